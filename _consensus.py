# SPDX-License-Identifier: Apache-2.0
"""The rule (DESIGN section 3): votes in, decisions out. No socket, no clock, no thread. A vote is decided in `cast`.

Votes whose spans overlap on a group's *line* are linked; linked votes are one *component* with one verdict. The spans
of a rank on a line ascend, so little is remembered. A *cell* is a span that waits for members: an entry in its line's
`cells`, which says in which component. An open component has one cell a line, and each of its ranks votes on every line
of it that the rank belongs to; a vote that does not fit that splits it. So it has one vote a rank, and is FAT once none
is missing, if all fingerprints are equal. On each of its lines, a vote

- joins the component in which its span is a cell; components that it joins become one;
- or is late: its span is no cell, and starts below the highest end seen. It is split, with all that it overlaps. A line
  keeps its last findings, so that a latecomer is told what others were told; to forget is safe, for it is split then;
- or opens a cell. Cells that end before it and lack its rank have been passed: they are split.

A *voter* is a set of ranks that vote as one: here one rank, behind a relay perhaps many. Where all votes of a component
are *partial*, its ranks look for a plan after a split: it waits until all have voted, so that all start together.
"""

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

if __package__:
    from . import _vocabulary
    from ._vocabulary import HandshakeConfigError, HandshakeProtocolError, format_ranks
else:
    import _vocabulary
    from _vocabulary import HandshakeConfigError, HandshakeProtocolError, format_ranks

NOTICE_AT_S = (5.0, 15.0, 30.0, 60.0)  # when a waiting rank is told whom it waits for,
NOTICE_INTERVAL_S = 60.0  # and how often after that
# How long a wait cycle must stand before it is split: one of its ranks may still vote from another thread. Half the
# timeout, if that is less: its ranks get SPLIT, and not TIMEOUT. While a vote waits, the clock is looked at this often.
CYCLE_GRACE_S = 5.0
MAX_FINDINGS_A_LINE = 64  # on past spans, for latecomers: about as many as ranks are apart
MAX_VOTES_UNDER_WAY = 1024  # of one rank: one a thread, some more where it does not wait; more is a runaway loop
MAX_RANKS_LAST_SEEN = 8  # missing ranks are all named, as ranges; so many of them with where they were last seen

Span = tuple[int, int]
Places = Sequence[tuple["Line", Span]]  # what a vote takes


class Outcome(enum.Enum):
    """What a vote is answered with, by gravity."""

    FAT = "FAT"
    SPLIT = "SPLIT"
    TIMEOUT = "TIMEOUT"
    PEER_LOST = "PEER_LOST"


@dataclass(frozen=True, slots=True)
class Finding:
    """An outcome; and unless it is FAT what happened, to which ranks, and on which group's line and span.

    A split is slower where the ranks issue the same collectives in the same order. Where they don't, they hang or get
    wrong numbers, split or not: `broken` says where they differ; "": they don't; None: it is not known.
    """

    outcome: Outcome
    reason: str = ""
    ranks: tuple[int, ...] = ()
    group: tuple[int, ...] | None = None
    span: Span | None = None
    broken: str | None = None
    told: dict[str | bytes, Any] = field(default_factory=dict, compare=False)  # by program, who was told first


class Program(NamedTuple):
    """What a rank has said of a fingerprint: how messages name it, and what its collectives are, in their order, on
    each group in the order of the vote (empty: it has not said that). A word "?" of these is not known."""

    name: str
    collectives: Sequence[Sequence[str]] = ()


_FAT = Finding(Outcome.FAT)


@dataclass(slots=True, eq=False)
class Line:
    """A process group's line: its cells, what was found on past spans, and how far the members have come."""

    ranks: tuple[int, ...]
    name: str
    members: frozenset["Voter"]
    cells: dict[Span, "Component"] = field(default_factory=dict)
    base: int = 0  # all members have come so far,
    frontier: dict["Voter", int] = field(default_factory=dict)  # and these farther: to the end of their last spans
    highest: int = 0
    findings: dict[Span, Finding] = field(default_factory=dict)  # the first on each of the last spans that were not fat
    stood: bool = False  # whether it was part of a wait cycle that stood for its grace


@dataclass(slots=True, eq=False)
class Voter:
    """Ranks that vote as one, and the lines to which any of them belongs."""

    ranks: tuple[int, ...]
    timeout_s: float  # how long its votes may wait
    label: str = ""  # how messages name it beside its number, such as `host:pid`
    lost: str = ""  # what became of it, if it is gone
    lines: set[Line] = field(default_factory=set)
    waiting: dict["Decision", None] = field(default_factory=dict)  # its votes without an answer, oldest first
    last: "Decision | None" = None

    def __str__(self) -> str:
        return format_ranks(self.ranks) + (f" ({self.label})" if self.label else "")


@dataclass(slots=True, eq=False)
class Decision:
    """A vote, and once it is settled its answer."""

    voter: Voter
    places: Places
    fingerprint: str | bytes
    request: Any  # what was given with the vote
    arrived: float
    finding: Finding = field(init=False)  # not there before it is settled: to ask for it raises
    plan: bool = False  # whether its component is to look for a plan
    speaks: bool = False  # whether its rank is the one that tells its log, of those with this program

    rank = property(lambda self: self.voter.ranks[0])
    outcome = property(lambda self: self.finding.outcome)
    reason = property(lambda self: self.finding.reason)


@dataclass(slots=True, eq=False)
class Component:
    """Linked votes that agree so far; or, where all are partial, that are held back until all have voted."""

    fingerprint: str | bytes  # that of its first vote
    notice_at: float  # when its ranks are next told that they wait
    due: float = math.inf  # when the first of its votes is out of time
    votes: dict[Voter, Decision] = field(default_factory=dict)
    spans: dict[Line, Span] = field(default_factory=dict)  # its cells
    missing: int = 0  # ranks, summed over its cells
    partial: bool = True  # whether all its votes are
    differs: bool = False  # whether they have several fingerprints

    def lacks(self) -> dict[int, Line]:
        """The ranks that it waits for, ascending, and a line on which each is missing."""
        voted = {rank for voter in self.votes for rank in voter.ranks}
        return dict(sorted({rank: line for line in self.spans for rank in line.ranks if rank not in voted}.items()))


class _CollectiveHandshakeConsensus:
    """Decides, for every vote, whether the ranks involved run their graphs fat or split. What returns decisions settles
    these votes. Time is an argument: seconds of a clock that does not go backwards."""

    def __init__(self, num_ranks: int, timeout_s: float | None = None) -> None:
        """`timeout_s` is how long a vote may wait, in seconds; None: for ever. Raises HandshakeConfigError."""
        if num_ranks < 1 or (timeout_s is not None and not timeout_s > 0):
            raise HandshakeConfigError(f"num_ranks={num_ranks} and timeout_s={timeout_s} must be positive")
        self._num_ranks = num_ranks
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._grace_s = min(CYCLE_GRACE_S, self._timeout_s / 2)
        self._lines: dict[_vocabulary.ProcessGroupId, Line] = {}
        self._voters: dict[int, Voter] = {}
        self._lost: set[Voter] = set()
        self._open: dict[Component, None] = {}  # in the order in which they were opened
        self._next = math.inf  # when to look at the clock; it may be too early
        self.programs: dict[str | bytes, Program] = {}  # of fingerprints, as far as ranks have said; kept by the caller

    def voter(self, rank: int) -> Voter:
        """A rank as a voter. Raises HandshakeConfigError where it is outside the world."""
        if rank not in self._voters:
            if not 0 <= rank < self._num_ranks:
                raise HandshakeConfigError(f"rank {rank} is outside a world of {self._num_ranks} ranks", ranks=[rank])
            self._voters[rank] = Voter((rank,), self._timeout_s)
        return self._voters[rank]

    def line(self, group: _vocabulary.GroupLike) -> Line:
        """The line of a process group. Raises HandshakeConfigError where a member is outside the world."""
        key = _vocabulary.as_process_group_id(group)
        if key not in self._lines:
            _vocabulary.must_be_in_world(key.ranks, self._num_ranks)
            members = frozenset(self.voter(rank) for rank in key.ranks)
            line = self._lines[key] = Line(key.ranks, format_ranks(key.ranks), members)
            for voter in members:
                voter.lines.add(line)
        return self._lines[key]

    def put_request(self, request: _vocabulary.CollectiveHandshakeRequest, now: float) -> list[Decision]:
        """Takes a rank's vote; groups that are idle in it (count 0) say nothing. HandshakeConfigError: the rank, or a
        member of a group, is outside the world. HandshakeProtocolError: the vote starts before the rank's last span on
        that group ended, or the rank was dropped, or has too many votes under way. Nothing has changed then."""
        voter = self.voter(request.rank)
        counts = [(group, its) for group, its in request.pg_collective_counts.items() if its.num_collectives_in_graph]
        places = [(self.line(group), (its.collective_count_before, its.end)) for group, its in counts]
        return self.cast(voter, places, request.executable_fingerprint, request, now)

    def cast(
        self, voter: Voter, places: Places, fingerprint: str | bytes, request: Any, now: float, partial: bool = False
    ) -> list[Decision]:
        """`put_request` for unpacked spans, one a line. `partial`: it looks for a plan if all of its component do."""
        met: list[Component] = []
        opened: list[Line] = []
        shared = 0  # lines of those it meets to which this voter belongs
        is_late = has_neighbours = plan = False
        for line, span in places:
            if span[0] < line.frontier.get(voter, line.base):
                raise _out_of_order(voter, line, span)
            here = line.cells.get(span)
            if here is None:
                opened.append(line)
                is_late |= span[0] < line.highest or not line.members.isdisjoint(self._lost)
            elif here not in met:
                met.append(here)
                shared += len(here.spans.keys() & voter.lines) if len(here.spans) > 1 else 1
            has_neighbours |= len(line.cells) > (here is not None)
        if voter.lost:
            raise HandshakeProtocolError(f"{voter} voted after it was lost: {voter.lost}", ranks=voter.ranks)
        if len(voter.waiting) >= MAX_VOTES_UNDER_WAY:
            text = f"{voter} has {MAX_VOTES_UNDER_WAY} votes without an answer; wait for some of them first"
            raise HandshakeProtocolError(text, ranks=voter.ranks)
        if has_neighbours and (passed := self._settle_cells_passed(voter, places)):
            return passed + self.cast(voter, places, fingerprint, request, now, partial)

        vote = voter.last = Decision(voter, places, fingerprint, request, now)
        settled: list[Decision] = []
        finding = None
        if is_late or shared + len(opened) > len(places) or not _can_be_one(met, opened):
            finding, linked = self._why_split(vote, met)
            settled = [other for component in linked for other in self._settle(component, finding)]
            met, opened = [], [line for line, _ in places]  # it is settled by itself
        component = met[0] if len(met) == 1 else self._merged(met, fingerprint, now)
        component.votes[voter] = vote
        component.missing -= len(places) * len(voter.ranks)
        component.partial &= partial
        component.differs |= component.fingerprint != fingerprint
        voter.waiting[vote] = None
        for line, span in places:
            line.frontier[voter] = span[1]
            if line in opened:
                line.cells[span] = component
                if span[1] > line.highest:
                    line.highest = span[1]
                component.spans[line] = span
                component.missing += len(line.ranks)
            if line.stood:
                self._next = now

        if component.differs and not (component.missing and component.partial):
            finding = self._fingerprints_differ(component)
            # A rank that waits in an older vote can't come to look for a plan before that is answered.
            plan = component.partial and all(next(iter(of.waiting)) is own for of, own in component.votes.items())
        elif not component.missing:
            finding = finding or _FAT
        if finding:
            return settled + self._settle(component, finding, plan)
        if now + voter.timeout_s < component.due:
            component.due = now + voter.timeout_s
            if component.due < self._next:
                self._next = component.due
        return settled

    def expire(self, now: float) -> list[Decision]:
        """Answers the votes whose time is up: SPLIT for a wait cycle, and for ranks that count differently, after a
        grace; TIMEOUT for a whole component when one of its votes has waited its timeout. Call `notices` after it."""
        settled: list[Decision] = []
        for cycle in [cycle for cycle, due in self._wait_cycles() if due <= now]:
            finding = _waits_in_cycle(cycle)
            for component in cycle:
                for line in component.spans:
                    line.stood = True  # a job that runs into it at every step waits for it once
                settled += self._settle(component, finding)
        settled += self._settle_miscounts(now)
        for component in [component for component in self._open if component.due <= now]:
            gave_up = self._waits(component, now, "gave up waiting")
            settled += self._settle(component, self._fingerprints_differ(component) if component.differs else gave_up)
        return settled + self._settle_miscounts(now)  # what was answered just now may be such a rank's last vote

    def drop_rank(self, rank: int, now: float, reason: str = "its connection was lost") -> list[Decision]:
        """Takes note that a rank is gone: whoever waits for it gets PEER_LOST, and so does every later vote on a
        group that holds it, unless others were answered at that span before; until `rejoin_rank`. The lost rank's own
        votes are forgotten without an answer. Raises HandshakeConfigError where it is outside the world."""
        voter = self.voter(rank)
        voter.lost = reason
        self._lost.add(voter)
        settled: list[Decision] = []
        for line in sorted(voter.lines, key=lambda line: line.ranks):
            for span, component in list(line.cells.items()):
                settled += self._settle(component, _peer_lost(line, span))
        return [decision for decision in settled if decision.voter is not voter]

    def rejoin_rank(self, rank: int) -> None:
        """A rank that was dropped is back. It goes on where its lines stood."""
        self.voter(rank).lost = ""
        self._lost.discard(self.voter(rank))

    def next_deadline(self) -> float | None:
        """When `expire` and `notices` should be called next, or None. Never too late; it may be too early."""
        return self._next if self._open else None

    def notices(self, now: float) -> list[tuple[Decision, str]]:
        """The votes whose ranks should now log that they wait, at `NOTICE_AT_S` and then every minute; and what to log.
        Call it after `expire`."""
        told = []
        for component in self._open:
            if component.notice_at <= now:
                text = self._waits(component, now, "waiting").reason
                told += [(vote, text) for vote in component.votes.values()]
                first = min(vote.arrived for vote in component.votes.values())
                then = itertools.count(NOTICE_AT_S[-1] + NOTICE_INTERVAL_S, NOTICE_INTERVAL_S)
                component.notice_at = next(first + at for at in itertools.chain(NOTICE_AT_S, then) if first + at > now)
        dues = [due for _, due in self._wait_cycles()] + [due for _, due, _ in self._miscounts()]
        self._next = min([now + self._grace_s, *dues, *(min(its.due, its.notice_at) for its in self._open)])
        return told

    def _merged(self, met: list[Component], fingerprint: str | bytes, now: float) -> Component:
        """What these components become together; a new one, if there are none."""
        if not met:
            component = Component(fingerprint, now + NOTICE_AT_S[0])
            self._open[component] = None
            if now + self._grace_s < self._next:
                self._next = now + self._grace_s
            return component
        own, *others = sorted(met, key=lambda component: len(component.votes), reverse=True)
        for other in others:
            del self._open[other]
            for line, span in other.spans.items():
                line.cells[span] = own
            own.votes |= other.votes
            own.spans |= other.spans
            own.missing += other.missing
            own.due = min(own.due, other.due)
            own.notice_at = min(own.notice_at, other.notice_at)
            own.partial &= other.partial
            own.differs |= other.differs or own.fingerprint != other.fingerprint
        return own

    def _settle(self, component: Component, finding: Finding, plan: bool = False) -> list[Decision]:
        """Answers all votes of a component, and forgets it. Raises KeyError for what was settled before."""
        del self._open[component]
        for line, span in component.spans.items():
            del line.cells[span]
            if finding is not _FAT:
                line.findings.setdefault(span, finding)
                if len(line.findings) > MAX_FINDINGS_A_LINE:
                    del line.findings[next(iter(line.findings))]
            elif not line.members <= component.votes.keys():
                raise AssertionError(f"FAT at {_at(line, span)}, and not all of its members have voted")
            elif span[1] == line.highest:  # all members stand there, and nothing is left behind
                line.base = span[1]
                line.frontier.clear()
        votes = list(component.votes.values())
        for vote in votes:
            del vote.voter.waiting[vote]
            vote.finding, vote.plan = finding, plan
        if finding is not _FAT:
            for vote in sorted(votes, key=lambda vote: vote.voter.ranks):
                if vote.fingerprint not in finding.told:
                    vote.speaks = True
                    finding.told[vote.fingerprint] = None if finding.broken is None else vote
        return votes

    def _why_split(self, vote: Decision, met: list[Component]) -> tuple[Finding, Iterable[Component]]:
        """Why a vote is late or doesn't fit, and which components are settled with it. The gravest of what others were
        told: on just its span, or else on spans that overlap it."""
        linked = dict.fromkeys(met)
        told: list[Finding] = []
        for line, span in vote.places:
            if span not in line.cells:
                linked |= {component: None for other, component in line.cells.items() if _overlap(other, span)}
                known = {other: finding for other, finding in line.findings.items() if _overlap(other, span)}
                told += [known[span]] if span in known else known.values()
                if not known and not line.members.isdisjoint(self._lost):
                    told.append(_peer_lost(line, span))
        gravest = max(told, key=lambda finding: list(Outcome).index(finding.outcome), default=None)
        others = [other for component in linked for other in component.votes.values()]
        if gravest and gravest.broken == "" and vote.fingerprint not in gravest.told:
            gravest = replace(gravest, broken=self._broken([*gravest.told.values(), vote]))
        return gravest or self._spans_differ([*others, vote]), linked

    def _settle_cells_passed(self, voter: Voter, places: Places) -> list[Decision]:
        """SPLIT for the cells before the spans of a vote that its voter never voted on."""
        settled: list[Decision] = []
        for line, (start, _) in places:
            for span, component in list(line.cells.items()):
                if span[1] <= start and voter not in component.votes:
                    reason = (
                        f"{voter} has gone past {_at(line, span)} without a vote there: its next one "
                        f"starts at {start}. It issued these collectives outside a compiled graph, or compiled a graph "
                        f"that the others lack"
                    )
                    settled += self._settle(component, Finding(Outcome.SPLIT, reason, voter.ranks, line.ranks, span))
        return settled

    def _wait_cycles(self) -> Iterator[tuple[list[Component], float]]:
        """Sets of components that wait for one another, and when each is to be split: when nothing was added to it for
        its grace; at once if the same groups stood so before. One waits for another if it lacks a rank that has a vote
        there. What does not wait, or is not waited for, is peeled off; what waits between two cycles goes with them."""
        waits_for: dict[Component, set[Component]] = {component: set() for component in self._open}
        awaited: dict[Component, set[Component]] = {component: set() for component in self._open}
        for own in self._open if len(self._open) > 1 else ():
            for voter in own.votes:
                for component in [component for line in voter.lines for component in line.cells.values()]:
                    if voter not in component.votes:
                        waits_for[component].add(own)
                        awaited[own].add(component)
        left = set(self._open)
        while left != (kept := {one for one in left if waits_for[one] & left and awaited[one] & left}):
            left = kept
        while left:
            cycle, more = set[Component](), {next(component for component in self._open if component in left)}
            while more != cycle:
                cycle = more
                more = left & cycle.union(*(waits_for[one] | awaited[one] for one in cycle))
            left -= cycle
            due = max(vote.arrived for component in cycle for vote in component.votes.values())
            if not all(line.stood for component in cycle for line in component.spans):
                due = min(due + self._grace_s, *(component.due for component in cycle))
            yield [component for component in self._open if component in cycle], due

    def _settle_miscounts(self, now: float) -> list[Decision]:
        settled: list[Decision] = []
        while behind := next(((its, why) for its, due, why in self._miscounts() if due <= now), None):
            for line in behind[0].spans:
                line.stood = True
            settled += self._settle(*behind)
        return settled

    def _miscounts(self) -> Iterator[tuple[Component, float, Finding]]:
        """Components that wait for a rank that has voted on their program already, farther back on their lines, and was
        answered there: it counts fewer collectives than they. And when each is to be split: after a grace, in which
        the rank may catch up; at once if its lines stood so before."""
        for component in [component for component in self._open if not component.differs]:
            for rank, line in component.lacks().items():
                voter, span = self.voter(rank), component.spans[line]
                last = voter.last
                if last is None or last in voter.waiting or last.fingerprint != component.fingerprint:
                    continue
                its = dict(last.places)
                if all(
                    other in its and its[other][1] - its[other][0] == end - start and its[other][1] < start
                    for other, (start, end) in component.spans.items()
                    if other in voter.lines
                ):
                    due = max(last.arrived, *(vote.arrived for vote in component.votes.values()))
                    due += 0.0 if all(its.stood for its in component.spans) else self._grace_s
                    reason = (
                        f"{voter} counts {span[0] - its[line][0]} collectives fewer on {line.name} than "
                        f"{format_ranks(rank for voter in component.votes for rank in voter.ranks)}: it voted on the "
                        f"same graph at {_at(line, its[line])}, where they are at [{span[0]}, {span[1]}). All counted "
                        f"alike up to {line.base}. It issued collectives since then that it did not count "
                        f"(record_eager_collectives), or the others counted some that they did not issue"
                    )
                    yield component, due, Finding(Outcome.SPLIT, reason, voter.ranks, line.ranks, span)
                    break

    def _name(self, fingerprint: str | bytes) -> str:
        if fingerprint in self.programs:
            return self.programs[fingerprint].name
        text = fingerprint.hex() if isinstance(fingerprint, bytes) else fingerprint
        return text[:12] + "…" * (len(text) > 12)

    def _fingerprints_differ(self, component: Component) -> Finding:
        votes = list(component.votes.values())
        ranks_with: dict[str | bytes, list[int]] = {}
        for vote in votes:
            ranks_with.setdefault(vote.fingerprint, []).extend(vote.voter.ranks)
        sides = [f"{self._name(its)} on {format_ranks(ranks)}" for its, ranks in ranks_with.items()]
        met = {place for vote in votes if vote.fingerprint != votes[-1].fingerprint for place in vote.places}
        line, span = next((place for place in votes[-1].places if place in met), votes[-1].places[0])
        voted = sum(len(voter.ranks) for voter in component.votes if line in voter.lines)
        others = f"; {voted} of {len(line.ranks)} ranks had voted" if voted < len(line.ranks) else ""
        reason = f"fingerprints differ at {_at(line, span)}: {'; '.join(sides)}{others}"
        ranks = tuple(sorted(itertools.chain(*ranks_with.values())))
        return Finding(Outcome.SPLIT, reason, ranks, line.ranks, span, self._broken(votes))

    def _spans_differ(self, votes: Sequence[Decision]) -> Finding:
        """For votes that can't be one component: a rank belongs to a line, and has no vote there or another span."""
        on = {line: (vote, span) for vote in votes for line, span in vote.places}
        for vote in (votes[-1], *votes[:-1]):
            for line, (other, span) in on.items():
                if line in vote.voter.lines and dict(vote.places).get(line) != span:
                    reason = (
                        f"the graph of {vote.voter} takes {_places(vote)}, that of {other.voter} takes "
                        f"{_places(other)}: they hold different numbers of collectives, or started at different "
                        f"positions"
                    )
                    ranks = tuple(sorted({*vote.voter.ranks, *other.voter.ranks}))
                    return Finding(Outcome.SPLIT, reason, ranks, line.ranks, span, self._broken(votes))
        late = votes[-1]
        line, span = next((line, span) for line, span in late.places if span[0] < line.highest)
        reason = (
            f"{late.voter} is late at {_at(line, span)}: others are at {line.highest} already, and went past "
            f"without a vote there, or were answered too long ago for it to be known"
        )
        return Finding(Outcome.SPLIT, reason, late.voter.ranks, line.ranks, span)

    def _broken(self, votes: Sequence[Decision]) -> str | None:
        """Where the ranks issue other collectives, as far as the spans of these votes overlap (`Finding.broken`)."""
        seen: dict[tuple[Line, int], tuple[str, Decision]] = {}
        for vote in {(vote.fingerprint, *vote.places): vote for vote in votes}.values():  # thousands may be equal
            program = self.programs.get(vote.fingerprint)
            if program is None or len(program.collectives) != len(vote.places):
                return None
            for (line, (start, end)), collectives in zip(vote.places, program.collectives, strict=True):
                if len(collectives) != end - start:
                    return None
                for position, its in enumerate(collectives, start):
                    known, other = seen.setdefault((line, position), (its, vote))
                    if known != its and _must_differ(known, its):
                        sides = f"{known} on {_with(other, votes)}, {its} on {_with(vote, votes)}"
                        return f"{_at(line, (position, position + 1))} is {sides}"
        places = {place for vote in votes for place in vote.places}
        return "" if len(places) == len({line for line, _ in places}) else None

    def _waits(self, component: Component, now: float, waits: str) -> Finding:
        """What is said of a component while it waits."""
        missing = component.lacks()
        line = next(iter(missing.values()))
        voted = format_ranks(rank for voter in component.votes for rank in voter.ranks)
        seen = "; ".join(_last_seen(self.voter(rank), now) for rank in list(missing)[:MAX_RANKS_LAST_SEEN])
        span = component.spans[line]
        program = self.programs.get(component.fingerprint)
        graph = f" with {program.name}" if program else ""
        reason = f"{waits} for {format_ranks(missing)} at {_at(line, span)}{graph} ({voted} voted): {seen}"
        return Finding(Outcome.TIMEOUT, reason, tuple(missing), line.ranks, span)


def _last_seen(voter: Voter, now: float) -> str:
    if voter.last is None:
        return f"{voter} has {'not voted' if voter.label else 'neither connected nor voted'} yet"
    state = "still waits in" if voter.last in voter.waiting else "last voted on"
    return f"{voter} {state} {_places(voter.last)}, {now - voter.last.arrived:.1f} s ago"


def _out_of_order(voter: Voter, line: Line, span: Span) -> HandshakeProtocolError:
    text = (
        f"{voter} voted out of order: its span {_at(line, span)} starts before {line.frontier.get(voter, line.base)}, "
        f"where its last vote on that group ended. Count the collectives of one process in one place, under one lock, "
        f"and submit each count once"
    )
    return HandshakeProtocolError(text, ranks=voter.ranks, group=line.ranks, span=span)


def _can_be_one(met: list[Component], opened: list[Line]) -> bool:
    """Whether each rank would vote on every line that it belongs to, if these became one component."""
    if opened and met and not all(one.votes.keys().isdisjoint(line.members) for one in met for line in opened):
        return False
    return len(met) < 2 or all(
        all(large.spans.keys().isdisjoint(voter.lines) for voter in small.votes)
        and all(large.votes.keys().isdisjoint(line.members) for line in small.spans)
        for small, large in itertools.combinations(sorted(met, key=lambda component: len(component.votes)), 2)
    )


def _peer_lost(line: Line, span: Span) -> Finding:
    lost = sorted((voter for voter in line.members if voter.lost), key=lambda voter: voter.ranks)
    ranks = tuple(rank for voter in lost for rank in voter.ranks)
    causes = "; ".join(f"{voter}, {voter.lost}" for voter in lost[:MAX_RANKS_LAST_SEEN])
    reason = (
        f"a member of {line.name} is gone, at [{span[0]}, {span[1]}): {causes}. Look at the end of the log of "
        f"{format_ranks(ranks)}, and restart the job"
    )
    return Finding(Outcome.PEER_LOST, reason, ranks, line.ranks, span)


def _waits_in_cycle(cycle: list[Component]) -> Finding:
    lacked = {rank for component in cycle for rank in component.lacks()}
    votes = [vote for component in cycle for vote in component.votes.values()]
    blocked = {vote.rank: vote for vote in votes if not lacked.isdisjoint(vote.voter.ranks)}
    first = [blocked[rank] for rank in sorted(blocked)[:MAX_RANKS_LAST_SEEN]]
    waits = ", ".join(f"{vote.voter} waits at {_places(vote)}" for vote in first)
    order = "They issue collectives on these groups in different orders"
    reason = f"{format_ranks(blocked)} wait for one another in a cycle: {waits}. {order}"
    line, span = first[0].places[0]
    return Finding(Outcome.SPLIT, reason, tuple(sorted(blocked)), line.ranks, span)


def _with(vote: Decision, votes: Sequence[Decision]) -> str:
    """The ranks of those that have the program of this one."""
    return format_ranks(rank for its in votes if its.fingerprint == vote.fingerprint for rank in its.voter.ranks)


def _must_differ(one: str, other: str) -> bool:
    """Whether two collectives are others: a word "?" may be any."""
    pairs = list(itertools.zip_longest(one.split(), other.split()))
    return any(its != their and "?" not in (its, their) for its, their in pairs)


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _at(line: Line, span: Span) -> str:
    return f"[{span[0]}, {span[1]}) on {line.name}"


def _places(vote: Decision) -> str:
    more = f" and on {len(vote.places) - 3} more groups" if len(vote.places) > 3 else ""
    return ", ".join(_at(line, span) for line, span in vote.places[:3]) + more
