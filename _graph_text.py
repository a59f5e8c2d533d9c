# SPDX-License-Identifier: Apache-2.0
"""Printed graphs and logs read again, and the command `explain`, for people who have only those. Without torch.

    python handshake.py explain rank0.txt rank1.txt --html report.html

**What is read.** What `GraphModule.print_readable` gives (of Dynamo's graphs or AOTAutograd's; with or without shapes,
strides, devices, source comments), plain `GraphModule.code`, node records (`_graph.graph_record`, one a line), or a log
that holds such texts among other lines, with any prefix before each line. In a log the lines

    --- [BEGIN GRAPH MODULE: <fingerprint>] ---
    --- [END GRAPH MODULE: <fingerprint>] ---

around a graph name its fingerprint (another label says nothing); where there are such lines, only what is between them
is read. Without them a graph starts at its `class` line and ends where the indentation does. Comment lines
`# handshake: <subject> = <value>` carry facts that torch's own text lacks (`_graph.graph_text`).

Nothing that is not understood is an error: a statement of an unknown form becomes a node that holds its words, so that
it can still be compared. Nothing of a statement is cut, however long or deeply nested it is. What differs between
ranks that run the same program is left out: the index of a device, the address in an object's repr.

**What is compared.** One file for each rank. The graphs of two ranks are matched in order: first those that are equal,
then, between these, those that are alike. `_graph_report` says how matched graphs differ.
"""

import argparse
import ast
import functools
import io
import operator
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

if __package__:
    from . import _graph_diff
    from ._graph import is_collective_name
    from ._graph_diff import Argument, Body, Graph, Keys, Node, Source, node_keys, number_of
    from ._graph_plan import align
    from ._graph_report import Context, Report, Variant, explain, page, write_file
    from ._vocabulary import format_ranks
else:
    import _graph_diff
    from _graph import is_collective_name
    from _graph_diff import Argument, Body, Graph, Keys, Node, Source, node_keys, number_of
    from _graph_plan import align
    from _graph_report import Context, Report, Variant, explain, page, write_file
    from _vocabulary import format_ranks

# A statement over several lines (a signature with one input a line) is given up after this many: nobody reads a graph
# with more inputs.
MAX_STATEMENT_LINES = 20_000

# Longer statements are split into words, not parsed: they hold the text of an object, not of a program, and `ast` takes
# quadratic time and a hundred times their size on some.
MAX_PARSED_CHARACTERS = 200_000

# Statements that are understood are kept, as the ranks' graphs have most lines in common. About 1 KB each.
_MAX_CACHED_STATEMENTS = 50_000

# Reports, graphs that only some ranks have, and names of files that the text shows: a screen or two for each report.
MAX_SHOWN = 8

# A file larger than this is refused: a dump of a graph of 10,000 nodes has 3 MB. Binary files show in the first part.
MAX_FILE_BYTES = 512 * 2**20
_FIRST_BYTES = 2**16

# Between graphs that are equal, those of two files are tried against one another that are at most this many places
# apart. How alike they must be (part of the operations that both have) to be taken for the same graph:
_MAX_PLACES_APART = 60
_MIN_LIKENESS = 0.3
# A graph is a part of another, larger one, as after a graph break, if that has this part of its operations.
_MIN_PART = 0.8
_MIN_PART_OPERATIONS = 4
_ALL_GRAPHS_HAVE = ("placeholder", "output", "get_attr")  # no operations


# --- Graphs in a text -------------------------------------------------------------------------------------------------


_BEGIN = re.compile(r"--- \[BEGIN GRAPH MODULE: (.*?)\] ---")
_END = re.compile(r"--- \[END GRAPH MODULE: .*?\] ---")
_FINGERPRINT = re.compile(r"(?:unhashable-)?[0-9a-f]{32}")
_RECORD = '{"handshake_graph"'
_CLASS = re.compile(r"class (\S+)\(torch\.nn\.Module\):\s*$")
_DEF = re.compile(r"def forward\(")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FACT = "# handshake: "
_PLACE = re.compile(r"(.+?):(\d{1,9}): ?(.*)$")
_DIGITS = re.compile(r"\d+")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_LIBRARY_FILE = re.compile(
    r"(?:site|dist)-packages[/\\]|(?:^|[/\\])torch[/\\](?:_\w+|distributed|nn|fx|utils|autograd)[/\\]|^<"
)
_OP = re.compile(r"torch\.ops\.(?!higher_order\b)(\w+)\.(\w+)")


def parse(text: str) -> list[Graph]:
    """The graphs in a text, in order; empty if there is none.

    Raises:
        ValueError: a node record is not valid, or bodies are nested too deep.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `ast` warns about escapes and comparisons in what it parses
        lines = _ANSI.sub("", text).replace("\r\n", "\n").split("\n")
        return [graph for reader in _find(lines) if (graph := reader.graph()) is not None]


def _find(lines: list[str]) -> list["_Reader"]:
    """A reader for each graph, with its lines without what a logger wrote before them."""
    is_marked = any(map(_BEGIN.search, lines))
    heads = [_CLASS] if not is_marked and any(map(_CLASS.search, lines)) else [_CLASS, _DEF]
    readers: list[_Reader] = []
    reader: _Reader | None = None  # of the graph that the line may belong to
    is_inside, fingerprint, prefix = not is_marked, "", ""
    for number, line in enumerate(lines, 1):
        if is_marked and (mark := _BEGIN.search(line) or _END.search(line)) is not None:
            if reader is not None and mark.re is _END:
                reader.is_ended = True
            reader, is_inside = None, mark.re is _BEGIN
            fingerprint = mark[1] if is_inside and _FINGERPRINT.fullmatch(mark[1]) else ""
            continue
        if not is_inside:
            continue
        rest = line if reader is None else _without_prefix(line, prefix)
        if reader is not None and rest[:1] in ("", " ", "\t", ")", "#"):
            reader.lines.append(rest)
            continue
        start = line.find(_RECORD)
        if start < 0:
            start = next((match.start() for head in heads if (match := head.search(line)) is not None), -1)
        if start >= 0:
            if reader is not None:
                reader.is_ended = True
            reader, prefix = _Reader(fingerprint, number, line[start:], not is_marked), line[:start]
            readers.append(reader)
        elif not is_marked:
            reader = None  # the graph has ended; between marks it is a line of another thread
    return readers


def _without_prefix(line: str, prefix: str) -> str:
    """A line without what it shares with the log prefix of the graph's first line; numbers in it may differ.

    Some loggers write their prefix only before the first line of a message: then nothing, or a part, is shared.
    """
    if line.startswith(prefix):
        return line[len(prefix) :]
    at = 0
    for text, digits in re.findall(r"(\D*)(\d*)", prefix):
        for character in text:
            if not line.startswith(character, at):
                return line[at:]
            at += 1
        number = _DIGITS.match(line, at) if digits else None
        if number is None:
            break
        at = number.end()
    return line[at:]


class _Reader:
    """Reads one graph's lines."""

    def __init__(self, fingerprint: str, first_line: int, first: str, is_ended: bool) -> None:
        self.lines = [first]
        self.is_ended = is_ended
        self._fingerprint = fingerprint
        self._first_line = first_line
        self._facts: dict[str, str] = {}  # value by subject
        self._open: list[tuple[int, Body]] = []  # the bodies around the current line, with their indentation
        self._positions: dict[str, int] = {}  # of the current body's nodes, by name
        self._source: Source | None = None
        self._user_source: Source | None = None

    def graph(self) -> Graph | None:
        """The graph, or None if it has no nodes."""
        if self.lines[0].startswith(_RECORD):
            graph = _graph_diff.read_record(self.lines[0])
            return graph._replace(fingerprint=graph.fingerprint or self._fingerprint, first_line=self._first_line)
        facts = [line.removeprefix(_FACT).partition(" = ") for line in self.lines if line.startswith(_FACT)]
        self._facts = {subject.strip(): value.strip() for subject, _, value in facts}
        number = 0
        while number < len(self.lines):
            number += self._read(number)
        if not self._open or not self._open[0][1].nodes:
            return None
        root, rank = self._open[0][1], self._facts.get("rank", "")
        groups = {
            subject.removeprefix("group "): (ranks, value.partition("; description ")[2])
            for subject, value in self._facts.items()
            if subject.startswith("group ") and (ranks := _ranks(value.partition(";")[0]))
        }
        is_cut = not self.is_ended or all(node.op != "output" for node in root.nodes)
        known_rank = int(rank) if re.fullmatch(r"\d{1,9}", rank) else None
        return Graph(root, self._fingerprint, known_rank, groups, self._first_line, is_cut)

    def _read(self, number: int) -> int:
        """Reads the statement that starts at this line; returns how many lines it takes."""
        line = self.lines[number].strip()
        indentation = len(self.lines[number]) - len(self.lines[number].lstrip())
        if line.startswith("#"):
            self._read_comment(line)
        elif line.startswith('"""'):  # all that is known of a node (FX_GRAPH_SHOW_META)
            others = self.lines[number + 1 :]
            return 1 + next((k for k, other in enumerate(others, 1) if other.strip().startswith('"""')), 0)
        elif (head := _CLASS.match(line)) is not None:
            self._open_body(head[1], indentation)
        elif _DEF.match(line):
            if not self._open:
                self._open_body("", indentation - 1)
            text, count = self._joined(number)
            for statement in _signature(text):
                self._add(statement)
            return count
        elif line and self._open:
            statement, count = _understand(line), 1
            if statement.op == "text" and _depth(line) > 0:
                text, count = self._joined(number)
                statement = _understand(text)
            self._add(statement)
            return count
        return 1

    def _read_comment(self, comment: str) -> None:
        if (source := _source(comment)) is not None:
            self._source = source
            if _LIBRARY_FILE.search(source.file) is None:
                self._user_source = source
        elif "No stacktrace found for following nodes" in comment:
            self._source = None

    def _open_body(self, name: str, indentation: int) -> None:
        body = Body(name, [], {})
        while len(self._open) > 1 and self._open[-1][0] >= indentation:
            self._open.pop()
        if self._open:
            self._open[-1][1].bodies[name] = body
        if len(self._open) > (most := _graph_diff.MAX_NESTED_BODIES):
            raise ValueError(f"bodies are nested more than {most} levels deep (MAX_NESTED_BODIES)")
        self._open.append((indentation, body))
        self._positions = {}
        self._source = self._user_source = None

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
        name, op, target, leaves = statement.name, statement.op, statement.target, statement.leaves
        nodes, positions = self._open[-1][1].nodes, self._positions
        root, _, rest = target.partition(".")
        body = "".join(f"{body.name}." for _, body in self._open[1:])
        if op in ("call", "attribute") and root in positions:
            if op == "attribute" and not rest:  # an input's own name, where the signature has another
                at = positions[name] = positions[root]
                nodes[at] = nodes[at]._replace(name=name, mutated_by=self._facts.get(f"mutated {body}{name}"))
                return
            op, target = "call", f".{rest}"
            shifted = ((re.sub(r"^\d+", _one_more, path), text, is_name) for path, text, is_name in leaves)
            leaves = (("0", root, True), *shifted)
        elif op == "attribute":
            op, target = ("get_attr", rest) if root == "self" else ("call", target)
        arguments = tuple(
            Argument(path, text, positions.get(text) if is_name else None) for path, text, is_name in leaves
        )
        is_collective = op == "call" and _is_collective(target, arguments)
        group = _group(arguments) if is_collective else None
        constant, mutated_by = (self._facts.get(f"{fact} {body}{target or name}") for fact in ("constant", "mutated"))
        source, user_source = (None, None) if op in ("placeholder", "output") else (self._source, self._user_source)
        if (place := _PLACE.match(self._facts.get(f"source {body}{name}", ""))) is not None:
            user_source = Source(place[1], int(place[2]), "", place[3])
        form = _form(statement.annotation)
        node = Node(name or op, op, target, arguments, statement.line, *form, source, user_source)
        positions[name] = len(nodes)
        nodes.append(node._replace(group=group, collective=is_collective, constant=constant, mutated_by=mutated_by))


def _one_more(number: re.Match[str]) -> str:
    return str(int(number[0]) + 1)


def _ranks(text: str) -> tuple[int, ...] | None:
    """The ranks of a group as `format_ranks` writes them; None for another text, or more ranks than any job has."""
    parts = [_RANGE.fullmatch(part) for part in re.sub(r"^ranks? ", "", text).split(", ")]
    spans = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part is not None]
    if len(spans) < len(parts) or sum(map(len, spans)) > _graph_diff.MAX_GROUP_RANKS:
        return None
    return tuple(rank for span in spans for rank in span)


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
# a string or a repr, and the address of an object.
_OF_PROCESS = re.compile(
    r"(['\]](?:cuda|xpu|xla|tpu|jax|mps|hpu|npu|cpu|privateuseone)):\d+(?=['\",)])"
    r"|(device\(type='\w+'), index=\d+(?=\))|(\b0x)[0-9a-fA-F]{6,}\b"
)
# What torch appends to a statement: names that are not needed any more.
_DELETION = re.compile(r";\s*(?:\w+ = )+None\s*")
# Numbers that Python reads as infinite, or refuses: they would all be the same.
_TOO_LARGE = re.compile(r"\d{300}|\d[eE]\+?(?:[3-9]\d\d|\d{4})")
_WORDS = re.compile(r'(?s)(?:(\w+)(?:\s*:\s*"([^"]*)")?\s*=\s*(?!=))?(?:(return) |([A-Za-z_][\w.]*)(?=\())?(.*)')
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[A-Za-z_][\w.]*|\d[\w.+-]*|\S")
_TENSOR = re.compile(r"(?:(\w+)\()?([a-z]\w*)\[([^\]]*)\](?:\[([^\]]*)\])?([a-z]+)?(?:,? ?(.*)\))?")

# One leaf of a statement's arguments: its path, its text, and whether it is a name.
_Leaf = tuple[str, str, bool]


class _Statement(NamedTuple):
    """A statement, its names not yet looked up: what is the same wherever this line stands.

    `op` is placeholder, call, attribute, output or text; `target` is what is called, or read, as it is written; `line`
    is the text without what it deletes.
    """

    name: str
    annotation: str
    op: str
    target: str
    leaves: tuple[_Leaf, ...]
    line: str


@functools.lru_cache(_MAX_CACHED_STATEMENTS)
def _understand(text: str) -> _Statement:
    line = _OF_PROCESS.sub(r"\1\2\3", text)
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


def _signature(text: str) -> Iterator[_Statement]:
    """The inputs, but for `self`; none of a signature that is cut off."""
    try:
        function = ast.parse(re.sub(r":\s*$", ": pass", _OF_PROCESS.sub(r"\1\2\3", text))).body[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    if not isinstance(function, ast.FunctionDef):
        return
    inputs = function.args
    positional = [*inputs.posonlyargs, *inputs.args]
    defaults = dict(zip(reversed(positional), reversed(inputs.defaults), strict=False))
    for argument in ast.walk(inputs):
        if isinstance(argument, ast.arg) and argument.arg != "self":
            annotation = _annotation(argument.annotation)
            default = ast.unparse(defaults[argument]) if argument in defaults else ""
            line = f'{argument.arg}: "{annotation}"' + (f" = {default}" if default else "")
            leaves = (("default", default, False),) if default else ()
            yield _Statement(argument.arg, annotation, "placeholder", "", leaves, line)


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


# --- The command explain ----------------------------------------------------------------------------------------------


class _FileError(Exception):
    """A file that can't be used; the text says which and why."""


class _RankFile(NamedTuple):
    path: str
    rank: int
    graphs: list[Graph]


class _Place(NamedTuple):
    """A graph in a rank's file: its number there, and one for its content, which is the same for equal graphs."""

    number: int
    content: int
    graph: Graph


# The graphs that match, by rank.
_Slot = dict[int, _Place]


def explain_files(paths: Sequence[str], html_path: str | None = None) -> int:
    """Compares the graphs in files of several ranks, one file a rank, and prints the reports.

    A file's rank is the one that it says itself (`# handshake: rank = 3`), else the number in its name (`rank12.txt`)
    or its folder's (`rank12/graph.txt`), else its place among the arguments. If two files would have the same rank, all
    are numbered by their place, and a line says so. Its graphs are matched with the other ranks' in order; a rank may
    have some that others lack.

    Args:
        paths: two files or more.
        html_path: where to write a page too; none of the files.

    Returns:
        0 if all ranks have the same graphs, 1 if they differ, 2 if the files can't be compared or a report can't be
        written (stderr says why).
    """
    try:
        status, text, html = _compare(paths, html_path)
    except _FileError as error:
        return _fail(str(error))
    except (RecursionError, MemoryError) as error:
        return _fail(f"the graphs are nested too deep or too large to compare: {type(error).__name__}: {error}")
    if html_path is not None:
        try:
            write_file(html_path, html)
        except OSError as error:
            status = _fail(f"the page could not be written to {html_path}: {error.strerror}")
    try:
        print(text, flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader has seen enough
            status = _fail(f"the report could not be written: {error.strerror}")
    return status


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _compare(paths: Sequence[str], html_path: str | None) -> tuple[int, str, str]:
    """Exit status, text and page."""
    files, remarks = _read_files(paths)
    for path in paths:
        if html_path is not None and os.path.exists(html_path) and os.path.samefile(html_path, path):
            raise _FileError(f"the page would overwrite {path}: give --html another file")
    unseen = sorted(set().union(*(_unseen(graph) for file in files for graph in file.graphs)))
    if unseen:
        remarks.append(
            f"Note: these texts do not hold the values of {', '.join(unseen[:3])}{' …' if len(unseen) > 3 else ''}, so "
            "they are not compared. Print the graphs with graph_text, or compare their fingerprints."
        )
    slots, extra = _match_files(files)
    ranks, graphs = [file.rank for file in files], number_of(len(slots), "graph")
    notes = [_only_some(slot, ranks) for slot in [*slots, *extra] if len(slot) < len(files)]
    if len(notes) > MAX_SHOWN:
        notes[MAX_SHOWN:] = [f"and {len(notes) - MAX_SHOWN} more graphs that only some ranks have (MAX_SHOWN)"]
    if notes:
        notes.append(
            "A graph that only some ranks have comes from a graph break or a recompile on these ranks "
            "(TORCH_LOGS=graph_breaks,recompiles says where), from a branch on the rank, or from a compile cache that "
            "is warm on the other ranks."
        )
    reports = [_report(slot, number, len(slots)) for number, slot in enumerate(slots) if len(slot) > 1]
    differing = [report for report in reports if len(report.variants) > 1]
    heading = f"{format_ranks(ranks)}: {len(differing)} of {graphs} differ" if len(slots) > 1 or notes else ""
    lines = [*remarks, *filter(None, [heading]), *notes]
    for report in differing[:MAX_SHOWN]:
        lines += [*([""] if lines else []), report.text().rstrip()]
    if len(differing) > MAX_SHOWN:
        lines.append(f"and {len(differing) - MAX_SHOWN} more graphs that differ (MAX_SHOWN)")
    if not differing and not notes:
        lines.append(f"{format_ranks(ranks)} have the same {graphs}{', as far as these texts tell' if unseen else ''}")
    html = page(differing or reports[:1], heading, [*remarks, *notes]) if html_path is not None else ""
    return 1 if differing or notes else 0, "\n".join(lines), html


def _unseen(graph: Graph) -> set[str]:
    """Attributes whose values can't be compared: a text without facts, and no fingerprint that stands for them."""
    if graph.fingerprint or graph.groups or graph.rank is not None:
        return set()
    nodes = [node for node in graph.body.nodes if node.op == "get_attr" and node.constant is None]
    unseen = {node.target for node in nodes if _graph_diff.nested_body(node, graph.body) is None}
    return unseen.union(*(_unseen(graph._replace(body=body)) for body in graph.body.bodies.values()))


def _read_files(paths: Sequence[str]) -> tuple[list[_RankFile], list[str]]:
    """The files, by rank, and what there is to say about their ranks."""
    if len(paths) < 2:
        raise _FileError(f"at least two files are needed, one for each rank; got {number_of(len(paths), 'file')}")
    files = [_read_file(path, number) for number, path in enumerate(paths)]
    rank, count = Counter(file.rank for file in files).most_common(1)[0]
    if count == 1:
        return sorted(files, key=lambda file: file.rank), []
    numbered = ", ".join(f"rank {number} is {path}" for number, path in enumerate(paths[:MAX_SHOWN]))
    remark = (
        f"Note: {count} files are of rank {rank}, so all are numbered in the order given: {numbered}"
        f"{' …' if len(paths) > MAX_SHOWN else ''}. Names such as rank0.txt, rank1.txt say whose a file is."
    )
    return [file._replace(rank=number) for number, file in enumerate(files)], [remark]


def _read_file(path: str, number: int) -> _RankFile:
    try:
        with open(path, "rb") as file:
            data = file.read(_FIRST_BYTES)
            if b"\0" in data:
                raise _FileError(f"{path} is not a text file (it holds null bytes)")
            data += file.read(MAX_FILE_BYTES + 1 - len(data))
    except OSError as error:
        raise _FileError(f"{path} can't be read: {error.strerror or error}") from error
    if not data:
        raise _FileError(f"{path} is empty")
    if len(data) > MAX_FILE_BYTES:
        raise _FileError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB (MAX_FILE_BYTES)")
    try:
        graphs = parse(data.decode("utf-8-sig", "backslashreplace"))
    except ValueError as error:
        raise _FileError(f"{path}: {error}") from error
    if not graphs:
        raise _FileError(
            f"{path} holds no graph: expected the text of GraphModule.print_readable() or of graph_record, or a log "
            "with `--- [BEGIN GRAPH MODULE: …] ---` lines"
        )
    name = os.path.splitext(os.path.basename(path))[0]
    named = re.findall(r"(?i)rank\D?(\d+)", path) or re.findall(r"\d+", name)
    ranks = [graph.rank for graph in graphs if graph.rank is not None]
    ranks += [int(digits) for digits in named[-1:] if len(digits) <= 6]  # a longer number is a date or an id
    return _RankFile(path, ranks[0] if ranks else number, graphs)


def _match_files(files: list[_RankFile]) -> tuple[list[_Slot], list[_Slot]]:
    """The graphs of the reference file, which is the one that most ranks have, and those that it lacks."""
    keys: dict[int, Keys] = {}
    numbers: dict[Any, int] = {}  # the same for graphs that are the same
    contents = {
        file.rank: [numbers.setdefault(_graph_diff.content(graph, keys), len(numbers)) for graph in file.graphs]
        for file in files
    }
    sequences = Counter(map(tuple, contents.values()))
    reference = max(files, key=lambda file: (sequences[tuple(contents[file.rank])], -file.rank))
    slots: list[_Slot] = [{} for _ in reference.graphs]
    extra: dict[tuple[int, int], _Slot] = {}
    operations = {
        number: Counter(key for key in node_keys(graph.body, keys).weak if key not in _ALL_GRAPHS_HAVE)
        for file in files
        for number, graph in zip(contents[file.rank], file.graphs, strict=True)
    }
    for file in files:
        matched = _match_graphs(contents[reference.rank], contents[file.rank], operations)
        if not matched:
            raise _FileError(
                f"rank {file.rank} ({file.path}) and rank {reference.rank} ({reference.path}) have no graph in common"
            )
        slot_of = {j: i for i, j in matched}
        last = -1
        for j, (graph, content) in enumerate(zip(file.graphs, contents[file.rank], strict=True)):
            last = slot_of.get(j, last)
            slot = slots[last] if j in slot_of else extra.setdefault((last, content), {})
            slot[file.rank] = _Place(j, content, graph)
    return slots, list(extra.values())


def _match_graphs(a: list[int], b: list[int], operations: dict[int, Counter[Any]]) -> list[tuple[int, int]]:
    """The pairs of graphs, ascending in both, that are the same, or alike at the same place of the sequence."""
    pairs = align(a, b)
    for start, stop, b_start, b_stop in list(_graph_diff.gaps(pairs, len(a), len(b))):
        reach = _MAX_PLACES_APART + abs((stop - start) - (b_stop - b_start))
        # Of the graphs of both from i and j on: the greatest sum of likeness, and a chain of the pairs that give it.
        best: list[tuple[float, Any]] = [(0.0, None)] * (b_stop - b_start + 1)
        for i in reversed(range(stop - start)):
            later, best = best, best.copy()
            for j in reversed(range(max(0, i - reach), min(b_stop - b_start, i + reach))):
                likeness = _likeness(operations[a[start + i]], operations[b[b_start + j]])
                together = (likeness + later[j + 1][0], (start + i, b_start + j, later[j + 1][1]))
                alone = max(later[j], best[j + 1], key=operator.itemgetter(0))
                best[j] = together if likeness and together[0] >= alone[0] else alone
        chain = best[0][1]
        while chain is not None:
            pairs.append(chain[:2])
            chain = chain[2]
    return pairs


def _likeness(a: Counter[Any], b: Counter[Any]) -> float:
    """The part of the operations that both have; 0 if that is too little."""
    sizes, common = (a.total(), b.total()), (a & b).total()
    part = common / max(*sizes, 1)
    is_part = common >= _MIN_PART_OPERATIONS and common >= _MIN_PART * min(sizes)
    return part if part >= _MIN_LIKENESS or is_part else 0.0


def _report(slot: _Slot, number: int, total: int) -> Report:
    all_have = all(place.graph.fingerprint for place in slot.values())
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for rank, place in slot.items():
        ranks_of.setdefault((place.content, place.graph.fingerprint if all_have else ""), []).append(rank)
    variants = [Variant(tuple(ranks), key[1], slot[ranks[0]].graph) for key, ranks in ranks_of.items()]
    return explain(variants, Context(title=f"graph {number} of {total}" if total > 1 else ""))


def _only_some(slot: _Slot, ranks: list[int]) -> str:
    having = sorted(slot)
    lacking = [rank for rank in ranks if rank not in slot]
    number, _, graph = slot[having[0]]
    source = next((node.user_source for node in graph.body.nodes if node.user_source is not None), None)
    first = f"; first line {source.place}: {source.code}" if source is not None else ""
    return (
        f"Only {format_ranks(having)} {'has' if len(having) == 1 else 'have'} this graph, {format_ranks(lacking)} "
        f"{'does' if len(lacking) == 1 else 'do'} not: graph {number} of rank {having[0]}, at line "
        f"{graph.first_line} of its file ({_graph_diff.describe_size(graph.body)}{first})"
    )


def main(arguments: Sequence[str]) -> int:
    """The command line, `explain FILE FILE … [--html FILE]`; returns the exit status, that of `explain_files`.

    Raises:
        SystemExit: with 2 if the arguments are wrong, with 0 if they ask for help.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may have no "·"
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.handshake" if __package__ else "python handshake.py",
        usage="%(prog)s explain FILE FILE … [--html FILE]",
        description="Says how the graphs of several ranks differ, and what to change.",
        epilog="A file's rank is the one that it says itself, else the number in its path (rank12.txt), else its "
        "place among the files. Exit status: 0 the graphs are the same, 1 they differ, 2 they can't be compared.",
    )
    parser.add_argument("command", choices=["explain"], metavar="explain", help="the only command")
    help_text = "a rank's graphs (print_readable, graph_record, or a log with graphs), one file for each rank"
    parser.add_argument("files", nargs="+", metavar="FILE", help=help_text)
    parser.add_argument("--html", metavar="FILE", help="write the report as a page too")
    options = parser.parse_args(arguments)
    return explain_files(options.files, options.html)
