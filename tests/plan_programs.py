# SPDX-License-Identifier: Apache-2.0
"""Models and programs whose graphs differ between ranks, for `test_graph_plan` and its gloo ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from functorch.compile import aot_function, make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx

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
    """Two tensor-parallel layers, as in a transformer block: 2 all_reduces forward and 2 backward."""

    def __init__(self, width: int, extra: float | None) -> None:
        super().__init__()
        self.columns = torch.nn.ParameterList(torch.randn(width, width // 2) for _ in range(2))
        self.rows = torch.nn.ParameterList(torch.randn(width // 2, width) for _ in range(2))
        self.extra = extra

    def forward(self, x):
        for column, row in zip(self.columns, self.rows, strict=True):
            y = torch.tanh(SumGradients.apply(x) @ column)
            if self.extra is not None and column is self.columns[0]:
                y = y * self.extra
            x = torch.tanh(x + SumOverRanks.apply(y @ row))
        return x


class VocabularyParallel(torch.nn.Module):
    """An embedding that is sharded over the vocabulary, with this rank's bounds as constants, and `blocks` blocks."""

    def __init__(self, rank: int, blocks: int, extra: tuple[int, float] | None = None, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(rank)
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


def joint_graphs(model: torch.nn.Module, tokens: Any) -> list[Any]:
    """AOTAutograd's forward and backward graph of a model."""
    graphs = []

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    names = [name for name, _ in model.named_parameters()]

    def function(tokens, *parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (tokens,))

    aot_function(function, fw_compiler=keep, bw_compiler=keep)(tokens, *model.parameters()).sum().backward()
    return graphs


# ---------------------------------------------------------------------- small programs


def reduce_start(x, op="sum"):
    return torch.ops._c10d_functional.all_reduce(x, op, "0")


def wait(x):
    return torch.ops._c10d_functional.wait_tensor(x)


def reduce(x, op="sum"):
    return wait(reduce_start(x, op))


def made(function: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> Any:
    """The graph of `function`, functional or not as it was written."""
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs)


def dynamo(function: Callable[..., Any], *inputs: Any) -> Any:
    """The graph that Dynamo gives a backend."""
    graphs = []

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    return graphs[0]


def matrix() -> Any:
    return torch.arange(16.0).reshape(4, 4) / 8


def other_constant(rank):
    def program(x):
        x = reduce(x.sin() * (rank + 2))
        return reduce(reduce(x.cos()) + x)

    return made(program, matrix())


def other_collective(rank):
    def program(x):
        x = reduce(x.sin())
        x = reduce(x + 1, "max" if rank == 1 else "sum")
        return reduce(x.cos())

    return made(program, matrix())


def nothing_in_common(rank):
    return made(lambda x: reduce(x.sin()).cos() + reduce(x), torch.ones(rank + 2, 3))


def no_neighbours(rank):
    return made(lambda x: reduce(x * (rank + 2)), matrix())


def mutation(rank):
    def program(x, y):
        x.add_(reduce(y.sin()).cos())
        z = x * (rank + 2)  # reads x before the next line changes it
        x.mul_(reduce(y.exp()) + y)
        return z + reduce(y.cos()).sin()

    return made(program, matrix(), matrix())


def mutated_input(rank):
    """Each rank changes its input after the collectives, by another amount."""

    def program(x, y):
        z = reduce(reduce(y.sin()).cos() + x)
        x.copy_(z * (rank + 1))
        return z.sin()

    return made(program, matrix(), matrix())


def in_place_collective(rank):
    def program(x):
        y = x * (rank + 2)
        wait(torch.ops._c10d_functional.all_reduce_(y, "sum", "0"))
        return reduce(y.sin()).cos()

    return made(program, matrix())


def coalesced(rank):
    def program(x, y):
        first, second = torch.ops._c10d_functional.all_reduce_coalesced([x.sin(), y.cos()], "sum", "0")
        first = wait(first)
        z = first * (rank + 2)
        third, fourth = torch.ops._c10d_functional.all_reduce_coalesced([z + 1, y], "sum", "0")
        return wait(third).exp() + wait(fourth) + wait(second)

    return made(program, matrix(), matrix())


def two_in_flight(rank):
    def program(x, y):
        first = reduce_start(x.sin())
        second = reduce_start(y.cos())
        z = x * (rank + 2)
        first = wait(first) + z
        return wait(second).sin() + reduce(first.exp())

    return made(program, matrix(), matrix())


def two_skinny_in_flight(rank):
    def program(x, y):
        first = reduce_start(x.sin(), "max" if rank == 1 else "sum")
        second = reduce_start(y.cos(), "max" if rank == 1 else "sum")
        return wait(first).exp() + wait(second)

    return made(program, matrix(), matrix())


def autocast(rank):
    def program(x, y):
        x = reduce(x.sin())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = reduce((x @ y).float())
            x = x * (rank + 2)
            x = reduce((x @ y).float())
        return reduce((x @ y).cos()) + 1

    return dynamo(program, matrix(), matrix())


def grad_mode(rank):
    def program(x, y):
        x = reduce(x.sin())
        with torch.no_grad():
            y = reduce(y.cos() + 1)
            y = y * (rank + 2)
            y = reduce(y.cos())
        return reduce((x * y).cos()) + 1

    return dynamo(program, matrix(), matrix())


def dynamic_shapes(rank):
    def program(x, y):
        x = reduce(x.sin())
        x = x.reshape(x.shape[0] // 2, 2, -1) * (rank + 2)
        return reduce(x.sum(1) @ y) + x.shape[0]

    return made(program, matrix(), torch.ones(4, 3), symbolic=True)


def nested_body(rank):
    def body(x):
        return (x * (rank + 2)).sin()

    def program(x):
        x = reduce(x.sin())
        x = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        return reduce(x.cos())

    return dynamo(program, matrix())


def collective_in_nested_body(rank):
    def body(x):
        return reduce(x * (rank + 2)).sin()

    def program(x):
        x = reduce(x.sin())
        x = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        return reduce(x.cos())

    return dynamo(program, matrix())


def same_nested_body(rank):
    def body(x):
        return reduce(x * 2).sin()

    def program(x):
        x = reduce((x + rank).sin())
        return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False).cos()

    return dynamo(program, matrix())


def tensor_constant(rank):
    def program(x):
        x = reduce(x.sin())
        x = x + torch.tensor([1.0, 2.0, 3.0, float(rank)])
        return reduce(x.cos() * torch.tensor([2.0, 3.0, 4.0, 5.0])).exp()

    return made(program, matrix())


def random_op(rank):
    def program(x):
        x = reduce(torch.bernoulli(x.sigmoid()))
        y = torch.bernoulli(x.sigmoid() / (rank + 2))
        return y, reduce(torch.bernoulli(x.sigmoid())) + x

    return made(program, matrix())


def many_values(rank):
    def program(x):
        values, places = reduce(x.sin()).topk(2)
        values = reduce(values * (rank + 2))
        return {"values": values.cos(), "more": (places, [x])}, values

    return made(program, matrix())


def own_metrics(rank):
    """What only this rank's output needs, between the collectives, and constants that only depend on the rank."""

    def program(x):
        metrics = []
        for layer in range(3):
            offsets = torch.arange(4.0) + rank * 4
            x = reduce(x.sin() + offsets)
            if rank == layer:
                metrics.append(x.abs().max().sqrt())
        return x, metrics

    return made(program, matrix())


def other_order(rank):
    """Odd ranks have the independent nodes of each block in the reverse order: next to one another, and far apart."""

    def program(x):
        for number in range(2):
            if rank % 2:
                y = x.tan().exp() + number
                parts = x.cos(), x.sin()
            else:
                parts = tuple(reversed((x.sin(), x.cos())))
                y = x.tan().exp() + number
            x = reduce(parts[0] + parts[1]) * y
        return x

    return made(program, matrix())


def other_order_of_like_nodes(rank):
    """Rank 1 computes keys before queries: the same op, on inputs of the same form."""

    def program(x, query, key):
        for _ in range(2):
            if rank == 1:
                k = x @ key
                q = x @ query
            else:
                q = x @ query
                k = x @ key
            x = reduce(q * 2 + k.sin())
        return x

    return made(program, matrix(), matrix(), matrix())


def own_input_of_like_nodes(rank):
    """What rank 1 does to an input, it does anew wherever it needs it: nothing of that has to run between."""

    def program(x, mask):
        for _ in range(3):
            x = x + reduce(x.sin()) * ((mask * 2).cos() if rank == 1 else mask.cos())
        return x

    return made(program, matrix(), matrix())


def returns_an_attribute(rank):
    """Its output returns an attribute that nothing else reads, and an input; a node is called self."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    buffer = graph.get_attr("buffer")
    node = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    node = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (node,))
    node = graph.create_node("call_function", torch.ops.aten.mul.Tensor, (node, rank), name="self")
    node = graph.call_function(torch.ops.aten.sin.default, (node,))
    node = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (node, "sum", "0"))
    node = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (node,))
    graph.output((node, buffer, x))
    for each in graph.nodes:
        if each.op != "output":
            each.meta["val"] = matrix()
    root = torch.nn.Module()
    root.register_buffer("buffer", matrix())
    return torch.fx.GraphModule(root, graph)


# The program of each rank; its segments on rank 0 under a plan (None: all ranks go skinny); and without one.
PROGRAMS = [
    (other_constant, "local fat", "local skinny local skinny local skinny"),
    (other_collective, "fat skinny fat", "local skinny local skinny local skinny"),
    (nothing_in_common, None, "local skinny local skinny local"),
    (no_neighbours, None, "local skinny"),
    (mutation, "fat local fat", "local skinny local skinny local skinny local"),
    (mutated_input, "fat local", "local skinny local skinny local"),
    (in_place_collective, "local fat", "local skinny local skinny local"),
    (coalesced, "fat local fat", "local skinny local skinny local"),
    (two_in_flight, "local fat", "local skinny local skinny local skinny local"),
    (two_skinny_in_flight, None, "local skinny local skinny local"),
    (autocast, "fat local fat", "local skinny local skinny local skinny local skinny local"),
    (grad_mode, "fat local fat", "local skinny local skinny local skinny local skinny local"),
    (dynamic_shapes, "fat local fat", "local skinny local skinny local"),
    (nested_body, "fat local fat", "local skinny local skinny"),
    (collective_in_nested_body, "fat skinny fat", "local skinny skinny local skinny"),
    (same_nested_body, "local fat", "local skinny skinny local"),
    (tensor_constant, "local fat", "local skinny local skinny local"),
    (random_op, "fat local fat", "local skinny local skinny local"),
    (many_values, "fat local fat", "local skinny local skinny local"),
    (own_metrics, "local fat local", "local skinny local skinny local skinny"),
    (other_order, "fat", "local skinny local skinny local"),
    (other_order_of_like_nodes, "fat", "local skinny local skinny"),
    (own_input_of_like_nodes, "local fat", "local skinny local skinny local skinny local"),
    (returns_an_attribute, "skinny local fat", "skinny local skinny"),
]


def segments_of(split: Any) -> str:
    """The kinds of the submodules that are called, in order."""
    return " ".join(
        str(node.target).rpartition("_")[0] for node in split.graph.nodes if node.op == "call_module"
    )


def inputs_of(graph_module: Any) -> list[Any]:
    """Arguments for a graph: small numbers for tensors, sizes for symbols."""
    generator = torch.Generator().manual_seed(3)
    inputs = []

    def number(size):
        # int(size) would make a symbol that number from then on.
        return size.node.hint if isinstance(size, torch.SymInt) else size

    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"] if "val" in node.meta else node.meta["example_value"]
        if isinstance(value, torch.Tensor):
            inputs.append(torch.rand([number(size) for size in value.shape], generator=generator).to(value.dtype))
        else:
            inputs.append(number(value))
    return inputs


def run(graph_module: Any) -> tuple[Any, Any]:
    """What a graph returns, and its inputs afterwards."""
    inputs = inputs_of(graph_module)
    torch.manual_seed(5)
    with torch.no_grad():
        outputs = graph_module(*inputs)
    return torch.utils._pytree.tree_leaves(outputs), inputs


def assert_runs_alike(graph_module: Any, split: Any) -> None:
    for expected, got in zip(run(graph_module), run(split), strict=True):
        assert len(expected) == len(got)
        for left, right in zip(expected, got, strict=True):
            if isinstance(left, torch.Tensor):
                assert left.dtype == right.dtype
                assert left.stride() == right.stride()
                assert torch.equal(left, right)
            else:
                assert left == right
