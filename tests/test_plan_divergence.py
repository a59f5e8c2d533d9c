# SPDX-License-Identifier: Apache-2.0
"""What diverging ranks keep fat, in graphs that torch traced: how many collectives, and that each rank's numbers are
those of its whole graph, bit by bit."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from layout import load  # noqa: E402
from plan_programs import SumGradients, SumOverRanks, VocabularyParallel, assert_runs_alike  # noqa: E402
from plan_rounds import plans_of  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

_graph = load("_graph")

WORLD = 4
LAST = WORLD - 1
WIDTH, LAYERS = 8, 4


@pytest.fixture(scope="module", autouse=True)
def fake_group():
    """Process group '0' of 4 ranks, of which this process plays all: programs take their rank as an argument."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def traced(function: Callable[..., Any], *inputs: Any, dynamic: Sequence[int] = ()) -> list[Any]:
    """AOTAutograd's graphs, as `torch.compile` makes them: the forward one, and where a weight needs a gradient the
    backward one. `dynamic` are the inputs whose first dimension is."""
    graphs = []

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    torch._dynamo.reset()
    for number in dynamic:
        torch._dynamo.mark_dynamic(inputs[number], 0)
    output = torch.compile(function, backend=aot_autograd(fw_compiler=keep), dynamic=False)(*inputs)
    if output.requires_grad:
        output.square().sum().backward()
    return graphs


def weight(*shape: int) -> Any:
    return torch.nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 100)


def rows(count: int = 6) -> Any:
    return torch.arange(float(count * WIDTH)).reshape(count, WIDTH) / 100


class FeedForward(torch.nn.Module):
    """Row-parallel layers of `hidden` units on this rank; `before_sum` does something to what is summed."""

    def __init__(self, hidden: int, before_sum: Callable[[int, Any], Any] = lambda layer, x: x, layers: int = LAYERS):
        super().__init__()
        self.columns = torch.nn.ParameterList(weight(WIDTH, hidden) for _ in range(layers))
        self.rows = torch.nn.ParameterList(weight(hidden, WIDTH) for _ in range(layers))
        self.before_sum = before_sum

    def forward(self, x):
        for layer, (column, row) in enumerate(zip(self.columns, self.rows, strict=True)):
            hidden = torch.relu(SumGradients.apply(x) @ column)
            x = torch.tanh(x + SumOverRanks.apply(self.before_sum(layer, hidden @ row)))
        return x


def uneven_vocabulary(rank):
    model = VocabularyParallel(rank, blocks=2)
    model.embedding = weight(12 if rank == LAST else 16, WIDTH)
    return traced(model, torch.arange(24).reshape(2, 12))


def uneven_feed_forward(rank):
    return traced(FeedForward(3 if rank == LAST else 4), rows())


def uneven_experts(rank):
    """Each rank adds up what its own experts say: two, the last one."""

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ParameterList(weight(1 if rank == LAST else 2, WIDTH, WIDTH) for _ in range(LAYERS))

        def forward(self, x):
            for experts in self.experts:
                x = torch.tanh(x + SumOverRanks.apply((SumGradients.apply(x) @ experts).relu().sum(0)))
            return x

    return traced(Experts(), rows())


def bias_on_rank_0(rank):
    bias = weight(WIDTH)
    return traced(FeedForward(4, lambda layer, x: x + bias if rank == 0 else x), rows())


def fused_bias_on_rank_0(rank):
    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=rank == 0) for _ in range(LAYERS))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(x + SumOverRanks.apply(layer(SumGradients.apply(x))))
            return x

    return traced(Fused(), rows())


def no_tokens_for_an_expert(rank):
    """Rank 1's experts have nothing to do."""
    chosen = torch.arange(0 if rank == 1 else 3)

    def before_sum(layer, x):
        out = torch.zeros_like(x)
        return out.index_add(0, chosen, x.index_select(0, chosen).sin()) if len(chosen) else out + 0 * x

    return traced(FeedForward(4, before_sum), rows())


def one_scales_what_is_summed(rank):
    """all_reduce(f(x)) on one rank, all_reduce(x) on the others."""
    return traced(FeedForward(4, lambda layer, x: x.sin() if rank == 2 else x), rows())


def all_scale_what_is_summed_but_one(rank):
    return traced(FeedForward(4, lambda layer, x: x if rank == 2 else x.sin()), rows())


def another_op_in_one_layer(rank):
    return traced(FeedForward(4, lambda layer, x: x.sin() if (rank, layer) == (1, 2) else x.cos()), rows())


class DataParallel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(weight(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for matrix in self.weights:
            x = torch.tanh(x @ SumGradients.apply(matrix))
        return x


def shorter_last_batch(rank):
    return traced(DataParallel(), rows(4 if rank == LAST else 6))


def one_rank_is_dynamic(rank):
    return traced(DataParallel(), rows(), dynamic=[0] if rank == 1 else [])


def one_rank_is_dynamic_where_all_work_on_one_batch(rank):
    return traced(FeedForward(4), rows(), dynamic=[0] if rank == 1 else [])


class Gated(torch.nn.Module):
    """Row-parallel layers; the batch is dynamic, and on one rank another input, which is used before the first sum."""

    def __init__(self, with_more: bool) -> None:
        super().__init__()
        self.inner = FeedForward(4, layers=10)
        self.with_more = with_more

    def forward(self, more, x):
        return self.inner(x * more.sum() if self.with_more else x)


def one_more_dynamic_input(rank):
    return traced(Gated(rank == 2), torch.ones(5), rows(), dynamic=[0, 1] if rank == 2 else [1])


def all_dynamic_and_uneven(rank):
    return traced(FeedForward(3 if rank == LAST else 4), rows(), dynamic=[0])


class Case(NamedTuple):
    program: Callable[[int], list[Any]]
    like: tuple[int, ...]  # for each rank, one that has the same graphs
    # Of the forward graph, and of the backward one if there are collectives in it: the number of collectives, how many
    # of them are in fat segments, and the most in one.
    collectives: tuple[tuple[int, int, int], ...]


CASES = [
    Case(uneven_vocabulary, (0, 1, 2, 3), ((5, 5, 5), (4, 4, 4))),
    Case(uneven_feed_forward, (0, 0, 0, 3), ((4, 4, 1), (3, 3, 1))),
    Case(uneven_experts, (0, 0, 0, 3), ((4, 4, 1), (3, 3, 1))),
    Case(bias_on_rank_0, (0, 1, 1, 1), ((4, 4, 1), (3, 3, 3))),
    Case(fused_bias_on_rank_0, (0, 1, 1, 1), ((4, 4, 1), (3, 3, 3))),
    Case(no_tokens_for_an_expert, (0, 1, 0, 0), ((4, 4, 1), (3, 3, 1))),
    Case(one_scales_what_is_summed, (0, 0, 2, 0), ((4, 4, 1), (3, 3, 1))),
    Case(all_scale_what_is_summed_but_one, (0, 0, 2, 0), ((4, 4, 1), (3, 3, 1))),
    Case(another_op_in_one_layer, (0, 1, 0, 0), ((4, 4, 2), (3, 3, 2))),
    Case(shorter_last_batch, (0, 0, 0, 3), ((0, 0, 0), (4, 4, 4))),
    Case(one_rank_is_dynamic, (0, 1, 0, 0), ((0, 0, 0), (4, 4, 4))),
    Case(one_rank_is_dynamic_where_all_work_on_one_batch, (0, 1, 0, 0), ((4, 0, 0), (3, 0, 0))),
    Case(one_more_dynamic_input, (0, 0, 2, 0), ((10, 10, 10), (9, 9, 9))),
    Case(all_dynamic_and_uneven, (0, 0, 0, 3), ((4, 4, 1), (3, 3, 1))),
]


@pytest.mark.parametrize("case", CASES, ids=[case.program.__name__ for case in CASES])
def test_collectives_stay_fat(case):
    graphs_of = {rank: case.program(rank) for rank in sorted(set(case.like))}
    for direction, (number, fat, together) in enumerate(case.collectives):
        graphs = [graphs_of[rank][direction] for rank in case.like]
        assert {sum(_graph.count_collectives(graph).values()) for graph in graphs} == {number}
        for reference in (0, LAST) if number else ():
            plans, _ = plans_of(graphs, reference)
            for graph, plan in zip(graphs, plans, strict=True):
                collectives = [s.num_collectives for s in plan.segments if s.kind == "fat"] if plan else []
                assert (sum(collectives), max(collectives, default=0)) == (fat, together)
                if plan is not None:
                    assert_runs_alike(graph, plan.program)
