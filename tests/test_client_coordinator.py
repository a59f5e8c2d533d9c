# SPDX-License-Identifier: Apache-2.0
"""A rank's connection and the coordinator, over real sockets: in both of its kinds, from many threads, with peers that
behave badly on either side."""

import contextlib
import errno
import logging
import socket
import struct
import threading
import time

import pytest
from layout import load
from ranks import Peer, counts, together, until

_client = load("_client")
_consensus = load("_consensus")
_coordinator = load("_coordinator")
_protocol = load("_protocol")
_splits = load("_splits")
_vocabulary = load("_vocabulary")

PARTIAL = _protocol.PARTIAL
FAT, SPLIT, TIMEOUT, PEER_LOST, VOTE_REFUSED = (
    _protocol.FAT,
    _protocol.SPLIT,
    _protocol.TIMEOUT,
    _protocol.PEER_LOST,
    _protocol.VOTE_REFUSED,
)
A, B = b"a" * 16, b"b" * 16
WAIT_S = 20.0


class Running:
    """A coordinator, and clients of it."""

    def __init__(self, world_size, kind, timeout_s):
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.world_size = world_size
        facts = {"rank": 0, "world_size": world_size, "session": "s", "host": "here", "pid": 1}
        config = _coordinator.Config(0, facts, "secret", timeout_s, "")
        self.coordinator = _coordinator.Coordinator(listener, config, kind)
        self.clients = []

    @property
    def server(self):
        return self.coordinator._server

    def client(self, rank, **facts):
        facts = {"rank": rank, "world_size": self.world_size, "coordinator_rank": 0, "host": "h", "pid": rank, **facts}
        endpoint = _client.Endpoint(("127.0.0.1",), self.port, "secret", "s")
        made = _client.connect(lambda deadline: endpoint, facts, _client.Deadline(WAIT_S))
        self.clients.append(made)
        return made

    def peer(self, rank=None):
        made = Peer(self.port)
        if rank is not None:
            answer = made.hello(rank, "secret", world_size=self.world_size, session="s")
            assert isinstance(answer, _protocol.Welcome), answer
        return made

    def close(self):
        for client in self.clients:
            client.close("the test is over")
        self.coordinator.close()


@contextlib.contextmanager
def running(world_size=2, kind="thread", timeout_s=WAIT_S):
    made = Running(world_size, kind, timeout_s)
    try:
        yield made
    finally:
        made.close()


def vote(client, *spans, digest=A, flags=0):
    return client.vote(counts(*spans), digest, flags)


def outcome(client, *spans, digest=A, flags=0):
    pending = vote(client, *spans, digest=digest, flags=flags)
    client.wait(pending, WAIT_S)
    return pending.outcome


# ---------------------------------------------------------------------- votes


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_votes_are_answered(kind):
    with running(3, kind) as job:
        assert job.coordinator.kind == kind
        clients = [job.client(rank) for rank in range(3)]
        world = (0, 1, 2)
        assert together(*(lambda c=c: outcome(c, (world, 0, 1)) for c in clients)) == [FAT] * 3
        votes = [vote(c, (world, 1, 2), digest=d) for c, d in zip(clients, (A, B, A), strict=True)]
        for client, pending in zip(clients, votes, strict=True):
            client.wait(pending, WAIT_S)
            assert pending.outcome == SPLIT
            assert "fingerprints differ at [1, 3) on ranks 0-2" in pending.facts["reason"]
            assert pending.facts["span"] == [1, 3]
            assert _protocol.ranks_of(pending.facts["group"]) == world
        # Back in step, on one more group.
        pair = vote(clients[0], (world, 3, 1), ((0, 2), 0, 1))
        other = vote(clients[2], (world, 3, 1), ((0, 2), 0, 1))
        assert outcome(clients[1], (world, 3, 1)) == FAT
        for client, pending in ((clients[0], pair), (clients[2], other)):
            client.wait(pending, WAIT_S)
            assert pending.outcome == FAT


def test_a_vote_out_of_order_is_refused_and_disturbs_nothing():
    with running() as job:
        clients = [job.client(rank) for rank in range(2)]
        assert together(*(lambda c=c: outcome(c, ((0, 1), 0, 5)) for c in clients)) == [FAT] * 2
        pending = vote(clients[0], ((0, 1), 3, 1))
        clients[0].wait(pending, WAIT_S)
        assert pending.outcome == VOTE_REFUSED
        assert "rank 0 voted out of order" in pending.facts["reason"] and "before 5" in pending.facts["reason"]
        assert together(*(lambda c=c: outcome(c, ((0, 1), 5, 1)) for c in clients)) == [FAT] * 2


def test_a_vote_past_the_end_of_a_world_is_the_callers_error_and_nothing_is_sent():
    with running() as job:
        client = job.client(0)
        sent = client.bytes_sent
        with pytest.raises(_vocabulary.HandshakeConfigError, match="ranks 0, 2 reach outside a world of 2 ranks"):
            vote(client, ((0, 2), 0, 1))
        assert client.bytes_sent == sent
        other = job.client(1)
        assert together(lambda: outcome(client, ((0, 1), 0, 1)), lambda: outcome(other, ((0, 1), 0, 1))) == [FAT, FAT]


def test_a_group_is_declared_once_and_a_vote_is_small():
    with running(64) as job:
        world = tuple(range(64))
        client = job.client(0)
        vote(client, (world, 0, 1))
        before = client.bytes_sent
        vote(client, (world, 1, 1))
        assert client.bytes_sent - before <= 32 + 16


def test_a_graph_that_meets_nobody_is_not_sent():
    with running() as job:
        client = job.client(0)
        assert vote(client, ((0,), 0, 5), ((0, 1), 0, 0)) is None
        assert client.bytes_sent == 0


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_many_threads_of_one_rank_each_get_their_own_answer(kind):
    others = range(1, 7)
    with running(7, kind) as job:
        hub = job.client(0)
        spokes = {rank: job.client(rank) for rank in others}

        def play(client, pair, turns):
            digests = [A if turn % 3 else bytes([min(pair) + client._rank]) * 16 for turn in range(turns)]
            return [outcome(client, (pair, turn, 1), digest=digest) for turn, digest in enumerate(digests)]

        results = together(
            *(lambda r=r: play(hub, (0, r), 40) for r in others),
            *(lambda r=r: play(spokes[r], (0, r), 40) for r in others),
        )
    expected = [FAT if turn % 3 else SPLIT for turn in range(40)]
    assert results == [expected] * 12


def test_votes_wait_for_the_one_that_fills_the_gap(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", WAIT_S)
    pair = (0, 1)
    with running() as job:
        threads, orderly = job.client(0), job.client(1)
        early = []
        third = threading.Thread(target=lambda: early.append(outcome(threads, (pair, 2, 1))))
        second = threading.Thread(target=lambda: early.append(outcome(threads, (pair, 1, 1))))
        third.start()
        until(lambda: threads._votes_wait_for_others == 1)
        second.start()
        until(lambda: threads._votes_wait_for_others == 2)
        results = together(
            lambda: outcome(threads, (pair, 0, 1)),
            lambda: [outcome(orderly, (pair, turn, 1)) for turn in range(3)],
        )
        second.join(WAIT_S)
        third.join(WAIT_S)
        assert results == [FAT, [FAT] * 3] and early == [FAT, FAT]


def test_a_real_gap_is_believed_after_a_moment(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", 0.02)
    with running() as job:
        clients = [job.client(rank) for rank in range(2)]
        assert together(*(lambda c=c: outcome(c, ((0, 1), 7, 1)) for c in clients)) == [FAT] * 2


def test_eager_collectives_that_were_recorded_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", WAIT_S)

    def play(client):
        standing = _vocabulary.RankCollectiveCounts()
        group = _vocabulary.ProcessGroupId((0, 1))
        found = []
        for eager in (3, 0, 2):
            standing.record_eager_collectives(group, eager)
            standing.increment_pg_collective_counts({group: 1})
            pending = client.vote(standing, A, 0)
            client.wait(pending, WAIT_S)
            found.append(pending.outcome)
        return found

    with running() as job:
        clients = [job.client(rank) for rank in range(2)]
        started = time.monotonic()
        assert together(*(lambda c=c: play(c) for c in clients)) == [[FAT] * 3] * 2
        assert time.monotonic() - started < WAIT_S / 2


def test_a_rank_that_votes_from_two_threads_is_not_taken_for_blocked():
    """Rank 0 waits on the world in one thread, and still casts the vote on {0, 1} that rank 1 waits for in another."""
    with running(3) as job:
        zero, one, two = (job.client(rank) for rank in range(3))
        world, pair = (0, 1, 2), (0, 1)
        first = vote(zero, (world, 0, 1))
        outer = vote(one, (pair, 0, 1))
        until(lambda: all(map(job.server._consensus.oldest_waiting, pair)))
        results = together(
            lambda: outcome(zero, (pair, 0, 1)),
            lambda: (one.wait(outer, WAIT_S), outer.outcome, outcome(one, (world, 0, 1))),
            lambda: outcome(two, (world, 0, 1)),
            lambda: (zero.wait(first, WAIT_S), first.outcome),
        )
        assert results == [FAT, (None, FAT, FAT), FAT, (None, FAT)]


def test_a_job_that_runs_for_years(monkeypatch):
    """In less than three days a busy server is past 2^32 collectives."""
    monkeypatch.setattr(_client, "GAP_WAIT_S", 0.01)
    with running(3) as job:
        zero, one, two = (job.client(rank) for rank in range(3))
        standing = counts(((0, 1), 2**40, 0), ((0, 1, 2), 2**40, 0))
        groups = list(standing)
        for turn in range(4):
            standing.increment_pg_collective_counts(dict.fromkeys(groups[turn % 2 :], 3))
            for client in (zero, one, two):
                counted = standing if client is not two else counts(((0, 1, 2), 2**40 + 3 * turn, 3))
                client.pending = client.vote(counted, A, 0)
            for client in (zero, one, two):
                client.wait(client.pending, WAIT_S)
                assert client.pending.outcome == FAT


def test_gaps_on_several_groups_are_waited_for_once(monkeypatch):
    waits = []
    monkeypatch.setattr(_client, "GAP_WAIT_S", 0.05)
    with running(3) as job:
        zero = job.client(0)
        wait_for = zero._sent.wait_for
        monkeypatch.setattr(zero._sent, "wait_for", lambda met, s: waits.append(s) or wait_for(met, s))
        vote(zero, ((0, 1), 3, 1), ((0, 2), 3, 1), ((0, 1, 2), 3, 1))
    assert waits == [0.05]


def test_a_vote_that_comes_after_its_gap_was_believed_is_split(monkeypatch):
    """The other thread of rank 0 is not stopped by an error: its graph runs split, as on the ranks that it meets."""
    monkeypatch.setattr(_client, "GAP_WAIT_S", 0.02)
    with running(3) as job:
        zero, one, two = (job.client(rank) for rank in range(3))
        early, beside = vote(one, ((0, 1), 0, 1)), vote(two, ((0, 2), 0, 1))
        until(lambda: job.server._consensus.oldest_waiting(1))
        second = vote(zero, ((0, 1), 1, 1))
        late = vote(zero, ((0, 1), 0, 1), ((0, 2), 0, 1))
        for client, pending in ((one, early), (zero, late), (two, beside)):
            client.wait(pending, WAIT_S)
            assert pending.outcome == SPLIT
        alone = vote(zero, ((0, 1), 0, 1))
        assert alone.outcome == SPLIT and "rank 0's vote at [0, 1) on ranks 0-1 came more than" in alone.facts["reason"]
        assert outcome(one, ((0, 1), 1, 1)) == FAT
        zero.wait(second, WAIT_S)
        assert second.outcome == FAT
        assert outcome(zero, ((0, 1), 1, 1)) == VOTE_REFUSED, "one that was sent before is still an error"


def test_a_vote_that_waits_in_a_gap_is_split_when_a_later_one_has_given_up_the_gap(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", WAIT_S)
    with running() as job:
        zero, one = job.client(0), job.client(1)
        waiting = []
        second = threading.Thread(target=lambda: waiting.append(vote(zero, ((0, 1), 1, 1))))
        second.start()
        until(lambda: zero._votes_wait_for_others == 1)
        monkeypatch.setattr(_client, "GAP_WAIT_S", 0.02)
        third = vote(zero, ((0, 1), 2, 1))
        second.join(WAIT_S)
        assert [pending.outcome for pending in waiting] == [SPLIT]
        assert "rank 0's vote at [1, 2) on ranks 0-1 came more than" in waiting[0].facts["reason"]
        assert vote(zero, ((0, 1), 0, 1)).outcome == SPLIT
        assert outcome(one, ((0, 1), 2, 1)) == FAT
        zero.wait(third, WAIT_S)
        assert third.outcome == FAT


def test_more_than_one_gap_is_remembered(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", 0.01)
    with running() as job:
        zero = job.client(0)
        for start in (1, 3, 5):
            vote(zero, ((0, 1), start, 1))
        assert [vote(zero, ((0, 1), start, 1)).outcome for start in (2, 0, 4)] == [SPLIT] * 3


def test_a_graph_on_too_many_groups_is_the_callers_error_and_nothing_is_sent(monkeypatch):
    monkeypatch.setattr(_protocol, "MAX_SPANS", 2)
    monkeypatch.setattr(_protocol, "MAX_GROUPS_PER_RANK", 3)
    with running(4) as job:
        zero, one = job.client(0), job.client(1)
        with pytest.raises(_vocabulary.HandshakeConfigError, match="collectives on 3 process groups of this rank"):
            vote(zero, ((0, 1), 0, 1), ((0, 2), 0, 1), ((0, 3), 0, 1))
        with pytest.raises(_vocabulary.HandshakeConfigError, match="rank 0 has voted on 3 process groups"):
            vote(zero, ((0, 1, 2), 0, 1))
        assert together(lambda: outcome(zero, ((0, 1), 0, 1)), lambda: outcome(one, ((0, 1), 0, 1))) == [FAT, FAT]


class Failing:
    """A socket, a method of which fails."""

    def __init__(self, sock, **errors):
        self._sock = sock
        self._errors = errors

    def __getattr__(self, name):
        if name in self._errors:

            def fail(*arguments):
                raise self._errors[name]

            return fail
        return getattr(self._sock, name)


@pytest.mark.parametrize("cast", ["vote", "vote_usually"])
def test_after_an_interrupted_send_nothing_more_is_sent(cast):
    """Half a frame may have left: what came after it would be taken for its rest."""
    with running() as job:
        zero, one = job.client(0), job.client(1)
        assert together(lambda: outcome(zero, ((0, 1), 0, 1)), lambda: outcome(one, ((0, 1), 0, 1))) == [FAT, FAT]
        sock, zero._sock = zero._sock, Failing(zero._sock, sendall=KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            getattr(zero, cast)(counts(((0, 1), 1, 1)), A, 0)
        zero._sock = sock
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="a send was interrupted"):
            outcome(zero, ((0, 1), 2, 1))


def test_a_connection_that_breaks_in_any_way_is_a_lost_coordinator():
    """Keepalive finds a host that is gone: ETIMEDOUT, which is no ConnectionError."""
    with running() as job:
        zero, one = job.client(0), job.client(1)
        assert together(lambda: outcome(zero, ((0, 1), 0, 1)), lambda: outcome(one, ((0, 1), 0, 1))) == [FAT, FAT]
        zero._sock = Failing(zero._sock, recv=OSError(errno.ETIMEDOUT, "Connection timed out"))
        pending = zero.vote_usually(counts(((0, 1), 1, 1)), A, 0)
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="Connection timed out"):
            zero.wait(pending, WAIT_S)


def test_an_exception_while_a_verdict_is_read_leaves_the_connection_in_order():
    """A signal handler's exception, such as KeyboardInterrupt, comes out of whatever call the thread is in."""
    with running() as job:
        zero, one = job.client(0), job.client(1)
        assert together(lambda: outcome(zero, ((0, 1), 0, 1)), lambda: outcome(one, ((0, 1), 0, 1))) == [FAT, FAT]
        sock, zero._sock = zero._sock, Failing(zero._sock, recv=KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            zero.vote_usually(counts(((0, 1), 1, 1)), A, 0)
        zero._sock = sock
        zero._reading.acquire()  # as if the exception had come right after it was taken
        assert outcome(one, ((0, 1), 1, 1)) == FAT
        theirs = vote(one, ((0, 1), 2, 1))
        assert outcome(zero, ((0, 1), 2, 1)) == FAT
        one.wait(theirs, WAIT_S)


# ---------------------------------------------------------------------- waiting


def test_timeout_names_the_missing_and_the_latecomer_has_the_same_outcome():
    with running(3, timeout_s=0.15) as job:
        zero, one = job.client(0), job.client(1)
        world = (0, 1, 2)
        one_vote = vote(one, (world, 0, 1))
        pending = vote(zero, (world, 0, 1))
        for client, waiting in ((zero, pending), (one, one_vote)):
            client.wait(waiting, WAIT_S)
            assert waiting.outcome == TIMEOUT
            assert "rank 2 at [0, 1) on ranks 0-2 (ranks 0-1 voted)" in waiting.facts["reason"]
            assert "rank 2 has neither connected nor voted yet" in waiting.facts["reason"]
            assert _protocol.ranks_of(waiting.facts["ranks"]) == (2,)
        late = job.client(2)
        pending = vote(late, (world, 0, 1))
        late.wait(pending, WAIT_S)
        assert pending.outcome == TIMEOUT
        assert "rank 2 (h:2) is late at [0, 1) on ranks 0-2" in pending.facts["reason"]


def test_a_rank_has_a_timeout_of_its_own():
    with running(timeout_s=1000.0) as job:
        client = job.client(0, timeout_s=0.05)
        assert outcome(client, ((0, 1), 0, 1)) == TIMEOUT


@pytest.mark.parametrize("timeout_s", ["9" * 400, "-1", "0", "NaN", "Infinity", '"soon"', "null", "[1]"])
def test_a_senseless_timeout_harms_nobody(timeout_s):
    with running() as job:
        with Peer(job.port) as peer:
            nonce = peer.receive().nonce
            signed = f'{{"rank": 1, "world_size": 2, "session": "s", "timeout_s": {timeout_s}}}'.encode()
            peer.send(_protocol.frame(_protocol.HELLO, _protocol.proof(b"secret", nonce, signed), signed))
            assert isinstance(peer.receive(), _protocol.Welcome)
            client = job.client(0)
            pending = vote(client, ((0, 1), 0, 1))
            peer.send(_protocol.group(0, (0, 1)), _protocol.vote(1, 0, A, [(0, 0, 1)]))
            assert peer.receive().outcome == FAT
            client.wait(pending, WAIT_S)
            assert pending.outcome == FAT


def test_a_timeout_of_years_harms_nobody():
    with running(3, timeout_s=1e9) as job:
        clients = [job.client(rank) for rank in range(3)]
        world = (0, 1, 2)
        flags = PARTIAL
        votes = [vote(c, (world, 0, 1), digest=d, flags=flags) for c, d in zip(clients[:2], (A, B), strict=True)]
        for client, pending in zip(clients, votes, strict=False):
            client.wait(pending, WAIT_S)
            assert pending.outcome == SPLIT and pending.rounds
        assert outcome(clients[2], (world, 0, 1), flags=flags) == SPLIT  # the loop has slept with a record kept


def test_a_rank_that_waits_is_told_whom_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(_consensus, "NOTICE_AT_S", (0.01, 0.02, 0.03, 0.04))
    monkeypatch.setattr(_consensus, "NOTICE_INTERVAL_S", 0.01)
    with running(3, timeout_s=0.3) as job, caplog.at_level(logging.WARNING, "torch_tpu.handshake"):
        zero = job.client(0)
        job.client(1)
        assert outcome(zero, ((0, 1, 2), 0, 1)) == TIMEOUT
    texts = [record.getMessage() for record in caplog.records if "still waits" in record.getMessage()]
    assert len(texts) >= 4
    assert "rank 0 still waits: waiting for ranks 1-2 at [0, 1) on ranks 0-2 (rank 0 voted)" in texts[0]
    assert "rank 1 (h:1) has not voted yet; rank 2 has neither connected nor voted yet" in texts[0]


def test_silence_on_success(caplog):
    with caplog.at_level(logging.INFO), running() as job:
        clients = [job.client(rank) for rank in range(2)]
        assert together(*(lambda c=c: outcome(c, ((0, 1), 0, 1)) for c in clients)) == [FAT] * 2
    assert caplog.records == []


def test_a_lost_rank_answers_those_who_wait_for_it():
    with running(3) as job:
        zero = job.client(0)
        world = (0, 1, 2)
        with job.peer(2):
            pending = vote(zero, (world, 0, 1))
            until(lambda: job.server._consensus.oldest_waiting(0))
            started = time.monotonic()
        zero.wait(pending, WAIT_S)
        assert time.monotonic() - started < 1.0
        assert pending.outcome == PEER_LOST
        assert "rank 2 (somewhere:12345), its process exited" in pending.facts["reason"]
        assert _protocol.ranks_of(pending.facts["ranks"]) == (2,)
        assert outcome(zero, (world, 1, 1)) == PEER_LOST, "also whoever votes later"
        one = job.client(1)
        assert together(lambda: outcome(zero, ((0, 1), 0, 1)), lambda: outcome(one, ((0, 1), 0, 1))) == [FAT] * 2
        job.client(2)
        assert not job.server._consensus._lost, "it is back"


def test_a_lost_rank_that_said_goodbye_gives_its_reason():
    with running() as job:
        zero, one = job.client(0), job.client(1)
        pending = vote(zero, ((0, 1), 0, 1))
        until(lambda: job.server._consensus.oldest_waiting(0))
        one.close("rank 1 has had enough")
        zero.wait(pending, WAIT_S)
        assert pending.outcome == PEER_LOST and "rank 1 has had enough" in pending.facts["reason"]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_the_end_of_the_coordinator_answers_everybody(kind):
    with running(3, kind) as job:
        clients = [job.client(rank) for rank in range(3)]
        votes = [vote(client, ((0, 1, 2), 0, 1)) for client in clients[:2]]
        job.coordinator.close()
        job.coordinator.close()
        for client, pending in zip(clients, votes, strict=False):
            with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
                client.wait(pending, WAIT_S)
            assert "the coordinator (rank 0, here:1) is lost" in str(error.value)
            assert "rank 0, which coordinates, closed the handshake or exited" in str(error.value)
            assert error.value.ranks == (0,)
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="closed the handshake or exited"):
            outcome(clients[2], ((0, 1, 2), 0, 1))
        socket.create_server(("127.0.0.1", job.port)).close()  # nobody listens there any more


def test_closing_wakes_the_threads_that_wait():
    with running(3) as job:
        client = job.client(0)
        votes = [vote(client, (group, 0, 1), flags=0) for group in ((0, 1), (0, 2), (0, 1, 2))]

        def wait(pending):
            client.wait(pending, WAIT_S)

        def close():
            until(lambda: not client._nobody_reads() and client._others_wait == 2)
            client.close("done")
            client.close("done")

        results = together(*(lambda p=p: wait(p) for p in votes), close)
        assert results.pop() is None
        for error in results:
            assert type(error) is _vocabulary.HandshakeError and "the handshake was closed" in str(error)


# ---------------------------------------------------------------------- exchanges


def test_a_whole_exchange_and_nothing_is_left_of_it():
    def play(client, digest):
        pending = vote(client, ((0, 1), 0, 1), digest=digest, flags=PARTIAL)
        client.wait(pending, WAIT_S)
        rounds = pending.rounds

        def result():
            waiting = client.next_round(rounds)
            client.wait(waiting, WAIT_S)
            return waiting.ok, waiting.payload

        found = [result()]
        if client._rank == 0:
            client.send_to_exchange(rounds, _protocol.SHARE, b"keys")
        else:
            found.append(result())
        for round_number, payload in ((_protocol.INTERSECT, digest), (_protocol.AGREE, A)):
            client.send_to_exchange(rounds, round_number, payload)
            found.append(result())
        client.end_exchange(rounds)
        return found

    with running() as job:
        clients = [job.client(rank) for rank in range(2)]
        common = bytes(a & b for a, b in zip(A, B, strict=True))
        first, second = together(*(lambda c=c, d=d: play(c, d) for c, d in zip(clients, (A, B), strict=True)))
        assert first == [(True, bytes(4)), (True, common), (True, b"\x01")]
        assert second == [(True, bytes(4)), (True, b"keys"), (True, common), (True, b"\x01")]
        assert not job.server._splits.has_records
        assert [len(client._exchanges) for client in clients] == [0, 0]


def test_a_vote_that_is_not_partial_calls_an_exchange_off():
    with running(3) as job:
        zero, one, two = (job.client(rank) for rank in range(3))
        world = (0, 1, 2)
        votes = [vote(zero, (world, 0, 1), flags=PARTIAL), vote(one, (world, 0, 1), digest=B, flags=PARTIAL)]
        for client, pending in zip((zero, one), votes, strict=True):
            client.wait(pending, WAIT_S)
            assert pending.rounds
        assert outcome(two, (world, 0, 1)) == SPLIT
        for client, pending in zip((zero, one), votes, strict=True):
            waiting = client.next_round(pending.rounds)
            client.wait(waiting, WAIT_S)
            assert (waiting.ok, waiting.payload) == (False, b"rank 2 does not take part")


@pytest.mark.parametrize("rank_2_votes", ["before", "after"])
def test_an_exchange_never_waits_for_a_rank_that_waits_for_it(rank_2_votes):
    """Ranks 0 and 1 look for a plan with rank 2, which waits for rank 0 elsewhere."""
    with running(3) as job:
        zero, one, two = (job.client(rank) for rank in range(3))
        world = (0, 1, 2)
        if rank_2_votes == "before":
            elsewhere = vote(two, ((0, 2), 0, 1), flags=PARTIAL)
            until(lambda: job.server._consensus.oldest_waiting(2))
        votes = [vote(zero, (world, 0, 1), flags=PARTIAL), vote(one, (world, 0, 1), digest=B, flags=PARTIAL)]
        for client, pending in zip((zero, one), votes, strict=True):
            client.wait(pending, WAIT_S)
            assert pending.outcome == SPLIT
        if rank_2_votes == "after":
            elsewhere = vote(two, ((0, 2), 0, 1), flags=PARTIAL)
        for client, pending in zip((zero, one), votes, strict=True):
            if pending.rounds:
                waiting = client.next_round(pending.rounds)
                client.wait(waiting, WAIT_S)
                assert not waiting.ok and b"rank 2" in waiting.payload
        assert outcome(zero, ((0, 2), 0, 1)) == FAT
        two.wait(elsewhere, WAIT_S)
        assert elsewhere.outcome == FAT


def test_an_exchange_that_a_rank_ended_leaves_nothing_behind():
    with running() as job:
        clients = [job.client(rank) for rank in range(2)]
        for turn in range(5):
            votes = [vote(c, ((0, 1), turn, 1), digest=d, flags=PARTIAL) for c, d in zip(clients, (A, B), strict=True)]
            for client, pending in zip(clients, votes, strict=True):
                client.wait(pending, WAIT_S)
            for client, pending in zip(clients, votes, strict=True):
                client.send_to_exchange(pending.rounds, _protocol.ABORT, b"no")
                client.end_exchange(pending.rounds)
        assert together(*(lambda c=c: outcome(c, ((0, 1), 5, 1)) for c in clients)) == [FAT] * 2
        assert [len(client._exchanges) for client in clients] == [0, 0]
        assert not job.server._splits.has_records


# ---------------------------------------------------------------------- peers that break the protocol


def _declared(job, rank):
    peer = job.peer(rank)
    peer.send(_protocol.group(0, (0, 1)))
    return peer


BREACHES = {
    "random bytes": bytes(range(255, -1, -1)),
    "a frame without end": struct.pack("!IB", 2**32 - 1, _protocol.GRAPH),
    "a second hello": _protocol.hello({"rank": 1}, b"secret", b""),
    "a verdict": _protocol.verdict(1, FAT),
    "a group again": _protocol.group(0, (0, 1)),
    "a group of others": _protocol.group(1, (0, 2)),
    "a group beyond the world": _protocol.group(1, (1, 9)),
    "a group without ranks": _protocol.group(1, ()),
    "a group that doubles back": _protocol.frame(
        _protocol.GROUP, struct.pack("!II", 1, 2), struct.pack("!III", 1, 1, 1), struct.pack("!III", 0, 2, 1)
    ),
    "a vote on an unknown group": _protocol.vote(1, 0, A, [(77, 0, 1)]),
    "a vote on nothing": _protocol.vote(1, 0, A, [(0, 3, 3)]),
    "a vote twice on a group": _protocol.vote(1, 0, A, [(0, 0, 1), (0, 1, 2)]),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_rank_that_breaks_the_protocol_is_told_so_and_lost_alone(name):
    with running(3) as job:
        zero, two = job.client(0), job.client(2)
        with _declared(job, 1) as peer:
            pending = vote(zero, ((0, 1), 0, 1), flags=0)
            until(lambda: job.server._consensus.oldest_waiting(0))
            peer.send(BREACHES[name])
            goodbye = peer.receive()
            assert isinstance(goodbye, _protocol.Goodbye) and "protocol error" in goodbye.reason
            assert peer.receive() is None
        zero.wait(pending, WAIT_S)
        assert pending.outcome == PEER_LOST
        assert "rank 1 (somewhere:12345), it broke the protocol" in pending.facts["reason"]
        assert together(lambda: outcome(zero, ((0, 2), 0, 1)), lambda: outcome(two, ((0, 2), 0, 1))) == [FAT] * 2


def test_votes_may_come_in_pieces_and_in_heaps():
    with running() as job:
        zero = job.client(0)
        with _declared(job, 1) as peer:
            pending = vote(zero, ((0, 1), 0, 1))
            for byte in _protocol.vote(1, 0, A, [(0, 0, 1)]):
                peer.send(bytes([byte]))
            assert peer.receive() == _protocol.Verdict(1, FAT, 0, 0)
            zero.wait(pending, WAIT_S)
            votes = [vote(zero, ((0, 1), turn, 1), flags=0) for turn in range(1, 500)]
            peer.send(*(_protocol.vote(turn, 0, A, [(0, turn, turn + 1)]) for turn in range(1, 500)))
            for turn, pending in enumerate(votes, 1):
                zero.wait(pending, WAIT_S)
                assert pending.outcome == FAT and peer.receive() == _protocol.Verdict(turn, FAT, 0, 0)


def test_votes_under_way_are_bounded():
    with running() as job, _declared(job, 1) as peer:
        limit = _consensus.MAX_VOTES_UNDER_WAY
        peer.send(*(_protocol.vote(turn, 0, A, [(0, turn, turn + 1)]) for turn in range(limit + 1)))
        answers = [peer.receive(), peer.receive()]
        assert isinstance(answers[0], _protocol.Detail) and str(limit) in answers[0].facts["reason"]
        assert answers[1] == _protocol.Verdict(limit, VOTE_REFUSED, 0, 0)


def test_a_rank_that_reads_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr(_coordinator, "MAX_UNSENT_BYTES", 1000)
    # So that what the kernel keeps is soon full.
    monkeypatch.setattr(
        _coordinator, "prepare_socket", lambda sock: sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    )
    with running() as job:
        zero = job.client(0)
        pending = vote(zero, ((0, 1), 0, 1))
        with _declared(job, 1) as peer:
            refused = _protocol.vote(7, 0, A, [(0, 0, 1)])
            peer.send(_protocol.vote(1, 0, B, [(0, 5, 6)]))  # from now on the others are out of order
            with contextlib.suppress(ConnectionError):
                for _ in range(2000):
                    peer.send(*[refused] * 100)
            zero.wait(pending, WAIT_S)
            assert pending.outcome in (SPLIT, PEER_LOST)
            pending = vote(zero, ((0, 1), 6, 1))
            zero.wait(pending, WAIT_S)
            assert pending.outcome == PEER_LOST
            assert "it does not read what is sent to it" in pending.facts["reason"]


def test_strangers_who_say_nothing_are_closed(monkeypatch):
    monkeypatch.setattr(_coordinator, "HELLO_WITHIN_S", 0.05)
    with running() as job, job.peer() as silent, job.peer() as slow:
        slow.sock.sendall(_protocol.hello({"rank": 1}, b"", b"")[:10])
        for stranger in (silent, slow):
            assert isinstance(stranger.receive(), _protocol.Greeting)
            assert stranger.receive() is None
        assert job.client(1)


def test_strangers_are_bounded_and_the_oldest_make_room(monkeypatch):
    monkeypatch.setattr(_coordinator, "MAX_STRANGERS", 3)
    with running() as job:
        strangers = [job.peer() for _ in range(3 + job.world_size)]
        for stranger in strangers:
            assert isinstance(stranger.receive(), _protocol.Greeting)
        assert job.client(1)
        strangers.append(job.peer())
        assert isinstance(strangers[-1].receive(), _protocol.Greeting)
        assert strangers[0].receive() is None, "one is enough: rank 1 is no stranger any more"
        for stranger in strangers[1:]:
            stranger.send(b"no hello at all")
            assert stranger.receive() is None
        for stranger in strangers:
            stranger.sock.close()


# ---------------------------------------------------------------------- who is let in


def _refusal(job, rank, secret="secret", **facts):
    with job.peer() as peer:
        answer = peer.hello(rank, secret, **{"world_size": job.world_size, "session": "s", **facts})
        assert isinstance(answer, _protocol.Refused), answer
        assert peer.receive() is None
        return answer.reason


def test_refusals_say_what_differs_and_whose_it_is():
    with running() as job:
        reason = _refusal(job, 1, "guessed")
        assert "rank 1 (somewhere:12345) does not know the secret of the coordinator (rank 0, here:1)" in reason
        assert "TORCH_TPU_INTERNAL_HANDSHAKE_SECRET" in reason
        reason = _refusal(job, 1, session="other")
        assert "session differs: other on rank 1 (somewhere:12345), s on the coordinator (rank 0, here:1)" in reason
        reason = _refusal(job, 1, world_size=3)
        assert "world size differs: 3 on rank 1" in reason and "2 on the coordinator" in reason
        for rank in (2, -1, "1", 1.0, None, [1], {"a": 1}):
            assert "outside the world of 2 ranks" in _refusal(job, rank)
        job.client(1)
        reason = _refusal(job, 1)
        assert "two processes say that they are rank 1: h:1, which is connected, and somewhere:12345" in reason


def test_the_coordinators_rank_logs_who_was_refused(caplog):
    with running() as job:
        zero, one = job.client(0), job.client(1)
        with pytest.raises(_vocabulary.HandshakeProtocolError, match="outside the world"):
            job.client(7)
        assert together(lambda: outcome(zero, ((0, 1), 0, 1)), lambda: outcome(one, ((0, 1), 0, 1))) == [FAT, FAT]
    (record,) = caplog.records
    assert "coordinator: a connection from 127.0.0.1 was refused: rank 7 (h:7) is outside" in record.getMessage()


def test_a_refused_client_gets_the_reason():
    with running() as job:
        with pytest.raises(_vocabulary.HandshakeProtocolError, match=r"rank 5 was refused: .* outside the world of 2"):
            job.client(5)
        first = job.client(1)
        with pytest.raises(_vocabulary.HandshakeProtocolError, match="two processes say that they are rank 1"):
            job.client(1)
        zero = job.client(0)
        assert together(lambda: outcome(zero, ((0, 1), 0, 1)), lambda: outcome(first, ((0, 1), 0, 1))) == [FAT] * 2


# ---------------------------------------------------------------------- what a rank finds instead of a coordinator


@contextlib.contextmanager
def listening(serve):
    """A server that treats each connection with `serve(socket)`. Gives its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets = []

    def run():
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            open_sockets.append(accepted)
            with contextlib.suppress(OSError):
                serve(accepted)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(WAIT_S)
        for accepted in open_sockets:
            accepted.close()


def connect(port, seconds=WAIT_S, hosts=("127.0.0.1",)):
    endpoint = _client.Endpoint(hosts, port, "secret", "s")
    facts = {"rank": 1, "world_size": 2, "coordinator_rank": 0, **_client.host_and_pid()}
    return _client.connect(lambda deadline: endpoint, facts, _client.Deadline(seconds))


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(range(64))])
def test_somebody_elses_server(banner):
    with listening(lambda sock: sock.sendall(banner)) as port:
        with pytest.raises(_vocabulary.HandshakeProtocolError) as error:
            connect(port)
        assert f"what listens on 127.0.0.1 port {port} is no handshake coordinator" in str(error.value)
        assert "TORCH_TPU_INTERNAL_HANDSHAKE_PORT" in str(error.value)


def test_a_stranger_at_one_address_does_not_hide_the_coordinator_at_the_next():
    with running() as job:
        try:
            stranger = socket.create_server(("127.0.0.2", job.port))
        except OSError:
            pytest.skip("this host has one loopback address only")
        with stranger:

            def answer():
                accepted, _ = stranger.accept()
                with accepted:
                    accepted.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

            client, _ = together(lambda: connect(job.port, hosts=("127.0.0.2", "127.0.0.1")), answer)
        assert client.coordinator["host"] == "here"
        client.close("done")


def test_a_coordinator_of_another_version():
    other = _protocol.greeting(bytes(16), _protocol.VERSION + 1)
    with listening(lambda sock: sock.sendall(other)) as port:
        with pytest.raises(_vocabulary.HandshakeProtocolError) as error:
            connect(port)
        text = str(error.value)
        assert f"speaks version {_protocol.VERSION + 1} of the handshake protocol" in text
        assert f"rank 1 version {_protocol.VERSION}:" in text
        assert "install the same release on all hosts" in text


def test_nobody_is_there(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
        connect(port, seconds=0.1)
    assert "rank 1 found no handshake coordinator within 0.1 s" in str(error.value)
    assert f"127.0.0.1 port {port}: Connection refused" in str(error.value)
    assert "MASTER_ADDR" in str(error.value)
    assert error.value.ranks == (0,) and error.value.seconds == 0.1


@pytest.mark.parametrize("serve", [lambda sock: None, lambda sock: sock.close()], ids=["silent", "closes"])
def test_nobody_answers(serve):
    with listening(serve) as port:
        started = time.monotonic()
        with pytest.raises(_vocabulary.HandshakePeerLostError, match=f"127.0.0.1 port {port}"):
            connect(port, seconds=0.15)
        assert time.monotonic() - started < 2.0


def test_a_name_that_does_not_resolve():
    with pytest.raises(_vocabulary.HandshakePeerLostError, match=r"no-such-host\.invalid"):
        connect(1, seconds=0.05, hosts=("no-such-host.invalid",))


def test_a_coordinator_that_starts_late_is_found():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    made = []
    thread = threading.Thread(target=lambda: made.append(connect(port)))
    thread.start()
    listener = socket.create_server(("127.0.0.1", port))
    facts = {"rank": 0, "world_size": 2, "session": "s"}
    coordinator = _coordinator.Coordinator(listener, _coordinator.Config(0, facts, "secret", WAIT_S, ""), "thread")
    thread.join(WAIT_S)
    coordinator.close()
    assert made
    made[0].close("done")


def _serve_after_welcome(*frames):
    def serve(sock):
        sock.sendall(_protocol.greeting(bytes(16)))
        decoder = _protocol.Decoder()
        while decoder.next_message() is None:
            decoder.feed(sock.recv(65536))
        sock.sendall(b"".join([_protocol.welcome({"rank": 0, "world_size": 2, "host": "h", "pid": 7}), *frames]))

    return serve


@contextlib.contextmanager
def vote_under_way(serve):
    """A client with a vote, of a coordinator that treats it with `serve(socket)`."""
    with listening(serve) as port:
        client = connect(port)
        yield client, vote(client, ((0, 1), 0, 1))
        client.close("done")


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([_protocol.verdict(99, FAT)], "a verdict on vote 99"),
        ([b"nonsense and more"], "not a frame of this protocol"),
        ([_protocol.welcome({})], "an unexpected Welcome"),
    ],
)
def test_a_coordinator_that_breaks_the_protocol(frames, words):
    with listening(_serve_after_welcome(*frames)) as port:
        client = connect(port)
        with pytest.raises(_vocabulary.HandshakeProtocolError, match=words) as error:
            outcome(client, ((0, 1), 0, 1))
        assert "the coordinator (rank 0, h:7)" in str(error.value)
        with pytest.raises(_vocabulary.HandshakeProtocolError, match=words):
            outcome(client, ((0, 1), 1, 1))
        client.close("done")


def test_a_coordinator_that_hangs(monkeypatch):
    monkeypatch.setattr(_client, "LOOK_UP_S", 0.02)
    with vote_under_way(_serve_after_welcome()) as (client, pending):
        said = r"the coordinator \(rank 0, h:7\) has not answered"
        with pytest.raises(_vocabulary.HandshakeTimeoutError, match=said):
            client.wait(pending, 0.05)


def test_a_wait_ends_although_something_else_arrives():
    def chatter(sock):
        _serve_after_welcome()(sock)
        while True:
            sock.sendall(_protocol.result(99, 1, True, b"of no interest"))

    with vote_under_way(chatter) as (client, pending):
        with pytest.raises(_vocabulary.HandshakeTimeoutError):
            client.wait(pending, 0.05)


def test_a_coordinator_that_takes_nothing(monkeypatch):
    """As one that was stopped by a debugger: the socket's buffers fill up, and no send may wait for ever."""
    monkeypatch.setattr(_client, "SEND_WITHIN_S", 0.05)
    with vote_under_way(_serve_after_welcome()) as (client, pending):
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="it has taken nothing for"):
            for _ in range(100):
                client.send_graph(pending, bytes(_protocol.MAX_GRAPH_BYTES))
        with pytest.raises(_vocabulary.HandshakePeerLostError):
            client.wait(pending, WAIT_S)


def test_closing_while_another_thread_is_stuck_in_a_send(monkeypatch):
    monkeypatch.setattr(_client, "CLOSE_WITHIN_S", 0.05)
    with vote_under_way(_serve_after_welcome()) as (client, pending):

        def fill():
            while True:
                client.send_graph(pending, bytes(_protocol.MAX_GRAPH_BYTES))

        def close():
            sent = [-1]

            def stuck():
                before, sent[0] = sent[0], client.bytes_sent
                time.sleep(0.02)
                return client._sending.locked() and before == sent[0]

            until(stuck)
            client.close("done")

        error, _ = together(fill, close)
        assert isinstance(error, _vocabulary.HandshakeError) and "the handshake was closed" in str(error)


# ---------------------------------------------------------------------- what a process leaves behind


def test_no_child_can_be_started(monkeypatch, caplog):
    monkeypatch.setattr(_coordinator.sys, "executable", "")
    with caplog.at_level(logging.WARNING), running(kind="process") as job:
        assert job.coordinator.kind == "thread" and job.coordinator.pid is None
        clients = [job.client(rank) for rank in range(2)]
        assert together(*(lambda c=c: outcome(c, ((0, 1), 0, 1)) for c in clients)) == [FAT] * 2
    assert [record.getMessage() for record in caplog.records if "runs as a thread" in record.getMessage()]


@pytest.mark.parametrize("executable", ["/does/not/exist", "/bin/false", "/bin/true"])
def test_a_child_that_ends_at_once(monkeypatch, caplog, executable):
    monkeypatch.setattr(_coordinator.sys, "executable", executable)
    with caplog.at_level(logging.WARNING), running(kind="process") as job:
        assert job.coordinator.kind == "thread"
        assert job.client(1)
    assert sum("runs as a thread" in record.getMessage() for record in caplog.records) == 1
