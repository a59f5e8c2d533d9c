# SPDX-License-Identifier: Apache-2.0
"""The wire: messages to bytes and bytes to messages. No socket, no clock, no thread.

A frame is a 4-byte length, a 1-byte kind and a body, in network byte order; the length counts kind and body. A body has
fixed fields and then a tail: text, JSON, bytes, ranks, or spans. `_KINDS` is the whole protocol:

    coordinator  GREETING   magic, version, nonce         (this frame's layout is the same in every version)
    rank         HELLO      a nonce of its own, who it is, and the proof that it knows the job's secret
    coordinator  ANSWER     who it is, or why the rank is refused, and the proof that it knows the secret too
    rank         GROUP      once for each process group: a number for it, and its ranks
    rank         PROGRAM    once for each graph, if it says so: its name, and what its collectives are
    rank         VOTE       26 bytes + 16 for each group
    coordinator  VERDICT    11 bytes; before one that is not FAT, a DETAIL with the reason

Later: WAIT (rank), how long its votes may wait from now on; NOTICE (coordinator), a text for the rank's log; EXTRA
(both), about a vote that was split, passed on unread by the core; GOODBYE (both): the end of the connection is meant.

A new message is a class, a row of `_KINDS`, and its number in the set of the side that may send it. Every length is
checked against the bound of its kind before anything of that size is made. A `Decoder` that has raised raises for ever:
after a frame that doesn't parse, nobody knows where the next one begins.
"""

import errno
import functools
import hmac
import json
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

if __package__:
    from ._vocabulary import DIGEST_BYTES, MAX_WORLD_SIZE, HandshakeProtocolError
else:
    from _vocabulary import DIGEST_BYTES, MAX_WORLD_SIZE, HandshakeProtocolError

MAGIC = b"TPU-HS\r\n"
VERSION = 3
NONCE_BYTES = PROOF_BYTES = 16

# Bounds of tails, in bytes.
MAX_HELLO_BYTES = 4096  # a few short strings, from somebody who has proved nothing yet
MAX_ANSWER_BYTES = 2**15  # to that: the same, and a folder's path or a reason
MAX_REASON_BYTES = 2**14  # what becomes part of an exception's text; longer ones are cut
MAX_TEXT_BYTES = 2**18  # notices, which hold reports for a log; longer ones are cut
MAX_JSON_BYTES = 2**24  # JSON around a reason: ranks as runs, of a world with no order at all
MAX_PAYLOAD_BYTES = 2**24  # of one extra frame: a plan's keys (100,000 nodes with some 100 bytes each), a graph
# The groups that one graph uses: a handful of mesh dimensions, and a pair for every point-to-point neighbour.
MAX_SPANS = 4096
MAX_GROUPS_PER_RANK = 65536  # that one rank may declare over its life
MAX_PROGRAM_BYTES = 2**18  # of one program's name and collectives: some 8,000 of them

FAT, SPLIT, TIMEOUT, PEER_LOST, VOTE_REFUSED = 1, 2, 3, 4, 5  # outcomes; a vote that is refused changes nothing
PARTIAL, HAS_GRAPH = 1, 2  # flags of a vote: the rank is able to look for a plan; it has a graph to show
PLAN, SPEAKS = 1, 2  # flags of a verdict: all ranks of the component look for a plan now; this rank is to log a split
PLANS, REPORTS = 1, 2  # extras
CALL_OFF = 5  # the step by which a rank calls a plan off
BROKE_OFF = "it can't run what was agreed"  # how the goodbye of a rank begins that gives up

GREETING, HELLO, ANSWER, GOODBYE = 1, 2, 3, 5
GROUP, VOTE, VERDICT, DETAIL, NOTICE, PROGRAM, WAIT, EXTRA = 16, 17, 18, 19, 20, 21, 22, 32
# Which kinds each side may send, and when.
FROM_STRANGER = frozenset({HELLO})
FROM_RANK = frozenset({GROUP, PROGRAM, VOTE, WAIT, EXTRA, GOODBYE})
FROM_COORDINATOR = frozenset({VERDICT, DETAIL, NOTICE, EXTRA, GOODBYE})

_LENGTH_BYTES = 4
_HEADER = struct.Struct("!IB")  # length, kind
_VERDICT = struct.Struct("!IBIBB")  # header, vote, outcome, flags
_VOTE = f"!IBIB{DIGEST_BYTES}s"  # header, number, flags, digest
_VOTE_LENGTH = struct.calcsize(_VOTE) - _LENGTH_BYTES
_SPAN, _SPAN_BYTES = "IQI", 16  # group's number, start, how many
_RUN = struct.Struct("!III")  # first, count, step


class Greeting(NamedTuple):
    """The coordinator's first frame. `nonce` goes into the proof. (A later version may append to it.)"""

    magic: bytes
    version: int
    nonce: bytes
    rest: bytes = b""


class Hello(NamedTuple):
    """Who a rank is: a JSON object as bytes, over which `proof` was made."""

    nonce: bytes
    proof: bytes
    facts: bytes


class Answer(NamedTuple):
    """To a hello. `facts`, a JSON object as bytes, describe the coordinator, and the rank is in; or they hold
    `refused`, the reason why it is not."""

    proof: bytes
    facts: bytes


class Goodbye(NamedTuple):
    """The sender ends the connection on purpose."""

    reason: str


class Group(NamedTuple):
    """From now on `number` names the group of these ranks on this connection."""

    number: int
    ranks: tuple[int, ...]


class Program(NamedTuple):
    """What is behind a digest: a JSON object as bytes, with its `name`, and its `collectives` on each group."""

    digest: bytes
    facts: Any


class Vote(NamedTuple):
    """A vote. `spans` is flat: group's number, start, how many, and so on."""

    number: int
    flags: int
    digest: bytes
    spans: Sequence[int]


class Verdict(NamedTuple):
    """The answer to the vote of that number."""

    vote: int
    outcome: int
    flags: int = 0


class Detail(NamedTuple):
    """Why the verdict that follows for that vote is not FAT, as `detail_facts` made it."""

    vote: int
    facts: Any


class Notice(NamedTuple):
    """What the rank should log."""

    text: str


class Wait(NamedTuple):
    """How long the rank's votes may wait from now on, in seconds."""

    seconds: float


class Extra(NamedTuple):
    """A frame of an extra, about the vote of that number of the rank that sends or gets it."""

    extra: int
    vote: int
    step: int
    payload: bytes


Message = Greeting | Hello | Answer | Goodbye | Group | Program | Vote | Verdict | Detail | Notice | Wait | Extra


class _Tail(NamedTuple):
    """How the last field of a message is written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[bytes, int], Any]  # the tail, and the number of ranks in the world
    max_bytes: int


def write_facts(facts: Any) -> bytes:
    return facts if isinstance(facts, bytes) else json.dumps(facts, separators=(",", ":")).encode()


def read_facts(data: bytes, world_size: int = 0) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else, and RecursionError."""
    facts = json.loads(data)
    if not isinstance(facts, dict):
        raise ValueError("facts that are not a JSON object")
    return facts


def runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending ranks as runs of (first, count, step): a world, a row or a column of a mesh is one."""
    found: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, count, step = found[-1] if found else (rank, 0, 1)
        if count == 1:
            step = rank - first
        if rank == first + count * step:
            found[-1:] = [(first, count + 1, step)]
        else:
            found.append((rank, 1, 1))
    return found


def ranks_of(encoded: Sequence[Sequence[int]], world_size: int = MAX_WORLD_SIZE) -> tuple[int, ...]:
    """The ranks that `runs` encoded. Raises ValueError where a run is empty, or reaches outside the world."""
    check_runs(encoded, world_size)
    return tuple(rank for first, count, step in encoded for rank in range(first, first + count * step, step))


def check_runs(encoded: Sequence[Sequence[int]], world_size: int) -> None:
    """Raises as `ranks_of`, which makes what may be a million ranks."""
    if sum(count for _, count, _ in encoded) > world_size:
        raise ValueError(f"a group of more than {world_size} ranks")
    for first, count, step in encoded:
        if count < 1 or step < 1 or first + (count - 1) * step >= world_size:
            raise ValueError(f"{count} ranks from {first} in steps of {step} reach outside a world of {world_size}")


@functools.lru_cache(maxsize=256)  # all ranks of a group declare it, mostly one after the other
def _read_ranks(data: bytes, world_size: int) -> tuple[int, ...]:
    return ranks_of(list(_RUN.iter_unpack(data)), world_size)


def _read_spans(data: bytes, _: int) -> tuple[int, ...]:
    spans = struct.unpack("!" + _SPAN * (len(data) // _SPAN_BYTES or 1), data)
    if 0 in spans[2::3]:
        raise ValueError("a span is empty")
    return spans


def _read_detail(data: bytes, world_size: int) -> dict[str, Any]:
    """The facts that `detail_facts` made."""
    facts = read_facts(data)
    texts, span = [facts.get("reason"), facts.get("broken") or ""], facts.get("span") or [0, 0]
    try:
        for name in ("ranks", "group"):
            check_runs([(*map(operator.index, run),) for run in facts.get(name) or ()], world_size)
        is_usable = len([*map(operator.index, span)]) == 2 and all(
                type(text) is str and len(text) <= MAX_REASON_BYTES for text in texts
            )
    except TypeError as error:
        raise ValueError(f"a detail whose numbers are none: {error}") from error
    if not is_usable:
        raise ValueError("a reason that is not a text, or too long a one, or a span that is none")
    return facts


_TEXT = _Tail(
    lambda text: text.encode("utf-8", "replace")[:MAX_TEXT_BYTES],
    lambda data, _: data.decode("utf-8", "replace"),
    MAX_TEXT_BYTES,
)
_REASON = _Tail(lambda text: _TEXT.write(text)[:MAX_REASON_BYTES], _TEXT.read, MAX_REASON_BYTES)
_DETAIL = _Tail(write_facts, _read_detail, MAX_JSON_BYTES)
_BYTES = _Tail(bytes, lambda data, _: data, MAX_PAYLOAD_BYTES)
_HELLO_FACTS = _BYTES._replace(max_bytes=MAX_HELLO_BYTES)
_PROGRAM_FACTS = _Tail(write_facts, _BYTES.read, MAX_PROGRAM_BYTES)  # read once for each program, not for each rank
_RANKS = _Tail(
    lambda ranks: b"".join([_RUN.pack(*run) for run in runs(ranks)]), _read_ranks, MAX_WORLD_SIZE * _RUN.size // 2
)
_SPANS = _Tail(
    lambda spans: struct.pack("!" + _SPAN * (len(spans) // 3), *spans), _read_spans, MAX_SPANS * _SPAN_BYTES
)

_KINDS: dict[int, tuple[Any, struct.Struct, _Tail | None]] = {
    GREETING: (Greeting, struct.Struct(f"!{len(MAGIC)}sH{NONCE_BYTES}s"), _HELLO_FACTS),
    HELLO: (Hello, struct.Struct(f"!{NONCE_BYTES}s{PROOF_BYTES}s"), _HELLO_FACTS),
    ANSWER: (Answer, struct.Struct(f"!{PROOF_BYTES}s"), _BYTES._replace(max_bytes=MAX_ANSWER_BYTES)),
    GOODBYE: (Goodbye, struct.Struct(""), _REASON),
    GROUP: (Group, struct.Struct("!I"), _RANKS),
    PROGRAM: (Program, struct.Struct(f"!{DIGEST_BYTES}s"), _PROGRAM_FACTS),
    VOTE: (Vote, struct.Struct(f"!IB{DIGEST_BYTES}s"), _SPANS),
    VERDICT: (Verdict, struct.Struct("!IBB"), None),
    DETAIL: (Detail, struct.Struct("!I"), _DETAIL),
    NOTICE: (Notice, struct.Struct(""), _TEXT),
    WAIT: (Wait, struct.Struct("!d"), None),
    EXTRA: (Extra, struct.Struct("!BIB"), _BYTES),
}
_KIND_OF = {row[0]: kind for kind, row in _KINDS.items()}


def encode(message: Message) -> bytes:
    """Any message as a frame."""
    kind = _KIND_OF[type(message)]
    _, fixed, tail = _KINDS[kind]
    fields: tuple[Any, ...] = message
    body = fixed.pack(*fields) if tail is None else fixed.pack(*fields[:-1]) + tail.write(fields[-1])
    return _HEADER.pack(len(body) + 1, kind) + body


def encode_vote(number: int, flags: int, digest: bytes, spans: Sequence[int]) -> bytes:
    """`encode(Vote(...))` in one step, for the hottest path: 26 bytes and 16 for each group."""
    count = len(spans) // 3
    length = _VOTE_LENGTH + count * _SPAN_BYTES
    return struct.pack(_VOTE + _SPAN * count, length, VOTE, number, flags, digest, *spans)


def encode_verdict(vote: int, outcome: int, flags: int = 0) -> bytes:
    """`encode(Verdict(...))` in one step."""
    return _VERDICT.pack(_VERDICT.size - _LENGTH_BYTES, VERDICT, vote, outcome, flags)


def detail_facts(
    reason: str,
    ranks: Sequence[int],
    group: Sequence[int] | None,
    span: tuple[int, int] | None,
    broken: str | None = None,
) -> bytes:
    """The facts of a `Detail`: what happened; the ranks, the group and the span that it is about; where the ranks'
    collectives differ (`_consensus.Finding`)."""
    about = {"ranks": runs(ranks), "group": group and runs(group), "span": span}
    return write_facts({"reason": reason[:MAX_REASON_BYTES], "broken": broken and broken[:MAX_REASON_BYTES], **about})


def proof(secret: str, session: str, nonces: bytes, side: str, said: bytes) -> bytes:
    """What only somebody of the session with the job's secret can make of what one side ("rank" or "coordinator") says.
    `nonces` are the coordinator's and the rank's: an old proof is worth nothing, nor is one of the other side."""
    key = hmac.digest(secret.encode(), session.encode("utf-8", "replace"), "sha256")
    return hmac.digest(key, side.encode() + nonces + said, "sha256")[:PROOF_BYTES]


def how_it_broke(error: OSError) -> str:
    """What an error of a socket means to people."""
    what = f"the connection broke: {error.strerror or error}"
    is_silent = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    return f"{what}: the network between the hosts, or that host, is down" if is_silent else what


class Decoder:
    """Takes bytes as they come and gives messages."""

    def __init__(self, kinds: frozenset[int], world_size: int = MAX_WORLD_SIZE) -> None:
        self.kinds = kinds  # what may come now; anything else ends it, undecoded
        self.world_size = world_size  # ranks from there on don't exist
        self._rest = bytearray()  # the beginning of a frame
        self._needed = 0  # bytes of it, before it is looked at again
        self._failure = ""

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that these bytes complete. Each is to be handled before the next is asked for. Raises
        HandshakeProtocolError where the bytes are not what may come now, and from then on for any."""
        if self._failure:
            raise HandshakeProtocolError(self._failure)
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
            self._rest.clear()
        start, size = 0, len(data)
        self._needed = _HEADER.size
        while size - start >= _HEADER.size:
            length, kind = _HEADER.unpack_from(data, start)
            end = start + _LENGTH_BYTES + length
            try:
                if kind not in self.kinds:
                    raise ValueError(f"it begins with {data[start : start + 16]!r}, which can't come here")
                of_class, fixed, tail = _KINDS[kind]
                least = 1 + fixed.size
                if not least <= length <= least + (0 if tail is None else tail.max_bytes):
                    raise ValueError(f"it has {length} bytes")
                if end > size:
                    self._needed = end - start
                    break
                fields = fixed.unpack_from(data, start + _HEADER.size)
                if tail is not None:
                    fields += (tail.read(data[start + _LENGTH_BYTES + least : end], self.world_size),)
            except (ValueError, struct.error, RecursionError) as error:
                self._failure = f"a malformed frame of kind {kind}: {error}"
                raise HandshakeProtocolError(self._failure) from error
            start = end
            yield of_class._make(fields)
        self._rest += data[start:]
