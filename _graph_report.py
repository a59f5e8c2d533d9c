# SPDX-License-Identifier: Apache-2.0
"""The report on a split: what differs between the ranks' graphs, said so that a person can fix it.

**The report.** `explain` compares every variant with the reference (`_graph_diff`): the variant that most ranks have;
of several, the one with the lowest rank. Rank 0 may be the odd one out. What comes of it are facts, which are written
as JSON; the text for a log is made from them, and the page is that text with the graphs side by side: one HTML file
without scripts, in which all that comes from a graph is escaped. What is advised is a table, `_ADVICE`: each piece of
evidence calls for a row, and the rows stand in the order of how much their evidence tells.

**During a job.** The coordinator hands the votes that were answered to `Reports`. Of each split component one graph is
asked for each distinct fingerprint, of one rank (`send_graph` is that rank's part). When the component is complete and
its graphs are in, or after REPORT_WAIT_S, a child process (`main`) compares them and writes the report: no verdict
waits for it, and a folder that hangs stops nothing but the reports. A set of fingerprints is explained again only where
graphs of it have come in since: a job may split at every step.
"""

import contextlib
import dataclasses
import hashlib
import itertools
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
from html import escape
from typing import Any, BinaryIO, NamedTuple

if __package__:
    from . import _graph_diff
    from ._graph_diff import NOT_THERE, BodyComparison, Comparison, Difference, Graph, Keys, Node, Source, number_of
    from ._vocabulary import HandshakeError, format_ranks
else:
    import _graph_diff
    from _graph_diff import NOT_THERE, BodyComparison, Comparison, Difference, Graph, Keys, Node, Source, number_of
    from _vocabulary import HandshakeError, format_ranks

_logger = logging.getLogger("torch_tpu.handshake")

# Of differences, variants, notes and pieces of advice so many are shown, and of the values of one difference: in a log
# that is a screen or two, on the page what a browser scrolls with ease. So many pieces of advice are to be read first.
MAX_LOG_ITEMS, MAX_LOG_VALUES, MAX_FIRST = 10, 4, 2
MAX_PAGE_ITEMS, MAX_PAGE_VALUES = 200, 64
# A side of a difference is one line. Of a longer one the part is shown in which it differs, with this much before it.
MAX_LINE_CHARACTERS, LEAD_CHARACTERS = 160, 40
# Graphs side by side: of variants, rows, and equal nodes around a changed one; and the characters of a node.
MAX_COMPARISONS, MAX_ROWS, CONTEXT_NODES, MAX_NODE_CHARACTERS = 12, 400, 3, 2000

MAX_GRAPH_BYTES = 8 * 2**20  # a graph on its way, compressed: one of 100,000 nodes takes some 4 MB
MAX_TEXT_BYTES = 64 * 2**20  # what it may be unpacked
MAX_VARIANTS = 64  # graphs that one report compares; with one for each rank, further ones show nothing new
# Graphs, compressed, that are kept for reports or on their way; past either bound no more are asked for.
MAX_GRAPHS, MAX_GRAPHS_BYTES = 1024, 256 * 2**20
MAX_SPLITS = 256  # split components that are kept for late votes; the ranks that the oldest lack never come
MAX_REPORTS = 1024  # of one job, since what differs is known long before
MAX_WAITING = 64  # comparisons that wait, since one runs at a time
HANDSHAKES_BEFORE = 3  # the last ones of a group, which a report mentions
MAX_LINES = 4096  # groups of which these are kept, and graphs that have run fat
REPORT_WAIT_S = 10.0  # a report is made when all that it needs is in, or so long after the split
GRAPH_WITHIN_S = 60.0  # then a graph is asked of others; making one of 100,000 nodes takes seconds
# What one comparison may take; how often to look whether it has ended; and what is left to it when the job ends.
COMPARE_WITHIN_S, LOOK_EVERY_S, CLOSE_WITHIN_S = 120.0, 0.05, 3.0
# A report's text for the log, what is said of a failure, and how many different failures are said.
MAX_REPORT_CHARACTERS, MAX_FAILURE_CHARACTERS, MAX_FAILURES = 2**18, 1000, 64

LOG, ASK, GRAPH = 0, 1, 2  # steps of the messages between the coordinator and a rank
NO_GRAPH = "# no graph: "  # what a rank sends in place of a graph that it can't give begins with this
VERSIONS = ("python", "torch", "torch_tpu")


class Variant(NamedTuple):
    """One of the graphs, and who has it."""

    ranks: Sequence[int]  # ascending
    fingerprint: str = ""  # by which it was found to be another graph
    graph: Graph | None = None  # None if it is not known
    note: str = ""  # why there is no graph
    hosts: Sequence[str] = ()  # `host:pid` of each of the ranks
    has_run_fat: bool = False  # all ranks have had this graph at once


class Context(NamedTuple):
    """What is known beside the graphs. Everything may be missing."""

    groups: Sequence[tuple[Any, ...]] = ()  # the group's ranks, a span that was split, and perhaps who voted on it
    before: Sequence[str] = ()  # the handshakes just before, a line of text each, oldest first
    reason: str = ""  # why the vote was split
    notes: Sequence[str] = ()  # what was left out, and which bound made it so
    versions: Mapping[str, Mapping[str, Sequence[int]]] = {}  # {library: {version: its ranks}}
    title: str = ""  # what these graphs are, for the heading
    earlier: str = ""  # the first report on a split between the same ranks


# --- Advice -----------------------------------------------------------------------------------------------------------

# What to do, by topic: the more telling the evidence, the earlier. In brackets what a topic makes needless to say.
_ADVICE_TEXT = """\
versions: The ranks' library versions differ (above). Install the same ones everywhere first: others trace differently.
cycle [*]: The ranks wait for one another in a cycle, since they issue collectives on these groups in different orders.
  Issue them in one order on all ranks; without the handshake this may hang.
thread [*]: Two threads count and submit votes (above). Submit right after counting, or let `submit_handshake` do both.
uncounted [*]: The ranks count their collectives differently (above). Count those outside graphs on all ranks
  (`record_eager_collectives`), and compile the same parts on all.
unhashable [constant, setting, change in place, text, nothing differs]: The graph of {odd} can't be hashed, so it is
  split whatever the others have: {reason}. Take that out of the graph, or pass it in as an input.
backward: These are backward graphs, and follow the forward ones: mend what differs there first ({earlier}).
empty [dynamic, inputs, shape, operations, purpose]: An input is empty on some ranks: {sides}{at}. Code that is skipped
  there (`if x.shape[0] > 0`) is not in their graph: run it on all ranks, or pad to one row at least.
purpose [graph, outputs, operations]: The ranks are in different passes: {passes}. They have different numbers of
  batches or steps (drop_last, an evaluation that ends early), or `torch.no_grad()` or frozen parameters on some only.
graph: The ranks run different parts of the program: {sides}. If one is a function that only some run (a tower where
  there is an image), run it on all, with a dummy input. Else look before this point for a branch on the rank or on
  data, a graph break, a recompile, or a compile cache that is warm on some only.
function [inputs, outputs, operations, collectives]: A function or module{at} runs on {having} only, as a tower where
  there is an image. Run it on all ranks: with a dummy input where there is none, and the result times 0.
layers [inputs, outputs, operations, collectives]: {blocks} more on {having}{at}: code that all run, repeated. Give all
  the same number of layers, or of turns of the loop. If they have it, a graph break cuts it short on the others.
graph break [inputs, outputs, operations]: The graph of {having} {edge}{at} where the others' goes on: probably a graph
  break (a branch on data), or a function compiled separately, on these ranks only. TORCH_LOGS=graph_breaks says where;
  `torch.compile(fullgraph=True)` makes it an error. If none breaks, the rest is under a condition: run it on all ranks.
dynamic [shape, symbols]: {having} recompiled with dynamic shapes, or with more of them{at}, since sizes changed there.
  Mark the dimension dynamic on all ranks at the start (`torch._dynamo.mark_dynamic(tensor, dim)`), or pad to one size.
shape: Sizes are not the same on all ranks{at}. Pad to one size (uneven last batch: drop_last=True; uneven shards: pad
  the shard), or mark the dimension dynamic on all ranks at the start: `torch._dynamo.mark_dynamic(tensor, dim)`.
inputs: The graphs take different inputs{at}: check that all ranks have the same parameters and optional arguments, and
  that none is frozen or tied on some only.
order of collectives [group]: The same collectives come in another order on {odd}{at}: on the device the ranks would
  hang, or mix up values. Issue them in a fixed order: the same on both sides of a branch; over sorted keys; without
  passes that go by timings (`torch._inductor.config.reorder_for_compute_comm_overlap = False`).
collectives [operations]: Not all ranks issue the same collectives{at}: on the device they would wait for one another
  forever. Issue each on all members of its group, with an empty or zero input where a rank has nothing to give.
ring: The split sizes are a ring or a shift{at}, and must differ. Vote with partial=True, which keeps the rest fat.
splits: Split sizes are data{at}, and are baked into the graph. Make them symbolic (`.tolist()` of a tensor inside the
  compiled function, with `torch._dynamo.config.capture_scalar_outputs = True`), or use a fixed capacity.
name of a group: The group has the same ranks but another name{at}: names are counted as groups are created. Create the
  same groups in the same order on all ranks (each calls new_group for every group, its own or not).
group: The collective runs on another group{at}. If the groups are each rank's own part of a mesh (its row, its column),
  fingerprint by role: `graph_fingerprint(graph_module, groups="role")`. Else use one group, created in the same order.
dtype: The dtype is not the same on all ranks{at}: check autocast, the parameters' dtype and the loaded checkpoint.
stride: Strides are not the same on all ranks{at}: call `.contiguous()`, or use one memory format, before this part.
device: The device is not the same on all ranks{at}: put the tensor on the same kind of device everywhere.
library: A library, not your code, bakes {formulas} into the graph{at}: layouts of DTensor and of tensor parallelism
  compute with the rank's place. Vote with partial=True, which keeps the rest fat, or give that module another layout.
shard: The bounds of each rank's shard ({formulas}) are baked into the graph as Python constants{at}. Keep them in a
  buffer (`self.register_buffer("shard_start", torch.tensor(start), persistent=False)`) or pass them to the compiled
  function as tensor inputs, and compute with the tensor: then all ranks trace one graph.
number: A number that depends on the rank ({formulas}) is baked into the graph as a Python constant{at}. Pass it in as a
  tensor, and compute with that (an index or a start by `x.index_select(dim, start + torch.arange(length))`).
hosts: The variants follow the hosts. Compare their library versions, environment variables and compile caches.
constant: A Python value that is not the same on all ranks is baked into the graph{at}: a setting, an environment
  variable, a seed, a length. Make it equal on all ranks, or pass it in as a tensor.
setting: An argument that no tensor can stand for (a kind of reduction, an epsilon, a dimension, a flag) is not the same
  on all ranks{at}: make equal the setting, the environment variable or the branch on the rank that it comes from.
tensor constant: A tensor made while tracing has other values on {odd}{at}; its values are part of the graph. Make it
  once in `__init__` with `register_buffer`, or pass it in as an input.
change in place: An input is changed in place on some ranks only{at}: change it on all or none, or work on a copy.
operations: The ranks traced different operations{at}. Look there for a branch on the rank (or on a setting, or an
  input that is empty or None), and compute the same on all; else for a compile cache that is warm on some ranks only.
symbols: Other sizes are dynamic on some ranks{at}: mark the same dimensions dynamic on all, or pad to one size. (Sizes
  that happen to be equal share one symbol; those that some code needs to be fixed have none.)
outputs: The graphs return different values{at}: check that the function returns the same, and that the same parameters
  need gradients and the same parts are checkpointed on all ranks.
text: Only the way in which the graph is written differs{at}: call it in one way, with the same versions everywhere.
nothing differs: The graphs of {odd} and of the reference read the same. What differs is not shown: values of tensor
  constants, inputs that share memory, descriptions of process groups, or how the graph was compiled."""
# By topic: what it makes needless, and the text.
_ROWS = re.findall(r"(?m)^([\w ]+?)(?: \[(.+)\])?: (.+)", _ADVICE_TEXT.replace("\n ", ""))
_ADVICE = {topic: (hides.split(", "), text) for topic, hides, text in _ROWS}
# Topics that the reason of a split calls for, by its words; and those that explain spans of different lengths.
_REASONS = {"in a cycle": "cycle", "another thread": "thread"}
_REASONS |= dict.fromkeys(("has gone past", "is late at", "did not count"), "uncounted")
_NO_BREAK = ("empty", "purpose", "graph", "function", "layers", "collectives")

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
_INSTALLED_FILE = re.compile(r"[/\\](site|dist)-packages[/\\]")
_DYNAMIC = r"\[[^][]*\b[a-z]"  # sizes some of which are symbols


def _constant_topic(difference: Difference) -> str:
    node, formula = difference.node, difference.formula
    name = re.sub(r"^torch\.ops\.\w+\.(\w+).*|^.*\.", r"\1", node.target).rstrip("_")
    sides = [each for each in (difference.sides[0], *difference.values.values()) if each != NOT_THERE]
    if name.startswith(("all_to_all", "alltoall")) and all(each.startswith("[") for each in sides):
        return "ring" if len({tuple(sorted(re.findall(r"\d+", each))) for each in sides}) == 1 else "splits"
    is_offset = bool(formula) or (difference.is_rising and name in _BOUND_OPERATIONS | {"select", "getitem"})
    is_of_library = node.origin and node.origin not in _SIZE_OPERATIONS | _NUMBER_OPERATIONS
    if is_offset and (is_of_library or (node.user_source and _INSTALLED_FILE.search(node.user_source.file))):
        return "library"
    if name in _SIZE_OPERATIONS:
        # A part that has the same size everywhere begins at another place.
        is_start = name in ("slice", "narrow") and node.shape is not None and not difference.follows
        return "number" if is_start and formula else "shape"
    are_numbers = all(_graph_diff.NUMBER.match(each) or each.endswith(", computed") for each in sides)
    if name not in _NUMBER_OPERATIONS or not are_numbers:
        return "setting"
    if not is_offset:
        return "constant"
    # A stride of one is more likely a number of its own, such as a seed; and no index is a floating point number.
    is_bound = name in _BOUND_OPERATIONS and ("·" in formula or not formula) and not re.match(r"b?f\d", node.dtype)
    return "shard" if is_bound else "number"


def _topics(difference: Difference) -> Iterator[str]:
    """The pieces of advice that a difference calls for."""
    kind, nodes = difference.kind, (difference.node, *difference.nodes)
    sides = [difference.sides[0], *difference.values.values()]
    is_of_inputs = kind in ("inputs", "shape") and difference.node.op == "placeholder"
    dynamic = [side for side in sides if re.search(_DYNAMIC, side)]
    if kind == "constant":
        yield _constant_topic(difference)
    elif kind == "group" and "same ranks" in difference.what:
        yield "name of a group"
    elif difference.what == "change in place":
        yield "change in place"
    elif is_of_inputs and kind == "shape" and any(re.search(r"\b0\b", side) for side in sides):
        yield "empty"
    elif is_of_inputs and dynamic:
        yield "dynamic" if len(dynamic) < len(sides) else "symbols"
    elif kind in _ADVICE:
        yield kind
    elif difference.is_function or difference.repeats:
        yield "function" if difference.is_function else "layers"
    else:
        if kind == "number of collectives" or any(node.collective for node in nodes):
            yield "collectives"
        yield "operations"


# --- The report -------------------------------------------------------------------------------------------------------


class Report:
    """What differs between the variants of one graph. Its public attributes are listed in `__init__`."""

    def __init__(self, variants: Iterable[Variant], context: Context | None = None) -> None:
        """`variants` has one for each distinct fingerprint. An iterator is read one at a time, since 64 large graphs
        take much memory; it must give them largest first. All others are put in that order."""
        if not isinstance(variants, Iterator):
            variants = sorted(variants, key=lambda variant: (-len(variant.ranks), variant.ranks))
        self.context = context = context or Context()
        self.variants: list[Variant] = []  # largest first, without their graphs
        self.reference = 0  # the variant that the others are compared with: the first whose graph is known
        self.comparisons: dict[int, Comparison] = {}  # by index of the variant
        # Variants that differ from the reference in the same places, together; only the first's bodies are kept.
        self.alike: dict[Any, list[int]] = {}
        self._graph: Graph | None = None  # the reference's
        self._cut: set[int] = set()  # variants whose text is cut off
        groups = [ranks for ranks, *_ in context.groups]
        self._unhashable: dict[str, int] = {}  # why, and a variant
        self._purposes: dict[str, list[int]] = {}  # variants, by what their graphs are for
        sizes: dict[int, str] = {}
        concerned: dict[str, list[int]] = {}  # variants, by what the report lacks of them
        cache: dict[int, Keys] = {}
        for number, variant in enumerate(variants):
            self.variants.append(variant._replace(graph=None))
            for remark in _remarks(variant):
                concerned.setdefault(remark, []).append(number)
            if (graph := variant.graph) is None:
                continue
            self._cut |= {number} if graph.is_cut else set()
            sizes[number] = _graph_diff.describe_size(graph.body)
            self._purposes.setdefault(_graph_diff.purpose(graph.body), []).append(number)
            self._unhashable[graph.unhashable] = number
            groups += [ranks for ranks, _ in graph.groups.values()]
            if self._graph is None:
                self.reference, self._graph = number, graph
                continue
            comparison = _graph_diff.compare(self._graph, graph, cache)
            # Graphs that have nothing in common can't be laid side by side.
            differences = [each for each in comparison.differences if each.kind != "graph"]
            pattern = tuple((each.body, each.position, each.kind, each.what) for each in differences)
            if pattern:
                self.alike.setdefault(pattern, []).append(number)
            is_shown = self.alike.get(pattern) == [number] and len(self.alike) <= MAX_COMPARISONS
            self.comparisons[number] = comparison if is_shown else comparison._replace(bodies=[])
        self.differences = _graph_diff.merge(self.comparisons)  # in the order of the reference
        for difference in self.differences:
            if difference.kind == "constant":
                values = {rank: side for ranks, side in self.sides(difference) if side != NOT_THERE for rank in ranks}
                difference.formula = _graph_diff.recognise(values, groups)
                difference.is_rising = _graph_diff.is_rising(values)
        notes = [f"{remark} ({self.ranks(numbers)})" for remark, numbers in concerned.items()]
        if dropped := max((comparison.dropped for comparison in self.comparisons.values()), default=0):
            notes.append(f"{dropped:,} more differences of one variant are left out (MAX_DIFFERENCES_PER_VARIANT)")
        versions = [*_unequal_versions(context)]
        count = len(self.variants)
        headline = f"one graph, on {self.ranks()}" if count == 1 else f"{self.ranks()} have {count} different graphs"
        # What there is to say, as JSON; the text and the page are made from it.
        self.facts: dict[str, Any] = {
            "handshake_report": 1,
            "headline": ": ".join(filter(None, [context.title, headline])),
            "groups": [{"ranks": format_ranks(ranks), "span": span} for ranks, span, *_ in context.groups],
            "reason": context.reason,
            "versions": versions,
            "variants": [
                {"name": _letters(number), "ranks": format_ranks(each.ranks), "size": sizes.get(number, ""),
                 "fingerprint": each.fingerprint, "hosts": [*each.hosts]}
                for number, each in enumerate(self.variants)
            ],
            "reference": _letters(self.reference),
            "differences": [
                {"kind": each.kind, "place": self._place(each), "what": each.what,
                 "source": _source_text(each.source, each.place, each.node.op == "placeholder"),
                 "sides": _shown(self.sides(each)), "formula": each.formula, "alike": each.alike,
                 "follows": each.follows}
                for each in self.differences
            ],
            "advice": self._advice(bool(versions)),
            "before": [*context.before],
            "notes": [*notes, *context.notes],
        }  # fmt: skip

    def ranks(self, numbers: Iterable[int] | None = None) -> str:
        """The ranks of these variants, or of all."""
        variants = self.variants if numbers is None else map(self.variants.__getitem__, numbers)
        return format_ranks(rank for variant in variants for rank in variant.ranks)

    def sides(self, difference: Difference) -> list[tuple[list[int], str]]:
        """(ranks, value) of each value, the reference's first, then in the order of the variants."""
        ranks_of = {difference.sides[0]: [*self.variants[self.reference].ranks]}
        for number, value in sorted(difference.values.items()):
            ranks_of.setdefault(value, []).extend(self.variants[number].ranks)
        return [(ranks, value) for value, ranks in ranks_of.items()]

    def _place(self, difference: Difference) -> str:
        """Node, position and operation of a difference; where on its group's line it is, if it is a collective."""
        if difference.kind == "graph" or self._graph is None:
            return "the whole graph"
        nodes, groups, node = self._graph.body.nodes, self._graph.groups, difference.node
        body = f"of nested body `{difference.body}`" if difference.body else f"of {len(nodes):,}"
        place = f"{'before ' if difference.what == 'added' else ''}node {difference.position:,} {body}"
        if difference.what not in ("inputs", "outputs", "added"):
            operation = f" = {_graph_diff.short_target(node.target)}" if node.op == "call" else f" ({node.op})"
            place += f", `{node.name}`{operation}"
        group = next((each.group for each in (node, *difference.nodes) if each.collective and each.group), None)
        if group is not None and group in groups and not difference.body:
            number = sum(each.collective and each.group == group for each in nodes[: difference.position])
            line = sorted(groups[group][0])
            starts = [start for members, (start, _), *_ in self.context.groups if sorted(members) == line]
            place += "".join(f", position {start + number} on the line of {format_ranks(line)}" for start in starts[:1])
        return place

    def _advice(self, do_versions_differ: bool) -> list[str]:
        """What to change, the most telling first; each piece once, with the place of the first difference it is for."""
        found: dict[str, dict[str, str]] = {"versions": {}} if do_versions_differ else {}
        hosts = [(each.rpartition(":")[0], k) for k, variant in enumerate(self.variants) for each in variant.hosts]
        if len(self.variants) > 1 and 1 < len(dict(hosts)) < len(hosts) and len(set(hosts)) == len(dict(hosts)):
            found["hosts"] = {}  # several ranks on a host, and each host has one variant
        found |= {topic: {} for words, topic in _REASONS.items() if words in self.context.reason}
        if len(self.variants) == 1 < len(self.variants[0].ranks) and "different positions" in self.context.reason:
            found["uncounted"] = {}
        if reason := max(self._unhashable, default=""):
            found["unhashable"] = {"odd": self.ranks([self._unhashable[reason]]), "reason": reason}
        if len(self._purposes) > 1 and "" not in self._purposes:
            passes = [f"{purpose} on {self.ranks(numbers)}" for purpose, numbers in self._purposes.items()]
            found["purpose"] = {"passes": ", ".join(passes)}
        if [*self._purposes] == ["backward"] and (self.context.earlier or not self.context.reason):
            found["backward"] = {"earlier": self.context.earlier or "if they differ too"}
        topics = [(difference, topic) for difference in self.differences for topic in _topics(difference)]
        for difference, topic in topics:
            if topic not in found:
                found[topic] = self._words(difference, [each for each, its_topic in topics if its_topic == topic])
        whole = self.comparisons.keys() - self._cut if self.reference not in self._cut else ()
        if same := [number for number in whole if not self.comparisons[number].differences]:
            found["nothing differs"] = {"odd": self.ranks(same)}
        ends: dict[Any, dict[int, Sequence[int]]] = {}  # of spans that start at one place of a line: who voted on them
        for ranks, (start, end), *voters in self.context.groups:
            ends.setdefault((*ranks, start), {})[end] = [*voters, ranks][0]
        short = {rank for each in ends.values() for end in each if end < max(each) for rank in each[end]}
        if short and found.keys().isdisjoint(_NO_BREAK):
            found.setdefault("graph break", {"having": format_ranks(short), "edge": "ends", "at": ""})
        hidden = {each for topic in found for each in _ADVICE[topic][0]}
        hidden |= _ADVICE.keys() - {"versions", *_REASONS.values()} if "*" in hidden else set()
        kept = [(topic, form) for topic, (_, form) in _ADVICE.items() if topic in found.keys() - hidden]
        said = [(text := form.format(**found[topic]))[0].upper() + text[1:] for topic, form in kept]
        new = [number for number, variant in enumerate(self.variants) if not variant.has_run_fat]
        if len(new) < len(self.variants):
            said[:1] = [" ".join([f"A new graph on {self.ranks(new)}; all ranks have run the others' fat.", *said[:1]])]
        return said

    def _words(self, difference: Difference, same_topic: list[Difference]) -> dict[str, str]:
        """What the advice on a difference is filled with."""
        sides = self.sides(difference)
        values = [value for _, value in sides]
        having = [
            {rank for ranks, value in sides if re.search(pattern, value) for rank in ranks}
            for pattern in ("^(ends|begins) here", _DYNAMIC, f"^(?!{NOT_THERE}$)")
        ]
        formulas = dict.fromkeys(each.formula or f"{values[0]}` to `{values[-1]}" for each in same_topic)
        place = next(filter(None, (each.place for each in same_topic)), "")
        return {
            "odd": self.ranks(difference.odd),
            "at": f" ({place})" if place else "",
            "formulas": ", ".join(f"`{formula}`" for formula in [*formulas][:3]),
            "having": format_ranks(next(filter(None, having))),
            "blocks": number_of(difference.repeats, "block"),
            "edge": difference.what.rpartition(" ")[2],
            "sides": "; ".join(f"{format_ranks(ranks)}: {_cut(value)}" for ranks, value in sides[:MAX_LOG_VALUES]),
        }

    def text(self, most_items: int = MAX_LOG_ITEMS, most_values: int = MAX_LOG_VALUES) -> str:
        """The report as text."""
        facts = self.facts
        groups, variants, differences = facts["groups"], facts["variants"], facts["differences"]
        follows = sum(each["follows"] for each in differences)
        also = f"; in {number_of(follows, 'more node')} as a consequence" if follows else ""
        places = number_of(sum(1 + len(each["alike"]) for each in differences), "place")
        advice = [*map(_PARAGRAPHS.fill, facts["advice"])]
        other_kinds = Counter(each["kind"] for each in differences[most_items:]).most_common()
        sections = [
            facts["headline"],
            *(f"  On the line of {each['ranks']}: collectives {_span(each['span'])}" for each in groups),
            *([f"  Reason: {facts['reason']}"] if facts["reason"] else []),
            *(f"  Library versions differ: {line}" for line in facts["versions"]),
            *_section(
                f"Variants, largest first; {facts['reference']} is the reference:",
                [_variant_text(each) for each in variants] if len(variants) > 1 else [],
                most_items,
                f"variants, on {self.ranks(range(most_items, len(variants)))}",
            ),
            *_section(
                f"What differs, in {places}{also}:",
                [_difference_text(number, each, most_values) for number, each in enumerate(differences, 1)],
                most_items,
                f"({', '.join(f'{count} {kind}' for kind, count in other_kinds)})",
            ),
            *_section("What to do:", advice[:MAX_FIRST], most_items, "to do"),
            *_section("If that is not it:", advice[MAX_FIRST:], most_items, "to do"),
            *_section("Handshakes just before:", [f"  {line}" for line in facts["before"]], most_items, "before"),
            *_section("", [f"Note: {note}" for note in facts["notes"]], most_items, "notes"),
        ]
        return "\n".join(sections) + "\n"


explain = Report  # as callers say it
_PARAGRAPHS = textwrap.TextWrapper(114, "  - ", "    ", break_long_words=False, break_on_hyphens=False)


def _section(title: str, items: list[str], most: int, of_what: str) -> Iterator[str]:
    """The first items below a title, if there are any, and how many more there are."""
    if items and title:
        yield title
    yield from items[:most]
    if len(items) > most:
        yield f"  and {len(items) - most:,} more {of_what}"


def _span(span: Sequence[Any]) -> str:
    return f"[{span[0]}, {span[1]})"


def _variant_text(variant: Mapping[str, Any]) -> str:
    """Size and fingerprint of a variant, and where its ranks run."""
    hosts, fingerprint = variant["hosts"], variant["fingerprint"]
    where = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
    parts = variant["size"], f"fingerprint {_cut(fingerprint, 17)}" if fingerprint else "", where
    return f"  {variant['name']}  {variant['ranks']}  {'; '.join(filter(None, parts))}"


def _difference_text(number: int, fact: Mapping[str, Any], most_values: int) -> str:
    sides = [f"{side['ranks']}: {_cut(side['value'])}" for side in fact["sides"]]
    if len(sides) > most_values:
        sides = [*sides[: most_values - 1], f"… {len(sides) - most_values} more …", sides[-1]]
    alike = fact["alike"]
    shown = ", ".join(map(str, alike[:6])) + (" …" if len(alike) > 6 else "")
    lines = [
        _cut(f"  {number}. {fact['kind']}: {fact['place']}, {fact['what']}", 2 * MAX_LINE_CHARACTERS),
        fact["source"],
        *sides,
        f"= {fact['formula']}" if fact["formula"] else "",
        f"the same at {number_of(len(alike), 'more place')}: node {shown}" if alike else "",
    ]
    return "\n     ".join(filter(None, lines))


def _unequal_versions(context: Context) -> Iterator[str]:
    for library, ranks_of in sorted(context.versions.items()):
        largest_first = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1]))
        if len(largest_first) > 1:
            shown = ", ".join(f"{version} on {format_ranks(ranks)}" for version, ranks in largest_first)
            yield f"{library}: {shown}"


def _remarks(variant: Variant) -> Iterator[str]:
    """What the report lacks of a variant, and why."""
    graph = variant.graph
    if graph is None:
        yield f"not compared: {variant.note or 'the graph is not known'}"
    if graph is not None and graph.is_cut:
        yield "the text of the graph is cut off: what is missing at its end may be there in fact"
    if ((graph.fingerprint if graph is not None else "") or variant.fingerprint).startswith("unhashable-"):
        yield "the graph could not be hashed, so it equals no other: see the warning on that rank"


def _shown(sides: list[tuple[list[int], str]]) -> list[dict[str, str]]:
    """The sides as they are to be read: long ones from a little before the first character that differs."""
    values = sorted(value for _, value in sides if value != NOT_THERE)
    start = 0
    if len(values) > 1 and max(map(len, values)) > MAX_LINE_CHARACTERS:
        # What the first and the last begin with, all do.
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(values[0], values[-1], strict=False))
        start = max(0, sum(1 for _ in alike) - LEAD_CHARACTERS)
    cut = [value if value == NOT_THERE or not start else f"…{value[start:]}" for _, value in sides]
    shown = [_cut(value, MAX_NODE_CHARACTERS) for value in cut]
    return [{"ranks": format_ranks(ranks), "value": value} for (ranks, _), value in zip(sides, shown, strict=True)]


def _source_text(source: Source | None, place: str = "", is_of_input: bool = False) -> str:
    """The user's line; of an input the line that reads it first."""
    if source is None:
        return place
    code = f": {_cut(source.code)}" if source.code else ""
    return f"{'first used in ' if is_of_input else ''}{place or source.place}{code}"


def _letters(number: int) -> str:
    """A variant's short name: A for the first, A1 after Z."""
    return f"{chr(65 + number % 26)}{number // 26 or ''}"


def _cut(text: str, most_characters: int = MAX_LINE_CHARACTERS) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= most_characters else f"{text[: most_characters - 1]}…"


# --- The page ---------------------------------------------------------------------------------------------------------

_HEAD = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light dark; --panel: #f6f8fa; --old: #ffebe9; --new: #dafbe1; }
@media (prefers-color-scheme: dark) { :root { --panel: #151b23; --old: #3c1618; --new: #12321d; } }
body { margin: 0 auto; max-width: 1500px; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; }
pre, td { font: 12.5px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
table { table-layout: fixed; width: 100%; } .at { width: 4rem; }
th, td { text-align: left; vertical-align: top; padding: .1rem .5rem; }
pre, th, .wide { background: var(--panel); }
.old { background: var(--old); } .new { background: var(--new); }
</style>"""


def page(reports: Sequence[Report], heading: str = "", notes: Iterable[str] = ()) -> str:
    """The page for one or several reports: HTML, light or dark as the reader's system is; for each report the text, and
    the graphs side by side. `heading` and `notes` are lines above them."""
    heading = escape(heading or (reports[0].facts["headline"] if reports else "No graphs"))
    parts = [f"{_HEAD}<title>{heading}</title></head><body><h1>{heading}</h1>"]
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    if len(reports) > 1:
        lines = [escape(report.facts["headline"]) for report in reports]
        links = (f'<li><a href="#report{k}">{line}</a></li>' for k, line in enumerate(lines))
        parts.append(f"<ul>{''.join(links)}</ul>")
    for number, report in enumerate(reports):
        parts.append(f'<pre id="report{number}">{escape(report.text(MAX_PAGE_ITEMS, MAX_PAGE_VALUES))}</pre>')
        parts += _comparisons(report)
    return "\n".join([*parts, "</body></html>\n"])


def _comparisons(report: Report) -> Iterator[str]:
    for first, *others in itertools.islice(report.alike.values(), MAX_COMPARISONS):
        names = [f"{_letters(number)} ({report.ranks([number])})" for number in (report.reference, first)]
        also = f"; the same places differ on {report.ranks(others)}" if others else ""
        yield f"<h2>Side by side: {' and '.join(names)}{also}</h2>"
        for body in report.comparisons[first].bodies:
            yield from _side_by_side(body, names)
    if (left := len(report.alike) - MAX_COMPARISONS) > 0:
        yield f"<p>{left} more comparisons are left out (MAX_COMPARISONS={MAX_COMPARISONS}).</p>"


def _side_by_side(comparison: BodyComparison, names: list[str]) -> Iterator[str]:
    """The changed regions of two bodies, with a few equal nodes around each."""
    rows = [*_rows(comparison)]
    changed = [k for k, (_, _, is_changed) in enumerate(rows) if is_changed]
    near = {k + d for k in changed for d in range(-CONTEXT_NODES, CONTEXT_NODES + 1)}
    shown = [k for k in range(len(rows)) if k in near]
    if not shown:
        return
    yield "<table><tr>" + "".join(f'<th class="at"></th><th>{name}</th>' for name in names) + "</tr>"
    if comparison.path:
        yield _wide(f"nested body {comparison.path}")
    source: Source | None = None
    end = shown[MAX_ROWS] if len(shown) > MAX_ROWS else len(rows)
    for is_near, group in itertools.groupby(range(end), near.__contains__):
        if not is_near:
            yield _wide(f"… {number_of(len([*group]), 'equal node')} …")
            continue
        for *sides, is_changed in map(rows.__getitem__, group):
            line = next(node.user_source for _, node in filter(None, sides))
            if line is not None and (source is None or line[:2] != source[:2]):
                source = line
                yield _wide(_source_text(source))
            cells = ""
            for side, style in zip(sides, ("old", "new"), strict=True):
                at, text = ("", "") if side is None else (side[0], _cut(side[1].line, MAX_NODE_CHARACTERS))
                style = style if text and is_changed else ""
                cells += f'<td class="at">{at}</td><td class="{style}">{escape(text)}</td>'
            yield f"<tr>{cells}</tr>"
    if len(shown) > MAX_ROWS:
        yield _wide(f"… {number_of(len(shown) - MAX_ROWS, 'more line')} left out (MAX_ROWS={MAX_ROWS}) …")
    yield "</table>"


_Side = tuple[int, Node] | None


def _rows(comparison: BodyComparison) -> Iterator[tuple[_Side, _Side, bool]]:
    """A node of the reference and one of the variant, with their positions; whether they are changed."""
    nodes, others = [*enumerate(comparison.reference.nodes)], [*enumerate(comparison.other.nodes)]
    i = j = 0
    for next_i, next_j in [*comparison.pairs, (len(nodes), len(others))]:
        yield from ((x, y, True) for x, y in itertools.zip_longest(nodes[i:next_i], others[j:next_j]))
        if next_i < len(nodes):
            yield nodes[next_i], others[next_j], next_i in comparison.changed
        i, j = next_i + 1, next_j + 1


def _wide(text: str) -> str:
    return f'<tr><td colspan="4" class="wide">{escape(text)}</td></tr>'


def write_file(path: str, content: str) -> None:
    """Writes a file so that a reader sees all of it or nothing; a device or a pipe is written as it is. Raises OSError
    with the path as it was given."""
    is_file = os.path.isfile(path) or not os.path.exists(path)
    target = os.path.realpath(path)
    unfinished = os.path.join(os.path.dirname(target), f".handshake-{os.getpid()}.part") if is_file else path
    try:
        with open(unfinished, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(content)
        if is_file:
            os.replace(unfinished, target)
    except OSError as error:
        if is_file:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
        raise OSError(error.errno, error.strerror, path) from error


# --- The process that makes a report ----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Makes one report, in files whose path without suffixes is the argument: the job is on the standard input, what is
    to be logged goes to the standard output. Returns 0; or 2 for a failure, with its reason instead of a report.

    The job is a line of JSON, `{"context": {…}, "variants": [{…}, …], "bytes": [number, …]}`, with the fields
    of `Context` and `Variant`, and after it the graphs as ranks sent them, of as many bytes as the line says.
    """
    try:
        said, status = _make_report(sys.stdin.buffer, arguments[0]), 0
    except Exception as error:
        # Without the file's name: the same for every split that it hinders.
        failure = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        said, status = failure[:MAX_FAILURE_CHARACTERS], 2
    sys.stdout.buffer.write(said.encode("utf-8", "replace"))
    return status


def _make_report(source: BinaryIO, stem: str) -> str:
    """The text for the log."""
    job = json.loads(source.readline())
    context = Context(**job["context"])
    variants = [Variant(**fields) for fields in job["variants"]]
    # By their length: whoever was forked meanwhile may hold the other end open.
    payloads = (source.read(length) for length in job["bytes"])
    try:
        report = explain(map(_with_graph, variants, payloads), context)
        text, as_page = report.text(), page([report])
    except Exception as error:  # who reads it wants to know which ranks, even if a graph is too strange
        note = f"the graphs could not be compared: {type(error).__name__}: {error}"
        report = explain(variants, context._replace(notes=[*context.notes, note]))
        text, as_page = report.text(), page([report])
    os.makedirs(os.path.dirname(stem), exist_ok=True)
    pointer = f"(side by side: {stem}.html)"
    try:
        write_file(f"{stem}.json", json.dumps(report.facts, indent=1) + "\n")
        write_file(f"{stem}.html", as_page)
    except OSError as error:
        pointer = f"Note: the page could not be written: {error}"
    write_file(f"{stem}.txt", f"{text}{pointer}\n")
    return text + pointer


def _with_graph(variant: Variant, payload: bytes) -> Variant:
    """The variant with the graph that a rank sent, or with a note that says why there is none."""
    if not payload:
        return variant
    try:
        return variant._replace(graph=_read_graph(payload))
    except (ValueError, zlib.error) as error:
        unreadable = "the graph can't be unpacked: " if isinstance(error, zlib.error) else ""
        return variant._replace(note=f"{unreadable}{error}")


def _read_graph(payload: bytes) -> Graph:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(payload, MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"the graph is larger than {MAX_TEXT_BYTES >> 20} MiB (MAX_TEXT_BYTES)")
    if not unpacker.eof:
        raise ValueError("the graph arrived cut off")
    text = data.decode("utf-8", "replace")
    if text.startswith(NO_GRAPH):
        raise ValueError(text.removeprefix(NO_GRAPH).strip())
    if text.startswith('{"handshake_graph"'):
        return _graph_diff.read_record(text)
    if __package__:
        from ._graph_text import parse
    else:
        from _graph_text import parse
    if graphs := parse(text):
        return graphs[0]
    raise ValueError("the text holds no graph that could be read")


# --- During a job -----------------------------------------------------------------------------------------------------


def send_graph(channel: Any, source: str | Callable[[], str]) -> None:
    """Sends this rank's graph, which the coordinator has asked for: a record or printed text, or what makes it."""
    try:
        text = source() if callable(source) else source
        if not isinstance(text, str):
            raise TypeError(f"it must be text, not {type(text).__name__}")
    except Exception as error:
        _logger.warning("handshake: the graph of a split could not be printed", exc_info=True)
        text = f"{NO_GRAPH}the graph could not be printed: {error!r}"
    payload = zlib.compress(text.encode("utf-8", "replace"))
    if len(payload) > MAX_GRAPH_BYTES:
        size = f"{len(payload):,} bytes, compressed, of at most {MAX_GRAPH_BYTES:,} (MAX_GRAPH_BYTES)"
        payload = zlib.compress(f"{NO_GRAPH}it takes {size}".encode())
    try:
        channel.send(GRAPH, payload)
    except HandshakeError as error:
        _logger.debug("handshake: a graph could not be sent: %s", error)


Settled = Any  # the core's: rank, number, flags, digest, spans, outcome, reason, has_graph
Span = tuple[Any, int, int]  # the line of a group, with `ranks` and `name`; start, end
Frame = tuple[int, int, int, bytes]  # to a rank: rank, number of its vote, step, payload


@dataclasses.dataclass(slots=True, eq=False)
class _Split:
    """One split component. Its report is made by `report_due`; None once it is made."""

    reason: str
    report_due: float | None
    digest_of: dict[int, bytes] = dataclasses.field(default_factory=dict)  # the fingerprint's, by rank
    spans: dict[Span, list[int]] = dataclasses.field(default_factory=dict)  # who voted on each, in the order of votes
    missing: set[int] = dataclasses.field(default_factory=set)  # ranks that have not voted
    compared: set[bytes] = dataclasses.field(default_factory=set)  # the digests whose graphs the report compares
    left_out: dict[bytes, str] = dataclasses.field(default_factory=dict)  # others that have graphs, and for which bound

    def meets(self, spans: Iterable[Span]) -> bool:
        """Whether any of the spans overlaps one of the component's."""
        pairs = itertools.product(spans, self.spans)
        return any(line is mine and start < its_end and its_start < end
                   for (line, start, end), (mine, its_start, its_end) in pairs)  # fmt: skip


class _Running(NamedTuple):
    """The comparison that runs."""

    stem: str  # the path of its files without their suffixes
    ranks: list[int]  # of the split
    process: subprocess.Popen[bytes]
    output: BinaryIO
    until: float  # when it is to be ended


class Reports:
    """What the coordinator does about reports. No thread, and no clock but in `close`; what is to be sent is returned.

    Methods return frames for ranks: (rank, number, step, payload). ASK asks a rank for the graph of its vote of that
    number. LOG, with number 0, is a text that the rank logs.
    """

    def __init__(
        self, folder: str, facts_of: Callable[[int], Mapping[str, Any]], coordinator_rank: int, command: Sequence[str]
    ) -> None:
        """The folder is made with the first report. `facts_of` gives what a rank said of itself when it connected
        (host, pid, VERSIONS). The coordinator's rank logs the reports; `command` calls this module's `main`."""
        self._folder, self._facts_of = folder, facts_of
        self._coordinator_rank, self._command = coordinator_rank, [*command]
        self._recent: dict[Any, list[tuple[int, int, str]]] = {}  # by line: (start, end, how it ended)
        self._splits: list[_Split] = []
        self._graphs: dict[bytes, bytes] = {}  # compressed, by digest
        self._asked: dict[bytes, tuple[int, int, float]] = {}  # by digest: rank, number, until when
        self._fat: dict[bytes, None] = {}  # fingerprints that all ranks have had at once, the latest last
        self._first_stems: dict[Any, str] = {}  # of the first report, by which ranks had which graph
        self._explained: set[bytes] = set()  # what is compared in a report, hashed: there may be thousands of each
        # Comparisons to be made: the path of the files, the ranks of the split, and what `main` reads.
        self._jobs: deque[tuple[str, list[int], list[bytes]]] = deque()
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
            if outcome == "fat":
                self._fat[vote.digest] = None
            for line, start, end in vote.spans:
                recent = self._recent.setdefault(line, [])
                if (start, end, outcome) not in recent:
                    recent.append((start, end, outcome))
                    del recent[: -2 * HANDSHAKES_BEFORE]
        for kept in (self._recent, self._fat):
            while len(kept) > MAX_LINES:
                del kept[next(iter(kept))]
        return frames + self.tick(now)

    def take(self, rank: int, number: int, step: int, payload: bytes, now: float) -> list[Frame]:
        """Takes a message of a rank: a graph that it was asked for. Others are ignored."""
        for digest, asked in [*self._asked.items()]:
            if step == GRAPH and asked[:2] == (rank, number):
                del self._asked[digest]
                self._graphs[digest] = payload
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
        running = self._running
        if running is not None and (running.process.poll() is not None or running.until <= now):
            frames += self._finish()
        while self._running is None and self._jobs:
            frames += self._start(*self._jobs.popleft(), now)
        self._look_at = now + LOOK_EVERY_S
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
            if self._running is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._running.process.wait(left_s)
            frames += self.tick(0.0)
        self._jobs.clear()
        self._finish()
        return frames

    def _add(self, votes: Sequence[Settled], now: float) -> list[Frame]:
        """Takes votes that were split together, for one reason. Ranks may come later to what was split before."""
        self._asked = {digest: asked for digest, asked in self._asked.items() if asked[2] > now}
        spans = {span for vote in votes for span in vote.spans}
        split = next((each for each in self._splits if each.meets(spans)), None)
        if split is None:
            if len(self._splits) >= MAX_SPLITS:
                del self._splits[0]
            due = now + REPORT_WAIT_S if len(self._explained) < MAX_REPORTS else None
            split = _Split(votes[0].reason, due)
            self._splits.append(split)
        first = [vote for vote in votes if vote.rank not in split.digest_of]  # after a graph break more may follow
        split.digest_of.update((vote.rank, vote.digest) for vote in first)
        for rank, span in ((vote.rank, span) for vote in votes for span in vote.spans):
            split.spans.setdefault(span, []).append(rank)
        split.missing = {rank for line, _, _ in split.spans for rank in line.ranks} - split.digest_of.keys()
        if split.report_due is None:
            return []
        return [frame for vote in first if vote.has_graph for frame in self._ask(split, vote, now)]

    def _ask(self, split: _Split, vote: Settled, now: float) -> list[Frame]:
        """Asks for a vote's graph if the report is to compare it, unless an equal one is there or on its way."""
        digest, kept = vote.digest, self._graphs
        if digest not in split.compared and len(split.compared) >= MAX_VARIANTS:
            split.left_out[digest] = f"left out: a report compares at most {MAX_VARIANTS} graphs"
        elif digest in kept or digest in self._asked:
            split.compared.add(digest)
        elif len(kept) + len(self._asked) >= MAX_GRAPHS or sum(map(len, kept.values())) >= MAX_GRAPHS_BYTES:
            bounds = f"{MAX_GRAPHS:,} graphs of a job are kept, and {MAX_GRAPHS_BYTES >> 20} MiB"
            split.left_out[digest] = f"left out: at most {bounds}"
        else:
            split.compared.add(digest)
            self._asked[digest] = (vote.rank, vote.number, now + GRAPH_WITHIN_S)
            return [(vote.rank, vote.number, ASK, b"")]
        return []

    def _explain(self, split: _Split) -> list[Frame]:
        """Has the split explained, unless one of the same fingerprints was, with the same graphs."""
        split.report_due = None
        known = split.compared & self._graphs.keys()
        key = hashlib.sha256(b"".join([*sorted({*split.digest_of.values()}), b"graphs", *sorted(known)])).digest()
        if key in self._explained or len(self._explained) >= MAX_REPORTS:
            return []
        self._explained.add(key)
        if len(self._jobs) >= MAX_WAITING:
            return self._failed(f"{MAX_WAITING} wait for their turn")
        facts = {rank: self._facts_of(rank) for rank in sorted(split.digest_of)}
        ranks_of: dict[bytes, list[int]] = {}
        versions: dict[str, dict[str, list[int]]] = {}
        for rank, of_rank in facts.items():
            ranks_of.setdefault(split.digest_of[rank], []).append(rank)
            for library in VERSIONS if of_rank else ():
                versions.setdefault(library, {}).setdefault(str(of_rank.get(library) or "none"), []).append(rank)
        variants: list[Variant] = []
        graphs: list[bytes] = []
        for digest, ranks in sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0])):
            note = "" if digest in known else "the graph was asked for and has not come"
            if digest not in split.compared:
                note = split.left_out.get(digest, "no graph was given; pass graph_module_str to the vote")
            hosts = [f"{facts[rank].get('host')}:{facts[rank].get('pid')}" for rank in ranks if facts[rank]]
            variants.append(Variant(ranks, digest.hex(), None, note, hosts, digest in self._fat))
            graphs.append(self._graphs[digest] if digest in known else b"")
        notes = [f"{format_ranks(split.missing)} had not voted when this was written"] if split.missing else []
        if len(self._explained) == MAX_REPORTS:
            notes.append(f"this is report {MAX_REPORTS:,} of the job, and the last")
        spans = sorted(split.spans, key=lambda span: (-len(span[0].ranks), span[1]))
        line, limit, _ = spans[0]
        recent = [each for each in sorted(self._recent.get(line, [])) if each[1] <= limit]
        before = [f"{_span(each)} on {line.name}: {each[2]}" for each in recent[-HANDSHAKES_BEFORE:]]
        groups = [(line.ranks, (start, end), sorted(split.spans[line, start, end])) for line, start, end in spans]
        stem = os.path.join(self._folder, f"handshake-split-{os.getpid()}-{len(self._explained):04d}")
        earlier = self._first_stems.setdefault(tuple(map(tuple, sorted(ranks_of.values()))), stem)
        earlier = "" if earlier == stem else f"see {earlier}.txt"
        context = Context(groups, before, split.reason, notes, versions, earlier=earlier)
        job = {"context": context._asdict(), "variants": [each._asdict() for each in variants]}
        head = json.dumps({**job, "bytes": [*map(len, graphs)]}, default=list).encode()
        self._jobs.append((stem, [*facts], [head, b"\n", *graphs]))
        return []

    def _start(self, stem: str, ranks: list[int], parts: list[bytes], now: float) -> list[Frame]:
        try:
            with tempfile.TemporaryFile() as source:
                source.writelines(parts)
                source.seek(0)
                output: BinaryIO = tempfile.TemporaryFile()
                process = subprocess.Popen([*self._command, stem], stdin=source, stdout=output)
        except OSError as error:
            return self._failed(error.strerror or str(error))
        self._running = _Running(stem, ranks, process, output, now + COMPARE_WITHIN_S)
        return []

    def _finish(self) -> list[Frame]:
        """Takes what the process has to say; ends it if it has not ended."""
        if self._running is None:
            return []
        stem, ranks, process, output, _ = self._running
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
        place = f"is in the log of rank {self._coordinator_rank}, and in {stem}.html on its host"
        texts = {rank: f"why rank {rank} was split {place}" for rank in ranks}
        texts[self._coordinator_rank] = f"why the ranks' graphs were split:\n{said}"
        return [(rank, 0, LOG, text.encode("utf-8", "replace")) for rank, text in texts.items()]

    def _failed(self, why: str) -> list[Frame]:
        text = f"splits can't be explained in {self._folder}: {why}"
        if text in self._failures or len(self._failures) >= MAX_FAILURES:
            return []
        self._failures.add(text)
        return [(self._coordinator_rank, 0, LOG, text.encode("utf-8", "replace"))]
