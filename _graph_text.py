# SPDX-License-Identifier: Apache-2.0
"""Reads the text of FX graphs, as torch prints it, without torch.

The input is what `GraphModule.print_readable` gives (of Dynamo's graphs or AOTAutograd's; with or without shapes,
strides, devices, source comments), or plain `GraphModule.code`, or a log that holds such texts among other lines,
with any prefix before each line. In a log the lines

    --- [BEGIN GRAPH MODULE: <fingerprint>] ---
    --- [END GRAPH MODULE: <fingerprint>] ---

around each graph name its fingerprint (another label says nothing); without them a graph starts at its `class` line
and ends where the indentation does.

Nothing that is not understood is an error: a statement that is no node of a known form becomes a node that holds its
text, so that it can still be compared. Nothing of a statement is cut, however long it is or deeply nested. What is
known to differ between ranks that run the same program is left out: the index of a device, the address in an object's
repr.

Beside the program, comment lines `# handshake: <subject> = <value>` carry facts that torch's text lacks; they are
collected in `Graph.facts`.
"""

import ast
import functools
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# A statement that goes over several lines (a signature with one input a line) is given up after this many; more inputs
# than this has no graph that somebody will read.
MAX_STATEMENT_LINES = 20_000

# Longer statements are split into words, not parsed: they hold the text of an object, not of a program, and `ast` takes
# quadratic time and a hundred times their size on some.
MAX_PARSED_CHARACTERS = 200_000

# Bodies nested deeper than this are refused, as each level takes some of Python's stack; programs nest two or three.
MAX_NESTED_BODIES = 50

# A group of more ranks than this is not read: no job has as many.
MAX_GROUP_RANKS = 2**20

# Parsed statements are kept, as the variants of a graph have most lines in common. About 1 KB each.
_MAX_CACHED_STATEMENTS = 50_000
_MAX_CACHED_CHARACTERS = 4096

_BEGIN = re.compile(r"--- \[BEGIN GRAPH MODULE: (.*?)\] ---")
_FINGERPRINT = re.compile(r"(?:unhashable-)?[0-9a-f]{32}")
_END = re.compile(r"--- \[END GRAPH MODULE: .*?\] ---")
_CLASS = re.compile(r"class (\S+)\(torch\.nn\.Module\):\s*$")
_DEF = re.compile(r"def forward\(")
_FACT = "# handshake: "
_PLACE = re.compile(r"(.+?):(\d{1,9}): ?(.*)$")
_NO_SOURCE = "No stacktrace found for following nodes"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_DEVICE_INDEX = re.compile(r"(device\(type='\w+'), index=\d+\)")
_ANNOTATED_DEVICE = re.compile(r"(\](?:cuda|xpu|xla|tpu|jax|mps|hpu|npu|cpu|privateuseone)):\d+(?=[\"),])")
_DEVICE_STRING = re.compile(r"^(cuda|xpu|xla|tpu|jax|mps|hpu|npu|privateuseone):\d+$")
_TENSOR = re.compile(r"^(?:(\w+)\()?([a-z]\w*)\[([^\]]*)\](?:\[([^\]]*)\])?([a-z]+)?(?::\d+)?(?:,? ?(.*)\))?$")
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[A-Za-z_][\w.]*|\d[\w.+-]*|\S")
# What torch appends to a statement: names that are not needed any more.
_DELETION = re.compile(r";\s*(?:\w+ = )+None\s*")
# Numbers that Python reads as infinite, or refuses: they would all be the same.
_TOO_LARGE = re.compile(r"\d{300}|\d[eE]\+?(?:[3-9]\d\d|\d{4})")
_DIGITS = re.compile(r"\d+")
_LIBRARY_FILE = re.compile(
    r"(?:site|dist)-packages[/\\]|(?:^|[/\\])torch[/\\](?:_\w+|distributed|nn|fx|utils|autograd)[/\\]|^<"
)

# Namespaces of torch.ops whose ops are collectives, and the ops in them that are not.
_COLLECTIVE = re.compile(
    r"^torch\.ops\.(?:(?:_?c10d_functional|_c10d_functional_autograd|c10d|symm_mem)\.\w+"
    r"|_dtensor\.shard_dim_alltoall|tpu\._(?:all_gather|reduce_scatter)_dim)\b"
)
_NO_COLLECTIVE = re.compile(r"\.(?:wait_tensor|_wrap_tensor_autograd)\b")


class Source(NamedTuple):
    """The source line that a node comes from."""

    file: str
    line: int
    function: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")

    @property
    def is_library(self) -> bool:
        """Whether this is torch's own code, or another installed package's, not the user's."""
        return _LIBRARY_FILE.search(self.file) is not None


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
        name: its name in this text.
        op: placeholder | get_attr | call | output | text (a statement that was not understood).
        target: what is called, as text; of a method `.name`, of a submodule `self.name`; of get_attr the attribute.
        arguments: the leaves of its arguments, in order.
        dtype: torch's short form, `f32`; of a symbolic integer `Sym`; empty if the text has none.
        shape: the sizes as written, or None if the text has none; of a symbolic integer its expression.
        stride: the same, in elements.
        device: its type without the index.
        note: what else the annotation says (a tensor subclass, placements).
        source: where it comes from, the innermost frame that the text names.
        user_source: `source` if that is the user's own code, else the user's line last named before it.
        line: the statement as it is written, without what it deletes.
    """

    name: str
    op: str
    target: str
    arguments: tuple[Argument, ...]
    dtype: str
    shape: tuple[str, ...] | None
    stride: tuple[str, ...] | None
    device: str
    note: str
    source: Source | None
    user_source: Source | None
    line: str

    @property
    def is_collective(self) -> bool:
        return _COLLECTIVE.match(self.target) is not None and _NO_COLLECTIVE.search(self.target) is None

    @property
    def group(self) -> Argument | None:
        """The argument that names a collective's process group."""
        if not self.is_collective:
            return None
        for argument in self.arguments:
            if argument.path in ("group", "group_name"):
                return argument
        for argument in reversed(self.arguments):
            if argument.producer is None and argument.text[:1] in "'\"":
                return argument
        return None


class Body(NamedTuple):
    """The nodes of a graph or of a body nested in it, in order: inputs, operations, output."""

    name: str
    nodes: list[Node]
    bodies: dict[str, "Body"]

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> tuple[Argument, ...]:
        return next((node.arguments for node in reversed(self.nodes) if node.op == "output"), ())


class Graph(NamedTuple):
    """A graph as read.

    Attributes:
        body: its nodes.
        fingerprint: from the begin marker; empty if there was none, or another label.
        facts: subject and value of the `# handshake:` lines.
        first_line: where it starts in the text, from 1.
        is_cut: its end marker or its output is missing.
    """

    body: Body
    fingerprint: str
    facts: dict[str, str]
    first_line: int
    is_cut: bool


def parse(text: str) -> list[Graph]:
    """The graphs in `text`, in order; empty if there is none."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = _ANNOTATED_DEVICE.sub(r"\1", text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `ast` warns about escapes and comparisons in what it parses
        return [
            graph
            for fingerprint, first_line, lines, ended in _blocks(text.splitlines())
            if (graph := _Reader(fingerprint, first_line, lines, ended).graph()) is not None
        ]


def group_ranks(facts: Mapping[str, str]) -> dict[str, list[int]]:
    """The ranks of the groups that a graph's facts name, by the group's name."""
    groups: dict[str, list[int]] = {}
    for subject, value in facts.items():
        name = re.match(r"group ['\"]?(.*?)['\"]?$", subject)
        ranks = re.search(r"ranks? ([\d, -]*\d)", value) or re.search(r"\[([\d, ]+)\]", value)
        if name is None or ranks is None or " more" in value:
            continue
        parts = [re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip()) for part in ranks[1].split(",")]
        spans = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part is not None]
        if len(spans) == len(parts) and sum(map(len, spans)) <= MAX_GROUP_RANKS:
            groups[name[1]] = [rank for span in spans for rank in span]
    return groups


def _blocks(lines: list[str]) -> Iterator[tuple[str, int, list[str], bool]]:
    """(fingerprint, number of its first line, its lines without log prefix, whether its end was seen) per graph."""
    begins = [number for number, line in enumerate(lines) if "BEGIN GRAPH MODULE" in line and _BEGIN.search(line)]
    if begins:
        for begin, next_begin in zip(begins, [*begins[1:], len(lines)], strict=True):
            marker = _BEGIN.search(lines[begin])
            inside = lines[begin + 1 : next_begin]
            end = next((k for k, line in enumerate(inside) if "END GRAPH" in line and _END.search(line)), None)
            block = _without_prefix(inside[:end])
            starts = [k for k, line in enumerate(block) if _CLASS.match(line)][1:]
            fingerprint = marker[1] if marker is not None and _FINGERPRINT.fullmatch(marker[1]) else ""
            for start, stop in zip([0, *starts], [*starts, len(block)], strict=True):
                yield fingerprint, begin + 2 + start, block[start:stop], end is not None
        return
    pattern = _CLASS if any("class " in line and _CLASS.search(line) for line in lines) else _DEF
    number = 0
    while number < len(lines):
        head = pattern.search(lines[number])
        if head is None:
            number += 1
            continue
        first = number
        prefix = lines[number][: head.start()]
        block = [lines[number][head.start() :]]
        number += 1
        while number < len(lines):
            line = _strip_prefix(lines[number], prefix)
            starts_anew = line[:1] not in ("", " ", "\t", ")", "#")
            if starts_anew:
                break
            block.append(line)
            number += 1
        yield "", first + 1, block, True


def _without_prefix(lines: list[str]) -> list[str]:
    for line in lines:
        head = _CLASS.search(line) or _DEF.search(line)
        if head is not None:
            prefix = line[: head.start()]
            return [_strip_prefix(line, prefix) for line in lines]
    return lines


def _strip_prefix(line: str, prefix: str) -> str:
    """`line` without what it shares with the log prefix of the graph's first line; numbers in it may differ.

    Some loggers write their prefix only before the first line of a message: then nothing is shared.
    """
    if not prefix or line.startswith(prefix):
        return line[len(prefix) :]
    pieces = _DIGITS.split(prefix)
    at = 0
    for number, piece in enumerate(pieces):
        if number:
            digits = _DIGITS.match(line, at)
            if digits is None:
                break
            at = digits.end()
        if not line.startswith(piece, at):
            while piece and not line.startswith(piece, at):
                piece = piece[:-1]
            at += len(piece)
            break
        at += len(piece)
    return line[at:]


class _Statement(NamedTuple):
    """A statement, names not yet looked up: what is the same wherever this line stands."""

    name: str
    annotation: str
    form: str  # call | attribute | name | output | text
    root: str
    target: str
    leaves: tuple[tuple[str, str, bool], ...]  # path, text, whether it is a name
    line: str


_CACHE: dict[str, _Statement | None] = {}


class _Reader:
    """Reads one graph's lines."""

    def __init__(self, fingerprint: str, first_line: int, lines: list[str], ended: bool) -> None:
        self._fingerprint = fingerprint
        self._first_line = first_line
        self._lines = lines
        self._ended = ended
        self._facts: dict[str, str] = {}
        self._root: Body | None = None
        self._open: list[tuple[int, Body]] = []  # the bodies around the current line, with their indentation
        self._positions: dict[str, int] = {}  # of the current body's nodes, by name
        self._source: Source | None = None
        self._user_source: Source | None = None
        self._has_output = False

    def graph(self) -> Graph | None:
        number = 0
        while number < len(self._lines):
            number += self._read(number)
        if self._root is None or not self._root.nodes:
            return None
        self._apply_facts(self._root, "")
        return Graph(
            self._root, self._fingerprint, self._facts, self._first_line, not (self._ended and self._has_output)
        )

    def _apply_facts(self, body: Body, prefix: str) -> None:
        """Gives nodes the user's own line, and attributes their value, where a fact names it; else their name."""
        for position, node in enumerate(body.nodes):
            place = _PLACE.match(self._facts.get(f"source {prefix}{node.name}", ""))
            if place is not None:
                node = node._replace(user_source=Source(place[1], int(place[2]), "", place[3]))
            if node.op == "get_attr":
                value = self._facts.get(f"constant {prefix}{node.target}") or self._facts.get(f"constant {node.target}")
                argument = Argument("value", value, None) if value else Argument("name", node.target, None)
                node = node._replace(arguments=(argument,))
            body.nodes[position] = node
        for name, nested in body.bodies.items():
            self._apply_facts(nested, f"{prefix}{name}.")

    def _read(self, number: int) -> int:
        """Reads the statement that starts at this line; returns how many lines it takes."""
        line = self._lines[number]
        stripped = line.strip()
        if not stripped:
            return 1
        if stripped[0] == "#" or stripped.startswith("/*"):
            self._read_comment(stripped)
            return 1
        indentation = len(line) - len(line.lstrip())
        head = _CLASS.match(stripped)
        if head is not None:
            self._open_body(head[1], indentation)
            return 1
        if _DEF.match(stripped):
            if not self._open or self._open[-1][1].nodes:
                self._open_body("", indentation - 1)
            return self._read_signature(number, stripped) if self._open else 1
        if stripped.startswith('"""'):  # a node's whole meta data (FX_GRAPH_SHOW_META)
            return 1 + next(
                (k for k, other in enumerate(self._lines[number + 1 :], 1) if other.strip().startswith('"""')), 0
            )
        if not self._open:
            return 1
        statement, count = self._statement(number, stripped)
        if statement is not None:
            self._add(statement)
        return count

    def _read_comment(self, comment: str) -> None:
        if comment.startswith(_FACT):
            subject, _, value = comment[len(_FACT) :].partition(" = ")
            self._facts[subject.strip()] = value.strip()
            return
        source = _source(comment)
        if source is not None:
            self._source = source
            if not source.is_library:
                self._user_source = source
        elif _NO_SOURCE in comment:
            self._source = None

    def _open_body(self, name: str, indentation: int) -> None:
        body = Body(name, [], {})
        while self._open and self._open[-1][0] >= indentation:
            self._open.pop()
        if self._open:
            self._open[-1][1].bodies[name] = body
        elif self._root is None:
            self._root = body
        else:
            return  # a second graph, where one ends: not this one's
        if len(self._open) > MAX_NESTED_BODIES:
            raise ValueError(f"nested bodies are more than MAX_NESTED_BODIES={MAX_NESTED_BODIES} levels deep")
        self._open.append((indentation, body))
        self._positions = {}
        self._source = self._user_source = None

    def _read_signature(self, number: int, first: str) -> int:
        text, count = self._joined(number, first)
        for statement in _signature(text):
            self._add(statement)
        return count

    def _statement(self, number: int, first: str) -> tuple[_Statement | None, int]:
        if first in _CACHE:
            return _CACHE[first], 1
        text, count = first, 1
        parsed = _parse_python(text)
        if parsed is None:
            text, count = self._joined(number, first)
            parsed = _parse_python(text) if count > 1 else None
        statement = _understand(parsed, text)
        if count == 1 and len(first) <= _MAX_CACHED_CHARACTERS:
            if len(_CACHE) >= _MAX_CACHED_STATEMENTS:
                _CACHE.clear()
            _CACHE[first] = statement
        return statement, count

    def _joined(self, number: int, first: str) -> tuple[str, int]:
        """A statement over several lines, and how many these are: up to where all that it opens is closed."""
        lines = [first]
        depth = _depth(first)
        for line in self._lines[number + 1 : number + MAX_STATEMENT_LINES]:
            following = line.strip()
            if depth <= 0 or _source(following) is not None or _CLASS.match(following):
                break
            lines.append(re.sub(r"\s#[^\"']*$", "", following) if "#" in following else following)
            depth += _depth(lines[-1])
        return "\n".join(lines), len(lines)

    def _add(self, statement: _Statement) -> None:
        nodes, positions = self._open[-1][1].nodes, self._positions
        form, root, target = statement.form, statement.root, statement.target
        leaves = statement.leaves
        if form == "name" and root in positions:  # another name for the same node
            positions[statement.name] = positions[root]
            return
        if form == "name" and root == "args_iter":
            form = "placeholder"
        if form in ("call", "attribute") and root in positions:  # a method, or an attribute, of a node
            leaves = (("0", root, True), *((_shift(path), text, is_name) for path, text, is_name in leaves))
            target = f".{target}"
            op = "call"
        elif form in ("attribute", "name") and root == "self":
            op = "get_attr"
        elif form in ("call", "attribute"):
            op = "call"
            if root:
                target = f"{root}.{target}" if target else root
        else:
            op = {"placeholder": "placeholder", "output": "output"}.get(form, "text")
        arguments = tuple(
            Argument(path, text, positions.get(text) if is_name else None) for path, text, is_name in leaves
        )
        dtype, shape, stride, device, note = _annotation(statement.annotation)
        with_source = op not in ("placeholder", "output")
        if op == "output" and len(self._open) == 1:
            self._has_output = True
        if statement.name:
            positions[statement.name] = len(nodes)
        nodes.append(
            Node(
                statement.name or op,
                op,
                target,
                arguments,
                dtype,
                shape,
                stride,
                device,
                note,
                self._source if with_source else None,
                self._user_source if with_source else None,
                statement.line,
            )
        )


def _shift(path: str) -> str:
    """A method's first argument is the node it is called on: the others are counted from 1."""
    number = _DIGITS.match(path)
    return f"{int(number[0]) + 1}{path[number.end() :]}" if number else path


def _depth(text: str) -> int:
    """How many brackets are opened, less those that are closed."""
    return sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))


def _source(comment: str) -> Source | None:
    """The source line that a comment names: `# File: /a/b.py:12 in forward, code: y = x + 1`."""
    place, is_source, code = comment.partition("File: ")[2].partition(", code:")
    where, _, function = place.rpartition(" in ")
    file, _, line = where.rpartition(":")
    if not (comment.startswith("#") and is_source and re.fullmatch(r"\d{1,9}", line)):
        return None
    return Source(file, int(line), function, code.strip())


def _signature(text: str) -> Iterator[_Statement]:
    """The inputs, but for `self`."""
    try:
        function = ast.parse(re.sub(r":\s*$", ": pass", text)).body[0]
        if not isinstance(function, ast.FunctionDef):
            return
    except (SyntaxError, ValueError, RecursionError, MemoryError, IndexError):
        inside = text.partition("(")[2]
        found = re.finditer(r'(\w+)\s*(?::\s*"([^"]*)")?\s*(?:=\s*([^,"]*))?(?:,|\)|$)', inside)
        inputs = [(match[1], match[2] or "", match[3] or "") for match in found]
    else:
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(named) - len(arguments.defaults)) + [*arguments.defaults, *arguments.kw_defaults]
        rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
        every = zip([*named, *arguments.kwonlyargs, *rest], [*defaults, *[None] * len(rest)], strict=True)
        inputs = [(each.arg, _text(each.annotation), _text(default, quoted=True)) for each, default in every]
    for name, annotation, default in inputs:
        if name != "self":
            leaves = (("default", default, False),) if default else ()
            line = f'{name}: "{annotation}"' + (f" = {default}" if default else "")
            yield _Statement(name, annotation, "placeholder", "", "", leaves, line)


def _parse_python(text: str) -> list[ast.stmt] | None:
    """None for what is no Python, or nested too deep or too large for its parser."""
    if len(text) > MAX_PARSED_CHARACTERS or _TOO_LARGE.search(text):
        return None
    try:
        return ast.parse(_without_process(text)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _without_process(text: str) -> str:
    """Without what differs between processes that run the same program."""
    text = _DEVICE_INDEX.sub(r"\1)", text)
    return _ADDRESS.sub("0x0", text) if "0x" in text else text


def _understand(parsed: list[ast.stmt] | None, text: str) -> _Statement | None:
    """The statement, or None if it is no node (it deletes values, or unpacks the list of inputs)."""
    line = _without_process(text)
    end = len(line)
    while (start := line.rfind(";", 0, end)) >= 0 and _DELETION.fullmatch(line, start, end):
        end = start
    line = line[:end].strip()
    try:
        return _understand_python(parsed, line) if parsed else _as_words(line)
    except RecursionError:
        return _as_words(line)


def _understand_python(parsed: list[ast.stmt], line: str) -> _Statement | None:
    statements = [statement for statement in parsed if not _deletes(statement)]
    if not statements:
        return None
    first = statements[0]
    if isinstance(first, ast.Return):
        return _Statement("", "", "output", "", "output", tuple(_leaves(first.value, "")), line)
    name, annotation, value = _assignment(statements[-1])
    in_place = _in_place(first) if len(statements) == 2 and isinstance(value, ast.Name) else None
    if in_place is not None and in_place[1][0][1] == _text(value):
        return _Statement(name, annotation, "call", "", *in_place, line)
    if name == "args_iter" or (isinstance(first, ast.Expr) and "args_list" in line):
        return None
    if value is None or len(statements) > 1:
        return _as_words(line)
    form, root, target, leaves = _expression(value)
    return _Statement(name, annotation, form, root, target, leaves, line)


def _in_place(statement: ast.stmt) -> tuple[str, tuple[tuple[str, str, bool], ...]] | None:
    """Target and leaves of `x += 3` and `x[0] = 3`, which torch writes as `x += 3;  y = x`."""
    if isinstance(statement, ast.AugAssign):
        leaves = (*_leaves(statement.target, "0"), *_leaves(statement.value, "1"))
        return f"operator.i{_operator(statement.op)}", leaves
    if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Subscript):
        leaves = (*_leaves(target.value, "0"), *_leaves(target.slice, "1"), *_leaves(statement.value, "2"))
        return "operator.setitem", leaves
    return None


def _deletes(statement: ast.stmt) -> bool:
    """Whether it is `x = None` or `x = y = None`."""
    value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else statement
    return isinstance(value, ast.Constant) and value.value is None


def _assignment(statement: ast.stmt) -> tuple[str, str, ast.expr | None]:
    """(name, annotation, value); the value is None for a statement of another form."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, _text(statement.annotation), statement.value
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            return target.id, "", statement.value
    return "", "", None


def _expression(value: ast.expr) -> tuple[str, str, str, tuple[tuple[str, str, bool], ...]]:
    """(form, root, target, leaves)."""
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Name) and value.func.id == "next":
            return "name", "args_iter", "", ()
        root, target = _dotted(value.func)
        leaves: list[tuple[str, str, bool]] = []
        for number, argument in enumerate(value.args):
            leaves.extend(_leaves(argument, str(number)))
        for keyword in value.keywords:
            leaves.extend(_leaves(keyword.value, keyword.arg or "**"))
        return "call", root, target, tuple(leaves)
    if isinstance(value, ast.Name):
        return "name", value.id, "", (("0", value.id, True),)
    if isinstance(value, ast.Attribute):
        root, target = _dotted(value)
        return "attribute", root, target, ()
    if isinstance(value, ast.Subscript):
        return "call", "", "operator.getitem", (*_leaves(value.value, "0"), *_leaves(value.slice, "1"))
    if isinstance(value, ast.BinOp):
        leaves_of_both = (*_leaves(value.left, "0"), *_leaves(value.right, "1"))
        return "call", "", f"operator.{_operator(value.op)}", leaves_of_both
    if isinstance(value, ast.Compare) and len(value.ops) == 1:
        leaves_of_both = (*_leaves(value.left, "0"), *_leaves(value.comparators[0], "1"))
        return "call", "", f"operator.{_operator(value.ops[0])}", leaves_of_both
    if isinstance(value, ast.UnaryOp) and isinstance(value.operand, ast.Name):
        return "call", "", f"operator.{_operator(value.op)}", tuple(_leaves(value.operand, "0"))
    return "text", "", "constant", tuple(_leaves(value, "0"))


_OPERATORS = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod", "Pow": "pow",
    "MatMult": "matmul", "LShift": "lshift", "RShift": "rshift", "BitAnd": "and", "BitOr": "or", "BitXor": "xor",
    "USub": "neg", "UAdd": "pos", "Invert": "invert", "Not": "not", "Eq": "eq", "NotEq": "ne", "Lt": "lt",
    "LtE": "le", "Gt": "gt", "GtE": "ge", "Is": "is", "IsNot": "is_not", "In": "in", "NotIn": "not_in",
}  # fmt: skip


def _operator(op: ast.AST) -> str:
    name = type(op).__name__
    return _OPERATORS.get(name, name)


def _dotted(value: ast.expr) -> tuple[str, str]:
    """The first name of `a.b.c`, and the rest."""
    parts: list[str] = []
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    if isinstance(value, ast.Name):
        return value.id, ".".join(reversed(parts))
    return "", ".".join([ast.unparse(value), *reversed(parts)])


def _leaves(value: ast.expr | None, path: str) -> Iterator[tuple[str, str, bool]]:
    if isinstance(value, (ast.Tuple, ast.List)):
        left, right = "()" if isinstance(value, ast.Tuple) else "[]"
        for number, element in enumerate(value.elts):
            yield from _leaves(element, f"{path}{left}{number}{right}")
        if not value.elts:
            yield path, left + right, False
    elif isinstance(value, ast.Dict):
        for key, element in zip(value.keys, value.values, strict=True):
            yield from _leaves(element, f"{path}{{{_text(key, quoted=True)}}}")
        if not value.keys:
            yield path, "{}", False
    elif (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "slice"
        and len(value.args) == 3
    ):
        for name, element in zip(("start", "stop", "step"), value.args, strict=True):
            yield from _leaves(element, f"{path}.{name}")
    elif isinstance(value, ast.Name):
        yield path, value.id, True
    else:
        text = _text(value, quoted=True)
        if text[:1] == "'":
            text = f"'{_DEVICE_STRING.sub(lambda match: match[1], text[1:-1])}'"
        yield path, text, False


def _text(value: ast.expr | None, quoted: bool = False) -> str:
    if isinstance(value, ast.Constant):
        return repr(value.value) if quoted else str(value.value)
    return "" if value is None else ast.unparse(value)


def _as_words(line: str) -> _Statement:
    """A statement that Python's parser can't read, as the repr of some object in it.

    The leaves are its arguments; of an argument with names in it, the names and what stands between them.
    """
    head = re.match(r'(\w+)(?:\s*:\s*"([^"]*)")?\s*=\s*(?!=)', line)
    name, annotation, rest = (head[1], head[2] or "", line[head.end() :]) if head else ("", "", line)
    call = re.match(r"([A-Za-z_][\w.]*)\(", rest)
    form, root, target = "text", "", "text"
    if call is not None and rest.endswith(")"):
        rest = rest[call.end() : -1]
        form, (root, _, target) = "call", call[1].partition(".")
    elif rest.startswith("return "):
        form, target, rest = "output", "output", rest[len("return ") :]
    arguments: list[list[tuple[str, bool]]] = [[]]
    depth = start = 0
    for token in _TOKEN.finditer(rest):
        is_next = token[0] == "," and depth == 0
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if is_next or token[0].isidentifier():
            arguments[-1].append((rest[start : token.start()].strip(), False))
            start = token.end()
        if is_next:
            arguments.append([])
        elif token[0].isidentifier():
            arguments[-1].append((token[0], True))
    arguments[-1].append((rest[start:].strip(), False))
    leaves: list[tuple[str, str, bool]] = []
    for number, pieces in enumerate(arguments):
        pieces = [piece for piece in pieces if piece[0]]
        for place, (text, is_name) in enumerate(pieces):
            leaves.append((f"{number}[{place}]" if len(pieces) > 1 else str(number), text, is_name))
    return _Statement(name, annotation, form, root, target, tuple(leaves), line)


@functools.lru_cache(maxsize=4096)  # a graph has few different ones
def _annotation(annotation: str) -> tuple[str, tuple[str, ...] | None, tuple[str, ...] | None, str, str]:
    """(dtype, shape, stride, device, note)."""
    if not annotation:
        return "", None, None, "", ""
    if annotation.startswith("Sym(") and annotation.endswith(")"):
        return "Sym", (annotation[4:-1],), None, "", ""
    match = _TENSOR.match(annotation)
    if match is None:
        return "", None, None, "", annotation
    note = " ".join(part for part in (match[1], match[6]) if part)
    return match[2], _sizes(match[3]), None if match[4] is None else _sizes(match[4]), match[5] or "", note


def _sizes(text: str) -> tuple[str, ...]:
    """Splits sizes at the commas that are not inside parentheses, as in `Max(1, s0), 4`."""
    if not text.strip():
        return ()
    if "(" not in text:
        return tuple(part.strip() for part in text.split(","))
    sizes = [""]
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            sizes.append("")
        else:
            sizes[-1] += character
    return tuple(size.strip() for size in sizes)
