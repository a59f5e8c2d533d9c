# SPDX-License-Identifier: Apache-2.0
"""One of four ranks of torch_tpu: `rank.py FOLDER changed|unchanged SCENARIO …`, the rest in its environment.

SCENARIO:SECONDS is one with a vote that nobody answers, so that it ends when these are over.

Each scenario is a method of `Scenarios`: a few small programs, compiled by torch_tpu's backend, in which one rank may
be the odd one out. It starts with a handshake of its own, in which all ranks stand at 0. For each step of a scenario,
a rank reports what came out, what ran (`gloo_stub.ran`), or the error that its vote ended in; after that it runs the
program uncompiled, since the other ranks wait for it in the collective. FOLDER/R.jsonl gets one line a scenario.
"""

import contextlib
import datetime
import json
import os
import sys
import time
import traceback
from pathlib import Path

import gloo_stub
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.utils import counters
from torch_tpu import _loader

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER, CHANGED = Path(sys.argv[1]), sys.argv[2] == "changed"
ODD = 2  # the rank that is the odd one out
PATIENCE_S = 200.0  # nothing takes so long, unless it fails

_loader._init_device("tpu")
dist.init_process_group(
    "cpu:gloo,tpu:tpu_dist",
    store=dist.FileStore(str(FOLDER / "store"), WORLD_SIZE),
    rank=RANK,
    world_size=WORLD_SIZE,
    timeout=datetime.timedelta(seconds=PATIENCE_S),
)
from torch_tpu._internal import compile as torch_tpu_compile  # noqa: E402
from torch_tpu._internal.compile import _backend, split_compiler  # noqa: E402
from torch_tpu._internal.distributed import handshake  # noqa: E402

gloo_stub.install()


# All on all ranks, as torch wants it.
GROUPS = {
    ranks: dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=PATIENCE_S))
    for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))
}
ROW, COLUMN = GROUPS[(0, 1) if RANK < 2 else (2, 3)], GROUPS[(RANK % 2, RANK % 2 + 2)]


def total(rows, group=None):
    return functional.all_reduce(rows, "sum", group or dist.group.WORLD)


def layer(rows, group=None):
    """Computing on both sides of a collective, so that it is seen whether they are one executable."""
    return total(torch.relu(rows - 1), group) * 0.5


class Total(torch.autograd.Function):
    """A sum over the ranks, whose backward is one too."""

    @staticmethod
    def forward(ctx, rows):
        return total(rows)

    @staticmethod
    def backward(ctx, gradient):
        return total(gradient)


class Scenarios:
    def __init__(self, odd):
        self.odd = RANK == odd
        self.steps = []
        self.rows = torch.full((3,), float(RANK))

    def compiled(self, function, **options):
        return torch.compile(function, backend=_backend.TpuBackend(debug=True), dynamic=False, options=options or None)

    def step(self, function, rows=None, compiled=None):
        """Runs `function` compiled, or by `compiled` where it was before. Returns the result, on the CPU."""
        rows = self.rows if rows is None else rows
        del gloo_stub.ran[:]
        error = ""
        try:
            result = (compiled or self.compiled(function))(rows.to("tpu")).cpu()
        except Exception as raised:
            cause = getattr(raised, "inner_exception", raised)
            if not isinstance(cause, handshake.HandshakeError):
                raise
            error, result = type(cause).__name__, function(rows)
        self.report(result, error)
        return result

    def report(self, result, error=""):
        ran = [error] if error else [kind for kind in gloo_stub.ran if kind != "local"]
        self.steps.append(" ".join([f"{result.reshape(-1)[0].item():g}", *ran]))

    def shifting(self, shifts):
        """One function, compiled again where the shift is one that this rank has not seen."""
        self.shift = 0

        def shifted(rows):
            return layer(rows + 3 if self.shift else rows)

        compiled = self.compiled(shifted)
        for self.shift in shifts:
            self.step(shifted, compiled=compiled)

    # -- what torch_tpu's own end-to-end tests are about

    def same(self):
        for _ in range(2):
            self.step(layer)

    def one_differs(self):
        self.step(lambda rows: layer(rows * 2 if self.odd else rows))

    def all_change(self):
        self.shifting([0, 1])

    def one_changes(self):
        self.shifting([0, 1] if self.odd else [0, 0])

    def one_breaks(self):
        def two_layers(rows):
            rows = layer(rows)
            if self.odd:
                torch._dynamo.graph_break()
            return layer(rows + 2)

        self.step(two_layers)
        self.step(layer)

    def last_frame_is_local(self):
        def with_a_tail(rows):
            rows = layer(rows)
            if not self.odd:
                torch._dynamo.graph_break()
            return rows + 1

        self.step(with_a_tail)
        self.step(layer)

    def in_pieces(self):
        def first(rows):
            return layer(rows * 3)

        def second(rows):
            return layer(rows + 2)

        if self.odd:
            self.step(second, self.step(first))
        else:
            self.step(lambda rows: second(first(rows)))
        self.step(layer)

    def rows_of_two(self):
        self.step(lambda rows: layer(rows, ROW))

    def in_background(self):
        compiled = self.compiled(layer, async_compile=True)
        with contextlib.suppress(torch_tpu_compile.AsyncCompilationSubmitted):
            compiled(self.rows.to("tpu"))
        self.step(layer, compiled=compiled)

    # -- beyond them

    def other_shape(self):
        rows = torch.full((5 if self.odd else 3,), float(RANK))
        self.step(lambda rows: layer(rows.amax()), rows)

    def other_dtype(self):
        rows = self.rows.to(torch.float16 if self.odd else torch.bfloat16)
        self.step(lambda rows: layer(rows.float()), rows)

    def comes_back(self):
        self.shifting([0, 1, 0] if self.odd else [0, 0, 0])

    def mesh(self):
        self.step(lambda rows: layer(layer(rows, ROW) + 2, COLUMN))

    def one_pair(self):
        """Rank 0, which coordinates, has nothing to vote on."""
        self.step((lambda rows: layer(rows, ROW)) if RANK > 1 else (lambda rows: rows + 1))

    def eager_on_one(self):
        """What the others have in a graph, the odd rank issues outside any."""
        if self.odd:
            started = dist.all_reduce(torch.relu(self.rows - 1), async_op=True)
            if CHANGED:
                handshake.record_eager_collectives(handshake.ProcessGroupId(range(WORLD_SIZE)), 1)
        else:
            self.step(layer)
        self.step(lambda rows: layer(rows + 2))
        if self.odd:
            started.wait()

    def backward(self):
        """A sum over the ranks forward and backward; the second time, the odd rank's graphs are others, both ways."""
        for factor in (2, 3 if self.odd else 2):

            def scaled(rows, factor=factor):
                return torch.relu(Total.apply(rows * factor) - 1) * 0.5

            rows = self.rows.to("tpu").requires_grad_()
            del gloo_stub.ran[:]
            (gradient,) = torch.autograd.grad(self.compiled(scaled)(rows), rows, torch.ones(3).to("tpu"))
            self.report(gradient.cpu())

    def from_cache(self):
        """One function, compiled twice: the second time it may come from torch's compile cache."""
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            run = torch.compile(layer, backend=_backend.TpuBackend(), dynamic=False)
            try:
                run(self.rows.to("tpu")).cpu()
            except RuntimeError:  # what comes from the cache can't run on the plug-in
                if not counters["aot_autograd"]["autograd_cache_hit"]:
                    raise
        hits, votes = counters["aot_autograd"]["autograd_cache_hit"], handshake.Handshake().stats()["handshakes"]
        self.steps.append(f"{hits} loaded {votes} votes")


def run(name, timeout_s):
    torch._dynamo.reset()
    if hasattr(split_compiler, "_RANK_COLLECTIVE_COUNTS"):
        split_compiler._RANK_COLLECTIVE_COUNTS = handshake.RankCollectiveCounts()
    os.environ["TORCH_TPU_INTERNAL_HANDSHAKE_TIMEOUT_S"] = str(timeout_s)
    dist.barrier()
    for threads in gloo_stub.threads.values():
        threads.clear()
    began = time.monotonic()
    scenarios = Scenarios(ODD)
    getattr(scenarios, name)()
    seconds = round(time.monotonic() - began, 2)
    dist.barrier()
    session = handshake.Handshake()
    stats = session.stats()
    dist.barrier()
    session.close()
    report = {"steps": scenarios.steps, "stats": stats, "threads": gloo_stub.threads, "seconds": seconds}
    return {"scenario": name, **report}


def main():
    with open(FOLDER / f"{RANK}.jsonl", "w") as report:
        for argument in sys.argv[3:]:
            name, _, timeout_s = argument.partition(":")
            try:
                print(json.dumps(run(name, timeout_s or PATIENCE_S)), file=report, flush=True)
            except Exception:
                traceback.print_exc()
                os._exit(1)
    os._exit(0)  # torch_tpu's threads need not be waited for


main()
