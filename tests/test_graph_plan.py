# SPDX-License-Identifier: Apache-2.0
"""The common part of diverging graphs: what stays fat, and that it computes the same; the alignment below it, and the
rounds in which ranks find it."""

import functools
import hashlib
import itertools
import json
import logging
import operator
import random
import subprocess
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from layout import child_environment, load

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from plan_programs import (  # noqa: E402
    PROGRAMS,
    TOKENS,
    VocabularyParallel,
    assert_runs_alike,
    joint_graphs,
    made,
    matrix,
    other_constant,
    reduce,
    reduce_start,
    segments_of,
    wait,
)
from plan_rounds import Component, Line, Settled, in_threads, plans_of  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.fx.experimental.symbolic_shapes import free_symbols  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

_graph = load("_graph")
_graph_plan = load("_graph_plan")
_vocabulary = load("_vocabulary")

WORLD = 4
RANKS = range(WORLD)


@pytest.fixture(scope="module", autouse=True)
def fake_group():
    """Process group '0' of 4 ranks, of which this process plays all: graphs take their rank as an argument."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def kinds(plan: Any) -> list[str]:
    return [segment.kind for segment in plan.segments]


def programs_of(plan: Any) -> list[str]:
    """The code of the fat submodules."""
    return [segment.code for name, segment in plan.program.named_children() if name.startswith("fat")]


# ---------------------------------------------------------------------- models

BLOCKS = 3  # 7 all_reduces forward, 6 backward; the ranks of test_on_gloo have 8 blocks


@pytest.fixture(scope="module")
def vocabulary_parallel():
    """The forward and backward graphs of each rank's model, and of rank 1's with one more op in block 1."""
    graphs = [joint_graphs(VocabularyParallel(rank, BLOCKS), TOKENS) for rank in RANKS]
    return graphs, joint_graphs(VocabularyParallel(1, BLOCKS, extra=(1, 1.5)), TOKENS)


def test_vocabulary_parallel_model_keeps_all_its_collectives_in_one_fat_segment(vocabulary_parallel):
    graphs, _ = vocabulary_parallel
    forward, _ = plans_of([per_rank[0] for per_rank in graphs])
    backward, _ = plans_of([per_rank[1] for per_rank in graphs], reference=3)
    assert {" ".join(kinds(plan)) for plan in forward} == {"local fat"}
    assert {plan.num_fat_collectives for plan in forward} == {2 * BLOCKS + 1}
    assert {" ".join(kinds(plan)) for plan in backward} == {"fat"}
    assert {plan.num_fat_collectives for plan in backward} == {2 * BLOCKS}


@pytest.mark.parametrize("reference", [0, 1])
def test_one_more_op_on_one_rank_leaves_two_fat_segments(vocabulary_parallel, reference):
    graphs, with_one_more = vocabulary_parallel
    for direction, collectives in enumerate((2 * BLOCKS + 1, 2 * BLOCKS)):
        per_rank = [rank_graphs[direction] for rank_graphs in graphs]
        per_rank[1] = with_one_more[direction]
        plans, component = plans_of(per_rank, reference)
        for plan in plans:
            assert kinds(plan).count("fat") == 2
            assert plan.num_fat_collectives >= collectives - 1
        programs = [programs_of(plan) for plan in plans]
        assert all(program == programs[0] for program in programs)
        # One bit a node in the first intersection, two in the second.
        assert max(component.sent) <= 3 * (len(per_rank[reference].graph.nodes) + 8) / 8


def test_one_graph_needs_no_cut(vocabulary_parallel):
    graphs, _ = vocabulary_parallel
    own = _graph_plan.OwnGraph(graphs[2][0])  # made ahead, as for a graph that is dispatched again and again
    plans, _ = plans_of([own, graphs[2][0], own])
    assert [kinds(plan) for plan in plans] == [["fat"]] * 3


# ---------------------------------------------------------------------- small programs


@pytest.mark.parametrize(("program", "with_plan", "without"), PROGRAMS, ids=[row[0].__name__ for row in PROGRAMS])
def test_program(program, with_plan, without):
    graphs = [program(rank) for rank in RANKS]
    before = [graph.code for graph in graphs]
    plans, component = plans_of(graphs)
    for plan, graph in zip(plans, graphs, strict=True):
        skinny = _graph_plan.split_skinny(graph)
        assert_runs_alike(graph, skinny)
        for name, segment in skinny.named_children():
            if name.startswith("skinny"):
                calls = list(segment.graph.nodes)
                assert sum(bool(_graph.node_collectives(node)) for node in calls) == 1
        if plan is not None:
            assert segments_of(plan.program) == " ".join(kinds(plan))
            assert programs_of(plan) == programs_of(plans[0])
            assert_runs_alike(graph, plan.program)
    assert [graph.code for graph in graphs] == before
    assert segments_of(_graph_plan.split_skinny(graphs[0])) == without
    if with_plan is None:
        assert plans == [None] * WORLD
        assert component.aborts
    else:
        assert " ".join(kinds(plans[0])) == with_plan


def test_fat_segments_are_one_program_whatever_each_rank_reads():
    """Rank 0 reads more of the fat segment's values than the others, in another order."""

    def program(rank):
        def function(x):
            first = reduce(x.sin())
            second = reduce(first.cos())
            if rank == 0:
                return second * 3, first * 5
            return second + 1, second

        return made(function, matrix())

    graphs = [program(rank) for rank in RANKS]
    plans, _ = plans_of(graphs, reference=2)
    programs = [programs_of(plan) for plan in plans]
    assert [len(program) for program in programs] == [1] * WORLD
    assert all(program == programs[0] for program in programs)
    for graph, plan in zip(graphs, plans, strict=True):
        assert_runs_alike(graph, plan.program)


def test_a_fat_segment_keeps_the_overlap_of_the_reference():
    """Waits lie behind what can run beside their collectives, as the reference has it; rank 1 waits at once."""

    def program(rank):
        def function(x, y):
            first = reduce_start(x.sin())
            first = wait(first) if rank == 1 else first
            z = y.cos().exp()
            first = first if rank == 1 else wait(first)
            return reduce(first + z), x * rank

        return made(function, matrix(), matrix())

    for reference in (0, 1):
        graphs = [program(rank) for rank in range(3)]
        plans, _ = plans_of(graphs, reference)
        assert len({*map(tuple, map(programs_of, plans))}) == 1
        for graph, plan in zip(graphs, plans, strict=True):
            assert_runs_alike(graph, plan.program)
            (fat,) = (part for name, part in plan.program.named_children() if name.startswith("fat"))
            targets = [node.target for node in fat.graph.nodes]
            waits = targets.index(torch.ops._c10d_functional.wait_tensor.default)
            exponential = targets.index(torch.ops.aten.exp.default)
            assert (waits < exponential) == (reference == 1)


def test_no_wait_is_moved_behind_a_mutation():
    """The reference changes the input of a collective that is on its way; the others have waited for it by then."""

    def program(rank):
        def function(x, y):
            first = reduce_start(x)
            first = wait(first) if rank else first
            x.add_(1)
            first = first if rank else wait(first)
            return reduce(first + y).sin()

        return made(function, matrix(), matrix())

    graphs = [program(rank) for rank in range(3)]
    for plan, graph in zip(plans_of(graphs)[0], graphs, strict=True):
        assert_runs_alike(graph, plan.program)
        (fat,) = plan.program.children()
        targets = [str(node.target) for node in fat.graph.nodes]
        assert targets.index("_c10d_functional.wait_tensor.default") < targets.index("aten.add_.Tensor")


def test_collectives_meet_by_their_number():
    """Rank 0 has the odd one first, the others last: the second is the second on all, however alike the others are."""

    def program(rank):
        def function(x):
            for number in range(4):
                x = reduce(x.sin(), "max" if number == (0 if rank == 0 else 3) else "sum")
            return x

        return made(function, matrix())

    graphs = [program(rank) for rank in range(3)]
    plans, _ = plans_of(graphs)
    for plan, graph in zip(plans, graphs, strict=True):
        assert " ".join(kinds(plan)) == "local skinny fat skinny"
        assert plan.num_fat_collectives == 2
        assert_runs_alike(graph, plan.program)


def test_an_item_of_a_constant_stays_where_it_is():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    item = graph.call_function(operator.getitem, ([2, 3], 1))
    node = graph.call_function(torch.ops.aten.mul.Tensor, (x, item))
    for _ in range(2):
        node = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (node, "sum", "0"))
        node = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (node,))
    graph.output((node,))
    for each in (x, *graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)):
        each.meta["val"] = matrix()
    graph_module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert segments_of(_graph_plan.split_skinny(graph_module)) == "local skinny skinny"
    plans, _ = plans_of([graph_module, graph_module])
    for split in (_graph_plan.split_skinny(graph_module), plans[0].program):
        assert_runs_alike(graph_module, split)


def test_the_log_of_one_rank_says_why_there_is_no_plan(caplog):
    caplog.set_level(logging.INFO, "torch_tpu.handshake")
    graphs = [made(lambda x: reduce(x.sin()), torch.ones(rank + 2, 3)) for rank in range(3)]
    assert plans_of(graphs, reference=1)[0] == [None] * 3
    (message,) = [record.getMessage() for record in caplog.records if record.name == "torch_tpu.handshake"]
    why = "the ranks' graphs have no collective in common together with its neighbours"
    assert message == f"handshake: no common plan: {why}"


def test_values_of_other_shape_at_the_boundary_are_another_program():
    """The sum has the same shape on both ranks, what it sums has not: only its collective can be in one program."""

    def program(rank):
        return made(lambda x: reduce((x * (rank + 2)).sum(0)).sin(), torch.ones(rank + 2, 3))

    graphs = [program(rank) for rank in range(2)]
    for graph, plan in zip(graphs, plans_of(graphs)[0], strict=True):
        assert kinds(plan) == ["local", "fat"]
        assert_runs_alike(graph, plan.program)


def test_a_segment_takes_the_sizes_that_its_values_depend_on():
    """Inductor can't compile a program whose inputs have sizes such as 2·s0 but that doesn't get s0."""
    graphs = []

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    def function(x):
        return reduce(torch.cat([reduce(x.sin()), x]).exp()) * x.shape[0]

    torch._dynamo.reset()
    torch.compile(function, backend=aot_autograd(fw_compiler=keep), dynamic=True)(torch.ones(6, 3))
    (graph,) = graphs
    plans, _ = plans_of([graph, graph])
    for split in (_graph_plan.split_skinny(graph), plans[0].program):
        assert_runs_alike(graph, split)
        for segment in split.children():
            inputs = [node.meta["val"] for node in segment.graph.find_nodes(op="placeholder")]
            sizes = {value.node.expr for value in inputs if isinstance(value, torch.SymInt)}
            for value in inputs:
                assert free_symbols(value) <= sizes
            assert all("example_value" not in node.meta for node in segment.graph.nodes)


def test_the_same_plan_comes_again(vocabulary_parallel):
    """What it was compiled to stays with it; plans that came up long ago are forgotten."""
    graphs, with_one_more = vocabulary_parallel
    own = _graph_plan.OwnGraph(graphs[0][0])
    first, second, third = (
        plans_of([own, other])[0][0] for other in (graphs[1][0], with_one_more[0], graphs[1][0])
    )
    assert first is third is not second
    assert type(first).__hash__ is object.__hash__, "nobody hashes its thousands of numbers at a dispatch"
    for number in range(_graph_plan.MAX_PLANS):
        own.plan((*first.segments, _graph_plan.Segment("local", (), (), number)))
    assert own.plan(first.segments) is not first


# ---------------------------------------------------------------------- faults


def failing(component: Component, rank: int, method: str, result: Callable[..., Any]) -> Any:
    exchange = component.exchange(rank)
    setattr(exchange, method, result)
    return exchange


def raise_lost(*_):
    raise ConnectionError("the coordinator is gone")


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("reference_rank", raise_lost),
        ("share", raise_lost),
        ("share", lambda payload: b"\0\0\0\1 no keys"),
        ("intersect", raise_lost),
        ("intersect", lambda bitmap: bitmap + b"\0"),
        ("intersect", lambda bitmap: b"\xff" * len(bitmap)),
    ],
)
def test_a_rank_that_fails_takes_everybody_to_skinny(method, result, caplog):
    graph = made(lambda x: reduce(x.sin()), matrix())
    component = Component(3)
    exchanges = [component.exchange(0), failing(component, 1, method, result), component.exchange(2)]
    calls = [lambda exchange=exchange: _graph_plan.agree_on_plan(exchange, graph) for exchange in exchanges]
    assert in_threads(calls) == [None] * 3
    assert "rank 1" in component.aborts[0]
    assert "rank 1" in caplog.text


def test_a_lost_answer_to_the_last_round_is_an_error():
    """The others may run fat by then."""
    exchange = failing(Component(1), 0, "agree", raise_lost)
    graph = made(lambda x: reduce(x.sin()), matrix())
    with pytest.raises(ConnectionError):
        _graph_plan.agree_on_plan(exchange, graph)
    exchange.is_undecided = True  # as handshake's is then
    with pytest.raises(_graph_plan.PlanError, match="got lost"):
        _graph_plan.agree_on_plan(exchange, graph)


def test_a_rank_that_can_not_split_takes_everybody_to_skinny(monkeypatch, caplog):
    """Nobody has agreed by then, so nobody runs a program that this rank doesn't have."""
    graphs = [other_constant(rank) for rank in range(3)]
    split = _graph_plan._split

    def fails_on_rank_1(graph_module, *arguments):
        if graph_module is graphs[1]:
            raise RuntimeError("torch can't copy a node")
        return split(graph_module, *arguments)

    monkeypatch.setattr(_graph_plan, "_split", fails_on_rank_1)
    plans, component = plans_of(graphs)
    assert plans == [None] * 3
    assert component.aborts == ["no plan on rank 1: RuntimeError: torch can't copy a node"]
    assert "no plan on rank 1: RuntimeError: torch can't copy a node; the graph runs skinny" in caplog.text


def test_a_graph_that_changed_since_it_was_read_takes_everybody_to_skinny(caplog):
    """As one does that its compiler works on in place."""
    graphs = [other_constant(rank) for rank in range(3)]
    own = _graph_plan.OwnGraph(graphs[1])
    (first, *_) = graphs[1].graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    with graphs[1].graph.inserting_after(first):
        graphs[1].graph.call_function(torch.ops.aten.neg.default, (first,))
    plans, _ = plans_of([graphs[0], own, graphs[2]])
    assert plans == [None] * 3
    assert "rank 1: PlanError: the graph has other nodes" in caplog.text


def test_wrong_arguments_are_refused():
    graph = made(lambda x: reduce(x.sin()), matrix())
    for exchange in (None, object()):
        with pytest.raises(_vocabulary.HandshakeTypeError, match="exchange"):
            _graph_plan.agree_on_plan(exchange, graph)
    for wrong, groups, error in (
        ("a graph", "exact", _vocabulary.HandshakeTypeError),
        (None, "exact", _vocabulary.HandshakeTypeError),
        (graph, "rôle", _vocabulary.HandshakeConfigError),
    ):
        component = Component(2)

        def give_it(component=component, wrong=wrong, groups=groups, error=error):
            with pytest.raises(error):
                _graph_plan.agree_on_plan(component.exchange(0), wrong, groups)
            return "refused"

        other = functools.partial(_graph_plan.agree_on_plan, component.exchange(1), graph)
        results = in_threads([give_it, other])
        assert results == ["refused", None], "the other rank doesn't wait for it"


def test_a_graph_that_has_no_keys_takes_everybody_to_skinny(caplog):
    good = made(lambda x: reduce(x.sin()), matrix())
    bad = made(lambda x: reduce(x.sin()), matrix())
    (sine,) = bad.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sine.args = (*sine.args, object())  # nothing that ranks could compare
    plans, component = plans_of([good, bad, good])
    assert plans == [None] * 3
    assert "rank 1" in component.aborts[0]
    assert "skinny" in caplog.text


def test_keys_survive_the_wire():
    own = _graph_plan.OwnGraph(made(lambda x: reduce(x.sin()) + x, matrix()))
    reference = _graph_plan.read_keys(_graph_plan.node_keys(own))
    assert [unit[:3] for unit in reference] == [unit[:3] for unit in own.units]


def test_keys_that_are_none_are_refused():
    keys = _graph_plan.node_keys(_graph_plan.OwnGraph(made(lambda x: reduce(x.sin()) + x, matrix())))
    generator = random.Random(4)
    damaged = [keys[:length] for length in range(len(keys))]
    damaged += [b"\xff" * 40, b""]
    for _ in range(300):
        place = generator.randrange(len(keys))
        damaged.append(keys[:place] + bytes([keys[place] ^ (1 << generator.randrange(8))]) + keys[place + 1 :])
    for row in (["0", [0], []], ["00" * 8, [0]], ["00" * 8, None, []], ["00" * 8, ["x"], []], 3, None):
        damaged.append(zlib.compress(json.dumps([row]).encode()))
    damaged.append(zlib.compress(b"[" * 100_000))
    for data in damaged:
        with pytest.raises(_graph_plan.PlanError):
            _graph_plan.read_keys(data)


def test_keys_that_unpack_to_no_end_are_refused(monkeypatch):
    monkeypatch.setattr(_graph_plan, "MAX_KEYS_BYTES", 1000)
    with pytest.raises(_graph_plan.PlanError):
        _graph_plan.read_keys(zlib.compress(json.dumps([["00" * 8, [0], []]] * 1000).encode()))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_bits_survive_the_wire(count):
    generator = random.Random(count)
    bits = [generator.random() < 0.5 for _ in range(count)]
    data = _graph_plan._pack(bits)
    assert _graph_plan._unpack(data, count) == bits
    damaged = [data + b"\0", *([data[1:]] if data else []), *([b"\xff" * len(data)] if count % 8 else [])]
    for wrong in damaged:
        with pytest.raises(_graph_plan.PlanError):
            _graph_plan._unpack(wrong, count)


def test_nothing_is_moved_past_a_barrier():
    """Node 1 is wished behind the barrier, node 3 before it: neither goes, and node 4 only as far as it."""

    def unit(position, is_barrier=False):
        return _graph_plan.Unit(b"any", (position,), (0,) if position else (), {}, is_barrier, is_barrier)

    units = [unit(0), unit(1), unit(2, is_barrier=True), unit(3), unit(4)]
    assert _graph_plan._reorder(units, {1: (3, 0), 3: (0, 1), 4: (2, 0)}) == [0, 1, 2, 3, 4]
    assert _graph_plan._reorder(units, {4: (2, 0)}) == [0, 1, 2, 4, 3]


# ---------------------------------------------------------------------- random programs

PURE, COLLECTIVE, WAIT, PART, RANDOM, MUTATION, INPUT, OUTPUT = range(8)


class Program:
    """A list of (kind, content, indices of what it reads), of which ranks get variants."""

    def __init__(self, generator: random.Random, length: int) -> None:
        self.ops: list[tuple[int, str, list[int]]] = [(INPUT, f"input {number}", []) for number in range(3)]
        mutates = generator.random() < 0.2
        while len(self.ops) < length:
            reads = [self._recent(generator) for _ in range(generator.choice((1, 1, 2)))]
            kind = generator.choices((PURE, COLLECTIVE, RANDOM, MUTATION), (8, 3, 1, int(mutates)))[0]
            content = f"{kind} {generator.randrange(4)}"
            if kind == PURE and generator.random() < 0.15:
                reads = []
            if kind == PURE and generator.random() < 0.2:
                reads.append(~generator.randrange(3))  # a symbol of its sizes
            self.ops.append((kind, content, reads if kind != COLLECTIVE else reads[:1]))
            if kind == COLLECTIVE:
                self.ops.append((WAIT, "wait", [len(self.ops) - 1]))
                if generator.random() < 0.3:  # something between a collective and its wait
                    self.ops.insert(-1, (PURE, "between", [reads[0]]))
                    self.ops[-1] = (WAIT, "wait", [len(self.ops) - 3])

    def _recent(self, generator: random.Random) -> int:
        while True:
            index = generator.randrange(max(0, len(self.ops) - 8), len(self.ops))
            if self.ops[index][0] != COLLECTIVE:
                return index

    def variant(self, generator: random.Random, edits: int) -> "Program":
        """This program with random edits: other content, a node more or less, another value read, another order."""
        changed = Program.__new__(Program)
        changed.ops = list(self.ops)
        for _ in range(edits):
            if len(changed.ops) == 3:
                break  # all but the inputs were taken away
            index = generator.randrange(3, len(changed.ops))
            kind, content, reads = changed.ops[index]
            edit = generator.randrange(5)
            if edit == 0:
                changed.ops[index] = (kind, content + "'", reads)
            elif edit == 1 and kind in (PURE, RANDOM):
                source = generator.randrange(index)
                if changed.ops[source][0] != COLLECTIVE:
                    changed.ops[index] = (kind, content, [source, *reads[1:]])
            elif edit == 2:
                source = generator.randrange(index)
                if changed.ops[source][0] != COLLECTIVE:
                    changed._insert(index, (generator.choice((PURE, PURE, RANDOM)), "extra", [source]))
                    if kind != WAIT and reads and generator.random() < 0.7:
                        changed.ops[index + 1] = (kind, content, [index, *changed.ops[index + 1][2][1:]])
            elif edit == 3 and kind == PURE and reads and reads[0] >= 0:
                changed._remove(index, reads[0])
            elif edit == 4 and kind == PURE:
                changed._move_up(index, generator.randrange(1, 6))
        return changed

    def _move_up(self, index: int, most: int) -> None:
        """Past nodes of any kind but mutations and what it reads."""
        for at in range(index, max(3, index - most), -1):
            before, (kind, content, reads) = self.ops[at - 1 : at + 1]
            if before[0] == MUTATION or at - 1 in reads:
                break
            swapped = {at - 1: at, at: at - 1}
            later = [(k, c, [swapped.get(i, i) for i in r]) for k, c, r in self.ops[at + 1 :]]
            self.ops = [*self.ops[: at - 1], (kind, content, reads), before, *later]

    def _insert(self, at: int, op: tuple[int, str, list[int]]) -> None:
        later = [(kind, content, [i + (i >= at) for i in reads]) for kind, content, reads in self.ops[at:]]
        self.ops = [*self.ops[:at], op, *later]

    def _remove(self, at: int, instead: int) -> None:
        later = [
            (kind, content, [instead if i == at else i - (i > at) for i in reads])
            for kind, content, reads in self.ops[at + 1 :]
        ]
        self.ops = [*self.ops[:at], *later]

    def own_graph(self) -> Any:
        """The program as `OwnGraph` would read it from a graph that returns its last values."""
        ops = [*self.ops, (OUTPUT, "output", list(range(max(3, len(self.ops) - 4), len(self.ops))))]
        own = _graph_plan.OwnGraph.__new__(_graph_plan.OwnGraph)
        own.nodes = [
            _graph_plan.Unit(
                bytes(8) if kind in (INPUT, OUTPUT) else hashlib.blake2b(content.encode(), digest_size=8).digest(),
                (index,),
                tuple(reads),
                {"world": 1} if kind == COLLECTIVE else {},
                is_pinned=kind in (COLLECTIVE, WAIT, RANDOM, MUTATION),
                is_barrier=kind == MUTATION,
            )
            for index, (kind, content, reads) in enumerate(ops)
        ]
        own.units = _graph_plan._units(
            own.nodes, [reads[0] if kind == WAIT else index for index, (kind, _, reads) in enumerate(ops)]
        )
        own.modes = {}
        return own


def plan_together(graphs: Sequence[Any], reference: int) -> list[Any]:
    """What `agree_on_plan` does, without the rounds, and without making programs."""
    keys = _graph_plan.read_keys(_graph_plan.node_keys(graphs[reference]))
    ordered, matched = zip(*[_graph_plan.follow(keys, graph.units) for graph in graphs], strict=True)
    common = conjunction([_graph_plan._pack([index >= 0 for index in each]) for each in matched])
    bits = _graph_plan._unpack(common, len(keys))
    matched = [[index if bit else -1 for index, bit in zip(each, bits, strict=True)] for each in matched]
    agreed = conjunction(
        [_graph_plan.constraints(keys, units, each) for units, each in zip(ordered, matched, strict=True)]
    )
    cut = [_graph_plan.make_segments(keys, units, each, agreed) for units, each in zip(ordered, matched, strict=True)]
    return [
        segments and _graph_plan.Plan(segments, _graph_plan._fingerprint(graph, segments), None)
        for graph, segments in zip(graphs, cut, strict=True)
    ]


def conjunction(bitmaps: Sequence[bytes]) -> bytes:
    bits = [int.from_bytes(bitmap, "big") for bitmap in bitmaps]
    return functools.reduce(operator.and_, bits).to_bytes(len(bitmaps[0]), "big")


def check_plan(own: Any, plan: Any) -> list[tuple[Any, ...]]:
    """A plan's invariants on one rank. Returns what its fat segments are, in terms that ranks can compare."""
    order = [position for segment in plan.segments for position in segment.positions]
    operations = [position for unit in own.units if unit.takes_part for position in unit.values]
    assert sorted(order) == sorted(operations)
    segment_of = {position: number for number, segment in enumerate(plan.segments) for position in segment.positions}
    place = {position: index for index, position in enumerate(order)}
    for position in order:
        assert all(place.get(source, -1) < place[position] for source in own.nodes[position].inputs)
    units = [unit for unit in own.units if unit.takes_part]
    for unit in units:
        assert len({segment_of[position] for position in unit.values}) == 1
    staying = [unit.values[0] for unit in units if unit.is_pinned]
    assert staying == sorted(staying, key=place.__getitem__), "effects have changed their order"
    for barrier in units:
        if barrier.is_barrier:
            for unit in units:
                assert (place[unit.values[0]] < place[barrier.values[0]]) == (unit.values[0] < barrier.values[0])
                if unit.values[0] < barrier.values[0]:
                    assert place[unit.values[-1]] < place[barrier.values[0]]
    programs = []
    for number, segment in enumerate(plan.segments):
        issued = sum(bool(own.nodes[position].collectives) for position in segment.positions)
        assert issued == segment.num_collectives
        assert {"fat": issued > 0, "skinny": issued == 1, "local": issued == 0}[segment.kind]
        if segment.kind != "fat":
            continue
        read_outside = {
            source
            for position, node in enumerate(own.nodes)
            for source in node.inputs
            if segment_of.get(source) == number and segment_of.get(position) != number
        }
        assert read_outside <= set(segment.outputs)
        inside = {position: index for index, position in enumerate(segment.positions)}
        outside: dict[int, int] = {}
        wiring = [
            [inside.get(source, ~outside.setdefault(source, len(outside))) if source not in inside else inside[source]
             for source in own.nodes[position].inputs]
            for position in segment.positions
        ]
        before = sum(bool(own.nodes[position].collectives) for position in order[: place[segment.positions[0]]])
        programs.append(
            (
                [own.nodes[position].key for position in segment.positions],
                wiring,
                [inside[position] for position in segment.outputs],
                before,
            )
        )
    return programs


def test_random_programs():
    """Whatever differs, the ranks' plans have equal fat segments, and each rank runs all that it has, in an order
    that its values and effects allow."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    num_plans = 0
    for _ in range(400):
        program = Program(generator, generator.randrange(6, 60))
        size = generator.randrange(2, 5)
        variants = [program.variant(generator, generator.choice((0, 1, 2, 6))) for _ in range(size)]
        graphs = [variant.own_graph() for variant in variants]
        plans = plan_together(graphs, generator.randrange(size))
        assert len({plan is None for plan in plans}) == 1
        if plans[0] is None:
            continue
        num_plans += 1
        programs = [check_plan(graph, plan) for graph, plan in zip(graphs, plans, strict=True)]
        assert all(each == programs[0] for each in programs)
        assert len({plan.fingerprint for plan in plans}) == 1
    assert num_plans > 100


def test_equal_programs_give_one_fat_segment():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for _ in range(50):
        graph = Program(generator, generator.randrange(30, 60)).own_graph()
        plans = plan_together([graph, graph, graph], 0)
        if sum(unit.num_collectives for unit in graph.units) > 1:
            assert [segment.kind for segment in plans[0].segments] == ["fat"]


def test_what_reads_one_value_twice_is_not_what_reads_two():
    def units(*reads):
        nodes = [_graph_plan.Unit(bytes(8), (number,), ()) for number in range(2)]
        nodes += [_graph_plan.Unit(b"multiply", (2 + n,), read) for n, read in enumerate(reads)]
        return _graph_plan._units(nodes, range(len(nodes)))

    one, two = units((0, 0)), units((0, 1))
    assert _graph_plan.match(one, two) == _graph_plan.match(two, one) == [-1, -1, -1]
    assert _graph_plan.match(two, units((1, 0))) == [-1, -1, 2], "by another name"


@pytest.mark.parametrize("what", ["key", "wiring", "outputs", "place", "mode"])
def test_fingerprint_tells_fat_segments_apart(what):
    program = Program(random.Random(2), 40)
    plans = []
    for changed in (False, True):
        graph = program.own_graph()
        (plan,) = plan_together([graph], 0)
        segments = list(plan.segments)
        (fat,) = segments
        if changed:
            position = next(p for p in fat.positions if len({*graph.nodes[p].inputs}) == 2)
            node = graph.nodes[position]
            if what == "key":
                graph.nodes[position] = node._replace(key=bytes(7) + b"x")
            elif what == "wiring":
                graph.nodes[position] = node._replace(inputs=node.inputs[::-1])
            elif what == "outputs":
                segments[0] = fat._replace(outputs=fat.outputs[1:])
            elif what == "mode":
                graph.modes = {-1: (0,)}
            else:  # a collective before it, in a skinny segment
                graph.nodes.append(_graph_plan.Unit(b"skinny..", (len(graph.nodes),), (), {"world": 1}))
                segments.insert(0, _graph_plan.Segment("skinny", (len(graph.nodes) - 1,), (), 1))
        plans.append(_graph_plan._fingerprint(graph, segments))
    assert plans[0] != plans[1]


# ---------------------------------------------------------------------- alignment


def slow_lcs_length(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        above = row[:]
        for j, y in enumerate(b, 1):
            row[j] = above[j - 1] + 1 if x == y else max(row[j - 1], above[j])
    return row[-1]


def check(a, b, pairs):
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))


@pytest.mark.parametrize("seed", range(60))
def test_finds_a_longest_common_subsequence_when_the_edits_suffice(seed):
    generator = random.Random(seed)
    for _ in range(25):
        letters = generator.choice(["ab", "abcde", "abcdefghijklmnop"])
        a = generator.choices(letters, k=generator.randint(0, 14))
        b = generator.choices(letters, k=generator.randint(0, 14))
        pairs = _graph_plan.align(a, b, 40)
        check(a, b, pairs)
        assert len(pairs) == slow_lcs_length(a, b), (a, b)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("max_edits", [0, 1, 3])
def test_stays_valid_when_the_edits_do_not_suffice(seed, max_edits):
    generator = random.Random(seed)
    for _ in range(10):
        letters = generator.choice(["ab", "abcdefgh", "abcdefghijklmnopqrstuvwxyz"])
        a = generator.choices(letters, k=generator.randint(0, 300))
        b = generator.choices(letters, k=generator.randint(0, 300))
        check(a, b, _graph_plan.align(a, b, max_edits))


def test_equal_sequences_match_throughout():
    assert _graph_plan.align("abc", "abc") == [(0, 0), (1, 1), (2, 2)]
    assert _graph_plan.align([], []) == []
    assert _graph_plan.align("abc", "") == []


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.99])
def test_an_inserted_item_costs_no_other_match(length, place):
    a = list(range(length))
    at = int(place * length)
    pairs = _graph_plan.align(a, [*a[:at], "new", *a[at:]])
    assert pairs == [(i, i + (i >= at)) for i in range(length)]


def test_many_changes_in_repeated_layers_are_followed():
    """More edits than are looked for, and no key is unique: each layer has the same items and a change of its own."""
    layer = [f"op{k}" for k in range(30)]
    a = layer * 200
    b = []
    for number in range(200):
        at = number % 25
        b += [*layer[:at], *(layer[k] for k in (3, 1, 4)), *layer[at + 1 :]]
    pairs = _graph_plan.align(a, b, 100)
    check(a, b, pairs)
    assert len(pairs) > 0.9 * len(a)


def test_sides_of_any_difference_are_aligned_without_quadratic_work():
    """Quadratic work would be 2,500,000,000 steps for each pair: far beyond the time that a test is given."""
    size = 50_000
    generator = random.Random(3)
    keys = [generator.getrandbits(64) for _ in range(size)]
    edited = [*keys[:3000], 1, *keys[3000:7000], *keys[7001:]]
    few = generator.choices(range(40), k=size)
    for a, b in (
        (keys, edited),
        (keys, [-key for key in keys]),
        (keys, generator.sample(keys, size)),
        (few, generator.choices(range(40), k=size)),
    ):
        check(a, b, _graph_plan.align(a, b))
    assert len(_graph_plan.align(keys, edited)) == size - 1


# ---------------------------------------------------------------------- the rounds, as the coordinator keeps them

START, SHARE, INTERSECT, AGREE, ABORT = 1, 2, 3, 4, 5
TIMEOUT_S = 30.0
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


class Job:
    """A coordinator's exchanges, and what its ranks were told, as `{rank: [(number, step, payload), ...]}`."""

    def __init__(self):
        self.rounds = _graph_plan.Rounds(TIMEOUT_S)
        self.lines = {}
        self.promised = set()  # (rank, number): was told START, and not yet how it ended
        self.told = {}

    def vote(self, rank, number, spans, digest=A):
        """`spans` as (ranks of the group, start, end)."""
        lines = [(self.lines.setdefault(ranks, Line(ranks)), start, end) for ranks, start, end in spans]
        return Settled(rank, number, digest, lines)

    def settle(self, *votes, now=0.0):
        self.tell(self.rounds.settled(votes, now))
        return self.take()

    def split(self, *digests, now=0.0):
        """All ranks of a world vote on its first collective, each as its vote 1."""
        world = tuple(range(len(digests)))
        votes = [self.vote(rank, 1, [(world, 0, 1)], digest) for rank, digest in enumerate(digests)]
        return self.settle(*votes, now=now)

    def tell(self, replies):
        for rank, number, step, payload in replies:
            self.told.setdefault(rank, []).append((number, step, payload))
            if step == START:
                self.promised.add((rank, number))
            elif (rank, number) in self.promised:
                if step in (AGREE, ABORT):
                    self.promised.remove((rank, number))
            else:
                assert step == ABORT, "a rank was told of an exchange that it isn't in"

    def part(self, rank, step, payload=b"", number=1):
        self.tell(self.rounds.take(rank, number, step, payload, 0.0))
        if step == ABORT:
            self.promised.discard((rank, number))

    def drop(self, rank):
        self.promised = {(other, number) for other, number in self.promised if other != rank}
        self.tell(self.rounds.drop_rank(rank, 0.0))

    def take(self):
        told, self.told = self.told, {}
        return told

    def to_intersect(self, reference=0):
        self.part(reference, SHARE, b"keys")
        self.take()

    def called_off(self):
        """Why each rank was told to go skinny: the first of them was, for all. Nobody waits for an answer, and nothing
        is open."""
        assert not self.promised and self.rounds.next_deadline() is None
        told = self.take()
        assert all([step for _, step, _ in frames] == [ABORT] for frames in told.values()), told
        first, *others = [frames[0][2] for _, frames in sorted(told.items())]
        assert first and not any(others), "one rank logs it"
        return dict.fromkeys(told, first.decode())


def to_all(ranks, step, payload, number=1):
    return {rank: [(number, step, payload)] for rank in ranks}


def test_complete_exchange():
    job = Job()
    start = job.split(B, A, A)
    assert start == to_all(range(3), START, bytes([0, 0, 0, 1])), "the lowest rank of the most frequent fingerprint"
    job.part(1, SHARE, b"keys")
    assert job.take() == to_all((0, 2), SHARE, b"keys")
    for rank, bitmap in ((2, b"\x00\xff\x0f"), (0, b"\x00\x3c\xff")):
        job.part(rank, INTERSECT, bitmap)
        assert job.take() == {}
    job.part(1, INTERSECT, b"\x00\xff\xff")
    assert job.take() == to_all(range(3), INTERSECT, b"\x00\x3c\x0f")
    for rank in (0, 1):
        job.part(rank, AGREE, A)
        assert job.take() == {}
    job.part(2, AGREE, A)
    assert job.take() == to_all(range(3), AGREE, b"\x01")
    assert not job.promised and job.rounds.next_deadline() is None


def test_intersections_as_often_as_needed():
    job = Job()
    job.split(A, B)
    job.to_intersect()
    for bits in range(1, 6):
        job.part(0, INTERSECT, bytes([0xF0, bits]))
        job.part(1, INTERSECT, bytes([0x3F, 0xFF]))
        assert job.take() == to_all(range(2), INTERSECT, bytes([0x30, bits]))
    job.part(1, AGREE, A)
    job.part(0, AGREE, A)
    assert job.take() == to_all(range(2), AGREE, b"\x01")


def test_different_plans_are_answered_no():
    job = Job()
    job.split(A, B, C)
    job.to_intersect()
    for rank, digest in enumerate((A, A, B)):
        job.part(rank, AGREE, digest)
    assert job.take() == to_all(range(3), AGREE, b"\x00")
    assert not job.promised


def test_exchange_over_several_groups():
    job = Job()
    groups = [(0, 1), (2, 3), (0, 2), (1, 3)]
    votes = [job.vote(rank, 9, [(g, 4, 5) for g in groups if rank in g], bytes([rank]) * 16) for rank in range(4)]
    assert job.settle(*votes) == to_all(range(4), START, bytes(4), number=9)


def test_each_rank_names_an_exchange_by_its_own_number():
    job = Job()
    told = job.settle(job.vote(0, 5, [((0, 1), 0, 1)]), job.vote(1, 8, [((0, 1), 0, 1)], B))
    assert told == {0: [(5, START, bytes(4))], 1: [(8, START, bytes(4))]}
    job.part(0, SHARE, b"keys", number=8)
    assert job.take() == {} and len(job.promised) == 2, "rank 0 knows no exchange by 8"
    job.part(0, SHARE, b"keys", number=5)
    assert job.take() == {1: [(8, SHARE, b"keys")]}


def test_exchanges_beside_each_other():
    job = Job()
    for ranks in ((0, 1), (2, 3)):
        job.settle(*[job.vote(rank, 1, [(ranks, 0, 1)], bytes([rank]) * 16) for rank in ranks])
        job.to_intersect(ranks[0])
    for rank in range(4):
        job.part(rank, AGREE, C if rank < 2 else B)
    assert job.take() == to_all(range(4), AGREE, b"\x01")


def test_a_shared_payload_is_not_copied():
    job = Job()
    job.split(*[bytes([rank // 256, rank % 256]) * 8 for rank in range(2000)])
    payload = bytes(2**20)
    job.part(0, SHARE, payload)
    assert all(frames[0][2] is payload for frames in job.take().values())


@pytest.mark.parametrize("spans", [[((0, 1, 2), 0, 2)], [((0, 1, 2), 0, 1), ((1, 2), 0, 1)], [((2, 1), 0, 1)]])
def test_unequal_spans(spans):
    job = Job()
    votes = [job.vote(rank, 1, [((0, 1, 2), 0, 1)]) for rank in range(2)]
    job.tell(job.rounds.settled([*votes, job.vote(2, 1, spans, B)], 0.0))
    assert job.called_off() == dict.fromkeys(range(3), "spans differ")


def test_a_rank_that_takes_no_part():
    job = Job()
    job.tell(job.rounds.settled([job.vote(rank, 1, [((0, 1, 2, 3), 0, 1)]) for rank in range(2)], 0.0))
    assert job.called_off() == dict.fromkeys(range(2), "ranks 2-3 did not take part")


def test_a_rank_with_two_graphs():
    job = Job()
    votes = [job.vote(0, 1, [((0, 1), 0, 2)]), *[job.vote(1, n, [((0, 1), n - 1, n)]) for n in (1, 2)]]
    told = job.settle(*votes)
    why = b"a rank takes part with two graphs"
    assert told == {0: [(1, ABORT, why)], 1: [(1, ABORT, b""), (2, ABORT, b"")]}
    assert job.rounds.next_deadline() is None


@pytest.mark.parametrize("step", [SHARE, INTERSECT, AGREE])
def test_a_lost_rank(step):
    job = Job()
    job.split(A, A, B)
    if step != SHARE:
        job.to_intersect()
        job.part(0, step, A)
    job.drop(1)
    assert job.called_off() == dict.fromkeys((0, 2), "rank 1 is gone")
    job.part(2, step, A)
    assert job.take() == {}, "they have been told; what was on its way is ignored"


def test_a_stranger_is_lost():
    job = Job()
    job.split(A, B)
    job.drop(7)
    assert job.take() == {} and len(job.promised) == 2


@pytest.mark.parametrize("step", [START, INTERSECT, AGREE, 0, 99])
def test_a_rank_out_of_step(step):
    job = Job()
    job.split(A, A, B)
    job.part(2, step, A)
    assert job.called_off() == dict.fromkeys(range(3), "rank 2 is out of step")


TWO_THINGS = [(INTERSECT, INTERSECT), (INTERSECT, AGREE), (AGREE, AGREE), (AGREE, SHARE)]


@pytest.mark.parametrize(("first", "second"), TWO_THINGS)
def test_a_rank_that_says_two_things(first, second):
    job = Job()
    job.split(A, A, B)
    job.to_intersect()
    job.part(0, first, A)
    job.part(0, second, A)
    assert job.called_off() == dict.fromkeys(range(3), "rank 0 is out of step")


@pytest.mark.parametrize(
    ("graphs", "of_rank_0", "of_rank_1"),
    [((A, A, B), (INTERSECT, A), (AGREE, A)), ((A, B), (AGREE, A), (INTERSECT, b"\xff"))],
    ids=["agree while others intersect", "intersect after agree"],
)
def test_a_rank_at_another_step_than_the_one_before_it(graphs, of_rank_0, of_rank_1):
    job = Job()
    job.split(*graphs)
    job.to_intersect()
    job.part(0, *of_rank_0)
    job.part(1, *of_rank_1)
    assert job.called_off() == dict.fromkeys(range(len(graphs)), "rank 1 is out of step")


def test_only_the_reference_rank_shares():
    job = Job()
    job.split(A, A, B)
    job.part(1, SHARE, b"keys")
    assert job.called_off() == dict.fromkeys(range(3), "rank 1 is not the reference rank")


def test_bitmaps_of_unequal_length():
    job = Job()
    job.split(A, B)
    job.to_intersect()
    job.part(0, INTERSECT, b"\xff\xff")
    job.part(1, INTERSECT, b"\xff")
    assert job.called_off() == dict.fromkeys(range(2), "rank 1 has a bitmap of another length")


def test_empty_bitmaps():
    job = Job()
    job.split(A, B)
    job.to_intersect()
    job.part(0, INTERSECT, b"")
    job.part(1, INTERSECT, b"")
    assert job.take() == to_all(range(2), INTERSECT, b"")


def test_a_rank_that_can_not_go_on():
    job = Job()
    job.split(A, B, B)
    job.part(1, ABORT, "out of memory: ü".encode())
    job.part(2, ABORT, b"me too")
    assert job.called_off() == dict.fromkeys((0, 2), "rank 1 can't go on: out of memory: ü")


@pytest.mark.parametrize(("step", "late"), [(SHARE, "rank 1"), (INTERSECT, "ranks 0, 2"), (AGREE, "ranks 0, 2")])
def test_time_is_up_names_who_is_late(step, late):
    job = Job()
    job.split(B, A, A, now=5.0)
    if step != SHARE:
        job.to_intersect(1)
        job.part(1, step, A)
    assert job.rounds.next_deadline() == 5.0 + TIMEOUT_S
    job.tell(job.rounds.tick(4.9 + TIMEOUT_S))
    assert job.take() == {} and len(job.promised) == 3
    job.tell(job.rounds.tick(5.0 + TIMEOUT_S))
    assert job.called_off() == dict.fromkeys(range(3), f"{late} did not come in time")


def test_who_meets_again_in_another_order_finds_no_exchange():
    """Rank 0 goes through the exchange of (0, 1) first and then that of (0, 2, 1), rank 1 the other way round."""
    job = Job()
    first = [job.vote(0, 1, [((0, 1), 0, 1)]), job.vote(1, 2, [((0, 1), 0, 1)], B)]
    second = [job.vote(rank, number, [((0, 1, 2), 0, 1)]) for rank, number in enumerate((2, 1, 1))]
    assert {step for frames in job.settle(*first).values() for _, step, _ in frames} == {START}
    why = b"rank 1 is in the exchange of a later vote"
    assert job.settle(*second) == {0: [(2, ABORT, why)], 1: [(1, ABORT, b"")], 2: [(1, ABORT, b"")]}
    job.part(1, ABORT, b"done", number=2)
    job.take()
    assert {step for frames in job.settle(*second).values() for _, step, _ in frames} == {START}, "the first has ended"


def test_votes_cast_ahead_open_several_exchanges():
    job = Job()
    for number in (1, 2, 3):
        votes = [job.vote(rank, number, [((0, 1), number, number + 1)], bytes([rank]) * 16) for rank in range(2)]
        assert job.settle(*votes) == to_all(range(2), START, bytes(4), number)
    job.drop(1)
    assert job.take() == {0: [(number, ABORT, b"rank 1 is gone") for number in (1, 2, 3)]}


def test_open_exchanges_are_bounded(monkeypatch):
    monkeypatch.setattr(_graph_plan, "MAX_OPEN_EXCHANGES", 3)
    job = Job()
    told = [job.settle(*[job.vote(rank, 1, [((n, n + 1), 0, 1)]) for rank in (n, n + 1)]) for n in range(0, 10, 2)]
    steps = [{step for frames in each.values() for _, step, _ in frames} for each in told]
    assert steps == [{START}] * 3 + [{ABORT}] * 2
    job.part(0, ABORT, b"")
    assert job.take() == {1: [(1, ABORT, b"rank 0 can't go on: ")]}
    again = job.settle(*[job.vote(rank, 2, [((0, 1), 1, 2)]) for rank in (0, 1)])
    assert again[0] == [(2, START, bytes(4))], "there is room again"


def test_whatever_happens_every_promise_is_kept():
    """One seed draws everything. A yes goes to all the ranks of the exchange, which gave one plan. In the end nobody
    waits for an answer."""
    outcomes = Counter()
    for seed in range(250):
        try:
            _disturb(random.Random(seed), outcomes)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert min(outcomes[kind] for kind in ("yes", "no", "called off")) > 20, f"the simulation is lopsided: {outcomes}"


def _disturb(rng, outcomes):
    job = Job()
    size = rng.choice((2, 3, 4, 6))
    faults = rng.choice((0.0, 0.02, 0.1))
    cast = dict.fromkeys(range(size), 0)
    exchanges = []  # {rank: number}, of each that was opened
    said = {}  # (rank, number) -> the step that it comes to, and the digest that it gave
    for step in range(rng.randrange(5, 200)):
        event = rng.random()
        if event < 0.05:
            ranks = tuple(sorted(rng.sample(range(size), rng.randrange(2, size + 1))))
            for rank in ranks:
                cast[rank] += 1
            votes = [job.vote(rank, cast[rank], [(ranks, step, step + 1)], rng.choice((A, B, C))) for rank in ranks]
            if any(frames[0][1] == START for frames in job.settle(*votes).values()):
                exchanges.append({rank: cast[rank] for rank in ranks})
        elif event < 0.05 + faults / 4:
            job.drop(rng.randrange(size))
        elif job.promised:
            rank, number = rng.choice(sorted(job.promised))
            come_to = said.get((rank, number), (SHARE, None))[0]
            if rng.random() < faults:
                come_to = rng.choice((START, SHARE, INTERSECT, AGREE, ABORT, 0, 7))
            payload = b"\xff\xff" if come_to == INTERSECT else rng.choice((A,) * 6 + (B,))
            open_ = job.rounds._of_rank[rank][number]
            if come_to == SHARE and rank != open_.reference and rng.random() >= faults:
                continue
            if come_to in (INTERSECT, AGREE) and open_.step == SHARE and rng.random() >= faults:
                continue
            if come_to == AGREE and open_.step == INTERSECT and open_.heard and rng.random() >= faults:
                continue
            said[rank, number] = (min(come_to + 1, AGREE) if rank in open_.numbers else come_to, payload)
            job.part(rank, come_to, payload, number)
        for rank, frames in job.take().items():
            for number, kind, payload in frames:
                if kind == SHARE:
                    said[rank, number] = (INTERSECT, None)
                (exchange,) = [each for each in exchanges if each.get(rank) == number] or [None]
                if kind == AGREE and payload == b"\x01":
                    plans = {said[other, theirs][1] for other, theirs in exchange.items()}
                    assert len(plans) == 1, "a yes to different plans"
                    assert not any((other, theirs) in job.promised for other, theirs in exchange.items())
                outcomes[{AGREE: "yes" if payload == b"\x01" else "no", ABORT: "called off"}.get(kind, "")] += 1
    job.tell(job.rounds.tick(1e9))
    assert not job.promised, f"promised and never told: {job.promised}"
    assert not job.rounds._open and not job.rounds._of_rank


def test_ranks_never_wait_for_one_another_in_a_cycle():
    """Ranks cast their votes ahead, each in an order of its own, and go through what they are promised in that order:
    without any timeout all come to an end."""
    outcomes = Counter()
    for seed in range(200):
        rng = random.Random(seed)
        size = rng.randrange(2, 6)
        sizes = [rng.randrange(2, size + 1) for _ in range(rng.randrange(2, 9))]
        groups = [tuple(sorted(rng.sample(range(size), length))) for length in sizes]
        shuffled = rng.random() < 0.7
        order = {rank: [place for place, group in enumerate(groups) if rank in group] for rank in range(size)}
        for places in order.values():
            if shuffled:
                rng.shuffle(places)
        job = Job()
        inbox = {(rank, number): deque() for rank in order for number in range(len(order[rank]))}
        players = {rank: _played(job, rank, len(order[rank]), inbox, outcomes) for rank in order}
        waiting = rng.sample(range(len(groups)), len(groups))
        while players or waiting:
            if waiting and rng.random() < 0.3:
                place = waiting.pop()
                spans = [(groups[place], place, place + 1)]
                votes = [job.vote(rank, order[rank].index(place), spans, bytes([rank]) * 16) for rank in groups[place]]
                job.tell(job.rounds.settled(votes, 0.0))
            moved = False
            for rank in list(players):
                try:
                    moved |= next(players[rank])
                except StopIteration:
                    del players[rank]
                    moved = True
                for other, frames in job.take().items():
                    moved = True
                    for number, kind, payload in frames:
                        inbox[other, number].append((kind, payload))
            assert moved or waiting or not players, f"seed {seed}: ranks {sorted(players)} wait for one another"
    assert outcomes["plan"] > 500 and outcomes["called off"] > 100, outcomes


def _played(job, rank, count, inbox, outcomes):
    """A rank that goes through its exchanges in order; yields whether it got on."""
    for number in range(count):
        frames = inbox[rank, number]
        reference = None
        for step in (START, SHARE, INTERSECT, AGREE):
            if step in (INTERSECT, AGREE) or (step == SHARE and rank == reference):
                job.part(rank, step, b"plan", number)
                yield True
            if step == SHARE and rank == reference:
                continue
            while not frames:
                yield False
            kind, payload = frames.popleft()
            if kind == ABORT:
                outcomes["called off"] += 1
                break
            assert kind == step
            if kind == START:
                reference = int.from_bytes(payload, "big")
        else:
            outcomes["plan"] += 1


# ---------------------------------------------------------------------- the rounds, as a rank goes through them


class Script:
    """A channel whose frames are known ahead; notes what is sent."""

    def __init__(self, *frames):
        self.frames = list(frames)
        self.sent = []
        self.abandoned = []
        self.closed = 0

    def send(self, step, payload):
        self.sent.append((step, payload))

    def receive(self):
        if not self.frames:
            raise _vocabulary.HandshakePeerLostError("the coordinator is gone")
        return self.frames.pop(0)

    def close(self):
        self.closed += 1

    def abandon(self, step, payload):
        self.abandoned.append((step, payload))


def started(*frames, rank=1, reference=0):
    channel = Script((START, reference.to_bytes(4, "big")), *frames)
    exchange = _graph_plan.Exchange(channel, rank)
    assert exchange.reference_rank() == reference
    return exchange, channel


def test_an_exchange_as_the_reference_and_as_another_rank_sees_it():
    for rank in (0, 1):
        answers = [(INTERSECT, b"\x03"), (INTERSECT, b"\x01"), (AGREE, b"\x01")]
        exchange, channel = started(*([(SHARE, b"keys")] if rank else []), *answers, rank=rank)
        assert exchange.share(None if rank else b"keys") == b"keys"
        assert exchange.intersect(b"\x07") == b"\x03"
        assert exchange.intersect(b"\x05") == b"\x01"
        assert exchange.agree("ab" * 16) is True
        parts = [(INTERSECT, b"\x07"), (INTERSECT, b"\x05"), (AGREE, b"\xab" * 16)]
        assert channel.sent == [*([] if rank else [(SHARE, b"keys")]), *parts]
        assert channel.closed == 1 and not exchange.is_undecided
        exchange.leave()
        del exchange
        assert (len(channel.sent), channel.abandoned) == (len(parts) + (not rank), []), "it has ended"


def test_a_no_is_a_no_of_which_the_reference_rank_tells(caplog):
    caplog.set_level(logging.INFO, "torch_tpu.handshake")
    for rank in (0, 1):
        exchange, channel = started((AGREE, b"\x00"), rank=rank)
        assert exchange.agree("ab" * 16) is False
        assert not exchange.is_undecided and channel.closed == 1
    assert [record.getMessage() for record in caplog.records] == ["handshake: no common plan: the ranks' plans differ"]


def test_a_rank_that_is_not_told_why_says_nothing(caplog):
    caplog.set_level(logging.INFO, "torch_tpu.handshake")
    exchange, channel = started((ABORT, b""))
    assert exchange.share(None) is None and channel.closed == 1
    assert not caplog.records


def test_an_exchange_that_is_called_off_says_so_once(caplog):
    caplog.set_level(logging.INFO, "torch_tpu.handshake")
    exchange, channel = started((SHARE, b"keys"), (ABORT, "rank 3 is gone: ü".encode()))
    assert exchange.share(None) == b"keys"
    assert exchange.intersect(b"\x01") is None
    sent = list(channel.sent)
    assert exchange.intersect(b"\x01") is None and exchange.agree("ab" * 16) is False and exchange.share(None) is None
    assert not exchange.is_undecided
    exchange.leave()
    exchange.abort("no")
    del exchange
    assert (channel.sent, channel.abandoned, channel.closed) == (sent, [], 1)
    assert [record.getMessage() for record in caplog.records] == ["handshake: no common plan: rank 3 is gone: ü"]


def test_an_exchange_that_is_called_off_while_plans_are_compared_is_decided():
    exchange, _ = started((ABORT, b"rank 3 is gone"))
    assert exchange.agree("ab" * 16) is False and not exchange.is_undecided


def test_a_rank_that_leaves_tells_the_others():
    exchange, channel = started()
    exchange.leave()
    exchange.leave()
    assert channel.sent == [(ABORT, b"it went on to its next vote instead")] and channel.closed == 1


def test_a_long_reason_is_cut():
    exchange, channel = started()
    exchange.abort("x" * 100_000)
    assert channel.sent == [(ABORT, b"x" * _graph_plan.MAX_REASON_BYTES)]


def test_an_exchange_that_is_dropped_tells_the_others():
    exchange, channel = started()
    del exchange
    assert channel.abandoned == [(ABORT, b"its ticket was thrown away")]
    assert channel.sent == [], "a destructor must not wait for a lock"


def test_a_lost_coordinator_raises_and_leaves_the_plan_undecided():
    exchange, channel = started()
    with pytest.raises(_vocabulary.HandshakePeerLostError):
        exchange.intersect(b"\x01")
    assert not exchange.is_undecided
    with pytest.raises(_vocabulary.HandshakePeerLostError):
        exchange.agree("ab" * 16)
    assert exchange.is_undecided
    sent = list(channel.sent)
    exchange.leave()
    assert channel.sent == sent, "the others may run the plan: it can't be called off any more"


def test_a_coordinator_out_of_step_is_an_error():
    exchange, _ = started((AGREE, b"\x01"))
    with pytest.raises(_vocabulary.HandshakeProtocolError, match="step"):
        exchange.intersect(b"\x01")


def test_keys_that_are_too_large_call_the_exchange_off(monkeypatch):
    monkeypatch.setattr(_graph_plan, "MAX_SHARED_BYTES", 10)
    exchange, channel = started(rank=0)
    assert exchange.share(b"x" * 11) is None
    assert channel.sent == [(ABORT, b"the reference graph's keys take 11 bytes")]


def test_the_reference_rank_has_to_share():
    exchange, _ = started(rank=0)
    with pytest.raises(_vocabulary.HandshakeConfigError):
        exchange.share(None)


# ---------------------------------------------------------------------- real ranks


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """What four gloo ranks, each a process, report; see `plan_worker`."""
    folder = tmp_path_factory.mktemp("gloo")
    worker = Path(__file__).with_name("plan_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(WORLD), str(folder)],
            env=child_environment(OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in RANKS
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * WORLD, "\n".join(outputs)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in RANKS]


def test_compiled_model_on_gloo(gloo):
    """8 blocks through torch.compile: 17 collectives fat, values and gradients as in the skinny run, bit by bit."""
    for report in gloo:
        forward, backward = report["model"]
        assert forward["segments"].count("fat") == 1
        assert forward["segments"][0] == "local"
        assert forward["fat_collectives"] == 17
        assert backward["segments"].count("fat") == 1
        assert backward["fat_collectives"] == 16
        assert report["gradients_close_to_eager"]


def test_one_more_op_on_gloo(gloo):
    for report in gloo:
        forward, backward = report["one_more"]
        assert forward["segments"].count("fat") == 2
        assert forward["fat_collectives"] >= 16
        assert backward["segments"].count("fat") == 2
        assert backward["fat_collectives"] >= 15


def test_programs_on_gloo(gloo):
    """Each program of the table that has a plan ran under it as it ran skinny; the worker compared."""
    expected = [program.__name__ for program, with_plan, _ in PROGRAMS if with_plan is not None]
    for report in gloo:
        assert report["programs"] == expected
