# SPDX-License-Identifier: Apache-2.0
"""The collective handshake: ranks agree whether a graph with collectives may run as one executable.

Before a rank compiles, or dispatches, a graph with collectives, it votes: for each process group, which span of the
group's collective line the graph takes, and a fingerprint of the program. If all the ranks that meet in those
collectives vote the same, each gets True, and compiles the whole graph ("fat"). If not, each gets False, and splits at
its collectives ("skinny"). `_consensus` is the rule.

    if should_handshake(pg_to_num_collectives):
        fat = submit_handshake(fingerprint, pg_to_num_collectives)

`Handshake` is this process's way to the coordinator, `DispatchGate` a compiled executable's vote at each dispatch.
"""

import atexit
import functools
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

if __package__:
    from . import _client, _coordinator, _protocol, _rendezvous, _vocabulary
else:
    import _client
    import _coordinator
    import _protocol
    import _rendezvous
    import _vocabulary

__all__ = [
    "CollectiveHandshakeRequest", "CollectiveHandshakeResponse", "DispatchGate", "Handshake",
    "HandshakeConfigError", "HandshakeError", "HandshakeMismatchError", "HandshakePeerLostError",
    "HandshakeProtocolError", "HandshakeStage", "HandshakeTimeoutError", "HandshakeTypeError",
    "ProcessGroupCollectiveCount", "ProcessGroupId", "RankCollectiveCounts", "Ticket",
    "has_collectives_between_ranks", "record_eager_collectives", "should_handshake", "submit_handshake",
    "submit_handshake_async",
]  # fmt: skip

CollectiveHandshakeRequest = _vocabulary.CollectiveHandshakeRequest
CollectiveHandshakeResponse = _vocabulary.CollectiveHandshakeResponse
HandshakeConfigError = _vocabulary.HandshakeConfigError
HandshakeError = _vocabulary.HandshakeError
HandshakeMismatchError = _vocabulary.HandshakeMismatchError
HandshakePeerLostError = _vocabulary.HandshakePeerLostError
HandshakeProtocolError = _vocabulary.HandshakeProtocolError
HandshakeStage = _vocabulary.HandshakeStage
HandshakeTimeoutError = _vocabulary.HandshakeTimeoutError
HandshakeTypeError = _vocabulary.HandshakeTypeError
ProcessGroupCollectiveCount = _vocabulary.ProcessGroupCollectiveCount
ProcessGroupId = _vocabulary.ProcessGroupId
RankCollectiveCounts = _vocabulary.RankCollectiveCounts

logger = logging.getLogger("torch_tpu.handshake")

GraphText = str | Callable[[], str] | None  # see `submit_handshake`
# Graphs whose splits are counted, or of which it is known that they were agreed. A job that makes new ones for ever is
# told of old ones once more.
MAX_SPLITS_COUNTED = 10_000
GRAPHS_WITHIN_S = 3.0  # for the last reports, when a rank leaves
_COUNTED_AS = ("handshakes", "fat", "split", "timeout", "peer_lost", "refused")  # by an outcome's number


class _Session:
    """What this process has of its job's handshakes: lines, connection, and on its rank the coordinator."""

    def __init__(self, settings: _rendezvous.Settings) -> None:
        self.settings = settings
        self.closed = ""  # why, once it is
        self.endpoint: _rendezvous.Endpoint | None = None  # on the coordinator rank
        # The coordinator ends every wait in time; the client's own limit is for a coordinator that hangs.
        self.wait_s = settings.timeout_s + _client.COORDINATOR_GRACE_S
        self.lock = threading.Lock()  # for what is counted, and for `closed`
        self.stats: dict[str, float] = dict.fromkeys((*_COUNTED_AS, "waited_s", "longest_wait_s"), 0)
        self.splits: dict[str, int] = {}  # by fingerprint
        self.votes_once = settings.stage is HandshakeStage.COMPILE_STAGE
        self.agreed: set[str] = set()  # fingerprints that were, where graphs vote once
        self.graphs: list[threading.Thread] = []  # that are on their way to the coordinator
        self._connecting = threading.Lock()
        self._connect_within = _rendezvous.Deadline(0.0)
        self._connect_failure: HandshakeError | None = None
        self._coordinator: _coordinator.Coordinator | None = None
        self.client: _client.Client
        self.observer: Any = None  # the client, where it is one that only observes
        if settings.observe:
            observe = _extra("_observe")
            if observe is None:
                raise HandshakeConfigError("mode=observe needs _observe.py, which is not beside handshake.py")
            self.client = self.observer = observe.Observer(self)
        else:
            self.client = _client.Client(settings.rank, settings.world_size)
            self.start_coordinator()
            if self._coordinator is not None:
                self.client.how_it_ended = self._coordinator.how_it_ended

    def start_coordinator(self) -> None:
        """Where this rank coordinates. Raises as `Handshake`."""
        settings = self.settings
        if settings.world_size > 1 and settings.rank == settings.coordinator_rank:
            self._is_published = settings.store() is not None
            listener, self.endpoint = _rendezvous.select_handshake_port(settings)
            _client.prepare_socket(listener)
            facts = {**self.facts(), "session": self.endpoint.session}
            config = _coordinator.Config(facts, self.endpoint.secret, settings.debug)
            try:
                self._coordinator = _coordinator.Coordinator(listener, config, settings.coordinator)
            except OSError as error:
                listener.close()
                text = f"rank {settings.rank}: the coordinator can't be started: {error.strerror or error}"
                raise HandshakeError(f"{text}. If descriptors ran out, raise `ulimit -n`") from error

    def facts(self) -> dict[str, Any]:
        """What this rank says of itself when it connects, but for the session."""
        settings = self.settings
        as_they_are = ("rank", "world_size", "coordinator_rank", "groups", "timeout_s")
        found = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "torch_tpu")}
        return {
            **{name: getattr(settings, name) for name in as_they_are},
            **{name: str(version) for name, version in found.items() if version is not None},
            "stage": settings.stage.name,
            "mode": "observe" if settings.observe else "enforce",
            "on_timeout": "split" if settings.split_on_timeout else "raise",
            "python": ".".join(map(str, sys.version_info[:3])),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def connected(self) -> _client.Client:
        """The client, with a connection: made when it is first needed."""
        failure_before = self._connect_failure
        with self._connecting:
            if self.client.is_connected:
                return self.client
            if self._connect_failure is not failure_before and self._connect_failure is not None:
                raise self._connect_failure.with_traceback(None)  # another thread's attempt, while this one waited
            self.publish()
            try:
                _client.connect(self.client, self.find, self.facts(), self.connect_within())
            except HandshakeError as error:
                self.must_be_open()
                self._connect_failure = error
                raise
            if self.client.coordinator.get("debug"):
                # Reports come when nobody waits for a verdict; only a job that is being debugged gets any.
                threading.Thread(target=self.client.read_on, name="handshake-reports", daemon=True).start()
        return self.client

    def connect_within(self) -> _rendezvous.Deadline:
        """Until when to connect, from now on; `close` cuts it. Raises HandshakeError if it was closed."""
        with self.lock:
            self.must_be_open()
            self._connect_within = _rendezvous.Deadline(self.settings.timeout_s)
            return self._connect_within

    def find(self) -> _rendezvous.Endpoint:
        """Where the coordinator is (`_rendezvous.find_endpoint`); this rank's own is on this host."""
        if self.endpoint is not None:
            own = _rendezvous.loopback_address(self.settings.host)
            return self.endpoint._replace(hosts=(own, *self.endpoint.hosts))
        return _rendezvous.find_endpoint(self.settings)

    def publish(self) -> None:
        """Where the coordinator was started before the job had a store, in which the other ranks look now."""
        if self.endpoint is not None and not self._is_published:
            self._is_published = _rendezvous.publish_late(self.settings, self.endpoint)

    def must_be_open(self) -> None:
        """Raises HandshakeError if it was closed."""
        if self.closed:
            raise HandshakeError(f"rank {self.settings.rank}: {self.closed}")

    def flags(self, text: GraphText, partial: bool) -> int:
        """Those of a vote."""
        has_graph = text is not None and (self.observer or self.client.coordinator.get("debug"))
        can_plan = partial and not self.observer and _extra("_graph_plan") is not None
        return (_protocol.PARTIAL if can_plan else 0) | (_protocol.HAS_GRAPH if has_graph else 0)

    def break_off(self, reason: str) -> None:
        """See `Handshake.abandon`."""
        if self.client.is_connected and self.client._failure is None and self.observer is None:
            what = f"{_protocol.BROKE_OFF}: {_vocabulary.shorten(reason, 1000)}"
            logger.error("handshake: rank %d tells the others that %s", self.settings.rank, what)
            self.client.close(f"{what}. It votes no more: restart the job", what)

    def close(self, failure: object = None) -> None:
        """Ends the connection, and the coordinator where it runs; forgets the counts. Idempotent. `failure`: the class
        of the exception that has ended the program, if it was one."""
        until = time.monotonic() + GRAPHS_WITHIN_S
        for thread in self.graphs:
            thread.join(max(0.0, until - time.monotonic()))
        with self.lock:
            if not self.closed:
                self.closed = "the handshake was closed; make a new Handshake()"
                _vocabulary.given_group_naming = None
            self._connect_within.cut()
        self.client.close(self.closed)
        if self._coordinator is not None:
            # Where this rank fails, nobody waits for others.
            self._coordinator.close(stays=(failure or sys.exc_info()[0]) in (None, SystemExit))

    def abandon(self) -> None:
        """In a forked child: lets go without a word."""
        self.closed = _FORKED
        self.client.abandon(self.closed)
        if self._coordinator is not None:
            self._coordinator.abandon()


# The one session of this process; None where there is none. And what was recorded while there was none.
_session: _Session | None = None
_recorded: dict[ProcessGroupId, int] = {}
_session_lock = threading.RLock()

# Why a forked child can't vote for the rank whose handshake was open in its parent.
_FORKED = (
    "this process is a fork of that rank's, which votes for it: don't run graphs with collectives in forked children, "
    "or make them ranks of their own"
)
_forked_ranks: set[int] = set()

# Each thread's `exchanges`: the one that it has still to go through, unless its ticket was let go.
_thread = threading.local()
_absent: set[str] = set()  # modules that are not there, which was said


class Handshake:
    """This process's part in the handshakes of its job.

    All objects of one process share one session: the first says how it is, later ones give the same arguments or none.
    The coordinator starts when the coordinator rank makes its first; the connection when something is first submitted.
    A world of one rank starts and connects nothing.
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
        on_mismatch: str | None = None,
        mode: str | None = None,
        secret: str | None = None,
        stage: HandshakeStage | str | None = None,
        groups: str | None = None,
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
            on_mismatch: where the ranks' collectives differ, so that they hang or get wrong numbers, split or not:
                "warn" (an error in the log) or "raise" (``TORCH_TPU_INTERNAL_HANDSHAKE_ON_MISMATCH``).
            mode: "enforce", or "observe": each answer is True at once, nobody waits, and what would have been split or
                timed out is logged and counted (``TORCH_TPU_INTERNAL_HANDSHAKE_MODE``).
            secret: what ranks must know to be let in (``TORCH_TPU_INTERNAL_HANDSHAKE_SECRET``; the store's).
            stage: for `should_handshake` and `DispatchGate` (``TORCH_TPU_INTERNAL_HANDSHAKE_STAGE``).
            groups: how fingerprints name groups, "role" or "exact" (``TORCH_TPU_INTERNAL_HANDSHAKE_GROUPS``).
            debug: a folder for reports on splits (``TORCH_TPU_INTERNAL_HANDSHAKE_DEBUG``).
            coordinator: "process" (the default), or "thread" to run it in this process.

        Raises:
            HandshakeConfigError: a value can't be used, differs from the open handshake's, or the port is taken.
            HandshakePeerLostError: the job's store, in which the coordinator is published, failed.
        """
        global _session, _recorded
        given = {name: value for name, value in locals().items() if name != "self" and value is not None}
        if _session is None or _session.closed or given:
            with _session_lock:
                if _session is not None and not _session.closed:
                    _session.settings.must_agree_with(given)
                else:
                    try:
                        settings = _rendezvous.Settings.resolve(given)
                        rank: Any = settings.rank
                    except HandshakeConfigError:  # its parent was told by keyword, perhaps
                        rank = max(_forked_ranks, default=None) if current_rank is None else None
                        if rank is None:
                            raise
                    if rank in _forked_ranks:
                        raise HandshakeError(f"rank {rank}: {_FORKED}")
                    session = _Session(settings)
                    session.client.eager, _recorded = _recorded, {}
                    _session = session
                    _vocabulary.given_group_naming = groups
        self._session = _session
        if _session.observer is None:
            _session.publish()

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
        endpoint = self._session.endpoint
        return None if endpoint is None else (endpoint.hosts[0], endpoint.port)

    def submit(
        self, request: CollectiveHandshakeRequest, graph_text: GraphText = None, *, label: str | None = None
    ) -> bool:
        """Casts a vote and waits for its verdict.

        Args:
            request: see `CollectiveHandshakeRequest`; its rank is this process's.
            graph_text: the graph, for the report on a split.
            label: what messages call the graph beside its fingerprint, such as "layer 3 backward".

        Returns:
            True: every rank involved runs the same program; compile or run the whole graph. False: split it.

        Raises:
            HandshakeConfigError: the request can't be this rank's.
            HandshakeTimeoutError: ranks did not come in time (with on_timeout="raise").
            HandshakePeerLostError: a rank involved, or the coordinator, is gone.
            HandshakeProtocolError: the vote is out of order, or the coordinator refuses this rank.
            HandshakeMismatchError: the ranks' collectives differ (with on_mismatch="raise").
            HandshakeError: the handshake was closed.
        """
        return self.submit_async(request, graph_text, label=label).result()

    def submit_async(
        self,
        request: CollectiveHandshakeRequest,
        graph_text: GraphText = None,
        *,
        partial: bool = False,
        label: str | None = None,
    ) -> "Ticket":
        """Casts a vote without waiting. See `submit`.

        Args:
            partial: this rank is able to agree on a plan that keeps the common part of diverging graphs fat;
                see `Ticket.exchange`. Only if all ranks involved say so does it come to that.
        """
        session = self._session
        if not isinstance(request, CollectiveHandshakeRequest):
            raise HandshakeTypeError(f"expected a CollectiveHandshakeRequest, got {type(request).__name__}")
        if request.rank != session.client.rank:
            text = f"a request of rank {request.rank} was submitted on rank {session.client.rank}"
            raise HandshakeConfigError(text, ranks=[request.rank])
        client, fingerprint = session.client, request.executable_fingerprint
        if not client.is_connected:
            session.must_be_open()
            if not client.resolve(dict.fromkeys(request.participating_groups, 1)):  # it meets nobody
                return Ticket(session, None, fingerprint, graph_text, label)
            session.connected()
        digest, flags = _vocabulary.fingerprint_digest(fingerprint), session.flags(graph_text, partial)
        if digest not in client.declared:
            client.declare(digest, _vocabulary.graph_name(fingerprint, label), ())
        pending = client.vote_counted(request.pg_collective_counts, digest, flags)
        return Ticket(session, pending, fingerprint, graph_text, label)

    def stats(self) -> dict[str, Any]:
        """Handshakes that were waited for, how they ended, `waited_s`, `longest_wait_s` and `bytes_sent`. In the mode
        "observe" also `graphs`: the same counts by graph."""
        session = self._session
        observed = {} if session.observer is None else {"graphs": session.observer.graphs}
        return {**session.stats, "bytes_sent": session.client.bytes_sent, **observed}

    def set_timeout(self, seconds: float) -> None:
        """How long votes may wait from the next one on: long while ranks compile for the first time, then short. Of
        ranks that wait together the shortest counts, so call it on all of them. Raises HandshakeConfigError."""
        session = self._session
        settings = session.settings._replace(timeout_s=_rendezvous._parse("timeout_s", seconds, "seconds"))
        session.client.ahead.append(_protocol.encode(_protocol.Wait(settings.timeout_s)))
        session.settings, session.wait_s = settings, settings.timeout_s + _client.COORDINATOR_GRACE_S

    def abandon(self, reason: str) -> None:
        """Tells the others why this rank can't do what was agreed, such as that a program fails to compile. Whoever
        waits for it, or votes on a group that holds it, gets HandshakePeerLostError with the reason. Its own votes
        raise."""
        self._session.break_off(reason)

    def close(self) -> None:
        """Leaves: ranks that wait for this one are told so. Idempotent; done at exit. A new `Handshake()` starts anew,
        at position 0 of each line. On the coordinator rank this ends the coordinator too, for all ranks: it waits until
        all have been there and left, for 10 s at most; but not where an exception ends the program."""
        self._session.close()

    @classmethod
    def _reset_instances(cls) -> None:  # for torch_tpu's tests
        _close()
        _recorded.clear()

    def __enter__(self) -> "Handshake":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Ticket:
    """A vote under way.

    Attributes:
        exchange: after `result` has returned False for a vote with `partial`, the rounds in which the ranks agree on a
            plan (`_graph_plan.Exchange`), if it comes to that; else None. The other ranks wait in them for this one: go
            through them, in the order in which the votes were cast, or call `Exchange.abort`. A thread that waits for
            another vote first has left them, which calls them off for all; so does letting go of the ticket.
    """

    def __init__(
        self,
        session: Any,
        pending: _client.PendingVote | None,
        fingerprint: str,
        text: GraphText,
        label: str | None,
        answer: bool = True,
    ) -> None:
        """A vote of a `_Session`; or, where there is none to cast, its answer."""
        self._session, self._pending = session, pending
        self._fingerprint, self._text, self._label = fingerprint, text, label
        self._lock = threading.Lock()
        self._answer: bool | HandshakeError | None = answer if pending is None else None
        self.exchange: Any = None
        if pending is not None:
            self._wait_s = session.wait_s
            if session.observer is not None:
                self._answer = True
                session.observer.watch(self, pending)

    def __del__(self) -> None:
        if self._pending is not None and self._answer is None:
            self._session.client.give_up(self._pending)

    def result(self) -> bool:
        """Waits for the verdict; True for fat. Raises what `Handshake.submit` raises. Idempotent, from any thread."""
        if self._answer is None:
            with self._lock:
                if self._answer is None and self._pending is not None:
                    self._answer = self._wait(self._pending)
        if isinstance(self._answer, HandshakeError):
            raise self._answer.with_traceback(None)
        return bool(self._answer)

    @property
    def name(self) -> str:
        """How messages name the graph."""
        return _vocabulary.graph_name(self._fingerprint, self._label)

    def _wait(self, pending: _client.PendingVote) -> bool | HandshakeError:
        session = self._session
        if not pending.outcome:
            # This thread can't go through its last exchange any more: nobody must wait for it there.
            for exchange in vars(_thread).pop("exchanges", ()):
                exchange.leave()
            session.client.wait(pending, pending.sent_at + self._wait_s)
        return self.conclude(pending)

    def conclude(self, pending: _client.PendingVote) -> bool | HandshakeError:
        """Counts the verdict, which is there, and does what follows from it."""
        session = self._session
        waited_s = time.monotonic() - pending.sent_at
        with session.lock:
            stats = session.stats
            stats["handshakes"] += 1
            stats[_COUNTED_AS[pending.outcome]] += 1
            stats["waited_s"] += waited_s
            stats["longest_wait_s"] = max(stats["longest_wait_s"], waited_s)
        if pending.outcome != _protocol.FAT:
            return self._not_fat(pending, waited_s)
        if session.votes_once and len(session.agreed) < MAX_SPLITS_COUNTED:
            session.agreed.add(self._fingerprint)
        return True

    def _not_fat(self, pending: _client.PendingVote, waited_s: float) -> bool | HandshakeError:
        settings, facts = self._session.settings, pending.facts
        reason = facts.get("reason", "no reason was given")
        ranks, group = (_protocol.ranks_of(facts.get(name) or ()) for name in ("ranks", "group"))
        span = tuple(facts["span"]) if facts.get("span") else None
        fields: dict[str, Any] = {"ranks": ranks, "group": group or None, "span": span, "seconds": waited_s}
        if pending.outcome == _protocol.TIMEOUT:
            what_to_do = "This rank is slower than that, or runs other graphs"
            if settings.rank not in ranks:
                who = _vocabulary.format_ranks(ranks)
                causes = "compiling since its last vote, hung, slower, or running other graphs"
                what_to_do = f"Look at the log of {who}: {causes}"
                if self._fingerprint in self._session.agreed:
                    again = "most likely only this rank has compiled it again, and in COMPILE_STAGE only it votes again"
                    what_to_do = f"This graph was agreed before: {again}. {what_to_do}"
            what_happened = f"rank {settings.rank}: {reason} (waited {waited_s:.1f} s)"
            longer = f"{_rendezvous.TIMEOUT_VARIABLE}, or Handshake().set_timeout(seconds)"
            message = f"{what_happened}. {what_to_do}. A longer wait: {longer}"
            if not settings.split_on_timeout:
                split = f"to go on split instead: {_rendezvous.ON_TIMEOUT_VARIABLE}=split"
                return HandshakeTimeoutError(f"{message}; {split}", **fields)
            logger.warning("handshake: %s. It goes on split", message)
            return False
        if pending.outcome == _protocol.PEER_LOST:
            return HandshakePeerLostError(f"rank {settings.rank} can't go on: {reason}", **fields)
        if pending.outcome == _protocol.VOTE_REFUSED:
            return HandshakeProtocolError(reason, **fields)
        self._take_mail(pending)
        text = self._log_split(pending, reason)
        if facts.get("broken") and settings.raise_on_mismatch:
            return HandshakeMismatchError(text, **fields)
        return False

    def _take_mail(self, pending: _client.PendingVote) -> None:
        """What extras of the coordinator's want of this rank."""
        client, wait_s = self._session.client, self._session.wait_s
        reports = _extra("_graph_report") if pending.graph_is_asked_for else None
        if reports is not None:
            channel = _client.Channel(client, pending, _protocol.REPORTS, wait_s)
            arguments = (channel, self._text)
            thread = threading.Thread(target=reports.send_graph, args=arguments, name="handshake-graph", daemon=True)
            thread.start()
            self._session.graphs = [one for one in self._session.graphs if one.is_alive()] + [thread]
        plans = _extra("_graph_plan") if pending.flags & _protocol.PLAN else None
        if plans is not None:
            # The coordinator ends an exchange at its own timeout.
            wait_s = max(wait_s, client.coordinator["timeout_s"] + _client.COORDINATOR_GRACE_S)
            channel = _client.Channel(client, pending, _protocol.PLANS, wait_s)
            self.exchange = plans.Exchange(channel, self._session.settings.rank)
            _thread.exchanges = weakref.WeakSet([self.exchange])

    def _log_split(self, pending: _client.PendingVote, reason: str) -> str:
        settings, splits = self._session.settings, self._session.splits
        name = self.name
        with self._session.lock:
            if len(splits) > MAX_SPLITS_COUNTED:
                splits.clear()
            count = splits[name] = splits.get(name, 0) + 1
        broken = pending.facts.get("broken")
        level = logging.ERROR if broken else logging.WARNING
        # The first is news, and then each tenfold number of them: a split at every step would bury the log. One rank
        # speaks for all with the same graph; but where it is broken, each is in trouble itself.
        if str(count).strip("0") != "1" or not (broken or pending.flags & _protocol.SPEAKS):
            level = logging.DEBUG
        if broken:
            reason += f". Their collectives differ, so they hang or get wrong numbers, split or not: {broken}"
        elif broken is not None:
            reason += ". Their collectives agree, so this is slower, and right"
        variable, folder = _rendezvous.DEBUG_VARIABLE, self._session.client.coordinator.get("debug")
        hint = f" Set {variable} to a folder to see what differs and what to change" if folder is None else ""
        if folder is None and settings.debug:
            hint = f" To see why, set {variable} on rank {settings.coordinator_rank} too, which coordinates"
        how = "whole, which the handshake would have split" if settings.observe else "split at its collectives"
        text = f"rank {settings.rank} runs graph {name} {how} (time {count}): {reason}.{hint}"
        logger.log(level, "handshake: %s", text)
        return text


def _extra(name: str) -> Any:
    """A module that may be absent; None then, which is said once."""
    module = None if name in _absent else _coordinator.find_extra(name)
    if module is None and name not in _absent:
        _absent.add(name)
        logger.warning("handshake: %s.py is not beside handshake.py: what needs it is left out", name)
    return module


# ---------------------------------------------------------------------- for a compiler's two stages


def should_handshake(pg_to_num_collectives: Mapping[Any, int]) -> bool:
    """`has_collectives_between_ranks`; but in the stage OFF, or where none is set, always False."""
    return _stage_now() is not HandshakeStage.OFF and has_collectives_between_ranks(pg_to_num_collectives)


def has_collectives_between_ranks(pg_to_num_collectives: Mapping[Any, int]) -> bool:
    """Whether there is a collective on a group of two or more ranks, so that there is something to agree on.
    Raises HandshakeTypeError for another type than a mapping from groups to whole numbers."""
    try:
        for group, count in pg_to_num_collectives.items():
            if count > 0 and len(group.ranks) > 1:
                return True
    except (AttributeError, TypeError):
        _vocabulary.collectives_by_group(pg_to_num_collectives)  # says what is wrong with it
        raise
    return False


@functools.lru_cache(maxsize=1)  # parsing them anew would be most of `should_handshake`
def _stage_by_variables(*texts: str | None) -> HandshakeStage:
    return HandshakeStage.from_env()


def _stage_now() -> HandshakeStage:
    session = _session
    if session is not None and not session.closed:
        return session.settings.stage
    get, (name, other_name) = os.environ.get, _vocabulary.STAGE_VARIABLES
    return _stage_by_variables(get(name), get(other_name))


def submit_handshake(
    executable_fingerprint: str,
    pg_to_num_collectives: Mapping[Any, int],
    graph_module_str: GraphText = None,
    *,
    label: str | None = None,
) -> bool:
    """Counts a graph's collectives on this process's lines, votes, and waits for the verdict.

    Args:
        executable_fingerprint: equal on two ranks exactly when their programs are (see `_graph.graph_fingerprint`).
        pg_to_num_collectives: how many collectives the graph issues on each group. With `.sequences`, as
            `_graph.count_collectives` gives it, a split tells whether the ranks' collectives differ.
        graph_module_str: the graph's record or text, or a callable that makes it, for the report on a split. The
            callable is called in another thread, at most once, and only if debugging is on and the ranks were split.
        label: what messages call the graph beside its fingerprint, such as "layer 3 backward".

    Returns:
        True for fat, False for split.

    Raises:
        As `Handshake.submit`. After a HandshakeConfigError nothing was counted.
    """
    ticket = submit_handshake_async(executable_fingerprint, pg_to_num_collectives, graph_module_str, label=label)
    return ticket.result()


def submit_handshake_async(
    executable_fingerprint: str,
    pg_to_num_collectives: Mapping[Any, int],
    graph_module_str: GraphText = None,
    *,
    partial: bool = False,
    label: str | None = None,
) -> Ticket:
    """`submit_handshake` without the wait. See `Handshake.submit_async`."""
    arguments = (executable_fingerprint, pg_to_num_collectives, graph_module_str)
    stage = HandshakeStage.DISPATCH_STAGE
    return DispatchGate(*arguments, stage=stage, partial=partial, label=label).vote_async()


def _select_handshake_port(current_rank: int | None = None, coordinator_rank: int | None = None) -> int:
    """The coordinator's port, on any rank. It is bound already: this opens the process's handshake, and connects."""
    session = Handshake(current_rank, coordinator_rank)._session
    session.connected()
    return session.find().port


def record_eager_collectives(pg: _vocabulary.GroupLike, num_collectives: int) -> None:
    """Counts collectives that this process issued on `pg` outside any graph: the line that `submit_handshake` keeps
    moves on, and nobody votes. Starts and connects nothing: without a session it is kept for the next one."""
    [(group, number)] = _vocabulary.collectives_by_group({pg: num_collectives}).items()
    with _session_lock:
        if _session is not None and not _session.closed:
            _session.client.record_eager(group, number)
        else:
            _recorded[group] = ProcessGroupCollectiveCount(_recorded.get(group, 0) + number, 0).end


class DispatchGate:
    """A compiled executable's vote, for its `__call__`: compile first, then vote, then run.

    OFF: always False, as without a handshake. COMPILE_STAGE: one vote, when it is first asked, remembered.
    DISPATCH_STAGE: one vote at each dispatch, also after a split, so that every graph moves its lines and goes back
    to fat as soon as the ranks agree again. A graph without collectives between ranks is fat in every stage: there is
    nothing to agree on.

    So a graph that is never run, or failed to compile, takes no place on its lines. What fails between the vote and
    the run must be told: `abandon`. A pickled gate has not voted where it is loaded, and takes the stage of that
    process; a callable for the graph's text is left out.
    """

    def __init__(
        self,
        executable_fingerprint: str,
        pg_to_num_collectives: Mapping[Any, int],
        graph_module_str: GraphText = None,
        *,
        stage: Any = None,
        partial: bool = False,
        label: str | None = None,
    ) -> None:
        """See `submit_handshake` for the arguments, and `Handshake.submit_async` for `partial`. `stage` may be any
        enum's member of that name; by default it is the open handshake's, as `should_handshake` takes it. Raises
        HandshakeConfigError."""
        self._fingerprint = _vocabulary.usable_fingerprint(executable_fingerprint)
        self._digest = _vocabulary.fingerprint_digest(self._fingerprint)
        self._text, self._label = graph_module_str, label
        self._collectives = _vocabulary.collectives_by_group(pg_to_num_collectives)
        self._sequences = getattr(pg_to_num_collectives, "sequences", {})
        self.stage = _stage_now() if stage is None else HandshakeStage.parse(stage, "stage")
        self.partial = partial
        self._session: _Session | None = None  # in which it voted last; its groups are resolved once for each
        self._takes: list[tuple[_client.Line, int]] = []
        self._flags = 0
        meets = has_collectives_between_ranks(self._collectives)
        self._votes_each_time = meets and self.stage is HandshakeStage.DISPATCH_STAGE
        self._lock = threading.Lock()  # where it votes once, it does so for all threads together
        self._ticket: Ticket | None = None  # the answer, where there is no vote any more
        if self.stage is HandshakeStage.OFF or not meets:
            # A collective whose group is not known counts on this rank alone (`_graph.count_collectives`).
            is_unknown = bool(self._collectives) and self._fingerprint.startswith("unhashable-")
            self._ticket = Ticket(None, None, self._fingerprint, None, None, not meets and not is_unknown)

    @property
    def answer(self) -> bool | None:
        """What `vote` returns without a vote, or None where it will vote."""
        known = None if self._ticket is None else self._ticket._answer
        return known if isinstance(known, bool) else None

    def vote(self, facts: str | bytes | None = None) -> bool:
        """Whether this dispatch runs fat. `facts`, a short text or bytes, become part of the fingerprint of this vote:
        what else must be equal on all ranks, such as which of several executables runs. In COMPILE_STAGE those of the
        first call count. Raises as `Handshake.submit`, and HandshakeTypeError for other facts."""
        return (self._cast(facts) if self._votes_each_time else self.vote_async(facts)).result()

    def vote_async(self, facts: str | bytes | None = None) -> Ticket:
        """`vote` without the wait. In COMPILE_STAGE it is the same ticket each time."""
        if self._votes_each_time:
            return self._cast(facts)
        with self._lock:
            session = self._session
            if self._ticket is None or (self.answer is None and session is not None and session.closed):
                self._ticket = self._cast(facts)
            return self._ticket

    def _cast(self, facts: str | bytes | None) -> Ticket:
        digest, label, session = self._digest, self._label, self._session
        if facts is not None:
            digest = _vocabulary.digest_with_facts(digest, facts)
            label = f"{label or 'graph'} with {facts!r}"
        if session is None or session.closed:
            session = Handshake()._session
            for group in [group for group, number in self._collectives.items() if number]:
                _vocabulary.must_be_in_world(group.ranks, session.settings.world_size)
            self._takes = session.client.resolve(self._collectives)
            session.connected()
            self._flags = session.flags(self._text, self.partial)
            self._session = session
        if digest not in session.client.declared:
            collectives = [self._sequences.get(line.group, ()) for line, _ in self._takes]
            session.client.declare(digest, _vocabulary.graph_name(self._fingerprint, label), collectives)
        pending = session.client.vote(self._takes, digest, self._flags)
        return Ticket(session, pending, self._fingerprint, self._text, label)

    def abandon(self, reason: str) -> None:
        """`Handshake.abandon`, if there was a vote."""
        if self._session is not None:
            self._session.break_off(reason)

    def __reduce__(self) -> tuple[Any, ...]:
        text = self._text if isinstance(self._text, str) else None
        state = {"partial": self.partial, "_label": self._label, "_sequences": self._sequences}
        return DispatchGate, (self._fingerprint, self._collectives, text), state


# ---------------------------------------------------------------------- the end of the process, and forks


def _close() -> None:
    if _session is not None:
        _session.close(getattr(sys, "last_type", None))


def _forget_after_fork() -> None:
    global _session, _session_lock
    _recorded.clear()
    _session_lock = threading.RLock()
    if _session is not None:
        if not _session.closed and _session.settings.world_size > 1:
            _forked_ranks.add(_session.settings.rank)
        _session.abandon()
        _session = None


atexit.register(_close)
os.register_at_fork(after_in_child=_forget_after_fork)


def main(arguments: list[str]) -> int:
    """`python handshake.py explain FILE FILE …`: what differs between graphs that were printed or logged."""
    command = _extra("_graph_explain")
    return 2 if command is None else int(command.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
