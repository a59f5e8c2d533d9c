# SPDX-License-Identifier: Apache-2.0
"""The handshake's rule, written once more: slow, obvious, and without a line of the state machine's code.

It keeps every vote for ever and works everything out from scratch each time it is asked.

- Two votes of different ranks are *linked* when their spans overlap on a group.
- A *component* is the closure of "linked", over all votes ever cast, answered or not.
- A component *fits* if every vote in it, on every group of it that the vote's rank belongs to, has the same span.
- A component is SPLIT if it does not fit, if its fingerprints differ, or if a member of one of its groups went past a
  span without voting on it. It is FAT if nothing of that is so and every member of every group in it has voted.
  Otherwise it waits.
- If all its votes are *partial*, fingerprints that differ wait until every member has voted: then it is SPLIT with a
  plan, which is called PLAN here; or without one, if one of its ranks still waits in an older vote.

`verdicts` is that rule alone. `Oracle` adds what depends on time and on who can still vote: ranks that wait for one
another in a cycle, ranks that count differently, timeouts, lost ranks, and those who come late to one of these.
"""

from collections.abc import Collection, Sequence

FAT = "FAT"
PLAN = "PLAN"
SPLIT = "SPLIT"
TIMEOUT = "TIMEOUT"
PEER_LOST = "PEER_LOST"
WAITS = "WAITS"

Group = tuple[int, ...]
Span = tuple[int, int]


class Vote:
    """One vote: `spans` maps each group with collectives in the graph to its `(start, end)`."""

    def __init__(self, rank: int, fingerprint: str, spans: dict[Group, Span], partial: bool = False) -> None:
        self.rank = rank
        self.fingerprint = fingerprint
        self.spans = spans
        self.partial = partial

    def __repr__(self) -> str:
        spans = ", ".join(
            f"{{{','.join(map(str, group))}}}: [{start},{end})" for group, (start, end) in self.spans.items()
        )
        partial = ", partial," if self.partial else ""
        return f"rank {self.rank} votes {self.fingerprint}{partial} on {spans or 'nothing'}"


def overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def linked(one: Vote, other: Vote) -> bool:
    if one.rank == other.rank:
        return False
    return any(overlap(span, other.spans[group]) for group, span in one.spans.items() if group in other.spans)


def components(votes: Sequence[Vote], places: Collection[int]) -> list[list[int]]:
    """The closure of "linked" over the votes at `places`, as lists of indices into `votes`."""
    left = set(places)
    found = []
    while left:
        component = [left.pop()]
        for place in component:  # grows while it is walked
            reached = [other for other in left if linked(votes[place], votes[other])]
            left.difference_update(reached)
            component.extend(reached)
        found.append(sorted(component))
    return found


def has_voted(votes: Sequence[Vote], rank: int, group: Group, span: Span) -> bool:
    return any(vote.rank == rank and group in vote.spans and overlap(vote.spans[group], span) for vote in votes)


def went_past(votes: Sequence[Vote], rank: int, group: Group, span: Span) -> bool:
    """Whether `rank` can't vote on `span` any more, and has not."""
    return not has_voted(votes, rank, group, span) and any(
        vote.rank == rank and group in vote.spans and vote.spans[group][0] >= span[1] for vote in votes
    )


def needs(votes: Sequence[Vote], component: Sequence[int]) -> set[tuple[int, Group, Span]]:
    """Each `(rank, group, span)` that the component is made of or lacks."""
    return {
        (member, group, span) for place in component for group, span in votes[place].spans.items() for member in group
    }


def missing(votes: Sequence[Vote], component: Sequence[int]) -> set[int]:
    """The ranks without whose vote the component can't be complete."""
    return {need[0] for need in needs(votes, component) if not has_voted(votes, *need)}


def fits(votes: Sequence[Vote], component: Sequence[int]) -> bool:
    """Whether each vote of it is on each of its groups that the vote's rank is in, always with the same span. So no
    rank has two votes in it."""
    spans = {(group, span) for place in component for group, span in votes[place].spans.items()}
    return all(
        votes[place].spans.get(group) == span
        for place in component
        for group, span in spans
        if votes[place].rank in group
    )


def passed(votes: Sequence[Vote], component: Sequence[int]) -> bool:
    return any(went_past(votes, *need) for need in needs(votes, component))


def differs(votes: Sequence[Vote], component: Sequence[int]) -> bool:
    return len({votes[place].fingerprint for place in component}) > 1


def verdict(votes: Sequence[Vote], component: Sequence[int]) -> str:
    if not fits(votes, component) or passed(votes, component):
        return SPLIT
    if differs(votes, component):
        if not all(votes[place].partial for place in component):
            return SPLIT
        return WAITS if missing(votes, component) else PLAN
    return WAITS if missing(votes, component) else FAT


def older_than(votes: Sequence[Vote], component: Sequence[int]) -> list[int]:
    """Its ranks' older votes. While one of these waits, its rank can't start to look for a plan."""
    return [other for place in component for other in range(place) if votes[other].rank == votes[place].rank]


def waits(votes: Sequence[Vote], place: int) -> bool:
    return any(place in its and verdict(votes, its) == WAITS for its in components(votes, range(len(votes))))


def verdicts(votes: Sequence[Vote]) -> list[str]:
    """The verdict on each vote, if these are all the votes so far, in the order in which they were cast."""
    answers = [WAITS] * len(votes)
    for component in components(votes, range(len(votes))):
        answer = verdict(votes, component)
        then = votes[: max(component) + 1]
        if answer == PLAN and any(waits(then, older) for older in older_than(votes, component)):
            answer = SPLIT
        for place in component:
            answers[place] = answer
    return answers


class Oracle:
    """The rule together with wait cycles, timeouts, lost ranks, and those who come late to one of these.

    Each event returns what is answered now: `{index of the vote: its outcome}`.
    """

    def __init__(self, cycle_grace_s: float = 5.0) -> None:
        self.cycle_grace_s = cycle_grace_s
        self.votes: list[Vote] = []
        self.answers: list[str] = []
        self.cast_at: list[float] = []
        self.timeouts_s: list[float] = []
        self.lost: set[int] = set()
        self.decided: dict[tuple[Group, Span], str] = {}  # what the first votes of that span were answered
        self.stood: set[Group] = set()  # the groups of cycles that stood for their grace

    def put(self, vote: Vote, now: float, timeout_s: float = float("inf")) -> dict[int, str]:
        newest = len(self.votes)
        self.votes.append(vote)
        self.answers.append(WAITS)
        self.cast_at.append(now)
        self.timeouts_s.append(timeout_s)
        # First what it passes: that is split, whatever the vote itself is answered.
        past = [component for component in self.waiting_components(but=newest) if passed(self.votes, component)]
        return self.answer(past, [SPLIT] * len(past)) | self.due()

    def drop(self, rank: int) -> dict[int, str]:
        self.lost.add(rank)
        return self.due()

    def rejoin(self, rank: int) -> None:
        self.lost.discard(rank)

    def expire(self, now: float) -> dict[int, str]:
        cycles = [cycle for cycle in self.cycles() if self.cycle_due_at(cycle) <= now]
        self.stood.update(group for cycle in cycles for group in self.groups_of(cycle))
        answered = self.answer(cycles, [SPLIT] * len(cycles))
        answered |= self.answer_miscounts(now)
        late = [component for component in self.waiting_components() if self.out_of_time_at(component) <= now]
        answered |= self.answer(late, [SPLIT if differs(self.votes, its) else TIMEOUT for its in late])
        return answered | self.answer_miscounts(now)

    def answer_miscounts(self, now: float) -> dict[int, str]:
        answered = {}
        while due := [its for its in self.waiting_components() if self.miscount_due_at(its) <= now]:
            answered |= self.answer(due[:1], [SPLIT])
            self.stood |= self.groups_of(due[0])
        return answered

    def due(self) -> dict[int, str]:
        waiting = self.waiting_components()
        return self.answer(waiting, [self.outcome(component) for component in waiting])

    def answer(self, waiting: Sequence[Sequence[int]], outcomes: Sequence[str]) -> dict[int, str]:
        answered = {}
        for component, outcome in zip(waiting, outcomes, strict=True):
            for place in component if outcome != WAITS else ():
                self.answers[place] = answered[place] = outcome
                for group_and_span in self.votes[place].spans.items():
                    self.decided.setdefault(group_and_span, outcome)
        return answered

    def outcome(self, component: Sequence[int]) -> str:
        """The gravest that applies to a component of waiting votes; what was decided on their spans tells it, too."""
        own = verdict(self.votes, component)
        if own == PLAN and any(self.answers[older] == WAITS for older in older_than(self.votes, component)):
            own = SPLIT
        told = {own}
        for member, group, span in needs(self.votes, component):
            decided = self.decided_on(group, span)
            told |= decided or ({PEER_LOST} if member in self.lost else set())
        return next((grave for grave in (PEER_LOST, TIMEOUT, SPLIT) if grave in told), own)

    def decided_on(self, group: Group, span: Span) -> set[str]:
        """What was decided on just this span, or else on those that overlap it."""
        if (group, span) in self.decided:
            return {self.decided[group, span]}
        return {answer for (other, its), answer in self.decided.items() if other == group and overlap(its, span)}

    def out_of_time_at(self, places: Collection[int]) -> float:
        return min(self.cast_at[place] + self.timeouts_s[place] for place in places)

    def groups_of(self, places: Collection[int]) -> set[Group]:
        return {group for place in places for group in self.votes[place].spans}

    def cycle_due_at(self, cycle: Collection[int]) -> float:
        """When it has stood for its grace, or the first of its votes is out of time; at once if it stood before."""
        closed_at = max(self.cast_at[place] for place in cycle)
        if self.groups_of(cycle) <= self.stood:
            return closed_at
        return min(closed_at + self.cycle_grace_s, self.out_of_time_at(cycle))

    def miscount_due_at(self, component: Sequence[int]) -> float:
        """When a component is split because a rank that it lacks counts fewer collectives: the rank's last vote was
        answered, and is on the same program, farther back on each of the groups. Infinity where it is not so."""
        if differs(self.votes, component):
            return float("inf")
        for rank in sorted(missing(self.votes, component)):
            own = [place for place, vote in enumerate(self.votes) if vote.rank == rank]
            last = self.votes[own[-1]] if own and self.answers[own[-1]] != WAITS else None
            spans = [(group, span) for place in component for group, span in self.votes[place].spans.items()]
            if last is not None and last.fingerprint == self.votes[component[0]].fingerprint:
                mine = [(last.spans.get(group, span), span) for group, span in spans if rank in group]
                if all(its[1] < span[0] and its[1] - its[0] == span[1] - span[0] for its, span in mine):
                    seen_at = max(self.cast_at[place] for place in [own[-1], *component])
                    return seen_at + (0.0 if self.groups_of(component) <= self.stood else self.cycle_grace_s)
        return float("inf")

    def waiting_components(self, but: int | None = None) -> list[list[int]]:
        """Those of the votes without an answer; all votes, or all but one."""
        waiting = [place for place, answer in enumerate(self.answers) if answer == WAITS and place != but]
        return components(self.votes, waiting)

    def cycles(self) -> list[list[int]]:
        """The waiting votes that wait for one another, those that touch together.

        A component waits for each one in which a rank that it lacks has a vote. What waits for itself that way, over
        however many others, is a cycle; and what waits for one and is waited for by one is answered with it.
        """
        waiting = self.waiting_components()
        lacking = [missing(self.votes, component) for component in waiting]
        numbers = range(len(waiting))
        waits_for = {
            one: {other for other in numbers if any(self.votes[place].rank in lacking[one] for place in waiting[other])}
            for one in numbers
        }
        reaches = {one: reached_from(one, waits_for) for one in numbers}
        on_cycle = {one for one in numbers if one in reaches[one]}
        stuck = {
            one for one in numbers if reaches[one] & on_cycle and any(one in reaches[cyclic] for cyclic in on_cycle)
        }
        touch = {one: {other for other in stuck if other in waits_for[one] or one in waits_for[other]} for one in stuck}
        together = {frozenset(reached_from(one, touch)) for one in stuck}
        return [[place for number in sorted(one) for place in waiting[number]] for one in together]


def reached_from(start: int, edges: dict[int, set[int]]) -> set[int]:
    reached: set[int] = set()
    walk = list(edges[start])
    while walk:
        node = walk.pop()
        if node not in reached:
            reached.add(node)
            walk.extend(edges[node])
    return reached
