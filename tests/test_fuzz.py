# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes come, parsers give what is documented, or raise what is, in bounded memory and time."""

import contextlib
import json
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simulation
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layout import load, needs

_client = load("_client")
_protocol = load("_protocol")
_vocabulary = load("_vocabulary")
ProtocolError = _vocabulary.HandshakeProtocolError

MANY = settings(max_examples=300, deadline=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([2**31, 2**64, 10**400]) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# What JSON parsers have fallen over: a corpus.
HARD_JSON = [b"[" * 10_000, b'{"a":' * 10_000, b"9" * 5_000]
HARD_JSON += [b"1e999", b"NaN", b'"\\ud800"', b"\xff", b"", b"null", b"{}"]
RUNS_OF_MANY = [[0, 2**20, 1]] * 4_000


@contextlib.contextmanager
def peak_below(most_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most_bytes, f"it took {peak:,} bytes"


def changed(draw: st.DrawFn, value: Any) -> Any:
    """A valid JSON value with some of its parts replaced by others, or missing."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    if isinstance(value, dict):
        return {key: changed(draw, its) for key, its in value.items() if draw(st.integers(0, 19))}
    if isinstance(value, list | tuple):
        return [changed(draw, its) for its in value]
    return value


def nearly(value: Any) -> st.SearchStrategy[Any]:
    return st.composite(lambda draw: changed(draw, value))()


# ---------------------------------------------------------------------------------------------------------------
# The wire
# ---------------------------------------------------------------------------------------------------------------

frames = st.one_of(
    st.builds(
        lambda kind, body: struct.pack("!IB", len(body) + 1, kind) + body,
        st.sampled_from(sorted(_protocol._KINDS)),
        st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()),
    ),
    st.builds(_protocol.encode_vote, st.integers(0, 9), st.integers(0, 3), st.binary(min_size=16, max_size=16),
              st.lists(st.integers(0, 5), min_size=3, max_size=3)),
    st.builds(lambda number, ranks: _protocol.encode(_protocol.Group(number, tuple(sorted(ranks)))),
              st.integers(0, 5), st.sets(st.integers(0, 5), min_size=1)),
    st.builds(_protocol.encode_verdict, st.integers(0, 3), st.integers(0, 255), st.integers(0, 255)),
    st.builds(lambda vote, facts: _protocol.encode(_protocol.Detail(vote, json.dumps(facts).encode())),
              st.integers(0, 3), nearly({"reason": "r", "ranks": [[0, 2, 1]], "group": [[0, 2, 1]], "span": [0, 1],
                                         "broken": None})),
    st.builds(lambda facts: _protocol.encode(_protocol.Program(b"x" * 16, json.dumps(facts).encode())),
              nearly({"name": "n", "collectives": [["all_reduce"]]})),
    st.binary(max_size=40),
)


def decoded(data: bytes, pieces: list[int]) -> tuple[list[Any], str]:
    decoder, messages, at = _protocol.Decoder(frozenset(_protocol._KINDS)), [], 0
    try:
        for size in [*pieces, len(data)]:
            for message in decoder.feed(data[at : at + size]):
                messages.append(message)
            at += size
    except ProtocolError as error:
        with pytest.raises(ProtocolError):  # for ever
            list(decoder.feed(b""))
        return messages, str(error)
    return messages, ""


@MANY
@given(st.lists(frames, max_size=5).map(b"".join), st.lists(st.integers(1, 30), max_size=20))
def test_frames_are_the_same_messages_in_whatever_pieces_they_come(data: bytes, pieces: list[int]) -> None:
    messages, error = decoded(data, [])
    others, other_error = decoded(data, pieces)
    assert (repr(messages), bool(error)) == (repr(others), bool(other_error))


@pytest.mark.parametrize("data", HARD_JSON)
@pytest.mark.parametrize("kind", sorted(_protocol._KINDS))
def test_hard_json_in_a_frame(kind: int, data: bytes) -> None:
    fixed = b"\0" * _protocol._KINDS[kind][1].size
    decoded(struct.pack("!IB", len(fixed + data) + 1, kind) + fixed + data, [])


def test_runs_of_a_million_ranks_a_thousand_times() -> None:
    runs = struct.pack("!III", 0, 2**20, 1) * 4_000
    declared = struct.pack("!IBI", len(runs) + 5, _protocol.GROUP, 1) + runs
    facts = {"reason": "", "ranks": RUNS_OF_MANY, "group": RUNS_OF_MANY}
    detail = _protocol.encode(_protocol.Detail(1, json.dumps(facts).encode()))
    with peak_below(30 * 2**20):
        assert decoded(declared, [])[1] and decoded(detail, [])[1]


class Wire:
    """A socket from which a rank reads what its coordinator has said."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def recv(self, size: int) -> bytes:
        data, self.data = self.data[:size], self.data[size:]
        return data

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@MANY
@given(st.lists(frames, max_size=5).map(b"".join))
def test_a_rank_whose_coordinator_says_anything(data: bytes) -> None:
    """It has a verdict that is one, with facts that can be used, or an exception of the handshake's."""
    client = _client.Client(0, 6)
    pending = client._votes[1] = _client.PendingVote(1)
    client._sock = Wire(data)
    with contextlib.suppress(_vocabulary.HandshakeError):
        client.wait(pending, float("inf"))
        assert _protocol.FAT <= pending.outcome <= _protocol.VOTE_REFUSED
        for name in ("ranks", "group"):
            assert all(type(rank) is int for rank in _protocol.ranks_of(pending.facts.get(name) or ()))
        assert isinstance(pending.facts.get("reason", ""), str)
        assert len(pending.facts.get("span") or (0, 0)) == 2


@settings(max_examples=150, deadline=None)
@given(st.lists(frames, max_size=6))
def test_a_coordinator_whose_ranks_say_anything(said: list[bytes]) -> None:
    """It goes on: another rank is let in after all of it, from a stranger and from a rank."""
    simulation.World(0).hear(said)


# ---------------------------------------------------------------------------------------------------------------
# What is kept and sent as JSON
# ---------------------------------------------------------------------------------------------------------------

COUNTS = [{"process_group": [0, 1], "collective_count_before": 3, "num_collectives_in_graph": 1}]
REQUEST = {"pg_collective_counts": COUNTS, "executable_fingerprint": "A", "rank": 0}


@MANY
@given(nearly(COUNTS))
@example(10**400)
@example([{**COUNTS[0], "process_group": "01"}])
@example([{**COUNTS[0], "process_group": 10**9}])
@example([{**COUNTS[0], "collective_count_before": float("inf")}])
def test_counts_from_any_json(value: Any) -> None:
    for data in (value, json.dumps(value)):
        with contextlib.suppress(ProtocolError):
            counts = _vocabulary.RankCollectiveCounts.from_json(data)
            assert _vocabulary.RankCollectiveCounts.from_json(counts.to_json()) == counts


@MANY
@given(nearly(REQUEST).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60))
def test_requests_from_any_bytes(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        request = _vocabulary.CollectiveHandshakeRequest.from_bytes(data)
        assert _vocabulary.CollectiveHandshakeRequest.from_bytes(request.to_bytes()) == request
    with contextlib.suppress(ProtocolError):
        assert _vocabulary.CollectiveHandshakeResponse.from_bytes(data).to_bytes() == data


@pytest.mark.parametrize("data", HARD_JSON)
def test_requests_and_counts_from_hard_json(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        _vocabulary.CollectiveHandshakeRequest.from_bytes(data)
    with pytest.raises(ProtocolError) if data != b"{}" else contextlib.nullcontext():  # no groups at all
        _vocabulary.RankCollectiveCounts.from_json(data.decode("latin-1"))


# ---------------------------------------------------------------------------------------------------------------
# Graphs
# ---------------------------------------------------------------------------------------------------------------

NODE = {"name": "x", "line": "x", "op": "placeholder", "target": "x", "shape": ["2"], "dtype": "f32", "stride": ["1"]}
ARGUMENTS = [["0", "x", 0]]
CALL = {"name": "y", "line": "y = x + 1", "op": "call", "target": "add", "arguments": ARGUMENTS}
CALL["source"] = ["m.py", 3, "f", "x + 1"]
BODY = {"name": "", "nodes": [NODE, CALL]}
RECORD = {
    "handshake_graph": 1,
    "body": {**BODY, "bodies": {"inner": BODY}},
    "fingerprint": "A",
    "rank": 0,
    "groups": {"0": {"ranks": [[0, 2, 1]], "description": "all"}},
}
PRINTED = """# handshake: rank = 3
class GraphModule(torch.nn.Module):
    def forward(self, x: "f32[2, 3]", s0: "Sym(s0)"):
        # File: m.py:3 in f, code: y = x + 1
        y: "f32[2, 3]" = torch.ops.aten.add.Tensor(x, 1);  x = None
        z = torch.ops._c10d_functional.all_reduce.default(y, 'sum', '0');  y = None
        return (z,)
"""


@needs("_graph_diff")
@MANY
@given(nearly(RECORD))
@example({**RECORD, "groups": {"0": {"ranks": [[10**4000, 2**20, 10**4000]]}}})
def test_records_from_any_json(value: Any) -> None:
    with contextlib.suppress(ValueError):
        load("_graph_diff").read_record(json.dumps(value))


@needs("_graph_diff")
@pytest.mark.parametrize("data", HARD_JSON)
def test_records_from_hard_json(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a valid graph record"):
        load("_graph_diff").read_record(data.decode("latin-1"))


@needs("_graph_diff")
def test_the_record_that_is_changed_here_is_valid() -> None:
    assert load("_graph_diff").read_record(json.dumps(RECORD)).groups == {"0": ((0, 1), "all")}


@needs("_graph_diff")
def test_a_record_with_thousands_of_groups_of_a_million_ranks() -> None:
    groups = {str(number): {"ranks": [[0, 2**20, 1]]} for number in range(4_000)}
    with peak_below(400 * 2**20), contextlib.suppress(ValueError):
        load("_graph_diff").read_record(json.dumps({**RECORD, "groups": groups}))


@needs("_graph_text")
@MANY
@given(st.data())
def test_printed_graphs_from_any_text(data: st.DataObject) -> None:
    """Valid text, of which parts are cut out, repeated, or replaced."""
    text = PRINTED
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 40)))
        piece = data.draw(st.sampled_from(["", text[start:end] * 2, "(", "[", "'", '"', ":", "\n", "\0", "# File: "]))
        text = text[:start] + piece + text[end:]
    with contextlib.suppress(ValueError):
        load("_graph_text").parse(text)


@needs("_graph_text")
@pytest.mark.parametrize("inner", ["(" * 10_000, "[" * 10_000, "f(" * 5_000, "-" * 10_000, "x." * 10_000, "1" * 10_000])
def test_printed_graphs_that_are_nested_deep(inner: str) -> None:
    with contextlib.suppress(ValueError):
        load("_graph_text").parse(PRINTED.replace("(x, 1)", f"({inner}x, 1)"))


@needs("_graph_report")
def test_a_graph_of_8_mb_is_not_unpacked_without_a_bound() -> None:
    report = load("_graph_report")
    bomb = zlib.compress(zlib.compress(b"0" * 2**27, 9), 0)
    large = zlib.compress(b" " * (report.MAX_TEXT_BYTES + 2**24))
    for payload in (bomb, large, large[: len(large) // 2], b"", b"\x78\x9c", b"nothing"):
        with peak_below(3 * report.MAX_TEXT_BYTES):
            variant = report._with_graph(report.Variant([0], "A"), payload)
        assert variant.graph is None


@needs("_graph_plan")
@MANY
@given((JSON | nearly([["00ff", [1, 2], [0]]])).map(lambda value: zlib.compress(json.dumps(value).encode())))
@example(zlib.compress(b"[" * 10_000))
@example(zlib.compress(b" " * (2**26 + 1)))
def test_keys_from_any_bytes(data: bytes) -> None:
    plan = load("_graph_plan")
    with contextlib.suppress(plan.PlanError):
        plan.read_keys(data)
    with contextlib.suppress(plan.PlanError):
        plan.read_keys(random.Random(len(data)).randbytes(40))
