# SPDX-License-Identifier: Apache-2.0
"""One model whose ranks trace different graphs: how they find out, what to change, and what stays fat meanwhile.

    torchrun --nproc-per-node 4 examples/vocab_parallel.py

Each rank keeps a part of the vocabulary's rows. It finds out which tokens are its own by comparing them with the bounds
of its part, and these are Python ints: every rank's graph has other constants in it, so no two ranks have the same
graph. All that follows, 16 tensor-parallel blocks, is the same on all of them.

Each rank is a process on this machine's CPU, with gloo. Rank 0 tells the story in four steps.
"""

import argparse
import logging
import os
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any, NamedTuple

# The modules of the handshake lie one folder above this one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from handshake_backend import Backend, Compiled, Inner
from train import WIDTH, Block, SumOfOutputs

from _graph import count_collectives
from handshake import HandshakeStage

ROWS_PER_RANK, TOKENS, BLOCKS = 18992, 32, 16
# The report is made beside the job, in a process of its own; it takes about a second.
REPORT_WITHIN_S = 60.0


class VocabParallelEmbedding(torch.nn.Module):
    """Rows of a vocabulary, divided over the ranks: each looks up the tokens that it has, and the results add up."""

    def __init__(self, rank: int, mended: bool) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(ROWS_PER_RANK, WIDTH))
        first = rank * ROWS_PER_RANK
        if mended:
            self.register_buffer("bounds", torch.tensor([first, first + ROWS_PER_RANK]), persistent=False)  # a tensor
        else:
            self.bounds = (first, first + ROWS_PER_RANK)  # the graph has the numbers in it

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first, end = self.bounds
        others = (tokens < first) | (tokens >= end)
        own_rows = torch.nn.functional.embedding((tokens - first).masked_fill(others, 0), self.rows)
        summed: torch.Tensor = SumOfOutputs.apply(  # type: ignore[no-untyped-call]
            own_rows.masked_fill(others.unsqueeze(-1), 0.0)
        )
        return summed


class NotesCollectives(Inner):
    """Runs each segment as it is, and notes how many collectives it has. Each runs once here."""

    def __init__(self) -> None:
        self.collectives_of_segments: list[int] = []

    def compile(self, graph_module: torch.fx.GraphModule, fake_mode: Any) -> Compiled:
        run, collectives = super().compile(graph_module, fake_mode), sum(count_collectives(graph_module).values())

        def run_and_note(inputs: list[Any]) -> Any:
            self.collectives_of_segments.append(collectives)
            return run(inputs)

        return run_and_note


class Run(NamedTuple):
    """What a rank saw of one forward and backward pass: the collectives of each segment, and the numbers."""

    forward: list[int]
    backward: list[int]
    values: list[torch.Tensor]


def run(mended: bool, partial: bool) -> Run:
    """One pass through the model, from the same weights every time, compiled anew."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    blocks = [Block(rank, world_size, "none") for _ in range(BLOCKS)]
    model = torch.nn.Sequential(VocabParallelEmbedding(rank, mended), *blocks)
    tokens = torch.randint(world_size * ROWS_PER_RANK, (TOKENS,), generator=torch.Generator().manual_seed(1))

    inner = NotesCollectives()
    backend = Backend(inner, HandshakeStage.COMPILE_STAGE, partial, "exact")
    output = torch.compile(model, backend=backend)(tokens)
    num_forward = len(inner.collectives_of_segments)
    output.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    segments = inner.collectives_of_segments
    return Run(segments[:num_forward], segments[num_forward:], [output.detach(), *gradients])


class KeepsReport(logging.Handler):
    """Prints what the handshake logs, but for the report on a split, which it keeps until it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.report = ""
        self.is_there = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "why the ranks' graphs were split" in text:
            self.report = text
            self.is_there.set()
        else:
            tell(quote(text))


def quote(text: str) -> str:
    return textwrap.indent(text, "   | ", lambda line: True)


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def describe(name: str, collectives: list[int]) -> str:
    alone = sum(count == 1 for count in collectives)
    together = [count for count in collectives if count > 1]
    parts = [f"{sum(together)} of {sum(collectives)} collectives in {len(together)} fat"] if together else []
    parts += [f"{alone} with one collective each"] if alone else []
    parts += [f"{collectives.count(0)} without"] if 0 in collectives else []
    return f"   {name}: {len(collectives)} segment{'s' if len(collectives) > 1 else ''}: {', '.join(parts)}"


def tell_run(seen: Run) -> None:
    tell(describe("forward ", seen.forward))
    tell(describe("backward", seen.backward))


def tell_equal(seen: Run, skinny: Run) -> None:
    """Says whether all ranks have the skinny run's numbers, bit by bit; ends the job if not."""
    same = all(map(torch.equal, seen.values, skinny.values)) and len(seen.values) == len(skinny.values)
    on_all_ranks = torch.tensor(int(same))
    dist.all_reduce(on_all_ranks, dist.ReduceOp.MIN)
    if not on_all_ranks:
        sys.exit("the numbers differ from the skinny run's")
    tell(f"   the output and all {len(seen.values) - 1} gradients are bitwise equal to step 1's, on every rank")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--debug", metavar="FOLDER", help="where the report goes (default: a new temporary folder)")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it under torchrun: torchrun --nproc-per-node 4 examples/vocab_parallel.py")

    dist.init_process_group("gloo")
    if dist.get_world_size() < 2:
        parser.error("it takes at least two ranks: --nproc-per-node 4")
    log = KeepsReport()
    logger = logging.getLogger("torch_tpu.handshake")
    if dist.get_rank() == 0:
        # Only the coordinator's rank needs to know the folder.
        folder = arguments.debug or tempfile.mkdtemp(prefix="handshake-")
        os.environ["TORCH_TPU_INTERNAL_HANDSHAKE_DEBUG"] = folder
        logger.addHandler(log)
        logger.propagate = False
    else:
        # Every rank logs that it was split. One of them is enough here.
        logger.setLevel(logging.ERROR)
    tell(f"{dist.get_world_size()} ranks; {ROWS_PER_RANK} rows of the vocabulary on each, then {BLOCKS} blocks.\n")

    tell("1. The bounds are Python ints. The ranks' forward graphs differ, so all run split at each collective.")
    skinny = run(mended=False, partial=False)
    tell_run(skinny)

    tell("\n2. A folder for reports is set, so the graphs are compared, beside the job. The log of rank 0 says:")
    if dist.get_rank() == 0 and not log.is_there.wait(REPORT_WITHIN_S):
        sys.exit("no report came")
    tell(quote(log.report))

    tell("\n3. With partial=True the ranks look for what their graphs have in common, and keep that fat.")
    planned = run(mended=False, partial=True)
    tell_run(planned)
    tell_equal(planned, skinny)

    tell("\n4. The fix is one line: the bounds in a buffer. All ranks trace one graph, and it runs fat.")
    fat = run(mended=True, partial=False)
    tell_run(fat)
    tell_equal(fat, skinny)
    dist.barrier()  # nobody's last collective is torn down under another rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
