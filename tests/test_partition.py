# SPDX-License-Identifier: Apache-2.0
"""The common part of diverging graphs: what stays fat, and that it computes the same."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from layout import load

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

_partition = load("_partition")

WORLD = 4
RANKS = range(WORLD)


@pytest.fixture(scope="module", autouse=True)
def fake_group():
    """Process group '0' of 4 ranks, of which this process plays all: graphs take their rank as an argument."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


class Rounds:
    """An exchange between threads. `faults` are called by rank before a round and may raise."""

    def __init__(self, size: int, reference: int = 0) -> None:
        self.reference = reference
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[Any] = [None] * size
        self.reasons: list[str] = []
        self.sent = [0] * size

    def exchange(self, rank: int) -> "Exchange":
        return Exchange(self, rank)


class Exchange:
    def __init__(self, rounds: Rounds, rank: int) -> None:
        self.rounds = rounds
        self.rank = rank

    def _gather(self, part: Any) -> list[Any] | None:
        try:
            self.rounds.parts[self.rank] = part
            self.rounds.barrier.wait()
            parts = list(self.rounds.parts)
            self.rounds.barrier.wait()
            return parts
        except threading.BrokenBarrierError:
            return None

    def reference_rank(self) -> int | None:
        return self.rounds.reference if self._gather(None) else None

    def share(self, payload: bytes | None) -> bytes | None:
        assert (payload is not None) == (self.rank == self.rounds.reference)
        parts = self._gather(payload)
        return parts[self.rounds.reference] if parts else None

    def intersect(self, bitmap: bytes) -> bytes | None:
        self.rounds.sent[self.rank] += len(bitmap)
        parts = self._gather(bitmap)
        if parts is None:
            return None
        assert len({len(part) for part in parts}) == 1
        common = parts[0]
        for part in parts:
            common = bytes(a & b for a, b in zip(common, part, strict=True))
        return common

    def agree(self, fingerprint: str) -> bool:
        parts = self._gather(fingerprint)
        return parts is not None and len(set(parts)) == 1

    def abort(self, reason: str) -> None:
        self.rounds.reasons.append(reason)
        self.rounds.barrier.abort()


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def plans_of(graphs: Sequence[Any], reference: int = 0, groups: str = "exact") -> tuple[list[Any], Rounds]:
    rounds = Rounds(len(graphs), reference)
    calls = [
        lambda rank=rank, graph=graph: _partition.agree_on_plan(rounds.exchange(rank), graph, groups)
        for rank, graph in enumerate(graphs)
    ]
    plans = in_threads(calls)
    assert len({plan is None for plan in plans}) == 1, "all ranks get a plan, or none does"
    return plans, rounds


def trace(function: Callable[..., Any], *inputs: Any, dynamic: bool = False, backward: bool = False) -> list[Any]:
    """AOTAutograd's graphs of `function`, in the order in which they are compiled."""
    graphs = []

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    output = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    if backward:
        output.sum().backward()
    return graphs


# ---------------------------------------------------------------------- models


class SumOverRanks(torch.autograd.Function):
    """The end of a row-parallel layer: all_reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx, x):
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "0"))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SumGradients(torch.autograd.Function):
    """The start of a column-parallel layer: nothing forward, all_reduce backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(gradient, "sum", "0"))


class Block(torch.nn.Module):
    """A tensor-parallel transformer block without its softmax: 2 all_reduces forward and 2 backward."""

    def __init__(self, width: int, extra: float | None) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.columns = torch.nn.ModuleList(torch.nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.rows = torch.nn.ModuleList(torch.nn.Linear(width // 2, width, bias=False) for _ in range(2))
        self.extra = extra

    def forward(self, x):
        for norm, column, row in zip(self.norms, self.columns, self.rows, strict=True):
            y = SumGradients.apply(norm(x))
            y = torch.nn.functional.silu(column(y))
            if self.extra is not None and norm is self.norms[0]:
                y = y * self.extra
            x = x + SumOverRanks.apply(row(y))
        return x


class VocabularyParallel(torch.nn.Module):
    """An embedding that is sharded over the vocabulary, with this rank's bounds as constants, and `blocks` blocks."""

    def __init__(self, rank: int, blocks: int, extra: tuple[int, float] | None = None, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        rows = 16
        self.low, self.high = rows * rank, rows * (rank + 1)
        self.embedding = torch.nn.Parameter(torch.randn(rows, width))
        self.blocks = torch.nn.ModuleList(
            Block(width, extra[1] if extra is not None and extra[0] == number else None) for number in range(blocks)
        )

    def forward(self, tokens):
        inside = (tokens >= self.low) & (tokens < self.high)
        rows = torch.nn.functional.embedding((tokens - self.low) * inside, self.embedding)
        x = SumOverRanks.apply(rows * inside.unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        return x


TOKENS = torch.arange(24).reshape(2, 12) * 2


def kinds(plan: Any) -> list[str]:
    return [segment.kind for segment in plan.segments]


def test_vocabulary_parallel_model_keeps_all_its_collectives_in_one_fat_segment():
    per_rank = [trace(VocabularyParallel(rank, 8), TOKENS, backward=True) for rank in RANKS]
    forward, _ = plans_of([graphs[0] for graphs in per_rank])
    backward, _ = plans_of([graphs[1] for graphs in per_rank])
    for plan in forward:
        assert plan.num_fat_collectives == 17
        assert kinds(plan) in (["local", "fat"], ["local", "fat", "local"])
    for plan in backward:
        assert plan.num_fat_collectives == 16
        assert kinds(plan).count("fat") == 1
