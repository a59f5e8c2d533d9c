# SPDX-License-Identifier: Apache-2.0
"""Whole jobs, simulated: see `simulation`."""

import collections

import pytest
import simulation
from oracle import FAT, PEER_LOST, SPLIT, TIMEOUT

SEEDS = 2_000


def test_no_job_is_told_what_is_not_so_and_all_come_to_an_end() -> None:
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(SEEDS):
        world = simulation.World(seed)
        try:
            world.play()
        except simulation.SimulationError:
            pytest.fail(str(simulation.shrunk(seed)))
        seen.update(world.told.values())
        seen.update(fault for fault in simulation.FAULTS if any(f"fault: {fault}," in line for line in world.trace))
        seen.update("come back" for line in world.trace if "comes back" in line)
        seen.update("late" for _ in world.late)
    assert {FAT, SPLIT, TIMEOUT, PEER_LOST, simulation.REFUSED, *simulation.FAULTS} <= seen.keys()


def test_one_seed_is_one_trace() -> None:
    traces = [[simulation.World(seed).play() for seed in range(50)] for _ in range(2)]
    assert traces[0] == traces[1]
    assert len({tuple(trace) for trace in traces[0]}) == 50
