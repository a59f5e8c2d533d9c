# SPDX-License-Identifier: Apache-2.0
"""Observing: ranks vote as always, and run whole without waiting for what comes of it.

In this mode every question is answered True at once. What a dispatch pays is to count, and to leave its vote in memory.
A daemon thread does the rest: it starts the coordinator where that is due, connects, sends what has gathered, and reads
the verdicts, some times a second. What it learns is logged, counted by graph, and written down at the end: what
enforcing would do to this job. Nothing that goes wrong here reaches the job.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if __package__:
    from . import _client
    from ._vocabulary import HandshakeError
else:
    import _client
    from _vocabulary import HandshakeError
if TYPE_CHECKING:
    from handshake import Ticket, _Session

logger = logging.getLogger("torch_tpu.handshake")

INTERVAL_S = 0.05  # between two looks at what there is to send and to read
LAST_WORDS_S = 1.0  # what the end of the process may wait for the last verdicts
MAX_UNANSWERED = 1000  # votes; the coordinator refuses more than 1,024 of one rank
MAX_GRAPHS = 10_000  # that are counted by name
_OUTCOMES = ("", "fat", "split", "timeout", "peer_lost", "refused")


class Observer(_client.Client):
    """A client whose votes nobody waits for. `graphs`: by name, how many votes there were, and how they ended."""

    waits = False

    def __init__(self, session: "_Session") -> None:
        super().__init__(session.settings.rank, session.settings.world_size)
        self.graphs: dict[str, dict[str, int]] = {}
        self.let_go = 0  # votes that were not cast, since so many had no answer yet
        self._session = session
        self._gathered: list[bytes] = []  # frames, for the thread to send
        self._unsent = bytearray()
        self._watched: dict[int, Ticket] = {}  # by the number of their votes
        self._told: dict[str, int] = {}  # how often each kind of trouble came up
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="handshake-observer", daemon=True)
        self.is_connected = True  # as far as those who vote need to know
        if session.settings.world_size > 1:
            self._thread.start()

    # ------------------------------------------------------------------ on the threads that vote

    def send(self, data: bytes) -> None:
        """Leaves a frame, and what is to go ahead of it, for the thread. `lock` is held."""
        while self.ahead:
            self._gathered.append(self.ahead.popleft())
        self._gathered.append(data)

    def _cast(self, spans: Sequence[int], digest: bytes, flags: int) -> _client.PendingVote:
        if self._failure is None and len(self._votes) < MAX_UNANSWERED:
            return super()._cast(spans, digest, flags)
        self.let_go += 1
        return _client.PendingVote(0)

    def watch(self, ticket: "Ticket", pending: _client.PendingVote) -> None:
        """The thread does what follows from the verdict on this vote."""
        if pending.number:
            self._watched[pending.number] = ticket

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        session = self._session
        try:
            session.start_coordinator()
            _client.connect(self, session.find, session.facts(), session.connect_within())
            self._sock.setblocking(False)
            while not self._ends.wait(INTERVAL_S) and self._failure is None:
                self._exchange()
            until = time.monotonic() + LAST_WORDS_S
            while (self._watched or self._gathered) and self._failure is None and time.monotonic() < until:
                self._exchange()
                time.sleep(INTERVAL_S / 10)
            if not self._ends.is_set():
                self._raise_failure()
        except Exception as error:  # whatever it is, the job goes on
            if self._failure is None:
                self._failure = (HandshakeError, str(error))
            if not self._ends.is_set():
                # Where nothing waits for an answer, it may be the job's regular end.
                level = logging.WARNING if self._watched or self._gathered else logging.INFO
                text = "handshake: rank %d observes no more, and the job goes on without: %s"
                logger.log(level, text, self.rank, error)

    def _exchange(self) -> None:
        """Sends what has gathered, reads what has come, and does what follows from it."""
        self._session.publish()
        with self.lock:
            gathered, self._gathered = self._gathered, []
        self._unsent += b"".join(gathered)
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._sock.send(self._unsent)
                self.bytes_sent += sent
                del self._unsent[:sent]
        quiet_at = self._quiet_at
        while self._quiet_at == quiet_at and self._failure is None:
            self._read()
        for number, ticket in list(self._watched.items()):
            if number not in self._votes:
                del self._watched[number]
                self._conclude(ticket)
        if self.let_go and "let go" not in self._told:
            text = f"rank {self.rank} has {MAX_UNANSWERED} votes without an answer, and casts no more until some come"
            self._tell("let go", text)

    def _conclude(self, ticket: "Ticket") -> None:
        pending = ticket._pending
        assert pending is not None
        answer, outcome = ticket.conclude(pending), pending.outcome
        if len(self.graphs) < MAX_GRAPHS or ticket.name in self.graphs:
            counts = self.graphs.setdefault(ticket.name, {"votes": 0})
            counts["votes"] += 1
            counts[_OUTCOMES[outcome]] = counts.get(_OUTCOMES[outcome], 0) + 1
        if isinstance(answer, HandshakeError):
            self._tell(_OUTCOMES[outcome], f"{answer}. Graph: {ticket.name}")

    def _tell(self, kind: str, text: str) -> None:
        count = self._told[kind] = self._told.get(kind, 0) + 1
        if str(count).strip("0") == "1":  # the first is news, and then each tenfold number
            note = "It is only observed: this rank ran whole all the same"
            logger.warning("handshake: %s. %s (time %d)", text, note, count)

    # ------------------------------------------------------------------ the end

    def close(self, reason: str, farewell: str = "") -> None:
        """Waits a moment for the last verdicts, and sums up, in the log and in the debug folder."""
        if self._ends.is_set():
            return
        self._ends.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * LAST_WORDS_S)
        super().close(reason, farewell)
        settings, stats = self._session.settings, self._session.stats
        votes = {name: stats[name] for name in ("handshakes", *_OUTCOMES[1:])} | {"let_go": self.let_go}
        if not stats["handshakes"] and not self.let_go:
            return
        counts = ", ".join(f"{number:g} {name}" for name, number in votes.items() if number)
        logger.info("handshake: rank %d observed %d graphs: %s", self.rank, len(self.graphs), counts)
        if settings.debug:
            path = os.path.join(settings.debug, f"handshake-observed-rank{self.rank}-{os.getpid()}.json")
            summary: dict[str, Any] = {"rank": self.rank, "world_size": settings.world_size}
            try:
                os.makedirs(settings.debug, exist_ok=True)
                with open(path, "w", encoding="utf-8") as file:
                    json.dump({**summary, "votes": votes, "graphs": self.graphs}, file, indent=1)
            except OSError as error:
                logger.warning("handshake: what was observed can't be written to %s: %s", path, error.strerror)
