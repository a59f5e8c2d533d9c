# SPDX-License-Identifier: Apache-2.0
"""Every graph that compiles whole compiles in segments too, skinny and planned, and computes the same: by the example's
inner compilers, on graphs that torch traced."""

import copy
import importlib
import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from layout import PACKAGE, PROJECT, load

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from plan_programs import SumGradients, SumOverRanks, segments_of  # noqa: E402
from plan_programs import reduce as total  # noqa: E402
from plan_rounds import plans_of  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._guards import detect_fake_mode  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

pytestmark = [pytest.mark.flat_only, pytest.mark.skipif(bool(PACKAGE), reason="runs the checkout's own examples")]

_graph_plan = load("_graph_plan")


@pytest.fixture(scope="module")
def backend_module(tmp_path_factory):
    """The example's backend, and process group '0' of 4 ranks, of which this process plays all. Graphs may
    hold sizes that depend on data. Inductor's cache is empty at first, and then that of all the programs."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROJECT / "examples"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
            yield importlib.import_module("handshake_backend")
    dist.destroy_process_group()


# ---------------------------------------------------------------------- programs: in each, what ranks differ in is `k`


def exchanged_splits(k, x, counts):
    splits = counts.tolist()
    y = torch.ops._c10d_functional.all_to_all_single(x.sin(), splits, splits, "0")
    y = torch.ops._c10d_functional.wait_tensor(y) * k
    return total(y.cos().sum(0)).exp(), y


def found(k, x):
    return total(total(torch.nonzero(x > 0.5).sin()) * k) + 1


def found_twice(k, x):
    """Their size is 2·u0, and no node says u0."""
    places = torch.nonzero(x > 0.5).float()
    y = total(torch.cat([places, places]).sin()) * k
    return total(y.cos()) + 1


def selected(k, x):
    y = total(x[x > 0.5].sin()) * k
    return total(torch.cat([y, y, x.flatten()]).cos()), y


def unique(k, x):
    values, inverse, counts = torch._unique2(x.flatten(), return_inverse=True, return_counts=True)
    y = total(values.sin()) * k
    return total(torch.cat([y, counts.float()]).cos()), inverse


def repeated(k, x, counts):
    y = total(x.repeat_interleave(counts, dim=0).sin()) * k
    return total(y.cos()).sum()


def size_from_a_tensor(k, x, count):
    size = count.item()
    torch._check(size >= 0)
    torch._check(size <= 4)
    y = total(x.narrow(0, 0, size).sin()) * k
    return y.sum() + total(total(torch.full((size * 2,), 1.5).cos()).sum()) * size


def two_sizes(k, first, second):
    y = total(torch.cat([torch.ones(first.item()), torch.ones(second.item())]).sin()) * k
    return total(y.cos()), y[:1]


def guarded_size(k, x, count):
    size = count.item()
    torch._check(size >= 2)
    torch._check(size % 2 == 0)
    y = total(x.new_ones(size, 4).view(-1, 2, 4).sin()) * k
    return total(y.sum(0)).cos()


def number_from_a_tensor(k, x, factor):
    number = factor.sum().item()
    y = total((x * number).sin()) * k
    return total(y.cos() * number)


def dynamic_sizes(k, x):
    y = total(torch.cat([x, x]).sin()) * k
    y = y.reshape(y.shape[0] // 2, 2, -1)
    return total(y.sum(1)) + x.shape[0], x.shape[0] * 2


def mutated(k, x, y):
    z = total(y.sin())
    x.add_(z.cos())
    w = x * k
    x.mul_(total(w.exp()))
    return total(w.cos()) + z


def views(k, x):
    y = total(x.t().sin())
    return total((y * k).t()[1:].cos()).t(), x[0], x.as_strided((2, 2), (4, 1))


@torch.library.custom_op("handshake_test::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scale.register_fake
def _(x, factor):
    return torch.empty_like(x)


@torch.library.custom_op("handshake_test::bump", mutates_args={"x"})
def bump(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("handshake_test::pick", mutates_args=())
def pick(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0.5].clone()


@pick.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


def custom_ops(k, x):
    y = total(scale(x.sin(), 2.0)) * k
    z = y.clone()
    bump(z)
    return total(z.cos()) + total(pick(y).sin()).sum()


def branches(k, x, count):
    y = total(x.narrow(0, 0, count.item()).sin())
    y = torch.cond(y.sum() > 0, lambda a: a.sin() * k, lambda a: a.cos(), (y,))
    return total(y.exp()) + 1


def loop(k, x):
    y = total(x.sin()) * k
    _, y = torch._higher_order_ops.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.sin()), (torch.tensor(0), y))
    return total(y.exp()) + 1


def several_results(k, x):
    values, places = total(x.sin()).topk(2)
    values = total(values * k)
    return values.cos(), places, [x]


def random_numbers(k, x):
    return total(torch.bernoulli((total(torch.bernoulli(x.sigmoid())) * k).sigmoid())) + 1


def jagged(k, x):
    y = total(x.values().sin()) * k
    return total(torch.nested.nested_tensor_from_jagged(y, x.offsets()).cos().values()) + 1


def distributed_tensor(k, x):
    mesh = meshes[0]
    y = DTensor.from_local(x, mesh, [Partial()]).redistribute(placements=[Replicate()])
    y = DTensor.from_local((y.sin() * k).to_local().cos(), mesh, [Partial()])
    return y.redistribute(placements=[Shard(0)]).to_local() + 1


def trained(k, x, weight):
    """Its backward graph takes sizes from the forward one."""
    places = torch.nonzero(x[:, 0] > 0.5).flatten()
    y = SumOverRanks.apply(SumGradients.apply(x)[places] @ weight) * k
    return SumOverRanks.apply((y @ weight).tanh())


meshes: list[Any] = []


def matrix(requires_grad: bool = False) -> Any:
    return (torch.arange(16.0).reshape(4, 4) / 8).requires_grad_(requires_grad)


def ragged() -> Any:
    return torch.nested.nested_tensor_from_jagged(matrix(), torch.tensor([0, 1, 4]))


class Case(NamedTuple):
    program: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    planned: str = "fat local fat"  # of the forward graph


CASES = [
    Case(exchanged_splits, lambda: (matrix(), torch.ones(4, dtype=torch.int64))),
    Case(found, lambda: (matrix(),)),
    Case(found_twice, lambda: (matrix(),)),
    Case(selected, lambda: (matrix(),)),
    Case(unique, lambda: (matrix(),)),
    Case(repeated, lambda: (matrix(), torch.tensor([1, 0, 2, 1]))),
    Case(size_from_a_tensor, lambda: (matrix(), torch.tensor(2))),
    Case(two_sizes, lambda: (torch.tensor(2), torch.tensor(1))),
    Case(guarded_size, lambda: (matrix(), torch.tensor(2))),
    Case(number_from_a_tensor, lambda: (matrix(), torch.tensor([0.5]))),
    Case(dynamic_sizes, lambda: (matrix(),)),
    Case(mutated, lambda: (matrix(), matrix())),
    Case(views, lambda: (matrix(),)),
    Case(custom_ops, lambda: (matrix(),)),
    Case(branches, lambda: (matrix(), torch.tensor(2))),
    Case(loop, lambda: (matrix(),)),
    Case(several_results, lambda: (matrix(),)),
    Case(random_numbers, lambda: (matrix(),)),
    Case(jagged, lambda: (ragged(),)),
    Case(distributed_tensor, lambda: (matrix(),)),
    Case(trained, lambda: (matrix(True), matrix(True))),
]


def leaves(values: Any) -> list[Any]:
    parts = torch.utils._pytree.tree_leaves(values)
    return [part.values() if getattr(part, "layout", None) is torch.jagged else part for part in parts]


def ran(case: Case, k: int, compile_graph: Callable[[Any, int], Any], decompositions: Any) -> list[Any]:
    """Results, inputs afterwards and gradients, when `compile_graph` is given each graph and its number."""
    count = 0

    def compiler(graph_module, example_inputs):
        nonlocal count
        number, compiled, count = count, [], count + 1

        def run(arguments):
            if not compiled:
                compiled.append(compile_graph(graph_module, number))
            return compiled[0](arguments)

        run._boxed_call = True
        return run

    torch._dynamo.reset()
    torch.manual_seed(3)
    inputs = case.inputs()
    if case.program is dynamic_sizes:
        torch._dynamo.mark_dynamic(inputs[0], 0)
    if case.program is distributed_tensor:
        meshes[:] = [init_device_mesh("cpu", (4,))]
    backend = aot_autograd(fw_compiler=compiler, decompositions=decompositions)
    results = torch.compile(lambda *arguments: case.program(k, *arguments), backend=backend, fullgraph=True)(*inputs)
    gradients = []
    if any(result.requires_grad for result in leaves(results) if isinstance(result, torch.Tensor)):
        results.sum().backward()
        gradients = [value.grad for value in inputs]
    return [part.detach() if isinstance(part, torch.Tensor) else part for part in leaves((results, inputs, gradients))]


@pytest.mark.parametrize(
    "inner",
    [
        "eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="needs a C++ compiler"),
        ),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=[case.program.__name__ for case in CASES])
def test_what_compiles_whole_compiles_in_segments(case, inner, backend_module):
    compiler = backend_module._INNER[inner]()
    peers: list[Any] = []
    segments: list[str] = []

    def kept(graph_module, number):
        peers.append(copy.copy(graph_module))
        return make_boxed_func(graph_module.forward)

    def compiled(graph_module):
        return compiler.compile(graph_module, detect_fake_mode([n.meta.get("val") for n in graph_module.graph.nodes]))

    def in_segments(split):
        segments.append(segments_of(split))
        for name, segment in list(split.named_children()):
            called, run = torch.nn.Module(), compiled(segment)
            called.forward = lambda *arguments, run=run: run(list(arguments))
            split.set_submodule(name, called)
        return make_boxed_func(split.forward)

    def planned(graph_module, number):
        plan, _ = plans_of([graph_module, peers[number]])[0]
        return in_segments(plan.program)

    def run(k, compile_graph):
        return ran(case, k, compile_graph, compiler.decompositions)

    with torch._inductor.config.patch(fallback_random=True):
        run(3, kept)
        whole = run(2, lambda graph_module, number: compiled(graph_module))
        skinny = run(2, lambda graph_module, number: in_segments(_graph_plan.split_skinny(graph_module)))
        del segments[:]
        by_plan = run(2, planned)
    assert segments[0] == case.planned
    for results in (skinny, by_plan):
        assert len(results) == len(whole)
        for ours, expected in zip(results, whole, strict=True):
            if isinstance(expected, torch.Tensor) and inner == "inductor":  # which may round otherwise where it fuses
                torch.testing.assert_close(ours, expected)
            else:
                assert torch.equal(ours, expected) if isinstance(expected, torch.Tensor) else ours == expected
