# SPDX-License-Identifier: Apache-2.0
"""What differs between graphs. Pairs of them are traced by torch here, each rank in its turn."""

import json
import re
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout import load
from printed_graphs import VOCABULARY, big_text, small, without_rank

_graph_diff = load("_graph_diff")
_graph_report = load("_graph_report")
_graph_text = load("_graph_text")

Variant = _graph_report.Variant


def graph_of(text):
    """The graph of a record, or of a printed text."""
    if text.startswith("{"):
        return _graph_diff.read_record(text)
    (graph,) = _graph_text.parse(text)
    return graph


def report_of(texts):
    """`texts` by rank; ranks with the same text have one variant, but for what says which rank it is."""
    ranks_of = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(without_rank(text), []).append(rank)
    return _graph_report.explain([Variant(ranks, "", graph_of(texts[ranks[0]])) for ranks in ranks_of.values()])


def side_texts(difference):
    """Both sides, of two variants."""
    return (difference.sides[0], *difference.values.values())


# --- Real pairs of graphs, a kind of difference each ---

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from graph_workers import built, world  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

_graph = load("_graph")
ALL = [0, 1, 2, 3]


def reduce(x, group=None):
    return funcol.all_reduce(x, "sum", ALL if group is None else group)


class TracedError(Exception):
    """Ends the compilation as soon as the first graph is known."""


def text_of(rank, make, inputs, stage="aot"):
    """The text of the first graph that `rank` of a world of four compiles of `make(rank)`."""
    texts = []

    def keep(graph_module, example_inputs):
        texts.append(_graph.graph_record(graph_module))
        raise TracedError

    with world(rank):
        torch._dynamo.reset()
        try:
            torch.compile(make(rank), backend=keep if stage == "dynamo" else aot_autograd(fw_compiler=keep))(*inputs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, TracedError):
                raise
    return texts[0]


class Case(NamedTuple):
    make: object
    kind: str
    expected: list  # what a person needs to find in the report
    inputs: object = lambda rank: [torch.ones(8, 4)]
    stage: str = "aot"
    places: int = 1  # differences that are reported
    absent: tuple = ()  # what would lead astray


def case_constant(rank):
    # The scale comes from a setting that is not the same on rank 3.
    scale = 0.25 if rank == 3 else 0.125

    def function(x):
        return reduce(x * scale) + 1

    return function


def case_op(rank):
    def function(x):
        y = torch.tanh(x) if rank == 3 else torch.relu(x)
        return reduce(y)

    return function


def case_added(rank):
    def function(x):
        x = x.sin()
        if rank == 3:
            x = x.clamp(-1, 1)
        return reduce(x.cos()).exp()

    return function


def case_missing(rank):
    def function(x):
        x = x.sin()
        if rank != 3:
            x = x.clamp(-1, 1)
        return reduce(x.cos()).exp()

    return function


def case_dtype(rank):
    def function(x):
        return reduce(x.to(torch.float16 if rank == 3 else torch.bfloat16).sin()).cos()

    return function


def case_plain(rank):
    def function(x):
        return reduce((x.sin() * 2).reshape(-1)).cos()

    return function


def case_group_name(rank):
    # Rank 3 has made a group of its own before, so the names are counted from another number.
    if rank == 3:
        dist.new_group([3])
    group = dist.new_group(ALL)

    def function(x):
        return reduce(x.sin(), group)

    return function


def case_group_ranks(rank):
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def function(x):
        return funcol.all_reduce(x.sin(), "sum", rows[rank // 2])

    return function


def case_order(rank):
    def function(x, y):
        x, y = x.sin(), y.sin()
        if rank == 3:
            y = funcol.all_reduce(y, "sum", ALL)
            x = funcol.all_reduce(x, "sum", ALL)
        else:
            x = funcol.all_reduce(x, "sum", ALL)
            y = funcol.all_reduce(y, "sum", ALL)
        return x, y

    return function


def case_order_of_groups(rank):
    """Each reads what the one before gave: no node is the same but for its place."""
    groups = [dist.new_group(ALL), dist.new_group(ALL)]

    def function(x):
        for group in groups[::-1] if rank == 3 else groups:
            x = funcol.all_reduce(x.sin(), "sum", group)
        return x.exp()

    return function


def case_order_of_reductions(rank):
    def function(x):
        for how in ("max", "sum") if rank == 3 else ("sum", "max"):
            x = funcol.all_reduce(x, how, ALL)
        return x.exp()

    return function


def case_order_of_rows_and_columns(rank):
    """Inside a larger model, and each rank has a row and a column of its own."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = [rows[rank // 2], columns[rank % 2]]

    def function(x):
        x = reduce(x.sin())
        for group in groups[::-1] if rank == 3 else groups:
            x = funcol.all_reduce(x, "sum", group)
        return reduce(x.exp()).cos()

    return function


# Advice that is false where all ranks issue the same, in another order.
ORDER_IS_NO = ("same collectives (", "number of collectives", "pass it in as a tensor", "role", "different operations")


def case_collective_count(rank):
    def function(x):
        x = reduce(x.sin())
        if rank == 3:
            x = x / reduce(x.abs().max())
        return x.exp().cos()

    return function


def case_graph_break(rank):
    def function(x):
        x = reduce(x.sin())
        if rank == 3:
            torch._dynamo.graph_break()
        return reduce(x.cos()).exp()

    return function


def case_layers_with_a_break(rank):
    """What comes last on rank 3 is also what comes last on the others, so an alignment may match it there."""

    def function(x, first, second):
        x = reduce(x @ first)
        if rank == 3:
            torch._dynamo.graph_break()
        return reduce(x @ second)

    return function


# Advice that would hang the job, or lead to nothing, where a graph breaks.
BREAK_IS_NO = ("same collectives", "on all members", "take different inputs")


def case_input(rank):
    def function(x, bias):
        x = x.sin()
        return reduce(x + (bias if rank == 3 else x))

    return function


def case_input_of_an_added_node(rank):
    def function(x, bias):
        x = x.sin()
        return reduce(x + bias if rank == 3 else x)

    return function


def case_changed_input(rank):
    def function(x):
        if rank == 3:
            x.add_(1)
        return funcol.all_reduce(x.sin(), "sum", ALL)

    return function


def case_output(rank):
    def function(x):
        y = x.sin()
        z = reduce(y.cos())
        return z if rank == 3 else (z, y)

    return function


def case_nested(rank):
    def block(x):
        return (x * (rank + 2)).sin()

    def function(x):
        return reduce(checkpoint(block, x, use_reentrant=False))

    return function


def case_tensor_constant(rank):
    def function(x):
        return reduce(x * torch.tensor([1.0, 2.0, 3.0, 4.0 + rank // 3]))

    return function


def case_nothing_in_common(rank):
    def first(x):
        return reduce(x.sin().cos().exp().tanh()).abs().sqrt().log()

    def second(x):
        return torch.cat([x, x]).relu().sigmoid().cumsum(0).argmax().add(1).mul(2).to(torch.float32)

    return second if rank == 3 else first


def transposed(rank):
    return [torch.ones(4, 8).t() if rank == 3 else torch.ones(8, 4)]


CASES = {
    "constant": Case(
        case_constant, "constant", ["argument 1", "0.125", "rank 3: 0.25", "reduce(x * scale) + 1", "equal on all"]
    ),
    "op": Case(
        case_op, "op", ["relu", "rank 3: `tanh: f32[8, 4] = torch.ops.aten.tanh", "y = torch.tanh(x) if", "branch"]
    ),
    "added node": Case(
        case_added, "added node", ["before node 2 of", "ranks 0-2: not there", "aten.clamp", "x = x.clamp(-1, 1)"]
    ),
    "missing node": Case(
        case_missing, "missing node", ["node 2 of", "rank 3: not there", "x = x.clamp(-1, 1)", "branch on the rank"]
    ),
    "dtype": Case(case_dtype, "dtype", ["ranks 0-2: torch.bfloat16", "rank 3: torch.float16", "autocast"]),
    "shape": Case(
        case_plain,
        "shape",
        ["first used in", "ranks 0-2: [8, 4]", "rank 3: [6, 4]", "Pad", "mark_dynamic", "as a consequence"],
        lambda rank: [torch.ones(6 if rank == 3 else 8, 4)],
    ),
    "stride": Case(case_plain, "stride", ["[4, 1]", "rank 3: [1, 8]", ".contiguous()"], transposed, places=2),
    "group created under another name": Case(
        case_group_name, "group", ["same ranks", "'1' = ranks 0-3", "'2' = ranks 0-3", "same order"]
    ),
    "group of other ranks": Case(
        case_group_ranks, "group", ["= ranks 0-1", "= ranks 2-3", 'groups="role"', "all_reduce(x.sin(), \"sum\", rows"]
    ),
    "order of collectives": Case(
        case_order,
        "order of collectives",
        ["ranks 0-2: node 4, after `sin_1: ", "rank 3: node 6, after `wait_tensor: ", " (test_graph_diff.py:",
         "fixed order", "x = funcol.all_reduce(x"],
        lambda rank: [torch.ones(8, 4), torch.ones(3)],
    ),
    "order of collectives of two groups": Case(
        case_order_of_groups,
        "order of collectives",
        ["ranks 0-2: all_reduce('sum') on '1' = ranks 0-3 (test_graph_diff.py:", "fixed order",
         "rank 3: all_reduce('sum') on '2' = ranks 0-3 (test_graph_diff.py:", ", then all_reduce('sum') on '1'"],
        absent=ORDER_IS_NO,
    ),
    "order of collectives that reduce in two ways": Case(
        case_order_of_reductions,
        "order of collectives",
        ["ranks 0-2: all_reduce('sum') on ", "rank 3: all_reduce('max') on ", "fixed order"],
        absent=ORDER_IS_NO,
    ),
    "order of collectives on rows and columns": Case(
        case_order_of_rows_and_columns,
        "order of collectives",
        ["ranks 0-2: all_reduce('sum') on a group such as ranks 0-1 (", "fixed order",
         "rank 3: all_reduce('sum') on a group such as ranks 0, 2 (", "'1' = ranks 0-1 on rank 0", "'2' = ranks 2-3"],
        places=3,
        absent=("same collectives (", "number of collectives", "pass it in as a tensor", 'groups="role"'),
    ),
    "order of collectives of one shape": Case(
        case_order,
        "order of collectives",
        ["ranks 0-2: ", "rank 3: ", "fixed order"],
        lambda rank: [torch.ones(8, 4), torch.ones(8, 4)],
    ),
    "number of collectives": Case(
        case_collective_count,
        "number of collectives",
        ["ranks 0-2: not there", "1 collective among them", "x = x / reduce(x.abs().max())", "all members of"],
    ),
    "graph break": Case(
        case_graph_break,
        "graph break",
        ["rank 3: ends here", "4 nodes, 1 collective among them", "TORCH_LOGS=graph_breaks",
         "return reduce(x.cos()).exp()"],
        absent=BREAK_IS_NO,
    ),
    "graph break between two layers that are alike": Case(
        case_layers_with_a_break,
        "graph break",
        ["rank 3: ends here", "ranks 0-2: goes on with 3 nodes, 1 collective among them", "TORCH_LOGS=graph_breaks",
         "node 5 of 10, `wait_tensor`", "return reduce(x @ second)"],
        lambda rank: [torch.ones(4, 4) for _ in range(3)],
        absent=BREAK_IS_NO,
    ),
    "inputs": Case(
        case_input,
        "inputs",
        ["ranks 0-2: 1 input", "rank 3: 2 inputs, only here: `arg1_1` f32[4]", "take different inputs"],
        lambda rank: [torch.ones(8, 4), torch.ones(4)],
    ),
    "input of an added node": Case(
        case_input_of_an_added_node,
        "added node",
        ["rank 3: `add: ", "in 1 more node as a consequence", "traced different operations"],
        lambda rank: [torch.ones(8, 4), torch.ones(4)],
        absent=("take different inputs",),
    ),
    "input changed in place": Case(
        case_changed_input,
        "inputs",
        ["ranks 0-2: not changed", "rank 3: changed in place", "x.add_(1)", "work on a copy"],
        places=2,
    ),
    "outputs": Case(case_output, "outputs", ["2 outputs, only here: `sin`", "rank 3: 1 output", "gradients"]),
    "nested body": Case(
        case_nested, "constant", ["nested body `wrap_body_0`", "ranks 0-2: 2", "rank 3: 5", "return (x * (rank + 2))"],
        lambda rank: [torch.ones(8, 4, requires_grad=True)], "dynamo",
    ),
    "tensor constant": Case(
        case_tensor_constant, "tensor constant", ["[1.0, 2.0, 3.0, 4.0]", "rank 3: ", "5.0]", "register_buffer"]
    ),
    "nothing in common": Case(
        case_nothing_in_common, "graph", ["no source line in common", "11 nodes, 1 collective", "different parts"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_real_pair_of_ranks_that_differ_in_one_kind(name):
    case = CASES[name]
    # Rank 2 stands for the ranks 0 to 2, but where ranks differ by nature.
    usual = text_of(0, case.make, case.inputs(0), case.stage)
    odd = text_of(3, case.make, case.inputs(3), case.stage)
    report = report_of([usual, usual, usual, odd])
    assert len(report.variants) == 2
    text = report.text()
    assert case.kind in [difference.kind for difference in report.differences], text
    assert len(report.differences) == case.places, text
    flat = " ".join(text.split())
    assert [words for words in case.expected if words not in flat] == [], text
    assert [words for words in case.absent if words in flat] == [], text
    assert "test_graph_diff.py" in text
    assert "site-packages/torch" not in text
    assert len(text.splitlines()) < 45


# --- What is advised first ---


def graphs_of(rank, make, inputs, backward=False, size=4, **options):
    """The records of the graphs that `rank` compiles of `make(rank)` for each list of inputs: forward and backward."""
    kinds = [], []

    def keep(kind):
        def compiler(graph_module, example_inputs):
            kind.append(_graph.graph_record(graph_module))
            return make_boxed_func(graph_module.forward)

        return compiler

    with world(rank, size):
        torch._dynamo.reset()
        torch.manual_seed(0)
        backend = aot_autograd(fw_compiler=keep(kinds[0]), bw_compiler=keep(kinds[1]))
        run = torch.compile(make(rank), backend=backend, **options)
        for each in inputs(rank):
            output = run(*each)
            if backward:
                output.sum().backward()
    return kinds


def reduced_block(x, weight):
    return reduce(torch.tanh(x @ weight)).sin()


def weights(count):
    return [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(count)]


def advice_break_on_data(rank):
    def function(x, flag):
        x = reduce(x.sin())
        if rank == 3 and flag.sum() > 0:
            x = x + 1
        return reduce(x.cos()).exp()

    return function


def advice_linear(rank):
    linear = torch.nn.Linear(4, 4)

    def function(x):
        return reduce(linear(x).relu()).exp()

    return function


def advice_matmul(rank):
    def function(x, weight):
        return reduce((x @ weight).relu()).exp()

    return function


def advice_backward(rank):
    linear = torch.nn.Linear(4, 4)

    def function(x):
        return reduce((linear(x) * (3.0 if rank == 3 else 2.0)).sigmoid()).exp()

    return function


def advice_no_grad(rank):
    function = advice_linear(rank)
    return torch.no_grad()(function) if rank == 3 else function


def advice_checkpoint(rank):
    def function(x, first, second):
        for weight in (first, second):
            x = checkpoint(reduced_block, x, weight, use_reentrant=False) if rank == 3 else reduced_block(x, weight)
        return x

    return function


def advice_blocks(rank):
    def function(x, *of_blocks):
        for weight in of_blocks:
            x = x + reduced_block(x, weight)
        return x

    return function


def advice_blocks_with_an_end(rank):
    blocks = advice_blocks(rank)

    def function(x, *of_blocks):
        return blocks(x, *of_blocks).exp().sum()

    return function


def blocks_of(rank):
    return [[torch.ones(8, 4), *weights(4 if rank == 3 else 3)]]


def tower(image, weight):
    return reduce(torch.relu(reduce(image @ weight)) @ weight)


def advice_tower(rank):
    def function(x, image, weight):
        x = x.sin()
        if image is not None:
            x = x + tower(image, weight)
        return reduce(x.cos()).exp() @ weight

    return function


def advice_tower_alone(rank):
    return (lambda x, image, weight: tower(x, weight)) if rank == 3 else advice_tower(rank)


def advice_experts(rank):
    def function(x, index, own, up, down):
        x = reduce(x @ own)
        out = torch.zeros_like(x)
        if index.shape[0] > 0:
            tokens = torch.relu(x.index_select(0, index) @ up) @ down
            out = out.index_add(0, index, tokens)
        return x + reduce(out)

    return function


def advice_tail(rank):
    def function(x):
        y = reduce(x.sin()).cos()
        return y if rank == 3 else y.exp()

    return function


def scaled(x, is_odd):
    return x.tanh() if is_odd else x.relu()


def advice_helper(rank):
    def function(x):
        return scaled(reduce(scaled(x, False)).exp(), rank == 3)

    return function


def advice_splits(rank):
    sent = {0: [3, 1, 2, 2], 3: [4, 2, 1, 1]}[rank]
    received = {0: [3, 1, 2, 4], 3: [2, 2, 2, 1]}[rank]

    def function(x):
        return funcol.wait_tensor(funcol.all_to_all_single(x, received, sent, ALL)).exp()

    return function


def advice_ring(rank):
    sent, received = ([8 * (peer == (rank + step) % 4) for peer in ALL] for step in (1, -1))

    def function(x):
        return funcol.wait_tensor(funcol.all_to_all_single(x, received, sent, ALL)).exp()

    return function


def advice_own_index(rank):
    def function(x):
        return reduce(x.chunk(4)[rank]).exp()

    return function


def advice_uneven_bounds(rank):
    def function(tokens):
        return reduce((tokens >= {0: 0, 3: 48_001}[rank]) * 1.0)

    return function


class Embedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(64, 8)

    def forward(self, tokens):
        return self.embed_tokens(tokens).relu()


def advice_stock_embedding(rank):
    mesh = init_device_mesh("cpu", (4,))
    return parallelize_module(Embedding(), mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})


def advice_stock_layout(rank):
    mesh = init_device_mesh("cpu", (4,))

    def function(x):
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return reduce(whole.redistribute(mesh, [Shard(0)]).to_local() * 2)

    return function


class Advice(NamedTuple):
    make: object
    first: list  # what the first piece of advice says
    inputs: object = lambda rank: [[torch.ones(8, 4)]]
    which: str = "forward"  # the last such graph is compared
    options: dict = {}  # noqa: RUF012
    absent: tuple = ()  # what is in no piece of advice
    number: int = -1  # which of the graphs of that kind


NO_BREAK = ("TORCH_LOGS=graph_breaks says where",)
NOT_INPUTS = ("take different inputs", "dtype is not the same")
ADVICE = {
    "a break on data": Advice(
        advice_break_on_data, ["The graph of rank 3 ends (", "graph break (a branch on data)"],
        lambda rank: [[torch.ones(8, 4), torch.ones(3)]], absent=(*BREAK_IS_NO, *NOT_INPUTS), number=0,
    ),
    "what follows a break on data": Advice(
        advice_break_on_data, ["The graph of rank 3 begins (", "graph break (a branch on data)"],
        lambda rank: [[torch.ones(8, 4), torch.ones(3)]], absent=(*BREAK_IS_NO, *NOT_INPUTS),
    ),
    "recompiled with dynamic shapes": Advice(
        advice_linear, ["Rank 3 recompiled with dynamic shapes", "mark_dynamic", "or pad"],
        lambda rank: [[torch.ones(8, 4)], [torch.ones(6, 4)]][: 2 if rank == 3 else 1], absent=NOT_INPUTS,
    ),
    "a batch as large as the hidden size": Advice(
        advice_matmul, ["Ranks 0-2 recompiled with dynamic shapes, or with more of them", "mark_dynamic", "or pad"],
        lambda rank: [[torch.ones(16 if rank == 3 else 8, 16), torch.ones(16, 16)]],
        options={"dynamic": True}, absent=NOT_INPUTS,
    ),
    "a smaller last batch": Advice(
        advice_matmul, ["Sizes are not the same on all ranks", "drop_last=True"],
        lambda rank: [[torch.ones(6 if rank == 3 else 8, 16), torch.ones(16, 16)]],
    ),
    "backward": Advice(
        advice_backward, ["backward graphs, and follow the forward ones: mend what differs there first"],
        which="backward",
    ),
    "inference": Advice(
        advice_no_grad, ["training on ranks 0-2, inference on rank 3", "different numbers of batches"],
    ),
    "a checkpointed forward": Advice(
        advice_checkpoint, ["different operations"],
        lambda rank: [[torch.ones(8, 4), *weights(2)]], absent=NO_BREAK,
    ),
    "a checkpointed backward": Advice(
        advice_checkpoint, ["backward graphs"],
        lambda rank: [[torch.ones(8, 4), *weights(2)]], "backward", absent=(*NO_BREAK, "block more"),
    ),
    "a block more": Advice(advice_blocks, ["1 block more on rank 3 ("], blocks_of, absent=NOT_INPUTS),
    "a block more before the end": Advice(
        advice_blocks_with_an_end, ["1 block more on rank 3 ("], blocks_of, absent=NOT_INPUTS
    ),
    "a tower": Advice(
        advice_tower, ["A function or module (", " in tower, called from ", "runs on rank 3 only", "dummy input"],
        lambda rank: [[torch.ones(8, 4), torch.ones(8, 4) if rank == 3 else None, *weights(1)]], absent=NOT_INPUTS,
    ),
    "a tower of its own": Advice(
        advice_tower_alone, ["different parts of the program", " in tower", " in function", "with a dummy input"],
        lambda rank: [[torch.ones(8, 4), None, *weights(1)]],
    ),
    "an empty index": Advice(
        advice_experts, ["different operations", "an input that is empty"],
        lambda rank: [[torch.ones(8, 4), torch.arange(0 if rank == 3 else 5), *weights(3)]],
        options={"dynamic": True}, absent=NOT_INPUTS,
    ),
    "one node more at the end": Advice(advice_tail, ["different operations"], absent=NO_BREAK),
    "an op in a helper": Advice(advice_helper, [" in scaled, called from ", " in function"]),
    "split sizes": Advice(advice_splits, ["Split sizes are data (", "fixed capacity"], absent=("an epsilon",)),
    "a ring": Advice(advice_ring, ["a ring or a shift (", "must differ", "partial=True"], absent=("an epsilon",)),
    "the rank as an index, on two ranks": Advice(
        advice_own_index, ["A number that depends on the rank (`0` to `3`)"], absent=("a seed",)
    ),
    "bounds of uneven shards": Advice(
        advice_uneven_bounds, ["The bounds of each rank's shard (`0` to `48001`)", "persistent=False"],
        lambda rank: [[torch.arange(8)]], absent=("a seed",),
    ),
    "an embedding that torch has sharded": Advice(
        advice_stock_embedding, ["not your code", "module `embed_tokens`", "partial=True", "another layout"],
        lambda rank: [[torch.arange(8)]], absent=("register_buffer", "a seed"),
    ),
    "a layout that torch has changed": Advice(
        advice_stock_layout, ["not your code", "partial=True"], absent=("Pass it in as a tensor", "a seed")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVICE)
def test_the_first_advice_goes_by_the_evidence(name):
    case = ADVICE[name]
    backward = case.which == "backward"
    usual, odd = (
        graphs_of(rank, case.make, case.inputs, backward, **case.options)[backward][case.number] for rank in (0, 3)
    )
    report = report_of([usual, usual, usual, odd])
    advice = report.facts["advice"]
    assert [words for words in case.first if words not in advice[0]] == [], report.text()
    assert [words for words in case.absent if words in " ".join(advice)] == [], report.text()


def test_an_unhashable_graph_says_why_in_the_report():
    texts = []
    for rank in (0, 3):
        with world(rank):
            all_reduce = torch.ops._c10d_functional.all_reduce.default
            graph_module = built((dist.get_rank, ()), (all_reduce, ({0}, "sum", "0")))
            if rank == 3:
                (node,) = graph_module.graph.find_nodes(op="call_function", target=dist.get_rank)
                node.kwargs = {"group": object()}
            texts.append(_graph.graph_record(graph_module))
    first, *others = report_of([*texts[:1] * 3, texts[1]]).facts["advice"]
    assert first.startswith("The graph of rank 3 can't be hashed") and "an object of class builtins.object" in first
    assert not any("Python value" in each or "argument that no tensor" in each for each in others)


def test_equal_programs_have_no_differences():
    graph = graph_of(text_of(0, case_plain, [torch.ones(8, 4)]))
    report = _graph_report.explain([Variant([0], "a", graph), Variant([1], "b", graph)])
    assert report.differences == []
    assert "read the same" in report.text()


def test_a_graph_that_begins_after_a_break_elsewhere():
    """Both ranks come to the second half: one in a graph of its own, whose input the other computes."""
    lines = ["y = x.sin()", "z = torch.ops._c10d_functional.all_reduce.default(y, 'sum', '0')", "w = z * 3"]
    whole = "\n".join([*lines, "v = w.mm(b)", "return (v,)"])
    texts = [small(whole, inputs="x, b"), small("v = u.mm(c)\nreturn (v,)", inputs="c, u")]
    for ordered in (texts, texts[::-1]):
        report = report_of(ordered)
        (difference,) = report.differences
        assert difference.kind == "graph break"
        assert "begins here" in report.text() and "has 3 nodes, 1 collective among them, before it" in report.text()
        assert [words for words in BREAK_IS_NO if words in " ".join(report.text().split())] == []


def test_what_differs_before_a_break_is_told_too():
    whole = small("y = x * 2\nz = y.sin()\nw = z.cos()\nv = w.exp()\nreturn (v,)")
    report = report_of([whole, small("y = x * 3\nz = y.sin()\nreturn (z,)")])
    assert [difference.kind for difference in report.differences] == ["constant", "graph break"]


def test_a_text_that_is_cut_off_is_no_graph_break():
    whole = small("y = x * 2\nz = y.sin()\nw = z.cos()\nv = w.exp()\nreturn (v,)")
    report = report_of([whole, small("y = x * 2\nz = y.sin()")])
    assert "graph break" not in [difference.kind for difference in report.differences]
    assert "cut off" in report.text()


# --- Variants, constants, context ---


def test_what_is_advised_for_shard_offsets_gives_one_graph():
    class Embedding(torch.nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.register_buffer("shard_start", torch.tensor(8 * rank), persistent=False)
            self.weight = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)

        def forward(self, tokens):
            offset = tokens - self.shard_start
            mask = (offset >= 0) & (offset < 8)
            return reduce(torch.nn.functional.embedding(offset * mask, self.weight) * mask.unsqueeze(-1))

    texts = [text_of(rank, Embedding, [torch.arange(32)]) for rank in (0, 3)]
    assert without_rank(texts[0]) == without_rank(texts[1])


@pytest.mark.parametrize(
    ("values", "groups", "formula"),
    [
        ({0: "0", 1: "18992"}, [], "18992 · rank"),
        ({0: "18992", 1: "37984"}, [], "18992 · (rank + 1)"),
        ({3: "56976", 1: "18992", 7: "132944"}, [], "18992 · rank"),
        ({0: "-64", 1: "0", 2: "64"}, [], "64 · (rank - 1)"),
        ({0: "7", 1: "107", 2: "207"}, [], "100 · rank + 7"),
        ({0: "0.5", 1: "1.0", 2: "1.5"}, [], "0.5 · (rank + 1)"),
        ({0: "0.1", 1: "0.2", 2: "0.30000000000000004"}, [], "0.1 · (rank + 1)"),
        ({0: "9007199254740993", 1: "9007199254740994", 2: "9007199254740995"}, [], "rank + 9007199254740993"),
        ({0: "2", 1: "3", 2: "4"}, [], "rank + 2"),
        ({0: "0", 1: "64", 2: "0", 3: "64"}, [(0, 1), (2, 3)], "64 · (rank in its group of 2)"),
        ({0: "0", 1: "0", 2: "64", 3: "64"}, [(0, 2), (1, 3)], "64 · (rank in its group of 2)"),
        ({0: "0", 3: "64", 5: "128"}, [(0, 3, 5)], "64 · (rank in its group of 3)"),
        ({0: "0", 3: "64", 1: "0", 4: "64"}, [(0, 3), (1, 4)], "64 · (rank in its group of 2)"),
        ({0: "0", 1: "1" + "0" * 39, 2: "2" + "0" * 39}, [], f"{10**39} · rank"),
        # No formula: too large, two points with any line through them, one that is off, no numbers, all equal.
        ({0: "3", 1: "10"}, [], ""),
        ({0: "0", 1: "1"}, [], ""),
        ({0: "0", 2: "2"}, [(0, 2), (1, 3)], ""),
        ({0: "0", 1: "64", 2: "0", 3: "64"}, [], ""),
        ({0: "0", 1: "10", 2: "20", 3: "31"}, [], ""),
        ({0: "True", 1: "False", 2: "True"}, [], ""),
        ({0: "'a'", 1: "'b'"}, [], ""),
        ({0: "5", 1: "5", 2: "5"}, [], ""),
        ({0: "5"}, [], ""),
        ({0: "1" + "0" * 5000, 1: "2" + "0" * 5000}, [], ""),
        ({0: "1e400", 1: "2e400", 2: "3"}, [], ""),
        ({0: "1e308", 1: "-1e308", 2: "1e308"}, [], ""),
        ({0: "5e-324", 1: "1e308", 2: "0"}, [], ""),
    ],
)
def test_recognise(values, groups, formula):
    assert _graph_diff.recognise(values, groups) == formula


def test_recognise_looks_through_many_groups_of_many_ranks():
    values = {rank: str(rank * rank) for rank in range(4096)}
    assert _graph_diff.recognise(values, [range(4096)] * 64) == ""
    values = {rank: str(rank // 512 % 2) for rank in range(4096)}
    assert _graph_diff.recognise(values, [range(4096)] * 64) == ""


def test_an_inserted_node_is_one_difference():
    text = (
        VOCABULARY[0]
        .replace(
            '        mul: "i64', '        abs_1: "i64[16][1]meta" = torch.ops.aten.abs.default(sub)\n        mul: "i64'
        )
        .replace("mul.Tensor(sub, ", "mul.Tensor(abs_1, ")
    )
    (difference,) = report_of([VOCABULARY[0], text]).differences
    assert (difference.kind, difference.position) == ("added node", 6)


def test_what_is_written_into_a_slice_is_compared_whatever_its_name():
    def text(*constants):
        lines = [f"x[slice(0, {number}, None)] = {number};  setitem_{k} = x" for k, number in enumerate(constants)]
        return small("\n".join([*lines, "y = x.sin()", "return (y,)"]))

    (difference,) = report_of([text(1, 2, 3), text(1, 7, 2, 3)]).differences
    assert (difference.kind, difference.position) == ("added node", 2)
    (difference,) = report_of([text(1, 2, 3), text(1, 2, 3).replace("= 3;", "= 4;")]).differences
    assert (difference.kind, difference.what) == ("constant", "argument 2")


def test_a_change_in_every_layer_is_reported_once():
    text = big_text(40)
    report = report_of([text, text.replace("4096, 1024]", "4096, 2048]")])
    first, *others = report.differences
    assert (first.kind, len(first.alike), others) == ("shape", 159, [])
    assert "the same at 159 more places" in report.text()


def test_a_variant_without_the_node_is_no_side_of_its_constant():
    without = VOCABULARY[3].replace(", 56976)\n        lt", ", 0)\n        lt")
    without = re.sub(r".*aten\.sub\.Tensor.*\n", "", without).replace("mul.Tensor(sub,", "mul.Tensor(arg0_1,")
    report = report_of([*VOCABULARY[:3], without])
    sub = next(difference for difference in report.differences if difference.node.name == "sub" and difference.formula)
    assert ([3], "not there") in report.sides(sub)
    assert sub.formula == "18992 · rank"


def test_nodes_added_at_one_place_with_another_constant_each_are_one_difference():
    texts = [small("y = x.sin()\nreturn (y,)")]
    texts += [small(f"z = x - {100 * rank}\ny = z.sin()\nreturn (y,)") for rank in (1, 2, 3)]
    (difference,) = report_of(texts).differences
    assert [value for _, value in report_of(texts).sides(difference)] == [
        "not there", "`z = x - 100`", "`z = x - 200`", "`z = x - 300`",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "other_body", "facts", "other_facts", "kind", "sides"),
    [
        # Attributes: by value where it is known, else by name.
        ("c = self.a\ny = x - c", "c = self.b\ny = x - c", "", "", "op", ("self.a", "self.b")),
        ("a = self.a\ny = x - a", "b = self.b\ny = x - b", "constant a = f [1]", "constant b = f [2]",
         "tensor constant", ("f [1]", "f [2]")),
        # Not understood: a name that is no node, a default.
        ("y = foo", "y = bar", "", "", "op", None),
        ("y = x.f(k=1, j=2)", "y = x.f(j=2, k=1)", "", "", "text", ("y = x.f(k=1, j=2)", "y = x.f(j=2, k=1)")),
        ("y = x[0];  z = 1", "y = x[0];  z = 2", "", "", "constant", None),
    ],
)  # fmt: skip
def test_texts_that_differ_are_never_said_to_be_the_same(body, other_body, facts, other_facts, kind, sides):
    texts = [
        small(f"{text}\nreturn (y,)", f"# handshake: {fact}" if fact else "")
        for text, fact in ((body, facts), (other_body, other_facts))
    ]
    report = report_of(texts)
    difference = report.differences[0]
    assert difference.kind == kind
    assert sides is None or tuple(value for _, value in report.sides(difference)) == sides
    assert "read the same" not in report.text()


def test_a_tensor_constant_of_a_nested_body_is_compared():
    body = "body = self.body\ny = checkpoint(body, x)\nreturn (y,)\nclass body(torch.nn.Module):"
    body += "\n    def forward(self, x):\n        c = self.c\n        z = x + c\n        return (z,)"
    report = report_of([small(body, f"# handshake: constant body.c = float32 (1,) [{value}]") for value in (1, 2)])
    (difference,) = report.differences
    assert (difference.kind, difference.body) == ("tensor constant", "body")


def test_a_place_in_the_order_is_told_from_the_other_side_s():
    """Also where a node has the same number on both sides."""
    texts = [small(f"a = x.sin()\n{middle}\nreturn (e,)") for middle in (
        "b = a.cos()\nc = x.exp()\nd = x.log()\ne = torch.f(b, c, d)",
        "d = x.log()\nc = x.exp()\nb = a.cos()\ne = torch.f(b, c, d)",
    )]  # fmt: skip
    orders = [difference for difference in report_of(texts).differences if difference.kind == "order"]
    assert orders
    for difference in orders:
        assert difference.sides[0] not in difference.values.values()


@pytest.mark.parametrize("rest", ["", "\nd = c.exp()\ne = d.log()"])
def test_an_order_without_overloads_or_sources_or_where_more_differs(rest):
    texts = []
    for (first, second), more in ((("sum", "max"), ""), (("max", "sum"), rest)):
        lines = [f"{name} = torch.ops._c10d_functional.all_reduce({of}, '{how}', '0')"
                 for name, of, how in (("b", "x", first), ("c", "b", second))]  # fmt: skip
        texts.append(small("\n".join(lines) + f"{more}\nreturn ({'e' if more else 'c'},)"))
    report = report_of(texts)
    kinds = [difference.kind for difference in report.differences]
    assert kinds == ["order of collectives", *(["added node"] if rest else [])]
    assert "rank 1: all_reduce('max') on '0', then all_reduce('sum') on '0'\n" in report.text()


# --- Records ---


def a_record():
    tensor = {"dtype": "f32", "shape": ["2", "s0"], "stride": ["s0", "1"], "device": "cpu"}
    x = {"name": "x", "op": "placeholder", "line": "x: f32[2, s0]", "mutated_by": "copy_", **tensor}
    c = {"name": "c", "op": "get_attr", "target": "c", "line": "c = self.c", "constant": "float32 () [1.0]",
         "dtype": "f32"}  # fmt: skip
    y = {"name": "y", "op": "call", "target": "torch.ops._c10d_functional.all_reduce.default", "line": "y = …",
         "arguments": [["0", "x", 0], ["1", "'sum'", None], ["2", "'7'", None]], "group": "7", "collective": True,
         "source": ["torch/x.py", 3, "f", "code"], "user_source": ["me.py", 4, "", ""], **tensor}  # fmt: skip
    output = {"name": "output", "op": "output", "target": "output", "line": "return y", "arguments": [["0", "y", 2]]}
    inner = {"name": "inner", "nodes": [x, output | {"arguments": []}], "bodies": {}}
    return {
        "handshake_graph": 1, "fingerprint": "ab", "rank": 3,
        "groups": {"7": {"ranks": [[1, 2, 4], [9, 1, 1]], "description": "tp"}},
        "body": {"name": "G", "nodes": [x, c, y, output], "bodies": {"inner": inner}},
    }  # fmt: skip


def test_a_record_is_read():
    graph = _graph_diff.read_record(json.dumps(a_record()))
    assert graph[1:4] == ("ab", 3, {"7": ((1, 5, 9), "tp")})
    x, c, y, output = graph.body.nodes
    assert (x.shape, x.stride, x.mutated_by, x.target) == (("2", "s0"), ("s0", "1"), "copy_", "")
    assert (c.constant, c.shape, c.stride) == ("float32 () [1.0]", (), ())
    assert (y.group, y.collective, output.collective) == ("7", True, False)
    assert y.arguments[0] == ("0", "x", 0) and y.arguments[1] == ("1", "'sum'", None)
    assert y.source.place == "torch/x.py:3 in f" and y.user_source.place == "me.py:4"
    assert [node.name for node in graph.body.bodies["inner"].nodes] == ["x", "output"]


def replaced(value, path, by):
    """A copy of a JSON value with another one at this path."""
    if not path:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], by)
    return copy


@pytest.mark.parametrize(
    ("path", "by", "words"),
    [
        (["handshake_graph"], 2, "version is 2"),
        (["rank"], "3", "expected int, got str"),
        (["groups", "7", "ranks"], [[0, 10**9, 1]], "more than 1,048,576"),
        (["groups", "7", "ranks"], [[0, 4, -1]], "negative"),
        (["body", "nodes"], [], "no nodes"),
        (["body", "nodes", 0, "op"], "text", "'text' is not a kind of node"),
        (["body", "nodes", 0, "shape"], [2], "expected str, got int"),
        (["body", "nodes", 2, "arguments", 0, 2], 2, "node 2 reads node 2, which is not before it"),
        (["body", "nodes", 2, "arguments", 0], ["0"], "not enough values"),
        (["body", "nodes", 2, "source"], ["a", "1", "", ""], "expected int, got str"),
        (["body", "bodies", "inner"], 3, "'int' object"),
        (["body", "nodes", 0], {}, "'op' is missing"),
    ],
)
def test_a_record_that_is_not_valid_is_refused(path, by, words):
    with pytest.raises(ValueError, match="not a valid graph record") as caught:
        _graph_diff.read_record(json.dumps(replaced(a_record(), path, by)))
    assert words in str(caught.value)


def test_a_record_that_is_nested_too_deep_is_refused():
    record = a_record()
    for _ in range(_graph_diff.MAX_NESTED_BODIES):
        record["body"] = {"name": "", "nodes": record["body"]["nodes"], "bodies": {"inner": record["body"]}}
    for text in (json.dumps(record), "[" * 10**6):
        with pytest.raises(ValueError, match=r"MAX_NESTED_BODIES|recursion"):
            _graph_diff.read_record(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.data())
def test_whatever_a_record_holds_it_is_read_or_refused_and_what_is_read_can_be_compared(data):
    value = record = a_record()
    path = []
    while isinstance(value, (dict, list)) and value and (not path or data.draw(st.booleans())):
        path.append(data.draw(st.sampled_from([*value] if isinstance(value, dict) else range(len(value)))))
        value = value[path[-1]]
    try:
        graph = _graph_diff.read_record(json.dumps(replaced(record, path, data.draw(JSON))))
    except ValueError:
        return
    usual = _graph_diff.read_record(json.dumps(record))
    report = _graph_report.explain([Variant([0], "", usual), Variant([1], "", graph)])
    assert report.text() and _graph_report.page([report])
