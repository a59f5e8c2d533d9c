# SPDX-License-Identifier: Apache-2.0
"""The report on diverging graphs as one HTML page: no other file, no script, light or dark as the reader's system is.

Everything that comes from a graph, a log or a file name is escaped. What would make the page unreadable is bounded,
and the page says so: of two graphs only the changed regions are shown, and of variants that differ from the reference
in the same places (as when each rank has a constant of its own) only one is laid side by side with it; the values of
all are in the tables.
"""

import html
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

if __package__:
    from ._align import align
    from ._divergence import MAX_COMPARISONS, Report
    from ._graph_diff import NOT_THERE, BodyComparison, Difference, number_of
    from ._graph_text import Body, Node, Source
    from ._vocabulary import format_ranks
else:
    from _align import align
    from _divergence import MAX_COMPARISONS, Report
    from _graph_diff import NOT_THERE, BodyComparison, Difference, number_of
    from _graph_text import Body, Node, Source
    from _vocabulary import format_ranks

# Equal nodes that are shown around a changed one.
CONTEXT_NODES = 3
# Rows of a comparison that are laid side by side: a browser scrolls through this many at ease.
MAX_ROWS = 400
# Rows of the list of differences, and values of one difference that are shown before the rest is folded away.
MAX_DIFFERENCES = 200
MAX_VALUES = 8
# Variants up to which the table of constants has a column for each; for more it has a row for each.
MAX_VARIANT_COLUMNS = 8
MAX_CONSTANTS = 40
# A line of a graph with more words than this is shown without marks on what changed.
MAX_MARKED_WORDS = 400
MAX_LINE_CHARACTERS = 2000
MAX_VALUE_CHARACTERS = 400

_WORD = re.compile(r"'(?:[^'\\]|\\.)*'|[A-Za-z_][\w.]*|-?\d[\w.]*|\s+|.")

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --panel: #f6f8fa;
  --old: #ffebe9; --old-mark: #ffb3ab; --new: #dafbe1; --new-mark: #8fe3a3; --badge: #ddf4ff; --badge-ink: #0550ae;
  --advice: #fff8c5; --advice-line: #d4a72c; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --panel: #151b23; --old: #3c1618; --old-mark: #8c2f2f; --new: #12321d; --new-mark: #1f6f37; --badge: #121d2f;
  --badge-ink: #79c0ff; --advice: #2b2410; --advice-line: #9e6a03; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1500px; padding: 1.2rem 1.6rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.45rem; margin: .2rem 0 .6rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
code, .code { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.soft { color: var(--soft); } ul, ol { margin: .3rem 0; padding-left: 1.4rem; } li { margin: .25rem 0; }
.advice { background: var(--advice); border-left: 4px solid var(--advice-line); padding: .5rem 1rem; }
.scroll { overflow: auto; max-height: 34rem; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top; padding: .3rem .6rem;
  border-bottom: 1px solid var(--line); }
.scroll th { position: sticky; top: 0; background: var(--panel); font-weight: 600; z-index: 1; }
tr:last-child td { border-bottom: 0; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.constants td:first-child { white-space: nowrap; } .constants th { font-weight: 400; overflow-wrap: anywhere; }
.constants td { overflow-wrap: anywhere; } td.number { width: 6rem; }
.difference { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .9rem; margin: .6rem 0; }
.badge { background: var(--badge); color: var(--badge-ink); border-radius: 1em; padding: .05rem .6rem;
  font-weight: 600; font-size: .85rem; white-space: nowrap; }
.values { margin-top: .3rem; } .values td { border: 0; padding: .1rem .8rem .1rem 0; }
.values td:first-child { white-space: nowrap; width: 1%; color: var(--soft); }
.formula { font-weight: 600; }
.graphs { table-layout: fixed; border: 1px solid var(--line); } .graphs td, .graphs th { border: 0;
  padding: .05rem .5rem; }
.graphs th { background: var(--panel); padding: .3rem .5rem; } .graphs .at { width: 4.2rem; text-align: right;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.graphs td { overflow-wrap: anywhere; white-space: pre-wrap; } .graphs .old { background: var(--old); }
.graphs .new { background: var(--new); } .old mark { background: var(--old-mark); color: inherit; }
.new mark { background: var(--new-mark); color: inherit; }
.graphs .skip td, .graphs .source td { background: var(--panel); color: var(--soft); padding: .15rem .5rem; }
.graphs .source td { border-top: 1px solid var(--line); }
nav { margin: .6rem 0; } hr { border: 0; border-top: 2px solid var(--line); margin: 2.5rem 0 1rem; }
"""


class _Row(NamedTuple):
    """A line of two graphs side by side: positions in the reference and in the variant, either may be None."""

    left: int | None
    right: int | None
    changed: bool


def page(reports: Sequence[Report], heading: str = "", notes: Iterable[str] = ()) -> str:
    """The page for one or several reports.

    Args:
        reports: what to show, in order.
        heading: a line above them, where there are several.
        notes: lines above the reports.
    """
    title = heading or (reports[0].headline() if reports else "No graphs")
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_escape(title)}</title><style>{_STYLE}</style></head><body>",
    ]
    if heading:
        parts.append(f"<h1>{_escape(heading)}</h1>")
    parts.append(_list(_escape(note) for note in notes))
    if len(reports) > 1:
        links = (f'<a href="#report{number}">{_escape(report.headline())}</a>' for number, report in enumerate(reports))
        parts.append(f"<nav>{_list(links)}</nav>")
    for number, report in enumerate(reports):
        if heading:
            parts.append(f'<hr id="report{number}">')
        parts.extend(_report(report))
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _report(report: Report) -> Iterator[str]:
    yield f"<h1>{_escape(report.headline())}</h1>"
    yield _list(_escape(line) for line in report.where())
    notes = report.notes()
    if notes:
        yield f'<p class="soft">Note:</p>{_list(_escape(note) for note in notes)}'
    if report.advice:
        yield f'<h2>What to do</h2><div class="advice">{_list(_with_code(text) for text in report.advice)}</div>'
    yield from _variants(report)
    yield from _constants(report)
    yield from _differences(report)
    yield from _comparisons(report)
    if report.context.before:
        yield f"<h2>Handshakes just before</h2>{_list(_escape(line) for line in report.context.before)}"


def _variants(report: Report) -> Iterator[str]:
    yield f"<h2>{number_of(len(report.variants), 'variant')}, largest first</h2>"
    rows = ["<tr><th></th><th>ranks</th><th>number</th><th>graph</th></tr>"]
    for number, variant in enumerate(report.variants):
        reference = ' <span class="badge">reference</span>' if number == report.reference else ""
        rows.append(
            f"<tr><td><b>{report.name(number)}</b>{reference}</td><td>{_escape(format_ranks(variant.ranks))}</td>"
            f'<td class="number">{len(variant.ranks)}</td><td>{_escape(report.describe_variant(number))}</td></tr>'
        )
    yield f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _constants(report: Report) -> Iterator[str]:
    constants = [difference for difference in report.differences if difference.kind == "constant"]
    if not constants:
        return
    numbers = [report.reference, *report.comparisons]
    names = [f"{report.name(number)}: {format_ranks(report.variants[number].ranks, 4)}" for number in numbers]
    table = [["", *(_escape(name) for name in names), "formula"]]
    for difference in constants[:MAX_CONSTANTS]:
        place = _short_place(difference.source) if difference.source else ""
        source = f'<br><span class="soft">{_escape(place)}</span>'
        operation = difference.node.target.removeprefix("torch.ops.")
        what = _escape(_cut(f"{operation}, {difference.what}", 200))
        head = f"<code>{_escape(difference.node.name)}</code> = {what}{source}"
        sides = [difference.shown(report.value(difference, number) or NOT_THERE) for number in numbers]
        values = [f"<code>{_escape(_cut(side, 200))}</code>" for side in sides]
        formula = f'<span class="formula">{_escape(difference.formula)}</span>' if difference.formula else "–"
        table.append([head, *values, formula])
    if len(numbers) > MAX_VARIANT_COLUMNS:
        for row in table:
            row.insert(1, row.pop())  # the formula belongs above all the values
        table = [list(column) for column in zip(*table, strict=True)]
    yield "<h2>Constants that differ</h2>"
    if len(constants) > MAX_CONSTANTS:
        yield f'<p class="soft">The first {MAX_CONSTANTS} of {len(constants)}.</p>'
    head_row, *rows = table
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{cell}</th>" for cell in head_row)
    yield f'<div class="scroll"><table class="constants"><tr>{head}</tr>{body}</table></div>'


def _differences(report: Report) -> Iterator[str]:
    if not report.differences:
        return
    shown = report.differences[:MAX_DIFFERENCES]
    yield f"<h2>{number_of(len(report.differences), 'difference')}, in the order of the reference</h2>"
    if len(shown) < len(report.differences):
        yield f'<p class="soft">The first {MAX_DIFFERENCES} are shown (MAX_DIFFERENCES).</p>'
    for number, difference in enumerate(shown, 1):
        yield _difference(report, number, difference)


def _difference(report: Report, number: int, difference: Difference) -> str:
    parts = [
        f'<div class="difference">{number}. <span class="badge">{_escape(difference.kind)}</span> '
        f"{_with_code(_cut(report.place(difference), MAX_VALUE_CHARACTERS))}, "
        f"{_escape(_cut(difference.what, MAX_VALUE_CHARACTERS))}"
    ]
    if difference.source is not None:
        code = f" <code>{_escape(_cut(difference.source.code, 300))}</code>" if difference.source.code else ""
        parts.append(f'<div class="soft">{_escape(_place(difference.source))}{code}</div>')
    rows = [
        f"<tr><td>{_escape(format_ranks(ranks, 4))}</td><td>{_value(value)}</td></tr>"
        for ranks, value in report.sides(difference)
        if ranks
    ]
    parts.append(f'<table class="values">{"".join(rows[:MAX_VALUES])}</table>')
    if len(rows) > MAX_VALUES:
        rest = f'<table class="values">{"".join(rows[MAX_VALUES:])}</table>'
        parts.append(f"<details><summary>{len(rows) - MAX_VALUES} more values</summary>{rest}</details>")
    if difference.formula:
        parts.append(f'<div class="formula">= {_escape(difference.formula)}</div>')
    if difference.alike:
        parts.append(f'<div class="soft">{_escape(report.alike_text(difference))}</div>')
    if difference.follows:
        parts.append(f'<div class="soft">{difference.follows:,} further nodes differ as a consequence.</div>')
    return "".join([*parts, "</div>"])


def _comparisons(report: Report) -> Iterator[str]:
    # Of graphs that have nothing in common there is nothing to lay side by side.
    alike = [
        numbers
        for numbers in report.alike.values()
        if any(difference.kind != "graph" for difference in report.comparisons[numbers[0]].differences)
    ]
    if alike:
        yield "<h2>Side by side</h2>"
    for numbers in alike[:MAX_COMPARISONS]:
        first = numbers[0]
        sides = [f"{report.name(n)} ({format_ranks(report.variants[n].ranks, 4)})" for n in (report.reference, first)]
        yield f"<h3>{_escape(sides[0])} and {_escape(sides[1])}</h3>"
        if len(numbers) > 1:
            ranks = [rank for number in numbers[1:] for rank in report.variants[number].ranks]
            yield f'<p class="soft">In the same places differ: {_escape(format_ranks(ranks))}.</p>'
        for body in report.comparisons[first].bodies:
            yield from _side_by_side(body, sides)
    left = len(alike) - MAX_COMPARISONS
    if left > 0:
        yield f'<p class="soft">{left} more comparisons are left out (MAX_COMPARISONS={MAX_COMPARISONS}).</p>'


def _side_by_side(comparison: BodyComparison, sides: list[str]) -> Iterator[str]:
    rows = _rows(comparison)
    near: set[int] = set()
    for number, row in enumerate(rows):
        if row.changed:
            near.update(range(number - CONTEXT_NODES, number + CONTEXT_NODES + 1))
    if not near:
        return
    names = [{node.name: i for i, node in enumerate(body.nodes)} for body in (comparison.reference, comparison.other)]
    if comparison.path:
        yield f"<p>Nested body <code>{_escape(comparison.path)}</code></p>"
    lines = [
        '<table class="graphs"><colgroup><col class="at"><col><col class="at"><col></colgroup>'
        f'<tr><th class="at"></th><th>{_escape(sides[0])}</th><th class="at"></th><th>{_escape(sides[1])}</th></tr>'
    ]
    shown = skipped = 0
    source: Source | None = None
    for number, row in enumerate(rows):
        if number not in near:
            skipped += 1
            continue
        if shown >= MAX_ROWS:
            left = sum(row.changed for row in rows[number:])
            lines.append(_wide("skip", f"… {left:,} more changed nodes are left out (MAX_ROWS={MAX_ROWS}) …"))
            skipped = 0
            break
        if skipped:
            lines.append(_wide("skip", f"… {skipped:,} equal node{'' if skipped == 1 else 's'} …"))
            skipped = 0
        node = comparison.reference.nodes[row.left] if row.left is not None else comparison.other.nodes[row.right or 0]
        if node.user_source is not None and (source is None or node.user_source[:2] != source[:2]):
            source = node.user_source
            code = f": {_cut(source.code, 300)}" if source.code else ""
            lines.append(_wide("source code", f"{_place(source)}{code}"))
        lines.append(_line(comparison, row, names))
        shown += 1
    if skipped:
        lines.append(_wide("skip", f"… {skipped:,} equal node{'' if skipped == 1 else 's'} …"))
    yield "".join([*lines, "</table>"])


def _rows(comparison: BodyComparison) -> list[_Row]:
    rows: list[_Row] = []
    i = j = 0
    ends = (len(comparison.reference.nodes), len(comparison.other.nodes))
    for next_i, next_j in [*comparison.pairs, ends]:
        only_left, only_right = list(range(i, next_i)), list(range(j, next_j))
        for k in range(max(len(only_left), len(only_right))):
            left = only_left[k] if k < len(only_left) else None
            right = only_right[k] if k < len(only_right) else None
            rows.append(_Row(left, right, True))
        if next_i < ends[0]:
            rows.append(_Row(next_i, next_j, next_i in comparison.changed))
        i, j = next_i + 1, next_j + 1
    return rows


def _line(comparison: BodyComparison, row: _Row, names: list[dict[str, int]]) -> str:
    left = _node_line(comparison.reference, row.left)
    right = _node_line(comparison.other, row.right)
    if row.changed and row.left is not None and row.right is not None:
        cells = _marked(left, right, names, comparison.to_reference)
    else:
        cells = [_escape(left), _escape(right)]
    styles = [
        "code" + (f" {style}" if row.changed and at is not None else "")
        for style, at in (("old", row.left), ("new", row.right))
    ]
    at = ["" if position is None else str(position) for position in (row.left, row.right)]
    return (
        f'<tr><td class="at">{at[0]}</td><td class="{styles[0]}">{cells[0]}</td>'
        f'<td class="at">{at[1]}</td><td class="{styles[1]}">{cells[1]}</td></tr>'
    )


def _node_line(body: Body, position: int | None) -> str:
    if position is None:
        return ""
    node: Node = body.nodes[position]
    return _cut(f"input {node.line}" if node.op == "placeholder" else node.line, MAX_LINE_CHARACTERS)


def _marked(left: str, right: str, names: list[dict[str, int]], to_reference: dict[int, int]) -> list[str]:
    """Both lines in HTML, with the words marked that the other doesn't have. Matched nodes may have other names."""
    words = [_WORD.findall(line) for line in (left, right)]
    if max(map(len, words)) > MAX_MARKED_WORDS:
        return [_escape(left), _escape(right)]
    keys: list[list[str | int]] = [
        [names[0].get(word, word) for word in words[0]],
        [to_reference.get(names[1][word], word) if word in names[1] else word for word in words[1]],
    ]
    pairs = align(keys[0], keys[1])
    same = [{pair[side] for pair in pairs} for side in (0, 1)]
    cells = []
    for side in (0, 1):
        cell = ""
        for number, word in enumerate(words[side]):
            escaped = _escape(word)
            cell += escaped if number in same[side] or word.isspace() else f"<mark>{escaped}</mark>"
        cells.append(cell.replace("</mark><mark>", ""))
    return cells


def _wide(style: str, text: str) -> str:
    return f'<tr class="{style}"><td colspan="4">{_escape(text)}</td></tr>'


def _value(value: str) -> str:
    """One side of a difference; a constant has no backquotes around it."""
    value = _cut(value, MAX_VALUE_CHARACTERS)
    return _with_code(value) if "`" in value or " " in value else f"<code>{_escape(value)}</code>"


def _place(source: Source | None) -> str:
    return "" if source is None else source.place


def _short_place(source: Source) -> str:
    """The last two parts of the path: the whole of it is in the list of differences."""
    parts = source.file.replace("\\", "/").split("/")
    return f"{'/'.join(parts[-2:])}:{source.line}"


def _list(items: Iterable[str]) -> str:
    """Items are HTML."""
    inside = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{inside}</ul>" if inside else ""


def _with_code(text: str) -> str:
    """Escapes text in which backquotes stand around code."""
    parts = _escape(text).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts)
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def _cut(text: str, most_characters: int) -> str:
    return text if len(text) <= most_characters else f"{text[:most_characters]}…"


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


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
