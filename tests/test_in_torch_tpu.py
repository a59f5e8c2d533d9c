# SPDX-License-Identifier: Apache-2.0
"""The files inside torch_tpu 0.2.0, as VENDORING.md says: without, and with, the changes that it recommends.

Dynamo, torch_tpu's backend, its split compiler, its lowering and PJRT's compilation are the real ones, on four ranks;
`in_torch_tpu/gloo_stub.py` says what is not. To start four ranks takes longer than all that they do. So there is one
start for each stage, without and with the changes, and in it the ranks go through all scenarios.

`HANDSHAKE_TORCH_TPU_FOLDER` may name a folder in which torch_tpu stays installed from one run to the next.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from in_torch_tpu import environment, vendor
from layout import FOLDER, PACKAGE, PROJECT

pytestmark = [
    pytest.mark.flat_only,
    pytest.mark.skipif(bool(PACKAGE) or FOLDER != PROJECT, reason="vendors the checkout's own files"),
]

WORLD_SIZE = 4
RANK = Path(environment.__file__).with_name("rank.py")
STAGE_VARIABLE = "TORCH_TPU_SPMD_HANDSHAKE_STAGE"  # the only one that torch_tpu 0.2.0 reads
COMPILE, DISPATCH = "COMPILE_STAGE", "DISPATCH_STAGE"
UNCHANGED, CHANGED = "unchanged", "changed"
RANKS_WITHIN_S = 500.0  # what does not hang is done long before
# How long a vote waits where nobody answers it. The other votes of such a scenario must be answered within it.
UNANSWERED_S = 3.0


class Start(NamedTuple):
    """One start of four ranks."""

    changes: str
    stage: str

    def __str__(self) -> str:
        return f"{self.changes}-{self.stage}"


STARTS = [Start(changes, stage) for changes in (UNCHANGED, CHANGED) for stage in (COMPILE, DISPATCH)]


class Odd(NamedTuple):
    """What the odd rank reports, and what the others do."""

    odd: str
    others: str


# What the ranks report of the steps of each scenario, "VALUE WHAT-RAN, …": all alike, or one apart, or each its own.
# If that is not the same in all starts: by the changes, the stage, or both. Where there is nothing, it isn't run.
SCENARIOS: dict[str, Any] = {
    "same": "1.5 fat, 1.5 fat",
    "one_differs": "2.5 split",
    "all_change": "1.5 fat, 7 fat",
    "one_changes": {
        # Nobody else compiles then. Its cached graph and the others' would run together: only a dispatch shows that.
        COMPILE: Odd("1.5 fat, 3 HandshakeTimeoutError", others="1.5 fat, 3 fat"),
        DISPATCH: "1.5 fat, 3 split",
    },
    "one_breaks": "5 split split, 1.5 fat",
    "last_frame_is_local": "2.5 split, 1.5 fat",
    "in_pieces": Odd("7.5 split, 17 split, 1.5 fat", others="17 split split, 1.5 fat"),
    "rows_of_two": ["0 fat", "0 fat", "1.5 fat", "1.5 fat"],
    "in_background": "1.5 fat",
    # torch_tpu's fingerprint in COMPILE_STAGE is of code without shapes or dtypes. Different programs, all fat: wrong.
    "other_shape": {Start(UNCHANGED, COMPILE): "1.5 fat", DISPATCH: "1.5 split", CHANGED: "1.5 split"},
    "other_dtype": {Start(UNCHANGED, COMPILE): "1.5 fat", DISPATCH: "1.5 split", CHANGED: "1.5 split"},
    # Without changes, a graph that was split once does not vote any more.
    "comes_back": {
        Start(UNCHANGED, DISPATCH): Odd(
            "1.5 fat, 3 split, 1.5 HandshakeTimeoutError", others="1.5 fat, 3 split, 1.5 split"
        ),
        Start(CHANGED, DISPATCH): "1.5 fat, 3 split, 1.5 fat",
    },
    # One program, but the code that is the fingerprint names groups, and the two rows have two names.
    "mesh": {Start(UNCHANGED, COMPILE): "1.75 split split", DISPATCH: "1.75 fat", CHANGED: "1.75 fat"},
    "one_pair": {
        UNCHANGED: ["1", "2", "1.5 HandshakePeerLostError", "1.5 HandshakePeerLostError"],
        CHANGED: ["1", "2", "1.5 fat", "1.5 fat"],
    },
    "eager_on_one": {
        UNCHANGED: Odd("5 split", others="1.5 split, 5 HandshakeTimeoutError"),
        CHANGED: Odd("5 fat", others="1.5 split, 5 fat"),
    },
    # A graph that one rank finds in its compile cache, and the others don't, is voted on by the others alone.
    "from_cache": {
        Start(UNCHANGED, COMPILE): "1 loaded 1 votes",
        DISPATCH: "0 loaded 2 votes",
        CHANGED: "0 loaded 2 votes",
    },
    "backward": Odd("4 fat fat, 6 split split", others="4 fat fat, 4 split split"),
}


def expected(start: Start, scenario: str) -> list[str]:
    """The reports of ranks 0, 1, …; none where the scenario isn't run."""
    reports = SCENARIOS[scenario]
    if isinstance(reports, dict):
        reports = next((reports[key] for key in (start, *start) if key in reports), [])
    if isinstance(reports, Odd):
        return [reports.others, reports.others, reports.odd, reports.others]
    return [reports] * WORLD_SIZE if isinstance(reports, str) else reports


# ---------------------------------------------------------------------- the ranks


@pytest.fixture(scope="module")
def torch_tpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[environment.Environment]:
    kept = os.environ.get(environment.FOLDER_VARIABLE)
    folder = Path(kept) if kept else tmp_path_factory.mktemp("installed")
    try:
        installed = environment.Environment(folder)
    except environment.UnavailableError as reason:
        pytest.skip(f"torch_tpu can't be had: {reason}")
    yield installed
    installed.close()
    if not kept:
        shutil.rmtree(folder)  # half a gigabyte, which pytest would keep


Reports = Callable[[Start], dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def reports(torch_tpu: environment.Environment) -> Reports:
    """What the ranks of a start reported, by scenario, in the order of the ranks. A start is made when it is wanted,
    and once, even if it failed."""

    @functools.cache
    def made(start: Start) -> dict[str, list[dict[str, Any]]] | AssertionError:
        try:
            return start_ranks(torch_tpu, start)
        except AssertionError as error:
            return error

    def reports_of(start: Start) -> dict[str, list[dict[str, Any]]]:
        outcome = made(start)
        if isinstance(outcome, AssertionError):
            raise outcome
        return outcome

    return reports_of


def start_ranks(torch_tpu: environment.Environment, start: Start) -> dict[str, list[dict[str, Any]]]:
    scenarios = [scenario for scenario in SCENARIOS if expected(start, scenario)]
    unanswered = [scenario for scenario in scenarios if "Error" in "".join(expected(start, scenario))]
    arguments = [f"{scenario}:{UNANSWERED_S}" if scenario in unanswered else scenario for scenario in scenarios]
    # Beside the installation, for there its files can be linked.
    with tempfile.TemporaryDirectory(dir=torch_tpu.site.parent) as scratch:
        folder = Path(scratch)
        package = vendor.vendor(torch_tpu.site, folder / "package")
        if start.changes == CHANGED:
            vendor.change(package)
        run_ranks(torch_tpu, package, start, [str(folder), start.changes, *arguments], folder)
        lines = [(folder / f"{rank}.jsonl").read_text().splitlines() for rank in range(WORLD_SIZE)]
    return dict(zip(scenarios, (list(map(json.loads, line)) for line in zip(*lines, strict=True)), strict=True))


def run_ranks(
    torch_tpu: environment.Environment, package: Path, start: Start, arguments: list[str], logs: Path
) -> None:
    """Starts the ranks, waits for them, and ends what they leave. Fails if one of them does."""
    deadline = time.monotonic() + RANKS_WITHIN_S
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(WORLD_SIZE):
            variables = torch_tpu.variables(package, rank, WORLD_SIZE) | {STAGE_VARIABLE: start.stage}
            with open(logs / f"{rank}.log", "wb") as log:
                command = [sys.executable, str(RANK), *arguments]
                streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                ranks.append(subprocess.Popen(command, env=variables, start_new_session=True, **streams))
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        states = [process.poll() for process in ranks]
        for process in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended = "\n".join(
        f"rank {rank} ended with {state}:\n{(logs / f'{rank}.log').read_text(errors='replace')[-3000:]}"
        for rank, state in enumerate(states)
        if state != 0
    )
    assert not ended, ended


# ---------------------------------------------------------------------- what they do


RUNS = [(start, scenario) for start in STARTS for scenario in SCENARIOS if expected(start, scenario)]


@pytest.mark.parametrize(("start", "scenario"), RUNS, ids=str)
def test_ranks_run(reports: Reports, start: Start, scenario: str) -> None:
    assert [", ".join(report["steps"]) for report in reports(start)[scenario]] == expected(start, scenario)


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_they_are_fat_because_they_voted(reports: Reports, start: Start) -> None:
    assert [report["stats"]["fat"] for report in reports(start)["same"]] == [2, 2, 2, 2]


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_backward_graphs_are_compiled_and_vote_in_another_thread(reports: Reports, start: Start) -> None:
    for report in reports(start)["backward"]:
        assert report["threads"]["compiled"] == ["main", "another"] * 2
        assert set(report["threads"]["ran"]) == {"main", "another"}


# ---------------------------------------------------------------------- the changes


def test_the_changes_are_those_of_the_document() -> None:
    text = (PROJECT / "VENDORING.md").read_text(encoding="utf-8")
    of_torch_tpu = text.partition("## Recommended changes to torch_tpu\n")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^\*\*(\d+)\. ", of_torch_tpu, re.MULTILINE)]
    # The last is where eager collectives are issued, which is in no file of Python's: `eager_on_one` does it.
    assert numbers == [*vendor.CHANGES, 7]


@pytest.mark.parametrize("number", vendor.CHANGES)
def test_a_change_that_finds_no_place_says_so(number: int) -> None:
    with pytest.raises(vendor.PlaceNotFoundError, match=rf"change {number}: split_compiler\.py has no .+"):
        vendor.changed("import handshake\n", [number])


def test_a_change_that_finds_no_place_leaves_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / vendor.SPLIT_COMPILER
    file.parent.mkdir(parents=True)
    file.write_text("another = 1\n")
    with pytest.raises(vendor.PlaceNotFoundError):
        vendor.change(tmp_path)
    assert file.read_text() == "another = 1\n"
