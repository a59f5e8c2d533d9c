# SPDX-License-Identifier: Apache-2.0
"""What a handshake costs, beside a bare star of the same messages, measured in the same run.

    python bench.py                      about a minute; needs nothing but Python
    python bench.py --ranks 4 --rounds 1

Real ranks, each a process on this machine, talk to a real coordinator, in a process of its own. The star is the floor:
a server that waits until all have sent a message of a vote's size, and answers each with one of a verdict's. Machines
are shared and noisy, so the figures that count are the ratios: star and handshakes take turns, and the best of several
rounds stands for each. With torch installed it also times what a compiler does around a vote.
"""

import argparse
import json
import math
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any

import _client
import _protocol
import _rendezvous
import handshake

# Of the votes of one run, the first tenth is warm-up and does not count.
VOTES = 1500
ROUNDS = 3
RANKS = (2, 4, 8)
# Simulated ranks, and how many votes of all of them together one run takes.
SIMULATED = (64, 256, 1024, 4096)
SIMULATED_VOTES = 20_000
# Nothing here takes so long, unless it hangs.
PATIENCE_S = 60.0
# Files that a process needs beside its connections.
SPARE_FILES = 64
GRAPH_LAYERS = 500

KINDS = {
    "gate": "DispatchGate.vote(), one group",
    "gate2": "DispatchGate.vote(), two groups",
    "submit": "Handshake.submit(), one group",
    "observe": "DispatchGate.vote(), one group, observing",
}
FINGERPRINT = "0123456789abcdef0123456789abcdef"
VOTE_BYTES = len(_protocol.encode_vote(0, 0, bytes(16), (0, 0, 1)))
VERDICT_BYTES = len(_protocol.encode_verdict(0, _protocol.FAT))


def groups_of(rank: int, world_size: int, kind: str) -> dict[handshake.ProcessGroupId, int]:
    """The groups of a rank's graph, with one collective on each: the world, or a row of two and the world."""
    first = rank - rank % 2
    row = range(first, min(first + 2, world_size))
    groups = [row, range(world_size)] if kind == "gate2" else [range(world_size)]
    return {handshake.ProcessGroupId(ranks): 1 for ranks in groups}


# ---------------------------------------------------------------------- one process of a run


def run_rank(kind: str, rank: int, world_size: int, port: int, votes: int) -> None:
    """A rank: prints the coordinator's port if it is rank 0, then what it measured; ends when its stdin does."""
    options = {"world_size": world_size, "port": port, "stage": "DISPATCH_STAGE"}
    mine = handshake.Handshake(rank, mode="observe" if kind == "observe" else "enforce", **options)  # type: ignore[arg-type]
    while rank == 0 and mine._session._coordinator is None:  # one that observes starts it in the background
        time.sleep(0.001)
    coordinator = 0
    if mine.address is not None:
        print(mine.address[1], flush=True)
        coordinator = mine._session._coordinator.pid or 0  # type: ignore[union-attr]
    groups = groups_of(rank, world_size, kind)
    gate = handshake.DispatchGate(FINGERPRINT, groups)

    def request(number: int) -> handshake.CollectiveHandshakeRequest:
        counts = {group: handshake.ProcessGroupCollectiveCount(number, 1) for group in groups}
        return handshake.CollectiveHandshakeRequest(handshake.RankCollectiveCounts(counts), FINGERPRINT, rank)

    seconds = []
    cpu_before = 0.0
    for number in range(votes):
        vote = request(number) if kind == "submit" else None
        if number == votes // 10:
            cpu_before = cpu_seconds(coordinator)
        started = time.perf_counter()
        agreed = gate.vote() if vote is None else mine.submit(vote)
        seconds.append(time.perf_counter() - started)
        if not agreed:
            raise RuntimeError(f"vote {number} of rank {rank} was split")
        if kind == "observe" and number % 500 == 0:  # it is not to run ahead without end
            wait_until_counted(mine, number)
    wait_until_counted(mine, votes)
    measured = len(seconds) - votes // 10
    cpu = (cpu_seconds(coordinator) - cpu_before) / measured / world_size if coordinator else None
    print(json.dumps({"seconds": seconds[-measured:], "cpu": cpu}), flush=True)
    sys.stdin.read()


def wait_until_counted(mine: handshake.Handshake, votes: int) -> None:
    """Until so many votes have their verdicts; what nobody waits for comes later."""
    until = time.monotonic() + PATIENCE_S
    while mine.stats()["handshakes"] < votes and time.monotonic() < until:
        time.sleep(0.001)


def run_star_rank(rank: int, world_size: int, port: int, votes: int) -> None:
    """A rank of the star."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    message = bytes(VOTE_BYTES)
    seconds = []
    for _ in range(votes):
        started = time.perf_counter()
        sock.send(message)
        sock.recv(64)
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"seconds": seconds[votes // 10 :], "cpu": None}), flush=True)
    sys.stdin.read()


def run_star_server(world_size: int, votes: int) -> None:
    """The star's server: prints its port, then its own CPU time for one message."""
    with socket.create_server(("127.0.0.1", 0), backlog=world_size) as listener:
        print(listener.getsockname()[1], flush=True)
        peers = {}
        epoll = select.epoll()
        for _ in range(world_size):
            sock, _address = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peers[sock.fileno()] = sock
            epoll.register(sock, select.EPOLLIN)
    answer = bytes(VERDICT_BYTES)
    here = done = 0
    cpu_before = 0.0
    while done < votes:
        for descriptor, _mask in epoll.poll():
            if not peers[descriptor].recv(64):
                return
            here += 1
            if here == world_size:
                here = 0
                done += 1
                for sock in peers.values():
                    sock.send(answer)
                if done == votes // 10:
                    cpu_before = cpu_seconds(os.getpid())
    cpu = (cpu_seconds(os.getpid()) - cpu_before) / (votes - votes // 10) / world_size
    print(json.dumps({"seconds": [], "cpu": cpu}), flush=True)
    sys.stdin.read()


def cpu_seconds(process: int) -> float:
    """The CPU time that a process has taken, in seconds, to the nanosecond (Linux, proc(5): schedstat)."""
    if not process:
        return 0.0
    with open(f"/proc/{process}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


# ---------------------------------------------------------------------- a run of real ranks


class Process:
    """This file once more, as one process of a run."""

    def __init__(self, role: str, *arguments: Any) -> None:
        command = [sys.executable, os.path.abspath(__file__), "--role", json.dumps([role, *arguments])]
        environment = {name: value for name, value in os.environ.items() if "HANDSHAKE" not in name}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def line(self) -> Any:
        """The next line that it prints, as JSON."""
        out: IO[str] = self._process.stdout  # type: ignore[assignment]
        ready, _, _ = select.select([out], [], [], PATIENCE_S)
        text = out.readline() if ready else ""
        if not text:
            raise SystemExit("bench.py: a process of it ended, or hangs; its own output is above")
        return json.loads(text)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(PATIENCE_S if exception[0] is None else 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(kind: str, world_size: int, votes: int) -> tuple[float, float]:
    """One run: the median of one handshake over all ranks, and the server's CPU time for a vote, in seconds."""
    with ExitStack() as stack:
        if kind == "star":
            first = stack.enter_context(Process("star_server", world_size, votes))
            port = first.line()
            others = [Process("star_rank", rank, world_size, port, votes) for rank in range(world_size)]
        else:
            first = stack.enter_context(Process("rank", kind, 0, world_size, 0, votes))
            port = first.line()
            others = [Process("rank", kind, rank, world_size, port, votes) for rank in range(1, world_size)]
        for other in others:
            stack.enter_context(other)
        measured = [process.line() for process in (*others, first)]
    seconds = [second for line in measured for second in line["seconds"]]
    return statistics.median(seconds), next(line["cpu"] for line in measured if line["cpu"] is not None)


def dispatches(ranks: Sequence[int], rounds: int, votes: int) -> Iterator[list[str]]:
    """The rows of the table of what a dispatch pays."""
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for world_size in ranks:
        # In a world of two, the row is the world.
        kinds = [kind for kind in KINDS if kind != "gate2" or world_size > 2]
        best = dict.fromkeys(("star", *kinds), (math.inf, math.inf))
        for _ in range(rounds):
            for kind in best:
                seconds, cpu = measure(kind, world_size, votes)
                best[kind] = min(best[kind][0], seconds), min(best[kind][1], cpu)
        star_s, star_cpu = best["star"]
        for kind in kinds:
            seconds, cpu = best[kind]
            ratios[kind].append(seconds / star_s)
            figures = [microseconds(seconds), microseconds(star_s), f"{seconds / star_s:.2f}"]
            yield [KINDS[kind], str(world_size), *figures, f"{(cpu - star_cpu) * 1e6:.1f}"]
    for kind, name in KINDS.items():
        if ratios[kind]:
            yield [name, "all", "", "", f"{statistics.geometric_mean(ratios[kind]):.2f}", ""]


# ---------------------------------------------------------------------- simulated ranks


def simulated_cpu(world_size: int, two_groups: bool) -> float:
    """The coordinator's own CPU time for a vote, in seconds, with all the ranks' connections in this process."""
    settings = {"current_rank": 0, "world_size": world_size, "port": 0}
    session = handshake._Session(_rendezvous.Settings.resolve(settings))
    endpoint, pid = session.endpoint, session._coordinator.pid if session._coordinator else None
    if endpoint is None or pid is None:
        raise SystemExit("bench.py: the coordinator could not be started as a process")
    side = math.isqrt(world_size)
    groups = [handshake.ProcessGroupId(range(world_size))]
    if two_groups:
        groups = [handshake.ProcessGroupId(range(row * side, row * side + side)) for row in range(side)]
        groups += [handshake.ProcessGroupId(range(column, world_size, side)) for column in range(side)]
    clients = []
    try:
        for rank in range(world_size):
            client = _client.Client(rank, world_size)
            deadline = _rendezvous.Deadline(PATIENCE_S)
            _client.connect(client, lambda: endpoint, {**session.facts(), "rank": rank}, deadline)
            mine = [groups[rank // side], groups[side + rank % side]] if two_groups else groups
            clients.append((client, client.resolve(dict.fromkeys(mine, 1))))
        steps = max(2, SIMULATED_VOTES // world_size)
        cpu_before = 0.0
        for step in range(steps + 1):
            pending = [client.vote(takes, bytes(16), 0) for client, takes in clients]
            for (client, _), vote in zip(clients, pending, strict=True):
                client.wait(vote, vote.sent_at + PATIENCE_S)
            if step == 0:
                cpu_before = cpu_seconds(pid)
        return (cpu_seconds(pid) - cpu_before) / steps / world_size
    finally:
        for client, _ in clients:
            client.close("done")
        session.close()


def simulated_star_cpu(world_size: int) -> float:
    """The same of the star's server."""
    steps = max(10, SIMULATED_VOTES // world_size)
    with Process("star_server", world_size, steps) as server, ExitStack() as stack:
        port = server.line()
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(world_size)]
        for _ in range(steps):
            for sock in socks:
                sock.send(bytes(VOTE_BYTES))
            for sock in socks:
                sock.recv(64)
        return float(server.line()["cpu"])


def simulations(sizes: Sequence[int], rounds: int) -> Iterator[list[str]]:
    """The rows of the table of the coordinator's CPU time."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for world_size in sizes:
        if hard != resource.RLIM_INFINITY and hard < world_size + SPARE_FILES:
            yield [str(world_size), f"left out: at most {hard} files can be open (ulimit -n)", "", "", ""]
            continue
        star = min(simulated_star_cpu(world_size) for _ in range(rounds))
        one = min(simulated_cpu(world_size, two_groups=False) for _ in range(rounds)) - star
        two = min(simulated_cpu(world_size, two_groups=True) for _ in range(rounds)) - star
        figures = [microseconds(second, 1) for second in (star, one, two)]
        yield [str(world_size), *figures, f"{two / one:.2f}"]


# ---------------------------------------------------------------------- other figures


def best_of(call: Callable[[], object], times: int, rounds: int = 5) -> float:
    """What one call takes at best, in seconds."""
    best = math.inf
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(times):
            call()
        best = min(best, (time.perf_counter() - started) / times)
    return best


def small_figures() -> Iterator[list[str]]:
    """What a rank of a large world pays, and the wire."""
    world = handshake.ProcessGroupId(range(4096))
    os.environ["TORCH_TPU_INTERNAL_HANDSHAKE_STAGE"] = "DISPATCH_STAGE"
    asked = best_of(lambda: handshake.should_handshake({world: 1}), 10_000)
    yield ["should_handshake(), 4,096 ranks", microseconds(asked, 2)]
    here, there = socket.socketpair()
    client = _client.Client(0, len(world))
    client._sock = here
    takes = client.resolve({world: 1})

    def vote() -> None:
        client.vote(takes, bytes(16), 0)
        there.recv(65536)
        client._votes.clear()

    there.setblocking(True)
    yield ["a vote counted, encoded, sent and received, 4,096 ranks", microseconds(best_of(vote, 2_000), 2)]
    here.close()
    there.close()
    program = "import time; t = time.perf_counter(); import handshake; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", program]
    folder = os.path.dirname(os.path.abspath(__file__))
    imports = [float(subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout) for _ in range(3)]
    yield ["import handshake, in a fresh interpreter", f"{min(imports) * 1e3:.0f} ms"]
    sizes = [len(_protocol.encode_vote(0, 0, bytes(16), (0, 0, 1) * groups)) for groups in (1, 2, 8)]
    yield ["bytes of a vote on 1, 2, 8 groups, whatever the world", ", ".join(map(str, sizes))]
    yield ["bytes of a verdict that is fat", str(VERDICT_BYTES)]


def graph_figures() -> Iterator[list[str]]:
    """What a compiler does around a vote, on one large graph, in milliseconds."""
    import torch

    import _graph
    import _graph_plan

    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = torch.empty(8, 8)
    for layer in range(GRAPH_LAYERS):
        for _ in range(18):
            value = graph.call_function(torch.ops.aten.add.Tensor, (value, float(layer)))
            value.meta["val"] = torch.empty(8, 8)
    graph.output((value,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    nodes = len(graph.nodes)
    for name, call in (
        ("fingerprint", lambda: _graph.graph_fingerprint(module)),
        ("record for a report", lambda: _graph.graph_record(module)),
        ("torch's own print_readable()", lambda: module.print_readable(print_output=False)),
        ("keys for a plan", lambda: _graph_plan.OwnGraph(module)),
    ):
        yield [f"{name}, {nodes:,} nodes", f"{best_of(call, 1, 3) * 1e3:.0f} ms"]


def microseconds(seconds: float, digits: int = 0) -> str:
    """As it is printed."""
    return f"{seconds * 1e6:.{digits}f} µs"


def show(title: str, head: Sequence[str], rows: Iterator[list[str]]) -> None:
    """Prints a table: the first column to the left, the others to the right."""
    table = [list(head), *rows]
    widths = [max(len(row[place]) for row in table if place < len(row)) for place in range(len(head))]
    print(f"\n{title}\n")
    for row in table:
        cells = [cell.ljust(widths[0]) if place == 0 else cell.rjust(widths[place]) for place, cell in enumerate(row)]
        print("  " + "  ".join(cells).rstrip())
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a handshake costs, beside a bare star of the same messages.")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of real ranks")
    parser.add_argument("--simulated", type=int, nargs="*", default=list(SIMULATED), help="numbers of simulated ranks")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="the best of so many stands for each figure")
    parser.add_argument("--votes", type=int, default=VOTES, help="votes of a rank in one run")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        role, *rest = json.loads(arguments.role)
        roles: dict[str, Any] = {"rank": run_rank, "star_rank": run_star_rank, "star_server": run_star_server}
        roles[role](*rest)
        return
    if min(arguments.ranks) < 2:
        parser.error("argument --ranks: a world of one rank has nothing to agree on")
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, all ranks on this machine")
    show(
        "What a dispatch pays: median of one handshake, best of the rounds; the coordinator's CPU beyond the star's",
        ["call", "ranks", "handshake", "star", "ratio", "CPU µs a vote"],
        dispatches(arguments.ranks, arguments.rounds, arguments.votes),
    )
    if arguments.simulated:
        show(
            "The coordinator's own CPU for a vote, simulated ranks: the star's, and what a vote takes beyond it",
            ["ranks", "star", "one group", "two (a mesh)", "two/one"],
            simulations(arguments.simulated, max(1, arguments.rounds - 1)),
        )
    show("Other figures", ["what", "cost"], small_figures())
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        print("\nWithout torch, nothing is said of graphs.")
    else:
        show("Graphs", ["what", "cost"], graph_figures())


if __name__ == "__main__":
    main()
