# SPDX-License-Identifier: Apache-2.0
"""One gloo rank of `test_graph_plan`: `plan_worker.py RANK WORLD FOLDER` writes what it found to FOLDER."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layout import load
from plan_programs import PROGRAMS, TOKENS, VocabularyParallel, assert_runs_alike, joint_graphs, segments_of
from torch._dynamo.backends.common import aot_autograd

_graph_plan = load("_graph_plan")


class GatheredRounds(_graph_plan.Exchange):
    """The rounds of an exchange over torch.distributed itself."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.is_undecided = False

    def _gather(self, part: Any) -> list[Any]:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part)
        return parts

    def reference_rank(self) -> int:
        return 1

    def share(self, payload: bytes | None) -> bytes | None:
        return self._gather(payload)[1]

    def intersect(self, bitmap: bytes) -> bytes:
        parts = [int.from_bytes(part, "big") for part in self._gather(bitmap)]
        return (parts[0] & parts[1] & parts[2] & parts[3]).to_bytes(len(bitmap), "big")

    def agree(self, fingerprint: str) -> bool:
        return len(set(self._gather(fingerprint))) == 1

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)


def compile_and_compare(model: torch.nn.Module, found: list[dict[str, Any]]) -> Any:
    """The model, compiled so that each graph runs skinny and by its plan, which must not differ in one bit."""

    def compile_graph(graph_module, example_inputs):
        splits = []

        def run(arguments):
            # The rounds are collectives. While a graph is compiled, torch (2.13) can deadlock in gloo's.
            if not splits:
                plan = _graph_plan.agree_on_plan(GatheredRounds(), graph_module)
                assert plan is not None
                splits.extend((_graph_plan.split_skinny(graph_module), plan.program))
                segments = segments_of(splits[1]).split()
                found.append({"segments": segments, "fat_collectives": plan.num_fat_collectives})
            expected, outputs = (split(*arguments) for split in splits)
            for left, right in zip(expected, outputs, strict=True):
                assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
            return outputs

        run._boxed_call = True
        return run

    return torch.compile(model, backend=aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph))


def plan_and_compare(graph_module: Any) -> dict[str, Any]:
    """Runs a graph skinny and by its plan on the same inputs."""
    plan = _graph_plan.agree_on_plan(GatheredRounds(), graph_module)
    assert_runs_alike(_graph_plan.split_skinny(graph_module), plan.program)
    return {"segments": segments_of(plan.program).split(), "fat_collectives": plan.num_fat_collectives}


def main(rank: int, world: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    report: dict[str, Any] = {"model": [], "one_more": [], "programs": []}

    model = VocabularyParallel(rank, blocks=8)
    model(TOKENS).square().sum().backward()
    eager = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    compile_and_compare(model, report["model"])(TOKENS).square().sum().backward()
    report["gradients_close_to_eager"] = all(
        torch.allclose(expected, parameter.grad) for expected, parameter in zip(eager, model.parameters(), strict=True)
    )

    for graph in joint_graphs(VocabularyParallel(rank, blocks=8, extra=(4, 1.5) if rank == 2 else None), TOKENS):
        report["one_more"].append(plan_and_compare(graph))

    for program, with_plan, _ in PROGRAMS:
        if with_plan is None:
            continue
        plan_and_compare(program(rank))
        report["programs"].append(program.__name__)

    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads need the interpreter lock while the interpreter ends: torch (2.13) can deadlock there


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
