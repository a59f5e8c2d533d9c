# SPDX-License-Identifier: Apache-2.0
"""A rank's connection to the coordinator: votes out, verdicts in, from any number of threads.

There is no reader thread. A thread that waits for its verdict reads the socket itself, and hands on what is for
others; while one thread reads, the others wait for it. So with one thread, which is the usual case, a handshake is one
`send` and one `recv`, and no thread is woken in between.

Votes leave in the order of the collective lines. A vote that leaves a gap behind this rank's last one on a group
waits a moment for the vote that fills it, which another thread may be about to submit.
"""

import functools
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

if __package__:
    from . import _protocol
    from ._sockets import limit_waits, prepare_socket
    from ._vocabulary import (
        DIGEST_BYTES,
        HandshakeConfigError,
        HandshakeError,
        HandshakePeerLostError,
        HandshakeProtocolError,
        HandshakeTimeoutError,
        ProcessGroupId,
        RankCollectiveCounts,
        format_ranks,
    )
else:
    import _protocol
    from _sockets import limit_waits, prepare_socket
    from _vocabulary import (
        DIGEST_BYTES,
        HandshakeConfigError,
        HandshakeError,
        HandshakePeerLostError,
        HandshakeProtocolError,
        HandshakeTimeoutError,
        ProcessGroupId,
        RankCollectiveCounts,
        format_ranks,
    )

logger = logging.getLogger("torch_tpu.handshake")

# How long a vote waits for the one that fills the gap before it. The other thread has counted already and is on its
# way to submit, so milliseconds are the rule; only a gap that was not recorded as eager collectives costs all of it.
GAP_WAIT_S = 1.0
# Gaps of one line that are remembered, for votes that come later still: about as many as threads compile at once.
MAX_SKIPPED_SPANS = 16
# The coordinator ends every wait at its timeout; so much later the rank concludes that it hangs.
COORDINATOR_GRACE_S = 10.0
# A reading thread looks up so often, to see whether it has waited too long.
LOOK_UP_S = 1
# A coordinator that takes nothing for so long hangs, or its host does.
SEND_WITHIN_S = 10
_TAKES_NOTHING = "it has taken nothing for some seconds: its process hangs, or its host is not reachable any more"
_INTERRUPTED = "a send was interrupted, and nobody knows how much of it has left"
# What the last bytes (a goodbye) may wait for another thread's.
CLOSE_WITHIN_S = 1.0
# Between two attempts to connect.
FIRST_RETRY_S = 0.02
LAST_RETRY_S = 0.5
# One address may keep an attempt busy so long.
ATTEMPT_S = 5.0
READ_BYTES = 65536


class Deadline:
    """A moment by which something must have happened."""

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def passed(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._at + self.seconds

    def cut(self) -> None:
        """It is now."""
        self._at = 0.0

    def remaining(self) -> float:
        """Seconds until then, never negative."""
        return max(0.0, self._at - time.monotonic())


class Endpoint(NamedTuple):
    """Where the coordinator listens, and what a rank must show to be let in."""

    hosts: tuple[str, ...]
    port: int
    secret: str
    session: str


class PendingVote:
    """A vote that was sent. `outcome` is 0 until the verdict is there; then `rounds` is there too if the ranks are to
    look for a plan."""

    __slots__ = ("facts", "flags", "number", "outcome", "rounds")

    def __init__(self, number: int) -> None:
        self.number = number
        self.outcome = 0
        self.flags = 0
        self.rounds: Rounds | None = None
        self.facts: dict[str, Any] = _NO_FACTS


_NO_FACTS: dict[str, Any] = {}


class PendingRound:
    """A round of an exchange that waits for its result."""

    __slots__ = ("ok", "outcome", "payload")

    def __init__(self) -> None:
        self.outcome = 0
        self.ok = False
        self.payload = b""

    def end(self, ok: bool, payload: bytes) -> None:
        """The result is there."""
        self.ok, self.payload, self.outcome = ok, payload, 1


class Rounds:
    """The rounds of one exchange, in order: those with a result, and those that this rank waits for."""

    __slots__ = ("__weakref__", "arrived", "asked_for", "called_off", "number", "rounds")

    def __init__(self, number: int) -> None:
        self.number = number
        self.rounds: list[PendingRound] = []
        self.arrived = 0
        self.asked_for = 0
        self.called_off: bytes | None = None

    def round(self, place: int) -> PendingRound:
        while len(self.rounds) <= place:
            self.rounds.append(PendingRound())
        return self.rounds[place]


class _Line:
    """How far this rank's votes on one group have been sent. `number` names the group on this connection; `eager` is
    how many of its collectives were recorded as issued outside any graph by then; `skipped` holds the last gaps that
    were given up waiting for."""

    __slots__ = ("eager", "frontier", "number", "ranks", "skipped")

    def __init__(self, number: int, ranks: tuple[int, ...]) -> None:
        self.number = number
        self.ranks = ranks
        self.frontier = 0
        self.eager = 0
        self.skipped: deque[tuple[int, int]] = deque(maxlen=MAX_SKIPPED_SPANS)


class _Take(NamedTuple):
    """What a vote takes of one line."""

    line: _Line
    start: int
    end: int
    eager: int

    def leaves_gap(self) -> bool:
        """Whether positions before it are neither voted on nor recorded as eager."""
        start, line = self.start, self.line
        return start > line.frontier and start - line.frontier > self.eager - line.eager

    def is_late(self) -> bool:
        """Whether it is in a gap that was given up."""
        return self.start < self.line.frontier and any(
            start <= self.start and self.end <= end for start, end in self.line.skipped
        )


class Client:
    """A connection that the coordinator has let in."""

    def __init__(self, sock: socket.socket, decoder: _protocol.Decoder, rank: int, coordinator: dict[str, Any]) -> None:
        """Takes over a socket on which the welcome has been read; `coordinator` is what the welcome said."""
        self._sock = sock
        self._decoder = decoder
        self._rank = rank
        self.coordinator = coordinator
        self.reports = bool(coordinator.get("debug"))  # whether splits are explained
        self._lines: dict[ProcessGroupId, _Line] = {}
        self._undeclared = b""
        self._sending = threading.Lock()
        self._sent = threading.Condition(self._sending)  # notified when a vote has left
        self._votes_wait_for_others = 0
        self._numbers = 0
        self._votes: dict[int, PendingVote] = {}
        self._details: dict[int, dict[str, Any]] = {}
        # Held by those who take part. When a ticket is thrown away the others are told with the next vote.
        self._exchanges: dict[int, weakref.ref[Rounds]] = {}
        self._thrown_away: deque[int] = deque()
        # Reentrant, because a signal handler's exception can come between taking it and `try`: it stays taken then, and
        # its thread must be able to read on.
        self._reading = threading.RLock()
        self._turn = threading.Condition()
        self._others_wait = 0
        self._failure: tuple[type[HandshakeError], str] | None = None
        self.bytes_sent = 0
        limit_waits(sock, receive_s=LOOK_UP_S, send_s=SEND_WITHIN_S)
        decoder.max_frame_bytes = _protocol.MAX_FRAME_BYTES
        self._hand_out()  # what came together with the welcome

    # ------------------------------------------------------------------ votes

    def vote(self, counts: RankCollectiveCounts, digest: bytes, flags: int) -> PendingVote | None:
        """Sends a vote, when it is its turn on the lines of its groups.

        Args:
            counts: where the rank stands, the graph's spans included.
            digest: the fingerprint's, `DIGEST_BYTES` long.
            flags: PARTIAL, HAS_GRAPH.

        Returns:
            The vote, for `wait`; None if the graph meets no other rank.

        Raises:
            HandshakeConfigError: a group reaches outside the world, or there are too many. Nothing was sent then.
        """
        with self._sending:
            # Not through the Mapping's methods: this is every dispatch's path.
            takes = [
                _Take(
                    self._lines.get(group) or self._declare(group),
                    count.collective_count_before,
                    count.collective_count_before + count.num_collectives_in_graph,
                    counts._eager.get(group, 0) if counts._eager else 0,
                )
                for group, count in counts._pg_to_count.items()
                if count.num_collectives_in_graph and len(group.ranks) > 1
            ]
            if len(takes) > _protocol.MAX_SPANS:
                raise too_many_groups(len(takes))
            late: list[_Take] = []
            if any(take.start != take.line.frontier for take in takes):
                self._wait_for_the_votes_before(takes)
                late = [take for take in takes if take.is_late()]
            if late:
                takes = [take for take in takes if take not in late]
                line, start, end, _ = late[0]
                reason = (
                    f"rank {self._rank}'s vote at [{start}, {end}) on {format_ranks(line.ranks)} came more than "
                    f"{GAP_WAIT_S:g} s after a later one of another thread, which was sent without it: the others have "
                    f"gone on split"
                )
                if not takes:
                    return _split_here(reason)
                # What it meets on its other groups must be split too: this is nobody's fingerprint.
                logger.warning("handshake: %s", reason)
                digest, flags = os.urandom(DIGEST_BYTES), 0
            if not takes:
                return None
            for line, _, end, eager in takes:
                # A span that goes back is for the coordinator to refuse; the line stays where it was.
                if end > line.frontier:
                    line.frontier, line.eager = end, eager
            number = self._numbers = (self._numbers + 1) & 0xFFFFFFFF
            pending = self._votes[number] = PendingVote(number)
            spans = [(line.number, start, end) for line, start, end, _ in takes]
            self._send(_protocol.vote(number, flags, digest, spans))
            if self._votes_wait_for_others:
                self._sent.notify_all()
        return pending

    def vote_usually(self, counts: RankCollectiveCounts, digest: bytes, flags: int) -> PendingVote | None:
        """`vote`, and a first read, in few steps for the usual handshake: on one group, declared before, without a gap
        before the span, and no other thread reads.

        Returns:
            None if it is no such vote; nothing has happened then. Else the vote, for `wait`: mostly it is answered.
        """
        if counts._eager or self._thrown_away or self._failure is not None:
            return None
        group = None
        for known, known_count in counts._pg_to_count.items():
            if known_count.num_collectives_in_graph:
                if group is not None:
                    return None
                group, count = known, known_count
        if group is None or (line := self._lines.get(group)) is None or not self._reading.acquire(False):
            return None
        try:
            start = count.collective_count_before
            with self._sending:
                if line.frontier != start or self._undeclared or self._decoder.is_within_frame:
                    return None
                end = line.frontier = start + count.num_collectives_in_graph
                number = self._numbers = (self._numbers + 1) & 0xFFFFFFFF
                frame = _protocol.vote_on_one(number, flags, digest, line.number, start, end)
                self.bytes_sent += len(frame)
                # Known before it is sent: an exception of a signal handler must not leave a vote that nobody knows.
                pending = self._votes[number] = PendingVote(number)
                try:
                    self._sock.sendall(frame)
                    sent = True
                except BlockingIOError:
                    self._fail(HandshakePeerLostError, _TAKES_NOTHING)
                    sent = False
                except OSError:
                    sent = False  # what the coordinator said before is still to be read, and tells more
                except BaseException:
                    self._fail(HandshakePeerLostError, _INTERRUPTED)
                    raise
                if self._votes_wait_for_others:
                    self._sent.notify_all()
            try:
                data = self._sock.recv(READ_BYTES) if sent else None
            except OSError:
                data = None  # nothing for a while; or the connection broke, as `wait` finds
            if data == _protocol.verdict(number, _protocol.FAT):
                del self._votes[number]
                pending.outcome = _protocol.FAT
                return pending
            if data is not None:
                self._take(data)
            return pending
        finally:
            self._reading.release()
            if self._others_wait:
                self._wake_others()

    def _declare(self, group: ProcessGroupId) -> _Line:
        """Gives a group a number. The frame that says so goes before whatever is sent next."""
        world_size = int(self.coordinator["world_size"])
        if group.ranks[-1] >= world_size:
            raise HandshakeConfigError(
                f"{format_ranks(group.ranks)} reach outside a world of {world_size} ranks",
                ranks=[group.ranks[-1]],
                group=group.ranks,
            )
        if len(self._lines) >= _protocol.MAX_GROUPS_PER_RANK:
            raise HandshakeConfigError(
                f"rank {self._rank} has voted on {len(self._lines)} process groups, which is all that a connection "
                f"can name; reuse groups, rather than making new ones for ever"
            )
        line = self._lines[group] = _Line(len(self._lines), group.ranks)
        self._undeclared += _protocol.group(line.number, group.ranks)
        return line

    def _wait_for_the_votes_before(self, takes: "list[_Take]") -> None:
        """Waits a moment while positions before these are neither voted on nor recorded as eager."""
        self._votes_wait_for_others += 1
        try:
            self._sent.wait_for(lambda: not any(take.leaves_gap() for take in takes), GAP_WAIT_S)
        finally:
            self._votes_wait_for_others -= 1
        for take in takes:
            if take.leaves_gap():
                take.line.skipped.append((take.line.frontier, take.start))

    def send_graph(self, vote: PendingVote, compressed: bytes) -> None:
        """Sends the graph that a verdict asked for."""
        with self._sending:
            self._send(_protocol.graph(vote.number, compressed))

    # ------------------------------------------------------------------ exchanges

    def send_to_exchange(self, rounds: Rounds, round_number: int, payload: bytes) -> None:
        """This rank's part in a round. Nothing is sent to an exchange that was called off."""
        with self._sending:
            if rounds.called_off is None:
                self._send(_protocol.exchange(rounds.number, round_number, payload))

    def next_round(self, rounds: Rounds) -> PendingRound:
        """The next result of an exchange, for `wait`: results come in the order of the rounds."""
        pending = rounds.round(rounds.asked_for)
        rounds.asked_for += 1
        if rounds.called_off is not None and not pending.outcome:
            pending.end(False, rounds.called_off)
        return pending

    def end_exchange(self, rounds: Rounds) -> None:
        """The exchange has ended for this rank."""
        self._exchanges.pop(rounds.number, None)
        rounds.rounds.clear()
        rounds.called_off = rounds.called_off or b"this rank has ended the exchange"

    # ------------------------------------------------------------------ waiting

    def wait(self, pending: PendingVote | PendingRound, seconds: float) -> None:
        """Blocks until the verdict, or the round's result, is there; for so many seconds at most.

        Raises:
            HandshakePeerLostError: the coordinator is gone.
            HandshakeProtocolError: the coordinator broke the protocol, or says that this rank did.
            HandshakeTimeoutError: the coordinator does not answer.
        """
        deadline = Deadline(seconds)
        while not pending.outcome:
            self._raise_failure()
            if self._reading.acquire(False):
                try:
                    while not pending.outcome and self._failure is None:
                        self._receive()
                        if not pending.outcome and not deadline.remaining():
                            raise self._no_answer(deadline.passed())
                finally:
                    self._reading.release()
                    if self._others_wait:
                        self._wake_others()
            else:
                with self._turn:
                    self._others_wait += 1
                    try:
                        if not pending.outcome and not self._nobody_reads():
                            self._turn.wait(LOOK_UP_S)
                    finally:
                        self._others_wait -= 1
                if not pending.outcome and not deadline.remaining():
                    raise self._no_answer(deadline.passed())

    def _nobody_reads(self) -> bool:
        if self._reading.acquire(False):
            self._reading.release()
            return True
        return False

    def read_on(self) -> None:
        """Reads what comes until the connection ends, for a thread that does nothing else."""
        while self._failure is None:
            try:
                self.wait(PendingRound(), LOOK_UP_S)
            except HandshakeTimeoutError:
                pass
            except HandshakeError:
                return

    def _wake_others(self) -> None:
        if self._others_wait:
            with self._turn:
                self._turn.notify_all()

    def _no_answer(self, seconds: float) -> HandshakeTimeoutError:
        return HandshakeTimeoutError(
            f"rank {self._rank}: {self._describe_coordinator()} has not answered within {seconds:.1f} s, and not "
            f"ended the wait either: its process hangs, or its host is not reachable any more. Look at that process",
            ranks=[int(self.coordinator["rank"])],
            seconds=seconds,
        )

    def _receive(self) -> bool:
        """Reads once, and hands out what came. Returns whether anything did, within LOOK_UP_S."""
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._fail(HandshakePeerLostError, f"the connection broke: {error.strerror or error}")
            return True
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        """Hands out what was read."""
        if not data:
            self._fail(HandshakePeerLostError, "its process exited, or its host is gone")
            return
        self._decoder.feed(data)
        self._hand_out()

    def _hand_out(self) -> None:
        """Handles the messages that have arrived whole."""
        try:
            while (message := self._decoder.next_message()) is not None:
                self._handle(message)
        except HandshakeProtocolError as error:
            self._fail(HandshakeProtocolError, str(error))

    def _handle(self, message: _protocol.Message) -> None:
        if type(message) is _protocol.Verdict:
            vote = self._votes.pop(message.vote, None)
            if vote is None:
                raise HandshakeProtocolError(f"a verdict on vote {message.vote}, which was not cast")
            vote.flags = message.flags
            if message.exchange:
                vote.rounds = Rounds(message.exchange)
                # The callback may come at any moment, in any thread: it takes no lock.
                give_up = functools.partial(self._thrown_away.append, message.exchange)
                self._exchanges[message.exchange] = weakref.ref(vote.rounds, lambda _: give_up())
            if message.outcome != _protocol.FAT:
                vote.facts = self._details.pop(message.vote, {})
            vote.outcome = message.outcome
            self._wake_others()
        elif isinstance(message, _protocol.Detail):
            self._details[message.vote] = message.facts
        elif isinstance(message, _protocol.Notice):
            logger.warning("handshake: rank %d still waits: %s", self._rank, message.text)
        elif isinstance(message, _protocol.Result):
            self._take_result(message)
        elif isinstance(message, _protocol.Report):
            self._log_report(message.facts)
        elif isinstance(message, _protocol.Goodbye):
            self._fail(HandshakePeerLostError, message.reason)
        else:
            raise HandshakeProtocolError(f"an unexpected {type(message).__name__}")

    def _take_result(self, result: _protocol.Result) -> None:
        known = self._exchanges.get(result.exchange)
        rounds = known() if known is not None else None
        if rounds is None:
            return  # this rank has ended the exchange
        if result.ok:
            rounds.round(rounds.arrived).end(True, result.payload)
            rounds.arrived += 1
        else:
            rounds.called_off = result.payload
            for pending in rounds.rounds[rounds.arrived :]:
                pending.end(False, result.payload)
        self._wake_others()

    def _log_report(self, facts: dict[str, Any]) -> None:
        if "log" in facts:
            logger.warning("handshake coordinator: %s", facts["log"])
        elif "text" in facts:
            where = f"\n(side by side: {facts['path']})" if facts.get("path") else ""
            logger.warning("handshake: why the ranks' graphs were split:\n%s%s", facts["text"].rstrip(), where)
        elif facts.get("path"):
            logger.warning(
                "handshake: why rank %d was split is in the log of rank %s, and in %s on its host",
                self._rank,
                facts.get("rank"),
                facts["path"],
            )

    # ------------------------------------------------------------------ the connection

    def _send(self, data: bytes) -> None:
        """Sends frames, `_sending` being held."""
        self._raise_failure()
        if self._undeclared:
            data, self._undeclared = self._undeclared + data, b""
        while self._thrown_away:
            number = self._thrown_away.popleft()
            self._exchanges.pop(number, None)
            data = _protocol.exchange(number, _protocol.ABORT, b"its ticket was thrown away") + data
        try:
            self._sock.sendall(data)
        except BlockingIOError:
            self._fail(HandshakePeerLostError, _TAKES_NOTHING)
        except OSError as error:
            # What the coordinator said before it closed tells more than this error; it may still be unread.
            if self._reading.acquire(False):
                try:
                    while self._failure is None and self._receive():
                        pass
                finally:
                    self._reading.release()
            self._fail(HandshakePeerLostError, f"the connection broke: {error.strerror or error}")
        except BaseException:
            self._fail(HandshakePeerLostError, _INTERRUPTED)
            raise
        self._raise_failure()
        self.bytes_sent += len(data)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure[0](self._failure[1], ranks=[int(self.coordinator["rank"])])

    def _fail(self, kind: type[HandshakeError], why: str) -> None:
        if self._failure is None:
            self._failure = (
                kind,
                f"rank {self._rank}: {self._describe_coordinator()} is lost: {why}. No handshake is possible any "
                f"more; look at the log of that rank, and restart the job",
            )
        self._wake_others()

    def _describe_coordinator(self) -> str:
        facts = self.coordinator
        return f"the coordinator (rank {facts.get('rank')}, {facts.get('host')}:{facts.get('pid')})"

    def close(self, reason: str) -> None:
        """Says goodbye and closes. Threads that wait get an error. Idempotent."""
        if self._failure is None:
            self._failure = (HandshakeError, f"rank {self._rank}: the handshake was closed")
            # Not into the middle of another thread's frame. One that is stuck is woken by the shutdown.
            if self._sending.acquire(timeout=CLOSE_WITHIN_S):
                try:
                    self._sock.sendall(_protocol.goodbye(reason))
                except OSError:
                    pass
                finally:
                    self._sending.release()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._wake_others()
        # A thread that reads is woken by the shutdown; only then may the descriptor's number be used again.
        if self._reading.acquire(timeout=2 * LOOK_UP_S):
            self._sock.close()
            self._reading.release()

    def abandon(self) -> None:
        """In a forked child: lets go of the parent's connection, without a word to the coordinator."""
        self._failure = (HandshakeError, f"rank {self._rank}: this connection belongs to the parent process")
        self._sock.close()


def connect(find_endpoint: Callable[[Deadline], Endpoint], facts: dict[str, Any], deadline: Deadline) -> Client:
    """Connects to the coordinator, trying again while it is still starting.

    Args:
        find_endpoint: says where the coordinator is; asked anew for every attempt.
        facts: this rank's hello, but for the session, which the endpoint gives.
        deadline: when to give up.

    Raises:
        HandshakePeerLostError: nobody was reached by then.
        HandshakeProtocolError: what listens there is no coordinator, speaks another version, or refuses this rank, and
            no other address of the coordinator's is better.
    """
    rank = int(facts["rank"])
    retry_s = FIRST_RETRY_S
    while True:
        endpoint = find_endpoint(deadline)
        failures: list[str] = []
        refused: HandshakeProtocolError | None = None
        for host in endpoint.hosts:
            try:
                addresses = socket.getaddrinfo(host, endpoint.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                failures.append(f"{host}: {getattr(error, 'strerror', None) or error}")
                continue
            for family, *_, address in addresses:
                try:
                    return _try(family, address, endpoint, facts, deadline)
                except OSError as error:
                    failures.append(f"{host} port {endpoint.port}: {error.strerror or error}")
                except HandshakeProtocolError as error:
                    # A stranger, perhaps; the coordinator may be at the next address.
                    refused = refused or error
        if refused is not None:
            raise refused
        remaining = deadline.remaining()
        if not remaining:
            raise HandshakePeerLostError(
                f"rank {rank} found no handshake coordinator within {deadline.seconds:.1f} s: {'; '.join(failures)}. "
                f"Is the coordinator rank up, has it made a Handshake(), and is it reachable by that address "
                f"(MASTER_ADDR, TORCH_TPU_INTERNAL_HANDSHAKE_PORT)?",
                ranks=[int(facts["coordinator_rank"])],
                seconds=deadline.seconds,
            )
        time.sleep(min(retry_s, remaining))
        retry_s = min(retry_s * 1.5, LAST_RETRY_S)


def _try(family: int, address: Any, endpoint: Endpoint, facts: dict[str, Any], deadline: Deadline) -> Client:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        attempt = Deadline(min(ATTEMPT_S, max(deadline.remaining(), 0.1)))
        sock.settimeout(attempt.remaining())
        sock.connect(address)
        prepare_socket(sock)
        decoder = _protocol.Decoder()
        where = f"what listens on {address[0]} port {address[1]}"
        try:
            greeting = _first(sock, decoder, attempt)
        except HandshakeProtocolError as error:
            raise HandshakeProtocolError(
                f"{where} is no handshake coordinator ({error}). Set TORCH_TPU_INTERNAL_HANDSHAKE_PORT to a free port, "
                f"the same on all ranks"
            ) from error
        if not isinstance(greeting, _protocol.Greeting):
            raise HandshakeProtocolError(f"{where} is no handshake coordinator: it began with {greeting!r}")
        if greeting.version != _protocol.VERSION:
            raise HandshakeProtocolError(
                f"the coordinator on {address[0]} port {address[1]} speaks version {greeting.version} of the handshake "
                f"protocol, rank {facts['rank']} version {_protocol.VERSION}: install the same release on all hosts"
            )
        sock.sendall(
            _protocol.hello({**facts, "session": endpoint.session}, endpoint.secret.encode(), greeting.nonce)
        )
        answer = _first(sock, decoder, attempt)
        if isinstance(answer, _protocol.Refused):
            raise HandshakeProtocolError(f"rank {facts['rank']} was refused: {answer.reason}", ranks=[facts["rank"]])
        if not isinstance(answer, _protocol.Welcome):
            raise HandshakeProtocolError(f"{where} answered a hello with {type(answer).__name__}")
        return Client(sock, decoder, int(facts["rank"]), answer.facts)
    except BaseException:
        sock.close()
        raise


def _first(sock: socket.socket, decoder: _protocol.Decoder, attempt: Deadline) -> _protocol.Message:
    while True:
        message = decoder.next_message()
        if message is not None:
            return message
        sock.settimeout(max(attempt.remaining(), 0.001))
        try:
            data = sock.recv(READ_BYTES)
        except TimeoutError:
            raise TimeoutError(
                f"something listens there, and has said nothing for {attempt.seconds:.1f} s: another program, or a "
                f"coordinator that hangs"
            ) from None
        if not data:
            raise ConnectionResetError("it closed the connection")
        decoder.feed(data)


def too_many_groups(number: int) -> HandshakeConfigError:
    """What to raise for a graph on so many groups."""
    return HandshakeConfigError(
        f"a graph has collectives on {number} process groups of this rank; a vote can name {_protocol.MAX_SPANS}"
    )


def _split_here(reason: str) -> PendingVote:
    """A vote that need not be sent to be answered SPLIT."""
    vote = PendingVote(0)
    vote.facts = {"reason": reason}
    vote.outcome = _protocol.SPLIT
    return vote


def host_and_pid() -> dict[str, Any]:
    """How other ranks name this process."""
    return {"host": socket.gethostname(), "pid": os.getpid()}
