# SPDX-License-Identifier: Apache-2.0
"""The command `explain`: files of several ranks, which of their graphs belong together, and what is said."""

import contextlib
import io
import itertools
import json
import os
import pty
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from layout import PACKAGE, TESTS, child_environment, load, module_file
from printed_graphs import VOCABULARY, assert_page_is_self_contained, big_text, small, without_rank

_graph_explain, _graph_text = load("_graph_explain"), load("_graph_text")


def explain_files(tmp_path, files, html=None, times=1, json_path=None):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = _graph_explain.explain_files([str(tmp_path / name) for name in files] * times, html, json_path)
    return status, out.getvalue()


def log_of(*texts):
    lines = ["starting"]
    for number, text in enumerate(texts):
        begin, end = (f"--- [{word} GRAPH MODULE: {number:032x}] ---" for word in ("BEGIN", "END"))
        lines += ["Handshake failed for graph module:", begin, *text.splitlines(), end, f"step {number}"]
    return "\n".join(f"W1130 03:22:11.{number} 7 file.py:12] {line}" for number, line in enumerate(lines))


def test_files_of_ranks_are_compared(tmp_path):
    status, out = explain_files(tmp_path, {f"rank{rank}.txt": VOCABULARY[rank] for rank in range(4)})
    assert status == 1
    assert "18992 · (rank + 1)" in out and "4 different graphs" in out


def record_of(text):
    (graph,) = _graph_text.parse(text)
    groups = {"0": {"ranks": [[0, 4, 1]], "description": "default_pg"}}
    body = {"name": graph.body.name, "nodes": [node._asdict() for node in graph.body.nodes], "bodies": {}}
    return json.dumps({"handshake_graph": 1, "rank": graph.rank, "groups": groups, "body": body})


def test_records_are_compared_with_one_another_and_with_texts(tmp_path):
    records = [record_of(text) for text in VOCABULARY]
    status, out = explain_files(tmp_path, {f"graph-{number}.json": record for number, record in enumerate(records)})
    assert status == 1
    assert "18992 · (rank + 1)" in out and "4 different graphs" in out
    # A log with one record a line, and one that holds the printed graphs.
    mixed = {"rank1.log": "\n".join([records[1], records[2]]), "2.log": log_of(VOCABULARY[1], VOCABULARY[2])}
    mixed["2.log"] = mixed["2.log"].replace("rank = 1", "rank = 5").replace("rank = 2", "rank = 5")
    status, out = explain_files(tmp_path, mixed)
    assert (status, out.splitlines()[-1]) == (0, "ranks 1, 5 have the same 2 graphs")


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank12.txt", "rank8.txt"], "ranks 8, 12"),
        (["job7_rank_0.log", "job7_rank_1.log"], "ranks 0-1"),
        (["a.txt", "b.txt"], "ranks 0-1"),
    ],
)
def test_the_rank_comes_from_the_files_name_or_its_place(tmp_path, names, ranks):
    _, out = explain_files(tmp_path, dict(zip(names, map(without_rank, VOCABULARY), strict=False)))
    assert out.startswith(f"{ranks} have 2 different graphs")


def test_a_rank_with_a_graph_more_than_the_others(tmp_path):
    other = (TESTS / "data" / "aot_dynamic_cond.txt").read_text()
    more = (TESTS / "data" / "dynamo_checkpoint.txt").read_text()
    html = tmp_path / "report.html"
    files = {
        "rank0.log": log_of(without_rank(VOCABULARY[0]), other),
        "rank1.log": log_of(without_rank(VOCABULARY[1]), other),
        "rank2.log": log_of(more, without_rank(VOCABULARY[2]), other),
    }
    status, out = explain_files(tmp_path, files, str(html))
    assert status == 1
    assert "ranks 0-2: 2 of 2 graphs differ" in out or "ranks 0-2: 1 of 2 graphs differ" in out
    assert "Only rank 2 has this graph, ranks 0-1 do not: graph 0 of rank 2" in out
    assert "18992 · rank" in out and "compile cache" in out
    assert_page_is_self_contained(html.read_text())
    assert "Only rank 2 has this graph" in html.read_text()


def test_the_sequence_that_most_ranks_have_is_the_one_to_compare_with(tmp_path):
    more = (TESTS / "data" / "dynamo_checkpoint.txt").read_text()
    files = {f"rank{rank}.log": log_of(without_rank(VOCABULARY[0])) for rank in (1, 2)}
    status, out = explain_files(tmp_path, {"rank0.log": log_of(without_rank(VOCABULARY[0]), more)} | files)
    assert status == 1
    assert out.startswith("ranks 0-2: 0 of 1 graph differ\nOnly rank 0 has this graph, ranks 1-2 do not: graph 1 of ")


def test_a_rank_that_has_many_more_graphs_first(tmp_path):
    def text(number, rank):
        return small(f"z = x.sin()\ny = z.op_{number}()\nw = y * {number + rank}.5\nreturn (w,)")

    first = [small(f"y = x.a_{number}().b_{number}()\nreturn (y,)") for number in range(80)]
    files = {"rank0.log": log_of(*(text(number, 0) for number in range(3)))}
    files["rank1.log"] = log_of(*first, *(text(number, 1) for number in range(3)))
    status, out = explain_files(tmp_path, files)
    assert status == 1
    assert out.startswith("ranks 0-1: 3 of 3 graphs differ\n")
    assert "and 72 more graphs that only some ranks have" in out


def test_many_graphs_that_all_differ_are_matched_in_order(tmp_path):
    """More than are tried against one another at a time; one rank has one more in the middle."""

    def text(number, rank):
        return small(f"z = x.sin()\nw = z.op_{number % 7}()\ny = w * {number}.5\nv = y - {18992 * rank}\nreturn (v,)")

    numbers = range(150)
    files = {f"rank{rank}.log": log_of(*(text(number, rank) for number in numbers)) for rank in (0, 1)}
    more = [*(text(number, 2) for number in numbers[:70]), small("y = x.a().b().c()\nreturn (y,)")]
    more += [text(number, 2) for number in numbers[70:]]
    status, out = explain_files(tmp_path, files | {"rank2.log": log_of(*more)})
    assert status == 1
    assert "ranks 0-2: 150 of 150 graphs differ" in out
    assert out.count("Only rank 2 has this graph, ranks 0-1 do not: graph 70 of rank 2") == 1
    assert "= 18992 · rank" in out


def test_a_graph_break_in_one_rank_s_file(tmp_path):
    """One rank has two graphs where the other has one that is both."""
    whole = big_text(6)
    lines = whole.splitlines()
    cut = next(number for number, line in enumerate(lines) if "w8)" in line) - 1
    name = lines[cut - 1].split(":")[0].strip()
    first = [*lines[:cut], f"        return ({name},)"]
    second = [lines[0], lines[1].replace("(self, x", f"(self, {name}"), *lines[cut:]]
    status, out = explain_files(tmp_path, {"rank0.txt": whole, "rank1.txt": "\n".join([*first, *second])})
    assert status == 1
    assert "Only rank 1 has this graph" in out and "TORCH_LOGS=graph_breaks" in out
    assert "What differs" in out and "collectives among them" in out


def test_a_graph_that_is_the_short_beginning_of_another_is_compared_with_it(tmp_path):
    whole = big_text(8)
    lines = whole.splitlines()
    cut = next(number for number, line in enumerate(lines) if "w5)" in line) - 1
    inputs = lines[1].partition(", w5")[0] + "):"
    first = [lines[0], inputs, *lines[2:cut], f"        return ({lines[cut - 1].split(':')[0].strip()},)"]
    status, out = explain_files(tmp_path, {"rank0.txt": whole, "rank1.txt": "\n".join(first)})
    assert status == 1
    assert "graph break" in out and "What differs, in 1 place" in out


def test_equal_files_are_said_to_be_equal(tmp_path):
    status, out = explain_files(
        tmp_path, {"rank0.txt": VOCABULARY[0], "b1.txt": VOCABULARY[0].replace("rank = 0", "rank = 1")}
    )
    assert (status, out) == (0, "ranks 0-1 have the same 1 graph\n")


def test_values_that_are_not_in_the_texts_are_not_said_to_be_the_same(tmp_path):
    text = small("c = self._tensor_constant0\ny = x + c\nreturn (y,)")
    page = tmp_path / "page.html"
    status, out = explain_files(tmp_path, {"rank0.txt": text, "rank1.txt": text}, str(page))
    assert status == 0
    assert out.endswith("ranks 0-1 have the same 1 graph, as far as these texts tell\n")
    assert "do not hold the value of _tensor_constant0" in out and "graph_text" in out and "fingerprints" in out
    assert "value of _tensor_constant0" in page.read_text()
    # Not where the values, or the fingerprints, are there.
    known = small("c = self._tensor_constant0\ny = x + c\nreturn (y,)", "# handshake: constant _tensor_constant0 = [1]")
    parameter = small("c = self.weight\ny = x + c\nreturn (y,)", "# handshake: group 0 = ranks 0-1; size 2")
    for same in (known, parameter, log_of(text), without_rank(VOCABULARY[0])):
        assert explain_files(tmp_path, {"a.txt": same, "b.txt": same}) == (0, "ranks 0-1 have the same 1 graph\n")


def test_only_a_fingerprint_is_one(tmp_path):
    """Other labels between the marks, and a fingerprint that only one side has, say nothing."""
    log = log_of(without_rank(VOCABULARY[0]))
    fingerprint = f"{0:032x}"
    for label, other in (("fw", "fw of rank 1"), ("step-1", "step-2"), (fingerprint, "fw")):
        files = {"rank0.log": log.replace(fingerprint, label), "rank1.log": log.replace(fingerprint, other)}
        assert explain_files(tmp_path, files) == (0, "ranks 0-1 have the same 1 graph\n")
    files = {"rank0.log": log, "rank1.txt": without_rank(VOCABULARY[0])}
    assert explain_files(tmp_path, files)[0] == 0
    for other in (f"{1:032x}", f"unhashable-{1:032x}"):
        files = {"rank0.log": log, "rank1.log": log.replace(fingerprint, other)}
        assert explain_files(tmp_path, files)[0] == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"rank0.txt": VOCABULARY[0]}, "at least two files"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": ""}, "rank1.txt is empty"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": '{"handshake_graph": 2}'}, "rank1.txt: not a valid graph record"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": "Traceback (most recent call last):"}, "rank1.txt holds no graph"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": bytes(range(256)) * 9}, "rank1.txt is not a text file"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": random.Random(1).randbytes(999).replace(b"\0", b"")}, "no graph"),
        (
            {"rank0.txt": VOCABULARY[0], "rank1.txt": (TESTS / "data" / "aot_dynamic_cond.txt").read_text()},
            "have no graph in common",
        ),
    ],
)
def test_files_that_cannot_be_compared(tmp_path, files, message, capsys):
    status, out = explain_files(tmp_path, files)
    assert (status, out) == (2, "")
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read(tmp_path, capsys):
    good = tmp_path / "rank0.txt"
    good.write_text(VOCABULARY[0])
    for path, why in ((tmp_path / "missing.txt", "No such file"), (tmp_path, "Is a directory")):
        assert _graph_explain.main(["explain", str(good), str(path)]) == 2
        assert f"{path} can't be read: {why}" in capsys.readouterr().err
    assert _graph_explain.main(["explain", str(good), "/dev/zero"]) == 2
    assert "/dev/zero is not a text file" in capsys.readouterr().err


@pytest.fixture
def two_files(tmp_path):
    paths = [tmp_path / "rank0.txt", tmp_path / "rank1.txt"]
    for path, text in zip(paths, VOCABULARY, strict=False):
        path.write_text(text)
    return [str(path) for path in paths]


@pytest.mark.parametrize("name", ["missing/x.html", ".", "x" * 300])
def test_a_page_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path, two_files, name, capsys):
    before = sorted(tmp_path.iterdir())
    page = f"{tmp_path}/{name}"
    assert _graph_explain.main(["explain", *two_files, "--html", page]) == 2
    captured = capsys.readouterr()
    assert f"could not be written to {page}: " in captured.err and ".part" not in captured.err
    assert "18992 · rank" in captured.out, "the text is there all the same"
    assert sorted(tmp_path.iterdir()) == before


def test_a_device_is_written_as_it_is_and_stays_one(two_files, capsys):
    assert _graph_explain.main(["explain", *two_files, "--html", "/dev/full"]) == 2
    assert "could not be written to /dev/full: No space left" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("alias", ["itself", "symlink", "hard link", "dots"])
def test_the_page_never_takes_the_place_of_an_input(tmp_path, two_files, alias, capsys):
    page = tmp_path / "page.html"
    if alias == "symlink":
        page.symlink_to(two_files[1])
    elif alias == "hard link":
        page.hardlink_to(two_files[1])
    else:
        page = two_files[1] if alias == "itself" else f"{tmp_path}/../{tmp_path.name}/rank1.txt"
    assert _graph_explain.main(["explain", *two_files, "--html", str(page)]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert Path(two_files[1]).read_text() == VOCABULARY[1]


def test_a_page_of_before_is_replaced_also_through_a_link(tmp_path, two_files):
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    assert _graph_explain.main(["explain", *two_files, "--html", str(tmp_path / "link.html")]) == 1
    assert (tmp_path / "link.html").is_symlink()
    assert_page_is_self_contained((tmp_path / "real.html").read_text())


def test_two_files_of_one_rank_are_told_apart_by_their_place(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    page = tmp_path / "page.html"
    status, out = explain_files(tmp_path, {"a/rank3.txt": VOCABULARY[0], "b/rank3.txt": VOCABULARY[0]}, str(page))
    assert status == 0
    for shown in (out, page.read_text()):
        assert f"2 files are of rank 0, so all are numbered in the order given: rank 0 is {tmp_path}/a/rank3" in shown
        assert f"rank 1 is {tmp_path}/b/rank3.txt" in shown
    assert "ranks 0-1 have the same 1 graph" in out
    # Also the very same file.
    assert "ranks 0-1 have the same 1 graph" in explain_files(tmp_path, {"x.txt": VOCABULARY[0]}, times=2)[1]


def test_a_date_in_a_name_is_no_rank(tmp_path):
    files = {f"dump-2024113000000{rank}.txt": without_rank(VOCABULARY[rank]) for rank in (0, 1)}
    assert explain_files(tmp_path, files)[1].startswith("ranks 0-1 have 2")


def run(*arguments, stdout=subprocess.PIPE):
    """The command that a user types, in the layout under test, in a terminal that has ASCII only."""
    module = ["-m", f"{PACKAGE}.handshake"] if PACKAGE else [str(module_file("handshake"))]
    return subprocess.run(
        [sys.executable, *module, *arguments], env=child_environment(PYTHONIOENCODING="ascii"),
        stdout=stdout, stderr=subprocess.PIPE, timeout=60,
    )  # fmt: skip


def test_the_command_line(two_files):
    differ = run("explain", *two_files)
    assert (differ.returncode, differ.stderr) == (1, b"") and rb"= 18992 \xb7 rank" in differ.stdout
    # `| head` has gone before anything is written.
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        gone = run("explain", *two_files, stdout=closed)
    assert (gone.returncode, gone.stderr) == (1, b"")
    with open("/dev/full", "wb") as full:
        no_room = run("explain", *two_files, stdout=full)
    assert no_room.returncode == 2
    assert no_room.stderr.splitlines() == [b"error: the report could not be written: No space left on device"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["-h"], 0), (["explain", "-h"], 0), ([], 2), (["explain"], 2), (["rank0.txt", "rank1.txt"], 2)],
)
def test_the_usage_is_what_has_to_be_typed(arguments, status):
    ran = run(*arguments)
    said, silent = (ran.stderr, ran.stdout) if status else (ran.stdout, ran.stderr)
    program = f"python -m {PACKAGE}.handshake" if PACKAGE else "python handshake.py"
    usage = rf"usage: {program} explain FILE FILE \u2026 [--html FILE] [--json FILE]"
    assert (ran.returncode, said.decode().splitlines()[0], silent) == (status, usage, b"")


def test_the_page_may_be_named_before_the_files(two_files, tmp_path):
    assert _graph_explain.main(["explain", "--html", str(tmp_path / "page.html"), *two_files]) == 1
    assert_page_is_self_contained((tmp_path / "page.html").read_text())


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("[" * 300 + "1" + "]" * 300, ("1", "2")),
        ("[" * 90_000 + "1" + "]" * 90_000, ("1", "2")),
        ("[1], 2", ("[1], 2", "1, [2]")),
        ("'" + "z" * 3_000_000 + "0'", ("0'", "1'")),
        ("[" + "1, " * 100_000 + "7]", ("7", "8")),
        ("- " * 3000 + "1", ("1", "2")),
        ("f(" * 3000 + "1" + ")" * 3000, ("1", "2")),
        ("1" + "0" * 5000 + "1", ("01", "02")),
        ("1e400", ("1e400", "2e400")),
        ("(x, x)", ("(x, x)", "[x, x]")),
        ("((x,), x)", ("((x,), x)", "(x, (x,))")),
        ("{}", ("{}, ", "")),
        ("{'0': 1}", ("'0'", "0")),
        ("<obj at 0x123456>[0]", ("[0]", "[1]")),
        ("<obj>, 'a;  b'", ("b'", "c'")),
        ("k=1, j=2", ("k=1, j=2", "j=2, k=1")),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_whatever_differs_is_shown_to(tmp_path, argument, changed):
    """However long or deep a statement is: nothing is cut before it is compared, and what is shown is not the same."""
    texts = []
    for side in changed:
        head, _, tail = argument.rpartition(changed[0])
        y = f'y: "f32[2]" = torch.f(x, 5, {head}{side}{tail});  x = None'
        texts.append(
            f'class G(torch.nn.Module):\n    def forward(self, x: "f32[2]"):\n        {y}\n        return (y,)\n'
        )
    page = tmp_path / "page.html"
    status, out = explain_files(tmp_path, dict(zip(("a.txt", "b.txt"), texts, strict=True)), str(page))
    assert status == 1
    sides = re.findall(r"\n +rank 0: (.+)\n +rank 1: (.+)", out)
    assert sides and all(left != right for left, right in sides), out
    assert max(map(len, out.splitlines())) < 320
    assert_page_is_self_contained(page.read_text())


# --- One file for all ranks, and logs as they are ---


def all_ranks(texts, tag="[rank{}]:", prefix="V1130 04:01:00.{} 8 a.py:9] ", noise=()):
    """One log, in which the lines of the ranks alternate; and lines of others among them."""
    lines = []
    for number, of_ranks in enumerate(itertools.zip_longest(*[text.splitlines() for text in texts])):
        for rank, line in enumerate(of_ranks):
            if line is not None:
                lines.append(tag.format(rank) + prefix.format(number) + line)
        lines += noise
    return "\n".join(lines) + "\n"


NOISE = (
    "host-3:1011:2021 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
    " 34%|███▍      | 12/35 [00:03<00:06,  3.6it/s]",
    "\r 35%|███▍      | 13/35 [00:03<00:06,  3.6it/s]",
    "Loading checkpoint shards",
    "",
)


@pytest.mark.parametrize(
    ("tag", "prefix"),
    [
        ("[rank{}]:", "V1130 04:01:00.{} 8 a.py:9] "),  # TORCH_LOGS
        ("[default{}]:", ""),  # torchrun
        ("[default0]:[rank{}]:", "V1130 04:01:00.{} 8 a.py:9] "),
        ("[1,{}]<stdout>:", ""),  # mpirun
        ("  7%|7  | 1/9 [00:03<00:06,  3.6it/s]\r 9%| [rank{}]:", ""),
    ],
)
def test_one_file_holds_all_ranks(tmp_path, tag, prefix):
    log = all_ranks(map(without_rank, VOCABULARY), tag, prefix, NOISE)
    status, out = explain_files(tmp_path, {"job.log": log})
    assert status == 1
    assert out.startswith("ranks 0-3 have 4 different graphs\n") and "= 18992 · rank" in out
    same = all_ranks([without_rank(VOCABULARY[0])] * 3, tag, prefix, NOISE)
    assert explain_files(tmp_path, {"job.log": same}) == (0, "ranks 0-2 have the same 1 graph\n")


def test_a_rank_whose_lines_hold_no_graph_is_named(tmp_path):
    log = all_ranks([without_rank(VOCABULARY[0])] * 2) + "[rank5]:Traceback (most recent call last):\n"
    status, out = explain_files(tmp_path, {"job.log": log})
    assert (status, out.splitlines()[0].endswith("job.log has lines of rank 5, but no graph of theirs.")) == (0, True)


def test_lines_without_the_prefix_of_the_graph_are_no_part_of_it(tmp_path):
    prefixed = [all_ranks([without_rank(text)], tag="", noise=NOISE) for text in VOCABULARY[:2]]
    plain = [all_ranks([without_rank(text)], tag="") for text in VOCABULARY[:2]]
    noisy, quiet = (
        explain_files(tmp_path, {f"{rank}.log": log for rank, log in enumerate(logs)}) for logs in (prefixed, plain)
    )
    assert noisy == quiet and noisy[0] == 1


def test_a_graph_that_is_cut_off_is_said_to_be_first_and_nothing_is_made_of_what_it_lacks(tmp_path):
    whole = big_text(6)
    middle = whole.index("n60:")
    for end in (middle, middle + 15, middle + 60, whole.index("\n", middle) + 1):
        status, out = explain_files(tmp_path, {"rank0.txt": whole, "rank1.txt": whole[:end]})
        first, *_, last = out.splitlines()
        assert first.startswith("Note: the graph at line 1 of ") and "rank1.txt (rank 1) is cut off" in first
        assert (status, last) == (0, "ranks 0-1 have the same 1 graph, as far as these texts tell")
    # What is there is compared, whichever side is cut off.
    for cut in (0, 1):
        texts = [whole, big_text(6, rank=1)]
        texts[cut] = texts[cut][: texts[cut].index("n60:")]
        status, out = explain_files(tmp_path, {"rank0.txt": texts[0], "rank1.txt": texts[1]})
        assert status == 1 and "is cut off" in out.splitlines()[0]
        assert "What differs, in 1 place:" in out and "rank 1: 18992" in out
        assert out.count("\n  - ") == 1 and "graph break" not in out


def test_graphs_after_the_place_where_a_log_is_cut_off_are_not_said_to_be_missing(tmp_path):
    logs = [all_ranks([big_text(6) + text], tag=f"[rank{rank}]:") for rank, text in enumerate((VOCABULARY[0], ""))]
    logs[1] = logs[1][: logs[1].index("n60:")]
    status, out = explain_files(tmp_path, {f"{rank}.log": log for rank, log in enumerate(logs)})
    assert status == 0 and "is cut off" in out.splitlines()[0] and "Only rank" not in out
    # What it lacks before that is.
    logs[0] = all_ranks([VOCABULARY[0] + big_text(6)], tag="[rank0]:")
    status, out = explain_files(tmp_path, {f"{rank}.log": log for rank, log in enumerate(logs)})
    assert status == 1 and "Only rank 0 has this graph" in out


def container(lines, **fields):
    """As a container's log has them: JSON, and at most 16 KiB of a line in one."""
    for line in lines:
        for start in range(0, len(line) + 1, 2**14):
            yield json.dumps({"log": f"{line}\n"[start : start + 2**14], "stream": "stderr", **fields})


@pytest.mark.parametrize("name", ["log", "message", "textPayload"])
def test_a_containers_log_is_read(tmp_path, name):
    texts = [big_text(200), big_text(200, rank=1)]
    assert len(texts[0].splitlines()[1]) > 2**14
    files = {}
    for rank, text in enumerate(texts):
        lines = text.splitlines()
        as_json = container(lines) if name == "log" else (json.dumps({"level": "INFO", name: line}) for line in lines)
        files[f"rank{rank}.log"] = "\n".join(as_json)
    status, out = explain_files(tmp_path, files)
    assert status == 1 and "What differs, in 1 place:" in out and "rank 1: 18992" in out


def test_a_log_that_lacks_repeated_lines_is_said_to(tmp_path):
    log = all_ranks([without_rank(VOCABULARY[0])] * 2)
    log += "(Worker pid=3, ip=10.0.0.2) y = x [repeated 3x across cluster] (Ray deduplicates logs by default.)\n"
    _, out = explain_files(tmp_path, {"job.log": log})
    first = out.splitlines()[0]
    assert "job.log lacks lines that several processes wrote" in first and "RAY_DEDUP_LOGS=0" in first


def test_a_large_file_is_read_and_a_smaller_setting_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_graph_explain, "LARGE_CHARACTERS", 20_000)
    log = all_ranks([without_rank(VOCABULARY[0])] * 2)
    assert "TORCH_LOGS" not in explain_files(tmp_path, {"job.log": log})[1]
    status, out = explain_files(tmp_path, {"job.log": log + "something else\n" * 2000})
    assert (status, out.count("TORCH_LOGS=aot_graphs")) == (0, 1)


def test_a_large_log_takes_little_memory(tmp_path):
    """Of what is read the graphs are kept, and what ranks have in common once."""
    noise = "W1130 04:01:00.123 8 torch/guards.py:3219] [0/1] +- TENSOR_MATCH: check_tensor(L['x'])\n" * 400_000
    for rank in range(8):
        (tmp_path / f"rank{rank}.log").write_text(big_text(30, rank) + (noise if rank == 5 else ""))
    program = (
        "import re, sys; from layout import load; status = load('_graph_explain').main(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]); sys.exit(status)"
    )
    files = [str(tmp_path / f"rank{rank}.log") for rank in range(8)]
    ran = subprocess.run(
        [sys.executable, "-c", program, "explain", *files],
        env=child_environment(), stdout=subprocess.PIPE, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 1 and "ranks 0-7 have 8 different graphs" in ran.stdout
    assert int(ran.stdout.split()[-1]) < 100_000, "KiB; one of the files has 37 MB"


def test_a_terminal_is_told_how_far_it_is(tmp_path, two_files):
    leader, terminal = pty.openpty()
    with open(leader, "rb", 0) as reading, open(terminal, "wb", 0) as err:
        module = ["-m", f"{PACKAGE}.handshake"] if PACKAGE else [str(module_file("handshake"))]
        command = [sys.executable, *module, "explain", *two_files]
        ran = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, stderr=err, timeout=60)
        said = reading.read(2**16).decode()
    assert ran.returncode == 1 and b"reading" not in ran.stdout
    assert f"reading {two_files[0]}: 0 of 0 MiB" in said and "comparing variant 2 of 2" in said
    assert said.endswith("\r\x1b[K"), "nothing is left of it"


# --- Groups ---


def meshed(rank, columns, rows_of, facts=True, more=""):
    """A graph with a collective on the rank's row of a mesh, and one on its column; groups are called as one likes."""
    row, column = divmod(rank, columns)
    groups = {
        f"{row}": [row * columns + k for k in range(columns)],
        f"{100 + column}": [column + k * columns for k in range(rows_of)],
    }
    call = "x{} = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '{}')"
    body = [*[call.format(k, name) for k, name in enumerate(groups)], *([more] if more else [])]
    fact = "# handshake: group {} = ranks {}; size 8; description mesh"
    lines = [fact.format(name, ", ".join(map(str, ranks))) for name, ranks in groups.items()]
    return small("\n".join([*body, "return (x0, x1)"]), "\n".join(lines) if facts else "")


@pytest.mark.parametrize("facts", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 16), (2, 2)])
def test_the_rows_of_a_mesh_are_one_role(tmp_path, rows, columns, facts):
    texts = {f"rank{rank}.txt": meshed(rank, columns, rows, facts) for rank in range(rows * columns)}
    status, out = explain_files(tmp_path, texts)
    *notes, last = out.splitlines()
    assert status == 0 and last.startswith(f"ranks 0-{rows * columns - 1} have the same 1 graph")
    assert f"Note: {rows} groups of {columns} ranks that lie alike ('0', '1'" in out
    assert f"Note: {columns} groups of {rows} ranks that lie alike ('100', '101'" in out
    assert last.endswith("as far as these texts tell") is not facts and len(notes) == 3 - facts
    # A difference is told as elsewhere.
    texts["rank3.txt"] = meshed(3, columns, rows, facts, "y = x + 3")
    status, out = explain_files(tmp_path, texts)
    assert status == 1 and " have 2 different graphs" in out and "group:" not in out


def test_groups_that_are_not_alike_are_not_one(tmp_path):
    def text(rank, name, ranks):
        call = f"y = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '{name}')\nreturn (y,)"
        return small(call, f"# handshake: rank = {rank}\n# handshake: group {name} = ranks {ranks}; size 2")

    for other in (("1", "1-2"), ("1", "2-4")):  # overlaps; has another size
        status, out = explain_files(tmp_path, {"rank1.txt": text(1, "0", "0-1"), "rank2.txt": text(2, *other)})
        assert status == 1 and "group: " in out and "are taken for one" not in out


def test_groups_whose_ranks_no_text_tells_are_noted(tmp_path):
    """They may have one name and other ranks."""
    text = small("y = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '7')\nreturn (y,)")
    status, out = explain_files(tmp_path, {"rank0.txt": text, "rank1.txt": text})
    assert status == 0 and "do not hold the ranks of group '7'" in out.splitlines()[0]
    assert out.endswith("have the same 1 graph, as far as these texts tell\n")


# --- JSON ---


def test_reports_as_json(tmp_path):
    path = tmp_path / "reports.json"
    texts = [log_of(small("y = x.sin()\nreturn (y,)"), without_rank(text)) for text in VOCABULARY]
    files = {f"rank{rank}.log": text for rank, text in enumerate(texts)}
    status, out = explain_files(tmp_path, files, json_path=str(path))
    (report,) = map(json.loads, path.read_text().splitlines())
    assert status == 1 and "18992 · rank" in out
    assert report["handshake_report"] == 1 and report["headline"] in out
    assert [each["ranks"] for each in report["variants"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert report["differences"][0]["formula"] == "18992 · rank" and "register_buffer" in report["advice"][0]
    assert explain_files(tmp_path, files, json_path="-") == (1, path.read_text())
    # One line for each graph that differs; what is said of the files is among the notes of each.
    texts[3] = log_of(small("y = x.cos()\nreturn (y,)"), VOCABULARY[3])
    texts[2] = log_of(small("y = x.sin()\nreturn (y,)"), VOCABULARY[2], small("c = self.c\nreturn (c,)"))
    _, out = explain_files(tmp_path, dict(zip(files, texts, strict=True)), json_path="-")
    reports = [json.loads(line) for line in out.splitlines()]
    assert [each["headline"].split(":")[0] for each in reports] == ["graph 1 of 2"]
    assert all(any(note.startswith("Only rank 2 has this graph") for note in each["notes"]) for each in reports)


def test_reports_as_json_where_nothing_differs(tmp_path):
    files = {f"rank{rank}.txt": without_rank(VOCABULARY[0]) for rank in (0, 1)}
    status, out = explain_files(tmp_path, files, json_path="-")
    report = json.loads(out)
    assert (status, report["differences"], report["advice"]) == (0, [], [])
    assert [each["ranks"] for each in report["variants"]] == ["ranks 0-1"]


def test_json_that_cannot_be_written_is_named(tmp_path, two_files, capsys):
    assert _graph_explain.main(["explain", *two_files, "--json", str(tmp_path)]) == 2
    assert f"could not be written to {tmp_path}: " in capsys.readouterr().err
    assert _graph_explain.main(["explain", *two_files, "--json", two_files[0]]) == 2
    assert "would overwrite" in capsys.readouterr().err
