# SPDX-License-Identifier: Apache-2.0
"""One gloo rank of `test_end_to_end`: `end_to_end_worker.py RANK FOLDER STAGE:SCENARIO …`, in step with the others.

A scenario is a function without arguments, which checks its own rank's outcomes and, in `Compiled`, values and
gradients against eager. Each has process groups and a coordinator of its own, so that one that fails leaves nothing
behind. What a rank found is one line in FOLDER/rankR.jsonl as soon as the scenario is over.

Every scenario keeps to the collective contract: on each group all members issue the same sequence. Only how the
sequence is cut into graphs, and what lies between, differs.
"""

import concurrent.futures
import copy
import datetime
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from layout import PROJECT, load
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

sys.path[:0] = [str(PROJECT), str(PROJECT / "examples")]
from handshake_backend import Inner, make_backend  # noqa: E402

handshake = load("handshake")
_graph = load("_graph")
_graph_plan = load("_graph_plan")

WORLD = 4
COMPILE, DISPATCH = "COMPILE_STAGE", "DISPATCH_STAGE"
# No scenario waits so long, unless it fails: a vote, a collective, a rank that is still busy with the last scenario.
VOTE_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 90.0
MEET_TIMEOUT_S = 240.0
# In `lone_rank`, where a vote has to wait until its timeout.
SHORT_TIMEOUT_S = 1.0

rank = int(sys.argv[1])
folder = Path(sys.argv[2])
stage = ""
even, odd, low, high = [0, 2], [1, 3], [0, 1], [2, 3]
groups: dict[tuple[int, ...], str] = {}


# ---------------------------------------------------------------------- programs


class Reduced(torch.autograd.Function):
    """all_reduce forward, and backward."""

    @staticmethod
    def forward(ctx, x, group_name):
        ctx.group_name = group_name
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group_name))

    @staticmethod
    def backward(ctx, gradient):
        started = torch.ops._c10d_functional.all_reduce(gradient, "sum", ctx.group_name)
        return torch.ops._c10d_functional.wait_tensor(started), None


def reduce(x, group_name="0"):
    return Reduced.apply(x, group_name)


def own_matrix():
    """This rank's input."""
    return (torch.arange(6.0).reshape(2, 3) + rank) / 20


def two_layers(x, scale=2.0):
    """Two collectives, each between two local parts; its backward graph too: 1 segment fat, 5 skinny."""
    return reduce(torch.tanh(reduce(x * scale))) * 3


class Seen(NamedTuple):
    """What came of one forward and one backward run: verdicts, and the segments of the programs made for them."""

    fat: int = 0
    split: int = 0
    segments: tuple[int, ...] = ()
    partial: int = 0

    @property
    def verdicts(self) -> tuple[int, int]:
        return self.fat, self.split


class Compiled:
    """A function, compiled by the example's backend. A call runs it, and eagerly too, and compares."""

    def __init__(
        self,
        *functions: Callable[..., Any],
        dynamic: bool | None = None,
        groups: str | None = None,
        partial: bool = False,
    ) -> None:
        """Several functions are compiled one by one, and called one after the other."""
        self.backend = make_backend(stage=stage, partial=partial, groups=groups)
        self.functions = functions
        self.compiled = [torch.compile(function, backend=self.backend, dynamic=dynamic) for function in functions]

    def __call__(self, *inputs: Any, eager: list[torch.Tensor] | None = None) -> Seen:
        expected = eager or run(self.functions, inputs)
        before = self.backend.report()
        actual = run(self.compiled, inputs)
        after = self.backend.report()
        for value, same_by_eager in zip(actual, expected, strict=True):
            if not torch.allclose(value, same_by_eager):
                surprises.append(f"{value}, eagerly {same_by_eager}")
        return Seen(
            after["fat"] - before["fat"],
            after["split"] - before["split"],
            tuple(after["segments"][len(before["segments"]) :]),
            after["partial"] - before["partial"],
        )


def run(functions: Sequence[Callable[..., Any]], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The value, and the gradients with respect to the tensors among the inputs."""
    inputs = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]
    value, *others = inputs
    for function in functions:
        value = function(value, *others)
    value.square().sum().backward()
    return [value.detach(), *(x.grad for x in inputs if isinstance(x, torch.Tensor))]


surprises: list[str] = []


def expect(seen: Any, expected: Any) -> None:
    """Notes what is not as expected. The scenario goes on: a rank that left it would make the others wait."""
    if seen != expected:
        line = sys._getframe(1).f_lineno
        surprises.append(f"line {line}: {seen}, expected {expected}")


FAT = Seen(fat=2, segments=(1, 1))
FAT_UNASKED = Seen(segments=(1, 1))
SPLIT = Seen(split=2, segments=(5, 5))


def again(first: Seen) -> Seen:
    """What a further run of the same graphs sees: new votes at dispatch, none at compile, no new programs."""
    return first._replace(segments=()) if stage == DISPATCH else Seen()


# ---------------------------------------------------------------------- scenarios


def no_divergence():
    call = Compiled(two_layers)
    expect(call(own_matrix()), FAT)
    expect(call(own_matrix()), again(FAT))


def one_rank_differs():
    def function(x):
        return two_layers(x, 2.5 if rank == 2 else 2.0)

    call = Compiled(function)
    expect(call(own_matrix()), SPLIT)
    expect(call(own_matrix()), again(SPLIT))


def one_rank_differs_in_its_forward_graph_alone():
    def function(x):
        return two_layers(x + (0.5 if rank == 2 else 0.25))

    expect(Compiled(function)(own_matrix()), Seen(fat=1, split=1, segments=(5, 1)))


def plan_for_what_is_common():
    def function(x):
        return two_layers(x, 2.5 if rank == 2 else 2.0)

    call = Compiled(function, partial=True)
    # Forward, the first factor is local and the rest fat; backward it is the last.
    planned = Seen(partial=2, segments=(2, 2))
    expect(call(own_matrix()), planned)
    expect(call(own_matrix()), again(planned))

    # A rank that can't split its graph says so before the ranks agree, and all run skinny.
    def fail(own, segments):
        raise RuntimeError("this graph can't be split")

    make_plan = _graph_plan.OwnGraph.plan
    if rank == 1:
        _graph_plan.OwnGraph.plan = fail
    torch._dynamo.reset()
    try:
        expect(Compiled(function, partial=True)(own_matrix()), SPLIT)
    finally:
        _graph_plan.OwnGraph.plan = make_plan


def collectives_of_one_rank_alone():
    """Ranks that only reduce among themselves have nothing to agree on."""
    alone = [dist.new_group([member]) for member in range(WORLD)][rank].group_name
    expect(Compiled(lambda x: reduce(torch.tanh(reduce(x * (rank + 2), alone)), alone) * 3)(own_matrix()), FAT_UNASKED)


def all_ranks_diverge_at_iteration_1():
    def function(x, has_changed):
        return two_layers(x, rank + 2.0 if has_changed else 2.0)

    call = Compiled(function)
    expect(call(own_matrix(), False), FAT)
    expect(call(own_matrix(), True), SPLIT)
    expect(call(own_matrix(), False), again(FAT))


def one_rank_diverges_at_iteration_1():
    def function(x, has_changed):
        return two_layers(x, 2.5 if has_changed else 2.0)

    call = Compiled(function)
    expect(call(own_matrix(), False), FAT)
    expect(call(own_matrix(), rank == 2), SPLIT)
    expect(call(own_matrix(), False), again(FAT))


def graph_break_on_one_rank():
    def function(x):
        y = torch.tanh(reduce(x * 2))
        if rank == 1:
            torch._dynamo.graph_break()
        return reduce(y) * 3

    call = Compiled(function)
    # Rank 1 has graphs of one collective each: local and skinny (and local), twice forward, twice backward.
    first = Seen(split=4, segments=(3, 2, 2, 3)) if rank == 1 else SPLIT
    expect(call(own_matrix()), first)
    expect(call(own_matrix()), again(first))
    expect(Compiled(two_layers)(own_matrix()), FAT)


def last_frame_without_a_collective_on_one_rank():
    def function(x):
        y = two_layers(x)
        if rank == 3:
            torch._dynamo.graph_break()
        return y.sin()

    # Rank 3's last frame casts no vote, and its first isn't what the others run.
    expect(Compiled(function)(own_matrix()), SPLIT._replace(segments=(5, 1, 1, 5)) if rank == 3 else SPLIT)
    # One that only rank 3 runs, beside what all of them run.
    torch._dynamo.reset()
    call = Compiled(two_layers, torch.sin) if rank == 3 else Compiled(two_layers)
    expect(call(own_matrix()), FAT._replace(segments=(1, 1, 1, 1)) if rank == 3 else FAT)


def two_functions_on_one_rank():
    call = Compiled(layer_0, layer_1) if rank == 3 else Compiled(composed(layer_0, layer_1))
    seen = Seen(split=4, segments=(3, 3, 3, 3)) if rank == 3 else SPLIT
    expect(call(own_matrix()), seen)
    expect(call(own_matrix()), again(seen))
    torch._dynamo.reset()
    expect(Compiled(composed(layer_0, layer_1))(own_matrix()), FAT)


def layer_0(x):
    return torch.tanh(reduce(x * 2))


def layer_1(x):
    return torch.sin(reduce(x * 3))


def layer_2(x):
    return torch.tanh(reduce(x * 4))


def composed(*layers: Callable[..., Any]) -> Callable[..., Any]:
    def call(x):
        for layer in layers:
            x = layer(x)
        return x

    return call


def three_graphs_and_two():
    """Positions 0 and 5 of the line are aligned; what lies between is cut in two ways."""
    call = Compiled(layer_0, layer_1, layer_2) if rank in even else Compiled(layer_0, composed(layer_1, layer_2))
    seen = (
        Seen(fat=2, split=4, segments=(1, 3, 3, 3, 3, 1))
        if rank in even
        else Seen(fat=2, split=2, segments=(1, 5, 5, 1))
    )
    expect(call(own_matrix()), seen)
    expect(call(own_matrix()), again(seen))


def four_ways_to_cut_three_collectives():
    functions = [
        (layer_0, layer_1, layer_2),
        (layer_0, composed(layer_1, layer_2)),
        (composed(layer_0, layer_1), layer_2),
        (composed(layer_0, layer_1, layer_2),),
    ][rank]
    parts = [(3, 3, 3), (3, 5), (5, 3), (7,)][rank]
    call = Compiled(*functions)
    seen = Seen(split=2 * len(parts), segments=(*parts, *reversed(parts)))
    expect(call(own_matrix()), seen)
    expect(call(own_matrix()), again(seen))
    expect(Compiled(two_layers)(own_matrix()), FAT)


def even_ranks_reduce_among_themselves_too():
    def function(x):
        y = reduce(x * 2)
        if rank in even:
            y = reduce(y * 2, groups[0, 2])
        return reduce(y * 2)

    seen = Seen(split=2, segments=(6, 6) if rank in even else (4, 4))
    expect(Compiled(function)(own_matrix()), seen)
    expect(Compiled(two_layers)(own_matrix()), FAT)


def two_groups_at_once():
    pair = groups[0, 2] if rank in even else groups[1, 3]

    def function(x):
        return reduce(torch.tanh(reduce(x * (2.5 if rank == 0 else 2.0), pair)), pair) * 3

    def alike(x):
        return reduce(torch.tanh(reduce(x * 2, pair)), pair) * 3

    expect(Compiled(alike)(own_matrix()), FAT)
    expect(Compiled(function)(own_matrix()), SPLIT if rank in even else FAT)


def group_without_the_coordinators_rank():
    handshake.Handshake()  # on all ranks: rank 0's starts the coordinator
    if rank in high:
        pair = groups[2, 3]
        call = Compiled(lambda x: reduce(torch.tanh(reduce(x * 2, pair)), pair) * 3)
        expect(call(own_matrix()), FAT)
        expect(call(own_matrix()), again(FAT))


def mesh_of_two_by_two():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh.get_group("tp").group_name, mesh.get_group("dp").group_name

    def function(x):
        return reduce(torch.tanh(reduce(x * 2, tp)), dp) * 3

    expect(Compiled(function)(own_matrix()), FAT)
    # Every rank's groups are others than its neighbours', and they are all linked.
    torch._dynamo.reset()
    expect(Compiled(function, groups="exact")(own_matrix()), SPLIT)


def distributed_tensors():
    mesh = init_device_mesh("cpu", (WORLD,))

    def function(x, by_columns, by_rows):
        whole = DTensor.from_local(x, mesh, [Replicate()])
        hidden = torch.tanh(whole @ DTensor.from_local(by_columns, mesh, [Shard(1)]))
        hidden = hidden * (2.5 if differs else 2.0)
        return (hidden @ DTensor.from_local(by_rows, mesh, [Shard(0)])).redistribute(mesh, [Replicate()]).to_local()

    inputs = torch.ones(2, 3), own_matrix().T.contiguous(), own_matrix()
    differs = False
    expect(Compiled(function)(*inputs), FAT)
    torch._dynamo.reset()
    differs = rank == 1
    expect(Compiled(function)(*inputs), Seen(split=2, segments=(3, 2)))


def distributed_tensors_on_a_mesh_of_two_by_two():
    """Data parallel by tensor parallel: each rank's groups are its own row and column; fat by default."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def function(x, by_columns, by_rows):
        batch = DTensor.from_local(x, mesh, [Shard(0), Replicate()])
        hidden = torch.tanh(batch @ DTensor.from_local(by_columns, mesh, [Replicate(), Shard(1)]))
        summed = hidden @ DTensor.from_local(by_rows, mesh, [Replicate(), Shard(0)])
        return summed.redistribute(mesh, [Shard(0), Replicate()]).to_local()

    inputs = torch.ones(2, 3) * (1 + rank // 2), own_matrix().T.contiguous(), own_matrix()
    expect(Compiled(function)(*inputs), FAT)
    torch._dynamo.reset()
    seen = Compiled(function, groups="exact")(*inputs)
    expect((seen.fat, seen.split), (1, 1))  # forward, a rank meets its row alone; backward its column too


def sizes_summed(x):
    return two_layers((x * 2).sum(0))


def dynamic_shapes():
    """As many rows as no other rank has: one graph for all ranks and sizes."""
    call = Compiled(sizes_summed, dynamic=True)
    expect(call(torch.ones(4 + rank, 3)).verdicts, FAT.verdicts)
    expect(call(torch.ones(8 + rank, 3)), again(FAT))
    # A size that is another one the second time makes all ranks compile again, for any size.
    torch._dynamo.reset()
    call = Compiled(sizes_summed)
    expect(call(torch.ones(4, 3)), FAT)
    expect(call(torch.ones(6, 3)).verdicts, FAT.verdicts)
    expect(call(torch.ones(7, 3)), again(FAT))


def dynamic_shapes_and_a_graph_break_on_one_rank():
    """A backward graph with dynamic shapes is compiled before its forward graph runs."""

    def function(x):
        y = torch.tanh(reduce((x * 2).sum(0)))
        if rank == 1:
            torch._dynamo.graph_break()
        return reduce(y) * 3

    seen = Compiled(function, dynamic=True)(torch.ones(4 + rank, 3))
    expect(seen.verdicts, (0, 4 if rank == 1 else 2))


def backward_that_fails_to_compile_at_first_on_one_rank():
    """Where sizes are dynamic, torch compiles it ahead of its first run, suppresses what that raises, and compiles it
    again when it is needed. Only that one votes."""

    class FailsOnce(Inner):
        has_failed = rank != 1

        def compile(self, graph_module, fake_mode):
            if "tangents" in str(graph_module.graph) and not FailsOnce.has_failed:
                FailsOnce.has_failed = True
                raise OSError("main.so: file too short")  # another rank still writes it
            return super().compile(graph_module, fake_mode)

    call = Compiled(sizes_summed, dynamic=True)
    call.backend.inner = FailsOnce()
    expect(call(torch.ones(4 + rank, 3)).verdicts, FAT.verdicts)
    expect(FailsOnce.has_failed, True)
    expect(call(torch.ones(4 + rank, 3)).verdicts, again(FAT).verdicts)


def uneven_last_batch_on_one_rank():
    call = Compiled(sizes_summed)
    expect(call(torch.ones(4, 3)), FAT)
    expect(call(torch.ones(3 if rank == 3 else 4, 3)).verdicts, SPLIT.verdicts)


def two_threads_compile_at_once():
    """Rank 0 compiles and runs for the world in one thread, for {0, 1} in another; rank 1 does one after the other."""
    pair = groups.get((0, 1))

    def in_pair(x):
        return reduce(torch.tanh(reduce(x * 2, pair)), pair) * 3

    calls = {"world": Compiled(two_layers)}
    if rank in low:
        calls["pair"] = Compiled(in_pair)
    eager = {name: run(call.functions, [own_matrix()]) for name, call in calls.items()}
    seen: dict[str, list[Seen]] = {name: [] for name in calls}
    both_have_run = threading.Barrier(2)

    def twice(name: str) -> None:
        for _ in range(2):
            seen[name].append(calls[name](own_matrix(), eager=eager[name]))
            if rank == 0:
                both_have_run.wait(VOTE_TIMEOUT_S)

    if rank == 0:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(twice, name) for name in ("pair", "world")]:
                done.result()
    else:
        for _ in range(2):
            for name, call in calls.items():
                seen[name].append(call(own_matrix(), eager=eager[name]))
    # Rank 0 may be seen to wait for rank 1 in one thread, and rank 1 for rank 0's other thread, of which nobody has
    # heard yet. To be safe such a wait is ended by a split, but for all members alike, and the next time all is fat.
    for name, members in (("world", range(WORLD)), ("pair", low)):
        words = meet(json.dumps([call.verdicts for call in seen.get(name, ())]))
        expect([words[member] for member in members], [words[0]] * len(members))
    for first, second in seen.values():
        expect(sum(first.verdicts), 2)
        expect(second.verdicts, again(FAT).verdicts)


def cache_that_is_warm_on_one_rank():
    def function(x):
        return two_layers(x, 1.75 if stage == COMPILE else 1.25)

    hits = torch._dynamo.utils.counters["aot_autograd"]
    cache = {"bundled_autograd_cache": rank == 1, "autograd_cache_allow_custom_autograd_functions": True}
    with torch._functorch.config.patch(cache):
        for expected_hits in (0, 1 if rank == 1 else 0):
            before = hits["autograd_cache_hit"]
            torch._dynamo.reset()
            call = Compiled(function)
            expect(call(own_matrix()), FAT)
            expect(call(own_matrix()), again(FAT))
            expect(hits["autograd_cache_hit"] - before, expected_hits)


# ---------------------------------------------------------------------- without the example's backend


def voting_backend(vote: Callable[[str, dict[Any, int]], bool], verdicts: list[bool]) -> Callable[..., Any]:
    """A backend that asks `vote` when it compiles, as torch_tpu's split compiler does."""

    def compile_graph(graph_module, example_inputs):
        collectives = _graph.count_collectives(graph_module)
        verdicts.append(vote(_graph.graph_fingerprint(graph_module), collectives))
        if not verdicts[-1]:
            graph_module = _graph_plan.split_skinny(graph_module)
        return make_boxed_func(graph_module.forward)

    return aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph)


def alike_then_different(vote: Callable[[str, dict[Any, int]], bool]) -> None:
    """Three graphs forward and three backward; the second ones have a constant of their own on rank 3."""
    found = []
    for constant in (2.0, 2.5 if rank == 3 else 2.0, 2.0):
        torch._dynamo.reset()
        verdicts: list[bool] = []
        compiled = torch.compile(two_layers, backend=voting_backend(vote, verdicts))
        inputs = [own_matrix(), constant]
        for value, eager in zip(run([compiled], inputs), run([two_layers], inputs), strict=True):
            expect(torch.allclose(value, eager), True)
        found.append(verdicts)
    expect(found, [[True, True], [False, False], [True, True]])


def coordinator_on_rank_1():
    counts = handshake.RankCollectiveCounts()

    def vote(fingerprint, collectives):
        counts.increment_pg_collective_counts(collectives)
        request = handshake.CollectiveHandshakeRequest(copy.copy(counts), fingerprint, rank)
        return handshake.Handshake(coordinator_rank=1).submit(request)

    try:
        alike_then_different(vote)
    finally:
        meet("all have voted")
        handshake.Handshake(coordinator_rank=1).close()


class ForeignProcessGroupId:
    """What a vendoring compiler has as its own class for groups: equal to its own kind only."""

    def __init__(self, ranks: Sequence[int], world_size: int | None = None) -> None:
        self.ranks = tuple(ranks)
        self.world_size = world_size

    def __hash__(self) -> int:
        return hash(self.ranks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForeignProcessGroupId) and other.ranks == self.ranks

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)


class SplitCompiler:
    """How torch_tpu 0.2.0 votes: counts and their copy under a lock, the vote itself outside of it."""

    def __init__(self) -> None:
        self.counts = handshake.RankCollectiveCounts()
        self.lock = threading.Lock()

    def request(self, fingerprint: str, collectives: dict[Any, int]) -> Any:
        with self.lock:
            self.counts.increment_pg_collective_counts(collectives)
            counts = copy.deepcopy(self.counts)
        return handshake.CollectiveHandshakeRequest(
            pg_collective_counts=counts, executable_fingerprint=fingerprint, rank=dist.get_rank()
        )

    def submit_handshake(self, fingerprint: str, collectives: dict[Any, int]) -> bool:
        return handshake.Handshake().submit(self.request(fingerprint, collectives))


def split_compiler_with_a_group_class_of_its_own():
    compiler = SplitCompiler()

    def vote(fingerprint, collectives):
        foreign = {ForeignProcessGroupId(group.ranks, WORLD): count for group, count in collectives.items()}
        assert handshake.should_handshake(foreign)
        return compiler.submit_handshake(fingerprint, foreign)

    alike_then_different(vote)


def votes_of_two_threads_in_either_order():
    """The graph that was counted second is submitted first on ranks 0 and 2, and second on ranks 1 and 3."""
    compiler = SplitCompiler()
    world = ForeignProcessGroupId(range(WORLD))
    for number in range(8):
        requests = [compiler.request(f"graph {number} {place}", {world: 1 + place}) for place in range(2)]
        if rank in even:
            requests.reverse()
        verdicts = [None, None]
        is_on_its_way = threading.Event()

        def submit_first(request=requests[0], verdicts=verdicts, is_on_its_way=is_on_its_way):
            is_on_its_way.set()
            verdicts[0] = handshake.Handshake().submit(request)

        thread = threading.Thread(target=submit_first)
        thread.start()
        is_on_its_way.wait()
        verdicts[1] = handshake.Handshake().submit(requests[1])
        thread.join()
        expect(verdicts, [True, True])


# ---------------------------------------------------------------------- the end of a job


def lone_rank() -> None:
    """Rank 2 alone recompiles, in COMPILE_STAGE: it votes, and the others, which run the graph that they have, don't.
    The job ends here, on every rank."""

    def function(x, has_changed):
        return two_layers(x, 2.5 if has_changed else 2.0)

    compiled = torch.compile(function, backend=make_backend(stage=stage))
    compiled(own_matrix(), False)
    try:
        compiled(own_matrix(), rank == 2)
    except Exception as error:
        # Dynamo may have wrapped what the backend raised.
        error = getattr(error, "inner_exception", error)
        facts = {name: getattr(error, name, None) for name in ("ranks", "seconds")}
        record("lone_rank", error=type(error).__name__, text=str(error), **facts)
        sys.exit("lone_rank: this rank ends")


# ---------------------------------------------------------------------- all ranks in step


def record(name: str, **facts: Any) -> None:
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        print(json.dumps({"name": name, **facts}), file=file)


_meetings = 0
_meeting_place: Any = None


def meet(word: str) -> list[str]:
    """Waits for all ranks; the word that each of them brings."""
    global _meetings
    _meetings += 1
    keys = [f"{_meetings}/{other}" for other in range(WORLD)]
    _meeting_place.set(keys[rank], word)
    _meeting_place.wait(keys)
    return [_meeting_place.get(key).decode() for key in keys]


def start(number: int, timeout_s: float = VOTE_TIMEOUT_S) -> None:
    """New process groups, and a new coordinator."""
    os.environ["TORCH_TPU_INTERNAL_HANDSHAKE_STAGE"] = stage
    os.environ["TORCH_TPU_INTERNAL_HANDSHAKE_TIMEOUT_S"] = str(timeout_s)
    torch._dynamo.reset()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/job{number}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    groups.clear()
    for ranks in (even, odd, low, high):
        group = dist.new_group(ranks)
        if rank in ranks:
            groups[tuple(ranks)] = group.group_name
    # Each scenario begins at the start of every line.
    handshake._counts = handshake.RankCollectiveCounts()


def stop() -> None:
    meet("stop")
    handshake.Handshake().close()
    dist.destroy_process_group()


def main() -> None:
    global _meeting_place, stage
    _meeting_place = dist.FileStore(f"{folder}/meet", WORLD)
    _meeting_place.set_timeout(datetime.timedelta(seconds=MEET_TIMEOUT_S))
    for number, scenario in enumerate(sys.argv[3:]):
        stage, _, name = scenario.partition(":")
        start(number, SHORT_TIMEOUT_S if name == "lone_rank" else VOTE_TIMEOUT_S)
        started = time.monotonic()
        try:
            globals()[name]()
        except Exception:
            surprises.append(traceback.format_exc())
        record(scenario, surprises=surprises, seconds=time.monotonic() - started)
        surprises.clear()
        stop()


if __name__ == "__main__":
    main()
