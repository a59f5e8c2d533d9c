# SPDX-License-Identifier: Apache-2.0
"""Keeps fat what ranks have in common, when their graphs differ.

After a split one rank of the component, the reference, shares the keys of its nodes (`node_keys`). From then on the
ranks speak of *places*: a place is a position in the reference's graph. Four steps lead to a plan:

1. `match`: each rank aligns its own nodes with the reference's. Nodes match when their own content is equal and they
   read values that correspond. Where the order of independent nodes is all that differs, a rank takes the reference's
   order for its own (`follow`). The places that matched on every rank are the *common* ones.
2. `constraints`: given the common places, each rank says before which of them it has to run something of its own, and
   which of their values something of its own reads. The union over the ranks binds everybody.
3. `make_segments`: both steps ended with what all ranks know alike, so all cut alike. Common places that no cut parts
   make a *run*. A run with collectives and something to overlap them with becomes a **fat** segment. What else a rank
   has stays where it was, around the fat ones: each collective in a **skinny** segment of its own, the rest **local**.
4. Each rank splits its graph by the plan, and only then the ranks compare its fingerprint: what each fat segment holds,
   read from this rank's own graph, with its boundary and its place on the groups' collective lines. A mistake in the
   steps above makes fingerprints differ, and then the whole graph runs skinny, as where a step fails on any rank.

No collective ever changes its place among this rank's collectives, so a plan keeps the order that the user's program
has. Nothing moves but these: a wait goes up to its collective; a `getitem` goes up to the node whose result it takes
apart; a node without effect goes where the reference has it, or, if it reads only inputs or only this rank's outputs
need it, before the first or after the last segment instead of cutting one. None goes past what it reads or is read by,
nor past a mutation or a change of autocast or grad mode.

Needs torch, which is imported inside the functions.
"""

import array
import contextlib
import copy
import hashlib
import heapq
import logging
import operator
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if __package__:
    from ._align import align
    from ._vocabulary import HandshakeConfigError, HandshakeError, HandshakeTypeError
else:
    from _align import align
    from _vocabulary import HandshakeConfigError, HandshakeError, HandshakeTypeError

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("torch_tpu.handshake")

FAT, LOCAL, SKINNY = "fat", "local", "skinny"

# Bounds on the keys that a rank takes from another. A graph of a large model has some 10,000 nodes of 2 inputs.
MAX_NODES = 1_000_000
MAX_MEAN_INPUTS = 16

_KEY_BYTES = 8
_NO_KEY = bytes(_KEY_BYTES)  # of a node that takes no part: placeholder, get_attr, output
_KEYS_HEADER = struct.Struct("!I")

# Plans that are kept of one graph, the oldest ones go. One more is made for each set of graphs that the other ranks
# run beside it; each holds programs.
MAX_PLANS = 16

# What a fat segment must have beside its collectives, for there to be something to overlap them with.
_LEAST_NEIGHBOURS = 1


class PlanError(HandshakeError):
    """What another rank sent can't be keys or bits of this exchange, or a graph can't be planned."""


@runtime_checkable
class PlanRounds(Protocol):
    """The rounds of a split component, as `handshake.Exchange` gives them; None: called off, go skinny.

    `is_undecided` is True once `agree` has raised: nobody knows what the others run.
    """

    @property
    def rank(self) -> int: ...
    @property
    def is_undecided(self) -> bool: ...
    def reference_rank(self) -> int | None: ...
    def share(self, payload: bytes | None) -> bytes | None: ...
    def intersect(self, bitmap: bytes) -> bytes | None: ...
    def agree(self, fingerprint: str) -> bool: ...
    def abort(self, reason: str) -> None: ...


class Segment(NamedTuple):
    """Nodes that are compiled together.

    Attributes:
        kind: `FAT`, `LOCAL` or `SKINNY`.
        positions: the nodes' positions in this rank's graph, in the order in which they run.
        outputs: of a fat segment, the positions of the values that leave it, the same ones on every rank, whether this
            rank reads them or not. Empty for the others: what leaves them is what is read.
        num_collectives: how many collectives it issues.
    """

    kind: str
    positions: tuple[int, ...]
    outputs: tuple[int, ...]
    num_collectives: int


class Plan:
    """How one rank runs its graph after a split.

    Attributes:
        segments: in the order in which they run; every node but placeholders, get_attr and output is in one.
        fingerprint: 32 lowercase hex; equal on two ranks when their fat segments are the same programs at the same
            places of the same collective lines.
        program: the graph as one that calls a submodule for each segment, named ``fat_0``, ``local_1``, ``skinny_2`` …
            Each returns a tuple; that of a fat segment holds the values that the segment names, in its order, on every
            rank. It runs as it is; parameters, buffers and nested bodies are shared with the graph.
        compiled: None, and the caller's to set: what it made of `program`. An `OwnGraph` gives the same plan again for
            the same segments, so that each is compiled once.
    """

    __slots__ = ("compiled", "fingerprint", "program", "segments")

    def __init__(self, segments: tuple[Segment, ...], fingerprint: str, program: "torch.fx.GraphModule") -> None:
        self.segments = segments
        self.fingerprint = fingerprint
        self.program = program
        self.compiled: Any = None

    @property
    def num_fat_collectives(self) -> int:
        """How many collectives lie in fat segments."""
        return sum(segment.num_collectives for segment in self.segments if segment.kind == FAT)


class Reference(NamedTuple):
    """What the reference rank told of its graph, one item a place.

    Attributes:
        keys: content without references (8 bytes); `_NO_KEY` for a node that takes no part.
        leaders: the place of the node that this one stays with (its own, mostly).
        inputs: the places that it reads.
    """

    keys: list[bytes]
    leaders: list[int]
    inputs: list[tuple[int, ...]]


class OwnGraph:
    """This rank's graph, as the steps need it; one item a node in each list, in graph order. The graph must not change.

    Attributes:
        keys, leaders, inputs: as in `Reference`, by position.
        collectives: per group, how many collectives the node issues (nested bodies counted); empty for most.
        pinned: True for a node with an effect, which keeps its place among the others with one.
        barriers: True for a node that nothing may be moved across: a mutation, a change of autocast or grad mode.
        describe: what one value is (shape, stride, dtype, …), as text, by position.
        modes: of each node that changes autocast or grad mode, the entries into modes that are in force after it.
        order: where in the graph each node is: its position, unless `in_order` made this.
    """

    __slots__ = (
        *("_graph_module", "_nodes", "_plans"),
        *("barriers", "collectives", "describe", "inputs", "keys", "leaders", "modes", "order", "pinned"),
    )

    def __init__(self, graph_module: "torch.fx.GraphModule", groups: str = "exact") -> None:
        """
        Args:
            graph_module: what this rank votes on.
            groups: "exact" or "role", as in the fingerprint of the vote.

        Raises:
            HandshakeError: the graph can't be hashed, or a collective's group can't be resolved.
        """
        import torch

        if __package__:
            from . import _graph
        else:
            import _graph
        if not isinstance(graph_module, torch.fx.GraphModule):
            raise HandshakeTypeError(f"expected a torch.fx.GraphModule, got {type(graph_module).__name__}")
        nodes = list(graph_module.graph.nodes)
        canonical = _graph.canonical_nodes(graph_module, groups)
        if len(canonical) != len(nodes):
            raise PlanError(f"{len(nodes)} nodes in the graph, {len(canonical)} canonical ones")
        self.inputs: list[tuple[int, ...]] = [item.inputs for item in canonical]
        self.leaders = _leaders(nodes)
        self.pinned = [item.has_effect for item in canonical]
        self.collectives = _collectives(nodes, self.pinned)
        keys = [item.alignment if _takes_part(node) else _NO_KEY for node, item in zip(nodes, canonical, strict=True)]
        self.keys = _numbered(keys, self.collectives)
        self.barriers = [
            pinned and not _keeps_only_its_order(node) for node, pinned in zip(nodes, self.pinned, strict=True)
        ]
        self.modes = _modes(nodes, self.pinned)
        self.order = list(range(len(nodes)))
        sizes = _size_inputs(nodes)
        self.describe: Callable[[int], str] = lambda position: _describe(nodes[position], sizes)

        self._graph_module = graph_module
        self._nodes = nodes
        self._plans: dict[tuple[Segment, ...], Plan] = {}

    def takes_part(self, position: int) -> bool:
        return self.keys[position] != _NO_KEY

    def in_order(self, order: list[int]) -> "OwnGraph":
        """The same graph, its nodes in another order that it may run in, for all steps up to `make_segments`."""
        index_of = {position: index for index, position in enumerate(order)}
        ordered = copy.copy(self)
        ordered.order = order
        ordered.keys = [self.keys[position] for position in order]
        ordered.inputs = [tuple([index_of[source] for source in self.inputs[position]]) for position in order]
        ordered.leaders = [index_of[self.leaders[position]] for position in order]
        ordered.pinned = [self.pinned[position] for position in order]
        ordered.collectives = [self.collectives[position] for position in order]
        ordered.barriers = [self.barriers[position] for position in order]
        ordered.modes = {
            index_of[change]: tuple([index_of[entry] for entry in active]) for change, active in self.modes.items()
        }
        return ordered

    def plan(self, segments: tuple[Segment, ...]) -> Plan:
        """The plan of these segments: the same one each time.

        Raises:
            PlanError: the graph has changed.
        """
        if list(self._graph_module.graph.nodes) != self._nodes:
            raise PlanError("the graph has other nodes than when its OwnGraph was made: compile a copy of it")
        plan = self._plans.get(segments)
        if plan is None:
            program = _split(self._graph_module, segments, self.modes)
            plan = Plan(segments, _fingerprint(self, segments), program)
            while len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[segments] = plan
        return plan


# ---------------------------------------------------------------------- keys


def _numbered(keys: Sequence[bytes], collectives: Sequence[dict[Any, int]]) -> list[bytes]:
    """The keys, those of collectives with the number of each on its groups: the third of one rank meets the third of
    another, however much the second is like it."""
    numbered = list(keys)
    issued: dict[Any, int] = {}
    for position, groups in enumerate(collectives):
        if groups:
            place = repr([issued.get(group, 0) for group in groups]).encode()
            numbered[position] = hashlib.blake2b(keys[position] + place, digest_size=_KEY_BYTES).digest()
            for group, number in groups.items():
                issued[group] = issued.get(group, 0) + number
    return numbered


def node_keys(own: OwnGraph) -> bytes:
    """The keys of this rank's nodes, for `share`: 8 bytes a node, and its inputs, compressed.

    Raises:
        PlanError: the graph is larger than `MAX_NODES` or `MAX_MEAN_INPUTS` allow.
    """
    count = len(own.keys)
    wiring = array.array("I")
    wiring.extend(position - leader for position, leader in enumerate(own.leaders))
    wiring.extend(map(len, own.inputs))
    wiring.extend(position - source for position, sources in enumerate(own.inputs) for source in sources)
    if count > MAX_NODES or len(wiring) > _most_wiring(count):
        raise PlanError(f"a graph of {count} nodes with {len(wiring) - 2 * count} inputs is too large for a plan")
    return _KEYS_HEADER.pack(count) + b"".join(own.keys) + zlib.compress(_little_endian(wiring).tobytes(), 1)


def read_keys(data: bytes) -> Reference:
    """What `node_keys` wrote on the reference rank.

    Raises:
        PlanError: it can't be.
    """
    if len(data) < _KEYS_HEADER.size:
        raise PlanError(f"{len(data)} bytes are no node keys")
    (count,) = _KEYS_HEADER.unpack_from(data)
    end = _KEYS_HEADER.size + count * _KEY_BYTES
    if count > MAX_NODES or len(data) < end:
        raise PlanError(f"{len(data)} bytes can't be the keys of {count} nodes")
    keys = [data[start : start + _KEY_BYTES] for start in range(_KEYS_HEADER.size, end, _KEY_BYTES)]
    wiring = array.array("I")
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(data[end:], _most_wiring(count) * wiring.itemsize + 1)
        wiring.frombytes(raw)
    except (zlib.error, ValueError) as error:
        raise PlanError(f"the wiring of {count} nodes can't be read: {error}") from None
    wiring = _little_endian(wiring)
    lengths = wiring[count : 2 * count]
    if not inflate.eof or len(lengths) != count or len(wiring) != 2 * count + sum(lengths):
        raise PlanError(f"the wiring of {count} nodes is incomplete")
    leaders = [place - distance for place, distance in enumerate(wiring[:count])]
    inputs: list[tuple[int, ...]] = []
    start = 2 * count
    for place, length in enumerate(lengths):
        inputs.append(tuple([place - distance for distance in wiring[start : start + length]]))
        if length and not 0 <= min(inputs[-1]) <= max(inputs[-1]) < place:
            raise PlanError(f"place {place} reads a place that isn't before it")
        start += length
    if any(leader < 0 or leaders[leader] != leader for leader in leaders):
        raise PlanError("a node stays with one that isn't there, or that stays with another")
    return Reference(keys, leaders, inputs)


def _most_wiring(count: int) -> int:
    return (2 + MAX_MEAN_INPUTS) * count


def _little_endian(numbers: "array.array[int]") -> "array.array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


# ---------------------------------------------------------------------- bits


def _pack(bits: Sequence[bool]) -> bytes:
    """One bit an item, the first in the lowest bit of the last byte."""
    text = "".join(["1" if bit else "0" for bit in reversed(bits)])
    return int(text or "0", 2).to_bytes((len(bits) + 7) // 8, "big")


def _unpack(data: bytes, count: int) -> list[bool]:
    if len(data) != (count + 7) // 8:
        raise PlanError(f"{len(data)} bytes can't be {count} bits")
    text = f"{int.from_bytes(data, 'big'):0{count}b}"
    if len(text) > max(count, 1):
        raise PlanError(f"more than {count} bits are set")
    return [bit == "1" for bit in reversed(text)][:count]


# ---------------------------------------------------------------------- step 1: the common places


def match(reference: Reference, own: OwnGraph) -> list[int]:
    """For each place, the position of this rank's node that is the same; -1 where none is.

    Nodes match when their keys are equal, and each reads what the other reads: nodes that match too, or values that
    lie outside of what matches but always correspond to one another. So the values that common nodes read can be named
    by places, on every rank. A node and those that stay with it match together or not at all.
    """
    places = [place for place, key in enumerate(reference.keys) if key != _NO_KEY]
    positions = [position for position, key in enumerate(own.keys) if key != _NO_KEY]
    pairs = align([reference.keys[place] for place in places], [own.keys[position] for position in positions])
    matched = [-1] * len(reference.keys)
    to_own: dict[int, int] = {}
    to_place: dict[int, int] = {}
    for place_index, position_index in pairs:
        place, position = places[place_index], positions[position_index]
        sources = list(zip(reference.inputs[place], own.inputs[position], strict=False))
        if len(reference.inputs[place]) != len(own.inputs[position]) or place in to_own or position in to_place:
            continue
        learned: list[tuple[int, int]] = []
        for there, here in sources:
            known = to_own.get(there)
            if known is None and here not in to_place:
                to_own[there], to_place[here] = here, there
                learned.append((there, here))
            elif known != here:
                for wrong_there, wrong_here in learned:
                    del to_own[wrong_there], to_place[wrong_here]
                break
        else:
            to_own[place], to_place[position] = position, place
            matched[place] = position
    _release_preparations(own, matched)
    _drop_torn_units(reference, own, matched)
    return matched


def follow(reference: Reference, own: OwnGraph) -> tuple[OwnGraph, list[int]]:
    """This rank's graph, in an order that has more in common with the reference's if there is one; and its `match`."""
    matched = match(reference, own)
    to_own = {place: position for place, position in enumerate(matched) if position >= 0}
    followed = {leader for position, leader in enumerate(own.leaders) if leader != position}
    movable = {
        (own.keys[position], own.inputs[position]): position
        for position in {*range(len(own.keys))}.difference(to_own.values(), followed)
        if own.takes_part(position) and own.leaders[position] == position and not own.pinned[position]
    }
    wishes: dict[int, tuple[int, int]] = {}
    anchor = -1
    for place, key in enumerate(reference.keys):
        if matched[place] >= 0:
            anchor = matched[place]
            continue
        # What is not known to correspond is mostly an input, and those mostly are at the same places.
        inputs = tuple([to_own.get(source, source) for source in reference.inputs[place]])
        position = movable.pop((key, inputs), -1)
        if position >= 0:
            to_own[place] = position
            wishes[position] = (anchor, place)
    if wishes:
        ordered = own.in_order(_reorder(own, wishes))
        matched_in_order = match(reference, ordered)
        if matched_in_order.count(-1) < matched.count(-1):
            return ordered, matched_in_order
    return own, matched


def _reorder(own: OwnGraph, wishes: dict[int, tuple[int, int]]) -> list[int]:
    """All positions, in an order that values, effects and barriers allow. A position with a wish `(other, number)` goes
    as near as it can to right behind the other one, by number if several do; what has none stays where it was.
    """
    unblocks: list[list[int]] = [[] for _ in own.keys]
    num_blocking: list[int] = []
    effect = barrier = -1
    for position in range(len(own.keys)):
        blocking = {own.leaders[position], *own.inputs[position], barrier}
        if own.pinned[position]:
            blocking.add(effect)
            effect = position
        if own.barriers[position]:
            blocking.update(range(barrier + 1, position))
            barrier = position
        blocking -= {position, -1}
        num_blocking.append(len(blocking))
        for other in blocking:
            unblocks[other].append(position)
    ready = [
        (wishes.get(position, (position, -1)), position) for position, number in enumerate(num_blocking) if not number
    ]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, position = heapq.heappop(ready)
        order.append(position)
        for other in unblocks[position]:
            num_blocking[other] -= 1
            if not num_blocking[other]:
                heapq.heappush(ready, (wishes.get(other, (other, -1)), other))
    return order


def _release_preparations(own: OwnGraph, matched: list[int]) -> None:
    """Unmatches what this rank's own preparations read.

    A node that can run before everything else, such as the sum of an `arange` and an offset that depends on the rank,
    must not have to wait for a fat segment because the `arange` lies in it.
    """
    places = _places(own, matched)
    ready = _reads_inputs_only(own)
    for position in reversed(range(len(places))):
        if ready[position] and places[position] < 0 and own.takes_part(position):
            for source in own.inputs[position]:
                if places[source] >= 0:
                    matched[places[source]] = places[source] = -1


def _drop_torn_units(reference: Reference, own: OwnGraph, matched: list[int]) -> None:
    """Unmatches the nodes that stay together where not all of them match."""
    places = {position: place for place, position in enumerate(matched) if position >= 0}
    torn: set[int] = set()
    for place, leader in enumerate(reference.leaders):
        if leader != place and (
            matched[place] < 0 or matched[leader] < 0 or own.leaders[matched[place]] != matched[leader]
        ):
            torn.add(leader)
    for position, leader in enumerate(own.leaders):
        if leader != position and position not in places and leader in places:
            torn.add(places[leader])
    for place, leader in enumerate(reference.leaders):
        if leader in torn:
            matched[place] = -1


def bitmap(matched: Sequence[int]) -> bytes:
    """One bit a place: whether it matched. For the first `intersect`."""
    return _pack([position >= 0 for position in matched])


def restrict(matched: Sequence[int], common: bytes) -> list[int]:
    """`matched`, but only where every rank's place matched (`common`, as `intersect` gave it)."""
    bits = _unpack(common, len(matched))
    return [position if bit else -1 for position, bit in zip(matched, bits, strict=True)]


# ---------------------------------------------------------------------- step 2: what this rank needs

_STAYS, _GOES_FIRST, _GOES_LAST = 0, 1, 2


def constraints(own: OwnGraph, matched: Sequence[int]) -> bytes:
    """Two bits a place, for the second `intersect`: it may follow the place before it at once; nothing of this rank's
    own reads its value. `matched` is what `restrict` gave."""
    count = len(matched)
    places = _places(own, matched)
    moves = _moves(own, places)
    joined = [True] * count
    unread = [True] * count
    something_between = False
    for position, place in enumerate(places):
        if place < 0:
            for source in own.inputs[position]:
                if places[source] >= 0:
                    unread[places[source]] = False
        if not own.takes_part(position) or own.leaders[position] != position:
            continue
        if place >= 0:
            joined[place] = not something_between
            something_between = False
        elif moves[position] == _STAYS:
            something_between = True
    return _pack(joined + unread)


def _places(own: OwnGraph, matched: Sequence[int]) -> list[int]:
    """For each position, its common place or -1."""
    places = [-1] * len(own.keys)
    for place, position in enumerate(matched):
        if position >= 0:
            places[position] = place
    return places


def _moves(own: OwnGraph, places: Sequence[int]) -> list[int]:
    """For each position, whether a node of this rank's own has to stay where it is.

    One without effect that reads only inputs, or what goes first itself, goes first; one that nothing that stays reads
    goes last. Nodes that stay with another go with it.
    """
    moves = [_STAYS] * len(places)
    for position, ready in enumerate(_reads_inputs_only(own, places)):
        if ready:
            moves[position] = _GOES_FIRST
    needed: set[int] = set()
    for position in reversed(range(len(places))):
        if own.barriers[position]:
            break
        if own.leaders[position] != position or not own.takes_part(position) or moves[position] == _GOES_FIRST:
            continue
        if places[position] < 0 and not own.pinned[position] and position not in needed:
            moves[position] = _GOES_LAST
        else:
            needed.update([own.leaders[source] for source in own.inputs[position]])
    return moves


def _reads_inputs_only(own: OwnGraph, places: Sequence[int] | None = None) -> list[bool]:
    """For each position, whether the node can run before all others: it has no effect and reads inputs, or nodes that
    can, and no barrier comes before it. With `places`, common nodes can't."""
    ready = [False] * len(own.keys)
    for position, leader in enumerate(own.leaders):
        if own.barriers[position]:
            break
        if leader != position:
            ready[position] = ready[leader]
        elif not own.takes_part(position):
            ready[position] = True
        elif not own.pinned[position] and (places is None or places[position] < 0):
            ready[position] = all(ready[source] for source in own.inputs[position])
    return ready


# ---------------------------------------------------------------------- step 3: the plan


def make_segments(
    reference: Reference, own: OwnGraph, matched: Sequence[int], agreed: bytes
) -> tuple[Segment, ...] | None:
    """The plan's segments, or None where no run of common places is worth a fat one; None on all ranks then.

    Args:
        reference: the reference rank's graph.
        own: this rank's graph.
        matched: what `restrict` gave.
        agreed: all ranks' `constraints`, intersected.
    """
    count = len(matched)
    bits = _unpack(agreed, 2 * count)
    joined, unread = bits[:count], bits[count:]
    fat_of, num_fat = _fat_runs(reference, own, matched, joined)
    if not num_fat:
        return None
    crossing = [False] * count
    for place in range(count):
        if matched[place] < 0:
            continue
        if fat_of[place] >= 0 and not unread[place]:
            crossing[place] = True
        for source in reference.inputs[place]:
            if matched[source] >= 0 and fat_of[source] >= 0 and fat_of[source] != fat_of[place]:
                crossing[source] = True

    # The exit from an autocast region reads its entry, but each segment enters by itself.
    entries = {entry for active in own.modes.values() for entry in active}
    # Even slots lie between the fat segments, which have the odd ones.
    slots: list[list[int]] = [[] for _ in range(2 * num_fat + 1)]
    places = _places(own, matched)
    moves = _moves(own, places)
    slot_of = [0] * len(places)
    here = 0
    for position, place in enumerate(places):
        if not own.takes_part(position):
            continue
        leader = own.leaders[position]
        if place >= 0 and fat_of[place] >= 0:
            slot = 2 * fat_of[place] + 1
            if leader == position:
                here = slot + 1
        elif leader != position:
            slot = slot_of[leader]
        elif moves[position] == _GOES_FIRST:
            slot = 0
        elif moves[position] == _GOES_LAST:
            slot = 2 * num_fat
        else:
            slot = here
        slot_of[position] = slot
        slots[slot].append(position)

    segments: list[Segment] = []
    for slot, positions in enumerate(slots):
        if slot % 2:
            outputs = tuple([each for each in positions if crossing[places[each]] and each not in entries])
            num_collectives = sum(sum(own.collectives[position].values()) for position in positions)
            segments.append(Segment(FAT, tuple(positions), outputs, num_collectives))
        else:
            segments.extend(_separate(own.leaders, own.collectives, positions))
    in_graph = own.order.__getitem__
    return tuple(
        [
            each._replace(positions=tuple(map(in_graph, each.positions)), outputs=tuple(map(in_graph, each.outputs)))
            for each in segments
        ]
    )


def _fat_runs(
    reference: Reference, own: OwnGraph, matched: Sequence[int], joined: Sequence[bool]
) -> tuple[list[int], int]:
    """For each place the number of its fat segment, -1 outside of them; and how many there are.

    A run that has no collective, or one with nothing beside it, is left to the local and skinny segments around it.
    """
    run_of = [-1] * len(matched)
    num_collectives: list[int] = []
    num_neighbours: list[int] = []
    for place, position in enumerate(matched):
        if position < 0:
            continue
        leader = reference.leaders[place]
        if leader == place:
            if not num_collectives or not joined[place]:
                num_collectives.append(0)
                num_neighbours.append(0)
            run_of[place] = len(num_collectives) - 1
            num_collectives[-1] += sum(own.collectives[position].values())
            num_neighbours[-1] += not own.collectives[position]
        else:
            run_of[place] = run_of[leader]
    fat_numbers: list[int] = []
    num_fat = 0
    for collectives, neighbours in zip(num_collectives, num_neighbours, strict=True):
        worth = collectives > 1 or (collectives == 1 and neighbours >= _LEAST_NEIGHBOURS)
        fat_numbers.append(num_fat if worth else -1)
        num_fat += worth
    return [fat_numbers[run] if run >= 0 else -1 for run in run_of], num_fat


def _separate(leaders: Sequence[int], collectives: Sequence[dict[Any, int]], positions: Iterable[int]) -> list[Segment]:
    """Nodes in order as local segments, and one skinny segment for each that issues collectives."""
    pieces: list[list[int]] = []
    piece_of: dict[int, list[int]] = {}
    for position in positions:
        leader = leaders[position]
        if leader != position:
            piece = piece_of[leader]
        elif collectives[position] or not pieces or collectives[pieces[-1][0]]:
            piece = []
            pieces.append(piece)
        else:
            piece = pieces[-1]
        piece.append(position)
        piece_of[position] = piece
    segments: list[Segment] = []
    for piece in pieces:
        num_collectives = sum(collectives[piece[0]].values())
        segments.append(Segment(SKINNY if num_collectives else LOCAL, tuple(piece), (), num_collectives))
    return segments


def _fingerprint(own: OwnGraph, segments: Sequence[Segment]) -> str:
    """The digest that all ranks have to share before a fat segment may run.

    For each fat segment: its nodes' content, and for each input which node of the segment it is or which value from
    outside, numbered by first use; what those values are; which values leave; the autocast and grad mode around it;
    and how many collectives the rank issues before it on each group that fat segments use. Groups are numbered by
    first use: their identity, exact or by role, is in the content of the collectives.
    """
    digest = hashlib.blake2b(digest_size=16)
    group_numbers: dict[Any, int] = {}
    for segment in segments:
        if segment.kind == FAT:
            for position in segment.positions:
                for group in own.collectives[position]:
                    group_numbers.setdefault(group, len(group_numbers))
    issued = [0] * len(group_numbers)
    for segment in segments:
        before = tuple(issued)
        for position in segment.positions:
            for group, number in own.collectives[position].items():
                if group in group_numbers:
                    issued[group_numbers[group]] += number
        if segment.kind != FAT:
            continue
        inside: dict[int, int] = {}
        outside: dict[int, int] = {}
        wiring = array.array("q")
        for position in segment.positions:
            wiring.append(len(own.inputs[position]))
            for source in own.inputs[position]:
                known = inside.get(source)
                wiring.append(~outside.setdefault(source, len(outside)) if known is None else known)
            inside[position] = len(inside)
        digest.update(struct.pack("!I", len(segment.positions)))
        digest.update(b"".join([own.keys[position] for position in segment.positions]))
        if sys.byteorder == "big":
            wiring.byteswap()
        digest.update(wiring.tobytes())
        boundary = (
            [own.describe(position) for position in outside],
            [inside[position] for position in segment.outputs],
            _modes_at(own, segment.positions[0]),
            before,
        )
        text = repr(boundary).encode()
        digest.update(struct.pack("!I", len(text)) + text)
    return digest.hexdigest()


def _modes_at(own: OwnGraph, position: int) -> list[str]:
    """The entries into autocast and grad modes that are in force at a node, by their content."""
    last_change = max((change for change in own.modes if change < position), default=None)
    return [] if last_change is None else [own.keys[entry].hex() for entry in own.modes[last_change]]


# ---------------------------------------------------------------------- step 4: with the other ranks


def agree_on_plan(exchange: PlanRounds, graph: "torch.fx.GraphModule | OwnGraph", groups: str = "exact") -> Plan | None:
    """Goes through the rounds with the other ranks of the component.

    Args:
        exchange: the open rounds: `Ticket.exchange` of a vote that was split, if it isn't None.
        graph: this rank's graph, the one that it voted on. It is only read. A graph that is dispatched again and again
            is better given as an `OwnGraph`, made once, before anything compiles it: it is hashed once, each plan is
            split once, and compilers may narrow the ranges of symbolic sizes, which are in the keys.
        groups: "exact" or "role", as in the fingerprint of the vote. An `OwnGraph` has it already.

    Returns:
        The plan, its program split already, once all ranks of the component have the same fat segments; None: run the
        whole graph skinny. All ranks get a plan, or none does. What fails on this rank before the last round, splitting
        included, is logged, and calls the rounds off for all. What fails afterwards, such as compiling the program, is
        the caller's own: the others run the plan, so this rank must run it too (`Plan.program` runs as it is), or end.

    Raises:
        HandshakeConfigError: an argument can't be used; the rounds are called off for all.
        PlanError, or what `exchange.agree` raises: the answer to this rank's fingerprint got lost. The others may run
            the plan now, so going on skinny could hang.
    """
    if not isinstance(exchange, PlanRounds):
        raise HandshakeTypeError(
            f"agree_on_plan needs the exchange of a ticket, got {type(exchange).__name__}; where Ticket.exchange is "
            "None there are no rounds, and the graph runs skinny"
        )
    if exchange.is_undecided:
        raise PlanError("the answer to this rank's plan got lost: the others may run it, so this rank can't go on")
    try:
        plan = _common_plan(exchange, graph if isinstance(graph, OwnGraph) else OwnGraph(graph, groups))
    except BaseException as error:
        reason = f"no plan on rank {exchange.rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the coordinator itself may be what failed
            exchange.abort(reason)
        if isinstance(error, HandshakeConfigError) or not isinstance(error, Exception):
            raise
        _LOG.warning("handshake: %s; the graph runs skinny", reason, exc_info=True)
        return None
    return plan if plan is not None and exchange.agree(plan.fingerprint) else None


def _common_plan(exchange: PlanRounds, own: OwnGraph) -> Plan | None:
    """The rounds but the last."""
    reference_rank = exchange.reference_rank()
    if reference_rank is None:
        return None
    keys = exchange.share(node_keys(own) if reference_rank == exchange.rank else None)
    if keys is None:
        return None
    reference = read_keys(keys)
    ordered, matched = follow(reference, own)
    common = exchange.intersect(bitmap(matched))
    if common is None:
        return None
    matched = restrict(matched, common)
    if not any(position >= 0 and ordered.collectives[position] for position in matched):
        # So on every rank: a common node issues what the reference's does.
        exchange.abort("the ranks' graphs have no collective in common")
        return None
    agreed = exchange.intersect(constraints(ordered, matched))
    if agreed is None:
        return None
    segments = make_segments(reference, ordered, matched, agreed)
    if segments is None:
        exchange.abort("the ranks' graphs have no collective in common together with its neighbours")
        return None
    return own.plan(segments)


# ---------------------------------------------------------------------- reading nodes


def _takes_part(node: "torch.fx.Node") -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _leaders(nodes: Sequence["torch.fx.Node"]) -> list[int]:
    """For each node the position of the one that it stays with; its own for most.

    A `getitem` stays with the node that returns the tuple, so that no tuple crosses a boundary. A wait stays with its
    collective: compilers that turn both into one program look for them in one graph.
    """
    import torch

    if __package__:
        from . import _graph
    else:
        import _graph
    waits: set[Any] = set()
    for namespace in (torch.ops._c10d_functional, torch.ops.c10d_functional):
        if hasattr(namespace, "wait_tensor"):  # the second is registered only where it is used
            waits |= {namespace.wait_tensor, namespace.wait_tensor.default}
    positions = {node: position for position, node in enumerate(nodes)}
    leaders = list(range(len(nodes)))
    for position, node in enumerate(nodes):
        if node.op != "call_function" or not (node.target is operator.getitem or node.target in waits):
            continue
        source: Any = node.args[0]
        if source not in positions or not _takes_part(source):
            continue
        leader = leaders[positions[source]]
        if node.target is operator.getitem:
            stays = isinstance(_value(source), (tuple, list)) or _graph.is_collective(source)
        else:
            stays = _graph.is_collective(nodes[leader])
        if stays:
            leaders[position] = leader
    return leaders


def _collectives(nodes: Sequence["torch.fx.Node"], where: Iterable[bool]) -> list[dict[Any, int]]:
    """For each node, how many collectives it issues on each group, nested bodies counted; none where not `where`."""
    if __package__:
        from . import _graph
    else:
        import _graph
    none: dict[Any, int] = {}
    return [_graph.node_collectives(node) if look else none for node, look in zip(nodes, where, strict=True)]


def _modes(nodes: Sequence["torch.fx.Node"], where: Iterable[bool]) -> dict[int, tuple[int, ...]]:
    """See `OwnGraph.modes`. An entry into autocast is in force until its exit, one into a grad mode until the next."""
    import torch

    enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
    set_grad_mode = torch._C._set_grad_enabled
    modes: dict[int, tuple[int, ...]] = {}
    active: tuple[int, ...] = ()
    for position, (node, look) in enumerate(zip(nodes, where, strict=True)):
        if not look or node.target not in (enter, leave, set_grad_mode):
            continue
        if node.target is leave:
            active = tuple([entry for entry in active if nodes[entry] is not node.args[0]])
        elif node.target is enter:
            active = (*active, position)
        else:
            active = (*[entry for entry in active if nodes[entry].target is not set_grad_mode], position)
        modes[position] = active
    return modes


def _keeps_only_its_order(node: "torch.fx.Node") -> bool:
    """Whether a node with an effect only has to keep its place among such nodes: a functional collective, a wait, a
    random op. It writes to none of its arguments and changes no mode."""
    overloads = [node.target]
    if hasattr(node.target, "overloads"):
        overloads = [getattr(node.target, name) for name in node.target.overloads()]
    schemas = [getattr(overload, "_schema", None) for overload in overloads]
    return all(schema is not None and not schema.is_mutable for schema in schemas)


def _value(node: "torch.fx.Node") -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _size_inputs(nodes: Iterable["torch.fx.Node"]) -> dict[Any, "torch.fx.Node"]:
    """The symbols that are inputs of the graph themselves, and their placeholders. None in a graph of fixed sizes."""
    import torch

    placeholders: dict[Any, torch.fx.Node] = {}
    for node in nodes:
        value = _value(node) if node.op == "placeholder" else None
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            placeholders.setdefault(value.node.expr, node)
    return placeholders


def _read_sizes(node: "torch.fx.Node", sizes: dict[Any, "torch.fx.Node"]) -> list["torch.fx.Node"]:
    """The placeholders of the symbols in a value's shape and strides: a program that takes the value needs them."""
    import torch
    from torch.fx.experimental.symbolic_shapes import free_symbols

    value = _value(node)
    if not sizes or not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return []
    return [sizes[symbol] for symbol in sorted(free_symbols(value), key=str) if symbol in sizes]


def _describe(node: "torch.fx.Node", sizes: dict[Any, "torch.fx.Node"]) -> str:
    """What a value is, as far as a program that takes it as an input is compiled for it."""
    import torch

    value = _value(node)
    if not isinstance(value, torch.Tensor):
        text = f"{type(value).__name__} {value}"
    elif value.layout is not torch.strided:
        text = f"{value.dtype} {list(value.shape)} {value.layout} {value.device.type}"
    else:
        text = f"{value.dtype} {list(value.shape)} {list(value.stride())} {value.device.type}"
    return f"{text} {[str(_value(placeholder)) for placeholder in _read_sizes(node, sizes)]}"


# ---------------------------------------------------------------------- splitting


def split_skinny(graph_module: "torch.fx.GraphModule") -> "torch.fx.GraphModule":
    """`graph_module` as one that calls submodules ``local_0``, ``skinny_1`` …, each collective with its waits in one of
    its own.

    A node whose nested body holds collectives is such a submodule too. See `Plan.program` for the rest.
    """
    nodes = list(graph_module.graph.nodes)
    where = [_takes_part(node) for node in nodes]
    positions = [position for position, takes_part in enumerate(where) if takes_part]
    segments = _separate(_leaders(nodes), _collectives(nodes, where), positions)
    return _split(graph_module, segments, _modes(nodes, where))


def _split(
    graph_module: "torch.fx.GraphModule", segments: Sequence[Segment], modes: dict[int, tuple[int, ...]]
) -> "torch.fx.GraphModule":
    """`graph_module` as one that calls one submodule a segment, in order.

    A segment takes what its nodes read from outside, in the order of reading, and the sizes that this depends on:
    Inductor can't compile a program that takes a tensor of 2·s0 rows but not s0. Nested bodies and called modules are
    its own attributes. It enters the modes that are in force where it begins, and leaves autocast where it ends.

    Nodes get new names: a fat segment is the same text on all ranks. The text itself, most of the time of making a
    graph module, is only written when somebody runs or reads it: compilers read the graph.
    """
    import torch
    from torch.fx._lazy_graph_module import _LazyGraphModule

    nodes = list(graph_module.graph.nodes)
    sizes = _size_inputs(nodes)
    entries = {nodes[entry] for active in modes.values() for entry in active}
    segment_of = {nodes[position]: number for number, each in enumerate(segments) for position in each.positions}
    # What is read outside of the segment that computes it.
    leaving = {
        source
        for node in nodes
        for source in node.all_input_nodes
        if source in segment_of and segment_of[source] != segment_of.get(node) and source not in entries
    }
    whole = torch.fx.Graph()
    # The graph's nodes, as nodes of `whole`.
    values = {node: whole.node_copy(node) for node in nodes if node.op == "placeholder"}

    def value_of(node: torch.fx.Node) -> torch.fx.Node:
        if node not in values:  # an attribute: a node of `whole` where it is first read
            values[node] = whole.node_copy(node)
        return values[node]

    root: dict[str, Any] = {}
    active: tuple[int, ...] = ()
    for number, segment in enumerate(segments):
        inside = [nodes[position] for position in segment.positions]
        read: dict[torch.fx.Node, None] = {}
        for node in inside:
            for source in node.all_input_nodes:
                if segment_of.get(source) != number and source not in entries:
                    read.update(dict.fromkeys((source, *_read_sizes(source, sizes))))
        attributes = [node for node in read if _is_module(graph_module, node)]
        arguments = [node for node in read if node not in attributes]

        part = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for place, node in enumerate(arguments):
            copies[node] = part.placeholder(f"arg_{place}")
            copies[node].meta = dict(node.meta)
        for node in (*attributes, *(nodes[entry] for entry in active)):
            copies[node] = part.node_copy(node)
        for position, node in zip(segment.positions, inside, strict=True):
            copies[node] = part.create_node(
                node.op,
                node.target,
                torch.fx.map_arg(node.args, copies.__getitem__),
                torch.fx.map_arg(node.kwargs, copies.__getitem__),
                type_expr=node.type,
            )
            copies[node].meta = dict(node.meta)
            active = modes.get(position, active)
        for entry in reversed(active):
            if nodes[entry].target is torch.amp.autocast_mode._enter_autocast:
                part.call_function(torch.amp.autocast_mode._exit_autocast, (copies[nodes[entry]],))
        if segment.kind == FAT:
            results = [nodes[position] for position in segment.outputs]
        else:
            results = [node for node in inside if node in leaving]
        part.output(tuple([copies[node] for node in results]))

        name = f"{segment.kind}_{number}"
        root[name] = _LazyGraphModule(graph_module, part)
        call = whole.call_module(name, tuple([value_of(node) for node in arguments]))
        for place, node in enumerate(results):
            if node in leaving:
                values[node] = whole.call_function(operator.getitem, (call, place))
    output = nodes[-1]
    whole.output(torch.fx.map_arg(output.args[0], value_of)).meta = dict(output.meta)

    for node in whole.find_nodes(op="get_attr"):
        root[str(node.target)] = operator.attrgetter(str(node.target))(graph_module)
    return _LazyGraphModule(root, whole)


def _is_module(graph_module: "torch.fx.GraphModule", node: "torch.fx.Node") -> bool:
    import torch

    return node.op == "get_attr" and isinstance(operator.attrgetter(str(node.target))(graph_module), torch.nn.Module)
