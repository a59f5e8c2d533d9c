# SPDX-License-Identifier: Apache-2.0
"""The wire: messages to bytes and bytes to messages. No socket, no clock, no thread.

A frame is a 4-byte length, a 1-byte kind and a body, in network byte order; the length counts kind and body. The
coordinator speaks first:

    coordinator  GREETING   magic, version, nonce         (this frame's layout is the same in every version)
    rank         HELLO      who it is, as JSON, and the proof that it knows the job's secret
    coordinator  WELCOME, or REFUSED with the reason
    rank         GROUP      once for each process group: a number for it, and its ranks as runs
    rank         VOTE       28 bytes + 16 for each group
    coordinator  VERDICT    19 bytes; before one that is not FAT, a DETAIL with the reason

    NOTICE (coordinator) tells a rank that waits whom it waits for. GRAPH (rank) carries a graph's text after a
    split whose verdict asked for it; REPORT (coordinator) what came of the comparison. EXCHANGE (rank) and RESULT
    (coordinator) are the rounds in which the ranks of a split component agree on a plan. GOODBYE (both) says that
    the end of the connection is meant.

Every length is checked against a named maximum before anything of that size is made. A `Decoder` that has raised
raises for ever: after a frame that doesn't parse, nobody knows where the next one begins.
"""

import functools
import hashlib
import hmac
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

if __package__:
    from ._vocabulary import DIGEST_BYTES, HandshakeProtocolError
else:
    from _vocabulary import DIGEST_BYTES, HandshakeProtocolError

MAGIC = b"TPU-HS\r\n"
VERSION = 1

NONCE_BYTES = 16
PROOF_BYTES = 16

# What a peer may send before it is known to belong to the job: a HELLO holds a few short strings.
MAX_FRAME_BYTES_AT_FIRST = 4096
# Afterwards: a graph's text (compressed) or a plan's node keys are the largest; see MAX_GRAPH_BYTES.
MAX_FRAME_BYTES = 17 * 2**20
# The text of a graph, compressed. A graph of 100,000 nodes has some 20 MB of text and 2 MB compressed.
MAX_GRAPH_BYTES = 8 * 2**20
# A plan's payload: 100,000 nodes with some 100 bytes a node.
MAX_PAYLOAD_BYTES = 16 * 2**20
# Reasons and notices; they name ranks as ranges, so a few lines are enough. Longer ones are cut.
MAX_TEXT_BYTES = 16 * 2**10
# The groups that one graph uses: a handful of mesh dimensions, and a pair for every point-to-point neighbour.
MAX_SPANS = 4096
# The groups that one rank may declare over its life.
MAX_GROUPS_PER_RANK = 65536
# Ranks of one group, and of a world.
MAX_WORLD_SIZE = 2**20

GREETING, HELLO, WELCOME, REFUSED, GOODBYE = 1, 2, 3, 4, 5
GROUP, VOTE, VERDICT, DETAIL, NOTICE = 16, 17, 18, 19, 20
GRAPH, REPORT = 32, 33
EXCHANGE, RESULT = 48, 49

# Outcomes on the wire.
FAT, SPLIT, TIMEOUT, PEER_LOST, VOTE_REFUSED = 1, 2, 3, 4, 5

# Flags of a vote.
PARTIAL, HAS_GRAPH = 1, 2
# Flags of a verdict.
SEND_GRAPH = 1

# The rounds of an exchange (see _splits).
REFERENCE, SHARE, INTERSECT, AGREE, ABORT = 1, 2, 3, 4, 5

_LENGTH = struct.Struct("!I")
_HEADER = struct.Struct("!IB")
_GREETING = struct.Struct(f"!8sH{NONCE_BYTES}s")
_VOTE = struct.Struct(f"!IBIB{DIGEST_BYTES}sH")  # length, kind, number, flags, digest, spans
_VOTE_BODY = struct.Struct(f"!IB{DIGEST_BYTES}sH")
# Group's number, start, how many. A server that dispatches 200 collectives a hundred times a second is past 2^32 in
# less than three days.
_SPAN = struct.Struct("!IQI")
_VERDICT = struct.Struct("!IBIBBQ")  # length, kind, vote, outcome, flags, exchange
_VERDICT_BODY = struct.Struct("!IBBQ")
_GROUP = struct.Struct("!II")
_RUN = struct.Struct("!III")
_NUMBER = struct.Struct("!I")
_EXCHANGE = struct.Struct("!QB")
_RESULT = struct.Struct("!QBB")

_VOTE_OF_ONE = struct.Struct(_VOTE.format + _SPAN.format[1:])  # a vote on one group, whole

_VERDICT_LENGTH = _VERDICT.size - _LENGTH.size
_VOTE_OF_ONE_LENGTH = _VOTE_OF_ONE.size - _LENGTH.size


class Greeting(NamedTuple):
    """The coordinator's first frame. `nonce` goes into the proof."""

    version: int
    nonce: bytes


class Hello(NamedTuple):
    """Who a rank is. `facts` is a flat JSON object; `signed` its bytes as they came, over which `proof` was made."""

    facts: dict[str, Any]
    signed: bytes
    proof: bytes


class Welcome(NamedTuple):
    """The rank is in. `facts` is a flat JSON object that describes the coordinator."""

    facts: dict[str, Any]


class Refused(NamedTuple):
    """The rank is not let in."""

    reason: str


class Goodbye(NamedTuple):
    """The sender ends the connection on purpose."""

    reason: str


class GroupDeclared(NamedTuple):
    """From now on `number` names the group of these ranks on this connection."""

    number: int
    ranks: tuple[int, ...]


class Vote(NamedTuple):
    """A vote; each span is (group's number, start, end)."""

    number: int
    flags: int
    digest: bytes
    spans: list[tuple[int, int, int]]


class Verdict(NamedTuple):
    """The answer to the vote of that number. `exchange` is 0, or names the plan rounds that are open."""

    vote: int
    outcome: int
    flags: int
    exchange: int


class Detail(NamedTuple):
    """Why the verdict that follows for that vote is not FAT: `reason`, and the fields of the exceptions."""

    vote: int
    facts: dict[str, Any]


class Notice(NamedTuple):
    """What the rank that waits for that vote should log."""

    vote: int
    text: str


class Graph(NamedTuple):
    """A graph's text, compressed by zlib, for the vote of that number."""

    vote: int
    compressed: bytes


class Report(NamedTuple):
    """What the comparison of graphs after a split found; `facts` has `text` and, where one was written, `path`."""

    facts: dict[str, Any]


class Exchange(NamedTuple):
    """One rank's part in one round of an exchange."""

    exchange: int
    round: int
    payload: bytes


class Result(NamedTuple):
    """The outcome of one round of an exchange; `ok` is 0 when it was called off, and the payload says why."""

    exchange: int
    round: int
    ok: int
    payload: bytes


Message = (
    Greeting | Hello | Welcome | Refused | Goodbye | GroupDeclared | Vote | Verdict | Detail | Notice | Graph | Report
    | Exchange | Result
)


# ---------------------------------------------------------------------- messages to bytes


def frame(kind: int, *parts: bytes) -> bytes:
    """One frame of that kind."""
    body = b"".join(parts)
    return _HEADER.pack(len(body) + 1, kind) + body


def greeting(nonce: bytes, version: int = VERSION) -> bytes:
    """The coordinator's first frame."""
    return frame(GREETING, _GREETING.pack(MAGIC, version, nonce))


def hello(facts: dict[str, Any], secret: bytes, nonce: bytes) -> bytes:
    """Who this rank is, with the proof for the greeting's nonce."""
    signed = _json(facts)
    return frame(HELLO, proof(secret, nonce, signed), signed)


def proof(secret: bytes, nonce: bytes, signed: bytes) -> bytes:
    """What only somebody with the job's secret can make of this nonce and these bytes."""
    return hmac.new(secret, nonce + signed, hashlib.sha256).digest()[:PROOF_BYTES]


def welcome(facts: dict[str, Any]) -> bytes:
    """The rank is in."""
    return frame(WELCOME, _json(facts))


def refused(reason: str) -> bytes:
    """The rank is not let in."""
    return frame(REFUSED, _text(reason))


def goodbye(reason: str) -> bytes:
    """The connection ends on purpose."""
    return frame(GOODBYE, _text(reason))


def group(number: int, ranks: Sequence[int]) -> bytes:
    """Declares a group. Ranks travel as runs (first, count, step): a world, a row or a column of a mesh is one run."""
    encoded = [_RUN.pack(*run) for run in runs(ranks)]
    return frame(GROUP, _GROUP.pack(number, len(encoded)), *encoded)


def vote(number: int, flags: int, digest: bytes, spans: Sequence[tuple[int, int, int]]) -> bytes:
    """A vote; each span is (group's number, start, end). `_VOTE.size` + `_SPAN.size` bytes for each span."""
    if len(spans) == 1:
        return vote_on_one(number, flags, digest, *spans[0])
    length = _VOTE.size - _LENGTH.size + _SPAN.size * len(spans)
    head = _VOTE.pack(length, VOTE, number, flags, digest, len(spans))
    return head + b"".join([_SPAN.pack(group, start, end - start) for group, start, end in spans])


def vote_on_one(number: int, flags: int, digest: bytes, group_number: int, start: int, end: int) -> bytes:
    """`vote` for one span."""
    return _VOTE_OF_ONE.pack(_VOTE_OF_ONE_LENGTH, VOTE, number, flags, digest, 1, group_number, start, end - start)


def verdict(vote_number: int, outcome: int, flags: int = 0, exchange: int = 0) -> bytes:
    """The answer to a vote."""
    return _VERDICT.pack(_VERDICT_LENGTH, VERDICT, vote_number, outcome, flags, exchange)


def detail(vote_number: int, facts: bytes) -> bytes:
    """Why the verdict that follows is not FAT; `facts` from `reason_facts`."""
    return frame(DETAIL, _NUMBER.pack(vote_number), facts)


def reason_facts(
    reason: str, ranks: Sequence[int], group_ranks: Sequence[int] | None, span: tuple[int, int] | None
) -> bytes:
    """The facts of a `Detail`: what happened, and the ranks, the group and the span that it is about."""
    about = {"ranks": runs(ranks), "group": group_ranks and runs(group_ranks), "span": span}
    return _json({"reason": reason[:MAX_TEXT_BYTES], **about})


def notice(vote_number: int, text: str) -> bytes:
    """What the rank that waits should log."""
    return frame(NOTICE, _NUMBER.pack(vote_number), _text(text))


def graph(vote_number: int, compressed: bytes) -> bytes:
    """A graph's text, compressed; empty if the rank has none to give."""
    return frame(GRAPH, _NUMBER.pack(vote_number), compressed)


def report(facts: dict[str, Any]) -> bytes:
    """What the comparison of graphs found."""
    return frame(REPORT, _json(facts))


def exchange(exchange_number: int, round_number: int, payload: bytes) -> bytes:
    """One rank's part in one round of an exchange."""
    return frame(EXCHANGE, _EXCHANGE.pack(exchange_number, round_number), payload)


def result(exchange_number: int, round_number: int, ok: bool, payload: bytes) -> bytes:
    """The outcome of one round of an exchange."""
    return frame(RESULT, _RESULT.pack(exchange_number, round_number, ok), payload)


def _json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, separators=(",", ":")).encode()


def _text(text: str) -> bytes:
    return text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]


def runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending ranks as runs of (first, count, step)."""
    found: list[tuple[int, int, int]] = []
    place = 0
    while place < len(ranks):
        first, count, step = ranks[place], 1, 1
        if place + 1 < len(ranks):
            step = ranks[place + 1] - first
            while place + count < len(ranks) and ranks[place + count] == first + count * step:
                count += 1
        found.append((first, count, step))
        place += count
    return found


def ranks_of(encoded: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks that `runs` encoded.

    Raises:
        HandshakeProtocolError: a run is empty, or the ranks are more than `MAX_WORLD_SIZE` or reach beyond it.
    """
    if sum(count for _, count, _ in encoded) > MAX_WORLD_SIZE:
        raise HandshakeProtocolError(f"a group of more than {MAX_WORLD_SIZE} ranks")
    ranks: list[int] = []
    for first, count, step in encoded:
        if count < 1 or step < 1 or first + (count - 1) * step >= MAX_WORLD_SIZE:
            raise HandshakeProtocolError(f"ranks that are none: {count} from {first} in steps of {step}")
        ranks += range(first, first + count * step, step)
    return tuple(ranks)


# ---------------------------------------------------------------------- bytes to messages


class Decoder:
    """Takes bytes as they come and gives messages.

    Attributes:
        max_frame_bytes: the largest frame that is accepted from now on.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES_AT_FIRST) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._failure: str | None = None

    @property
    def is_within_frame(self) -> bool:
        """Whether bytes were fed that are no whole frame yet, or the decoder has failed."""
        return bool(self._buffer) or self._failure is not None

    def feed(self, data: bytes) -> None:
        """Adds bytes that were received."""
        self._buffer += data

    def next_message(self) -> Message | None:
        """The next message, or None if more bytes are needed.

        Raises:
            HandshakeProtocolError: the bytes are no frame of this protocol; so will be every later call.
        """
        if self._failure is not None:
            raise HandshakeProtocolError(self._failure)
        buffer = self._buffer
        if len(buffer) < _HEADER.size:
            return None
        length, kind = _HEADER.unpack_from(buffer)
        try:
            if kind not in _DECODERS:
                raise HandshakeProtocolError(f"not a frame of this protocol: it starts with {bytes(buffer[:16])!r}")
            if not 1 <= length <= self.max_frame_bytes:
                raise HandshakeProtocolError(f"a frame of {length} bytes, at most {self.max_frame_bytes} are allowed")
            end = _LENGTH.size + length
            if len(buffer) < end:
                return None
            body = bytes(buffer[_HEADER.size : end])
            del buffer[:end]
            return _DECODERS[kind](body)
        except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
            self._failure = f"a malformed frame of kind {kind}: {error}"
            raise HandshakeProtocolError(self._failure) from error
        except HandshakeProtocolError as error:
            self._failure = str(error)
            raise


# A shortcut past the decoder, for data that begins at a frame's start. Nearly all that a coordinator reads is this.


def vote_of_one(data: bytes) -> tuple[int, int, int, int, bytes, int, int, int, int] | None:
    """The fields of `data` if it is one vote on one group and nothing else: length, kind, number, flags, digest,
    1, group's number, start, how many. Else None."""
    if len(data) == _VOTE_OF_ONE.size and data[4] == VOTE:
        fields = _VOTE_OF_ONE.unpack(data)
        if fields[0] == _VOTE_OF_ONE_LENGTH and fields[5] == 1:
            return fields
    return None


def _decode_greeting(body: bytes) -> Greeting:
    # A later version may append to this frame; what stands here stays.
    magic, version, nonce = _GREETING.unpack_from(body)
    if magic != MAGIC:
        raise HandshakeProtocolError(f"not a greeting of this protocol: {body[:16]!r}")
    return Greeting(version, nonce)


def _decode_hello(body: bytes) -> Hello:
    signed = body[PROOF_BYTES:]
    return Hello(_facts(signed), signed, body[:PROOF_BYTES])


def _decode_group(body: bytes) -> GroupDeclared:
    number, count = _GROUP.unpack_from(body)
    if len(body) != _GROUP.size + count * _RUN.size:
        raise HandshakeProtocolError(f"a group of {count} runs in {len(body)} bytes")
    return GroupDeclared(number, _ranks_in(body[_GROUP.size :]))


@functools.lru_cache(maxsize=256)  # all ranks of a group declare it, mostly one after the other
def _ranks_in(encoded: bytes) -> tuple[int, ...]:
    return ranks_of(list(_RUN.iter_unpack(encoded)))


def _decode_vote(body: bytes) -> Vote:
    number, flags, digest, count = _VOTE_BODY.unpack_from(body)
    if len(body) != _VOTE_BODY.size + count * _SPAN.size or not 1 <= count <= MAX_SPANS:
        raise HandshakeProtocolError(f"a vote of {count} spans in {len(body)} bytes")
    spans = [(group, start, start + num) for group, start, num in _SPAN.iter_unpack(body[_VOTE_BODY.size :])]
    return Vote(number, flags, digest, spans)


def _decode_text(body: bytes) -> str:
    return body.decode("utf-8", "replace")


def _facts(body: bytes) -> dict[str, Any]:
    facts = json.loads(body)
    if not isinstance(facts, dict):
        raise HandshakeProtocolError("facts that are no JSON object")
    return facts


def _decode_graph(body: bytes) -> Graph:
    if len(body) > MAX_GRAPH_BYTES + _NUMBER.size:
        raise HandshakeProtocolError(f"a graph of {len(body)} bytes, at most {MAX_GRAPH_BYTES} are allowed")
    return Graph(_NUMBER.unpack_from(body)[0], body[_NUMBER.size :])


def _decode_exchange(body: bytes) -> Exchange:
    payload = body[_EXCHANGE.size :]
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise HandshakeProtocolError(f"a payload of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are allowed")
    number, round_number = _EXCHANGE.unpack_from(body)
    return Exchange(number, round_number, payload)


def _decode_result(body: bytes) -> Result:
    number, round_number, ok = _RESULT.unpack_from(body)
    return Result(number, round_number, ok, body[_RESULT.size :])


_DECODERS: dict[int, Callable[[bytes], Message]] = {
    GREETING: _decode_greeting,
    HELLO: _decode_hello,
    WELCOME: lambda body: Welcome(_facts(body)),
    REFUSED: lambda body: Refused(_decode_text(body)),
    GOODBYE: lambda body: Goodbye(_decode_text(body)),
    GROUP: _decode_group,
    VOTE: _decode_vote,
    VERDICT: lambda body: Verdict(*_VERDICT_BODY.unpack(body)),
    DETAIL: lambda body: Detail(_NUMBER.unpack_from(body)[0], _facts(body[_NUMBER.size :])),
    NOTICE: lambda body: Notice(_NUMBER.unpack_from(body)[0], _decode_text(body[_NUMBER.size :])),
    GRAPH: _decode_graph,
    REPORT: lambda body: Report(_facts(body)),
    EXCHANGE: _decode_exchange,
    RESULT: _decode_result,
}
