# SPDX-License-Identifier: Apache-2.0
"""Trains a small tensor-parallel model, and shows what the handshake does in each stage.

    torchrun --nproc-per-node 4 examples/train.py
    torchrun --nproc-per-node 4 examples/train.py --stage DISPATCH_STAGE --inner inductor --diverge-rank 2

Each rank is a process on this machine's CPU, with gloo. Without `--stage` all three stages run, one after the other,
from the same weights. With `--diverge-rank R` rank R's graphs differ in one op: the ranks find out, and all run split.
The handshake decides how graphs are cut, not what they compute, so the loss must be the same each time.
"""

import argparse
import logging
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# The modules of the handshake lie one folder above this one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from handshake_backend import make_backend

STAGES = ("OFF", "COMPILE_STAGE", "DISPATCH_STAGE")
BLOCKS, WIDTH, HIDDEN, BATCH = 4, 128, 512, 32
# Steps in which graphs are compiled: not in the time per step.
WARM_UP_STEPS = 2
# Relative. Compiled whole, or in parts, a graph may add its numbers up in another order.
LOSS_TOLERANCE = 1e-5


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, as a functional collective, which compilers can see."""
    group_name = dist.distributed_c10d._get_default_group().group_name
    started = torch.ops._c10d_functional.all_reduce(x, "sum", group_name)
    summed: torch.Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return summed


class SumOfGradients(torch.autograd.Function):
    """Where a tensor-parallel layer begins: nothing forward, all_reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return all_reduce(gradient)


class SumOfOutputs(torch.autograd.Function):
    """Where it ends: all_reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Block(torch.nn.Module):
    """Two linear layers whose hidden units are divided over the ranks: the first by columns, the second by rows."""

    def __init__(self, rank: int, world_size: int, approximate: str) -> None:
        super().__init__()
        # All ranks draw the same whole matrices; each keeps its own part.
        own = slice(rank * HIDDEN // world_size, (rank + 1) * HIDDEN // world_size)
        columns = torch.randn(WIDTH, HIDDEN) / math.sqrt(WIDTH)
        rows = torch.randn(HIDDEN, WIDTH) / math.sqrt(HIDDEN)
        self.columns = torch.nn.Parameter(columns[:, own].clone())
        self.rows = torch.nn.Parameter(rows[own].clone())
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = SumOfGradients.apply(x) @ self.columns  # type: ignore[no-untyped-call]
        hidden = torch.nn.functional.gelu(hidden, approximate=self.approximate)
        summed: torch.Tensor = SumOfOutputs.apply(hidden @ self.rows)  # type: ignore[no-untyped-call]
        return torch.tanh(x + summed)


def train(stage: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains from the same start as every time; returns what this rank saw."""
    os.environ["TORCH_TPU_INTERNAL_HANDSHAKE_STAGE"] = stage
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    approximate = "tanh" if rank == arguments.diverge_rank else "none"
    model = torch.nn.Sequential(*[Block(rank, world_size, approximate) for _ in range(BLOCKS)])
    inputs, targets = torch.randn(2, BATCH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    backend = make_backend(arguments.inner, stage=stage)
    compiled = torch.compile(model, backend=backend)
    seconds = []
    for _ in range(WARM_UP_STEPS + arguments.steps):
        started = time.perf_counter()
        loss = torch.nn.functional.mse_loss(compiled(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    step_s = statistics.median(seconds[WARM_UP_STEPS:])
    return {**backend.report(), "step_s": step_s, "loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", choices=STAGES, help="run only this one (default: all three)")
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager", help="what compiles each segment")
    parser.add_argument("--steps", type=int, default=20, help="steps to time in each stage (default: %(default)s)")
    parser.add_argument("--diverge-rank", type=int, metavar="R", help="the rank whose graphs differ (default: none)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if "RANK" not in os.environ:
        parser.error("start it under torchrun: torchrun --nproc-per-node 4 examples/train.py")

    dist.init_process_group("gloo")
    if dist.get_rank() != 0:
        # Every rank logs a split. One of them is enough here.
        logging.getLogger("torch_tpu.handshake").setLevel(logging.ERROR)
    rows = {stage: train(stage, arguments) for stage in ([arguments.stage] if arguments.stage else STAGES)}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {BLOCKS} blocks, {arguments.steps} steps a stage; this is rank 0")
        print("stage           graphs  handshakes   fat  split  segments  ms per step      loss")
        for stage, seen in rows.items():
            segments = "+".join(map(str, seen["segments"]))
            print(
                f"{stage:<14}  {seen['graphs']:>6}  {seen['handshakes']:>10}  {seen['fat']:>4}  {seen['split']:>5}"
                f"  {segments:>8}  {1000 * seen['step_s']:>11.2f}  {seen['loss']:.6f}"
            )
    dist.barrier()  # nobody's last collective is torn down under another rank
    dist.destroy_process_group()
    losses = [seen["loss"] for seen in rows.values()]
    if max(losses) - min(losses) > LOSS_TOLERANCE * max(losses):
        sys.exit(f"the loss depends on the stage: {losses}")


if __name__ == "__main__":
    main()
