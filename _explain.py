# SPDX-License-Identifier: Apache-2.0
"""The command line `explain`: compares graphs that somebody already has, in one file for each rank.

    python handshake.py explain rank0.txt rank1.txt --html report.html

A file holds one graph as it was printed, or a log with many. The graphs of the ranks are matched in order, as the
nodes of two graphs are: those that are equal first (`_align`), and between them those that are alike. What differs
between the graphs that match is `_divergence`'s; a graph that only some ranks have is named here.
"""

import argparse
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

if __package__:
    from ._align import align
    from ._divergence import MAX_TEXT_VARIANTS, Context, Report, Variant, first_notes, source_text
    from ._divergence_page import page, write_file
    from ._graph_diff import Keys, count_collectives, facts_of_program, gaps, node_keys, number_of, unseen_attributes
    from ._graph_text import Graph, parse
    from ._vocabulary import format_ranks
else:
    from _align import align
    from _divergence import MAX_TEXT_VARIANTS, Context, Report, Variant, first_notes, source_text
    from _divergence_page import page, write_file
    from _graph_diff import Keys, count_collectives, facts_of_program, gaps, node_keys, number_of, unseen_attributes
    from _graph_text import Graph, parse
    from _vocabulary import format_ranks

# Graphs that differ whose reports go to the terminal, of a screen or two each. The page has all.
MAX_TEXT_SLOTS = 8

# A file larger than this is refused: a dump of a graph of 10,000 nodes has 3 MB. Binary files show in the first part.
MAX_FILE_BYTES = 512 * 2**20
_FIRST_BYTES = 2**16

# Graphs of two files that are tried against one another at a time, between graphs that are equal, and how alike they
# must be (part of the operations that both have) to be taken for the same graph.
_MAX_GRAPHS_TRIED = 60
_MIN_LIKENESS = 0.3
# A graph is a part of another, larger one, as after a graph break, if that has this part of its operations.
_MIN_PART = 0.8
_MIN_PART_OPERATIONS = 4


class _FileError(Exception):
    """A file that can't be used; the text says which and why."""


class _RankFile(NamedTuple):
    path: str
    rank: int
    graphs: list[Graph]


# A graph of the reference file, or one that it lacks: {rank: (number of the graph in the rank's file, graph)} of the
# ranks whose graphs match.
_Slot = dict[int, tuple[int, Graph]]


def explain_files(paths: Sequence[str], html_path: str | None = None) -> int:
    """Compares the graphs in files of several ranks, one file a rank, and prints the reports.

    A file's rank is the one it says itself (`# handshake: rank = 3`), else the number in its name (`rank12.txt`) or
    its folder's (`rank12/graph.txt`), else its place among the arguments. If two files would have the same rank, all
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
        files, remarks = _read_files(paths)
        unseen = _unseen(files)
        remarks += unseen
        for path in paths:
            if html_path is not None and os.path.exists(html_path) and os.path.samefile(html_path, path):
                raise _FileError(f"the page would overwrite {path}: give --html another file than {html_path}")
        reports, notes = _match_files(files)
        heading, text = _told(files, reports, remarks, notes, ", as far as these texts tell" if unseen else "")
        differing = [report for report in reports if len(report.variants) > 1]
        html = page(differing or reports[:1], heading, [*remarks, *notes]) if html_path is not None else ""
    except _FileError as error:
        return _fail(str(error))
    except (RecursionError, MemoryError) as error:
        return _fail(f"the graphs are too deep or too large to compare: {type(error).__name__}: {error}")
    status = 1 if differing or notes else 0
    if html_path is not None:
        try:
            write_file(html_path, html)
        except OSError as error:
            status = _fail(f"the page could not be written to {html_path}: {error.strerror}")
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader has seen enough
            status = _fail(f"the report could not be written: {error.strerror}")
    return status


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _told(
    files: Sequence[_RankFile], reports: Sequence[Report], remarks: Sequence[str], notes: Sequence[str], reserve: str
) -> tuple[str, str]:
    """A heading, empty if one graph that all have needs none, and the text on all graphs."""
    differing = [report for report in reports if len(report.variants) > 1]
    ranks = format_ranks(file.rank for file in files)
    heading = f"{ranks}: {len(differing)} of {number_of(len(reports), 'graph')} differ"
    heading = heading if len(reports) > 1 or notes else ""
    lines = [*remarks, *([heading] if heading else []), *first_notes(notes)]
    for report in differing[:MAX_TEXT_SLOTS]:
        lines += [*([""] if lines else []), report.text().rstrip()]
    if len(differing) > MAX_TEXT_SLOTS:
        lines.append(f"and {len(differing) - MAX_TEXT_SLOTS} more graphs that differ (MAX_TEXT_SLOTS)")
    if not differing and not notes:
        lines.append(f"{ranks} have the same {number_of(len(reports), 'graph')}{reserve}")
    return heading, "\n".join(lines) + "\n"


def _read_files(paths: Sequence[str]) -> tuple[list[_RankFile], list[str]]:
    """The files, by rank, and what there is to say about their ranks."""
    if len(paths) < 2:
        raise _FileError(f"at least two files are needed, one for each rank; got {number_of(len(paths), 'file')}")
    files = [_read_file(path, number) for number, path in enumerate(paths)]
    paths_of: dict[int, list[str]] = {}
    for file in files:
        paths_of.setdefault(file.rank, []).append(file.path)
    clash = next(((rank, of_rank) for rank, of_rank in paths_of.items() if len(of_rank) > 1), None)
    if clash is None:
        return sorted(files, key=lambda file: file.rank), []
    numbered = ", ".join(f"rank {number} is {path}" for number, path in enumerate(paths[:MAX_TEXT_VARIANTS]))
    remark = (
        f"Note: {' and '.join(clash[1][:MAX_TEXT_VARIANTS])} are of one rank, {clash[0]}, so the files are numbered in "
        f"the order given: {numbered}{' …' if len(paths) > MAX_TEXT_VARIANTS else ''}. Names such as rank0.txt, "
        "rank1.txt say which rank a file is of."
    )
    return [file._replace(rank=number) for number, file in enumerate(files)], [remark]


def _unseen(files: Sequence[_RankFile]) -> list[str]:
    """A line about values that can't be compared. A fingerprint holds them, and `graph_text` names what is constant."""
    graphs = [graph for file in files for graph in file.graphs if not graph.fingerprint and not graph.facts]
    names = sorted(set().union(*(unseen_attributes(graph.body) for graph in graphs)))
    if not names:
        return []
    shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    return [
        f"Note: these texts don't have the values of {shown}, so they are not compared. Print the graphs by "
        "graph_text, or compare their fingerprints."
    ]


def _read_file(path: str, number: int) -> _RankFile:
    try:
        with open(path, "rb") as file:
            data = file.read(_FIRST_BYTES)
            encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
            if encoding != "utf-16" and b"\0" in data:
                raise _FileError(f"{path} is no text (it holds null bytes)")
            data += file.read(MAX_FILE_BYTES + 1 - len(data))
    except OSError as error:
        raise _FileError(f"{path} can't be read: {error.strerror or error}") from error
    if not data:
        raise _FileError(f"{path} is empty")
    if len(data) > MAX_FILE_BYTES:
        raise _FileError(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MB (MAX_FILE_BYTES)")
    try:
        graphs = parse(data.decode(encoding, "backslashreplace"))
    except ValueError as error:
        raise _FileError(f"{path}: {error}") from error
    if not graphs:
        raise _FileError(
            f"{path} holds no graph: what is looked for is the text of GraphModule.print_readable(), or a log with "
            "`--- [BEGIN GRAPH MODULE: …] ---` lines"
        )
    name = os.path.splitext(os.path.basename(path))[0]
    named = re.findall(r"(?i)rank\D?(\d+)", path) or re.findall(r"\d+", name)
    said = [graph.facts["rank"] for graph in graphs if "rank" in graph.facts]
    # A longer number is a date or an id.
    ranks = [int(text) for text in (*said[:1], *named[-1:]) if re.fullmatch(r"[0-9]{1,6}", text)]
    return _RankFile(path, ranks[0] if ranks else number, graphs)


def _match_files(files: list[_RankFile]) -> tuple[list[Report], list[str]]:
    """The reports, one for each graph that two ranks have, and lines about graphs that only some ranks have."""
    cache: dict[int, Keys] = {}
    numbers: dict[Any, int] = {}
    contents = {file.rank: [_content(graph, cache, numbers) for graph in file.graphs] for file in files}
    sequences = Counter(tuple(of_rank) for of_rank in contents.values())
    reference = max(files, key=lambda file: (sequences[tuple(contents[file.rank])], -file.rank))
    slots: list[_Slot] = [{} for _ in reference.graphs]
    extra: dict[tuple[int, int], _Slot] = {}
    for file in files:
        matched = _match_graphs(reference.graphs, contents[reference.rank], file.graphs, contents[file.rank], cache)
        pairs = {j: i for i, j in matched}
        if not pairs:
            raise _FileError(
                f"rank {file.rank} ({file.path}) and rank {reference.rank} ({reference.path}) have no graph in common"
            )
        last = -1
        for j, graph in enumerate(file.graphs):
            last = pairs.get(j, last)
            slot = slots[pairs[j]] if j in pairs else extra.setdefault((last, contents[file.rank][j]), {})
            slot[file.rank] = (j, graph)
    ranks = [file.rank for file in files]
    notes = [_graph_more(slot, ranks) for slot in [*slots, *extra.values()] if len(slot) < len(files)]
    if notes:
        notes.append(
            "A graph that only some ranks have comes from a graph break or a recompile on these ranks "
            "(TORCH_LOGS=graph_breaks,recompiles says where), from a branch on the rank, or from a compile cache that "
            "is warm on the other ranks."
        )
    total = len(slots)
    reports = [
        _slot_report(slot, f"graph {number} of {total}" if total > 1 else "", contents)
        for number, slot in enumerate(slots)
        if len(slot) > 1
    ]
    return reports, notes


def _content(graph: Graph, cache: dict[int, Keys], numbers: dict[Any, int]) -> int:
    """A number that is the same for graphs that are the same."""
    facts = sorted(facts_of_program(graph.facts).items())
    return numbers.setdefault((tuple(node_keys(graph.body, cache).content), tuple(facts)), len(numbers))


def _match_graphs(
    graphs: list[Graph], contents: list[int], others: list[Graph], other_contents: list[int], cache: dict[int, Keys]
) -> list[tuple[int, int]]:
    """The pairs of graphs of two ranks that are the same, or alike at the same place of the sequence."""
    equal = align(contents, other_contents)
    pairs = list(equal)
    for start, stop, other_start, other_stop in gaps(equal, len(contents), len(other_contents)):
        i, j = start, other_start
        while i < stop and j < other_stop:
            window = graphs[i : min(i + _MAX_GRAPHS_TRIED, stop)]
            other_window = others[j : min(j + _MAX_GRAPHS_TRIED, other_stop)]
            alike = [(i + k, j + m) for k, m in _match_alike(window, other_window, cache)]
            pairs.extend(alike)
            i, j = (alike[-1][0] + 1, alike[-1][1] + 1) if alike else (i + len(window), j + len(other_window))
    return pairs


def _match_alike(graphs: list[Graph], others: list[Graph], cache: dict[int, Keys]) -> list[tuple[int, int]]:
    """The pairs, ascending in both, whose sum of likeness is greatest."""
    bags, other_bags = ([Counter(node_keys(graph.body, cache).weak) for graph in side] for side in (graphs, others))
    likeness = [[_likeness(bag, other) for other in other_bags] for bag in bags]
    # best[i][j]: the greatest sum of the graphs from i and j on.
    best = [[0.0] * (len(others) + 1) for _ in range(len(graphs) + 1)]
    for i in reversed(range(len(graphs))):
        for j in reversed(range(len(others))):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], likeness[i][j] + best[i + 1][j + 1])
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(graphs) and j < len(others):
        if likeness[i][j] and best[i][j] == likeness[i][j] + best[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _likeness(bag: Counter[Any], other: Counter[Any]) -> float:
    """The part of the operations that both have; 0 if that is too little. Inputs and outputs say nothing."""
    ignored = ("placeholder", "output", "get_attr")
    sizes = [sum(count for key, count in each.items() if key not in ignored) for each in (bag, other)]
    common = sum(min(count, other[key]) for key, count in bag.items() if key not in ignored)
    part = common / max(*sizes, 1)
    is_part = common >= _MIN_PART_OPERATIONS and common >= _MIN_PART * min(sizes)
    return part if part >= _MIN_LIKENESS or is_part else 0.0


def _graph_more(slot: _Slot, ranks: list[int]) -> str:
    having = sorted(slot)
    number, graph = slot[having[0]]
    node = next((node for node in graph.body.nodes if node.user_source is not None), None)
    source = f"; first line {source_text(node.user_source)}" if node is not None else ""
    size = f"{number_of(len(graph.body.nodes), 'node')}, {number_of(count_collectives(graph.body), 'collective')}"
    lacking = format_ranks(rank for rank in ranks if rank not in slot)
    return (
        f"Only {format_ranks(having)} {'has' if len(having) == 1 else 'have'} this graph, {lacking} "
        f"{'has' if len(ranks) - len(having) == 1 else 'have'} not: graph {number} of rank {having[0]}, at line "
        f"{graph.first_line} of its file ({size}{source})"
    )


def _slot_report(slot: _Slot, title: str, contents: Mapping[int, list[int]]) -> Report:
    ranks_of: dict[tuple[int, str], list[int]] = {}
    all_have = all(graph.fingerprint for _, graph in slot.values())
    for rank, (number, graph) in slot.items():
        ranks_of.setdefault((contents[rank][number], graph.fingerprint if all_have else ""), []).append(rank)
    variants = [Variant(tuple(ranks), fingerprint, "") for (_, fingerprint), ranks in ranks_of.items()]
    return Report(variants, lambda variant: slot[variant.ranks[0]][1], Context(title=title))


def main(arguments: Sequence[str]) -> int:
    """The command line: `explain FILE FILE … [--html FILE]`.

    Returns:
        The exit status: that of `explain_files`.

    Raises:
        SystemExit: with 2 if the arguments are wrong, with 0 if they ask for help.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may have no "·"
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.handshake" if __package__ else "python handshake.py",
        usage="%(prog)s explain FILE FILE … [--html FILE]",
        description="Says in which way the graphs of several ranks differ, and what to change.",
        epilog="A file's rank is the one that it says itself, else the number in its path (rank12.txt), else its "
        "place among the files. Exit status: 0 the graphs are the same, 1 they differ, 2 they can't be compared.",
    )
    parser.add_argument("command", choices=["explain"], metavar="explain", help="the one command there is")
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="the text of a rank's graphs (print_readable, or a log with graphs), one file for each rank",
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as a page too")
    options = parser.parse_args(arguments)
    return explain_files(options.files, options.html)
