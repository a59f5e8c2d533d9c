# SPDX-License-Identifier: Apache-2.0
"""The command `explain`: files of several ranks, which of their graphs belong together, and what is said."""

import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from layout import PACKAGE, TESTS, child_environment, load, module_file
from printed_graphs import VOCABULARY, assert_page_is_self_contained, big_text, small, without_rank

_graph_text = load("_graph_text")


def explain_files(tmp_path, files, html=None, times=1):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = _graph_text.explain_files([str(tmp_path / name) for name in files] * times, html)
    return status, out.getvalue()


def log_of(*texts):
    lines = ["starting"]
    for number, text in enumerate(texts):
        begin, end = (f"--- [{word} GRAPH MODULE: {number:032x}] ---" for word in ("BEGIN", "END"))
        lines += ["Handshake failed for graph module:", begin, *text.splitlines(), end, f"step {number}"]
    return "\n".join(f"W1130 03:22:11.{number} 7 file.py:12] {line}" for number, line in enumerate(lines))


def test_files_of_ranks_are_compared(tmp_path):
    status, out = explain_files(tmp_path, {f"rank{rank}.txt": VOCABULARY[rank] for rank in range(4)})
    assert status == 1
    assert "18992 · (rank + 1)" in out and "4 different graphs" in out


def record_of(text):
    (graph,) = _graph_text.parse(text)
    groups = {"0": {"ranks": [[0, 4, 1]], "description": "default_pg"}}
    body = {"name": graph.body.name, "nodes": [node._asdict() for node in graph.body.nodes], "bodies": {}}
    return json.dumps({"handshake_graph": 1, "rank": graph.rank, "groups": groups, "body": body})


def test_records_are_compared_with_one_another_and_with_texts(tmp_path):
    records = [record_of(text) for text in VOCABULARY]
    status, out = explain_files(tmp_path, {f"graph-{number}.json": record for number, record in enumerate(records)})
    assert status == 1
    assert "18992 · (rank + 1)" in out and "4 different graphs" in out
    # A log with one record a line, and one that holds the printed graphs.
    mixed = {"rank1.log": "\n".join([records[1], records[2]]), "2.log": log_of(VOCABULARY[1], VOCABULARY[2])}
    mixed["2.log"] = mixed["2.log"].replace("rank = 1", "rank = 5").replace("rank = 2", "rank = 5")
    status, out = explain_files(tmp_path, mixed)
    assert (status, out.splitlines()[-1]) == (0, "ranks 1, 5 have the same 2 graphs")


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank12.txt", "rank8.txt"], "ranks 8, 12"),
        (["job7_rank_0.log", "job7_rank_1.log"], "ranks 0-1"),
        (["a.txt", "b.txt"], "ranks 0-1"),
    ],
)
def test_the_rank_comes_from_the_files_name_or_its_place(tmp_path, names, ranks):
    _, out = explain_files(tmp_path, dict(zip(names, map(without_rank, VOCABULARY), strict=False)))
    assert out.startswith(f"{ranks} have 2 different graphs")


def test_a_rank_with_a_graph_more_than_the_others(tmp_path):
    other = (TESTS / "data" / "aot_dynamic_cond.txt").read_text()
    more = (TESTS / "data" / "dynamo_checkpoint.txt").read_text()
    html = tmp_path / "report.html"
    files = {
        "rank0.log": log_of(without_rank(VOCABULARY[0]), other),
        "rank1.log": log_of(without_rank(VOCABULARY[1]), other),
        "rank2.log": log_of(more, without_rank(VOCABULARY[2]), other),
    }
    status, out = explain_files(tmp_path, files, str(html))
    assert status == 1
    assert "ranks 0-2: 2 of 2 graphs differ" in out or "ranks 0-2: 1 of 2 graphs differ" in out
    assert "Only rank 2 has this graph, ranks 0-1 do not: graph 0 of rank 2" in out
    assert "18992 · rank" in out and "compile cache" in out
    assert_page_is_self_contained(html.read_text())
    assert "Only rank 2 has this graph" in html.read_text()


def test_the_sequence_that_most_ranks_have_is_the_one_to_compare_with(tmp_path):
    more = (TESTS / "data" / "dynamo_checkpoint.txt").read_text()
    files = {f"rank{rank}.log": log_of(without_rank(VOCABULARY[0])) for rank in (1, 2)}
    status, out = explain_files(tmp_path, {"rank0.log": log_of(without_rank(VOCABULARY[0]), more)} | files)
    assert status == 1
    assert out.startswith("ranks 0-2: 0 of 1 graph differ\nOnly rank 0 has this graph, ranks 1-2 do not: graph 1 of ")


def test_a_rank_that_has_many_more_graphs_first(tmp_path):
    def text(number, rank):
        return small(f"z = x.sin()\ny = z.op_{number}()\nw = y * {number + rank}.5\nreturn (w,)")

    first = [small(f"y = x.a_{number}().b_{number}()\nreturn (y,)") for number in range(80)]
    files = {"rank0.log": log_of(*(text(number, 0) for number in range(3)))}
    files["rank1.log"] = log_of(*first, *(text(number, 1) for number in range(3)))
    status, out = explain_files(tmp_path, files)
    assert status == 1
    assert out.startswith("ranks 0-1: 3 of 3 graphs differ\n")
    assert "and 72 more graphs that only some ranks have" in out


def test_many_graphs_that_all_differ_are_matched_in_order(tmp_path):
    """More than are tried against one another at a time; one rank has one more in the middle."""

    def text(number, rank):
        return small(f"z = x.sin()\nw = z.op_{number % 7}()\ny = w * {number}.5\nv = y - {18992 * rank}\nreturn (v,)")

    numbers = range(150)
    files = {f"rank{rank}.log": log_of(*(text(number, rank) for number in numbers)) for rank in (0, 1)}
    more = [*(text(number, 2) for number in numbers[:70]), small("y = x.a().b().c()\nreturn (y,)")]
    more += [text(number, 2) for number in numbers[70:]]
    status, out = explain_files(tmp_path, files | {"rank2.log": log_of(*more)})
    assert status == 1
    assert "ranks 0-2: 150 of 150 graphs differ" in out
    assert out.count("Only rank 2 has this graph, ranks 0-1 do not: graph 70 of rank 2") == 1
    assert "= 18992 · rank" in out


def test_a_graph_break_in_one_rank_s_file(tmp_path):
    """One rank has two graphs where the other has one that is both."""
    whole = big_text(6)
    lines = whole.splitlines()
    cut = next(number for number, line in enumerate(lines) if "w8)" in line) - 1
    name = lines[cut - 1].split(":")[0].strip()
    first = [*lines[:cut], f"        return ({name},)"]
    second = [lines[0], lines[1].replace("(self, x", f"(self, {name}"), *lines[cut:]]
    status, out = explain_files(tmp_path, {"rank0.txt": whole, "rank1.txt": "\n".join([*first, *second])})
    assert status == 1
    assert "Only rank 1 has this graph" in out and "TORCH_LOGS=graph_breaks" in out
    assert "What differs" in out and "collectives among them" in out


def test_a_graph_that_is_the_short_beginning_of_another_is_compared_with_it(tmp_path):
    whole = big_text(8)
    lines = whole.splitlines()
    cut = next(number for number, line in enumerate(lines) if "w5)" in line) - 1
    inputs = lines[1].partition(", w5")[0] + "):"
    first = [lines[0], inputs, *lines[2:cut], f"        return ({lines[cut - 1].split(':')[0].strip()},)"]
    status, out = explain_files(tmp_path, {"rank0.txt": whole, "rank1.txt": "\n".join(first)})
    assert status == 1
    assert "graph break" in out and "What differs, in 1 place" in out


def test_equal_files_are_said_to_be_equal(tmp_path):
    status, out = explain_files(
        tmp_path, {"rank0.txt": VOCABULARY[0], "b1.txt": VOCABULARY[0].replace("rank = 0", "rank = 1")}
    )
    assert (status, out) == (0, "ranks 0-1 have the same 1 graph\n")


def test_values_that_are_not_in_the_texts_are_not_said_to_be_the_same(tmp_path):
    text = small("c = self._tensor_constant0\ny = x + c\nreturn (y,)")
    page = tmp_path / "page.html"
    status, out = explain_files(tmp_path, {"rank0.txt": text, "rank1.txt": text}, str(page))
    assert status == 0
    assert out.endswith("ranks 0-1 have the same 1 graph, as far as these texts tell\n")
    assert "do not hold the values of _tensor_constant0" in out and "graph_text" in out and "fingerprints" in out
    assert "values of _tensor_constant0" in page.read_text()
    # Not where the values, or the fingerprints, are there.
    known = small("c = self._tensor_constant0\ny = x + c\nreturn (y,)", "# handshake: constant _tensor_constant0 = [1]")
    parameter = small("c = self.weight\ny = x + c\nreturn (y,)", "# handshake: group 0 = ranks 0-1; size 2")
    for same in (known, parameter, log_of(text), without_rank(VOCABULARY[0])):
        assert explain_files(tmp_path, {"a.txt": same, "b.txt": same}) == (0, "ranks 0-1 have the same 1 graph\n")


def test_only_a_fingerprint_is_one(tmp_path):
    """Other labels between the marks, and a fingerprint that only one side has, say nothing."""
    log = log_of(without_rank(VOCABULARY[0]))
    fingerprint = f"{0:032x}"
    for label, other in (("fw", "fw of rank 1"), ("step-1", "step-2"), (fingerprint, "fw")):
        files = {"rank0.log": log.replace(fingerprint, label), "rank1.log": log.replace(fingerprint, other)}
        assert explain_files(tmp_path, files) == (0, "ranks 0-1 have the same 1 graph\n")
    files = {"rank0.log": log, "rank1.txt": without_rank(VOCABULARY[0])}
    assert explain_files(tmp_path, files)[0] == 0
    for other in (f"{1:032x}", f"unhashable-{1:032x}"):
        files = {"rank0.log": log, "rank1.log": log.replace(fingerprint, other)}
        assert explain_files(tmp_path, files)[0] == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"rank0.txt": VOCABULARY[0]}, "at least two files"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": ""}, "rank1.txt is empty"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": '{"handshake_graph": 2}'}, "rank1.txt: not a valid graph record"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": "Traceback (most recent call last):"}, "rank1.txt holds no graph"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": bytes(range(256)) * 9}, "rank1.txt is not a text file"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": random.Random(1).randbytes(999).replace(b"\0", b"")}, "no graph"),
        (
            {"rank0.txt": VOCABULARY[0], "rank1.txt": (TESTS / "data" / "aot_dynamic_cond.txt").read_text()},
            "have no graph in common",
        ),
    ],
)
def test_files_that_cannot_be_compared(tmp_path, files, message, capsys):
    status, out = explain_files(tmp_path, files)
    assert (status, out) == (2, "")
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    good = tmp_path / "rank0.txt"
    good.write_text(VOCABULARY[0])
    for path, why in ((tmp_path / "missing.txt", "No such file"), (tmp_path, "Is a directory")):
        assert _graph_text.main(["explain", str(good), str(path)]) == 2
        assert f"{path} can't be read: {why}" in capsys.readouterr().err
    assert _graph_text.main(["explain", str(good), "/dev/zero"]) == 2
    assert "/dev/zero is not a text file" in capsys.readouterr().err
    monkeypatch.setattr(_graph_text, "MAX_FILE_BYTES", 5000)
    (tmp_path / "large.txt").write_text("y" * 5001)
    assert _graph_text.main(["explain", str(good), str(tmp_path / "large.txt")]) == 2
    assert "large.txt is larger than" in capsys.readouterr().err


@pytest.fixture
def two_files(tmp_path):
    paths = [tmp_path / "rank0.txt", tmp_path / "rank1.txt"]
    for path, text in zip(paths, VOCABULARY, strict=False):
        path.write_text(text)
    return [str(path) for path in paths]


@pytest.mark.parametrize("name", ["missing/x.html", ".", "x" * 300])
def test_a_page_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path, two_files, name, capsys):
    before = sorted(tmp_path.iterdir())
    page = f"{tmp_path}/{name}"
    assert _graph_text.main(["explain", *two_files, "--html", page]) == 2
    captured = capsys.readouterr()
    assert f"could not be written to {page}: " in captured.err and ".part" not in captured.err
    assert "18992 · rank" in captured.out, "the text is there all the same"
    assert sorted(tmp_path.iterdir()) == before


def test_a_device_is_written_as_it_is_and_stays_one(two_files, capsys):
    assert _graph_text.main(["explain", *two_files, "--html", "/dev/full"]) == 2
    assert "could not be written to /dev/full: No space left" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("alias", ["itself", "symlink", "hard link", "dots"])
def test_the_page_never_takes_the_place_of_an_input(tmp_path, two_files, alias, capsys):
    page = tmp_path / "page.html"
    if alias == "symlink":
        page.symlink_to(two_files[1])
    elif alias == "hard link":
        page.hardlink_to(two_files[1])
    else:
        page = two_files[1] if alias == "itself" else f"{tmp_path}/../{tmp_path.name}/rank1.txt"
    assert _graph_text.main(["explain", *two_files, "--html", str(page)]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert Path(two_files[1]).read_text() == VOCABULARY[1]


def test_a_page_of_before_is_replaced_also_through_a_link(tmp_path, two_files):
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    assert _graph_text.main(["explain", *two_files, "--html", str(tmp_path / "link.html")]) == 1
    assert (tmp_path / "link.html").is_symlink()
    assert_page_is_self_contained((tmp_path / "real.html").read_text())


def test_two_files_of_one_rank_are_told_apart_by_their_place(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    page = tmp_path / "page.html"
    status, out = explain_files(tmp_path, {"a/rank3.txt": VOCABULARY[0], "b/rank3.txt": VOCABULARY[0]}, str(page))
    assert status == 0
    for shown in (out, page.read_text()):
        assert f"2 files are of rank 0, so all are numbered in the order given: rank 0 is {tmp_path}/a/rank3" in shown
        assert f"rank 1 is {tmp_path}/b/rank3.txt" in shown
    assert "ranks 0-1 have the same 1 graph" in out
    # Also the very same file.
    assert "ranks 0-1 have the same 1 graph" in explain_files(tmp_path, {"x.txt": VOCABULARY[0]}, times=2)[1]


def test_a_date_in_a_name_is_no_rank(tmp_path):
    files = {f"dump-2024113000000{rank}.txt": without_rank(VOCABULARY[rank]) for rank in (0, 1)}
    assert explain_files(tmp_path, files)[1].startswith("ranks 0-1 have 2")


def run(*arguments, stdout=subprocess.PIPE):
    """The command that a user types, in the layout under test, in a terminal that has ASCII only."""
    module = ["-m", f"{PACKAGE}.handshake"] if PACKAGE else [str(module_file("handshake"))]
    return subprocess.run(
        [sys.executable, *module, *arguments], env=child_environment(PYTHONIOENCODING="ascii"),
        stdout=stdout, stderr=subprocess.PIPE, timeout=60,
    )  # fmt: skip


def test_the_command_line(two_files):
    differ = run("explain", *two_files)
    assert (differ.returncode, differ.stderr) == (1, b"") and rb"= 18992 \xb7 rank" in differ.stdout
    # `| head` has gone before anything is written.
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        gone = run("explain", *two_files, stdout=closed)
    assert (gone.returncode, gone.stderr) == (1, b"")
    with open("/dev/full", "wb") as full:
        no_room = run("explain", *two_files, stdout=full)
    assert no_room.returncode == 2
    assert no_room.stderr.splitlines() == [b"error: the report could not be written: No space left on device"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["-h"], 0), (["explain", "-h"], 0), ([], 2), (["explain"], 2), (["rank0.txt", "rank1.txt"], 2)],
)
def test_the_usage_is_what_has_to_be_typed(arguments, status):
    ran = run(*arguments)
    said, silent = (ran.stderr, ran.stdout) if status else (ran.stdout, ran.stderr)
    program = f"python -m {PACKAGE}.handshake" if PACKAGE else "python handshake.py"
    usage = rf"usage: {program} explain FILE FILE \u2026 [--html FILE]"
    assert (ran.returncode, said.decode().splitlines()[0], silent) == (status, usage, b"")


def test_the_page_may_be_named_before_the_files(two_files, tmp_path):
    assert _graph_text.main(["explain", "--html", str(tmp_path / "page.html"), *two_files]) == 1
    assert_page_is_self_contained((tmp_path / "page.html").read_text())


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("[" * 300 + "1" + "]" * 300, ("1", "2")),
        ("[" * 90_000 + "1" + "]" * 90_000, ("1", "2")),
        ("[1], 2", ("[1], 2", "1, [2]")),
        ("'" + "z" * 3_000_000 + "0'", ("0'", "1'")),
        ("[" + "1, " * 100_000 + "7]", ("7", "8")),
        ("- " * 3000 + "1", ("1", "2")),
        ("f(" * 3000 + "1" + ")" * 3000, ("1", "2")),
        ("1" + "0" * 5000 + "1", ("01", "02")),
        ("1e400", ("1e400", "2e400")),
        ("(x, x)", ("(x, x)", "[x, x]")),
        ("((x,), x)", ("((x,), x)", "(x, (x,))")),
        ("{}", ("{}, ", "")),
        ("{'0': 1}", ("'0'", "0")),
        ("<obj at 0x123456>[0]", ("[0]", "[1]")),
        ("<obj>, 'a;  b'", ("b'", "c'")),
        ("k=1, j=2", ("k=1, j=2", "j=2, k=1")),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_whatever_differs_is_shown_to(tmp_path, argument, changed):
    """However long or deep a statement is: nothing is cut before it is compared, and what is shown is not the same."""
    texts = []
    for side in changed:
        head, _, tail = argument.rpartition(changed[0])
        y = f'y: "f32[2]" = torch.f(x, 5, {head}{side}{tail});  x = None'
        texts.append(
            f'class G(torch.nn.Module):\n    def forward(self, x: "f32[2]"):\n        {y}\n        return (y,)\n'
        )
    page = tmp_path / "page.html"
    status, out = explain_files(tmp_path, dict(zip(("a.txt", "b.txt"), texts, strict=True)), str(page))
    assert status == 1
    sides = re.findall(r"\n +rank 0: (.+)\n +rank 1: (.+)", out)
    assert sides and all(left != right for left, right in sides), out
    assert max(map(len, out.splitlines())) < 320
    assert_page_is_self_contained(page.read_text())
