# SPDX-License-Identifier: Apache-2.0
"""Graphs: counting collectives, fingerprints that are equal exactly when programs are, and the text for people."""

import functools
import json
import logging
import math
import random
import re
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from graph_workers import built, compiled, sample_fingerprints, traced, world
from layout import TESTS, child_environment, load
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

_graph = load("_graph")
_types = load("_types")

c10d = torch.ops._c10d_functional
fingerprint = _graph.graph_fingerprint


def group_id(*ranks):
    return _types.ProcessGroupId(ranks)


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
    "number of inputs": case(
        lambda x, y: x + 1 + y * 0, lambda x, y: x + 1, ones(3), ones(3)
    ),
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
        ones(5), ones(5), ones(5),
        dynamic=True,
    ),  # fmt: skip
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
    "tensor constant": case(
        lambda x: x + torch.tensor([1.0, 2.0]), lambda x: x + torch.tensor([1.0, 2.5]), ones(2)
    ),
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
    "body of a region": case(lambda x: region(x) + 1, lambda x: other_region(x) + 1, ones(3)),
    "body of an autograd function": case(
        lambda x: Doubled.apply(x), lambda x: DoubledElse.apply(x), ones(3, requires_grad=True)
    ),
    "random seed consumed": case(
        lambda x: torch.nn.functional.dropout(x, 0.5), lambda x: torch.nn.functional.dropout(x, 0.25), ones(3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_programs_that_differ_have_different_fingerprints(name):
    first, second, inputs, second_inputs, stages, options = DIFFERENCES[name]
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
    torch.finfo(torch.float32), torch.iinfo(torch.int8),
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


def test_functions_made_in_functions_count_by_code_and_captured_values():
    def scale(by):
        return lambda x: x * by

    prints = [fingerprint(built((scale(by), ({0},)))) for by in (2, 2, 3)]
    assert prints[0] == prints[1] != prints[2]


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
        torch.tensor([1.0, 0.0]), torch.tensor([1.0, math.nan]), torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, 2.0, 3.0]),
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
    one, other, wider = (fingerprint(with_attribute(weight)) for weight in [*weights, wide])
    assert one == other != wider
    linears = [torch.nn.Linear(2, 2) for _ in range(2)]
    lifted = [compiled(linear, ones(2, 2)).all for linear in linears]
    assert [fingerprint(graph) for graph in lifted[0]] == [fingerprint(graph) for graph in lifted[1]]


def test_a_module_that_the_graph_calls_counts_by_class_settings_and_metadata_of_its_parameters():
    def calls(module):
        return torch.fx.symbolic_trace(torch.nn.Sequential(module))

    kinds = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 3), torch.nn.Linear(2, 2, bias=False), torch.nn.LayerNorm(2)]
    kinds += [torch.nn.LayerNorm(2, eps=1e-3), torch.nn.Linear(2, 2).double(), torch.nn.Dropout(0.5).eval()]
    prints = [fingerprint(calls(kind)) for kind in [*kinds, torch.nn.Dropout(0.5)]]
    assert len(set(prints)) == len(prints)
    assert prints[0] == fingerprint(calls(torch.nn.Linear(2, 2)))


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


def test_groups_must_be_named_in_a_known_way():
    with pytest.raises(_types.HandshakeConfigError, match="ranks.*exact, role"):
        fingerprint(built((torch.sin, ({0},))), "ranks")
