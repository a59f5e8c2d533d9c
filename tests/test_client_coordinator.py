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
import types

import pytest
from layout import load
from ranks import PATIENCE_S, Peer, Refused, Welcome, counts, let_in, together, until

_client = load("_client")
_consensus = load("_consensus")
_coordinator = load("_coordinator")
_protocol = load("_protocol")
_rendezvous = load("_rendezvous")
_vocabulary = load("_vocabulary")

PARTIAL, PLAN, PLANS, SPEAKS = _protocol.PARTIAL, _protocol.PLAN, _protocol.PLANS, _protocol.SPEAKS
FAT, SPLIT, TIMEOUT, PEER_LOST, VOTE_REFUSED = (
    _protocol.FAT,
    _protocol.SPLIT,
    _protocol.TIMEOUT,
    _protocol.PEER_LOST,
    _protocol.VOTE_REFUSED,
)
A, B = b"a" * 16, b"b" * 16
PAIR, WORLD = (0, 1), (0, 1, 2)
SOON_S = 0.02  # a time after which something is to have happened, where nothing else is waited for


class Running:
    """A coordinator, and clients of it."""

    def __init__(self, world_size, kind, timeout_s, listener):
        listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.world_size = world_size
        facts = {"rank": 0, "world_size": world_size, "session": "s", "host": "here", "pid": 1, "timeout_s": timeout_s}
        self.coordinator = _coordinator.Coordinator(listener, _coordinator.Config(facts, "secret", ""), kind)
        self.clients = []

    @property
    def server(self):
        return self.coordinator._server

    def client(self, rank, **facts):
        made = connect(self.port, rank, self.world_size, **facts)
        self.clients.append(made)
        return made

    def all_clients(self):
        return [self.client(rank) for rank in range(self.world_size)]

    def peer(self, rank, *declared):
        """A rank that is played frame by frame, and has declared these groups, from number 0 on."""
        made = Peer(self.port)
        answer = made.hello(rank, "secret", world_size=self.world_size, session="s")
        assert isinstance(answer, Welcome), answer
        made.send(*(_protocol.Group(number, ranks) for number, ranks in enumerate(declared)))
        return made

    def close(self):
        for client in self.clients:
            client.close("the test is over")
        self.coordinator.close()


@contextlib.contextmanager
def running(world_size=2, kind="thread", timeout_s=PATIENCE_S, listener=None):
    made = Running(world_size, kind, timeout_s, listener)
    try:
        yield made
    finally:
        made.close()


def connect(port, rank=1, world_size=2, hosts=("127.0.0.1",), within_s=PATIENCE_S, find=None, **facts):
    """A client, connected to what listens there."""
    client = _client.Client(rank, world_size)
    endpoint = _rendezvous.Endpoint(hosts, port, "secret", "s")
    facts = {"rank": rank, "world_size": world_size, "coordinator_rank": 0, "host": "h", "pid": rank, **facts}
    _client.connect(client, find or (lambda: endpoint), facts, _rendezvous.Deadline(within_s))
    return client


def cast(client, *spans, digest=A, flags=0):
    """A vote, with spans `(ranks, before, number)`."""
    return client.vote_counted(counts(*spans), digest, flags)


def cast_and_wait(client, *spans):
    """A vote that waits in the coordinator: the same again was refused, and answers come in the order of votes."""
    pending = cast(client, *spans)
    assert outcome(client, *spans) == VOTE_REFUSED and pending.outcome == 0
    return pending


def answer(client, pending, within_s=PATIENCE_S):
    client.wait(pending, time.monotonic() + within_s)
    return pending.outcome


def outcome(client, *spans, digest=A, flags=0):
    return answer(client, cast(client, *spans, digest=digest, flags=flags))


def outcomes(clients, *spans):
    """Those of a vote that all these cast."""
    return together(*(lambda c=c: outcome(c, *spans) for c in clients))


# ---------------------------------------------------------------------- votes


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_votes_are_answered(kind):
    with running(3, kind) as job:
        assert (job.coordinator.pid is None) == (kind == "thread")
        clients = job.all_clients()
        assert outcomes(clients, (WORLD, 0, 1)) == [FAT] * 3
        votes = [cast(c, (WORLD, 1, 2), digest=d) for c, d in zip(clients, (A, B, A), strict=True)]
        for client, pending in zip(clients, votes, strict=True):
            assert answer(client, pending) == SPLIT
            assert "fingerprints differ at [1, 3) on ranks 0-2" in pending.facts["reason"]
            assert pending.facts["span"] == [1, 3]
            assert _protocol.ranks_of(pending.facts["group"]) == WORLD
        # Back in step, on one more group.
        zero, one, two = clients
        pair, other = (cast(c, (WORLD, 3, 1), ((0, 2), 0, 1)) for c in (zero, two))
        assert [outcome(one, (WORLD, 3, 1)), answer(zero, pair), answer(two, other)] == [FAT] * 3


def test_a_vote_out_of_order_is_refused_and_disturbs_nothing():
    with running() as job:
        clients = job.all_clients()
        assert outcomes(clients, (PAIR, 0, 5)) == [FAT, FAT]
        pending = cast(clients[0], (PAIR, 3, 1))
        assert answer(clients[0], pending) == VOTE_REFUSED
        assert "voted out of order" in pending.facts["reason"] and "before 5" in pending.facts["reason"]
        assert outcomes(clients, (PAIR, 5, 1)) == [FAT, FAT]


def test_a_vote_that_can_not_be_is_the_callers_error_and_nothing_is_sent(monkeypatch):
    monkeypatch.setattr(_protocol, "MAX_SPANS", 2)
    monkeypatch.setattr(_protocol, "MAX_GROUPS_PER_RANK", 4)
    with running(4) as job:
        zero, one = job.client(0), job.client(1)
        wrong = [
            ([((0, 4), 0, 1)], "rank 4 of a process group is outside a world of 4 ranks"),
            ([((1, 2), 0, 1)], "rank 0 votes on a group that it is not in"),
            ([(PAIR, 0, 1), ((0, 2), 0, 1), ((0, 3), 0, 1)], "collectives on 3 process groups of this rank"),
            ([(WORLD, 0, 1), ((0, 2, 3), 0, 1)], "rank 0 has voted on 4 process groups"),
            ([(PAIR, 0, 2**32)], "4294967295"),
        ]
        for spans, words in wrong:
            collectives = {_vocabulary.ProcessGroupId(ranks): number for ranks, _, number in spans}
            for call in (lambda s=spans: cast(zero, *s), lambda c=collectives: zero.vote(zero.resolve(c), A, 0)):
                with pytest.raises(_vocabulary.HandshakeConfigError, match=words):
                    call()
        assert zero.bytes_sent == 0
        assert outcomes([zero, one], (PAIR, 0, 1)) == [FAT, FAT]


def test_a_graph_that_meets_nobody_is_not_sent():
    with running() as job:
        client = job.client(0)
        assert cast(client, ((0,), 0, 5), (PAIR, 0, 0)) is None
        assert client.resolve({_vocabulary.ProcessGroupId((0,)): 5, _vocabulary.ProcessGroupId(PAIR): 0}) == []
        assert client.bytes_sent == 0


def test_a_group_is_declared_once_and_a_vote_is_small():
    with running(64) as job:
        client = job.client(0)
        cast(client, (range(64), 0, 1))
        before = client.bytes_sent
        cast(client, (range(64), 1, 1))
        assert client.bytes_sent - before <= 32 + 16


def play_counted(client, turns, threads):
    """Votes from several threads, of which each is counted and sent in one step. Returns how they ended."""
    pair = _vocabulary.ProcessGroupId(PAIR)
    found = set()

    def play():
        takes = client.resolve({pair: 2})
        for turn in range(turns):
            if turn % 5 == 0:
                client.record_eager(pair, 0)
            found.add(answer(client, client.vote(takes, A, 0)))

    assert together(*[play] * threads) == [None] * threads
    return found


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_votes_that_the_client_counts_are_never_out_of_order(kind):
    with running(2, kind) as job:
        zero, one = job.all_clients()
        for client in (zero, one):
            client.record_eager(_vocabulary.ProcessGroupId(PAIR), 3)
        assert together(lambda: play_counted(zero, 40, 4), lambda: play_counted(one, 40, 4)) == [{FAT}] * 2
        assert outcomes([zero, one], (PAIR, 3 + 40 * 4 * 2, 1)) == [FAT, FAT], "they stand where they should"


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_many_threads_of_one_rank_each_get_their_own_answer(kind):
    others = range(1, 7)
    with running(7, kind) as job:
        hub, *spokes = job.all_clients()

        def play(client, pair):
            digests = [A if turn % 3 else bytes([client.rank]) * 16 for turn in range(40)]
            return [outcome(client, (pair, turn, 1), digest=digest) for turn, digest in enumerate(digests)]

        results = together(
            *(lambda r=r: play(hub, (0, r)) for r in others), *(lambda c=c: play(c, (0, c.rank)) for c in spokes)
        )
    assert results == [[FAT if turn % 3 else SPLIT for turn in range(40)]] * 12


def test_a_rank_that_votes_from_two_threads_is_not_taken_for_blocked():
    """Rank 0 waits on the world in one thread, and still casts the vote on {0, 1} that rank 1 waits for in another."""
    with running(3) as job:
        zero, one, two = job.all_clients()
        first, outer = cast_and_wait(zero, (WORLD, 0, 1)), cast_and_wait(one, (PAIR, 0, 1))
        results = together(
            lambda: outcome(zero, (PAIR, 0, 1)),
            lambda: (answer(one, outer), outcome(one, (WORLD, 0, 1))),
            lambda: outcome(two, (WORLD, 0, 1)),
            lambda: answer(zero, first),
        )
        assert results == [FAT, (FAT, FAT), FAT, FAT]


def test_a_job_that_runs_for_years(monkeypatch):
    """In less than three days a busy server is past 2^32 collectives."""
    monkeypatch.setattr(_client, "GAP_WAIT_S", SOON_S)
    with running() as job:
        clients = job.all_clients()
        assert outcomes(clients, (PAIR, 2**40, 3)) == [FAT, FAT]
        assert outcomes(clients, (PAIR, 2**40 + 3, 3)) == [FAT, FAT]


def test_a_line_ends_where_the_wire_does():
    with running() as job:
        zero = job.client(0)
        group = _vocabulary.ProcessGroupId(PAIR)
        zero.line(group).position = 2**64
        with pytest.raises(_vocabulary.HandshakeConfigError, match="line ends at 18446744073709551615"):
            zero.vote(zero.resolve({group: 1}), A, 0)


# ---------------------------------------------------------------------- votes that overtake one another


def votes_in_gaps(client):
    """Notes which votes wait for others that come before them."""
    votes = set()
    in_turn = client._vote_in_turn

    def noted(counts, *arguments):
        found = in_turn(counts, *arguments)
        if found == "not yet":
            votes.add(str(counts.to_json()))
        return found

    client._vote_in_turn = noted
    return votes


def test_votes_wait_for_the_one_that_fills_the_gap(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", PATIENCE_S)
    with running() as job:
        threads, orderly = job.all_clients()
        waiting = votes_in_gaps(threads)

        def when_others_wait(number, start):
            until(lambda: len(waiting) == number)
            return outcome(threads, (PAIR, start, 1))

        results = together(
            lambda: outcome(threads, (PAIR, 2, 1)),
            lambda: when_others_wait(1, 1),
            lambda: when_others_wait(2, 0),
            lambda: [outcome(orderly, (PAIR, turn, 1)) for turn in range(3)],
        )
        assert results == [FAT, FAT, FAT, [FAT] * 3]


def test_gaps_on_several_groups_are_waited_for_once_and_believed(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", SOON_S)
    with running(3) as job:
        clients = job.all_clients()
        waiting = votes_in_gaps(clients[0])
        spans = [(PAIR, 3, 1), ((0, 2), 4, 1), (WORLD, 5, 1)]
        votes = [cast(c, *(span for span in spans if c.rank in span[0])) for c in clients]
        assert [answer(c, pending) for c, pending in zip(clients, votes, strict=True)] == [FAT] * 3
    assert len(waiting) == 1


def test_eager_collectives_that_were_recorded_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", PATIENCE_S)

    def play(client):
        standing = _vocabulary.RankCollectiveCounts()
        group = _vocabulary.ProcessGroupId(PAIR)
        found = []
        for eager in (3, 0, 2):
            standing.record_eager_collectives(group, eager)
            standing.increment_pg_collective_counts({group: 1})
            found.append(answer(client, client.vote_counted(standing, A, 0)))
        return found

    with running() as job:
        clients = job.all_clients()
        waiting = [votes_in_gaps(client) for client in clients]
        assert together(*(lambda c=c: play(c) for c in clients)) == [[FAT] * 3] * 2
        assert waiting == [set(), set()], "nobody will vote there"


def test_a_vote_that_comes_after_its_gap_was_believed_is_split(monkeypatch):
    """The other thread of rank 0 is not stopped by an error: its graph runs split, as on the ranks that it meets."""
    monkeypatch.setattr(_client, "GAP_WAIT_S", SOON_S)
    with running(3) as job:
        zero, one, two = job.all_clients()
        early, beside = cast_and_wait(one, (PAIR, 0, 1)), cast_and_wait(two, ((0, 2), 0, 1))
        second = cast(zero, (PAIR, 1, 1))
        late = cast(zero, (PAIR, 0, 1), ((0, 2), 0, 1))
        assert [answer(one, early), answer(zero, late), answer(two, beside)] == [SPLIT] * 3
        alone = cast(zero, (PAIR, 0, 1))
        assert alone.outcome == SPLIT and "rank 0's vote at [0, 1) on ranks 0-1 came more than" in alone.facts["reason"]
        assert [outcome(one, (PAIR, 1, 1)), answer(zero, second)] == [FAT, FAT]
        assert outcome(zero, (PAIR, 1, 1)) == VOTE_REFUSED, "one that was sent before is still an error"


def test_a_vote_that_waits_in_a_gap_is_split_when_a_later_one_has_given_up_the_gap(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", PATIENCE_S)
    with running() as job:
        zero, one = job.all_clients()
        waiting, in_gaps = [], votes_in_gaps(zero)
        second = threading.Thread(target=lambda: waiting.append(cast(zero, (PAIR, 1, 1))))
        second.start()
        until(lambda: in_gaps)
        monkeypatch.setattr(_client, "GAP_WAIT_S", SOON_S)
        third = cast(zero, (PAIR, 2, 1))
        second.join(PATIENCE_S)
        assert [pending.outcome for pending in waiting] == [SPLIT]
        assert [outcome(one, (PAIR, 2, 1)), answer(zero, third)] == [FAT, FAT]


def test_more_than_one_gap_is_remembered(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", SOON_S)
    with running() as job:
        zero = job.client(0)
        for start in (1, 3, 5):
            cast(zero, (PAIR, start, 1))
        assert [cast(zero, (PAIR, start, 1)).outcome for start in (2, 0, 4)] == [SPLIT] * 3


# ---------------------------------------------------------------------- calls that are cut short


class Hooked:
    """A socket, methods of which were replaced."""

    def __init__(self, sock, **methods):
        self._sock = sock
        self._methods = methods

    def __getattr__(self, name):
        return self._methods.get(name) or getattr(self._sock, name)


def failing(error):
    def fail(*arguments):
        raise error

    return fail


def cast_counted(client):
    return client.vote(client.resolve({_vocabulary.ProcessGroupId(PAIR): 1}), A, 0)


@pytest.mark.parametrize("cast_next", [cast_counted, lambda client: cast(client, (PAIR, 1, 1))])
def test_after_an_interrupted_send_nothing_more_is_sent(cast_next):
    """Half a frame may have left: what came after it would be taken for its rest."""
    with running() as job:
        zero, one = job.all_clients()
        assert outcomes([zero, one], (PAIR, 0, 1)) == [FAT, FAT]
        sock, zero._sock = zero._sock, Hooked(zero._sock, send=failing(KeyboardInterrupt()))
        theirs = cast(one, (PAIR, 1, 1))
        with pytest.raises(KeyboardInterrupt):
            cast_next(zero)
        assert answer(one, theirs) == PEER_LOST, "at once"
        zero._sock = sock
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="exception has come while a message was sent"):
            cast(zero, (PAIR, 2, 1))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("a handler's")])
def test_an_exception_once_all_has_left_is_only_that(error):
    """A handler's own OSError too: it says nothing of the connection."""
    with running() as job:
        zero, one = job.all_clients()
        assert outcomes([zero, one], (PAIR, 0, 1)) == [FAT, FAT]
        counts = {"bytes_sent": property(lambda client: 0, failing(error))}
        zero.__class__ = type("Interrupted", (_client.Client,), counts)
        with pytest.raises(type(error)):
            cast_counted(zero)
        zero.__class__ = _client.Client
        assert outcome(one, (PAIR, 1, 1)) == FAT, "the vote has left, and counts"
        assert outcomes([zero, one], (PAIR, 2, 1)) == [FAT, FAT]


def test_after_an_exception_in_the_midst_of_a_message_nothing_more_is_read():
    with running() as job:
        zero, one = job.all_clients()
        pending, theirs = cast(zero, (PAIR, 0, 1)), cast(one, (PAIR, 0, 1))
        zero._handle = failing(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            answer(zero, pending)
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="exception has come while a message was read"):
            answer(zero, pending)
        assert answer(one, theirs) == FAT
        assert outcome(one, (PAIR, 1, 1)) == PEER_LOST, "at once"


def test_a_wait_that_is_interrupted_while_another_thread_reads_leaves_no_lock_behind(monkeypatch):
    with running() as job:
        zero, one = job.all_clients()
        votes = [cast(zero, (PAIR, turn, 1)) for turn in range(2)]
        first = threading.Thread(target=lambda: answer(zero, votes[0]))
        first.start()
        until(lambda: zero._readers)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            bell = types.SimpleNamespace(get=lambda timeout: failing(KeyboardInterrupt())(), put=lambda item: None)
            patch.setattr(_client.queue, "SimpleQueue", lambda: bell)
            answer(zero, votes[1])
        assert [outcome(one, (PAIR, turn, 1)) for turn in range(2)] == [FAT, FAT]
        assert answer(zero, votes[1]) == FAT
        first.join(PATIENCE_S)
        assert not zero._readers


def test_a_connection_that_breaks_in_any_way_is_a_lost_coordinator():
    """Keepalive finds a host that is gone: ETIMEDOUT, which is no ConnectionError."""
    with running() as job:
        zero, one = job.all_clients()
        assert outcomes([zero, one], (PAIR, 0, 1)) == [FAT, FAT]
        zero._sock = Hooked(zero._sock, recv=failing(OSError(errno.ETIMEDOUT, "Connection timed out")))
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="Connection timed out"):
            outcome(zero, (PAIR, 1, 1))


def test_an_exception_while_a_verdict_is_read_leaves_the_connection_in_order():
    """A signal handler's exception, such as KeyboardInterrupt, comes out of whatever call the thread is in."""
    with running() as job:
        zero, one = job.all_clients()
        assert outcomes([zero, one], (PAIR, 0, 1)) == [FAT, FAT]
        sock, zero._sock = zero._sock, Hooked(zero._sock, recv=failing(KeyboardInterrupt()))
        pending = cast(zero, (PAIR, 1, 1))
        with pytest.raises(KeyboardInterrupt):
            answer(zero, pending)
        zero._sock = sock
        assert [outcome(one, (PAIR, 1, 1)), answer(zero, pending)] == [FAT, FAT]
        theirs = cast(one, (PAIR, 2, 1))
        assert [outcome(zero, (PAIR, 2, 1)), answer(one, theirs)] == [FAT, FAT]


# ---------------------------------------------------------------------- waiting


def test_timeout_names_the_missing_and_the_latecomer_has_the_same_outcome():
    with running(3, timeout_s=0.15) as job:
        zero, one = job.client(0), job.client(1)
        for client, pending in [(client, cast(client, (WORLD, 0, 1))) for client in (zero, one)]:
            assert answer(client, pending) == TIMEOUT
            assert "rank 2 at [0, 1) on ranks 0-2 (ranks 0-1 voted)" in pending.facts["reason"]
            assert "rank 2 has neither connected nor voted yet" in pending.facts["reason"]
            assert _protocol.ranks_of(pending.facts["ranks"]) == (2,)
        assert outcome(job.client(2), (WORLD, 0, 1)) == TIMEOUT


def test_a_rank_has_a_timeout_of_its_own():
    with running(timeout_s=1000.0) as job:
        assert outcome(job.client(0, timeout_s=0.05), (PAIR, 0, 1)) == TIMEOUT


@pytest.mark.parametrize("timeout_s", ["9" * 400, "-1", "0", "NaN", "Infinity", '"soon"', "null", "[1]"])
def test_a_senseless_timeout_harms_nobody(timeout_s):
    with running() as job, Peer(job.port) as peer:
        facts = f'{{"rank": 1, "world_size": 2, "session": "s", "timeout_s": {timeout_s}}}'.encode()
        assert isinstance(peer.hello_of(facts, "secret", "s"), Welcome)
        zero = job.client(0)
        pending = cast(zero, (PAIR, 0, 1))
        peer.send(_protocol.Group(0, PAIR), _protocol.encode_vote(1, 0, A, (0, 0, 1)))
        assert peer.receive() == _protocol.Verdict(1, FAT)
        assert answer(zero, pending) == FAT


def test_a_timeout_of_years_harms_nobody():
    with running(3, timeout_s=1e9) as job:
        zero, one, two = job.all_clients()
        pending = cast_and_wait(zero, (WORLD, 0, 1))
        assert outcomes([one, two], ((1, 2), 0, 1)) == [FAT, FAT], "the loop has slept while a vote waits"
        assert outcomes([one, two], (WORLD, 0, 1)) == [FAT, FAT] and answer(zero, pending) == FAT


def test_a_rank_that_waits_is_told_whom_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(_consensus, "NOTICE_AT_S", (0.01, 0.02, 0.03, 0.04))
    monkeypatch.setattr(_consensus, "NOTICE_INTERVAL_S", 0.01)
    monkeypatch.setattr(_consensus, "CYCLE_GRACE_S", 0.01)  # a vote is not looked at before
    with running(3) as job:
        zero, one = job.client(0), job.client(1)
        pending = cast(zero, (WORLD, 0, 1))
        waiting = threading.Thread(target=lambda: answer(zero, pending))
        waiting.start()
        until(lambda: len(caplog.records) >= 6)
        two = job.client(2)
        assert outcomes([one, two], (WORLD, 0, 1)) == [FAT, FAT]
        waiting.join(PATIENCE_S)
        assert pending.outcome == FAT
    text = caplog.records[0].getMessage()
    assert "rank 0 still waits: waiting for ranks 1-2 at [0, 1) on ranks 0-2 (rank 0 voted)" in text
    assert "rank 1 (h:1) has not voted yet; rank 2 has neither connected nor voted yet" in text


def test_silence_on_success(caplog):
    with caplog.at_level(logging.INFO), running() as job:
        assert outcomes(job.all_clients(), (PAIR, 0, 1)) == [FAT, FAT]
    assert caplog.records == []


def test_a_lost_rank_answers_those_who_wait_for_it_and_may_come_back(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", SOON_S)
    with running(3, timeout_s=1e6) as job:
        zero = job.client(0)
        with job.peer(2):
            pending = cast_and_wait(zero, (WORLD, 0, 1))
        assert answer(zero, pending) == PEER_LOST
        assert "rank 2 (somewhere:12345), its process exited" in pending.facts["reason"]
        assert _protocol.ranks_of(pending.facts["ranks"]) == (2,)
        assert outcome(zero, (WORLD, 1, 1)) == PEER_LOST, "also whoever votes later"
        one = job.client(1)
        assert outcomes([zero, one], (PAIR, 0, 1)) == [FAT, FAT]
        two = job.client(2)
        assert outcomes([zero, one, two], (WORLD, 2, 1)) == [FAT] * 3


def test_a_rank_that_says_goodbye_gives_its_reason():
    with running() as job:
        zero, one = job.all_clients()
        pending = cast_and_wait(zero, (PAIR, 0, 1))
        one.close("done")
        assert answer(zero, pending) == PEER_LOST and "rank 1 closed its handshake" in pending.facts["reason"]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_the_end_of_the_coordinator_answers_everybody(kind):
    with running(3, kind) as job:
        clients = job.all_clients()
        votes = [cast(client, (WORLD, 0, 1)) for client in clients[:2]]
        job.coordinator.close()
        job.coordinator.close()
        for client, pending in zip(clients, votes, strict=False):
            with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
                answer(client, pending)
            assert "the coordinator (rank 0, here:1, its child process " in str(error.value)
            assert "rank 0, which coordinates, closed the handshake or exited" in str(error.value)
            assert error.value.ranks == (0,)
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="closed the handshake or exited"):
            outcome(clients[2], (WORLD, 0, 1))
        socket.create_server(("127.0.0.1", job.port)).close()  # nobody listens there any more


def test_what_the_coordinator_said_last_tells_more_than_a_send_that_fails():
    with running() as job:
        zero = job.client(0)
        job.coordinator.close()
        zero._sock = Hooked(zero._sock, send=failing(BrokenPipeError(errno.EPIPE, "Broken pipe")))
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="closed the handshake or exited"):
            cast(zero, (PAIR, 0, 1))


def test_closing_wakes_the_threads_that_wait():
    with running(3) as job:
        client = job.client(0)
        votes = [cast(client, (group, 0, 1)) for group in (PAIR, (0, 2), WORLD)]

        def close():
            until(lambda: len(client._readers) == 3)
            client.close("the handshake was closed")
            client.close("the handshake was closed")

        *errors, nothing = together(*(lambda p=p: answer(client, p) for p in votes), close)
        assert nothing is None
        for error in errors:
            assert type(error) is _vocabulary.HandshakeError and "rank 0: the handshake was closed" in str(error)


def waits_of_others(client, monkeypatch):
    """Notes each time that a thread begins to wait for another that reads; and it waits until it is woken."""
    waits = []
    is_first = client._is_first

    def noted(reader):
        if client._readers[0].thread != reader.thread:
            waits.append(reader)
        return is_first(reader)

    monkeypatch.setattr(client, "_is_first", noted)
    monkeypatch.setattr(_client, "LOOK_UP_S", PATIENCE_S)
    return waits


@pytest.mark.parametrize("what", ["its verdict came", "its mail came", "the other was interrupted"])
def test_a_thread_that_waits_while_another_reads_is_woken(monkeypatch, what):
    it_waits, in_read = threading.Event(), threading.Event()
    last = {"its mail came": _protocol.encode(_protocol.Extra(PLANS, 2, 1, b"mail"))}

    def serve(sock):
        welcoming(at_vote=[_protocol.encode_verdict(2, SPLIT, PLAN)] if what in last else [b""])(sock)
        it_waits.wait(PATIENCE_S)
        sock.sendall(last.get(what, _protocol.encode_verdict(2, FAT)))

    with client_of(serve) as client:
        unanswered, pending = cast(client, (PAIR, 0, 1)), cast(client, (PAIR, 1, 1))
        if what in last:
            assert answer(client, pending) == SPLIT
        waits = waits_of_others(client, monkeypatch)
        sock = client._sock

        def read(size):
            if not in_read.is_set():
                in_read.set()
                if what == "the other was interrupted":
                    it_waits.wait(PATIENCE_S)
                    raise KeyboardInterrupt
            return sock.recv(size)

        def wait():
            in_read.wait(PATIENCE_S)
            channel = _client.Channel(client, pending, PLANS, PATIENCE_S)
            found = channel.receive() if what in last else answer(client, pending)
            client.close("done")
            return found

        client._sock = Hooked(sock, recv=read)
        _, found, _ = together(
            lambda: answer(client, unanswered), wait, lambda: until(lambda: waits) and it_waits.set()
        )
        assert found == ((1, b"mail") if what in last else FAT)


def test_a_thread_whose_answer_came_as_it_began_to_read_does_not_read():
    """Another thread has read it between this one's look and its turn; it would wait for what nobody sends."""
    with client_of(welcoming()) as client:
        pending = cast(client, (PAIR, 0, 1))

        def is_first(reader):
            pending.outcome = FAT
            return True

        client._is_first = is_first
        client._sock = Hooked(client._sock, recv=failing(AssertionError("it reads")))
        assert answer(client, pending) == FAT


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_pause_longer_than_any_timeout_costs_nobody_an_answer_that_is_there(monkeypatch, is_answered):
    """A process that was stopped, or a host that slept, goes on with several threads past their time."""
    clock = [1000.0]
    in_read, goes_on = threading.Event(), threading.Event()
    with running(3) as job:
        zero, *others = job.all_clients()
        votes = [cast(zero, (group, 0, 1)) for group in (PAIR, (0, 2), WORLD)]
        waits = waits_of_others(zero, monkeypatch)
        look_up_often(zero)
        sock = zero._sock

        def read(size):
            if in_read.is_set():
                return sock.recv(size)
            in_read.set()
            goes_on.wait(PATIENCE_S)
            raise BlockingIOError  # it began before the pause

        zero._sock = Hooked(sock, recv=read)
        monkeypatch.setattr(_client, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

        def wait(pending):
            zero.wait(pending, 1001.0)
            return pending.outcome

        def pause():
            until(lambda: in_read.is_set() and len(waits) == 2)
            if is_answered:
                for other, group in zip(others, (PAIR, (0, 2)), strict=True):
                    cast(other, (group, 0, 1))
                    cast(other, (WORLD, 0, 1))
                until(lambda: len(sock.recv(65536, socket.MSG_PEEK)) == 3 * len(_protocol.encode_verdict(1, FAT)))
            clock[0] += 3600.0
            zero._wake_others()
            until(lambda: len(waits) == 4)
            goes_on.set()

        *results, nothing = together(*(lambda p=p: wait(p) for p in votes), pause)
    assert nothing is None
    if is_answered:
        assert results == [FAT] * 3
    else:
        assert [type(result) for result in results] == [_vocabulary.HandshakePeerLostError] * 3


# ---------------------------------------------------------------------- what follows a split


class Rounds:
    """An extra that notes what it is told, and says a word to each rank of a plan."""

    def __init__(self):
        self.told = []
        self.replies = []

    def settled(self, votes, now):
        self.told.append(("settled", {vote.rank: (vote.number, vote.flags, vote.digest) for vote in votes}))
        return [(vote.rank, vote.number, 1, b"start") for vote in votes]

    def take(self, *arguments):
        self.told.append(("take", *arguments[:-1]))
        if isinstance(self.replies, Exception):
            raise self.replies
        return self.replies

    def drop_rank(self, rank, now):
        self.told.append(("drop_rank", rank))
        return []

    def next_deadline(self):
        return None

    def close(self):
        return []


@contextlib.contextmanager
def looking_for_a_plan():
    """Ranks 0 and 1 wait in the world with different graphs, both partial. Gives the extra, these ranks, their votes,
    and a peer that is rank 2."""
    with running(3) as job:
        rounds = job.server._extras[PLANS] = Rounds()
        zero, one = job.client(0), job.client(1)
        peer = job.peer(2, WORLD)
        votes = [cast(c, (WORLD, 0, 1), digest=d, flags=PARTIAL) for c, d in ((zero, A), (one, B))]
        assert outcomes([zero, one], (PAIR, 0, 1)) == [FAT, FAT]
        assert [pending.outcome for pending in votes] == [0, 0], "held until all have voted"
        with peer:
            yield rounds, [zero, one], votes, peer


def test_partial_votes_are_held_until_all_have_voted_and_frames_of_extras_come_ahead_of_verdicts():
    with looking_for_a_plan() as (rounds, clients, votes, peer):
        peer.send(_protocol.encode_vote(7, PARTIAL, A, (0, 0, 1)))
        assert peer.receive() == _protocol.Extra(PLANS, 7, 1, b"start")
        detail, verdict = peer.receive(), peer.receive()
        assert "fingerprints differ at [0, 1) on ranks 0-2" in detail.facts["reason"]
        assert verdict == _protocol.Verdict(7, SPLIT, PLAN)  # rank 0 has the same graph, and speaks for both
        channels = []
        for client, pending in zip(clients, votes, strict=True):
            assert answer(client, pending) == SPLIT and pending.flags == PLAN | SPEAKS
            channels.append(_client.Channel(client, pending, PLANS, PATIENCE_S))
            assert channels[-1].receive() == (1, b"start")
        number = votes[0].number
        assert rounds.told == [
            ("settled", {0: (number, PARTIAL, A), 1: (votes[1].number, PARTIAL, B), 2: (7, PARTIAL, A)})
        ]

        # They go on talking, each about its own vote. What comes while nobody waits for it is kept.
        rounds.replies = [(1, votes[1].number, 2, b"first"), (1, votes[1].number, 3, b""), (2, 7, 2, b"to 2")]
        channels[0].send(9, b"\x00payload")
        assert peer.receive() == _protocol.Extra(PLANS, 7, 2, b"to 2")
        assert rounds.told[1:] == [("take", 0, number, 9, b"\x00payload")]
        assert outcomes(clients, (PAIR, 1, 1)) == [FAT, FAT]
        assert [channels[1].receive(), channels[1].receive()] == [(2, b"first"), (3, b"")]

        # After its end, and about a vote that is not known, what is still said is dropped.
        channels[1].close()
        rounds.replies = [(1, votes[1].number, 4, b"late"), (1, 999, 4, b"never"), (1, 0, _coordinator.LOG, b"to log")]
        channels[0].send(9, b"")
        assert outcomes(clients, (PAIR, 2, 1)) == [FAT, FAT]
        assert not clients[1]._votes


def test_one_vote_that_is_not_partial_is_enough_for_an_ordinary_split():
    with looking_for_a_plan() as (rounds, clients, votes, peer):
        peer.send(_protocol.encode_vote(7, 0, A, (0, 0, 1)))
        assert isinstance(peer.receive(), _protocol.Detail) and peer.receive() == _protocol.Verdict(7, SPLIT)
        for client, pending in zip(clients, votes, strict=True):
            assert answer(client, pending) == SPLIT and pending.flags == SPEAKS and not client._votes
        assert rounds.told == []


@pytest.mark.parametrize("when", ["before its verdict", "after its verdict"])
def test_a_ticket_that_is_thrown_away_calls_the_plan_off(when):
    """Ahead of this rank's next vote: the others wait for it."""
    with looking_for_a_plan() as (rounds, (zero, one), (pending, other), peer):
        if when == "before its verdict":
            zero.give_up(pending)
        peer.send(_protocol.encode_vote(7, PARTIAL, A, (0, 0, 1)))
        assert answer(one, other) == SPLIT
        assert rounds.told.pop(0)[0] == "settled"
        if when == "after its verdict":
            assert answer(zero, pending) == SPLIT
            zero.give_up(pending)
        else:
            assert answer(zero, pending) == SPLIT  # as another vote of this rank's would read it
        assert rounds.told == [] and outcomes([zero, one], (PAIR, 1, 1)) == [FAT, FAT]
        assert rounds.told == [("take", 0, pending.number, _protocol.CALL_OFF, b"its ticket was thrown away")]
        assert not zero._votes
        one.give_up(other)


def test_what_extras_say_comes_whole_and_in_order_while_another_thread_reads():
    payloads = [b"%d" % turn for turn in range(1000)]

    def serve(sock):
        welcoming(at_vote=[_protocol.encode_verdict(1, SPLIT, PLAN)])(sock)
        for payload in payloads:
            sock.sendall(_protocol.encode(_protocol.Extra(PLANS, 1, 1, payload)))

    with client_of(serve) as client:
        pending, unanswered = cast(client, (PAIR, 0, 1)), cast(client, (PAIR, 1, 1))
        assert answer(client, pending) == SPLIT
        channel = _client.Channel(client, pending, PLANS, PATIENCE_S)

        def receive_all():
            try:
                return [channel.receive() for _ in payloads]
            finally:
                client.close("done")

        found, _ = together(receive_all, lambda: answer(client, unanswered))
    assert found == [(1, payload) for payload in payloads]


def test_who_talks_about_a_plan_hears_of_the_end_of_the_coordinator():
    with looking_for_a_plan() as (rounds, (zero, _), (pending, _), peer):
        peer.send(_protocol.encode_vote(7, PARTIAL, A, (0, 0, 1)))
        assert answer(zero, pending) == SPLIT
        channel = _client.Channel(zero, pending, PLANS, PATIENCE_S)
        assert channel.receive() == (1, b"start")
        peer.sock.close()
        until(lambda: ("drop_rank", 2) in rounds.told, "the extra to hear of a lost rank")

        def end():
            rounds.replies = RuntimeError("an extra that fails")
            _client.Channel(zero, pending, PLANS, PATIENCE_S).send(1, b"")

        error, _ = together(channel.receive, end)
        assert isinstance(error, _vocabulary.HandshakePeerLostError) and "an extra that fails" in str(error)


# ---------------------------------------------------------------------- peers that break the protocol


def raw_group(*runs):
    body = struct.pack("!I", 1) + b"".join(struct.pack("!III", *run) for run in runs)
    return struct.pack("!IB", len(body) + 1, _protocol.GROUP) + body


BREACHES = {
    "random bytes": bytes(range(255, -1, -1)),
    "a frame without end": struct.pack("!IB", 2**32 - 1, _protocol.EXTRA),
    "a second hello": _protocol.encode(_protocol.Hello(bytes(16), bytes(16), b'{"rank":1}')),
    "a verdict": _protocol.encode_verdict(1, FAT),
    "a group again": _protocol.encode(_protocol.Group(0, PAIR)),
    "a group of others": _protocol.encode(_protocol.Group(1, (0, 2))),
    "a group beyond the world": _protocol.encode(_protocol.Group(1, (1, 3))),
    "a group without ranks": _protocol.encode(_protocol.Group(1, ())),
    "a group with a rank twice": raw_group((1, 1, 1), (0, 2, 1)),
    "a vote on an unknown group": _protocol.encode_vote(1, 0, A, (77, 0, 1)),
    "a vote on nothing": _protocol.encode_vote(1, 0, A, (0, 3, 0)),
    "a vote twice on a group": _protocol.encode_vote(1, 0, A, (0, 0, 1, 0, 1, 1)),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_rank_that_breaks_the_protocol_is_told_so_and_lost_alone(name):
    with running(3) as job:
        zero, two = job.client(0), job.client(2)
        with job.peer(1, PAIR) as peer:
            pending = cast_and_wait(zero, (PAIR, 0, 1))
            peer.send(BREACHES[name])
            goodbye = peer.receive()
            assert isinstance(goodbye, _protocol.Goodbye) and "protocol error" in goodbye.reason
            assert peer.receive() is None
        assert answer(zero, pending) == PEER_LOST
        assert "rank 1 (somewhere:12345), it broke the protocol" in pending.facts["reason"]
        assert outcomes([zero, two], ((0, 2), 0, 1)) == [FAT, FAT]


def test_votes_may_come_in_pieces_and_in_heaps_and_about_extras_that_are_not_there():
    with running() as job, job.peer(1, PAIR) as peer:
        zero = job.client(0)
        pending = cast(zero, (PAIR, 0, 1))
        for byte in _protocol.encode(_protocol.Extra(77, 1, 1, b"?")) + _protocol.encode_vote(1, 0, A, (0, 0, 1)):
            peer.send(bytes([byte]))
        assert [peer.receive(), answer(zero, pending)] == [_protocol.Verdict(1, FAT), FAT]
        votes = [cast(zero, (PAIR, turn, 1)) for turn in range(1, 500)]
        peer.send(*(_protocol.encode_vote(turn, 0, A, (0, turn, 1)) for turn in range(1, 500)))
        for turn, pending in enumerate(votes, 1):
            assert [peer.receive(), answer(zero, pending)] == [_protocol.Verdict(turn, FAT), FAT]


def test_votes_under_way_are_bounded():
    with running() as job, job.peer(1, PAIR) as peer:
        limit = _consensus.MAX_VOTES_UNDER_WAY
        peer.send(*(_protocol.encode_vote(turn, 0, A, (0, turn, 1)) for turn in range(limit + 1)))
        detail, verdict = peer.receive(), peer.receive()
        assert isinstance(detail, _protocol.Detail) and str(limit) in detail.facts["reason"]
        assert verdict == _protocol.Verdict(limit, VOTE_REFUSED)


def test_groups_of_a_rank_are_bounded(monkeypatch):
    monkeypatch.setattr(_protocol, "MAX_GROUPS_PER_RANK", 2)
    with running() as job, job.peer(1, PAIR, PAIR, PAIR) as peer:
        assert "group number 2 can't be declared" in peer.receive().reason


def test_a_rank_that_reads_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr(_coordinator, "MAX_UNSENT_BYTES", 1000)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that what the kernel keeps is soon full
    with running(listener=listener) as job:
        zero = job.client(0)
        with job.peer(1, PAIR) as peer:
            peer.send(_protocol.encode_vote(1, 0, B, (0, 5, 1)))  # from now on the others are out of order

            def send_without_end():
                with contextlib.suppress(OSError):
                    while True:
                        peer.send(*[_protocol.encode_vote(7, 0, A, (0, 0, 1))] * 100)

            def vote():
                zero.record_eager(_vocabulary.ProcessGroupId(PAIR), 6)
                pending = cast_counted(zero)
                try:
                    return answer(zero, pending), pending.facts["reason"]
                finally:
                    with contextlib.suppress(OSError):
                        peer.sock.shutdown(socket.SHUT_RDWR)  # ends the other thread

            _, (lost, reason) = together(send_without_end, vote)
            assert lost == PEER_LOST and "it does not read what is sent to it" in reason


# ---------------------------------------------------------------------- strangers


def test_strangers_who_say_nothing_are_closed(monkeypatch):
    monkeypatch.setattr(_coordinator, "HELLO_WITHIN_S", 0.05)
    with running() as job, Peer(job.port) as silent, Peer(job.port) as slow:
        slow.send(_protocol.encode(_protocol.Hello(bytes(16), bytes(16), b"{}"))[:10])
        for stranger in (silent, slow):
            assert isinstance(stranger.receive(), _protocol.Greeting)
            assert stranger.receive() is None
        assert job.client(1)


def test_a_stranger_is_closed_at_the_first_bytes_that_are_not_a_hello(monkeypatch):
    monkeypatch.setattr(_coordinator, "HELLO_WITHIN_S", 1e6)
    frames = [_protocol.Group(0, tuple(range(0, 2**16, 3))), _protocol.Extra(PLANS, 1, 1, bytes(1000))]
    for data in [*map(_protocol.encode, frames), struct.pack("!IB", 2**24, _protocol.HELLO), b"GET /"]:
        with running(2**16) as job, Peer(job.port) as stranger:
            assert isinstance(stranger.receive(), _protocol.Greeting)
            stranger.send(data[:5])
            assert stranger.receive() is None


def test_strangers_are_bounded_and_the_oldest_make_room(monkeypatch):
    monkeypatch.setattr(_coordinator, "MAX_STRANGERS", 3)
    monkeypatch.setattr(_coordinator, "HELLO_WITHIN_S", 1e6)
    with running() as job, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(Peer(job.port)) for _ in range(3 + job.world_size)]
        for stranger in strangers:
            assert isinstance(stranger.receive(), _protocol.Greeting)
        assert job.client(1)
        strangers.append(stack.enter_context(Peer(job.port)))
        assert isinstance(strangers[-1].receive(), _protocol.Greeting)
        assert strangers[0].receive() is None, "one is enough: rank 1 is no stranger any more"
        for stranger in strangers[1:]:
            stranger.send(b"no hello at all")
            assert stranger.receive() is None


class Flooded:
    """A listener to which somebody connects, and closes, faster than anybody can accept."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.always_readable, self.other_end = socket.socketpair()
        self.other_end.send(b"x")
        self.num_accepted = 0

    def __getattr__(self, name):
        return getattr(self.listener, name)

    def fileno(self):
        return self.always_readable.fileno()

    def accept(self):
        self.num_accepted += 1
        with contextlib.suppress(BlockingIOError):
            return self.listener.accept()
        theirs, ours = socket.socketpair()
        theirs.close()
        return ours, ("192.0.2.1", 1)

    def close(self):
        for sock in (self.listener, self.always_readable, self.other_end):
            sock.close()


def test_a_process_that_connects_and_closes_without_end_stops_neither_votes_nor_timers():
    flood = Flooded()
    with running(3, listener=flood) as job:
        zero, one = job.client(0), job.client(1, timeout_s=0.05)
        assert outcomes([zero, one], (PAIR, 0, 1)) == [FAT, FAT]
        assert outcome(one, (WORLD, 0, 1)) == TIMEOUT
        assert outcomes([zero, one], (PAIR, 1, 1)) == [FAT, FAT]
        assert len(job.server._connections) <= 3 + _coordinator.MAX_STRANGERS + job.world_size
    assert flood.num_accepted > 100


# ---------------------------------------------------------------------- who is let in


def refusal(job, rank, secret="secret", **facts):
    with Peer(job.port) as peer:
        said = peer.hello(rank, secret, **{"world_size": job.world_size, "session": "s", **facts})
        assert isinstance(said, Refused), said
        assert peer.receive() is None
        return said.reason


def test_refusals_say_what_differs_and_whose_it_is():
    with running() as job:
        reason = refusal(job, 1, "guessed")
        assert "it says that it is rank 1, but does not know the secret of the coordinator (rank 0, here:1)" in reason
        assert "TORCH_TPU_INTERNAL_HANDSHAKE_SECRET" in reason
        reason = refusal(job, 1, session="other")
        assert "session differs: other on rank 1 (somewhere:12345), s on the coordinator (rank 0, here:1)" in reason
        reason = refusal(job, 1, world_size=3)
        assert "world size differs: 3 on rank 1" in reason and "2 on the coordinator" in reason
        for rank in (2, -1, "1", 1.0, True, None, [1], {"a": 1}):
            assert "outside the world of 2 ranks" in refusal(job, rank)
        job.client(1)
        reason = refusal(job, 1)
        assert "two processes say that they are rank 1: h:1, which is connected, and somewhere:12345" in reason


def test_a_stranger_can_not_write_lines_of_its_own_into_logs(caplog):
    with running(timeout_s=0.15) as job:
        zero = job.client(0)
        refusal(job, 1, world_size=3, host="evil\nhandshake: all is well", pid="\x1b[2J")
        pending = cast(zero, (PAIR, 0, 1))
        assert answer(zero, pending) == TIMEOUT and "rank 1 (evil" in pending.facts["reason"]
        for text in [pending.facts["reason"], *(record.getMessage() for record in caplog.records)]:
            assert text.isprintable()


@pytest.mark.parametrize("facts", [b"[1]", b"{", b"\xff", b"[" * 4000, b'{"a":' + b"9" * 4080 + b"}"])
def test_a_hello_that_is_not_an_object_ends_that_connection_alone(facts):
    with running() as job, Peer(job.port) as peer:
        assert not isinstance(peer.hello_of(facts, "secret"), Welcome)
        assert outcomes(job.all_clients(), (PAIR, 0, 1)) == [FAT, FAT]


def test_a_refused_client_gets_the_reason_and_the_coordinators_rank_logs_it(caplog):
    with running() as job:
        with pytest.raises(_vocabulary.HandshakeProtocolError, match=r"rank 5 was refused: .* outside the world of 2"):
            job.client(5)
        one = job.client(1)
        with pytest.raises(_vocabulary.HandshakeProtocolError, match="two processes say that they are rank 1"):
            job.client(1)
        assert outcomes([job.client(0), one], (PAIR, 0, 1)) == [FAT, FAT]
    twins = "two processes say that they are rank 1: h:1, which is connected"
    of_coordinator = "handshake: coordinator: a connection from 127.0.0.1 was refused: "
    logged = sorted(record.getMessage() for record in caplog.records)
    assert len(logged) == 3
    assert logged[0].startswith(f"{of_coordinator}rank 5 (h:5) is outside the world")
    assert logged[1].startswith(f"{of_coordinator}{twins}")
    assert logged[2].startswith(f"handshake: {twins}"), "rank 1 is told too"


# ---------------------------------------------------------------------- what a rank finds instead of a coordinator


@contextlib.contextmanager
def listening(serve, listener=None):
    """A server that treats each connection with `serve(socket)`. Gives its port."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
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
        for accepted in open_sockets:
            with contextlib.suppress(OSError):
                accepted.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
        for accepted in open_sockets:
            accepted.close()


GREETING = _protocol.encode(_protocol.Greeting(_protocol.MAGIC, _protocol.VERSION, bytes(16)))
COORDINATOR = {"rank": 0, "world_size": 2, "host": "h", "pid": 7}
ANSWER = _protocol.encode(_protocol.Answer(bytes(16), b"{}"))
OTHER_MAGIC = _protocol.encode(_protocol.Greeting(b"TPU-XX\r\n", _protocol.VERSION, bytes(16)))
BANNERS = [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(range(64)), OTHER_MAGIC, GREETING * 2]
BANNER_NAMES = ["ssh", "http", "other bytes", "other magic", "two greetings"]


@pytest.mark.parametrize("banner", BANNERS, ids=BANNER_NAMES)
def test_somebody_elses_server(banner):
    with listening(lambda sock: sock.sendall(banner)) as port:
        with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
            connect(port, within_s=0.1)
        assert f"127.0.0.1 port {port}: what listens there is not a coordinator" in str(error.value)
        assert "TORCH_TPU_INTERNAL_HANDSHAKE_PORT" in str(error.value)


def other_job(sock):
    """A coordinator of a job with another secret, which lets in anybody."""
    let_in(sock, COORDINATOR, secret="another")


def mirror(sock):
    """A stranger who says what it hears, and so proves what the rank has proved."""
    sock.sendall(GREETING)
    decoder = _protocol.Decoder(_protocol.FROM_STRANGER)
    [hello] = decoder.feed(sock.recv(65536))
    sock.sendall(_protocol.encode(_protocol.Answer(hello.proof, hello.facts)))


def refuses(sock):
    """A stranger who has its own ideas of what a rank should do."""
    sock.sendall(GREETING)
    sock.recv(65536)
    sock.sendall(_protocol.encode(_protocol.Answer(bytes(16), b'{"refused": "call this number"}')))


def speaks_first(sock):
    sock.sendall(BANNERS[0])


def says_nothing(sock):
    pass


@pytest.mark.parametrize("stranger", [speaks_first, says_nothing, other_job, mirror, refuses])
def test_a_stranger_at_one_address_does_not_hide_the_coordinator_at_the_next(stranger):
    with running() as job:
        try:
            listener = socket.create_server(("127.0.0.2", job.port))
        except OSError:
            pytest.skip("this host has one loopback address only")
        with listening(stranger, listener):
            started = time.monotonic()
            client = connect(job.port, hosts=("127.0.0.2", "127.0.0.1"))
            assert time.monotonic() - started < 2.0
        assert client.coordinator["host"] == "here"
        client.close("done")


@pytest.mark.parametrize("stranger", [other_job, mirror, refuses])
def test_what_a_coordinator_says_that_does_not_know_the_secret_is_believed_by_nobody(stranger, caplog):
    with listening(stranger) as port:
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="the coordinator there is another job's") as error:
            connect(port, within_s=0.2)
    assert "number" not in str(error.value) + caplog.text


def test_a_recorded_conversation_is_worth_nothing():
    said = []
    with running() as job, Peer(job.port) as honest, Peer(job.port) as replaying:
        honest.send = lambda hello: said.append(hello) or Peer.send(honest, hello)
        assert isinstance(honest.hello(1, "secret", world_size=2, session="s"), Welcome)
        replaying.receive()
        replaying.send(said[0])
        answer = replaying.receive()
        assert "refused" in _protocol.read_facts(answer.facts)
        assert b"does not know the secret" in answer.facts


def test_an_address_of_an_earlier_attempt_is_left_for_the_right_one():
    """The job's store holds it until the coordinator of this attempt has published itself."""
    with running() as job, listening(other_job) as stale, socket.create_server(("127.0.0.1", 0)) as taken:
        dead = taken.getsockname()[1]
        taken.close()
        published = iter([None, dead, stale, stale])
        endpoint = _rendezvous.Endpoint(("127.0.0.1",), job.port, "secret", "s")

        def find():
            port = next(published, job.port)
            if port is None:
                raise LookupError("nobody has published itself")
            return endpoint._replace(port=port)

        client = connect(job.port, find=find)
        assert client.coordinator["host"] == "here"
        client.close("done")


def test_a_search_that_fails_says_what_happened_at_each_address():
    with listening(other_job) as port:
        hosts = ("127.0.0.1", "no-such-host.invalid", "127.0.0.3")
        with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
            connect(port, within_s=0.2, hosts=hosts)
    text = str(error.value)
    assert f"127.0.0.1 port {port}: the coordinator there is another job's" in text
    assert "no-such-host.invalid: " in text
    assert f"127.0.0.3 port {port}: Connection refused" in text


def test_a_long_search_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(_client, "FIRST_NOTICE_S", 0.1)
    monkeypatch.setattr(_client, "NOTICE_FACTOR", 1000)

    def find():
        raise LookupError("it is not published")

    with pytest.raises(_vocabulary.HandshakePeerLostError, match="the job's store: it is not published"):
        connect(1, within_s=0.4, find=find)
    assert [record.getMessage() for record in caplog.records] == [
        "handshake: rank 1 still looks for the coordinator: the job's store: it is not published"
    ]


def test_a_coordinator_of_another_version_is_known_by_its_greeting():
    other = _protocol.encode(_protocol.Greeting(_protocol.MAGIC, _protocol.VERSION + 1, bytes(16), b"and more"))
    with listening(lambda sock: sock.sendall(other)) as port:
        with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
            connect(port, within_s=0.1)
        text = str(error.value)
        assert f"speaks version {_protocol.VERSION + 1} of the handshake protocol" in text
        assert f"rank 1 version {_protocol.VERSION}:" in text
        assert "install the same release on all hosts" in text


def test_nobody_is_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
        connect(port, within_s=0.1)
    assert "rank 1 found no handshake coordinator within 0.1 s" in str(error.value)
    assert f"127.0.0.1 port {port}: Connection refused" in str(error.value)
    assert "MASTER_ADDR" in str(error.value)
    assert error.value.ranks == (0,) and error.value.seconds == 0.1


@pytest.mark.parametrize("serve", [lambda sock: None, lambda sock: sock.close()], ids=["silent", "closes"])
def test_nobody_answers(serve):
    with listening(serve) as port:
        with pytest.raises(_vocabulary.HandshakePeerLostError, match=f"127.0.0.1 port {port}"):
            connect(port, within_s=0.1)


def test_a_name_that_does_not_resolve():
    with pytest.raises(_vocabulary.HandshakePeerLostError, match=r"no-such-host\.invalid"):
        connect(1, within_s=0.05, hosts=("no-such-host.invalid",))


def test_a_coordinator_that_starts_late_is_found():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tried = threading.Event()
    endpoint = _rendezvous.Endpoint(("127.0.0.1",), port, "secret", "s")
    rounds = iter(range(3))

    def find():
        if next(rounds, None) is None:
            tried.set()
        return endpoint

    def start():
        assert tried.wait(PATIENCE_S)
        with running(listener=socket.create_server(("127.0.0.1", port))):
            assert connected.wait(PATIENCE_S)

    connected = threading.Event()
    client, nothing = together(lambda: (connect(port, find=find), connected.set())[0], start)
    assert nothing is None and client.coordinator["host"] == "here"
    client.close("done")


def welcoming(*frames, at_vote=()):
    """Lets a rank in, with more frames behind the welcome, and others once it has voted."""

    def serve(sock):
        let_in(sock, COORDINATOR, behind=b"".join(frames))
        if at_vote:
            sock.recv(65536)
            sock.sendall(b"".join(at_vote))

    return serve


@contextlib.contextmanager
def client_of(serve):
    """A client of a coordinator that treats it with `serve(socket)`."""
    with listening(serve) as port:
        client = connect(port)
        yield client
        client.close("done")


def look_up_often(client):
    """A read ends soon."""
    client._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 10_000))


@pytest.mark.parametrize("cut", [None, 3])
def test_what_comes_in_one_segment_with_the_welcome_is_not_lost(cut, caplog):
    frames = _protocol.encode(_protocol.Notice("first")) + _protocol.encode(_protocol.Notice("second"))
    at_vote = [frames[cut:] if cut else b"", _protocol.encode_verdict(1, FAT)]
    with client_of(welcoming(frames[:cut], at_vote=at_vote)) as client:
        assert outcome(client, (PAIR, 0, 1)) == FAT
    assert [record.getMessage() for record in caplog.records] == ["handshake: first", "handshake: second"]


def test_a_goodbye_in_one_segment_with_the_welcome():
    with client_of(welcoming(_protocol.encode(_protocol.Goodbye("rank 0 has changed its mind")))) as client:
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="rank 0 has changed its mind"):
            cast(client, (PAIR, 0, 1))


BROKEN = {
    "verdict": (_protocol.encode_verdict(99, FAT), "a verdict, 1, on vote 99"),
    "nonsense": (b"nonsense and more", "a malformed frame"),
    "answer": (ANSWER, "can't come here"),
    "vote": (_protocol.encode_vote(1, 0, A, (0, 0, 1)), "can't come here"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_coordinator_that_breaks_the_protocol(name):
    data, words = BROKEN[name]
    with client_of(welcoming(at_vote=[data])) as client:
        with pytest.raises(_vocabulary.HandshakeProtocolError, match=words) as error:
            outcome(client, (PAIR, 0, 1))
        assert "the coordinator (rank 0, h:7)" in str(error.value)
        with pytest.raises(_vocabulary.HandshakeProtocolError, match=words):
            outcome(client, (PAIR, 1, 1))


@pytest.mark.parametrize("name", ["verdict", "nonsense"])
def test_a_coordinator_that_breaks_the_protocol_right_behind_its_welcome(name):
    """The rank knows no more of it than that; it is not connected, and says so again."""
    data, words = {**BROKEN, "nonsense": (b"nonsense and more", "is not a coordinator")}[name]
    with listening(welcoming(data)) as port:
        client = _client.Client(1, 2)
        endpoint = _rendezvous.Endpoint(("127.0.0.1",), port, "secret", "s")
        for _ in range(2):
            with pytest.raises(_vocabulary.HandshakeError, match=words):
                facts = {"rank": 1, "coordinator_rank": 0}
                _client.connect(client, lambda: endpoint, facts, _rendezvous.Deadline(0.1))
            assert not client.is_connected


def test_a_host_that_vanishes_is_noticed_with_bytes_under_way_too():
    """Keepalive is silent then."""
    with running() as job:
        listener = job.server._listener
        _client.prepare_socket(listener)
        client = job.client(1)
        [connection] = job.server._of_rank.values()
        for sock in (client._sock, connection.sock):
            idle, interval, count, unacknowledged_ms = (
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            )
            assert idle + interval * count <= 30 and 0 < unacknowledged_ms <= 30_000


def test_a_network_that_is_down_is_called_so():
    with running() as job:
        client = job.client(1)
        client._sock = Hooked(client._sock, recv=failing(TimeoutError(errno.ETIMEDOUT, "Connection timed out")))
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="the network between the hosts, or that host, is"):
            outcome(client, (PAIR, 0, 1))


@pytest.mark.parametrize("said", [b"[1]", b"{", b"\xff", b"[" * 4000])
def test_an_answer_that_is_not_an_object_is_another_programs(said):
    def serve(sock):
        let_in(sock, said)

    with listening(serve) as port, pytest.raises(_vocabulary.HandshakePeerLostError, match=f"port {port}: "):
        connect(port, within_s=0.1)


def test_a_coordinator_that_hangs():
    with client_of(welcoming()) as client:
        look_up_often(client)
        pending = cast(client, (PAIR, 0, 1))
        said = r"rank 1: the coordinator \(rank 0, h:7\) is lost: it has not answered in time: .* Other ranks may"
        with pytest.raises(_vocabulary.HandshakePeerLostError, match=said) as error:
            answer(client, pending, 0.05)
        assert error.value.ranks == (0,)


def test_a_wait_ends_although_something_else_arrives_all_the_time():
    def chatter(sock):
        welcoming()(sock)
        while True:
            sock.sendall(_protocol.encode(_protocol.Extra(PLANS, 99, 1, b"of no interest")))

    with client_of(chatter) as client:
        pending = cast(client, (PAIR, 0, 1))
        error, _ = together(lambda: answer(client, pending, 0.05), lambda: None)
        assert isinstance(error, _vocabulary.HandshakePeerLostError)


def test_a_coordinator_that_takes_nothing():
    """As one that was stopped by a debugger: the socket's buffers fill up, and no send may wait for ever."""
    with client_of(welcoming()) as client:
        client._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 50_000))
        pending = cast(client, (PAIR, 0, 1))
        channel = _client.Channel(client, pending, PLANS, PATIENCE_S)
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="it has taken nothing for"):
            for _ in range(10):
                channel.send(1, bytes(_protocol.MAX_PAYLOAD_BYTES))
        with pytest.raises(_vocabulary.HandshakePeerLostError):
            answer(client, pending)


def test_closing_while_another_thread_is_stuck_in_a_send(monkeypatch):
    monkeypatch.setattr(_client, "CLOSE_WITHIN_S", 0.05)
    with client_of(welcoming()) as client:
        pending = cast(client, (PAIR, 0, 1))
        sock, is_stuck = client._sock, threading.Event()

        def send(data):
            is_stuck.set()
            return sock.send(data)

        client._sock = Hooked(sock, send=send)
        channel = _client.Channel(client, pending, PLANS, PATIENCE_S)
        error, _ = together(
            lambda: channel.send(1, bytes(10 * _protocol.MAX_PAYLOAD_BYTES)),  # more than any socket keeps
            lambda: is_stuck.wait(PATIENCE_S) and client.close("the handshake was closed"),
        )
        assert type(error) is _vocabulary.HandshakeError and "the handshake was closed" in str(error)


# ---------------------------------------------------------------------- where no process can be started


@pytest.mark.parametrize("executable", ["", "/does/not/exist", "/bin/false", "/bin/true"])
def test_where_no_child_can_be_started_a_thread_takes_its_place(monkeypatch, caplog, executable):
    monkeypatch.setattr(_coordinator.sys, "executable", executable)
    with running(kind="process") as job:
        assert job.coordinator.pid is None
        assert outcomes(job.all_clients(), (PAIR, 0, 1)) == [FAT, FAT]
    assert ["runs as a thread" in record.getMessage() for record in caplog.records] == [True]
