# SPDX-License-Identifier: Apache-2.0
"""Printed graphs, and logs that hold some, read again. Without torch.

**What is read.** What `GraphModule.print_readable` gives (of Dynamo's graphs or AOTAutograd's; with or without shapes,
strides, devices, source comments), plain `GraphModule.code`, node records (`_graph.graph_record`, one a line), or a log
that holds such texts among other lines, with any prefix before each line. In a log the lines

    --- [BEGIN GRAPH MODULE: <fingerprint>] ---
    --- [END GRAPH MODULE: <fingerprint>] ---

around a graph name its fingerprint (another label says nothing); where there are such lines, only what is between them
is read. Without them a graph starts at its `class` line and ends where the indentation does; lines without the prefix
that its own have are skipped. Comment lines `# handshake: <subject> = <value>` carry facts that torch's own text lacks
(`_graph.graph_text`). A log is read once, as a stream, and only the graphs are kept. It may be that of several ranks.

Nothing that is not understood is an error: a statement of an unknown form becomes a node that holds its words, so that
it can still be compared. Nothing of a statement is cut, however long or deeply nested it is. What differs between
ranks that run the same program is left out: the index of a device, the address in an object's repr. Lines that ranks
have in common are understood once, and the nodes made of them are the same objects.
"""

import ast
import dataclasses
import functools
import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

if __package__:
    from . import _graph_diff
    from ._graph import is_collective_name
    from ._graph_diff import Argument, Body, Graph, Node, Source
else:
    import _graph_diff
    from _graph import is_collective_name
    from _graph_diff import Argument, Body, Graph, Node, Source

MAX_STATEMENT_LINES = 20_000  # of one over several lines (a signature): nobody reads a graph with more inputs
# Longer statements are split into words, not parsed: they hold the text of an object, not of a program, and `ast` takes
# quadratic time and a hundred times their size on some.
MAX_PARSED_CHARACTERS = 200_000
MAX_OTHER_LINES = 10_000  # among those of a graph, before it is taken to have ended
_MAX_CACHED = 2**16  # lines that are kept understood, some 3 KB each


# --- Graphs in a text -------------------------------------------------------------------------------------------------


# Where a graph, or what is read, begins or ends; and what no such line is without.
_HEAD = re.compile(
    r'--- \[(?P<mark>BEGIN|END) GRAPH MODULE: (?P<label>.*?)\] ---|(?P<record>\{"handshake_graph")'
    r"|(?P<cls>class \S+\(torch\.nn\.Module\):\s*$)|def forward\("
)
_HINTS = ("GRAPH MODULE", "torch.nn.Module", "def forward(", "handshake_graph")
_FINGERPRINT = re.compile(r"(?:unhashable-)?[0-9a-f]{32}")
_CLASS = re.compile(r"class (\S+)\(torch\.nn\.Module\):\s*$")
_INSIDE_A_GRAPH = (" ", "\t", ")", "#")  # how its lines begin, if they are not empty
_FACT = "# handshake: "
_PLACE = re.compile(r"(.+?):(\d{1,9}): ?(.*)$")
_DIGITS = re.compile(r"\d+")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_LIBRARY_FILE = re.compile(
    r"(?:site|dist)-packages[/\\]|(?:^|[/\\])torch[/\\](?:_\w+|distributed|nn|fx|utils|autograd)[/\\]|^<"
)
_OP = re.compile(r"torch\.ops\.(?!higher_order\b)(\w+)\.(\w+)")
# What is written before a line of a rank: by torch, anywhere; by torchrun or mpirun at its start.
_TAG = re.compile(r"\[rank(\d{1,6})\]:")
_FIRST_TAG = re.compile(r"(?:\[(?:[A-Za-z_]*|1,)(\d{1,6})\](?:<std\w+>)?:)+")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Where a container's log, one JSON object a line, has what was written; and from how many characters on that may be a
# part of a line, which goes on in the next object.
_WRAPPED_IN = ("log", "message", "msg", "textPayload")
_PART_CHARACTERS = 2**14


def parse(text: str) -> list[Graph]:
    """The graphs in a text, in order; empty if there is none.

    Raises:
        ValueError: a node record is not valid, or bodies are nested too deep.
    """
    return list(itertools.chain.from_iterable(read_blocks([text]).values()))


def read_blocks(blocks: Iterable[str]) -> dict[int | None, list[Graph]]:
    """The graphs in a log, by the rank with which their lines begin; None if they don't.

    Args:
        blocks: the log, in blocks of whole lines; those in which there is nothing of a graph take little time.

    Raises:
        ValueError: as `parse`.
    """
    log = _Log()
    logs: dict[int | None, _Log] = {None: log}
    parts: list[str] = []
    number, block = 0, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `ast` warns about escapes and comparisons in what it parses
        for block in blocks:
            is_reading = parts or any(each.reader is not None for each in logs.values())
            if not is_reading and not any(hint in block for hint in _HINTS):
                number += block.count("\n")
                continue
            for written in _ANSI.sub("", block).removesuffix("\n").split("\n"):
                number += 1
                for line in _unwrapped(written, parts) if written.startswith('{"') else (written,):
                    line = line.rstrip("\r").rpartition("\r")[2]  # of a progress bar what is left to see
                    if (tag := _TAG.search(line) if "[rank" in line else _FIRST_TAG.match(line)) is not None:
                        line, rank = line[tag.start() :], int(tag[1])
                        if rank not in logs:  # what came before the first of them is taken for the same rank's
                            logs[rank] = logs.pop(None) if None in logs else _Log()
                        log = logs[rank]
                    log.take(number, line)
        for log in logs.values():
            log.close(is_ended=False, is_whole=block.endswith("\n"))
    return {rank: log.graphs for rank, log in logs.items()}


def _unwrapped(line: str, parts: list[str]) -> list[str]:
    """The lines that a line of a container's log stands for; none if it is a part, which `parts` keeps for the next."""
    try:
        fields = json.loads(line)
    except ValueError:
        return [line]
    text = next((fields[name] for name in _WRAPPED_IN if isinstance(fields.get(name), str)), None)
    if text is None:
        return [line]
    parts.append(text)
    if "log" in fields and len(text) >= _PART_CHARACTERS and not text.endswith("\n"):
        return []
    whole = "".join(parts).removesuffix("\n")
    parts.clear()
    return whole.split("\n")


class _Log:
    """Takes the lines that one rank wrote, and finds the graphs in them."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.reader: _Reader | None = None  # of the graph that the next line may belong to
        # How graphs begin here: 0 with a `def`, 1 with a `class` line, or as a record, 2 between marks. Where there are
        # some of a higher kind, those of a lower one are none.
        self._kind = 0
        self._is_inside = False  # of marks
        self._fingerprint = ""

    def take(self, number: int, line: str) -> None:
        rest = self.reader.rest(line) if self.reader is not None else None
        if self.reader is not None and rest is not None and (not rest or rest.startswith(_INSIDE_A_GRAPH)):
            self.reader.lines.append(rest)
            return
        head = _HEAD.search(line) if any(hint in line for hint in _HINTS) else None
        kind = -1 if head is None else 2 if head["mark"] else 1 if head["record"] or head["cls"] else 0
        if kind > self._kind:
            self.reader = None
            self.graphs.clear()
            self._kind = kind
        if head is not None and head["mark"]:
            self.close(is_ended=head["mark"] == "END")
            self._is_inside = head["mark"] == "BEGIN"
            self._fingerprint = head["label"] if self._is_inside and _FINGERPRINT.fullmatch(head["label"]) else ""
        elif head is not None and (self._is_inside or kind == self._kind):
            self.close()
            self.reader = _Reader(line[: head.start()], line[head.start() :], self._fingerprint, number)
        elif self.reader is not None:
            self.reader.others += 1  # of another thread, or process; without marks and with the prefix it is the end
            if (rest is not None and not self._is_inside) or self.reader.others > MAX_OTHER_LINES:
                self.close(is_ended=False)

    def close(self, is_ended: bool = True, is_whole: bool = True) -> None:
        """The graph has no more lines. Between marks it is known whether it has ended. Is the last line whole?"""
        if self.reader is not None:
            graph = self.reader.graph(is_ended or not self._is_inside, is_whole)
            self.graphs += [graph] if graph is not None else []
        self.reader = None


class _Reader:
    """Reads one graph's lines."""

    def __init__(self, prefix: str, first: str, fingerprint: str, first_line: int) -> None:
        self.lines = [first]
        self.others = 0  # lines that are not the graph's
        self._prefix = _DIGITS.sub("0", prefix)  # what a logger wrote before the first line; numbers differ
        self._pattern: re.Pattern[str] | None = None  # of what stands before the others, once that is known
        self._fingerprint = fingerprint
        self._first_line = first_line
        self._facts: dict[str, dict[str, str]] = {}  # value by kind, by what they are about
        self._open: list[tuple[int, Body]] = []  # the bodies around the current line, with their indentation
        self._path = ""  # of the current body, such as `body_0.`
        self._positions: dict[str, int] = {}  # of the current body's nodes, by name
        self._sources: tuple[Source | None, Source | None] = (None, None)  # the last one, and the last of the user's

    def rest(self, line: str) -> str | None:
        """A line without what a logger wrote before it; None if something else wrote it, such as a progress bar.

        Other lines have the prefix of the first, or a part of it, or none: some loggers write it only before the first
        line of a message. Which it is, the line with the `def` shows.
        """
        if self._pattern is not None:
            match = self._pattern.match(line)
            return None if match is None else line[match.end() :]
        sides = zip(self._prefix, _DIGITS.sub("0", line), strict=False)
        shared = "".join(left for left, _ in itertools.takewhile(lambda side: side[0] == side[1], sides))
        pattern = re.compile(re.escape(shared).replace("0", r"\d+"))
        rest = pattern.sub("", line, count=1)
        is_inside = not rest or rest.startswith(_INSIDE_A_GRAPH)
        if is_inside and (rest.lstrip().startswith("def ") or self.lines[0].startswith("def ")):
            self._pattern = pattern
        elif is_inside or shared != self._prefix:
            return None
        return rest

    def graph(self, is_ended: bool, is_last_whole: bool) -> Graph | None:
        """The graph, or None if it has no nodes. Of one that is cut off, half a line at its end is left out."""
        if self.lines[0].startswith("{"):
            graph = _graph_diff.read_record(self.lines[0])
            return graph._replace(fingerprint=graph.fingerprint or self._fingerprint, first_line=self._first_line)
        for line in self.lines:
            if line.startswith(_FACT):
                subject, _, value = line.removeprefix(_FACT).partition(" = ")
                kind, _, what = subject.strip().partition(" ")
                self._facts.setdefault(what, {})[kind] = value.strip()
        number = 0
        while number < len(self.lines):
            number += self._read(number)
        if not self._open or not self._open[0][1].nodes:
            return None
        root = self._open[0][1]
        is_whole = any(node.op == "output" for node in root.nodes)
        if not (is_whole or is_last_whole) and len(root.nodes) > 1 and self.lines[-1].strip()[:1] not in ("", "#"):
            root.nodes.pop()
        rank = self._facts.get("", {}).get("rank", "")
        groups = {
            name: (ranks, facts["group"].partition("; description ")[2])
            for name, facts in self._facts.items()
            if "group" in facts and (ranks := _ranks(facts["group"].partition(";")[0]))
        }
        known_rank = int(rank) if re.fullmatch(r"\d{1,9}", rank) else None
        return Graph(root, self._fingerprint, known_rank, groups, self._first_line, not (is_ended and is_whole))

    def _read(self, number: int) -> int:
        """Reads the statement that starts at this line; returns how many lines it takes."""
        line = self.lines[number].strip()
        if line.startswith("#"):
            if (source := _source(line)) is not None:
                self._sources = (source, self._sources[1] if _LIBRARY_FILE.search(source.file) else source)
            elif "No stacktrace found for following nodes" in line:
                self._sources = (None, self._sources[1])
        elif line.startswith('"""'):  # all that is known of a node (FX_GRAPH_SHOW_META)
            others = self.lines[number + 1 :]
            return 1 + next((k for k, other in enumerate(others, 1) if other.strip().startswith('"""')), 0)
        elif line.startswith("class ") and (head := _CLASS.match(line)) is not None:
            self._open_body(head[1], self._indentation(number))
        elif line.startswith("def forward("):
            if not self._open:
                self._open_body("", self._indentation(number) - 1)
            text, count = self._joined(number)
            for statement in _signature(_without_indices(text)):
                self._add(statement)
            return count
        elif line and self._open:
            statement, count = _understand(_without_indices(line)), 1
            if statement.op == "text" and _depth(line) > 0:
                text, count = self._joined(number)
                statement = _understand(_without_indices(text))
            self._add(statement)
            return count
        return 1

    def _indentation(self, number: int) -> int:
        return len(self.lines[number]) - len(self.lines[number].lstrip())

    def _open_body(self, name: str, indentation: int) -> None:
        body = Body(name, [], {})
        while len(self._open) > 1 and self._open[-1][0] >= indentation:
            self._open.pop()
        if self._open:
            self._open[-1][1].bodies[name] = body
        if len(self._open) > (most := _graph_diff.MAX_NESTED_BODIES):
            raise ValueError(f"bodies are nested more than {most} levels deep (MAX_NESTED_BODIES)")
        self._open.append((indentation, body))
        self._path = "".join(f"{body.name}." for _, body in self._open[1:])
        self._positions = {}
        self._sources = (None, None)

    def _joined(self, number: int) -> tuple[str, int]:
        """A statement over several lines, and how many these are: up to where all that it opens is closed."""
        lines = [self.lines[number].strip()]
        depth = _depth(lines[0])
        for line in self.lines[number + 1 : number + MAX_STATEMENT_LINES]:
            following = line.strip()
            if depth <= 0 or _source(following) is not None or _CLASS.match(following):
                break
            lines.append(re.sub(r"\s#[^\"']*$", "", following) if "#" in following else following)
            depth += _depth(lines[-1])
        return "\n".join(lines), len(lines)

    def _add(self, statement: "_Statement") -> None:
        name, op, nodes, positions = statement.name, statement.op, self._open[-1][1].nodes, self._positions
        root, _, rest = statement.target.partition(".")
        owner = positions.get(root) if op in ("call", "attribute") else None  # of the method, or the attribute
        facts = self._facts.get(f"{self._path}{rest if root == 'self' else name}", {}) if self._facts else {}
        if owner is not None and op == "attribute" and not rest:  # an input's own name, where the signature has another
            positions[name] = owner
            mutated_by, shares = facts.get("mutated"), facts.get("shares")
            nodes[owner] = nodes[owner]._replace(name=name, mutated_by=mutated_by, shares=shares)
            return
        producers = tuple([positions.get(text) if is_name else None for _, text, is_name in statement.leaves])
        source, user_source = (None, None) if op in ("placeholder", "output") else self._sources
        key = (owner, producers, source, user_source, tuple(facts.items()))
        if (node := statement.nodes.get(key)) is None:
            target, leaves = statement.target, zip(statement.leaves, producers, strict=True)
            arguments = [Argument(path, text, producer) for (path, text, _), producer in leaves]
            if owner is not None:
                shifted = [each._replace(path=re.sub(r"^\d+", _one_more, each.path)) for each in arguments]
                op, target, arguments = "call", f".{rest}", [Argument("0", root, owner), *shifted]
            elif op == "attribute":
                op, target = ("get_attr", rest) if root == "self" else ("call", target)
            is_collective = op == "call" and _is_collective(target, arguments)
            group = _group(arguments) if is_collective else None
            if (place := _PLACE.match(facts.get("source", ""))) is not None:
                user_source = Source(place[1], int(place[2]), "", place[3])
            node = statement.nodes[key] = Node(
                *(name or op, op, target, tuple(arguments), statement.line, *_form(statement.annotation)),
                *(source, user_source, group, is_collective),
                constant=facts.get("constant"),
                mutated_by=facts.get("mutated"),
                shares=facts.get("shares"),
            )
        positions[name] = len(nodes)
        nodes.append(node)


def _one_more(number: re.Match[str]) -> str:
    return str(int(number[0]) + 1)


def _ranks(text: str) -> tuple[int, ...] | None:
    """The ranks of a group as `format_ranks` writes them; None for another text, or more ranks than any job has."""
    parts = [_RANGE.fullmatch(part) for part in re.sub(r"^ranks? ", "", text).split(", ")]
    spans = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part is not None]
    if len(spans) < len(parts) or sum(map(len, spans)) > _graph_diff.MAX_GROUP_RANKS:
        return None
    return tuple(rank for span in spans for rank in span)


@functools.lru_cache(_MAX_CACHED)
def _source(comment: str) -> Source | None:
    """The source line that a comment names: `# File: /a/b.py:12 in forward, code: y = x + 1`."""
    place, is_source, code = comment.partition("File: ")[2].partition(", code:")
    where, _, function = place.rpartition(" in ")
    file, _, line = where.rpartition(":")
    if not (comment.startswith("#") and is_source and re.fullmatch(r"\d{1,9}", line)):
        return None
    return Source(file, int(line), function, code.strip())


def _depth(text: str) -> int:
    """How many brackets are opened, less those that are closed."""
    return sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))


def _is_collective(target: str, arguments: Iterable[Argument]) -> bool:
    """Whether a call issues a collective, itself or as a higher-order op that takes the op and its arguments."""
    texts = [target, *(argument.text for argument in arguments)] if target.startswith("torch.ops.") else []
    op = next(filter(None, map(_OP.match, texts)), None)
    return op is not None and is_collective_name(f"{op[1]}::{op[2]}")


def _group(arguments: Sequence[Argument]) -> str | None:
    """The name of a collective's process group: the argument that is called so, else the last one that is a string."""
    names = ("group_name", "group", "process_group")
    named = [argument for argument in arguments if argument.path in names] or reversed(arguments)
    return next((argument.text[1:-1] for argument in named if argument.text.startswith(("'", '"'))), None)


# --- Statements -------------------------------------------------------------------------------------------------------


# What differs between processes that run the same program, but for the groups: the index of a device, in an annotation,
# in a string where a device stands, or in a repr, and the address of an object.
_DEVICES = ("cuda", "xpu", "xla", "tpu", "jax", "mps", "hpu", "npu", "cpu", "privateuseone")
_INDEX = re.compile(":(?:" + "|".join(rf"(?<=\]{device}:)" for device in _DEVICES) + r")\d+(?=[\",)])")
_AS_TEXT = re.compile(rf"(\bdevice ?= ?|\.to\()'({'|'.join(_DEVICES)})(?::\d+)?'")
_IN_REPR = re.compile(r"(device\(type='\w+'), index=\d+(?=\))|(\b0x)[0-9a-fA-F]{6,}\b")
# What torch appends to a statement: names that are not needed any more.
_DELETION = re.compile(r";\s*(?:\w+ = )+None\s*")
# Numbers that Python reads as infinite, or refuses: they would all be the same.
_TOO_LARGE = re.compile(r"\d{300}|\d[eE]\+?(?:[3-9]\d\d|\d{4})")
_WORDS = re.compile(r'(?s)(?:(\w+)(?:\s*:\s*"([^"]*)")?\s*=\s*(?!=))?(?:(return) |([A-Za-z_][\w.]*)(?=\())?(.*)')
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[A-Za-z_][\w.]*|\d[\w.+-]*|\S")
_TENSOR = re.compile(r"(?:(\w+)\()?([a-z]\w*)\[([^\]]*)\](?:\[([^\]]*)\])?([a-z]+)?(?:,? ?(.*)\))?")

# One leaf of a statement's arguments: its path, its text, and whether it is a name.
_Leaf = tuple[str, str, bool]


@dataclasses.dataclass(slots=True, eq=False)
class _Statement:
    """A statement, its names not yet looked up: what is the same wherever this line stands.

    `op` is placeholder, call, attribute, output or text; `target` is what is called, or read, as it is written; `line`
    is the text without what it deletes. `nodes` are those made of it so far, by all else that makes them what they are.
    """

    name: str
    annotation: str
    op: str
    target: str
    leaves: tuple[_Leaf, ...]
    line: str
    nodes: dict[Any, Node] = dataclasses.field(default_factory=dict)


def _without_indices(text: str) -> str:
    """A statement without what differs between processes that run the same program."""
    text = _AS_TEXT.sub(r"\1device(type='\2')", _INDEX.sub("", text))
    return _IN_REPR.sub(r"\1\2", text) if "index=" in text or "0x" in text else text


@functools.lru_cache(_MAX_CACHED)
def _understand(line: str) -> _Statement:
    end = len(line)
    while (start := line.rfind(";", 0, end)) >= 0 and _DELETION.fullmatch(line, start, end):
        end = start
    line = line[:end].strip()
    if len(line) <= MAX_PARSED_CHARACTERS and not _TOO_LARGE.search(line):
        try:
            return _understand_python(ast.parse(line).body, line) or _as_words(line)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
    return _as_words(line)


@functools.lru_cache(_MAX_CACHED // 1024)  # all the inputs of a graph
def _signature(text: str) -> list[_Statement]:
    """The inputs, but for `self`; none of a signature that is cut off."""
    try:
        function = ast.parse(re.sub(r":\s*$", ": pass", text)).body[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if not isinstance(function, ast.FunctionDef):
        return []
    statements = []
    inputs = function.args
    positional = [*inputs.posonlyargs, *inputs.args]
    defaults = dict(zip(reversed(positional), reversed(inputs.defaults), strict=False))
    for argument in ast.walk(inputs):
        if isinstance(argument, ast.arg) and argument.arg != "self":
            annotation = _annotation(argument.annotation)
            default = ast.unparse(defaults[argument]) if argument in defaults else ""
            line = f'{argument.arg}: "{annotation}"' + (f" = {default}" if default else "")
            leaves = (("default", default, False),) if default else ()
            statements.append(_Statement(argument.arg, annotation, "placeholder", "", leaves, line))
    return statements


def _annotation(value: ast.expr | None) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    return "" if value is None else ast.unparse(value)


def _understand_python(statements: list[ast.stmt], line: str) -> _Statement | None:
    """None for a statement of an unknown form."""
    changed: ast.expr | None = None
    operands: list[tuple[str, ast.expr]]
    match statements:
        case [ast.Return(value)]:
            return _Statement("", "", "output", "output", tuple(_leaves(value, "")) if value else (), line)
        case [ast.AugAssign(changed, change, value), last]:  # torch writes `x += 3;  y = x`
            target, operands = f"operator.i{_operator(change)}", [("0", changed), ("1", value)]
        case [ast.Assign([ast.Subscript(changed, index)], value), last]:  # `x[0] = 3;  y = x`
            target, operands = "operator.setitem", [("0", changed), ("1", index), ("2", value)]
        case [last]:
            pass
        case _:
            return None
    match last:
        case ast.AnnAssign(ast.Name(name), _, ast.expr() as value) | ast.Assign([ast.Name(name)], value):
            annotation = _annotation(getattr(last, "annotation", None))
        case _:
            return None
    op = "call"
    if changed is None:
        op, target, operands = _expression(value)
    elif ast.unparse(changed) != ast.unparse(value):
        return None
    leaves = tuple(leaf for path, operand in operands for leaf in _leaves(operand, path))
    return _Statement(name, annotation, op, target, leaves, line)


def _expression(value: ast.expr) -> tuple[str, str, list[tuple[str, ast.expr]]]:
    """(op, target, operands by path) of what is assigned to a name."""
    match value:
        case ast.Call(function, arguments, keywords):
            operands = [(str(number), argument) for number, argument in enumerate(arguments)]
            operands += [(keyword.arg or "**", keyword.value) for keyword in keywords]
            return "call", ast.unparse(function), operands
        case ast.Name() | ast.Attribute():
            return "attribute", ast.unparse(value), []
        case ast.Subscript(container, index):
            return "call", "operator.getitem", [("0", container), ("1", index)]
        case ast.BinOp(left, function, right) | ast.Compare(left, [function], [right]):
            return "call", f"operator.{_operator(function)}", [("0", left), ("1", right)]
        case ast.UnaryOp(function, operand):
            return "call", f"operator.{_operator(function)}", [("0", operand)]
    return "text", "constant", [("0", value)]


# Functions of `operator` that are not called as the class of `ast` is, in lower case.
_OPERATORS = {
    "mult": "mul", "div": "truediv", "matmult": "matmul", "bitand": "and", "bitor": "or", "bitxor": "xor",
    "usub": "neg", "uadd": "pos", "noteq": "ne", "lte": "le", "gte": "ge",
}  # fmt: skip


def _operator(function: ast.AST) -> str:
    name = type(function).__name__.lower()
    return _OPERATORS.get(name, name)


def _leaves(value: ast.expr, path: str) -> Iterator[_Leaf]:
    parts: list[tuple[str, ast.expr]] = []
    match value:
        case ast.Tuple(elements):
            parts = [(f"({number})", element) for number, element in enumerate(elements)]
        case ast.List(elements):
            parts = [(f"[{number}]", element) for number, element in enumerate(elements)]
        case ast.Dict(keys, values):
            names = ["**" if key is None else ast.unparse(key) for key in keys]
            parts = [(f"{{{name}}}", element) for name, element in zip(names, values, strict=True)]
        case ast.Call(ast.Name("slice"), [start, stop, step]):
            parts = [(".start", start), (".stop", stop), (".step", step)]
    for place, part in parts:
        yield from _leaves(part, path + place)
    if not parts:
        yield path, ast.unparse(value), isinstance(value, ast.Name)


def _as_words(line: str) -> _Statement:
    """A statement that Python's parser can't read, as with the repr of some object in it.

    The leaves are its arguments; of an argument with names in it, the names and what stands between them.
    """
    name, annotation, returns, target, rest = _WORDS.findall(line)[0]
    op = "text" if _depth(line) > 0 else "output" if returns else "call" if target else "text"
    if op == "call":
        rest = rest.removeprefix("(").removesuffix(")")
    leaves: list[_Leaf] = []
    for number, argument in enumerate(_split(rest)):
        pieces: list[tuple[str, bool]] = []
        start = 0
        for token in _TOKEN.finditer(argument):
            if token[0].isidentifier():
                pieces += [(argument[start : token.start()].strip(), False), (token[0], True)]
                start = token.end()
        pieces = [piece for piece in (*pieces, (argument[start:].strip(), False)) if piece[0]]
        for place, (text, is_name) in enumerate(pieces):
            leaves.append((f"{number}[{place}]" if len(pieces) > 1 else str(number), text, is_name))
    return _Statement(name, annotation, op, target if op == "call" else op, tuple(leaves), line)


def _split(text: str) -> list[str]:
    """Splits a text at the commas that are outside brackets and strings."""
    parts: list[str] = []
    depth = start = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


_Sizes = tuple[str, ...] | None


@functools.lru_cache(maxsize=4096)  # a graph has few different ones
def _form(annotation: str) -> tuple[str, _Sizes, _Sizes, str, str]:
    """(dtype, shape, stride, device, note)."""
    if annotation.startswith("Sym(") and annotation.endswith(")"):
        return "Sym", (annotation[4:-1],), None, "", ""
    match = _TENSOR.fullmatch(annotation)
    if match is None:
        return "", None, None, "", annotation
    shape, stride = (None if sizes is None else tuple(_split(sizes)) if sizes else () for sizes in match.group(3, 4))
    return match[2], shape, stride, match[5] or "", " ".join(part for part in match.group(1, 6) if part)
