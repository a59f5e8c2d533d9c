# SPDX-License-Identifier: Apache-2.0
"""A rank's connection to the coordinator, and its collective lines: votes out, verdicts in, from any number of threads.

There is no reader thread. The first of the threads that wait for a verdict reads the socket itself, and hands on what
is for the others. So with one thread, which is the usual case, a handshake is one `send` and one `recv`, and no thread
is woken in between.

A signal handler's exception can come between any two calls, and out of one that blocks. So what is sent, received, or
waited for is noted by one call of a builtin, and nobody waits on a condition variable, which may let go of its lock
twice then. At worst this rank gives up its connection: it gets an error that says so, and the others know at once.

A vote is counted on its lines and sent under one lock, in one step (`vote`). Who counts for himself and submits
afterwards (`vote_counted`) may be overtaken by another thread in between: a vote that leaves a gap behind this rank's
last one waits a moment for the one that fills it.
"""

import contextlib
import dataclasses
import functools
import hmac
import logging
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if __package__:
    from . import _protocol, _vocabulary
    from ._vocabulary import HandshakeConfigError, HandshakeError, HandshakePeerLostError, HandshakeProtocolError
else:
    import _protocol
    import _vocabulary
    from _vocabulary import HandshakeConfigError, HandshakeError, HandshakePeerLostError, HandshakeProtocolError
if TYPE_CHECKING:
    from _rendezvous import Deadline, Endpoint

logger = logging.getLogger("torch_tpu.handshake")

# How long a vote waits for the one that fills the gap before it. The other thread has counted already and is on its
# way to submit, so milliseconds are the rule; only a gap that was not recorded as eager collectives costs all of it.
GAP_WAIT_S, GAP_LOOK_S = 1.0, 0.001
MAX_DECLARED = 4096  # programs; what a job has more is declared again, which is harmless
MAX_GAPS = 16  # of one line that are remembered, for votes that come later still: about as many as threads compile
COORDINATOR_GRACE_S = 10.0  # the coordinator ends every wait at its timeout; so much later a rank takes it for hung
LOOK_UP_S = 1  # so often a thread that reads looks whether anybody has waited too long
SEND_WITHIN_S = 10  # a coordinator that takes nothing for so long hangs, or its host does
CLOSE_WITHIN_S = 1.0  # what the last bytes (a goodbye) may wait for another thread's
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 1.0  # between two rounds of attempts to connect
NEXT_ADDRESS_S = 0.25  # in a round, the next address is tried after so long, beside this one (RFC 8305)
ATTEMPT_S = 5.0  # what an address has for a greeting, and then for its answer to a hello
FIRST_NOTICE_S, NOTICE_FACTOR = 5.0, 6  # when the log is told that there is no coordinator yet, and how rarely then
READ_BYTES = 65536


def prepare_socket(sock: socket.socket) -> None:
    """Small messages go out at once; a host that vanishes without a word is noticed within half a minute: after idle +
    count * interval, or, with bytes under way, the timeout (in ms). What a listener accepts inherits it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
    for name in options.keys() & vars(socket):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), options[name])


@dataclasses.dataclass(eq=False, slots=True)
class Line:
    """This rank's place on one group's line."""

    group: _vocabulary.ProcessGroupId
    number: int  # names the group on the connection
    position: int  # where the next graph starts
    eager: int = 0  # how many of the counted ones were issued outside any graph, where votes are counted elsewhere
    gaps: deque[tuple[int, int]] = dataclasses.field(default_factory=lambda: deque(maxlen=MAX_GAPS))  # given up


class _Reader(NamedTuple):
    """A thread that waits for something to come, and what wakes it."""

    thread: int
    bell: "queue.SimpleQueue[None]"


class PendingVote:
    """A vote that was sent, and what is known of its answer so far."""

    outcome = 0  # until the verdict is there, and with it the flags
    flags = 0
    facts: Mapping[str, Any] = {}  # what the coordinator says of a verdict that is not FAT
    # What the plan's part in the coordinator sent about it.
    mail: deque[_protocol.Extra] = deque(maxlen=0)  # noqa: RUF012
    graph_is_asked_for = False  # for a report
    is_abandoned = False  # nobody will ask for its answer

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent_at = time.monotonic()


@dataclasses.dataclass(eq=False)
class Channel:
    """What an extra of this rank and its part in the coordinator have to say to one another about one vote."""

    client: "Client"
    pending: PendingVote
    extra: int
    wait_s: float

    def send(self, step: int, payload: bytes) -> None:
        """Sends a frame."""
        with self.client.lock:
            self.client.send(self._frame(step, payload))

    def abandon(self, step: int, payload: bytes) -> None:
        """Has a frame sent ahead of the next one. Takes no lock, so that a destructor can call it."""
        self.client.ahead.append(self._frame(step, payload))
        self.close()

    def receive(self) -> tuple[int, bytes]:
        """Waits for the next frame: its step and payload. Raises HandshakeError as `Client.wait`."""
        self.client.wait(self.pending, time.monotonic() + self.wait_s, "mail")
        return self.pending.mail.popleft()[2:]

    def close(self) -> None:
        """This rank has no more to say or hear; what still comes is dropped."""
        self.client._votes.pop(self.pending.number, None)

    def _frame(self, step: int, payload: bytes) -> bytes:
        return _protocol.encode(_protocol.Extra(self.extra, self.pending.number, step, payload))


class Client:
    """The lines of one rank, and its connection once there is one."""

    waits = True  # whether a vote may wait for one that comes before it

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self._world_size = world_size
        self.lock = threading.Lock()  # for the lines, and for what is sent
        self.bytes_sent = 0
        self.coordinator: dict[str, Any] = {}  # what the welcome said of it
        self.how_it_ended: Callable[[], str] = str  # on its rank, what became of its process; else empty
        self.ahead: deque[bytes] = deque()  # frames to be sent ahead of the next one
        self.eager: Mapping[_vocabulary.ProcessGroupId, int] = {}  # counted before it: lines begin there
        self.declared: set[bytes] = set()  # programs of which the coordinator was told
        self._lines: dict[_vocabulary.ProcessGroupId, Line] = {}
        self._number = 0
        self._votes: dict[int, PendingVote] = {}  # those without a verdict, and those about which a plan is sought
        self._readers: list[_Reader] = []  # who waits for something to come; the thread of the first reads
        self._quiet_at = 0.0  # when the last read began that found nothing
        self.is_connected = False
        self._joining = threading.Lock()
        self._sock: Any = None  # once it is
        self._decoder = _protocol.Decoder(_protocol.FROM_COORDINATOR)
        self._failure: tuple[type[HandshakeError], str] | None = None

    # ------------------------------------------------------------------ votes

    def line(self, group: _vocabulary.ProcessGroupId) -> Line:
        """This rank's line of a group, declared ahead of the next vote if it is new. `lock` is held. Raises
        HandshakeConfigError where the group reaches outside the world, does not hold this rank, or is one too many."""
        line = self._lines.get(group)
        if line is None:
            _vocabulary.must_be_in_world(group.ranks, self._world_size)
            if self.rank not in group:
                text = f"rank {self.rank} votes on a group that it is not in ({_vocabulary.format_ranks(group)})"
                raise HandshakeConfigError(text, ranks=[self.rank], group=group.ranks)
            number = len(self._lines) + 1
            if number > _protocol.MAX_GROUPS_PER_RANK:
                raise HandshakeConfigError(
                    f"rank {self.rank} has voted on {len(self._lines)} process groups, which is all that a connection "
                    f"can name; reuse groups, rather than making new ones for ever"
                )
            line = self._lines[group] = Line(group, number, self.eager.get(group, 0))
            self.ahead.append(_protocol.encode(_protocol.Group(number, group.ranks)))
        return line

    def resolve(self, collectives: Mapping[_vocabulary.ProcessGroupId, int]) -> list[tuple[Line, int]]:
        """The lines of a graph's groups, with how many collectives it issues on each; those alone that meet others.
        Raises HandshakeConfigError as `line`, and where the graph has too many groups, or collectives on one."""
        with self.lock:
            takes = [(self.line(group), number) for group, number in collectives.items() if number and len(group) > 1]
        for _, number in takes:
            _vocabulary.ProcessGroupCollectiveCount(0, number)  # says what is wrong with it
        if len(takes) > _protocol.MAX_SPANS:
            raise _too_many_groups(len(takes))
        return takes

    def declare(self, digest: bytes, name: str, collectives: Sequence[Sequence[str]]) -> None:
        """Has the coordinator told, once and ahead of the next vote, what is behind a digest: see `_protocol.Program`.
        What is too much to be told is left out."""
        facts = _protocol.write_facts({"name": name, "collectives": collectives})
        if len(facts) > _protocol.MAX_PROGRAM_BYTES:
            facts = _protocol.write_facts({"name": name, "collectives": []})
        with self.lock:
            if len(self.declared) >= MAX_DECLARED:
                self.declared.clear()
            self.declared.add(digest)
            self.ahead.append(_protocol.encode(_protocol.Program(digest, facts)))

    def record_eager(self, group: _vocabulary.ProcessGroupId, number: int) -> None:
        """Counts collectives that were issued outside any graph."""
        with self.lock:
            line = self.line(group)
            line.position = _vocabulary.ProcessGroupCollectiveCount(line.position + number, 0).end

    def vote(self, takes: Sequence[tuple[Line, int]], digest: bytes, flags: int) -> PendingVote:
        """Counts a graph's collectives (`takes`, from `resolve`, not empty) and sends its vote, in one step, with the
        fingerprint's digest, `DIGEST_BYTES` long, and flags (PARTIAL, HAS_GRAPH). Raises HandshakeError where the
        connection is lost."""
        with self.lock:
            spans: list[int] = []
            for line, number in takes:
                spans += (line.number, line.position, number)
                line.position += number
            return self._cast(spans, digest, flags)

    def vote_counted(
        self, counts: _vocabulary.RankCollectiveCounts, digest: bytes, flags: int
    ) -> PendingVote | None:
        """`vote` for spans that the caller has counted, once it is their turn on their lines. None if the graph meets
        no other rank. Raises as `resolve` (nothing was sent then) and `vote`."""
        until = time.monotonic() + (GAP_WAIT_S if self.waits else 0.0)
        while (pending := self._vote_in_turn(counts, digest, flags, time.monotonic() >= until)) == "not yet":
            time.sleep(GAP_LOOK_S)
        return pending

    def _vote_in_turn(
        self, counts: _vocabulary.RankCollectiveCounts, digest: bytes, flags: int, now: bool
    ) -> PendingVote | Literal["not yet"] | None:
        """`vote_counted`, if nothing before it is still to come, or `now`."""
        with self.lock:
            takes: list[tuple[Line, int, int]] = []
            in_turn = True
            for group, count in counts._pg_to_count.items():
                number = count.num_collectives_in_graph
                if number and len(group.ranks) > 1:
                    line = self._lines.get(group) or self.line(group)
                    start = count.collective_count_before
                    takes.append((line, start, number))
                    in_turn = in_turn and start == line.position
            if len(takes) > _protocol.MAX_SPANS:
                raise _too_many_groups(len(takes))
            if not in_turn:
                eager = counts._eager
                recorded = [max(0, eager.get(line.group, 0) - line.eager) for line, _, _ in takes]
                gaps = [line.position + more < start for (line, start, _), more in zip(takes, recorded, strict=True)]
                if any(gaps) and not now:
                    return "not yet"
                for (line, start, _), is_gap in zip(takes, gaps, strict=True):
                    if is_gap:
                        line.gaps.append((line.position, start))
                takes, late = self._in_time(takes, eager)
                if late and not takes:
                    answered = PendingVote(0)
                    answered.facts, answered.outcome = {"reason": late}, _protocol.SPLIT
                    return answered
                if late:
                    # What it meets on its other groups must be split too: this is nobody's fingerprint.
                    logger.warning("handshake: %s", late)
                    digest, flags = os.urandom(_vocabulary.DIGEST_BYTES), 0
            spans: list[int] = []
            for line, start, number in takes:
                spans += (line.number, start, number)
                line.position = max(line.position, start + number)  # to go back is for the coordinator to refuse
            return self._cast(spans, digest, flags) if spans else None

    def _cast(self, spans: Sequence[int], digest: bytes, flags: int) -> PendingVote:
        number = self._number = self._number + 1 & 0xFFFFFFFF
        # Known before it is sent: an exception of a signal handler must not leave a vote that nobody knows.
        pending = self._votes[number] = PendingVote(number)
        try:
            frame = _protocol.encode_vote(number, flags, digest, spans)
        except struct.error as error:
            ends = f"a process group's line ends at {_vocabulary.MAX_LINE_POSITION}"
            raise HandshakeConfigError(f"rank {self.rank} can't cast this vote: {ends}") from error
        self.send(frame)
        return pending

    def _in_time(
        self, takes: list[tuple[Line, int, int]], eager: Mapping[_vocabulary.ProcessGroupId, int]
    ) -> tuple[list[tuple[Line, int, int]], str]:
        """Those that are not in a gap that was given up before, and what became of the others."""
        in_time, late = [], ""
        for line, start, number in takes:
            line.eager = max(line.eager, eager.get(line.group, 0))
            if start < line.position and any(first <= start and start + number <= last for first, last in line.gaps):
                place = f"[{start}, {start + number}) on {_vocabulary.format_ranks(line.group)}"
                late = (
                    f"rank {self.rank}'s vote at {place} came more than {GAP_WAIT_S:g} s after a later one of another "
                    f"thread, which was sent without it: the others have gone on split"
                )
            else:
                in_time.append((line, start, number))
        return in_time, late

    def give_up(self, pending: PendingVote) -> None:
        """Nobody will ask for this vote's answer. Takes no lock, so that a destructor can call it."""
        pending.is_abandoned = True
        if pending.flags & _protocol.PLAN and pending.number in self._votes:
            self._call_off(pending)

    def _call_off(self, pending: PendingVote) -> None:
        Channel(self, pending, _protocol.PLANS, 0.0).abandon(_protocol.CALL_OFF, b"its ticket was thrown away")

    # ------------------------------------------------------------------ answers

    def wait(self, pending: PendingVote, deadline: float, wanted: str = "outcome") -> None:
        """Blocks until the verdict ("outcome") or "mail" is there. Raises HandshakePeerLostError where the coordinator
        is gone, or has said nothing until the deadline, a time of `time.monotonic`; HandshakeProtocolError where it
        broke the protocol, or says that this rank did. For vote number 0, reads what has come."""
        reader = _Reader(threading.get_ident(), queue.SimpleQueue())
        try:
            self._readers.append(reader)
            while not getattr(pending, wanted):
                if self._is_first(reader):
                    while self._failure is None and self._quiet_at < deadline and not getattr(pending, wanted):
                        self._read()
                # Not by the clock alone: what came while this process was stopped has yet to be read.
                is_over = self._quiet_at >= deadline
                if not getattr(pending, wanted):
                    self._raise_failure()
                    if is_over and not pending.number:
                        return
                    if is_over:
                        how = "its process hangs, or its host is not reachable any more"
                        self._fail(f"it has not answered in time: {how}. Other ranks may have been answered, and go on")
        finally:
            if reader in self._readers:
                self._readers.remove(reader)
            self._wake_others()

    def _is_first(self, reader: "_Reader") -> bool:
        """Whether it is this thread's turn to read. If not, waits until there may be news, for LOOK_UP_S at most."""
        is_first = self._readers[0].thread == reader.thread
        if not is_first:
            with contextlib.suppress(queue.Empty):
                reader.bell.get(timeout=LOOK_UP_S)
        return is_first

    def read_on(self) -> None:
        """Reads what comes until the connection ends, for a thread that does nothing else."""
        with contextlib.suppress(HandshakeError):
            self.wait(PendingVote(0), float("inf"))

    def _wake_others(self) -> None:
        for reader in tuple(self._readers):
            reader.bell.put(None)

    def _read(self) -> None:
        """Reads once, for LOOK_UP_S at most, and hands out what came."""
        began = time.monotonic()
        received: list[bytes] = []
        try:
            received.extend(map(self._sock.recv, (READ_BYTES,)))
            if not received[0]:
                self._fail(self.how_it_ended() or "its process exited, or its host is gone")
            for message in self._decoder.feed(received[0]):
                self._handle(message)
        except BlockingIOError:
            if getattr(sys, "last_type", None) is not None and getattr(threading, "_SHUTTING_DOWN", False):
                self.close("an exception has ended the main thread, and so this process ends")
        except HandshakeProtocolError as error:
            self._fail(str(error), HandshakeProtocolError)
        except BaseException as error:
            if not isinstance(error, OSError) or error.errno is None:  # a signal handler's
                if received:
                    self._fail("a signal handler's exception has come while a message was read")
                raise
            self._fail(self.how_it_ended() or _protocol.how_it_broke(error))
        if len(b"".join(received)) < READ_BYTES:
            self._quiet_at = began  # all that had come by then is handed out

    def _handle(self, message: _protocol.Message) -> None:
        if type(message) is _protocol.Verdict:
            number, outcome, flags = message
            pending = self._votes.get(number)
            if pending is None or pending.outcome or not _protocol.FAT <= outcome <= _protocol.VOTE_REFUSED:
                raise HandshakeProtocolError(f"a verdict, {outcome}, on vote {number}, which waits for none like it")
            pending.flags = flags
            pending.outcome = outcome
            if not flags & _protocol.PLAN:
                del self._votes[number]
            elif pending.is_abandoned:
                self._call_off(pending)
            if len(self._readers) > 1:
                self._wake_others()
        elif isinstance(message, _protocol.Notice):
            logger.warning("handshake: %s", message.text)
        elif isinstance(message, _protocol.Goodbye):
            self._fail(message.reason)
        elif isinstance(message, _protocol.Detail | _protocol.Extra) and message.vote in self._votes:
            pending = self._votes[message.vote]
            if isinstance(message, _protocol.Detail):
                pending.facts = message.facts
            elif message.extra == _protocol.REPORTS:
                pending.graph_is_asked_for = True
            else:
                pending.mail = pending.mail or deque()
                pending.mail.append(message)
                self._wake_others()

    # ------------------------------------------------------------------ the connection

    def join(self, sock: socket.socket, endpoint: "Endpoint", facts: dict[str, Any]) -> None:
        """Says who this rank is, and goes on with the socket once the coordinator has let it in. Each proves to the
        other that it knows the job's secret. Raises HandshakeError where this rank is refused, or was closed; OSError
        where nobody answers, or not this job's coordinator, whose words are shown nowhere."""
        decoder = _protocol.Decoder(frozenset({_protocol.GREETING}))
        (magic, version, coordinators_nonce, _), *more = _hear(sock, decoder)
        if more or magic != _protocol.MAGIC:
            raise ConnectionError(NOT_A_COORDINATOR)
        if version != _protocol.VERSION:
            versions = f"version {version} of the handshake protocol, rank {self.rank} version {_protocol.VERSION}"
            raise ConnectionError(f"the coordinator there speaks {versions}: install the same release on all hosts")
        nonce = os.urandom(_protocol.NONCE_BYTES)
        said = _protocol.write_facts({**facts, "session": endpoint.session})
        prove = functools.partial(_protocol.proof, endpoint.secret, endpoint.session, coordinators_nonce + nonce)
        with self._joining:  # several addresses may lead to the coordinator
            if self._sock is not None:
                return
            sock.sendall(_protocol.encode(_protocol.Hello(nonce, prove("rank", said), said)))
            decoder.kinds = _protocol.FROM_COORDINATOR | {_protocol.ANSWER}
            answer, *more = _hear(sock, decoder)
            decoder.kinds = _protocol.FROM_COORDINATOR
            if not isinstance(answer, _protocol.Answer) or not hmac.compare_digest(
                answer.proof, prove("coordinator", answer.facts)
            ):
                raise ConnectionError(NOT_OURS)
            about = _protocol.read_facts(answer.facts)
            if "refused" in about:
                raise HandshakeProtocolError(f"rank {self.rank} was refused: {about['refused']}", ranks=[self.rank])
            with self.lock:
                self._raise_failure()  # it was closed meanwhile
                self.coordinator = about
                self._decoder = decoder
                for message in more:
                    self._handle(message)
                self._sock = socket.socket(fileno=sock.detach())
                # Timeouts of the kernel's: unlike `settimeout`, they cost no system call more.
                self._sock.settimeout(None)
                for option, seconds in ((socket.SO_RCVTIMEO, LOOK_UP_S), (socket.SO_SNDTIMEO, SEND_WITHIN_S)):
                    self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, 0))
                self.is_connected = True

    def send(self, data: bytes) -> None:
        """Sends a frame, and what is to go ahead of it. `lock` is held."""
        if self._failure is not None:
            self._raise_failure()
        sent: list[int] = []
        try:
            while self.ahead:
                data = self.ahead.popleft() + data
            while (left := len(data) - sum(sent)) > 0:
                sent.extend(map(self._sock.send, (data[-left:],)))  # `sendall` does not tell what has left
            self.bytes_sent += len(data)
        except BaseException as error:
            if sum(sent) == len(data):  # a signal handler's, and nothing is amiss
                raise
            if not isinstance(error, OSError) or error.errno is None:
                self._fail("a signal handler's exception has come while a message was sent")
                raise
            # What the coordinator said before it closed tells more than this error; it may still be unread.
            self.wait(PendingVote(0), time.monotonic())
            stuck = "it has taken nothing for some seconds: its process hangs, or its host is not reachable any more"
            is_stuck = isinstance(error, BlockingIOError)
            self._fail(stuck if is_stuck else self.how_it_ended() or _protocol.how_it_broke(error))
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._error(*self._failure)

    def _error(self, kind: type[HandshakeError], text: str) -> HandshakeError:
        return kind(f"rank {self.rank}: {text}", ranks=[int(self.coordinator.get("rank", 0))])

    def _fail(self, why: str, kind: type[HandshakeError] = HandshakePeerLostError) -> None:
        if self._failure is None:
            what_to_do = "No handshake is possible any more; look at the log of that rank, and restart the job"
            self._failure = (kind, f"{self._coordinator_name()} is lost: {why}. {what_to_do}")
            self._shut()
        self._wake_others()

    def _shut(self) -> None:
        """The coordinator sees the end of the connection, and so does a thread that reads."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _coordinator_name(self) -> str:
        rank, host, pid, child = map(self.coordinator.get, ("rank", "host", "pid", "coordinator_pid"))
        of_its_own = f", its child process {child}" if child not in (None, pid) else ""
        return f"the coordinator (rank {rank}, {host}:{pid}{of_its_own})"

    def close(self, reason: str, farewell: str = "") -> None:
        """Says goodbye and closes. Threads that wait get an error. Idempotent."""
        farewell = farewell or f"rank {self.rank} closed its handshake"
        sock, failure = self._sock, self._failure
        self._failure = failure or (HandshakeError, reason)
        if sock is None:
            return
        # Not into the middle of another thread's frame. One that is stuck is woken by the shutdown.
        if failure is None and self.lock.acquire(timeout=CLOSE_WITHIN_S):
            try:
                with contextlib.suppress(OSError):
                    sock.sendall(_protocol.encode(_protocol.Goodbye(farewell)))
            finally:
                self.lock.release()
        self._shut()
        self._wake_others()
        # A thread that reads is woken by the shutdown; only then may the descriptor's number be used again.
        reader = _Reader(threading.get_ident(), queue.SimpleQueue())
        try:
            self._readers.append(reader)
            if any(self._is_first(reader) for _ in range(3)):
                sock.close()
        finally:
            self._readers.remove(reader)

    def abandon(self, reason: str) -> None:
        """In a forked child: lets go of the parent's connection, without a word to the coordinator."""
        self._failure = (HandshakeError, reason)
        if self._sock is not None:
            self._sock.close()


def _too_many_groups(number: int) -> HandshakeConfigError:
    text = f"a graph has collectives on {number} process groups of this rank; a vote can name {_protocol.MAX_SPANS}"
    return HandshakeConfigError(text)


# ---------------------------------------------------------------------- finding the coordinator, and being let in


NOT_A_COORDINATOR = "what listens there is not a coordinator; TORCH_TPU_INTERNAL_HANDSHAKE_PORT must be a free port"
NOT_OURS = (
    "the coordinator there is another job's, or the session or TORCH_TPU_INTERNAL_HANDSHAKE_SECRET differs: give each "
    "job a TORCH_TPU_INTERNAL_HANDSHAKE_PORT of its own, and all its ranks the same secret"
)


def connect(client: Client, find: "Callable[[], Endpoint]", facts: dict[str, Any], deadline: "Deadline") -> None:
    """Connects a client to the coordinator, looking for it until the deadline. `find` says where it is, or raises
    LookupError while that is not known; `facts` are this rank's hello, but for the session, which the endpoint gives.

    Raises HandshakePeerLostError where it is not found, HandshakeError where it refuses this rank. Whoever else is
    there does not end the search: an address may be of an earlier attempt at this job, or lead to another host here.
    """
    search = _Search(client, facts)
    pause_s, notice_at = FIRST_RETRY_S, FIRST_NOTICE_S
    while not search.round(find, min(pause_s, deadline.remaining())):
        tried = "; ".join(f"{where}: {what}" for where, what in search.happened.items())
        if not deadline.remaining():
            text = f"rank {client.rank} found no handshake coordinator within {deadline.seconds:.1f} s: {tried}"
            text += ". Is its rank up, has it made a Handshake(), and not closed it already, and is it there "
            text += "(MASTER_ADDR, TORCH_TPU_INTERNAL_HANDSHAKE_PORT)?"
            ranks = [int(facts["coordinator_rank"])]
            raise HandshakePeerLostError(text, ranks=ranks, seconds=deadline.seconds)
        if deadline.seconds - deadline.remaining() >= notice_at:
            logger.warning("handshake: rank %d still looks for the coordinator: %s", client.rank, tried)
            notice_at *= NOTICE_FACTOR
        pause_s = min(pause_s * 1.5, LAST_RETRY_S)


class _Search:
    """A rank's attempts at the addresses of its coordinator, side by side: each in a thread, which ends by itself."""

    def __init__(self, client: Client, facts: dict[str, Any]) -> None:
        self.happened: dict[str, str] = {}  # by address, the last that is known of it
        self._client, self._facts = client, facts
        self._failure: HandshakeError | None = None
        self._under_way: set[str] = set()
        self._changed = threading.Event()

    def round(self, find: "Callable[[], Endpoint]", pause_s: float) -> bool:
        """Tries all addresses that are not being tried yet, and pauses. Whether the client is connected."""
        try:
            endpoint = find()
        except LookupError as error:
            self.happened["the job's store"] = str(error)
            return self._is_done(pause_s)
        for where, family, address in endpoint.addresses(self.happened):
            if where not in self._under_way:
                self._under_way.add(where)
                self.happened.setdefault(where, "no answer")
                threading.Thread(target=self._try, args=(where, family, address, endpoint), daemon=True).start()
                if self._is_done(NEXT_ADDRESS_S):
                    return True
        return self._is_done(pause_s)

    def _is_done(self, within_s: float) -> bool:
        self._changed.wait(within_s)
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
        return self._client._sock is not None

    def _try(self, where: str, family: int, address: Any, endpoint: "Endpoint") -> None:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                prepare_socket(sock)
                sock.settimeout(ATTEMPT_S)
                sock.connect(address)
                self._client.join(sock, endpoint, self._facts)
        except HandshakeError as error:
            self._failure = error
        except (OSError, ValueError, RecursionError) as error:  # also what is no JSON
            self.happened[where] = getattr(error, "strerror", None) or str(error)
        finally:
            self._under_way.discard(where)
            self._changed.set()


def _hear(sock: socket.socket, decoder: _protocol.Decoder) -> list[Any]:
    """What comes next, one message or more, from somebody who may be anybody. Raises OSError."""
    messages: list[Any] = []
    until = time.monotonic() + ATTEMPT_S
    try:
        while not messages:
            sock.settimeout(max(until - time.monotonic(), 0.001))
            data = sock.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            messages += decoder.feed(data)
    except TimeoutError:
        raise TimeoutError("it says nothing: another program, or a coordinator that hangs") from None
    except HandshakeProtocolError:
        raise ConnectionError(NOT_A_COORDINATOR) from None
    return messages
