# SPDX-License-Identifier: Apache-2.0
"""Graphs: counting collectives, fingerprints that are equal exactly when programs are, texts and records for people."""

import functools
import itertools
import json
import logging
import math
import operator
import random
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from graph_workers import built, compiled, sample_fingerprints, traced, world
from layout import TESTS, child_environment, load
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

_graph = load("_graph")
_vocabulary = load("_vocabulary")

c10d = torch.ops._c10d_functional
fingerprint = _graph.graph_fingerprint


@pytest.fixture(scope="module")
def ops_of_mine():
    """Ops as other libraries define them. Of the collectives one names its group, another takes it, a third neither."""
    with torch.library._scoped_library("handshake_ops", "DEF") as library:
        library.define("all_reduce(Tensor x, str group_name) -> Tensor")
        library.define("rotated(Tensor x, __torch__.torch.classes.c10d.ProcessGroup ring) -> Tensor")
        library.define("dispatched(Tensor x, int buffer) -> Tensor")
        library.define("normed(Tensor x, int group) -> Tensor")
        library.define("placed(Tensor x, str where) -> Tensor")
        for name in ("all_reduce", "rotated", "dispatched", "normed", "placed"):
            library.impl(name, lambda x, _: x.clone(), "CompositeExplicitAutograd")
        yield torch.ops.handshake_ops


def group_id(*ranks):
    return _vocabulary.ProcessGroupId(ranks)


def make_groups():
    """The groups {0, 1} and {1, 2}, as rank 1 has them."""
    return dist.new_group([0, 1]), dist.new_group([1, 2])


# --- Different programs have different fingerprints ---


def case(first, second, *inputs, second_inputs=None, stages=("dynamo", "forward"), **options):
    """Two functions, or one with two sets of inputs, that must differ in the graphs of these stages."""
    return first, second, inputs, inputs if second_inputs is None else second_inputs, stages, options


def ones(*shape, **options):
    return torch.ones(*shape, **options)


def marked(tensor, highest):
    torch._dynamo.mark_dynamic(tensor, 0, min=2, max=highest)
    return tensor


def same(x):
    return x * 3 + x


def same_of_two(x, y):
    return x * 3 + y


def changes_first(x, y):
    total = x + y
    x.copy_(total)
    return total * 1


def changes_second(x, y):
    total = x + y
    y.copy_(total)
    return total * 1


def changes_none(x, y):
    total = x + y
    return total * 1, total


def without_gradient(x):
    with torch.no_grad():
        return x * 2


def under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class DoubledElse(Doubled):
    @staticmethod
    def forward(ctx, x):
        return x * 2.5


@torch.compiler.nested_compile_region
def region(x):
    return torch.sin(x) * 2


@torch.compiler.nested_compile_region
def other_region(x):
    return torch.sin(x) * 3


FORWARD = ("forward",)
DYNAMO = ("dynamo",)
BACKWARD = ("backward",)
CHANNELS_LAST = torch.channels_last
SHARED = ones(6)

DIFFERENCES = {
    "op": case(lambda x: x + 1, lambda x: x - 1, ones(3)),
    "overload": case(
        lambda x: torch.ops.aten.add.Tensor(x, 2), lambda x: torch.ops.aten.add.Scalar(x, 2), ones(3), stages=DYNAMO
    ),
    "overload after functionalisation": case(lambda x: x.sum(), lambda x: x.sum(0), ones(3)),
    # Inputs are numbered as the function meets them: x, y.
    "order of arguments": case(lambda x, y: (x + y) * (x - y), lambda x, y: (x + y) * (y - x), ones(3), ones(3)),
    "argument": case(lambda x: x.sum(0), lambda x: x.sum(1), ones(3, 3)),
    "keyword argument": case(
        lambda x: torch.nn.functional.gelu(x, approximate="none"),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        ones(3),
    ),
    "slice": case(lambda x: x[1:], lambda x: x[:2], ones(3)),
    "constant": case(lambda x: x * 2, lambda x: x * 3, ones(3)),
    "integer or float": case(lambda x: x * 2, lambda x: x * 2.0, ones(3)),
    "integer or bool": case(lambda x: x * 1, lambda x: x * True, ones(3)),
    "float in its last bit": case(lambda x: x * 0.1, lambda x: x * math.nextafter(0.1, 1), ones(3)),
    "sign of zero": case(lambda x: x * 0.0, lambda x: x * -0.0, ones(3)),
    "infinity or not a number": case(lambda x: x * math.inf, lambda x: x * math.nan, ones(3)),
    "sign of infinity": case(lambda x: x * math.inf, lambda x: x * -math.inf, ones(3)),
    "conversion": case(lambda x: x.to(torch.float64), lambda x: x.to(torch.bfloat16), ones(3)),
    "dtype of an input": case(same, same, ones(3), second_inputs=[ones(3, dtype=torch.float64)]),
    "shape of an input": case(same, same, ones(3), second_inputs=[ones(4)]),
    "rank of an input": case(same, same, ones(4), second_inputs=[ones(4, 1)]),
    "stride of an input": case(same, same, ones(3, 3), second_inputs=[ones(3, 3).t()]),
    # For a function that saves nothing AOTAutograd's forward program is one; the backward is a graph of its own.
    "input that requires a gradient": case(
        same, same, ones(3), second_inputs=[ones(3, requires_grad=True)], stages=DYNAMO
    ),
    "number of inputs": case(lambda x, y: x + 1 + y * 0, lambda x, y: x + 1, ones(3), ones(3)),
    "memory format": case(
        lambda x: x.contiguous(memory_format=CHANNELS_LAST) * 1, lambda x: x.contiguous() * 1, ones(2, 3, 4, 5)
    ),
    "dynamic or static": case(same, same, marked(ones(4), 8), second_inputs=[ones(4)]),
    "symbols shared by two sizes": case(
        same_of_two, same_of_two, ones(5), ones(5), second_inputs=[ones(5), ones(1)], dynamic=True
    ),
    "which sizes a symbol is shared by": case(
        lambda x, y, z: (x * 1, y * 1, z * 1, x + y),
        lambda x, y, z: (x * 1, y * 1, z * 1, x + z),
        *(ones(5), ones(5), ones(5)),
        dynamic=True,
    ),
    "expression of a symbol": case(
        lambda x: x.new_zeros(x.shape[0] + 1), lambda x: x.new_zeros(x.shape[0] * 2), ones(5), dynamic=True
    ),
    "range of a symbol": case(same, same, marked(ones(4), 8), second_inputs=[marked(ones(4), 16)]),
    "symbolic argument": case(lambda x: x * x.shape[0], lambda x: x * x.shape[1], ones(5, 7), dynamic=True),
    "order": case(lambda x: (x.sin(), x.cos()), lambda x: tuple(reversed((x.cos(), x.sin()))), ones(3)),
    "order of outputs": case(
        lambda x: (lambda a, b: (a, b))(x.sin(), x.cos()), lambda x: (lambda a, b: (b, a))(x.sin(), x.cos()), ones(3)
    ),
    "an output more": case(lambda x: (x.sin(), x), lambda x: (x.sin(), x.sin() + 1), ones(3)),
    "output computed or passed on": case(lambda x: (x.clone(), x.sin()), lambda x: (x * 1, x.sin()), ones(3)),
    "reference": case(
        lambda x: (lambda a, b: a.exp() + b * 0)(x.sin(), x.cos()),
        lambda x: (lambda a, b: b.exp() + b * 0 if a is None else b.exp() + a * 0)(x.sin(), x.cos()),
        ones(3),
    ),
    "input mutated": case(changes_first, changes_none, ones(3), ones(3)),
    "which input is mutated": case(changes_first, changes_second, ones(3), ones(3)),
    "inputs that share memory": case(
        same_of_two, same_of_two, SHARED[:3], SHARED[3:], second_inputs=[ones(3), ones(3)]
    ),
    "tensor constant": case(lambda x: x + torch.tensor([1.0, 2.0]), lambda x: x + torch.tensor([1.0, 2.5]), ones(2)),
    "dtype of a tensor constant": case(
        lambda x: x + torch.tensor([1, 2]), lambda x: x + torch.tensor([1, 2], dtype=torch.int32), ones(2)
    ),
    "gradient mode": case(lambda x: x * 2, without_gradient, ones(3, requires_grad=True), stages=DYNAMO),
    "autocast": case(lambda x: x @ x, under_autocast, ones(3, 3)),
    "backward": case(
        lambda x: (x * x).sum(), lambda x: (x * x.detach()).sum() * 1, ones(3, requires_grad=True), stages=BACKWARD
    ),
    "checkpointed body": case(
        lambda x: checkpoint(lambda y: y.sin() * 2, x, use_reentrant=False),
        lambda x: checkpoint(lambda y: y.sin() * 3, x, use_reentrant=False),
        ones(3, requires_grad=True),
    ),
    "branch of a condition": case(
        lambda x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,)),
        lambda x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 4, (x,)),
        ones(3),
    ),
    "which branch of a condition": case(
        lambda x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,)),
        lambda x: torch.cond(x.sum() > 0, lambda y: y * 3, lambda y: y * 2, (x,)),
        ones(3),
    ),
    "body of a region": case(lambda x: region(region(x)), lambda x: other_region(other_region(x)), ones(3)),
    "body of an autograd function": case(
        lambda x: Doubled.apply(x), lambda x: DoubledElse.apply(x), ones(3, requires_grad=True)
    ),
    "random seed consumed": case(
        lambda x: torch.nn.functional.dropout(x, 0.5), lambda x: torch.nn.functional.dropout(x, 0.25), ones(3)
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_programs_that_differ_have_different_fingerprints(name):
    first, second, inputs, second_inputs, stages, options = DIFFERENCES[name]
    options["with_backward"] = "backward" in stages
    one = compiled(first, *inputs, **options)
    other = compiled(second, *second_inputs, **options)
    for stage in stages:
        graphs, others = getattr(one, stage), getattr(other, stage)
        assert graphs and others
        assert [fingerprint(graph) for graph in graphs] != [fingerprint(graph) for graph in others], stage
        assert not any(fingerprint(graph).startswith("unhashable") for graph in [*graphs, *others])


def all_reduce(x, group, reduction="sum"):
    return funcol.all_reduce(x, reduction, group)


def two_at_once(x, first, second):
    """Two collectives, both under way before either is waited for."""
    one = c10d.all_reduce(x, "sum", first.group_name)
    other = c10d.all_reduce(x, "sum", second.group_name)
    return c10d.wait_tensor(one) + c10d.wait_tensor(other)


COLLECTIVE_DIFFERENCES = {
    "group": (lambda x, a, b: all_reduce(x, a), lambda x, a, b: all_reduce(x, b)),
    "reduction": (lambda x, a, b: all_reduce(x, a), lambda x, a, b: all_reduce(x, a, "max")),
    "collective": (
        lambda x, a, b: all_reduce(x, a),
        lambda x, a, b: funcol.reduce_scatter_tensor(funcol.all_gather_tensor(x, 0, a), "sum", 0, a),
    ),
    "order of collectives": (lambda x, a, b: two_at_once(x, a, b), lambda x, a, b: two_at_once(x, b, a)),
    "collective in a checkpointed body": (
        lambda x, a, b: checkpoint(all_reduce, x, a, use_reentrant=False),
        lambda x, a, b: checkpoint(all_reduce, x, b, use_reentrant=False),
    ),
    "another group of the same ranks": (
        lambda x, a, b: all_reduce(x, dist.group.WORLD),
        lambda x, a, b: all_reduce(x, WHOLE[0]),
    ),
}
WHOLE = []


@pytest.mark.parametrize("groups", ["exact", "role"])
@pytest.mark.parametrize("name", COLLECTIVE_DIFFERENCES)
def test_collectives_that_differ_have_different_fingerprints(name, groups):
    with world(1):
        a, b = make_groups()
        WHOLE[:] = [dist.new_group()]
        for stage in ("dynamo", "forward"):
            one, other = (
                getattr(compiled(lambda x: function(x, a, b), ones(4)), stage)  # noqa: B023
                for function in COLLECTIVE_DIFFERENCES[name]
            )
            assert fingerprint(one[0], groups) != fingerprint(other[0], groups), stage


def on_device(device):
    with FakeTensorMode():
        return make_fx(lambda x: torch.zeros(3, device=device) + x)(torch.ones(3, device=device))


def test_the_type_of_a_device_counts_and_its_index_does_not():
    assert fingerprint(on_device("cuda:0")) == fingerprint(on_device("cuda:1"))
    assert fingerprint(on_device("cuda:0")) != fingerprint(on_device("cpu"))
    by_text = [fingerprint(built((torch.zeros, (3,), {"device": device}))) for device in ("cuda:0", "cuda:1", "cpu")]
    assert by_text[0] == by_text[1] != by_text[2]
    moved = [compiled(lambda x, to=text: x.to(to) * 2, ones(3)).dynamo[0] for text in ("meta", "meta:0", "cpu")]
    assert fingerprint(moved[0]) == fingerprint(moved[1]) != fingerprint(moved[2])


def test_a_text_that_is_no_device_counts_whole(ops_of_mine):
    graphs = [
        traced(lambda x: ops_of_mine.placed(x, "cpu:0"), ones(3)),
        traced(lambda x: ops_of_mine.placed(x, "cpu:1"), ones(3)),
    ]
    assert fingerprint(graphs[0]) != fingerprint(graphs[1])
    lines = [record_of(graph_module)["body"]["nodes"][1]["line"] for graph_module in graphs]
    assert [line.partition("(")[2] for line in lines] == ["x_1, 'cpu:0')", "x_1, 'cpu:1')"]


def test_layouts_differ():
    dense, sparse = (traced(lambda x: x * 1, x) for x in (ones(2, 2), ones(2, 2).to_sparse()))
    assert fingerprint(dense) != fingerprint(sparse)


# Values that stand as arguments in graphs, no two of which are the same program.
ARGUMENTS = [
    None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1j, "", "1", "a,b", "a", b"a", "None",
    "torch.float32", torch.float32, torch.float64, torch.strided, torch.channels_last, torch.device("cpu"),
    torch.device("meta"), (), (1,), [], [1], [[1]], [1, 2], ["1,2"], {}, {"a": 1}, {"a": 2}, {"b": 1}, {1: 1},
    frozenset({1}), frozenset({1, 2}), slice(1), slice(1, None), slice(None, None, 2), ..., range(3), range(4),
    torch.Size([1, 2]), torch.add, torch.sub, torch.nn.functional.relu, torch.relu, int, float,
    torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar, torch.ops.aten.add, functools.partial(torch.add, alpha=1),
    functools.partial(torch.add, alpha=2), functools.partial(torch.add, 1), lambda x: x + 1, lambda x: x + 2,
    lambda x, by=3: x + by, torch.Tensor.add, torch.Tensor.sub, re.RegexFlag.MULTILINE, re.RegexFlag.DOTALL,
    torch.distributed.tensor.Shard(0), torch.distributed.tensor.Shard(1), torch.distributed.tensor.Replicate(),
    torch.finfo(torch.float32), torch.iinfo(torch.int8), dist.ReduceOp.SUM, dist.ReduceOp.MAX,
]  # fmt: skip


def test_each_argument_value_has_a_fingerprint_of_its_own():
    of_values = {}
    for value in ARGUMENTS:
        made = fingerprint(built((isinstance, ({0}, value))))
        assert not made.startswith("unhashable"), value
        assert made not in of_values, (value, of_values.get(made))
        of_values[made] = value
    # Torch's containers in graphs are equal to Python's.
    assert fingerprint(built((isinstance, ({0}, [1])))) == fingerprint(built((isinstance, ({0}, [1]))))


def test_nested_arguments_have_a_fingerprint_of_their_own():
    """Whatever is in texts and keys: nothing in them is taken for a bracket, a separator or another leaf."""

    def containers(parts):
        yield from ([], (), {}, slice(None))
        for part in parts:
            yield from ([part], (part,), {"k": part}, {part: 1} if isinstance(part, str) else [[part]], slice(part))
        for one, other in itertools.product(parts, repeat=2):
            yield from ([one, other], (one, other), {"k": one, "l": other}, slice(one, other))

    leaves = [None, 0, "", "0", "None", "[]", ":0", "[0]:0,[1]:0", "'", "\\'", "0,1=:0", "k'}:0,{:'l"]
    inner = list(containers(leaves[:5]))
    values = [*leaves, *containers(leaves), *containers([*inner[:24], *leaves[:2]])]
    different = {repr(value): value for value in values}
    prints = {fingerprint(built((isinstance, ({0}, value)))): text for text, value in different.items()}
    assert len(prints) == len(different) > 2000
    assert not any(text.startswith("unhashable") for text in prints)


def test_reductions_of_c10d_ops_count_by_their_kind():
    """The ops that `dist.all_reduce` and its like are traced as take the reduction as an object of C++."""

    def graph(reduction):
        def function(x, y):
            dist.all_reduce(x, reduction)
            dist.reduce(x, 0, reduction)
            dist.reduce_scatter_single(y, x, reduction)
            return x + 1

        with world(0, 2):
            return fingerprint(make_fx(function)(torch.ones(4), torch.ones(2)))

    kinds = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG)
    prints = [graph(kind) for kind in (*kinds, dist.ReduceOp.SUM)]
    assert not any(each.startswith("unhashable") for each in prints)
    assert len(set(prints)) == 3
    assert prints[0] == prints[3]
    # The factor can't be read, and two that differ must not be taken for equal.
    assert graph(dist._make_nccl_premul_sum(2.0)).startswith("unhashable")


def test_functions_made_in_functions_count_by_code_and_captured_values():
    def scale(by):
        return lambda x: x * by

    prints = [fingerprint(built((scale(by), ({0},)))) for by in (2, 2, 3)]
    assert prints[0] == prints[1] != prints[2]


def test_a_name_that_two_functions_share_is_not_taken_for_either():
    def scaled(by):
        @functools.wraps(same)
        def wrapper(x):
            return same(x) * by

        return wrapper

    prints = [fingerprint(built((function, ({0},)))) for function in (scaled(2), scaled(2), scaled(3), same)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    kinds = [type("int", (int,), {"__module__": "builtins"}), int]
    assert len({fingerprint(built((isinstance, ({0}, kind)))) for kind in kinds}) == 2


def test_order_of_keys_does_not_count():
    one = built((isinstance, ({0}, {"a": 1, "b": 2})), (torch.add, ({0}, 1), {"alpha": 2, "out": None}))
    other = built((isinstance, ({0}, {"b": 2, "a": 1})), (torch.add, ({0}, 1), {"out": None, "alpha": 2}))
    assert fingerprint(one) == fingerprint(other)


# --- Tensors that belong to the graph ---


def with_attribute(value, name="held", as_buffer=False):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    root = torch.nn.Module()
    if as_buffer:
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)
    graph.output((graph.call_function(torch.add, (x, graph.get_attr(name))),))
    return torch.fx.GraphModule(root, graph)


def constants():
    return [
        torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), torch.tensor([1, 2]), torch.tensor([1.0, -0.0]),
        torch.tensor([1.0, 0.0]), torch.tensor([1.0, math.nan]), torch.tensor([[1.0, 2.0]]),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([True, False]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1 + 1j, 2]),
        torch.tensor([1 + 1j, 2]).conj(), torch.tensor(1.0), torch.tensor([]), torch.tensor([], dtype=torch.int64),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t(),
        torch.tensor([1.0, 2.0], dtype=torch.float8_e4m3fn),
    ]  # fmt: skip


def test_tensor_constants_count_by_value():
    prints = [fingerprint(with_attribute(value)) for value in constants()]
    assert len(set(prints)) == len(prints)
    assert prints == [fingerprint(with_attribute(value)) for value in constants()]
    assert prints[0] == fingerprint(with_attribute(constants()[0], "other_name"))
    assert prints[0] == fingerprint(with_attribute(constants()[0], as_buffer=True))


def test_a_tensor_constant_is_hashed_by_value_while_a_graph_is_compiled():
    """Compilers run under a fake tensor mode, in which a real tensor's elements can't be read as usual."""
    prints = []
    for value in (1.0, 2.0):
        graphs = compiled(lambda x: x + torch.tensor([value, 3.0]), ones(2), seen=fingerprint)  # noqa: B023
        assert graphs.seen_results == [fingerprint(graph) for graph in graphs.all]
        prints.append(graphs.seen_results[-1])
    assert prints[0] != prints[1]


def test_parameters_and_inputs_count_by_metadata():
    weights = [torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0)]
    wide = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    one, other, *different = (fingerprint(with_attribute(weight)) for weight in [*weights, wide, frozen])
    assert one == other
    assert len({one, *different}) == 3
    linears = [torch.nn.Linear(2, 2) for _ in range(2)]
    lifted = [compiled(linear, ones(2, 2)).all for linear in linears]
    assert [fingerprint(graph) for graph in lifted[0]] == [fingerprint(graph) for graph in lifted[1]]


def test_two_parameters_that_look_alike_are_not_one():
    """Where a graph holds its parameters as attributes, each use has a node of its own."""

    def graph(*names):
        graph = torch.fx.Graph()
        root = torch.nn.Module()
        for name in names:
            root.register_parameter(name, torch.nn.Parameter(ones(2)))
        first, second = graph.get_attr(names[0]), graph.get_attr(names[-1])
        graph.output((graph.call_function(torch.add, (first, second)),))
        return fingerprint(torch.fx.GraphModule(root, graph))

    assert graph("a") == graph("b") != graph("a", "b") == graph("c", "d")


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_a_module_whose_program_is_not_in_the_graph_makes_it_unhashable(module):
    class Caller(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.called = module

        def forward(self, x):
            return self.called(x, x) if isinstance(module, torch.nn.CrossEntropyLoss) else self.called(x)

    assert_unhashable(torch.fx.symbolic_trace(Caller()), "called")


def assert_unhashable(graph_module, *reasons):
    """It equals no other graph, itself included, and says why."""
    assert fingerprint(graph_module).startswith("unhashable-")
    with pytest.raises(_vocabulary.HandshakeError) as raised:
        _graph.canonical_nodes(graph_module)
    assert all(reason in str(raised.value) for reason in reasons), str(raised.value)


def fake(value=1.0):
    with FakeTensorMode() as mode:
        return mode.from_tensor(torch.full((2,), value))


class Hollow(torch.Tensor):
    """A tensor subclass that wraps another tensor without saying so, and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, kinds, arguments=(), options=None):
        return arguments[0]


class Wrapper(Hollow):
    """One that says so."""

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapper(inner["inner"])


UNREADABLE = {
    "fake": fake,
    "meta": lambda: ones(2, device="meta"),
    "fake inside a tensor subclass": lambda: Wrapper(fake()),
    "meta inside a tensor subclass": lambda: Wrapper(ones(2, device="meta")),
    "subclass without memory": lambda: Hollow(ones(2)),
    "functional": lambda: torch._to_functional_tensor(ones(2)),
    "sparse": lambda: ones(2).to_sparse(),
    "scaled": lambda: torch._make_per_tensor_quantized_tensor(ones(2, dtype=torch.uint8), 0.5, 0),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_tensor_constant_whose_value_cannot_be_read_makes_a_graph_unhashable(name):
    """Equal fingerprints for values that nobody compared would let ranks run different programs as one."""
    value = UNREADABLE[name]()
    assert_unhashable(with_attribute(value), "held")
    assert_unhashable(with_attribute(value, as_buffer=True), "held")
    if "subclass" not in name and name != "functional":  # as parameters these are inputs: their metadata counts
        hash_of = fingerprint(with_attribute(torch.nn.Parameter(value, requires_grad=False)))
        assert not hash_of.startswith("unhashable")
    body = torch.fx.Graph()
    body.output((body.call_function(torch.add, (body.placeholder("x"), body.get_attr("held"))),))
    nested = torch.nn.Module()
    nested.held = value
    assert_unhashable(with_attribute(torch.fx.GraphModule(nested, body)), "held")
    assert_unhashable(built((isinstance, ({0}, [value]))), "isinstance")


def test_tensor_subclasses_count_by_the_value_inside():
    prints = [fingerprint(with_attribute(Wrapper(torch.tensor([1.0, value])))) for value in (2.0, 2.0, 3.0)]
    assert prints[0] == prints[1] != prints[2]
    assert not prints[0].startswith("unhashable")


def test_a_constant_that_a_fake_tensor_carries_is_read():
    with FakeTensorMode(allow_non_fake_inputs=True):
        carried = [torch.tensor([value]) for value in (1.0, 1.0, 2.0)]
    assert all(tensor.constant is not None for tensor in carried)
    prints = [fingerprint(with_attribute(tensor)) for tensor in carried]
    assert prints[0] == prints[1] != prints[2]


# --- Equal programs have equal fingerprints ---


def test_another_process_hash_seed_path_and_number_of_graphs_before(tmp_path):
    """And, by role, another rank of a mesh that compiles a program on distributed tensors."""
    shutil.copy(TESTS / "graph_workers.py", tmp_path / "elsewhere.py")
    command = [sys.executable, str(tmp_path / "elsewhere.py"), "2", "3"]
    environment = child_environment(PYTHONHASHSEED="1234")
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True, cwd=tmp_path) as other:
        here = sample_fingerprints(fingerprint, 0)
        output, _ = other.communicate(timeout=120)
    assert json.loads(output.splitlines()[-1]) == here
    prints = here["exact"] + here["role"]
    assert len(prints) == 8
    assert len(set(prints)) == len(prints)
    assert not any(text.startswith("unhashable") for text in prints)


def test_names_of_nodes_do_not_count():
    graph_module = compiled(lambda x: torch.sin(x) * 2, ones(3)).forward[0]
    before = fingerprint(graph_module)
    for node in graph_module.graph.nodes:
        node.name = f"renamed_{node.name}"
    assert fingerprint(graph_module) == before


def test_the_number_of_a_region_does_not_count():
    graph_module = compiled(lambda x: region(region(x)), ones(3)).dynamo[0]
    before = fingerprint(graph_module)
    calls = [node for node in graph_module.graph.nodes if str(node.target) == "invoke_subgraph"]
    assert len(calls) == 2
    for call in calls:
        call.args = (call.args[0], f"{call.args[1]}_17", *call.args[2:])
    assert fingerprint(graph_module) == before


def test_names_and_hints_of_symbols_do_not_count():
    def product(x, y):
        return (x[:, None] * y[None, :]).view(-1)

    def again(left, right):
        return (left[:, None] * right[None, :]).view(-1)

    first = compiled(product, ones(5), ones(7), dynamic=True).all
    hints = compiled(product, ones(11), ones(6), dynamic=True).all
    names = compiled(again, ones(5), ones(7), dynamic=True).all
    assert str(first[0].graph) != str(names[0].graph)
    assert list(map(fingerprint, first)) == list(map(fingerprint, hints)) == list(map(fingerprint, names))


def test_storage_offset_of_an_input_does_not_count():
    storage = ones(8)
    graphs = [compiled(lambda x: x * 2, x).all for x in (ones(4), storage[4:])]
    assert [fingerprint(graph) for graph in graphs[0]] == [fingerprint(graph) for graph in graphs[1]]


# --- Groups by role ---


def fingerprints_of_ranks(function, size, groups="role"):
    """The fingerprints of one program on each rank; `function(rank)` makes the graph inside the rank's world."""
    prints = []
    for rank in range(size):
        with world(rank, size):
            prints.append(fingerprint(function(rank), groups))
    assert not any(text.startswith("unhashable") for text in prints)
    return prints


def mesh_program(*shape):
    names = tuple(f"dim{i}" for i in range(len(shape)))

    def make(rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

        def program(x):
            for name in names:
                x = all_reduce(x * 2, mesh.get_group(name))
            return all_reduce(x, dist.group.WORLD)

        return traced(program, ones(4))

    return make


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (2, 2, 2), (4, 1, 2)])
def test_all_ranks_of_a_mesh_share_one_fingerprint_by_role(shape):
    size = math.prod(shape)
    assert len(set(fingerprints_of_ranks(mesh_program(*shape), size))) == 1
    by_ranks = fingerprints_of_ranks(mesh_program(*shape), size, "exact")
    assert len(set(by_ranks)) > 1


def test_a_mesh_whose_rows_are_no_ranges_shares_one_fingerprint_by_role():
    def make(rank):
        mesh = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("dp", "tp"))
        return traced(lambda x: all_reduce(all_reduce(x, mesh.get_group("tp")), mesh.get_group("dp")), ones(4))

    assert len(set(fingerprints_of_ranks(make, 4))) == 1


def test_equal_stages_of_a_pipeline_share_one_fingerprint_by_role():
    def make(rank):
        stages = [dist.new_group([2 * stage, 2 * stage + 1]) for stage in range(4)]
        stage = stages[rank // 2]
        after, before = (rank + 2) % 8, (rank - 2) % 8

        def program(x):
            y = c10d.wait_tensor(c10d.irecv(x, before, 0, "0"))
            c10d.wait_tensor(c10d.isend(all_reduce(y * 2, stage), after, 0, "0"))
            return y

        return traced(program, ones(4))

    assert len(set(fingerprints_of_ranks(make, 8))) == 1
    assert len(set(fingerprints_of_ranks(make, 8, "exact"))) == 8


def test_the_first_and_last_stage_of_a_pipeline_differ_from_those_between():
    def make(rank):
        def program(x):
            if rank > 0:
                x = c10d.wait_tensor(c10d.irecv(x, rank - 1, 0, "0"))
            x = x * 2
            if rank < 3:
                c10d.wait_tensor(c10d.isend(x, rank + 1, 0, "0"))
            return x

        return traced(program, ones(4))

    prints = fingerprints_of_ranks(make, 4)
    assert prints[1] == prints[2]
    assert len(set(prints)) == 3


def test_ranks_that_use_two_groups_in_another_order_differ():
    """Each rank meets its successor, then its predecessor: to its two members a pair is the first and the second."""

    def make(rank):
        pairs = [dist.new_group(sorted((i, (i + 1) % 4))) for i in range(4)]
        return traced(lambda x: all_reduce(all_reduce(x, pairs[rank]), pairs[rank - 1]), ones(4))

    prints = fingerprints_of_ranks(make, 4)
    assert all(prints[rank] != prints[(rank + 1) % 4] for rank in range(4))


def test_equal_roles_mean_the_same_group_to_all_its_members():
    """On random groups, regular or not, named or not: where two ranks share a group and one of them calls it what the
    other calls some group, that is the same group."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    size = 6
    for _ in range(12):
        groups = []
        for _ in range(draw.randrange(2, 8)):
            if draw.random() < 0.5:
                first, step = draw.randrange(size - 1), draw.randrange(1, size)
                ranks = list(range(first, size, step))[: draw.randrange(2, 4)]
            else:
                ranks = sorted(draw.sample(range(size), draw.randrange(2, 5)))
            groups.append((ranks, draw.choice([None, None, "a", "b"])))
        role_to_group = []
        for rank in range(size):
            with world(rank, size):
                made = [dist.new_group(ranks, group_desc=description) for ranks, description in groups]
                mine = {}
                for number, (ranks, _) in enumerate(groups):
                    if rank in ranks:
                        call = built((c10d.all_reduce.default, ({0}, "sum", made[number].group_name)))
                        mine[_graph.canonical_nodes(call, "role")[1].equality] = number
                assert len(mine) == sum(rank in ranks for ranks, _ in groups)
                role_to_group.append(mine)
        for one in range(size):
            for other in range(size):
                for role, group in role_to_group[one].items():
                    meant = role_to_group[other].get(role)
                    if other in groups[group][0] and meant is not None:
                        assert meant == group, (groups, one, other)


def test_groups_are_named_by_role_unless_the_handshake_is_set_otherwise(monkeypatch):
    def prints(groups=None):
        return fingerprints_of_ranks(mesh_program(2, 2), 4, groups)

    monkeypatch.delenv("TORCH_TPU_INTERNAL_HANDSHAKE_GROUPS", raising=False)
    by_role, by_ranks = prints("role"), prints("exact")
    assert prints() == by_role != by_ranks
    monkeypatch.setenv("TORCH_TPU_INTERNAL_HANDSHAKE_GROUPS", "exact")
    assert prints() == by_ranks
    assert prints("role") == by_role


def test_groups_must_be_named_in_a_known_way():
    with pytest.raises(_vocabulary.HandshakeConfigError, match=r"ranks.*role"):
        fingerprint(built((torch.sin, ({0},))), "ranks")


# --- Counting ---


def names_of(counts):
    assert {group: len(texts) for group, texts in counts.sequences.items()} == counts
    return {group.ranks: number for group, number in counts.items()}


def sequences_of(graph_module):
    return {group.ranks: texts for group, texts in _graph.count_collectives(graph_module).sequences.items()}


def test_every_kind_of_collective_counts_once():
    with world(1):
        pair = dist.new_group([0, 1]).group_name
        calls = {
            c10d.all_reduce.default: ({0}, "sum", pair),
            c10d.all_reduce_.default: ({0}, "sum", pair),
            c10d.all_reduce_coalesced.default: ([{0}, {0}], "sum", pair),
            c10d.all_gather_into_tensor.default: ({0}, 2, pair),
            c10d.all_gather_into_tensor_out.default: ({0}, 2, pair),
            c10d.all_gather_into_tensor_coalesced.default: ([{0}, {0}], 2, pair),
            c10d.reduce_scatter_tensor.default: ({0}, "sum", 2, pair),
            c10d.reduce_scatter_tensor_coalesced.default: ([{0}], "sum", 2, pair),
            c10d.all_to_all_single.default: ({0}, [1, 1], [1, 1], pair),
            c10d.broadcast.default: ({0}, 0, pair),
            c10d.all_reduce: ({0}, "sum", pair),  # a packet, as in Dynamo's graphs
            torch.ops._c10d_functional_autograd.all_gather_into_tensor.default: ({0}, 2, pair),
            torch.ops._dtensor.shard_dim_alltoall.default: ({0}, 0, 1, pair),
            torch.ops.symm_mem.fused_all_gather_matmul.default: ({0}, [{0}], 0, pair),
            torch.ops.symm_mem._low_contention_all_gather.default: ({0}, pair),
            torch.ops.c10d_functional.all_reduce.default: ({0}, "sum", "", [0, 1], 2),
            torch.ops.c10d_functional.all_reduce: ({0}, "sum", "", [2, 3, 0, 1], 2),  # two groups of two
        }
        for target, args in calls.items():
            graph_module = built((target, args))
            node = list(graph_module.graph.nodes)[1]
            assert _graph.is_collective(node), target
            assert _graph.collective_group(node) == group_id(0, 1), target
            assert names_of(_graph.count_collectives(graph_module)) == {(0, 1): 1}, target
            assert _graph.canonical_nodes(graph_module)[1].group == group_id(0, 1), target
            assert _graph.canonical_nodes(graph_module)[1].has_effect
        whole = built(*calls.items())
        assert names_of(_graph.count_collectives(whole)) == {(0, 1): len(calls)}


def test_waiting_is_no_collective():
    for target in (c10d.wait_tensor.default, c10d.wait_tensor, c10d._wrap_tensor_autograd.default, torch.sin):
        graph_module = built((target, ({0},)))
        node = list(graph_module.graph.nodes)[1]
        assert not _graph.is_collective(node)
        assert _graph.count_collectives(graph_module) == {}
        with pytest.raises(_vocabulary.HandshakeConfigError, match=r"is not a collective"):
            _graph.collective_group(node)


def test_collectives_of_a_real_program_count_forward_and_backward():
    with world(1):
        first, second = make_groups()

        def program(x, w):
            y = funcol.all_reduce(x @ w, "sum", first)
            dist.all_reduce(y, group=second)
            gathered = funcol.all_gather_into_tensor_coalesced([y, y + 1], first)
            return funcol.all_gather_tensor_autograd(gathered[0] + gathered[1], 0, second).sum()

        graphs = compiled(program, ones(2, 2, requires_grad=True), ones(2, 2, requires_grad=True), with_backward=True)
        for graph_module in (graphs.dynamo[0], graphs.forward[0]):
            assert names_of(_graph.count_collectives(graph_module)) == {(0, 1): 2, (1, 2): 2}
        assert (1, 2) in names_of(_graph.count_collectives(graphs.backward[0]))


def test_eager_collectives_that_were_traced_count():
    with world(1):
        first, second = make_groups()

        def program(x):
            dist.barrier(group=first)
            dist.send(x, 2, group=second)
            return x

        assert names_of(_graph.count_collectives(traced(program, ones(2)))) == {(0, 1): 1, (1, 2): 1}


def test_point_to_point_ops_count_on_the_line_of_the_pair():
    with world(1):
        batch = (["isend", "irecv", "isend"], [2, 0, 2], [0, 0, 0], [{0}, {0}, {0}], "0")
        graph_module = built((c10d.isend.default, ({0}, 3, 0, "0")), (c10d.batch_p2p_ops.default, batch))
        assert names_of(_graph.count_collectives(graph_module)) == {(1, 3): 1, (1, 2): 2, (0, 1): 1}
        assert _graph.collective_group(list(graph_module.graph.nodes)[2]) == group_id(0, 1, 2)


def test_a_peer_is_a_rank_within_the_group_or_the_global_one_that_dynamo_writes():
    with world(1):
        ends, trio = dist.new_group([1, 3]), dist.new_group([0, 1, 2])
        peers = [(ends, 1, 3), (ends, 3, 3), (trio, 2, 2), (trio, 0, 0)]
        for group, number, peer in peers:
            graph_module = built((c10d.isend.default, ({0}, number, 0, group.group_name)))
            assert names_of(_graph.count_collectives(graph_module)) == {tuple(sorted((1, peer))): 1}
        for number in (2, None):
            graph_module = built((c10d.isend.default, ({0}, number, 0, ends.group_name)))
            with pytest.raises(_vocabulary.HandshakeConfigError, match=r"isend.*(rank 2.*ranks 1, 3|not known)"):
                _graph.count_collectives(graph_module)


def test_nested_bodies_count_as_often_as_they_are_called():
    with world(1):
        first, second = make_groups()
        name, other = first.group_name, second.group_name

        def reduce_by_name(x, group=name):
            return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))

        @torch.compiler.nested_compile_region
        def repeated(x):
            return reduce_by_name(x.sin())

        def twice(x):
            return repeated(repeated(x))

        def inner(x):
            return checkpoint(reduce_by_name, x * 2, use_reentrant=False) + checkpoint(
                reduce_by_name, x, use_reentrant=False
            )

        def branches(x):
            return torch.cond(
                x.sum() > 0,
                lambda y: reduce_by_name(y) * 2,
                lambda y: reduce_by_name(reduce_by_name(y)) + reduce_by_name(y, other),
                (x,),
            )

        def loop(x):
            return torch._higher_order_ops.while_loop(
                lambda i, y: i < 3, lambda i, y: (i + 1, reduce_by_name(y)), (torch.zeros((), dtype=torch.int64), x)
            )

        for program, expected in [
            (twice, {(0, 1): 2}),
            (inner, {(0, 1): 2}),
            (branches, {(0, 1): 2, (1, 2): 1}),
            (loop, {(0, 1): 1}),
        ]:
            graphs = compiled(program, ones(3))
            for graph_module in (graphs.dynamo[0], graphs.forward[0]):
                assert names_of(_graph.count_collectives(graph_module)) == expected, program
                assert any(node.has_effect for node in _graph.canonical_nodes(graph_module)), program


def test_sequences_say_what_all_members_must_agree_on():
    with world(1):
        everyone, pair = dist.group.WORLD, dist.new_group([0, 1])

        def program(x, y):
            reduced = all_reduce(x, everyone)
            gathered = funcol.all_gather_tensor(y.bfloat16(), 0, everyone)
            scattered = funcol.reduce_scatter_tensor(reduced, "avg", 0, everyone)
            sent = funcol.broadcast(reduced, 2, everyone)
            even = funcol.all_to_all_single(x, None, None, everyone)
            uneven = funcol.all_to_all_single(x, [1, 2, 3, x.shape[0] - 6], [x.shape[0] // 4] * 4, everyone)
            several = funcol.all_gather_into_tensor_coalesced([x, y.int()], pair)
            changed = x.clone()
            dist.all_reduce(changed, dist.ReduceOp.MIN, group=pair)
            return gathered, scattered, sent, even, uneven, several, changed

        for dynamic, x, y in [(False, "24", "5"), (True, "?", "?")]:
            graphs = compiled(program, ones(8, 3), ones(5), dynamic=dynamic)
            for graph_module in (graphs.dynamo[0], graphs.forward[0]):
                assert sequences_of(graph_module) == {
                    (0, 1, 2, 3): [
                        f"all_reduce sum float32 {x}",
                        f"all_gather bfloat16 {y}",
                        f"reduce_scatter avg float32 {x}",
                        f"broadcast float32 {x} root 2",
                        f"all_to_all float32 {x}",
                        "all_to_all float32",
                    ],
                    (0, 1): [f"all_gather float32 {x} + int32 {y}", f"all_reduce min float32 {x}"],
                }


def test_sequences_of_eager_collectives_that_were_traced():
    with world(1):
        pair = dist.new_group([0, 1])

        def program(x):
            halves = [torch.empty(2), torch.empty(2)]
            dist.scatter(halves[0], None, src=0, group=pair)
            dist.all_gather(halves, x[:2], group=pair)
            dist.all_to_all(halves, list(x.split(2)), group=pair)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
            dist.reduce(x, 3)
            return x

        assert sequences_of(traced(program, ones(4))) == {
            (0, 1): ["scatter float32 2 root 0", "allgather float32 2", "alltoall float32 + float32"],
            (0, 1, 2, 3): [
                "allreduce avg float32 4", "allreduce premul_sum float32 4", "reduce sum float32 4 root 3",
            ],
        }  # fmt: skip


def test_numbers_that_are_data_are_not_in_sequences():
    """Ranks that trace a size known at run time only may number its symbol differently."""

    def program(x, splits, others):
        first, second = splits.tolist(), others.tolist()
        for number in (*first, *second):
            torch._check(number >= 0)
        exchanged = funcol.all_to_all_single(x, second, first, dist.group.WORLD)
        return all_reduce(exchanged.sum(0), dist.group.WORLD), all_reduce(x.new_ones(second[1], 4), dist.group.WORLD)

    with world(1), torch._dynamo.config.patch(capture_scalar_outputs=True):
        splits = torch.tensor([1, 2, 3, 2])
        graph_module = compiled(program, ones(8, 3), splits, splits).forward[0]
        assert sequences_of(graph_module) == {
            (0, 1, 2, 3): ["all_to_all float32", "all_reduce sum float32 3", "all_reduce sum float32 ?"]
        }


def test_both_ends_of_a_pair_have_the_same_sequence():
    def sequence(rank, ops, peers, tensors):
        def program(large, small):
            given = [{"large": large, "small": small}[name] for name in tensors]
            return c10d.batch_p2p_ops(ops, peers, [0] * len(ops), given, "0")

        with world(rank):
            return sequences_of(traced(program, ones(4), ones(3)))[0, 1]

    expected = ["send_recv float32 3", "send_recv float32 4"]
    assert sequence(0, ["isend", "isend", "irecv"], [1, 2, 1], ["large", "large", "small"]) == expected
    assert sequence(1, ["isend", "irecv"], [0, 0], ["small", "large"]) == expected


def test_ranks_with_one_fingerprint_have_the_same_sequences_for_their_groups_in_order():
    """What one of them says of its collectives holds for the others too, each on its own groups."""
    sequences = []

    def make(rank):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))

        def program(x):
            c10d.isend(all_reduce(x, mesh.get_group("tp")), (rank + 1) % 8, 0, "0")
            return all_reduce(c10d.irecv(x * 2, (rank - 1) % 8, 0, "0"), mesh.get_group("dp"))

        graph_module = traced(program, ones(4))
        sequences.append(list(sequences_of(graph_module).values()))
        return graph_module

    assert len(set(fingerprints_of_ranks(make, 8))) == 1
    reduced, sent = ["all_reduce sum float32 4"], ["send_recv float32 4"]
    assert sequences == [[reduced, sent, sent, reduced]] * 8


def test_many_tensors_of_one_collective_are_told_apart_in_a_short_text():
    def text(*sizes):
        graph_module = traced(lambda *xs: funcol.all_reduce_coalesced(xs, "sum", dist.group.WORLD), *map(ones, sizes))
        return sequences_of(graph_module)[0, 1, 2, 3][0]

    with world(1):
        assert text(*[1000] * 50, 1) != text(*[1000] * 50, 2)
        assert len(text(*[1000] * 50)) < 140


@pytest.mark.parametrize("kind", ["mesh", "group"])
def test_groups_that_are_objects_in_the_graph(kind):
    import torch.distributed.config

    prints = set()
    for _ in range(2):
        with world(1), torch.distributed.config.patch(compile_on_one_rank=True):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            group = mesh["tp"] if kind == "mesh" else mesh.get_group("tp")

            def program(x):
                inner = checkpoint(lambda y: funcol.all_reduce(y, "sum", group), x, use_reentrant=False)  # noqa: B023
                return funcol.all_reduce(inner, "sum", group)  # noqa: B023

            graphs = compiled(program, ones(4))
            for graph_module in graphs.all:
                assert names_of(_graph.count_collectives(graph_module)) == {(0, 1): 2}
            prints.add(tuple(fingerprint(graph_module, "role") for graph_module in graphs.all))
    assert len(prints) == 1


def test_a_group_that_is_not_known_is_an_error_that_names_node_and_line():
    with world(1):
        pair = dist.new_group([0, 1])
        graph_module = compiled(lambda x: all_reduce(x.sin(), pair), ones(3)).forward[0]  # this line is named
    with world(1):
        with pytest.raises(_vocabulary.HandshakeConfigError) as raised:
            _graph.count_collectives(graph_module)
        assert "node all_reduce (_c10d_functional.all_reduce.default)" in str(raised.value)
        assert re.search(r"test_graph\.py:\d+: .*funcol\.all_reduce", str(raised.value))
        with pytest.raises(_vocabulary.HandshakeConfigError, match="all_reduce"):
            _graph.canonical_nodes(graph_module)
        assert fingerprint(graph_module).startswith("unhashable-")


def test_registered_ops_are_collectives():
    library = torch.library.Library("handshake_test", "DEF")
    library.define("ring_reduce(Tensor x, str ring, int steps=1) -> Tensor")
    library.define("other(Tensor x) -> Tensor")
    ops = torch.ops.handshake_test
    with world(1):
        graph_module = built((ops.ring_reduce.default, ({0}, "0")))
        assert _graph.count_collectives(graph_module) == {}
        _graph.register_collective("handshake_test::ring_reduce", "ring")
        assert names_of(_graph.count_collectives(graph_module)) == {(0, 1, 2, 3): 1}
        _graph.register_collective("handshake_test::other", "ring")
        with pytest.raises(_vocabulary.HandshakeConfigError, match=r"handshake_test.other.*'ring'"):
            _graph.count_collectives(built((ops.other.default, ({0},))))
        for name in ("ring_reduce", "other"):
            assert _graph.is_collective_name(f"handshake_test::{name}")
        (node,) = collectives_in(record_of(graph_module))
        assert (node["target"], node["group"]) == ("torch.ops.handshake_test.ring_reduce.default", "0")
    for name in ("ring_reduce", "a.b", ""):
        with pytest.raises(_vocabulary.HandshakeConfigError, match="is not a qualified op name"):
            _graph.register_collective(name)


def test_an_op_of_any_namespace_that_takes_a_process_group_is_a_collective(ops_of_mine):
    ops = ops_of_mine
    with world(1):
        pair = dist.new_group([0, 1])

        def program(x):
            return ops.normed(ops.rotated(ops.all_reduce(x, pair.group_name), pair.boxed()), 2)

        graph_module = traced(program, ones(4))
        assert sequences_of(graph_module) == {
            (0, 1): ["handshake_ops::all_reduce float32 4", "handshake_ops::rotated float32"]
        }
        nodes = {node.name: node for node in _graph.canonical_nodes(graph_module)}
        assert nodes["all_reduce"].group == nodes["rotated"].group == group_id(0, 1)
        assert nodes["normed"].group is None
        # Of an op of theirs nothing is known.
        assert [name for name, node in nodes.items() if node.has_effect] == ["all_reduce", "rotated", "normed"]


def test_a_collective_whose_group_is_not_known_is_split_until_it_is_registered(ops_of_mine, caplog, monkeypatch):
    monkeypatch.setattr(_graph, "_registered_collectives", {})
    monkeypatch.setattr(_graph, "_warned_of", set())
    ops = ops_of_mine
    with world(1):
        pair = dist.new_group([0, 1])
        graph_module = traced(lambda x: ops.dispatched(ops.all_reduce(ops.all_reduce(x, "tp:0"), "tp:0"), 7), ones(4))
        with caplog.at_level(logging.WARNING, "torch_tpu.handshake"):
            assert names_of(_graph.count_collectives(graph_module)) == {(1,): 2}  # of this rank: not none
        (record,) = caplog.records
        assert "node all_reduce (handshake_ops.all_reduce.default)" in record.getMessage()
        assert "_graph.register_collective" in record.getMessage()
        assert fingerprint(graph_module).startswith("unhashable-")

        _graph.register_collective("handshake_ops::all_reduce", resolve={"tp:0": pair}.get)
        _graph.register_collective("handshake_ops::dispatched", resolve=lambda _: pair)
        assert names_of(_graph.count_collectives(graph_module)) == {(0, 1): 3}
        prints = [fingerprint(graph_module)]
        _graph.register_collective("handshake_ops::dispatched", resolve=lambda _: dist.group.WORLD)
        prints.append(fingerprint(graph_module))
        assert prints[0] != prints[1] and not any(text.startswith("unhashable-") for text in prints)
    _graph._signature.cache_clear()


def test_ops_of_torch_tpu_are_collectives():
    library = torch.library.Library("tpu", "FRAGMENT")
    if not hasattr(torch.ops.tpu, "_all_gather_dim"):
        library.define("_all_gather_dim(Tensor x, int dim, int group_size, str group_name) -> Tensor")
    with world(1):
        graph_module = built((torch.ops.tpu._all_gather_dim.default, ({0}, 0, 4, "0")))
        assert names_of(_graph.count_collectives(graph_module)) == {(0, 1, 2, 3): 1}


def test_the_name_of_an_op_says_whether_it_is_a_collective_as_its_schema_does():
    """Reports go by the name where they have no more; what they call a collective is what counts."""
    import torch.distributed._symmetric_memory

    namespaces = {schema.name.partition("::")[0] for schema in torch._C._jit_get_all_schemas()}
    assert {"_c10d_functional", "c10d", "symm_mem", "_dtensor", "aten"} <= namespaces
    seen = {True: 0, False: 0}
    for name in {schema.name for schema in torch._C._jit_get_all_schemas()}:
        namespace, _, op = name.partition("::")
        if namespace in ("tpu", "handshake_test", "handshake_ops"):  # defined by tests
            continue
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        says = _graph.is_collective_name(name)
        assert says == _graph.is_collective(list(built((packet, ({0},))).graph.nodes)[1]), name
        seen[says] += 1
    assert seen[True] > 60 and seen[False] > 1000
    for name in ("_all_gather_dim", "_reduce_scatter_dim", "all_to_all"):
        assert _graph.is_collective_name(f"tpu::{name}")
    for name in ("tpu::optimization_barrier", "tpu::sparse_dense_matmul", "mine::all_reduce", "all_reduce", ""):
        assert not _graph.is_collective_name(name)


def test_a_module_that_could_hide_collectives_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr(_graph, "_warned_of", set())

    class Ring(torch.nn.Module):
        def forward(self, x):
            return x

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return not isinstance(module, Model)

    class Model(torch.nn.Module):
        def __init__(self, *modules):
            super().__init__()
            self.parts = torch.nn.ModuleList(modules)

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    def warnings(*modules):
        caplog.clear()
        model = Model(*modules)
        with caplog.at_level(logging.WARNING, "torch_tpu.handshake"):
            assert _graph.count_collectives(torch.fx.GraphModule(model, Tracer().trace(model))) == {}
        return [record.getMessage() for record in caplog.records]

    assert warnings(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2))) == []
    (warning,) = warnings(Ring(), torch.nn.Linear(2, 2), Ring())
    assert "node parts_0 (parts.0) calls a module of class" in warning and "Ring" in warning
    assert warnings(Ring()) == []
    (warning,) = warnings(torch.nn.SyncBatchNorm(2))
    assert "SyncBatchNorm" in warning
    (warning,) = warnings(torch.nn.Sequential(torch.nn.ReLU(), type("OfMine", (torch.nn.Linear,), {})(2, 2)))
    assert "of class test_graph.OfMine (" in warning


# --- Canonical nodes ---


def test_an_inserted_node_changes_equality_after_it_and_no_alignment():
    def one(x):
        return (x.sin().cos() * 2).exp()

    def other(x):
        return (x.sin().tan().cos() * 2).exp()

    first, second = (_graph.canonical_nodes(traced(function, ones(3))) for function in (one, other))
    assert [node.target for node in first[:3]] == ["placeholder", "aten.sin.default", "aten.cos.default"]
    del second[2]
    assert [a.equality == b.equality for a, b in zip(first, second, strict=True)] == [True, True] + [False] * 4
    assert [node.alignment for node in first] == [node.alignment for node in second]
    assert {len(node.equality) for node in first} == {16}
    assert {len(node.alignment) for node in first} == {8}
    assert [node.inputs for node in first] == [(), (0,), (1,), (2,), (3,), (4,)]
    assert [node.name for node in first] == [node.name for node in traced(one, ones(3)).graph.nodes]


def test_alignment_tells_what_values_are_that_a_node_reads_whatever_made_them():
    def reader_of(function, *inputs):
        *_, reader, _ = _graph.canonical_nodes(traced(function, *inputs))
        return reader.alignment

    cosine = reader_of(lambda x: x.cos().sum(), ones(3))
    assert reader_of(lambda x: (x + 1).sum(), ones(3)) == cosine
    for other in (ones(4), ones(3).double()):
        assert reader_of(lambda x: x.cos().sum(), other) != cosine


def test_symbols_are_named_by_where_they_are_used():
    def rows(graph_module):
        return [(node.alignment, node.symbols) for node in _graph.canonical_nodes(graph_module) if node.op != "output"]

    def dynamic(function, *inputs):
        return make_fx(function, tracing_mode="symbolic")(*inputs)

    one = rows(dynamic(lambda x: x.cos(), ones(3, 5)))
    more = rows(dynamic(lambda y, x: x.cos(), ones(7), ones(3, 5)))
    assert [alignment for alignment, _ in more[-1:]] == [alignment for alignment, _ in one[-1:]]
    assert (one[-1][1], more[-1][1]) == ((0, 1), (1, 2))
    square = rows(dynamic(lambda x: x.cos(), ones(3, 3)))
    assert square[-1][0] != one[-1][0] and square[-1][1] == (0,)


def test_inputs_are_all_arguments_in_order():
    graph_module = built((torch.sin, ({0},)), (torch.add, ({1}, {0})))
    x, sine, add, _ = graph_module.graph.nodes
    add.args, add.kwargs = ([x, sine], {"key": (sine, slice(x))}), {"out": x, "alpha": sine}
    assert _graph.canonical_nodes(graph_module)[2].inputs == (0, 1, 1, 0, 1, 0)


def effects_of(function, *inputs, dynamo=False):
    graphs = compiled(function, *inputs)
    graph_module = graphs.dynamo[0] if dynamo else graphs.forward[0]
    return {node.target.rpartition("::")[2] for node in _graph.canonical_nodes(graph_module) if node.has_effect}


def test_effects():
    x = ones(3)
    assert effects_of(lambda x: torch.relu(x.sin() + 1)[1:].sum(), x) == set()
    assert effects_of(lambda x: torch.relu(x.sin() + 1)[1:].sum(), x, dynamo=True) == set()
    assert effects_of(lambda x: torch.rand_like(x) + x, x) == {"aten.rand_like.default"}
    dynamo = effects_of(lambda x: torch.rand_like(x) + torch.nn.functional.dropout(x) + x.bernoulli(), x, dynamo=True)
    assert {target.rpartition(".")[2] for target in dynamo} == {"rand_like", "dropout", "bernoulli"}
    assert effects_of(lambda x: x.clone().add_(1).view(-1), x, dynamo=True) == {"add_"}
    assert len(effects_of(under_autocast, ones(3, 3), dynamo=True)) == 2
    assert len(effects_of(without_gradient, ones(3, requires_grad=True), dynamo=True)) == 1
    copied = built((torch.ops.aten.sin.default, ({0},)), (torch.ops.aten.copy_.default, ({0}, {1})))
    assert [node.has_effect for node in _graph.canonical_nodes(copied)] == [False, False, True, False]
    in_place = {operator.iadd, operator.imatmul, operator.iconcat, operator.setitem, operator.delitem}
    for target in (*in_place, operator.add, operator.invert, operator.index, operator.is_, isinstance, math.isqrt):
        graph_module = built((torch.sin, ({0},)))
        list(graph_module.graph.nodes)[1].target = target
        assert _graph.canonical_nodes(graph_module)[1].has_effect == (target in in_place), target
    with world(1):
        waits = effects_of(lambda x: all_reduce(x, dist.group.WORLD), x, dynamo=True)
        assert waits == {"_c10d_functional.all_reduce", "_c10d_functional.wait_tensor"}


# --- Graphs that can't be hashed ---


class Opaque:
    pass


def test_a_graph_that_cannot_be_hashed_equals_no_other_and_says_why(caplog):
    graph_module = built((torch.sin, ({0},)), (isinstance, ({1}, [Opaque()])))
    with caplog.at_level(logging.WARNING, "torch_tpu.handshake"):
        prints = [fingerprint(graph_module) for _ in range(2)]
    assert prints[0] != prints[1]
    assert all(re.fullmatch(r"unhashable-[0-9a-f]{32}", text) for text in prints)
    assert len(caplog.records) == 2
    assert "node isinstance_1" in caplog.text and "Opaque" in caplog.text and "0x" not in caplog.text
    with pytest.raises(_vocabulary.HandshakeError, match=r"isinstance_1.*Opaque"):
        _graph.canonical_nodes(graph_module)
    assert fingerprint(with_attribute(torch.nn.Parameter(ones(2)))) == fingerprint(
        with_attribute(torch.nn.Parameter(ones(2)))
    )


@pytest.mark.parametrize("value", [Opaque(), Opaque().__init__, object(), torch.Generator(), ones(2).to_mkldnn()])
def test_values_without_a_text_that_all_ranks_share_are_not_hashed(value):
    assert fingerprint(built((isinstance, ({0}, value)))).startswith("unhashable-")


def test_a_kernel_that_is_named_by_a_number_of_this_process_is_not_hashed():
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    call = (triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "constant_args_idx": 0, "kwargs": {}})
    assert fingerprint(built(call)).startswith("unhashable-")


def test_fingerprints_of_executables():
    assert re.fullmatch("[0-9a-f]{32}", _graph.executable_fingerprint(b"\x00\xff"))
    assert _graph.executable_fingerprint("abc") == _graph.executable_fingerprint(b"abc")
    assert _graph.executable_fingerprint("abc") != _graph.executable_fingerprint("abd")
    _graph.executable_fingerprint("\ud800")


# What XLA made of `hlo_program` on four ranks of a CPU, without most of it.
HLO = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

FileNames
1 "/here/program.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY %main.0_spmd (param.1: f32[1,3]) -> f32[1,3] {
  %param.1 = f32[1,3]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="x[\\"}{\\"]"}
  ROOT %all-reduce = f32[1,3]{1,0} all-reduce(%param.1), channel_id=1, replica_groups={{0,1},{2,3}}, \
to_apply=%region_0.0, metadata={op_name="jit(f)/psum" stack_frame_id=10}
}
"""


def test_what_is_no_part_of_an_xla_program_does_not_count():
    prints = _graph.executable_fingerprint
    elsewhere = HLO.replace("jit_f", "jit_g").replace("/here", "/there").replace("=10}", "=12}").replace("(f)", "(g)")
    longer = elsewhere.replace("\n\nENTRY", "\n2 {file_location_id=2 parent_frame_id=1}\n\nENTRY")
    assert prints(longer) == prints(HLO) == prints(HLO.encode())
    for old, new in [("f32[1,3]", "f32[1,4]"), ("all-reduce(", "all-gather("), ("channel_id=1", "channel_id=2")]:
        assert prints(HLO.replace(old, new)) != prints(HLO)
    assert prints("of " + longer) != prints("of " + HLO)  # some other text


def test_replica_groups_of_an_xla_program_count_by_role():
    def prints(groups, naming="role"):
        return _graph.executable_fingerprint(HLO.replace("{{0,1},{2,3}}", groups), naming)

    rows = prints("{{0,1},{2,3}}")
    assert prints("{{0,1}}") == prints("{{2,3}}") == rows
    others = ("{{0,2},{1,3}}", "{{0,1,2,3}}", "{{0,3},{1,2}}", "{{0,1},{2}}", "{{0,1},{3,2}}")
    assert len({rows, *map(prints, others)}) == 6
    assert prints("{{0,1}}", "exact") != prints("{{2,3}}", "exact")


def test_real_executables_of_one_program_have_one_fingerprint_wherever_it_is_installed(tmp_path):
    pytest.importorskip("jax")
    programs = [tmp_path / "here" / "program.py", tmp_path / "there" / "renamed.py"]
    source = (TESTS / "hlo_program.py").read_text()
    for program, text in zip(programs, (source, "\n" + source.replace("model", "net")), strict=True):
        program.parent.mkdir()
        program.write_text(text)
    runs = [(programs[0], "2.0"), (programs[1], "2.0"), (programs[0], "1.0")]
    made = [subprocess.run([sys.executable, *run], capture_output=True, text=True, check=True) for run in runs]
    texts = [process.stdout for process in made]
    assert str(programs[0]) in texts[0]
    assert texts[0] != texts[1]
    prints = [_graph.executable_fingerprint(text) for text in texts]
    assert prints[0] == prints[1] != prints[2]  # XLA folds a multiplication by 1.0, and merges two collectives


# --- Text and source lines ---


def helper_of_the_model(x, group):
    return funcol.all_reduce(x, "sum", group)


def test_the_source_line_is_the_users():
    with world(1):
        pair = dist.new_group([0, 1])
        graphs = compiled(
            lambda x: helper_of_the_model(x * x, pair).sum(), ones(3, requires_grad=True), with_backward=True
        )
        for graph_module in graphs.all[:2]:
            node = next(node for node in graph_module.graph.nodes if _graph.is_collective(node))
            line = _graph.source_line(node)
            assert line.file == __file__
            assert line.line == helper_of_the_model.__code__.co_firstlineno + 1
            assert line.code == 'return funcol.all_reduce(x, "sum", group)'
        backward = [node for node in graphs.backward[0].graph.nodes if node.op == "call_function"]
        assert any(_graph.source_line(node) is not None for node in backward)
        assert _graph.source_line(next(iter(graphs.forward[0].graph.nodes))) is None


def facts_of(graph_module):
    lines = _graph.graph_text(graph_module).splitlines()
    return dict(re.fullmatch(r"# handshake: (.+?) = (.*)", line).groups() for line in lines if "handshake:" in line)


def test_the_text_holds_what_print_readable_leaves_out():
    with world(1):
        pair = dist.new_group([0, 1], group_desc="a pair")

        def block(x):
            return helper_of_the_model(x, pair) + torch.tensor([1.5, 2.5, 3.5])

        def program(x):
            y = checkpoint(block, x, use_reentrant=False) + torch.arange(100.0).sum()
            x.mul_(2)
            return y

        graphs = compiled(program, ones(3))
        facts = facts_of(graphs.forward[0])
        assert facts["rank"] == "1"
        assert facts[f"group {pair.group_name}"] == "ranks 0-1; size 2; description a pair"
        assert re.fullmatch(
            r"float32 \(3,\) blake2b:[0-9a-f]{32} \[1\.5, 2\.5, 3\.5\]", facts["constant _tensor_constant0"]
        )
        assert facts["mutated arg0_1"] == "output"
        assert facts["source all_reduce"].endswith('return funcol.all_reduce(x, "sum", group)')
        dynamo = facts_of(graphs.dynamo[0])
        assert dynamo["mutated l_x_"] == "mul_"
        assert "source wrap_body_0.tensor" in dynamo
        text = _graph.graph_text(graphs.forward[0])
        assert '"f32[3][1]cpu"' in text
        assert text.index("# handshake:") > text.index("        return (")


def test_the_text_of_a_graph_with_a_group_that_is_gone_is_still_there():
    with world(1):
        pair = dist.new_group([0, 1])
        graph_module = compiled(lambda x: all_reduce(x, pair), ones(3)).forward[0]
    assert "all_reduce" in _graph.graph_text(graph_module)
    assert "group" not in " ".join(facts_of(graph_module))


def test_long_constants_are_cut_in_the_text():
    fact = facts_of(with_attribute(torch.arange(1000)))["constant held"]
    assert fact.startswith("int64 (1000,) blake2b:")
    assert fact.endswith(", 15, …]")
    assert "blake2b" not in facts_of(with_attribute(ones(3, device="meta")))["constant held"]


# --- Records ---


def record_of(graph_module, **options):
    return json.loads(_graph.graph_record(graph_module, **options))


def nodes_of(record):
    """The nodes by name."""
    return {node["name"]: node for node in record["body"]["nodes"]}


def collectives_in(record):
    def of_body(body):
        own = [node for node in body["nodes"] if node.get("collective")]
        return own + [node for nested in body["bodies"].values() for node in of_body(nested)]

    return of_body(record["body"])


def test_a_record_says_what_a_real_graph_is():
    with world(1):
        pair = dist.new_group([0, 2, 1], group_desc="three")
        odd = dist.new_group([1, 3])

        def block(x):
            return helper_of_the_model(x, pair) + torch.tensor([1.5, 2.5, 3.5])

        def program(x, y):
            z = checkpoint(block, x, use_reentrant=False) + torch.cat([y, y], 0)[:3]
            x.mul_(2)
            return all_reduce(z.to(torch.float64), odd, "max"), y.sum(dim=0, keepdim=True)

        graphs = compiled(program, ones(3), ones(3))
        aot, dynamo = record_of(graphs.forward[0], fingerprint="f" * 32), record_of(graphs.dynamo[0])
        counts = _graph.count_collectives(graphs.forward[0])
    assert aot["handshake_graph"] == 1
    assert (aot["fingerprint"], aot["rank"], dynamo["fingerprint"]) == ("f" * 32, 1, "")
    assert aot["groups"] == {
        pair.group_name: {"ranks": [[0, 3, 1]], "description": "three"},
        odd.group_name: {"ranks": [[1, 2, 2]], "description": "undefined"},
    }
    assert len(collectives_in(aot)) == len(collectives_in(dynamo)) == sum(counts.values()) == 2

    nodes = nodes_of(aot)
    reduce = nodes["all_reduce"]
    assert reduce["op"] == "call"
    assert reduce["target"] == "torch.ops._c10d_functional.all_reduce.default"
    assert reduce["group"] == pair.group_name
    assert reduce["arguments"] == [["0", "arg0_1", 0], ["1", "'sum'", None], ["2", f"'{pair.group_name}'", None]]
    assert (reduce["dtype"], reduce["shape"], reduce["stride"], reduce["device"]) == ("f32", ["3"], ["1"], "cpu")
    assert reduce["line"] == (
        f"all_reduce: f32[3] = torch.ops._c10d_functional.all_reduce.default(arg0_1, 'sum', '{pair.group_name}')"
    )
    assert reduce["source"][0].startswith(torch.__path__[0])
    line = helper_of_the_model.__code__.co_firstlineno + 1
    code = 'return funcol.all_reduce(x, "sum", group)'
    *place, caller = reduce["user_source"]
    assert place == [__file__, line, "helper_of_the_model", code]
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in block", caller), "also through torch's own frames"
    assert (nodes["cat"]["origin"], aot.get("unhashable")) == ("cat", "")
    assert nodes["arg0_1"]["mutated_by"] == "output"
    assert nodes["arg0_1"]["op"] == "placeholder"
    assert re.fullmatch(
        r"float32 \(3,\) blake2b:[0-9a-f]{32} \[1\.5, 2\.5, 3\.5\]", nodes["_tensor_constant0"]["constant"]
    )
    assert nodes["_tensor_constant0"]["op"] == "get_attr"
    positions = {node["name"]: position for position, node in enumerate(aot["body"]["nodes"])}
    y = positions["arg1_1"]
    assert nodes["cat"]["arguments"] == [["0[0]", "arg1_1", y], ["0[1]", "arg1_1", y]]
    assert nodes["sum_1"]["arguments"] == [["0", "arg1_1", y], ["1[0]", "0", None], ["2", "True", None]]
    output = aot["body"]["nodes"][-1]
    assert (output["op"], output["target"], output["arguments"][-1][0]) == ("output", "output", "(2)")
    assert output["line"].startswith("return (")

    (body,) = dynamo["body"]["bodies"].values()
    inner = {node["name"]: node for node in body["nodes"]}
    assert [node.get("group") for node in collectives_in(dynamo)] == [odd.group_name, pair.group_name]
    assert nodes_of(dynamo)["l_x_"]["mutated_by"] == "mul_"
    assert any(node.get("target") == "torch.tensor" for node in inner.values())


@pytest.mark.parametrize("make", [_graph.graph_record, lambda graph_module: "\n".join(facts_of(graph_module).values())])
def test_what_is_said_of_constants_is_the_same_while_a_graph_is_compiled(make):
    """Compilers run under a fake tensor mode, in which a real tensor's elements can't be read as usual."""
    graphs = compiled(lambda x: x + torch.tensor([1.5, 3.0]), ones(2), seen=make)
    assert graphs.seen_results == [make(graph_module) for graph_module in graphs.all]
    assert "[1.5, 3.0]" in graphs.seen_results[-1]


def test_records_of_one_program_are_the_same_but_for_the_rank():
    def record(rank):
        with world(rank, 2):
            graph_module = compiled(lambda x: all_reduce(x.sin(), dist.group.WORLD), ones(3)).forward[0]
            return {**record_of(graph_module), "rank": None}

    assert record(0) == record(1)


def test_symbolic_sizes_in_a_record():
    graphs = compiled(lambda x, n: (x.new_zeros(x.shape[0] + 1) * n, x * 2), ones(5, 3), 7, dynamic=True)
    nodes = nodes_of(record_of(graphs.forward[0]))
    sizes = [node for node in nodes.values() if node.get("dtype") == "Sym"]
    assert sizes
    symbol = sizes[0]["shape"][0]
    assert any(node["shape"][:1] == [symbol] for node in nodes.values() if node.get("dtype") == "f32")
    assert any(node["shape"] == [f"{symbol} + 1"] for node in nodes.values() if "shape" in node)


def test_records_are_spelled_as_torch_prints_graphs():
    """So that a record can be compared with a printed graph."""
    graph_module = built(
        (torch.ops.aten.add.Tensor, ({0}, 1), {"alpha": 2}),
        (torch.sin, ({1}, (0, ...))),
        (torch.nn.functional.gelu, ({2},), {"approximate": "tanh"}),
        (torch.cos, ({3}, {1})),
        (torch.zeros, ([2],), {"dtype": torch.float32, "device": torch.device("cuda:1"), "pin_memory": False}),
        (isinstance, ({0}, {"k": [], "a": (3,), "d": "cuda:0"}, -0.5, None, torch.ops.aten.sin.default, Opaque())),
    )
    x, add, item, method, both = list(graph_module.graph.nodes)[:5]
    item.target, both.target = operator.getitem, operator.and_
    item.args = (add, (0, slice(None, x, 2), ...))
    method.op, method.target, method.args = "call_method", "view", (method.args[0], -1)
    nodes = record_of(graph_module)["body"]["nodes"]
    assert [node["target"] for node in nodes[1:6]] == [
        "torch.ops.aten.add.Tensor", "operator.getitem", ".view", "operator.and", "torch.zeros",
    ]  # fmt: skip
    assert nodes[1]["arguments"] == [["0", "x", 0], ["1", "1", None], ["alpha", "2", None]]
    assert nodes[1]["line"] == "add_tensor = torch.ops.aten.add.Tensor(x, 1, alpha = 2)"
    assert nodes[2]["arguments"] == [
        ["0", "add_tensor", 1], ["1(0)", "0", None], ["1(1).start", "None", None], ["1(1).stop", "x", 0],
        ["1(1).step", "2", None], ["1(2)", "Ellipsis", None],
    ]  # fmt: skip
    assert nodes[3]["line"] == "gelu = sin.view(-1, approximate = 'tanh')"
    assert nodes[5]["arguments"] == [
        ["0[0]", "2", None], ["dtype", "torch.float32", None],
        ["device", "device(type='cuda')", None], ["pin_memory", "False", None],
    ]  # fmt: skip
    texts = {path: text for path, text, _ in nodes[6]["arguments"]}
    assert texts.pop("5").endswith("Opaque object at 0x0>")
    assert texts == {
        "0": "x", "1{'a'}(0)": "3", "1{'d'}": "'cuda:0'", "1{'k'}": "[]", "2": "-0.5", "3": "None",
        "4": "torch.ops.aten.sin.default",
    }  # fmt: skip
    assert nodes[0]["op"] == "placeholder" and nodes[7]["arguments"] == [["(0)", "isinstance_1", 6]]


def test_a_record_is_made_of_graphs_that_cannot_be_hashed_or_resolved():
    with world(1):
        pair = dist.new_group([0, 1])
        graph_module = compiled(lambda x: all_reduce(x, pair), ones(3)).forward[0]
    record = record_of(graph_module)
    (reduce,) = collectives_in(record)
    assert (reduce["group"], record["groups"], record["rank"]) == (pair.group_name, {}, None)
    assert nodes_of(record_of(with_attribute(fake())))["held"]["constant"] == "float32 (2,)"
    lonely = record_of(built((isinstance, ({0}, "\ud800"))))
    assert lonely["body"]["nodes"][1]["arguments"][1] == ["1", "'\\ud800'", None]


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2, 3], [1, 3, 5], [0, 1, 4, 5, 9], [0, 3, 4, 5, 6]])
def test_the_runs_of_a_group_are_its_ranks(ranks):
    with world(ranks[0], 10):
        group = dist.new_group(ranks)
        record = record_of(built((c10d.all_reduce.default, ({0}, "sum", group.group_name))))
    runs = record["groups"][group.group_name]["ranks"]
    assert [first + step * k for first, count, step in runs for k in range(count)] == ranks
