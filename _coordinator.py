# SPDX-License-Identifier: Apache-2.0
"""The coordinator: connections, timers and the state machines, in one loop on a selector.

It runs in a child process of the coordinator rank, because a thread beside a busy Python main thread waits up to
5 ms for the interpreter lock at every message. The child is started isolated (see `_child`).

It ends when its control channel is closed or its parent process dies, whichever comes first. Where no child can be
started the same `Server` runs in a thread.
"""

import errno
import hmac
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if __package__:
    from . import _child, _protocol
    from ._consensus import Decision, Group, Outcome, _CollectiveHandshakeConsensus
    from ._sockets import prepare_socket
    from ._splits import Record, Reply, Splits, SplitVote
    from ._vocabulary import HandshakeError, HandshakeProtocolError, ProcessGroupId
else:
    import _child
    import _protocol
    from _consensus import Decision, Group, Outcome, _CollectiveHandshakeConsensus
    from _sockets import prepare_socket
    from _splits import Record, Reply, Splits, SplitVote
    from _vocabulary import HandshakeError, HandshakeProtocolError, ProcessGroupId

if TYPE_CHECKING:
    if __package__:
        from ._reports import Finished, Reports
    else:
        from _reports import Finished, Reports

logger = logging.getLogger("torch_tpu.handshake")

# A connection that has not said who it is by then is closed.
HELLO_WITHIN_S = 10.0
# Connections that have not said who they are: all the world's ranks may come at once, and so many more. Then the
# oldest makes room: a rank's hello follows within milliseconds, and a rank that was closed tries again.
MAX_STRANGERS = 64
# What may wait to be sent to one rank: a plan's payload, and small messages. A rank that reads nothing is dropped.
MAX_UNSENT_BYTES = 2 * _protocol.MAX_PAYLOAD_BYTES
# What a frame that waits to be sent takes beside its bytes, about.
UNSENT_FRAME_BYTES = 200
# Bytes that one read takes; a vote on one group is 44.
READ_BYTES = 65536
# After running out of file descriptors, connections wait so long to be accepted.
ACCEPT_AGAIN_S = 1.0
# How often the parent is looked at where the kernel can't tell that it died (no pidfd).
LOOK_AT_PARENT_S = 0.5
# A selector can't sleep for longer than 24 days; a timeout may be set to any length.
LONGEST_SLEEP_S = 3600.0
# What the last bytes (goodbyes) may take, to all ranks together.
CLOSE_WITHIN_S = 1.0
# How many of a group's last handshakes a report mentions.
HANDSHAKES_BEFORE = 5
# Messages for the coordinator rank's log: so many different ones in a job, each once. Strangers can cause some.
MAX_MESSAGES = 256
# Hellos are checked for these facts: all ranks must have the same. And what to look at where one has not.
FACTS_THAT_MUST_AGREE = {
    "world_size": "Start all ranks with the same world size",
    "session": (
        "It is made of TORCHELASTIC_RUN_ID and MASTER_PORT: these differ within the job, or the coordinator of another "
        "job is on this host and port; give each job a TORCH_TPU_INTERNAL_HANDSHAKE_PORT of its own"
    ),
    "stage": "Set TORCH_TPU_INTERNAL_HANDSHAKE_STAGE to the same on all ranks",
    "on_timeout": "Set TORCH_TPU_INTERNAL_HANDSHAKE_ON_TIMEOUT to the same on all ranks",
    "torch": "Install the same version on all ranks",
    "torch_tpu": "Install the same version on all ranks",
}

_OUTCOMES = {
    Outcome.FAT: _protocol.FAT,
    Outcome.SPLIT: _protocol.SPLIT,
    Outcome.TIMEOUT: _protocol.TIMEOUT,
    Outcome.PEER_LOST: _protocol.PEER_LOST,
}


class Config(NamedTuple):
    """What a coordinator must know. All of it can be written as JSON."""

    rank: int  # the coordinator rank
    facts: dict[str, Any]  # the coordinator rank's own hello, against which others are compared
    secret: str
    timeout_s: float
    debug: str  # the folder for reports, or empty


# A vote as it waits in the consensus machine: who cast it, and its number, flags, digest and spans.
Cast: TypeAlias = "tuple[_Connection, int, int, bytes, list[tuple[Group, int, int]]]"


class _Connection:
    """One peer: its address, what was read and not understood yet, what is still to be sent, and who it is."""

    __slots__ = (
        "decoder", "facts", "groups", "hello_by", "nonce", "peer", "rank", "sock", "timeout_s", "unsent", "unsent_bytes"
    )

    def __init__(self, sock: socket.socket, peer: str, hello_by: float) -> None:
        self.sock = sock
        self.peer = peer
        self.hello_by = hello_by
        self.nonce = os.urandom(_protocol.NONCE_BYTES)
        self.decoder = _protocol.Decoder()
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.rank = -1
        self.facts: dict[str, Any] = {}
        self.timeout_s: float | None = None
        self.groups: dict[int, Group] = {}


class Server:
    """Serves one job's handshakes on a listening socket until its control channel is closed."""

    def __init__(self, listener: socket.socket, control: socket.socket, config: Config, parent: int | None) -> None:
        """
        Args:
            listener: bound and listening.
            control: one end of a pair; the server ends when the other end is shut down.
            config: see `Config`.
            parent: the process whose death ends the server, or None.
        """
        self._listener = listener
        self._control = control
        self._config = config
        self._parent = parent
        self._secret = config.secret.encode()
        self._world_size = int(config.facts["world_size"])
        self._consensus = _CollectiveHandshakeConsensus(self._world_size, config.timeout_s)
        self._splits = Splits(config.timeout_s, bool(config.debug), self._oldest_waiting)
        self._reports = _reports_in(config.debug) if config.debug else None
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._strangers: dict[_Connection, None] = {}  # the oldest first
        self._stuck: set[_Connection] = set()  # to be dropped before the loop sleeps
        self._of_rank: dict[int, _Connection] = {}
        # By their ranks: every rank declares the world, and its ranks need to be checked only once.
        self._declared: dict[tuple[int, ...], Group] = {}
        self._accept_again: float | None = None
        self._accept_failure = ""
        self._messages: set[str] = set()  # for the coordinator rank's log
        self._unread_messages: list[str] = []  # those for which it has not connected yet
        self._voted_at = 0.0  # when the last vote of this turn of the loop came; 0: none has
        self._last_reason = ("", b"")
        self._looks_at_parent = False
        self._recent: dict[Group, list[tuple[int, int, str]]] = {}  # (start, end, how it ended), for reports

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serves until told to end, or until it fails, which is logged and told to all ranks. Closes the listener, the
        control channel and all connections."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._control, selectors.EVENT_READ, None)
        parent_descriptor = self._watch_parent()
        self._looks_at_parent = self._parent is not None and parent_descriptor is None
        reason = f"rank {self._config.rank}, which coordinates, closed the handshake or exited"
        select, monotonic = self._selector.select, time.monotonic
        seconds: float | None = 0.0
        try:
            while True:
                while self._stuck:
                    self._drop(self._stuck.pop(), "it does not read what is sent to it")
                    seconds = 0.0  # whatever is due now was not known before
                for key, events in select(seconds):
                    peer = key.data
                    if type(peer) is _Connection:
                        if events & selectors.EVENT_WRITE:
                            self._flush(peer)
                        if events & selectors.EVENT_READ:
                            self._read(peer)
                    elif peer is None:
                        return
                    else:
                        peer()
                voted_at, self._voted_at = self._voted_at, 0.0
                deadline = self._next_deadline()
                if deadline is None:
                    seconds = None
                    continue
                now = voted_at or monotonic()
                if deadline <= now or self._reports is not None:
                    self._look_at_the_clock(now)
                    deadline = self._next_deadline() or now
                seconds = min(max(0.0, deadline - now), LONGEST_SLEEP_S)
                if self._looks_at_parent and os.getppid() != self._parent:
                    return
        except Exception as error:
            reason = f"the coordinator failed: {type(error).__name__}: {error}"
            logger.critical("handshake: %s", reason, exc_info=True)
        finally:
            self._close(reason)
            if parent_descriptor is not None:
                os.close(parent_descriptor)

    def _watch_parent(self) -> int | None:
        if self._parent is None:
            return None
        try:
            descriptor = os.pidfd_open(self._parent)
        except (AttributeError, OSError):
            return None
        self._selector.register(descriptor, selectors.EVENT_READ, None)
        return descriptor

    def _next_deadline(self) -> float | None:
        """When something is to be done though nothing arrives, or None."""
        deadline = self._consensus.next_deadline()
        if not (
            self._strangers
            or self._splits.has_records
            or self._reports is not None
            or self._accept_again is not None
            or self._looks_at_parent
        ):
            return deadline
        deadlines = [d for d in (deadline, self._splits.next_deadline(), self._accept_again) if d is not None]
        if self._strangers:
            deadlines.append(next(iter(self._strangers)).hello_by)
        if self._reports is not None and (look := self._reports.next_look()) is not None:
            deadlines.append(look)
        if self._looks_at_parent:
            deadlines.append(time.monotonic() + LOOK_AT_PARENT_S)
        return min(deadlines, default=None)

    def _look_at_the_clock(self, now: float) -> None:
        deadline = self._consensus.next_deadline()
        if deadline is not None and deadline <= now:
            self._answer(self._consensus.expire(now), now)
            for notice in self._consensus.notices(now):
                connection, number, *_ = notice.request
                self._send(connection, _protocol.notice(number, notice.text))
        deadline = self._splits.next_deadline()
        if deadline is not None and deadline <= now:
            self._reply(self._splits.expire(now))
        if self._reports is not None:
            for record in self._splits.reports_due(now):
                facts = {rank: connection.facts for rank, connection in self._of_rank.items()}
                self._reports.add(record, self._splits, facts, self._before(record))
            for finished in self._reports.finished():
                self._send_report(finished)
        for connection in [c for c in self._strangers if c.hello_by <= now]:
            self._drop(connection, "it did not say who it is")
        if self._accept_again is not None and self._accept_again <= now:
            self._accept_again = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _close(self, reason: str) -> None:
        self._listener.close()
        self._selector.close()
        until = time.monotonic() + CLOSE_WITHIN_S
        for connection in self._connections:
            try:
                connection.sock.settimeout(max(0.0, until - time.monotonic()))
                for data in connection.unsent:
                    connection.sock.sendall(data)
                connection.sock.sendall(_protocol.goodbye(reason))
            except OSError:
                pass
            connection.sock.close()
        self._connections.clear()
        for text in self._unread_messages:
            logger.warning("handshake: %s", text)
        if self._reports is not None:
            self._reports.close()
        self._control.close()

    def abandon(self) -> None:
        """In a forked child, where no thread runs it: lets go of all descriptors, so that what the parent closes, or
        what ends with it, is closed for its peers too."""
        for connection in self._connections:
            connection.sock.close()
        self._selector.close()
        self._listener.close()
        self._control.close()

    # ------------------------------------------------------------------ connections

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                self._accept_failure = ""
                return
            except OSError as error:
                self._pause_accepting(error)
                return
            while len(self._strangers) >= MAX_STRANGERS + self._world_size:
                self._make_room()
            try:
                sock.setblocking(False)
                prepare_socket(sock)
            except OSError:  # a peer that is gone already
                sock.close()
                continue
            connection = _Connection(sock, address[0], time.monotonic() + HELLO_WITHIN_S)
            self._connections.add(connection)
            self._strangers[connection] = None
            self._selector.register(sock, selectors.EVENT_READ, connection)
            self._send(connection, _protocol.greeting(connection.nonce))

    def _make_room(self) -> None:
        """Closes the oldest stranger, unless its hello has arrived meanwhile."""
        number = len(self._strangers)
        oldest = next(iter(self._strangers))
        self._read(oldest)
        if oldest in self._strangers:
            self._tell(f"{number} connections said nothing: the oldest, from {oldest.peer}, was closed to make room")
            self._drop(oldest, "it did not say who it is")

    def _pause_accepting(self, error: OSError) -> None:
        failure = f"connections can't be accepted: {error.strerror or error}"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            failure += "; raise `ulimit -n`"
        if failure != self._accept_failure:
            self._accept_failure = failure
            self._messages.discard(failure)  # it is said once each time that this begins
            self._tell(failure)
        self._selector.unregister(self._listener)
        self._accept_again = time.monotonic() + ACCEPT_AGAIN_S

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(connection, f"its connection broke: {error.strerror or error}")
            return
        if not data:
            self._drop(connection, "its process exited, or its host is gone")
            return
        decoder = connection.decoder
        try:
            vote = _protocol.vote_of_one(data)
            if vote is not None and connection.rank >= 0 and not decoder.is_within_frame:
                if not self._vote_usually(connection, *vote):
                    _, _, number, flags, digest, _, group_number, start, num = vote
                    self._vote(connection, number, flags, digest, [(group_number, start, start + num)])
                return
            decoder.feed(data)
            while (message := decoder.next_message()) is not None:
                if type(message) is _protocol.Vote and connection.rank >= 0:
                    self._vote(connection, *message)
                elif not self._handle(connection, message):
                    return
        except HandshakeProtocolError as error:
            if connection.rank < 0:
                # Once for each peer: it may never send the same twice.
                self._tell(f"a connection from {connection.peer} was closed: {error}", connection.peer)
                self._drop(connection, str(error))
            else:
                self._send(connection, _protocol.goodbye(f"protocol error: {error}"))
                self._drop(connection, f"it broke the protocol: {error}")

    def _handle(self, connection: _Connection, message: _protocol.Message) -> bool:
        """Handles a message other than a vote. Returns whether the connection is still there."""
        if connection.rank < 0:
            if not isinstance(message, _protocol.Hello):
                raise HandshakeProtocolError(f"a {type(message).__name__} before a hello")
            return self._hello(connection, message)
        if isinstance(message, _protocol.GroupDeclared):
            self._declare(connection, message)
        elif isinstance(message, _protocol.Exchange):
            self._reply(
                self._splits.contribute(connection.rank, message.exchange, message.round, message.payload)
            )
        elif isinstance(message, _protocol.Graph):
            self._splits.add_graph(connection.rank, message.vote, message.compressed)
        elif isinstance(message, _protocol.Goodbye):
            self._drop(connection, message.reason)
            return False
        else:
            raise HandshakeProtocolError(f"an unexpected {type(message).__name__}")
        return True

    def _hello(self, connection: _Connection, hello: _protocol.Hello) -> bool:
        connection.facts = hello.facts
        refusal = self._refusal(connection, hello)
        if refusal:
            self._refuse(connection, refusal)
            return False
        rank = connection.rank = int(hello.facts["rank"])
        timeout_s = hello.facts.get("timeout_s")
        if isinstance(timeout_s, int | float) and 0 < timeout_s < sys.float_info.max:
            connection.timeout_s = float(timeout_s)
        connection.decoder.max_frame_bytes = _protocol.MAX_FRAME_BYTES
        self._strangers.pop(connection, None)
        self._of_rank[rank] = connection
        self._consensus.rejoin_rank(rank)
        self._consensus.set_label(rank, _label(connection.facts))
        about = {**self._config.facts, "timeout_s": self._config.timeout_s, "debug": self._config.debug}
        self._send(connection, _protocol.welcome(about))
        if rank == self._config.rank:
            while self._unread_messages:
                self._send(connection, _protocol.report({"log": self._unread_messages.pop(0)}))
        return True

    def _refuse(self, connection: _Connection, refusal: str) -> None:
        rank = connection.facts.get("rank")
        # It is for a log, and may be a stranger's words.
        refusal = "".join(character for character in refusal if character.isprintable())
        self._tell(f"a connection from {connection.peer} was refused: {refusal}")
        if type(rank) is int and 0 <= rank < self._world_size and rank not in self._of_rank:
            # Those who wait for this rank are told.
            self._consensus.set_label(rank, f"{_label(connection.facts)}, which was refused: {refusal}")
        self._send(connection, _protocol.refused(refusal))
        self._drop(connection, refusal)

    def _refusal(self, connection: _Connection, hello: _protocol.Hello) -> str:
        ours, theirs = self._config.facts, hello.facts
        rank = theirs.get("rank")
        us = f"the coordinator (rank {self._config.rank}, {_label(ours)})"
        them = f"rank {rank} ({_label(theirs)})"
        if not hmac.compare_digest(hello.proof, _protocol.proof(self._secret, connection.nonce, hello.signed)):
            return (
                f"{them} does not know the secret of {us}: it belongs to another job, or "
                f"TORCH_TPU_INTERNAL_HANDSHAKE_SECRET differs between hosts"
            )
        if type(rank) is not int or not 0 <= rank < self._world_size:
            return f"{them} is outside the world of {self._world_size} ranks of {us}"
        for fact, what_to_do in FACTS_THAT_MUST_AGREE.items():
            mine, other = ours.get(fact), theirs.get(fact)
            if mine != other and mine is not None and other is not None:
                name = fact.replace("_", " ") if fact != "torch_tpu" else fact
                return f"{name} differs: {other} on {them}, {mine} on {us}. {what_to_do}"
        present = self._of_rank.get(rank)
        if present is not None:
            return (
                f"two processes say that they are rank {rank}: {_label(present.facts)}, which is connected, and "
                f"{_label(theirs)}. Give each process a RANK of its own"
            )
        return ""

    def _declare(self, connection: _Connection, declared: _protocol.GroupDeclared) -> None:
        if declared.number in connection.groups or len(connection.groups) >= _protocol.MAX_GROUPS_PER_RANK:
            raise HandshakeProtocolError(f"group number {declared.number} can't be declared")
        group = self._declared.get(declared.ranks)
        if group is None:
            try:
                group = self._consensus.group(ProcessGroupId(declared.ranks))
            except HandshakeError as error:
                raise HandshakeProtocolError(str(error)) from error
            self._declared[group.ranks] = group
        if connection.rank not in group.members:
            raise HandshakeProtocolError(f"rank {connection.rank} is not in {group.name}")
        connection.groups[declared.number] = group

    def _drop(self, connection: _Connection, reason: str) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        rank = connection.rank
        if rank >= 0 and self._of_rank.get(rank) is connection:
            del self._of_rank[rank]
            now = time.monotonic()
            self._answer(self._consensus.drop_rank(rank, now, reason), now)
            self._reply(self._splits.drop_rank(rank))

    # ------------------------------------------------------------------ votes and answers

    def _vote_usually(
        self,
        connection: _Connection,
        length: int,
        kind: int,
        number: int,
        flags: int,
        digest: bytes,
        one: int,
        group_number: int,
        start: int,
        num: int,
    ) -> bool:
        """`_vote` for the fields of `vote_of_one`, in few steps. Returns whether it is a vote that can be taken in
        them; if not, nothing has changed."""
        group = connection.groups.get(group_number)
        if group is None or not num or self._reports is not None or self._splits.has_records:
            return False
        now = self._voted_at = time.monotonic()
        spans = [(group, start, start + num)]
        cast: Cast = (connection, number, flags, digest, spans)
        fat = self._consensus.cast_usual(
            connection.rank, spans, digest, now, cast, False, connection.timeout_s
        )
        if fat is None:
            return False
        for vote in fat:
            self._send(vote.request[0], _protocol.verdict(vote.request[1], _protocol.FAT))
        return True

    def _vote(
        self, connection: _Connection, number: int, flags: int, digest: bytes, numbered: list[tuple[int, int, int]]
    ) -> None:
        groups = connection.groups
        spans = []
        for group_number, start, end in numbered:
            group = groups.get(group_number)
            if group is None:
                raise HandshakeProtocolError(f"a vote on group number {group_number}, which was never declared")
            if start >= end:
                raise HandshakeProtocolError(f"a vote with an empty span [{start}, {end})")
            spans.append((group, start, end))
        if len(spans) > 1 and len({group for group, _, _ in spans}) < len(spans):
            raise HandshakeProtocolError("a vote that names a group twice")
        now = self._voted_at = time.monotonic()
        cast: Cast = (connection, number, flags, digest, spans)
        try:
            decisions = self._consensus.cast(
                connection.rank, spans, digest, now, cast, False, connection.timeout_s
            )
        except HandshakeProtocolError as error:
            facts = _protocol.reason_facts(str(error), error.ranks, error.group, error.span)
            self._send(
                connection,
                _protocol.detail(number, facts) + _protocol.verdict(number, _protocol.VOTE_REFUSED),
            )
            return
        if decisions:
            self._answer(decisions, now)
        if self._splits.has_open_plans:
            self._reply(self._splits.note_vote(connection.rank))

    def _oldest_waiting(self, rank: int) -> int | None:
        """The number of a rank's oldest vote that has no answer, or None."""
        cast: Cast | None = self._consensus.oldest_waiting(rank)
        return None if cast is None else cast[1]

    def _answer(self, decisions: list[Decision], now: float) -> None:
        split: dict[str, list[Decision]] = {}
        for decision in decisions:
            if decision.outcome is Outcome.FAT:
                self._send(decision.request[0], _protocol.verdict(decision.request[1], _protocol.FAT))
            elif decision.outcome is Outcome.SPLIT:
                split.setdefault(decision.reason, []).append(decision)
            else:
                self._send_refusal(decision)
        for reason, together in split.items():
            self._answer_split(reason, together, now)
        if self._reports is not None:
            for decision in decisions:
                self._note(decision)

    def _answer_split(self, reason: str, together: list[Decision], now: float) -> None:
        """Answers votes that were split for one reason. Where plans are wanted, or reports, they are kept for that."""
        votes = []
        for decision in together:
            connection, number, flags, digest, spans = decision.request
            partial, has_graph = bool(flags & _protocol.PARTIAL), bool(flags & _protocol.HAS_GRAPH)
            votes.append(SplitVote(connection.rank, number, spans, digest, partial, has_graph))
        if self._reports is None and not any(vote.partial for vote in votes) and not self._splits.has_open_plans:
            for decision in together:
                self._send_refusal(decision)
            return
        record, replies = self._splits.add(votes, reason, now)
        # Of the votes, not of the ranks: one that was promised an exchange for an earlier vote was told its end too.
        exchange = record.number if record.plan else 0
        for decision, vote in zip(together, votes, strict=True):
            flags = _protocol.SEND_GRAPH if self._splits.asks_for_graph(record, vote, now) else 0
            self._send_refusal(decision, flags, exchange)
        self._reply(replies)

    def _send_refusal(self, decision: Decision, flags: int = 0, exchange: int = 0) -> None:
        connection, number, *_ = decision.request
        # Thousands of ranks may be answered one by one for the same reason: its facts are made once.
        if self._last_reason[0] is not decision.reason:
            facts = _protocol.reason_facts(decision.reason, decision.ranks, decision.group, decision.span)
            self._last_reason = (decision.reason, facts)
        verdict = _protocol.verdict(number, _OUTCOMES[decision.outcome], flags, exchange)
        self._send(connection, _protocol.detail(number, self._last_reason[1]) + verdict)

    def _note(self, decision: Decision) -> None:
        outcome = "fat" if decision.outcome is Outcome.FAT else f"{decision.outcome.name} ({decision.reason})"
        for group, start, end in decision.request[4]:
            recent = self._recent.setdefault(group, [])
            if (start, end, outcome) not in recent:
                recent.append((start, end, outcome))
                del recent[: -2 * HANDSHAKES_BEFORE]

    def _reply(self, replies: Iterable[Reply]) -> None:
        # A shared payload may be 16 MB, and go to thousands of ranks: its frame is made once, and never copied.
        framed: Reply | None = None
        data = b""
        for reply in replies:
            if framed is None or reply.payload is not framed.payload or reply[1:] != framed[1:]:
                framed = reply
                data = _protocol.result(reply.exchange, reply.round, reply.ok, reply.payload)
            connection = self._of_rank.get(reply.rank)
            if connection is not None:
                self._send(connection, data)

    def _before(self, record: Record) -> list[str]:
        """The handshakes on the record's largest group before it, oldest first."""
        group, limit, _ = max(record.spans, key=lambda span: (len(span[0].ranks), -span[1]))
        before = [
            f"[{start}, {end}) on {group.name}: {outcome}"
            for start, end, outcome in sorted(self._recent.get(group, []))
            if end <= limit
        ]
        return before[-HANDSHAKES_BEFORE:]

    def _send_report(self, finished: "Finished") -> None:
        if finished.failure:
            self._tell(finished.failure)
        whole = {"text": finished.text, "path": finished.path}
        pointer = {"path": finished.path, "rank": self._config.rank}
        for rank in finished.ranks | {self._config.rank} if finished.text else ():
            connection = self._of_rank.get(rank)
            if connection is not None:
                self._send(connection, _protocol.report(whole if rank == self._config.rank else pointer))

    def _tell(self, text: str, once_for: str = "") -> None:
        """Has it logged on the coordinator rank, in that rank's own process, unless it, or another text for the same
        `once_for`, was before."""
        if (once_for or text) in self._messages or len(self._messages) >= MAX_MESSAGES:
            return
        self._messages.add(once_for or text)
        connection = self._of_rank.get(self._config.rank)
        if connection is None:
            self._unread_messages.append(text)
        else:
            self._send(connection, _protocol.report({"log": text}))

    # ------------------------------------------------------------------ sending

    def _send(self, connection: _Connection, data: bytes) -> None:
        if not connection.unsent:
            try:
                sent = connection.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # it was dropped, or the next read finds it broken and drops it with the reason
            if sent == len(data):
                return
            self._selector.modify(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        else:
            sent = 0
        connection.unsent.append(memoryview(data)[sent:])
        connection.unsent_bytes += len(data) - sent + UNSENT_FRAME_BYTES
        if connection.unsent_bytes > MAX_UNSENT_BYTES:
            # Not dropped here: that answers other votes, and the caller may be in the middle of answering some.
            self._stuck.add(connection)

    def _flush(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        unsent = connection.unsent
        try:
            while unsent:
                sent = connection.sock.send(unsent[0])
                connection.unsent_bytes -= sent
                if sent < len(unsent[0]):
                    unsent[0] = unsent[0][sent:]
                    return
                connection.unsent_bytes -= UNSENT_FRAME_BYTES
                unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            unsent.clear()  # the next read finds it broken
            connection.unsent_bytes = 0
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)


def _reports_in(folder: str) -> "Reports":
    # Imported only where reports are made: every rank imports this file, and few make any.
    if __package__:
        from ._reports import Reports
    else:
        from _reports import Reports
    return Reports(folder)


def _label(facts: dict[str, Any]) -> str:
    return f"{facts.get('host', '?')}:{facts.get('pid', '?')}"


# ---------------------------------------------------------------------- in a process, or in a thread


class Coordinator:
    """A running coordinator, in a child process or in a thread of this one."""

    # The child's interpreter starts in some 50 ms; a loaded host may need seconds.
    START_WITHIN_S = 20.0
    # A child that doesn't end on request is killed then: later than its goodbyes and its reports may take.
    END_WITHIN_S = 5.0

    def __init__(self, listener: socket.socket, config: Config, kind: str) -> None:
        """Starts it. `listener` is handed over. `kind` is "process" or "thread"; where no process can be started,
        a thread takes its place, with a warning."""
        self._control, theirs = socket.socketpair()
        self._process: Any = None
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()
        if kind == "process":
            try:
                self._start_process(listener, theirs, config)
                return
            except (OSError, ValueError) as error:
                logger.warning(
                    "handshake: the coordinator could not be started as a process (%s); it runs as a thread, which "
                    "makes every handshake slower while this process is busy",
                    error,
                )
                self._reap()
                theirs.close()
                self._control.close()
                self._control, theirs = socket.socketpair()
        self._server = Server(listener, theirs, config, None)
        self._thread = threading.Thread(target=self._server.run, name="handshake-coordinator", daemon=True)
        self._thread.start()

    @property
    def kind(self) -> str:
        """ "process" or "thread"."""
        return "process" if self._process is not None else "thread"

    @property
    def pid(self) -> int | None:
        """The child's process id, or None."""
        return self._process.pid if self._process is not None else None

    def _start_process(self, listener: socket.socket, theirs: socket.socket, config: Config) -> None:
        import subprocess

        if not sys.executable:
            raise OSError("this Python has no executable of its own (sys.executable is empty)")
        arguments = (str(listener.fileno()), str(theirs.fileno()), str(os.getpid()))
        self._process = subprocess.Popen(
            _child.command("_coordinator", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), theirs.fileno()),
        )
        theirs.close()
        self._control.settimeout(self.START_WITHIN_S)
        self._control.sendall(json.dumps(config._asdict()).encode() + b"\n")
        if self._control.recv(1) != b"R":
            raise OSError("the child ended before it was ready")
        listener.close()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Ends it and waits for its end. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            # Not only closed: a process that was forked from this one may hold the descriptor too.
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._control.close()
        if self._process is not None:
            import subprocess

            try:
                self._process.wait(self.END_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        elif self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.END_WITHIN_S)

    def abandon(self) -> None:
        """In a forked child: lets go of what belongs to the parent, without a word to it."""
        self._closed = True
        self._control.close()
        if self._server is not None:
            self._server.abandon()
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        self._process = self._thread = None


def main(arguments: list[str]) -> None:
    """The child process: `listener's descriptor, control's descriptor, parent's pid`; its config as a line of JSON on
    the control channel."""
    import signal

    # The rank decides when its coordinator ends: a Ctrl-C or a scheduler's SIGTERM reaches the rank too.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    _raise_descriptor_limit()
    listener = socket.socket(fileno=int(arguments[0]))
    control = socket.socket(fileno=int(arguments[1]))
    line = b""
    try:
        while not line.endswith(b"\n"):
            data = control.recv(READ_BYTES)
            if not data:
                return
            line += data
        server = Server(listener, control, Config(**json.loads(line)), int(arguments[2]))
        control.sendall(b"R")
    except ConnectionError:
        return  # the rank has ended before its coordinator has begun
    server.run()


def _raise_descriptor_limit() -> None:
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ImportError, OSError, ValueError):
        pass  # the limit stays; running out of descriptors is logged when it happens
