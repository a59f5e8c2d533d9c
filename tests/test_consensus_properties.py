# SPDX-License-Identifier: Apache-2.0
"""The consensus machine against the oracle, over random programs.

A *program* is what one rank does, in order: cast a vote, or issue collectives eagerly. A *world* is one program a
rank. One seed draws everything about a case and stands in every failure: `Case(kind, seed)` plays it again.

`python tests/test_consensus_properties.py 1000000` measures the machine's memory over that many handshakes.
"""

import copy
import gc
import random
import sys
import time
import types

import oracle
import pytest
from layout import load
from oracle import FAT, PEER_LOST, SPLIT, TIMEOUT, WAITS, Group, Oracle, Vote

_vocabulary = load("_vocabulary")
_consensus = load("_consensus")

# Seeds per kind of world. Together with the other numbers here: some 6,000 worlds in less than 15 s.
CASES = 240


# ---------------------------------------------------------------------------------------------------------------
# Random worlds
# ---------------------------------------------------------------------------------------------------------------

# A step of a program: a graph (its fingerprint and collectives on each group), or eager collectives (no fingerprint).
Step = tuple[str | None, dict[Group, int]]
World = list[list[Step]]


def random_groups(draw: random.Random, ranks: int) -> list[Group]:
    sizes = [min(draw.choice([1, 2, 2, 2, 3, ranks]), ranks) for _ in range(draw.randint(2, 5))]
    return sorted({tuple(sorted(draw.sample(range(ranks), size))) for size in sizes})


def nested_groups(draw: random.Random, ranks: int) -> list[Group]:
    return [tuple(range(size)) for size in range(2, ranks + 1)]


def mesh_groups(draw: random.Random, ranks: int) -> list[Group]:
    columns = draw.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    rows = [tuple(range(start, start + columns)) for start in range(0, ranks, columns)]
    return rows + [tuple(range(start, ranks, columns)) for start in range(columns)]


def aligned_world(draw: random.Random, ranks: int, groups: list[Group], graphs: int) -> World:
    """All ranks that a graph's collectives concern run the same graphs in the same order."""
    world: World = [[] for _ in range(ranks)]
    for number in range(graphs):
        chosen = draw.sample(groups, draw.randint(1, min(3, len(groups))))
        counts = {group: draw.randint(1, 3) for group in chosen}
        eager = draw.random() < 0.15
        for rank in range(ranks):
            own = {group: count for group, count in counts.items() if rank in group}
            if own:
                world[rank].append((None if eager else f"g{number}", own))
    return world


def perturb(draw: random.Random, world: World) -> None:
    """Changes one thing in one rank's program, as real programs come to differ."""
    program = draw.choice([program for program in world if program] or [[]])
    if not program:
        return
    place = draw.randrange(len(program))
    fingerprint, counts = program[place]
    match draw.randrange(8):
        case 0:  # another graph with the same collectives
            program[place] = ("other", counts)
        case 1:  # the rank does not run this graph at all
            del program[place]
        case 2:  # it runs the collectives eagerly
            program[place] = (None, counts)
        case 3:  # it compiles two graphs as one
            if place + 1 < len(program):
                _, more = program.pop(place + 1)
                merged = {group: counts.get(group, 0) + more.get(group, 0) for group in counts.keys() | more.keys()}
                program[place] = ("composed", dict(sorted(merged.items())))
        case 4:  # a graph break: two graphs where the others have one
            first = {group: count - 1 for group, count in counts.items() if count > 1}
            if first:
                rest = {group: count - first.get(group, 0) for group, count in counts.items()}
                program[place : place + 1] = [("first half", first), ("second half", rest)]
        case 5:  # one collective more
            group = draw.choice(sorted(counts))
            program[place] = (fingerprint, {**counts, group: counts[group] + 1})
        case 6:  # two graphs in the other order
            other = draw.randrange(len(program))
            program[place], program[other] = program[other], program[place]
        case 7:  # one graph more, of its own
            program.insert(place, (draw.choice(["extra", fingerprint]), dict(draw.sample(sorted(counts.items()), 1))))


def random_world(draw: random.Random, ranks: int, groups: list[Group], graphs: int) -> World:
    """Nothing fits: only safety and the rule's letter are left."""
    world: World = []
    for rank in range(ranks):
        mine = [group for group in groups if rank in group]
        program: list[Step] = []
        for _ in range(draw.randint(1, graphs) if mine else 0):
            chosen = draw.sample(mine, draw.randint(1, len(mine)))
            program.append((draw.choice(["A", "A", "A", "B", None]), {group: draw.randint(1, 2) for group in chosen}))
        world.append(program)
    return world


def unordered_world(draw: random.Random, ranks: int, groups: list[Group], steps: int) -> World:
    """Each rank runs the same graphs at every step, in an order of its own, or nearly."""
    world: World = []
    sizes = [min(draw.choice([1, 1, 2]), len(groups)) for _ in range(draw.randint(2, 4))]
    graphs = [dict.fromkeys(draw.sample(groups, size), 1) for size in sizes]
    for rank in range(ranks):
        program: list[Step] = []
        for number, counts in enumerate(graphs):
            own = {group: count for group, count in counts.items() if rank in group}
            if own:
                program.append((f"g{number}", own))
        draw.shuffle(program)
        world.append(program * steps)
    if draw.random() < 0.3:
        perturb(draw, world)
    return world


def make_world(kind: str, draw: random.Random) -> World:
    ranks = draw.randint(2, 5)
    graphs = draw.randint(2, 6)
    if kind == "random":
        ranks = draw.randint(2, 4)
        return random_world(draw, ranks, random_groups(draw, ranks), graphs)
    if kind == "mesh":
        ranks = draw.choice([4, 6])
        groups = mesh_groups(draw, ranks)
        graphs = draw.randint(1, 4)
    elif kind == "nested":
        groups = nested_groups(draw, ranks)
    else:
        groups = random_groups(draw, ranks)
    if kind == "unordered":
        return unordered_world(draw, ranks, groups, graphs)
    world = aligned_world(draw, ranks, groups, graphs)
    if kind != "aligned":
        for _ in range(draw.randint(0, 3)):
            perturb(draw, world)
    return world


KINDS = ["aligned", "perturbed", "random", "mesh", "nested"]


class Case:
    """A world, and the votes that its programs cast. `groups` of which nothing is in a graph are idle in its vote."""

    def __init__(self, kind: str, seed: int) -> None:
        self.name = f"Case({kind!r}, {seed})"
        self.draw = random.Random(f"{kind} {seed}")
        world = make_world(kind, self.draw)
        self.num_ranks = max(len(world), 3)
        self.programs = [self.votes_of(rank, program) for rank, program in enumerate(world)]
        self.requests = {}
        for rank, program in enumerate(world):
            for vote, request in zip(self.programs[rank], self.requests_of(rank, program), strict=True):
                self.requests[vote] = request

    @staticmethod
    def votes_of(rank: int, program: list[Step]) -> list[Vote]:
        ends: dict[Group, int] = {}
        votes = []
        for fingerprint, counts in program:
            spans = {group: (ends.get(group, 0), ends.get(group, 0) + count) for group, count in counts.items()}
            ends.update({group: end for group, (_, end) in spans.items()})
            if fingerprint is not None:
                votes.append(Vote(rank, fingerprint, spans))
        return votes

    @staticmethod
    def requests_of(rank: int, program: list[Step]) -> list:
        """What the rank would really send: its whole counts, groups idle in the graph included."""
        requests = []
        position = _vocabulary.RankCollectiveCounts()
        for fingerprint, counts in program:
            if fingerprint is None:
                for group, count in counts.items():
                    position.record_eager_collectives(_vocabulary.ProcessGroupId(group), count)
                continue
            position.increment_pg_collective_counts(
                {_vocabulary.ProcessGroupId(group): count for group, count in counts.items()}
            )
            requests.append(_vocabulary.CollectiveHandshakeRequest(copy.deepcopy(position), fingerprint, rank))
        return requests

    def interleaving(self) -> list[Vote]:
        """All the votes in a random order that keeps each rank's own."""
        turns = [rank for rank, votes in enumerate(self.programs) for _ in votes]
        self.draw.shuffle(turns)
        following = [iter(votes) for votes in self.programs]
        return [next(following[rank]) for rank in turns]


class Run:
    """The machine at work on a case; keeps each vote's answer, and fails if a vote gets two or a stranger gets one."""

    def __init__(self, case: Case, timeout_s: float | None = None) -> None:
        self.case = case
        self.machine = _consensus._CollectiveHandshakeConsensus(case.num_ranks, timeout_s)
        self.order: list[Vote] = []
        self.answers: dict[Vote, str] = {}
        self.log: list[str] = [case.name]

    def put(self, vote: Vote, now: float = 0.0, *, blocking: bool = True) -> dict[Vote, str]:
        self.order.append(vote)
        self.log.append(f"{now:g} s: {vote}{'' if blocking else ', not blocking'}")
        return self.take(self.machine.put_request(self.case.requests[vote], now, blocking=blocking))

    def cast(self, vote: Vote, now: float, timeout_s: float) -> dict[Vote, str]:
        """As the coordinator does it: spans of groups that were declared before, a timeout of the rank's own."""
        self.order.append(vote)
        self.log.append(f"{now:g} s: {vote}, for {timeout_s:g} s")
        spans = [
            (self.machine.group(_vocabulary.ProcessGroupId(group)), start, end)
            for group, (start, end) in vote.spans.items()
        ]
        request = self.case.requests[vote]
        return self.take(self.machine.cast(vote.rank, spans, vote.fingerprint, now, request, False, timeout_s))

    def drop(self, rank: int, now: float) -> dict[Vote, str]:
        self.log.append(f"{now:g} s: rank {rank} is lost")
        return self.take(self.machine.drop_rank(rank, now, "gone"))

    def rejoin(self, rank: int) -> None:
        self.log.append(f"rank {rank} rejoins")
        self.machine.rejoin_rank(rank)

    def expire(self, now: float) -> dict[Vote, str]:
        self.log.append(f"{now:g} s: expire")
        return self.take(self.machine.expire(now))

    def take(self, decisions: list) -> dict[Vote, str]:
        taken = {}
        for decision in decisions:
            vote = next(
                (
                    vote
                    for vote in self.order
                    if vote.rank == decision.rank
                    and vote not in self.answers
                    and self.case.requests[vote] == decision.request
                ),
                None,
            )
            assert vote is not None, self.failure(f"an answer to no waiting vote: {decision.request!r}")
            self.answers[vote] = taken[vote] = decision.outcome.name
            self.log.append(f"    {decision.outcome.name} for {vote}: {decision.reason}")
        return taken

    def answer(self, vote: Vote) -> str:
        return self.answers.get(vote, WAITS)

    def failure(self, text: str) -> str:
        return "\n".join([text, *self.log])


def assert_as_the_oracle_says(run: Run) -> None:
    expected = dict(zip(run.order, oracle.verdicts(run.order), strict=True))
    for vote, verdict in expected.items():
        assert run.answer(vote) == verdict, run.failure(f"{vote}: {run.answer(vote)}, by the oracle {verdict}")


def assert_safe(run: Run) -> None:
    """FAT for a vote implies that all it is linked with agree and are FAT, and that nobody it needs is missing."""
    for vote in run.order:
        if run.answer(vote) != FAT:
            continue
        for other in run.order:
            if oracle.linked(vote, other):
                assert oracle.agree(vote, other), run.failure(f"{vote} is FAT, but {other} differs")
                assert run.answer(other) == FAT, run.failure(f"{vote} is FAT, {other} {run.answer(other)}")
        for group, span in vote.spans.items():
            for member in group:
                assert oracle.has_voted(run.order, member, group, span), run.failure(f"{vote} FAT without {member}")


# ---------------------------------------------------------------------------------------------------------------
# The oracle itself, by hand
# ---------------------------------------------------------------------------------------------------------------

WORLD2, WORLD4, EVEN = (0, 1), (0, 1, 2, 3), (0, 2)


@pytest.mark.parametrize(
    ("votes", "verdicts"),
    [
        ([Vote(0, "A", {WORLD2: (0, 1)})], [WAITS]),
        ([Vote(0, "A", {WORLD2: (0, 1)}), Vote(1, "A", {WORLD2: (0, 1)})], [FAT, FAT]),
        ([Vote(0, "A", {WORLD2: (0, 1)}), Vote(1, "B", {WORLD2: (0, 1)})], [SPLIT, SPLIT]),
        ([Vote(0, "A", {WORLD2: (0, 1)}), Vote(1, "A", {WORLD2: (1, 2)})], [SPLIT, WAITS]),
        ([Vote(0, "A", {})], [FAT]),
        ([Vote(0, "A", {(0,): (0, 7)})], [FAT]),
        (
            [
                Vote(0, "A", {WORLD2: (1, 2)}),
                Vote(1, "BC", {WORLD2: (1, 3)}),
                Vote(0, "A", {WORLD2: (2, 3)}),
            ],
            [SPLIT, SPLIT, SPLIT],
        ),
        (
            [Vote(rank, "A", {WORLD4: (0, 2), EVEN: (0, 1)} if rank in EVEN else {WORLD4: (0, 2)}) for rank in WORLD4],
            [FAT] * 4,  # were the fingerprints equal; a pair of ranks compares only the groups that both are in
        ),
        (
            [Vote(0, "A", {WORLD4: (0, 2), EVEN: (0, 1)}), Vote(2, "A", {WORLD4: (0, 2)})],
            [SPLIT, SPLIT],
        ),
        (
            [
                Vote(0, "A", {(0, 1): (0, 1), (0, 2): (0, 1)}),
                Vote(3, "A", {(2, 3): (0, 1), (1, 3): (0, 1)}),
                Vote(1, "A", {(0, 1): (0, 1), (1, 3): (0, 1)}),
                Vote(2, "A", {(2, 3): (0, 1), (0, 2): (0, 1)}),
            ],
            [FAT] * 4,
        ),
        (
            [
                Vote(0, "A", {(0, 1): (0, 1), (0, 2): (0, 1)}),
                Vote(3, "B", {(2, 3): (0, 1), (1, 3): (0, 1)}),
                Vote(1, "A", {(0, 1): (0, 1), (1, 3): (0, 1)}),
            ],
            [SPLIT] * 3,  # by 1 and 3; rank 0's vote is linked with rank 1's; nobody waits for rank 2
        ),
    ],
)
def test_oracle_by_hand(votes: list[Vote], verdicts: list[str]) -> None:
    assert oracle.verdicts(votes) == verdicts


# ---------------------------------------------------------------------------------------------------------------
# The rule
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_each_vote_is_answered_as_early_as_it_can_be(kind: str) -> None:
    for seed in range(CASES):
        case = Case(kind, seed)
        run = Run(case)
        now = 0.0
        for vote in case.interleaving():
            now += case.draw.choice([0.0, 1.0, 100.0])
            run.put(vote, now, blocking=False)
            assert_as_the_oracle_says(run)
        assert_safe(run)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_in_which_votes_arrive_does_not_matter(kind: str) -> None:
    for seed in range(CASES):
        case = Case(kind, 10_000 + seed)
        expected = None
        for _ in range(4):
            run = Run(case)
            for vote in case.interleaving():
                run.put(vote, blocking=False)
            if expected is None:
                assert_as_the_oracle_says(run)
                expected = run.answers
            assert run.answers == expected, run.failure(f"another order gave {expected}")


def test_ranks_that_run_the_same_graphs_never_split() -> None:
    for seed in range(CASES):
        case = Case("aligned", 20_000 + seed)
        run = Run(case)
        for vote in case.interleaving():
            run.put(vote, blocking=False)
        assert all(run.answer(vote) == FAT for vote in run.order), run.failure("a needless split")


@pytest.mark.parametrize("kind", KINDS)
def test_a_latecomer_to_a_split_is_told_its_reason(kind: str) -> None:
    """The one that the first votes of its span were told, however far the others have gone on."""
    latecomers = 0
    for seed in range(CASES):
        case = Case(kind, 25_000 + seed)
        machine = _consensus._CollectiveHandshakeConsensus(case.num_ranks)
        reasons: dict[tuple, str] = {}
        for vote in case.interleaving():
            spans = list(vote.spans.items())
            for decision in machine.put_request(case.requests[vote], 0.0, blocking=False):
                if decision.rank == vote.rank and len(spans) == 1 and spans[0] in reasons:
                    assert decision.reason == reasons[spans[0]], f"{case.name}: {vote}"
                    latecomers += 1
                for pg, count in decision.request.pg_collective_counts.items():
                    if count.num_collectives_in_graph and decision.outcome.name == SPLIT:
                        reasons.setdefault((pg.ranks, (count.collective_count_before, count.end)), decision.reason)
    assert latecomers or kind == "aligned"


def test_what_is_not_kept_is_split() -> None:
    """Ranks 0 and 1 differ at [0, 2), give up at [2, 4), and differ from then on, until rank 1 is lost. Rank 2
    is late to all of it."""
    machine = _consensus._CollectiveHandshakeConsensus(3, timeout_s=4.0)
    line = machine.group(_vocabulary.ProcessGroupId([0, 1, 2]))
    steps = _consensus.MAX_FINDINGS_A_LINE + 2
    for step in range(steps):
        for rank in (0, 1):
            machine.cast(rank, [(line, 2 * step, 2 * step + 2)], "A" if step == 1 else "AB"[rank], 0.0)
        machine.expire(4.0)
    machine.drop_rank(1, 4.0)

    def told(start: int, end: int) -> tuple[str, str]:
        [decision] = machine.cast(2, [(line, start, end)], "A", 5.0)
        return decision.outcome.name, decision.reason

    ahead = f"the others have gone on to {2 * steps}; what they had there is not kept any more"
    assert told(0, 2) == (SPLIT, f"rank 2 is late at [0, 2) on ranks 0-2: {ahead}")
    assert told(2, 3) == (SPLIT, f"rank 2 is late at [2, 3) on ranks 0-2: {ahead}")
    last = 2 * steps - 2
    assert told(last, last + 2) == (
        SPLIT,
        f"fingerprints differ at [{last}, {last + 2}) on ranks 0-2: A on rank 0; B on rank 1",
    )
    assert told(2 * steps, 2 * steps + 2)[0] == PEER_LOST


def test_a_refused_vote_changes_nothing() -> None:
    refused = 0
    for seed in range(CASES):
        case = Case("perturbed", 30_000 + seed)
        run = Run(case)
        for vote in case.interleaving():
            run.put(vote, blocking=False)
            if not vote.spans:
                continue
            stale = case.draw.choice([other for other in run.order if other.rank == vote.rank])
            before = run.machine.next_deadline()
            with pytest.raises(_vocabulary.HandshakeProtocolError):
                run.machine.put_request(case.requests[stale], 0.0, blocking=False)
            refused += 1
            assert run.machine.next_deadline() == before
        assert_as_the_oracle_says(run)
    assert refused > CASES


# ---------------------------------------------------------------------------------------------------------------
# Ranks that block, time, and lost ranks
# ---------------------------------------------------------------------------------------------------------------


def confirm(run: Run, judge: Oracle, taken: dict[Vote, str], due: dict[int, set[str]]) -> None:
    """What the machine answered now is what the oracle says is due now."""
    expected = {judge.votes[place]: outcomes for place, outcomes in due.items()}
    for vote, outcome in taken.items():
        assert outcome in expected.get(vote, ()), run.failure(
            f"{vote}: {outcome}, by the oracle {sorted(expected.get(vote, {WAITS}))}"
        )
        judge.record(judge.votes.index(vote), outcome)
    for vote, outcomes in expected.items():
        if vote in taken or WAITS in outcomes:
            continue
        # A lost rank has nobody left to be told.
        assert vote.rank in judge.lost, run.failure(f"{vote}: no answer, by the oracle {sorted(outcomes)}")
        judge.record(judge.votes.index(vote), PEER_LOST)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_block_are_stuck_only_where_a_rank_never_comes(kind: str) -> None:
    split_by_cycle = 0
    for seed in range(CASES):
        case = Case(kind, 40_000 + seed)
        run = Run(case)
        judge = Oracle()
        following = [0] * case.num_ranks  # how many votes each rank has cast
        programs = case.programs + [[] for _ in range(case.num_ranks - len(case.programs))]

        def blocked(rank: int, run: Run = run) -> bool:
            return any(vote.rank == rank and run.answer(vote) == WAITS for vote in run.order)

        while True:
            ready = [
                rank for rank, votes in enumerate(programs) if following[rank] < len(votes) and not blocked(rank)
            ]
            if not ready:
                break
            rank = case.draw.choice(ready)
            vote = programs[rank][following[rank]]
            following[rank] += 1
            due = judge.put(vote, 0.0)
            taken = run.put(vote)
            confirm(run, judge, taken, due)
            split_by_cycle += SPLIT in taken.values() and oracle.verdicts(run.order)[run.order.index(vote)] == WAITS
        finished = {rank for rank in range(case.num_ranks) if not blocked(rank)}
        waits_in_vain = set()
        components = judge.waiting_components()
        for _ in components:
            for component in components:
                lacking = oracle.missing(judge.votes, component)
                if lacking & (finished | waits_in_vain):
                    waits_in_vain.update(judge.votes[place].rank for place in component)
        assert finished | waits_in_vain == set(range(case.num_ranks)), run.failure("ranks wait for one another")
        assert_safe(run)
        if finished == set(range(case.num_ranks)):
            assert run.machine.next_deadline() is None
    if kind in ("random", "perturbed"):
        assert split_by_cycle, "these worlds are meant to hold ranks that wait for one another"


def test_only_a_cycle_splits_what_the_rule_would_let_wait() -> None:
    """Ranks with several votes under way, some of them blocking."""
    for seed in range(2 * CASES):
        case = Case(KINDS[seed % len(KINDS)], 50_000 + seed)
        run = Run(case)
        judge = Oracle()
        for vote in case.interleaving():
            blocking = case.draw.random() < 0.5
            due = judge.put(vote, 0.0, blocking=blocking)
            confirm(run, judge, run.put(vote, blocking=blocking), due)
        assert_safe(run)


class Faults:
    """A run whose ranks, all with several votes under way, are lost and time out; the oracle judges every step."""

    def __init__(self, case: Case) -> None:
        self.run = Run(case)
        self.judge = Oracle(_consensus.CYCLE_GRACE_S)
        self.timeouts_s = [case.draw.choice([20.0, 20.0, 20.0, 4.0, 1.0]) for _ in range(case.num_ranks)]
        self.now = 0.0

    def check(self, taken: dict[Vote, str], due: dict[int, set[str]]) -> None:
        confirm(self.run, self.judge, taken, due)
        assert_safe(self.run)
        deadline = self.run.machine.next_deadline()
        for component in self.judge.waiting_components():
            out_of_time = self.judge.out_of_time_at(component)
            assert deadline is not None and deadline <= out_of_time, self.run.failure(f"sleeps past {out_of_time}")
        for cycle in self.judge.cycles(certain=False):  # what is left of a larger one may stand for a second time
            latest = self.judge.cycle_due_at(cycle) + _consensus.CYCLE_GRACE_S
            assert deadline is not None and deadline <= latest, self.run.failure(f"sleeps past {latest}")

    def put(self, vote: Vote) -> None:
        self.rejoin(vote.rank)
        timeout_s = self.timeouts_s[vote.rank]
        due = self.judge.put(vote, self.now, blocking=False, timeout_s=timeout_s)
        self.check(self.run.cast(vote, self.now, timeout_s), due)

    def drop(self, rank: int) -> None:
        due = self.judge.drop(rank)
        self.check(self.run.drop(rank, self.now), due)

    def rejoin(self, rank: int) -> None:
        if rank in self.judge.lost:
            self.judge.rejoin(rank)
            self.run.rejoin(rank)

    def expire(self) -> None:
        self.check(self.run.expire(self.now), self.judge.expire(self.now))


@pytest.mark.parametrize("kind", KINDS)
def test_lost_ranks_and_timeouts(kind: str) -> None:
    """Faults first, each followed by a check; then time passes, and nobody is left without an answer."""
    outcomes = set()
    late = set()
    for seed in range(CASES // 2):
        case = Case(kind, 60_000 + seed)
        faults = Faults(case)
        for vote in case.interleaving():
            faults.now += case.draw.choice([0.0, 0.0, 0.3, 1.0, 6.0])
            if case.draw.random() < 0.2:
                faults.expire()
            rank = case.draw.randrange(case.num_ranks)
            if case.draw.random() < 0.1:
                faults.drop(rank)
            elif case.draw.random() < 0.2:
                faults.rejoin(rank)
            faults.put(vote)
            late.add(faults.run.answer(vote))
        for rank in sorted(faults.judge.lost):
            faults.rejoin(rank)
        machine = faults.run.machine
        while (deadline := machine.next_deadline()) is not None:
            faults.now = max(faults.now, deadline)
            faults.expire()
            machine.notices(faults.now)
            after = machine.next_deadline()
            assert after is None or after > faults.now, faults.run.failure(f"the deadline {after} is past")
        assert WAITS not in faults.judge.answers, faults.run.failure("votes without an answer, and no deadline")
        outcomes.update(faults.judge.answers)
    assert {FAT, TIMEOUT, PEER_LOST} <= outcomes
    assert {TIMEOUT, PEER_LOST} <= late  # when it was cast: others had that before


def test_a_wait_cycle_that_nobody_vouches_for_waits_for_its_grace_once() -> None:
    """Ranks that wait for each vote before they cast the next, but might have other threads; time passes when all of
    them wait. The oracle judges every step."""
    at_once = 0
    for seed in range(CASES // 2):
        case = Case("unordered", 70_000 + seed)
        faults = Faults(case)
        faults.timeouts_s = [case.draw.choice([1.0, 4.0, 20.0])] * case.num_ranks
        run, machine = faults.run, faults.run.machine
        left = [list(reversed(votes)) for votes in case.programs]
        while True:
            ready = [rank for rank, votes in enumerate(left) if votes and not machine.oldest_waiting(rank)]
            if ready:
                vote = left[case.draw.choice(ready)].pop()
                faults.put(vote)
                cycle = "wait for one another" in run.log[-1] or "can't vote there before" in run.log[-1]
                at_once += cycle and faults.judge.has_stood(len(run.order) - 1)
            elif (deadline := machine.next_deadline()) is not None:
                faults.now = deadline
                faults.expire()
                machine.notices(faults.now)
            else:
                break
        assert WAITS not in faults.judge.answers, run.failure("votes without an answer, and no deadline")
    assert at_once


def test_each_wait_cycle_wakes_the_machine_in_time() -> None:
    """After half of its own ranks' timeout, also while another one stands."""
    machine = _consensus._CollectiveHandshakeConsensus(5)
    groups = [_vocabulary.ProcessGroupId(ranks) for ranks in ((0, 1, 4), (0, 1), (2, 3, 4), (2, 3))]
    spans = [[(machine.group(group), 0, 1)] for group in groups]
    for rank, now, timeout_s in ((0, 0.0, 4.0), (1, 1.0, 4.0), (2, 1.2, 1.0)):
        assert machine.cast(rank, spans[rank], "A", now, rank, False, timeout_s) == []
    assert machine.cast(3, spans[3], "A", 1.2, 3, False, 1.0) == []
    assert machine.next_deadline() == pytest.approx(1.7)
    assert {(decision.rank, decision.outcome.name) for decision in machine.expire(1.7)} == {(2, SPLIT), (3, SPLIT)}
    assert machine.notices(1.7) == []
    assert machine.next_deadline() == pytest.approx(3.0)
    assert {(decision.rank, decision.outcome.name) for decision in machine.expire(3.0)} == {(0, SPLIT), (1, SPLIT)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_quick_way_and_the_whole_way_answer_alike(kind: str) -> None:
    """`cast_usual` is `cast` in fewer steps: a machine in which it takes no vote says the same at every step."""
    for seed in range(CASES // 2):
        case = Case(kind, 80_000 + seed)
        quick = Run(case)
        whole = Run(case)
        whole.machine.cast_usual = lambda *arguments: None
        timeout_s = case.draw.choice([4.0, 20.0])
        now = 0.0
        for vote in case.interleaving():
            now += case.draw.choice([0.0, 1.0, 6.0])
            rank = case.draw.randrange(case.num_ranks)
            event = case.draw.random()
            for run in (quick, whole):
                if event < 0.1:
                    run.drop(rank, now)
                if event < 0.05:
                    run.rejoin(rank)
                run.rejoin(vote.rank)
                run.cast(vote, now, timeout_s)
                if event > 0.7:
                    run.expire(now)
            assert quick.log == whole.log, quick.failure("\n".join([*whole.log, "but the quick way:"]))
            if event > 0.8:
                assert [(n.rank, n.text) for n in quick.machine.notices(now)] == [
                    (n.rank, n.text) for n in whole.machine.notices(now)
                ], quick.failure("other notices")
            deadline = whole.machine.next_deadline()
            assert deadline is None or quick.machine.next_deadline() <= deadline, quick.failure("a later deadline")


# ---------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------


def reachable_objects(root: object) -> int:
    """How many objects `root` keeps alive, by itself; classes, functions and modules apart."""
    seen: set[int] = set()
    walk = [root]
    while walk:
        thing = walk.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(thing))
        walk.extend(gc.get_referents(thing))
    return len(seen)


class Endless:
    """Four ranks that never stop: equal graphs, differing ones, subgroups, cycles, timeouts, losses, a laggard."""

    ROUND = 20

    def __init__(self) -> None:
        self.machine = _consensus._CollectiveHandshakeConsensus(5, timeout_s=60.0)
        self.world = _vocabulary.ProcessGroupId([0, 1, 2, 3])
        self.pairs = [_vocabulary.ProcessGroupId([0, 1]), _vocabulary.ProcessGroupId([2, 3])]
        self.with_laggard = _vocabulary.ProcessGroupId([0, 1, 4])  # rank 4 never votes
        self.counts = [_vocabulary.RankCollectiveCounts() for _ in range(4)]
        self.now = 0.0
        self.done = 0
        self.waiting = 0
        self.outcomes: set[str] = set()

    def vote(self, rank: int, fingerprint: str, collectives: dict, *, blocking: bool = True) -> None:
        self.counts[rank].increment_pg_collective_counts(collectives)
        request = _vocabulary.CollectiveHandshakeRequest(copy.copy(self.counts[rank]), fingerprint, rank)
        self.waiting += 1
        self.take(self.machine.put_request(request, self.now, blocking=blocking))

    def take(self, decisions: list) -> None:
        self.waiting -= len(decisions)
        self.outcomes.update(decision.outcome.name for decision in decisions)

    def handshakes(self, number: int) -> None:
        for step in range(number):
            self.done += 1
            self.handshake(step % self.ROUND, f"graph {self.done}")

    def handshake(self, step: int, fingerprint: str) -> None:
        self.now += 1.0
        if step == 15:  # rank 0 differs
            for rank in range(4):
                self.vote(rank, fingerprint + "*" * (rank == 0), {self.world: 2})
        elif step == 16:  # a subgroup whose vote one rank skips, then goes past
            self.counts[1].increment_pg_collective_counts({self.pairs[0]: 1})
            for rank in (0, 1):
                self.vote(rank, fingerprint, {self.pairs[0]: 1})
            self.vote(0, fingerprint, {self.pairs[0]: 1})
        elif step == 17:  # ranks 0 and 1 wait for each other
            self.vote(0, fingerprint, {self.pairs[0]: 1})
            for rank in (1, 2, 3):
                self.vote(rank, fingerprint, {self.world: 1})
            self.vote(1, fingerprint, {self.pairs[0]: 1})
            self.vote(0, fingerprint, {self.world: 1})
        elif step == 18:  # rank 4 does not come, and later is lost
            for rank in (0, 1):
                self.vote(rank, fingerprint, {self.with_laggard: 1})
            self.machine.notices(self.now + 5.0)
            self.now += 60.0
            self.take(self.machine.expire(self.now))
            self.vote(0, fingerprint, {self.with_laggard: 1})
            self.take(self.machine.drop_rank(4, self.now, "exited"))
            self.vote(1, fingerprint, {self.with_laggard: 1})
            self.machine.rejoin_rank(4)
        elif step == 19:  # ranks 0 and 1 differ, on a group that rank 4 never votes on; a line with gaps
            for rank in (0, 1):
                self.counts[rank].record_eager_collectives(self.with_laggard, 1)
                self.vote(rank, f"{fingerprint} of {rank}", {self.with_laggard: 1})
        elif step % 3 == 2:
            for rank in range(4):
                self.vote(rank, fingerprint, {self.world: 1, self.pairs[rank // 2]: 1})
        else:
            for rank in range(4):
                self.vote(rank, fingerprint, {self.world: 1})


class Luckless(Endless):
    """No handshake is ever fat: each times out, is lost, or stands in a wait cycle, and has latecomers."""

    def handshake(self, step: int, fingerprint: str) -> None:
        self.now += 1.0
        if step % 3 == 2:
            self.vote(0, fingerprint, {self.pairs[0]: 1}, blocking=False)
            self.vote(1, fingerprint, {self.world: 1}, blocking=False)
            self.now += _consensus.CYCLE_GRACE_S
            self.take(self.machine.expire(self.now))
            self.vote(1, fingerprint, {self.pairs[0]: 1}, blocking=False)
            late = (0, 2, 3)
        else:
            self.vote(0, fingerprint, {self.world: 1})
            self.vote(1, fingerprint, {self.world: 1})
            if step % 3 == 0:
                self.now += 60.0
                self.take(self.machine.expire(self.now))
            else:
                self.take(self.machine.drop_rank(3, self.now, "exited"))
                self.machine.rejoin_rank(3)
            late = (2, 3)
        for rank in late:
            self.vote(rank, fingerprint, {self.world: 1}, blocking=False)


@pytest.mark.parametrize("kind", [Endless, Luckless])
def test_memory_does_not_grow_with_the_number_of_handshakes(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_consensus, "MAX_BLOCKS_REMEMBERED", 100)
    endless = kind()
    endless.handshakes(2 * Endless.ROUND * _consensus.MAX_FINDINGS_A_LINE)
    gc.collect()
    early = reachable_objects(endless.machine)
    endless.handshakes(5_000)
    gc.collect()
    assert endless.waiting == 0
    assert endless.outcomes == {SPLIT, TIMEOUT, PEER_LOST} | ({FAT} if kind is Endless else set())
    assert endless.machine.next_deadline() is None
    # Integers past 256 are objects of their own, so a line that moves on may cost one a rank and group.
    assert reachable_objects(endless.machine) <= early + 100


def measure_memory(endless: Endless, handshakes: int) -> None:
    print(endless.__doc__)
    step = max(handshakes // 10, 1)
    for done in range(0, handshakes + 1, step):
        gc.collect()
        print(f"{done:>9,} handshakes: {reachable_objects(endless.machine):,} objects", flush=True)
        endless.handshakes(step)


if __name__ == "__main__":
    started = time.perf_counter()
    for made in (Endless(), Luckless()):
        measure_memory(made, int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
    print(f"{time.perf_counter() - started:.0f} s")
