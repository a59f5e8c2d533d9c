# SPDX-License-Identifier: Apache-2.0
"""Graphs compiled by a real XLA, on CPUs: what it makes of their collectives, and the handshake of that.

The scenarios are in `xla_worker`, one function each. They all run in one start, in a job of four ranks and one of one;
each is a test here, which says what any rank found to be not as expected. What breaks without a handshake is in
`examples/xla_story.py`, which runs here on two ranks.

A CPU shows no overlap, since its collectives have no start and done; nor a TPU's stricter matching, nor a device that
stays stuck.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from layout import PACKAGE, PROJECT, TESTS, child_environment, run

pytest.importorskip("torch")
pytest.importorskip("jax")

# The example's backend, which all of this goes through, imports the flat modules.
pytestmark = [pytest.mark.flat_only, pytest.mark.skipif(bool(PACKAGE), reason="runs the checkout's own examples")]

SCENARIOS = {
    4: [
        "xla_makes_other_collectives",
        "graphs_that_differ_run_split",
        "plan_keeps_what_is_common",
        "constant_that_became_a_tensor",
        "tensor_parallel_mlp",
        "vocab_parallel_embedding",
        "mesh_of_two_by_two",
        "every_collective",
    ],
    1: ["ops_do_what_pytorch_does", "tensors_are_the_callers", "what_xla_is_not_given"],
}
# The ranks take 30 s on two free processors.
RANKS_WITHIN_S = 400.0
STORY_WITHIN_S = 300.0


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[int, int], dict[str, Any]], str]:
    """What each rank found, by its number and that of all ranks, and then by scenario; and what they printed."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(TESTS / "xla_worker.py"), str(folder)]
    # XLA optimises programs as ever; only the code of what is left is not worth the time here.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    ran = run(command, RANKS_WITHIN_S, env=child_environment(OMP_NUM_THREADS="1", XLA_FLAGS=flags))
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for world_size in SCENARIOS:
        for rank in range(world_size):
            file = folder / f"{rank}of{world_size}.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            found[rank, world_size] = {line["name"]: line["surprises"] for line in map(json.loads, lines)}
    return found, ran.stdout


@pytest.mark.parametrize(
    ("world_size", "scenario"), [(size, scenario) for size, scenarios in SCENARIOS.items() for scenario in scenarios]
)
def test_scenario(records: Any, world_size: int, scenario: str) -> None:
    found, printed = records
    findings = []
    for rank in range(world_size):
        surprises = found[rank, world_size].get(scenario)
        if surprises is None:
            findings.append(f"rank {rank} did not get to its end. The ranks printed last:\n{printed[-3000:]}")
        else:
            findings += [f"rank {rank}: {surprise}" for surprise in surprises]
    if findings:
        pytest.fail("\n".join(findings), pytrace=False)


def test_the_story(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(PROJECT / "examples" / "xla_story.py"), "--debug", str(tmp_path / "reports")]
    with (tmp_path / "stderr.txt").open("w+") as stderr:
        environment = child_environment(PYTHONPATH="", OMP_NUM_THREADS="1")
        ran = run(command, STORY_WITHIN_S, cwd=tmp_path, env=environment, stderr=stderr)
        stderr.seek(0)
        assert ran.returncode == 0, f"{ran.stdout}\n{stderr.read()}"
    printed = ran.stdout
    opening, *broken_and_split, report, plan, mend = printed.split("\n\n")
    assert opening.startswith("2 ranks")
    (title, merged, dropped, folded, split) = broken_and_split
    assert title.startswith("1.")
    assert "rank 0: an all-reduce of 1 tensor; done, and wrong by 0.2" in merged
    assert "rank 1: an all-reduce of 2 tensors; still waiting when it is ended" in merged
    assert "rank 0: no all-reduce; done, and right" in dropped
    assert "rank 1: an all-reduce of 1 tensor; still waiting when it is ended" in dropped
    assert "ranks 0-1: no all-reduce; done, and wrong by 1" in folded

    assert split.startswith("2.") and "fingerprints differ at [0, 2) on ranks 0-1" in split
    assert "ranks 0-1: 4 executables: 2 with an all-reduce of 1 tensor, 2 with no all-reduce" in split
    assert report.startswith("3.") and "rank 0: 1.0" in report and "rank 1: 2.0" in report
    assert plan.startswith("4.") and mend.startswith("5.")
    assert "ranks 0-1: 2 executables: 1 with no all-reduce, 1 with an all-reduce of 2 tensors" in plan
    assert "ranks 0-1: 1 executable: 1 with an all-reduce of 2 tensors" in mend
    for step in (split, plan, mend):
        assert "Those with all-reduces are the same on all ranks, and the numbers are right." in step
