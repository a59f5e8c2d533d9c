# SPDX-License-Identifier: Apache-2.0
"""The consensus state machine: votes in, decisions out. No socket, no clock, no thread.

Theory
------
Each process group has a *collective line*. A vote takes a span on the line of each of its groups. Two votes of
different ranks are *linked* when their spans overlap on a group that both belong to; linked votes *agree* when their
fingerprints are equal and, on every group that both ranks belong to, both have the same span or neither has one. A
*component* is the closure of the links, and it gets one verdict: FAT once every member of all its groups has voted
and all linked votes agree; SPLIT as soon as two linked votes disagree, or a member has gone past a span without a vote
that touches it.

What must be remembered for this is little, because each rank's spans on a line ascend. For each group the machine
keeps each member's *frontier* (the end of its last span) and the *cells* that are still open: a cell is one span
with the votes on it so far. While a cell is open nobody disagrees about it, so:

- a vote whose span is an open cell's joins it; every member beyond the cell's start is in the cell already;
- a vote whose span starts below the highest frontier, and is no open cell, meets a vote that differs, or that was
  split before, or a member that has gone past: SPLIT, whichever of the three it is. What was decided on a span stays,
  also when a member is lost later: that matters to spans on which nothing was decided;
- any other vote opens a cell; open cells that end before it, and lack the voter, have been passed: SPLIT.

A settled cell is forgotten, and nothing grows with the number of handshakes. Only of spans that were not fat each line
keeps the last few findings, so that a latecomer gets the outcome that the others had, and their reason; to forget one
is safe, since what is not known is split. A vote costs a few dictionary operations for each of its groups, whatever
their size.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

if __package__:
    from ._vocabulary import (
        CollectiveHandshakeRequest,
        HandshakeConfigError,
        HandshakeProtocolError,
        ProcessGroupId,
        as_process_group_id,
        format_ranks,
        must_be_in_world,
    )
else:
    from _vocabulary import (
        CollectiveHandshakeRequest,
        HandshakeConfigError,
        HandshakeProtocolError,
        ProcessGroupId,
        as_process_group_id,
        format_ranks,
        must_be_in_world,
    )

# A waiting rank is told whom it waits for after so many seconds, then every NOTICE_INTERVAL_S.
NOTICE_AT_S = (5.0, 15.0, 30.0, 60.0)
NOTICE_INTERVAL_S = 60.0

# How long a wait cycle must stand before it is answered where one of its ranks may still vote from another thread:
# long enough for that thread to reach its vote. Half the smallest timeout in the cycle, if that is less: its ranks get
# SPLIT, and not TIMEOUT.
CYCLE_GRACE_S = 5.0

# Blocks that stood in a wait cycle for its grace are remembered: a job that runs into the cycle at every step waits for
# it once. Two for each rank of a world of thousands, some 3 MB; the oldest are forgotten.
MAX_BLOCKS_REMEMBERED = 16_384

# Spans of one line that were not fat, kept with the reason for latecomers: about as many as ranks are apart, and a few
# hundred bytes each, apart from the ranks that a reason names. A latecomer to an older one is split.
MAX_FINDINGS_A_LINE = 64

# Votes of one rank that wait at once: one a thread, some more where it does not wait for each. More is a loop that has
# run away.
MAX_VOTES_UNDER_WAY = 1024

# Missing ranks are all named, as ranges; so many of them with where they were last seen.
MAX_RANKS_LAST_SEEN = 8


class Outcome(enum.Enum):
    """What a vote is answered with."""

    FAT = "FAT"
    SPLIT = "SPLIT"
    TIMEOUT = "TIMEOUT"
    PEER_LOST = "PEER_LOST"


class Decision(NamedTuple):
    """The answer to one vote.

    Attributes:
        rank: the rank that voted.
        outcome: FAT, SPLIT, TIMEOUT or PEER_LOST; the same for a whole component.
        reason: what happened, which ranks, which group and positions; empty for FAT.
        request: the request (or whatever was given in its place) that is answered.
        ranks: the ranks that the reason is about, ascending: in disagreement, missing, or lost.
        group: the ranks of the process group on whose line it happened, or None.
        span: `(start, end)` on that line, or None.
        seconds: how long the component had waited.
    """

    rank: int
    outcome: Outcome
    reason: str
    request: Any
    ranks: tuple[int, ...] = ()
    group: tuple[int, ...] | None = None
    span: tuple[int, int] | None = None
    seconds: float = 0.0


class Notice(NamedTuple):
    """What a rank that still waits should log."""

    rank: int
    text: str
    request: Any


class Group:
    """A process group's line: how far each member has got, and the cells that are open.

    `unknown_to` holds the members that had votes under way when the group was declared, and when the last of them was
    cast; some whose votes are all answered may be left in it.
    """

    __slots__ = (
        "_name",
        "cells",
        "findings",
        "forgotten_to",
        "frontier",
        "highest_frontier",
        "lost",
        "lost_finding",
        "members",
        "ranks",
        "unknown_to",
    )

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.members = frozenset(ranks)
        self.frontier: dict[int, int] = {}
        self.highest_frontier = 0
        self.cells: dict[tuple[int, int], _Cell] = {}
        self.lost: set[int] = set()
        self.unknown_to: dict[int, float] = {}
        self.findings: dict[tuple[int, int], _Finding] = {}  # on the last spans that were not fat, oldest first
        self.forgotten_to = 0  # the highest end of a span whose finding is not kept any more
        self.lost_finding: _Finding | None = None  # the last one made for `lost` as it is
        self._name = ""

    @property
    def name(self) -> str:
        """`ranks 0-3`; made once, since there may be thousands of ranks."""
        if not self._name:
            self._name = format_ranks(self.ranks)
        return self._name

    def note(self, start: int, end: int, finding: "_Finding") -> None:
        """Keeps why a span was not fat, for latecomers; what was decided first stays."""
        self.findings.setdefault((start, end), finding)
        if len(self.findings) > MAX_FINDINGS_A_LINE:
            oldest = next(iter(self.findings))
            del self.findings[oldest]
            self.forgotten_to = max(self.forgotten_to, oldest[1])

    def decided(self, start: int, end: int) -> "list[_Finding]":
        """The finding on just this span, or else all those on spans that overlap it."""
        exact = self.findings.get((start, end))
        if exact is not None:
            return [exact]
        return [finding for (other, its_end), finding in self.findings.items() if other < end and start < its_end]


Span = tuple[Group, int, int]


class _Vote:
    __slots__ = ("arrived", "blocking", "component", "notices", "rank", "request", "spans", "timeout_s")

    def __init__(
        self, rank: int, spans: list[Span], arrived: float, timeout_s: float | None, request: Any, blocking: bool
    ) -> None:
        self.rank = rank
        self.spans = spans
        self.arrived = arrived
        self.timeout_s = timeout_s
        self.request = request
        self.blocking = blocking
        self.notices = 0
        self.component: _Component  # once it has joined one

    def cells(self) -> list["_Cell"]:
        """The open cells that it is in."""
        return [group.cells[(start, end)] for group, start, end in self.spans]

    def block(self) -> "_Block":
        return self.rank, self.spans[0][0], self.component.fingerprint

    def grace_s(self) -> float:
        """How long a wait cycle that holds it may stand."""
        return CYCLE_GRACE_S if self.timeout_s is None else min(CYCLE_GRACE_S, self.timeout_s / 2)

    def next_look(self) -> float:
        """When something is to be done about it: tell its rank that it still waits, or give up."""
        if self.timeout_s is None:
            return self.next_notice()
        return min(self.next_notice(), self.arrived + self.timeout_s)

    def next_notice(self) -> float:
        """When its rank should next be told that it still waits."""
        beyond = self.notices - len(NOTICE_AT_S)
        if beyond < 0:
            return self.arrived + NOTICE_AT_S[self.notices]
        return self.arrived + NOTICE_AT_S[-1] + (beyond + 1) * NOTICE_INTERVAL_S


class _Cell:
    """One span of one group's line that waits for members.

    `beside` holds the other groups that its votes are on; `without` the groups that a voter belongs to and did not
    vote on. A newcomer that lacks one of the first, or has one of the second, disagrees.

    `waits_for` holds the members that it lacks and that wait in other votes; some that no longer do may be left in it.
    """

    __slots__ = ("beside", "component", "end", "group", "start", "voters", "waits_for", "without")

    def __init__(self, group: Group, start: int, end: int, component: "_Component") -> None:
        self.group = group
        self.start = start
        self.end = end
        self.component = component
        self.voters: dict[int, _Vote] = {}
        self.beside: set[Group] = set()
        self.without: set[Group] = set()
        self.waits_for: set[int] = set()

    def missing(self) -> list[int]:
        return [rank for rank in self.group.ranks if rank not in self.voters]


class _Component:
    """`lacked` holds the ranks with a vote here that other cells wait for; some for which none does any more may be
    left in it."""

    __slots__ = ("cells", "fingerprint", "incomplete", "lacked", "votes")

    def __init__(self, fingerprint: str | bytes) -> None:
        self.fingerprint = fingerprint
        self.votes: list[_Vote] = []
        self.cells: list[_Cell] = []
        self.incomplete = 0
        self.lacked: set[int] = set()

    def absorb(self, other: "_Component") -> None:
        for vote in other.votes:
            vote.component = self
        self.votes += other.votes
        self.cells += other.cells
        self.incomplete += other.incomplete
        self.lacked |= other.lacked
        for cell in other.cells:
            cell.component = self

    def forget(self) -> None:
        """Cuts what votes, cells and component hold of one another: then they are freed at once, and not by the
        garbage collector."""
        for cell in self.cells:
            cell.voters = {}
        self.cells = []
        self.votes = []


# A rank that waits with some graph on some group, at whichever position.
_Block = tuple[int, Group, str | bytes]

# For each component those that it waits for, and the votes there whose ranks it lacks.
_Waits = dict[_Component, dict[_Component, list[_Vote]]]


class _Failure(NamedTuple):
    """What a latecomer is told of a handshake that ended in TIMEOUT or PEER_LOST: `the others {did} there{detail}`."""

    outcome: Outcome
    group: Group
    span: tuple[int, int]
    did: str
    detail: str
    lost: tuple[int, ...] = ()


class _Finding(NamedTuple):
    """Why a component can't be fat: an outcome and what to say of it. `failure` is there unless it is SPLIT."""

    outcome: Outcome
    reason: str
    ranks: tuple[int, ...] = ()
    group: tuple[int, ...] | None = None
    span: tuple[int, int] | None = None
    failure: _Failure | None = None


class _CollectiveHandshakeConsensus:
    """Decides, for every vote, whether the ranks involved run their graphs fat or split.

    Feed it with `put_request` (or `cast`, its quicker form), `expire`, `drop_rank`; each returns the decisions that
    follow. Time is an argument, in seconds of any clock that does not go backwards.
    """

    def __init__(self, num_ranks: int, timeout_s: float | None = None) -> None:
        """
        Args:
            num_ranks: the world size.
            timeout_s: how long a vote may wait, in seconds; None: for ever.

        Raises:
            HandshakeConfigError: `num_ranks` is below 1, or `timeout_s` is not positive.
        """
        if num_ranks < 1:
            raise HandshakeConfigError(f"num_ranks must be at least 1, got {num_ranks}")
        if timeout_s is not None and not timeout_s > 0:
            raise HandshakeConfigError(f"timeout_s must be positive, got {timeout_s}")
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._groups: dict[ProcessGroupId, Group] = {}
        self._groups_of_rank: list[set[Group]] = [set() for _ in range(num_ranks)]
        self._unknown_to_some: set[Group] = set()  # groups with an `unknown_to` that is not empty
        self._components: dict[_Component, None] = {}  # the open ones, in the order in which they were opened
        self._pending_of_rank: list[list[_Vote]] = [[] for _ in range(num_ranks)]
        self._last_vote: list[_Vote | None] = [None] * num_ranks
        self._labels: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._contested: set[int] = set()  # ranks that wait while an open cell waits for them
        self._cycles_due: float | None = None  # when wait cycles are to be looked for, if any may stand
        self._blocking_seen = False  # whether any vote has ever said that its rank does nothing else
        self._stood: dict[_Block, None] = {}  # blocks that stood in a cycle for its grace, oldest first
        self._next_deadline: float | None = None

    # ------------------------------------------------------------------ what happens

    def put_request(
        self, request: CollectiveHandshakeRequest, now: float, *, blocking: bool = True
    ) -> list[Decision]:
        """Takes a rank's vote.

        Args:
            request: the vote. Groups that are idle in it (count 0) say nothing.
            now: the time, in seconds.
            blocking: the rank does nothing else until this vote is answered. A wait cycle is answered at once if all
                its ranks are known to be blocked, from this or because they stood in a cycle so before; else when it
                has stood for `CYCLE_GRACE_S`.

        Raises:
            HandshakeConfigError: the rank, or a member of a group, is outside the world.
            HandshakeProtocolError: the vote is out of order (it starts before the end of the rank's last span on
                that group), or the rank was dropped. Nothing has changed then.
        """
        rank = request.rank
        if rank >= self._num_ranks:
            raise HandshakeConfigError(f"rank {rank} is outside a world of {self._num_ranks} ranks", ranks=[rank])
        spans = [
            (self.group(group), count.collective_count_before, count.end)
            for group, count in request.pg_collective_counts.items()
            if count.num_collectives_in_graph
        ]
        if blocking:
            self._blocking_seen = True
        return self.cast(rank, spans, request.executable_fingerprint, now, request, blocking)

    def group(self, pg: Any) -> Group:
        """The machine's own record of a process group, for `cast`.

        Raises:
            HandshakeConfigError: a member is outside the world.
        """
        key = as_process_group_id(pg)
        known = self._groups.get(key)
        if known is not None:
            return known
        must_be_in_world(key.ranks, self._num_ranks)
        made = self._groups[key] = Group(key.ranks)
        for rank in key.ranks:
            self._groups_of_rank[rank].add(made)
            if self._pending_of_rank[rank]:
                made.unknown_to[rank] = self._pending_of_rank[rank][-1].arrived
        if made.unknown_to:
            self._unknown_to_some.add(made)
        made.lost.update(made.members & self._lost.keys())
        return made

    def cast(
        self,
        rank: int,
        spans: list[Span],
        fingerprint: str | bytes,
        now: float,
        request: Any = None,
        blocking: bool = True,
        timeout_s: float | None = None,
    ) -> list[Decision]:
        """`put_request` for spans that are unpacked already: `[(group, start, end), …]`, each not empty.

        `timeout_s` is this vote's own, where it differs from the machine's.
        """
        if len(spans) == 1:
            fat = self.cast_usual(rank, spans, fingerprint, now, request, blocking, timeout_s)
            if fat is not None:
                return [Decision(vote.rank, Outcome.FAT, "", vote.request) for vote in fat]
        vote = _Vote(rank, spans, now, self._timeout_s if timeout_s is None else timeout_s, request, blocking)
        decisions: list[Decision] = []
        self._refuse_what_can_not_be(rank, spans)
        if not spans:
            return [Decision(rank, Outcome.FAT, "", request)]
        failed = self._failed_before(vote)
        if failed is None:
            self._settle_cells_passed(vote, now, decisions)
        finding = failed or self._finding_against(vote, fingerprint)
        for group, _, end in spans:
            group.frontier[rank] = end
            if end > group.highest_frontier:
                group.highest_frontier = end
        self._last_vote[rank] = vote
        if finding is not None:
            self._settle_with_all_linked(vote, finding, now, decisions)
            if failed is not None:  # what it has gone past may be linked with it as well, and a failure is graver
                self._settle_cells_passed(vote, now, decisions)
            return decisions

        opened = self._join(vote, fingerprint)
        if not vote.component.incomplete:
            self._settle(vote.component, None, now, decisions)
            return decisions
        self._wake_at(vote.next_look())
        self._look_for_wait_cycles(vote, opened, now, decisions)
        return decisions

    def cast_usual(
        self,
        rank: int,
        spans: list[Span],
        fingerprint: str | bytes,
        now: float,
        request: Any = None,
        blocking: bool = True,
        timeout_s: float | None = None,
    ) -> Sequence[_Vote] | None:
        """`cast` for the usual vote, in few steps.

        That is the only vote of its rank, on one group. Either nobody waits for anything, and nobody has been beyond
        its start: it opens a cell. Or the group's only open cell is of the same span and makes up its component alone,
        with the same fingerprint, and no other group of the rank has an open cell: it joins. Nothing can speak against
        such a vote, and it closes no cycle: `_finding_against` and `_look_for_wait_cycles` need not be asked.

        Returns:
            None if it is no such vote: nothing has changed then, and `cast` must be called. Else the votes that are
            FAT now, none while members are missing.
        """
        group, start, end = spans[0]
        cell = group.cells.get((start, end))
        belongs_to = self._groups_of_rank[rank]
        if cell is None:
            if self._components or group.lost or group.highest_frontier > start:
                return None
            component = _Component(fingerprint)
            cell = group.cells[(start, end)] = _Cell(group, start, end, component)
            component.cells.append(cell)
            component.incomplete = 1
            self._components[component] = None
            cell.beside.add(group)
            group.highest_frontier = end
        else:
            component = cell.component
            if (
                component.fingerprint != fingerprint
                or group.lost
                or len(component.cells) > 1
                or len(group.cells) > 1
                or group.frontier.get(rank, 0) > start
                or self._pending_of_rank[rank]
                or (len(belongs_to) > 1 and any(other.cells for other in belongs_to if other is not group))
            ):
                return None
        if len(belongs_to) > 1:
            cell.without |= belongs_to
            cell.without.discard(group)
        vote = _Vote(rank, spans, now, self._timeout_s if timeout_s is None else timeout_s, request, blocking)
        group.frontier[rank] = end
        self._last_vote[rank] = vote
        vote.component = component
        votes = component.votes
        votes.append(vote)
        if len(votes) < len(group.ranks):
            cell.voters[rank] = vote
            self._pending_of_rank[rank].append(vote)
            self._wake_at(vote.next_look())
            return ()
        del self._components[component], group.cells[(start, end)]
        for rank, other in cell.voters.items():
            self._pending_of_rank[rank].remove(other)
        component.forget()
        return votes

    def expire(self, now: float) -> list[Decision]:
        """Answers the votes whose time is up: SPLIT for a wait cycle that has stood for `CYCLE_GRACE_S`, TIMEOUT for a
        whole component when one of its votes has waited its timeout."""
        decisions: list[Decision] = []
        if self._cycles_due is not None:
            self._settle_wait_cycles(now, decisions)
        for component in list(self._components):
            if any(vote.timeout_s is not None and vote.arrived + vote.timeout_s <= now for vote in component.votes):
                self._settle(component, self._timeout_finding(component, now), now, decisions)
        return decisions

    def drop_rank(self, rank: int, now: float, reason: str = "its connection was lost") -> list[Decision]:
        """Takes note that a rank is gone: whoever waits for it gets PEER_LOST, and so does every later vote on a
        group that holds it, unless others were answered at that span before; until `rejoin_rank`. The lost rank's own
        votes are forgotten without an answer.

        Raises:
            HandshakeConfigError: the rank is outside the world.
        """
        if not 0 <= rank < self._num_ranks:
            raise HandshakeConfigError(f"rank {rank} is outside a world of {self._num_ranks} ranks", ranks=[rank])
        self._lost[rank] = reason
        decisions: list[Decision] = []
        for group in self._groups_of_rank[rank]:
            group.lost.add(rank)
            group.lost_finding = None
        for group in sorted(self._groups_of_rank[rank], key=lambda group: group.ranks):
            while group.cells:
                cell = next(iter(group.cells.values()))
                finding = self._lost_finding(group, (cell.start, cell.end))
                self._settle(cell.component, finding, now, decisions)
        return [decision for decision in decisions if decision.rank != rank]

    def rejoin_rank(self, rank: int) -> None:
        """A rank that was dropped is back. It goes on where its lines stood."""
        self._lost.pop(rank, None)
        for group in self._groups_of_rank[rank]:
            group.lost.discard(rank)
            group.lost_finding = None

    def set_label(self, rank: int, label: str) -> None:
        """How messages name a rank beside its number, such as `host:pid`."""
        self._labels[rank] = label

    # ------------------------------------------------------------------ what is asked

    def next_deadline(self) -> float | None:
        """When `expire` and `notices` should be called next, or None. Never too late; it may be too early."""
        return self._next_deadline if self._components else None

    def oldest_waiting(self, rank: int) -> Any:
        """The request of this rank that has been without an answer for longest, or None."""
        votes = self._pending_of_rank[rank]
        return votes[0].request if votes else None

    def notices(self, now: float) -> list[Notice]:
        """What the ranks that wait should log now, each at 5, 15, 30 and 60 s, then every 60 s. Call it after
        `expire`; it also finds when both must be called next."""
        due = []
        self._next_deadline = None
        for component in self._components:
            text = ""
            for vote in component.votes:
                if vote.next_notice() <= now:
                    while vote.next_notice() <= now:
                        vote.notices += 1
                    text = text or f"waiting for {self._describe_missing(component, now)}"
                    due.append(Notice(vote.rank, text, vote.request))
                self._wake_at(vote.next_look())
        if self._cycles_due is not None:
            self._wake_at(self._cycles_due)
        return due

    # ------------------------------------------------------------------ a vote arrives

    def _refuse_what_can_not_be(self, rank: int, spans: list[Span]) -> None:
        for group, start, end in spans:
            frontier = group.frontier.get(rank, 0)
            if start < frontier:
                raise HandshakeProtocolError(
                    f"rank {rank} voted out of order: its span [{start}, {end}) on {group.name} starts "
                    f"before {frontier}, where its last vote on that group ended. Count the collectives of one "
                    f"process in one place, under one lock, and submit each count once",
                    ranks=[rank],
                    group=group.ranks,
                    span=(start, end),
                )
        if rank in self._lost:
            raise HandshakeProtocolError(f"rank {rank} voted after it was lost: {self._lost[rank]}", ranks=[rank])
        if len(self._pending_of_rank[rank]) >= MAX_VOTES_UNDER_WAY:
            raise HandshakeProtocolError(
                f"rank {rank} has {MAX_VOTES_UNDER_WAY} votes without an answer; wait for some of them first",
                ranks=[rank],
            )

    def _settle_cells_passed(self, vote: _Vote, now: float, decisions: list[Decision]) -> None:
        """SPLIT for the open cells before the spans of `vote` that its rank never voted on."""
        rank = vote.rank
        for group, start, end in vote.spans:
            if not group.cells or (len(group.cells) == 1 and (start, end) in group.cells):
                continue
            for cell in list(group.cells.values()):
                if cell.end <= start and rank not in cell.voters and group.cells.get((cell.start, cell.end)) is cell:
                    span = f"[{cell.start}, {cell.end})"
                    finding = _Finding(
                        Outcome.SPLIT,
                        f"{self._name(rank)} has gone past {span} on {group.name} without a vote there: "
                        f"its next one starts at {start}. It issued these collectives outside a compiled graph, or "
                        f"compiled a graph that the others lack",
                        (rank,),
                        group.ranks,
                        (cell.start, cell.end),
                    )
                    self._settle(cell.component, finding, now, decisions)

    def _failed_before(self, vote: _Vote) -> _Finding | None:
        """Why `vote` gets TIMEOUT or PEER_LOST at once: others had it at one of its spans, or a member is gone and
        nothing was decided there."""
        late = []
        for group, start, end in vote.spans:
            if (start, end) in group.cells:
                continue  # where a cell is open nothing was decided, and nobody is lost
            decided = group.decided(start, end) if group.highest_frontier > start else []
            if group.lost and not decided and start >= group.forgotten_to:
                return self._lost_finding(group, (start, end))
            late += [(finding.failure, group, start, end) for finding in decided if finding.failure is not None]
        if not late:
            return None
        return self._late_finding(vote.rank, *max(late, key=lambda found: found[0].outcome is Outcome.PEER_LOST))

    def _finding_against(self, vote: _Vote, fingerprint: str | bytes) -> _Finding | None:
        """Why `vote` and all that it is linked with are split; None if nothing speaks against it so far."""
        voted_on = {span[0] for span in vote.spans}
        belongs_to = self._groups_of_rank[vote.rank]
        lacks = belongs_to - voted_on if len(belongs_to) > len(voted_on) else None
        for group, start, end in vote.spans:
            cell = group.cells.get((start, end))
            if cell is None:
                if group.highest_frontier > start:
                    return self._meets_other_span(vote, group, start, end)
            elif cell.component.fingerprint != fingerprint:
                return self._fingerprints_differ(vote, fingerprint, cell)
            elif (
                (lacks and not cell.beside.isdisjoint(lacks))
                or (cell.without and not cell.without.isdisjoint(voted_on))
                or (self._unknown_to_some and self._lacks_unknown(cell, voted_on))
            ):
                return self._groups_differ(vote, cell, voted_on)
        return None

    def _lacks_unknown(self, cell: _Cell, voted_on: set[Group]) -> bool:
        """Whether a member of one of these groups has a vote in the cell from before the group was declared, of which
        `without` does not tell."""
        for group in self._unknown_to_some & voted_on:
            unknown_to = group.unknown_to
            while unknown_to:
                rank, last_cast = next(iter(unknown_to.items()))
                pending = self._pending_of_rank[rank]
                if pending and pending[0].arrived <= last_cast:
                    break
                del unknown_to[rank]
            else:
                self._unknown_to_some.discard(group)
            for rank in unknown_to.keys() & cell.voters.keys():
                if all(span[0] is not group for span in cell.voters[rank].spans):
                    return True
        return False

    def _settle_with_all_linked(
        self, vote: _Vote, finding: _Finding, now: float, decisions: list[Decision]
    ) -> None:
        """Answers `vote`, which opens and joins no cell, and the components that its spans overlap."""
        decisions.append(self._decide(vote, finding, now))
        for group, start, end in vote.spans:
            group.note(start, end, finding)
            for cell in list(group.cells.values()):
                if cell.start < end and start < cell.end and group.cells.get((cell.start, cell.end)) is cell:
                    self._settle(cell.component, finding, now, decisions)

    def _join(self, vote: _Vote, fingerprint: str | bytes) -> list[_Cell]:
        """Puts `vote` into the cells of its spans and into their component. Returns the cells that it opened."""
        component: _Component | None = None
        opened: list[_Cell] = []
        for group, start, end in vote.spans:
            cell = group.cells.get((start, end))
            if cell is None:
                if component is None:
                    component = _Component(fingerprint)
                    self._components[component] = None
                cell = group.cells[(start, end)] = _Cell(group, start, end, component)
                component.cells.append(cell)
                component.incomplete += 1
                opened.append(cell)
            elif component is None:
                component = cell.component
            elif component is not cell.component:
                larger, smaller = component, cell.component
                if len(smaller.cells) > len(larger.cells):
                    larger, smaller = smaller, larger
                larger.absorb(smaller)
                del self._components[smaller]
                component = larger
            cell.voters[vote.rank] = vote
            if len(cell.voters) == len(group.ranks):
                component.incomplete -= 1
        if component is None:
            raise AssertionError("a vote without spans has no component")
        vote.component = component
        component.votes.append(vote)
        belongs_to = self._groups_of_rank[vote.rank]
        if len(belongs_to) > 1:
            voted_on = {span[0] for span in vote.spans}
            lacks = belongs_to - voted_on
            for cell in vote.cells():
                cell.beside |= voted_on
                cell.without |= lacks
        self._pending_of_rank[vote.rank].append(vote)
        return opened

    # ------------------------------------------------------------------ settling

    def _settle(
        self, component: _Component, finding: _Finding | None, now: float, decisions: list[Decision]
    ) -> None:
        """Answers all votes of a component, FAT where there is no finding, and forgets it."""
        for cell in component.cells:
            del cell.group.cells[(cell.start, cell.end)]
            if finding is not None:
                cell.group.note(cell.start, cell.end, finding)
        del self._components[component]
        for vote in component.votes:
            self._pending_of_rank[vote.rank].remove(vote)
            if finding is None:
                decisions.append(Decision(vote.rank, Outcome.FAT, "", vote.request))
            else:
                decisions.append(self._decide(vote, finding, now))
        component.forget()

    @staticmethod
    def _decide(vote: _Vote, finding: _Finding, now: float) -> Decision:
        return Decision(
            vote.rank,
            finding.outcome,
            finding.reason,
            vote.request,
            finding.ranks,
            finding.group,
            finding.span,
            now - vote.arrived,
        )

    # ------------------------------------------------------------------ wait cycles

    def _cells_waiting_for(self, rank: int) -> Iterator[_Cell]:
        for group in self._groups_of_rank[rank]:
            if group.cells:
                for cell in group.cells.values():
                    if rank not in cell.voters:
                        yield cell

    def _is_contested(self, rank: int) -> bool:
        return next(self._cells_waiting_for(rank), None) is not None

    def _look_for_wait_cycles(
        self, vote: _Vote, opened: Iterable[_Cell], now: float, decisions: list[Decision]
    ) -> None:
        """Finds the cycles that this vote, which now waits, or the cells that it opened, may have closed."""
        for cell in self._cells_waiting_for(vote.rank):
            self._note_that_it_waits_for(cell, vote.rank)
        for cell in opened:
            for other in self._waiting_members(cell.group):
                if other.rank not in cell.voters:
                    self._note_that_it_waits_for(cell, other.rank)
        if not self._contested:
            return
        if self._cycles_due is None and not self._is_in_wait_cycle(vote.component):
            return
        if self._cycles_due is None or self._blocking_seen or vote.block() in self._stood:
            self._settle_wait_cycles(now, decisions)
        else:  # nothing is answered before its grace is over: not for each of thousands of votes until then
            self._look_at_cycles_by(now + vote.grace_s())

    def _note_that_it_waits_for(self, cell: _Cell, rank: int) -> None:
        self._contested.add(rank)
        cell.waits_for.add(rank)
        for vote in self._pending_of_rank[rank]:
            vote.component.lacked.add(rank)

    def _is_in_wait_cycle(self, component: _Component) -> bool:
        """Whether a component waits, through others, for itself. The usual case is that some ranks are merely ahead of
        others: then nobody waits for this one, or it for nobody, and that is known in a step."""
        lacked = component.lacked
        while lacked:
            rank = lacked.pop()
            if self._is_contested(rank):
                lacked.add(rank)
                break
        else:
            return False
        seen: set[_Component] = set()
        follow = [component]
        while follow:
            for cell in follow.pop().cells:
                over = {rank for rank in cell.waits_for if rank in cell.voters or not self._pending_of_rank[rank]}
                cell.waits_for -= over
                for rank in cell.waits_for:
                    for vote in self._pending_of_rank[rank]:
                        if vote.component is component:
                            return True
                        if vote.component not in seen:
                            seen.add(vote.component)
                            follow.append(vote.component)
        return False

    def _waiting_members(self, group: Group) -> Iterator[_Vote]:
        """A vote of each member of the group that waits; through its ranks, or through the votes if they are fewer."""
        few = len(self._components) < len(group.ranks)
        if few and sum(len(component.votes) for component in self._components) < len(group.ranks):
            for component in self._components:
                for vote in component.votes:
                    if vote.rank in group.members:
                        yield vote
        else:
            for rank in group.ranks:
                yield from self._pending_of_rank[rank][:1]

    def _settle_wait_cycles(self, now: float, decisions: list[Decision]) -> None:
        """SPLIT for the components that wait for one another in a cycle.

        One component waits for another when it lacks the vote of a rank that is blocked in the other. Only contested
        ranks make such a pair, and in a healthy job there are none. A cycle of ranks that are known to be blocked is
        answered at once. One in which a rank may still vote is answered once nothing has been added to it for its
        grace, and before one of its votes is out of time; if some of it is settled meanwhile, the rest may stand twice.
        """
        self._contested = {
            rank for rank in self._contested if self._pending_of_rank[rank] and self._is_contested(rank)
        }
        for cycle in self._wait_cycles(known_blocked=True):
            self._settle_cycle(cycle, now, decisions)
        self._cycles_due = None
        for cycle in self._wait_cycles(known_blocked=False):
            votes = [vote for component in cycle for vote in component.votes]
            due = max(vote.arrived for vote in votes) + min(vote.grace_s() for vote in votes)
            due = min([due, *(vote.arrived + vote.timeout_s for vote in votes if vote.timeout_s is not None)])
            if due > now:
                self._look_at_cycles_by(due)
                continue
            for waited_for in cycle.values():
                self._stood.update((vote.block(), None) for blocked in waited_for.values() for vote in blocked)
            self._settle_cycle(cycle, now, decisions)
        while len(self._stood) > MAX_BLOCKS_REMEMBERED:
            del self._stood[next(iter(self._stood))]

    def _look_at_cycles_by(self, when: float) -> None:
        if self._cycles_due is None or when < self._cycles_due:
            self._cycles_due = when
            self._wake_at(when)

    def _is_known_blocked(self, vote: _Vote) -> bool:
        return (vote.blocking and len(self._pending_of_rank[vote.rank]) == 1) or vote.block() in self._stood

    def _wait_cycles(self, *, known_blocked: bool) -> list[_Waits]:
        """The sets of components that wait for one another, through votes that are known to block their ranks or
        through any."""
        waits_for: _Waits = {}
        for rank in sorted(self._contested):
            votes = [
                vote for vote in self._pending_of_rank[rank] if not known_blocked or self._is_known_blocked(vote)
            ]
            for cell in sorted(self._cells_waiting_for(rank), key=lambda cell: (cell.group.ranks, cell.start)):
                for vote in votes:
                    waits_for.setdefault(cell.component, {}).setdefault(vote.component, []).append(vote)
        return _cycles(waits_for)

    def _settle_cycle(self, cycle: _Waits, now: float, decisions: list[Decision]) -> None:
        finding = self._cycle_finding(cycle)
        for component in sorted(cycle, key=lambda component: (component.votes[0].arrived, component.votes[0].rank)):
            self._settle(component, finding, now, decisions)

    # ------------------------------------------------------------------ saying why

    def _name(self, rank: int) -> str:
        label = self._labels.get(rank)
        return f"rank {rank} ({label})" if label else f"rank {rank}"

    def _fingerprints_differ(self, vote: _Vote, fingerprint: str | bytes, cell: _Cell) -> _Finding:
        ranks_with: dict[str | bytes, list[int]] = {cell.component.fingerprint: sorted(cell.voters)}
        ranks_with.setdefault(fingerprint, []).append(vote.rank)
        sides = "; ".join(f"{_show(print_)} on {format_ranks(ranks)}" for print_, ranks in ranks_with.items())
        return _Finding(
            Outcome.SPLIT,
            f"fingerprints differ at [{cell.start}, {cell.end}) on {cell.group.name}: {sides}",
            tuple(sorted({*cell.voters, vote.rank})),
            cell.group.ranks,
            (cell.start, cell.end),
        )

    def _groups_differ(self, vote: _Vote, cell: _Cell, voted_on: set[Group]) -> _Finding:
        for other in cell.voters.values():
            others_groups = {span[0] for span in other.spans}
            for group in sorted(others_groups ^ voted_on, key=lambda group: group.ranks):
                if vote.rank in group.members and other.rank in group.members:
                    has, lacks = (vote, other) if group in voted_on else (other, vote)
                    return _Finding(
                        Outcome.SPLIT,
                        f"at [{cell.start}, {cell.end}) on {cell.group.name} the graph of "
                        f"{self._name(has.rank)} also has collectives on {group.name}, and that of "
                        f"{self._name(lacks.rank)} has none there",
                        tuple(sorted((has.rank, lacks.rank))),
                        cell.group.ranks,
                        (cell.start, cell.end),
                    )
        raise AssertionError("a disagreement about groups that no pair of votes shows")

    def _meets_other_span(self, vote: _Vote, group: Group, start: int, end: int) -> _Finding:
        decided = group.findings.get((start, end))
        if decided is not None:
            return decided
        span = f"[{start}, {end}) on {group.name}"
        for cell in group.cells.values():
            if cell.start < end and start < cell.end:
                return _Finding(
                    Outcome.SPLIT,
                    f"the graph of {self._name(vote.rank)} takes {span}, that of {format_ranks(cell.voters)} takes "
                    f"[{cell.start}, {cell.end}): they hold different numbers of collectives, or started at "
                    f"different positions",
                    tuple(sorted({*cell.voters, vote.rank})),
                    group.ranks,
                    (start, end),
                )
        # Nobody is counted here: thousands of latecomers may each come this way.
        for other, its_end in group.findings:
            if other < end and start < its_end:
                return _Finding(
                    Outcome.SPLIT,
                    f"the graph of {self._name(vote.rank)} takes {span}, others took [{other}, {its_end}): they hold "
                    f"different numbers of collectives, or started at different positions",
                    (vote.rank,),
                    group.ranks,
                    (start, end),
                )
        if start < group.forgotten_to:
            others = f"the others have gone on to {group.highest_frontier}; what they had there is not kept any more"
        else:
            others = f"another rank is at {group.highest_frontier} already, and went past without a vote there"
        return _Finding(
            Outcome.SPLIT,
            f"{self._name(vote.rank)} is late at {span}: {others}",
            (vote.rank,),
            group.ranks,
            (start, end),
        )

    def _late_finding(self, rank: int, failure: _Failure, group: Group, start: int, end: int) -> _Finding:
        if failure.lost and group.lost.issuperset(failure.lost):  # they are still gone
            return self._lost_finding(group, (start, end))
        where = "there"
        if failure.group is not group or failure.span != (start, end):
            where = f"at [{failure.span[0]}, {failure.span[1]}) on {failure.group.name}"
        return _Finding(
            failure.outcome,
            f"{self._name(rank)} is late at [{start}, {end}) on {group.name}: the others {failure.did} {where}"
            f"{failure.detail}",
            failure.lost or (rank,),
            group.ranks,
            (start, end),
            failure,
        )

    def _lost_finding(self, group: Group, span: tuple[int, int]) -> _Finding:
        # Thousands of ranks may each vote on the span after the loss: what they are told is made once.
        if group.lost_finding is not None and group.lost_finding.span == span:
            return group.lost_finding
        lost = sorted(group.lost)
        causes = "; ".join(f"{self._name(rank)}, {self._lost[rank]}" for rank in lost[:MAX_RANKS_LAST_SEEN])
        group.lost_finding = _Finding(
            Outcome.PEER_LOST,
            f"a member of {group.name} is gone, at [{span[0]}, {span[1]}): {causes}. "
            f"Look at the end of the log of {format_ranks(lost)}, and restart the job",
            tuple(lost),
            group.ranks,
            span,
            _Failure(
                Outcome.PEER_LOST,
                group,
                span,
                f"lost {format_ranks(lost)}",
                f": {causes}. Restart the job",
                tuple(lost),
            ),
        )
        return group.lost_finding

    def _timeout_finding(self, component: _Component, now: float) -> _Finding:
        cell = next(cell for cell in component.cells if len(cell.voters) < len(cell.group.ranks))
        missing = {rank for open_cell in component.cells for rank in open_cell.missing()}
        waited_s = now - min(vote.arrived for vote in component.votes)
        return _Finding(
            Outcome.TIMEOUT,
            f"gave up waiting for {self._describe_missing(component, now)}",
            tuple(sorted(missing)),
            cell.group.ranks,
            (cell.start, cell.end),
            _Failure(Outcome.TIMEOUT, cell.group, (cell.start, cell.end), "gave up", f" after {waited_s:.1f} s"),
        )

    def _describe_missing(self, component: _Component, now: float) -> str:
        missing_of: dict[int, _Cell] = {}
        for cell in component.cells:
            for rank in cell.missing():
                missing_of.setdefault(rank, cell)
        cell = next(iter(missing_of.values()))
        seen = [f"{self._name(rank)} {self._last_seen(rank, now)}" for rank in sorted(missing_of)[:MAX_RANKS_LAST_SEEN]]
        more = len(missing_of) - len(seen)
        if more:
            seen.append(f"and {more} more")
        voters = {vote.rank for vote in component.votes}
        return (
            f"{format_ranks(missing_of)} at [{cell.start}, {cell.end}) on {cell.group.name} "
            f"({format_ranks(voters)} voted): {'; '.join(seen)}"
        )

    def _last_seen(self, rank: int, now: float) -> str:
        last = self._last_vote[rank]
        if last is None:
            return "has not voted yet" if rank in self._labels else "has neither connected nor voted yet"
        where = ", ".join(f"[{start}, {end}) on {group.name}" for group, start, end in last.spans[:2])
        state = "still waits in" if self._pending_of_rank[rank] else "last voted on"
        return f"{state} {where}, {now - last.arrived:.1f} s ago"

    def _cycle_finding(self, cycle: _Waits) -> _Finding:
        blocked: dict[int, Span] = {}
        for waited_for in cycle.values():
            for votes in waited_for.values():
                blocked.update((vote.rank, vote.spans[0]) for vote in votes)
        described = ", ".join(
            f"{self._name(rank)} waits at [{blocked[rank][1]}, {blocked[rank][2]}) on {blocked[rank][0].name}"
            for rank in sorted(blocked)[:MAX_RANKS_LAST_SEEN]
        )
        group, start, end = blocked[min(blocked)]
        if len(blocked) == 1:
            lacking = min(self._cells_waiting_for(min(blocked)), key=lambda cell: (cell.group.ranks, cell.start))
            reason = (
                f"{described}, and others of that handshake wait for it at [{lacking.start}, {lacking.end}) on "
                f"{lacking.group.name}: it can't vote there before they have voted here"
            )
        else:
            reason = (
                f"{format_ranks(blocked)} wait for one another in a cycle: {described}. "
                f"They issue collectives on these groups in different orders"
            )
        return _Finding(Outcome.SPLIT, reason, tuple(sorted(blocked)), group.ranks, (start, end))

    def _wake_at(self, when: float) -> None:
        if self._next_deadline is None or when < self._next_deadline:
            self._next_deadline = when


def _cycles(waits_for: _Waits) -> list[_Waits]:
    """The parts of a graph in which each node can be reached from each; nodes on no cycle are left out. Kosaraju's
    algorithm: two walks along all edges, however many components there are."""
    finished: list[_Component] = []
    seen: set[_Component] = set()
    walk: list[tuple[_Component, Iterator[_Component]]] = []
    for start in waits_for:
        if start in seen:
            continue
        seen.add(start)
        walk.append((start, iter(waits_for[start])))
        while walk:
            node, following = walk[-1]
            other = next((other for other in following if other not in seen), None)
            if other is None:
                finished.append(walk.pop()[0])
            else:
                seen.add(other)
                walk.append((other, iter(waits_for.get(other, ()))))
    lacking: dict[_Component, list[_Component]] = {}
    for node, edges in waits_for.items():
        for other in edges:
            lacking.setdefault(other, []).append(node)
    cycles = []
    for start in reversed(finished):
        if start not in seen:
            continue
        seen.discard(start)
        together = {start: None}
        follow = [start]
        while follow:
            for other in lacking.get(follow.pop(), ()):
                if other in seen:
                    seen.discard(other)
                    together[other] = None
                    follow.append(other)
        if len(together) > 1 or start in waits_for.get(start, ()):
            cycles.append(
                {
                    node: {other: votes for other, votes in waits_for[node].items() if other in together}
                    for node in together
                }
            )
    return cycles


def _show(fingerprint: str | bytes) -> str:
    text = fingerprint.hex() if isinstance(fingerprint, bytes) else fingerprint
    return text[:12] + ("…" if len(text) > 12 else "")
