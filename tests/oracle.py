# SPDX-License-Identifier: Apache-2.0
"""The handshake's rule, written once more: slow, obvious, and without a line of the state machine's code.

It keeps every vote for ever and works everything out from scratch each time it is asked.

- Two votes of different ranks are *linked* when their spans overlap on a group.
- They *agree* when their fingerprints are equal and, on every group that both ranks belong to, they have the same
  span or both have none.
- A *component* is the closure of "linked", over all votes ever cast, answered or not.
- A component is SPLIT if a linked pair in it disagrees, if a member of one of its groups went past a span without
  voting on it, or if a vote in it was answered other than FAT before. It is FAT if nothing of that is so and every
  member of every group in it has voted. Otherwise it waits.

`verdicts` is that rule alone. `Oracle` adds what depends on time and on who can still vote: ranks that wait for one
another in a cycle, timeouts, lost ranks.
"""

from collections.abc import Collection, Sequence

FAT = "FAT"
SPLIT = "SPLIT"
TIMEOUT = "TIMEOUT"
PEER_LOST = "PEER_LOST"
WAITS = "WAITS"

Group = tuple[int, ...]
Span = tuple[int, int]


class Vote:
    """One vote: `spans` maps each group with collectives in the graph to its `(start, end)`."""

    def __init__(self, rank: int, fingerprint: str, spans: dict[Group, Span]) -> None:
        self.rank = rank
        self.fingerprint = fingerprint
        self.spans = spans

    def __repr__(self) -> str:
        spans = ", ".join(
            f"{{{','.join(map(str, group))}}}: [{start},{end})" for group, (start, end) in self.spans.items()
        )
        return f"rank {self.rank} votes {self.fingerprint} on {spans or 'nothing'}"


def overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def linked(one: Vote, other: Vote) -> bool:
    if one.rank == other.rank:
        return False
    return any(overlap(span, other.spans[group]) for group, span in one.spans.items() if group in other.spans)


def agree(one: Vote, other: Vote) -> bool:
    if one.fingerprint != other.fingerprint:
        return False
    return all(
        one.spans.get(group) == other.spans.get(group)
        for group in one.spans.keys() | other.spans.keys()
        if one.rank in group and other.rank in group
    )


def components(votes: Sequence[Vote]) -> list[list[int]]:
    """The closure of "linked", as lists of indices into `votes`."""
    left = set(range(len(votes)))
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
    return any(
        vote.rank == rank and group in vote.spans and overlap(vote.spans[group], span) for vote in votes
    )


def went_past(votes: Sequence[Vote], rank: int, group: Group, span: Span) -> bool:
    """Whether `rank` can't vote on `span` any more, and has not."""
    return not has_voted(votes, rank, group, span) and any(
        vote.rank == rank and group in vote.spans and vote.spans[group][0] >= span[1] for vote in votes
    )


def needs(votes: Sequence[Vote], component: Sequence[int]) -> list[tuple[int, Group, Span]]:
    """Each `(rank, group, span)` that the component is made of or lacks."""
    return [
        (member, group, span)
        for place in component
        for group, span in votes[place].spans.items()
        for member in group
    ]


def missing(votes: Sequence[Vote], component: Sequence[int]) -> set[int]:
    """The ranks without whose vote the component can't be complete."""
    return {need[0] for need in needs(votes, component) if not has_voted(votes, *need)}


def has_evidence(votes: Sequence[Vote], component: Sequence[int]) -> bool:
    """Whether the component can't become FAT, whatever else is cast."""
    pairs = [(votes[one], votes[other]) for one in component for other in component if one < other]
    if any(linked(one, other) and not agree(one, other) for one, other in pairs):
        return True
    return any(went_past(votes, *need) for need in needs(votes, component))


def verdict(votes: Sequence[Vote], component: Sequence[int]) -> str:
    if has_evidence(votes, component):
        return SPLIT
    return WAITS if missing(votes, component) else FAT


def verdicts(votes: Sequence[Vote]) -> list[str]:
    """The verdict on each vote, if these are all the votes so far; each rank's in the order in which it cast them."""
    answers = [WAITS] * len(votes)
    for component in components(votes):
        answer = verdict(votes, component)
        for place in component:
            answers[place] = answer
    return answers


def cycles_of(edges: dict[int, set[int]]) -> list[set[int]]:
    """The sets of nodes from each of which a walk along `edges` leads to each, itself included."""
    reached_from: dict[int, set[int]] = {}
    for start in edges:
        reached: set[int] = set()
        walk = list(edges[start])
        while walk:
            node = walk.pop()
            if node not in reached:
                reached.add(node)
                walk.extend(edges.get(node, ()))
        reached_from[start] = reached
    found: list[set[int]] = []
    for start, reached in reached_from.items():
        cycle = {node for node in reached if start in reached_from.get(node, ())}
        if start in cycle and cycle not in found:
            found.append(cycle)
    return found


class Oracle:
    """The rule together with wait cycles, timeouts, lost ranks, and those who come late to one of these.

    Each event returns what must be answered now: `{index of the vote: the outcomes that are right}`, more than one
    where the design does not say which comes first; WAITS among them where no answer is right as well. The caller
    gives back what was chosen by `record`.
    """

    def __init__(self, cycle_grace_s: float = 5.0) -> None:
        self.cycle_grace_s = cycle_grace_s
        self.votes: list[Vote] = []
        self.answers: list[str] = []
        self.cast_at: list[float] = []
        self.timeouts_s: list[float] = []
        self.blocking: list[bool] = []
        self.lost: set[int] = set()
        self.decided: dict[tuple[Group, Span], str] = {}  # what the first votes of that span were answered
        self.stood: set[tuple[int, Group, str]] = set()  # blocks that stood in a cycle for its grace
        self.standing: dict[int, set[tuple[int, Group, str]]] = {}  # which ones did if this vote is answered now

    def put(
        self, vote: Vote, now: float, *, blocking: bool = True, timeout_s: float = float("inf")
    ) -> dict[int, set[str]]:
        self.votes.append(vote)
        self.answers.append(WAITS)
        self.cast_at.append(now)
        self.timeouts_s.append(timeout_s)
        self.blocking.append(blocking)
        due = self.due()
        for place in self.note_cycles_that_stood(now, due):
            due[place] = {SPLIT, WAITS}
        return due

    def drop(self, rank: int) -> dict[int, set[str]]:
        self.lost.add(rank)
        return self.due()

    def rejoin(self, rank: int) -> None:
        self.lost.discard(rank)

    def expire(self, now: float) -> dict[int, set[str]]:
        due = self.due()
        for place in self.note_cycles_that_stood(now, due):
            due[place] = {SPLIT}
        for component in self.waiting_components(answered=due.keys()):
            if self.out_of_time_at(component) <= now:
                due.update((place, {TIMEOUT}) for place in component)
        return due

    def record(self, place: int, outcome: str) -> None:
        self.answers[place] = outcome
        for group_and_span in self.votes[place].spans.items():
            self.decided.setdefault(group_and_span, outcome)
        self.stood |= self.standing.get(place, set())

    def due(self) -> dict[int, set[str]]:
        answers: dict[int, set[str]] = {}
        for component in self.waiting_components():
            outcome = self.outcome(component)
            if outcome != WAITS:
                answers.update((place, {outcome}) for place in component)
        # A cycle of ranks that surely block is answered at once by the vote that closes it; of ranks that do because
        # they stood so before, if this vote is one of those. One that was there before, and is certain only now that
        # its ranks' other votes are answered, may be taken for one a little later.
        newest = len(self.votes) - 1
        before = self.cycles(certain=True, answered={*answers, newest})
        for cycle in self.cycles(certain=True, answered=answers.keys()):
            known = any(self.blocking[place] for place in cycle) or (newest in cycle and self.has_stood(newest))
            closed_now = not answers and not any(cycle & other for other in before)
            answers_of_it = {SPLIT} if known and closed_now else {SPLIT, WAITS}
            answers.update((place, answers_of_it) for place in cycle)
        return answers

    def outcome(self, component: Sequence[int]) -> str:
        """The gravest that applies to a component of waiting votes; what was decided on their spans tells it, too."""
        had: set[str] = set()
        for place in component:
            for group, span in self.votes[place].spans.items():
                had.update(self.decided_on(group, span))
        if PEER_LOST in had or any(
            member in self.lost and not self.decided_on(group, span)
            for member, group, span in needs(self.votes, component)
        ):
            return PEER_LOST
        if TIMEOUT in had:
            return TIMEOUT
        if SPLIT in had:
            return SPLIT
        return verdict(self.votes, component)

    def decided_on(self, group: Group, span: Span) -> set[str]:
        """What was decided on just this span, or else on those that overlap it."""
        if (group, span) in self.decided:
            return {self.decided[group, span]}
        return {answer for (other, its), answer in self.decided.items() if other == group and overlap(its, span)}

    def out_of_time_at(self, places: Collection[int]) -> float:
        return min(self.cast_at[place] + self.timeouts_s[place] for place in places)

    def cycle_due_at(self, cycle: Collection[int]) -> float:
        """When it has stood for its grace, or the first of its votes is out of time."""
        grace_s = min(self.cycle_grace_s, *(self.timeouts_s[place] / 2 for place in cycle))
        return min(max(self.cast_at[place] for place in cycle) + grace_s, self.out_of_time_at(cycle))

    def note_cycles_that_stood(self, now: float, due: dict[int, set[str]]) -> set[int]:
        """The votes in them; and what is to be remembered if they are answered."""
        self.standing = {}
        for cycle in self.cycles(certain=False, answered=due.keys()):
            if self.cycle_due_at(cycle) <= now:
                blocks = {
                    self.block(place)
                    for component in self.waiting_components()
                    if cycle.issuperset(component)
                    for place in cycle
                    if self.votes[place].rank in missing(self.votes, component)
                }
                self.standing.update((place, blocks) for place in cycle)
        return set(self.standing)

    def waiting_components(self, answered: Collection[int] = ()) -> list[list[int]]:
        """Those of the votes without an answer; `answered` have one as well."""
        places = [
            place for place, answer in enumerate(self.answers) if answer == WAITS and place not in answered
        ]
        return [[places[at] for at in component] for component in components([self.votes[at] for at in places])]

    def block(self, place: int) -> tuple[int, Group, str]:
        vote = self.votes[place]
        return vote.rank, next(iter(vote.spans)), vote.fingerprint

    def has_stood(self, place: int) -> bool:
        return bool(self.votes[place].spans) and self.block(place) in self.stood

    def cycles(self, certain: bool, answered: Collection[int] = ()) -> list[set[int]]:
        """The sets of waiting votes none of which can be answered before another one of its set is.

        Args:
            certain: only ranks that surely can't vote count as waiting: those with one vote without an answer, for
                which they block, and those that stood in a cycle so before.
            answered: votes that are taken as answered as well.
        """
        waiting = self.waiting_components(answered)
        home = {place: number for number, component in enumerate(waiting) for place in component}
        edges: dict[int, set[int]] = {}
        for number, component in enumerate(waiting):
            edges[number] = set()
            for rank in missing(self.votes, component):
                own = [place for place in home if self.votes[place].rank == rank]
                edges[number].update(
                    home[place]
                    for place in own
                    if not certain or (len(own) == 1 and self.blocking[place]) or self.has_stood(place)
                )
        return [{place for place, number in home.items() if number in cycle} for cycle in cycles_of(edges)]
