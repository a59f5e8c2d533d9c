# SPDX-License-Identifier: Apache-2.0
"""What differs between two graphs, from their texts.

**Alignment.** The nodes are aligned first by all that a node is: operation, constants, dtype, shape …, and for its
inputs only what produces them, so that an inserted node does not change the nodes after it. Then, in the gaps that
this leaves, by operation alone; then, in gaps of as many nodes on both sides, whatever they are.

**Comparison.** Nodes that are matched are compared field by field. A reference to another node is the same when the
two producers are matched. Nodes left over are missing or added; those that stand next to one another or depend on one
another are one difference. Nodes left over on both sides that are the same have moved.

**Graph breaks.** Where the operations of the shorter graph are those that the longer one begins or ends with, they are
matched one to one, and the rest is one difference: an alignment would be free to match the end with the end.

**Order of collectives.** Where both graphs issue the same collectives (operation, group, constants) in another order,
each is matched with its like, whatever it reads, and the order is one difference.

**Consequences.** A shape, dtype or stride that differs because an input's does is not reported again, only counted with
the difference that it follows from; so are the constants that repeat such a size, and nodes that read moved ones.
"""

import bisect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

if __package__:
    from ._graph_plan import align
    from ._vocabulary import format_ranks
else:
    from _graph_plan import align
    from _vocabulary import format_ranks

_T = TypeVar("_T")
_OPS = ("placeholder", "get_attr", "call", "output")

# Bodies nested deeper than this are refused, as each level takes some of Python's stack; programs nest two or three.
MAX_NESTED_BODIES = 50

# A group of more ranks than this is refused: no job has as many.
MAX_GROUP_RANKS = 2**20


# --- Node records -----------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """The source line that a node comes from."""

    file: str
    line: int
    function: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


class Argument(NamedTuple):
    """One leaf of a node's arguments.

    Attributes:
        path: where it is: `1`, `2[0]`, `dtype`.
        text: a constant as it is written; of a reference, the name of the node.
        producer: position of the node that it refers to, or None for a constant.
    """

    path: str
    text: str
    producer: int | None


class Node(NamedTuple):
    """A node of a graph.

    Attributes:
        name: its name in this graph.
        op: placeholder | get_attr | call | output | text (a printed statement that was not understood).
        target: what is called, as `print_readable` writes it (`torch.ops.aten.add.Tensor`); of a method `.name`, of a
            submodule `self.name`; of get_attr the attribute.
        arguments: the leaves of its arguments, in order; a get_attr has none.
        line: the node in one line, as people read it.
        dtype: torch's short form, `f32`; of a symbolic integer `Sym`; empty if unknown.
        shape: the sizes as written, or None if unknown; of a symbolic integer its expression.
        stride: the same, in elements.
        device: its type without the index; empty if unknown.
        note: what else is known of its form (a tensor subclass, placements).
        source: where it comes from, the innermost frame.
        user_source: the innermost frame outside torch and other installed libraries.
        group: name of the process group of a collective or a point-to-point operation, else None.
        collective: whether it counts as a collective (`_graph.count_collectives`).
        constant: of a get_attr, the value of a tensor constant as text, if known.
        mutated_by: of an input that the graph changes, what changes it, such as `copy_`; else None.
    """

    name: str
    op: str
    target: str
    arguments: tuple[Argument, ...]
    line: str
    dtype: str = ""
    shape: tuple[str, ...] | None = None
    stride: tuple[str, ...] | None = None
    device: str = ""
    note: str = ""
    source: Source | None = None
    user_source: Source | None = None
    group: str | None = None
    collective: bool = False
    constant: str | None = None
    mutated_by: str | None = None


class Body(NamedTuple):
    """The nodes of a graph or of a body nested in it, in order: inputs, operations, output."""

    name: str
    nodes: list[Node]
    bodies: dict[str, "Body"]

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.nodes if node.op == "placeholder"]


class Graph(NamedTuple):
    """One rank's graph.

    Attributes:
        body: its nodes, at least one.
        fingerprint: empty if unknown.
        rank: whose graph it is, or None.
        groups: (ranks, description) of the process groups that it uses, by name.
        first_line: where it starts in the text that it was read from, from 1.
        is_cut: its end is missing.
    """

    body: Body
    fingerprint: str = ""
    rank: int | None = None
    groups: Mapping[str, tuple[tuple[int, ...], str]] = {}
    first_line: int = 1
    is_cut: bool = False


def read_record(text: str) -> Graph:
    """The graph of a node record, which is the JSON text that `_graph.graph_record` gives.

    Raises:
        ValueError: it is not a valid record, or it is past one of the bounds above.
    """
    try:
        record = json.loads(text)
        if (version := record["handshake_graph"]) != 1:
            raise ValueError(f"its version is {version!r}, this program reads version 1")
        return Graph(
            _read_body(record["body"], MAX_NESTED_BODIES),
            _checked(str, record.get("fingerprint", "")),
            None if record.get("rank") is None else _checked(int, record["rank"]),
            {name: _read_group(group) for name, group in (record.get("groups") or {}).items()},
        )
    except KeyError as error:
        raise ValueError(f"not a valid graph record: {error} is missing") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a valid graph record: {error}") from error


def _checked(kind: type[_T], value: Any) -> _T:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _read_group(fields: Any) -> tuple[tuple[int, ...], str]:
    ranks: list[int] = []
    for first, count, step in fields["ranks"]:
        if min(first, count, step) < 0 or len(ranks) + count > MAX_GROUP_RANKS:
            raise ValueError(f"a group has negative ranks, or more than {MAX_GROUP_RANKS:,}")
        ranks.extend(first + step * k for k in range(count))
    return tuple(ranks), _checked(str, fields.get("description") or "")


def _read_body(fields: Any, levels_left: int) -> Body:
    if not levels_left:
        raise ValueError(f"bodies are nested more than {MAX_NESTED_BODIES} levels deep (MAX_NESTED_BODIES)")
    nodes = [_read_node(node, position) for position, node in enumerate(fields["nodes"])]
    if not nodes:
        raise ValueError("a body has no nodes")
    bodies = {name: _read_body(body, levels_left - 1) for name, body in (fields.get("bodies") or {}).items()}
    return Body(_checked(str, fields.get("name") or ""), nodes, bodies)


def _read_node(fields: Any, position: int) -> Node:
    if (op := fields["op"]) not in _OPS:
        raise ValueError(f"{op!r} is not a kind of node")
    arguments = []
    for path, text, producer in fields.get("arguments") or ():
        if producer is not None and not 0 <= _checked(int, producer) < position:
            raise ValueError(f"node {position} reads node {producer}, which is not before it")
        arguments.append(Argument(_checked(str, path), _checked(str, text), producer))
    sizes = [fields.get(name) for name in ("shape", "stride")]
    shape, stride = (None if each is None else tuple(_checked(str, size) for size in each) for each in sizes)
    dtype, device, note = (_checked(str, fields.get(name) or "") for name in ("dtype", "device", "note"))
    group, constant, mutated_by = (
        _checked(str, fields[name]) if fields.get(name) else None for name in ("group", "constant", "mutated_by")
    )
    name, target, line = (_checked(str, fields[name]) for name in ("name", "target", "line"))
    source, user_source = (_read_source(fields.get(name)) for name in ("source", "user_source"))
    return Node(
        name, op, target, tuple(arguments), line, dtype, shape, stride, device, note, source, user_source, group,
        bool(fields.get("collective")), constant, mutated_by,
    )  # fmt: skip


def _read_source(fields: Any) -> Source | None:
    if not fields:
        return None
    file, line, function, code = fields
    return Source(_checked(str, file), _checked(int, line), _checked(str, function or ""), _checked(str, code or ""))


# Two graphs are different programs when less than this part of the smaller one's operations is matched; a list of
# differences would be as long as both.
MIN_COMMON_PART = 0.2

# Differences of one variant that are kept; more say nothing new, and 64 variants of 5,000 nodes must fit in memory.
MAX_DIFFERENCES_PER_VARIANT = 1000

# The side of a difference on which there is no such node.
NOT_THERE = "not there"

# Collectives of each side that are named where their order differs.
MAX_ORDER_SHOWN = 3

# Nodes of a missing or added run that are kept for the report.
MAX_RUN_NODES = 200

# A side of a difference is one line. Of a longer one the part is shown in which it differs, with this much before it.
MAX_LINE_CHARACTERS = 160
LEAD_CHARACTERS = 40


class Difference:
    """One place in which at least one variant is not as the reference.

    Attributes:
        kind: constant, op, missing node, added node, dtype, shape, stride, device, tensor class, group, order of
            collectives, order (of other nodes), number of collectives, inputs, outputs, operand (reads another node),
            nested body, tensor constant, text (only the way it is written), graph break (one graph is the beginning or
            the end of the other), graph (nothing in common).
        body: the nested body it is in, as a path; empty for the graph itself.
        position: of the node in the reference (of an added node: of the one it comes before).
        node: the reference's node; of an added one the variant's.
        what: the part of the node that differs, such as `argument 1`.
        reference: the reference's side.
        values: the other side by variant's index, where it differs.
        alike: positions of further nodes that differ in the same way in the same variants.
        nodes: of nodes missing or added: the run of them, the first ones.
        size: how many nodes that run has.
        follows: differences that are consequences of this one, most of any variant.
        at_end: the run reaches the end (or the start) of the graph, as after a graph break.
        formula: for a constant that is affine in the rank.
    """

    __slots__ = (
        "alike", "at_end", "body", "follows", "formula", "kind", "node", "nodes", "position", "reference", "size",
        "values", "what",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        body: str,
        position: int,
        node: Node,
        what: str,
        sides: Sequence[str],
        nodes: Sequence[Node] = (),
        at_end: bool = False,
    ) -> None:
        self.kind = kind
        self.body = body
        self.position = position
        self.node = node
        self.what = what
        self.reference, value = sides
        self.values: dict[int, str] = {-1: value}
        self.nodes = list(nodes[:MAX_RUN_NODES])
        self.size = len(nodes)
        self.follows = 0
        self.at_end = at_end
        self.formula = ""
        self.alike: list[int] = []

    @property
    def source(self) -> Source | None:
        """The user's own source line."""
        if self.node.user_source is not None:
            return self.node.user_source
        return next((node.user_source for node in self.nodes if node.user_source is not None), self.node.source)

    def shown(self, value: str) -> str:
        """A side as it is to be read: a long one from a little before the first character that is not on all sides."""
        sides = [side for side in (self.reference, *self.values.values()) if side != NOT_THERE]
        if value == NOT_THERE or len(sides) < 2 or max(map(len, sides)) <= MAX_LINE_CHARACTERS:
            return value
        first, last = min(sides), max(sides)  # what these two begin with, all do
        alike = bisect.bisect_left(range(len(first) + 1), True, key=lambda n: not last.startswith(first[:n])) - 1
        return f"…{value[alike - LEAD_CHARACTERS :]}" if alike > LEAD_CHARACTERS else value


class BodyComparison(NamedTuple):
    """How a variant's body lies against the reference's.

    Attributes:
        path: the nested body's path; empty for the graph itself.
        reference: the reference's body.
        other: the variant's.
        pairs: matched positions (reference, variant), ascending in both.
        moved: (reference, variant) positions of nodes that are at another place.
        to_other: position in the variant of each node of the reference that is matched or moved.
        to_reference: the other way round.
        changed: positions in the reference whose node differs in itself, not only as a consequence.
    """

    path: str
    reference: Body
    other: Body
    pairs: list[tuple[int, int]]
    moved: dict[int, int]
    to_other: dict[int, int]
    to_reference: dict[int, int]
    changed: set[int]


# --- Comparing two graphs ---------------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """What a body's nodes are compared by.

    Attributes:
        content: all of a node; references by absolute position.
        strict: all of a node; references by the producer's operation.
        weak: the operation alone.
    """

    content: list[Any]
    strict: list[Any]
    weak: list[Any]


# Names of inputs that only count them; Dynamo's say which parameter or argument it is, which helps to match them.
_NUMBERED_INPUT = re.compile(r"^(?:primals|tangents|arg|args|s|u|l|input)_?\d*(?:_\d+)?$")


def node_keys(body: Body, cache: dict[int, Keys]) -> Keys:
    """The keys of a body's nodes. `cache` is by identity; whoever holds it holds the bodies."""
    known = cache.get(id(body))
    if known is not None:
        return known
    names = [_operation(node, body, cache) for node in body.nodes]
    content: list[Any] = []
    strict: list[Any] = []
    for node, name in zip(body.nodes, names, strict=True):
        form: tuple[Any, ...] = (name, node.dtype, node.shape, node.stride, node.device, node.note)
        content.append((form, tuple((a.path, a.text if a.producer is None else a.producer) for a in node.arguments)))
        if node.op == "placeholder" and not _NUMBERED_INPUT.match(node.name):
            form = (*form, node.name)
        strict.append(
            (form, tuple((a.path, a.text if a.producer is None else names[a.producer]) for a in node.arguments))
        )
    weak = [name if isinstance(name, str) else name[0] for name in names]
    cache[id(body)] = made = Keys(content, strict, weak)
    return made


def _operation(node: Node, body: Body, cache: dict[int, Keys]) -> Any:
    """What the node does. The name of an attribute says nothing; a nested body counts by its content."""
    if node.op == "call":
        return node.target
    nested = _nested(node, body)
    return node.op if nested is None else (node.op, tuple(node_keys(nested, cache).content))


def _nested(node: Node, body: Body) -> Body | None:
    """The nested body that a get_attr refers to."""
    if node.op != "get_attr":
        return None
    for part in node.target.split("."):
        if part not in body.bodies:
            return None
        body = body.bodies[part]
    return body


def unseen_attributes(body: Body) -> set[str]:
    """The attributes of a graph, such as tensor constants, whose values its text doesn't tell."""
    unseen = {
        node.target
        for node in body.nodes
        if node.op == "get_attr" and node.arguments[0].path == "name" and _nested(node, body) is None
    }
    return unseen.union(*map(unseen_attributes, body.bodies.values()))


# Operations that are never matched with another.
_ONLY_WITH_LIKE = ("placeholder", "output", "get_attr")


def _align_bodies(a: Keys, b: Keys) -> list[tuple[int, int]]:
    """By all that the nodes are; in the gaps by operation; in gaps of as many nodes on both sides, as they come."""
    anchors = align(a.strict, b.strict)
    pairs: list[tuple[int, int]] = []
    for start, stop, other_start, other_stop in gaps(anchors, len(a.strict), len(b.strict)):
        weak = [(start + i, other_start + j) for i, j in align(a.weak[start:stop], b.weak[other_start:other_stop])]
        for low, high, other_low, other_high in gaps(
            [(i - start, j - other_start) for i, j in weak], stop - start, other_stop - other_start
        ):
            if high - low == other_high - other_low:
                for k in range(high - low):
                    i, j = start + low + k, other_start + other_low + k
                    either = (a.weak[i], b.weak[j])
                    if not any(key in _ONLY_WITH_LIKE or isinstance(key, _Issued) for key in either):
                        weak.append((i, j))
        pairs.extend(weak)
    return sorted(pairs + anchors)


def gaps(pairs: Iterable[tuple[int, int]], length: int, other_length: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, other start, other stop) of what lies between the pairs, where neither side is empty."""
    i = j = 0
    for next_i, next_j in [*pairs, (length, other_length)]:
        if next_i > i and next_j > j:
            yield i, next_i, j, next_j
        i, j = next_i + 1, next_j + 1


class _Issued(NamedTuple):
    """A collective as far as the order matters in which it is issued: all but what it reads."""

    target: str
    text: str


def _issued(node: Node, groups: Mapping[str, list[int]], by_layout: bool) -> _Issued:
    """`by_layout` takes groups of the same layout for one, such as the rows of a mesh."""
    group = node.group
    constants = [each.text for each in node.arguments if each.producer is None and each is not group]
    where = "" if group is None else f" on {group.text}"
    ranks = None if group is None else groups.get(group.text[1:-1])
    if ranks and by_layout:
        where = f" on a group such as {format_ranks(rank - ranks[0] for rank in ranks)}"
    elif ranks:
        where += f" = {format_ranks(ranks)}"
    return _Issued(node.target, f"{short_target(node.target).split('.')[1]}({', '.join(constants)}){where}")


# The collectives of both sides by position, where they are the same but for their order.
_Order = tuple[dict[int, _Issued], dict[int, _Issued]]


class _Part(NamedTuple):
    """A graph whose operations are those that another begins or ends with, as after a graph break.

    Attributes:
        to_shorter: position in the shorter graph of the nodes of the longer one that are in both.
        rest: positions of the operations that only the longer one has.
        edge: (position in the longer, in the shorter) of the operation next to the rest.
        is_start: whether the shorter one is the beginning.
    """

    longer: Body
    shorter: Body
    to_shorter: dict[int, int]
    rest: list[int]
    edge: tuple[int, int]
    is_start: bool

    def pairs(self, is_reference: bool) -> list[tuple[int, int]]:
        """As an alignment gives them. Inputs in another order are left out."""
        ascending: list[tuple[int, int]] = []
        for i, j in sorted(self.to_shorter.items()):
            if not ascending or j > ascending[-1][1]:
                ascending.append((i, j))
        return ascending if is_reference else [(j, i) for i, j in ascending]


def _part(longer: Body, shorter: Body) -> _Part | None:
    """How `shorter` is a part of `longer`. Constants and the forms of results may differ, and are compared later."""
    calls, own_calls = (
        [k for k, node in enumerate(body.nodes) if node.op not in ("placeholder", "output")]
        for body in (longer, shorter)
    )
    count, left = len(own_calls), len(calls) - len(own_calls)
    is_whole = all(body.nodes[-1].op == "output" for body in (longer, shorter))  # not the text of one that was cut off
    if count < 1 or left < 1 or not is_whole:
        return None
    for is_start in (True, False):
        if not is_start and left < 2:  # a node more at the start is no other graph
            break
        inside = calls[:count] if is_start else calls[left:]
        to_shorter = _match_part(longer, shorter, dict(zip(inside, own_calls, strict=True)))
        if to_shorter is not None:
            rest = calls[count:] if is_start else calls[:left]
            edge = (inside[-1], own_calls[-1]) if is_start else (inside[0], own_calls[0])
            return _Part(longer, shorter, to_shorter, rest, edge, is_start)
    return None


def _match_part(longer: Body, shorter: Body, calls: dict[int, int]) -> dict[int, int] | None:
    """`calls` and the inputs that they read, if they do the same; what they read from outside must be input."""
    outside: dict[int, int] = {}
    for i, j in calls.items():
        x, y = longer.nodes[i], shorter.nodes[j]
        if x.op != y.op or (x.op == "call" and x.target != y.target) or len(x.arguments) != len(y.arguments):
            return None
        for left, right in zip(x.arguments, y.arguments, strict=True):
            if left.path != right.path or (left.producer is None) != (right.producer is None):
                return None
            if left.producer is None or right.producer is None:
                continue
            if left.producer in calls:
                if calls[left.producer] != right.producer:
                    return None
            elif outside.setdefault(left.producer, right.producer) != right.producer:
                return None
    if any(shorter.nodes[j].op != "placeholder" for j in outside.values()) or len(set(outside.values())) < len(outside):
        return None
    inputs = {i: j for i, j in outside.items() if longer.nodes[i].op == "placeholder"}
    return {**inputs, **calls, len(longer.nodes) - 1: len(shorter.nodes) - 1}


def facts_of_program(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts about a graph that are the same on all ranks that run the same program."""
    return {
        subject: value for subject, value in facts.items() if subject != "rank" and not subject.startswith("source ")
    }


class Comparison(NamedTuple):
    """One variant against the reference: what differs, and how its bodies lie."""

    differences: list[Difference]
    bodies: list[BodyComparison]
    dropped: int


def compare(reference: Graph, other: Graph, cache: dict[int, Keys]) -> Comparison:
    """What differs in `other`.

    Args:
        reference: the graph to compare with; positions are its.
        other: another variant of it.
        cache: the reference's keys, for comparing it with many variants; whoever holds it must hold the reference.
    """
    comparer = _Comparer(reference, other, cache)
    return Comparison(comparer.differences, comparer.bodies, comparer.dropped)


class _Comparer:
    """Compares one variant with the reference."""

    def __init__(self, reference: Graph, other: Graph, cache: dict[int, Keys]) -> None:
        self._cache = cache
        self._other_cache: dict[int, Keys] = {}
        self._facts = (facts_of_program(reference.facts), facts_of_program(other.facts))
        self._groups = (group_ranks(reference.facts), group_ranks(other.facts))
        self.differences: list[Difference] = []
        self.bodies: list[BodyComparison] = []
        self.common_part = 1.0
        self.dropped = 0  # differences past the bound
        self._compare(reference.body, other.body, "")
        if not self.differences:
            self._compare_writing(reference.body.nodes[0])
        if self.common_part < MIN_COMMON_PART:
            both = (reference.body, other.body)
            texts = [
                f"{number_of(len(body.nodes), 'node')}, {number_of(count_collectives(body), 'collective')}"
                for body in both
            ]
            first = next((node for node in reference.body.nodes if node.user_source), reference.body.nodes[0])
            self.differences = [Difference("graph", "", 0, first, "nothing in common", texts)]
            self.dropped = 0

    def _compare(self, a: Body, b: Body, path: str) -> None:
        a_keys, b_keys = node_keys(a, self._cache), node_keys(b, self._other_cache)
        order = self._order(a, b)
        if order is not None:
            a_keys, b_keys = (
                keys._replace(
                    strict=[issued.get(k, key) for k, key in enumerate(keys.strict)],
                    weak=[issued.get(k, key) for k, key in enumerate(keys.weak)],
                )
                for keys, issued in zip((a_keys, b_keys), order, strict=True)
            )
        part = None if path or order is not None else _part(a, b) or _part(b, a)
        pairs = _align_bodies(a_keys, b_keys) if part is None else part.pairs(is_reference=part.longer is a)
        to_other = dict(pairs)
        to_reference = {j: i for i, j in pairs}
        a_left = [i for i in range(len(a.nodes)) if i not in to_other]
        b_left = [j for j in range(len(b.nodes)) if j not in to_reference]
        moved = {} if part is not None else dict(_moved(a_keys.strict, a_left, b_keys.strict, b_left))
        to_other.update(moved)
        to_reference.update((j, i) for i, j in moved.items())
        comparison = BodyComparison(path, a, b, pairs, moved, to_other, to_reference, set())
        self.bodies.append(comparison)
        if not path:
            # Of the smaller: a graph that ends early, at a graph break, is a part of the other.
            calls = min(sum(node.op == "call" for node in body.nodes) for body in (a, b))
            same = (i for i, j in to_other.items() if a.nodes[i].target == b.nodes[j].target)
            self.common_part = sum(a.nodes[i].op == "call" for i in same) / calls if calls else 1.0
        first = len(self.differences)
        if part is not None:
            self._add_break(comparison, part)
        else:
            self._compare_order(comparison, order)
            self._compare_left_over(comparison)
        self._compare_nodes(comparison, order is not None)
        if not path and part is None:
            self._compare_mutations(comparison)
        self.differences[first:] = sorted(self.differences[first:], key=lambda difference: difference.position)

    def _add(self, difference: Difference) -> None:
        if len(self.differences) < MAX_DIFFERENCES_PER_VARIANT:
            self.differences.append(difference)
        else:
            self.dropped += 1

    def _add_break(self, comparison: BodyComparison, part: _Part) -> None:
        is_reference = part.longer is comparison.reference
        rest = [part.longer.nodes[k] for k in part.rest]
        first = next((node.user_source for node in rest if node.user_source is not None), None)
        size = f"{_describe_size(rest)}{f', from {first.place}: {first.code}' if first is not None else ''}"
        sides = [f"goes on with {size}", "ends here"] if part.is_start else [f"has {size}, before it", "begins here"]
        position = part.edge[0 if is_reference else 1]
        node = part.shorter.nodes[part.edge[1]]._replace(name=comparison.reference.nodes[position].name)
        what = "where one graph ends" if part.is_start else "where one graph begins"
        sides = sides if is_reference else sides[::-1]
        self._add(Difference("graph break", "", position, node, what, sides, rest))
        comparison.changed.update(part.rest if is_reference else ())

    def _order(self, a: Body, b: Body) -> _Order | None:
        """The collectives of both, if only their order differs: on the same groups, else on groups of one layout."""
        for by_layout in (False, True):
            left, right = (
                {k: _issued(node, groups, by_layout) for k, node in enumerate(body.nodes) if node.is_collective}
                for body, groups in zip((a, b), self._groups, strict=True)
            )
            sequences = list(left.values()), list(right.values())
            if sequences[0] != sequences[1] and sorted(sequences[0]) == sorted(sequences[1]):
                return left, right
            if sequences[0] == sequences[1]:
                break
        return None

    def _compare_order(self, comparison: BodyComparison, order: _Order | None) -> None:
        a, b, moved = comparison.reference, comparison.other, comparison.moved
        what = "place in the order"
        if order is not None:
            sequences = [list(issued.items()) for issued in order]
            differ = [n for n, (x, y) in enumerate(zip(*sequences, strict=True)) if x[1] != y[1]]
            first, stop = differ[0], min(differ[-1] + 1, differ[0] + MAX_ORDER_SHOWN)
            sides = [
                ", then ".join(f"{issued.text}{_short_place(body.nodes[k])}" for k, issued in sequence[first:stop])
                + (" …" if stop <= differ[-1] else "")
                for body, sequence in zip((a, b), sequences, strict=True)
            ]
            i = sequences[0][first][0]
            self._add(Difference("order of collectives", comparison.path, i, a.nodes[i], what, sides))
            self.differences[-1].follows += max(len(moved) - 1, 0)
            comparison.changed.update(moved)
            return
        collectives = [(i, j) for i, j in moved.items() if a.nodes[i].is_collective]
        for i, j in collectives:
            sides = [
                f"{_collective_place(body, k)}, node {k}{_short_place(body.nodes[k])}" for body, k in ((a, i), (b, j))
            ]
            self._add(Difference("order of collectives", comparison.path, i, a.nodes[i], what, sides))
            comparison.changed.add(i)
        if collectives:
            self.differences[-1].follows += len(moved) - len(collectives)
            return
        for run in _runs(list(moved)):
            i, j = run[0], moved[run[0]]
            # What stands on its other side there; the number of the place alone may be the same.
            passed = next((p for p, q in comparison.pairs if (p < i) != (q < j)), None)
            words = ("after", "before") if passed is not None and passed < i else ("before", "after")
            by = "" if passed is None else f" `{a.nodes[passed].name}`"
            sides = [
                f"node {k}{f', {word}{by}' if by else ''}{_short_place(body.nodes[k])}"
                for body, k, word in ((a, i, words[0]), (b, j, words[1]))
            ]
            nodes = [a.nodes[i] for i in run]
            self._add(Difference("order", comparison.path, i, nodes[0], what, sides, nodes))
            comparison.changed.update(run)

    def _compare_left_over(self, comparison: BodyComparison) -> None:
        """Missing and added nodes."""
        path, a, b = comparison.path, comparison.reference, comparison.other
        places = _places(comparison.pairs, len(a.nodes), len(b.nodes))
        missing = [i for i in range(len(a.nodes)) if i not in comparison.to_other]
        added = [j for j in range(len(b.nodes)) if j not in comparison.to_reference]
        self._compare_inputs(
            comparison,
            [i for i in missing if a.nodes[i].op == "placeholder"],
            [j for j in added if b.nodes[j].op == "placeholder"],
            places,
        )
        missing_runs = _connected(a, [i for i in missing if a.nodes[i].op != "placeholder"])
        added_runs = _connected(b, [j for j in added if b.nodes[j].op != "placeholder"])
        for run in missing_runs:
            comparison.changed.update(run)
            partner = next((other for other in added_runs if run[0] <= places[other[0]] <= run[-1] + 1), None)
            nodes = [a.nodes[i] for i in run]
            at_end = run[0] <= len(a.inputs) or run[-1] >= len(a.nodes) - 2
            if partner is None:
                kind = _run_kind(nodes, "missing node")
                side = _describe_run(nodes)
                self._add(Difference(kind, path, run[0], nodes[0], "missing", (side, NOT_THERE), nodes, at_end))
                continue
            added_runs.remove(partner)
            others = [b.nodes[j] for j in partner]
            counts = [sum(node.is_collective for node in side) for side in (nodes, others)]
            kind = "op" if counts[0] == counts[1] else "number of collectives"
            self._add(
                Difference(
                    kind, path, run[0], nodes[0], "replaced", (_describe_run(nodes), _describe_run(others)), nodes
                )
            )
        for run in added_runs:
            nodes = [b.nodes[j] for j in run]
            at_end = run[0] <= len(b.inputs) or run[-1] >= len(b.nodes) - 2
            kind = _run_kind(nodes, "added node")
            side = _describe_run(nodes)
            self._add(Difference(kind, path, places[run[0]], nodes[0], "added", (NOT_THERE, side), nodes, at_end))

    def _compare_inputs(
        self, comparison: BodyComparison, missing: list[int], added: list[int], places: list[int]
    ) -> None:
        if not (missing or added):
            return
        a, b = comparison.reference, comparison.other
        body, only = (a, missing) if missing else (b, added)
        first = body.nodes[only[0]]._replace(user_source=_first_uses(body).get(only[0]))
        position = missing[0] if missing else places[added[0]]
        sides = [
            f"{number_of(len(body.inputs), 'input')}{_only([body.nodes[k] for k in only])}"
            for body, only in ((a, missing), (b, added))
        ]
        nodes = [body.nodes[k] for k in only]
        self._add(Difference("inputs", comparison.path, position, first, "inputs", sides, nodes))
        comparison.changed.update(missing)

    def _compare_mutations(self, comparison: BodyComparison) -> None:
        """Inputs that one side changes in place."""
        a, b = comparison.reference, comparison.other
        if not any(subject.startswith("mutated ") for facts in self._facts for subject in facts):
            return
        uses = _first_uses(a), _first_uses(b)
        for i, j in comparison.pairs:
            if a.nodes[i].op != "placeholder":
                continue
            left, right = (
                facts.get(f"mutated {node.name}", "")
                for facts, node in zip(self._facts, (a.nodes[i], b.nodes[j]), strict=True)
            )
            if bool(left) != bool(right):
                # The line where it is changed is on the side that does.
                node = a.nodes[i]._replace(user_source=uses[0].get(i) if left else uses[1].get(j))
                sides = [_mutation_text(side) for side in (left, right)]
                self._add(Difference("inputs", "", i, node, "change in place", sides))
                comparison.changed.add(i)

    def _compare_nodes(self, comparison: BodyComparison, is_order_told: bool) -> None:
        a, b = comparison.reference, comparison.other
        to_other, to_reference = comparison.to_other, comparison.to_reference
        a_keys, b_keys = node_keys(a, self._cache), node_keys(b, self._other_cache)
        tainted: dict[int, Difference | None] = {}  # nodes whose result differs in form, and the difference at the root
        sizes: set[tuple[str, str]] = set()  # pairs of sizes that were seen to differ
        first_uses = _first_uses(a)
        reordered = set(comparison.moved)  # nodes at another place, and those that read another node for that
        order = next((each for each in reversed(self.differences) if each.kind.startswith("order")), None)
        for i in sorted(to_other):
            x, y = a.nodes[i], b.nodes[to_other[i]]
            inputs = [argument.producer for argument in x.arguments if argument.producer is not None]
            other_inputs = [argument.producer for argument in y.arguments if argument.producer is not None]
            if len(inputs) == 1 and inputs[0] in reordered:
                reordered.add(i)  # hands on what it reads, as a wait does
            if (
                a_keys.strict[i] == b_keys.strict[to_other[i]]
                and [to_other.get(p) for p in inputs] == other_inputs
                and x.op != "get_attr"
                and not x.is_collective
            ):
                continue
            cause = next((tainted[p] for p in inputs if p in tainted), None)
            follows = any(p in tainted or p not in to_other for p in inputs)
            follows = follows or any(p not in to_reference for p in other_inputs)
            found = self._fields(comparison, i, x, y)
            crossed = _crossed(x, y, to_reference)
            if is_order_told and x.is_collective:
                # What it reads, and the size of that, is what its place in the order makes of it.
                follows = follows or bool(crossed)
                reordered.update([i] if crossed else [])
            root: Difference | None = None
            form_differs = False
            consequences = 0
            for difference, is_form in found:
                form_differs = form_differs or is_form
                is_size = difference.kind == "constant" and (difference.reference, difference.values[-1]) in sizes
                may_follow = is_form or is_size
                is_wiring = difference.kind in ("operand", "outputs", "order of collectives") and bool(crossed)
                if is_wiring and order is not None and not reordered.isdisjoint((i, *crossed)):
                    reordered.add(i)
                    order.follows += 1
                    continue
                if may_follow and follows:
                    consequences += 1
                    continue
                if is_wiring and x.is_collective:
                    reordered.update((i, *crossed))
                    order = difference
                if root is not None and is_form and root.kind in ("shape", "op", "constant", "dtype"):
                    consequences += 1  # the strides of a tensor whose shape differs
                    continue
                if x.op == "placeholder":
                    difference.node = x._replace(user_source=first_uses.get(i))
                self._add(difference)
                comparison.changed.add(i)
                root = root or difference
            cause = root or cause
            if consequences and cause is not None:
                cause.follows += 1
            if form_differs:
                tainted[i] = cause
            if x.shape is not None and y.shape is not None and len(x.shape) == len(y.shape):
                sizes.update((m, n) for m, n in zip(x.shape, y.shape, strict=True) if m != n)

    def _fields(self, comparison: BodyComparison, i: int, x: Node, y: Node) -> list[tuple[Difference, bool]]:
        """The differences between two matched nodes; of each, whether it is one of the result's form."""
        path = comparison.path
        if x.op != y.op or (x.op == "call" and x.target != y.target):
            difference = Difference("op", path, i, x, "operation", (x.target, y.target))
            form = (x.dtype, x.shape, x.stride, x.device) != (y.dtype, y.shape, y.stride, y.device)
            return [(difference, False), *([(difference, True)] if form else [])]
        if x.op == "get_attr":
            own = self._attributes(comparison, i, x, y)
        elif x.op == "output":
            own = _outputs(comparison, i, x, y)
        else:
            own = self._arguments(comparison, i, x, y)
        found = [(difference, False) for difference in own]
        for kind, left, right in (
            ("dtype", x.dtype, y.dtype),
            ("shape", _sizes(x.shape), _sizes(y.shape)),
            ("stride", _sizes(x.stride), _sizes(y.stride)),
            ("device", x.device, y.device),
            ("tensor class", x.note, y.note),
        ):
            # A text without the field says nothing about it.
            if left != right and ((left and right) or kind == "tensor class"):
                sides = (left or "plain", right or "plain")
                found.append((Difference(kind, path, i, x, kind, sides), True))
        return found

    def _arguments(self, comparison: BodyComparison, i: int, x: Node, y: Node) -> Iterator[Difference]:
        for kind, what, left, right in _arguments(x, y, comparison):
            yield Difference(kind, comparison.path, i, x, what, (left, right))
        groups = x.group, y.group
        if groups[0] is not None and groups[1] is not None and groups[0].text == groups[1].text:
            ranks = [known.get(groups[0].text[1:-1]) for known in self._groups]
            if None not in ranks and ranks[0] != ranks[1]:
                sides = (groups[0].text, groups[1].text)
                yield Difference("group", comparison.path, i, x, "ranks of the group", sides)

    def _attributes(self, comparison: BodyComparison, i: int, x: Node, y: Node) -> Iterator[Difference]:
        path = comparison.path
        nested, other = _nested(x, comparison.reference), _nested(y, comparison.other)
        if nested is not None and other is not None:
            contents = node_keys(nested, self._cache).content, node_keys(other, self._other_cache).content
            if contents[0] != contents[1] or self._facts[0] != self._facts[1]:
                self._compare(nested, other, f"{path}.{x.target}" if path else x.target)
            if contents[0] != contents[1]:
                comparison.changed.add(i)
        elif (nested is None) != (other is None):
            sides = [
                "an attribute" if side is None else f"a body of {len(side.nodes)} nodes" for side in (nested, other)
            ]
            yield Difference("nested body", path, i, x, "nested body", sides)
        elif (left := x.arguments[0]).path == (right := y.arguments[0]).path and left.text != right.text:
            if left.path == "name":
                yield Difference("op", path, i, x, "attribute", (f"self.{left.text}", f"self.{right.text}"))
                return
            sides = [_DIGEST.sub("", argument.text) for argument in (left, right)]
            sides = sides if sides[0] != sides[1] else [left.text, right.text]
            yield Difference("tensor constant", path, i, x, "value", sides)

    def _compare_writing(self, first: Node) -> None:
        """What is left where no difference was found, and yet the texts are not the same."""
        for body in self.bodies:
            left_keys, right_keys = node_keys(body.reference, self._cache), node_keys(body.other, self._other_cache)
            for i, (left, right) in enumerate(zip(left_keys.content, right_keys.content, strict=False)):
                x, y = body.reference.nodes[i], body.other.nodes[i]
                if left != right and x.line != y.line:
                    self._add(Difference("text", body.path, i, x, "as written", (x.line, y.line)))
                    body.changed.add(i)
                    return
        for subject in sorted(self._facts[0].keys() | self._facts[1].keys()):
            sides = [facts.get(subject, NOT_THERE) for facts in self._facts]
            if sides[0] != sides[1]:
                self._add(Difference("text", "", 0, first, f"`# handshake: {subject}`", sides))
                return


def _outputs(comparison: BodyComparison, i: int, x: Node, y: Node) -> Iterator[Difference]:
    to_other, to_reference = comparison.to_other, comparison.to_reference
    if [(each.path, each.text if each.producer is None else to_other.get(each.producer)) for each in x.arguments] == [
        (each.path, each.text if each.producer is None else each.producer) for each in y.arguments
    ]:
        return
    lefts = {each.producer: each.text for each in x.arguments if each.producer is not None}
    rights = {each.producer: each.text for each in y.arguments if each.producer is not None}
    if not (to_other.keys() >= lefts.keys() and to_reference.keys() >= rights.keys()):
        return  # the missing or added node that is returned is reported itself
    only_left = [p for p in lefts if to_other[p] not in rights]
    only_right = [p for p in rights if to_reference[p] not in lefts]
    sides = [
        number_of(len(node.arguments), "output")
        + (f", only here: {', '.join(f'`{texts[p]}`' for p in only[:4])}" if only else "")
        for node, texts, only in ((x, lefts, only_left), (y, rights, only_right))
    ]
    if sides[0] == sides[1]:
        sides = [x.line, y.line]
    # The line of a value that only one side returns, else of the first one.
    nodes = [comparison.reference.nodes[p] for p in only_left] + [comparison.other.nodes[p] for p in only_right]
    nodes += [comparison.reference.nodes[p] for p in lefts] + [x]
    node = x._replace(user_source=nodes[0].user_source)
    yield Difference("outputs", comparison.path, i, node, "outputs", sides)


def _crossed(x: Node, y: Node, to_reference: dict[int, int]) -> list[int]:
    """The positions in the reference that two matched nodes read at the same place, where these are not the same."""
    return [
        position
        for left, right in zip(x.arguments, y.arguments, strict=False)
        if left.producer is not None and right.producer is not None and right.producer in to_reference
        for position in (left.producer, to_reference[right.producer])
        if left.producer != to_reference[right.producer]
    ]


def _mutation_text(how: str) -> str:
    """How an input is changed: by an operation, or by an output that is written back to it."""
    return f"changed in place ({how})" if how not in ("", "output") else "changed in place" if how else "not changed"


def _first_uses(body: Body) -> dict[int, Source]:
    """The source line of the first node that reads a node, by the position of that."""
    uses: dict[int, Source] = {}
    for node in body.nodes:
        if node.user_source is not None:
            for argument in node.arguments:
                if argument.producer is not None:
                    uses.setdefault(argument.producer, node.user_source)
    return uses


def _arguments(x: Node, y: Node, comparison: BodyComparison) -> Iterator[tuple[str, str, str, str]]:
    """(kind, what, reference's side, other side) of each argument that differs."""
    to_other, to_reference = comparison.to_other, comparison.to_reference
    left_of, right_of = _by_argument(x), _by_argument(y)
    group = x.group
    for name in [*left_of, *(name for name in right_of if name not in left_of)]:
        lefts, rights = left_of.get(name, []), right_of.get(name, [])
        what = f"argument {name}" if name.isdigit() else f"argument `{name}`"
        if [argument.path for argument in lefts] != [argument.path for argument in rights]:
            texts = _argument_text(lefts), _argument_text(rights)
            if texts[0] == texts[1]:  # such as a list and a tuple
                texts = x.line, y.line
            is_constant = all(argument.producer is None for argument in (*lefts, *rights))
            yield "constant" if is_constant else "operand", what, *texts
            continue
        for left, right in zip(lefts, rights, strict=True):
            if left.producer is None and right.producer is None:
                if left.text == right.text:
                    continue
                kind = "constant"
                if group is not None and left.path == group.path:
                    kind = "group"
                elif _DTYPE.match(left.text) and _DTYPE.match(right.text):
                    kind = "dtype"
                yield kind, f"argument {left.path}" if left.path != name else what, left.text, right.text
            elif left.producer is None or right.producer is None:
                sides = [a.text if a.producer is None else f"`{a.text}`, computed" for a in (left, right)]
                yield "constant", what, sides[0], sides[1]
            elif (
                left.producer in to_other
                and right.producer in to_reference
                and to_other[left.producer] != right.producer
            ):
                other_name = comparison.reference.nodes[to_reference[right.producer]].name
                kind = "order of collectives" if x.is_collective else "operand"
                yield kind, what, f"reads `{left.text}`", f"reads `{other_name}`"


_DTYPE = re.compile(r"torch\.(?:float|bfloat|int|uint|bool|half|double|long|complex|short|quint|qint)\w*$")


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


def _moved(a_strict: list[Any], a_left: list[int], b_strict: list[Any], b_left: list[int]) -> list[tuple[int, int]]:
    """Nodes left over on both sides that are the same: they stand at another place."""
    places: dict[Any, list[int]] = {}
    for j in reversed(b_left):
        places.setdefault(b_strict[j], []).append(j)
    return [(i, places[a_strict[i]].pop()) for i in a_left if places.get(a_strict[i])]


def _runs(positions: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][-1] + 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


def _connected(body: Body, positions: list[int]) -> list[list[int]]:
    """Groups of nodes that stand next to one another or read one another; each ascending, by their first node."""
    parent = {position: position for position in positions}

    def root_of(position: int) -> int:
        while parent[position] != position:
            parent[position] = parent[parent[position]]
            position = parent[position]
        return position

    for position in positions:
        for near in (position - 1, *(argument.producer for argument in body.nodes[position].arguments)):
            if near is not None and near in parent:
                roots = root_of(near), root_of(position)
                parent[max(roots)] = min(roots)
    groups: dict[int, list[int]] = {}
    for position in positions:
        groups.setdefault(root_of(position), []).append(position)
    return list(groups.values())


def _places(pairs: Iterable[tuple[int, int]], length: int, other_length: int) -> list[int]:
    """For each position of the other side, where in the reference it would stand: before the next node matched."""
    to_a = {j: i for i, j in pairs}
    places = [length] * other_length
    for j in range(other_length - 1, -1, -1):
        places[j] = to_a.get(j, places[j + 1] if j + 1 < other_length else length)
    return places


def _run_kind(nodes: list[Node], kind: str) -> str:
    return "number of collectives" if any(node.is_collective for node in nodes) else kind


def _describe_run(nodes: list[Node]) -> str:
    if len(nodes) == 1:
        return f"`{nodes[0].line}`"
    targets = [short_target(node.target) for node in nodes]
    shown = ", ".join(targets[:5]) + (" …" if len(targets) > 5 else "")
    return f"{_describe_size(nodes)}: {shown}"


def _describe_size(nodes: list[Node]) -> str:
    collectives = sum(node.is_collective for node in nodes)
    among = f", {number_of(collectives, 'collective')} among them" if collectives else ""
    return f"{number_of(len(nodes), 'node')}{among}"


def _only(nodes: list[Node]) -> str:
    if not nodes:
        return ""
    names = ", ".join(f"`{node.name}` {_form(node)}".rstrip() for node in nodes[:3])
    return f", only here: {names}{' …' if len(nodes) > 3 else ''}"


def _form(node: Node) -> str:
    return f"{node.dtype}{_sizes(node.shape)}"


def _sizes(sizes: tuple[str, ...] | None) -> str:
    return "" if sizes is None else f"[{', '.join(sizes)}]"


def short_target(target: str) -> str:
    return target.removeprefix("torch.ops.").removeprefix("aten.")


def _short_place(node: Node) -> str:
    """Where the user wrote it, in few characters."""
    source = node.user_source
    return "" if source is None else f" ({source.file.rpartition('/')[2]}:{source.line})"


def _collective_place(body: Body, position: int) -> str:
    number = sum(node.is_collective for node in body.nodes[:position])
    return f"collective {number} of the graph"


_DIGEST = re.compile(r"\bblake2b:[0-9a-f]+ ")


def count_collectives(body: Body) -> int:
    """The collectives in the body and those nested in it."""
    nested = sum(count_collectives(inner) for inner in body.bodies.values())
    return nested + sum(node.is_collective for node in body.nodes)


def number_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def clip(text: str, most_characters: int = MAX_LINE_CHARACTERS) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= most_characters else f"{text[: most_characters - 1]}…"
