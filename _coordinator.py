# SPDX-License-Identifier: Apache-2.0
"""The coordinator: connections, the machine of `_consensus`, and timers, in one loop on epoll.

It runs in a child process of the coordinator rank: a thread beside a busy Python main thread waits up to 5 ms for the
interpreter lock at every message. The child is started isolated, and loads these files by path, since their folder may
hold a stranger's `multiprocessing.py`. Where no child can be started the same `Server` runs in a thread.

It ends when its control channel is closed or its parent dies. A byte on that channel says that its rank has left
regularly: it ends once no other rank needs it. What the rank's log must still be told comes back on the channel.

What follows a split is done by *extras*, in files that may be absent: `_graph_plan.Rounds`, loaded when a plan is first
wanted, and `_graph_report.Reports`, loaded if there is a debug folder. `Reply` says all that the core knows of them.
"""

import contextlib
import errno
import fcntl
import hmac
import importlib.util
import json
import logging
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

if __package__:
    from . import _protocol
    from ._consensus import Decision, Line, Outcome, Program, _CollectiveHandshakeConsensus
    from ._vocabulary import HandshakeError, HandshakeProtocolError, as_process_group_id, format_ranks, shorten
else:
    import _protocol
    from _consensus import Decision, Line, Outcome, Program, _CollectiveHandshakeConsensus
    from _vocabulary import HandshakeError, HandshakeProtocolError, as_process_group_id, format_ranks, shorten

logger = logging.getLogger("torch_tpu.handshake")

HELLO_WITHIN_S = 10.0  # a connection that has not said who it is by then is closed
# Beside the world's ranks, which may come at once. Then the oldest makes room; if it is a rank, it tries again.
MAX_STRANGERS = 64
ACCEPTS_A_TURN = 16  # of the loop: whoever connects without end must not stop the votes
MAX_UNSENT_BYTES = 2 * _protocol.MAX_PAYLOAD_BYTES  # to one rank, which is dropped then: it reads nothing
READ_BYTES = 4096  # one read; a vote on one group is 42
# How often it looks whether the parent lives (it may die while a process that it forked holds the control channel),
# whether strangers are overdue, and, after running out of descriptors, whether connections can be accepted again.
LOOK_UP_S = 0.5
CLOSE_WITHIN_S = 1.0  # for the last bytes (goodbyes), to all ranks together
TELL_AFTER_S = 1.0  # when its rank has left, and others are still there
GRAPHS_WITHIN_S = 2.0  # for reports, when its rank has failed
MAX_PROGRAMS = 1024  # whose names and collectives are kept, the last ones; of others messages show the digest
MAX_MESSAGES = 256  # for the coordinator rank's log, each once; strangers can cause some
# What all ranks must have the same of, and what to do where one has not.
FACTS_THAT_MUST_AGREE = {
    "world_size": "Start all ranks with the same world size",
    "session": (
        "It is made of the user, TORCHELASTIC_RUN_ID, MASTER_PORT and the scheduler's job id: these differ within the "
        "job, or another job's coordinator has this port; give each job a TORCH_TPU_INTERNAL_HANDSHAKE_PORT of its own"
    ),
    "stage": "Set TORCH_TPU_INTERNAL_HANDSHAKE_STAGE to the same on all ranks",
    "groups": "Set TORCH_TPU_INTERNAL_HANDSHAKE_GROUPS to the same on all ranks",
    "mode": "Set TORCH_TPU_INTERNAL_HANDSHAKE_MODE to the same on all ranks",
    "on_timeout": "Set TORCH_TPU_INTERNAL_HANDSHAKE_ON_TIMEOUT to the same on all ranks",
    **dict.fromkeys(("torch", "torch_tpu"), "Install the same version on all ranks"),
}

_BOOTSTRAP = (
    "import sys, types, importlib;"
    "package = types.ModuleType('torch_tpu_handshake');"
    "package.__path__ = [sys.argv[1]];"
    "sys.modules[package.__name__] = package;"
    "sys.exit(importlib.import_module(package.__name__ + '.' + sys.argv[2]).main(sys.argv[3:]))"
)
_EXTRA_FILES = {_protocol.PLANS: ("_graph_plan", "plans"), _protocol.REPORTS: ("_graph_report", "reports")}


def find_extra(name: str) -> Any:
    """The module of that name beside this one, or None."""
    qualified = f"{__package__}.{name}" if __package__ else name
    return None if importlib.util.find_spec(qualified) is None else importlib.import_module(qualified)


class Config(NamedTuple):
    """What a coordinator must know. All of it can be written as JSON."""

    facts: dict[str, Any]  # the coordinator rank's own hello, against which others are compared
    secret: str
    debug: str  # the folder for reports, or empty


class Settled(NamedTuple):
    """A vote that was answered, as extras see it."""

    rank: int
    number: int  # the rank's own number of the vote; they rise
    flags: int
    digest: bytes
    spans: list[tuple[Line, int, int]]
    outcome: Outcome
    reason: str
    has_graph: bool

    @classmethod
    def of(cls, decision: Decision) -> "Settled":
        _, number, flags = decision.request
        digest: Any = decision.fingerprint
        spans = [(line, *span) for line, span in decision.places]
        has_graph = flags & _protocol.HAS_GRAPH != 0
        return cls(decision.rank, number, flags, digest, spans, decision.outcome, decision.reason, has_graph)


# What an extra wants a rank to be sent: rank, number of the vote that it is about, step, payload. At step LOG the
# payload is a text for the rank's log. An extra has these methods, of which all but `next_deadline` return replies:
#     settled(votes, now)     votes that were answered together; what it returns goes ahead of their verdicts
#     take(rank, number, step, payload, now), drop_rank(rank, now)      a frame of a rank; a rank is gone
#     tick(now), when the time has come that next_deadline() gave (or None); close()
Reply = tuple[int, int, int, bytes]
LOG = 0


@dataclass(slots=True, eq=False)
class _Connection:
    """One peer: what is still to be sent to it, and who it is."""

    sock: socket.socket
    peer: str
    hello_by: float
    nonce: bytes = field(default_factory=lambda: os.urandom(_protocol.NONCE_BYTES))
    decoder: _protocol.Decoder = field(default_factory=lambda: _protocol.Decoder(_protocol.FROM_STRANGER))
    unsent: bytearray = field(default_factory=bytearray)
    facts: dict[str, Any] = field(default_factory=dict)
    label: str = "?"  # who it says it is, for logs
    voter: Any = None  # once it is let in, its `Voter`
    lines: dict[int, Line] = field(default_factory=dict)


class Server:
    """Serves one job's handshakes on a listening socket until its control channel is closed."""

    def __init__(self, listener: socket.socket, control: socket.socket, config: Config, parent: int | None) -> None:
        """`listener` is bound and listens. `control` is one end of a pair, the rank has the other. `parent`: the id of
        the process that must be its parent, or None."""
        self._listener, self._control, self._parent = listener, control, parent
        self._config = config = config._replace(facts={**config.facts, "coordinator_pid": os.getpid()})
        self._rank = int(config.facts["rank"])
        self._world_size = int(config.facts["world_size"])
        self._timeout_s = float(config.facts["timeout_s"])
        self._consensus = _CollectiveHandshakeConsensus(self._world_size, self._timeout_s)
        # Not `selectors`: its own Python costs more for each vote than the machine's.
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self._of_rank: dict[int, _Connection] = {}  # those that said who they are; the others are strangers
        self._stuck: set[_Connection] = set()  # those that read nothing, until the end of this turn
        self._now = self._look_up_at = 0.0
        self._messages: set[str] = set()  # for the coordinator rank's log
        self._unread: list[str] = []  # those for which it is not connected
        self._facts = {self._rank: config.facts}  # of the ranks that have connected so far
        self._has_left = False  # its rank; and then, when the log is told, and when it ends at the latest
        self._tell_at = self._end_at = math.inf
        self._told: tuple[Any, int, bytes] = (None, 0, b"")  # the last finding, and what ranks are told of it
        self._extras: dict[int, Any] = {}
        if config.debug:
            self._load(_protocol.REPORTS)

    def run(self) -> None:
        """Serves until told to end, or until it fails, which is logged. Tells all ranks, and closes all."""
        self._listener.setblocking(False)
        listening, ending = self._listener.fileno(), self._control.fileno()
        for descriptor in (listening, ending):
            self._epoll.register(descriptor, select.EPOLLIN)
        reason = f"rank {self._rank}, which coordinates, closed the handshake or exited"
        deadline = 0.0
        try:
            while True:
                events = self._epoll.poll(max(0.0, deadline - self._now))
                self._now = time.monotonic()
                for descriptor, mask in events:
                    connection = self._connections.get(descriptor)
                    if connection is not None:
                        if mask & select.EPOLLOUT:
                            self._send(connection)
                        self._read(connection)
                    elif descriptor == listening:
                        self._accept()
                    elif descriptor == ending:
                        self._leave()
                if self._has_left and not self._is_needed():
                    return
                if deadline <= self._now:
                    if self._parent not in (None, os.getppid()):
                        return
                    self._look_at_the_clock()
                while self._stuck:
                    self._drop(self._stuck.pop(), "it does not read what is sent to it")
                deadline = self._look_up_at
                for timed in (self._consensus, *self._extras.values()):
                    due = timed.next_deadline()
                    if due is not None and due < deadline:
                        deadline = due
        except Exception as error:
            reason = f"the coordinator failed: {type(error).__name__}: {error}"
            logger.critical("handshake: %s", reason, exc_info=True)
        finally:
            own = self._consensus.voter(self._rank).lost
            self._close(f"{reason}: {own}" if own.startswith(_protocol.BROKE_OFF) else reason)

    def _leave(self) -> None:
        """Its rank has left, regularly or not."""
        self._has_left, said = True, b""
        with contextlib.suppress(OSError):  # a process that dies may reset it
            said = self._control.recv(1)
        if not said:
            self._end_at = self._now + GRAPHS_WITHIN_S
            self._epoll.unregister(self._control)
            return
        self._tell_at = self._now + TELL_AFTER_S
        own = self._consensus.voter(self._rank)
        if not own.label:  # it never connected, and the others wait for it
            own.label = f"{self._facts[self._rank]['host']}:{self._facts[self._rank]['pid']}"
            self._answer(self._consensus.drop_rank(self._rank, self._now, "it closed its handshake"))

    def _is_needed(self) -> bool:
        """Whether there is a reason to go on without its rank."""
        if self._end_at == math.inf:
            return bool(self._of_rank) or len(self._facts) < self._world_size
        reports = self._extras.get(_protocol.REPORTS)
        return self._now < self._end_at and reports is not None and reports.next_deadline() is not None

    def _look_at_the_clock(self) -> None:
        now = self._now
        due = self._consensus.next_deadline()
        if due is not None and due <= now:
            self._answer(self._consensus.expire(now))
            for vote, text in self._consensus.notices(now):
                notice = _protocol.Notice(f"rank {vote.rank} still waits: {text}")
                self._send(vote.request[0], _protocol.encode(notice))
        for number, extra in self._extras.items():
            due = extra.next_deadline()
            if due is not None and due <= now:
                self._reply(number, extra.tick(now))
        if self._look_up_at <= now:
            self._look_up_at = now + LOOK_UP_S
            for connection in list(self._connections.values()):
                if connection.voter is None and connection.hello_by <= now:
                    self._drop(connection, "it did not say who it is")
            self._epoll.modify(self._listener, select.EPOLLIN)
            if self._tell_at <= now:
                self._tell_at = math.inf
                missing = set(range(self._world_size)) - self._facts.keys()
                late = ((self._of_rank, "connected"), (missing, "not connected yet"))
                who = " and ".join(f"{format_ranks(sorted(ranks))} ({how})" for ranks, how in late if ranks)
                self._tell(f"rank {self._rank} has closed its handshake; for a moment it still coordinates for {who}")

    def _close(self, reason: str) -> None:
        self._listener.close()
        for number, extra in self._extras.items():
            self._reply(number, extra.close())
        self._has_left = True
        self._send_unread()
        until = time.monotonic() + CLOSE_WITHIN_S
        for connection in self._of_rank.values():
            with contextlib.suppress(OSError):
                connection.sock.settimeout(max(0.0, until - time.monotonic()))
                connection.unsent += _protocol.encode(_protocol.Goodbye(reason))
                connection.sock.sendall(connection.unsent)
        self.abandon()

    def abandon(self) -> None:
        """Lets go of all descriptors. Also in a forked child, where no thread runs it: what the parent closes, or what
        ends with it, is closed for its peers only then."""
        self._epoll.close()
        for sock in (self._listener, self._control, *(one.sock for one in self._connections.values())):
            sock.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                hint = "; raise `ulimit -n`" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
                self._tell(f"connections can't be accepted: {error.strerror or error}{hint}")
                self._epoll.modify(self._listener, 0)  # until the next look-up
                return
            if len(self._connections) - len(self._of_rank) >= MAX_STRANGERS + self._world_size:
                oldest = next(one for one in self._connections.values() if one.voter is None)
                self._tell(f"many connections say nothing; the oldest, from {oldest.peer}, was closed to make room")
                self._drop(oldest, "it did not say who it is")
            sock.setblocking(False)
            connection = _Connection(sock, address[0], self._now + HELLO_WITHIN_S)
            self._connections[sock.fileno()] = connection
            self._epoll.register(sock, select.EPOLLIN)
            greeting = _protocol.Greeting(_protocol.MAGIC, _protocol.VERSION, connection.nonce)
            self._send(connection, _protocol.encode(greeting))

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            return self._drop(connection, _protocol.how_it_broke(error))
        if not data:
            return self._drop(connection, "its process exited, or its host is gone")
        try:
            for message in connection.decoder.feed(data):
                if type(message) is _protocol.Vote:
                    self._vote(connection, message)
                elif reason := self._handle(connection, message):
                    return self._drop(connection, reason)
        except HandshakeError as error:
            if connection.voter is None:
                self._tell(f"a connection from {connection.peer} was closed: it is not a rank's", connection.peer)
            else:
                self._send(connection, _protocol.encode(_protocol.Goodbye(f"protocol error: {error}")))
            self._drop(connection, f"it broke the protocol: {error}")

    def _handle(self, connection: _Connection, message: _protocol.Message) -> str:
        """Handles a message other than a vote. Returns why the connection ends, if it does."""
        if isinstance(message, _protocol.Hello):
            return self._hello(connection, message)
        rank = connection.facts["rank"]
        if isinstance(message, _protocol.Group):
            if message.number in connection.lines or len(connection.lines) >= _protocol.MAX_GROUPS_PER_RANK:
                raise HandshakeProtocolError(f"group number {message.number} can't be declared")
            group = as_process_group_id(message)
            if rank not in group:
                raise HandshakeProtocolError(f"rank {rank} is not in the group that it declares, {group!r}")
            connection.lines[message.number] = self._consensus.line(group)
        elif isinstance(message, _protocol.Program):
            self._program(message)
        elif isinstance(message, _protocol.Extra) and message.extra in self._extras:
            self._reply(message.extra, self._extras[message.extra].take(rank, *message[1:], self._now))
        elif isinstance(message, _protocol.Wait) and connection.voter is not None:
            if not 0 < message.seconds < sys.float_info.max:
                raise HandshakeProtocolError(f"votes that may wait {message.seconds} s")
            connection.voter.timeout_s = message.seconds
        elif isinstance(message, _protocol.Goodbye):
            return message.reason or "it said goodbye"
        return ""

    def _hello(self, connection: _Connection, hello: _protocol.Hello) -> str:
        """Lets a rank in, or returns why not."""
        try:
            facts = connection.facts = _protocol.read_facts(hello.facts)
        except (ValueError, RecursionError) as error:
            raise HandshakeProtocolError(f"a hello that is not a JSON object: {error}") from error
        label = f"{facts.get('host', '?')}:{facts.get('pid', '?')}"
        connection.label = shorten("".join(filter(str.isprintable, label)))
        rank: Any = facts.get("rank")
        is_in_world = type(rank) is int and 0 <= rank < self._world_size
        secret, ours, nonces = self._config.secret, self._config.facts, connection.nonce + hello.nonce
        proof = _protocol.proof(secret, str(facts.get("session")), nonces, "rank", hello.facts)
        is_known = hmac.compare_digest(hello.proof, proof)  # what anybody else says is shown nowhere
        refusal = "".join(filter(str.isprintable, self._refusal(connection, is_known, is_in_world)))
        # None: no folder is set. Empty: there is one, and nothing to make reports with, which was said.
        folder = self._config.debug if _protocol.REPORTS in self._extras else ""
        about = {"refused": refusal} if refusal else {**ours, "debug": folder if self._config.debug else None}
        said = _protocol.write_facts(about)
        proof = _protocol.proof(secret, str(ours.get("session")), nonces, "coordinator", said)
        answer = _protocol.encode(_protocol.Answer(proof, said))
        if refusal:
            text = f"a connection from {connection.peer} was refused: {refusal}"
            self._tell(text, "" if is_known else connection.peer)
            # Those who wait for this rank are told.
            if is_in_world and rank not in self._of_rank and self._consensus.voter(rank).last is None:
                who = connection.label if is_known else connection.peer
                self._consensus.voter(rank).label = f"{who}, which was refused: {refusal}"
            self._send(connection, answer)
            return refusal
        voter, timeout_s = self._consensus.voter(rank), facts.get("timeout_s")
        if voter.last is not None:  # without an answer it tries again, until the next coordinator is here
            self._tell(f"rank {rank} ({connection.label}) has closed its handshake and made another; it waits for all")
            return "it was opened anew"
        if isinstance(timeout_s, int | float) and 0 < timeout_s < sys.float_info.max:
            voter.timeout_s = float(timeout_s)
        voter.label, connection.voter = connection.label, voter
        connection.decoder.kinds, connection.decoder.world_size = _protocol.FROM_RANK, self._world_size
        self._of_rank[rank] = connection
        self._facts[rank] = facts
        self._consensus.rejoin_rank(rank)
        self._send(connection, answer)
        self._send_unread()
        return ""

    def _refusal(self, connection: _Connection, is_known: bool, is_in_world: bool) -> str:
        ours, theirs = self._config.facts, connection.facts
        rank: Any = theirs.get("rank")
        us = f"the coordinator (rank {self._rank}, {ours.get('host', '?')}:{ours.get('pid', '?')})"
        them = f"rank {rank} ({connection.label})"
        if not is_known:
            why = "it belongs to another job, or TORCH_TPU_INTERNAL_HANDSHAKE_SECRET differs between hosts"
            who = f"it says that it is rank {rank}, but" if is_in_world else "it"
            return f"{who} does not know the secret of {us}: {why}"
        if not is_in_world:
            return shorten(f"{them} is outside the world of {self._world_size} ranks of {us}", 1000)
        for fact, what_to_do in FACTS_THAT_MUST_AGREE.items():
            mine, other = ours.get(fact), theirs.get(fact)
            if mine != other and mine is not None and other is not None:
                name = fact if fact == "torch_tpu" else fact.replace("_", " ")
                return f"{name} differs: {shorten(str(other), 300)} on {them}, {mine} on {us}. {what_to_do}"
        if rank in self._of_rank:
            self._read(self._of_rank[rank])  # it may have ended just now
        if rank in self._of_rank:
            both = f"{self._of_rank[rank].label}, which is connected, and {connection.label}"
            text = f"two processes say that they are rank {rank}: {both}. Give each process a RANK of its own"
            self._send(self._of_rank[rank], _protocol.encode(_protocol.Notice(text)))
            return text
        voter = self._consensus.voter(rank)
        if voter.last is not None and voter.label != connection.label:  # what it had counted is lost
            what_to_do = "restart the job, or close() the handshake on all ranks and make a new one"
            voter.lost = f"it was restarted alone ({voter.label}, then {connection.label}): {what_to_do}"
            return f"rank {rank} can't go on: {voter.lost}"
        return ""

    def _drop(self, connection: _Connection, reason: str) -> None:
        if self._connections.pop(connection.sock.fileno(), None) is None:
            return  # it was dropped before: a closed socket has no descriptor
        self._epoll.unregister(connection.sock)
        connection.sock.close()
        if connection.voter is not None:
            rank = connection.voter.ranks[0]
            del self._of_rank[rank]
            self._answer(self._consensus.drop_rank(rank, self._now, reason))
            for number, extra in self._extras.items():
                self._reply(number, extra.drop_rank(rank, self._now))

    def _vote(self, connection: _Connection, vote: _protocol.Vote) -> None:
        number, flags, digest, spans = vote
        lines, numbers = connection.lines, iter(spans)  # group, start, how many, and so on
        try:
            places = [(lines[group], (start := next(numbers), start + next(numbers))) for group in numbers]
        except KeyError as error:
            raise HandshakeProtocolError(f"a vote on group number {error}, which was never declared") from None
        if len(places) > 1 and len(dict(places)) < len(places):
            raise HandshakeProtocolError("a vote that names a group twice")
        request, partial = (connection, number, flags), flags & _protocol.PARTIAL != 0
        try:
            decisions = self._consensus.cast(connection.voter, places, digest, request, self._now, partial)
        except HandshakeProtocolError as error:
            facts = _protocol.detail_facts(str(error), error.ranks, error.group, error.span)
            detail = _protocol.encode(_protocol.Detail(number, facts))
            self._send(connection, detail + _protocol.encode_verdict(number, _protocol.VOTE_REFUSED))
            return
        if decisions:
            self._answer(decisions)

    def _program(self, program: _protocol.Program) -> None:
        programs = self._consensus.programs
        if program.digest in programs:  # all its ranks say the same
            return
        try:
            facts = _protocol.read_facts(program.facts)
        except (ValueError, RecursionError) as error:
            raise HandshakeProtocolError(f"a program that is not a JSON object: {error}") from error
        name, collectives = facts.get("name"), facts.get("collectives")
        if not (
            isinstance(name, str)
            and isinstance(collectives, list)
            and all(isinstance(its, list) and set(map(type, its)) <= {str} for its in collectives)
        ):
            raise HandshakeProtocolError("a program that has no name, or whose collectives are not lists of text")
        if len(programs) >= MAX_PROGRAMS:
            del programs[next(iter(programs))]
        programs[program.digest] = Program(shorten("".join(filter(str.isprintable, name)), 300), collectives)

    def _answer(self, decisions: list[Decision]) -> None:
        """Sends what was decided in one step; what extras want ranks to have goes ahead of that."""
        plans = [decision for decision in decisions if decision.plan]
        flags = _protocol.PLAN if plans and self._load(_protocol.PLANS) else 0
        for extra in self._extras:
            votes = [Settled.of(decision) for decision in (plans if extra == _protocol.PLANS else decisions)]
            if votes:
                self._reply(extra, self._extras[extra].settled(votes, self._now))
        finding, outcome, facts = self._told
        for decision in decisions:
            connection, number, _ = decision.request
            if decision.finding is not finding:  # thousands of ranks may be told the same
                finding = decision.finding
                outcome = getattr(_protocol, finding.outcome.name)
                about = finding.reason, finding.ranks, finding.group, finding.span, finding.broken
                facts = b"" if outcome == _protocol.FAT else _protocol.detail_facts(*about)
                self._told = finding, outcome, facts
            verdict = _protocol.encode_verdict(number, outcome, flags if decision.plan else 0)
            if facts:
                speaks = _protocol.SPEAKS if decision.speaks else 0
                verdict = _protocol.encode_verdict(number, outcome, speaks | (flags if decision.plan else 0))
                verdict = _protocol.encode(_protocol.Detail(number, facts)) + verdict
            self._send(connection, verdict)
            for other in finding.told.values() if finding.broken and decision.speaks else ():
                if other.finding.broken == "":  # it was told so before this rank's collectives were known
                    text = f"what rank {decision.rank} runs breaks the others too: {finding.broken}"
                    self._send(other.request[0], _protocol.encode(_protocol.Notice(f"rank {other.rank}: {text}")))

    def _reply(self, extra: int, replies: Iterable[Reply]) -> None:
        for rank, number, step, payload in replies:
            message: _protocol.Message = _protocol.Extra(extra, number, step, payload)
            if step == LOG:
                message = _protocol.Notice(payload.decode("utf-8", "replace"))
            if rank in self._of_rank:
                self._send(self._of_rank[rank], _protocol.encode(message))
            elif isinstance(message, _protocol.Notice) and rank == self._rank:
                self._unread.append(message.text)

    def _load(self, extra: int) -> bool:
        """Whether there is this extra; its absence is said once."""
        if extra not in self._extras:
            name, what = _EXTRA_FILES[extra]
            module = find_extra(name)
            if module is None:
                self._tell(f"there are no {what} on splits: {name}.py is not beside the handshake's files")
            elif extra == _protocol.PLANS:
                self._extras[extra] = module.Rounds(self._timeout_s)
            else:
                folder, command = self._config.debug, child_command(name)
                self._extras[extra] = module.Reports(folder, self._facts_of, self._rank, command)
        return extra in self._extras

    def _facts_of(self, rank: int) -> dict[str, Any]:
        return self._facts.get(rank, {})

    def _tell(self, text: str, once_for: str = "") -> None:
        """Has the coordinator rank log it, unless it, or another text for the same `once_for`, was before. Strangers
        have half of the room."""
        room = MAX_MESSAGES // 2 if once_for else MAX_MESSAGES
        if (once_for or text) not in self._messages and len(self._messages) < room:
            self._messages.add(once_for or text)
            self._unread.append(f"coordinator: {text}")
            self._send_unread()

    def _send_unread(self) -> None:
        while self._unread and (self._rank in self._of_rank or self._has_left):
            text = self._unread.pop(0)
            notice = _protocol.encode(_protocol.Notice(text))
            try:
                if self._rank in self._of_rank:
                    self._send(self._of_rank[self._rank], notice)
                else:
                    self._control.settimeout(CLOSE_WITHIN_S)
                    self._control.sendall(notice)
            except OSError:  # the process of its rank is gone
                logger.warning("handshake: %s", text)

    def _send(self, connection: _Connection, data: bytes | bytearray = b"") -> None:
        """Sends it, after what waits to be sent already. What the socket does not take waits."""
        unsent = connection.unsent
        if unsent:
            unsent += data
            data = unsent
        try:
            sent = connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it was dropped, or the next read finds it broken and drops it with the reason
        if unsent:
            del unsent[:sent]
        elif sent == len(data):
            return
        else:
            unsent += data[sent:]
        self._epoll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT if unsent else select.EPOLLIN)
        if len(unsent) > MAX_UNSENT_BYTES:
            self._stuck.add(connection)  # to drop it answers votes: not in the midst of answering some


# ---------------------------------------------------------------------- in a process, or in a thread


def child_command(module: str, *arguments: str) -> list[str]:
    """The command line that calls `main([argument, ...])` of one of these modules, in an isolated interpreter."""
    folder = os.path.dirname(os.path.abspath(__file__))
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, folder, module, *arguments]


class Coordinator:
    """A running coordinator, in a child process or in a thread of this one. `pid` is the child's, or None."""

    START_WITHIN_S = 20.0  # the child's interpreter starts in some 50 ms; a loaded host may need seconds
    STAY_S = 10.0  # for other ranks, when its own has left regularly
    END_WITHIN_S = 8.0  # then it is killed: later than its goodbyes and its reports may take

    def __init__(self, listener: socket.socket, config: Config, kind: str) -> None:
        """Starts it. `listener` is handed over. `kind` is "process" or "thread"; where no process can be started,
        a thread takes its place, with a warning."""
        self.pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._control, theirs = socket.socketpair()
        if kind == "process":
            try:
                self._start_process(listener, theirs, config)
                return
            except (OSError, ValueError) as error:
                what = f"the coordinator could not be started as a process ({error})"
                slow = "it runs as a thread, which makes every handshake slower while this process is busy"
                logger.warning("handshake: %s; %s", what, slow)
            theirs.close()
            self.close()
            self._process = None
            self._control, theirs = socket.socketpair()
        self._server = Server(listener, theirs, config, None)
        self._thread = threading.Thread(target=self._server.run, name="handshake-coordinator", daemon=True)
        self._thread.start()

    def _start_process(self, listener: socket.socket, theirs: socket.socket, config: Config) -> None:
        if not sys.executable:
            raise OSError("this Python has no executable of its own (sys.executable is empty)")
        # Not 0 to 2, which are free where a rank was started with its stdin or stdout closed, and are the child's own.
        given = [fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, 3) for sock in (listener, theirs)]
        command, nowhere = child_command("_coordinator", *map(str, (*given, os.getpid()))), subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, pass_fds=given)
        finally:
            for descriptor in given:
                os.close(descriptor)
        theirs.close()
        self._control.settimeout(self.START_WITHIN_S)
        self._control.sendall(json.dumps(config._asdict()).encode() + b"\n")
        if self._control.recv(1) != b"R":
            raise OSError("the child ended before it was ready")
        self.pid = self._process.pid
        listener.close()

    def close(self, stays: bool = False) -> None:
        """Ends it and waits for its end; first, if it `stays`, for the other ranks. Idempotent."""
        with contextlib.suppress(OSError):  # it was closed, or has ended
            try:
                if stays:
                    self._control.sendall(b"L")
                    self._log_last_words(self.STAY_S)
            finally:
                # Not only closed: a process that was forked from this one may hold the descriptor too.
                self._control.shutdown(socket.SHUT_WR)
            self._log_last_words(self.END_WITHIN_S)
        self._control.close()
        if self._process is not None:
            try:
                self._process.wait(self.END_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        elif self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.END_WITHIN_S)

    def how_it_ended(self) -> str:
        """What became of the child, if it has ended."""
        try:
            status = 0 if self._process is None else self._process.wait(CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:
            return ""
        name = signal.Signals(-status).name if status < 0 else ""
        return f"it was killed by {name}" if name else f"it ended with exit status {status}" if status else ""

    def _log_last_words(self, within_s: float) -> None:
        """Logs what it has to say, until it has said nothing for so long."""
        decoder = _protocol.Decoder(frozenset({_protocol.NOTICE}))
        self._control.settimeout(within_s)
        with contextlib.suppress(TimeoutError):
            while data := self._control.recv(READ_BYTES):
                for notice in decoder.feed(data):
                    logger.warning("handshake: %s", getattr(notice, "text", notice))

    def abandon(self) -> None:
        """In a forked child: lets go of what belongs to the parent, without a word to it."""
        self._control.close()
        if self._server is not None:
            self._server.abandon()
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        self._process = self._thread = None


def main(arguments: list[str]) -> None:
    """The child process: the listener's and the control channel's descriptors, and the parent's pid; its config comes
    as a line of JSON on the control channel."""
    # The rank decides when its coordinator ends: a Ctrl-C or a scheduler's SIGTERM reaches the rank too.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # the limit stays; running out of descriptors is logged
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    listener, control = (socket.socket(fileno=int(descriptor)) for descriptor in arguments[:2])
    try:
        with control.makefile("rb") as lines:
            config = Config(**json.loads(lines.readline()))
        server = Server(listener, control, config, int(arguments[2]))
        control.sendall(b"R")
    except (ConnectionError, json.JSONDecodeError):
        return  # the rank has ended before its coordinator has begun
    server.run()
