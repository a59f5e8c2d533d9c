# SPDX-License-Identifier: Apache-2.0
"""The words of the handshake: groups, counts, requests, stages and errors.

A *collective line* is the numbered sequence of collectives issued on one process group. A graph takes, on each of its
groups, the *span* ``[collective_count_before, collective_count_before + num_collectives_in_graph)`` of that line.
`RankCollectiveCounts` is where one rank stands on all of its lines, `CollectiveHandshakeRequest` one graph's vote.
"""

import bisect
import dataclasses
import enum
import functools
import hashlib
import json
import operator
import os
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

# torch_tpu 0.2.0 reads the second; later versions the first.
STAGE_VARIABLES = ("TORCH_TPU_INTERNAL_HANDSHAKE_STAGE", "TORCH_TPU_SPMD_HANDSHAKE_STAGE")
GROUPS_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_GROUPS"
given_group_naming: str | None = None  # as the open handshake was told; set by `handshake`
MAX_FINGERPRINT_CHARACTERS = 1024  # a digest in hex, or a few; what is longer is kept and sent as its digest
# As many as the wire has bits for. A busy server issues 2**32 collectives in less than three days, a graph never.
MAX_LINE_POSITION = 2**64 - 1
MAX_COLLECTIVES_IN_GRAPH = 2**32 - 1
DIGEST_BYTES = 16
MAX_WORLD_SIZE = 2**20  # ranks; a bound for what a peer may say
MAX_FOREIGN_GROUPS = 4096  # a job has tens; past this many, callers make new ones for each call
# Other classes' groups as ours, by the identity of their tuple of ranks, which is kept alive here: hashing 4,096 ranks
# takes longer than a vote may.
_foreign_groups: dict[int, tuple[tuple[int, ...], "ProcessGroupId"]] = {}
_MALFORMED_JSON_ERRORS = (ValueError, KeyError, TypeError, RecursionError)


class HandshakeError(RuntimeError):
    """Anything that the handshake raises. Raised as itself where no narrower class fits."""

    def __init__(
        self, message: str, *, ranks: Iterable[int] = (), group: Iterable[int] | None = None,
        span: tuple[int, int] | None = None, seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))  # those that it is about (missing, lost, refused), ascending; empty if none
        self.group = None if group is None else tuple(group)  # the ranks of the process group concerned
        self.span = span  # (start, end) on that group's collective line
        self.seconds = seconds  # how long the rank waited


class HandshakeTimeoutError(HandshakeError, TimeoutError):
    """Ranks that a vote needs did not come within `timeout_s`."""


class HandshakePeerLostError(HandshakeError, ConnectionError):
    """A rank that a vote needs, or the coordinator, is gone, or the coordinator does not answer. Where it is the
    coordinator, others may have been told True for the same vote, and have gone on: end this rank."""


class HandshakeProtocolError(HandshakeError, ValueError):
    """The other side, or a rank's sequence of votes, broke the protocol; or bytes or JSON can't be parsed."""


class HandshakeMismatchError(HandshakeError):
    """The ranks issue other collectives: they would hang or get wrong numbers (with on_mismatch="raise")."""


class HandshakeConfigError(HandshakeError, ValueError):
    """A value given by a caller, or by a variable, can't be used."""


class HandshakeTypeError(HandshakeConfigError, TypeError):
    """Something was given of a type that can't be what is wanted there."""


class HandshakeStage(enum.Enum):
    """When ranks compare their graphs: never, once when a graph is compiled, or at every dispatch."""

    OFF = "OFF"
    COMPILE_STAGE = "COMPILE_STAGE"
    DISPATCH_STAGE = "DISPATCH_STAGE"

    @classmethod
    def from_env(cls) -> "HandshakeStage":
        """The stage by `STAGE_VARIABLES`; OFF where none is set. Raises HandshakeConfigError, also where two differ."""
        named = {name: cls.parse(os.environ[name], name) for name in STAGE_VARIABLES if os.environ.get(name)}
        if len(set(named.values())) > 1:
            both = " and ".join(f"{name}={stage.name}" for name, stage in named.items())
            raise HandshakeConfigError(f"{both} are different stages; set only one of the variables")
        return next(iter(named.values()), cls.OFF)

    @classmethod
    def parse(cls, stage: Any, source: str) -> "HandshakeStage":
        """A stage; or the one of that name, in any case ("" is OFF), or that another package's enum has (an object with
        `.name`). `source`: as in `whole_number`."""
        name = str(getattr(stage, "name", stage)).strip().upper() or "OFF"
        if name in cls.__members__:
            return cls[name]
        raise HandshakeConfigError(f"{source}={stage!r} is not a valid stage; use one of {', '.join(cls.__members__)}")


def group_naming(given: str | None = None) -> str:
    """How fingerprints name process groups: "role" (by what a group is to its members) or "exact" (by its ranks). As
    given, as the open handshake was told, or as `GROUPS_VARIABLE` says; else "role". Raises HandshakeConfigError."""
    naming = given or given_group_naming or os.environ.get(GROUPS_VARIABLE) or "role"
    if naming not in ("role", "exact"):
        use = f'use "role" or "exact" for groups=, or in {GROUPS_VARIABLE}'
        raise HandshakeConfigError(f"{naming!r} is not a way to name groups; {use}")
    return naming


def whole_number(value: Any, source: str, *, least: int | None = None, text: bool = False) -> int:
    """`value` as an int: any integer, numpy's too, but not a bool; with `text` also decimal text. Anything else, or
    less than `least`, raises HandshakeConfigError, which names `source`, the keyword or variable that gave it."""
    try:
        number = int(value) if text and isinstance(value, str) else operator.index(value)
        if not isinstance(value, bool) and (least is None or number >= least):
            return number
    except (TypeError, ValueError):
        pass
    bound = "" if least is None else f" of at least {least}"
    raise HandshakeConfigError(f"{source}={shorten(repr(value))} is not a whole number{bound}")


def format_ranks(ranks: Iterable[int], most_ranges: int = 16) -> str:
    """Ranks in any order as people read them: ``rank 3``, ``ranks 0-3, 8``; past `most_ranges` they are counted."""
    members = set(ranks)
    firsts, lasts = (sorted(rank for rank in members if rank + step not in members) for step in (-1, 1))
    ranges = list(zip(firsts, lasts, strict=True))
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges[:most_ranges])
    left = sum(high - low + 1 for low, high in ranges[most_ranges:])
    text = f"{shown} and {left} more" if left else shown
    return f"{'rank' if len(members) == 1 else 'ranks'} {text}" if members else "no rank"


def shorten(text: str, most_characters: int = 120) -> str:
    """`text`, or its beginning and how long it is."""
    return text if len(text) <= most_characters else f"{text[:most_characters]}… ({len(text)} characters)"


def must_be_in_world(ranks: Sequence[int], world_size: int) -> None:
    """Raises HandshakeConfigError where the ascending ranks of a group reach outside a world."""
    if ranks[-1] >= world_size:
        text = f"rank {ranks[-1]} of a process group is outside a world of {world_size} ranks"
        raise HandshakeConfigError(text, ranks=ranks[-1:], group=ranks)


class GroupLike(Protocol):
    """Any object that names a process group by its `ranks`."""

    @property
    def ranks(self) -> Sequence[int]: ...


class ProcessGroupId:
    """A process group, named by its members: `ranks`, a tuple, strictly ascending. Immutable, hashable, a sequence of
    ranks, and equal to any object with the same `.ranks`, such as one of torch_tpu's own class of this name."""

    def __init__(self, ranks: Iterable[int], world_size: int | None = None) -> None:
        """`ranks` in any order; `world_size`, the number of ranks in the job, may be unknown. Raises HandshakeTypeError
        if they are not integers, HandshakeConfigError if one is negative, repeated or outside the world, or none."""
        try:
            given = tuple(ranks)
            if isinstance(ranks, bytes | bytearray | Mapping) or bool in map(type, given):
                raise TypeError
            self.ranks: tuple[int, ...] = tuple(sorted(map(operator.index, given)))
        except TypeError:
            shown = shorten(repr(ranks))
            raise HandshakeTypeError(f"ranks of a process group must be integers, as in [0, 1], got {shown}") from None
        if not self.ranks or self.ranks[0] < 0 or not all(map(operator.lt, self.ranks, self.ranks[1:])):
            shown = shorten(repr(list(given)))
            raise HandshakeConfigError(f"a process group needs ranks from 0 on, each once, got {shown}")
        if world_size is not None:
            world_size = whole_number(world_size, "world_size")
            must_be_in_world(self.ranks, world_size)
        self.world_size = world_size
        self._hash = hash(self.ranks)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        ranks: Any = getattr(other, "ranks", None)
        try:
            return ranks is self.ranks or self.ranks == tuple(ranks)
        except TypeError:  # it has no ranks, or what it calls so are not a group's
            return NotImplemented

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: int) -> int:
        return self.ranks[index]

    def __contains__(self, rank: int) -> bool:
        place = bisect.bisect_left(self.ranks, rank)
        return place < len(self.ranks) and self.ranks[place] == rank

    def __repr__(self) -> str:
        return f"ProcessGroupId({format_ranks(self.ranks)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (ProcessGroupId, (self.ranks, self.world_size))


def as_process_group_id(group: GroupLike) -> ProcessGroupId:
    """`group` itself, or a `ProcessGroupId` of its `.ranks`. Raises as that; HandshakeTypeError without `.ranks`."""
    if type(group) is ProcessGroupId:
        return group
    ranks = getattr(group, "ranks", None)
    if ranks is None:
        wanted = "ProcessGroupId(torch.distributed.get_process_group_ranks(group))"
        text = f"expected a process group (an object with .ranks), got {shorten(repr(group))}: pass {wanted}"
        raise HandshakeTypeError(text)
    _, known = _foreign_groups.get(id(ranks), (ranks, None))
    if known is None:
        known = ProcessGroupId(ranks)
        if isinstance(ranks, tuple):  # a list may change
            if len(_foreign_groups) >= MAX_FOREIGN_GROUPS:
                _foreign_groups.clear()
            _foreign_groups[id(ranks)] = (ranks, known)
    return known


def collectives_by_group(pg_to_num_collectives: Mapping[Any, int]) -> dict[ProcessGroupId, int]:
    """How many collectives a graph issues on each group, in our types. Groups of the same ranks are one line. Raises
    HandshakeTypeError for another type than a mapping from groups, HandshakeConfigError for an impossible number."""
    if not isinstance(pg_to_num_collectives, Mapping):
        raise HandshakeTypeError(f"not a mapping from process group to count: {shorten(repr(pg_to_num_collectives))}")
    collectives: dict[ProcessGroupId, int] = {}
    for key, number in pg_to_num_collectives.items():
        group = as_process_group_id(key)
        if type(number) is not int or number < 0:  # asked here, because to write 4,096 ranks takes long
            number = whole_number(number, f"num_collectives on {format_ranks(group)}", least=0)
        collectives[group] = collectives.get(group, 0) + number
    return collectives


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessGroupCollectiveCount:
    """Where a rank stands on one group's collective line. Raises HandshakeConfigError for an impossible number."""

    collective_count_before: int  # collectives issued on the group before this graph
    num_collectives_in_graph: int  # those that this graph issues; 0 where the group is idle in it

    def __post_init__(self) -> None:
        before, number = self.collective_count_before, self.num_collectives_in_graph
        if type(before) is type(number) is int and 0 <= before <= number + before <= MAX_COLLECTIVES_IN_GRAPH:
            return  # as nearly always; who counts by himself makes one for each vote
        before = whole_number(before, "collective_count_before", least=0)
        number = whole_number(number, "num_collectives_in_graph", least=0)
        if before + number > MAX_LINE_POSITION or number > MAX_COLLECTIVES_IN_GRAPH:
            bounds = f"at most {MAX_COLLECTIVES_IN_GRAPH} collectives, and its line ends at {MAX_LINE_POSITION}"
            raise HandshakeConfigError(f"on a group a graph has {bounds}; got {before} + {number}")
        object.__setattr__(self, "collective_count_before", before)
        object.__setattr__(self, "num_collectives_in_graph", number)

    def increment_num_collectives_in_graph(self, number_of_collectives: int) -> None:
        """Moves on to the next graph, in place, as torch_tpu's class does. Not for one in a `RankCollectiveCounts`,
        whose copies share it: there is `increment_pg_collective_counts`. Raises HandshakeConfigError."""
        moved = ProcessGroupCollectiveCount(self.end, number_of_collectives)
        object.__setattr__(self, "collective_count_before", moved.collective_count_before)
        object.__setattr__(self, "num_collectives_in_graph", moved.num_collectives_in_graph)

    @property
    def end(self) -> int:
        """The position after the span: before + in graph."""
        return self.collective_count_before + self.num_collectives_in_graph


class RankCollectiveCounts(Mapping[ProcessGroupId, ProcessGroupCollectiveCount]):
    """Where one rank stands on the collective lines of all the groups that it has used so far: a mapping from group to
    count, in which groups of any class can be looked up. Not safe for use from several threads at once."""

    def __init__(self, pg_to_count: Mapping[Any, ProcessGroupCollectiveCount] | None = None) -> None:
        """Raises HandshakeTypeError for another type, HandshakeConfigError where keys are groups of the same ranks."""
        given = {} if pg_to_count is None else pg_to_count
        if not isinstance(given, Mapping) or any(type(c) is not ProcessGroupCollectiveCount for c in given.values()):
            wanted = "a mapping from process group to ProcessGroupCollectiveCount(before, in_graph)"
            raise HandshakeTypeError(f"expected {wanted}, got {shorten(repr(given))}")
        # Copies share these two dictionaries: they are replaced, never changed.
        self._pg_to_count = {as_process_group_id(group): count for group, count in given.items()}
        self._eager: dict[ProcessGroupId, int] = {}  # of each line, how many were recorded as eager
        if len(self._pg_to_count) < len(given):
            raise HandshakeConfigError(f"a group is counted twice in {shorten(repr(given))}")

    def increment_pg_collective_counts(self, pg_to_num_collectives: Mapping[Any, int]) -> None:
        """Moves on to the next graph, with so many collectives on each group: its spans start where the last ones end.
        A known group that is not named is idle. Where this raises, as `collectives_by_group`, nothing has moved."""
        moved = dict(self._pg_to_count)
        for group, count in self.items():
            if count.num_collectives_in_graph:
                moved[group] = ProcessGroupCollectiveCount(count.end, 0)
        for group, number in collectives_by_group(pg_to_num_collectives).items():
            before = moved[group].collective_count_before if group in moved else 0
            moved[group] = ProcessGroupCollectiveCount(before, number)
        self._pg_to_count = moved

    def record_eager_collectives(self, pg: GroupLike, num_collectives: int) -> None:
        """Counts collectives issued outside any graph, without a vote. Raises as `collectives_by_group`."""
        [(group, number)] = collectives_by_group({as_process_group_id(pg): num_collectives}).items()
        end = self[group].end if group in self else 0
        self._pg_to_count = {**self._pg_to_count, group: ProcessGroupCollectiveCount(end + number, 0)}
        self._eager = {**self._eager, group: self._eager.get(group, 0) + number}

    def collective_count(self, pg: GroupLike) -> int:
        """How many collectives `pg` has seen once this graph has run: before + in graph. Raises KeyError."""
        return self[pg].end

    def matches(self, other: "RankCollectiveCounts") -> bool:
        """Whether two ranks' counts agree: on every group that surely holds both, the same span, or none on both."""
        mine = {group: count for group, count in self.items() if count.num_collectives_in_graph}
        theirs = {group: count for group, count in other.items() if count.num_collectives_in_graph}
        differing = {group for group, _ in mine.items() ^ theirs.items()}
        for counts in (self, other):
            # Surely in those that it names, and those that hold all of these: one of {0, 1} is in {0, 1, 2}.
            among = set[int].intersection(*map(set, counts)) if counts else set[int]()
            differing = {group for group in differing if group in counts or (among and among.issubset(group))}
        return not differing

    def to_json(self) -> list[dict[str, Any]]:
        """The counts as a list that `json.dumps` takes, one object a group."""
        return [{"process_group": list(group), **dataclasses.asdict(count)} for group, count in self.items()]

    @classmethod
    def from_json(cls, data: str | list[dict[str, Any]]) -> "RankCollectiveCounts":
        """The counts that `to_json` gave, as that list or as its text. Raises HandshakeProtocolError."""
        try:
            items = json.loads(data) if isinstance(data, str) else data
            names = ("process_group", "collective_count_before", "num_collectives_in_graph")
            rows = [[item[name] for name in names] for item in items]
            counts = {ProcessGroupId(ranks): ProcessGroupCollectiveCount(*numbers) for ranks, *numbers in rows}
            if len(counts) < len(rows):
                raise ValueError("a group is counted twice")
            return cls(counts)
        except _MALFORMED_JSON_ERRORS as error:
            raise HandshakeProtocolError(f"not the JSON of collective counts: {error}") from error

    def __getitem__(self, pg: GroupLike) -> ProcessGroupCollectiveCount:
        return self._pg_to_count[as_process_group_id(pg)]

    def __contains__(self, pg: object) -> bool:
        return hasattr(pg, "ranks") and as_process_group_id(pg) in self._pg_to_count

    def __len__(self) -> int:
        return len(self._pg_to_count)

    def __iter__(self) -> Iterator[ProcessGroupId]:
        return iter(self._pg_to_count)

    def items(self) -> ItemsView[ProcessGroupId, ProcessGroupCollectiveCount]:
        return self._pg_to_count.items()  # Mapping's own looks each key up again

    def __copy__(self, memo: object = None) -> "RankCollectiveCounts":
        copied = RankCollectiveCounts()
        copied._pg_to_count, copied._eager = self._pg_to_count, self._eager
        return copied

    __deepcopy__ = __copy__

    def __repr__(self) -> str:
        return f"RankCollectiveCounts({self._pg_to_count!r})"


@functools.lru_cache(maxsize=4096)  # the graphs that a process dispatches over and over
def fingerprint_digest(fingerprint: str) -> bytes:
    """The bytes that stand for `fingerprint` on the wire, `DIGEST_BYTES`; 32 lowercase hex digits are their own."""
    if len(fingerprint) == 2 * DIGEST_BYTES and set("0123456789abcdef").issuperset(fingerprint):
        return bytes.fromhex(fingerprint)
    return _digest(fingerprint.encode("utf-8", "surrogatepass"))


def graph_name(fingerprint: str, label: str | None) -> str:
    """How messages name a graph: by its label, if it has one, and its fingerprint; a digest by how it begins."""
    shown = fingerprint if len(fingerprint) < 2 * DIGEST_BYTES else f"{fingerprint[:12]}…"
    return shown if label is None else f'"{shorten(label)}" ({shown})'


def usable_fingerprint(fingerprint: Any, ranks: Sequence[int] = ()) -> str:
    """`fingerprint`, or its digest if it is long. Raises HandshakeConfigError if it can't be one."""
    if not isinstance(fingerprint, str) or not fingerprint:
        text = f"executable_fingerprint must be a string that is not empty, got {shorten(repr(fingerprint))}"
        raise HandshakeConfigError(text, ranks=ranks)
    if len(fingerprint) <= MAX_FINGERPRINT_CHARACTERS:
        return fingerprint
    return _digest(fingerprint.encode("utf-8", "surrogatepass")).hex()


def digest_with_facts(digest: bytes, facts: str | bytes) -> bytes:
    """The digest of a fingerprint together with facts of one dispatch. Raises HandshakeTypeError."""
    if not isinstance(facts, str | bytes):
        raise HandshakeTypeError(f"facts of a vote must be a short text or bytes, got {shorten(repr(facts))}")
    return _digest_with_facts(digest, facts)


@functools.lru_cache(maxsize=4096)
def _digest_with_facts(digest: bytes, facts: str | bytes) -> bytes:
    return _digest(digest + (facts if isinstance(facts, bytes) else facts.encode("utf-8", "surrogatepass")))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclasses.dataclass
class CollectiveHandshakeRequest:
    """One graph's vote. Raises HandshakeConfigError for an unusable fingerprint or rank, or where there is no group, or
    one with collectives in this graph does not hold the rank; HandshakeTypeError for counts of another type."""

    pg_collective_counts: RankCollectiveCounts  # where the rank stands, this graph's spans included
    executable_fingerprint: str  # equal on two ranks exactly when their programs are
    rank: int  # the one that votes

    def __post_init__(self) -> None:
        if not isinstance(self.pg_collective_counts, RankCollectiveCounts):
            self.pg_collective_counts = RankCollectiveCounts(self.pg_collective_counts)
        rank = self.rank = whole_number(self.rank, "rank", least=0)
        self.executable_fingerprint = usable_fingerprint(self.executable_fingerprint, ranks=[rank])
        if not self.pg_collective_counts:
            raise HandshakeConfigError("a request needs at least one process group", ranks=[rank])
        for group in self.participating_groups:
            if rank not in group:
                text = f"rank {rank} votes on a group that it is not in ({format_ranks(group)})"
                raise HandshakeConfigError(text, ranks=[rank], group=group)

    @property
    def participating_groups(self) -> list[ProcessGroupId]:
        """The groups on which this graph has collectives."""
        return [group for group, count in self.pg_collective_counts.items() if count.num_collectives_in_graph]

    @property
    def participating_ranks(self) -> list[int]:
        """The ranks that this graph's collectives meet, ascending: the members of those groups."""
        return sorted(set[int]().union(*self.participating_groups))

    def to_bytes(self) -> bytes:
        """The request as JSON in UTF-8, whole and self-contained. (On the wire it is a frame of `_protocol`.)"""
        return json.dumps({**vars(self), "pg_collective_counts": self.pg_collective_counts.to_json()}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "CollectiveHandshakeRequest":
        """The request that `to_bytes` gave. Raises HandshakeProtocolError for anything else."""
        try:
            fields = json.loads(data)
            counts = RankCollectiveCounts.from_json(fields["pg_collective_counts"])
            return cls(counts, fields["executable_fingerprint"], fields["rank"])
        except _MALFORMED_JSON_ERRORS as error:
            raise HandshakeProtocolError(f"not a handshake request: {error}") from error


@dataclasses.dataclass(frozen=True)
class CollectiveHandshakeResponse:
    """The answer to a request: `success` is True for fat (all ranks involved agree), False for skinny."""

    success: bool

    def to_bytes(self) -> bytes:
        """One byte, 1 or 0."""
        return b"\x01" if self.success else b"\x00"

    @classmethod
    def from_bytes(cls, data: bytes) -> "CollectiveHandshakeResponse":
        """The response that `to_bytes` gave. Raises HandshakeProtocolError for anything else."""
        if data not in (b"\x00", b"\x01"):
            raise HandshakeProtocolError(f"not a handshake response: {shorten(repr(data))}")
        return cls(data == b"\x01")
