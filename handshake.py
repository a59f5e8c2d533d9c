# SPDX-License-Identifier: Apache-2.0
"""The collective handshake: ranks agree whether a graph with collectives may run as one executable.

Before a rank compiles, or dispatches, a graph with collectives, it votes: for each process group, which span of the
group's collective line the graph takes, and a fingerprint of the program. If all the ranks that meet in those
collectives vote the same, each gets True, and compiles the whole graph ("fat"). If not, each gets False, and splits at
its collectives ("skinny"). See `_consensus` for the exact rule.

    if should_handshake(pg_to_num_collectives):
        fat = submit_handshake(fingerprint, pg_to_num_collectives)

`Handshake` is one process's way to the coordinator, `DispatchGate` a compiled executable's vote at each dispatch.
"""

import atexit
import logging
import os
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

if __package__:
    from . import _client, _coordinator, _protocol, _rendezvous
    from ._client import Deadline, Endpoint, PendingVote
    from ._settings import DEBUG_VARIABLE, ON_TIMEOUT_VARIABLE, TIMEOUT_VARIABLE, Settings, rank_or_size, stage_of
    from ._vocabulary import (
        STAGE_VARIABLE,
        CollectiveHandshakeRequest,
        CollectiveHandshakeResponse,
        GroupLike,
        HandshakeConfigError,
        HandshakeError,
        HandshakePeerLostError,
        HandshakeProtocolError,
        HandshakeStage,
        HandshakeTimeoutError,
        HandshakeTypeError,
        ProcessGroupCollectiveCount,
        ProcessGroupId,
        RankCollectiveCounts,
        collectives_by_group,
        fingerprint_digest,
        format_ranks,
        must_be_in_world,
        whole_number,
    )
else:
    import _client
    import _coordinator
    import _protocol
    import _rendezvous
    from _client import Deadline, Endpoint, PendingVote
    from _settings import DEBUG_VARIABLE, ON_TIMEOUT_VARIABLE, TIMEOUT_VARIABLE, Settings, rank_or_size, stage_of
    from _vocabulary import (
        STAGE_VARIABLE,
        CollectiveHandshakeRequest,
        CollectiveHandshakeResponse,
        GroupLike,
        HandshakeConfigError,
        HandshakeError,
        HandshakePeerLostError,
        HandshakeProtocolError,
        HandshakeStage,
        HandshakeTimeoutError,
        HandshakeTypeError,
        ProcessGroupCollectiveCount,
        ProcessGroupId,
        RankCollectiveCounts,
        collectives_by_group,
        fingerprint_digest,
        format_ranks,
        must_be_in_world,
        whole_number,
    )

__all__ = [
    "CollectiveHandshakeRequest",
    "CollectiveHandshakeResponse",
    "DispatchGate",
    "Exchange",
    "Handshake",
    "HandshakeConfigError",
    "HandshakeError",
    "HandshakePeerLostError",
    "HandshakeProtocolError",
    "HandshakeStage",
    "HandshakeTimeoutError",
    "HandshakeTypeError",
    "ProcessGroupCollectiveCount",
    "ProcessGroupId",
    "RankCollectiveCounts",
    "Ticket",
    "has_collectives_between_ranks",
    "record_eager_collectives",
    "should_handshake",
    "submit_handshake",
    "submit_handshake_async",
]

logger = logging.getLogger("torch_tpu.handshake")

# A graph's text, or a callable that makes it. The callable is called in a thread of its own, at most once, and only
# if debugging is on and the ranks were split: the graph must not change until then.
GraphText = str | Callable[[], str] | None

_select_handshake_port = _rendezvous.select_handshake_port


# ---------------------------------------------------------------------- one process's way to the coordinator


class _Session:
    """What all `Handshake` objects of one process and job share: the connection, and on the coordinator rank the
    coordinator."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.closed = False
        self.forked = False  # whether this is a copy of another process's
        self.bytes_sent = 0  # by a connection that was closed
        self.endpoint: Endpoint | None = None
        # The coordinator ends every wait in time; the client's own limit is for a coordinator that hangs.
        self.wait_s = settings.timeout_s + _client.COORDINATOR_GRACE_S
        self.waited_s = 0.0
        self.longest_wait_s = 0.0
        self.counters = dict.fromkeys(("fat", "split", "timeout", "peer_lost", "refused"), 0)
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._connect_within = Deadline(0.0)
        self._connect_failure: HandshakeError | None = None
        self.connected: _client.Client | None = None
        self.exchange_of_thread: dict[int, weakref.ref[Exchange]] = {}  # the last that was opened for each
        self._coordinator: _coordinator.Coordinator | None = None
        self._is_published = False
        self._splits_of: dict[bytes, int] = {}
        if settings.world_size > 1 and settings.rank == settings.place.coordinator_rank:
            self._start_coordinator()

    def _start_coordinator(self) -> None:
        settings = self.settings
        self._is_published = settings.place.store() is not None
        listener, self.endpoint = _select_handshake_port(settings.place)
        config = _coordinator.Config(
            settings.rank,
            {**self._facts(), "session": self.endpoint.session},
            self.endpoint.secret,
            settings.timeout_s,
            settings.debug,
        )
        self._coordinator = _coordinator.Coordinator(listener, config, settings.coordinator)

    def _facts(self) -> dict[str, Any]:
        facts = {
            "rank": self.settings.rank,
            "world_size": self.settings.world_size,
            "coordinator_rank": self.settings.place.coordinator_rank,
            "stage": self.settings.stage.name,
            "timeout_s": self.settings.timeout_s,
            "on_timeout": "split" if self.settings.split_on_timeout else "raise",
            "python": ".".join(map(str, sys.version_info[:3])),
            **_client.host_and_pid(),
        }
        for name in ("torch", "torch_tpu"):
            version = getattr(sys.modules.get(name), "__version__", None)
            if version is not None:
                facts[name] = str(version)
        return facts

    def client(self) -> _client.Client:
        """The connection, made when it is first needed."""
        failure_before = self._connect_failure
        with self._connecting:
            if self.connected is not None:
                return self.connected
            if self._connect_failure is not failure_before and self._connect_failure is not None:
                raise self._connect_failure.with_traceback(None)  # another thread's attempt, while this one waited
            with self._lock:
                self.must_be_open()
                self._connect_within = Deadline(self.settings.timeout_s)
            self.publish()
            try:
                client = _client.connect(self._find, self._facts(), self._connect_within)
            except HandshakeError as error:
                self.must_be_open()
                self._connect_failure = error
                raise
            with self._lock:
                if not self.closed:
                    self.connected = client
            if self.closed:
                client.close(f"rank {self.rank} closed its handshake")
                self.must_be_open()
            if client.reports:
                # Reports come when nobody waits for a verdict; only a job that is being debugged gets any.
                threading.Thread(target=client.read_on, name="handshake-reports", daemon=True).start()
            return client

    def publish(self) -> None:
        """Where the coordinator was started before the job had a store, in which the other ranks look now."""
        if self._coordinator is not None and self.endpoint is not None and not self._is_published:
            self._is_published = _rendezvous.publish_late(self.settings.place, self.endpoint)

    def must_be_open(self) -> None:
        """Raises HandshakeError if it was closed."""
        if self.forked:
            raise HandshakeError(_forked(self.rank))
        if self.closed:
            raise HandshakeError(f"rank {self.rank}: the handshake was closed; make a new Handshake()")

    def _find(self, deadline: Deadline) -> Endpoint:
        # The coordinator's own rank knows what it bound; the others ask.
        if self.endpoint is not None:
            own = _rendezvous.loopback_address(self.settings.place.host)
            return self.endpoint._replace(hosts=(own, *self.endpoint.hosts))
        return _rendezvous.find_endpoint(self.settings.place, deadline)

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port) of the coordinator, on its own rank; else None."""
        return None if self.endpoint is None else (self.endpoint.hosts[0], self.endpoint.port)

    def count(self, how: str, waited_s: float) -> None:
        """Counts one handshake, how it ended, and the seconds that it took."""
        with self._lock:
            self.counters[how] += 1
            self.waited_s += waited_s
            if waited_s > self.longest_wait_s:
                self.longest_wait_s = waited_s

    def leave_exchange(self) -> None:
        """This thread is about to wait for a vote: if it has not gone through its last exchange, it can't any more, and
        the ranks that wait there must not wait for it."""
        known = self.exchange_of_thread.pop(threading.get_ident(), None)
        exchange = None if known is None else known()
        if exchange is not None:
            exchange.leave()

    def splits_seen(self, digest: bytes) -> int:
        """Counts one more split of this fingerprint."""
        with self._lock:
            # Bounded: a job that makes new fingerprints for ever loses only how often it was told about old ones.
            if len(self._splits_of) > 10_000:
                self._splits_of.clear()
            count = self._splits_of[digest] = self._splits_of.get(digest, 0) + 1
            return count

    def close(self) -> None:
        """Ends the connection, and the coordinator where it runs. Idempotent."""
        with self._lock:
            self.closed = True
            self._connect_within.cut()
            client, self.connected = self.connected, None
            coordinator, self._coordinator = self._coordinator, None
        if client is not None:
            self.bytes_sent = client.bytes_sent
            client.close(f"rank {self.settings.rank} closed its handshake")
        if coordinator is not None:
            coordinator.close()

    def abandon(self) -> None:
        """In a forked child: lets go without a word."""
        self.closed = self.forked = True
        client, self.connected = self.connected, None
        if client is not None:
            client.abandon()
        if self._coordinator is not None:
            self._coordinator.abandon()


# The open sessions, by the arguments with which a Handshake of theirs was made.
_sessions: dict[tuple[Any, ...], _Session] = {}
_sessions_lock = threading.Lock()


# The ranks whose handshakes were open in the process that this one was forked from.
_forked_from: set[int | None] = set()


def _forked(rank: int | None) -> str:
    return (
        f"this process is a fork of rank {rank}'s, which votes for that rank: don't run graphs with collectives in "
        f"forked children, or make them ranks of their own"
    )


def _session_for(
    key: tuple[Any, ...],
    rank: int | None,
    world_size: int | None,
    coordinator_rank: int | None,
    given: Mapping[str, Any],
) -> _Session:
    """The session for these arguments of a Handshake: the open one that they fit, else a new one. What is None, and no
    variable says, fits all."""
    rank = rank_or_size("current_rank", rank, "RANK")
    world_size = rank_or_size("world_size", world_size, "WORLD_SIZE")
    coordinator_rank = None if coordinator_rank is None else whole_number(coordinator_rank, "coordinator_rank")
    with _sessions_lock:
        for closed in [known for known, session in _sessions.items() if session.closed]:
            del _sessions[closed]
        if key not in _sessions:
            fitting = [
                session
                for session in dict.fromkeys(_sessions.values())
                if rank in (None, session.rank)
                and world_size in (None, session.settings.world_size)
                and coordinator_rank in (None, session.settings.place.coordinator_rank)
                and session.settings.has_place(given)
            ]
            if len(fitting) > 1:
                ranks = format_ranks(session.rank for session in fitting)
                raise HandshakeConfigError(
                    f"{len(fitting)} handshakes that are open in this process could be meant, of {ranks}: say which by "
                    f"current_rank, host and port"
                )
            if fitting:
                session = fitting[0]
                settings = session.settings
                asked = Settings.resolve(settings.rank, settings.world_size, settings.place.coordinator_rank, given)
                asked.must_agree_with(settings, given)
                session.publish()
            else:
                if rank in _forked_from:
                    raise HandshakeError(_forked(rank))
                session = _Session(Settings.resolve(rank, world_size, coordinator_rank or 0, given))
                if given["stage"] is not None:
                    global _stage_session
                    _stage_session = session
            _sessions[key] = session
        return _sessions[key]


class Handshake:
    """This process's part in the handshakes of its job.

    All objects of one process and job share one connection, so making one for each call is cheap: the first says how it
    is, later ones need no arguments. (Only who gives another rank, coordinator rank, world size, host or port gets
    another connection.) The coordinator starts when the coordinator rank makes its first; the connection when something
    is first submitted. A world of one rank starts and connects nothing.
    """

    def __init__(
        self,
        current_rank: int | None = None,
        coordinator_rank: int | None = None,
        *,
        world_size: int | None = None,
        host: str | None = None,
        port: int | None = None,
        timeout_s: float | None = None,
        on_timeout: str | None = None,
        secret: str | None = None,
        stage: HandshakeStage | str | None = None,
        debug: str | os.PathLike[str] | None = None,
        coordinator: str | None = None,
    ) -> None:
        """
        Args:
            current_rank: this process's rank; by default torch.distributed's, else ``RANK``.
            coordinator_rank: the rank that runs the coordinator; by default 0.
            world_size: by default torch.distributed's, else ``WORLD_SIZE``.
            host: where the coordinator is reached without a store (``MASTER_ADDR``; localhost).
            port: the coordinator's; 0 on its rank: the kernel picks one (see `address`).
            timeout_s: how long a vote may wait, in seconds (``TORCH_TPU_INTERNAL_HANDSHAKE_TIMEOUT_S``; 60).
            on_timeout: "raise" or "split" (``TORCH_TPU_INTERNAL_HANDSHAKE_ON_TIMEOUT``).
            secret: what ranks must know to be let in (``TORCH_TPU_INTERNAL_HANDSHAKE_SECRET``; the store's).
            stage: for `should_handshake` and `DispatchGate`, and compared between ranks
                (``TORCH_TPU_INTERNAL_HANDSHAKE_STAGE``).
            debug: a folder for reports on splits (``TORCH_TPU_INTERNAL_HANDSHAKE_DEBUG``).
            coordinator: "process" (the default), or "thread" to run it in this process.

        Raises:
            HandshakeConfigError: a value can't be used, differs from the open handshake's, or the port is taken.
            HandshakePeerLostError: the job's store, in which the coordinator is published, failed.
        """
        if current_rank is None or world_size is None:
            distributed = _rendezvous.torch_distributed()
            if distributed is not None:
                current_rank = distributed.get_rank() if current_rank is None else current_rank
                world_size = distributed.get_world_size() if world_size is None else world_size
        key = (
            *(current_rank, coordinator_rank, world_size, host, port, timeout_s, on_timeout),
            *(secret, stage, debug, coordinator),
        )
        try:
            session = _sessions.get(key)
        except TypeError as error:
            wrong = [value for value in key if value.__hash__ is None]
            raise HandshakeTypeError(f"an argument of Handshake can't be {wrong!r}: {error}") from None
        if session is None or session.closed:
            given = {
                "host": host,
                "port": port,
                "timeout_s": timeout_s,
                "on_timeout": on_timeout,
                "secret": secret,
                "stage": stage,
                "debug": debug,
                "coordinator": coordinator,
            }
            session = _session_for(key, current_rank, world_size, coordinator_rank, given)
        self._session = session

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._session.settings.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the job."""
        return self._session.settings.world_size

    @property
    def address(self) -> tuple[str, int] | None:
        """On the coordinator rank, the (host, port) by which others reach it; elsewhere None."""
        return self._session.address

    def submit(self, request: CollectiveHandshakeRequest, graph_text: GraphText = None) -> bool:
        """Casts a vote and waits for its verdict.

        Args:
            request: see `CollectiveHandshakeRequest`; its rank is this process's.
            graph_text: the graph, for the report on a split.

        Returns:
            True: every rank involved runs the same program; compile or run the whole graph. False: split it.

        Raises:
            HandshakeConfigError: the request can't be this rank's.
            HandshakeTimeoutError: ranks did not come in time (with on_timeout="raise").
            HandshakePeerLostError: a rank involved, or the coordinator, is gone.
            HandshakeProtocolError: the vote is out of order, or the coordinator refuses this rank.
            HandshakeError: the handshake was closed.
        """
        session = self._session
        client = session.connected
        if client is None or type(request) is not CollectiveHandshakeRequest or request.rank != session.rank:
            client = self._client_for(request)
            if client is None:
                return True
        flags = 0
        if graph_text is not None and client.reports:
            flags |= _protocol.HAS_GRAPH
        if session.exchange_of_thread:
            session.leave_exchange()
        started = time.monotonic()
        counts, digest = request.pg_collective_counts, fingerprint_digest(request.executable_fingerprint)
        pending = client.vote_usually(counts, digest, flags) or client.vote(counts, digest, flags)
        if pending is None:
            return True
        if not pending.outcome:
            client.wait(pending, session.wait_s)
        if pending.outcome == _protocol.FAT:
            session.count("fat", time.monotonic() - started)
            return True
        return Ticket(session, client, pending, request, graph_text, started).result()

    def submit_async(
        self, request: CollectiveHandshakeRequest, graph_text: GraphText = None, *, partial: bool = False
    ) -> "Ticket":
        """Casts a vote without waiting. See `submit`.

        Args:
            partial: this rank is able to agree on a plan that keeps the common part of diverging graphs fat;
                see `Ticket.exchange`. Only if all ranks involved say so does it come to that.
        """
        client = self._client_for(request)
        if client is None:
            return Ticket(self._session, None, None, request, None, 0.0)
        flags = _protocol.PARTIAL if partial else 0
        if graph_text is not None and client.reports:
            flags |= _protocol.HAS_GRAPH
        started = time.monotonic()
        pending = client.vote(request.pg_collective_counts, fingerprint_digest(request.executable_fingerprint), flags)
        return Ticket(self._session, client, pending, request, graph_text, started)

    def _client_for(self, request: CollectiveHandshakeRequest) -> _client.Client | None:
        """The connection to vote on; None while nothing that needs one was submitted.

        Raises:
            HandshakeConfigError: the request can't be this rank's.
            HandshakeError: the handshake was closed, or no connection could be made.
        """
        rank = self._session.rank
        if not isinstance(request, CollectiveHandshakeRequest):
            raise HandshakeTypeError(f"expected a CollectiveHandshakeRequest, got {type(request).__name__}")
        if request.rank != rank:
            raise HandshakeConfigError(
                f"a request of rank {request.rank} was submitted on rank {rank}", ranks=[request.rank]
            )
        counts = request.pg_collective_counts
        return self._client_for_groups([group for group in counts if counts[group].num_collectives_in_graph])

    def _client_for_groups(self, groups: Iterable[ProcessGroupId]) -> _client.Client | None:
        session = self._session
        session.must_be_open()
        if session.connected is not None:
            return session.connected
        for group in groups:
            must_be_in_world(group.ranks, self.world_size)
        return session.client() if any(len(group.ranks) > 1 for group in groups) else None

    def stats(self) -> dict[str, float]:
        """What this process has seen since it connected: handshakes whose answer was asked for, and how they ended,
        `waited_s` and `longest_wait_s` in seconds, `bytes_sent`."""
        session = self._session
        client = session.connected
        return {
            "handshakes": sum(session.counters.values()),
            **session.counters,
            "waited_s": session.waited_s,
            "longest_wait_s": session.longest_wait_s,
            "bytes_sent": client.bytes_sent if client is not None else session.bytes_sent,
        }

    def close(self) -> None:
        """Leaves: ranks that wait for this one are told so. On the coordinator rank this ends the coordinator too,
        for all ranks. Idempotent; done at exit."""
        self._session.close()

    def __enter__(self) -> "Handshake":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_COUNTED_AS = {
    _protocol.FAT: "fat",
    _protocol.SPLIT: "split",
    _protocol.TIMEOUT: "timeout",
    _protocol.PEER_LOST: "peer_lost",
    _protocol.VOTE_REFUSED: "refused",
}


class Ticket:
    """A vote under way.

    Attributes:
        exchange: after `result` has returned False for a vote with `partial`, the rounds in which the ranks agree on a
            plan, if the coordinator opened them; else None. The other ranks wait in them for this one: go through
            them, in the order in which the votes were cast, or call `Exchange.abort`. A thread that waits for another
            vote first has left them, which calls them off for all; so does letting go of the ticket, with this rank's
            next vote.
    """

    def __init__(
        self,
        session: _Session,
        client: _client.Client | None,
        pending: PendingVote | None,
        request: CollectiveHandshakeRequest,
        graph_text: GraphText,
        started: float,
    ) -> None:
        self._session = session
        self._client = client
        self._pending = pending
        self._request = request
        self._graph_text = graph_text
        self._started = started
        self._lock = threading.Lock()
        self._answer: bool | HandshakeError | None = None if pending is not None else True
        self.exchange: Exchange | None = None

    def result(self) -> bool:
        """Waits for the verdict; True for fat. Raises what `Handshake.submit` raises. Idempotent, from any thread."""
        if self._answer is None:
            with self._lock:
                if self._answer is None:
                    self._answer = self._wait()
        if isinstance(self._answer, HandshakeError):
            raise self._answer.with_traceback(None)
        return self._answer

    def _wait(self) -> bool | HandshakeError:
        pending, client = self._pending, self._client
        if pending is None or client is None:
            raise AssertionError("a vote that was never sent")
        if not pending.outcome:
            self._session.leave_exchange()
            client.wait(pending, self._session.wait_s)
        waited_s = time.monotonic() - self._started
        self._session.count(_COUNTED_AS[pending.outcome], waited_s)
        if pending.outcome == _protocol.FAT:
            return True
        return self._not_fat(pending, client, waited_s)

    def _not_fat(self, pending: PendingVote, client: _client.Client, waited_s: float) -> bool | HandshakeError:
        settings = self._session.settings
        reason = pending.facts.get("reason", "no reason was given")
        fields: dict[str, Any] = {"seconds": waited_s}
        for name in ("ranks", "group"):
            if pending.facts.get(name):
                fields[name] = _protocol.ranks_of(pending.facts[name])
        if pending.facts.get("span"):
            fields["span"] = tuple(pending.facts["span"])
        if pending.outcome == _protocol.TIMEOUT:
            missing = fields.get("ranks", ())
            if settings.rank in missing:
                what_to_do = "This rank is slower than that, or runs other graphs"
            else:
                what_to_do = f"Look at the log of {format_ranks(missing)}: hung, slower, or running other graphs"
            message = (
                f"rank {settings.rank}: {reason} (waited {waited_s:.1f} s). {what_to_do}. A longer wait: "
                f"{TIMEOUT_VARIABLE}"
            )
            if settings.split_on_timeout:
                logger.warning("handshake: %s. It goes on split", message)
                return False
            return HandshakeTimeoutError(
                f"{message}; to go on split instead: {ON_TIMEOUT_VARIABLE}=split", **fields
            )
        if pending.outcome == _protocol.PEER_LOST:
            return HandshakePeerLostError(f"rank {settings.rank} can't go on: {reason}", **fields)
        if pending.outcome == _protocol.VOTE_REFUSED:
            return HandshakeProtocolError(reason, **fields)
        if pending.flags & _protocol.SEND_GRAPH:
            threading.Thread(target=self._send_graph, args=(client,), name="handshake-graph", daemon=True).start()
        if pending.rounds is not None:
            # The coordinator ends an exchange at its own timeout.
            wait_s = max(self._session.wait_s, client.coordinator["timeout_s"] + _client.COORDINATOR_GRACE_S)
            self.exchange = Exchange(client, pending.rounds, settings.rank, wait_s)
            self._session.exchange_of_thread[threading.get_ident()] = weakref.ref(self.exchange)
        self._log_split(reason)
        return False

    def _log_split(self, reason: str) -> None:
        fingerprint = self._request.executable_fingerprint
        count = self._session.splits_seen(fingerprint_digest(fingerprint))
        # The first is news, and then each tenfold number of them: a split at every step would bury the log.
        level = logging.WARNING if str(count).strip("0") == "1" else logging.DEBUG
        settings, client = self._session.settings, self._client
        if client is not None and client.reports:
            hint = ""
        elif settings.debug:
            hint = f" To see why, set {DEBUG_VARIABLE} on rank {settings.place.coordinator_rank} too, which coordinates"
        else:
            hint = f" Set {DEBUG_VARIABLE} to a folder to see what differs and what to change"
        logger.log(
            level,
            "handshake: rank %d runs graph %s split at its collectives (time %d): %s.%s",
            settings.rank,
            fingerprint[:32],
            count,
            reason,
            hint,
        )

    def _send_graph(self, client: _client.Client) -> None:
        try:
            text = self._graph_text() if callable(self._graph_text) else (self._graph_text or "")
            if not isinstance(text, str):
                raise TypeError(f"it must be text, not {type(text).__name__}")
        except Exception as error:
            logger.warning("handshake: the graph of a split could not be printed", exc_info=True)
            text = f"# the graph could not be printed: {error!r}\n"
        compressed = zlib.compress(text.encode("utf-8", "replace"))
        if len(compressed) > _protocol.MAX_GRAPH_BYTES:
            half = len(text) * _protocol.MAX_GRAPH_BYTES // len(compressed) // 2
            cut = f"# handshake: truncated = {len(text)} characters, the first {half} are here\n"
            compressed = zlib.compress((cut + text[:half]).encode("utf-8", "replace"))
        if self._pending is not None:
            try:
                client.send_graph(self._pending, compressed[: _protocol.MAX_GRAPH_BYTES])
            except HandshakeError as error:
                logger.debug("handshake: a graph could not be sent: %s", error)


class Exchange:
    """The rounds in which the ranks of a split component agree on a plan (see `_partition`).

    Each method returns None once the exchange is called off: a rank is lost, late, or not able to. Everybody goes
    on skinny then.

    Attributes:
        rank: this rank.
        is_undecided: the answer to this rank's `agree` is on its way, or got lost: the others may run the plan.
    """

    def __init__(self, client: _client.Client, rounds: _client.Rounds, rank: int, wait_s: float) -> None:
        self._client = client
        self._rounds = rounds
        self._wait_s = wait_s
        self.rank = rank
        self._reference: int | None = None
        self.is_undecided = False

    def reference_rank(self) -> int | None:
        """Waits until all ranks of the component have voted; the rank whose graph the others align with."""
        payload = self._result()
        self._reference = None if payload is None else int.from_bytes(payload, "big")
        return self._reference

    def share(self, payload: bytes | None) -> bytes | None:
        """The reference rank gives `payload`, the others None; all get it."""
        if self.rank != self._reference:
            return self._result()
        if payload is None:
            raise HandshakeConfigError("the reference rank must give a payload")
        if len(payload) > _protocol.MAX_PAYLOAD_BYTES:
            self.abort(f"the reference graph's keys take {len(payload)} bytes")
            return None
        self._client.send_to_exchange(self._rounds, _protocol.SHARE, payload)
        return payload

    def intersect(self, bitmap: bytes) -> bytes | None:
        """The bitwise AND of all ranks' bitmaps, which must be of one length. May be called several times."""
        return self._round(_protocol.INTERSECT, bitmap)

    def agree(self, fingerprint: str) -> bool:
        """Whether all ranks of the component gave the same fingerprint: then, and only then, run the plan."""
        # An exception on the way leaves it open what the others were told: they may run the plan. So nobody may take
        # this exchange for one that was called off.
        self.is_undecided = True
        answer = self._round(_protocol.AGREE, fingerprint_digest(fingerprint))
        self.is_undecided = False
        self._client.end_exchange(self._rounds)
        return answer == b"\x01"

    def abort(self, reason: str) -> None:
        """This rank can't go on: everybody runs skinny."""
        self._client.send_to_exchange(self._rounds, _protocol.ABORT, reason.encode("utf-8", "replace")[:1024])
        self._client.end_exchange(self._rounds)

    def leave(self) -> None:
        """`abort`, if this rank has not come to the end."""
        if self._rounds.called_off is None and not self.is_undecided:
            self.abort("it went on to its next vote instead")

    def _round(self, round_number: int, payload: bytes) -> bytes | None:
        self._client.send_to_exchange(self._rounds, round_number, payload)
        return self._result()

    def _result(self) -> bytes | None:
        pending = self._client.next_round(self._rounds)
        self._client.wait(pending, self._wait_s)
        if not pending.ok:
            logger.info("handshake: no common plan: %s", pending.payload.decode("utf-8", "replace"))
            self._client.end_exchange(self._rounds)
            return None
        return pending.payload


# ---------------------------------------------------------------------- for a compiler's two stages


def should_handshake(pg_to_num_collectives: Mapping[Any, int]) -> bool:
    """Whether a graph with these collectives must be agreed on: the stage is not OFF, and at least one collective
    is on a group of two or more ranks."""
    return _stage_now() is not HandshakeStage.OFF and has_collectives_between_ranks(pg_to_num_collectives)


def has_collectives_between_ranks(pg_to_num_collectives: Mapping[Any, int]) -> bool:
    """Whether there is a collective on a group of two or more ranks, so that there is something to agree on.

    Raises:
        HandshakeTypeError: a key is no process group, or that is no mapping.
        HandshakeConfigError: a count is none.
    """
    try:
        for group, count in pg_to_num_collectives.items():
            if count > 0 and len(group.ranks) > 1:
                return True
    except (AttributeError, TypeError):
        collectives_by_group(pg_to_num_collectives)  # says what is wrong with it
        raise
    return False


# The last text of the stage's variable and what it means: parsing it anew would be most of `should_handshake`.
_stage_seen: tuple[str | None, HandshakeStage] = (None, HandshakeStage.OFF)


# The open session that was given a stage by keyword, which goes before the variable.
_stage_session: _Session | None = None


def _stage_now() -> HandshakeStage:
    global _stage_seen
    session = _stage_session
    if session is not None and not session.closed:
        return session.settings.stage
    text = os.environ.get(STAGE_VARIABLE)
    seen = _stage_seen
    if seen[0] != text:
        seen = _stage_seen = (text, HandshakeStage.from_env())
    return seen[1]


_counts = RankCollectiveCounts()
_counts_lock = threading.Lock()


def submit_handshake(
    executable_fingerprint: str, pg_to_num_collectives: Mapping[Any, int], graph_module_str: GraphText = None
) -> bool:
    """Counts a graph's collectives on this process's lines, votes, and waits for the verdict.

    Args:
        executable_fingerprint: equal on two ranks exactly when their programs are (see `_graph.graph_fingerprint`).
        pg_to_num_collectives: how many collectives the graph issues on each group.
        graph_module_str: the graph's text, or a callable that makes it, for the report on a split. The callable is
            called in another thread, at most once, and only if debugging is on and the ranks were split.

    Returns:
        True for fat, False for split.

    Raises:
        As `Handshake.submit`. After a HandshakeConfigError nothing was counted (but if it says that this rank has
        used up the groups of its connection).
    """
    handshake = Handshake()
    request = _count(handshake, executable_fingerprint, pg_to_num_collectives)
    # Another thread's vote may overtake this one here; the connection sends them in the order of the lines.
    return handshake.submit(request, graph_module_str)


def submit_handshake_async(
    executable_fingerprint: str,
    pg_to_num_collectives: Mapping[Any, int],
    graph_module_str: GraphText = None,
    *,
    partial: bool = False,
) -> Ticket:
    """`submit_handshake` without the wait. See `Handshake.submit_async`."""
    handshake = Handshake()
    request = _count(handshake, executable_fingerprint, pg_to_num_collectives)
    return handshake.submit_async(request, graph_module_str, partial=partial)


def _count(
    handshake: Handshake, fingerprint: str, pg_to_num_collectives: Mapping[Any, int]
) -> CollectiveHandshakeRequest:
    """The request for the next graph. The process's lines have moved if it could be made and there is a connection."""
    global _counts
    collectives = collectives_by_group(pg_to_num_collectives)
    for group in collectives:
        must_be_in_world(group.ranks, handshake.world_size)
    if len(collectives) > _protocol.MAX_SPANS and sum(map(bool, collectives.values())) > _protocol.MAX_SPANS:
        raise _client.too_many_groups(sum(map(bool, collectives.values())))
    # Not under the lock: it may take a while, and another thread may have something to count.
    handshake._client_for_groups([group for group, count in collectives.items() if count])
    with _counts_lock:
        counts = _counts.__copy__()
        counts.increment_pg_collective_counts(collectives)
        if not counts:
            # A graph without collectives, before any with some: a request still needs a group, an idle one.
            counts.increment_pg_collective_counts({ProcessGroupId([handshake.rank]): 0})
        request = CollectiveHandshakeRequest(counts, fingerprint, handshake.rank)
        _counts = counts
    return request


def record_eager_collectives(pg: GroupLike, num_collectives: int) -> None:
    """Counts collectives that this process issued on `pg` outside any graph: the line that `submit_handshake` keeps
    moves on, and nobody votes."""
    global _counts
    with _counts_lock:
        counts = _counts.__copy__()  # requests that are under way hold the last one
        counts.record_eager_collectives(pg, num_collectives)
        _counts = counts


class DispatchGate:
    """A compiled executable's vote, for its `__call__`.

    OFF: always False, as without a handshake. COMPILE_STAGE: one vote, when the gate is made, remembered.
    DISPATCH_STAGE: one vote at each dispatch, also after a split, so that every graph moves its lines and goes back
    to fat as soon as the ranks agree again. A graph without collectives between ranks is always fat: there is
    nothing to agree on.
    """

    def __init__(
        self,
        executable_fingerprint: str,
        pg_to_num_collectives: Mapping[Any, int],
        graph_module_str: GraphText = None,
        *,
        stage: HandshakeStage | str | None = None,
    ) -> None:
        """Votes in COMPILE_STAGE. See `submit_handshake` for the arguments and what is raised; `stage` is
        that of the open handshake by default, as `should_handshake` takes it."""
        self._fingerprint = executable_fingerprint
        self._pg_to_num_collectives = collectives_by_group(pg_to_num_collectives)
        self._graph_text = graph_module_str
        self.stage = _stage_now() if stage is None else stage_of(stage)
        self._remembered: bool | None = None
        if self.stage is HandshakeStage.OFF:
            self._remembered = False
        elif not has_collectives_between_ranks(self._pg_to_num_collectives):
            self._remembered = True
        elif self.stage is HandshakeStage.COMPILE_STAGE:
            self._remembered = self._cast()

    def vote(self) -> bool:
        """Whether this dispatch runs fat."""
        return self._cast() if self._remembered is None else self._remembered

    def _cast(self) -> bool:
        return submit_handshake(self._fingerprint, self._pg_to_num_collectives, self._graph_text)


# ---------------------------------------------------------------------- the end of the process, and forks


def _close_all() -> None:
    for session in list(_sessions.values()):
        session.close()
    _sessions.clear()


def _forget_all_after_fork() -> None:
    global _sessions_lock, _counts_lock
    _sessions_lock = threading.Lock()
    _counts_lock = threading.Lock()
    for session in list(_sessions.values()):
        session.abandon()
        _forked_from.add(session.rank)
    _sessions.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all_after_fork)


def main(arguments: list[str]) -> int:
    """`python handshake.py explain FILE FILE …`: what differs between graphs that were printed or logged."""
    if __package__:
        from . import _explain
    else:
        import _explain
    return _explain.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
