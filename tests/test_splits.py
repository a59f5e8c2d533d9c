# SPDX-License-Identifier: Apache-2.0
"""What follows a split: exchanges that end for everybody at once, and only in a yes that all ranks gave; graphs asked
for once; records that are forgotten."""

import collections
import random
import types

import pytest
from layout import load

_consensus = load("_consensus")
_coordinator = load("_coordinator")
_protocol = load("_protocol")
_splits = load("_splits")
_vocabulary = load("_vocabulary")

REFERENCE, SHARE, INTERSECT, AGREE, ABORT = (
    _protocol.REFERENCE,
    _protocol.SHARE,
    _protocol.INTERSECT,
    _protocol.AGREE,
    _protocol.ABORT,
)
TIMEOUT_S = 30.0
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


class Job:
    """The split components of a job, and what its ranks were told, by rank."""

    def __init__(self, timeout_s=TIMEOUT_S, explain=False):
        self.waiting = {}  # rank -> the number of its oldest vote without an answer
        self.splits = _splits.Splits(timeout_s, explain, self.waiting.get)
        self.groups = {}
        self.numbers = 0
        self.told = {}
        self.promised = set()  # (rank, exchange)

    def group(self, *ranks):
        return self.groups.setdefault(ranks, _consensus.Group(ranks))

    def vote(self, rank, spans, digest=A, partial=True, has_graph=True):
        """One vote that is answered SPLIT; `spans` as (ranks of the group, start, end). The lines have moved on."""
        self.numbers += 1
        made = [(self.group(*ranks), start, end) for ranks, start, end in spans]
        for group, _, end in made:
            group.frontier[rank] = end
        return _splits.SplitVote(rank, self.numbers, made, digest, partial, has_graph)

    def add(self, *votes, now=0.0):
        record, replies = self.splits.add(votes, "fingerprints differ", now)
        self.promised |= {(vote.rank, record.number) for vote in votes if vote.rank in record.promised and record.plan}
        self.tell(replies)
        return record

    def split(self, *digests, world=None, now=0.0, **options):
        """All ranks of a world vote on its first collective; answered together."""
        world = tuple(range(len(digests))) if world is None else world
        votes = [self.vote(rank, [(world, 0, 1)], digest, **options) for rank, digest in enumerate(digests)]
        return self.add(*votes, now=now)

    def tell(self, replies):
        for reply in replies:
            assert (reply.rank, reply.exchange) in self.promised, f"{reply} to a rank that takes no part"
            self.told.setdefault(reply.rank, []).append((reply.round, reply.ok, reply.payload))
            if not reply.ok or reply.round == AGREE:
                self.promised.remove((reply.rank, reply.exchange))

    def contribute(self, rank, record, round_number, payload=b""):
        self.tell(self.splits.contribute(rank, record.number, round_number, payload))

    def take(self):
        told, self.told = self.told, {}
        return told

    def called_off(self):
        """Why each rank was told to go skinny. Nobody is left without an answer, and nothing is open."""
        told = self.take()
        assert not self.promised and not self.splits.has_open_plans
        assert all(len(entries) == 1 and not entries[0][1] for entries in told.values()), told
        return {rank: entries[0][2].decode() for rank, entries in told.items()}

    def to_intersect(self, record):
        """Goes on to the round of bitmaps."""
        self.contribute(record.reference, record, SHARE, b"keys")
        self.take()


# ---------------------------------------------------------------------- an exchange, whole


def test_complete_exchange():
    job = Job()
    record = job.split(B, A, A)
    assert record.reference == 1, "the lowest rank of the most frequent variant"
    assert job.take() == {rank: [(REFERENCE, True, bytes([0, 0, 0, 1]))] for rank in range(3)}
    job.contribute(1, record, SHARE, b"keys")
    assert job.take() == {0: [(SHARE, True, b"keys")], 2: [(SHARE, True, b"keys")]}
    for rank, bitmap in ((2, b"\x00\xff\x0f"), (0, b"\x00\x3c\xff")):
        job.contribute(rank, record, INTERSECT, bitmap)
        assert job.take() == {}
    job.contribute(1, record, INTERSECT, b"\x00\xff\xff")
    assert job.take() == {rank: [(INTERSECT, True, b"\x00\x3c\x0f")] for rank in range(3)}
    for rank in (0, 1):
        job.contribute(rank, record, AGREE, A)
        assert job.take() == {}
    job.contribute(2, record, AGREE, A)
    assert job.take() == {rank: [(AGREE, True, b"\x01")] for rank in range(3)}
    assert not job.splits.has_records and not job.promised


def test_intersections_as_often_as_needed():
    job = Job()
    record = job.split(A, B)
    job.take()
    job.to_intersect(record)
    for _ in range(5):
        job.contribute(0, record, INTERSECT, b"\xf0")
        job.contribute(1, record, INTERSECT, b"\x3f")
        assert job.take() == {rank: [(INTERSECT, True, b"\x30")] for rank in range(2)}
    job.contribute(1, record, AGREE, A)
    job.contribute(0, record, AGREE, A)
    assert job.take() == {rank: [(AGREE, True, b"\x01")] for rank in range(2)}


def test_different_plans_are_answered_no():
    job = Job()
    record = job.split(A, B, C)
    job.take()
    job.to_intersect(record)
    for rank, digest in enumerate((A, A, B)):
        job.contribute(rank, record, AGREE, digest)
    assert job.take() == {rank: [(AGREE, True, b"\x00")] for rank in range(3)}
    assert not job.splits.has_records


def test_latecomers_complete_an_exchange():
    job = Job()
    world = (0, 1, 2, 3)
    record = job.add(job.vote(1, [(world, 0, 2)], A), job.vote(2, [(world, 0, 2)], B))
    assert job.take() == {} and job.splits.has_open_plans
    assert job.add(job.vote(3, [(world, 0, 2)], B), now=1.0) is record
    assert job.take() == {}
    assert job.add(job.vote(0, [(world, 0, 2)], C), now=2.0) is record
    assert set(job.take()) == {0, 1, 2, 3}
    assert record.reference == 2


def test_exchange_over_several_groups_waits_for_all_of_their_members():
    job = Job()
    rows, columns = [(0, 1), (2, 3)], [(0, 2), (1, 3)]

    def vote(rank):
        return job.vote(rank, [(group, 0, 1) for group in (*rows, *columns) if rank in group], bytes([rank]) * 16)

    record = job.add(vote(0), vote(1))
    assert record.missing == {2, 3}
    job.add(vote(3))
    assert job.take() == {}
    job.add(vote(2))
    assert job.take() == {rank: [(REFERENCE, True, bytes(4))] for rank in range(4)}


def test_exchanges_beside_each_other():
    job = Job()
    left = job.add(job.vote(0, [((0, 1), 0, 1)], A), job.vote(1, [((0, 1), 0, 1)], B))
    right = job.add(job.vote(2, [((2, 3), 0, 1)], A), job.vote(3, [((2, 3), 0, 1)], B))
    job.take()
    job.to_intersect(left)
    job.to_intersect(right)
    for record, ranks in ((left, (0, 1)), (right, (2, 3))):
        for rank in ranks:
            job.contribute(rank, record, AGREE, C)
    assert job.take() == {rank: [(AGREE, True, b"\x01")] for rank in range(4)}


# ---------------------------------------------------------------------- called off


def test_a_rank_that_takes_no_part():
    job = Job()
    world = (0, 1, 2)
    job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    job.add(job.vote(2, [(world, 0, 1)], A, partial=False))
    assert job.called_off() == dict.fromkeys((0, 1), "rank 2 does not take part")


def test_a_rank_that_takes_no_part_among_those_answered_together():
    job = Job()
    world = (0, 1, 2)
    votes = [job.vote(rank, [(world, 0, 1)], digest, partial=rank != 1) for rank, digest in enumerate((A, B, A))]
    record = job.add(*votes)
    assert record.promised == [] and job.called_off() == {}


@pytest.mark.parametrize("spans", [[((0, 1, 2), 0, 2)], [((0, 1, 2), 0, 1), ((1, 2), 0, 1)]])
def test_unequal_spans(spans):
    job = Job()
    world = (0, 1, 2)
    job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    job.add(job.vote(2, spans, B))
    assert job.called_off() == {0: "spans differ", 1: "spans differ"}


def test_a_rank_that_has_gone_past_is_not_waited_for():
    job = Job()
    world = (0, 1, 2)
    job.group(*world).frontier[2] = 5
    record = job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    assert record.promised == [] and job.called_off() == {}


def test_a_lost_rank_that_is_missing():
    job = Job()
    world = (0, 1, 2)
    job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    job.tell(job.splits.drop_rank(2))
    assert job.called_off() == {0: "rank 2 is gone", 1: "rank 2 is gone"}


@pytest.mark.parametrize("round_number", [SHARE, INTERSECT, AGREE])
def test_a_lost_rank_within_a_round(round_number):
    job = Job()
    record = job.split(A, A, B)
    job.take()
    if round_number != SHARE:
        job.to_intersect(record)
        job.contribute(0, record, round_number, A)
    job.tell(job.splits.drop_rank(1))
    assert set(job.called_off().values()) == {"rank 1 is gone"}
    job.contribute(2, record, round_number, A)
    assert job.take() == {}, "they have been told; what was on its way is ignored"


def test_a_stranger_is_lost():
    job = Job()
    job.split(A, B)
    job.take()
    job.tell(job.splits.drop_rank(7))
    assert job.take() == {} and job.splits.has_open_plans


def test_a_missing_rank_votes_elsewhere():
    job = Job()
    world = (0, 1, 2)
    job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    for rank in range(3):
        job.tell(job.splits.note_vote(rank))
    assert job.take() == {}, "rank 2's vote has been answered, so it may still come"
    job.waiting |= {0: 7, 2: 8}
    job.tell(job.splits.note_vote(0))
    assert job.take() == {}, "rank 0 has voted here already"
    job.tell(job.splits.note_vote(2))
    why = "rank 2 can't come: blocked in another vote"
    assert job.called_off() == {0: why, 1: why}


def test_a_missing_rank_votes_past_an_exchange_and_is_answered_at_once():
    job = Job()
    world = (0, 1, 2)
    job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    job.vote(2, [(world, 1, 2)])
    job.tell(job.splits.note_vote(2))
    assert job.called_off() == dict.fromkeys((0, 1), "rank 2 went on without it")


def test_a_missing_rank_that_is_blocked_in_a_vote_already():
    job = Job()
    job.waiting[2] = 0
    world = (0, 1, 2)
    record = job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    assert record.promised == [] and job.called_off() == {}


def test_a_rank_that_waits_in_an_earlier_vote_does_not_come_to_the_rounds():
    for later, promised in ((-1, []), (1, [0, 1])):
        job = Job()
        votes = [job.vote(rank, [((0, 1), 0, 1)], digest) for rank, digest in enumerate((A, B))]
        job.waiting[0] = votes[0].number + later
        assert job.add(*votes).promised == promised


def test_exchanges_never_wait_for_each_other():
    job = Job()
    first = job.add(job.vote(0, [((0, 1, 2), 0, 1)], A), job.vote(1, [((0, 1, 2), 0, 1)], B))
    second = job.add(job.vote(2, [((0, 2, 3), 0, 1)], A), job.vote(3, [((0, 2, 3), 0, 1)], B))
    assert second.promised == [], "rank 0 is blocked in the first, which waits for rank 2"
    job.tell(job.splits.note_vote(2))
    assert job.take() == {}, "rank 2 is free to come"
    job.add(job.vote(2, [((0, 1, 2), 0, 1)], B))
    assert job.take() == {rank: [(REFERENCE, True, bytes([0, 0, 0, 1]))] for rank in range(3)}
    assert job.splits._records[first.number].plan


def test_exchanges_never_wait_for_each_other_through_a_third():
    job = Job()
    for ranks in ((0, 1), (1, 2)):
        assert job.add(job.vote(ranks[0], [(ranks, 0, 1)])).promised == [ranks[0]]
    assert job.add(job.vote(2, [((2, 0), 0, 1)])).promised == []


@pytest.mark.parametrize("answered", [[0, 1], [1, 0]])
def test_an_exchange_whose_ranks_are_all_in_never_waits_for_one_that_waits_for_it(answered):
    """Rank 0 has two votes under way, and goes through their exchanges in order; rank 2 casts one after the other."""
    job = Job()
    votes = [job.vote(0, [(group, 0, 1)], A) for group in ((0, 1, 2), (0, 2))]
    assert [job.add(votes[place]).promised for place in answered] == [[0], [0]]
    job.add(job.vote(2, [((0, 2), 0, 1)], B))
    assert job.take() == {0: [(ABORT, False, b"its ranks are in an exchange that waits for it")]}
    job.add(job.vote(2, [((0, 1, 2), 0, 1)], B))
    job.add(job.vote(1, [((0, 1, 2), 0, 1)], B))
    assert [entries[0][:2] for entries in job.take().values()] == [(REFERENCE, True)] * 3


def test_a_rank_may_be_on_its_way_through_earlier_exchanges():
    """The votes of two graphs are cast at once, on one rank after the other."""
    job = Job()
    world = (0, 1, 2, 3)
    for rank in world:
        for start in range(2):
            record = job.add(job.vote(rank, [(world, start, start + 1)], bytes([rank]) * 16))
            job.tell(job.splits.note_vote(rank))
            assert record.promised[-1] == rank
    assert job.take() == {rank: [(REFERENCE, True, bytes(4))] * 2 for rank in world}


def test_two_splits_that_turn_out_to_be_one():
    job = Job()
    job.add(job.vote(0, [((0, 1, 2), 0, 1)], A), job.vote(1, [((0, 1, 2), 0, 1)], B))
    job.add(job.vote(3, [((2, 3, 4), 0, 1)], A), job.vote(4, [((2, 3, 4), 0, 1)], B))
    job.add(job.vote(2, [((0, 1, 2), 0, 1), ((2, 3, 4), 0, 1)], C))
    assert set(job.called_off()) == {0, 1, 3, 4}


@pytest.mark.parametrize("round_number", [REFERENCE, INTERSECT, AGREE, 0, 99])
def test_a_rank_out_of_step(round_number):
    job = Job()
    record = job.split(A, A, B)
    job.take()
    job.contribute(2, record, round_number, A)
    assert job.called_off() == dict.fromkeys(range(3), "rank 2 is out of step")


def test_a_first_rank_can_not_end_an_exchange_before_the_others_are_in():
    job = Job()
    world = (0, 1, 2)
    record = job.add(job.vote(0, [(world, 0, 1)], A))
    job.contribute(0, record, REFERENCE, A)
    assert job.called_off() == {0: "rank 0 is out of step"}


def test_a_rank_that_says_the_same_twice():
    job = Job()
    record = job.split(A, A, B)
    job.take()
    job.to_intersect(record)
    job.contribute(0, record, INTERSECT, b"\xff")
    job.contribute(0, record, INTERSECT, b"\xff")
    assert job.called_off() == dict.fromkeys(range(3), "rank 0 is out of step")


def test_intersect_after_agree():
    job = Job()
    record = job.split(A, B)
    job.take()
    job.to_intersect(record)
    job.contribute(0, record, AGREE, A)
    job.contribute(1, record, INTERSECT, b"\xff")
    assert job.called_off() == dict.fromkeys(range(2), "rank 1 is out of step")


def test_only_the_reference_rank_shares():
    job = Job()
    record = job.split(A, A, B)
    job.take()
    job.contribute(1, record, SHARE, b"keys")
    assert job.called_off() == dict.fromkeys(range(3), "rank 1 is not the reference rank")


def test_bitmaps_of_unequal_length():
    job = Job()
    record = job.split(A, B)
    job.take()
    job.to_intersect(record)
    job.contribute(0, record, INTERSECT, b"\xff\xff")
    job.contribute(1, record, INTERSECT, b"\xff")
    assert job.called_off() == dict.fromkeys(range(2), "rank 1 has a bitmap of another length")


def test_empty_bitmaps_intersect():
    job = Job()
    record = job.split(A, B)
    job.take()
    job.to_intersect(record)
    job.contribute(0, record, INTERSECT, b"")
    job.contribute(1, record, INTERSECT, b"")
    assert job.take() == {rank: [(INTERSECT, True, b"")] for rank in range(2)}


def test_a_rank_that_can_not_go_on():
    job = Job()
    record = job.split(A, B)
    job.take()
    job.contribute(1, record, ABORT, "out of memory: ü".encode())
    assert job.called_off() == dict.fromkeys(range(2), "rank 1 can't go on: out of memory: ü")


def test_time_is_up_names_who_did_not_come():
    job = Job()
    world = (0, 1, 2, 3)
    job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B), now=5.0)
    assert job.splits.next_deadline() == 5.0 + TIMEOUT_S
    job.tell(job.splits.expire(4.9 + TIMEOUT_S))
    assert job.take() == {}
    job.tell(job.splits.expire(5.0 + TIMEOUT_S))
    assert job.called_off() == {0: "ranks 2-3 did not come in time", 1: "ranks 2-3 did not come in time"}
    assert not job.splits.has_records and job.splits.next_deadline() is None


@pytest.mark.parametrize(
    ("round_number", "late"), [(SHARE, "rank 0"), (INTERSECT, "ranks 1-2"), (AGREE, "ranks 1-2")]
)
def test_time_is_up_within_a_round(round_number, late):
    job = Job()
    record = job.split(A, A, B)
    job.take()
    if round_number != SHARE:
        job.to_intersect(record)
        job.contribute(0, record, round_number, A)
    job.tell(job.splits.expire(TIMEOUT_S))
    assert job.called_off() == dict.fromkeys(range(3), f"{late} did not come in time")


def test_who_comes_after_an_exchange_was_called_off_is_promised_nothing():
    job = Job()
    world = (0, 1, 2)
    job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    job.splits.drop_rank(0)
    job.promised.clear()
    record = job.add(job.vote(2, [(world, 0, 1)], B))
    assert record.promised == [0, 1] and job.take() == {} and not job.splits.has_records


def test_who_comes_after_a_record_was_forgotten_is_promised_nothing():
    job = Job()
    world = (0, 1, 2)
    job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    job.tell(job.splits.expire(TIMEOUT_S))
    job.take()
    record = job.add(job.vote(2, [(world, 0, 1)], B), now=TIMEOUT_S + 1)
    assert record.promised == [] and job.take() == {}


def test_contributions_to_unknown_exchanges_are_ignored():
    job = Job()
    record = job.split(A, B)
    job.take()
    job.tell(job.splits.contribute(0, 999, AGREE, A))
    job.tell(job.splits.contribute(7, record.number, ABORT, b"I am no member"))
    assert job.take() == {} and job.splits.has_open_plans


# ---------------------------------------------------------------------- graphs


def test_one_graph_for_each_fingerprint():
    job = Job(explain=True)
    world = (0, 1, 2)
    votes = [job.vote(rank, [(world, 0, 1)], digest) for rank, digest in enumerate((A, B, B))]
    record = job.add(*votes)
    assert [job.splits.asks_for_graph(record, vote, 0.0) for vote in votes] == [True, True, False]
    assert job.splits.reports_due(0.0) == []
    job.splits.add_graph(0, votes[0].number, b"graph a")
    assert job.splits.reports_due(0.0) == []
    job.splits.add_graph(2, votes[2].number, b"nobody asked")
    job.splits.add_graph(1, 12345, b"nobody asked")
    assert job.splits.reports_due(0.0) == []
    job.splits.add_graph(1, votes[1].number, b"graph b")
    job.splits.add_graph(1, votes[1].number, b"once more")
    assert job.splits.reports_due(0.0) == [record]
    assert [job.splits.graph(record, digest) for digest in (A, B)] == [(b"graph a", ""), (b"graph b", "")]
    assert job.splits.reports_due(0.0) == []


def test_a_graph_is_sent_once_in_the_life_of_the_job():
    job = Job(explain=True)
    for start, digests in enumerate(((A, B), (A, B), (A, C))):
        spans = [((0, 1), start, start + 1)]
        votes = [job.vote(rank, spans, digest, partial=False) for rank, digest in enumerate(digests)]
        record = job.add(*votes)
        asked = [vote for vote in votes if job.splits.asks_for_graph(record, vote, 0.0)]
        assert [vote.digest for vote in asked] == [[A, B], [], [C]][start]
        for vote in asked:
            job.splits.add_graph(vote.rank, vote.number, vote.digest)
        assert (record in job.splits.reports_due(0.0)) == (start != 1), "a set is explained once"


def test_no_graph_is_asked_for_without_debugging_or_where_there_is_none():
    job = Job()
    vote = job.vote(0, [((0, 1), 0, 1)], A)
    assert not job.splits.asks_for_graph(job.add(vote), vote, 0.0)
    job = Job(explain=True)
    vote = job.vote(0, [((0, 1), 0, 1)], A, has_graph=False)
    assert not job.splits.asks_for_graph(job.add(vote), vote, 0.0)


def test_a_report_is_made_without_a_graph_that_does_not_come():
    job = Job(explain=True)
    votes = [job.vote(rank, [((0, 1), 0, 1)], digest) for rank, digest in enumerate((A, B))]
    record = job.add(*votes, now=3.0)
    for vote in votes:
        job.splits.asks_for_graph(record, vote, 0.0)
    assert job.splits.reports_due(2.9 + _splits.REPORT_WAIT_S) == []
    assert job.splits.next_deadline() == 3.0 + _splits.REPORT_WAIT_S
    assert job.splits.reports_due(3.0 + _splits.REPORT_WAIT_S) == [record]


def test_a_report_does_not_wait_for_the_graph_of_a_lost_rank():
    job = Job(explain=True)
    votes = [job.vote(rank, [((0, 1), 0, 1)], digest) for rank, digest in enumerate((A, B))]
    record = job.add(*votes)
    assert all(job.splits.asks_for_graph(record, vote, 0.0) for vote in votes)
    job.splits.add_graph(0, votes[0].number, b"graph a")
    job.splits.drop_rank(1)
    assert job.splits.reports_due(0.0) == [record]


def test_a_timeout_shorter_than_the_wait_for_graphs_lets_the_loop_sleep():
    timeout_s = _splits.REPORT_WAIT_S / 2
    job = Job(timeout_s, explain=True)
    world = (0, 1, 2)
    record = job.add(job.vote(0, [(world, 0, 1)], A), job.vote(1, [(world, 0, 1)], B))
    now, looks = 0.0, 0
    reports = []
    while (deadline := job.splits.next_deadline()) is not None:
        assert looks < 10, "the next deadline is always one that has passed"
        now = max(now, deadline)
        job.tell(job.splits.expire(now))
        reports += job.splits.reports_due(now)
        looks += 1
    assert reports == [record]
    assert job.called_off() == {0: "rank 2 did not come in time", 1: "rank 2 did not come in time"}
    assert not job.splits.has_records


def test_a_graph_that_does_not_come_is_asked_of_others_and_the_split_explained_again():
    job = Job(explain=True)

    def split(start, now):
        votes = [job.vote(rank, [((0, 1, 2), start, start + 1)], d, partial=False) for rank, d in enumerate((A, B, B))]
        record = job.add(*votes, now=now)
        asked = [vote for vote in votes if job.splits.asks_for_graph(record, vote, now)]
        if votes[0] in asked:
            job.splits.add_graph(0, votes[0].number, b"graph a")
        return record, asked

    record, asked = split(0, 0.0)
    assert [vote.rank for vote in asked] == [0, 1]
    assert job.splits.reports_due(_splits.REPORT_WAIT_S) == [record], "without rank 1's graph"
    now = _splits.GRAPH_WITHIN_S - 1
    record, asked = split(1, now)
    assert asked == [], "rank 1's may still come"
    assert job.splits.reports_due(now + _splits.REPORT_WAIT_S) == [], "nothing has been added"
    now = _splits.GRAPH_WITHIN_S
    job.splits.drop_rank(2)
    record, asked = split(2, now)
    assert [vote.rank for vote in asked] == [1]
    job.splits.add_graph(1, asked[0].number, b"graph b")
    assert job.splits.reports_due(now) == [record]
    record, asked = split(3, now)
    assert asked == [] and job.splits.reports_due(now) == []


def test_graphs_that_never_come_do_not_keep_others_from_being_asked_for_for_ever():
    job = Job(explain=True)
    asked = []
    for step in range(3 * _splits.MAX_GRAPHS):
        now = 0.0 if step < 2 * _splits.MAX_GRAPHS else _splits.GRAPH_WITHIN_S
        vote = job.vote(0, [((0, 1), step, step + 1)], step.to_bytes(16, "big"), partial=False)
        asked.append(job.splits.asks_for_graph(job.add(vote, now=now), vote, now))
    assert asked == [step < _splits.MAX_GRAPHS or step >= 2 * _splits.MAX_GRAPHS for step in range(len(asked))]


@pytest.mark.parametrize("together", [True, False])
def test_of_thousands_of_variants_a_few_graphs_are_asked_for(together):
    job = Job(explain=True)
    world = tuple(range(4096))
    votes = [job.vote(rank, [(world, 0, 1)], rank.to_bytes(16, "big"), partial=False) for rank in world]
    asked = []
    for some in [votes] if together else [[vote] for vote in votes]:
        record = job.add(*some)
        asked += [vote for vote in some if job.splits.asks_for_graph(record, vote, 0.0)]
    assert [vote.rank for vote in asked] == list(range(_splits.MAX_VARIANTS))
    for vote in asked:
        job.splits.add_graph(vote.rank, vote.number, b"graph")
    assert job.splits.reports_due(0.0) == [record]
    assert job.splits.graph(record, votes[0].digest) == (b"graph", "")
    graph, why = job.splits.graph(record, votes[-1].digest)
    assert graph == b"" and why == "left out: a report compares at most 64 graphs"


# ---------------------------------------------------------------------- bounds


def test_what_is_done_is_forgotten():
    job = Job()
    for step in range(2000):
        job.group(0, 1)
        votes = [job.vote(rank, [((0, 1), step, step + 1)], digest) for rank, digest in enumerate((A, B))]
        record = job.add(*votes)
        job.contribute(0, record, ABORT if step % 2 else SHARE, b"x")
        for rank in (0, 1):
            job.contribute(rank, record, AGREE, C)
        assert not job.splits.has_records and not job.promised
        job.take()


def test_records_that_never_complete_are_bounded():
    job = Job()
    pairs = 0
    for first in range(0, 6 * _splits.MAX_RECORDS, 3):
        group = (first, first + 1, first + 2)
        job.add(job.vote(first, [(group, 0, 1)], A), job.vote(first + 1, [(group, 0, 1)], B))
        pairs += 1
    told = job.take()
    given_up = pairs - _splits.MAX_RECORDS
    assert len(job.splits._records) == _splits.MAX_RECORDS
    assert len(told) == 2 * given_up and min(told) == 0 and max(told) == 3 * given_up - 2, "the oldest are given up"
    assert {entry for entries in told.values() for entry in entries} == {(ABORT, False, b"too many splits are open")}


def test_graphs_are_bounded():
    job = Job(explain=True)
    asked = 0
    for step in range(2 * _splits.MAX_GRAPHS):
        digests = (step.to_bytes(16, "big"), B)
        votes = [job.vote(rank, [((0, 1), step, step + 1)], digest) for rank, digest in enumerate(digests)]
        record = job.add(*votes)
        for vote in votes:
            if job.splits.asks_for_graph(record, vote, 0.0):
                asked += 1
                job.splits.add_graph(vote.rank, vote.number, b"graph")
        job.splits.reports_due(0.0)
        job.splits.drop_rank(0)
        job.promised.clear()
    assert asked == _splits.MAX_GRAPHS
    assert not job.splits.has_records


# ---------------------------------------------------------------------- anything may happen


def test_simulation_every_promise_is_kept():
    """One seed draws everything. After each event: a yes goes to all the ranks of the exchange, which gave one plan.
    In the end nobody waits for an answer."""
    outcomes = dict.fromkeys(("yes", "no", "called off"), 0)
    for seed in range(250):
        try:
            _simulate(random.Random(seed), outcomes)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert min(outcomes.values()) > 20, f"the simulation is lopsided: {outcomes}"


def _simulate(rng, outcomes):
    size = rng.choice((2, 3, 4, 6))
    faults = rng.choice((0.0, 0.05, 0.3))
    is_ahead = rng.random() < 0.5  # votes are cast without waiting
    job = Job()
    groups = [tuple(range(size))]
    if size >= 4:
        groups += [tuple(range(0, size, 2)), tuple(range(1, size, 2))]
    now = 0.0
    lost = set()
    last_plan = {}  # (exchange, rank) -> digest given in AGREE
    members = {}  # exchange -> ranks that were promised it
    records = {}
    starts = dict.fromkeys(groups, 0)

    def absorb(record=None):
        if record is not None:
            records[record.number] = record
            members.setdefault(record.number, set()).update(
                rank for rank, number in job.promised if number == record.number
            )

    def promised_to(rank):
        return [number for other, number in job.promised if other == rank]

    def tell(replies):
        yes = {reply.exchange for reply in replies if reply.ok and reply.round == AGREE and reply.payload == b"\x01"}
        for exchange in yes:
            ranks = {reply.rank for reply in replies if reply.exchange == exchange}
            assert ranks == set(records[exchange].votes) == members[exchange]
            assert len({last_plan[exchange, rank] for rank in ranks}) == 1, "a yes to different plans"
        outcomes["yes"] += len(yes)
        outcomes["no"] += len({r.exchange for r in replies if r.ok and r.round == AGREE and r.payload == b"\x00"})
        outcomes["called off"] += len({reply.exchange for reply in replies if not reply.ok})
        job.tell(replies)

    for _ in range(rng.randrange(5, 120)):
        now += rng.choice((0.0, 0.1, 5.0))
        event = rng.random()
        free = [rank for rank in range(size) if rank not in lost and (is_ahead or not promised_to(rank))]
        if event < 0.2 and free:
            group = rng.choice(groups)
            voters = [rank for rank in group if rank in free and rng.random() < 0.9]
            late = [rank for rank in voters if job.group(*group).frontier.get(rank, 0) > starts[group]]
            voters = [rank for rank in voters if rank not in late]
            if voters:
                length = 2 if rng.random() < faults / 2 else 1
                votes = [
                    job.vote(
                        rank,
                        [(group, starts[group], starts[group] + length)],
                        rng.choice((A, B, C)),
                        partial=rng.random() >= faults / 2,
                    )
                    for rank in voters
                ]
                cut = rng.randrange(1, len(votes) + 1)
                for together in (votes[:cut], votes[cut:]):
                    if together:
                        record, replies = job.splits.add(together, "differs", now)
                        for vote in together:
                            if vote.rank in record.promised and record.plan:
                                job.promised.add((vote.rank, record.number))
                        absorb(record)
                        tell(replies)
                        for vote in together:
                            tell(job.splits.note_vote(vote.rank))
            if rng.random() < 0.5:
                starts[group] = max(job.group(*group).frontier.values(), default=0)
        elif event < 1.0 - faults:
            if not job.promised:
                continue
            rank, number = rng.choice(sorted(job.promised))
            record = records[number]
            in_step = record.round if record.round != REFERENCE else None
            if in_step == SHARE and rank != record.reference:
                in_step = None
            if in_step == INTERSECT and (record.heard or rng.random() < 0.5) and rng.random() < 0.4:
                in_step = AGREE if not record.heard else INTERSECT
            if rng.random() < faults / 5:
                in_step = rng.choice((REFERENCE, SHARE, INTERSECT, AGREE, ABORT, 0, 7))
            if in_step is not None and (rank not in record.heard or rng.random() < faults / 5):
                payload = b"\xff\xff" if in_step == INTERSECT else rng.choice((A,) * 6 + (B,))
                if in_step == AGREE:
                    last_plan[record.number, rank] = payload
                tell(job.splits.contribute(rank, record.number, in_step, payload))
        elif event < 1.0 - 0.6 * faults:
            rank = rng.randrange(size)
            lost.add(rank)
            tell(job.splits.drop_rank(rank))
            job.promised -= {(rank, number) for number in promised_to(rank)}
        elif event < 1.0 - 0.2 * faults:
            rank = rng.randrange(size)
            if not promised_to(rank):
                job.waiting[rank] = job.numbers
                tell(job.splits.note_vote(rank))
                if rng.random() < 0.5:
                    job.waiting.clear()
        else:
            tell(job.splits.expire(now))
        assert len(job.splits._records) <= _splits.MAX_RECORDS
    # Healed: time alone brings everybody the answer.
    tell(job.splits.expire(now + TIMEOUT_S))
    assert job.promised == set(), f"promised and never told: {job.promised}"
    assert not job.splits.has_records


class PlayedRank:
    """A rank that casts its votes, some of them ahead, and goes through what they are promised in their order.

    `votes` are (group's number, start, digest, flags). It talks to a server without a socket between them."""

    def __init__(self, rank, server, groups, votes, ahead):
        self.server = server
        self.connection = _coordinator._Connection(None, "", 0.0)
        self.connection.rank = rank
        self.connection.groups = dict(enumerate(groups))
        server._of_rank[rank] = self.connection
        self.decoder = _protocol.Decoder(_protocol.MAX_FRAME_BYTES)
        self.votes = votes
        self.ahead = ahead
        self.cast = self.done = self.events = self.plans = 0
        self.verdicts = {}
        self.results = {}
        self.called_off = []
        self.goes_on = self._go_on()

    def may_cast(self):
        return self.cast < min(len(self.votes), self.done + self.ahead)

    def cast_next(self):
        group, start, digest, flags = self.votes[self.cast]
        self.cast += 1
        self.events += 1
        self.server._vote(self.connection, self.cast, flags, digest, [(group, start, start + 1)])

    def receive(self, data):
        self.events += 1
        self.decoder.feed(data)
        while (message := self.decoder.next_message()) is not None:
            if isinstance(message, _protocol.Verdict):
                assert message.outcome in (_protocol.FAT, _protocol.SPLIT)
                self.verdicts[message.vote] = message.exchange
                if message.exchange:
                    self.results[message.exchange] = collections.deque()
            elif isinstance(message, _protocol.Result):
                self.results[message.exchange].append(message)

    def _go_on(self):
        for number in range(1, len(self.votes) + 1):
            while number not in self.verdicts:
                yield
            if self.verdicts[number]:
                yield from self._look_for_plan(self.verdicts[number])
            self.done += 1
            self.events += 1

    def _look_for_plan(self, exchange):
        is_reference = False
        for round_number in (REFERENCE, SHARE, INTERSECT, AGREE):
            if round_number in (INTERSECT, AGREE) or (round_number == SHARE and is_reference):
                replies = self.server._splits.contribute(self.connection.rank, exchange, round_number, b"plan")
                self.server._reply(replies)
            if round_number == SHARE and is_reference:
                continue
            while not self.results[exchange]:
                yield
            result = self.results[exchange].popleft()
            if not result.ok:
                self.called_off.append(result.payload.decode())
                return
            is_reference |= round_number == REFERENCE and result.payload == bytes([0, 0, 0, self.connection.rank])
        self.plans += 1


def _play(rng, monkeypatch, groups, programs, most_ahead):
    """Ranks run their programs, each at its own pace, until all have ended, in a time in which nothing times out."""
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(_coordinator, "time", clock)
    config = _coordinator.Config(0, {"world_size": len(programs)}, "", 1000.0, "")
    server = _coordinator.Server(None, None, config, None)
    server._selector.close()
    lines = [server._consensus.group(_vocabulary.ProcessGroupId(group)) for group in groups]
    ranks = [
        PlayedRank(rank, server, lines, votes, rng.randrange(1, most_ahead + 1)) for rank, votes in enumerate(programs)
    ]
    server._send = lambda connection, data: ranks[connection.rank].receive(data)
    paces = [rng.choice((0.05, 0.3, 1.0)) for _ in ranks]
    while any(rank.done < len(rank.votes) for rank in ranks):
        before = sum(rank.events for rank in ranks)
        for rank, pace in zip(ranks, paces, strict=True):
            while rank.may_cast() and rng.random() < pace:
                rank.cast_next()
            next(rank.goes_on, None)
        if before == sum(rank.events for rank in ranks) and not any(rank.may_cast() for rank in ranks):
            clock.now += _consensus.CYCLE_GRACE_S
            waiting = {place: (rank.done, rank.cast) for place, rank in enumerate(ranks)}
            assert clock.now < 100, f"a cycle of waits: {waiting}, {programs}"
            server._look_at_the_clock(clock.now)
    assert not server._splits.has_open_plans
    return ranks


def test_no_plan_is_lost_by_timing(monkeypatch):
    """All ranks take part in all plans, of graphs that all differ: whatever their pace, and however far they are
    ahead, none is called off."""
    for seed in range(150):
        rng = random.Random(seed)
        world = tuple(range(rng.choice((2, 3, 4, 6))))
        variants = [0, 1, *(rng.randrange(3) for _ in world[2:])]
        flags = [rng.choice((0, _protocol.PARTIAL, _protocol.PARTIAL)) for _ in range(6)]
        programs = [[(0, start, bytes([variants[rank]]) * 16, flags[start]) for start in range(6)] for rank in world]
        for rank in _play(rng, monkeypatch, [world], programs, most_ahead=4):
            assert (rank.called_off, rank.plans) == ([], sum(map(bool, flags))), f"seed {seed}"


def test_nobody_waits_in_a_cycle_that_an_exchange_is_in(monkeypatch):
    """Ranks meet their groups in orders of their own, with several votes under way: only votes that wait for one
    another cost time, as they do without exchanges."""
    plans, called_off = 0, collections.Counter()
    for seed in range(300):
        rng = random.Random(seed)
        size = rng.choice((3, 4, 5))
        groups = [tuple(sorted(rng.sample(range(size), rng.randrange(2, size + 1)))) for _ in range(4)]
        groups = list(dict.fromkeys(groups))
        equal = rng.choice((0.0, 0.5, 0.9))
        programs = []
        shuffled = rng.random() < 0.7
        common = [place for place in range(len(groups)) for _ in range(3)]
        rng.shuffle(common)
        for rank in range(size):
            order = [place for place in common if rank in groups[place]]
            if shuffled:
                rng.shuffle(order)
            starts = dict.fromkeys(order, 0)
            votes = []
            for place in order:
                digest = A if rng.random() < equal else bytes([rank]) * 16
                votes.append((place, starts[place], digest, _protocol.PARTIAL))
                starts[place] += 1
            programs.append(votes)
        try:
            for rank in _play(rng, monkeypatch, groups, programs, most_ahead=4):
                plans += rank.plans
                called_off.update(rank.called_off)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    for reason in ("blocked in another vote", "exchange that waits for it"):
        assert sum(count for text, count in called_off.items() if reason in text) > 10, (reason, called_off)
    assert plans > 1000
