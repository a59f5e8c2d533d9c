# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs, and its figures are what its documentation says. How large they are is not asserted here."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from layout import PACKAGE, PROJECT, child_environment

pytestmark = [pytest.mark.flat_only, pytest.mark.skipif(bool(PACKAGE), reason="bench.py is not vendored")]

if not PACKAGE:
    import bench


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "bench.py"), *arguments]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one short run, with the text that it printed under `text`."""
    file: Path = tmp_path_factory.mktemp("bench") / "report.json"
    ran = _run("--ranks", "2", "--seconds", "1", "--json", str(file))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == "", "no progress where there is no terminal"
    found: dict[str, Any] = json.loads(file.read_text())
    return {**found, "text": ran.stdout}


def test_report_has_the_documented_keys(report: dict[str, Any]) -> None:
    assert report.keys() - {"text"} == {"environment"} | {section.name for section in bench.SECTIONS}
    assert report["environment"].keys() == {"python", "platform", "cpus", "torch", "seconds"}
    for section in bench.SECTIONS:
        assert f"`{section.name}`" in bench.__doc__
        assert section.title in report["text"]
        assert report[section.name], section.name
        for row in report[section.name]:
            assert {column.key for column in section.columns} <= row.keys()


def test_handshake_is_measured_against_the_bare_star(report: dict[str, Any]) -> None:
    [row] = report["handshake"]
    assert row["ranks"] == 2
    assert all(value > 0 for value in row.values())
    assert row["handshake_median_us"] <= row["handshake_p99_us"]
    assert row["star_median_us"] <= row["star_p99_us"]
    assert row["ratio_lower_quartile"] <= row["ratio"] <= row["ratio_upper_quartile"]
    # Back to back: what passes between two answers is one handshake.
    assert 0.1 < row["handshakes_per_s"] * row["handshake_median_us"] / 1e6 < 10


def test_frames_do_not_grow_with_the_world(report: dict[str, Any]) -> None:
    sizes = {(row["frame"], row["world_size"]): row["bytes"] for row in report["frames"]}
    for groups, frame in ((1, "vote on 1 group"), (2, "vote on 2 groups"), (8, "vote on 8 groups")):
        assert 0 < sizes[frame, 4096] == sizes[frame, 8] <= 32 + 16 * groups
    assert 0 < sizes["verdict", 4096] == sizes["verdict", 8] <= 24


def test_calls_and_consensus_have_figures(report: dict[str, Any]) -> None:
    assert all(row["median_us"] > 0 for row in report["calls"])
    [row] = report["consensus"]
    assert row["ranks"] == 4096
    assert row["vote_us"] > 0
    assert row["handshakes_per_s"] > 0
    # Less than one object a vote: what is settled is forgotten.
    assert row["grown_bytes_per_handshake"] < 4096 * 16


def test_collectives_are_measured_where_torch_is_installed(report: dict[str, Any]) -> None:
    [row] = report["collectives"]
    if report["environment"]["torch"] is None:
        assert row["note"] == "torch is not installed"
        assert row["all_reduce_median_us"] is None
    else:
        assert 0 < row["all_gather_object_median_us"] <= row["all_gather_object_p99_us"]
        assert 0 < row["all_reduce_median_us"] <= row["all_reduce_p99_us"]


def test_graphs_are_measured_where_torch_is_installed(report: dict[str, Any]) -> None:
    rows = report["graphs"]
    if report["environment"]["torch"] is None:
        assert [row["note"] for row in rows] == ["torch is not installed"]
        return
    assert all(row["nodes"] > 0 and row["ms"] > 0 for row in rows)
    fingerprints = [row for row in rows if row["what"] == "graph_fingerprint()"]
    splits = [row for row in rows if row["what"] == "split_skinny()"]
    for measured in (fingerprints, splits):
        assert [round(row["nodes"], -3) for row in measured] == [1_000, 10_000]
        assert all(row["ratio"] > 0 for row in measured)
    notes = {row["what"]: row["note"] for row in rows if row["what"].startswith("plan")}
    [few] = {note for what, note in notes.items() if what.endswith("100")}
    assert few == "526 of 526 collectives fat"
    [none] = {note for what, note in notes.items() if what.endswith("all")}
    assert none == "0 of 526 collectives fat"
    # Each plan but the one that isn't one has its split.
    kinds = [row["what"].partition(",")[0] for row in rows]
    assert kinds.count("split by it") == kinds.count("plan") - 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "two"], "no list of numbers"),
        (["--ranks", "1,2"], "from 2 to 64"),
        (["--ranks", "100000"], "from 2 to 64"),
        (["--seconds", "-1"], "between 0 and 3600"),
        (["--seconds", "nan"], "between 0 and 3600"),
        (["--seconds", "soon"], "no number of seconds"),
        (["--ranks", ""], "no list of numbers"),
        (["--json", "no/such/folder/report.json"], "can't write 'no/such/folder/report.json': No such file"),
        (["--json", str(PROJECT)], "Is a directory"),
        (["--jsn", "x"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_file_for_the_json_is_only_tried(tmp_path: Path) -> None:
    """A run that fails leaves no empty file, and an old report as it was."""
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    assert bench._parse_json(str(new)) == new
    assert bench._parse_json(str(old)) == old
    assert not new.exists()
    assert old.read_text() == "{}"


def _read_on(terminal: int) -> bytes:
    """What is shown next; nothing once nobody has the terminal open any more, of which Linux makes an error."""
    assert select.select([terminal], [], [], 30)[0], "nothing happens, or a process was left behind"
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def test_ctrl_c_ends_it_without_a_trace() -> None:
    """On a terminal, where it shows what it does."""
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, str(PROJECT / "bench.py"), "--ranks", "3", "--seconds", "60"],
        env=child_environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while b"s left" not in shown:
            shown += _read_on(ours)
        os.killpg(running.pid, signal.SIGINT)  # to all of its processes, as a terminal does
        while data := _read_on(ours):
            shown += data
        assert running.wait(30) == 128 + signal.SIGINT
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        os.close(ours)
    assert b"handshake, 3 ranks: starting" in shown
    assert shown.rstrip().endswith(b"bench.py: interrupted")
    assert b"Traceback" not in shown


def _child_that_fails(pipe: object) -> None:
    raise ValueError("on purpose")


def test_a_process_that_fails_ends_the_benchmark() -> None:
    with bench.Processes() as processes:
        number = processes.start(_child_that_fails)
        with pytest.raises(bench.BenchError, match="exit code 1"):
            processes.hear(number)


def test_quantiles_are_samples() -> None:
    samples = list(range(1, 101))
    assert bench.quantile(samples, 0.99) == 99
    assert bench.quantile(samples, 0.25) == 25
    assert bench.quantile([7], 0.99) == bench.quantile([7], 0.0) == 7


def test_table_aligns_numbers_right_and_marks_what_is_missing() -> None:
    columns = (bench.Column("name", "what"), bench.Column("n", "µs", 1))
    assert bench.format_table(columns, [{"name": "a", "n": 12345.67}, {"name": "bcdef", "n": None}]) == (
        "what         µs\n"
        "a      12,345.7\n"
        "bcdef         -"
    )
