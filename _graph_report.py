# SPDX-License-Identifier: Apache-2.0
"""The report on a split: what differs between the ranks' graphs, said so that a person can fix it.

**The report.** `explain` compares every variant with the reference (`_graph_diff`): the variant that most ranks have;
of several, the one with the lowest rank. Rank 0 may be the odd one out. The facts that come of it (`Report.facts`) are
written as they are (JSON), as text for a log, and on a page: one HTML file without scripts, in which everything that
comes from a graph is escaped.

**During a job.** The coordinator hands the votes that were answered to `Reports`. Of each split component one graph is
asked for each distinct fingerprint, of one rank (`send_graph` is that rank's part). When the component is complete and
its graphs are in, or after REPORT_WAIT_S, a child process (`main`) reads and compares them and writes the report: no
verdict waits for it, and a folder that hangs stops nothing but the reports. A set of fingerprints is explained again
only where graphs of it have come in since: a job may split at every step.
"""

import contextlib
import dataclasses
import hashlib
import html
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

if __package__:
    from ._graph_diff import (
        MAX_DIFFERENCES_PER_VARIANT, NOT_THERE, NUMBER, Body, BodyComparison, Comparison, Difference, Graph, Keys, Source,
        compare, describe_size, merge, number_of, read_record, recognise, short_target,
    )  # fmt: skip
    from ._graph_plan import align
    from ._vocabulary import HandshakeError, format_ranks
else:
    from _graph_diff import (
        MAX_DIFFERENCES_PER_VARIANT, NOT_THERE, NUMBER, Body, BodyComparison, Comparison, Difference, Graph, Keys, Source,
        compare, describe_size, merge, number_of, read_record, recognise, short_target,
    )  # fmt: skip
    from _graph_plan import align
    from _vocabulary import HandshakeError, format_ranks

_logger = logging.getLogger("torch_tpu.handshake")

# The text goes into a log and is read in a terminal: a screen or two.
MAX_TEXT_DIFFERENCES = 10
MAX_TEXT_VARIANTS = 8
MAX_TEXT_VALUES = 4
MAX_TEXT_ADVICE = 6
MAX_TEXT_NOTES = 8
MAX_TEXT_COLUMNS = 110
MAX_TEXT_HEAD = 300
# A side of a difference is one line. Of a longer one the part is shown in which it differs, with this much before it.
MAX_LINE_CHARACTERS = 160
LEAD_CHARACTERS = 40
# The page, and the JSON file: what a browser scrolls through with ease.
MAX_DIFFERENCES = 200
MAX_VALUES = 64
MAX_VALUE_CHARACTERS = 400
MAX_COMPARISONS = 12
MAX_ROWS = 400
MAX_NODE_CHARACTERS = 2000
MAX_MARKED_WORDS = 400  # a line of a graph with more words is shown without marks on what changed
CONTEXT_NODES = 3  # equal nodes that are shown around a changed one

# A graph on its way, compressed; one of 100,000 nodes takes some 4 MB. And what it may be unpacked.
MAX_GRAPH_BYTES = 8 * 2**20
MAX_TEXT_BYTES = 64 * 2**20
# Graphs that one report compares; with one variant for each rank, further ones show nothing new.
MAX_VARIANTS = 64
# Graphs, compressed, that are kept for reports or on their way; past either bound no more are asked for.
MAX_GRAPHS = 1024
MAX_GRAPHS_BYTES = 256 * 2**20
# Split components that are kept, for votes that come late; the ranks that the oldest lack never come.
MAX_SPLITS = 256
# Reports of one job: what differs between its graphs is known long before. And those that wait: one comparison runs at
# a time, since the host's cores belong to the job.
MAX_REPORTS = 1024
MAX_WAITING = 64
# Of each group, the last handshakes that a report mentions; and groups of which they are kept.
HANDSHAKES_BEFORE = 3
MAX_LINES = 4096
# A report is made when the component is complete and its graphs are in, or so long after the split.
REPORT_WAIT_S = 10.0
# A graph that was asked for and has not come by then is asked of others; making one of 100,000 nodes takes seconds.
GRAPH_WITHIN_S = 60.0
# What one comparison may take; how often to look whether it has ended; and what is left to it when the job ends.
COMPARE_WITHIN_S = 120.0
LOOK_EVERY_S = 0.05
CLOSE_WITHIN_S = 3.0
# A report's text has a screen or two; what is said of a failure, and different ones that are said, less.
MAX_REPORT_CHARACTERS = 2**18
MAX_FAILURE_CHARACTERS = 1000
MAX_FAILURES = 64

# Steps of the messages between the coordinator and a rank.
LOG, ASK, GRAPH = 0, 1, 2
# What a rank sends in place of a graph that it can't give begins with this.
NO_GRAPH = "# no graph: "
VERSIONS = ("python", "torch", "torch_tpu")


class Variant(NamedTuple):
    """One of the graphs, and who has it.

    Attributes:
        ranks: the ranks that have it.
        fingerprint: by which it was found to be another graph; may be empty.
        graph: None if it is not known.
        note: why there is no graph, or what is to be said about the one that there is.
        hosts: `host:pid` by rank, where known.
    """

    ranks: tuple[int, ...]
    fingerprint: str = ""
    graph: Graph | None = None
    note: str = ""
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
        "The graphs of {odd} and of the reference read the same, so their fingerprints differ in something that is not "
        "shown: values of tensor constants, inputs that are changed in place or share memory, or how the graph was "
        "compiled. A fingerprint of the executable also differs where library versions or compiler flags do."
    ),
    "shard": (
        "The bounds of each rank's shard ({formulas}) are baked into the graph as Python constants{at}. Keep them in a "
        'buffer (`self.register_buffer("shard_start", torch.tensor(start), persistent=False)`) or pass them to the '
        "compiled function as tensor inputs, and compute with the tensor: then all ranks trace one graph."
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
        "is under a condition that depends on the rank: run it on all ranks."
    ),
    "collectives": (
        "Not all ranks issue the same collectives{at}: on the device the ranks would wait for one another forever. "
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
        "forever, or mix up values. Issue them in a fixed order: the same on both sides of a branch; over sorted keys, "
        "not over a set or dict that was filled in another order; without passes that reorder by timings measured in "
        "each process (for Inductor `torch._inductor.config.reorder_for_compute_comm_overlap = False`), or let one "
        "rank choose for all."
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


def _constant_topic(difference: Difference, reads_floats: bool) -> str:
    parts = difference.node.target.split(".")
    name = (parts[3] if difference.node.target.startswith("torch.ops.") and len(parts) > 3 else parts[-1]).rstrip("_")
    if name in _SIZE_OPERATIONS:
        # A part that has the same size everywhere begins at another place.
        is_start = name in ("slice", "narrow") and difference.node.shape is not None and not difference.follows
        return "number" if is_start and difference.formula else "shape"
    sides = (difference.reference, *difference.values.values())
    are_numbers = all(NUMBER.match(side) or side.endswith(", computed") for side in sides)
    if not are_numbers or name not in _NUMBER_OPERATIONS:
        return "setting"
    if not difference.formula:
        return "constant"
    # A stride of one is more likely a number of its own, such as a seed; and no index is a floating point number.
    return "shard" if name in _BOUND_OPERATIONS and "·" in difference.formula and not reads_floats else "number"


def _topics(difference: Difference, reads_floats: bool) -> Iterator[str]:
    """The pieces of advice that a difference calls for."""
    kind = difference.kind
    if kind == "constant":
        yield _constant_topic(difference, reads_floats)
    elif kind == "inputs" and difference.what == "change in place":
        yield "change in place"
    elif kind == "group" and "same ranks" in difference.what:
        yield "name of a group"
    elif kind in _ADVICE:
        yield kind
    else:  # operations, and collectives among them
        if difference.at_end and len(difference.nodes) > 1:
            yield "graph break"
        elif kind == "number of collectives" or any(each.collective for each in (difference.node, *difference.nodes)):
            yield "collectives"
        if kind != "number of collectives":
            yield "operations"


# --- The report -------------------------------------------------------------------------------------------------------


_CUT = "the text of the graph is cut off: what is missing at its end may be there in fact"
_BY_ROLE = "the names and ranks of groups are those of {rank} alone; the others' are other groups of the same role"
_UNHASHABLE = "the graph could not be hashed, so it equals no other: see the warning on that rank"


def explain(variants: Iterable[Variant], context: Context | None = None) -> "Report":
    """Compares the variants of a graph.

    Args:
        variants: one for each distinct fingerprint. An iterator is read one at a time, since 64 large graphs take much
            memory; it must give them largest first. All others are put in that order.
        context: what is known beside the graphs.
    """
    if not isinstance(variants, Iterator):
        variants = sorted(variants, key=lambda variant: (-len(variant.ranks), min(variant.ranks, default=0)))
    return Report(variants, context or Context())


class Report:
    """What differs between the variants of one graph.

    Attributes:
        variants: largest first, without their nodes.
        reference: index of the variant that the others are compared with: the first whose graph is known.
        comparisons: by index of the variant.
        alike: indices of the variants that differ from the reference in the same places, together. The bodies are kept
            only in the comparison of the first of them.
        differences: merged over the variants, in the order of the reference.
        facts: what there is to say, as JSON.
    """

    def __init__(self, variants: Iterable[Variant], context: Context) -> None:
        self.context = context
        self.variants: list[Variant] = []
        self.comparisons: dict[int, Comparison] = {}
        self.alike: dict[Any, list[int]] = {}
        self.reference = 0
        self._graph: Graph | None = None  # the reference's
        self._sizes: dict[int, str] = {}
        # Of each variant, the positions in the reference's bodies that it doesn't have.
        self._lacks: dict[tuple[int, str], frozenset[int]] = {}
        cache: dict[int, Keys] = {}
        for number, variant in enumerate(variants):
            graph = variant.graph
            if graph is not None:
                self._sizes[number] = describe_size(graph.body)
                variant = variant._replace(graph=graph._replace(body=Body("", [], {})))
                if self._graph is None:
                    self.reference, self._graph = number, graph
                else:
                    self._keep(number, compare(self._graph, graph, cache))
            self.variants.append(variant)
        self.differences = merge(self.comparisons)
        groups: list[Sequence[int]] = [ranks for ranks, _ in context.groups]
        groups += [ranks for number in self._sizes for ranks, _ in self._groups(number).values()]
        for difference in self.differences:
            if difference.kind == "constant":
                difference.formula = recognise(self._value_of_rank(difference), groups)
            elif difference.kind == "group":
                self._add_ranks(difference)
        self.facts = self._facts()

    def _keep(self, number: int, comparison: Comparison) -> None:
        for body in comparison.bodies:
            lacking = frozenset(i for i in range(len(body.reference.nodes)) if i not in body.to_other)
            self._lacks[number, body.path] = lacking
        pattern = tuple((each.body, each.position, each.kind, each.what) for each in comparison.differences)
        numbers = self.alike.setdefault(pattern, [])
        numbers.append(number)
        is_shown = len(numbers) == 1 and len(self.alike) <= MAX_COMPARISONS
        self.comparisons[number] = comparison if is_shown else comparison._replace(bodies=[])

    def _groups(self, number: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        graph = self.variants[number].graph
        return {} if graph is None else graph.groups

    def _whose(self, number: int) -> str:
        graph = self.variants[number].graph
        return "one of them" if graph is None or graph.rank is None else f"rank {graph.rank}"

    def _add_ranks(self, difference: Difference) -> None:
        """Adds the ranks of the groups; of which rank they are, where not all ranks of a variant are in them."""
        members, texts = set(), []
        for number, name in [(self.reference, difference.reference), *difference.values.items()]:
            ranks = self._groups(number).get(name.strip("'"), (None, ""))[0]
            members.add(ranks)
            if ranks is not None:
                is_all = set(self.variants[number].ranks) <= set(ranks)
                name += f" = {format_ranks(ranks)}" + ("" if is_all else f" on {self._whose(number)}")
            texts.append(name)
        if len(members) == 1 and None not in members:
            difference.what = f"name of the group ({difference.what}; same ranks)"
        difference.sides = (texts[0], texts[-1])
        difference.values = dict(zip(difference.values, texts[1:], strict=True))

    def _value(self, difference: Difference, number: int) -> str | None:
        """A difference's side in this variant; None if it doesn't have the node."""
        if number in difference.values:
            return difference.values[number]
        # A nested body that was not compared is equal.
        lacks_it = difference.position in self._lacks.get((number, difference.body), ())
        return None if lacks_it and difference.what not in ("added", "inputs") else difference.reference

    def _value_of_rank(self, difference: Difference) -> dict[int, str]:
        """A difference's value on each rank whose graph has the node."""
        return {
            rank: value
            for number in self._sizes
            if (value := self._value(difference, number)) is not None
            for rank in self.variants[number].ranks
        }

    def sides(self, difference: Difference) -> list[tuple[tuple[int, ...], str]]:
        """(ranks, value to be shown) of each value, the reference's first, then in the order of the variants."""
        ranks_of: dict[str, list[int]] = {difference.reference: []}
        for number in self._sizes:
            ranks_of.setdefault(self._value(difference, number) or NOT_THERE, []).extend(self.variants[number].ranks)
        values = [value for value in ranks_of if value != NOT_THERE]
        alike = (
            len(os.path.commonprefix(values)) if len(values) > 1 and max(map(len, values)) > MAX_LINE_CHARACTERS else 0
        )
        return [
            (
                tuple(sorted(ranks)),
                f"…{value[alike - LEAD_CHARACTERS :]}" if alike > LEAD_CHARACTERS and value != NOT_THERE else value,
            )
            for value, ranks in ranks_of.items()
            if ranks
        ]

    def _reads_floats(self, difference: Difference) -> bool:
        """Whether the first tensor that a matched node reads is one of floating point numbers, as no index is."""
        if self._graph is None:
            return False
        body = self._graph.body
        for name in filter(None, difference.body.split(".")):
            body = body.bodies[name]
        read = next((each.producer for each in difference.node.arguments if each.producer is not None), None)
        return read is not None and re.match(r"b?f\d", body.nodes[read].dtype) is not None

    def _advice(self) -> list[str]:
        """What to change, the most telling first; each piece once, with the place of the first difference it is for."""
        found: dict[str, str] = {}
        if self._versions():
            found["versions"] = _ADVICE["versions"]
        elif self._is_split_by_host():
            found["hosts"] = _ADVICE["hosts"]
        topics = [
            (difference, list(_topics(difference, self._reads_floats(difference)))) for difference in self.differences
        ]
        for difference, of_difference in topics:
            odd = format_ranks(rank for number in difference.values for rank in self.variants[number].ranks)
            at = f" ({difference.source.place})" if difference.source else ""
            for topic in of_difference:
                if topic not in found:
                    formulas = dict.fromkeys(f"`{each.formula}`" for each, of_each in topics if topic in of_each)
                    found[topic] = _ADVICE[topic].format(odd=odd, at=at, formulas=", ".join([*formulas][:3]))
        if "graph break" in found:
            found.pop("inputs", None)  # what the rest takes
        if "order of collectives" in found:
            found.pop("group", None)  # in another order each rank's own groups may be meant
        same = [number for number, comparison in self.comparisons.items() if not comparison.differences]
        if same:
            odd = format_ranks(rank for number in same for rank in self.variants[number].ranks)
            found["nothing differs"] = _ADVICE["nothing differs"].format(odd=odd)
        return list(found.values())

    def _versions(self) -> list[str]:
        """One line for each library whose version is not the same on all ranks."""
        lines = []
        for library in sorted({library for of_rank in self.context.versions.values() for library in of_rank}):
            ranks_of: dict[str, list[int]] = {}
            for rank, of_rank in sorted(self.context.versions.items()):
                ranks_of.setdefault(of_rank.get(library, "none"), []).append(rank)
            if len(ranks_of) > 1:
                sides = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1]))
                lines.append(
                    f"{library}: {', '.join(f'{version} on {format_ranks(ranks)}' for version, ranks in sides)}"
                )
        return lines

    def _is_split_by_host(self) -> bool:
        """Whether all ranks of a host have the same variant, with several hosts and a host of several ranks."""
        variants_of: dict[str, set[int]] = {}
        for number, variant in enumerate(self.variants):
            for address in variant.hosts.values():
                variants_of.setdefault(address.rpartition(":")[0], set()).add(number)
        is_one_each = all(len(numbers) == 1 for numbers in variants_of.values())
        ranks = sum(len(variant.hosts) for variant in self.variants)
        return len(self.variants) > 1 and is_one_each and 1 < len(variants_of) < ranks

    def _notes(self) -> list[str]:
        """What the report lacks, and why."""
        concerned: dict[str, list[int]] = {}
        for number, variant in enumerate(self.variants):
            reasons = [variant.note] if variant.note else []
            if variant.graph is None:
                reasons = [f"not compared: {variant.note or 'the graph is not known'}"]
            elif variant.graph.is_cut:
                reasons.append(_CUT)
            if not all(set(variant.ranks) <= set(ranks) for ranks, _ in self._groups(number).values()):
                reasons.append(_BY_ROLE.format(rank=self._whose(number)))
            if variant.fingerprint.startswith("unhashable-"):
                reasons.append(_UNHASHABLE)
            for reason in reasons:
                concerned.setdefault(reason, []).extend(variant.ranks)
        notes = [f"{reason} ({format_ranks(ranks)})" for reason, ranks in concerned.items()]
        dropped = max((comparison.dropped for comparison in self.comparisons.values()), default=0)
        if dropped:
            bound = f"MAX_DIFFERENCES_PER_VARIANT={MAX_DIFFERENCES_PER_VARIANT}"
            notes.append(f"{dropped:,} more differences of one variant are left out ({bound})")
        return [*notes, *self.context.notes]

    def _position_on_line(self, difference: Difference) -> str:
        """Where on its group's line a collective that differs is, if the span is known."""
        nodes = (difference.node, *difference.nodes)
        name = next((node.group for node in nodes if node.collective and node.group is not None), None)
        if self._graph is None or name is None or name not in self._graph.groups or difference.body:
            return ""
        for members, span in self.context.groups:
            if span is not None and sorted(members) == sorted(self._graph.groups[name][0]):
                before = self._graph.body.nodes[: difference.position]
                number = sum(node.collective and node.group == name for node in before)
                return f", position {span[0] + number} on the line of {format_ranks(members)}"
        return ""

    def _place(self, difference: Difference) -> str:
        """Node, position and operation of a difference."""
        if difference.kind == "graph":
            return "the whole graph"
        total = len(self._graph.body.nodes) if self._graph is not None else 0
        body = f"of nested body `{difference.body}`" if difference.body else f"of {total:,}"
        place = f"{'before ' if difference.what == 'added' else ''}node {difference.position:,} {body}"
        node = difference.node
        if difference.what not in ("inputs", "outputs", "added"):
            place += f", `{node.name}`" + (f" = {short_target(node.target)}" if node.op == "call" else f" ({node.op})")
        return place + self._position_on_line(difference)

    def headline(self) -> str:
        """Who has how many graphs."""
        ranks = format_ranks(rank for variant in self.variants for rank in variant.ranks)
        title = f"{self.context.title}: " if self.context.title else ""
        if len(self.variants) == 1:
            return f"{title}one graph, of {ranks}"
        return f"{title}{ranks} have {len(self.variants)} different graphs"

    def _facts(self) -> dict[str, Any]:
        context = self.context
        variants = [
            {
                "name": _letters(number),
                "ranks": format_ranks(variant.ranks, len(variant.ranks)),
                "number": len(variant.ranks),
                "is_reference": number == self.reference,
                "size": self._sizes.get(number, ""),
                "fingerprint": variant.fingerprint,
                "hosts": [variant.hosts[rank] for rank in sorted(variant.hosts)],
            }
            for number, variant in enumerate(self.variants)
        ]
        differences = [
            {
                "kind": difference.kind,
                "place": self._place(difference),
                "what": difference.what,
                "source": ("first used in " if difference.node.op == "placeholder" else "")
                + source_text(difference.source)
                if difference.source
                else "",
                "sides": [
                    [format_ranks(ranks), _cut(side, MAX_NODE_CHARACTERS)] for ranks, side in self.sides(difference)
                ],
                "formula": difference.formula,
                "alike": difference.alike,
                "follows": difference.follows,
            }
            for difference in self.differences
        ]
        return {
            "handshake_report": 1,
            "headline": self.headline(),
            "groups": [{"ranks": format_ranks(ranks), "span": span} for ranks, span in context.groups],
            "reason": context.reason,
            "versions": self._versions(),
            "variants": variants,
            "differences": differences,
            "advice": self._advice(),
            "before": list(context.before),
            "notes": self._notes(),
        }

    def text(self) -> str:
        """The report for a log: a screen or two."""
        facts = self.facts
        lines = [facts["headline"], *(f"  {line}" for line in _where(facts))]
        variants = facts["variants"]
        if len(variants) > 1:
            lines.append(f"Variants, largest first; {_letters(self.reference)} is the reference:")
            for each, variant in list(zip(variants, self.variants, strict=True))[:MAX_TEXT_VARIANTS]:
                lines.append(f"  {each['name']}  {format_ranks(variant.ranks)}  {_description(each)}")
            if len(variants) > MAX_TEXT_VARIANTS:
                left = format_ranks(rank for variant in self.variants[MAX_TEXT_VARIANTS:] for rank in variant.ranks)
                lines.append(f"  and {number_of(len(variants) - MAX_TEXT_VARIANTS, 'variant')} more on {left}")
        differences = facts["differences"]
        if differences:
            follows = sum(each["follows"] for each in differences)
            also = f"; in {number_of(follows, 'more node')} as a consequence" if follows else ""
            places = sum(1 + len(each["alike"]) for each in differences)
            lines.append(f"What differs, in {number_of(places, 'place')}{also}:")
        for number, each in enumerate(differences[:MAX_TEXT_DIFFERENCES], 1):
            lines.append(_cut(f"  {number}. {each['kind']}: {each['place']}, {each['what']}", MAX_TEXT_HEAD))
            sides = [f"{ranks}: {_cut(side)}" for ranks, side in each["sides"]]
            if len(sides) > MAX_TEXT_VALUES:
                sides = [*sides[: MAX_TEXT_VALUES - 1], f"… {len(sides) - MAX_TEXT_VALUES} more …", sides[-1]]
            below = [each["source"], *sides, f"= {each['formula']}" if each["formula"] else "", _alike(each)]
            lines += [f"     {line}" for line in below if line]
        if len(differences) > MAX_TEXT_DIFFERENCES:
            more = Counter(each["kind"] for each in differences[MAX_TEXT_DIFFERENCES:])
            kinds = ", ".join(f"{count} {kind}" for kind, count in more.most_common())
            lines.append(f"  and {sum(more.values()):,} more ({kinds})")
        if facts["advice"]:
            lines.append("What to do:")
            for advice in facts["advice"][:MAX_TEXT_ADVICE]:
                wrapped = textwrap.wrap(advice, MAX_TEXT_COLUMNS, break_long_words=False, break_on_hyphens=False)
                lines.extend(f"  {' ' if number else '-'} {line}" for number, line in enumerate(wrapped))
        if facts["before"]:
            lines += ["Handshakes just before:", *(f"  {line}" for line in facts["before"])]
        lines += first_notes([f"Note: {note}" for note in facts["notes"]])
        return "\n".join(lines) + "\n"


def _where(facts: Mapping[str, Any]) -> list[str]:
    """Position on the groups' lines, reason, versions; a line each."""
    lines = [
        f"On the line of {each['ranks']}"
        + ("" if each["span"] is None else f": collectives [{each['span'][0]}, {each['span'][1]})")
        for each in facts["groups"]
    ]
    lines += [f"Reason: {facts['reason']}"] if facts["reason"] else []
    return lines + [f"Library versions differ: {line}" for line in facts["versions"]]


def _description(variant: Mapping[str, Any]) -> str:
    """Size and fingerprint of a variant, and where its ranks run."""
    fingerprint, hosts = variant["fingerprint"], variant["hosts"]
    parts = [
        variant["size"],
        f"fingerprint {_cut(fingerprint, 17)}" if fingerprint else "",
        ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""),
    ]
    return "; ".join(filter(None, parts))


def _alike(difference: Mapping[str, Any]) -> str:
    """Where else it is the same."""
    alike = difference["alike"]
    if not alike:
        return ""
    shown = ", ".join(map(str, alike[:6])) + (" …" if len(alike) > 6 else "")
    return f"the same at {number_of(len(alike), 'more place')}: node {shown}"


def _letters(number: int) -> str:
    """A variant's short name: A for the first, AA after Z."""
    letters = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        letters = chr(65 + letter) + letters
    return letters


def first_notes(notes: Sequence[str]) -> list[str]:
    """As many as a terminal has room for."""
    more = len(notes) - MAX_TEXT_NOTES
    return [*notes[:MAX_TEXT_NOTES], *([f"and {number_of(more, 'note')} more (MAX_TEXT_NOTES)"] if more > 0 else [])]


def source_text(source: Source | None) -> str:
    """A source line as people read it."""
    if source is None:
        return "no source line known"
    return f"{source.place}: {_cut(source.code)}" if source.code else source.place


def _cut(text: str, most_characters: int = MAX_LINE_CHARACTERS) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= most_characters else f"{text[: most_characters - 1]}…"


# --- The page ---------------------------------------------------------------------------------------------------------


_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --panel: #f6f8fa;
  --old: #ffebe9; --old-mark: #ffb3ab; --new: #dafbe1; --new-mark: #8fe3a3; --advice: #fff8c5; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --panel: #151b23; --old: #3c1618; --old-mark: #8c2f2f; --new: #12321d; --new-mark: #1f6f37; --advice: #2b2410; } }
body { margin: 0 auto; max-width: 1500px; padding: 1.2rem 1.6rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.45rem; } h2 { font-size: 1.1rem; margin-top: 1.8rem; } h3 { font-size: 1rem; }
code, .code { font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.soft { color: var(--soft); } ul { margin: .3rem 0; padding-left: 1.4rem; }
.advice { background: var(--advice); padding: .5rem 1rem; } .scroll { overflow: auto; max-height: 34rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top; padding: .2rem .6rem; }
.list td { border-bottom: 1px solid var(--line); } .difference td:first-child { width: 1%; white-space: nowrap; }
.difference { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .9rem; margin: .6rem 0; }
.graphs { table-layout: fixed; border: 1px solid var(--line); } .graphs .at { width: 4.2rem; color: var(--soft); }
.graphs td { overflow-wrap: anywhere; white-space: pre-wrap; } .graphs th, .wide { background: var(--panel); }
.old { background: var(--old); } .old mark { background: var(--old-mark); color: inherit; }
.new { background: var(--new); } .new mark { background: var(--new-mark); color: inherit; }
"""
_WORD = re.compile(r"'(?:[^'\\]|\\.)*'|[A-Za-z_][\w.]*|-?\d[\w.]*|\s+|.")


def page(reports: Sequence[Report], heading: str = "", notes: Iterable[str] = ()) -> str:
    """The page for one or several reports: HTML, light or dark as the reader's system is.

    Args:
        reports: what to show, in order.
        heading: a line above them, where there are several.
        notes: lines above the reports.
    """
    title = heading or (reports[0].headline() if reports else "No graphs")
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_html(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_html(heading)}</h1>" if heading else "",
        _list(notes),
    ]
    if len(reports) > 1:
        links = (f'<li><a href="#report{k}">{_html(each.headline())}</a></li>' for k, each in enumerate(reports))
        parts.append(f"<ul>{''.join(links)}</ul>")
    for number, report in enumerate(reports):
        parts += [f'<h1 id="report{number}">{_html(report.headline())}</h1>', *_report(report)]
    return "\n".join([*parts, "</body></html>\n"])


def _report(report: Report) -> Iterator[str]:
    facts = report.facts
    yield _list(_where(facts))
    yield _list(f"Note: {note}" for note in facts["notes"])
    if facts["advice"]:
        yield f'<h2>What to do</h2><div class="advice">{_list(facts["advice"])}</div>'
    yield f"<h2>{number_of(len(facts['variants']), 'variant')}, largest first</h2>"
    rows = (
        f"<tr><td><b>{each['name']}</b>{' reference' if each['is_reference'] else ''}</td><td>{_html(format_ranks(ranks))}"
        f"</td><td>{number_of(len(ranks), 'rank')}</td><td>{_html(_description(each))}</td></tr>"
        for each, (ranks, *_) in zip(facts["variants"], report.variants, strict=True)
    )
    yield f'<div class="scroll"><table class="list">{"".join(rows)}</table></div>'
    differences = facts["differences"]
    if differences:
        yield f"<h2>{number_of(len(differences), 'difference')}, in the order of the reference</h2>"
    for number, each in enumerate(differences[:MAX_DIFFERENCES], 1):
        yield _difference(number, each)
    if len(differences) > MAX_DIFFERENCES:
        yield f'<p class="soft">and {len(differences) - MAX_DIFFERENCES:,} more (MAX_DIFFERENCES={MAX_DIFFERENCES})</p>'
    yield from _comparisons(report)
    if facts["before"]:
        yield f"<h2>Handshakes just before</h2>{_list(facts['before'])}"


def _difference(number: int, difference: Mapping[str, Any]) -> str:
    head = f"{difference['place']}, {difference['what']}"
    parts = [f"{number}. <b>{_html(difference['kind'])}</b>: {_html(_cut(head, MAX_VALUE_CHARACTERS))}"]
    if difference["source"]:
        parts.append(f'<div class="soft">{_html(difference["source"])}</div>')
    rows = [
        f'<tr><td class="soft">{_html(ranks)}</td><td class="code">{_html(_cut(side, MAX_VALUE_CHARACTERS))}</td></tr>'
        for ranks, side in difference["sides"][:MAX_VALUES]
    ]
    parts.append(f'<div class="scroll"><table>{"".join(rows)}</table></div>')
    left = len(difference["sides"]) - MAX_VALUES
    follows = difference["follows"]
    below = [
        f"and {number_of(left, 'value')} more" if left > 0 else "",
        f"= {difference['formula']}" if difference["formula"] else "",
        _alike(difference),
        f"{number_of(follows, 'more node')} as a consequence" if follows else "",
    ]
    parts += [f"<div>{_html(line)}</div>" for line in below if line]
    return f'<div class="difference">{"".join(parts)}</div>'


def _comparisons(report: Report) -> Iterator[str]:
    # Of graphs that have nothing in common there is nothing to lay side by side.
    alike = [
        numbers
        for numbers in report.alike.values()
        if any(difference.kind != "graph" for difference in report.comparisons[numbers[0]].differences)
    ]
    if alike:
        yield "<h2>Side by side</h2>"
    for first, *others in alike[:MAX_COMPARISONS]:
        names = [f"{_letters(k)} ({format_ranks(report.variants[k].ranks, 4)})" for k in (report.reference, first)]
        yield f"<h3>{_html(names[0])} and {_html(names[1])}</h3>"
        if others:
            ranks = format_ranks(rank for number in others for rank in report.variants[number].ranks)
            yield f'<p class="soft">The same places differ on {_html(ranks)}.</p>'
        for body in report.comparisons[first].bodies:
            yield from _side_by_side(body, names)
    left = len(alike) - MAX_COMPARISONS
    if left > 0:
        yield f'<p class="soft">{left} more comparisons are left out (MAX_COMPARISONS={MAX_COMPARISONS}).</p>'


def _side_by_side(comparison: BodyComparison, names: list[str]) -> Iterator[str]:
    """The changed regions of two bodies, and a few equal nodes around each."""
    bodies = comparison.reference, comparison.other
    rows = list(_rows(comparison))
    near = {k + d for k, row in enumerate(rows) if row[2] for d in range(-CONTEXT_NODES, CONTEXT_NODES + 1)}
    shown = sorted(near & set(range(len(rows))))
    if not shown:
        return
    positions = [{node.name: k for k, node in enumerate(body.nodes)} for body in bodies]
    head = "".join(f'<th class="at"></th><th>{_html(name)}</th>' for name in names)
    lines = [f'<table class="graphs"><tr>{head}</tr>']
    if comparison.path:
        lines.append(_wide(f"nested body {comparison.path}"))
    last, source = -1, None
    for number in shown[:MAX_ROWS]:
        if number > last + 1:
            lines.append(_wide(f"… {number_of(number - last - 1, 'equal node')} …"))
        last = number
        at, changed = rows[number][:2], rows[number][2]
        nodes = [None if k is None else body.nodes[k] for k, body in zip(at, bodies, strict=True)]
        line = next((node.user_source for node in nodes if node is not None), None)
        if line is not None and (source is None or line[:2] != source[:2]):
            source = line
            lines.append(_wide(source_text(source)))
        texts = ["" if node is None else _cut(node.line, MAX_NODE_CHARACTERS) for node in nodes]
        cells = (
            _marked(texts, positions, comparison.to_reference)
            if changed and None not in nodes
            else [*map(_html, texts)]
        )
        lines.append("<tr>")
        for k, cell, style in zip(at, cells, ("old", "new"), strict=True):
            style = f"code {style}" if changed and k is not None else "code"
            lines.append(f'<td class="at">{"" if k is None else k}</td><td class="{style}">{cell}</td>')
        lines.append("</tr>")
    left = sum(rows[k][2] for k in shown[MAX_ROWS:])
    if left:
        lines.append(_wide(f"… {left:,} more changed nodes are left out (MAX_ROWS={MAX_ROWS}) …"))
    elif last < len(rows) - 1:
        lines.append(_wide(f"… {number_of(len(rows) - 1 - last, 'equal node')} …"))
    yield "".join([*lines, "</table>"])


def _rows(comparison: BodyComparison) -> Iterator[tuple[int | None, int | None, bool]]:
    """(position in the reference, in the variant, whether it is changed) of each line; a position may be None."""
    i = j = 0
    ends = (len(comparison.reference.nodes), len(comparison.other.nodes))
    for next_i, next_j in [*comparison.pairs, ends]:
        for k in range(max(next_i - i, next_j - j)):
            yield i + k if i + k < next_i else None, j + k if j + k < next_j else None, True
        if next_i < ends[0]:
            yield next_i, next_j, next_i in comparison.changed
        i, j = next_i + 1, next_j + 1


def _marked(lines: list[str], positions: list[dict[str, int]], to_reference: Mapping[int, int]) -> list[str]:
    """Both lines in HTML, with the words marked that the other doesn't have. Matched nodes may have other names."""
    words = [_WORD.findall(line) for line in lines]
    if max(map(len, words)) > MAX_MARKED_WORDS:
        return [*map(_html, lines)]
    keys: list[list[str | int]] = [
        [positions[0].get(word, word) for word in words[0]],
        [to_reference.get(positions[1][word], word) if word in positions[1] else word for word in words[1]],
    ]
    pairs = align(keys[0], keys[1])
    cells = []
    for side in (0, 1):
        same = {pair[side] for pair in pairs}
        cell = "".join(
            _html(word) if number in same or word.isspace() else f"<mark>{_html(word)}</mark>"
            for number, word in enumerate(words[side])
        )
        cells.append(cell.replace("</mark><mark>", ""))
    return cells


def _wide(text: str) -> str:
    return f'<tr><td colspan="4" class="wide soft">{_html(text)}</td></tr>'


def _list(lines: Iterable[str]) -> str:
    inside = "".join(f"<li>{_html(line)}</li>" for line in lines)
    return f"<ul>{inside}</ul>" if inside else ""


def _html(text: str) -> str:
    """Escapes text; what stands between backquotes is code."""
    parts = html.escape(text).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts)
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def write_file(path: str, content: str) -> None:
    """Writes a file so that a reader sees all of it or nothing; a device or a pipe is written as it is.

    Raises:
        OSError: with the path as it was given.
    """
    is_file = os.path.isfile(path) or not os.path.exists(path)
    target = os.path.realpath(path)
    unfinished = os.path.join(os.path.dirname(target), f".handshake-{os.getpid()}.part") if is_file else path
    try:
        try:
            with open(unfinished, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(content)
            if is_file:
                os.replace(unfinished, target)
        except BaseException:
            if is_file and os.path.exists(unfinished):
                os.unlink(unfinished)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


# --- The process that makes a report ----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Makes one report: the job is on the standard input, what is to be logged goes to the standard output.

    The job is a line of JSON, `{"variants": [{"ranks", "fingerprint", "hosts", "note", "bytes"}, ...], "context":
    {...}}`, and after it the graphs, as the ranks sent them, each of as many bytes as the line says.

    Args:
        arguments: one, the path of the files without their suffixes.

    Returns:
        0; or 2 for a failure, with its reason instead of a report.
    """
    try:
        text = _make_report(sys.stdin.buffer, *arguments)
    except Exception as error:
        # Without the file's name: the same for every split that it hinders.
        text = (getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")[:MAX_FAILURE_CHARACTERS]
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        return 2
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    return 0


def _make_report(source: BinaryIO, stem: str) -> str:
    """The text for the log."""
    job = json.loads(source.readline())
    fields = job["context"]
    context = Context(
        tuple((tuple(ranks), tuple(span)) for ranks, span in fields["groups"]), tuple(fields["before"]), fields["reason"],
        tuple(fields["notes"]), {int(rank): of_rank for rank, of_rank in fields["versions"].items()},
    )  # fmt: skip
    variants = [
        Variant(
            tuple(each["ranks"]), each["fingerprint"], None, each["note"],
            {int(rank): address for rank, address in each["hosts"].items()},
        )
        for each in job["variants"]
    ]  # fmt: skip
    # By their length: whoever was forked meanwhile may hold the other end open.
    payloads = (source.read(each["bytes"]) for each in job["variants"])
    try:
        report = explain(map(_with_graph, variants, payloads), context)
        text, as_page = report.text(), page([report])
    except Exception as error:  # who reads it wants to know which ranks, even if a graph is too strange to compare
        note = f"the graphs could not be compared: {type(error).__name__}: {error}"
        report = explain(variants, context._replace(notes=(*context.notes, note)))
        text, as_page = report.text(), page([report])
    os.makedirs(os.path.dirname(stem), exist_ok=True)
    pointer = f"(side by side: {stem}.html)"
    try:
        write_file(f"{stem}.json", json.dumps(report.facts, indent=1) + "\n")
        write_file(f"{stem}.html", as_page)
    except OSError as error:
        pointer = f"Note: the page could not be written: {error}"
    write_file(f"{stem}.txt", text + (f"{pointer}\n" if pointer.startswith("Note") else ""))
    return text + pointer


def _with_graph(variant: Variant, payload: bytes) -> Variant:
    if not payload:
        return variant
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(payload, MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise ValueError(f"the graph is larger than {MAX_TEXT_BYTES >> 20} MiB (MAX_TEXT_BYTES)")
        if not unpacker.eof:
            raise ValueError("the graph arrived cut off")
        text = data.decode("utf-8", "replace")
        if text.startswith('{"handshake_graph"'):
            return variant._replace(graph=read_record(text))
        if text.startswith(NO_GRAPH):
            raise ValueError(text.removeprefix(NO_GRAPH).strip())
        return _with_printed_graph(variant, text)
    except (zlib.error, ValueError) as error:
        return variant._replace(
            note=str(error) if isinstance(error, ValueError) else f"the graph can't be unpacked: {error}"
        )


def _with_printed_graph(variant: Variant, text: str) -> Variant:
    if importlib.util.find_spec(f"{__package__}._graph_text" if __package__ else "_graph_text") is None:
        raise ValueError("the graph came as printed text, and the file that reads it, _graph_text.py, is not there")
    if __package__:
        from ._graph_text import parse
    else:
        from _graph_text import parse
    graphs = parse(text)
    if not graphs:
        raise ValueError("the text holds no graph that could be read")
    note = "the text holds several graphs: only the first is compared" if len(graphs) > 1 else ""
    return variant._replace(graph=graphs[0], note=note)


# --- During a job -----------------------------------------------------------------------------------------------------


class Channel(Protocol):
    """What a rank sends to the coordinator by."""

    def send(self, step: int, payload: bytes) -> None: ...


def send_graph(channel: Channel, source: str | Callable[[], str]) -> None:
    """Sends this rank's graph, which the coordinator has asked for.

    Args:
        channel: where to.
        source: the graph, as a record or as printed text, or a callable that makes it.
    """
    try:
        text = source() if callable(source) else source
        if not isinstance(text, str):
            raise TypeError(f"it must be text, not {type(text).__name__}")
    except Exception as error:
        _logger.warning("handshake: the graph of a split could not be printed", exc_info=True)
        text = f"{NO_GRAPH}the graph could not be printed: {error!r}"
    payload = zlib.compress(text.encode("utf-8", "replace"))
    if len(payload) > MAX_GRAPH_BYTES:
        limit = f"more than the {MAX_GRAPH_BYTES >> 20} MiB that are sent (MAX_GRAPH_BYTES)"
        text = f"{NO_GRAPH}the graph takes {len(payload):,} bytes compressed, {limit}"
        payload = zlib.compress(text.encode())
    try:
        channel.send(GRAPH, payload)
    except HandshakeError as error:
        _logger.debug("handshake: a graph could not be sent: %s", error)


class Line(Protocol):
    """A process group's line, as the coordinator knows it: hashable, the same object for the same group."""

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def name(self) -> str: ...


class Outcome(Protocol):
    """How a vote was answered: FAT, SPLIT, TIMEOUT or PEER_LOST."""

    @property
    def name(self) -> str: ...


class Settled(Protocol):
    """A vote that was answered. `spans` are (line, start, end)."""

    @property
    def rank(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def spans(self) -> Sequence[tuple[Any, int, int]]: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def reason(self) -> str: ...
    @property
    def has_graph(self) -> bool: ...


Frame = tuple[int, int, int, bytes]  # to a rank: rank, number of its vote, step, payload


@dataclasses.dataclass(slots=True, eq=False)
class _Split:
    """One split component.

    Attributes:
        reason: of its first votes.
        report_due: when the report is made at the latest; None once it is made.
        digest_of: the fingerprint's digest by rank.
        spans: in the order in which they were voted on.
        missing: ranks that have not voted.
        compared: the digests whose graphs the report compares.
        left_out: the others that have graphs, and which bound leaves them out.
    """

    reason: str
    report_due: float | None
    digest_of: dict[int, bytes] = dataclasses.field(default_factory=dict)
    spans: dict[tuple[Any, int, int], None] = dataclasses.field(default_factory=dict)
    missing: set[int] = dataclasses.field(default_factory=set)
    compared: set[bytes] = dataclasses.field(default_factory=set)
    left_out: dict[bytes, str] = dataclasses.field(default_factory=dict)

    def meets(self, spans: Iterable[tuple[Any, int, int]]) -> bool:
        """Whether any of the spans overlaps one of the component's."""
        return any(
            line is mine and start < end_of_mine and start_of_mine < end
            for line, start, end in spans
            for mine, start_of_mine, end_of_mine in self.spans
        )


class _Job(NamedTuple):
    """A comparison: the path of its files without their suffixes, what `main` reads, and the ranks of the split."""

    stem: str
    head: dict[str, Any]
    graphs: list[bytes]
    ranks: list[int]


class _Running(NamedTuple):
    """The comparison that runs, where it writes to, and until when it may."""

    job: _Job
    process: subprocess.Popen[bytes]
    output: BinaryIO
    until: float


class Reports:
    """What the coordinator does about reports. No thread and no clock but in `close`; what is to be sent is returned.

    Methods return frames for ranks: (rank, number, step, payload). ASK asks a rank for the graph of its vote of that
    number. LOG, with number 0, is a text that the rank logs.
    """

    def __init__(
        self, folder: str, facts_of: Callable[[int], Mapping[str, Any]], coordinator_rank: int, command: Sequence[str]
    ) -> None:
        """
        Args:
            folder: where the reports go; it is made with the first one.
            facts_of: what a rank said of itself when it connected: host, pid, python, torch, torch_tpu.
            coordinator_rank: the rank that logs the reports.
            command: the command line that calls this module's `main`, to which the argument is added.
        """
        self._folder, self._facts_of = folder, facts_of
        self._coordinator_rank, self._command = coordinator_rank, list(command)
        self._recent: dict[Any, list[tuple[int, int, str]]] = {}  # by line: (start, end, how it ended)
        self._splits: list[_Split] = []
        self._graphs: dict[bytes, bytes] = {}  # compressed, by digest
        self._asked: dict[bytes, tuple[int, int, float]] = {}  # by digest: rank, number, until when
        self._explained: set[bytes] = set()
        self._jobs: deque[_Job] = deque()
        self._running: _Running | None = None
        self._look_at = 0.0
        self._failures: set[str] = set()

    def settled(self, votes: Sequence[Settled], now: float) -> list[Frame]:
        """Takes the votes that were answered in one step, also those that were not split."""
        together: dict[str, list[Settled]] = {}
        for vote in votes:
            if vote.outcome.name == "SPLIT":
                together.setdefault(vote.reason, []).append(vote)
        frames = [frame for of_reason in together.values() for frame in self._add(of_reason, now)]
        for vote in votes:
            outcome = "fat" if vote.outcome.name == "FAT" else f"{vote.outcome.name} ({vote.reason})"
            for line, start, end in vote.spans:
                recent = self._recent.setdefault(line, [])
                if (start, end, outcome) not in recent:
                    recent.append((start, end, outcome))
                    del recent[: -2 * HANDSHAKES_BEFORE]
        while len(self._recent) > MAX_LINES:
            del self._recent[next(iter(self._recent))]
        return frames + self.tick(now)

    def take(self, rank: int, number: int, step: int, payload: bytes, now: float) -> list[Frame]:
        """Takes a message of a rank: a graph that it was asked for. Others are ignored."""
        for digest, asked in self._asked.items() if step == GRAPH else ():
            if asked[:2] == (rank, number):
                del self._asked[digest]
                self._graphs[digest] = payload
                break
        return self.tick(now)

    def drop_rank(self, rank: int, now: float) -> list[Frame]:
        """A rank is gone: no report waits for its graph."""
        self._asked = {digest: asked for digest, asked in self._asked.items() if asked[0] != rank}
        return self.tick(now)

    def tick(self, now: float) -> list[Frame]:
        """Makes the reports that are due. To be called at `next_deadline`."""
        frames: list[Frame] = []
        for split in self._splits:
            is_complete = not split.missing and self._asked.keys().isdisjoint(split.compared)
            if split.report_due is not None and (is_complete or split.report_due <= now):
                frames += self._explain(split)
        self._splits = [split for split in self._splits if split.missing or split.report_due is not None]
        while self._running is not None or self._jobs:
            if self._running is None:
                frames += self._start(self._jobs.popleft(), now)
            elif self._running.process.poll() is None and now < self._running.until:
                self._look_at = now + LOOK_EVERY_S
                break
            else:
                frames += self._finish()
        return frames

    def next_deadline(self) -> float | None:
        """When `tick` is to be called, or None."""
        due = [split.report_due for split in self._splits if split.report_due is not None]
        return min([*due, *([self._look_at] if self._running is not None else [])], default=None)

    def close(self) -> list[Frame]:
        """Makes the reports that are due, as far as CLOSE_WITHIN_S is enough for them. Leaves no process behind."""
        until = time.monotonic() + CLOSE_WITHIN_S
        frames = [frame for split in self._splits if split.report_due is not None for frame in self._explain(split)]
        self._splits.clear()
        while (self._running is not None or self._jobs) and (left_s := until - time.monotonic()) > 0:
            if self._running is None:
                frames += self._start(self._jobs.popleft(), 0.0)
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.process.wait(left_s)
                frames += self._finish()
        self._jobs.clear()
        if self._running is not None:
            self._running.process.kill()
            self._running.process.wait()
            self._running.output.close()
            self._running = None
        return frames

    # ------------------------------------------------------------------ splits

    def _add(self, votes: Sequence[Settled], now: float) -> list[Frame]:
        """Takes votes that were split together, for one reason. Ranks may come later to what was split before."""
        self._asked = {digest: asked for digest, asked in self._asked.items() if asked[2] > now}
        spans = {span for vote in votes for span in vote.spans}
        split = next((each for each in self._splits if each.meets(spans)), None)
        if split is None:
            del self._splits[: len(self._splits) - MAX_SPLITS + 1]
            due = now + REPORT_WAIT_S if len(self._explained) < MAX_REPORTS else None
            split = _Split(votes[0].reason, due)
            self._splits.append(split)
        frames: list[Frame] = []
        for vote in votes:
            split.digest_of[vote.rank] = vote.digest
            split.missing.discard(vote.rank)
            for span in vote.spans:
                if span not in split.spans:
                    split.spans[span] = None
                    split.missing.update(rank for rank in span[0].ranks if rank not in split.digest_of)
            if split.report_due is not None and vote.has_graph and self._asks(split, vote, now):
                frames.append((vote.rank, vote.number, ASK, b""))
        return frames

    def _asks(self, split: _Split, vote: Settled, now: float) -> bool:
        """Whether this vote's rank is to send its graph: the report is to compare it, and nobody has sent one of its
        fingerprint or is about to."""
        if vote.digest not in split.compared and len(split.compared) >= MAX_VARIANTS:
            split.left_out[vote.digest] = f"left out: a report compares at most {MAX_VARIANTS} graphs"
            return False
        is_known = vote.digest in self._graphs or vote.digest in self._asked
        if not is_known:
            kept_bytes = sum(map(len, self._graphs.values()))
            if len(self._graphs) + len(self._asked) >= MAX_GRAPHS or kept_bytes >= MAX_GRAPHS_BYTES:
                bounds = f"{MAX_GRAPHS:,} graphs of a job are kept, and {MAX_GRAPHS_BYTES >> 20} MiB"
                split.left_out[vote.digest] = f"left out: at most {bounds}"
                return False
            self._asked[vote.digest] = (vote.rank, vote.number, now + GRAPH_WITHIN_S)
        split.compared.add(vote.digest)
        return not is_known

    def _explain(self, split: _Split) -> list[Frame]:
        """Has the split explained, unless one of the same fingerprints was, with the same graphs."""
        split.report_due = None
        known = split.compared & self._graphs.keys()
        # A hash: there may be thousands of each.
        key = hashlib.sha256(b"".join([*sorted({*split.digest_of.values()}), b"graphs", *sorted(known)])).digest()
        if key in self._explained or len(self._explained) >= MAX_REPORTS:
            return []
        self._explained.add(key)
        if len(self._jobs) >= MAX_WAITING:
            return self._failed(f"{MAX_WAITING} wait for their turn")
        ranks_of: dict[bytes, list[int]] = {}
        for rank in sorted(split.digest_of):
            ranks_of.setdefault(split.digest_of[rank], []).append(rank)
        facts = {rank: self._facts_of(rank) for rank in split.digest_of}
        variants = []
        graphs = []
        for digest, ranks in sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0])):
            graph = self._graphs.get(digest, b"") if digest in split.compared else b""
            note = "" if graph else "the graph was asked for and has not come"
            if digest not in split.compared:
                note = split.left_out.get(digest, "no graph was given; pass graph_module_str to the vote")
            hosts = {rank: f"{facts[rank].get('host')}:{facts[rank].get('pid')}" for rank in ranks if facts[rank]}
            variants.append(
                {"ranks": ranks, "fingerprint": digest.hex(), "hosts": hosts, "note": note, "bytes": len(graph)}
            )
            graphs.append(graph)
        notes = [f"{format_ranks(split.missing)} had not voted when this was written"] if split.missing else []
        if len(self._explained) == MAX_REPORTS:
            notes.append(f"this is report {MAX_REPORTS:,} of the job, and the last")
        spans = sorted(split.spans, key=lambda span: (-len(span[0].ranks), span[1]))
        line, limit, _ = spans[0]
        before = [
            f"[{start}, {end}) on {line.name}: {outcome}"
            for start, end, outcome in sorted(self._recent.get(line, []))
            if end <= limit
        ]
        context = {
            "groups": [[list(line.ranks), [start, end]] for line, start, end in spans],
            "before": before[-HANDSHAKES_BEFORE:],
            "reason": split.reason,
            "notes": notes,
            "versions": {
                rank: {name: of_rank[name] for name in VERSIONS if of_rank.get(name)}
                for rank, of_rank in facts.items()
                if of_rank
            },
        }
        stem = os.path.join(self._folder, f"handshake-split-{os.getpid()}-{len(self._explained):04d}")
        self._jobs.append(_Job(stem, {"variants": variants, "context": context}, graphs, [*split.digest_of]))
        return []

    # ------------------------------------------------------------------ comparisons

    def _start(self, job: _Job, now: float) -> list[Frame]:
        try:
            with tempfile.TemporaryFile() as source:
                source.writelines([json.dumps(job.head).encode(), b"\n", *job.graphs])
                source.seek(0)
                output: BinaryIO = tempfile.TemporaryFile()
                process = subprocess.Popen([*self._command, job.stem], stdin=source, stdout=output)
        except OSError as error:
            return self._failed(error.strerror or str(error))
        self._running = _Running(job, process, output, now + COMPARE_WITHIN_S)
        return []

    def _finish(self) -> list[Frame]:
        """Takes what the process has to say; ends it if it has not ended."""
        if self._running is None:
            return []
        job, process, output, _ = self._running
        self._running = None
        status = process.poll()
        process.kill()
        process.wait()
        with output:
            output.seek(0)
            said = output.read(MAX_REPORT_CHARACTERS).decode("utf-8", "replace")
        if status is None:
            return self._failed(f"a comparison took more than {COMPARE_WITHIN_S:.0f} s")
        if status:
            return self._failed(said or f"its process ended with status {status}")
        place = f"is in the log of rank {self._coordinator_rank}, and in {job.stem}.html on its host"
        texts = {rank: f"why rank {rank} was split {place}" for rank in job.ranks}
        texts[self._coordinator_rank] = f"why the ranks' graphs were split:\n{said}"
        return [(rank, 0, LOG, text.encode()) for rank, text in texts.items()]

    def _failed(self, why: str) -> list[Frame]:
        text = f"splits can't be explained in {self._folder}: {why}"
        if text in self._failures or len(self._failures) >= MAX_FAILURES:
            return []
        self._failures.add(text)
        return [(self._coordinator_rank, 0, LOG, text.encode())]
