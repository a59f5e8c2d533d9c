# SPDX-License-Identifier: Apache-2.0
"""The words of the handshake: groups, counts, requests, stages and errors.

Every other module speaks in these types; this one imports none of them, and nothing outside
the standard library.

A *collective line* is the numbered sequence of collectives issued on one process group. A graph takes,
on each of its groups, the *span* ``[collective_count_before, collective_count_before +
num_collectives_in_graph)`` of that group's line. `RankCollectiveCounts` is where one rank stands on all of
its lines; `CollectiveHandshakeRequest` is one graph's vote.
"""

import bisect
import enum
import functools
import hashlib
import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

STAGE_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_STAGE"
GROUPS_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_GROUPS"

# A fingerprint is a digest in hex, or at most a short compound of some; more is a mistake of the caller's
# (a whole graph passed where its fingerprint belongs).
MAX_FINGERPRINT_CHARACTERS = 1024

# A collective line is numbered with 64 bits on the wire: 32 are used up by a server that dispatches 200 collectives a
# hundred times a second in less than three days. How many of them are one graph's, with 32.
MAX_LINE_POSITION = 2**64 - 1
MAX_COLLECTIVES_IN_GRAPH = 2**32 - 1

DIGEST_BYTES = 16

_LOWERCASE_HEX = frozenset("0123456789abcdef")


class HandshakeError(RuntimeError):
    """Anything that the handshake raises. Raised as itself where no narrower class fits.

    Attributes:
        ranks: the ranks that the error is about (missing, lost, refused), sorted; empty if none.
        group: the ranks of the process group concerned, or None.
        span: `(start, end)` on that group's collective line, or None.
        seconds: how long the rank waited, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Iterable[int] = (),
        group: Iterable[int] | None = None,
        span: tuple[int, int] | None = None,
        seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))
        self.group = None if group is None else tuple(group)
        self.span = span
        self.seconds = seconds


class HandshakeTimeoutError(HandshakeError, TimeoutError):
    """Ranks that a vote needs did not come within `timeout_s`."""


class HandshakePeerLostError(HandshakeError, ConnectionError):
    """A rank that a vote needs, or the coordinator, is gone."""


class HandshakeProtocolError(HandshakeError):
    """The other side, or a rank's sequence of votes, broke the protocol."""


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
        """The stage that ``TORCH_TPU_INTERNAL_HANDSHAKE_STAGE`` names; OFF where it is unset or empty.

        Raises:
            HandshakeConfigError: the variable names no stage.
        """
        return cls.parse(os.environ.get(STAGE_VARIABLE, ""), STAGE_VARIABLE)

    @classmethod
    def parse(cls, name: str, source: str) -> "HandshakeStage":
        """The stage called `name`, upper or lower case; `source` is what an error says to correct."""
        if not name.strip():
            return cls.OFF
        try:
            return cls[name.strip().upper()]
        except KeyError:
            choices = ", ".join(stage.name for stage in cls)
            raise HandshakeConfigError(f"{source}={name!r} is no stage; set it to one of {choices}") from None


def group_naming(given: str | None = None) -> str:
    """How fingerprints name groups: "role" or "exact"; as given, else as the variable says, else "role".

    Raises:
        HandshakeConfigError: it is neither.
    """
    naming = given if given is not None else os.environ.get(GROUPS_VARIABLE) or "role"
    if naming not in ("exact", "role"):
        source = GROUPS_VARIABLE if given is None else "groups"
        raise HandshakeConfigError(f"{source}={naming!r} is not a way to name groups; use one of exact, role")
    return naming


def whole_number(value: Any, source: str, *, text: bool = False) -> int:
    """`value` as an int: whatever Python takes as an index, numpy's integers included, but no bool.

    Args:
        value: what was given.
        source: the keyword or variable that gave it, for the error.
        text: whether decimal text is taken too, as variables hold it.

    Raises:
        HandshakeConfigError: it is no whole number.
    """
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return int(value) if text and isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        pass
    raise HandshakeConfigError(f"{source}={shorten(repr(value))} is no whole number")


def format_ranks(ranks: Iterable[int], most_ranges: int = 16) -> str:
    """Ranks as people read them: ``rank 3``, ``ranks 0-3, 8``.

    Args:
        ranks: any ranks, in any order; duplicates count once.
        most_ranges: how many ranges are written before the rest is only counted.
    """
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    ranges: list[list[int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in ranges[:most_ranges]]
    left = sum(high - low + 1 for low, high in ranges[most_ranges:])
    text = ", ".join(shown) + (f" and {left} more" if left else "")
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text}"


def must_be_in_world(ranks: Sequence[int], world_size: int) -> None:
    """Refuses the ascending ranks of a process group that reach outside a world.

    Raises:
        HandshakeConfigError: as said.
    """
    if ranks[-1] >= world_size:
        raise HandshakeConfigError(
            f"rank {ranks[-1]} of a process group is outside a world of {world_size} ranks",
            ranks=[ranks[-1]],
            group=ranks,
        )


class ProcessGroupId:
    """A process group, named by its members.

    Hashable and immutable; equal to any object whose `.ranks` are the same, torch_tpu's own class of this name
    included.

    Attributes:
        ranks: the members' global ranks, a tuple, strictly ascending.
        world_size: the number of ranks in the job, if it was given.
    """

    __slots__ = ("_hash", "ranks", "world_size")

    def __init__(self, ranks: Sequence[int], world_size: int | None = None) -> None:
        """
        Raises:
            HandshakeTypeError: `ranks` is no sequence of integers.
            HandshakeConfigError: `ranks` is empty, negative, unsorted, has duplicates, or reaches outside a world of
                `world_size` ranks, or that is no world.
        """
        try:
            given = tuple(ranks)
            members = tuple(map(operator.index, given))
            # Of booleans no more than two can be in ascending order.
            if isinstance(ranks, bytes | bytearray | Mapping) or bool in map(type, given[:2]):
                raise TypeError
        except TypeError:
            raise HandshakeTypeError(
                f"ranks of a process group must be integers, as in [0, 1], got {shorten(repr(ranks))}"
            ) from None
        if not members:
            raise HandshakeConfigError("a process group needs at least one rank")
        if members[0] < 0:
            raise HandshakeConfigError(f"rank {members[0]} of a process group is negative")
        if not all(map(operator.lt, members, members[1:])):
            raise HandshakeConfigError(
                "ranks of a process group must be unique and in ascending order, "
                f"got {shorten(repr(list(members)))}: pass sorted(set(ranks))"
            )
        if world_size is not None:
            world_size = whole_number(world_size, "world_size")
            if world_size < 1:
                raise HandshakeConfigError(f"world_size must be at least 1, got {world_size}")
            must_be_in_world(members, world_size)
        self.ranks: tuple[int, ...] = members
        self.world_size = world_size
        self._hash = hash(members)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        ranks = getattr(other, "ranks", None)
        if ranks is None:
            return NotImplemented
        try:
            return bool(self.ranks == (ranks if isinstance(ranks, tuple) else tuple(ranks)))
        except TypeError:  # what it calls its ranks is none of a group's
            return NotImplemented

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: int) -> int:
        return self.ranks[index]

    def __contains__(self, rank: object) -> bool:
        try:
            rank = whole_number(rank, "rank")
        except HandshakeConfigError:
            return False
        place = bisect.bisect_left(self.ranks, rank)
        return place < len(self.ranks) and self.ranks[place] == rank

    def __repr__(self) -> str:
        return f"ProcessGroupId({format_ranks(self.ranks)})"

    def __copy__(self) -> "ProcessGroupId":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessGroupId":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (ProcessGroupId, (self.ranks, self.world_size))


class GroupLike(Protocol):
    """Any object that names a process group by its `ranks`."""

    @property
    def ranks(self) -> Sequence[int]: ...


# Other classes' groups that were turned into ours, by the identity of their tuple of ranks, which is kept alive
# here so that its identity stays its own. Hashing 4,096 ranks takes longer than a whole vote may.
_FOREIGN_GROUPS: dict[int, tuple[tuple[int, ...], ProcessGroupId]] = {}
# A job has tens of groups; past this many the callers make new objects for every call, and caching is of no use.
_MAX_FOREIGN_GROUPS = 4096


def as_process_group_id(group: GroupLike) -> ProcessGroupId:
    """`group` as a `ProcessGroupId`: itself, or made from its `.ranks`.

    Raises:
        HandshakeTypeError: `group` has no `.ranks`, or none that are integers.
        HandshakeConfigError: its `.ranks` make no group.
    """
    if type(group) is ProcessGroupId:
        return group
    ranks = getattr(group, "ranks", None)
    if ranks is None:
        raise HandshakeTypeError(
            f"expected a process group by its ranks (an object with .ranks), got {shorten(repr(group))}: pass "
            f"ProcessGroupId(ranks), and for a group of torch.distributed's "
            f"ProcessGroupId(torch.distributed.get_process_group_ranks(group))"
        )
    known = _FOREIGN_GROUPS.get(id(ranks))
    if known is not None:
        return known[1]
    made = ProcessGroupId(ranks)
    if isinstance(ranks, tuple):
        if len(_FOREIGN_GROUPS) >= _MAX_FOREIGN_GROUPS:
            _FOREIGN_GROUPS.clear()
        _FOREIGN_GROUPS[id(ranks)] = (ranks, made)
    return made


def _items_by_group(mapping: Mapping[Any, Any]) -> list[tuple[ProcessGroupId, Any]]:
    if not isinstance(mapping, Mapping):
        raise HandshakeTypeError(f"expected a mapping from process group to count, got {shorten(repr(mapping))}")
    return [(as_process_group_id(group), value) for group, value in mapping.items()]


def collectives_by_group(pg_to_num_collectives: Mapping[Any, int]) -> dict[ProcessGroupId, int]:
    """How many collectives a graph issues on each group, in our types. Groups of the same ranks are added up: they
    are one line.

    Raises:
        HandshakeTypeError: that is no mapping, or a key is no group.
        HandshakeConfigError: a count is no non-negative integer.
    """
    collectives: dict[ProcessGroupId, int] = {}
    for group, number in _items_by_group(pg_to_num_collectives):
        if type(number) is not int:
            number = whole_number(number, f"num_collectives on {format_ranks(group)}")
        if number < 0:
            raise HandshakeConfigError(f"num_collectives={number} on {format_ranks(group)} is negative")
        collectives[group] = collectives.get(group, 0) + number
    return collectives


class ProcessGroupCollectiveCount:
    """Where a rank stands on one group's collective line. Immutable.

    Attributes:
        collective_count_before: collectives issued on the group before this graph.
        num_collectives_in_graph: collectives that this graph issues on the group; 0 where the group is idle in it.
    """

    __slots__ = ("collective_count_before", "num_collectives_in_graph")

    def __init__(self, collective_count_before: int, num_collectives_in_graph: int) -> None:
        """
        Raises:
            HandshakeConfigError: a count is negative, no integer, past `MAX_LINE_POSITION`, or of more than
                `MAX_COLLECTIVES_IN_GRAPH`.
        """
        collective_count_before = whole_number(collective_count_before, "collective_count_before")
        num_collectives_in_graph = whole_number(num_collectives_in_graph, "num_collectives_in_graph")
        if collective_count_before < 0 or num_collectives_in_graph < 0:
            raise HandshakeConfigError(
                f"counts must not be negative, got {collective_count_before} and {num_collectives_in_graph}"
            )
        if collective_count_before + num_collectives_in_graph > MAX_LINE_POSITION:
            raise HandshakeConfigError(
                f"a collective line ends at {MAX_LINE_POSITION}, "
                f"got {collective_count_before} + {num_collectives_in_graph}"
            )
        if num_collectives_in_graph > MAX_COLLECTIVES_IN_GRAPH:
            raise HandshakeConfigError(
                f"a graph has at most {MAX_COLLECTIVES_IN_GRAPH} collectives on a group, got {num_collectives_in_graph}"
            )
        self.collective_count_before = collective_count_before
        self.num_collectives_in_graph = num_collectives_in_graph

    @property
    def end(self) -> int:
        """The position after the span: before + in graph."""
        return self.collective_count_before + self.num_collectives_in_graph

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessGroupCollectiveCount):
            return NotImplemented
        return (
            self.collective_count_before == other.collective_count_before
            and self.num_collectives_in_graph == other.num_collectives_in_graph
        )

    def __hash__(self) -> int:
        return hash((self.collective_count_before, self.num_collectives_in_graph))

    def __repr__(self) -> str:
        return f"ProcessGroupCollectiveCount({self.collective_count_before}, {self.num_collectives_in_graph})"


class RankCollectiveCounts(Mapping[ProcessGroupId, ProcessGroupCollectiveCount]):
    """Where one rank stands on the collective lines of all the groups that it has used so far.

    A mapping from group to count. Not safe for use from several threads at once: its owner holds a lock around
    `increment_pg_collective_counts` and the copy that goes into a request. Copies are cheap: groups and counts are
    immutable and shared.
    """

    __slots__ = ("_eager", "_pg_to_count")

    def __init__(self, pg_to_count: Mapping[Any, ProcessGroupCollectiveCount] | None = None) -> None:
        """
        Raises:
            HandshakeTypeError: that is no mapping, a key is no group, or a value no ProcessGroupCollectiveCount.
            HandshakeConfigError: two keys are groups of the same ranks.
        """
        self._pg_to_count: dict[ProcessGroupId, ProcessGroupCollectiveCount] = {}
        self._eager: dict[ProcessGroupId, int] = {}
        for group, count in () if pg_to_count is None else _items_by_group(pg_to_count):
            if not isinstance(count, ProcessGroupCollectiveCount):
                raise HandshakeTypeError(
                    f"the count of {format_ranks(group)} must be ProcessGroupCollectiveCount(before, in_graph), "
                    f"got {shorten(repr(count))}",
                    group=group.ranks,
                )
            if group in self._pg_to_count:
                raise HandshakeConfigError(f"{format_ranks(group)} are counted twice", group=group.ranks)
            self._pg_to_count[group] = count

    def increment_pg_collective_counts(self, pg_to_num_collectives: Mapping[Any, int]) -> None:
        """Moves on to the next graph: every known group's span ends where the new one starts.

        Args:
            pg_to_num_collectives: how many collectives the next graph issues on each group. A known group that is
                not named is idle in it.

        Raises:
            HandshakeConfigError: as `collectives_by_group`, or a line is too long. Nothing has moved then.
        """
        moved = {
            group: count if not count.num_collectives_in_graph else ProcessGroupCollectiveCount(count.end, 0)
            for group, count in self._pg_to_count.items()
        }
        for group, num_collectives in collectives_by_group(pg_to_num_collectives).items():
            known = moved.get(group)
            before = 0 if known is None else known.collective_count_before
            moved[group] = ProcessGroupCollectiveCount(before, num_collectives)
        self._pg_to_count = moved

    def record_eager_collectives(self, pg: GroupLike, num_collectives: int) -> None:
        """Counts collectives that were issued on `pg` outside any graph: the line moves, nobody votes.

        Raises:
            HandshakeConfigError: `num_collectives` is no non-negative integer, or `pg` is no group.
        """
        group = as_process_group_id(pg)
        number = collectives_by_group({group: num_collectives})[group]
        known = self._pg_to_count.get(group)
        self._pg_to_count[group] = ProcessGroupCollectiveCount((0 if known is None else known.end) + number, 0)
        self._eager[group] = self._eager.get(group, 0) + number

    def collective_count(self, pg: GroupLike) -> int:
        """How many collectives `pg` has seen once this graph has run: before + in graph.

        Raises:
            KeyError: the group is not known.
        """
        return self[as_process_group_id(pg)].end

    def matches(self, other: "RankCollectiveCounts") -> bool:
        """Whether two ranks' counts agree: on every group that both belong to, the same span, or none on both.

        A group that only one side names counts against the match if it has a span there and the other side's rank
        surely belongs to it (as a rank of {0, 1} surely belongs to {0, 1, 2}).
        """
        if not all(
            count == other[group] or not (count.num_collectives_in_graph or other[group].num_collectives_in_graph)
            for group, count in self.items()
            if group in other
        ):
            return False
        return not (self._lacks_a_group_of(other) or other._lacks_a_group_of(self))

    def _lacks_a_group_of(self, other: "RankCollectiveCounts") -> bool:
        missing = [g for g, count in other.items() if count.num_collectives_in_graph and g not in self]
        if not missing or not self._pg_to_count:
            return False
        could_be_self = set.intersection(*(set(group.ranks) for group in self._pg_to_count))
        return any(could_be_self.issubset(group.ranks) for group in missing)

    def to_json(self) -> list[dict[str, Any]]:
        """The counts as a list that `json.dumps` takes, one object a group."""
        return [
            {
                "process_group": list(group.ranks),
                "collective_count_before": count.collective_count_before,
                "num_collectives_in_graph": count.num_collectives_in_graph,
            }
            for group, count in self._pg_to_count.items()
        ]

    @classmethod
    def from_json(cls, data: str | list[dict[str, Any]]) -> "RankCollectiveCounts":
        """The counts that `to_json` gave, as that list or as its JSON text.

        Raises:
            HandshakeProtocolError: `data` is no such list.
        """
        try:
            items = json.loads(data) if isinstance(data, str) else data
            counts = {
                ProcessGroupId(item["process_group"]): ProcessGroupCollectiveCount(
                    item["collective_count_before"], item["num_collectives_in_graph"]
                )
                for item in items
            }
            if len(counts) < len(items):
                raise ValueError("a group is counted twice")
            return cls(counts)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise HandshakeProtocolError(f"not the JSON of collective counts: {error}") from error

    def __getitem__(self, pg: GroupLike) -> ProcessGroupCollectiveCount:
        return self._pg_to_count[as_process_group_id(pg)]

    def __contains__(self, pg: object) -> bool:
        return hasattr(pg, "ranks") and as_process_group_id(pg) in self._pg_to_count

    def __len__(self) -> int:
        return len(self._pg_to_count)

    def __iter__(self) -> Iterator[ProcessGroupId]:
        return iter(self._pg_to_count)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankCollectiveCounts):
            return NotImplemented
        return self._pg_to_count == other._pg_to_count

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __copy__(self) -> "RankCollectiveCounts":
        copied = RankCollectiveCounts()
        copied._pg_to_count = dict(self._pg_to_count)
        copied._eager = dict(self._eager)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankCollectiveCounts":
        return self.__copy__()

    def __repr__(self) -> str:
        return f"RankCollectiveCounts({self._pg_to_count!r})"


@functools.lru_cache(maxsize=4096)  # the graphs that a process dispatches over and over
def fingerprint_digest(fingerprint: str) -> bytes:
    """The `DIGEST_BYTES` bytes that stand for `fingerprint` on the wire.

    A fingerprint that is 32 lower-case hex digits, as `graph_fingerprint` gives, is its own digest, so that logs on
    both sides show the same text.
    """
    if len(fingerprint) == 2 * DIGEST_BYTES and _LOWERCASE_HEX.issuperset(fingerprint):
        return bytes.fromhex(fingerprint)
    return hashlib.blake2b(fingerprint.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


class CollectiveHandshakeRequest:
    """One graph's vote: where its rank stands, and what it is about to run.

    Attributes:
        pg_collective_counts: the rank's counts, this graph's spans included.
        executable_fingerprint: equal on two ranks exactly when their programs are.
        rank: the rank that votes.
    """

    def __init__(
        self, pg_collective_counts: RankCollectiveCounts, executable_fingerprint: str, rank: int
    ) -> None:
        """
        Raises:
            HandshakeTypeError: the counts are no mapping from group to count.
            HandshakeConfigError: the fingerprint is empty, over-long or no string; the rank is negative or no
                integer; there is no group; or a group with collectives in this graph does not hold the rank.
        """
        if not isinstance(pg_collective_counts, RankCollectiveCounts):
            pg_collective_counts = RankCollectiveCounts(pg_collective_counts)
        rank = whole_number(rank, "rank")
        if rank < 0:
            raise HandshakeConfigError(f"rank={rank} is negative")
        if not isinstance(executable_fingerprint, str) or not executable_fingerprint:
            raise HandshakeConfigError(
                f"executable_fingerprint must be a string that is not empty, got "
                f"{shorten(repr(executable_fingerprint))}",
                ranks=[rank],
            )
        if len(executable_fingerprint) > MAX_FINGERPRINT_CHARACTERS:
            raise HandshakeConfigError(
                f"executable_fingerprint has {len(executable_fingerprint)} characters, at most "
                f"{MAX_FINGERPRINT_CHARACTERS} are allowed: pass executable_fingerprint(text), its digest",
                ranks=[rank],
            )
        if not pg_collective_counts:
            raise HandshakeConfigError("a request needs at least one process group", ranks=[rank])
        for group, count in pg_collective_counts._pg_to_count.items():
            if count.num_collectives_in_graph and rank not in group:
                raise HandshakeConfigError(
                    f"rank {rank} votes on a group that it is not in ({format_ranks(group)})",
                    ranks=[rank],
                    group=group.ranks,
                )
        self.pg_collective_counts = pg_collective_counts
        self.executable_fingerprint = executable_fingerprint
        self.rank = rank

    @functools.cached_property
    def participating_ranks(self) -> list[int]:
        """The ranks that this graph's collectives meet, sorted: the members of its groups that are not idle."""
        meets: set[int] = set()
        for group, count in self.pg_collective_counts.items():
            if count.num_collectives_in_graph:
                meets.update(group.ranks)
        return sorted(meets)

    def to_bytes(self) -> bytes:
        """The request as JSON in UTF-8, whole and self-contained (on the wire it is 28 + 16 bytes a group)."""
        return json.dumps(
            {
                "rank": self.rank,
                "executable_fingerprint": self.executable_fingerprint,
                "pg_collective_counts": self.pg_collective_counts.to_json(),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "CollectiveHandshakeRequest":
        """The request that `to_bytes` gave.

        Raises:
            HandshakeProtocolError: `data` is no such request.
        """
        try:
            fields = json.loads(data)
            return cls(
                RankCollectiveCounts.from_json(fields["pg_collective_counts"]),
                fields["executable_fingerprint"],
                fields["rank"],
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise HandshakeProtocolError(f"not a handshake request: {error}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CollectiveHandshakeRequest):
            return NotImplemented
        return (
            self.rank == other.rank
            and self.executable_fingerprint == other.executable_fingerprint
            and self.pg_collective_counts == other.pg_collective_counts
        )

    __hash__ = None  # type: ignore[assignment]  # its counts are mutable

    def __repr__(self) -> str:
        return (
            f"CollectiveHandshakeRequest(rank={self.rank}, "
            f"executable_fingerprint={shorten(self.executable_fingerprint)!r}, {self.pg_collective_counts!r})"
        )


class CollectiveHandshakeResponse:
    """The answer to a request.

    Attributes:
        success: True for fat (all ranks involved agree), False for skinny.
    """

    __slots__ = ("success",)

    def __init__(self, success: bool) -> None:
        self.success = success

    def to_bytes(self) -> bytes:
        """One byte, 1 or 0."""
        return b"\x01" if self.success else b"\x00"

    @classmethod
    def from_bytes(cls, data: bytes) -> "CollectiveHandshakeResponse":
        """The response that `to_bytes` gave.

        Raises:
            HandshakeProtocolError: `data` is no such byte.
        """
        if data not in (b"\x00", b"\x01"):
            raise HandshakeProtocolError(f"not a handshake response: {shorten(repr(data))}")
        return cls(data == b"\x01")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CollectiveHandshakeResponse):
            return NotImplemented
        return self.success == other.success

    def __hash__(self) -> int:
        return hash(self.success)

    def __repr__(self) -> str:
        return f"CollectiveHandshakeResponse({self.success})"


def shorten(text: str, most_characters: int = 120) -> str:
    """`text`, or its beginning and how long it is."""
    return text if len(text) <= most_characters else f"{text[:most_characters]}… ({len(text)} characters)"
