# SPDX-License-Identifier: Apache-2.0
"""A whole job in one thread's time: the real clients and the real coordinator over a network and a clock that are not.

One seed draws everything: what the ranks run, the order of events, delays, pieces of any size, and faults. So one seed
is one trace. What would block (`recv`, `poll`, a pause) hands over to the scheduler, which draws what happens next:
some bytes arrive, a rank or the coordinator goes on, time passes, something breaks. Ranks and coordinator are threads
of which one runs at a time.

After every event the coordinator's answers are compared with the oracle's, and what ranks are told with these. Then the
faults stop, and every rank must come to its end within a bounded number of events.

    python tests/simulation.py 0 100000      plays these seeds, and shrinks the first that fails
    python tests/simulation.py 4711          plays one, and prints its trace
"""

import argparse
import contextlib
import errno
import logging
import random
import select
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import oracle
from layout import load

_client = load("_client")
_consensus = load("_consensus")
_coordinator = load("_coordinator")
_protocol = load("_protocol")
_rendezvous = load("_rendezvous")
_vocabulary = load("_vocabulary")

MAX_EVENTS = 20_000  # of one seed; some hundreds are the rule
MAX_LAG_S = 2.0  # what can happen happens within it
FAULTS = ("cut", "crash", "stop", "stop the coordinator", "leave", "twin", "stranger", "nonsense", "late", "come back")
OUTCOMES = {_protocol.FAT: oracle.FAT, _protocol.SPLIT: oracle.SPLIT, _protocol.TIMEOUT: oracle.TIMEOUT}
OUTCOMES[_protocol.PEER_LOST] = oracle.PEER_LOST
REFUSED = "REFUSED"
MAX_STEPS = 4  # graphs of one rank


class SimulationError(AssertionError):
    """Something that must not be was seen."""


class Killed(BaseException):
    """Ends a process in the middle of whatever it does."""


class Fiber:
    """A process: a thread that runs only while the scheduler waits for it."""

    def __init__(self, world: "World", name: str, body: Callable[[], None]) -> None:
        self.world, self.name = world, name
        self.is_ready: Callable[[], bool] = lambda: True
        self.wake_at = float("inf")
        self.stopped_until = 0.0
        self.ready_since: float | None = None
        self.done = self.killed = False
        self.error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._body = body
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.killed:
                self._body()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()

    def resume(self) -> None:
        self.world.running, before = self, self.world.running
        self._go.release()
        self._back.acquire()
        self.world.running = before
        if self.error is not None:
            raise self.error

    def block(self, is_ready: Callable[[], bool], wake_at: float) -> None:
        """Of the fiber itself: goes on once that is so, or at that time."""
        self.is_ready, self.wake_at, self.ready_since = is_ready, wake_at, None
        self._back.release()
        self._go.acquire()
        if self.killed:
            raise Killed

    def can_run(self) -> bool:
        return self.world.now >= self.stopped_until and (self.world.now >= self.wake_at or self.is_ready())

    def kill(self) -> None:
        if not self.done:
            self.killed = True
            self.resume()
        self._thread.join()


class Pipe:
    """One direction of a connection."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # of what is under way
        self.under_way = bytearray()
        self.arrived = bytearray()
        self.since = 0.0  # when the first of what is under way was sent
        self.is_ending = self.has_ended = self.is_broken = False


class Socket:
    """One end of a connection, or a listening socket."""

    def __init__(self, world: "World", incoming: Pipe | None = None, outgoing: Pipe | None = None) -> None:
        self.world, self.incoming, self.outgoing = world, incoming, outgoing
        self.descriptor = -1
        self.timeout_s: float | None = None
        self.backlog: list[Socket] = []
        self.was_cut = False
        self.owner = ""
        self.votes: dict[int, oracle.Vote] = {}  # that its rank has cast on it, by number
        self.taken: set[int] = set()  # of these, the ones that the coordinator has handled
        self.goodbye = ""
        self.saw_end = False
        self.peer: Any = None

    def fileno(self) -> int:
        return self.descriptor

    def setblocking(self, blocks: bool) -> None:
        self.timeout_s = None if blocks else 0.0

    def settimeout(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s

    def setsockopt(self, *_: Any) -> None: ...

    def detach(self) -> "Socket":
        return self

    def is_readable(self) -> bool:
        pipe = self.incoming
        return bool(self.backlog) or (pipe is not None and bool(pipe.arrived or pipe.has_ended or pipe.is_broken))

    def is_writable(self) -> bool:
        pipe = self.outgoing
        return pipe is not None and (pipe.is_broken or len(pipe.under_way) < pipe.capacity)

    def accept(self) -> tuple["Socket", tuple[str, int]]:
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, "nobody")
        return self.world.with_descriptor(self.backlog.pop(0)), ("10.0.0.1", 1)

    def recv(self, size: int) -> bytes:
        pipe = self.incoming
        assert pipe is not None
        if not self.is_readable() and self.timeout_s != 0.0:
            within_s = self.timeout_s or _client.LOOK_UP_S
            self.world.block(self.is_readable, self.world.now + within_s)
        if pipe.arrived:
            size = min(size, len(pipe.arrived))
            data = bytes(pipe.arrived[:size])
            del pipe.arrived[:size]
            return data
        if pipe.is_broken:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if pipe.has_ended:
            self.saw_end = True
            return b""
        raise TimeoutError if self.timeout_s else BlockingIOError(errno.EAGAIN, "nothing")

    def send(self, data: bytes | bytearray) -> int:
        pipe = self.outgoing
        assert pipe is not None
        if pipe.is_broken:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        size = min(len(data), pipe.capacity - len(pipe.under_way))
        if size <= 0 < len(data):
            raise BlockingIOError(errno.EAGAIN, "full")
        if not pipe.under_way:
            pipe.since = self.world.now
        pipe.under_way += data[:size]
        return size

    def sendall(self, data: bytes | bytearray) -> None:
        assert self.outgoing is not None
        self.outgoing.capacity = 2**40  # what a rank sends does not wait
        self.send(data)

    def shutdown(self, _: int = 0) -> None:
        if self.outgoing is not None:
            self.outgoing.is_ending = True
        if self.incoming is not None:
            self.incoming.has_ended = True

    def close(self) -> None:
        self.world.descriptors.pop(self.descriptor, None)
        self.descriptor = -1
        self.shutdown()

    def cut(self, draw: random.Random) -> None:
        """The connection is lost, with a part of what is under way either way."""
        for end in (self, self.peer):
            end.was_cut = True
            pipe = end.outgoing
            pipe.arrived += pipe.under_way[: draw.randint(0, len(pipe.under_way))]
            pipe.under_way.clear()
            pipe.is_broken = True


class Epoll:
    """What the coordinator waits on."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.masks: dict[int, int] = {}

    def register(self, it: Any, mask: int) -> None:
        self.masks[it if isinstance(it, int) else it.fileno()] = mask

    modify = register

    def unregister(self, it: Any) -> None:
        del self.masks[it.fileno()]

    def close(self) -> None:
        self.masks.clear()

    def ready(self) -> list[tuple[int, int]]:
        found = []
        for descriptor, mask in self.masks.items():
            sock = self.world.descriptors.get(descriptor)
            if sock is not None:
                readable = select.EPOLLIN if mask & select.EPOLLIN and sock.is_readable() else 0
                writable = select.EPOLLOUT if mask & select.EPOLLOUT and sock.is_writable() else 0
                if readable | writable:
                    found.append((descriptor, readable | writable))
        return found

    def poll(self, within_s: float) -> list[tuple[int, int]]:
        self.world.check_coordinator()
        self.world.block(lambda: bool(self.ready()), self.world.now + within_s)
        found = self.ready()
        self.world.draw.shuffle(found)
        return found[: self.world.draw.randint(1, len(found))] if found else []


class Judge:
    """Stands between the coordinator and its machine: the oracle judges each step; what goes in is what ranks did."""

    def __init__(self, world: "World", machine: Any) -> None:
        self._world, self._machine = world, machine
        self.oracle = oracle.Oracle(min(_consensus.CYCLE_GRACE_S, world.timeout_s / 2))
        self.sockets: list[tuple[Socket, int]] = []  # of each of the oracle's votes: where it came from, its number
        self.expected: dict[tuple[Socket, int], str] = {}
        self.connected: dict[int, Socket] = {}
        self.last_end: dict[tuple[int, oracle.Group], int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def cast(self, voter: Any, places: Any, digest: bytes, request: Any, now: float, partial: bool = False) -> Any:
        connection, number, _ = request
        sock = connection.sock.peer
        vote = sock.votes.get(number)
        spans = {line.ranks: span for line, span in places}
        self._world.must(
            vote is not None and (voter.ranks, digest, spans) == ((vote.rank,), vote.fingerprint.encode(), vote.spans),
            f"the coordinator takes vote {number} of {sock.owner} for {spans}, it was {vote}",
        )
        self._world.must(number not in sock.taken, f"vote {number} of {sock.owner} is taken twice")
        sock.taken.add(number)
        try:
            decisions = self._machine.cast(voter, places, digest, request, now, partial)
        except _vocabulary.HandshakeProtocolError:
            ends = [(span[0], self.last_end.get((vote.rank, group), 0)) for group, span in vote.spans.items()]
            self._world.must(any(start < end for start, end in ends), f"refused without a reason: {vote}")
            self.expected[sock, number] = REFUSED
            raise
        self.last_end.update({(vote.rank, group): span[1] for group, span in vote.spans.items()})
        self.sockets.append((sock, number))
        self._compare(decisions, self.oracle.put(vote, now, self._world.timeout_s))
        return decisions

    def expire(self, now: float) -> Any:
        decisions = self._machine.expire(now)
        self._compare(decisions, self.oracle.expire(now))
        return decisions

    def drop_rank(self, rank: int, now: float, reason: str) -> Any:
        self._world.note(f"the coordinator drops rank {rank}: {reason}")
        sock = self.connected.pop(rank)
        self._world.must(sock.was_cut or sock.goodbye in reason, f"{sock.owner} said that {sock.goodbye}")
        decisions = self._machine.drop_rank(rank, now, reason)
        self._compare(decisions, self.oracle.drop(rank))
        return decisions

    def rejoin_rank(self, rank: int) -> None:
        self._world.note(f"the coordinator lets rank {rank} in")
        self._world.must(rank not in self.connected, f"rank {rank} is let in twice")
        self.connected[rank] = self._world.server._of_rank[rank].sock.peer
        self.oracle.rejoin(rank)
        self._machine.rejoin_rank(rank)

    def _compare(self, decisions: Any, due: dict[int, str]) -> None:
        told = {(its.request[0].sock.peer, its.request[1]): its.outcome.name for its in decisions}
        self._world.must(len(told) == len(decisions), "a vote is answered twice")
        live = {self.sockets[at]: outcome for at, outcome in due.items() if self._is_there(at)}
        told = {key: outcome for key, outcome in told.items() if key in live or key not in self._of_lost()}
        said, due_now = ({f"{key[0].owner}, vote {key[1]}": its for key, its in them.items()} for them in (told, live))
        self._world.must(told == live, f"answered {said}, by the oracle {due_now}")
        for key, outcome in told.items():
            self._world.note(f"    {outcome} for {key[0].votes[key[1]]}")
        self.expected |= told

    def _is_there(self, at: int) -> bool:
        return self.oracle.votes[at].rank not in self.oracle.lost

    def _of_lost(self) -> set[tuple[Socket, int]]:
        return {key for at, key in enumerate(self.sockets) if not self._is_there(at)}


class World:
    """One seed's job."""

    def __init__(self, seed: int, without: frozenset[str] = frozenset(), max_steps: int = MAX_STEPS) -> None:
        """`without`: these faults don't happen. `max_steps`: ranks run no more graphs. Both for shrinking."""
        self.seed, self.without, self.max_steps = seed, without, max_steps
        self.draw = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.trace: list[str] = []
        self.running: Fiber | None = None
        self.descriptors: dict[int, Socket] = {}
        self.links: list[Socket] = []  # the connecting ends
        self.timeout_s = self.draw.choice([4.0, 12.0])
        self.size = self.draw.randint(2, 4)
        self.programs = self._programs()
        self.told: dict[tuple[Socket, int], str] = {}
        self.errors: dict[str, BaseException] = {}
        self.calm = self.is_over = False
        self.violation: SimulationError | None = None
        self.faults_left = self.draw.choice([0, 1, 2, 4])
        self.may_fail: set[str] = set()  # processes that something was done to
        self.leaving: set[str] = set()
        self.ranks: dict[str, Fiber] = {}
        self.lasting: list[Fiber] = []
        self.late = {rank for rank in range(self.size) if self.draw.random() < 0.1 and "late" not in without}

    # -------------------------------------------------------------- what ranks run

    def _programs(self) -> list[list[tuple[str | None, dict[oracle.Group, int]]]]:
        draw = self.draw
        everybody = tuple(range(self.size))
        pairs = [tuple(sorted(draw.sample(everybody, 2))) for _ in range(draw.randint(0, 2))]
        groups = sorted({everybody, *pairs})
        kind = draw.choice(["same", "same", "perturbed", "perturbed", "random", "shuffled"])
        steps: list[tuple[str | None, dict[oracle.Group, int]]] = []
        for number in range(draw.randint(1, 4)):
            chosen = draw.sample(groups, draw.randint(1, len(groups)))
            fingerprint = None if draw.random() < 0.1 else f"graph {number:10}"
            steps.append((fingerprint, {group: draw.randint(1, 2) for group in chosen}))
        programs = []
        for rank in everybody:
            own = [(name, {group: count for group, count in its.items() if rank in group}) for name, its in steps]
            if kind == "shuffled":
                draw.shuffle(own)
            for at in range(len(own)) if kind in ("perturbed", "random") else ():
                name, counts = own[at]
                match draw.randrange(5 if kind == "random" else 24):
                    case 0:
                        own[at] = ("another graph   ", counts)
                    case 1:
                        own[at] = (name, {})
                    case 2:
                        own[at] = (None, counts)
                    case 3:
                        own[at] = (name, {group: count + 1 for group, count in counts.items()})
            programs.append([(name, counts) for name, counts in own if counts][: self.max_steps])
        return programs

    def _run_rank(self, name: str, rank: int, first: int, positions: dict[oracle.Group, int]) -> None:
        """A rank's process. `first`: the graph with which it goes on, at these positions."""
        if rank in self.late and first == 0:
            self.pause(self.draw.uniform(0.0, 2 * self.timeout_s))
        client = _client.Client(rank, self.size)
        client.eager = {_vocabulary.ProcessGroupId(group): at for group, at in positions.items()}
        sock = self._join(name, client, rank)
        if sock is None:
            return
        under_way: list[Any] = []
        depth = self.draw.choice([1, 1, 1, 3])
        at = first
        try:
            for at in range(first, len(self.programs[rank])):
                fingerprint, counts = self.programs[rank][at]
                groups = {_vocabulary.ProcessGroupId(group): count for group, count in counts.items()}
                spans = {group: (positions.get(group, 0), positions.get(group, 0) + n) for group, n in counts.items()}
                positions.update({group: span[1] for group, span in spans.items()})
                if name in self.leaving:
                    break
                if fingerprint is None:
                    for group, count in groups.items():
                        client.record_eager(group, count)
                    continue
                vote = oracle.Vote(rank, fingerprint, spans)
                self.note(f"{name}: {vote}")
                sock.votes[client._number + 1] = vote
                under_way.append(client.vote(client.resolve(groups), fingerprint.encode(), 0))
                while len(under_way) >= depth:
                    self._wait(name, client, sock, under_way.pop(0))
                if self.draw.random() < 0.3:
                    self.pause(self.draw.choice([0.0, 0.1, 1.0, 3.0]))
            for pending in under_way:
                self._wait(name, client, sock, pending)
            self.block(lambda: self.is_over or name in self.leaving, float("inf"))
            sock.goodbye = f"rank {rank} closed its handshake"
            client.close("done")
        except _vocabulary.HandshakeError as error:
            self._failed(name, error)
            client.close("failed")
            if self._happens("come back", 0.5):
                self.may_fail.add(f"{name}+")
                self.note(f"{name} comes back")
                if self.draw.random() < 0.5:  # a new process, which knows nothing
                    self._start(f"{name}+", rank, 0, {})
                else:
                    self._start(f"{name}+", rank, at + 1, positions)

    def _wait(self, name: str, client: Any, sock: Socket, pending: Any) -> None:
        client.wait(pending, pending.sent_at + self.timeout_s + _client.COORDINATOR_GRACE_S)
        outcome = REFUSED if pending.outcome == _protocol.VOTE_REFUSED else OUTCOMES[pending.outcome]
        key = sock, pending.number
        self.note(f"{name} is told {outcome} for {sock.votes[pending.number]}")
        self.must(key not in self.told, f"{name} is told twice")
        self.told[key] = outcome
        expected = self.judge.expected.get(key)
        self.must(outcome == expected, f"{name} is told {outcome}, and was answered {expected}")
        self._check_safety()

    def _check_safety(self) -> None:
        votes = {key: vote for sock in self.links for key, vote in (((sock, n), its) for n, its in sock.votes.items())}
        for key, vote in votes.items():
            if self.told.get(key) != oracle.FAT:
                continue
            for group, span in vote.spans.items():
                for member in group:
                    same = [
                        other
                        for other in votes.values()
                        if other.rank == member
                        and other.spans.get(group) == span
                        and other.fingerprint == vote.fingerprint
                    ]
                    self.must(bool(same), f"{vote} is FAT, and rank {member} has no such vote")
            for other_key, other in votes.items():
                told = self.told.get(other_key)
                if oracle.linked(vote, other) and told is not None:
                    self.must(told in (oracle.FAT, REFUSED), f"{vote} is FAT, and {other} was told {told}")

    def _join(self, name: str, client: Any, rank: int) -> Socket | None:
        facts = {"rank": rank, "world_size": self.size, "coordinator_rank": 0, "host": "host", "pid": name}
        facts["timeout_s"] = self.timeout_s
        endpoint = _rendezvous.Endpoint(("coordinator",), 1, "secret", "session")
        until = self.now + 30.0
        while self.now < until:
            sock = Socket(self)
            sock.owner = name
            try:
                self.connect(sock)
                client.join(sock, endpoint, facts)
                return sock
            except OSError as error:
                self.note(f"{name} can't connect: {error}")
                self.must(sock.was_cut or name in self.may_fail, f"{name} can't connect: {error}")
                sock.close()
            except _vocabulary.HandshakeError as error:
                self._failed(name, error)
                sock.close()
                return None
            self.pause(0.5)
        return None

    def _failed(self, name: str, error: BaseException) -> None:
        self.note(f"{name} fails: {error}")
        self.errors[name] = error
        self.must(name in self.may_fail, f"{name} fails, and nothing was done to it: {error}")

    def _run_stranger(self, name: str) -> None:
        sock = Socket(self)
        sock.owner = name
        self.connect(sock)
        with contextlib.suppress(OSError):
            for _ in range(self.draw.randint(0, 3)):
                sock.send(self.draw.randbytes(self.draw.randint(1, 40)))
                self.pause(self.draw.choice([0.0, 1.0, 6.0]))
        sock.close()

    def _run_twin(self, name: str, rank: int) -> None:
        client = _client.Client(rank, self.size)
        sock = self._join(name, client, rank)
        if sock is not None:  # it was there first; the rank itself is refused, or comes later
            sock.goodbye = f"rank {rank} closed its handshake"
            client.close("done")

    # -------------------------------------------------------------- what fibers call

    def block(self, is_ready: Callable[[], bool], wake_at: float) -> None:
        assert self.running is not None
        self.running.block(is_ready, wake_at)

    def pause(self, seconds: float) -> None:
        self.block(lambda: False, self.now + seconds)

    def with_descriptor(self, sock: Socket) -> Socket:
        sock.descriptor = next(number for number in range(3, 10_000) if number not in self.descriptors)
        self.descriptors[sock.descriptor] = sock
        return sock

    def connect(self, sock: Socket) -> None:
        up, down = Pipe(2**40), Pipe(self.draw.choice([2**40, 2**40, 50, 200]))
        sock.incoming, sock.outgoing = down, up
        sock.peer = Socket(self, up, down)
        sock.peer.peer, sock.peer.owner = sock, sock.owner
        self.links.append(sock)
        self.listener.backlog.append(sock.peer)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:8.3f} {text}")

    def must(self, holds: bool, text: str) -> None:
        if not holds:
            self.violation = self.violation or SimulationError(text)  # what runs may catch it
            raise self.violation

    def check_coordinator(self) -> None:
        """What holds whenever the coordinator has done its turn."""
        if not self.ranks:
            return
        there = {connection.sock for connection in self.server._connections.values()}
        for link in self.links:
            ours = link.peer
            if ours.saw_end and not ours.was_cut and link.owner in self.ranks and ours.descriptor == -1:
                self.must(link.votes.keys() == link.taken, f"votes of {link.owner} were lost before its end")
            self.must(not (ours.saw_end and ours in there), f"{link.owner} is gone, and kept")
        inside = {one.voter.ranks[0] for one in self.server._connections.values() if one.voter is not None}
        known = set(self.judge.connected)
        self.must(inside == known, f"ranks {inside} are connected, and the machine knows of {known}")

    # -------------------------------------------------------------- the scheduler

    def _start(self, name: str, rank: int, first: int, positions: dict[oracle.Group, int]) -> None:
        self.ranks[name] = Fiber(self, name, lambda: self._run_rank(name, rank, first, positions))

    def _happens(self, fault: str, chance: float) -> bool:
        return not self.calm and fault not in self.without and self.draw.random() < chance

    def play(self) -> list[str]:
        """Plays it, and returns the trace. Raises SimulationError."""
        with self._coordinated() as control:
            self.judge = self.server._consensus = Judge(self, self.server._consensus)
            try:
                for rank in range(self.size):
                    self._start(f"rank {rank}", rank, 0, {})
                self._until(lambda: self.faults_left == 0 or self.events > 400)
                self.calm = True
                self.note("the faults stop")
                self._until(lambda: all(its.done or self._stays(its) for its in self.ranks.values()))
                self._check_all_told()
                self.is_over = True
                self._until(lambda: all(fiber.done for fiber in [*self.ranks.values(), *self.lasting]))
                control.has_ended = True
                self._until(lambda: self.coordinator.done)
            except SimulationError as error:
                raise SimulationError("\n".join([str(error), *self.trace[-200:], self.replay()])) from None
        return self.trace

    @contextlib.contextmanager
    def _coordinated(self) -> Iterator[Pipe]:
        """With a coordinator; gives what ends it."""
        control = Pipe(1)
        self.listener = self.with_descriptor(Socket(self))
        facts = {"rank": 0, "world_size": self.size, "timeout_s": self.timeout_s, "host": "host", "pid": "rank 0"}
        config = _coordinator.Config({**facts, "session": "session"}, "secret", "")
        with self._patched():
            controlled = self.with_descriptor(Socket(self, control, Pipe(1)))
            self.server = _coordinator.Server(self.listener, controlled, config, None)
            self.coordinator = Fiber(self, "coordinator", self.server.run)
            try:
                yield control
            finally:
                self.calm = True
                for fiber in self._fibers():
                    fiber.error = None
                    with contextlib.suppress(BaseException):
                        fiber.kill()

    def hear(self, said: Sequence[bytes]) -> None:
        """The coordinator hears these frames from a stranger, then from a rank; then another rank must be let in."""

        def say(rank: int | None) -> None:
            sock: Any = Socket(self)
            if rank is None:
                self.connect(sock)
            else:
                sock = self._join(f"rank {rank}", _client.Client(rank, self.size), rank)
            with contextlib.suppress(OSError):
                for data in said:
                    sock.send(data)
                    self.pause(0.01)

        self.faults_left = 0
        with self._coordinated():
            for rank in (None, 0, 1):
                self.lasting.append(Fiber(self, f"rank {rank}", lambda rank=rank: say(rank)))  # type: ignore[misc]
                self._until(lambda: all(fiber.done for fiber in self.lasting))
            self.must(set(self.server._of_rank) >= {1} or bool(said), "nobody is in")

    def replay(self) -> str:
        without = "".join(f" --without {fault!r}" for fault in sorted(self.without))
        steps = "" if self.max_steps == MAX_STEPS else f" --steps {self.max_steps}"
        return f"python tests/simulation.py {self.seed}{without}{steps}"

    def _stays(self, fiber: Fiber) -> bool:
        return fiber.wake_at == float("inf") and fiber.name not in self.errors

    def _check_all_told(self) -> None:
        for link in self.links:
            if link.owner in self.ranks and self._stays(self.ranks[link.owner]) and not self.ranks[link.owner].done:
                for number, vote in link.votes.items():
                    if not link.was_cut:
                        self.must((link, number) in self.told, f"nobody has answered: {vote}")

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.events += 1
            self.must(self.events < MAX_EVENTS, "it does not come to an end")
            self._step()
            if self.violation is not None:
                raise self.violation
            self.must(self.is_over or not self.coordinator.done, "the coordinator has ended by itself")

    def _step(self) -> None:
        draw = self.draw
        if self.faults_left and draw.random() < 0.03:
            self.faults_left -= 1
            self._break()
        pipes = [pipe for link in self.links for pipe in (link.incoming, link.outgoing) if pipe is not None]
        pipes = [pipe for pipe in pipes if pipe.under_way or (pipe.is_ending and not pipe.has_ended)]
        fibers = [fiber for fiber in self._fibers() if not fiber.done]
        ready = [fiber for fiber in fibers if fiber.can_run()]
        for fiber in ready:
            fiber.ready_since = self.now if fiber.ready_since is None else fiber.ready_since
        choices: list[Any] = [*pipes, *ready]
        latest = min([*(pipe.since for pipe in pipes), *(its.ready_since or 0.0 for its in ready)], default=None)
        wakes = [at for its in fibers for at in (its.wake_at, its.stopped_until) if self.now < at < float("inf")]
        self.must(bool(choices or wakes), "nobody can go on")
        if latest is None or (wakes and draw.random() < 0.1 and self.now < latest + MAX_LAG_S):
            to = min(wakes)
            self.now = to if latest is None else min(to, self.now + draw.choice([0.001, 0.01, 0.2]))
            return
        chosen = draw.choice(choices)
        if isinstance(chosen, Fiber):
            chosen.resume()
        elif chosen.under_way:
            size = min(len(chosen.under_way), draw.choice([1, 3, 10, 50, 2**40, 2**40, 2**40]))
            chosen.arrived += chosen.under_way[:size]
            del chosen.under_way[:size]
            chosen.since = self.now
        else:
            chosen.has_ended = True

    def _fibers(self) -> Iterator[Fiber]:
        yield self.coordinator
        yield from self.ranks.values()
        yield from self.lasting

    def _break(self) -> None:
        draw = self.draw
        fault = draw.choice(FAULTS[:8])
        names = [name for name, fiber in self.ranks.items() if not fiber.done]
        if fault in self.without or not names:
            return
        name = draw.choice(names)
        fiber = self.ranks[name]
        links = [link for link in self.links if link.owner == name and link.incoming is not None]
        self.note(f"fault: {fault}, {name}")
        if fault == "stop the coordinator":
            self.coordinator.stopped_until = self.now + draw.choice([0.5, 3.0, 9.0, 30.0])
            self.may_fail.update(self.ranks)  # they may give it up
        elif fault == "stop":
            fiber.stopped_until = self.now + draw.choice([0.5, 3.0, 9.0])
            self.may_fail.add(name)
        elif fault == "leave":
            self.leaving.add(name)
        elif fault == "stranger":
            self.lasting.append(Fiber(self, "stranger", lambda: self._run_stranger("stranger")))
        elif fault == "twin":
            rank = int(name.split()[1].rstrip("+"))
            twin = f"twin of {name}"
            self.may_fail.update((twin, name))
            self.lasting.append(Fiber(self, twin, lambda: self._run_twin(twin, rank)))
        elif links:
            self.may_fail.add(name)
            if fault == "cut":
                links[-1].cut(draw)
            elif fault == "nonsense":
                with contextlib.suppress(OSError):
                    links[-1].send(b"\xff" * draw.randint(5, 60))
                    links[-1].was_cut = links[-1].peer.was_cut = True
            elif fault == "crash":
                fiber.kill()
                for link in links:
                    link.was_cut = link.peer.was_cut = True
                    link.close()

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.pause)
        sockets = types.SimpleNamespace(**vars(socket))
        sockets.socket = lambda *_, fileno: fileno
        epoll = types.SimpleNamespace(epoll=lambda: Epoll(self), EPOLLIN=select.EPOLLIN, EPOLLOUT=select.EPOLLOUT)
        patches = [(_client, "time", clock), (_client, "socket", sockets)]
        patches += [(_coordinator, "time", clock), (_coordinator, "select", epoll)]
        before = [(module, name, getattr(module, name)) for module, name, _ in patches]
        log = logging.getLogger("torch_tpu.handshake")
        disabled, log.disabled = log.disabled, True
        for module, name, value in patches:
            setattr(module, name, value)
        try:
            yield
        finally:
            log.disabled = disabled
            for module, name, value in before:
                setattr(module, name, value)


def failure(seed: int, **how: Any) -> SimulationError | None:
    try:
        World(seed, **how).play()
    except SimulationError as error:
        return error
    return None


def shrunk(seed: int) -> SimulationError:
    """How a failing seed fails with as few kinds of faults, and as few graphs, as it takes."""
    error = failure(seed)
    assert error is not None
    without: frozenset[str] = frozenset()
    for fault in FAULTS:
        if (other := failure(seed, without=without | {fault})) is not None:
            without, error = without | {fault}, other
    for steps in range(MAX_STEPS - 1, 0, -1):
        if (other := failure(seed, without=without, max_steps=steps)) is not None:
            error = other
    return error


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="plays seeds of the simulation")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?", help="plays the seeds before this one; without it one is played")
    parser.add_argument("--without", action="append", default=[], choices=FAULTS, help="faults that don't happen")
    parser.add_argument("--steps", type=int, default=MAX_STEPS, help="ranks run no more graphs")
    given = parser.parse_args(arguments)
    if given.last is None:
        print(*World(given.first, frozenset(given.without), given.steps).play(), sep="\n")
        return
    began = time.monotonic()
    for seed in range(given.first, given.last):
        if failure(seed) is not None:
            sys.exit(str(shrunk(seed)))
    print(f"{given.last - given.first} seeds in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
