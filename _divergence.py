# SPDX-License-Identifier: Apache-2.0
"""Says in which way the graphs of several ranks differ, and what to change so that they don't.

Works on the text of graphs alone (see `_graph_text`), without torch: online in a process of its own (`_report_job`),
for the variants that the ranks sent after a split; offline on files that somebody already has (`_explain`).

**Reference.** The variant that most ranks have; of several, the one with the lowest rank. Rank 0 may be the odd one
out. Every other variant is compared with it (`_graph_diff`).

**Merging.** The same place in the reference that differs in several variants is one difference with one value per
variant. For a constant these are a table; values that are affine in the rank, or in its place in a group, are
recognised: that is a shard's offset, baked into the graph.
"""

import functools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

if __package__:
    from ._graph_diff import (
        MAX_DIFFERENCES_PER_VARIANT,
        NOT_THERE,
        Comparison,
        Difference,
        Keys,
        clip,
        compare,
        count_collectives,
        number_of,
        short_target,
    )
    from ._graph_text import Graph, Source, group_ranks, parse
    from ._vocabulary import format_ranks
else:
    from _graph_diff import (
        MAX_DIFFERENCES_PER_VARIANT,
        NOT_THERE,
        Comparison,
        Difference,
        Keys,
        clip,
        compare,
        count_collectives,
        number_of,
        short_target,
    )
    from _graph_text import Graph, Source, group_ranks, parse
    from _vocabulary import format_ranks

# The text goes into a log and is read in a terminal: a screen or two.
MAX_TEXT_DIFFERENCES = 10
MAX_TEXT_VARIANTS = 8
MAX_TEXT_VALUES = 4
MAX_TEXT_ADVICE = 6
MAX_TEXT_NOTES = 8
MAX_WIDTH = 110
MAX_HEAD = 300

# Comparisons laid side by side on the page: a browser scrolls through this many at ease.
MAX_COMPARISONS = 12

# A longer number is no offset into anything. (Python refuses integers of more than 4,300 digits.)
MAX_NUMBER_CHARACTERS = 40

# Where the groups are not known, rows of a mesh up to this many ranks are tried, and larger ones that divide the world.
MAX_ROW_GUESSED = 64


class Variant(NamedTuple):
    """One of the graphs, and who has it.

    Attributes:
        ranks: the ranks that have it.
        fingerprint: by which it was found to be another graph.
        text: of the graph; empty if it is not there.
        hosts: `host:pid` by rank, where known.
    """

    ranks: tuple[int, ...]
    fingerprint: str
    text: str
    hosts: Mapping[int, str] = {}


class Context(NamedTuple):
    """What is known beside the graphs. Everything may be missing.

    Attributes:
        groups: (ranks, (start, end)) of each group's line where the split was; the span may be None.
        before: the handshakes just before, a line of text each, oldest first.
        reason: why the vote was split.
        notes: what was left out, and which bound made it so.
        versions: {library: version} by rank.
        title: what these graphs are, for the heading.
    """

    groups: tuple[tuple[tuple[int, ...], tuple[int, int] | None], ...] = ()
    before: tuple[str, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    versions: Mapping[int, Mapping[str, str]] = {}
    title: str = ""


# --- Merging the variants ---------------------------------------------------------------------------------------------


def _merge(comparisons: Mapping[int, Comparison]) -> list[Difference]:
    """One difference for each place in the reference, with the values of all the variants that differ there."""
    merged: dict[Any, Difference] = {}
    for variant, comparison in comparisons.items():
        for difference in comparison.differences:
            key: Any = (difference.body, difference.position, difference.kind, difference.what, difference.reference)
            if difference.reference == NOT_THERE:
                key = (*key, tuple(node.target for node in difference.nodes))
            known = merged.setdefault(key, difference)
            known.values[variant] = difference.values[-1]
            known.follows = max(known.follows, difference.follows)
    for difference in merged.values():
        difference.values.pop(-1, None)
    return _collapse(sorted(merged.values(), key=lambda difference: (difference.body, difference.position)))


def _collapse(differences: list[Difference]) -> list[Difference]:
    """Takes together what differs in the same way in many nodes, as a change in every layer does."""
    first: dict[Any, Difference] = {}
    for difference in differences:
        key: Any = (difference.kind, difference.body, difference.what, difference.node.op, difference.node.target)
        if difference.nodes:
            key = (*key, tuple(node.target for node in difference.nodes), tuple(difference.values))
        else:
            key = (*key, difference.reference, tuple(difference.values.items()))
        if difference.kind in ("order of collectives", "inputs", "outputs"):
            key = (*key, difference.position)
        known = first.setdefault(key, difference)
        if known is not difference:
            known.alike.append(difference.position)
            known.follows += difference.follows
    return list(first.values())


_INTEGER = re.compile(r"-?\d+$")
_FLOAT = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+)(?:e[+-]?\d+)?$")


def recognise(value_of_rank: Mapping[int, str], groups: Iterable[Sequence[int]] = ()) -> str:
    """The formula by which a constant depends on the rank, or an empty string.

    Args:
        value_of_rank: the constant as written, by rank; not all ranks need be there.
        groups: ranks of the groups that are known; a rank's place in its group of each size is tried.

    Returns:
        Such as `18992 · rank`, `18992 · (rank + 1)` or `64 · (rank % 4)`. Two values are enough only for a multiple
        of the rank or of the rank + 1; any two points lie on a line.
    """
    values: dict[int, float] = {}
    for rank, text in value_of_rank.items():
        if not _FLOAT.match(text):
            return ""
        if len(text) > MAX_NUMBER_CHARACTERS:
            return ""
        values[rank] = int(text) if _INTEGER.match(text) else float(text)
        if not math.isfinite(values[rank]):
            return ""
    for name, index_of in _indices(values, groups):
        formula = _affine(values, name, index_of)
        if formula:
            return formula
    return ""


def _indices(
    values: Mapping[int, float], groups: Iterable[Sequence[int]]
) -> Iterator[tuple[str, Callable[[int], int]]]:
    """What a constant may depend on: a name, and the index of a rank."""
    yield "rank", lambda rank: rank
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in sorted({tuple(sorted(group)) for group in groups}):
        by_size.setdefault(len(group), []).append(group)
    for size, known in sorted(by_size.items()):
        members = Counter(rank for group in known for rank in group)
        if size > 1 and all(members[rank] == 1 for rank in values):
            place = {rank: number for group in known for number, rank in enumerate(group)}
            yield f"(rank in its group of {size})", place.__getitem__
    # Without the groups: a mesh of ranks in order, whose rows have `size` ranks.
    for size in _row_sizes(max(values, default=0) + 1):
        yield f"(rank % {size})", lambda rank, size=size: rank % size  # type: ignore[misc]
        yield f"(rank // {size})", lambda rank, size=size: rank // size  # type: ignore[misc]


@functools.cache
def _row_sizes(world_size: int) -> list[int]:
    return [size for size in range(2, world_size) if size <= MAX_ROW_GUESSED or world_size % size == 0]


def _affine(values: Mapping[int, float], name: str, index_of: Callable[[int], int]) -> str:
    points: dict[int, float] = {}
    for rank, value in values.items():
        if points.setdefault(index_of(rank), value) != value:
            return ""
    if len(points) < 2:
        return ""
    (x0, y0), (x1, y1), *_ = points.items()
    exact = all(isinstance(value, int) for value in points.values())
    if exact and (y1 - y0) % (x1 - x0):
        return ""
    step = (y1 - y0) // (x1 - x0) if exact else (y1 - y0) / (x1 - x0)
    offset = y0 - step * x0
    if not step or not math.isfinite(step) or not math.isfinite(offset):
        return ""
    if any(abs(step * x + offset - y) > (0 if exact else 1e-9 * abs(y)) for x, y in points.items()):
        return ""
    ahead = round(offset / step)
    is_multiple = abs(offset - ahead * step) <= (0 if exact else 1e-9 * abs(step))
    if len(points) == 2 and not (is_multiple and ahead in (0, 1) and abs(step) >= 2):
        return ""
    if step != 1 and is_multiple and ahead and abs(ahead) <= max(points) + 1:
        return f"{_plain(step)} · ({name} {'+' if ahead > 0 else '-'} {abs(ahead)})"
    term = name if step == 1 else f"{_plain(step)} · {name}"
    if is_multiple and not ahead:
        return term
    return f"{term} {'+' if offset > 0 else '-'} {_plain(abs(offset))}"


def _plain(number: float) -> str:
    """Without the digits that come from rounding alone."""
    return str(number) if isinstance(number, int) else f"{number:.12g}"


# --- Advice -----------------------------------------------------------------------------------------------------------


_ADVICE = {
    "versions": (
        "The ranks have different library versions (above). Install the same ones everywhere first: other versions "
        "decompose, fuse and partition differently."
    ),
    "hosts": (
        "The variants follow the hosts. Compare the hosts: library versions, environment variables, and compile caches "
        "(a cache that is warm on some hosts only can give them an older graph; clear it or share it)."
    ),
    "nothing differs": (
        "The texts of the graphs are the same on {odd} and in the reference, so the fingerprints differ in something "
        "that the text does not show: values of tensor constants, inputs that are changed in place or share memory, or "
        "how the graph was compiled. A fingerprint of the executable also differs where library versions or compiler "
        "flags do."
    ),
    "shard": (
        "The bounds of the shard of each rank ({formulas}) are baked into the graph as Python constants{at}. Keep them "
        'in a buffer (`self.register_buffer("shard_start", torch.tensor(start), persistent=False)`) or pass them to '
        "the compiled function as tensor inputs, and compute with the tensor: then all ranks trace one graph."
    ),
    "number": (
        "A number that depends on the rank ({formulas}) is baked into the graph as a Python constant{at}. Pass it in "
        "as a tensor, and compute with that (where it is an index or the start of a slice, by "
        "`x.index_select(dim, start + torch.arange(length))`): then all ranks trace one graph."
    ),
    "constant": (
        "A Python value that is not the same on all ranks is baked into the graph{at}: a setting, an environment "
        "variable, a seed, a length. Make it equal on all ranks, or pass it in as a tensor."
    ),
    "setting": (
        "An argument that no tensor can stand for (such as a kind of reduction, an epsilon, a dimension or a flag) is "
        "not the same on all ranks{at}: it comes from a setting, an environment variable or a branch on the rank. Make "
        "it equal on all ranks."
    ),
    "tensor constant": (
        "A tensor made while tracing has other values on {odd}{at}; its values are part of the graph. Make it once in "
        "`__init__` with `register_buffer`, or pass it in as an input."
    ),
    "graph break": (
        "One graph ends or begins where the other goes on{at}: probably a graph break, or a function compiled "
        "separately, on some ranks only. Run with TORCH_LOGS=graph_breaks,recompiles and compare {odd} with the rest; "
        "`torch.compile(fullgraph=True)` turns a break into an error at its place. If no rank breaks there, the rest "
        "is under a condition that depends on the rank: do it on all ranks."
    ),
    "collectives": (
        "Not all ranks issue the same collectives{at}: on the device the ranks would wait for one another for ever. "
        "Issue the collective on all members of its group (with an empty or zero input where a rank has nothing to "
        "give), not under a condition that depends on the rank."
    ),
    "graph": (
        "The graphs of {odd} and of the reference have next to nothing in common: these ranks are at different places "
        "of the program. Look for a branch on the rank or on data before this point, a graph break or a recompile on "
        "some ranks only, or a compile cache that is warm on some ranks only."
    ),
    "operations": (
        "The ranks traced different operations{at}. Look there for a branch on the rank or on its settings, and remove "
        "it or compute both sides on all ranks; else for other library versions, for a compile cache that is warm on "
        "some ranks only (clear it or share it), or for a partitioner that chose differently."
    ),
    "order of collectives": (
        "The same collectives come in another order on {odd}{at}: on the device the ranks would wait for one another "
        "for ever, or mix up values. Issue them in a fixed order: the same on both sides of a branch; over sorted "
        "keys, not over a set or dict that was filled in another order; without passes that reorder by timings "
        "measured in each process (for Inductor `torch._inductor.config.reorder_for_compute_comm_overlap = False`), "
        "or let one rank choose for all."
    ),
    "shape": (
        "Sizes are not the same on all ranks{at}. Pad to the same size (uneven last batch: drop_last=True, or pad; "
        "uneven shards: pad the shard), or mark the dimension dynamic on all ranks: "
        "`torch._dynamo.mark_dynamic(tensor, dim)` before the first call, or `torch.compile(dynamic=True)`."
    ),
    "dtype": (
        "The dtype is not the same on all ranks{at}: check that autocast, the parameters' dtype and the loaded "
        "checkpoint are the same everywhere."
    ),
    "stride": (
        "The stride is not the same on all ranks{at}: call `.contiguous()` (or use one memory format) before the "
        "compiled part."
    ),
    "device": "The device is not the same on all ranks{at}: put the tensor on the same kind of device everywhere.",
    "name of a group": (
        "The group has the same ranks but was created under another name{at}: names are counted in the order of "
        "creation. Create the groups in the same order, and as many, on all ranks (every rank calls new_group for "
        "every group, its own or not), or take them from one DeviceMesh."
    ),
    "group": (
        "The collective runs on another group{at}. If the groups are each rank's own part of a mesh (its row, its "
        'column), fingerprint by role: `graph_fingerprint(graph_module, groups="role")`. Else use the same group on '
        "all ranks, and create the groups in the same order on all of them."
    ),
    "change in place": (
        "An input is changed in place on some ranks only{at}: change it on all ranks or on none, or work on a copy."
    ),
    "inputs": (
        "The graphs take different inputs: check that all ranks have the same parameters and the same optional "
        "arguments, that none is frozen or tied on some ranks only, and (for `Sym` inputs) that a dimension is dynamic "
        "on all ranks or on none: `torch._dynamo.mark_dynamic(tensor, dim)` on all, before the first call."
    ),
    "outputs": (
        "The graphs return different values: check that the same parameters need gradients on all ranks, that the "
        "function returns the same on all, and that a compile cache or partitioner did not choose other tensors to "
        "save for backward on some ranks."
    ),
    "text": (
        "No operation differs, only how the graph is written{at}: arguments that are passed by position or in another "
        "order, or texts that different library versions have printed. Call it in one way, and install the same "
        "versions on all ranks."
    ),
}


def _advice(report: "Report") -> list[str]:
    """What to change, the most telling first; each piece once, with the place of the first difference it is for."""
    found: dict[str, str] = {}
    if _version_lines(report.context.versions):
        found["versions"] = _ADVICE["versions"]
    elif report.split_by_host:
        found["hosts"] = _ADVICE["hosts"]
    topics = [(difference, list(_topics(difference, report))) for difference in report.differences]
    for difference, of_difference in topics:
        odd = format_ranks(rank for variant in difference.values for rank in report.variants[variant].ranks)
        at = f" ({difference.source.place})" if difference.source else ""
        for topic in of_difference:
            formulas = dict.fromkeys(f"`{each.formula}`" for each, of_each in topics if topic in of_each)
            if topic not in found:
                found[topic] = _ADVICE[topic].format(odd=odd, at=at, formulas=", ".join([*formulas][:3]))
    if "graph break" in found:
        found.pop("inputs", None)  # what the rest takes
    if "order of collectives" in found:
        found.pop("group", None)  # in another order each rank's own groups may be meant
    same = [number for number, comparison in report.comparisons.items() if not comparison.differences]
    if same:
        odd = format_ranks(rank for number in same for rank in report.variants[number].ranks)
        found["nothing differs"] = _ADVICE["nothing differs"].format(odd=odd)
    return list(found.values())


# Operations whose integers are sizes, or the places of a part; those that compute with a number, which may be a tensor;
# and among these, those that find what of an index is in a shard.
_SIZE_OPERATIONS = frozenset(
    "slice slice_scatter narrow constant_pad_nd pad view _unsafe_view reshape expand repeat split split_with_sizes "
    "chunk unfold as_strided full zeros ones empty rand randn arange new_full new_zeros new_ones new_empty".split()
)
_NUMBER_OPERATIONS = frozenset(
    "add sub rsub mul div truediv floordiv remainder mod pow eq ne ge gt le lt maximum minimum clamp clamp_min "
    "clamp_max where masked_fill fill select getitem".split()
)
_BOUND_OPERATIONS = frozenset("ge gt le lt sub rsub clamp clamp_min clamp_max where masked_fill".split())


def _constant_topic(difference: Difference, report: "Report") -> str:
    parts = difference.node.target.split(".")
    name = (parts[3] if difference.node.target.startswith("torch.ops.") and len(parts) > 3 else parts[-1]).rstrip("_")
    if name in _SIZE_OPERATIONS:
        # A part that has the same size everywhere begins at another place.
        is_start = name in ("slice", "narrow") and difference.node.shape is not None and not difference.follows
        return "number" if is_start and difference.formula else "shape"
    sides = (difference.reference, *difference.values.values())
    are_numbers = all(_FLOAT.match(side) or side.endswith(", computed") for side in sides)
    if not are_numbers or name not in _NUMBER_OPERATIONS:
        return "setting"
    if not difference.formula:
        return "constant"
    # A stride of one is more likely a number of its own, such as a seed.
    is_bound = name in _BOUND_OPERATIONS and "·" in difference.formula
    return "shard" if is_bound and not report.reads_floats(difference) else "number"


def _topics(difference: Difference, report: "Report") -> Iterator[str]:
    """The pieces of advice that a difference calls for."""
    kind = difference.kind
    if kind == "constant":
        yield _constant_topic(difference, report)
    elif kind == "inputs" and difference.what == "change in place":
        yield "change in place"
    elif kind == "group" and "same ranks" in difference.what:
        yield "name of a group"
    elif kind in _ADVICE:
        yield kind
    else:  # operations, and collectives among them
        has_collective = any(node.is_collective for node in (difference.node, *difference.nodes))
        if difference.at_end and difference.size > 1:
            yield "graph break"
        elif kind == "number of collectives" or has_collective:
            yield "collectives"
        if kind != "number of collectives":
            yield "operations"


def _version_lines(versions: Mapping[int, Mapping[str, str]]) -> list[str]:
    """One line for each library whose version is not the same on all ranks."""
    lines = []
    for library in sorted({library for of_rank in versions.values() for library in of_rank}):
        ranks_of: dict[str, list[int]] = {}
        for rank, of_rank in sorted(versions.items()):
            ranks_of.setdefault(of_rank.get(library, "none"), []).append(rank)
        if len(ranks_of) > 1:
            sides = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1]))
            lines.append(f"{library}: " + ", ".join(f"{version} on {format_ranks(ranks)}" for version, ranks in sides))
    return lines


def first_notes(notes: Sequence[str]) -> list[str]:
    more = len(notes) - MAX_TEXT_NOTES
    return [*notes[:MAX_TEXT_NOTES], *([f"and {number_of(more, 'note')} more (MAX_TEXT_NOTES)"] if more > 0 else [])]


def source_text(source: Source | None) -> str:
    if source is None:
        return "no source line known"
    return f"{source.place}: {clip(source.code)}" if source.code else source.place


# --- The report -------------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """What is kept of a variant's graph: its size, whether its text was cut off, whose text that is and its groups."""

    nodes: int
    collectives: int
    is_cut: bool
    rank: str
    groups: Mapping[str, Sequence[int]]


_UNREADABLE = "the text holds no graph that could be read: not compared"
_NO_TEXT = "there is no text of the graph: not compared"
_CUT = "the text of the graph is cut off: what is missing at its end may be there in fact"
_BY_ROLE = "the names and ranks of groups are those of {rank} alone; the others' are other groups of the same role"
_UNHASHABLE = "the graph could not be hashed, so it equals no other: see the warning on that rank"


class Report:
    """What differs between the variants of one graph.

    Attributes:
        variants: largest first; the first is the reference of all comparisons (if its text could be read).
        summaries: what was read from each variant's text; None if that holds no graph.
        comparisons: by index of the variant.
        alike: indices of the variants that differ from the reference in the same places, together. The bodies are kept
            only in the comparison of the first of them.
        differences: merged over the variants, in the order of the reference.
        advice: what to change, the most telling first.
    """

    def __init__(
        self, variants: Iterable[Variant], graph_of: Callable[[Variant], Graph | None], context: Context
    ) -> None:
        """`graph_of` reads a variant's graph. One is held beside the reference's at a time: 64 take much memory."""
        self.context = context
        self.variants = sorted(variants, key=lambda variant: (-len(variant.ranks), min(variant.ranks, default=0)))
        self.summaries: list[Summary | None] = [None] * len(self.variants)
        self.comparisons: dict[int, Comparison] = {}
        self.alike: dict[Any, list[int]] = {}
        self.reference = 0
        self.reference_graph: Graph | None = None
        # Of each variant, the positions in the reference's bodies that it doesn't have.
        self._lacks: dict[tuple[int, str], frozenset[int]] = {}
        cache: dict[int, Keys] = {}
        for number, variant in enumerate(self.variants):
            graph = graph_of(variant)
            if graph is None:
                continue
            self.summaries[number] = Summary(
                len(graph.body.nodes),
                count_collectives(graph.body),
                graph.is_cut,
                graph.facts.get("rank", ""),
                group_ranks(graph.facts),
            )
            if self.reference_graph is None:
                self.reference, self.reference_graph = number, graph
            else:
                self._keep(number, compare(self.reference_graph, graph, cache))
        self.differences = _merge(self.comparisons)
        self._complete()
        self.advice = _advice(self)

    def _keep(self, number: int, comparison: Comparison) -> None:
        for body in comparison.bodies:
            lacking = frozenset(i for i in range(len(body.reference.nodes)) if i not in body.to_other)
            self._lacks[number, body.path] = lacking
        pattern = tuple((each.body, each.position, each.kind, each.what) for each in comparison.differences)
        numbers = self.alike.setdefault(pattern, [])
        numbers.append(number)
        is_shown = len(numbers) == 1 and len(self.alike) <= MAX_COMPARISONS
        self.comparisons[number] = comparison if is_shown else comparison._replace(bodies=[])

    def _complete(self) -> None:
        """Adds what needs all the variants: formulas of constants, ranks of groups."""
        groups: list[Sequence[int]] = [ranks for ranks, _ in self.context.groups]
        groups += [ranks for summary in self.summaries if summary is not None for ranks in summary.groups.values()]
        for difference in self.differences:
            if difference.kind == "constant":
                difference.formula = recognise(self.value_of_rank(difference), groups)
            elif difference.kind == "group":
                self._complete_group(difference)

    def _complete_group(self, difference: Difference) -> None:
        sides = [(self.reference, difference.reference), *difference.values.items()]
        members = []
        for number, name in sides:
            summary = self.summaries[number]
            members.append(summary.groups.get(name.strip("'\"")) if summary is not None else None)
        if None not in members and len({tuple(ranks) for ranks in members if ranks is not None}) == 1:
            difference.what = f"name of the group ({difference.what}; same ranks)"
        texts = [
            name if ranks is None else f"{name} = {format_ranks(ranks)}{self._whose(number, ranks)}"
            for (number, name), ranks in zip(sides, members, strict=True)
        ]
        difference.reference = texts[0]
        difference.values = dict(zip(difference.values, texts[1:], strict=True))

    def _whose(self, number: int, members: Iterable[int]) -> str:
        """Of which rank a group is, in a variant whose ranks are not all in it: they are alike by its role only."""
        summary = self.summaries[number]
        if summary is None or set(self.variants[number].ranks) <= set(members):
            return ""
        return f" on rank {summary.rank}" if summary.rank else " on one of them"

    def reads_floats(self, difference: Difference) -> bool:
        """Whether the first tensor that a matched node reads is one of floating point numbers, as no index is."""
        assert self.reference_graph is not None  # else there is no difference
        body = self.reference_graph.body
        for name in filter(None, difference.body.split(".")):
            body = body.bodies[name]
        read = next((each.producer for each in difference.node.arguments if each.producer is not None), None)
        return read is not None and re.match(r"b?f\d", body.nodes[read].dtype) is not None

    def value(self, difference: Difference, number: int) -> str | None:
        """A difference's side in this variant; None if it doesn't have the node."""
        if number in difference.values or number not in self.comparisons:
            return difference.values.get(number, difference.reference)
        if difference.what in ("added", "inputs"):
            return difference.reference
        # A nested body that was not compared is equal.
        lacking = self._lacks.get((number, difference.body), frozenset())
        return None if difference.position in lacking else difference.reference

    def value_of_rank(self, difference: Difference) -> dict[int, str]:
        """A difference's value on each rank whose graph has the node."""
        return {
            rank: value
            for number in (self.reference, *self.comparisons)
            if (value := self.value(difference, number)) is not None
            for rank in self.variants[number].ranks
        }

    def sides(self, difference: Difference) -> list[tuple[tuple[int, ...], str]]:
        """(ranks, value to be shown) of each value, the reference's first, then in the order of the variants."""
        ranks_of: dict[str, list[int]] = {difference.reference: []}
        for number in (self.reference, *self.comparisons):
            value = self.value(difference, number) or NOT_THERE
            ranks_of.setdefault(value, []).extend(self.variants[number].ranks)
        return [(tuple(sorted(ranks)), difference.shown(value)) for value, ranks in ranks_of.items()]

    @property
    def split_by_host(self) -> bool:
        """Whether all ranks of a host have the same variant, with several hosts and a host of several ranks."""
        variants_of: dict[str, set[int]] = {}
        ranks = 0
        for number, variant in enumerate(self.variants):
            for address in variant.hosts.values():
                variants_of.setdefault(address.rpartition(":")[0], set()).add(number)
                ranks += 1
        return (
            1 < len(variants_of) < ranks
            and len(self.variants) > 1
            and all(len(numbers) == 1 for numbers in variants_of.values())
        )

    def name(self, number: int) -> str:
        """A variant's short name: A for the first."""
        letters = ""
        number += 1
        while number:
            number, letter = divmod(number - 1, 26)
            letters = chr(65 + letter) + letters
        return letters

    def headline(self) -> str:
        ranks = [rank for variant in self.variants for rank in variant.ranks]
        title = f"{self.context.title}: " if self.context.title else ""
        if len(self.variants) == 1:
            return f"{title}{format_ranks(ranks)} have the same graph"
        return f"{title}{format_ranks(ranks)} have {len(self.variants)} different graphs"

    def where(self) -> list[str]:
        """Position on the groups' lines, reason, versions, the handshakes before, bounds that bit; a line each."""
        lines = [
            f"On the line of {format_ranks(ranks)}" + (f": collectives [{span[0]}, {span[1]})" if span else "")
            for ranks, span in self.context.groups
        ]
        if self.context.reason:
            lines.append(f"Reason: {self.context.reason}")
        lines.extend(f"Library versions differ: {line}" for line in _version_lines(self.context.versions))
        return lines

    def notes(self) -> list[str]:
        """What the report lacks, and why."""
        concerned: dict[str, list[int]] = {}
        for variant, summary in zip(self.variants, self.summaries, strict=True):
            if summary is None:
                reason = _UNREADABLE if variant.text else _NO_TEXT
                concerned.setdefault(reason, []).extend(variant.ranks)
            elif summary.is_cut:
                concerned.setdefault(_CUT, []).extend(variant.ranks)
            if summary is not None and not all(set(variant.ranks) <= set(ranks) for ranks in summary.groups.values()):
                reason = _BY_ROLE.format(rank=f"rank {summary.rank}" if summary.rank else "one of them")
                concerned.setdefault(reason, []).extend(variant.ranks)
            if variant.fingerprint.startswith("unhashable-"):
                concerned.setdefault(_UNHASHABLE, []).extend(variant.ranks)
        notes = [f"{reason} ({format_ranks(ranks)})" for reason, ranks in concerned.items()]
        notes.extend(self.context.notes)
        for number, comparison in self.comparisons.items():
            if comparison.dropped:
                notes.append(
                    f"{self.name(number)}: {comparison.dropped:,} differences more than "
                    f"MAX_DIFFERENCES_PER_VARIANT={MAX_DIFFERENCES_PER_VARIANT} are left out"
                )
        return notes

    def describe_variant(self, number: int) -> str:
        """Size and fingerprint of a variant, and where its ranks run."""
        variant, summary = self.variants[number], self.summaries[number]
        parts = []
        if summary is not None:
            parts.append(f"{number_of(summary.nodes, 'node')}, {number_of(summary.collectives, 'collective')}")
        if variant.fingerprint:
            parts.append(f"fingerprint {variant.fingerprint[:16]}{'…' if len(variant.fingerprint) > 16 else ''}")
        hosts = [variant.hosts[rank] for rank in sorted(variant.hosts)]
        if hosts:
            parts.append(", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""))
        return "; ".join(parts)

    def source_text(self, difference: Difference) -> str:
        """The user's line; of an input the line that reads it first."""
        first = "first used in " if difference.node.op == "placeholder" else ""
        return f"{first}{source_text(difference.source)}"

    def position_on_line(self, difference: Difference) -> str:
        """Where on its group's line a collective that differs is, if the span is known."""
        graph = self.reference_graph
        collective = next((node for node in (difference.node, *difference.nodes) if node.is_collective), None)
        if graph is None or collective is None or collective.group is None or difference.body:
            return ""
        name = collective.group.text
        ranks = group_ranks(graph.facts).get(name[1:-1])
        for members, span in self.context.groups:
            if span is not None and ranks is not None and sorted(members) == sorted(ranks):
                before = graph.body.nodes[: difference.position]
                number = sum(node.group is not None and node.group.text == name for node in before)
                return f"position {span[0] + number} on the line of {format_ranks(members)}"
        return ""

    def place(self, difference: Difference) -> str:
        """Node, position and operation of a difference."""
        reference = self.reference_graph
        total = len(reference.body.nodes) if reference is not None else 0
        at = f"node {difference.position:,}"
        body = f" of nested body `{difference.body}`" if difference.body else f" of {total:,}"
        if difference.kind == "graph":
            return "the whole graph"
        if difference.what in ("inputs", "outputs", "added"):
            before = "before " if difference.what == "added" else ""
            position = self.position_on_line(difference)
            return f"{before}{at}{body}" + (f", {position}" if position else "")
        node = difference.node
        operation = f" = {short_target(node.target)}" if node.op == "call" else f" ({node.op})"
        position = self.position_on_line(difference)
        return f"{at}{body}, `{node.name}`{operation}" + (f", {position}" if position else "")

    def text(self) -> str:
        """The report for a log: a screen or two."""
        lines = [self.headline(), *(f"  {line}" for line in self.where())]
        if len(self.variants) > 1:
            lines.append(f"Variants, largest first; {self.name(self.reference)} is the reference:")
            for number, variant in enumerate(self.variants[:MAX_TEXT_VARIANTS]):
                lines.append(f"  {self.name(number)}  {format_ranks(variant.ranks)}  {self.describe_variant(number)}")
            if len(self.variants) > MAX_TEXT_VARIANTS:
                left = [rank for variant in self.variants[MAX_TEXT_VARIANTS:] for rank in variant.ranks]
                count = len(self.variants) - MAX_TEXT_VARIANTS
                lines.append(f"  and {number_of(count, 'variant')} more on {format_ranks(left)}")
        if self.differences:
            follows = sum(difference.follows for difference in self.differences)
            also = f"; in {number_of(follows, 'more node')} as a consequence" if follows else ""
            places = sum(1 + len(difference.alike) for difference in self.differences)
            lines.append(f"What differs, in {number_of(places, 'place')}{also}:")
        for number, difference in enumerate(self.differences[:MAX_TEXT_DIFFERENCES], 1):
            lines.append(clip(f"  {number}. {difference.kind}: {self.place(difference)}, {difference.what}", MAX_HEAD))
            if difference.source is not None:
                lines.append(f"     {self.source_text(difference)}")
            lines.extend(f"     {line}" for line in self._value_lines(difference))
            if difference.alike:
                lines.append(f"     {self.alike_text(difference)}")
        if len(self.differences) > MAX_TEXT_DIFFERENCES:
            more = Counter(difference.kind for difference in self.differences[MAX_TEXT_DIFFERENCES:])
            kinds = ", ".join(f"{count} {kind}" for kind, count in more.most_common())
            lines.append(f"  and {sum(more.values()):,} more ({kinds})")
        if self.advice:
            lines.append("What to do:")
            for advice in self.advice[:MAX_TEXT_ADVICE]:
                wrapped = textwrap.wrap(advice, MAX_WIDTH, break_long_words=False, break_on_hyphens=False)
                lines.extend(f"  {' ' if number else '-'} {line}" for number, line in enumerate(wrapped))
        if self.context.before:
            lines.append("Handshakes just before:")
            lines.extend(f"  {line}" for line in self.context.before)
        lines += first_notes([f"Note: {note}" for note in self.notes()])
        return "\n".join(lines) + "\n"

    def alike_text(self, difference: Difference) -> str:
        """Where else it is the same."""
        shown = ", ".join(map(str, difference.alike[:6])) + (" …" if len(difference.alike) > 6 else "")
        return f"the same at {number_of(len(difference.alike), 'more place')}: node {shown}"

    def _value_lines(self, difference: Difference) -> list[str]:
        sides = self.sides(difference)
        lines = [f"{format_ranks(ranks)}: {clip(value)}" for ranks, value in sides if ranks]
        if len(lines) > MAX_TEXT_VALUES:
            lines = [*lines[: MAX_TEXT_VALUES - 1], f"… {len(lines) - MAX_TEXT_VALUES} more …", lines[-1]]
        if difference.formula:
            lines.append(f"= {difference.formula}")
        return lines


def explain(variants: Iterable[Variant], context: Context | None = None) -> Report:
    """Compares the variants of a graph.

    Args:
        variants: one for each distinct fingerprint; a text that holds no graph, or several, is said to in the report.
        context: what is known beside the graphs.
    """
    context = context or Context()
    concerned: dict[str, list[int]] = {}

    def graph_of(variant: Variant) -> Graph | None:
        try:
            graphs = parse(variant.text)
        except ValueError as error:
            concerned.setdefault(str(error), []).extend(variant.ranks)
            return None
        if len(graphs) > 1:
            concerned.setdefault("the text holds several graphs: only the first is compared", []).extend(variant.ranks)
        return graphs[0] if graphs else None

    report = Report(variants, graph_of, context)
    notes = [f"{reason} ({format_ranks(ranks)})" for reason, ranks in concerned.items()]
    report.context = context._replace(notes=(*context.notes, *notes))
    return report
