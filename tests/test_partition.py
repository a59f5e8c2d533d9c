# SPDX-License-Identifier: Apache-2.0
"""The common part of diverging graphs: what stays fat, and that it computes the same."""

import functools
import hashlib
import json
import operator
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from layout import child_environment, load

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from partition_programs import (  # noqa: E402
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
_partition = load("_partition")
_vocabulary = load("_vocabulary")

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
        self.is_undecided = False

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
        plans, rounds = plans_of(per_rank, reference)
        for plan in plans:
            assert kinds(plan).count("fat") == 2
            assert plan.num_fat_collectives >= collectives - 1
        programs = [programs_of(plan) for plan in plans]
        assert all(program == programs[0] for program in programs)
        # One bit a node in the first intersection, two in the second.
        assert max(rounds.sent) <= 3 * (len(per_rank[reference].graph.nodes) + 8) / 8


def test_one_graph_needs_no_cut(vocabulary_parallel):
    graphs, _ = vocabulary_parallel
    own = _partition.OwnGraph(graphs[2][0])  # made ahead, as for a graph that is dispatched again and again
    plans, _ = plans_of([own, graphs[2][0], own])
    assert [kinds(plan) for plan in plans] == [["fat"]] * 3


# ---------------------------------------------------------------------- small programs


@pytest.mark.parametrize(("program", "with_plan", "without"), PROGRAMS, ids=[row[0].__name__ for row in PROGRAMS])
def test_program(program, with_plan, without):
    graphs = [program(rank) for rank in RANKS]
    before = [graph.code for graph in graphs]
    plans, rounds = plans_of(graphs)
    for plan, graph in zip(plans, graphs, strict=True):
        skinny = _partition.split_skinny(graph)
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
    assert segments_of(_partition.split_skinny(graphs[0])) == without
    if with_plan is None:
        assert plans == [None] * WORLD
        assert rounds.reasons
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
    for split in (_partition.split_skinny(graph), plans[0].program):
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
    own = _partition.OwnGraph(graphs[0][0])
    first, second, third = (
        plans_of([own, other])[0][0] for other in (graphs[1][0], with_one_more[0], graphs[1][0])
    )
    assert first is third is not second
    assert type(first).__hash__ is object.__hash__, "nobody hashes its thousands of numbers at a dispatch"
    for number in range(_partition.MAX_PLANS):
        own.plan((*first.segments, _partition.Segment("local", (), (), number)))
    assert own.plan(first.segments) is not first


# ---------------------------------------------------------------------- faults


def failing(rounds: Rounds, rank: int, method: str, result: Callable[..., Any]) -> Exchange:
    exchange = rounds.exchange(rank)
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
    rounds = Rounds(3)
    exchanges = [rounds.exchange(0), failing(rounds, 1, method, result), rounds.exchange(2)]
    calls = [lambda exchange=exchange: _partition.agree_on_plan(exchange, graph) for exchange in exchanges]
    assert in_threads(calls) == [None] * 3
    assert "rank 1" in rounds.reasons[0]
    assert "rank 1" in caplog.text


def test_a_lost_answer_to_the_last_round_is_an_error():
    """The others may run fat by then."""
    exchange = failing(Rounds(1), 0, "agree", raise_lost)
    graph = made(lambda x: reduce(x.sin()), matrix())
    with pytest.raises(ConnectionError):
        _partition.agree_on_plan(exchange, graph)
    exchange.is_undecided = True  # as handshake's is then
    with pytest.raises(_partition.PlanError, match="got lost"):
        _partition.agree_on_plan(exchange, graph)


def test_a_rank_that_can_not_split_takes_everybody_to_skinny(monkeypatch, caplog):
    """Nobody has agreed by then, so nobody runs a program that this rank doesn't have."""
    graphs = [other_constant(rank) for rank in range(3)]
    split = _partition._split

    def fails_on_rank_1(graph_module, *arguments):
        if graph_module is graphs[1]:
            raise RuntimeError("torch can't copy a node")
        return split(graph_module, *arguments)

    monkeypatch.setattr(_partition, "_split", fails_on_rank_1)
    plans, rounds = plans_of(graphs)
    assert plans == [None] * 3
    assert rounds.reasons == ["no plan on rank 1: RuntimeError: torch can't copy a node"]
    assert "no plan on rank 1: RuntimeError: torch can't copy a node; the graph runs skinny" in caplog.text


def test_a_graph_that_changed_since_it_was_read_takes_everybody_to_skinny(caplog):
    """As one does that its compiler works on in place."""
    graphs = [other_constant(rank) for rank in range(3)]
    own = _partition.OwnGraph(graphs[1])
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
            _partition.agree_on_plan(exchange, graph)
    for wrong, groups, error in (
        ("a graph", "exact", _vocabulary.HandshakeTypeError),
        (None, "exact", _vocabulary.HandshakeTypeError),
        (graph, "rôle", _vocabulary.HandshakeConfigError),
    ):
        rounds = Rounds(2)

        def give_it(rounds=rounds, wrong=wrong, groups=groups, error=error):
            with pytest.raises(error):
                _partition.agree_on_plan(rounds.exchange(0), wrong, groups)
            return "refused"

        results = in_threads([give_it, lambda rounds=rounds: _partition.agree_on_plan(rounds.exchange(1), graph)])
        assert results == ["refused", None], "the other rank doesn't wait for it"


def test_a_graph_that_has_no_keys_takes_everybody_to_skinny(caplog):
    good = made(lambda x: reduce(x.sin()), matrix())
    bad = made(lambda x: reduce(x.sin()), matrix())
    (sine,) = bad.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sine.args = (*sine.args, object())  # nothing that ranks could compare
    plans, rounds = plans_of([good, bad, good])
    assert plans == [None] * 3
    assert "rank 1" in rounds.reasons[0]
    assert "skinny" in caplog.text


def test_keys_survive_the_wire():
    own = _partition.OwnGraph(made(lambda x: reduce(x.sin()) + x, matrix()))
    reference = _partition.read_keys(_partition.node_keys(own))
    assert reference == (own.keys, own.leaders, own.inputs)


def test_keys_that_are_none_are_refused():
    keys = _partition.node_keys(_partition.OwnGraph(made(lambda x: reduce(x.sin()) + x, matrix())))
    generator = random.Random(4)
    damaged = [keys[:length] for length in range(len(keys))]
    damaged += [keys + b"x", b"\xff" * 40, b""]
    for _ in range(300):
        place = generator.randrange(len(keys))
        damaged.append(keys[:place] + bytes([keys[place] ^ (1 << generator.randrange(8))]) + keys[place + 1 :])
    for data in damaged:
        try:
            reference = _partition.read_keys(data)
        except _partition.PlanError:
            continue
        assert len(reference.keys) == len(reference.leaders) == len(reference.inputs)  # only a key was damaged


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
        own = _partition.OwnGraph.__new__(_partition.OwnGraph)
        own.inputs = [tuple(reads) for _, _, reads in ops]
        keys = [
            bytes(8) if kind in (INPUT, OUTPUT) else content_hash(content, [ops[i][1] for i in reads])
            for kind, content, reads in ops
        ]
        own.leaders = [reads[0] if kind == WAIT else index for index, (kind, _, reads) in enumerate(ops)]
        own.collectives = [{"world": 1} if kind == COLLECTIVE else {} for kind, _, _ in ops]
        own.keys = _partition._numbered(keys, own.collectives)
        own.pinned = [kind in (COLLECTIVE, WAIT, RANDOM, MUTATION) for kind, _, _ in ops]
        own.barriers = [kind == MUTATION for kind, _, _ in ops]
        own.modes = {}
        own.order = list(range(len(ops)))
        own.describe = lambda position: "tensor"
        return own


def content_hash(content: str, sources: list[str]) -> bytes:
    return hashlib.blake2b(f"{content} {sources}".encode(), digest_size=8).digest()


def plan_together(graphs: Sequence[Any], reference: int) -> list[Any]:
    """What `agree_on_plan` does, without the rounds, and without making programs."""
    keys = _partition.read_keys(_partition.node_keys(graphs[reference]))
    ordered, matched = zip(*[_partition.follow(keys, graph) for graph in graphs], strict=True)
    common = conjunction([_partition.bitmap(each) for each in matched])
    matched = [_partition.restrict(each, common) for each in matched]
    agreed = conjunction([_partition.constraints(graph, each) for graph, each in zip(ordered, matched, strict=True)])
    cut = [_partition.make_segments(keys, graph, each, agreed) for graph, each in zip(ordered, matched, strict=True)]
    return [
        segments and _partition.Plan(segments, _partition._fingerprint(graph, segments), None)
        for graph, segments in zip(graphs, cut, strict=True)
    ]


def conjunction(bitmaps: Sequence[bytes]) -> bytes:
    bits = [int.from_bytes(bitmap, "big") for bitmap in bitmaps]
    return functools.reduce(operator.and_, bits).to_bytes(len(bitmaps[0]), "big")


def check_plan(own: Any, plan: Any) -> list[tuple[Any, ...]]:
    """A plan's invariants on one rank. Returns what its fat segments are, in terms that ranks can compare."""
    order = [position for segment in plan.segments for position in segment.positions]
    operations = [position for position in range(len(own.keys)) if own.takes_part(position)]
    assert sorted(order) == operations
    segment_of = {position: number for number, segment in enumerate(plan.segments) for position in segment.positions}
    place = {position: index for index, position in enumerate(order)}
    for position in order:
        assert all(place.get(source, -1) < place[position] for source in own.inputs[position])
        assert segment_of[position] == segment_of[own.leaders[position]]
    staying = [position for position in order if own.pinned[position] and own.leaders[position] == position]
    assert staying == sorted(staying), "effects have changed their order"
    for barrier in operations:
        if own.barriers[barrier]:
            for position in operations:
                if own.leaders[position] == position:
                    assert (place[position] < place[barrier]) == (position < barrier)
    programs = []
    for number, segment in enumerate(plan.segments):
        issued = sum(bool(own.collectives[position]) for position in segment.positions)
        assert issued == segment.num_collectives
        assert {"fat": issued > 0, "skinny": issued == 1, "local": issued == 0}[segment.kind]
        if segment.kind != "fat":
            continue
        read_outside = {
            source
            for position in range(len(own.keys))
            for source in own.inputs[position]
            if segment_of.get(source) == number and segment_of.get(position) != number
        }
        assert read_outside <= set(segment.outputs)
        inside = {position: index for index, position in enumerate(segment.positions)}
        outside: dict[int, int] = {}
        wiring = [
            [inside.get(source, ~outside.setdefault(source, len(outside))) if source not in inside else inside[source]
             for source in own.inputs[position]]
            for position in segment.positions
        ]
        before = sum(bool(own.collectives[position]) for position in order[: place[segment.positions[0]]])
        programs.append(
            (
                [own.keys[position] for position in segment.positions],
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
        if sum(map(bool, graph.collectives)) > 1:
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
            position = next(p for p in fat.positions if len(graph.inputs[p]) == 2 and len(set(graph.inputs[p])) == 2)
            if what == "key":
                graph.keys[position] = bytes(7) + b"x"
            elif what == "wiring":
                graph.inputs[position] = graph.inputs[position][::-1]
            elif what == "outputs":
                segments[0] = fat._replace(outputs=fat.outputs[1:])
            elif what == "value":
                graph.describe = lambda position: f"tensor {position}"
            elif what == "mode":
                graph.modes = {-1: (0,)}
            else:  # a collective before it, in a skinny segment
                graph.keys.append(b"skinny..")
                graph.inputs.append(())
                graph.collectives.append({"world": 1})
                segments.insert(0, _partition.Segment("skinny", (len(graph.keys) - 1,), (), 1))
        plans.append(_partition._fingerprint(graph, segments))
    assert plans[0] != plans[1]


# ---------------------------------------------------------------------- real ranks


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """What four gloo ranks, each a process, report; see `partition_worker`."""
    folder = tmp_path_factory.mktemp("gloo")
    worker = Path(__file__).with_name("partition_worker.py")
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
