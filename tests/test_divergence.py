# SPDX-License-Identifier: Apache-2.0
"""What is said about ranks whose graphs differ. Pairs of graphs are traced by torch here, each rank in its turn."""

import io
import json
import os
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest
from layout import PACKAGE, TESTS, child_environment, load, module_file

_divergence = load("_divergence")
_graph_diff = load("_graph_diff")
_graph_text = load("_graph_text")

Variant, Context, explain = _divergence.Variant, _divergence.Context, _divergence.explain
VOCABULARY = [(TESTS / "data" / "vocabulary" / f"rank{rank}.txt").read_text() for rank in range(4)]


def report_of(texts, context=None):
    """`texts` by rank; ranks with the same text have one variant, but for the line that says which rank it is."""
    ranks_of = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(re.sub(r"# handshake: rank = \d+\n", "", text), []).append(rank)
    variants = [
        Variant(
            tuple(ranks), f"{number:032x}", texts[ranks[0]], {rank: f"node{rank // 2}:{rank + 100}" for rank in ranks}
        )
        for number, ranks in enumerate(ranks_of.values())
    ]
    return explain(variants, context)


# --- Real pairs of graphs, a kind of difference each ---

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
from graph_workers import world  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
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
        texts.append(_graph.graph_text(graph_module))
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


def case_input(rank):
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
    "op": Case(case_op, "op", ["relu", "rank 3: torch.ops.aten.tanh", "y = torch.tanh(x) if rank == 3", "branch"]),
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
        ["ranks 0-2: collective 0 of", "rank 3: collective 1 of", "fixed order", "x = funcol.all_reduce(x"],
        lambda rank: [torch.ones(8, 4), torch.ones(3)],
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
        "number of collectives",
        ["rank 3: not there", "graph break", "TORCH_LOGS=graph_breaks", "return reduce(x.cos()).exp()"],
    ),
    "inputs": Case(
        case_input,
        "inputs",
        ["ranks 0-2: 1 input", "rank 3: 2 inputs, only here: `arg1_1` f32[4]", "take different inputs"],
        lambda rank: [torch.ones(8, 4), torch.ones(4)],
        places=2,
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
    "nothing in common": Case(case_nothing_in_common, "graph", ["nothing in common", "11 nodes, 1 collective"]),
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
    assert "test_divergence.py" in text
    assert "site-packages/torch" not in text
    assert len(text.splitlines()) < 45
    assert_page_is_self_contained(report.html())


def test_equal_programs_have_no_differences():
    text = text_of(0, case_plain, [torch.ones(8, 4)])
    report = explain([Variant((0,), "a", text), Variant((1,), "b", text)])
    assert report.differences == []
    assert "texts of the graphs are the same" in " ".join(report.text().split())


# --- Variants, constants, context ---


def test_vocabulary_bounds_are_recognised_as_shard_offsets():
    report = report_of(VOCABULARY)
    text = " ".join(report.text().split())
    assert [difference.formula for difference in report.differences] == [
        "18992 · rank",
        "18992 · (rank + 1)",
        "18992 · rank",
    ]
    assert "rank 2: 37984" in text
    assert "/home/user/model/vocab_parallel_embedding.py:14 in forward: mask = (tokens >= self.start)" in text
    assert "register_buffer" in text and "tensor inputs" in text and "one graph" in text


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
    assert [re.sub("rank = [03]", "", text) for text in texts[1:]] == [re.sub("rank = [03]", "", texts[0])]


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
        ({0: "0", 1: "64", 2: "0", 3: "64"}, [], "64 · (rank % 2)"),
        ({0: "0", 1: "0", 2: "64", 3: "64"}, [], "64 · (rank // 2)"),
        ({0: "0", 3: "64", 5: "128"}, [(0, 3, 5)], "64 · (rank in its group of 3)"),
        ({0: "0", 3: "64", 1: "0", 4: "64"}, [(0, 3), (1, 4)], "64 · (rank in its group of 2)"),
        ({0: "0", 1: "1" + "0" * 39, 2: "2" + "0" * 39}, [], f"{10**39} · rank"),
        # No formula: too large, two points with any line through them, one that is off, no numbers, all equal.
        ({0: "3", 1: "10"}, [], ""),
        ({0: "0", 1: "1"}, [], ""),
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
    assert _divergence.recognise(values, groups) == formula


def test_recognise_looks_through_many_groups_of_many_ranks():
    values = {rank: str(rank * rank) for rank in range(4096)}
    assert _divergence.recognise(values, [range(4096)] * 64) == ""
    values = {rank: str(rank // 512 % 2) for rank in range(4096)}
    assert _divergence.recognise(values, [range(4096)] * 64) == ""


def test_the_largest_variant_is_the_reference_whichever_ranks_have_it():
    changed = VOCABULARY[0].replace("ge.Scalar", "gt.Scalar")
    report = report_of([changed, *[VOCABULARY[0]] * 6])
    assert report.variants[0].ranks == (1, 2, 3, 4, 5, 6)
    text = report.text()
    assert "A  ranks 1-6" in text and "B  rank 0" in text
    assert "ranks 1-6: torch.ops.aten.ge.Scalar" in text and "rank 0: torch.ops.aten.gt.Scalar" in text
    # Of equals, the one with the lowest rank.
    assert report_of([changed, VOCABULARY[0]]).variants[0].ranks == (0,)


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


def test_the_context_is_in_the_report():
    context = Context(
        groups=(((0, 1, 2, 3), (12, 13)),),
        before=("[11, 12) on ranks 0-3: fat",),
        reason="fingerprints of ranks 0 and 1 differ",
        notes=("8 variants more were not sent (MAX_VARIANTS=64)",),
        versions={0: {"torch": "2.13.0"}, 1: {"torch": "2.13.0"}, 2: {"torch": "2.12.1"}, 3: {"torch": "2.13.0"}},
        title="graph 7",
    )
    removed = re.sub(r".*_c10d_functional.*\n", "", VOCABULARY[3]).replace(
        "return (wait_tensor,)", "return (masked_fill,)"
    )
    report = report_of([*[VOCABULARY[0]] * 3, removed], context)
    for shown in (report.text(), report.html()):
        for words in (
            "ranks 0-3: collectives [12, 13)",
            "[11, 12) on ranks 0-3: fat",
            "fingerprints of ranks 0 and 1 differ",
            "MAX_VARIANTS=64",
            "torch: 2.13.0 on ranks 0-1, 3, 2.12.1 on rank 2",
            "graph 7",
            "position 12 on the line of ranks 0-3",
            "node1:103",
            "same ones everywhere",
        ):
            assert words in shown, words


def test_variants_that_follow_the_hosts_point_at_the_hosts():
    report = report_of([*[VOCABULARY[0]] * 2, *[VOCABULARY[0].replace("ge.Scalar", "gt.Scalar")] * 2])
    assert "The variants follow the hosts" in report.text()
    report = report_of([VOCABULARY[0], *[VOCABULARY[0].replace("ge.Scalar", "gt.Scalar")] * 3])
    assert "The variants follow the hosts" not in report.text()


def test_a_variant_without_the_node_is_no_side_of_its_constant():
    without = VOCABULARY[3].replace(", 56976)\n        lt", ", 0)\n        lt")
    without = re.sub(r".*aten\.sub\.Tensor.*\n", "", without).replace("mul.Tensor(sub,", "mul.Tensor(arg0_1,")
    report = report_of([*VOCABULARY[:3], without])
    sub = next(difference for difference in report.differences if difference.node.name == "sub" and difference.formula)
    assert ((3,), "not there") in report.sides(sub)
    assert sub.formula == "18992 · rank"


def test_graphs_that_cannot_be_read_are_named_and_the_rest_is_compared():
    report = explain(
        [
            Variant((0, 1), "a", "no graph"),
            Variant((2,), "b", VOCABULARY[2]),
            Variant((3,), "unhashable-c", VOCABULARY[3][:900]),
            Variant((4,), "d", ""),
        ]
    )
    text = report.text()
    assert "B is the reference" in text
    assert "the text holds no graph that could be read: not compared (ranks 0-1)" in text
    assert "there is no text of the graph: not compared (rank 4)" in text
    assert "the text of the graph is cut off: what is missing at its end may be there in fact (rank 3)" in text
    assert "the graph could not be hashed, so it equals no other: see the warning on that rank (rank 3)" in text
    assert report.differences


def small(body, facts="", inputs='x: "f32[2]"'):
    lines = [f"    def forward(self, {inputs}):", *(f"        {line}" for line in body.split("\n"))]
    return "\n".join(["class G(torch.nn.Module):", *lines, facts, ""])


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
        ("y = foo", "y = bar", "", "", "constant", ("foo", "bar")),
        ("y = x.f(k=1, j=2)", "y = x.f(j=2, k=1)", "", "", "text", ("y = x.f(k=1, j=2)", "y = x.f(j=2, k=1)")),
        ("y = x[0];  z = 1", "y = x[0];  z = 2", "", "", "constant", None),
        # Facts alone.
        ("y = x", "y = x", "group 0 = ranks 0-1; description tp", "group 0 = ranks 0-1; description dp", "text", None),
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
    assert "are the same" not in report.text()


def test_a_tensor_constant_of_a_nested_body_is_compared():
    body = "body = self.body\ny = checkpoint(body, x)\nreturn (y,)\nclass body(torch.nn.Module):"
    body += "\n    def forward(self, x):\n        c = self.c\n        z = x + c\n        return (z,)"
    report = report_of([small(body, f"# handshake: constant body.c = float32 (1,) [{value}]") for value in (1, 2)])
    (difference,) = report.differences
    assert (difference.kind, difference.body) == ("tensor constant", "body")


def test_variants_whose_texts_are_equal_are_named_beside_one_that_differs():
    texts = [VOCABULARY[0], VOCABULARY[0], VOCABULARY[0].replace("ge.Scalar", "gt.Scalar")]
    report = explain([Variant((rank,), str(rank), text) for rank, text in enumerate(texts)])
    assert "same on rank 1 and in the reference" in " ".join(report.text().split())


def test_a_text_that_is_not_compared_as_a_whole_is_named():
    deep = "\n".join(" " * k + "class G(torch.nn.Module):\n" + " " * k + " def forward(self, x):" for k in range(99))
    texts = [VOCABULARY[0] + VOCABULARY[1], VOCABULARY[2], deep]
    text = explain([Variant((rank,), str(rank), text) for rank, text in enumerate(texts)]).text()
    assert "several graphs: only the first is compared (rank 0)" in text
    assert "MAX_NESTED_BODIES=50 levels deep (rank 2)" in text
    assert "rank 0: 0" in text and "rank 1: 37984" in text


def test_a_table_of_constants_has_no_value_for_a_variant_without_the_node():
    texts = [small(f"z = x + {rank}\ny = z.sin()\nreturn (y,)") for rank in (3, 4)]
    page = report_of([*texts, small("y = x.sin()\nreturn (y,)")]).html()
    row = re.search(r'<table class="constants">.*?</table>', page)[0]
    assert re.findall(r"<td><code>([^<]*)</code></td>", row) == ["3", "4", "not there"]


# --- Size ---


def big_text(layers, rank=0, extra_layer=None):
    """A graph of `layers` times 18 nodes, in the form in which torch prints it."""
    weights = ", ".join(f'w{number}: "bf16[4096, 1024][1024, 1]cuda:{rank}"' for number in range(4 * layers))
    lines = [
        "class <lambda>(torch.nn.Module):",
        f'    def forward(self, x: "bf16[8, 4096][4096, 1]cuda:{rank}", {weights}):',
    ]
    last = "x"

    def add(operation, arguments, line):
        nonlocal last
        name = f"n{len(lines)}"
        lines.append(f"        # File: /home/user/model/layers.py:{line} in forward, code: x = step_{line}(x)")
        lines.append(f'        {name}: "bf16[8, 4096][4096, 1]cuda:{rank}" = torch.ops.{operation}({last}{arguments})')
        last = name

    add("aten.ge.Scalar", f", {18992 * rank}", 3)
    for layer in range(layers):
        for k in range(4):
            add("aten.mm.default", f", w{4 * layer + k}", 10 + k)
            add("aten.mul.Tensor", ", 0.5", 20 + k)
            add("aten.relu.default", "", 30 + k)
        if layer == extra_layer:
            add("aten.clamp.default", ", -1, 1", 99)
        add("_c10d_functional.all_reduce.default", ", 'sum', '0'", 40)
        add("_c10d_functional.wait_tensor.default", "", 40)
    return "\n".join([*lines, f"        return ({last},)", ""])


def test_64_variants_of_a_large_graph_are_told_in_a_screen_or_two():
    texts = [big_text(20, rank, extra_layer=7 if rank == 50 else None) for rank in range(64)]
    report = report_of(texts)
    text = report.text()
    assert "= 18992 · rank" in text and "before node" in text and "rank 50: `n" in text
    assert len(text.splitlines()) < 60
    page = report.html()
    assert_page_is_self_contained(page)
    assert len(page) < 200_000
    # One comparison for all that differ in the constant alone, and one for rank 50.
    assert page.count('<table class="graphs">') == 2
    assert "ranks 2-49, 51-63" in page


def test_a_large_graph_with_one_added_node_and_one_without_any_common_node():
    text = big_text(280)  # 5,042 nodes
    report = report_of([text, big_text(280, extra_layer=100)])
    assert [difference.kind for difference in report.differences] == ["added node"]
    nothing_in_common = report_of([text, text.replace("aten", "other").replace("4096", "77")])
    assert [difference.kind for difference in nothing_in_common.differences] == ["graph"]
    assert "nothing in common" in nothing_in_common.html()


def test_bounds_that_bite_are_named():
    text = big_text(280)
    other = re.sub(r'w(\d+): "bf16\[4096', lambda match: f'w{match[1]}: "bf16[{5000 + int(match[1])}', text)
    report = report_of([text, other])
    assert "MAX_DIFFERENCES_PER_VARIANT=1000" in report.text()
    assert "MAX_DIFFERENCES" in report.html() and "MAX_ROWS" in report.html()
    assert len(report.text().splitlines()) < 70


# --- The page ---


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open, self.attributes = set(), [], []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in ("meta", "br", "hr", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def assert_page_is_self_contained(page):
    parsed = _Page()
    parsed.feed(page)
    assert parsed.open == []
    assert not parsed.tags & {"script", "link", "img", "iframe", "object", "svg"}
    assert all(name in ("lang", "charset", "name", "content", "class", "colspan", "id") or (
        name == "href" and value.startswith("#")
    ) for name, value in parsed.attributes), parsed.attributes  # fmt: skip
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert "prefers-color-scheme: dark" in page


def test_the_page_escapes_whatever_is_in_graphs_and_logs():
    evil = "</td><script>alert(1)</script><b onclick='x'>&"
    texts = [
        text.replace("self.start", evil).replace("'sum'", f"'{side}<script>'").replace("vocab_parallel", "<script>")
        for side, text in enumerate(VOCABULARY[:2])
    ]
    context = Context(
        before=(evil,), reason=evil, notes=(evil,), title=evil, versions={0: {evil: evil}, 1: {evil: "2"}}
    )
    variants = [Variant((rank,), evil, text, {rank: evil}) for rank, text in enumerate(texts)]
    page = explain(variants, context).html()
    assert_page_is_self_contained(page)
    assert "onclick='x'" not in page


def test_the_page_marks_what_changed_within_a_line():
    page = report_of(VOCABULARY).html()
    assert "torch.ops.aten.ge.Scalar(arg0_1, <mark>0</mark>)" in page
    assert "torch.ops.aten.ge.Scalar(arg0_1, <mark>18992</mark>)" in page


# --- Jobs of the coordinator ---


def run_job(tmp_path, variants, context=None):
    job = {
        "variants": variants,
        "context": context or {},
        "out_text": str(tmp_path / "report.txt"),
        "out_html": str(tmp_path / "report.html"),
    }
    _divergence.run_job(job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.txt"]
    return (tmp_path / "report.txt").read_text(), (tmp_path / "report.html").read_text()


def test_a_job_gives_a_text_and_a_page(tmp_path):
    variants = [
        {
            "ranks": [rank],
            "fingerprint": f"{rank:032x}",
            "text": VOCABULARY[rank],
            "hosts": {str(rank): f"node0:{rank}"},
        }
        for rank in range(4)
    ]
    context = {
        "groups": [{"ranks": [0, 1, 2, 3], "span": [5, 6]}],
        "reason": "why",
        "versions": {"0": {"torch": "2.13"}},
    }
    text, page = run_job(tmp_path, variants, context)
    assert "18992 · rank" in text and "collectives [5, 6)" in text and "node0:3" in text
    assert "18992 · rank" in page


@pytest.mark.parametrize(
    "text", [None, "", "\0\ud800", "class GraphModule(torch.nn.Module):\n    def forward(", "x" * 10**6]
)
def test_a_job_with_a_strange_graph_says_so_in_the_report(tmp_path, text):
    variants = [{"ranks": [0], "text": VOCABULARY[0]}, {"ranks": [2, 1], "fingerprint": "f", "text": text}]
    report, page = run_job(tmp_path, variants)
    assert "ranks 1-2" in report and "not compared" in report and "not compared" in page


def test_a_failure_of_the_comparison_still_names_the_ranks(tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(_divergence, "compare", fail)
    variants = [{"ranks": [rank], "text": VOCABULARY[rank]} for rank in (0, 1)]
    report, _ = run_job(tmp_path, variants)
    assert "ranks 0-1" in report and "could not be compared: ZeroDivisionError: oops" in report


def test_a_job_without_room_for_its_page_says_so_in_the_text(tmp_path):
    variants = [{"ranks": [rank], "text": VOCABULARY[rank]} for rank in (0, 1)]
    page = tmp_path / "missing" / "report.html"
    _divergence.run_job({"variants": variants, "out_text": str(tmp_path / "report.txt"), "out_html": str(page)})
    text = (tmp_path / "report.txt").read_text()
    assert "18992 · rank" in text and "page could not be written" in text and str(page) in text
    with pytest.raises(OSError, match="missing"):
        _divergence.run_job({"variants": variants, "out_text": str(page), "out_html": str(page)})


@pytest.mark.parametrize("job", ["[]", "{}", '{"variants": 3}', '{"variants": [{}]}', "{", "[" * 9999])
def test_a_file_that_is_no_job_is_refused(tmp_path, job, capsys):
    (tmp_path / "job.json").write_text(job)
    assert _divergence.main(["--job", str(tmp_path / "job.json")]) == 2
    assert "job.json: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields", [{}, {"variants": 3}, {"variants": [{}]}, {"variants": [{"ranks": [0], "hosts": {"x": 1}}]}]
)
def test_a_job_that_is_none_leaves_a_text_that_says_so(tmp_path, fields):
    (tmp_path / "job.json").write_text(
        json.dumps(fields | {name: str(tmp_path / name) for name in ("out_text", "out_html")})
    )
    assert _divergence.main(["--job", str(tmp_path / "job.json")]) == 2
    assert "no job for a report" in (tmp_path / "out_text").read_text()


# --- Files ---


def explain_files(tmp_path, files, html=None, times=1):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    out = io.StringIO()
    status = _divergence.explain_files([str(tmp_path / name) for name in files] * times, html, out)
    return status, out.getvalue()


def log_of(*texts):
    lines = ["starting"]
    for number, text in enumerate(texts):
        begin, end = (f"--- [{word} GRAPH MODULE: {number:032x}] ---" for word in ("BEGIN", "END"))
        lines += ["Handshake failed for graph module:", begin, *text.splitlines(), end, f"step {number}"]
    return "\n".join(f"W1130 03:22:11.{number} 7 file.py:12] {line}" for number, line in enumerate(lines))


def without_rank(text):
    return re.sub(r"# handshake: rank = \d+\n", "", text)


def test_files_of_ranks_are_compared(tmp_path):
    status, out = explain_files(tmp_path, {f"rank{rank}.txt": VOCABULARY[rank] for rank in range(4)})
    assert status == 1
    assert "18992 · (rank + 1)" in out and "4 different graphs" in out


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank12.txt", "rank8.txt"], "ranks 8, 12"),
        (["job7_rank_0.log", "job7_rank_1.log"], "ranks 0-1"),
        (["a.txt", "b.txt"], "ranks 0-1"),
    ],
)
def test_the_rank_comes_from_the_files_name_or_its_place(tmp_path, names, ranks):
    _, out = explain_files(tmp_path, dict(zip(names, map(without_rank, VOCABULARY), strict=False)))
    assert out.startswith(f"{ranks} have 2 different graphs")


def test_a_rank_with_a_graph_more_than_the_others(tmp_path):
    other = (TESTS / "data" / "aot_dynamic_cond.txt").read_text()
    more = (TESTS / "data" / "dynamo_checkpoint.txt").read_text()
    html = tmp_path / "report.html"
    files = {
        "rank0.log": log_of(without_rank(VOCABULARY[0]), other),
        "rank1.log": log_of(without_rank(VOCABULARY[1]), other),
        "rank2.log": log_of(more, without_rank(VOCABULARY[2]), other),
    }
    status, out = explain_files(tmp_path, files, str(html))
    assert status == 1
    assert "ranks 0-2: 2 of 2 graphs differ" in out or "ranks 0-2: 1 of 2 graphs differ" in out
    assert "Only rank 2 has this graph, ranks 0-1 have not: graph 0 of rank 2" in out
    assert "18992 · rank" in out and "compile cache" in out
    assert_page_is_self_contained(html.read_text())
    assert "Only rank 2 has this graph" in html.read_text()


def test_many_graphs_that_all_differ_are_matched_in_order(tmp_path):
    """More than are tried against one another at a time; one rank has one more in the middle."""

    def text(number, rank):
        return small(f"z = x.sin()\nw = z.op_{number % 7}()\ny = w * {number}.5\nv = y - {18992 * rank}\nreturn (v,)")

    numbers = range(150)
    files = {f"rank{rank}.log": log_of(*(text(number, rank) for number in numbers)) for rank in (0, 1)}
    more = [*(text(number, 2) for number in numbers[:70]), small("y = x.a().b().c()\nreturn (y,)")]
    more += [text(number, 2) for number in numbers[70:]]
    status, out = explain_files(tmp_path, files | {"rank2.log": log_of(*more)})
    assert status == 1
    assert "ranks 0-2: 150 of 150 graphs differ" in out
    assert out.count("Only rank 2 has this graph, ranks 0-1 have not: graph 70 of rank 2") == 1
    assert "= 18992 · rank" in out


def test_a_graph_break_in_one_rank_s_file(tmp_path):
    """One rank has two graphs where the other has one that is both."""
    whole = big_text(6)
    lines = whole.splitlines()
    cut = next(number for number, line in enumerate(lines) if "w8)" in line) - 1
    name = lines[cut - 1].split(":")[0].strip()
    first = [*lines[:cut], f"        return ({name},)"]
    second = [lines[0], lines[1].replace("(self, x", f"(self, {name}"), *lines[cut:]]
    status, out = explain_files(tmp_path, {"rank0.txt": whole, "rank1.txt": "\n".join([*first, *second])})
    assert status == 1
    assert "Only rank 1 has this graph" in out and "TORCH_LOGS=graph_breaks" in out
    assert "What differs" in out and "collectives among them" in out


def test_equal_files_are_said_to_be_equal(tmp_path):
    status, out = explain_files(
        tmp_path, {"rank0.txt": VOCABULARY[0], "b1.txt": VOCABULARY[0].replace("rank = 0", "rank = 1")}
    )
    assert (status, out) == (0, "ranks 0-1 have the same 1 graph\n")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"rank0.txt": VOCABULARY[0]}, "at least two files"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": ""}, "rank1.txt is empty"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": "Traceback (most recent call last):"}, "rank1.txt holds no graph"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": bytes(range(256)) * 9}, "rank1.txt is no text"),
        ({"rank0.txt": VOCABULARY[0], "rank1.txt": random.Random(1).randbytes(999).replace(b"\0", b"")}, "no graph"),
        (
            {"rank0.txt": VOCABULARY[0], "rank1.txt": (TESTS / "data" / "aot_dynamic_cond.txt").read_text()},
            "have no graph in common",
        ),
    ],
)
def test_files_that_cannot_be_compared(tmp_path, files, message, capsys):
    status, out = explain_files(tmp_path, files)
    assert (status, out) == (2, "")
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    good = tmp_path / "rank0.txt"
    good.write_text(VOCABULARY[0])
    for path, why in ((tmp_path / "missing.txt", "No such file"), (tmp_path, "Is a directory")):
        assert _divergence.main([str(good), str(path)]) == 2
        assert f"{path} can't be read: {why}" in capsys.readouterr().err
    assert _divergence.main([str(good), "/dev/zero"]) == 2
    assert "/dev/zero is no text" in capsys.readouterr().err
    monkeypatch.setattr(_divergence, "MAX_FILE_BYTES", 5000)
    (tmp_path / "large.txt").write_text("y" * 5001)
    assert _divergence.main([str(good), str(tmp_path / "large.txt")]) == 2
    assert "large.txt is larger than" in capsys.readouterr().err


@pytest.fixture
def two_files(tmp_path):
    paths = [tmp_path / "rank0.txt", tmp_path / "rank1.txt"]
    for path, text in zip(paths, VOCABULARY, strict=False):
        path.write_text(text)
    return [str(path) for path in paths]


@pytest.mark.parametrize("name", ["missing/x.html", ".", "x" * 300])
def test_a_page_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path, two_files, name, capsys):
    before = sorted(tmp_path.iterdir())
    page = f"{tmp_path}/{name}"
    assert _divergence.main([*two_files, "--html", page]) == 2
    captured = capsys.readouterr()
    assert f"could not be written to {page}: " in captured.err and ".part" not in captured.err
    assert "18992 · rank" in captured.out, "the text is there all the same"
    assert sorted(tmp_path.iterdir()) == before


def test_a_device_is_written_as_it_is_and_stays_one(two_files, capsys):
    assert _divergence.main([*two_files, "--html", "/dev/full"]) == 2
    assert "could not be written to /dev/full: No space left" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("alias", ["itself", "symlink", "hard link", "dots"])
def test_the_page_never_takes_the_place_of_an_input(tmp_path, two_files, alias, capsys):
    page = tmp_path / "page.html"
    if alias == "symlink":
        page.symlink_to(two_files[1])
    elif alias == "hard link":
        page.hardlink_to(two_files[1])
    else:
        page = two_files[1] if alias == "itself" else f"{tmp_path}/../{tmp_path.name}/rank1.txt"
    assert _divergence.main([*two_files, "--html", str(page)]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert Path(two_files[1]).read_text() == VOCABULARY[1]


def test_a_page_of_before_is_replaced_also_through_a_link(tmp_path, two_files):
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    assert _divergence.main([*two_files, "--html", str(tmp_path / "link.html")]) == 1
    assert (tmp_path / "link.html").is_symlink()
    assert_page_is_self_contained((tmp_path / "real.html").read_text())


def test_two_files_of_one_rank_are_told_apart_by_their_place(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    page = tmp_path / "page.html"
    status, out = explain_files(tmp_path, {"a/rank3.txt": VOCABULARY[0], "b/rank3.txt": VOCABULARY[0]}, str(page))
    assert status == 0
    for shown in (out, page.read_text()):
        assert f"{tmp_path}/a/rank3.txt and {tmp_path}/b/rank3.txt are of one rank, 0" in shown
        assert f"rank 1 is {tmp_path}/b/rank3.txt" in shown
    assert "ranks 0-1 have the same 1 graph" in out
    # Also the very same file.
    assert "ranks 0-1 have the same 1 graph" in explain_files(tmp_path, {"x.txt": VOCABULARY[0]}, times=2)[1]


def test_a_date_in_a_name_is_no_rank(tmp_path):
    files = {f"dump-2024113000000{rank}.txt": without_rank(VOCABULARY[rank]) for rank in (0, 1)}
    assert explain_files(tmp_path, files)[1].startswith("ranks 0-1 have 2")


def command_line():
    """The command that a user types, in the layout under test."""
    module = f"{PACKAGE}.handshake" if PACKAGE else None
    return [sys.executable, *(["-m", module] if module else [str(module_file("handshake"))]), "explain"]


def test_the_command_line(two_files, tmp_path):
    def run(*arguments, **options):
        return subprocess.run(
            [*command_line(), *arguments], env=child_environment(PYTHONIOENCODING="ascii"), cwd=tmp_path,
            stderr=subprocess.PIPE, timeout=60, **options,
        )  # fmt: skip

    differ = run(*two_files, stdout=subprocess.PIPE)
    assert (differ.returncode, differ.stderr) == (1, b"") and rb"= 18992 \xb7 rank" in differ.stdout
    # `| head` has gone before anything is written.
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        gone = run(*two_files, stdout=closed)
    assert (gone.returncode, gone.stderr) == (1, b"")
    with open("/dev/full", "wb") as full:
        no_room = run(*two_files, stdout=full)
    assert no_room.returncode == 2
    assert no_room.stderr.splitlines() == [b"error: the report could not be written: No space left on device"]
    usage = run("--help", stdout=subprocess.PIPE)
    assert usage.returncode == 0 and b"handshake" in usage.stdout and rb"FILE FILE \u2026 [--html FILE]" in usage.stdout


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("[" * 300 + "1" + "]" * 300, ("1", "2")),
        ("[" * 90_000 + "1" + "]" * 90_000, ("1", "2")),
        ("[1], 2", ("[1], 2", "1, [2]")),
        ("'" + "z" * 3_000_000 + "0'", ("0'", "1'")),
        ("[" + "1, " * 100_000 + "7]", ("7", "8")),
        ("- " * 3000 + "1", ("1", "2")),
        ("f(" * 3000 + "1" + ")" * 3000, ("1", "2")),
        ("1" + "0" * 5000 + "1", ("01", "02")),
        ("1e400", ("1e400", "2e400")),
        ("(x, x)", ("(x, x)", "[x, x]")),
        ("((x,), x)", ("((x,), x)", "(x, (x,))")),
        ("{}", ("{}, ", "")),
        ("{'0': 1}", ("'0'", "0")),
        ("<obj at 0x123456>[0]", ("[0]", "[1]")),
        ("<obj>, 'a;  b'", ("b'", "c'")),
        ("k=1, j=2", ("k=1, j=2", "j=2, k=1")),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_whatever_differs_is_shown_to(tmp_path, argument, changed):
    """However long or deep a statement is: nothing is cut before it is compared, and what is shown is not the same."""
    texts = []
    for side in changed:
        head, _, tail = argument.rpartition(changed[0])
        y = f'y: "f32[2]" = torch.f(x, 5, {head}{side}{tail});  x = None'
        texts.append(
            f'class G(torch.nn.Module):\n    def forward(self, x: "f32[2]"):\n        {y}\n        return (y,)\n'
        )
    status, out = explain_files(tmp_path, dict(zip(("a.txt", "b.txt"), texts, strict=True)))
    assert status == 1
    sides = re.findall(r"\n +rank 0: (.+)\n +rank 1: (.+)", out)
    assert sides and all(left != right for left, right in sides), out
    assert max(map(len, out.splitlines())) < 320
    report = report_of(texts)
    assert report.differences
    assert_page_is_self_contained(report.html())


@pytest.mark.parametrize("seed", range(8))
def test_damaged_texts_never_fail(seed):
    random_ = random.Random(seed)
    texts = [
        *VOCABULARY,
        *((TESTS / "data" / name).read_text() for name in ("dynamo_checkpoint.txt", "aot_dynamic_cond.txt")),
    ]
    for _ in range(20):
        variants = []
        for rank in range(3):
            lines = random_.choice(texts).splitlines()
            for _ in range(random_.randint(0, 8)):
                at = random_.randrange(len(lines))
                cut = random_.randrange(len(lines[at]) + 1)
                damage = random_.choice(["(", '"', "'", "\0", "{", "# ", ":", "=", "<x at 0x7f>", "\\", "  ", "class "])
                lines[at] = lines[at][:cut] + damage + lines[at][cut + random_.randint(0, 4) :]
                lines.insert(random_.randrange(len(lines)), lines[at])
            variants.append(Variant((rank,), str(rank), "\n".join(lines)))
        report = explain(variants)
        assert report.text()
        assert_page_is_self_contained(report.html())
