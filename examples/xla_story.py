# SPDX-License-Identifier: Apache-2.0
"""Why ranks shake hands: what a real XLA makes of graphs that differ a little, and what comes of it.

    torchrun --nproc-per-node 4 examples/xla_story.py

Each rank is a process on this machine's CPU, whose executables come from XLA: see `xla_backend`. First each rank runs
its own graph as one executable, whatever the others run. None of three programs comes out right; each is a job of its
own, whose processes are ended. Then the ranks shake hands. Rank 0 tells what all ranks saw.
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

# The modules of the handshake lie one folder above this one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import torch
import torch.distributed as dist
from handshake_backend import Backend
from torch._dynamo.backends.common import aot_autograd
from train import all_reduce
from vocab_parallel import REPORT_WITHIN_S, KeepsReport, quote, tell
from xla_backend import Program, Xla

from _graph import executable_fingerprint
from _vocabulary import format_ranks
from handshake import Handshake, HandshakeStage

# An all-reduce of three numbers that is not over so long after another rank was done waits for one that never comes.
HANGS_AFTER_S = 3.0
# Ends a job in which no rank is done.
JOB_WITHIN_S = 100.0
# Of float32.
TOLERANCE = 1e-5


def merged(x: torch.Tensor, scale: Any) -> torch.Tensor:
    return torch.tanh(all_reduce(x)) + torch.sin(all_reduce(x * scale))


def dropped(x: torch.Tensor, scale: Any) -> torch.Tensor:
    return all_reduce(x.long()) * int(scale - 1)


def folded(x: torch.Tensor, scale: Any) -> torch.Tensor:
    return x + all_reduce(torch.full((3,), scale))


def own_input(rank: int) -> torch.Tensor:
    return torch.tensor([0.1, 0.2, 0.3]) * (rank + 1)


class Whole(NamedTuple):
    """A program that goes wrong if each rank runs its own graph of it as one executable."""

    function: Callable[[torch.Tensor, Any], torch.Tensor]
    text: str
    reason: str


WHOLE = (
    Whole(
        merged,
        "tanh(all_reduce(x)) + sin(all_reduce(x * scale))",
        "On rank 0 x * 1.0 is x, so XLA makes one all-reduce of two. The others' two become one of two tensors.",
    ),
    Whole(
        dropped,
        "all_reduce(integers) * rank",
        "On rank 0 the product is 0 whatever the sum is, so XLA drops the all-reduce.",
    ),
    Whole(
        folded,
        "x + all_reduce(full(3, scale))",
        "To XLA all ranks run one program, with one constant: each multiplies its own by the number of ranks.",
    ),
)


def all_reduces(hlo: str) -> str:
    """The all-reduces of an executable, in words."""
    operands = [found.count("%") for found in re.findall(r" all-reduce(?:-start)?\(([^)]*)\)", hlo)]
    texts = [f"an all-reduce of {number} tensor{'s' if number > 1 else ''}" for number in operands]
    return " and ".join(texts) or "no all-reduce"


# ---------------------------------------------------------------------- without a handshake


def run_whole(function: Callable[..., Any], job: str, told: Connection, heard: Connection) -> None:
    """A rank of a job, in a process of its own. It tells its all-reduces, and then how far its numbers are off."""
    heard.close()
    ended = threading.Thread(target=end_with, args=(told,), daemon=True)
    ended.start()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store(job), rank=rank, world_size=world_size)
    x, scale = own_input(rank), rank + 1.0
    expected = function(x, scale)
    xla = Xla()

    def compile_whole(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        program = Program(graph_module)

        def run(inputs: list[Any]) -> Any:
            dist.barrier()  # nobody waits for a rank that still compiles
            told.send(all_reduces(program.hlo))
            return program(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=compile_whole, decompositions=xla.decompositions)
    error = (torch.compile(function, backend=backend)(x, scale) - expected).abs().max().item()
    told.send(f"done, and wrong by {error:.2g}" if error > TOLERANCE else "done, and right")
    ended.join()  # leaving by itself would end the others


def end_with(parent: Connection) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        parent.recv()
    os._exit(0)


def store(name: str) -> Any:
    """A part of the store that torchrun keeps for its ranks, by a connection of its own."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(name, dist.TCPStore(*address, is_master=False))  # type: ignore[attr-defined]


def run_job(function: Callable[..., Any], job: str) -> list[str]:
    """Runs the function whole on all ranks. Of each rank: its all-reduces, and what came of it."""
    context = multiprocessing.get_context("fork")  # all is imported already, and no thread runs yet
    heard, told = context.Pipe()
    process = context.Process(target=run_whole, args=(function, job, told, heard), daemon=True)
    process.start()
    told.close()
    shared = store(f"parents, {job}")
    seen = f"{hear(heard, shared)}; {hear(heard, shared)}"
    # All processes stay until all were looked at.
    shared.set(os.environ["RANK"], seen)
    seen_on = [shared.get(str(rank)).decode() for rank in range(int(os.environ["WORLD_SIZE"]))]
    process.kill()
    process.join()
    return seen_on


def hear(process: Connection, shared: Any) -> str:
    """What a rank's process tells next; or that it waits, while another rank's is done."""
    is_other_done = False
    for _ in range(int(JOB_WITHIN_S / HANGS_AFTER_S)):
        if process.poll(HANGS_AFTER_S):
            try:
                text = str(process.recv())
            except EOFError:
                return "died"
            if text.startswith("done"):
                shared.set("done", "")
            return text
        if is_other_done:
            break
        is_other_done = shared.check(["done"])
    return "still waiting when it is ended"


def keep_stdout() -> None:
    """Leaves this process's stdout to Python: gloo writes to it too."""
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def tell_ranks(facts: list[str]) -> None:
    """A line for each fact, with the ranks that have it."""
    for fact in dict.fromkeys(facts):
        print(f"   {format_ranks(rank for rank, other in enumerate(facts) if other == fact)}: {fact}")


# ---------------------------------------------------------------------- with the handshake


class KeepsPrograms(Xla):
    """Compiles with XLA, and keeps what has run of it: the whole graph is compiled even if it is split."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[Program] = []

    def compile(self, graph_module: torch.fx.GraphModule, fake_mode: Any) -> Callable[[list[Any]], Any]:
        program = Program(graph_module)

        def run(inputs: list[Any]) -> Any:
            if program not in self.programs:
                self.programs.append(program)
            return program(inputs)

        return run


class Seen(NamedTuple):
    """Of one rank: its executables, the fingerprints of those with all-reduces, how far the numbers are off."""

    executables: str
    fingerprints: list[str]
    error: float


def run(scale: float | torch.Tensor, partial: bool) -> None:
    """Runs the first program with the handshake. Ends the job if it doesn't come out right."""
    torch._dynamo.reset()
    x = own_input(dist.get_rank())
    expected = merged(x, scale)
    inner = KeepsPrograms()
    backend = Backend(inner, HandshakeStage.DISPATCH_STAGE, partial, "role")
    error = (torch.compile(merged, backend=backend)(x, scale) - expected).abs().max().item()

    made = [all_reduces(program.hlo) for program in inner.programs]
    number = f"{len(made)} executable{'s' if len(made) > 1 else ''}"
    executables = f"{number}: {', '.join(f'{count} with {text}' for text, count in Counter(made).items())}"
    fingerprints = [executable_fingerprint(program.hlo) for program in inner.programs if "all-reduce" in program.hlo]
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, Seen(executables, fingerprints, error))
    if dist.get_rank() == 0:
        tell_ranks([one.executables for one in seen])
    if any(one.fingerprints != fingerprints for one in seen):
        sys.exit("the ranks have different executables around their all-reduces")
    if any(one.error > TOLERANCE for one in seen):
        sys.exit("the numbers are wrong")
    tell("   Those with all-reduces are the same on all ranks, and the numbers are right.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--debug", metavar="FOLDER", help="where the report goes (default: a new temporary folder)")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it under torchrun: torchrun --nproc-per-node 4 examples/xla_story.py")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size < 2:
        parser.error("it takes at least two ranks: --nproc-per-node 4")
    keep_stdout()

    if rank == 0:
        print(
            f"{world_size} ranks. scale is a Python float, rank + 1.0: a constant, another one in each rank's graph.\n"
        )
        print(
            "1. Without a handshake, each rank's graph in one executable. What XLA makes of it, and what comes of that:"
        )
    for number, program in enumerate(WHOLE):
        seen = run_job(program.function, f"job {number}")
        if rank == 0:
            print(f"\n   {program.text}")
            tell_ranks(seen)
            print(f"   {program.reason}")

    dist.init_process_group("gloo")
    log = KeepsReport()
    logger = logging.getLogger("torch_tpu.handshake")
    if rank == 0:
        # Only the coordinator's rank needs to know the folder.
        folder = arguments.debug or tempfile.mkdtemp(prefix="handshake-")
        os.environ["TORCH_TPU_INTERNAL_HANDSHAKE_DEBUG"] = folder
        logger.addHandler(log)
        logger.propagate = False
    else:
        # Every rank logs that it was split. One of them is enough here.
        logger.setLevel(logging.ERROR)

    tell("\n2. The first of them with the handshake: the graphs differ, so all ranks run split at each collective.")
    run(rank + 1.0, partial=False)
    tell("\n3. A folder for reports is set, so the graphs are compared. The log of rank 0 says:")
    if rank == 0 and not log.is_there.wait(REPORT_WITHIN_S):
        sys.exit("no report came")
    tell(quote(log.report))
    tell("\n4. With partial=True the ranks look for what their graphs have in common, and keep that in one executable.")
    run(rank + 1.0, partial=True)
    tell("\n5. The fix is to pass scale as a tensor. All ranks trace one graph, and it runs in one executable.")
    run(torch.tensor(rank + 1.0), partial=False)

    dist.barrier()  # nobody's last collective is torn down under another rank
    jax.distributed.shutdown()
    dist.destroy_process_group()
    Handshake().close()
    os._exit(0)  # taking JAX and PyTorch apart takes longer than all of this


if __name__ == "__main__":
    main()
