# SPDX-License-Identifier: Apache-2.0
"""Keeps fat what ranks have in common, when their graphs differ.

After a split one rank of the component, the reference, shares its graph: what each node is, as a key, and what it
reads. A *unit* is a node with those that stay with it: each `getitem` of its result, and the waits for a collective. A
*place* is a unit of the reference's graph; of places all ranks can speak. Four steps lead to a plan:

1. `match`: each rank aligns its own units with the reference's, collectives first. Units match when they are the same
   ops on values of the same form, whatever made these. Where the order of independent units is all that differs, a rank
   takes the reference's order for its own (`follow`). The places that matched on every rank are the *common* ones.
2. `constraints`: given the common places, each rank says where it needs a cut: to run something of its own there, or as
   what common units read does not correspond otherwise; and which of their values are read in other ways than in the
   reference's graph. The union over the ranks binds everybody.
3. `make_segments`: both steps ended with what all ranks know alike, so all cut alike. Common places that no cut parts
   make a *run*. A run with collectives and something to overlap them with becomes a **fat** segment. What else a rank
   has runs around the fat ones: each collective in a **skinny** segment of its own, the rest in **local** ones.
4. Each rank splits its graph by the plan, and only then the ranks compare its fingerprint: what each fat segment holds,
   read from this rank's own graph, with its boundary and its place on the groups' collective lines. A mistake in the
   steps above makes fingerprints differ, and then the whole graph runs skinny, as where a step fails on any rank.

No collective ever changes its place among this rank's collectives, so a plan keeps the order that the user's program
has. Little else moves: a wait to its collective, or as far behind it as in the reference's graph, in one fat segment; a
`getitem` to the node whose result it takes apart; a node without effect to where the reference has it, or to before or
behind a fat segment instead of cutting that. None goes past what it reads or is read by, nor past a mutation or a
change of autocast or grad mode.

Three parts: the alignment of two sequences; the plan; and the rounds in which ranks find it, on the coordinator
(`Rounds`) and on a rank (`Exchange`). Torch is imported inside the functions that need it.
"""

import bisect
import contextlib
import dataclasses
import graphlib
import hashlib
import heapq
import json
import logging
import operator
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if __package__:
    from . import _graph, _vocabulary
else:
    import _graph
    import _vocabulary

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("torch_tpu.handshake")

# ====================================================================== alignment

# 256 edits: sequences of 10,000 keys of 100 kinds take some 50 ms.
DEFAULT_MAX_EDITS = 256
# By how much longer one side may be for all pairs to be looked for: bounds the time. 40 layers of 100 nodes are found.
_MAX_SKEW = 4096

_Pairs = list[tuple[int, int]]


def align(a_keys: Sequence[Hashable], b_keys: Sequence[Hashable], max_edits: int = DEFAULT_MAX_EDITS) -> _Pairs:
    """The pairs `(i, j)` of positions that match, strictly ascending in both, with `a_keys[i] == b_keys[j]`.

    As many as there can be, as long as the sides are at most `max_edits` edits apart: items to leave out on either
    side, not counting those whose key the other side lacks. Past that, keys that occur once on both sides are matched
    first, and the gaps between them searched; that may not be the most, but time stays linear in the length.
    """
    a, b = list(a_keys), list(b_keys)
    start = _common_prefix(a, b)
    suffix = _common_prefix(a[start:][::-1], b[start:][::-1])
    a_end, b_end = len(a) - suffix, len(b) - suffix
    in_a, in_b = set(a[start:a_end]), set(b[start:b_end])
    a_left = [i for i in range(start, a_end) if a[i] in in_b]
    b_left = [j for j in range(start, b_end) if b[j] in in_a]
    middle = _align_middle([a[i] for i in a_left], [b[j] for j in b_left], max_edits)
    pairs = [(i, i) for i in range(start)]
    pairs += [(a_left[i], b_left[j]) for i, j in middle]
    pairs += [(a_end + k, b_end + k) for k in range(suffix)]
    return pairs


def _common_prefix(a: list[Hashable], b: list[Hashable]) -> int:
    differing = (place for place, (left, right) in enumerate(zip(a, b, strict=False)) if left != right)
    return next(differing, min(len(a), len(b)))


def _align_middle(a: list[Hashable], b: list[Hashable], max_edits: int) -> _Pairs:
    for edits in (max_edits // 16, max_edits):
        pairs = _longest_chain(_near_pairs(a, b, edits))
        if len(a) + len(b) - 2 * len(pairs) <= edits:
            return pairs
    in_a, in_b = Counter(a), Counter(b)
    place_in_b = {key: j for j, key in enumerate(b)}
    anchors = _longest_chain((i, place_in_b[key]) for i, key in enumerate(a) if in_a[key] == in_b[key] == 1)
    return _fill(anchors, a, b, lambda left, right: _longest_chain(_near_pairs(left, right, max_edits)))


def _fill(pairs: _Pairs, a: list[Any], b: list[Any], find: Callable[[list[Any], list[Any]], _Pairs]) -> _Pairs:
    """`pairs`, and between them those that `find` finds in each gap."""
    filled: _Pairs = []
    i = j = 0
    for next_i, next_j in [*pairs, (len(a), len(b))]:
        if i < next_i and j < next_j:
            filled += [(i + left, j + right) for left, right in find(a[i:next_i], b[j:next_j])]
        filled.append((next_i, next_j))
        i, j = next_i + 1, next_j + 1
    return filled[:-1]


def _near_pairs(a: list[Hashable], b: list[Hashable], edits: int) -> Iterable[tuple[int, int]]:
    """All pairs that a path with so many edits from (0, 0) to the end may hold, as `_longest_chain` takes them."""
    places: dict[Hashable, list[int]] = {}
    for j, key in enumerate(b):
        places.setdefault(key, []).append(j)
    skew = max(-_MAX_SKEW, min(len(b) - len(a), _MAX_SKEW))
    for i, key in enumerate(a):
        found = places.get(key, [])
        first = bisect.bisect_left(found, i + min(skew, 0) - edits)
        for j in reversed(found[first : bisect.bisect_right(found, i + max(skew, 0) + edits)]):
            yield i, j


def _longest_chain(pairs: Iterable[tuple[int, int]]) -> _Pairs:
    """The most of these pairs that ascend strictly in both, if they come by rising i, and for one i by falling j."""
    # Hunt and Szymanski's algorithm: `ends[k]` is the least j in which a chain of k + 1 pairs ends, `chains[k]` that
    # chain as a linked list, its last pair first.
    ends: list[int] = []
    chains: list[Any] = []
    for pair in pairs:
        k = bisect.bisect_left(ends, pair[1])
        ends[k : k + 1] = [pair[1]]
        chains[k : k + 1] = [(pair, chains[k - 1] if k else None)]
    chosen: _Pairs = []
    chain = chains[-1] if chains else None
    while chain is not None:
        pair, chain = chain
        chosen.append(pair)
    return chosen[::-1]


# ====================================================================== the plan

FAT, LOCAL, SKINNY, PARTIAL = "fat", "local", "skinny", "partial"

# What a rank takes from the reference, unpacked: 1,000,000 nodes of 2 inputs. A bomb may not make it allocate more.
MAX_KEYS_BYTES = 64 * 2**20

_KEY_BYTES = 8
_NO_KEY = bytes(_KEY_BYTES)  # of a node that takes no part: placeholder, get_attr, output

# Plans that are kept of one graph, with their programs: one for each set of graphs that the other ranks run beside it.
MAX_PLANS = 16


class PlanError(_vocabulary.HandshakeError):
    """What another rank sent can't be keys or bits of this exchange, or a graph can't be planned."""


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


@dataclasses.dataclass(eq=False, slots=True)
class Plan:
    """How one rank runs its graph after a split.

    Attributes:
        segments: in the order in which they run; every node but placeholders, get_attr and output is in one.
        fingerprint: 32 lowercase hex; equal on two ranks when their fat segments are the same programs at the same
            places of the same collective lines.
        program: the graph as one that calls a submodule for each segment, named ``fat_0``, ``local_1``, ``skinny_2`` …
            Each returns a tuple; that of a fat segment holds the values that the segment names, in its order, on every
            rank. It runs as it is; parameters, buffers and nested bodies are shared with the graph.
        compiled: None, and the caller's to set: what it made of `program`, as `Programs` does. An `OwnGraph` gives the
            same plan again for the same segments, so that each is compiled once.
    """

    segments: tuple[Segment, ...]
    fingerprint: str
    program: "torch.fx.GraphModule"
    compiled: Any = None

    @property
    def num_fat_collectives(self) -> int:
        """How many collectives lie in fat segments."""
        return sum(segment.num_collectives for segment in self.segments if segment.kind == FAT)


class Unit(NamedTuple):
    """A node, with the nodes that stay with it. Values are named by the positions of their nodes in the graph; the
    symbols of sizes are values that no unit makes, with numbers below 0.

    Attributes:
        key: content, and what the values are that it reads, but not which; `_NO_KEY` if it takes no part.
        values: its own values; the first is that of the node that the others stay with.
        inputs: the values of other units that it reads: arguments, the sizes that those depend on, and their symbols.
        collectives: per group, how many collectives it issues, nested bodies counted. This, and what follows, is not
            known of the reference's units.
        is_pinned: it has an effect, and keeps its place among the others with one.
        is_barrier: nothing may be moved across it: a mutation, a change of autocast or grad mode.
    """

    key: bytes
    values: tuple[int, ...]
    inputs: tuple[int, ...]
    collectives: Mapping[Any, int] = {}
    is_pinned: bool = False
    is_barrier: bool = False

    @property
    def takes_part(self) -> bool:
        return self.key != _NO_KEY

    @property
    def num_collectives(self) -> int:
        return sum(self.collectives.values())


class OwnGraph:
    """This rank's graph, as the steps need it: the one that it votes on, which must not change.

    `groups` is "role" or "exact", as in the fingerprint of the vote; by default what fingerprints use by default.

    Attributes:
        fx_nodes: the graph's nodes.
        nodes: each of them as a unit of its own, by position.
        units: the nodes with those that stay with them, in graph order.
        modes: by position, for each node that changes autocast or grad mode: the positions of the entries into modes
            that are in force after it.

    Raises:
        HandshakeError: the graph can't be hashed, or a collective's group can't be resolved.
    """

    def __init__(self, graph_module: "torch.fx.GraphModule", groups: str | None = None) -> None:
        import torch

        if not isinstance(graph_module, torch.fx.GraphModule):
            raise _vocabulary.HandshakeTypeError(f"expected a torch.fx.GraphModule, got {type(graph_module).__name__}")
        self._graph_module = graph_module
        self.fx_nodes = list(graph_module.graph.nodes)
        self._plans: dict[tuple[Segment, ...], Plan] = {}
        canonical = _graph.canonical_nodes(graph_module, _vocabulary.group_naming(groups))
        self.nodes = []
        leaders = _leaders(self.fx_nodes)
        sizes = _sizes_read(self.fx_nodes, leaders)
        for position, (node, item) in enumerate(zip(self.fx_nodes, canonical, strict=True)):
            key = item.alignment if _takes_part(node) else _NO_KEY
            inputs = (*item.inputs, *sizes[position], *[~symbol for symbol in item.symbols])
            collectives = _graph.node_collectives(node) if item.has_effect else {}
            is_barrier = item.has_effect and not _keeps_only_its_order(node)
            self.nodes.append(Unit(key, (position,), inputs, collectives, item.has_effect, is_barrier))
        self.units = _units(self.nodes, leaders)
        self.modes = _modes(self.fx_nodes)

    def plan(self, segments: tuple[Segment, ...]) -> Plan:
        """The plan of these segments: the same one each time.

        Raises:
            PlanError: the graph has changed.
        """
        if list(self._graph_module.graph.nodes) != self.fx_nodes:
            raise PlanError("the graph has other nodes than when its OwnGraph was made: compile a copy of it")
        plan = self._plans.get(segments)
        if plan is None:
            program = _split(self._graph_module, segments)
            plan = Plan(segments, _fingerprint(self, segments), program)
            while len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[segments] = plan
        return plan


def _units(nodes: Sequence[Unit], leaders: Sequence[int]) -> list[Unit]:
    """Joins each node with those that stay with it, `leaders` being for each the position of the one that it stays
    with. The key of a collective gets its number on its groups: the third of one rank meets the third of another,
    however much the second is like it."""
    members: dict[int, list[int]] = {}
    for position, leader in enumerate(leaders):
        members.setdefault(leader, []).append(position)
    issued: Counter[Any] = Counter()
    units = []
    for leader, values in members.items():
        inside = {value: ~number for number, value in enumerate(values)}
        read = [source for value in values for source in nodes[value].inputs]
        inputs = tuple([source for source in read if source not in inside])
        is_pinned = any(nodes[value].is_pinned for value in values)
        unit = nodes[leader]._replace(values=tuple(values), inputs=inputs, is_pinned=is_pinned)
        if unit.takes_part:
            # Which of them are the same: what reads one value twice is not what reads two.
            wiring = [inside[source] if source in inside else inputs.index(source) for source in read]
            numbers = [issued[group] for group in unit.collectives]
            content = b"".join([nodes[value].key for value in values]) + repr((numbers, wiring)).encode()
            unit = unit._replace(key=hashlib.blake2b(content, digest_size=_KEY_BYTES).digest())
            issued.update(unit.collectives)
        units.append(unit)
    return units


def node_keys(own: OwnGraph) -> bytes:
    """What the other ranks need to know of this rank's graph, for `share`: some 10 bytes a node."""
    rows = [(unit.key.hex(), unit.values, unit.inputs) for unit in own.units]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)


def read_keys(data: bytes) -> list[Unit]:
    """The units whose `node_keys` the reference rank shared. Raises PlanError if they can't be."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(data, MAX_KEYS_BYTES)
        if not inflate.eof:
            raise ValueError("they are cut off, or too long")
        return [
            Unit(bytes.fromhex(key), tuple(map(int, values)), tuple(map(int, inputs)))
            for key, values, inputs in json.loads(text)
        ]
    except (zlib.error, ArithmeticError, ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"{len(data)} bytes are not the keys of a graph: {error}") from None


def _pack(bits: Sequence[bool]) -> bytes:
    """One bit an item, the first in the lowest bit of the last byte."""
    text = "".join(["1" if bit else "0" for bit in reversed(bits)])
    return int(text or "0", 2).to_bytes((len(bits) + 7) // 8, "big")


def _unpack(data: bytes, count: int) -> list[bool]:
    number = int.from_bytes(data, "big")
    if len(data) != (count + 7) // 8 or number >> count:
        raise PlanError(f"{len(data)} bytes are not {count} bits")
    return [bit == "1" for bit in reversed(f"{number:0{count}b}")][:count]


def match(reference: Sequence[Unit], units: Sequence[Unit]) -> list[int]:
    """For each place, the index of this rank's unit that is the same; -1 where none is. Indexes ascend.

    Units match whose keys are equal: collectives before all others, then what reads values of like origin, then the
    rest. What they read need not correspond: see `constraints`.
    """
    issuing = {unit.key for unit in units if unit.collectives}
    pairs: _Pairs = []
    for level in range(3):
        keys: list[list[Hashable]] = []  # of both sides
        for side in (reference, units):
            made_by = {value: unit.key for unit in side for value in unit.values}
            keys.append([])
            for unit in side:
                counts = unit.key in issuing if level == 0 else unit.takes_part
                origin = [made_by.get(source) for source in unit.inputs] if level == 1 else ()
                keys[-1].append((unit.key, *origin) if counts else len(keys))  # a number never equals the other side's
        pairs = _fill(pairs, keys[0], keys[1], align)
    matched = [-1] * len(reference)
    for place, index in pairs:
        matched[place] = index
    _release_preparations(reference, units, matched)
    return matched


def _release_preparations(reference: Sequence[Unit], units: Sequence[Unit], matched: list[int]) -> None:
    """Unmatches units that can run before everything else, where they would ask for a cut: those that don't read what
    the reference's do, and those that such units read which did not match. A sum of an `arange` and an offset that
    depends on the rank need not wait for a fat segment because the `arange` is in it.
    """
    behind_effects, _ = _bounds(units, {index: 0 for index, unit in enumerate(units) if unit.is_pinned}, 1)
    place_of = {index: place for place, index in enumerate(matched) if index >= 0}
    place_of_value = {value: place for index, place in place_of.items() for value in units[index].values}
    released = {at for _, at in _wires(reference, units, matched)[0] if behind_effects[matched[at]] < 0}
    for index in reversed(range(len(units))):
        is_own = index not in place_of or place_of[index] in released
        if is_own and units[index].takes_part and behind_effects[index] < 0:
            released.update([place_of_value[source] for source in units[index].inputs if source in place_of_value])
    for place in released:
        matched[place] = -1


def follow(reference: Sequence[Unit], units: Sequence[Unit]) -> tuple[Sequence[Unit], list[int]]:
    """This rank's units, in its own order or one that has more in common with the reference's; and their `match`."""
    matched = match(reference, units)
    to_own: dict[int, int] = {}
    movable = {(unit.key, unit.inputs): index for index, unit in reversed([*enumerate(units)]) if unit.takes_part}
    wishes: dict[int, tuple[int, int]] = {}
    anchor = -1
    for place, unit in enumerate(reference):
        # What is not known to correspond is mostly an input, and those mostly are at the same places.
        index = movable.pop((unit.key, tuple([to_own.get(source, source) for source in unit.inputs])), matched[place])
        if index >= 0:
            to_own.update(zip(unit.values, units[index].values, strict=False))
            if index != matched[place] and not units[index].is_pinned:
                wishes[index] = (anchor, place)
            else:
                anchor = index
    if wishes:
        ordered = [units[index] for index in _reorder(units, wishes)]
        matched_in_order = match(reference, ordered)
        if _cost(reference, ordered, matched_in_order) < _cost(reference, units, matched):
            return ordered, matched_in_order
    return units, matched


def _cost(reference: Sequence[Unit], units: Sequence[Unit], matched: Sequence[int]) -> int:
    """What is lost if these are the common places: those that did not match, and the cuts."""
    return matched.count(-1) + len(_cuts(reference, units, matched)[0])


def _reorder(units: Sequence[Unit], wishes: dict[int, tuple[int, int]]) -> list[int]:
    """All indexes, in an order that values, effects and barriers allow. One with a wish `(other, number)` goes as near
    as it can to right behind the other one, by number if several do; what has none stays where it was."""
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    for index, before in enumerate(_must_follow(units)):
        sorter.add(index, *before)
    sorter.prepare()
    ready: list[tuple[tuple[int, int], int]] = []
    order: list[int] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            place = (index, -1) if units[index].takes_part else (-1, -1)  # inputs come before all that may read them
            heapq.heappush(ready, (wishes.get(index, place), index))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order


def _must_follow(units: Sequence[Unit]) -> list[set[int]]:
    """For each unit the indexes of some that come before it: whoever keeps behind these runs as the graph does."""
    index_of = {value: index for index, unit in enumerate(units) for value in unit.values}
    effect = barrier = -1
    follows = []
    for index, unit in enumerate(units):
        before = {barrier, *[index_of.get(source, -1) for source in unit.inputs]}
        if unit.is_pinned:
            before.add(effect)
            effect = index
        if unit.is_barrier:
            before.update(range(barrier + 1, index))
            barrier = index
        follows.append(before - {-1})
    return follows


def _bounds(units: Sequence[Unit], fixed: Mapping[int, int], end: int) -> tuple[list[int], list[int]]:
    """For each unit the last of the numbers in `fixed`, which ascend, that has to come before it, or is its own; else
    -1. And the first that has to come behind it; else `end`."""
    follows = _must_follow(units)
    last: list[int] = []
    first = [end] * len(units)
    for index, before in enumerate(follows):
        last.append(fixed.get(index, max([last[other] for other in before], default=-1)))
    for index in reversed(range(len(units))):
        for other in follows[index]:
            first[other] = min(first[other], fixed.get(index, first[index]))
    return last, first


def constraints(reference: Sequence[Unit], units: Sequence[Unit], matched: Sequence[int]) -> bytes:
    """For the second `intersect`, one bit a place: it may follow the place before it at once; then one bit a value of
    each place: nothing reads it but what the reference's graph says. `matched` is as `match` gave it, for common places
    only."""
    cuts, read = _cuts(reference, units, matched)
    unread = [here not in read for here in _to_own(reference, units, matched).values()]
    return _pack([place not in cuts for place in range(len(matched))] + unread)


def _cuts(reference: Sequence[Unit], units: Sequence[Unit], matched: Sequence[int]) -> tuple[set[int], set[int]]:
    """The places before which to cut, as few as there can be, so that each unit of this rank's own has a place to run
    and each part is one program with the reference's; and the values of which own units and other wires read."""
    apart, read = _wires(reference, units, matched)
    place_of = {index: place for place, index in enumerate(matched) if index >= 0}
    last, first = _bounds(units, place_of, len(matched))
    for index, unit in enumerate(units):
        if index not in place_of:
            read.update(unit.inputs)
            if unit.takes_part and last[index] >= 0 and first[index] < len(matched):
                apart.append((last[index], first[index]))
    cuts: set[int] = set()
    newest = -1
    for behind, at in sorted(apart, key=operator.itemgetter(1)):
        if newest <= behind:
            newest = at
            cuts.add(at)
    return cuts, read


def _wires(
    reference: Sequence[Unit], units: Sequence[Unit], matched: Sequence[int]
) -> tuple[list[tuple[int, int]], set[int]]:
    """Where what a matched unit reads is not what the reference's reads: pairs of places which can't be in one program,
    as within one the values correspond, whatever made them; and the values that are read there."""
    to_reference = {here: there for there, here in _to_own(reference, units, matched).items()}
    read: set[int] = set()
    apart: list[tuple[int, int]] = []
    partners: tuple[dict[int, tuple[int, int]], ...] = {}, {}  # by value: the other side's, and where seen last
    for place, index in enumerate(matched):
        if index < 0:
            continue
        theirs, ours = reference[place], units[index]
        for there, here in zip(theirs.inputs + theirs.values, ours.inputs + ours.values, strict=True):
            if to_reference.get(here, there) != there:
                read.add(here)
            for seen, value, other in zip(partners, (there, here), (here, there), strict=True):
                partner, where = seen.get(value, (other, place))
                if partner != other:
                    apart.append((where, place))
                seen[value] = other, place
    return apart, read


def _to_own(reference: Sequence[Unit], units: Sequence[Unit], matched: Sequence[int]) -> dict[int, int | None]:
    """The value of this rank for each value of the places in turn; None where the place did not match."""
    return {
        there: units[index].values[number] if index >= 0 else None
        for unit, index in zip(reference, matched, strict=True)
        for number, there in enumerate(unit.values)
    }


def make_segments(
    reference: Sequence[Unit], units: Sequence[Unit], matched: Sequence[int], agreed: bytes
) -> tuple[Segment, ...] | None:
    """The plan's segments, or None where no run of common places is worth a fat one; None on all ranks then. `agreed`
    are all ranks' `constraints`, intersected."""
    to_own = _to_own(reference, units, matched)
    bits = _unpack(agreed, len(matched) + len(to_own))
    runs = _fat_runs(units, matched, bits)
    if not runs:
        return None
    run_of = {index: number for number, run in enumerate(runs) for index in run}
    # What leaves its run, as the reference names it: what other runs read there, and what some rank reads besides.
    runs_of_places = [run_of.get(index, -1) for index in matched]
    run_of_value = {value: n for unit, n in zip(reference, runs_of_places, strict=True) for value in unit.values}
    leaving = {there for there, is_unread in zip(to_own, bits[len(matched) :], strict=True) if not is_unread}
    for unit, number, index in zip(reference, runs_of_places, matched, strict=True):
        if index >= 0:
            leaving.update([value for value in unit.inputs if run_of_value.get(value, number) != number])

    last, first = _bounds(units, run_of, len(runs))
    around: list[list[Unit]] = [[] for _ in range(len(runs) + 1)]  # what runs before each fat segment, and at the end
    here = 0
    for index, unit in enumerate(units):
        if index in run_of:
            here = run_of[index] + 1
        elif unit.takes_part:
            around[max(last[index] + 1, min(here, first[index]))].append(unit)

    segments = _separate(around[0])
    to_reference = {here: there for there, here in to_own.items()}
    for run, behind in zip(runs, around[1:], strict=True):
        # As in the reference's graph, where waits may lie far behind their collectives; but a wait goes behind no
        # barrier that lies behind its collective.
        placed: list[tuple[int, int, int]] = []
        num_barriers = 0
        for unit in [units[index] for index in run]:
            num_barriers += unit.is_barrier
            placed += [(num_barriers, to_reference[value], value) for value in unit.values]
            num_barriers += unit.is_barrier
        positions = tuple([value for _, _, value in sorted(placed)])
        outputs = tuple([position for position in positions if to_reference[position] in leaving])
        segments.append(Segment(FAT, positions, outputs, sum(units[index].num_collectives for index in run)))
        segments += _separate(behind)
    return tuple(segments)


def _fat_runs(units: Sequence[Unit], matched: Sequence[int], joined: Sequence[bool]) -> list[list[int]]:
    """The runs of common units that become fat segments. One that has no collective, or one with nothing beside it, is
    left to the local and skinny segments."""
    runs: list[list[int]] = []
    for place, index in enumerate(matched):
        if index >= 0:
            if not runs or not joined[place]:
                runs.append([])
            runs[-1].append(index)
    collectives = [sum(units[index].num_collectives for index in run) for run in runs]
    return [run for run, number in zip(runs, collectives, strict=True) if number > 1 or (number and len(run) > 1)]


def _separate(units: Iterable[Unit]) -> list[Segment]:
    """Units in order as local segments, and one skinny segment for each that issues collectives."""
    pieces: list[list[Unit]] = []
    for unit in units:
        if unit.collectives or not pieces or pieces[-1][0].collectives:
            pieces.append([])
        pieces[-1].append(unit)
    segments = []
    for piece in pieces:
        values = tuple([value for unit in piece for value in unit.values])
        kind = SKINNY if piece[0].collectives else LOCAL
        segments.append(Segment(kind, values, (), piece[0].num_collectives))
    return segments


def _fingerprint(own: OwnGraph, segments: Sequence[Segment]) -> str:
    """The digest that all ranks have to share before a fat segment may run.

    For each fat segment: its nodes' content; for each input which node of the segment it is, or which value from
    outside, numbered by first use (what such values are, is in the content); for each collective how many the rank
    issues before it on its groups, whose identity, exact or by role, is in the content; which values leave; and the
    autocast and grad mode around it.
    """
    digest = hashlib.blake2b(digest_size=16)
    issued: Counter[Any] = Counter()
    for segment in segments:
        inside: dict[int, int] = {}
        outside: dict[int, int] = {}
        nodes = []
        for position in segment.positions:
            key, _, inputs, collectives, *_ = own.nodes[position]
            wiring = [
                inside[source] if source in inside else ~outside.setdefault(source, len(outside)) for source in inputs
            ]
            inside[position] = len(inside)
            nodes.append((key, wiring, [issued[group] for group in collectives]))
            issued.update(collectives)
        if segment.kind == FAT:
            entries = next((own.modes[change] for change in reversed(own.modes) if change < segment.positions[0]), ())
            content = (
                nodes,
                [inside[position] for position in segment.outputs],
                [own.nodes[entry].key for entry in entries],
            )
            digest.update(repr(content).encode())
    return digest.hexdigest()


def agree_on_plan(
    exchange: "Exchange", graph: "torch.fx.GraphModule | OwnGraph", groups: str | None = None
) -> Plan | None:
    """Goes through the rounds with the other ranks of the component.

    Args:
        exchange: the open rounds: `Ticket.exchange` of a vote that was split, if it isn't None.
        graph: this rank's graph, the one that it voted on. It is only read. A graph that is dispatched again and again
            is better given as an `OwnGraph`, made once, before anything compiles it: it is hashed once, each plan is
            split once, and compilers may narrow the ranges of symbolic sizes, which are in the keys.
        groups: as for an `OwnGraph`, which has it already.

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
    if not isinstance(exchange, Exchange):
        raise _vocabulary.HandshakeTypeError(
            f"expected the exchange of a ticket, got {type(exchange).__name__}; if Ticket.exchange is None, run skinny"
        )
    if exchange.is_undecided:
        raise PlanError("the answer to this rank's plan got lost: the others may run it, so this rank can't go on")
    try:
        plan = _common_plan(exchange, graph if isinstance(graph, OwnGraph) else OwnGraph(graph, groups))
    except BaseException as error:
        reason = f"no plan on rank {exchange.rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the coordinator itself may be what failed
            exchange.abort(reason)
        if isinstance(error, _vocabulary.HandshakeConfigError) or not isinstance(error, Exception):
            raise
        _LOG.warning("handshake: %s; the graph runs skinny", reason, exc_info=True)
        return None
    return plan if plan is not None and exchange.agree(plan.fingerprint) else None


def _common_plan(exchange: "Exchange", own: OwnGraph) -> Plan | None:
    """The rounds but the last."""
    reference_rank = exchange.reference_rank()
    if reference_rank is None:
        return None
    keys = exchange.share(node_keys(own) if reference_rank == exchange.rank else None)
    if keys is None:
        return None
    reference = read_keys(keys)
    units, matched = follow(reference, own.units)
    common = exchange.intersect(_pack([index >= 0 for index in matched]))
    if common is None:
        return None
    matched = [index if bit else -1 for index, bit in zip(matched, _unpack(common, len(matched)), strict=True)]
    agreed = exchange.intersect(constraints(reference, units, matched))
    if agreed is None:
        return None
    segments = make_segments(reference, units, matched, agreed)
    if segments is None:
        why = "the ranks' graphs have no collective in common together with its neighbours"
        exchange.log_once(why)
        exchange.abort(why)
        return None
    return own.plan(segments)


def _takes_part(node: "torch.fx.Node") -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _leaders(nodes: Sequence["torch.fx.Node"]) -> list[int]:
    """For each node the position of the one that it stays with; its own for most.

    A `getitem` stays with the node that returns the tuple, so that no tuple crosses a boundary. A wait stays with its
    collective: compilers that turn both into one program look for them in one graph. Neither reads anything else.
    """
    positions = {node: position for position, node in enumerate(nodes)}
    leaders = list(range(len(nodes)))
    for position, node in enumerate(nodes):
        is_wait = getattr(node.target, "__name__", "").partition(".")[0] == "wait_tensor"
        sources = node.all_input_nodes
        if node.op != "call_function" or not (is_wait or node.target is operator.getitem) or len(sources) != 1:
            continue
        leader = leaders[positions[sources[0]]]
        stays = _graph.is_collective(nodes[leader] if is_wait else sources[0])
        stays |= not is_wait and isinstance(_value(sources[0]), (tuple, list))
        if stays and _takes_part(sources[0]):
            leaders[position] = leader
    return leaders


def _modes(nodes: Sequence["torch.fx.Node"]) -> dict[int, tuple[int, ...]]:
    """See `OwnGraph.modes`. An entry into autocast is in force until its exit, one into a grad mode until the next."""
    import torch

    enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
    set_grad_mode = torch._C._set_grad_enabled
    modes: dict[int, tuple[int, ...]] = {}
    active: tuple[int, ...] = ()
    for position, node in enumerate(nodes):
        if node.target is enter:
            active = (*active, position)
        elif node.target is leave:
            active = tuple([entry for entry in active if nodes[entry] is not node.args[0]])
        elif node.target is set_grad_mode:
            active = (*[entry for entry in active if nodes[entry].target is not set_grad_mode], position)
        else:
            continue
        modes[position] = active
    return modes


def _keeps_only_its_order(node: "torch.fx.Node") -> bool:
    """Whether a node with an effect only has to keep its place among such nodes: a functional collective, a wait, a
    random op. It writes to none of its arguments and changes no mode."""
    packet: Any = node.target
    overloads = [getattr(packet, name) for name in packet.overloads()] if hasattr(packet, "overloads") else [packet]
    schemas = [getattr(overload, "_schema", None) for overload in overloads]
    return all(schema is not None and not schema.is_mutable for schema in schemas)


def _value(node: "torch.fx.Node") -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _sizes_read(nodes: Sequence["torch.fx.Node"], leaders: Sequence[int]) -> list[list[int]]:
    """For each node the positions of those whose values are the symbols in its sizes and in those of what it reads, as
    far as such come before it: a program that takes a tensor of 2·s0 rows needs s0 too."""
    import torch
    from torch.fx.experimental.symbolic_shapes import free_symbols

    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    known: dict[Any, int] = {}
    symbols: dict[torch.fx.Node, list[Any]] = {}
    read: list[list[int]] = []
    for position, node in enumerate(nodes):
        leaves = torch.utils._pytree.tree_leaves(_value(node))
        sized = [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, *numbers))]
        symbols[node] = sorted(free_symbols(sized), key=str)
        mentioned = dict.fromkeys(symbol for each in (*node.all_input_nodes, node) for symbol in symbols[each])
        before = dict.fromkeys(known[symbol] for symbol in mentioned if symbol in known)
        read.append([place for place in before if place < leaders[position]] if _takes_part(node) else [])
        if sized and isinstance(sized[0], numbers) and symbols[node] == [sized[0].node.expr]:
            known.setdefault(sized[0].node.expr, position)
    return read


def split_skinny(graph_module: "torch.fx.GraphModule") -> "torch.fx.GraphModule":
    """`graph_module` as one that calls submodules ``local_0``, ``skinny_1`` …: each collective with its waits, and each
    node whose nested body holds collectives, is in one of its own. See `Plan.program` for the rest."""
    fx_nodes = list(graph_module.graph.nodes)
    nodes = [
        Unit(b"", (position,), (), _graph.node_collectives(node)) if _takes_part(node) else Unit(_NO_KEY, (), ())
        for position, node in enumerate(fx_nodes)
    ]
    units = [unit for unit in _units(nodes, _leaders(fx_nodes)) if unit.takes_part]
    return _split(graph_module, _separate(units))


@dataclasses.dataclass(eq=False, frozen=True, slots=True)
class Program:
    """What a graph is run as.

    Attributes:
        kind: `FAT`: whole; `SKINNY`: split at its collectives; `PARTIAL`: by a plan.
        num_segments: how many graphs were compiled for it.
        run: takes the graph's inputs in one list.
    """

    kind: str
    num_segments: int
    run: Callable[[list[Any]], Any]


class Programs:
    """One graph, and the programs made of it so far. Each is compiled once, when it is first needed, and kept.

    The whole graph is compiled at once, so that nothing which can fail stands between a vote and the run. What fails to
    compile once it is agreed on is told to the other ranks (`DispatchGate.abandon`), and raised.
    """

    def __init__(
        self,
        graph_module: "torch.fx.GraphModule",
        gate: Any,
        compile_graph: "Callable[[torch.fx.GraphModule], Callable[[list[Any]], Any]]",
        *,
        groups: str | None = None,
        split_too: bool = False,
    ) -> None:
        """
        Args:
            graph_module: the graph that is voted on. It must not change: `compile_graph` works on a copy if it has to.
            gate: its `DispatchGate`; with `partial=True`, ranks look for a plan after a split.
            compile_graph: makes of a graph, the whole one or a segment, what takes its inputs in one list, as
                AOTAutograd's compilers do.
            groups: as in the gate's fingerprint; by default what fingerprints use by default.
            split_too: compile the program split at its collectives now too, as where guards on sizes can be made only
                now.

        Raises:
            What `compile_graph` raises.
        """
        self._graph_module, self._gate, self._compile_graph = graph_module, gate, compile_graph
        self._own: OwnGraph | None = None
        if gate.partial and gate.answer is None:
            # Before anything compiles it: compilers may narrow the ranges of symbolic sizes, which are in the keys.
            try:
                self._own = OwnGraph(graph_module, groups)
            except _vocabulary.HandshakeError:
                gate.partial = False  # it is split as a whole; why was said when its fingerprint was taken
        self._compiled: dict[str, Program] = {}
        self._lock = threading.Lock()
        self._ticket: Any = None  # of the last vote, and
        self._agreed: Program | None = None  # what came of it
        if gate.answer is not False:
            self._program(FAT)
        if gate.answer is False or (split_too and gate.answer is None):
            self._program(SKINNY)

    def agreed(self, facts: str | bytes | None = None) -> Program:
        """Votes, and returns what to run this time. For `facts`, and what is raised, see `DispatchGate.vote`."""
        with self._lock:
            ticket = self._gate.vote_async(facts)
            fat = ticket.result()
            if ticket is not self._ticket or self._agreed is None:
                try:
                    self._agreed = self._program(FAT) if fat else self._split(ticket.exchange)
                except BaseException as error:
                    self._gate.abandon(f"{type(error).__name__}: {error}")
                    raise
                self._ticket = ticket
            return self._agreed

    def _split(self, exchange: "Exchange | None") -> Program:
        plan = None if exchange is None or self._own is None else agree_on_plan(exchange, self._own)
        if plan is None:
            return self._program(SKINNY)
        if plan.compiled is None:
            plan.compiled = self._compile_segments(PARTIAL, plan.program)
        compiled: Program = plan.compiled
        return compiled

    def _program(self, kind: str) -> Program:
        if kind not in self._compiled:
            if kind == FAT:
                self._compiled[FAT] = Program(FAT, 1, self._compile_graph(self._graph_module))
            else:
                self._compiled[SKINNY] = self._compile_segments(SKINNY, split_skinny(self._graph_module))
        return self._compiled[kind]

    def _compile_segments(self, kind: str, program: "torch.fx.GraphModule") -> Program:
        import torch

        names = [str(node.target) for node in program.graph.find_nodes(op="call_module")]
        segments: list[Any] = [program.get_submodule(name) for name in names]
        for name, compiled in zip(names, [self._compile_graph(segment) for segment in segments], strict=True):
            segment = torch.nn.Module()
            segment.forward = lambda *inputs, compiled=compiled: compiled(list(inputs))
            program.set_submodule(name, segment)
        return Program(kind, len(names), lambda inputs: program(*inputs))


def _split(graph_module: "torch.fx.GraphModule", segments: Sequence[Segment]) -> "torch.fx.GraphModule":
    """`graph_module` as one that calls one submodule a segment, in order.

    A segment takes what its nodes read from outside, in the order of reading, and the sizes that this depends on:
    Inductor can't compile a program that takes a tensor of 2·s0 rows but not s0. Nested bodies and called modules are
    its own attributes. It enters the modes that are in force where it begins, and leaves autocast where it ends. Nodes
    get new names, so that a fat segment is the same text on all ranks; it is only written when somebody runs or reads
    it, as writing takes most of the time of making a graph module, and compilers read the graph.
    """
    import torch
    from torch.fx._lazy_graph_module import _LazyGraphModule

    nodes = list(graph_module.graph.nodes)
    modes = _modes(nodes)
    sizes = _sizes_read(nodes, _leaders(nodes))
    sources = {
        node: [*node.all_input_nodes, *map(nodes.__getitem__, read)] for node, read in zip(nodes, sizes, strict=True)
    }
    entries = {nodes[entry] for active in modes.values() for entry in active}
    segment_of = {nodes[position]: number for number, each in enumerate(segments) for position in each.positions}
    # What is read outside of the segment that computes it.
    leaving = {
        source
        for node in nodes
        for source in sources[node]
        if source in segment_of and segment_of[source] != segment_of.get(node) and source not in entries
    }
    whole = torch.fx.Graph()
    root: dict[str, Any] = {}
    values = {node: whole.node_copy(node) for node in nodes if node.op == "placeholder"}  # as nodes of `whole`

    def held(attribute: torch.fx.Node) -> Any:
        return operator.attrgetter(str(attribute.target))(graph_module)

    def value_of(node: torch.fx.Node) -> torch.fx.Node:
        if node not in values:  # an attribute: a node of `whole` where it is first read
            values[node] = whole.node_copy(node)
            root[str(node.target)] = held(node)
        return values[node]

    active: tuple[int, ...] = ()
    for number, segment in enumerate(segments):
        inside = [nodes[position] for position in segment.positions]
        read: dict[torch.fx.Node, None] = {}
        for node in inside:
            outside = [source for source in sources[node] if segment_of.get(source) != number]
            read.update(dict.fromkeys(source for source in outside if source not in entries))
        attributes = [node for node in read if node.op == "get_attr" and isinstance(held(node), torch.nn.Module)]
        arguments = [node for node in read if node not in attributes]

        part = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for place, node in enumerate(arguments):
            copies[node] = part.placeholder(f"arg_{place}")
            copies[node].meta = dict(node.meta)
        for node in (*attributes, *(nodes[entry] for entry in active)):
            copies[node] = part.node_copy(node)
        for position, node in zip(segment.positions, inside, strict=True):
            read_by_node = torch.fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = part.create_node(node.op, node.target, *read_by_node, type_expr=node.type)
            copies[node].meta = dict(node.meta)
            active = modes.get(position, active)
        for entry in reversed(active):
            if nodes[entry].target is torch.amp.autocast_mode._enter_autocast:
                part.call_function(torch.amp.autocast_mode._exit_autocast, (copies[nodes[entry]],))
        if segment.kind == FAT:
            results = [nodes[position] for position in segment.outputs if nodes[position] not in entries]
        else:
            results = [node for node in inside if node in leaving]
        part.output(tuple([copies[node] for node in results]))

        name = f"{segment.kind}_{number}"
        root[name] = _LazyGraphModule(graph_module, part)
        call = whole.call_module(name, tuple([value_of(node) for node in arguments]))
        for place, node in enumerate(results):
            if node in leaving:
                values[node] = whole.call_function(operator.getitem, (call, place))
    whole.output(torch.fx.map_arg(nodes[-1].args[0], value_of)).meta = dict(nodes[-1].meta)
    return _LazyGraphModule(root, whole)


# ====================================================================== the rounds

# Steps of an exchange. A rank's START frame holds the reference rank, 4 bytes; ABORT goes both ways, with a reason.
START, SHARE, INTERSECT, AGREE, ABORT = range(1, 6)

# The reference's keys: of some 500,000 nodes.
MAX_SHARED_BYTES = 16 * 2**20
MAX_REASON_BYTES = 1024
# In a job of 8,192 ranks that are split in pairs, all at once.
MAX_OPEN_EXCHANGES = 4096

_YES, _NO = b"\x01", b"\x00"

Reply = tuple[int, int, int, bytes]  # rank, its number of the vote, step, payload


@dataclasses.dataclass(eq=False, slots=True)
class _Open:
    """An open exchange."""

    numbers: dict[int, int]  # of its ranks: the number by which each knows it
    reference: int
    deadline: float
    step: int = SHARE
    heard: set[int] = dataclasses.field(default_factory=set)  # in this step
    bitmap: int = 0
    num_bytes: int = 0
    digests: set[bytes] = dataclasses.field(default_factory=set)

    def to_all(self, step: int, payload: bytes, but: int | None = None) -> list[Reply]:
        return [(rank, number, step, payload) for rank, number in self.numbers.items() if rank != but]


def _called_off(told: Iterable[tuple[int, int]], why: str) -> list[Reply]:
    """There is no plan. All these ranks hear it, by rank and number of the vote; the first of them why, for its log."""
    return [(rank, number, ABORT, b"" if place else why.encode()) for place, (rank, number) in enumerate(sorted(told))]


class Rounds:
    """The coordinator's side of all exchanges, each of which may last `timeout_s`. It knows no socket, no clock and no
    thread: it is told the time, in seconds, and what it returns is to be sent.

    The ranks of a split component are answered together, so an exchange begins with all of them, and goes on in steps:

        SHARE       the reference rank's payload, to all the others
        INTERSECT   the bitwise AND of everybody's bitmap, to all; as often as they need it
        AGREE       whether all gave the same digest, to all; only a yes lets anybody run anything fat

    It is called off for all, once, as soon as it can't complete: a rank says something else than its step asks for,
    says that it can't go on, is lost, or does not come in time. What a rank still says to it then is ignored. A rank
    that has cast votes ahead may be in several. It goes through them in the order of its votes, so an exchange is
    opened only if all its ranks come to it after those that are open: ranks never wait for one another in a cycle.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: dict[_Open, None] = {}  # the oldest first
        self._of_rank: dict[int, dict[int, _Open]] = {}  # by rank and its number

    def settled(self, votes: Sequence[Any], now: float) -> list[Reply]:
        """Opens an exchange between all votes of one component, which was split; or says why it can't.

        A vote has a `rank`, the rank's own `number` of it (they rise), a `digest`, and `spans` of `(line, start, end)`.
        A group has one line, whose `ranks` are the group's.
        """
        numbers = {vote.rank: vote.number for vote in votes}
        why_not = "a rank takes part with two graphs" if len(numbers) < len(votes) else self._why_not(votes)
        if why_not:
            return _called_off([(vote.rank, vote.number) for vote in votes], why_not)
        frequency = Counter(vote.digest for vote in votes)
        reference = min(votes, key=lambda vote: (-frequency[vote.digest], vote.rank)).rank
        exchange = _Open(numbers, reference, now + self._timeout_s)
        self._open[exchange] = None
        for rank, number in numbers.items():
            self._of_rank.setdefault(rank, {})[number] = exchange
        return exchange.to_all(START, reference.to_bytes(4, "big"))

    def _why_not(self, votes: Sequence[Any]) -> str:
        came: dict[tuple[int, int, int], tuple[Any, set[int]]] = {}
        for vote in votes:
            if any(number >= vote.number for number in self._of_rank.get(vote.rank, ())):
                return f"rank {vote.rank} is in the exchange of a later vote"
            for line, start, end in vote.spans:
                came.setdefault((id(line), start, end), (line, set()))[1].add(vote.rank)
        if any(len(line.ranks) > len(ranks) for line, ranks in came.values()):
            members = {rank for line, _ in came.values() for rank in line.ranks}
            absent = members.difference(vote.rank for vote in votes)
            return f"{_vocabulary.format_ranks(absent)} did not take part" if absent else "spans differ"
        return "too many exchanges are open" if len(self._open) >= MAX_OPEN_EXCHANGES else ""

    def take(self, rank: int, number: int, step: int, payload: bytes, now: float) -> list[Reply]:
        """Takes one rank's part in a step of the exchange that it knows by this number of a vote."""
        exchange = self._of_rank.get(rank, {}).get(number)
        if exchange is None:
            return []  # it has ended, and the rank has been told
        if step == ABORT:
            reason = payload[:MAX_REASON_BYTES].decode("utf-8", "replace")
            return self._call_off(exchange, f"rank {rank} can't go on: {reason}", but=rank)
        if exchange.step == INTERSECT and not exchange.heard and step == AGREE:
            exchange.step = AGREE  # enough intersections: the first rank to say so speaks for all
        if step != exchange.step or rank in exchange.heard:
            return self._call_off(exchange, f"rank {rank} is out of step")
        if step == SHARE:
            if rank != exchange.reference:
                return self._call_off(exchange, f"rank {rank} is not the reference rank")
            exchange.step = INTERSECT
            return exchange.to_all(SHARE, payload, but=rank)
        if step == INTERSECT:
            if exchange.heard and len(payload) != exchange.num_bytes:
                return self._call_off(exchange, f"rank {rank} has a bitmap of another length")
            bits = int.from_bytes(payload, "big")
            exchange.bitmap = exchange.bitmap & bits if exchange.heard else bits
            exchange.num_bytes = len(payload)
        else:
            exchange.digests.add(payload)
        exchange.heard.add(rank)
        if len(exchange.heard) < len(exchange.numbers):
            return []
        exchange.heard.clear()
        if step == INTERSECT:
            return exchange.to_all(INTERSECT, exchange.bitmap.to_bytes(exchange.num_bytes, "big"))
        self._forget(exchange)
        return exchange.to_all(AGREE, _YES if len(exchange.digests) == 1 else _NO)

    def drop_rank(self, rank: int, now: float) -> list[Reply]:
        """A rank is gone."""
        exchanges = list(self._of_rank.get(rank, {}).values())
        return [reply for each in exchanges for reply in self._call_off(each, f"rank {rank} is gone", but=rank)]

    def tick(self, now: float) -> list[Reply]:
        """Calls off the exchanges whose time is up."""
        replies: list[Reply] = []
        for exchange in [exchange for exchange in self._open if exchange.deadline <= now]:
            late = {exchange.reference} if exchange.step == SHARE else exchange.numbers.keys() - exchange.heard
            replies += self._call_off(exchange, f"{_vocabulary.format_ranks(late)} did not come in time")
        return replies

    def next_deadline(self) -> float | None:
        """When `tick` should be called next; None if no exchange is open."""
        return min((exchange.deadline for exchange in self._open), default=None)

    def close(self) -> list[Reply]:
        """Nothing is left to be said: the ranks hear that the coordinator ends."""
        return []

    def _call_off(self, exchange: _Open, why: str, but: int | None = None) -> list[Reply]:
        self._forget(exchange)
        return _called_off([told for told in exchange.numbers.items() if told[0] != but], why)

    def _forget(self, exchange: _Open) -> None:
        del self._open[exchange]
        for rank, number in exchange.numbers.items():
            of_rank = self._of_rank[rank]
            del of_rank[number]
            if not of_rank:
                del self._of_rank[rank]


class Channel(Protocol):
    """A rank's way to the coordinator, for one exchange."""

    def send(self, step: int, payload: bytes) -> None: ...
    def receive(self) -> tuple[int, bytes]: ...
    def close(self) -> None: ...
    def abandon(self, step: int, payload: bytes) -> None: ...


class Exchange:
    """The rounds in which the ranks of a split component agree on a plan, as one rank goes through them.

    Each method returns None once the exchange is called off: a rank is lost, late, or not able to. Everybody goes
    on skinny then. They raise HandshakeError when the coordinator is lost or does not answer.

    Attributes:
        rank: this rank.
        is_undecided: the answer to this rank's `agree` is on its way, or got lost: the others may run the plan.
    """

    _channel: Channel | None = None  # None once it has ended

    def __init__(self, channel: Channel, rank: int) -> None:
        self.rank = rank
        self.is_undecided = False
        self._channel = channel
        self._reference: int | None = None

    def reference_rank(self) -> int | None:
        """The rank whose graph the others align with. To be called first."""
        payload = self._receive(START)
        self._reference = None if payload is None else int.from_bytes(payload, "big")
        return self._reference

    def share(self, payload: bytes | None) -> bytes | None:
        """The reference rank gives `payload`, the others None; all get it."""
        if self.rank != self._reference:
            return self._receive(SHARE)
        if payload is None:
            raise _vocabulary.HandshakeConfigError("the reference rank must share its keys")
        if len(payload) > MAX_SHARED_BYTES:
            self.abort(f"the reference graph's keys take {len(payload)} bytes")
        self._send(SHARE, payload)
        return None if self._channel is None else payload

    def intersect(self, bitmap: bytes) -> bytes | None:
        """The bitwise AND of all ranks' bitmaps, which must be of one length. May be called several times."""
        self._send(INTERSECT, bitmap)
        return self._receive(INTERSECT)

    def agree(self, fingerprint: str) -> bool:
        """Whether all ranks of the component gave the same fingerprint: then, and only then, run the plan."""
        self.is_undecided = True  # and stays so after an exception, as nobody knows then what the others were told
        self._send(AGREE, _vocabulary.fingerprint_digest(fingerprint))
        answer = self._receive(AGREE)
        self.is_undecided = False
        self._end()
        if answer == _NO:
            self.log_once("the ranks' plans differ")
        return answer == _YES

    def log_once(self, why: str) -> None:
        """Says why there is no plan, where all ranks know: one of them does."""
        if self.rank == self._reference:
            _LOG.info("handshake: no common plan: %s", why)

    def abort(self, reason: str) -> None:
        """This rank can't go on: everybody runs skinny."""
        try:
            self._send(ABORT, reason.encode("utf-8", "replace")[:MAX_REASON_BYTES])
        finally:
            self._end()

    def leave(self) -> None:
        """`abort`, if this rank has not come to the end."""
        if not self.is_undecided:
            self.abort("it went on to its next vote instead")

    def _send(self, step: int, payload: bytes) -> None:
        if self._channel is not None:
            self._channel.send(step, payload)

    def _receive(self, expected: int) -> bytes | None:
        if self._channel is None:
            return None
        step, payload = self._channel.receive()
        if step == ABORT:
            if payload:
                _LOG.info("handshake: no common plan: %s", payload.decode("utf-8", "replace"))
            self._end()
            return None
        if step != expected:
            raise _vocabulary.HandshakeProtocolError(f"step {step} of an exchange in place of step {expected}")
        return payload

    def _end(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def __del__(self) -> None:
        if self._channel is not None:
            self._channel.abandon(ABORT, b"its ticket was thrown away")
