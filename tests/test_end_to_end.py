# SPDX-License-Identifier: Apache-2.0
"""Four gloo ranks, each a process, that compile real graphs by the example's backend and agree how to run them.

The scenarios are in `end_to_end_worker`, one function each. They all run in one start of the ranks, because that
takes longer than most of them; each is a test here, which says what any rank found to be not as expected.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from layout import PACKAGE, child_environment

pytest.importorskip("torch")

# The example's backend, which all of this goes through, imports the flat modules.
pytestmark = [pytest.mark.flat_only, pytest.mark.skipif(bool(PACKAGE), reason="runs the checkout's own examples")]

WORLD = 4
# The ranks take 30 s on two free processors.
JOB_TIMEOUT_S = 400.0

IN_BOTH_STAGES = [
    "no_divergence",
    "one_rank_differs",
    "one_rank_differs_in_its_forward_graph_alone",
    "plan_for_what_is_common",
    "all_ranks_diverge_at_iteration_1",
    "graph_break_on_one_rank",
    "last_frame_without_a_collective_on_one_rank",
    "two_functions_on_one_rank",
    "three_graphs_and_two",
    "four_ways_to_cut_three_collectives",
    "even_ranks_reduce_among_themselves_too",
    "two_groups_at_once",
    "group_without_the_coordinators_rank",
    "mesh_of_two_by_two",
    "distributed_tensors",
    "distributed_tensors_on_a_mesh_of_two_by_two",
    "dynamic_shapes",
    "dynamic_shapes_and_a_graph_break_on_one_rank",
    "backward_that_fails_to_compile_at_first_on_one_rank",
    "two_threads_compile_at_once",
    "cache_that_is_warm_on_one_rank",
]
AT_COMPILE = [
    *IN_BOTH_STAGES,
    "coordinator_on_rank_1",
    "split_compiler_with_a_group_class_of_its_own",
    "votes_of_two_threads_in_either_order",
]
AT_DISPATCH = [
    *IN_BOTH_STAGES,
    "collectives_of_one_rank_alone",
    "one_rank_diverges_at_iteration_1",
    "uneven_last_batch_on_one_rank",
]
SCENARIOS = [
    *(f"DISPATCH_STAGE:{name}" for name in AT_DISPATCH),
    *(f"COMPILE_STAGE:{name}" for name in AT_COMPILE),
]
# Ends the job, so it comes last.
LONE_RANK = "COMPILE_STAGE:lone_rank"


class Rank(NamedTuple):
    records: dict[str, dict[str, Any]]  # by scenario
    output: str
    exit_code: int


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What the ranks recorded, printed, and how they ended."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).with_name("end_to_end_worker.py")
    processes, outputs = [], [folder / f"rank{rank}.txt" for rank in range(WORLD)]
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(worker), str(rank), str(folder), *SCENARIOS, LONE_RANK],
                    env=child_environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_CACHE_DIR=str(folder / f"cache{rank}")),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + JOB_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
    for process in processes:
        process.kill()  # those that hang
        process.wait()
    ranks = []
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        file = folder / f"rank{rank}.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        ranks.append(Rank({record["name"]: record for record in records}, output.read_text(), process.returncode))
    return ranks


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(job, scenario):
    findings = []
    for number, rank in enumerate(job):
        if scenario not in rank.records:
            findings.append(f"rank {number} did not get to its end. It printed last:\n{rank.output[-2000:]}")
        else:
            findings += [f"rank {number}: {surprise}" for surprise in rank.records[scenario]["surprises"]]
    if findings:
        pytest.fail("\n".join(findings), pytrace=False)


def test_rank_that_votes_alone(job):
    """It knows for whom it waited, after the timeout of a second, and the job ends: nobody hangs."""
    alone = job[2].records["lone_rank"]
    assert alone["error"] == "HandshakeTimeoutError"
    assert alone["ranks"] == [0, 1, 3]
    assert "rank 2: gave up waiting for ranks 0-1, 3 at [2, 4)" in alone["text"]
    assert 1.0 <= alone["seconds"] < 5.0
    for rank in job:
        assert rank.records["lone_rank"]["error"]
        assert rank.exit_code == 1, rank.output[-2000:]
