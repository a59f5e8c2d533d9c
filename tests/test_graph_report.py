# SPDX-License-Identifier: Apache-2.0
"""The report on a split: what is said and shown, how it is made during a job, and what happens when that fails."""

import enum
import json
import os
import random
import re
import subprocess
import sys
import time
import zlib
from collections import namedtuple

import pytest
from layout import TESTS, import_folder, load
from printed_graphs import VOCABULARY, assert_page_is_self_contained, big_text, small, without_rank

_consensus = load("_consensus")
_graph_diff = load("_graph_diff")
_graph_report = load("_graph_report")
_graph_text = load("_graph_text")
_vocabulary = load("_vocabulary")

ASK, GRAPH, LOG = _graph_report.ASK, _graph_report.GRAPH, _graph_report.LOG
Context, Variant, explain = _graph_report.Context, _graph_report.Variant, _graph_report.explain


def graph_of(text):
    return _graph_text.parse(text)[0]


def report_of(texts, context=None):
    """`texts` by rank; ranks with the same text have one variant, but for the line that says which rank it is."""
    ranks_of = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(without_rank(text), []).append(rank)
    return explain(
        [
            Variant(
                ranks,
                f"{number:032x}",
                graph_of(texts[ranks[0]]),
                "",
                [f"node{rank // 2}:{rank + 100}" for rank in ranks],
            )
            for number, ranks in enumerate(ranks_of.values())
        ],
        context,
    )


def page_of(report):
    return _graph_report.page([report])


def flat(report):
    return " ".join(report.text().split())


# --- What is said ---


def test_vocabulary_bounds_are_recognised_as_shard_offsets():
    report = report_of(VOCABULARY)
    text = " ".join(report.text().split())
    assert [difference.formula for difference in report.differences] == [
        "18992 · rank",
        "18992 · (rank + 1)",
        "18992 · rank",
    ]
    assert "rank 2: 37984" in text
    assert "/home/user/model/vocab_parallel_embedding.py:14 in forward: mask = (tokens >= self.start)" in text
    assert "register_buffer" in text and "tensor inputs" in text and "one graph" in text


BUFFER, TENSOR, EQUAL, PAD = (
    "register_buffer",
    "Pass it in as a tensor",
    "that no tensor can stand for",
    "Pad to one size",
)


@pytest.mark.parametrize(
    ("statement", "of_rank", "advice"),
    [
        ("y = torch.ops.aten.ge.Scalar(tokens, {})", lambda rank: 100 * rank, BUFFER),
        ("y = torch.ops.aten.sub.Tensor(tokens, {})", lambda rank: 100 * rank, BUFFER),
        ("y = tokens < {}", lambda rank: 100 * (rank + 1), BUFFER),
        ('y: "f32[16, 16]" = torch.ops.aten.sub.Tensor(x, {})', lambda rank: 100 * rank, TENSOR),
        ("y = torch.ops.aten.mul.Tensor(x, {})", lambda rank: 10 * rank + 7, TENSOR),
        ("y = torch.ops.aten.add.Tensor(tokens, {})", lambda rank: 10 * rank, TENSOR),
        ("y = torch.ops.aten.select.int(x, 0, {})", lambda rank: rank, TENSOR),
        ('y: "f32[4]" = torch.ops.aten.slice.Tensor(x, 0, {}, 9)', lambda rank: 4 * rank, TENSOR),
        ("y = torch.ops.aten.mul.Tensor(x, {})", lambda rank: [0.3, 0.1, 0.7, 0.2][rank], "or pass it in as a tensor"),
        ("y = torch.ops.aten.slice.Tensor(x, 0, 0, {})", lambda rank: rank + 3, PAD),
        ("y = torch.ops.aten.constant_pad_nd.default(x, [0, {}])", lambda rank: 13 - rank, PAD),
        ("y = torch.ops.aten.view.default(x, [{}, 4])", lambda rank: 2 * rank + 2, PAD),
        ("y = torch.ops._c10d_functional.all_reduce(x, '{}', '0')", lambda rank: "max" if rank else "sum", EQUAL),
        ("y = torch.ops.aten.native_layer_norm.default(x, [16], None, None, {})", lambda rank: 1 / (rank + 1), EQUAL),
        ("y = torch.ops.aten.dropout.default(x, 0.5, {})", lambda rank: rank > 1, EQUAL),
    ],
)  # fmt: skip
def test_what_to_do_about_a_constant_depends_on_what_it_is_for(statement, of_rank, advice):
    texts = [
        small(f"{statement.format(of_rank(rank))}\nz = y.sin()\nw = z.cos()\nreturn (w,)",
              inputs='x: "f32[16, 16]", tokens: "i64[16]"')
        for rank in range(4)
    ]  # fmt: skip
    text = " ".join(report_of(texts).text().split())
    given = [words for words in (BUFFER, TENSOR, EQUAL, PAD, "or pass it in as a tensor") if words in text]
    assert given == [advice], text


def test_the_largest_variant_is_the_reference_whichever_ranks_have_it():
    changed = VOCABULARY[0].replace("ge.Scalar", "gt.Scalar")
    report = report_of([changed, *[VOCABULARY[0]] * 6])
    assert report.variants[0].ranks == [1, 2, 3, 4, 5, 6]
    text = report.text()
    assert "A  ranks 1-6" in text and "B  rank 0" in text
    assert re.search(r"ranks 1-6: `ge.*aten\.ge\.Scalar", text) and re.search(r"rank 0: `ge.*aten\.gt\.Scalar", text)
    # Of equals, the one with the lowest rank.
    assert report_of([changed, VOCABULARY[0]]).variants[0].ranks == [0]


def test_the_context_is_in_the_report():
    context = Context(
        groups=(((0, 1, 2, 3), (12, 13)),),
        before=("[11, 12) on ranks 0-3: fat",),
        reason="fingerprints of ranks 0 and 1 differ",
        notes=("8 variants more were not sent (MAX_VARIANTS=64)",),
        versions={"torch": {"2.13.0": [0, 1, 3], "2.12.1": [2]}, "python": {"3.11.7": [0, 1, 2, 3]}},
        title="graph 7",
    )
    removed = re.sub(r".*_c10d_functional.*\n", "", VOCABULARY[3]).replace(
        "return (wait_tensor,)", "return (masked_fill,)"
    )
    report = report_of([*[VOCABULARY[0]] * 3, removed], context)
    for shown in (report.text(), page_of(report)):
        for words in (
            "ranks 0-3: collectives [12, 13)",
            "[11, 12) on ranks 0-3: fat",
            "fingerprints of ranks 0 and 1 differ",
            "MAX_VARIANTS=64",
            "torch: 2.13.0 on ranks 0-1, 3, 2.12.1 on rank 2",
            "graph 7",
            "position 12 on the line of ranks 0-3",
            "node1:103",
            "same ones everywhere",
        ):
            assert words in shown, words


def test_variants_that_follow_the_hosts_point_at_the_hosts():
    report = report_of([*[VOCABULARY[0]] * 2, *[VOCABULARY[0].replace("ge.Scalar", "gt.Scalar")] * 2])
    assert "The variants follow the hosts" in report.text()
    report = report_of([VOCABULARY[0], *[VOCABULARY[0].replace("ge.Scalar", "gt.Scalar")] * 3])
    assert "The variants follow the hosts" not in report.text()


def test_graphs_that_are_not_there_are_named_and_the_rest_is_compared():
    report = explain(
        [
            Variant([0, 1], "a", note="the text holds no graph"),
            Variant([2], "b", graph_of(VOCABULARY[2])),
            Variant([3], "unhashable-c", graph_of(VOCABULARY[3][:900])),
            Variant([4], "d"),
        ]
    )
    text = report.text()
    assert "B is the reference" in text
    assert "Note: not compared: the text holds no graph (ranks 0-1)" in text
    assert "Note: not compared: the graph is not known (rank 4)" in text
    assert "the text of the graph is cut off: what is missing at its end may be there in fact (rank 3)" in text
    assert "the graph could not be hashed, so it equals no other: see the warning on that rank (rank 3)" in text
    assert report.differences


def test_variants_whose_graphs_are_equal_are_named_beside_one_that_differs():
    texts = [VOCABULARY[0], VOCABULARY[0], VOCABULARY[0].replace("ge.Scalar", "gt.Scalar")]
    report = explain([Variant([rank], str(rank), graph_of(text)) for rank, text in enumerate(texts)])
    assert "The graphs of rank 1 and of the reference read the same" in flat(report)


def test_a_group_is_said_to_be_of_the_rank_whose_graph_it_is():
    texts = [
        small(f"y = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '{name}')\nreturn (y,)",
              f"# handshake: rank = {rank}\n# handshake: group {name} = {members}")
        for name, rank, members in (("4", 3, "ranks 2-3"), ("9", 2, "ranks 0-3"))
    ]  # fmt: skip
    text = explain([Variant([0, 1, 3], "a", graph_of(texts[0])), Variant([2], "b", graph_of(texts[1]))]).text()
    assert "ranks 0-1, 3: '4' = ranks 2-3 on rank 3\n" in text
    assert "rank 2: '9' = ranks 0-3 on rank 2\n" in text


# --- What the votes tell ---


def reason_of(*votes):
    """The reason that the machine gives for a split: of votes (rank, {ranks: (start, number)}), a second apart."""
    machine = _consensus._CollectiveHandshakeConsensus(3, timeout_s=60)
    decisions = []
    for now, (rank, spans) in enumerate(votes):
        counts = {
            _vocabulary.ProcessGroupId(ranks): _vocabulary.ProcessGroupCollectiveCount(start, number)
            for ranks, (start, number) in spans.items()
        }
        counts = _vocabulary.RankCollectiveCounts(counts)
        decisions += machine.put_request(_vocabulary.CollectiveHandshakeRequest(counts, "one program", rank), now)
    decisions += machine.expire(30)
    return next(decision.reason for decision in decisions if decision.outcome.name == "SPLIT")


WORLD, PAIR = (0, 1, 2), (0, 1)


@pytest.mark.parametrize(
    ("votes", "advice"),
    [
        ([(0, {WORLD: (0, 1)}), (1, {PAIR: (0, 1)})], "The ranks wait for one another in a cycle"),
        ([(0, {PAIR: (0, 1)}), (1, {PAIR: (1, 1)})], "The ranks count their collectives differently"),
        ([(0, {PAIR: (1, 1)}), (1, {PAIR: (0, 1)})], "The ranks count their collectives differently"),
    ],
)
def test_the_reason_of_a_split_comes_before_what_differs_in_the_graphs(votes, advice):
    report = report_of(VOCABULARY, Context(reason=reason_of(*votes)))
    (only,) = report.facts["advice"]
    assert only.startswith(advice)


def test_graphs_that_are_equal_and_begin_at_different_positions_are_counted_differently():
    reason = reason_of((0, {PAIR: (0, 2)}), (1, {PAIR: (1, 2)}))
    (advice,) = explain([Variant([0, 1], "a", graph_of(VOCABULARY[0]))], Context(reason=reason)).facts["advice"]
    assert "record_eager_collectives" in advice
    # Not where the graphs of the others have not come.
    assert explain([Variant([1], "a", graph_of(VOCABULARY[0]))], Context(reason=reason)).facts["advice"] == []


def test_spans_from_one_start_tell_a_graph_break_also_without_the_graphs():
    groups = [((0, 1, 2), (0, 2), [2]), ((0, 1, 2), (0, 4), [0, 1]), ((0, 1, 2), (2, 4), [2])]
    report = explain([Variant([0, 1], "a"), Variant([2], "b")], Context(groups, reason="fingerprints differ"))
    assert report.facts["advice"][0].startswith("The graph of rank 2 ends where the others' goes on: probably a graph")
    # Where each begins where the one before ends, there is none.
    groups = [((0, 1, 2), (0, 2), [0, 1]), ((0, 1, 2), (1, 4), [2])]
    assert explain([Variant([0, 1], "a"), Variant([2], "b")], Context(groups)).facts["advice"] == []


def test_at_most_two_things_are_said_first():
    texts = [small(f"y = x * {k}\nz = torch.f(y, 'a{k}')\nw = z.view({k}, 2)\nreturn (w,)") for k in (3, 5)]
    report = report_of(texts)
    first, others = report.text().split("What to do:\n")[1].split("If that is not it:\n")
    assert (first.count("  - "), others.count("  - ")) == (2, len(report.facts["advice"]) - 2)


# --- Size ---


def test_64_variants_of_a_large_graph_are_told_in_a_screen_or_two():
    texts = [big_text(20, rank, extra_layer=7 if rank == 50 else None) for rank in range(64)]
    report = report_of(texts)
    text = report.text()
    assert "= 18992 · rank" in text and "before node" in text and "rank 50: `n" in text
    assert len(text.splitlines()) < 60
    page = page_of(report)
    assert_page_is_self_contained(page)
    assert len(page) < 200_000
    # One comparison for all that differ in the constant alone, and one for rank 50.
    assert page.count("<table>") == 2
    assert "the same places differ on ranks 2-49, 51-63" in page


def test_a_large_graph_with_one_added_node_and_one_without_any_common_node():
    text = big_text(280)  # 5,042 nodes
    report = report_of([text, big_text(280, extra_layer=100)])
    assert [difference.kind for difference in report.differences] == ["added node"]
    nothing_in_common = report_of([text, text.replace("aten", "other").replace("4096", "77")])
    assert [difference.kind for difference in nothing_in_common.differences] == ["graph"]
    assert "nothing in common" in page_of(nothing_in_common)


def test_bounds_that_bite_are_named():
    text = big_text(280)
    other = re.sub(r'w(\d+): "bf16\[4096', lambda match: f'w{match[1]}: "bf16[{5000 + int(match[1])}', text)
    report = report_of([text, other])
    assert "MAX_DIFFERENCES_PER_VARIANT" in report.text()
    assert "more (" in page_of(report) and "MAX_ROWS" in page_of(report)
    assert len(report.text().splitlines()) < 70


# --- The page ---


def test_the_page_escapes_whatever_is_in_graphs_and_logs():
    evil = "</td><script>alert(1)</script><b onclick='x'>&"
    texts = [
        text.replace("self.start", evil).replace("'sum'", f"'{side}<script>'").replace("vocab_parallel", "<script>")
        for side, text in enumerate(VOCABULARY[:2])
    ]
    context = Context(before=[evil], reason=evil, notes=[evil], title=evil, versions={evil: {evil: [0], "2": [1]}})
    page = page_of(explain([Variant([k], evil, graph_of(text), evil, [evil]) for k, text in enumerate(texts)], context))
    assert_page_is_self_contained(page)
    assert "onclick='x'" not in page


def test_the_page_shows_what_changed_side_by_side():
    page = page_of(report_of(VOCABULARY))
    for style, number in (("old", 0), ("new", 18992)):
        assert re.search(rf'<td class="{style}">ge: [^<]*torch\.ops\.aten\.ge\.Scalar\(arg0_1, {number}\)</td>', page)
    assert "vocab_parallel_embedding.py:14 in forward" in page


@pytest.mark.parametrize("seed", range(8))
def test_damaged_graphs_never_fail(seed):
    random_ = random.Random(seed)
    texts = [
        *VOCABULARY,
        *((TESTS / "data" / name).read_text() for name in ("dynamo_checkpoint.txt", "aot_dynamic_cond.txt")),
    ]
    for _ in range(20):
        variants = []
        for rank in range(3):
            lines = random_.choice(texts).splitlines()
            for _ in range(random_.randint(0, 8)):
                at = random_.randrange(len(lines))
                cut = random_.randrange(len(lines[at]) + 1)
                damage = random_.choice(["(", '"', "'", "\0", "{", "# ", ":", "=", "<x at 0x7f>", "\\", "  ", "class "])
                lines[at] = lines[at][:cut] + damage + lines[at][cut + random_.randint(0, 4) :]
                lines.insert(random_.randrange(len(lines)), lines[at])
            variants.append(Variant([rank], str(rank), next(iter(_graph_text.parse("\n".join(lines))), None)))
        report = explain(variants)
        assert report.text() and json.dumps(report.facts)
        assert_page_is_self_contained(page_of(report))


# --- The process that makes a report ---


def record(constant, rank=0):
    """The record of a graph."""
    x, y = ({"name": name, "op": op, "target": "", "line": name} for name, op in (("x", "placeholder"), ("y", "call")))
    y |= {"target": "torch.ops.aten.mul.Tensor", "arguments": [["0", "x", 0], ["1", str(constant), None]]}
    output = {"name": "output", "op": "output", "target": "output", "line": "return", "arguments": [["0", "y", 1]]}
    body = {"name": "G", "nodes": [x, y, output], "bodies": {}}
    return json.dumps({"handshake_graph": 1, "fingerprint": "", "rank": rank, "groups": {}, "body": body})


def packed(text):
    return zlib.compress(text.encode("utf-8", "surrogatepass"))


def command():
    """The command line of the process, in the layout under test."""
    code = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(import_folder())!r}]; from layout import load; "
    return [sys.executable, "-c", code + "sys.exit(load('_graph_report').main(sys.argv[1:]))"]


def make_report(folder, payloads, **context):
    """Runs the process; what it says, and its exit status."""
    variants = [Variant([rank], f"{rank:032x}", None, "", [f"here:{rank}"])._asdict() for rank in range(len(payloads))]
    job = {"context": context, "variants": variants, "bytes": [*map(len, payloads)]}
    data = b"".join([json.dumps(job).encode(), b"\n", *payloads, b"what follows"])
    done = subprocess.run([*command(), str(folder / "report")], input=data, stdout=subprocess.PIPE, timeout=60)
    return done.stdout.decode(), done.returncode


def test_a_job_gives_a_text_a_page_and_its_facts(tmp_path):
    folder = tmp_path / "reports"
    payloads = [packed(record(10 * rank)) for rank in range(3)]
    said, status = make_report(folder, payloads, reason="why", groups=[[[0, 1, 2], [5, 6]]])
    assert status == 0
    assert {path.name for path in folder.iterdir()} == {"report.txt", "report.html", "report.json"}
    text, page, facts = ((folder / f"report.{suffix}").read_text() for suffix in ("txt", "html", "json"))
    assert said == text.rstrip("\n") and f"(side by side: {folder}/report.html)" in said
    for shown in (text, page):
        assert "= 10 · rank" in shown and "collectives [5, 6)" in shown and "here:2" in shown and "Reason: why" in shown
    facts = json.loads(facts)
    (difference,) = facts["differences"]
    assert difference["formula"] == "10 · rank"
    assert difference["sides"][1] == {"ranks": "rank 1", "value": "10"}
    assert facts["groups"] == [{"ranks": "ranks 0-2", "span": [5, 6]}]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "the graph is not known"),
        (b"no zlib", "the graph can't be unpacked"),
        (packed(record(1))[:-6], "the graph arrived cut off"),
        (packed("x" * (_graph_report.MAX_TEXT_BYTES + 1)), "the graph is larger than 64 MiB"),
        (packed('{"handshake_graph": 1}'), "not a valid graph record: 'body' is missing"),
        (packed("\0\ud800"), "the text holds no graph"),
        (packed(_graph_report.NO_GRAPH + "it was too large"), "not compared: it was too large"),
    ],
)
def test_a_graph_that_can_not_be_read_is_said_in_the_report(tmp_path, payload, words):
    said, status = make_report(tmp_path, [packed(record(1)), payload])
    assert status == 0 and f"{words}" in said and "(rank 1)" in said and "ranks 0-1 have 2 different graphs" in said


def test_a_graph_that_could_not_be_hashed_is_said_to_be_one(tmp_path):
    odd = record(1).replace('"fingerprint": ""', f'"fingerprint": "unhashable-{0:032x}"')
    said, _ = make_report(tmp_path, [packed(record(1)), packed(odd)])
    assert "the graph could not be hashed, so it equals no other: see the warning on that rank (rank 1)" in said


def test_printed_graphs_are_read_too(tmp_path):
    said, _ = make_report(tmp_path, [packed(text) for text in VOCABULARY])
    assert "= 18992 · (rank + 1)" in said and "not compared" not in said
    said, _ = make_report(tmp_path, [packed(VOCABULARY[0] + VOCABULARY[1]), packed(VOCABULARY[2])])
    assert "rank 1: 37984" in said, "of several, the first is compared"


def test_a_failure_of_the_comparison_still_names_the_ranks(tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(_graph_diff, "compare", fail)
    payloads = [packed(record(rank)) for rank in (0, 1)]
    job = {"context": {}, "variants": [{"ranks": [rank]} for rank in (0, 1)], "bytes": [*map(len, payloads)]}
    (tmp_path / "job").write_bytes(b"".join([json.dumps(job).encode(), b"\n", *payloads]))
    with open(tmp_path / "job", "rb") as source:
        said = _graph_report._make_report(source, str(tmp_path / "report"))
    assert "ranks 0-1" in said and "could not be compared: ZeroDivisionError: oops" in said


def test_a_page_that_can_not_be_written_is_said_in_the_text(tmp_path):
    (tmp_path / "report.html").mkdir()
    said, status = make_report(tmp_path, [packed(record(rank)) for rank in (0, 1)])
    assert status == 0 and "Note: the page could not be written" in said and "argument 1" in said
    assert (tmp_path / "report.txt").read_text().rstrip() == said


# --- A rank's part ---


class Channel:
    def __init__(self, error=None):
        self.sent, self.error = [], error

    def send(self, step, payload):
        if self.error:
            raise self.error
        self.sent.append((step, zlib.decompress(payload).decode()))


def test_a_rank_sends_its_graph(caplog):
    channel = Channel()
    _graph_report.send_graph(channel, "text")
    _graph_report.send_graph(channel, lambda: "made")
    assert channel.sent == [(GRAPH, "text"), (GRAPH, "made")] and not caplog.records
    _graph_report.send_graph(Channel(_vocabulary.HandshakePeerLostError("gone")), "text")  # nobody waits for it


@pytest.mark.parametrize("source", [lambda: 1 / 0, lambda: None])
def test_a_graph_that_can_not_be_made(source, caplog):
    channel = Channel()
    _graph_report.send_graph(channel, source)
    assert "the graph of a split could not be printed" in caplog.text
    ((_, text),) = channel.sent
    assert text.startswith(_graph_report.NO_GRAPH) and "Error" in text


def test_a_graph_that_is_too_large_to_be_sent(monkeypatch):
    monkeypatch.setattr(_graph_report, "MAX_GRAPH_BYTES", 1000)
    channel = Channel()
    _graph_report.send_graph(channel, random.Random(1).randbytes(2000).hex())
    ((_, text),) = channel.sent
    assert text.startswith(_graph_report.NO_GRAPH) and "MAX_GRAPH_BYTES" in text


# --- During a job ---


Outcome = enum.Enum("Outcome", "FAT SPLIT TIMEOUT PEER_LOST")
Settled = namedtuple("Settled", "rank number flags digest spans outcome reason has_graph")


class Line:
    def __init__(self, *ranks):
        self.ranks = ranks
        self.name = _vocabulary.format_ranks(ranks)


class Job:
    """Reports of a job, of which a test plays the coordinator."""

    def __init__(self, folder, **options):
        facts = {rank: {"host": "here", "pid": 100 + rank, "python": "3.11.7"} for rank in range(8)}
        options = {"coordinator_rank": 0, "command": command(), **options}
        self.reports = _graph_report.Reports(str(folder), lambda rank: facts.get(rank, {}), **options)
        self.now, self.numbers = 0.0, 0

    def settle(self, line, start, digests, outcome=Outcome.SPLIT, reason="fingerprints differ", has_graph=True):
        """Answers votes on `line`, of these digests by rank; the ranks that are asked for their graphs."""
        self.numbers += 1
        spans = [(line, start, start + 1)]
        votes = [
            Settled(rank, self.numbers, 0, digest, spans, outcome, reason, has_graph)
            for rank, digest in digests.items()
        ]
        frames = self.reports.settled(votes, self.now)
        assert all(frame[1:] == (self.numbers, ASK, b"") for frame in frames if frame[2] == ASK)
        return [frame[0] for frame in frames if frame[2] == ASK]

    def send(self, rank, text, number=None):
        payload = text if isinstance(text, bytes) else packed(text)
        return self.reports.take(rank, number or self.numbers, GRAPH, payload, self.now)

    def logged(self):
        """What ranks are to log, by rank, once all comparisons have ended."""
        texts = {}
        until = time.monotonic() + 60
        while (deadline := self.reports.next_deadline()) is not None and deadline < self.now + 1:
            assert time.monotonic() < until, "the report"
            if self.reports._running is not None:
                self.reports._running.process.wait(60)
            for rank, number, step, payload in self.reports.tick(self.now):
                assert (number, step) == (0, LOG)
                texts.setdefault(rank, []).append(payload.decode())
        return texts


A, B, C = (bytes([k]) * 16 for k in range(3))


@pytest.fixture
def job(tmp_path):
    jobs = []

    def make(folder=tmp_path / "reports", **options):
        jobs.append(Job(folder, **options))
        return jobs[-1]

    yield make
    for each in jobs:
        running = each.reports._running
        each.reports.close()
        assert running is None or running.process.returncode is not None, "a process is left"


def test_a_report_of_a_split(job, tmp_path):
    made, line = job(), Line(0, 1, 2)
    assert made.settle(line, 0, dict.fromkeys((0, 1, 2), A), Outcome.FAT) == []
    assert made.reports.next_deadline() is None
    assert made.settle(line, 1, {0: A, 1: B, 2: B}) == [0, 1], "one for each fingerprint"
    assert made.send(0, record(2)) == [] and not (tmp_path / "reports").exists()
    assert made.send(1, record(3)) == []
    logged = made.logged()
    (path,) = (tmp_path / "reports").glob("handshake-split-*-0001.html")
    assert path.name == f"handshake-split-{os.getpid()}-0001.html"
    (text,) = logged.pop(0)
    assert text.startswith("why the ranks' graphs were split:\nranks 0-2 have 2 different graphs\n")
    for words in ("here:100", "Reason: fingerprints differ", "[0, 1) on ranks 0-2: fat", "argument 1", str(path)):
        assert words in text, words
    pointer = f"is in the log of rank 0, and in {path} on its host"
    assert logged == {rank: [f"why rank {rank} was split {pointer}"] for rank in (1, 2)}
    assert {each.suffix for each in path.parent.iterdir()} == {".txt", ".html", ".json"}, "nothing else is left"


def test_a_set_of_fingerprints_is_explained_once_and_a_graph_sent_once(job):
    made, line = job(), Line(0, 1)
    for start, (digests, asked) in enumerate([((A, B), [0, 1]), ((B, A), []), ((A, C), [1])]):
        assert made.settle(line, start, dict(enumerate(digests))) == asked
        for rank in asked:
            made.send(rank, record(rank))
        assert bool(made.logged()) == bool(asked)


def test_a_second_vote_of_a_rank_does_not_take_the_place_of_its_first(job):
    """As after a graph break: rank 1 has one graph where rank 0 has two."""
    made, line = job(), Line(0, 1)
    assert made.settle(line, 0, {0: A}) == [0]
    assert made.settle(line, 0, {0: C}) == []
    assert made.settle(line, 0, {1: B}) == [1]
    made.send(0, record(1), number=1)
    made.send(1, record(2))
    text = made.logged()[0][0]
    assert "rank 0  3 nodes, 0 collectives; fingerprint 0000" in text and "rank 1: 2" in text


def test_a_new_graph_is_told_from_one_that_all_have_run(job):
    made, line = job(), Line(0, 1, 2)
    made.settle(line, 0, dict.fromkeys(line.ranks, A), Outcome.FAT)
    made.settle(line, 1, {0: A, 1: B, 2: A})
    made.send(0, record(1))
    made.send(1, record(2))
    advice = made.logged()[0][0].split("What to do:\n")[1]
    assert advice.startswith("  - A new graph on rank 1; all ranks have run the others' fat. A Python value ")


def test_a_backward_graph_points_at_the_report_on_the_forward(job, tmp_path):
    made, line = job(), Line(0, 1)
    made.settle(line, 0, {0: A, 1: B})
    made.send(0, record(1))
    made.send(1, record(2))
    assert "backward graphs" not in made.logged()[0][0]
    made.settle(line, 1, {0: C, 1: bytes(16)[:-1] + b"9"})
    for rank in line.ranks:
        made.send(rank, record(rank + 3).replace('"x"', '"tangents_1"'))
    advice = " ".join(made.logged()[0][0].split("What to do:\n")[1].split())
    (first,) = (tmp_path / "reports").glob("*-0001.txt")
    assert advice.startswith("- These are backward graphs, and follow the forward ones: mend what differs there first")
    assert f"(see {first})" in advice


def test_ranks_that_come_late_join_the_split(job):
    made, line = job(), Line(0, 1, 2)
    assert made.settle(line, 4, {0: A, 1: B}) == [0, 1]
    made.send(0, record(1))
    made.send(1, record(2))
    assert made.logged() == {}, "rank 2 may still come"
    assert made.settle(line, 4, {2: C}, reason="another reason") == [2]
    made.send(2, record(3))
    logged = made.logged()
    assert "ranks 0-2 have 3 different graphs" in logged[0][0] and sorted(logged) == [0, 1, 2]
    # Who comes after the report has no report of its own.
    made.settle(line, 5, {0: A, 1: C})
    made.now += _graph_report.REPORT_WAIT_S
    assert "rank 2 had not voted when this was written" in made.logged()[0][0]
    assert made.settle(line, 5, {2: B}) == [] and made.logged() == {}
    assert made.reports.next_deadline() is None


def test_a_report_is_made_without_what_does_not_come(job):
    made, line = job(), Line(0, 1, 2, 3)
    assert made.settle(line, 0, {0: A, 1: B, 2: C}) == [0, 1, 2]
    made.settle(line, 0, {3: bytes(15) + b"4"}, has_graph=False)
    made.send(0, record(1), number=1)
    made.send(1, record(2), number=77)  # nobody asked for that one
    made.now = _graph_report.REPORT_WAIT_S
    assert made.reports.next_deadline() == made.now
    text = made.logged()[0][0]
    assert "not compared: the graph was asked for and has not come (ranks 1-2)" in text
    assert "not compared: no graph was given; pass graph_module_str to the vote (rank 3)" in text


def test_a_graph_that_does_not_come_is_asked_of_others_and_the_split_explained_again(job):
    made, line = job(), Line(0, 1, 2)
    assert made.settle(line, 0, {0: A, 1: B, 2: B}) == [0, 1]
    made.send(0, record(1))
    made.now = _graph_report.REPORT_WAIT_S
    assert "has not come" in made.logged()[0][0]
    assert made.settle(line, 1, {0: A, 1: B, 2: B}) == [], "rank 1's may still come"
    made.now = _graph_report.GRAPH_WITHIN_S
    assert made.logged() == {}, "nothing has been added"
    assert made.settle(line, 2, {0: A, 2: B, 1: B}) == [2]
    made.send(2, record(2))
    assert "argument 1" in made.logged()[0][0]


def test_no_report_waits_for_the_graph_of_a_lost_rank(job):
    made = job()
    assert made.settle(Line(0, 1), 0, {0: A, 1: B}) == [0, 1]
    made.send(0, record(1))
    made.reports.drop_rank(1, 0.0)
    assert "the graph was asked for and has not come (rank 1)" in made.logged()[0][0]


def test_what_is_not_a_split_has_no_report(job):
    made, line = job(), Line(0, 1)
    for start, outcome in enumerate((Outcome.FAT, Outcome.TIMEOUT, Outcome.PEER_LOST)):
        assert made.settle(line, start, {0: A, 1: B}, outcome) == []
    assert made.reports.next_deadline() is None


def test_of_thousands_of_variants_a_few_graphs_are_asked_for(job):
    made, world = job(), Line(*range(4096))
    asked = made.settle(world, 0, {rank: rank.to_bytes(16, "big") for rank in world.ranks})
    assert asked == list(range(_graph_report.MAX_VARIANTS))
    for rank in asked:
        made.send(rank, record(rank))
    text = made.logged()[0][0]
    assert "left out: a report compares at most 64 graphs (ranks 64-4095)" in text and "= rank\n" in text


def test_what_is_kept_is_bounded(job, monkeypatch):
    monkeypatch.setattr(_graph_report, "MAX_GRAPHS", 10)
    monkeypatch.setattr(_graph_report, "MAX_SPLITS", 5)
    monkeypatch.setattr(_graph_report, "MAX_LINES", 7)
    made = job()
    asked = [made.settle(Line(0, 1), 0, {0: step.to_bytes(16, "big")}) for step in range(20)]
    assert asked == [[0]] * 10 + [[]] * 10
    assert len(made.reports._splits) == 5 and len(made.reports._recent) == 7
    made.now = _graph_report.GRAPH_WITHIN_S  # those that never came make room
    assert made.settle(Line(0, 1), 0, {0: C}) == [0]


def test_the_last_report_says_so_and_the_ones_that_wait_are_bounded(job, monkeypatch):
    monkeypatch.setattr(_graph_report, "MAX_REPORTS", 6)
    monkeypatch.setattr(_graph_report, "MAX_WAITING", 2)
    made, line = job(), Line(0, 1)
    failures = []
    for start in range(8):
        made.numbers += 1
        votes = [
            Settled(
                rank, made.numbers, 0, bytes([start, rank]) * 8, [(line, start, start + 1)], Outcome.SPLIT, "", False
            )
            for rank in (0, 1)
        ]
        failures += [frame[3].decode() for frame in made.reports.settled(votes, 0.0)]
    assert failures == [f"splits can't be explained in {made.reports._folder}: 2 wait for their turn"], "said once"
    texts = made.logged()[0]
    assert len(texts) == 3 and not any("the last" in text for text in texts)
    monkeypatch.setattr(_graph_report, "MAX_REPORTS", 7)
    made.settle(line, 9, {0: A, 1: C}, has_graph=False)
    assert "this is report 7 of the job, and the last" in made.logged()[0][0]
    assert made.settle(line, 10, {0: B, 1: C}) == [] and made.reports.next_deadline() is None


# --- What may go wrong ---


def _file(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file", "File exists"


def _below_a_file(tmp_path):
    return _file(tmp_path)[0] / "reports", "Not a directory"


def _no_file_can_be_made(tmp_path):
    # As a full disk: what is there already is a folder where the file should go.
    (tmp_path / f"handshake-split-{os.getpid()}-0001.txt").mkdir()
    return tmp_path, "Is a directory"


@pytest.mark.parametrize("fault", [_file, _below_a_file, _no_file_can_be_made])
def test_a_folder_that_can_not_be_used(job, tmp_path, fault):
    folder, words = fault(tmp_path)
    made, line = job(folder), Line(0, 1)
    made.settle(line, 0, {0: A, 1: B}, has_graph=False)
    assert made.logged() == {0: [f"splits can't be explained in {folder}: {words}"]}
    if words != "Is a directory":
        made.settle(line, 1, {0: A, 1: C}, has_graph=False)
        assert made.logged() == {}, "each cause is said once"


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (["/does/not/exist"], "No such file or directory"),
        (["/bin/sh", "-c", "kill -9 $$"], "its process ended with status -9"),
        (["/bin/sh", "-c", "exit 3"], "its process ended with status 3"),
    ],
)
def test_a_process_that_does_not_do_it(job, process, words):
    made = job(command=process)
    made.settle(Line(0, 1), 0, {0: A, 1: B})
    frames = [*made.send(0, os.urandom(10**6)), *made.send(1, record(1))]  # more than a pipe holds
    texts = [frame[3].decode() for frame in frames] + made.logged().get(0, [])
    assert texts == [f"splits can't be explained in {made.reports._folder}: {words}"]


def test_a_comparison_that_takes_too_long_is_ended(job):
    made = job(command=["/bin/sh", "-c", "exec sleep 600"])
    made.settle(Line(0, 1), 0, {0: A, 1: B}, has_graph=False)
    process = made.reports._running.process
    assert made.reports.next_deadline() == _graph_report.LOOK_EVERY_S
    assert made.reports.tick(_graph_report.COMPARE_WITHIN_S - 1) == []
    (frame,) = made.reports.tick(_graph_report.COMPARE_WITHIN_S)
    assert "a comparison took more than 120 s" in frame[3].decode() and process.returncode == -9


def test_closing_waits_for_a_short_report(job, monkeypatch):
    monkeypatch.setattr(_graph_report, "CLOSE_WITHIN_S", 60)
    made = job()
    made.settle(Line(0, 1, 2), 0, {0: A, 1: B})
    made.send(0, record(1))
    made.send(1, record(2))
    frames = {frame[0]: frame[3].decode() for frame in made.reports.close()}
    assert "argument 1" in frames[0] and "rank 2 had not voted" in frames[0] and "handshake-split" in frames[1]
    assert made.reports.close() == []


def test_closing_ends_a_comparison_that_runs(job, monkeypatch):
    monkeypatch.setattr(_graph_report, "CLOSE_WITHIN_S", 0.01)
    made = job(command=["/bin/sh", "-c", "exec sleep 600"])
    made.settle(Line(0, 1), 0, {0: A, 1: B}, has_graph=False)
    process = made.reports._running.process
    assert made.reports.close() == [] and process.returncode == -9
