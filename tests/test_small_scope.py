# SPDX-License-Identifier: Apache-2.0
"""All small jobs, in all orders, against the oracle: up to 3 ranks, 2 groups and 3 collectives of each rank.

A rank's program is a list of votes. Each takes any number of collectives of each of the rank's groups, and is on
graph A or B; with one group it may follow after any number of eager collectives (with two, these would be too many).
A job is a program for each rank. Each order of a job's votes ends with the last vote of one rank: so the jobs are
played from small to large, and each goes on from where the jobs that lack one last vote have left the machine. Orders
that leave it in the same state are gone on with once.

    python tests/test_small_scope.py       plays 3 collectives of 3 ranks without a gap, which takes a while
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import oracle
import pytest
from layout import load
from oracle import Group, Span

_consensus = load("_consensus")
_vocabulary = load("_vocabulary")

Vote = tuple[str, tuple[tuple[Group, Span], ...]]  # the graph, and what it takes
Program = tuple[Vote, ...]
Order = tuple[int, ...]  # whose vote is next

WORLD, PAIR, OTHER_PAIR = (0, 1, 2), (0, 1), (1, 2)
SCOPES = [(PAIR,), (WORLD,), (PAIR, OTHER_PAIR), (WORLD, PAIR)]  # all others are these with other numbers

GROUPS = {ranks: _vocabulary.ProcessGroupId(ranks) for ranks in (WORLD, PAIR, OTHER_PAIR)}


def programs(groups: Sequence[Group], collectives: int, graphs: str, eager: bool) -> list[Program]:
    """All programs of a rank that is in these groups, those with fewer votes first."""

    def go_on(positions: tuple[int, ...]) -> Iterator[Program]:
        yield ()
        left = collectives - sum(positions)
        for skipped in itertools.product(range(left + 1 if eager else 1), repeat=len(groups)):
            for counts in itertools.product(range(left + 1), repeat=len(groups)):
                if 0 < sum(counts) <= left - sum(skipped):
                    starts = tuple(map(sum, zip(positions, skipped, strict=True)))
                    ends = tuple(map(sum, zip(starts, counts, strict=True)))
                    places = zip(groups, zip(starts, ends, strict=True), counts, strict=True)
                    spans = tuple((group, span) for group, span, count in places if count)
                    for rest in go_on(ends):
                        for graph in graphs:
                            yield ((graph, spans), *rest)

    return sorted(set(go_on((0,) * len(groups))), key=lambda program: (len(program), program))


class Machine:
    """The machine after these votes, and what it has answered."""

    def __init__(self, ranks: int, job: Sequence[Program], order: Order) -> None:
        self.machine = _consensus._CollectiveHandshakeConsensus(ranks)
        self.answers = {(rank, at): oracle.WAITS for rank, program in enumerate(job) for at in range(len(program))}
        cast = [0] * ranks
        for rank in order:
            graph, spans = job[rank][cast[rank]]
            places = [(self.machine.line(GROUPS[group]), span) for group, span in spans]
            for decision in self.machine.cast(self.machine.voter(rank), places, graph, (rank, cast[rank]), 0.0):
                assert self.answers[decision.request] == oracle.WAITS, f"two answers: {job}, {order}"
                self.answers[decision.request] = decision.outcome.name
            cast[rank] += 1

    def state(self) -> Any:
        """All of it that what comes later can depend on."""
        lines = []
        for line in sorted(self.machine._lines.values(), key=lambda line: line.ranks):
            cells = []
            for span, component in sorted(line.cells.items()):
                votes = sorted((vote.request, vote.fingerprint) for vote in component.votes.values())
                spans = sorted((its.ranks, span) for its, span in component.spans.items())
                cells.append((span, tuple(votes), tuple(spans), component.missing, component.differs))
            members = sorted(line.members, key=lambda voter: voter.ranks)
            frontier = [line.frontier.get(voter, line.base) for voter in members]
            findings = sorted((span, finding.outcome.name) for span, finding in line.findings.items())
            if any(frontier) or cells:
                lines.append((line.ranks, tuple(cells), tuple(frontier), line.highest, tuple(findings)))
        return tuple(lines)


def play_all(groups: Sequence[Group], collectives: int, graphs: str = "AB", eager: bool = True) -> tuple[int, set[str]]:
    """Plays all jobs. Returns how many there were, and the outcomes."""
    ranks = max(map(max, groups)) + 1
    of_rank = [programs([its for its in groups if rank in its], collectives, graphs, eager) for rank in range(ranks)]
    orders: dict[tuple[Program, ...], list[Order]] = {}  # one for each state in which the machine can be
    seen: set[str] = set()
    for job in itertools.product(*of_rank):
        if job[0] and job[0][0][0] != graphs[0]:
            continue  # the same with A and B exchanged
        votes = {
            (rank, at): oracle.Vote(rank, graph, dict(spans))
            for rank, program in enumerate(job)
            for at, (graph, spans) in enumerate(program)
        }
        expected = dict(zip(votes, oracle.verdicts(list(votes.values())), strict=True))
        states: dict[Any, Order] = {}
        for last in range(ranks):
            before = (*job[:last], job[last][:-1], *job[last + 1 :])
            for order in orders[before] if job[last] else ():
                played = Machine(ranks, job, (*order, last))
                told = f"{job}, in the order {(*order, last)}: {played.answers}, by the oracle {expected}"
                assert played.answers == expected, told
                states.setdefault(played.state(), (*order, last))
        orders[job] = list(states.values()) or [()]
        seen.update(expected.values())
    return len(orders), seen


@pytest.mark.parametrize(
    ("groups", "collectives", "graphs", "eager"),
    [
        (SCOPES[0], 3, "AB", True),
        (SCOPES[1], 2, "AB", True),
        (SCOPES[2], 2, "AB", True),
        (SCOPES[3], 2, "AB", False),
        (SCOPES[1], 3, "A", False),
        (SCOPES[2], 3, "A", False),
        (SCOPES[3], 3, "A", False),
    ],
)
def test_each_small_job_is_answered_as_the_oracle_says_in_any_order(
    groups: Sequence[Group], collectives: int, graphs: str, eager: bool
) -> None:
    _, seen = play_all(groups, collectives, graphs, eager)
    assert seen == {oracle.FAT, oracle.SPLIT, oracle.WAITS}


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_consensus._CollectiveHandshakeConsensus, "_settle_cells_passed", lambda *_: [])
    with pytest.raises(AssertionError, match=r"in the order \(0, 1\).*'WAITS'.*by the oracle.*'SPLIT'"):
        play_all((PAIR,), 2)


if __name__ == "__main__":
    for scope in SCOPES:
        began = time.monotonic()
        jobs, _ = play_all(scope, 3, eager=len(scope) == 1)
        print(f"{scope}: {jobs} jobs in {time.monotonic() - began:.0f} s", flush=True)
