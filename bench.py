# SPDX-License-Identifier: Apache-2.0
"""What a handshake costs: ``python bench.py``, no arguments, under a minute.

It needs the standard library alone. Where torch is installed, it also measures what people would write in the
handshake's place: gloo's `all_gather_object` of a fingerprint and `all_reduce` of a digest.

How a handshake is measured
    N real processes, each a rank. Every rank submits its next vote as soon as it has the answer to the last; each
    times its own `submit`, from the call to the answer, and the samples of all ranks are pooled. So a sample holds the
    wait for the slowest rank, as it does in a training job.

    The floor is a star of the same messages: the same N processes send as many bytes as a vote over plain blocking
    sockets to one bare process, which, once it has one message from everybody, sends everybody as many bytes as a
    verdict. It parses and decides nothing. Both middles, the coordinator and the bare process, are processes of their
    own. The scheduler places them all: with more processes than processors, the ranks' own work adds up.

    Blocks of `ROUNDS_PER_BLOCK` handshakes and as many star rounds take turns, so that whatever else the machine does
    hits both. The first round of a block lines the ranks up and doesn't count. `ratio` is the median, over the pairs of
    neighbouring blocks, of the ratio of their medians.

The JSON of ``--json FILE``
    An object with `environment` (python, platform, cpus, torch, seconds) and one list of rows for each section, under
    its name: `handshake`, `collectives`, `frames`, `calls`, `consensus`, `graphs`. A row's keys are among those in
    `SECTIONS`; times are in microseconds (`_us`) or milliseconds (`ms`). A figure that could not be measured is null
    or left out, and the row's `note` says why.

A section is a function that takes the options and returns rows; `SECTIONS` lists them in the order of the report.
"""

import argparse
import copy
import gc
import importlib.metadata
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import platform
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import tracemalloc
from array import array
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent

# One block of handshakes, or of star rounds: long enough to be steady, short enough for noise to hit both alike.
ROUNDS_PER_BLOCK = 100
# More processes than this measure the scheduler of one machine.
MAX_RANKS = 64
LARGE_WORLD = 4096
# One object kept by mistake for each vote shows at once: 4,096 of them are hundreds of kilobytes a handshake.
MEMORY_HANDSHAKES = 5
FINGERPRINT = "0123456789abcdef" * 2
# A process that gives no sign for this long is taken for dead: importing torch 8 times on 2 cores takes about 15 s.
PROCESS_TIMEOUT_S = 120.0
# A process that is told to end has nothing to do but to close its sockets.
END_TIMEOUT_S = 10.0

Row = dict[str, Any]


class Options(NamedTuple):
    """What the command line asks for."""

    ranks: tuple[int, ...]
    seconds: float  # of measurement, for each number of ranks
    progress: Callable[[str], None]


class Column(NamedTuple):
    """One column of a section's table: the row's key, what stands above it, and digits after the point."""

    key: str
    heading: str
    digits: int = 0


class Section(NamedTuple):
    """One part of the report."""

    name: str
    title: str
    measure: Callable[[Options], list[Row]]
    columns: tuple[Column, ...]


class BenchError(Exception):
    """A process of the benchmark failed."""


# ---------------------------------------------------------------------- statistics


def quantile(samples: Iterable[float], fraction: float) -> float:
    """The smallest sample that at least `fraction` of all samples don't exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def microseconds(nanoseconds: float) -> float:
    return nanoseconds / 1e3


def time_call(function: Callable[[], object], seconds: float = 0.3) -> float:
    """Nanoseconds of one call: the median over batches of 100 calls, for about `seconds`."""
    batches: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(batches) < 5:
        started = time.perf_counter_ns()
        for _ in range(100):
            function()
        batches.append((time.perf_counter_ns() - started) / 100)
    return statistics.median(batches)


# ---------------------------------------------------------------------- processes


class Processes:
    """Child processes that each run `target(pipe, *arguments)`; a context manager that leaves none behind."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # or the first start would do it, and change the mask that `start` sets
        self._children: list[tuple[Any, Connection]] = []

    def start(self, target: Callable[..., None], *arguments: object) -> int:
        """Starts one and returns its number."""
        ours, theirs = self._context.Pipe()
        child = self._context.Process(target=_run_child, args=(target, theirs, *arguments))
        # A child inherits this: Ctrl-C, which the terminal sends to all, is for the parent alone to answer.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            child.start()
            self._children.append((child, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return len(self._children) - 1

    def tell(self, numbers: Iterable[int], message: object) -> None:
        for number in numbers:
            try:
                self._children[number][1].send(message)
            except OSError:
                raise self._ended(number) from None

    def hear(self, number: int) -> Any:
        """The next message of child `number`.

        Raises:
            BenchError: a process ended (the others may wait for it), or this one said nothing for
                `PROCESS_TIMEOUT_S`.
        """
        pipe = self._children[number][1]
        ends = [child.sentinel for child, _ in self._children]
        ready = wait([pipe, *ends], PROCESS_TIMEOUT_S)
        if not ready:
            raise BenchError(f"process {number} said nothing for {PROCESS_TIMEOUT_S:g} s")
        if pipe not in ready:
            raise self._ended(next(place for place, end in enumerate(ends) if end in ready))
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise self._ended(number) from None

    def _ended(self, number: int) -> BenchError:
        child = self._children[number][0]
        child.join(PROCESS_TIMEOUT_S)
        return BenchError(f"process {number} ended with exit code {child.exitcode}; its own error is above")

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child, pipe in self._children:
            pipe.close()  # which every child takes for the end
            if kind is not None:
                child.kill()  # before it finds out that others are gone, and says so
        for child, _ in self._children:
            child.join(END_TIMEOUT_S)
            if child.is_alive():
                child.kill()
                child.join()


def _run_child(target: Callable[..., None], pipe: Connection, *arguments: object) -> None:
    try:
        target(pipe, *arguments)
    except (EOFError, BrokenPipeError):
        pass  # the benchmark is over
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


# ---------------------------------------------------------------------- handshakes, and the bare star


def _star_server(pipe: Connection, ranks: int, vote_bytes: int, verdict_bytes: int) -> None:
    """The bare star's middle: a message from everybody, then a message to everybody."""
    verdict = bytes(verdict_bytes)
    selector = selectors.DefaultSelector()
    with socket.create_server(("127.0.0.1", 0), backlog=ranks) as listener:
        pipe.send(listener.getsockname())
        clients = [listener.accept()[0] for _ in range(ranks)]
    missing = dict.fromkeys(clients, vote_bytes)
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(client, selectors.EVENT_READ, client)
    whole = 0
    while True:
        for key, _ in selector.select():
            client = key.data
            data = client.recv(missing[client])
            if not data:
                return
            missing[client] -= len(data)
            if not missing[client]:
                missing[client] = vote_bytes
                whole += 1
        if whole == ranks:
            whole = 0
            for client in clients:
                client.sendall(verdict)


def _star_rounds(star: socket.socket, vote: bytes, verdict_bytes: int, rounds: int) -> "array[int]":
    latencies = array("Q")
    for _ in range(rounds):
        started = time.perf_counter_ns()
        star.sendall(vote)
        missing = verdict_bytes
        while missing:
            data = star.recv(missing)
            if not data:
                raise BenchError("the star's middle is gone")
            missing -= len(data)
        latencies.append(time.perf_counter_ns() - started)
    return latencies


def _rank(
    pipe: Connection,
    rank: int,
    ranks: int,
    secret: str,
    coordinator: tuple[str, int],
    star_address: tuple[str, int],
    vote_bytes: int,
    verdict_bytes: int,
) -> None:
    """One rank: runs blocks of handshakes or of star rounds as it is told, and sends back the nanoseconds of each."""
    import handshake

    world = handshake.ProcessGroupId(range(ranks), ranks)
    counts = handshake.RankCollectiveCounts()
    vote = bytes(vote_bytes)
    with (
        handshake.Handshake(
            current_rank=rank, world_size=ranks, host=coordinator[0], port=coordinator[1], secret=secret
        ) as face,
        socket.create_connection(star_address) as star,
    ):
        star.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe.send(face.address)
        while True:
            kind, rounds = pipe.recv()
            if kind == "star":
                latencies = _star_rounds(star, vote, verdict_bytes, rounds)
            else:
                requests = []
                for _ in range(rounds):
                    counts.increment_pg_collective_counts({world: 2})
                    requests.append(handshake.CollectiveHandshakeRequest(counts.__copy__(), FINGERPRINT, rank))
                latencies = array("Q")
                for request in requests:
                    started = time.perf_counter_ns()
                    fat = face.submit(request)
                    latencies.append(time.perf_counter_ns() - started)
                    if not fat:
                        raise BenchError(f"rank {rank}: equal votes were split")
            pipe.send(latencies)


def measure_handshake(options: Options) -> list[Row]:
    """One handshake against one round of the bare star, for each number of ranks."""
    return [_measure_ranks(ranks, options) for ranks in options.ranks]


def _measure_ranks(ranks: int, options: Options) -> Row:
    vote_bytes, verdict_bytes = vote_frame_bytes(1), verdict_frame_bytes()
    secret = os.urandom(16).hex()
    options.progress(f"handshake, {ranks} ranks: starting")
    with Processes() as processes:
        star_address = processes.hear(processes.start(_star_server, ranks, vote_bytes, verdict_bytes))
        everyone: list[int] = []
        address = ("127.0.0.1", 0)  # rank 0's coordinator takes a free port, and the others are told which
        for rank in range(ranks):
            everyone.append(
                processes.start(_rank, rank, ranks, secret, address, star_address, vote_bytes, verdict_bytes)
            )
            if rank == 0:
                address = processes.hear(everyone[0])
        for number in everyone[1:]:
            processes.hear(number)

        def block(kind: str) -> list[int]:
            processes.tell(everyone, (kind, ROUNDS_PER_BLOCK + 1))
            return [nanoseconds for number in everyone for nanoseconds in processes.hear(number)[1:]]

        samples: dict[str, list[int]] = {"handshake": [], "star": []}
        ratios: list[float] = []
        for kind in samples:
            block(kind)  # warms up: allocators, caches, the interpreter's inlined lookups
        until = time.monotonic() + options.seconds
        while time.monotonic() < until or len(ratios) < 4:
            pair = {}
            for kind in sorted(samples, reverse=len(ratios) % 2 == 1):
                pair[kind] = block(kind)
                samples[kind] += pair[kind]
            ratios.append(statistics.median(pair["handshake"]) / statistics.median(pair["star"]))
            options.progress(f"handshake, {ranks} ranks: {max(0.0, until - time.monotonic()):.1f} s left")

    median = statistics.median(samples["handshake"])
    star_median = statistics.median(samples["star"])
    return {
        "ranks": ranks,
        "handshake_median_us": microseconds(median),
        "handshake_p99_us": microseconds(quantile(samples["handshake"], 0.99)),
        "star_median_us": microseconds(star_median),
        "star_p99_us": microseconds(quantile(samples["star"], 0.99)),
        "ratio": statistics.median(ratios),
        "ratio_lower_quartile": quantile(ratios, 0.25),
        "ratio_upper_quartile": quantile(ratios, 0.75),
        "handshakes_per_s": 1e9 / statistics.fmean(samples["handshake"]),
        "star_rounds_per_s": 1e9 / statistics.fmean(samples["star"]),
        "vote_bytes": vote_bytes,
        "verdict_bytes": verdict_bytes,
        "samples": len(samples["handshake"]),
    }


# ---------------------------------------------------------------------- what people would write instead


def _gloo_rank(pipe: Connection, rank: int, world_size: int, store: str, group_sizes: tuple[int, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    groups = {size: dist.new_group(list(range(size))) for size in group_sizes}
    halves = [int(FINGERPRINT[:15], 16), int(FINGERPRINT[15:30], 16)]
    pipe.send(None)
    while (told := pipe.recv()) is not None:
        kind, size, rounds = told
        latencies = array("Q")
        for _ in range(rounds):
            started = time.perf_counter_ns()
            if kind == "all_gather_object":
                fingerprints: list[Any] = [None] * size
                dist.all_gather_object(fingerprints, FINGERPRINT, group=groups[size])
                equal = len(set(fingerprints)) == 1
            else:
                # The largest of x and of -x: equal on all ranks exactly where the one is the other's opposite.
                digest = torch.tensor(halves + [-half for half in halves])
                dist.all_reduce(digest, op=dist.ReduceOp.MAX, group=groups[size])
                high, low, minus_high, minus_low = digest.tolist()
                equal = (high, low) == (-minus_high, -minus_low)
            latencies.append(time.perf_counter_ns() - started)
            if not equal:
                raise BenchError(f"{kind}: equal fingerprints came out unequal")
        pipe.send(latencies)
    dist.destroy_process_group()


def measure_collectives(options: Options) -> list[Row]:
    """The fingerprint compared by gloo's collectives, which every rank of the group has to join, and in order."""
    keys = ("all_gather_object_median_us", "all_gather_object_p99_us", "all_reduce_median_us", "all_reduce_p99_us")
    if importlib.util.find_spec("torch") is None:
        empty: Row = dict.fromkeys(keys)
        return [{"ranks": ranks, **empty, "note": "torch is not installed"} for ranks in options.ranks]
    rows = []
    world_size = max(options.ranks)
    options.progress(f"gloo, {world_size} ranks: starting")
    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        everyone = [
            processes.start(_gloo_rank, rank, world_size, os.path.join(folder, "store"), options.ranks)
            for rank in range(world_size)
        ]
        for number in everyone:
            processes.hear(number)
        for ranks in options.ranks:
            row: Row = {"ranks": ranks}
            for kind in ("all_gather_object", "all_reduce"):
                options.progress(f"gloo, {ranks} ranks: {kind}")
                samples: list[int] = []
                until = time.monotonic() + options.seconds / 5
                while not samples or time.monotonic() < until:
                    processes.tell(everyone[:ranks], (kind, ranks, ROUNDS_PER_BLOCK + 1))
                    for number in everyone[:ranks]:
                        samples += processes.hear(number)[1:]
                row[f"{kind}_median_us"] = microseconds(statistics.median(samples))
                row[f"{kind}_p99_us"] = microseconds(quantile(samples, 0.99))
            rows.append({**row, "note": ""})
        processes.tell(everyone, None)
    return rows


# ---------------------------------------------------------------------- frames


def vote_frame_bytes(groups: int) -> int:
    """Bytes of a vote on so many groups. The groups' ranks are not in it, so the world's size plays no part."""
    import _protocol

    spans = [(number, 1_000_000, 1_000_002) for number in range(groups)]
    return len(_protocol.vote(1_000_000, 0, bytes.fromhex(FINGERPRINT), spans))


def verdict_frame_bytes() -> int:
    """Bytes of a verdict that lets the ranks run fat."""
    import _protocol

    return len(_protocol.verdict(1_000_000, _protocol.FAT))


def measure_frames(options: Options) -> list[Row]:
    """Bytes of each message of a handshake as it goes over the wire; a group is declared once per connection."""
    import _protocol

    rows: list[Row] = []
    for world_size in (8, LARGE_WORLD):
        declared = {
            "all ranks": range(world_size),
            "every eighth rank": range(0, world_size, 8),
            "a block of 4 in every 8 ranks": [rank for rank in range(world_size) if rank % 8 < 4],
        }
        sizes = {f"vote on {groups} group{'s' * (groups > 1)}": vote_frame_bytes(groups) for groups in (1, 2, 8)}
        sizes["verdict"] = verdict_frame_bytes()
        for name, ranks in declared.items():
            sizes[f"group, once: {name}"] = len(_protocol.group(0, ranks))
        rows += [{"world_size": world_size, "frame": frame, "bytes": size} for frame, size in sizes.items()]
    return rows


# ---------------------------------------------------------------------- single calls


def _import_us() -> float:
    """Microseconds of `import handshake` in a fresh interpreter: the median of 11, the first, which compiles, aside."""
    program = (
        f"import sys, time; sys.path.insert(0, {str(PROJECT)!r}); started = time.perf_counter_ns(); "
        "import handshake; print(time.perf_counter_ns() - started)"
    )
    times = [
        int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout) for _ in range(12)
    ]
    return microseconds(statistics.median(times[1:]))


def measure_calls(options: Options) -> list[Row]:
    """What a rank pays at every dispatch before anything is sent, and once at import."""
    import _protocol
    import _vocabulary
    import handshake

    options.progress("single calls")
    world = handshake.ProcessGroupId(range(LARGE_WORLD), LARGE_WORLD)
    in_graph = {world: 2}
    counts = handshake.RankCollectiveCounts()
    numbers = {world: 0}

    def build_and_encode() -> bytes:
        counts.increment_pg_collective_counts(in_graph)
        request = handshake.CollectiveHandshakeRequest(copy.deepcopy(counts), FINGERPRINT, 7)
        spans = [
            (
                numbers[group],
                count.collective_count_before,
                count.collective_count_before + count.num_collectives_in_graph,
            )
            for group, count in request.pg_collective_counts.items()
            if count.num_collectives_in_graph
        ]
        return _protocol.vote(1, 0, _vocabulary.fingerprint_digest(request.executable_fingerprint), spans)

    times = {
        f"should_handshake(), world of {LARGE_WORLD:,}": microseconds(
            time_call(lambda: handshake.should_handshake(in_graph))
        ),
        f"build and encode a vote, world of {LARGE_WORLD:,}": microseconds(time_call(build_and_encode)),
        "import handshake, fresh interpreter": _import_us(),
    }
    return [{"call": call, "median_us": median} for call, median in times.items()]


# ---------------------------------------------------------------------- the state machine alone


def measure_consensus(options: Options) -> list[Row]:
    """Whole handshakes over `LARGE_WORLD` ranks through the state machine, in this process, without sockets."""
    import _consensus
    import handshake

    options.progress(f"consensus machine, {LARGE_WORLD} ranks")
    world = handshake.ProcessGroupId(range(LARGE_WORLD), LARGE_WORLD)
    machine = _consensus._CollectiveHandshakeConsensus(LARGE_WORLD)
    position = 0

    def one_handshake() -> int:
        """Nanoseconds from the first vote to the last answer. Making the requests is the ranks' work, not timed."""
        nonlocal position
        counts = handshake.RankCollectiveCounts({world: handshake.ProcessGroupCollectiveCount(position, 2)})
        position += 2
        requests = [handshake.CollectiveHandshakeRequest(counts, FINGERPRINT, rank) for rank in range(LARGE_WORLD)]
        answered = 0
        started = time.perf_counter_ns()
        for request in requests:
            answered += len(machine.put_request(request, 0.0))
        elapsed = time.perf_counter_ns() - started
        if answered != LARGE_WORLD:
            raise BenchError(f"the consensus machine answered {answered} of {LARGE_WORLD} votes")
        return elapsed

    one_handshake()
    elapsed: list[int] = []
    until = time.monotonic() + options.seconds / 4
    while len(elapsed) < 3 or time.monotonic() < until:
        elapsed.append(one_handshake())

    tracemalloc.start()
    try:
        for _ in range(2):
            one_handshake()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(MEMORY_HANDSHAKES):
            one_handshake()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    median = statistics.median(elapsed)
    return [
        {
            "ranks": LARGE_WORLD,
            "vote_us": microseconds(median) / LARGE_WORLD,
            "handshakes_per_s": 1e9 / median,
            "handshakes": len(elapsed),
            "grown_bytes_per_handshake": max(0.0, grown / MEMORY_HANDSHAKES),
        }
    ]


# ---------------------------------------------------------------------- graphs

GRAPH_NODES = (1_000, 10_000)
PLAN_RANKS = 4
# Blocks of the graph in which the ranks' constants differ; ALL_DIFFERENT: every shape differs, so nothing is common.
ALL_DIFFERENT = -1
PLAN_CASES = ((1_000, 1), (10_000, 1), (10_000, 100), (10_000, ALL_DIFFERENT))
REPEATS = 2


def _make_graph(nodes: int, rank: int, different_blocks: int) -> Any:
    """A graph of about so many nodes: a block with one all_reduce, traced once and repeated.

    In `different_blocks` of the blocks, evenly spread, a constant is the rank's own.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    width = 64 + rank if different_blocks == ALL_DIFFERENT else 64

    def block(x: Any, weight: Any, bias: Any) -> Any:
        hidden = torch.nn.functional.layer_norm(x, [width])
        hidden = torch.nn.functional.gelu(hidden @ weight + bias) * 3
        hidden = torch.where(hidden > 0.5, hidden, hidden.softmax(-1)).transpose(0, 1).contiguous().transpose(0, 1)
        reduced = torch.ops._c10d_functional.all_reduce(hidden @ weight.t(), "sum", "0")
        return x + torch.ops._c10d_functional.wait_tensor(reduced)

    shapes = ((8, width), (width, width), (width,))
    template = make_fx(block, tracing_mode="fake")(*(torch.zeros(shape) for shape in shapes)).graph
    inputs = [node for node in template.nodes if node.op == "placeholder"]
    body = [node for node in template.nodes if node.op not in ("placeholder", "output")]
    [result] = [node.args[0] for node in template.nodes if node.op == "output"]
    blocks = (nodes - len(inputs) - 1) // len(body)
    every = max(1, blocks // different_blocks) if different_blocks > 0 else blocks + 1

    graph = torch.fx.Graph()
    copies = {node: graph.node_copy(node) for node in inputs}
    for number in range(blocks):
        for node in body:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.target is torch.ops.aten.mul.Tensor and node.args[1] == 3 and number % every == every // 2:
                copies[node].args = (copies[node].args[0], 3 + rank)
        copies[inputs[0]] = copies[result]
    graph.output(copies[result])
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _graph_rank(pipe: Connection, rank: int, ranks: int, secret: str, coordinator: tuple[str, int]) -> None:
    """One rank of torch's fake process group: nothing is communicated but by the handshake."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import _graph
    import _partition
    import handshake

    torch.set_num_threads(1)
    logging.getLogger("torch_tpu.handshake").setLevel(logging.ERROR)  # every split here is meant
    made = (0, 0)
    hashing, splitting = _time_calls(_graph, "canonical_nodes"), _time_calls(_partition, "_split")
    world = handshake.ProcessGroupId(range(ranks), ranks)
    counts = handshake.RankCollectiveCounts()
    with handshake.Handshake(
        current_rank=rank, world_size=ranks, host=coordinator[0], port=coordinator[1], secret=secret
    ) as face:
        pipe.send(face.address)
        pipe.recv()
        # One vote to connect, before there is a process group: its store, in which the handshake would look for its
        # coordinator, is a fake as well.
        counts.increment_pg_collective_counts({world: 1})
        face.submit(handshake.CollectiveHandshakeRequest(counts.__copy__(), FINGERPRINT, rank))
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        while (told := pipe.recv()) is not None:
            kind, nodes, different_blocks = told
            if (nodes, different_blocks) != made:
                graph, made = _make_graph(nodes, rank, different_blocks), (nodes, different_blocks)
                in_graph, fingerprint = _graph.count_collectives(graph), _graph.graph_fingerprint(graph)
            if kind == "fingerprint":
                fingerprint_ns = _quickest(_graph.graph_fingerprint, graph)
                text_ns = _quickest(torch.fx.GraphModule.print_readable, graph, False)
                skinny_ns = _quickest(_partition.split_skinny, graph)
                pipe.send((len(graph.graph.nodes), fingerprint_ns, text_ns, skinny_ns))
                continue
            counts.increment_pg_collective_counts(in_graph)
            request = handshake.CollectiveHandshakeRequest(counts.__copy__(), fingerprint, rank)
            ticket = face.submit_async(request, partial=True)
            if ticket.result() or ticket.exchange is None:
                raise BenchError(f"rank {rank}: graphs that differ ran fat, or can't be planned")
            hashing.clear()
            splitting.clear()
            started = time.perf_counter_ns()
            plan = _partition.agree_on_plan(ticket.exchange, graph)
            elapsed = time.perf_counter_ns() - started
            fat = plan.num_fat_collectives if plan is not None else 0
            pipe.send((len(graph.graph.nodes), in_graph[world], fat, elapsed, sum(hashing), sum(splitting)))
    dist.destroy_process_group()


def _time_calls(module: Any, name: str) -> list[int]:
    """From now on, the nanoseconds of each call of this function of the module."""
    function, times = vars(module)[name], []

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter_ns()
        result = function(*arguments)
        times.append(time.perf_counter_ns() - started)
        return result

    vars(module)[name] = timed
    return times


def _quickest(function: Callable[..., object], *arguments: object) -> int:
    times: list[int] = []
    for _ in range(REPEATS):
        started = time.perf_counter_ns()
        function(*arguments)
        times.append(time.perf_counter_ns() - started)
    return min(times)


def _graph_row(
    what: str, nodes: int | None = None, nanoseconds: int | None = None, ratio: float | None = None, note: str = ""
) -> Row:
    ms = None if nanoseconds is None else nanoseconds / 1e6
    return {"what": what, "nodes": nodes, "ms": ms, "ratio": ratio, "note": note}


def measure_graphs(options: Options) -> list[Row]:
    """A graph's fingerprint against its text, its split at each collective, and a plan for the common part of diverging
    graphs.

    The plan's time is that of the slowest rank, from the verdict to the plan that all have agreed on, less what the
    slowest took to hash its graph and to split it by the plan. That has a row of its own. Least of `REPEATS` times.
    """
    if importlib.util.find_spec("torch") is None:
        return [_graph_row("fingerprint, plan", note="torch is not installed")]
    rows: list[Row] = []
    secret = os.urandom(16).hex()
    options.progress(f"graphs, {PLAN_RANKS} ranks: starting")
    with Processes() as processes:
        everyone: list[int] = []
        address = ("127.0.0.1", 0)
        for rank in range(PLAN_RANKS):
            everyone.append(processes.start(_graph_rank, rank, PLAN_RANKS, secret, address))
            if rank == 0:
                address = processes.hear(everyone[0])
        for number in everyone[1:]:
            processes.hear(number)
        processes.tell(everyone, "connect")
        for nodes in GRAPH_NODES:
            options.progress(f"graphs: fingerprint, {nodes} nodes")
            processes.tell(everyone[:1], ("fingerprint", nodes, 0))
            count, fingerprint, text, skinny = processes.hear(everyone[0])
            rows.append(_graph_row("graph_fingerprint()", count, fingerprint, ratio=fingerprint / text))
            rows.append(_graph_row("print_readable()", count, text, ratio=1.0))
            rows.append(_graph_row("split_skinny()", count, skinny, ratio=skinny / text))
        for nodes, different_blocks in PLAN_CASES:
            differing = "all" if different_blocks == ALL_DIFFERENT else str(different_blocks)
            options.progress(f"graphs: plan, {nodes} nodes, blocks that differ: {differing}")
            times: list[int] = []
            split_times: list[int] = []
            for _ in range(REPEATS):
                processes.tell(everyone, ("plan", nodes, different_blocks))
                answers = [processes.hear(number) for number in everyone]
                count, collectives, fat = answers[0][:3]
                elapsed, hashing, splitting = (max(answer[part] for answer in answers) for part in (3, 4, 5))
                times.append(elapsed - hashing - splitting)
                split_times.append(splitting)
            case = f"{PLAN_RANKS} ranks, blocks that differ: {differing}"
            rows.append(_graph_row(f"plan, {case}", count, min(times), note=f"{fat} of {collectives} collectives fat"))
            if fat:
                rows.append(_graph_row(f"split by it, {case}", count, min(split_times)))
        processes.tell(everyone, None)
    return rows


# ---------------------------------------------------------------------- the report

SECTIONS = (
    Section(
        "handshake",
        "One handshake, submit to answer as a rank sees it, against a bare star of the same messages",
        measure_handshake,
        (
            Column("ranks", "ranks"),
            Column("handshake_median_us", "median µs"),
            Column("handshake_p99_us", "p99 µs"),
            Column("star_median_us", "star median µs"),
            Column("star_p99_us", "star p99 µs"),
            Column("ratio", "ratio", 2),
            Column("ratio_lower_quartile", "quartiles", 2),
            Column("ratio_upper_quartile", "of ratio", 2),
            Column("handshakes_per_s", "handshakes/s"),
            Column("vote_bytes", "vote B"),
            Column("verdict_bytes", "verdict B"),
        ),
    ),
    Section(
        "collectives",
        "The same comparison by gloo's collectives",
        measure_collectives,
        (
            Column("ranks", "ranks"),
            Column("all_gather_object_median_us", "all_gather_object median µs"),
            Column("all_gather_object_p99_us", "p99 µs"),
            Column("all_reduce_median_us", "all_reduce median µs"),
            Column("all_reduce_p99_us", "p99 µs"),
            Column("note", ""),
        ),
    ),
    Section(
        "frames",
        "Bytes on the wire",
        measure_frames,
        (
            Column("world_size", "world size"),
            Column("frame", "frame"),
            Column("bytes", "bytes"),
        ),
    ),
    Section(
        "calls",
        "On the rank, before anything is sent",
        measure_calls,
        (Column("call", "call"), Column("median_us", "median µs", 2)),
    ),
    Section(
        "consensus",
        "The consensus machine alone, in one process",
        measure_consensus,
        (
            Column("ranks", "ranks"),
            Column("vote_us", "µs per vote", 2),
            Column("handshakes_per_s", "handshakes/s", 1),
            Column("grown_bytes_per_handshake", "B kept per handshake"),
        ),
    ),
    Section(
        "graphs",
        "A graph's fingerprint against its text, its split, and a plan for diverging graphs (beyond hashing and split)",
        measure_graphs,
        (
            Column("what", "what"),
            Column("nodes", "nodes"),
            Column("ms", "ms", 1),
            Column("ratio", "ratio", 2),
            Column("note", ""),
        ),
    ),
)


def format_table(columns: tuple[Column, ...], rows: list[Row]) -> str:
    """The rows under the columns' headings: text to the left, numbers to the right, `-` for what is missing."""
    cells = [[_format_cell(row.get(column.key), column.digits) for column in columns] for row in rows]
    lines = [[column.heading for column in columns], *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    is_text = [any(isinstance(row.get(column.key), str) for row in rows) for column in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in lines
    )


def _format_cell(value: object, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else str(value)


def _show_progress(text: str) -> None:
    """One line on the terminal, overwritten by the next; nothing where there is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _parse_ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 2,4,8") from None
    if not 2 <= ranks[0] <= ranks[-1] <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"numbers of ranks go from 2 to {MAX_RANKS}, got {text!r}")
    return ranks


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"between 0 and 3600 seconds, got {text}")
    return seconds


def _parse_json(text: str) -> Path:
    """A file that can be written: that is found out here, not after a minute of work."""
    path = Path(text)
    was_there = path.exists()
    try:
        path.open("a").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't write {text!r}: {error.strerror}") from None
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.py", description="What a handshake costs, measured on this machine.")
    parser.add_argument("--ranks", type=_parse_ranks, default=(2, 4, 8), metavar="2,4,8", help="numbers of processes")
    parser.add_argument(
        "--seconds", type=_parse_seconds, default=3.0, metavar="S", help="time to measure each number of ranks"
    )
    parser.add_argument("--json", type=_parse_json, metavar="FILE", help="write all figures there as well")
    given = parser.parse_args(arguments)
    options = Options(given.ranks, given.seconds, _show_progress)

    # The handshake is off unless it is asked for; that should_handshake() finds out is what it costs when it is on.
    os.environ["TORCH_TPU_INTERNAL_HANDSHAKE_STAGE"] = "DISPATCH_STAGE"
    has_torch = importlib.util.find_spec("torch") is not None
    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "torch": importlib.metadata.version("torch") if has_torch else None,
            "seconds": options.seconds,
        }
    }
    print(", ".join(f"{name} {value}" for name, value in report["environment"].items()))
    try:
        for section in SECTIONS:
            rows = section.measure(options)
            report[section.name] = rows
            options.progress("")
            print(f"\n{section.title}\n\n{format_table(section.columns, rows)}", flush=True)
    except BenchError as error:
        options.progress("")
        print(f"bench.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        options.progress("")
        print("bench.py: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
