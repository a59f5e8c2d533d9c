# SPDX-License-Identifier: Apache-2.0
"""The common part of diverging graphs: what stays fat, and that it computes the same; the alignment below it, and the
rounds in which ranks find it."""

import functools
import hashlib
import itertools
import json
import operator
import queue
import random
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    segments_of,
)
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


class Line(NamedTuple):
    """A group's line, as the coordinator has it."""

    ranks: tuple[int, ...]


class Settled(NamedTuple):
    rank: int
    number: int
    digest: bytes
    spans: Sequence[tuple[Line, int, int]]
    reason: str = "fingerprints differ"


class Component:
    """Ranks of one split component, and a coordinator between them. `aborts` are the reasons that ranks gave, `sent`
    how many bytes of bitmaps each sent."""

    def __init__(self, size: int) -> None:
        self.rounds = _graph_plan.Rounds(60.0)
        self.lock = threading.Lock()
        self.frames = [queue.SimpleQueue() for _ in range(size)]
        self.aborts: list[str] = []
        self.sent = [0] * size
        line = Line(tuple(range(size)))
        self._deliver(self.rounds.settled([Settled(rank, 7, bytes([rank]), [(line, 0, 1)]) for rank in line.ranks], 0))

    def exchange(self, rank: int) -> Any:
        return _graph_plan.Exchange(Channel(self, rank), rank)

    def take(self, rank: int, step: int, payload: bytes) -> None:
        with self.lock:
            if step == _graph_plan.ABORT:
                self.aborts.append(payload.decode())
            if step == _graph_plan.INTERSECT:
                self.sent[rank] += len(payload)
            self._deliver(self.rounds.take(rank, 7, step, payload, 0.0))

    def _deliver(self, replies: list[Any]) -> None:
        for rank, number, step, payload in replies:
            assert number == 7
            self.frames[rank].put((step, payload))


class Channel:
    def __init__(self, component: Component, rank: int) -> None:
        self.component = component
        self.rank = rank

    def send(self, step: int, payload: bytes) -> None:
        self.component.take(self.rank, step, payload)

    def receive(self) -> tuple[int, bytes]:
        return self.component.frames[self.rank].get(timeout=60)

    def close(self) -> None:
        pass

    def abandon(self, step: int, payload: bytes) -> None:
        self.component.take(self.rank, step, payload)


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


def plans_of(graphs: Sequence[Any], reference: int = 0, groups: str | None = None) -> tuple[list[Any], Component]:
    """Each graph's plan, that at place `reference` being the reference's: it is rank 0's, the next one rank 1's …"""
    component = Component(len(graphs))
    calls = [
        lambda rank=(place - reference) % len(graphs), graph=graph: _graph_plan.agree_on_plan(
            component.exchange(rank), graph, groups
        )
        for place, graph in enumerate(graphs)
    ]
    plans = in_threads(calls)
    assert len({plan is None for plan in plans}) == 1, "all ranks get a plan, or none does"
    return plans, component


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


def test_values_of_other_shape_at_the_boundary_are_another_program():
    """The sum has the same shape on both ranks, what it sums has not."""

    def program(rank):
        return made(lambda x: reduce((x * (rank + 2)).sum(0)).sin(), torch.ones(rank + 2, 3))

    plans, _ = plans_of([program(rank) for rank in range(2)])
    assert plans == [None, None]


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
            elif edit == 3 and kind == PURE and reads:
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
                bytes(8) if kind in (INPUT, OUTPUT) else content_hash(content, [ops[i][1] for i in reads]),
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
        own.fx_nodes = [torch.fx.Graph().placeholder("tensor")] * len(ops)
        return own


def content_hash(content: str, sources: list[str]) -> bytes:
    return hashlib.blake2b(f"{content} {sources}".encode(), digest_size=8).digest()


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


@pytest.mark.parametrize("what", ["key", "wiring", "outputs", "value", "place", "mode"])
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
            elif what == "value":
                graph.fx_nodes = [torch.fx.Graph().placeholder("size") for _ in graph.nodes]
                for number, each in enumerate(graph.fx_nodes):
                    each.meta["val"] = number
            elif what == "mode":
                graph.modes = {-1: (0,)}
            else:  # a collective before it, in a skinny segment
                graph.nodes.append(_graph_plan.Unit(b"skinny..", (len(graph.nodes),), (), {"world": 1}))
                segments.insert(0, _graph_plan.Segment("skinny", (len(graph.nodes) - 1,), (), 1))
        plans.append(_graph_plan._fingerprint(graph, segments))
    assert plans[0] != plans[1]


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
        outputs = [process.communicate(timeout=100)[0] for process in processes]
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
