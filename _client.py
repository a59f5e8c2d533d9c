# SPDX-License-Identifier: Apache-2.0
"""A rank's connection to the coordinator, and its collective lines: votes out, verdicts in, from any number of threads.

There is no reader thread. A thread that waits for its verdict reads the socket itself, and hands on what is for others;
while one thread reads, the others wait for it. So with one thread, which is the usual case, a handshake is one `send`
and one `recv`, and no thread is woken in between.

A vote is counted on its lines and sent under one lock, in one step (`vote`). Who counts for himself and submits
afterwards (`vote_counted`) may be overtaken by another thread in between: a vote that leaves a gap behind this rank's
last one waits a moment for the one that fills it.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
GAP_WAIT_S = 1.0
# Gaps of one line that are remembered, for votes that come later still: about as many as threads compile at once.
MAX_GAPS = 16
# The coordinator ends every wait at its timeout; so much later the rank concludes that it hangs.
COORDINATOR_GRACE_S = 10.0
# A reading thread looks up so often, to see whether anybody has waited too long.
LOOK_UP_S = 1
# A coordinator that takes nothing for so long hangs, or its host does.
SEND_WITHIN_S = 10
# What the last bytes (a goodbye) may wait for another thread's.
CLOSE_WITHIN_S = 1.0
# Between two attempts to connect; and one address may keep an attempt busy so long.
FIRST_RETRY_S, LAST_RETRY_S, ATTEMPT_S = 0.02, 0.5, 5.0
READ_BYTES = 65536
# A host that vanishes without a word is noticed after idle + count * interval: half a minute.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def prepare_socket(sock: socket.socket) -> None:
    """Small messages go out at once; a host that vanishes is noticed. What a listener accepts inherits it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Line:
    """This rank's place on one group's line: `position` is where the next graph starts. `number` names the group on the
    connection, once it is declared."""

    __slots__ = ("eager", "gaps", "number", "position", "ranks")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.position = 0
        self.number = -1
        self.eager = 0  # how many of the counted ones were issued outside any graph, where votes are counted elsewhere
        self.gaps: deque[tuple[int, int]] = deque(maxlen=MAX_GAPS)  # those that were given up waiting for


_NO_FACTS: dict[str, Any] = {}


class PendingVote:
    """A vote that was sent.

    Attributes:
        outcome: 0 until the verdict is there; then `flags` is, too.
        facts: what the coordinator says of a verdict that is not FAT.
        is_abandoned: nobody will ask for its answer.
        graph_is_asked_for: this rank is to send its graph for a report.
        mail: what the plan's part in the coordinator sent about it.
    """

    __slots__ = ("facts", "flags", "graph_is_asked_for", "is_abandoned", "mail", "number", "outcome", "sent_at")

    def __init__(self, number: int, sent_at: float) -> None:
        self.number = number
        self.sent_at = sent_at
        self.outcome = self.flags = 0
        self.facts = _NO_FACTS
        self.is_abandoned = self.graph_is_asked_for = False
        self.mail: deque[_protocol.Extra] | None = None


class Channel:
    """What an extra of this rank and its part in the coordinator have to say to one another about one vote."""

    def __init__(self, client: "Client", pending: PendingVote, extra: int, wait_s: float) -> None:
        self._client = client
        self._pending = pending
        self._extra = extra
        self._wait_s = wait_s

    def send(self, step: int, payload: bytes) -> None:
        """Sends a frame."""
        with self._client.lock:
            self._client.send(self._frame(step, payload))

    def abandon(self, step: int, payload: bytes) -> None:
        """Has a frame sent ahead of the next one. Takes no lock, so that a destructor can call it."""
        self._client.ahead.append(self._frame(step, payload))
        self.close()

    def receive(self) -> tuple[int, bytes]:
        """Waits for the next frame: its step and payload. Raises HandshakeError as `Client.wait`."""
        self._client.wait(self._pending, time.monotonic() + self._wait_s, for_mail=True)
        message = (self._pending.mail or deque()).popleft()
        return message.step, message.payload

    def close(self) -> None:
        """This rank has no more to say or hear; what still comes is dropped."""
        self._client.channels.pop(self._pending.number, None)

    def _frame(self, step: int, payload: bytes) -> bytes:
        return _protocol.encode(_protocol.Extra(self._extra, self._pending.number, step, payload))


class Client:
    """The lines of one rank, and its connection once there is one."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.lock = threading.Lock()  # for the lines, and for what is sent
        self.bytes_sent = 0
        self.coordinator: dict[str, Any] = {}  # what the welcome said of it
        self.ahead: deque[bytes] = deque()  # frames to be sent ahead of the next one
        self.channels: dict[int, PendingVote] = {}  # votes about which extras go on talking
        self.eager: Mapping[_vocabulary.ProcessGroupId, int] = {}  # counted before it: lines begin there
        self.rank = rank
        self._world_size = world_size
        self._lines: dict[_vocabulary.ProcessGroupId, Line] = {}
        self._sent = threading.Condition(self.lock)  # notified when a vote has left
        self._votes_wait_for_others = 0
        self._number = 0
        self._votes: dict[int, PendingVote] = {}
        # Reentrant, because a signal handler's exception can come between taking it and `try`: it stays taken then, and
        # its thread must be able to read on.
        self._reading = threading.RLock()
        self._turn = threading.Condition()
        self._others_wait = 0
        self._quiet_at = 0.0  # when the last read began that found nothing
        self._sock: Any = None  # once it is connected
        self._decoder = _protocol.Decoder(_protocol.FROM_COORDINATOR)
        self._failure: tuple[type[HandshakeError], str] | None = None

    # ------------------------------------------------------------------ lines

    def line(self, group: _vocabulary.ProcessGroupId) -> Line:
        """This rank's line of a group, declared ahead of the next vote if it is new. `lock` is held. Raises
        HandshakeConfigError where the group reaches outside the world, does not hold this rank, or is one too many."""
        line = self._lines.get(group)
        if line is None:
            _vocabulary.must_be_in_world(group.ranks, self._world_size)
            if self.rank not in group:
                text = f"rank {self.rank} votes on a group that it is not in ({_vocabulary.format_ranks(group)})"
                raise HandshakeConfigError(text, ranks=[self.rank], group=group.ranks)
            if len(self._lines) >= _protocol.MAX_GROUPS_PER_RANK:
                raise HandshakeConfigError(
                    f"rank {self.rank} has voted on {len(self._lines)} process groups, which is all that a connection "
                    f"can name; reuse groups, rather than making new ones for ever"
                )
            line = self._lines[group] = Line(group.ranks)
            line.position = self.eager.get(group, 0)
            line.number = len(self._lines)
            self.ahead.append(_protocol.encode(_protocol.Group(line.number, group.ranks)))
        return line

    def resolve(self, collectives: Mapping[_vocabulary.ProcessGroupId, int]) -> list[tuple[Line, int]]:
        """The lines of a graph's groups, with how many collectives it issues on each; those alone that meet others.

        Raises:
            HandshakeConfigError: as `line`, or the graph is on too many groups. Nothing has changed then.
        """
        meets = [(group, number) for group, number in collectives.items() if number and len(group) > 1]
        if len(meets) > _protocol.MAX_SPANS:
            raise _too_many_groups(len(meets))
        for _, number in meets:
            _vocabulary.ProcessGroupCollectiveCount(0, number)  # says what is wrong with it
        with self.lock:
            return [(self.line(group), number) for group, number in meets]

    def record_eager(self, group: _vocabulary.ProcessGroupId, number: int) -> None:
        """Counts collectives that were issued outside any graph."""
        with self.lock:
            line = self.line(group)
            line.position = _vocabulary.ProcessGroupCollectiveCount(line.position + number, 0).end

    # ------------------------------------------------------------------ votes

    def vote(self, takes: Sequence[tuple[Line, int]], digest: bytes, flags: int) -> PendingVote:
        """Counts a graph's collectives, and sends its vote, in one step.

        Args:
            takes: from `resolve`, not empty.
            digest: the fingerprint's, `DIGEST_BYTES` long.
            flags: PARTIAL, HAS_GRAPH.

        Raises:
            HandshakeError: the connection is lost.
        """
        with self.lock:
            spans: list[int] = []
            for line, number in takes:
                spans += (line.number, line.position, number)
                line.position += number
            return self._cast(spans, digest, flags)

    def _cast(self, spans: Sequence[int], digest: bytes, flags: int) -> PendingVote:
        number = self._number = self._number + 1 & 0xFFFFFFFF
        # Known before it is sent: an exception of a signal handler must not leave a vote that nobody knows.
        pending = self._votes[number] = PendingVote(number, time.monotonic())
        self.send(_protocol.encode_vote(number, flags, digest, spans))
        return pending

    def vote_counted(
        self, counts: _vocabulary.RankCollectiveCounts, digest: bytes, flags: int
    ) -> PendingVote | None:
        """`vote` for spans that the caller has counted, once it is their turn on their lines.

        Returns:
            None if the graph meets no other rank.

        Raises:
            HandshakeConfigError: as `resolve`. Nothing was sent then.
            HandshakeError: the connection is lost.
        """
        with self.lock:
            takes: list[tuple[Line, int, int]] = []
            in_turn = True
            for group, count in counts.items():
                if count.num_collectives_in_graph and len(group.ranks) > 1:
                    line = self._lines.get(group) or self.line(group)
                    takes.append((line, count.collective_count_before, count.num_collectives_in_graph))
                    in_turn = in_turn and line.position == count.collective_count_before
            if not takes:
                return None
            if len(takes) > _protocol.MAX_SPANS:
                raise _too_many_groups(len(takes))
            if not in_turn:
                eager = {self._lines[group]: number for group, number in counts._eager.items() if group in self._lines}
                takes, late = self._wait_for_turn(takes, eager)
                if late and not takes:
                    answered = PendingVote(0, time.monotonic())
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
            pending = self._cast(spans, digest, flags)
            if self._votes_wait_for_others:
                self._sent.notify_all()
        return pending

    def _wait_for_turn(
        self, takes: list[tuple[Line, int, int]], eager: Mapping[Line, int]
    ) -> tuple[list[tuple[Line, int, int]], str]:
        """Waits a moment while positions before these are neither voted on nor recorded as eager. Returns those that
        are not in a gap that was given up before, and what became of the others."""

        def gaps() -> list[tuple[Line, int]]:
            return [
                (line, start)
                for line, start, _ in takes
                if start - line.position > max(0, eager.get(line, 0) - line.eager)
            ]

        self._votes_wait_for_others += 1
        try:
            self._sent.wait_for(lambda: not gaps(), GAP_WAIT_S)
        finally:
            self._votes_wait_for_others -= 1
        for line, start in gaps():
            line.gaps.append((line.position, start))
        in_time, reason = [], ""
        for line, start, number in takes:
            line.eager = max(line.eager, eager.get(line, 0))
            if start < line.position and any(first <= start and start + number <= last for first, last in line.gaps):
                reason = (
                    f"rank {self.rank}'s vote at [{start}, {start + number}) on "
                    f"{_vocabulary.format_ranks(line.ranks)} came more than {GAP_WAIT_S:g} s after a later one of "
                    f"another thread, which was sent without it: the others have gone on split"
                )
            else:
                in_time.append((line, start, number))
        return in_time, reason

    def give_up(self, pending: PendingVote) -> None:
        """Nobody will ask for this vote's answer. Takes no lock, so that a destructor can call it."""
        pending.is_abandoned = True
        if pending.number in self.channels:
            self._call_off(pending)

    def _call_off(self, pending: PendingVote) -> None:
        Channel(self, pending, _protocol.PLANS, 0.0).abandon(_protocol.CALL_OFF, b"its ticket was thrown away")

    # ------------------------------------------------------------------ waiting

    def wait(self, pending: PendingVote, deadline: float, for_mail: bool = False) -> None:
        """Blocks until the verdict, or mail, is there.

        Raises:
            HandshakePeerLostError: the coordinator is gone.
            HandshakeProtocolError: the coordinator broke the protocol, or says that this rank did.
            HandshakeTimeoutError: the coordinator has said nothing until the deadline, a time of `time.monotonic`.
        """
        while not (pending.mail if for_mail else pending.outcome):
            if self._reading.acquire(False):
                try:
                    while self._failure is None and self._quiet_at < deadline:
                        self._read()
                        if pending.mail if for_mail else pending.outcome:
                            return
                finally:
                    self._reading.release()
                    if self._others_wait:
                        self._wake_others()
            else:
                with self._turn:
                    self._others_wait += 1
                    try:
                        if not (pending.mail if for_mail else pending.outcome) and not self._nobody_reads():
                            self._turn.wait(LOOK_UP_S)
                    finally:
                        self._others_wait -= 1
            # Not by the clock alone: what came while this process was stopped has yet to be read.
            is_over = self._quiet_at >= deadline
            if not (pending.mail if for_mail else pending.outcome):
                self._raise_failure()
                if is_over:
                    raise self._no_answer()

    def _nobody_reads(self) -> bool:
        if self._reading.acquire(False):
            self._reading.release()
            return True
        return False

    def read_on(self) -> None:
        """Reads what comes until the connection ends, for a thread that does nothing else."""
        with contextlib.suppress(HandshakeError):
            self.wait(PendingVote(0, 0.0), float("inf"))

    def _wake_others(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def _read(self) -> bool:
        """Reads once, for LOOK_UP_S at most, and hands out what came. Returns whether there may be more."""
        began = time.monotonic()
        data = b""
        try:
            data = self._sock.recv(READ_BYTES)
            if not data:
                self._fail(HandshakePeerLostError, "its process exited, or its host is gone")
            for message in self._decoder.feed(data):
                self._handle(message)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._fail(HandshakePeerLostError, f"the connection broke: {error.strerror or error}")
        except HandshakeProtocolError as error:
            self._fail(HandshakeProtocolError, str(error))
        if len(data) < READ_BYTES:
            self._quiet_at = began  # all that had come by then is handed out
        return bool(data)

    def _handle(self, message: _protocol.Message) -> None:
        if type(message) is _protocol.Verdict:
            number, outcome, flags = message
            pending = self._votes.pop(number, None)
            if pending is None:
                raise HandshakeProtocolError(f"a verdict on vote {number}, which was not cast")
            if flags & _protocol.PLAN:
                self.channels[number] = pending
                if pending.is_abandoned:
                    self._call_off(pending)
            pending.flags = flags
            pending.outcome = outcome
            if self._others_wait:
                self._wake_others()
        elif isinstance(message, _protocol.Detail):
            if message.vote in self._votes:
                self._votes[message.vote].facts = message.facts
        elif isinstance(message, _protocol.Extra):
            pending = self._votes.get(message.vote) or self.channels.get(message.vote)
            if pending is not None and message.extra == _protocol.REPORTS:
                pending.graph_is_asked_for = True
            elif pending is not None:
                if pending.mail is None:
                    pending.mail = deque()
                pending.mail.append(message)
                self._wake_others()
        elif isinstance(message, _protocol.Notice):
            logger.warning("handshake: %s", message.text)
        elif isinstance(message, _protocol.Goodbye):
            self._fail(HandshakePeerLostError, message.reason)

    # ------------------------------------------------------------------ the connection

    @property
    def is_connected(self) -> bool:
        return self._sock is not None

    def take_over(
        self,
        sock: socket.socket,
        decoder: _protocol.Decoder,
        welcome: _protocol.Welcome,
        messages: list[_protocol.Message],
    ) -> None:
        """Goes on with a socket on which the coordinator has let this rank in: its welcome, and what came with it."""
        # Timeouts of the kernel's: unlike `settimeout`, they cost no system call more.
        sock.settimeout(None)
        for option, seconds in ((socket.SO_RCVTIMEO, LOOK_UP_S), (socket.SO_SNDTIMEO, SEND_WITHIN_S)):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, 0))
        self.coordinator = welcome.facts
        self._decoder = decoder
        with self.lock:
            self._raise_failure()  # it was closed meanwhile
            for message in messages:
                self._handle(message)
            self._sock = sock

    def send(self, data: bytes) -> None:
        """Sends a frame, and what is to go ahead of it. `lock` is held."""
        if self._failure is not None:
            self._raise_failure()
        while self.ahead:
            data = self.ahead.popleft() + data
        try:
            self._sock.sendall(data)
        except BlockingIOError:
            why = "it has taken nothing for some seconds: its process hangs, or its host is not reachable any more"
            self._fail(HandshakePeerLostError, why)
            self._raise_failure()
        except OSError as error:
            # What the coordinator said before it closed tells more than this error; it may still be unread.
            if self._reading.acquire(False):
                try:
                    while self._failure is None and self._read():
                        pass
                finally:
                    self._reading.release()
            self._fail(HandshakePeerLostError, f"the connection broke: {error.strerror or error}")
            self._raise_failure()
        except BaseException:
            self._fail(HandshakePeerLostError, "a send was interrupted, and nobody knows how much of it has left")
            raise
        self.bytes_sent += len(data)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure[0](self._failure[1], ranks=[int(self.coordinator.get("rank", 0))])

    def _fail(self, kind: type[HandshakeError], why: str) -> None:
        if self._failure is None:
            self._failure = (
                kind,
                f"rank {self.rank}: {self._coordinator_name()} is lost: {why}. No handshake is possible any more; "
                f"look at the log of that rank, and restart the job",
            )
        self._wake_others()

    def _no_answer(self) -> _vocabulary.HandshakeTimeoutError:
        return _vocabulary.HandshakeTimeoutError(
            f"rank {self.rank}: {self._coordinator_name()} has not answered in time, and not ended the wait either: "
            f"its process hangs, or its host is not reachable any more. Look at that process",
            ranks=[int(self.coordinator["rank"])],
        )

    def _coordinator_name(self) -> str:
        facts = self.coordinator
        return f"the coordinator (rank {facts.get('rank')}, {facts.get('host')}:{facts.get('pid')})"

    def close(self, reason: str) -> None:
        """Says goodbye and closes. Threads that wait get an error. Idempotent."""
        sock, failure = self._sock, self._failure
        self._failure = failure or (HandshakeError, f"rank {self.rank}: {reason}")
        if sock is None:
            return
        # Not into the middle of another thread's frame. One that is stuck is woken by the shutdown.
        if failure is None and self.lock.acquire(timeout=CLOSE_WITHIN_S):
            try:
                sock.sendall(_protocol.encode(_protocol.Goodbye(f"rank {self.rank} closed its handshake")))
            except OSError:
                pass
            finally:
                self.lock.release()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        self._wake_others()
        # A thread that reads is woken by the shutdown; only then may the descriptor's number be used again.
        if self._reading.acquire(timeout=2 * LOOK_UP_S):
            sock.close()
            self._reading.release()

    def abandon(self, reason: str) -> None:
        """In a forked child: lets go of the parent's connection, without a word to the coordinator."""
        self._failure = (HandshakeError, f"rank {self.rank}: {reason}")
        if self._sock is not None:
            self._sock.close()


def _too_many_groups(number: int) -> HandshakeConfigError:
    text = f"a graph has collectives on {number} process groups of this rank; a vote can name {_protocol.MAX_SPANS}"
    return HandshakeConfigError(text)


# ---------------------------------------------------------------------- finding the coordinator, and being let in


def connect(
    client: Client, find_endpoint: "Callable[[Deadline], Endpoint]", facts: dict[str, Any], deadline: "Deadline"
) -> None:
    """Connects a client to the coordinator, trying again while it is still starting.

    Args:
        client: is given the connection.
        find_endpoint: says where the coordinator is; asked anew for every attempt.
        facts: this rank's hello, but for the session, which the endpoint gives.
        deadline: when to give up.

    Raises:
        HandshakePeerLostError: nobody was reached by then.
        HandshakeProtocolError: what listens there is not a coordinator, speaks another version, or refuses this rank,
            and no other address of the coordinator's is better.
    """
    retry_s = FIRST_RETRY_S
    while True:
        endpoint = find_endpoint(deadline)
        failures: list[str] = []
        refused: HandshakeProtocolError | None = None
        for host, family, address in _addresses(endpoint, failures):
            try:
                with contextlib.ExitStack() as undo:
                    sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    client.take_over(sock, *_greet(sock, address, endpoint, facts, deadline))
                    undo.pop_all()
                    return
            except OSError as error:
                failures.append(f"{host} port {endpoint.port}: {getattr(error, 'strerror', None) or error}")
            except HandshakeProtocolError as error:
                # A stranger, perhaps; the coordinator may be at the next address.
                refused = refused or error
        if refused is not None:
            raise refused
        if not deadline.remaining():
            raise HandshakePeerLostError(
                f"rank {facts['rank']} found no handshake coordinator within {deadline.seconds:.1f} s: "
                f"{'; '.join(failures)}. Is the coordinator rank up, has it made a Handshake(), and is it reachable by "
                f"that address (MASTER_ADDR, TORCH_TPU_INTERNAL_HANDSHAKE_PORT)?",
                ranks=[int(facts["coordinator_rank"])],
                seconds=deadline.seconds,
            )
        time.sleep(min(retry_s, deadline.remaining()))
        retry_s = min(retry_s * 1.5, LAST_RETRY_S)


def _addresses(endpoint: "Endpoint", failures: list[str]) -> Iterator[tuple[str, int, Any]]:
    for host in endpoint.hosts:
        try:
            found = socket.getaddrinfo(host, endpoint.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failures.append(f"{host}: {getattr(error, 'strerror', None) or error}")
            continue
        for family, *_, address in found:
            yield host, family, address


def _greet(
    sock: socket.socket, address: Any, endpoint: "Endpoint", facts: dict[str, Any], deadline: "Deadline"
) -> tuple[_protocol.Decoder, _protocol.Welcome, list[_protocol.Message]]:
    """Connects a socket and says who this rank is; the answer is a welcome, perhaps with more behind it. Raises OSError
    where nobody answers, HandshakeProtocolError where the wrong one does."""
    until = time.monotonic() + min(ATTEMPT_S, max(deadline.remaining(), 0.1))
    sock.settimeout(until - time.monotonic())
    sock.connect(address)
    prepare_socket(sock)
    where = f"what listens on {address[0]} port {address[1]}"
    decoder = _protocol.Decoder(frozenset({_protocol.GREETING}))
    try:
        greeting, *more = _answer(sock, decoder, until)
        if more or not isinstance(greeting, _protocol.Greeting) or greeting.magic != _protocol.MAGIC:
            raise HandshakeProtocolError(f"it began with {greeting!r}")
    except HandshakeProtocolError as error:
        raise HandshakeProtocolError(
            f"{where} is not a handshake coordinator ({error}). Set TORCH_TPU_INTERNAL_HANDSHAKE_PORT to a free port, "
            f"the same on all ranks"
        ) from error
    if greeting.version != _protocol.VERSION:
        raise HandshakeProtocolError(
            f"the coordinator on {address[0]} port {address[1]} speaks version {greeting.version} of the handshake "
            f"protocol, rank {facts['rank']} version {_protocol.VERSION}: install the same release on all hosts"
        )
    said = _protocol.write_facts({**facts, "session": endpoint.session})
    proof = _protocol.proof(endpoint.secret.encode(), greeting.nonce, said)
    sock.sendall(_protocol.encode(_protocol.Hello(proof, said)))
    decoder.kinds = _protocol.FROM_COORDINATOR | {_protocol.WELCOME, _protocol.REFUSED}
    answer, *more = _answer(sock, decoder, until)
    if not isinstance(answer, _protocol.Welcome):
        reason = answer.reason if isinstance(answer, _protocol.Refused) else f"it answered {answer!r}"
        raise HandshakeProtocolError(f"rank {facts['rank']} was refused: {reason}", ranks=[facts["rank"]])
    decoder.kinds = _protocol.FROM_COORDINATOR
    return decoder, answer, more


def _answer(sock: socket.socket, decoder: _protocol.Decoder, until: float) -> list[_protocol.Message]:
    """What comes next, one message or more."""
    messages: list[_protocol.Message] = []
    while not messages:
        sock.settimeout(max(until - time.monotonic(), 0.001))
        try:
            data = sock.recv(READ_BYTES)
        except TimeoutError:
            text = "something listens there, and has said nothing: another program, or a coordinator that hangs"
            raise TimeoutError(text) from None
        if not data:
            raise ConnectionResetError("it closed the connection")
        messages += decoder.feed(data)
    return messages
