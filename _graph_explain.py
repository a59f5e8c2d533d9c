# SPDX-License-Identifier: Apache-2.0
"""The command `explain`: what differs between graphs that were printed or logged, for people who have only those.

    python handshake.py explain rank0.txt rank1.txt --html report.html

A file for each rank, or one whose lines begin with the rank. The graphs of two ranks are matched in order: first those
that are equal, then, between these, those that are alike. `_graph_report` says how matched graphs differ. Groups that a
fingerprint by role takes for one, as the rows of a mesh, are one here too, and a line says so.
"""

import argparse
import functools
import gc
import io
import itertools
import json
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

if __package__:
    from ._graph import group_layout
    from ._graph_diff import Body, Graph, Node, describe_size, gaps, nested_body, node_content, number_of
    from ._graph_plan import align
    from ._graph_report import Context, Report, Variant, explain, page, write_file
    from ._graph_text import read_blocks
    from ._vocabulary import format_ranks
else:
    from _graph import group_layout
    from _graph_diff import Body, Graph, Node, describe_size, gaps, nested_body, node_content, number_of
    from _graph_plan import align
    from _graph_report import Context, Report, Variant, explain, page, write_file
    from _graph_text import read_blocks
    from _vocabulary import format_ranks

# Reports, graphs that only some ranks have, and names of files that the text shows: a screen or two for each report.
MAX_SHOWN = 8
MAX_LINE_CHARACTERS = 2**28  # a longer line is read as several; the record of a graph of 100,000 nodes has 40 MB
LARGE_CHARACTERS = 64 * 2**20  # for a file as large as this a smaller setting is named
_BLOCK = 2**22  # characters that are read at a time
_FIRST_BYTES = 2**16  # of a file, in which it shows whether it is text
# Between graphs that are equal, those of two files are tried against one another that are at most this many places
# apart. How alike they must be (part of the operations that both have) to be taken for the same graph:
_MAX_PLACES_APART = 60
_MIN_LIKENESS = 0.3
# A graph is a part of another, larger one, as after a graph break, if that has this part of its operations.
_MIN_PART = 0.8
_MIN_PART_OPERATIONS = 4


class _FileError(Exception):
    """A file that can't be used; the text says which and why."""


class _RankFile(NamedTuple):
    """The graphs of a rank, and the file that they are from."""

    path: str
    rank: int
    graphs: list[Graph]


# The graphs that match, by rank: each with its number in the file, and one for its content, the same for equal graphs.
_Slot = dict[int, tuple[int, int, Graph]]


def explain_files(paths: Sequence[str], html_path: str | None = None, json_path: str | None = None) -> int:
    """Compares the graphs of several ranks, and prints the reports.

    A file's rank is the one that it says itself (`# handshake: rank = 3`), else the one with which its lines begin
    (`[rank3]:`; there may be several), else the number in its name (`rank12.txt`) or its folder's (`rank12/graph.txt`),
    else its place among the arguments. If two would have the same rank, all are numbered by their place, and a line
    says so. The graphs of the ranks are matched in order; a rank may have some that others lack.

    Args:
        paths: the files.
        html_path: where to write a page too; none of the files.
        json_path: where to write the reports as JSON too, one a line, each as a job writes it; `-` stands for the
            standard output, in place of the text.

    Returns:
        0 if all ranks have the same graphs, 1 if they differ, 2 if the files can't be compared or a report can't be
        written (stderr says why).
    """
    try:
        for output, path in itertools.product(filter(None, (html_path, json_path)), paths):
            if os.path.exists(output) and os.path.exists(path) and os.path.samefile(output, path):
                raise _FileError(f"the report would overwrite {path}: write it to another file")
        gc.disable()  # of millions of small objects it looks through again and again, none is in a cycle
        files, remarks = _read_files(paths)
        status, lines, heading, above, reports = _compare(files, remarks)
    except _FileError as error:
        return _fail(str(error))
    except (RecursionError, MemoryError) as error:
        return _fail(f"the graphs are nested too deep or too large to compare: {type(error).__name__}: {error}")
    finally:
        gc.enable()
        _say("")
    facts = (report.facts | {"notes": [*above, *report.facts["notes"]]} for report in reports)
    as_json = "\n".join(map(json.dumps, facts))
    text = as_json if json_path == "-" else "\n".join(lines)
    for output in filter(None, (html_path, json_path if json_path != "-" else None)):
        try:
            write_file(output, page(reports, heading, above) if output == html_path else f"{as_json}\n")
        except OSError as error:
            status = _fail(f"the report could not be written to {output}: {error.strerror}")
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


def _say(text: str) -> None:
    """Says on a terminal how far the work is; the next text takes its place."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _compare(files: list[_RankFile], remarks: list[str]) -> tuple[int, list[str], str, list[str], list[Report]]:
    """Exit status, lines of text, heading, what stands above the reports, and these: of one graph if none differs."""
    unseen = sorted(set().union(*(_unseen(graph) for file in files for graph in file.graphs)))
    if unseen:
        remarks.append(
            f"Note: these texts do not hold {', '.join(unseen[:4])}{' …' if len(unseen) > 4 else ''}: that is not "
            "compared. Print the graphs with graph_text, or compare their fingerprints."
        )
    cut = [(file, graph) for file in files for graph in file.graphs if graph.is_cut]
    remarks[:0] = [
        f"Note: the graph at line {graph.first_line} of {file.path} ({format_ranks([file.rank])}) is cut off. What it "
        "lacks at its end is not compared."
        for file, graph in cut[:MAX_SHOWN]
    ]
    remarks += _unite_groups(files)[:MAX_SHOWN]
    slots, extra = _match_files(files)
    ranks, graphs = [file.rank for file in files], number_of(len(slots), "graph")
    # What a rank whose log is cut off would have had next is not known.
    known = {
        file.rank: max(number for number, slot in enumerate(slots) if file.rank in slot)
        for file, graph in cut
        if graph is file.graphs[-1]
    }
    notes = []
    for number, slot in enumerate([*slots, *extra]):
        if lacking := [rank for rank in ranks if rank not in slot and number <= known.get(rank, number)]:
            notes.append(_only_some(slot, lacking))
    if len(notes) > MAX_SHOWN:
        notes[MAX_SHOWN:] = [f"and {len(notes) - MAX_SHOWN} more graphs that only some ranks have (MAX_SHOWN)"]
    if notes:
        notes.append(
            "A graph that only some ranks have comes from a graph break or a recompile on these ranks "
            "(TORCH_LOGS=graph_breaks,recompiles says where), from a branch on the rank, or from a compile cache that "
            "is warm on the other ranks."
        )
    compared = {number: _report(slot, number, len(slots)) for number, slot in enumerate(slots) if len(slot) > 1}
    reports = []
    for number, report in compared.items():
        is_cut = any(graph.is_cut for *_, graph in slots[number].values())  # then what is there may be the same
        if report.differences or (len(report.variants) > 1 and not is_cut):
            reports.append(report)
    heading = f"{format_ranks(ranks)}: {len(reports)} of {graphs} differ" if len(slots) > 1 or notes else ""
    lines = [*remarks, *filter(None, [heading]), *notes]
    for report in reports[:MAX_SHOWN]:
        lines += [*([""] if lines else []), report.text().rstrip()]
    if len(reports) > MAX_SHOWN:
        lines.append(f"and {len(reports) - MAX_SHOWN} more graphs that differ (MAX_SHOWN)")
    if not reports and not notes:
        as_far = ", as far as these texts tell" if unseen or cut else ""
        lines.append(f"{format_ranks(ranks)} have the same {graphs}{as_far}")
    return int(bool(reports or notes)), lines, heading, [*remarks, *notes], reports or [*compared.values()][:1]


def _bodies(body: Body) -> Iterator[Body]:
    yield body
    for nested in body.bodies.values():
        yield from _bodies(nested)


def _unseen(graph: Graph) -> set[str]:
    """What a text without facts doesn't say, and no fingerprint stands for."""
    unseen = set()
    for body in _bodies(graph.body) if not graph.fingerprint else ():
        for node in body.nodes:
            if node.group is not None and node.group not in graph.groups:
                unseen.add(f"the ranks of group {node.group!r}")
            is_value = node.op == "get_attr" and node.constant is None and not nested_body(node, body)
            if is_value and not graph.groups and graph.rank is None:
                unseen.add(f"the value of {node.target}")
    return unseen


def _read_files(paths: Sequence[str]) -> tuple[list[_RankFile], list[str]]:
    """The graphs, by rank, and what there is to say about the files."""
    files: list[_RankFile] = []
    remarks: list[str] = []
    for path in paths:
        try:
            files += _read_file(path, len(files), remarks)
        except OSError as error:
            raise _FileError(f"{path} can't be read: {error.strerror or error}") from error
        except ValueError as error:
            raise _FileError(f"{path}: {error}") from error
    if len(files) < 2:
        raise _FileError(
            "there are graphs of one rank only: at least two files are needed, one for each rank, or a log whose lines "
            "begin with the rank, as `[rank0]:`"
        )
    rank, count = Counter(file.rank for file in files).most_common(1)[0]
    if count == 1:
        return sorted(files, key=lambda file: file.rank), remarks
    numbered = ", ".join(f"rank {number} is {file.path}" for number, file in enumerate(files[:MAX_SHOWN]))
    remark = (
        f"Note: {count} files are of rank {rank}, so all are numbered in the order given: {numbered}"
        f"{' …' if len(files) > MAX_SHOWN else ''}. Names such as rank0.txt, rank1.txt say whose a file is."
    )
    return [file._replace(rank=number) for number, file in enumerate(files)], [*remarks, remark]


def _read_file(path: str, number: int, remarks: list[str]) -> list[_RankFile]:
    graphs_of = read_blocks(_blocks(path, remarks))
    if not any(graphs_of.values()):
        raise _FileError(
            f"{path} holds no graph: expected the text of GraphModule.print_readable() or of graph_record, or a log "
            "with `--- [BEGIN GRAPH MODULE: …] ---` lines"
        )
    if lacking := [rank for rank, graphs in graphs_of.items() if not graphs and rank is not None]:
        remarks.append(f"Note: {path} has lines of {format_ranks(lacking)}, but no graph of theirs.")
    name = os.path.splitext(os.path.basename(path))[0]
    named = re.findall(r"(?i)rank\D?(\d+)", path) or re.findall(r"\d+", name)
    in_name = [int(digits) for digits in named[-1:] if len(digits) <= 6]  # a longer number is a date or an id
    files: list[_RankFile] = []
    for tag, graphs in ((tag, graphs) for tag, graphs in graphs_of.items() if graphs):
        ranks = [graph.rank for graph in graphs if graph.rank is not None] + (in_name if tag is None else [tag])
        files.append(_RankFile(path, ranks[0] if ranks else number + len(files), graphs))
    return files


def _blocks(path: str, remarks: list[str]) -> Iterator[str]:
    """A file in blocks of whole lines. It is read once."""
    characters, is_whole = 0, True
    with io.BufferedReader(io.FileIO(path), _BLOCK) as file:
        first, size = file.peek()[:_FIRST_BYTES], os.fstat(file.fileno()).st_size
        if not first or b"\0" in first:
            raise _FileError(f"{path} is {'not a text file (it holds null bytes)' if first else 'empty'}")
        text = io.TextIOWrapper(file, "utf-8-sig", "backslashreplace", newline="\n")
        while block := text.read(_BLOCK) + text.readline(MAX_LINE_CHARACTERS):
            _say(f"reading {path}: {characters >> 20} of {size >> 20} MiB")
            characters += len(block)
            is_whole = is_whole and not ("across cluster]" in block and re.search(r"\[repeated \d+x across", block))
            yield block
    if not is_whole:
        remarks.append(
            f"Note: {path} lacks lines that several processes wrote (`[repeated 3x across cluster]`): graphs may lack "
            "some. Set RAY_DEDUP_LOGS=0, which switches that off, or log each rank to a file of its own."
        )
    if characters >= LARGE_CHARACTERS:
        remarks.append(f"Note: {path} is large. TORCH_LOGS=aot_graphs logs the graphs and little else.")


def _unite_groups(files: list[_RankFile]) -> list[str]:
    """Gives one name to groups that a fingerprint by role takes for one, as the rows of a mesh; and says which.

    A group whose ranks no text tells has those that use it.
    """
    users: dict[str, list[int]] = {}
    for file in files:
        nodes = (node for graph in file.graphs for body in _bodies(graph.body) for node in body.nodes)
        for name in {node.group for node in nodes if node.group is not None}:
            users.setdefault(name, []).append(file.rank)
    roles: dict[Any, dict[int, list[tuple[str, tuple[int, ...]]]]] = {}  # the groups of each rank, by role
    for file in files:
        known = {name: group for graph in file.graphs for name, group in graph.groups.items()}
        groups = {name: known.get(name, (tuple(ranks), "")) for name, ranks in users.items() if file.rank in ranks}
        kinds = Counter((len(ranks), description) for ranks, description in groups.values())
        for name, (ranks, description) in groups.items():
            is_only = description not in ("", "undefined") and kinds[len(ranks), description] == 1
            if layout := "only one" if is_only else group_layout(ranks):
                role = (len(ranks), description, layout)
                roles.setdefault(role, {}).setdefault(file.rank, []).append((name, ranks))
    remarks = []
    for (size, *_), groups_of in roles.items():
        alike = list(dict.fromkeys(group for of_rank in groups_of.values() for group in of_rank))
        if len(alike) > 1 and all(len(of_rank) == 1 for of_rank in groups_of.values()):
            united = f"{format_ranks(alike[0][1])} and {number_of(len(alike) - 1, 'group')} like it"
            for file in (file for file in files if file.rank in groups_of):
                for body in (body for graph in file.graphs for body in _bodies(graph.body)):
                    name = groups_of[file.rank][0][0]
                    body.nodes[:] = [_with_group(node, united) if node.group == name else node for node in body.nodes]
            names = ", ".join(repr(name) for name, _ in alike[:4]) + (" …" if len(alike) > 4 else "")
            lying = f"{len(alike)} groups of {number_of(size, 'rank')} that lie alike ({names})"
            remarks.append(f"Note: {lying} are taken for one, as by fingerprints that name groups by role.")
    return remarks


@functools.lru_cache(2**16)
def _with_group(node: Node, name: str) -> Node:
    quoted = (f"'{node.group}'", f'"{node.group}"')
    arguments = [each._replace(text=f"'{name}'") if each.text in quoted else each for each in node.arguments]
    return node._replace(group=name, arguments=tuple(arguments))


def _match_files(files: list[_RankFile]) -> tuple[list[_Slot], list[_Slot]]:
    """The graphs of the reference file, which is the one that most ranks have, and those that it lacks."""
    numbers: dict[Any, int] = {}  # the same for nodes, and graphs, that are the same
    known: dict[int, int] = {}  # those of nodes, by identity

    def content(graph: Graph) -> int:
        """All but the names of groups that were united."""
        row = []
        for node in graph.body.nodes:
            # What the name of a nested body stands for is not in the node.
            if id(node) not in known or (node.op == "get_attr" and graph.body.bodies):
                known[id(node)] = numbers.setdefault(node_content(node, graph.body), len(numbers))
            row.append(known[id(node)])
        used = {node.group for body in _bodies(graph.body) for node in body.nodes}
        groups = sorted((name, group) for name, group in graph.groups.items() if name in used)
        return numbers.setdefault((tuple(row), tuple(groups)), len(numbers))

    contents = {file.rank: [content(graph) for graph in file.graphs] for file in files}
    sequences = Counter(map(tuple, contents.values()))
    reference = max(files, key=lambda file: (sequences[tuple(contents[file.rank])], -file.rank))
    slots: list[_Slot] = [{} for _ in reference.graphs]
    extra: dict[tuple[int, int], _Slot] = {}
    operations = {
        number: Counter(node.target or node.op for node in graph.body.nodes if node.op in ("call", "text"))
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
        for j, (graph, of_graph) in enumerate(zip(file.graphs, contents[file.rank], strict=True)):
            last = slot_of.get(j, last)
            slot = slots[last] if j in slot_of else extra.setdefault((last, of_graph), {})
            slot[file.rank] = (j, of_graph, graph)
    return slots, list(extra.values())


def _match_graphs(a: list[int], b: list[int], operations: dict[int, Counter[Any]]) -> list[tuple[int, int]]:
    """The pairs of graphs, ascending in both, that are the same, or alike at the same place of the sequence."""
    pairs = align(a, b)
    for start, stop, b_start, b_stop in list(gaps(pairs, len(a), len(b))):
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
    all_have = all(graph.fingerprint for *_, graph in slot.values())
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for rank, (_, content, graph) in slot.items():
        ranks_of.setdefault((content, graph.fingerprint if all_have else ""), []).append(rank)
    variants = [Variant(ranks, key[1], slot[ranks[0]][2]) for key, ranks in ranks_of.items()]
    variants.sort(key=lambda variant: (-len(variant.ranks), variant.ranks))

    def in_order() -> Iterator[Variant]:
        for done, variant in enumerate(variants, 1):
            _say(f"graph {number} of {total}: comparing variant {done} of {len(variants)}")
            yield variant

    return explain(in_order(), Context(title=f"graph {number} of {total}" if total > 1 else ""))


def _only_some(slot: _Slot, lacking: list[int]) -> str:
    having = sorted(slot)
    number, _, graph = slot[having[0]]
    source = next((node.user_source for node in graph.body.nodes if node.user_source is not None), None)
    first = f"; first line {source.place}: {source.code}" if source is not None else ""
    return (
        f"Only {format_ranks(having)} {'has' if len(having) == 1 else 'have'} this graph, {format_ranks(lacking)} "
        f"{'does' if len(lacking) == 1 else 'do'} not: graph {number} of rank {having[0]}, at line "
        f"{graph.first_line} of its file ({describe_size(graph.body)}{first})"
    )


def main(arguments: Sequence[str]) -> int:
    """The command line, `explain FILE … [--html FILE] [--json FILE]`; returns the exit status, that of `explain_files`.

    Raises:
        SystemExit: with 2 if the arguments are wrong, with 0 if they ask for help.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may have no "·"
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.handshake" if __package__ else "python handshake.py",
        usage="%(prog)s explain FILE FILE … [--html FILE] [--json FILE]",
        description="Says how the graphs of several ranks differ, and what to change.",
        epilog="A file may hold several ranks, if its lines begin with them ([rank3]:). Else its rank is the one that "
        "it says itself, else the number in its path (rank12.txt), else its place among the files. Exit status: 0 the "
        "graphs are the same, 1 they differ, 2 they can't be compared.",
    )
    parser.add_argument("command", choices=["explain"], metavar="explain", help="the only command")
    help_text = "the ranks' graphs: print_readable, graph_record, or a log that holds them"
    parser.add_argument("files", nargs="+", metavar="FILE", help=help_text)
    parser.add_argument("--html", metavar="FILE", help="write the report as a page too")
    parser.add_argument("--json", metavar="FILE", help="write the reports as JSON too; - for JSON in place of the text")
    options = parser.parse_args(arguments)
    return explain_files(options.files, options.html, options.json)
