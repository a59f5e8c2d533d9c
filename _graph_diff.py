# SPDX-License-Identifier: Apache-2.0
"""What differs between the graphs of several ranks, found from node records.

A *record* is one rank's graph as JSON (`_graph.graph_record` makes it, `read_record` reads it); graphs that were only
printed become the same objects by `_graph_text.parse`. Nothing here needs torch.

**Alignment.** Nodes are aligned by all that a node is: operation, constants, dtype, shape …, and for its inputs only
what produces them, so that an inserted node does not change the nodes after it; in the gaps that this leaves, by
operation alone. Inputs are matched by what reads them. Where the longer graph begins or ends with the shorter one's
collectives, as after a graph break, only that part of it is aligned: the end could be matched with the end. Where both
graphs issue the same collectives in another order, each is matched with its like, and the order is one difference.

**Comparison.** Matched nodes are compared field by field; references are the same when the producers are matched. Nodes
left over are missing or added; those that stand next to one another or depend on one another are one difference. Those
left over on both sides that are the same have moved. A shape, dtype or stride that differs because an input's does is
only counted with the difference that it follows from; so are constants that repeat such a size, readers of moved
nodes, and inputs for nodes that only one side has.

**Merging.** The same place in the reference that differs in several variants is one difference with one value per
variant. Values that are affine in the rank, or in its place in a group, are recognised: mostly offsets of shards.
"""

import dataclasses
import functools
import itertools
import json
import marshal
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

if __package__:
    from ._graph_plan import align
    from ._vocabulary import format_ranks
else:
    from _graph_plan import align
    from _vocabulary import format_ranks

MAX_NESTED_BODIES = 50  # deeper ones are refused: a level takes some of Python's stack; programs nest 2 or 3
MAX_GROUP_RANKS = 2**20  # a larger group is refused: no job has as many ranks
MAX_ALL_GROUPS_RANKS = 2**22  # of a record's groups together, each of which takes memory
# Two graphs are different programs when less than this part of the smaller one's operations, if so many, is matched.
MIN_COMMON_PART, MIN_CALLS = 0.2, 5
MAX_DIFFERENCES_PER_VARIANT = 1000  # more say nothing new, and 64 variants of 5,000 nodes must fit in memory
MAX_ORDER_SHOWN = 3  # collectives of each side that are named where their order differs
MAX_RUN_NODES = 200  # nodes of a missing or added run that are kept for the report
MAX_CACHED_NODES = 2**16  # that are kept for further records, some 2 KB each
MAX_NUMBER_CHARACTERS = 40  # a longer one is no offset into anything; Python refuses more than 4,300 digits

NOT_THERE = "not there"  # the side of a difference on which there is no such node
_T = TypeVar("_T")
_Pairs = list[tuple[int, int]]  # of positions in the reference and in the variant

# --- Node records -----------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """The source line that a node comes from."""

    file: str
    line: int
    function: str
    code: str
    caller: str = ""  # the place that it was called from, outside installed libraries

    @property
    def place(self) -> str:
        caller = f", called from {self.caller}" if self.caller else ""
        return f"{self.file}:{self.line}{f' in {self.function}' if self.function else ''}{caller}"

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for one line, called from one place, wherever the program is installed."""
        return self.file.rpartition("/")[2], self.code or str(self.line), self.caller.rpartition("/")[2]


class Argument(NamedTuple):
    """One leaf of a node's arguments."""

    path: str  # where it is: `1`, `2[0]`, `dtype`
    text: str  # a constant as it is written; of a reference, the name of the node
    producer: int | None  # position of the node that it refers to, or None for a constant


class Node(NamedTuple):
    """A node of a graph. What a printed text doesn't tell is empty or None."""

    name: str
    op: str  # placeholder | get_attr | call | output | text (a printed statement that was not understood)
    target: str  # as `print_readable` writes it: `torch.ops.aten.add.Tensor`, method `.name`, submodule `self.name`
    arguments: tuple[Argument, ...]  # the leaves, in order; a get_attr has none
    line: str  # the node in one line, as people read it
    dtype: str = ""  # torch's short form, `f32`; of a symbolic number `Sym`
    shape: tuple[str, ...] | None = None  # the sizes as written; of a symbolic number its expression
    stride: tuple[str, ...] | None = None  # in elements
    device: str = ""  # its type without the index
    note: str = ""  # a tensor subclass, placements
    source: Source | None = None  # the innermost frame
    user_source: Source | None = None  # the innermost frame outside torch
    group: str | None = None  # name of the process group of a collective or a point-to-point operation
    collective: bool = False  # whether it counts as a collective (`_graph.count_collectives`)
    constant: str | None = None  # of a get_attr, the value of a tensor constant
    mutated_by: str | None = None  # of an input that the graph changes: by what, such as `copy_`
    shares: str | None = None  # of an input: the first one that it shares memory with
    module: str = ""  # the path of the module of the model that it is in, such as `model.embed_tokens`
    origin: str = ""  # what the program called there: a function, or a class of torch's modules

    @property
    def producers(self) -> list[int]:
        """Positions of the nodes that it reads, one for each time."""
        return [each.producer for each in self.arguments if each.producer is not None]


class Body(NamedTuple):
    """The nodes of a graph or of a body nested in it, in order: inputs, operations, output."""

    name: str
    nodes: list[Node]
    bodies: dict[str, "Body"]

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.nodes if node.op == "placeholder"]


class Graph(NamedTuple):
    """One rank's graph. It has at least one node."""

    body: Body
    fingerprint: str = ""  # empty if unknown
    rank: int | None = None  # whose graph it is
    groups: Mapping[str, tuple[tuple[int, ...], str]] = {}  # (ranks, description) of its process groups, by name
    first_line: int = 1  # where it starts in the text that it was read from
    is_cut: bool = False  # its end is missing
    unhashable: str = ""  # why it could not be hashed, if so


def read_record(text: str) -> Graph:
    """The graph of a node record, the JSON text that `_graph.graph_record` gives. Raises ValueError if it is not
    valid, or past one of the bounds above."""
    try:
        record = json.loads(text)
        if (version := record["handshake_graph"]) != 1:
            raise ValueError(f"its version is {version!r}, and this program reads version 1")
        return Graph(
            _read_body(record["body"], MAX_NESTED_BODIES),
            _checked(str, record.get("fingerprint") or ""),
            None if record.get("rank") is None else _checked(int, record["rank"]),
            _read_groups(record.get("groups") or {}),
            unhashable=_checked(str, record.get("unhashable") or ""),
        )
    except KeyError as error:
        raise ValueError(f"not a valid graph record: {error} is missing") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a valid graph record: {error}") from error


def _checked(kind: type[_T], value: Any) -> _T:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _read_groups(groups: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    read: dict[str, tuple[tuple[int, ...], str]] = {}
    left = MAX_ALL_GROUPS_RANKS
    for name, fields in groups.items():
        ranks: list[int] = []
        for first, count, step in fields["ranks"]:
            if min(first, count, step) < 0 or len(ranks) + count > MAX_GROUP_RANKS:
                raise ValueError(f"a group has negative ranks, or more than {MAX_GROUP_RANKS:,}")
            if first + step * count > 2 * MAX_GROUP_RANKS or (left := left - count) < 0:
                raise ValueError(f"its groups have ranks that no job has, or more than {MAX_ALL_GROUPS_RANKS:,} in all")
            ranks.extend(range(first, first + step * count, step) if step else [first] * count)
        read[name] = tuple(ranks), _checked(str, fields.get("description") or "")
    return read


def _read_body(fields: Any, levels_left: int) -> Body:
    if not levels_left:
        raise ValueError(f"bodies are nested more than {MAX_NESTED_BODIES} levels deep (MAX_NESTED_BODIES)")
    nodes = [_read_node(marshal.dumps(node, 2), position) for position, node in enumerate(fields["nodes"])]
    if not nodes:
        raise ValueError("a body has no nodes")
    bodies = {name: _read_body(body, levels_left - 1) for name, body in (fields.get("bodies") or {}).items()}
    return Body(_checked(str, fields.get("name") or ""), nodes, bodies)


# Fields of a node that are text.
_TEXTS = "name op target line dtype device note group constant mutated_by shares module origin".split()


@functools.lru_cache(MAX_CACHED_NODES)
def _read_node(record: bytes, position: int) -> Node:
    """A node from what `marshal` makes of its fields: those that ranks have in common are read, and kept, once."""
    fields = marshal.loads(record)
    values = {"target": "", **{name: fields[name] for name in Node._fields if fields.get(name)}}
    for name in _TEXTS:
        _checked(str, values.get(name, ""))
    if values["op"] not in ("placeholder", "get_attr", "call", "output"):
        raise ValueError(f"{values['op']!r} is not a kind of node")
    is_scalar = values.get("dtype", "Sym") != "Sym" and not fields.get("shape")  # then its sizes may be left out
    for name in ("shape", "stride"):
        if is_scalar or fields.get(name) is not None:
            values[name] = tuple(_checked(str, size) for size in fields.get(name) or ())
    arguments = []
    for path, text, producer in values.get("arguments", ()):
        if producer is not None and not 0 <= _checked(int, producer) < position:
            raise ValueError(f"node {position} reads node {producer}, which is not before it")
        arguments.append(Argument(_checked(str, path), _checked(str, text), producer))
    values["arguments"] = tuple(arguments)
    for name in ("source", "user_source"):
        if name in values:
            file, line, *more = values[name]
            values[name] = Source(_checked(str, file), _checked(int, line), *(_checked(str, each) for each in more))
    return Node(**values)


# --- What a comparison gives ------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class Difference:
    """One place in which at least one variant is not as the reference."""

    kind: str  # as MESSAGES.md lists them
    body: str  # the nested body it is in, as a path; empty for the graph itself
    position: int  # of the node in the reference (of an added node: of the one it comes before)
    node: Node  # the reference's; of an added one the variant's
    what: str  # the part of the node that differs, such as `argument 1`
    sides: Sequence[str]  # the reference's, and that of the variant in which it was found
    nodes: list[Node] = dataclasses.field(default_factory=list)  # missing or added, the first MAX_RUN_NODES
    repeats: int = 0  # how often these repeat lines that both sides have: layers, or turns of a loop
    is_function: bool = False  # these are a function, or a module, that the other side doesn't run
    follows: int = 0  # differences that are consequences of this one, most of any variant
    # After merging: the variants in which it differs; the side of every variant; positions of further nodes that differ
    # alike; the formula of a constant that depends on the rank, and whether it `is_rising`.
    odd: list[int] = dataclasses.field(default_factory=list)
    values: dict[int, str] = dataclasses.field(default_factory=dict)
    alike: list[int] = dataclasses.field(default_factory=list)
    formula: str = ""
    is_rising: bool = False

    @property
    def source(self) -> Source | None:
        """The user's own source line."""
        nodes = (self.node, *self.nodes)
        return next((node.user_source for node in nodes if node.user_source is not None), self.node.source)

    @property
    def place(self) -> str:
        """That line, where it is called from, and the module that it is in, as far as they are known."""
        module = next((f"module `{node.module}`" for node in (self.node, *self.nodes) if node.module), "")
        return ", ".join(filter(None, [self.source and self.source.place, module]))


class BodyComparison(NamedTuple):
    """How a variant's body lies against the reference's."""

    path: str  # the nested body's; empty for the graph itself
    reference: Body
    other: Body
    pairs: list[tuple[int, int]]  # matched positions (reference, variant), ascending in both
    to_other: dict[int, int]  # position in the variant of each node of the reference that is matched or moved
    to_reference: dict[int, int]  # the other way round
    changed: set[int]  # positions in the reference whose node differs in itself, not only as a consequence


class Comparison(NamedTuple):
    """One variant against the reference."""

    differences: list[Difference]  # in the order of the reference
    bodies: list[BodyComparison]
    lacks: dict[str, frozenset[int]]  # by body, the positions of the reference's nodes that the variant doesn't have
    dropped: int  # differences past MAX_DIFFERENCES_PER_VARIANT


# --- Aligning two bodies ----------------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """What a body's nodes are compared by."""

    strict: list[Any]  # all that tells what a node is; references by the producer's operation
    weak: list[Any]  # the operation alone


# Names of inputs that only count them; Dynamo's say which parameter or argument it is, which helps to match them.
_NUMBERED_INPUT = re.compile(r"^(?:primals|tangents|arg|args|s|u|l|input)_?\d*(?:_\d+)?$")


def node_keys(body: Body, cache: dict[int, Keys]) -> Keys:
    """The keys of a body's nodes. `cache` is by identity; whoever holds it must hold the bodies."""
    if id(body) in cache:
        return cache[id(body)]
    names = [_operation(node, body) for node in body.nodes]
    strict: list[Any] = []
    for node, name in zip(body.nodes, names, strict=True):
        form = _form_key(node, name, body)
        if node.op == "placeholder" and not _NUMBERED_INPUT.match(node.name):
            form = (*form, node.name)
        reads = [(path, text if producer is None else names[producer]) for path, text, producer in node.arguments]
        strict.append((form, tuple(reads)))
    weak = [name if isinstance(name, str) else name[0] for name in names]
    return cache.setdefault(id(body), Keys(strict, weak))


def node_content(node: Node, body: Body) -> Any:
    """All of a node, hashable; references by absolute position."""
    reads = [(path, text if producer is None else producer) for path, text, producer in node.arguments]
    form = _form_key(node, _operation(node, body), body)
    return form, node.mutated_by, node.shares, node.group, tuple(reads)


def _body_content(body: Body) -> tuple[Any, ...]:
    return tuple([node_content(node, body) for node in body.nodes])


def _form_key(node: Node, name: Any, body: Body) -> tuple[Any, ...]:
    """What a node does, and the form of its result."""
    form = (name, node.dtype, node.shape, node.stride, node.device, node.note)
    if node.op == "get_attr" and nested_body(node, body) is None:
        return (*form, node.constant or node.target)
    return form


def _operation(node: Node, body: Body) -> Any:
    """What the node does. The name of an attribute says nothing; a nested body counts by its content."""
    if node.op == "call":
        return node.target
    nested = nested_body(node, body)
    return node.op if nested is None else (node.op, _body_content(nested))


def nested_body(node: Node, body: Body) -> Body | None:
    """The nested body that a get_attr refers to."""
    if node.op != "get_attr":
        return None
    for part in node.target.split("."):
        if part not in body.bodies:
            return None
        body = body.bodies[part]
    return body


def _align_bodies(a: Body, b: Body, a_keys: Keys, b_keys: Keys, are_nested: bool) -> tuple[_Pairs, str]:
    """The pairs of positions that match, ascending in both; whether the shorter "ends" where the longer goes on, or
    "begins" where it has begun before, as after a graph break. Inputs come first."""
    starts = [next((k for k, node in enumerate(body.nodes) if node.op != "placeholder"), 0) for body in (a, b)]
    spans = [[i, len(body.nodes)] for i, body in zip(starts, (a, b), strict=True)]
    broken = "" if are_nested else _shorten(a, b, spans)
    if (a.nodes[-1].op == "output") != (b.nodes[-1].op == "output"):  # one is cut off
        spans = [[i, i + min(end - start for start, end in spans)] for i in starts]
    (i, i_end), (j, j_end) = spans
    pairs = _align(a_keys, i, i_end, b_keys, j, j_end)
    if broken == "ends":
        pairs.append((len(a.nodes) - 1, len(b.nodes) - 1))
    return _align_inputs(a, b, a_keys, b_keys, starts, pairs) + pairs, broken


def _shorten(a: Body, b: Body, spans: list[list[int]]) -> str:
    """Where one side has only the first collectives of the other, or only the last, and does not end, or begin, like
    it: takes the rest out of the longer one's span. Operations stand for collectives where there are none."""
    calls = [range(i, end - 1) for i, end in spans]
    marks = [[k for k in each if body.nodes[k].collective] for body, each in zip((a, b), calls, strict=True)]
    marks = marks if any(marks) else [[*each] for each in calls]
    longer = int(len(marks[1]) > len(marks[0]))
    count, more = len(marks[1 - longer]), len(marks[longer])
    is_whole = a.nodes[-1].op == b.nodes[-1].op == "output" and all(calls)
    if not is_whole or count == more or purpose(a) == "backward":
        return ""
    targets = [[body.nodes[k].target for k in each] for each, body in zip(marks, (a, b), strict=True)]
    starts, ends = (
        x.target == y.target and (x.user_source and x.user_source.key) == (y.user_source and y.user_source.key)
        for x, y in ((a.nodes[spans[0][0]], b.nodes[spans[1][0]]), (a.nodes[-2], b.nodes[-2]))
    )
    starts = starts and targets[longer][:count] == targets[1 - longer]
    ends = ends and targets[longer][more - count :] == targets[1 - longer]
    start, end = spans[longer]
    if starts and not ends and end - 1 - marks[longer][count] > 1:
        spans[longer][1] = marks[longer][count]
        return "ends"
    if ends and not starts and marks[longer][more - count - 1] > start:
        spans[longer][0] = marks[longer][more - count - 1] + 1
        return "begins"
    return ""


def _align_inputs(a: Body, b: Body, a_keys: Keys, b_keys: Keys, ends: list[int], calls: _Pairs) -> _Pairs:
    """The inputs that match: those of equal lists as they stand, others by what reads them, else by what they are."""
    i, j = ends
    if a_keys.strict[:i] == b_keys.strict[:j]:
        return [(k, k) for k in range(i)]
    matches = [
        (left.producer, right.producer)
        for x, y in calls
        for left, right in zip(a.nodes[x].arguments, b.nodes[y].arguments, strict=False)
        if a.nodes[x].op == "call" and left.path == right.path
    ]
    matches += align(a_keys.strict[:i], b_keys.strict[:j])
    forms = [[(node.dtype, node.dtype == "Sym" and node.shape) for node in body.inputs] for body in (a, b)]
    matches += align(forms[0], forms[1])  # a symbol is named for what it is the size of
    matched: dict[int, int] = {}
    taken: set[int] = set()
    for p, q in matches:
        if p is not None and q is not None and p < i and q < j and p not in taken and q not in matched:
            if "Sym" not in (a.nodes[p].dtype, b.nodes[q].dtype) or a.nodes[p].shape == b.nodes[q].shape:
                matched[q] = p
                taken.add(p)
    return align(range(i), [matched.get(q, -1) for q in range(j)])  # inputs in another order are left out


def _align(a: Keys, i: int, i_end: int, b: Keys, j: int, j_end: int) -> _Pairs:
    """By all that the nodes are, and in the gaps by operation."""
    pairs = [(i + k, j + m) for k, m in align(a.strict[i:i_end], b.strict[j:j_end])]
    for k, k_end, m, m_end in [*gaps(pairs, i_end, j_end, i, j)]:
        pairs += [(k + x, m + y) for x, y in align(a.weak[k:k_end], b.weak[m:m_end])]
    return sorted(pairs)


def gaps(
    pairs: Iterable[tuple[int, int]], end: int, other_end: int, i: int = 0, j: int = 0
) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, other start, other stop) of what lies between pairs, from i and j on, on both sides."""
    for next_i, next_j in [*pairs, (end, other_end)]:
        if next_i > i and next_j > j:
            yield i, next_i, j, next_j
        i, j = next_i + 1, next_j + 1


def _issued(body: Body, graph: Graph, by_layout: bool) -> dict[int, str]:
    """The collectives of a body by position, as far as their order matters: operation, constants and group. `by_layout`
    takes groups of one layout for one, as the rows of a mesh."""
    issued = {}
    for position, node in enumerate(body.nodes):
        if node.collective:
            group, ranks = _group_argument(node), graph.groups.get(node.group or "", ((),))[0]
            constants = [each.text for each in node.arguments if each.producer is None and each is not group]
            where = "" if node.group is None else f" on '{node.group}'"
            if ranks and by_layout:
                where = f" on a group such as {format_ranks(rank - ranks[0] for rank in ranks)}"
            elif ranks:
                where += f" = {format_ranks(ranks)}"
            name = short_target(node.target).removesuffix(".default").rpartition(".")[2]
            issued[position] = f"{name}({', '.join(constants)}){where}"
    return issued


# The collectives of both sides by position, where they are the same but for their order.
_Order = tuple[dict[int, str], dict[int, str]]


def _order(a: Body, b: Body, graphs: tuple[Graph, Graph]) -> _Order | None:
    """The collectives of both, if only their order differs: on the same groups, else on groups of one layout."""
    for by_layout in (False, True):
        order = _issued(a, graphs[0], by_layout), _issued(b, graphs[1], by_layout)
        sequences = [list(issued.values()) for issued in order]
        if sequences[0] == sequences[1]:
            break
        if sorted(sequences[0]) == sorted(sequences[1]):
            return order
    return None


# --- Comparing two graphs ---------------------------------------------------------------------------------------------


def compare(reference: Graph, other: Graph, cache: dict[int, Keys]) -> Comparison:
    """What differs in `other`, by positions in the reference. `cache` is of the reference's keys, for comparing it with
    many variants; whoever holds it must hold the reference."""
    comparer = _Comparer(reference, other, cache)
    differences, bodies, dropped = comparer.differences, comparer.bodies, comparer.dropped
    if whole := _as_a_whole(*bodies[0][1:3], bodies[0].to_other):
        sides, firsts = [], []
        for body in bodies[0][1:3]:
            firsts.append(next((node for node in body.nodes if node.user_source), body.nodes[0]))
            place = firsts[-1].user_source and firsts[-1].user_source.place
            sides.append(", ".join(filter(None, (purpose(body), describe_size(body), place))))
        differences, dropped = [Difference("graph", "", 0, firsts[0], whole, sides)], 0
    lacks = {each.path: frozenset(range(len(each.reference.nodes))) - each.to_other.keys() for each in bodies}
    return Comparison(differences, bodies, lacks, dropped)


def _as_a_whole(a: Body, b: Body, to_other: Mapping[int, int]) -> str:
    """How two graphs differ as a whole, if they are not to be compared node by node."""
    if (purpose(a) == "backward") != (purpose(b) == "backward"):
        return "a backward and a forward pass"
    sources = ((a.nodes[i].user_source, b.nodes[j].user_source) for i, j in to_other.items())
    if not any(x and x == y for x, y in sources):  # seldom: the lines of large graphs take long
        lines = [{node.user_source.key for node in body.nodes if node.user_source} for body in (a, b)]
        if all(lines) and lines[0].isdisjoint(lines[1]):
            return "no source line in common"
    same = sum(a.nodes[i].op == "call" and a.nodes[i].target == b.nodes[j].target for i, j in to_other.items())
    calls = min(sum(node.op == "call" for node in body.nodes) for body in (a, b))
    return "nothing in common" if calls >= MIN_CALLS and same < MIN_COMMON_PART * calls else ""


def purpose(body: Body) -> str:
    """What a graph of AOTAutograd's is for, by the names of its inputs; empty for others."""
    names = [node.name for node in body.inputs]
    if any(name.startswith("tangents_") for name in names):
        return "backward"
    if any(name.startswith("primals_") for name in names):
        return "training"
    return "inference" if names and all(re.fullmatch(r"arg\d+_\d+", name) for name in names) else ""


# What differs between two nodes: its kind, what part of the node it is, and both sides. And the kinds of differences in
# the form of a node's result.
_Found = tuple[str, str, Sequence[str]]
_FORM = ("dtype", "shape", "stride", "device", "tensor class")


class _Comparer:
    """Compares one variant with the reference."""

    def __init__(self, reference: Graph, other: Graph, cache: dict[int, Keys]) -> None:
        self._cache = cache
        self._other_cache: dict[int, Keys] = {}
        self._graphs = (reference, other)
        self.differences: list[Difference] = []
        self.bodies: list[BodyComparison] = []
        self.dropped = 0  # differences past the bound
        self._compare(reference.body, other.body, "")
        if not self.differences:
            self._compare_writing()

    def _compare(self, a: Body, b: Body, path: str) -> None:
        a_keys, b_keys = node_keys(a, self._cache), node_keys(b, self._other_cache)
        order = _order(a, b, self._graphs)
        if order is not None:
            a_keys, b_keys = (
                Keys(*([issued.get(k, key) for k, key in enumerate(by)] for by in keys))
                for keys, issued in zip((a_keys, b_keys), order, strict=True)
            )
        pairs, broken = _align_bodies(a, b, a_keys, b_keys, bool(path))
        to_other = dict(pairs)
        to_reference = {j: i for i, j in pairs}
        left_over: dict[Any, list[int]] = {}
        for j in reversed([j for j in range(len(b.nodes)) if j not in to_reference]):
            left_over.setdefault(b_keys.strict[j], []).append(j)
        kept = range(len(a.inputs) if broken else len(a.nodes))  # of what lies beyond a break nothing has moved
        others = [(i, left_over.get(a_keys.strict[i])) for i in kept if i not in to_other]
        moved = {i: js.pop() for i, js in others if js}
        to_other.update(moved)
        to_reference.update((j, i) for i, j in moved.items())
        comparison = BodyComparison(path, a, b, pairs, to_other, to_reference, set())
        self.bodies.append(comparison)
        first = len(self.differences)
        if order is not None:
            self._add_order(comparison, order, moved)
        else:
            self._add_moved(comparison, moved)
        self._compare_left_over(comparison, broken)
        self._compare_nodes(comparison, order is not None, bool(broken))
        self.differences[first:] = sorted(self.differences[first:], key=lambda difference: difference.position)

    def _add(self, difference: Difference) -> None:
        if len(self.differences) < MAX_DIFFERENCES_PER_VARIANT:
            del difference.nodes[MAX_RUN_NODES:]
            self.differences.append(difference)
        else:
            self.dropped += 1

    def _add_break(self, comparison: BodyComparison, left_over: list[list[int]], how: str) -> list[list[int]]:
        """One graph ends, or begins, where the other goes on. Returns what is left over on this side of that."""
        bodies, ends = (comparison.reference, comparison.other), how == "ends"
        common = [pair for pair in comparison.pairs if bodies[0].nodes[pair[0]].op in ("call", "get_attr")]
        edge = common[-1 if ends else 0] if common else tuple(len(body.inputs) - ends for body in bodies)
        parts = [*zip(bodies, left_over, edge, strict=True)]
        nodes = [[body.nodes[k] for k in each if (k > at) == ends] for body, each, at in parts]
        longer = max((0, 1), key=lambda side: (sum(node.collective for node in nodes[side]), len(nodes[side])))
        beyond, own = nodes[longer], nodes[1 - longer]
        source = next((f", from {each.place}: {each.code}" for node in beyond if (each := node.user_source)), "")
        size = f"{_describe_nodes(beyond)}{source}"
        here = f"{how} here{f', with {_describe_run(own)}' if own else ''}"
        sides = [f"goes on with {size}" if ends else f"has {size}, before it", here]
        last = own[-1] if own else bodies[1 - longer].nodes[edge[1 - longer]]
        node = bodies[0].nodes[edge[0]]._replace(user_source=last.user_source)
        sides, what = sides[::-1] if longer else sides, f"where one graph {how}"
        self._add(Difference("graph break", comparison.path, edge[0], node, what, sides, beyond))
        return [[k for k in each if (k > at) != ends] for _, each, at in parts]

    def _add_order(self, comparison: BodyComparison, order: _Order, moved: Mapping[int, int]) -> None:
        """The same collectives in another order."""
        sequences = [list(issued.items()) for issued in order]
        differ = [n for n, (x, y) in enumerate(zip(*sequences, strict=True)) if x[1] != y[1]]
        shown = [sequence[differ[0] : min(differ[-1] + 1, differ[0] + MAX_ORDER_SHOWN)] for sequence in sequences]
        more = " …" if len(shown[0]) <= differ[-1] - differ[0] else ""
        sides = [
            ", then ".join(f"{issued}{_short_place(body.nodes[k])}" for k, issued in sequence) + more
            for body, sequence in zip((comparison.reference, comparison.other), shown, strict=True)
        ]
        i = shown[0][0][0]
        node = comparison.reference.nodes[i]
        found = Difference("order of collectives", comparison.path, i, node, "place in the order", sides)
        found.follows = max(len(moved) - 1, 0)
        self._add(found)
        comparison.changed.update(moved)

    def _add_moved(self, comparison: BodyComparison, moved: Mapping[int, int]) -> None:
        """Nodes at another place; those that stand next to one another are one difference."""
        a, b = comparison.reference, comparison.other
        for i, j in moved.items():
            if i - 1 in moved:
                continue
            # The number of the place alone may be the same.
            sides = [
                f"node {k}, after `{body.nodes[k - 1].line}`{_short_place(body.nodes[k])}" if k else "node 0"
                for body, k in ((a, i), (b, j))
            ]
            nodes = [a.nodes[k] for k in itertools.takewhile(moved.__contains__, itertools.count(i))]
            kind = "order of collectives" if any(node.collective for node in nodes) else "order"
            self._add(Difference(kind, comparison.path, i, nodes[0], "place in the order", sides, nodes))
        comparison.changed.update(moved)

    def _compare_left_over(self, comparison: BodyComparison, broken: str) -> None:
        """Missing and added nodes."""
        path, a, b = comparison.path, comparison.reference, comparison.other
        places = _places(comparison.pairs, len(a.nodes), len(b.nodes))
        ends = [len(a.nodes), len(b.nodes)]
        if not path and any(graph.is_cut for graph in self._graphs):  # what is beyond may be there too
            ends = [max(matched, default=-1) + 1 for matched in (comparison.to_other, comparison.to_reference)]
        missing = [i for i in range(ends[0]) if i not in comparison.to_other]
        added = [j for j in range(ends[1]) if j not in comparison.to_reference]
        comparison.changed.update(missing)
        inputs, only_for_missing = _only_inputs(a, missing)
        other_inputs, only_for_added = _only_inputs(b, added)
        missing = [i for i in missing if a.nodes[i].op != "placeholder"]
        added = [j for j in added if b.nodes[j].op != "placeholder"]
        first = len(self.differences)
        if broken:
            missing, added = self._add_break(comparison, [missing, added], broken)
        elif inputs or other_inputs:  # with a break come other inputs
            body, only = (a, inputs) if inputs else (b, other_inputs)
            node = body.nodes[only[0]]._replace(user_source=_first_uses(body).get(only[0]))
            position = inputs[0] if inputs else places[other_inputs[0]]
            sides = [_describe_inputs(a, inputs), _describe_inputs(b, other_inputs)]
            self._add(Difference("inputs", path, position, node, "inputs", sides, [body.nodes[k] for k in only]))
        common = _Code(a.nodes[i] for i in comparison.to_other if missing or added)
        added_runs = _connected(b, added)
        for run in _connected(a, missing):
            partner = next((other for other in added_runs if run[0] <= places[other[0]] <= run[-1] + 1), [])
            added_runs = [other for other in added_runs if other is not partner]
            self._add_run(path, run[0], [a.nodes[i] for i in run], [b.nodes[j] for j in partner], common)
        for run in added_runs:
            self._add_run(path, places[run[0]], [], [b.nodes[j] for j in run], common)
        for difference in self.differences[first : first + 1]:
            difference.follows += only_for_missing + only_for_added

    def _add_run(self, path: str, position: int, missing: list[Node], added: list[Node], common: "_Code") -> None:
        """Nodes that only one side has, or each side its own."""
        counts = [sum(node.collective for node in nodes) for nodes in (missing, added)]
        what = "replaced" if missing and added else "missing" if missing else "added"
        kind = "op" if what == "replaced" else f"{what} node"
        kind = "number of collectives" if counts[0] != counts[1] else kind
        sides = [_describe_run(nodes) if nodes else NOT_THERE for nodes in (missing, added)]
        more = max(missing, added, key=lambda nodes: (sum(node.collective for node in nodes), len(nodes)))
        found, code = Difference(kind, path, position, (missing or added)[0], what, sides, more), _Code(more)
        is_more = what != "replaced" and purpose(self._graphs[0].body) != "backward"  # which computes values again
        if is_more and code.calls.keys() <= common.calls.keys():
            found.repeats = min(code.calls.values(), default=0)
        elif len(code.calls) > 1 and code.lines.isdisjoint(common.lines):
            own = sum(count for frame, count in code.frames.items() if frame not in common.frames)
            found.is_function = 2 * own > code.frames.total()  # else a branch in one that both run
        self._add(found)

    def _compare_nodes(self, comparison: BodyComparison, is_order_told: bool, is_broken: bool) -> None:
        """What differs in nodes that are matched."""
        a, b = comparison.reference, comparison.other
        to_other, to_reference = comparison.to_other, comparison.to_reference
        a_keys, b_keys = node_keys(a, self._cache), node_keys(b, self._other_cache)
        tainted: dict[int, Difference | None] = {}  # nodes whose result differs in form, and the difference at the root
        sizes: set[tuple[str, ...]] = set()  # pairs of sizes that were seen to differ
        uses = _first_uses(a), _first_uses(b)
        order = next((each for each in reversed(self.differences) if each.kind.startswith("order")), None)
        has_facts = not is_broken and not any(graph.is_cut for graph in self._graphs)  # a text has them at its end
        for i, j in sorted(to_other.items()):
            x, y = a.nodes[i], b.nodes[j]
            if has_facts and bool(x.mutated_by) != bool(y.mutated_by):
                # The line where it is changed is on the side that does.
                node = x._replace(user_source=uses[0].get(i) if x.mutated_by else uses[1].get(j))
                sides = [f"changed in place ({how})" if how else "not changed" for how in (x.mutated_by, y.mutated_by)]
                self._add(Difference("inputs", comparison.path, i, node, "change in place", sides))
                comparison.changed.add(i)
            if has_facts and x.shares != y.shares:
                sides = [f"shares that of `{each.shares}`" if each.shares else "of its own" for each in (x, y)]
                node = x._replace(user_source=uses[0].get(i))
                self._add(Difference("inputs", comparison.path, i, node, "memory", sides))
                comparison.changed.add(i)
            inputs, other_inputs = x.producers, y.producers
            is_same = a_keys.strict[i] == b_keys.strict[j] and [to_other.get(p) for p in inputs] == other_inputs
            if is_same and x.op != "get_attr" and x.group is None:
                continue
            cause = next((tainted[p] for p in inputs if p in tainted), None)
            # What a collective reads, and the size of that, is what its place in the order makes of it.
            follows = (is_order_told and x.collective) or not to_reference.keys() >= {*other_inputs}
            follows = follows or any(p in tainted or p not in to_other for p in inputs)
            root: Difference | None = None
            consequences = 0
            found = [*self._fields(comparison, i, x, y)]
            for difference in found:
                is_form = difference.kind in _FORM
                is_wiring = difference.kind == "outputs" or difference.sides[0].startswith("reads `")
                if is_wiring and order is not None:
                    order.follows += 1
                    continue
                # Of a tensor whose shape differs the strides do too.
                is_of_root = is_form and root is not None and root.kind in ("shape", "constant", "dtype")
                is_size = difference.kind == "constant" and tuple(difference.sides) in sizes
                if is_of_root or ((is_form or is_size) and follows):
                    consequences += 1
                    continue
                if difference.kind == "order of collectives":
                    order = difference
                if x.op == "placeholder":
                    difference.node = x._replace(user_source=uses[0].get(i))
                self._add(difference)
                comparison.changed.add(i)
                root = root or difference
            cause = root or cause
            if consequences and cause is not None:
                cause.follows += 1
            if any(difference.kind in _FORM for difference in found):
                tainted[i] = cause
            if x.shape is not None and y.shape is not None and len(x.shape) == len(y.shape):
                sizes.update(pair for pair in zip(x.shape, y.shape, strict=True) if pair[0] != pair[1])

    def _fields(self, comparison: BodyComparison, i: int, x: Node, y: Node) -> Iterator[Difference]:
        """The differences between two matched nodes."""
        node = x
        found: Iterator[_Found] = itertools.chain(self._groups(x, y), _arguments(x, y, comparison))
        if x.op == "get_attr":
            found = self._attributes(comparison, i, x, y)
        elif x.op == "output":
            found = _outputs(x, y, comparison)
            returned = next(iter(x.producers), i)
            node = x._replace(user_source=comparison.reference.nodes[returned].user_source)
        for kind, what, sides in found:
            yield Difference(kind, comparison.path, i, node, what, sides)
        forms = [
            (each.dtype, _sizes(each.shape), _sizes(each.stride), each.device, each.note or "plain") for each in (x, y)
        ]
        for kind, left, right in zip(_FORM, *forms, strict=True):
            if left != right and left and right:  # a text without the field says nothing about it
                yield Difference(kind, comparison.path, i, x, kind, (left, right))

    def _groups(self, x: Node, y: Node) -> Iterator[_Found]:
        """The process group, by name, else by its ranks."""
        if x.group is None or y.group is None:
            return
        ranks = [graph.groups.get(node.group or "", ((),))[0] for graph, node in zip(self._graphs, (x, y), strict=True)]
        sides = []
        for graph, node, of_group in zip(self._graphs, (x, y), ranks, strict=True):
            whose = "" if graph.rank is None else f" on rank {graph.rank}"  # other ranks may have others by that role
            sides.append(f"'{node.group}'" + ("" if not of_group else f" = {format_ranks(of_group)}{whose}"))
        if x.group != y.group:
            argument = _group_argument(x)
            what = "process group" if argument is None else f"argument {argument.path}"
            is_same = all(ranks) and ranks[0] == ranks[1]
            yield "group", f"name of the group ({what}; same ranks)" if is_same else what, sides
        elif all(ranks) and ranks[0] != ranks[1]:
            yield "group", "ranks of the group", sides

    def _attributes(self, comparison: BodyComparison, i: int, x: Node, y: Node) -> Iterator[_Found]:
        path = comparison.path
        bodies = nested, other = nested_body(x, comparison.reference), nested_body(y, comparison.other)
        if nested is not None and other is not None:
            is_same = _body_content(nested) == _body_content(other)
            if not is_same or self._graphs[0].groups != self._graphs[1].groups:
                self._compare(nested, other, f"{path}.{x.target}" if path else x.target)
            comparison.changed.update(() if is_same else (i,))
        elif nested is not other:
            sides = ["an attribute" if body is None else describe_size(body) for body in bodies]
            yield "nested body", "nested body", sides
        elif x.constant is None and y.constant is None and x.target != y.target:
            yield "op", "attribute", (f"self.{x.target}", f"self.{y.target}")
        elif x.constant is not None and y.constant is not None and x.constant != y.constant:
            values = [_DIGEST.sub("", constant) for constant in (x.constant, y.constant)]
            yield "tensor constant", "value", values if values[0] != values[1] else (x.constant, y.constant)

    def _compare_writing(self) -> None:
        """What is left where no difference was found, and yet the graphs are not the same."""
        for body in self.bodies:
            for i, (x, y) in enumerate(zip(body.reference.nodes, body.other.nodes, strict=False)):
                if x.line != y.line and node_content(x, body.reference) != node_content(y, body.other):
                    self._add(Difference("text", body.path, i, x, "as written", (x.line, y.line)))
                    body.changed.add(i)
                    return


class _Code:
    """The user's code that some nodes come from."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        known = [(node, node.user_source) for node in nodes if node.user_source]
        self.calls = Counter((node.target, source.key) for node, source in known)  # operations, by their lines
        self.lines = {source.key for _, source in known}
        self.frames = Counter((source.function, source.caller) for _, source in known)  # calls of functions


_DTYPE = re.compile(r"torch\.(?:float|bfloat|int|uint|bool|half|double|long|complex|short|quint|qint)\w*$")
_DIGEST = re.compile(r"\bblake2b:[0-9a-f]+ ")


def _outputs(x: Node, y: Node, comparison: BodyComparison) -> Iterator[_Found]:
    to_other, to_reference = comparison.to_other, comparison.to_reference
    lefts, rights = ([(each.path, each.producer, each.text) for each in node.arguments] for node in (x, y))
    if not (to_other.keys() >= {*x.producers} and to_reference.keys() >= {*y.producers}):
        return  # the missing or added node that is returned is reported itself
    mapped = [(path, None if q is None else to_reference[q], text) for path, q, text in rights]
    returned, other_returned = ({p for _, p, _ in each} for each in (lefts, mapped))
    sides = []
    for of_side, elsewhere in ((lefts, other_returned), (mapped, returned)):
        only = [f"`{text}`" for _, p, text in of_side if p is not None and p not in elsewhere]
        sides.append(number_of(len(of_side), "output") + (f", only here: {', '.join(only[:4])}" if only else ""))
    plain, other_plain = ([(path, text if p is None else p) for path, p, text in each] for each in (lefts, mapped))
    if plain != other_plain:
        yield "outputs", "outputs", sides if sides[0] != sides[1] else (x.line, y.line)


def _arguments(x: Node, y: Node, comparison: BodyComparison) -> Iterator[_Found]:
    """(kind, what, both sides) of each argument that differs, but for the group."""
    left_of, right_of = _by_argument(x), _by_argument(y)
    groups = _group_argument(x), _group_argument(y)
    for name in dict.fromkeys([*left_of, *right_of]):
        lefts, rights = left_of.get(name, []), right_of.get(name, [])
        what = f"argument {name}" if name.isdigit() else f"argument `{name}`"
        if [each.path for each in lefts] != [each.path for each in rights]:
            texts = _argument_text(lefts), _argument_text(rights)
            is_constant = all(each.producer is None for each in (*lefts, *rights))
            # The same for a list and a tuple, say.
            yield "constant" if is_constant else "operand", what, texts if texts[0] != texts[1] else (x.line, y.line)
            continue
        constants = [pair for pair in zip(lefts, rights, strict=True) if pair[0].producer is pair[1].producer is None]
        if sum(left.text != right.text for left, right in constants) > 1:
            yield "constant", what, (_argument_text(lefts), _argument_text(rights))
            continue
        for left, right in zip(lefts, rights, strict=True):
            if left.producer is None and right.producer is None:
                if left.text != right.text and not (left is groups[0] and right is groups[1]):
                    kind = "dtype" if _DTYPE.match(left.text) and _DTYPE.match(right.text) else "constant"
                    yield kind, f"argument {left.path}" if left.path != name else what, (left.text, right.text)
            elif left.producer is None or right.producer is None:
                sides = [each.text if each.producer is None else f"`{each.text}`, computed" for each in (left, right)]
                yield "constant", what, sides
            elif left.producer in comparison.to_other and right.producer in comparison.to_reference:
                if (p := comparison.to_reference[right.producer]) != left.producer:
                    kind = "order of collectives" if x.collective else "operand"
                    yield kind, what, (f"reads `{left.text}`", f"reads `{comparison.reference.nodes[p].name}`")


def _by_argument(node: Node) -> dict[str, list[Argument]]:
    grouped: dict[str, list[Argument]] = {}
    for argument in node.arguments:
        grouped.setdefault(re.split(r"[\[({.]", argument.path, maxsplit=1)[0], []).append(argument)
    return grouped


def _argument_text(arguments: list[Argument]) -> str:
    if not arguments:
        return "not given"
    texts = [argument.text for argument in arguments]
    return texts[0] if len(texts) == 1 and "[" not in arguments[0].path else f"[{', '.join(texts)}]"


def _group_argument(node: Node) -> Argument | None:
    """The argument that names the node's process group, if it is a name."""
    names = (f"'{node.group}'", f'"{node.group}"')
    return next((each for each in reversed(node.arguments) if each.producer is None and each.text in names), None)


def _only_inputs(body: Body, left_over: list[int]) -> tuple[list[int], int]:
    """The inputs that only one side has, but for those that just other such nodes read; and how many these are."""
    only = set(left_over)
    readers: dict[int, set[int]] = {k: set() for k in left_over if body.nodes[k].op == "placeholder"}
    of_size = {body.nodes[k].shape: k for k in readers if body.nodes[k].dtype == "Sym"}  # its tensors read it too
    for k, node in enumerate(body.nodes[:-1] if readers else ()):
        for producer in (*node.producers, *(of_size.get((size,), -1) for size in node.shape or ())):
            readers.get(producer, set()).add(k)
    inputs = [k for k, its in readers.items() if not its - {k} or not its <= only]
    return inputs, len(readers) - len(inputs)


def _first_uses(body: Body) -> dict[int, Source]:
    """The source line of the first node that reads a node, by the position of that."""
    uses: dict[int, Source] = {}
    for node in body.nodes:
        if node.user_source is not None:
            for producer in node.producers:
                uses.setdefault(producer, node.user_source)
    return uses


def _connected(body: Body, positions: list[int]) -> list[list[int]]:
    """Sets of nodes that stand next to one another or read one another; each ascending, by their first node."""
    set_of: dict[int, list[int]] = {}
    for position in positions:
        set_of[position] = [position]
        for near in (position - 1, *body.nodes[position].producers):
            if near in set_of and set_of[near] is not set_of[position]:
                small, large = sorted((set_of[near], set_of[position]), key=len)
                large += small
                set_of.update((each, large) for each in small)
    return sorted(sorted(each) for each in {id(each): each for each in set_of.values()}.values())


def _places(pairs: Iterable[tuple[int, int]], length: int, other_length: int) -> list[int]:
    """For each position of the other side, where in the reference it would stand: before the next node matched."""
    to_reference = {j: i for i, j in pairs}
    places = [length] * (other_length + 1)
    for j in reversed(range(other_length)):
        places[j] = to_reference.get(j, places[j + 1])
    return places


def number_of(count: int, noun: str) -> str:
    """Such as `1 node`, `1,200 nodes`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def count_collectives(body: Body) -> int:
    """The collectives in the body and those nested in it."""
    return sum(node.collective for node in body.nodes) + sum(map(count_collectives, body.bodies.values()))


def describe_size(body: Body) -> str:
    """How many nodes a body has, and how many collectives, also in those nested in it."""
    return f"{number_of(len(body.nodes), 'node')}, {number_of(count_collectives(body), 'collective')}"


def short_target(target: str) -> str:
    """A target without what all operations begin with."""
    return target.removeprefix("torch.ops.").removeprefix("aten.")


def _describe_nodes(nodes: list[Node]) -> str:
    collectives = sum(node.collective for node in nodes)
    among = f", {number_of(collectives, 'collective')} among them" if collectives else ""
    return f"{number_of(len(nodes), 'node')}{among}"


def _describe_run(nodes: list[Node]) -> str:
    if len(nodes) == 1:
        return f"`{nodes[0].line}`"
    targets = [short_target(node.target) for node in nodes]
    return f"{_describe_nodes(nodes)}: {', '.join(targets[:5])}{' …' if len(targets) > 5 else ''}"


def _describe_inputs(body: Body, only_here: list[int]) -> str:
    nodes = [body.nodes[position] for position in only_here[:3]]
    names = [f"`{node.name}` {node.dtype}{_sizes(node.shape)}".rstrip() for node in nodes]
    only = f", only here: {', '.join(names)}{' …' if len(only_here) > 3 else ''}" if names else ""
    return f"{number_of(len(body.inputs), 'input')}{only}"


def _sizes(sizes: tuple[str, ...] | None) -> str:
    return "" if sizes is None else f"[{', '.join(sizes)}]"


def _short_place(node: Node) -> str:
    """Where the user wrote it, in few characters."""
    source = node.user_source
    return "" if source is None else f" ({source.file.rpartition('/')[2]}:{source.line})"


# --- Merging the variants ---------------------------------------------------------------------------------------------


def merge(comparisons: Mapping[int, Comparison]) -> list[Difference]:
    """One difference for each place in the reference, in its order, with the values of all variants that differ there,
    by the variant's index. What differs alike in many nodes, as a change in every layer, is one difference too."""
    merged: dict[Any, Difference] = {}
    for variant, comparison in comparisons.items():
        for difference in comparison.differences:
            key: Any = (difference.body, difference.position, difference.kind, difference.what, difference.sides[0])
            if difference.sides[0] == NOT_THERE:
                key = (*key, tuple(node.target for node in difference.nodes))
            known = merged.setdefault(key, difference)
            known.odd.append(variant)
            known.values[variant] = difference.sides[1]
            known.follows = max(known.follows, difference.follows)
    first: dict[Any, Difference] = {}
    for difference in sorted(merged.values(), key=lambda difference: (difference.body, difference.position)):
        key = (difference.kind, difference.body, difference.what, difference.node.op, difference.node.target)
        if difference.nodes:
            key = (*key, tuple(node.target for node in difference.nodes), tuple(difference.values))
        else:
            key = (*key, difference.sides[0], tuple(difference.values.items()))
        if difference.kind in ("order of collectives", "inputs", "outputs"):
            key = (*key, difference.position)
        known = first.setdefault(key, difference)
        if known is not difference:
            known.alike.append(difference.position)
            known.follows += difference.follows
    for difference in first.values():
        for variant, comparison in comparisons.items():
            # A nested body that was not compared is equal.
            is_lacking = difference.position in comparison.lacks.get(difference.body, ())
            is_lacking = is_lacking and difference.what not in ("added", "inputs")
            difference.values.setdefault(variant, NOT_THERE if is_lacking else difference.sides[0])
    return list(first.values())


NUMBER = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+)(?:e[+-]?\d+)?$")


def recognise(value_of_rank: Mapping[int, str], groups: Iterable[Sequence[int]] = ()) -> str:
    """The formula by which a constant, as it is written, depends on the rank, or on its place in a group of each size
    that is known: `18992 · rank`, `18992 · (rank + 1)`, `64 · (rank in its group of 4)`; or an empty string. Any two
    points lie on a line: they are enough only for a multiple of the rank or of the rank + 1."""
    for text in value_of_rank.values():
        if len(text) > MAX_NUMBER_CHARACTERS or not NUMBER.match(text) or math.isinf(float(text)):
            return ""
    values = {rank: Fraction(text) for rank, text in value_of_rank.items()}
    formulas = (_affine(values, name, index_of) for name, index_of in _indices(values, groups))
    return next(filter(None, formulas), "")


def is_rising(value_of_rank: Mapping[int, str]) -> bool:
    """Whether a constant is a whole number that rises with the rank, as the offsets of uneven shards."""
    values = [value for _, value in sorted(value_of_rank.items()) if len(value) <= MAX_NUMBER_CHARACTERS]
    numbers = [int(value) for value in values if value.isdecimal()]
    return len(numbers) == len(value_of_rank) and numbers == sorted(numbers) and len({*numbers}) > 1


def _indices(ranks: Iterable[int], groups: Iterable[Sequence[int]]) -> Iterator[tuple[str, Callable[[int], int]]]:
    """What a constant may depend on: a name, and the index of a rank."""
    yield "rank", lambda rank: rank
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in sorted({tuple(sorted(group)) for group in groups}):
        by_size.setdefault(len(group), []).append(group)
    for size, known in sorted(by_size.items()):
        members = Counter(rank for group in known for rank in group)
        if size > 1 and all(members[rank] == 1 for rank in ranks):
            place = {rank: number for group in known for number, rank in enumerate(group)}
            yield f"(rank in its group of {size})", place.__getitem__


def _affine(values: Mapping[int, Fraction], name: str, index_of: Callable[[int], int]) -> str:
    points: dict[int, Fraction] = {}
    for rank, value in values.items():
        if points.setdefault(index_of(rank), value) != value:
            return ""
    if len(points) < 2:
        return ""
    (x0, y0), (x1, y1), *_ = points.items()
    step = (y1 - y0) / (x1 - x0)
    offset = y0 - step * x0
    are_whole = all(value.denominator == 1 for value in points.values())
    tolerance = 0 if are_whole else Fraction(1, 10**9)  # of what floating point numbers are rounded by
    if not step or (are_whole and step.denominator > 1):
        return ""
    if any(abs(step * x + offset - y) > tolerance * abs(y) for x, y in points.items()):
        return ""
    ahead = round(offset / step)
    is_multiple = abs(offset - ahead * step) <= tolerance * abs(step)
    is_likely = is_multiple and ahead in (0, 1) and abs(step) >= 2 and (name == "rank" or len(values) > 2)
    if len(points) == 2 and not is_likely:
        return ""
    if step != 1 and is_multiple and ahead and abs(ahead) <= max(points) + 1:
        return f"{_plain(step)} · ({name} {'+' if ahead > 0 else '-'} {abs(ahead)})"
    term = name if step == 1 else f"{_plain(step)} · {name}"
    if is_multiple and not ahead:
        return term
    return f"{term} {'+' if offset > 0 else '-'} {_plain(abs(offset))}"


def _plain(number: Fraction) -> str:
    """Without the digits that come from rounding alone."""
    return str(number) if number.denominator == 1 else f"{float(number):.12g}"
