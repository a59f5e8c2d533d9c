# SPDX-License-Identifier: Apache-2.0
"""The public face: what a compiler calls, how it is configured, and what it says when that can't work."""

import contextlib
import copy
import gc
import logging
import os
import socket
import threading

import pytest
from layout import load
from ranks import PATIENCE_S, handshake, job, request, submit_all, together, until

_client = load("_client")
_protocol = load("_protocol")
_rendezvous = load("_rendezvous")
_vocabulary = load("_vocabulary")

PAIR = (0, 1)
VARIABLES = ("STAGE", "PORT", "TIMEOUT_S", "ON_TIMEOUT", "SECRET", "DEBUG")


def variable(name):
    return f"TORCH_TPU_INTERNAL_HANDSHAKE_{name}"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No setting of the machine's own; nothing counted; nothing left open."""
    for name in (*map(variable, VARIABLES), "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(handshake, "_counts", _vocabulary.RankCollectiveCounts())
    yield
    handshake._close_all()


@pytest.fixture
def rank_0(monkeypatch):
    """This process is rank 0 of two, as its launcher's variables say. Gives the other rank's handshake."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(variable("PORT"), "0")
    monkeypatch.setenv(variable("TIMEOUT_S"), str(PATIENCE_S))
    port = handshake.Handshake().address[1]
    with handshake.Handshake(1, world_size=2, port=port, host="127.0.0.1") as other:
        yield other


class Group:
    """Another package's process group: anything with `.ranks`."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __hash__(self):
        return hash(tuple(self.ranks))

    def __eq__(self, other):
        return tuple(self.ranks) == tuple(other.ranks)


# ---------------------------------------------------------------------- handshakes


@pytest.mark.parametrize("coordinator", ["process", "thread"])
def test_fat_split_and_fat_again(coordinator, caplog):
    with job(4, coordinator=coordinator) as ranks, caplog.at_level(logging.DEBUG, "torch_tpu.handshake"):
        world = (0, 1, 2, 3)
        assert submit_all(ranks, (world, 0, 2)) == [True] * 4
        assert caplog.records == []
        assert submit_all(ranks, (world, 2, 1), fingerprints=["a", "a", "b", "a"]) == [False] * 4
        assert submit_all(ranks, (world, 3, 1)) == [True] * 4
        for h in ranks:
            stats = h.stats()
            assert (stats["handshakes"], stats["fat"], stats["split"]) == (3, 2, 1)
            assert 0 < stats["longest_wait_s"] <= stats["waited_s"] < PATIENCE_S
            assert 0 < stats["bytes_sent"] < 300
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 4 and all(record.levelno == logging.WARNING for record in caplog.records)
    for rank, fingerprint in enumerate("aaba"):
        (text,) = [text for text in texts if f"rank {rank} runs graph {fingerprint} split" in text]
        assert "fingerprints differ at [2, 3) on ranks 0-3" in text and variable("DEBUG") in text


def test_subgroups_at_the_same_time_and_without_the_coordinators_rank():
    with job(6, coordinator_rank=1) as ranks:
        groups = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3), 4: (4, 5), 5: (4, 5)}
        results = together(
            *(
                lambda h=h, g=groups[h.rank]: [
                    h.submit(request(h.rank, (g, turn, 1), fingerprint=f"{g if turn % 2 else h.rank}"))
                    for turn in range(20)
                ]
                for h in ranks
            )
        )
        assert results == [[False, True] * 10] * 6
        assert [h.address is not None for h in ranks] == [False, True, False, False, False, False]


def test_a_two_dimensional_mesh():
    with job(4) as ranks:
        lines = {0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 3)], 2: [(2, 3), (0, 2)], 3: [(2, 3), (1, 3)]}

        def step(turn, fingerprints):
            return together(
                *(
                    lambda h=h, f=f: h.submit(
                        request(h.rank, *((group, turn, 1) for group in lines[h.rank]), fingerprint=f)
                    )
                    for h, f in zip(ranks, fingerprints, strict=True)
                )
            )

        assert step(0, "aaaa") == [True] * 4
        assert step(1, "aaab") == [False] * 4
        assert step(2, "aaaa") == [True] * 4


def test_ranks_that_wait_for_one_another_are_split():
    with job(3) as three:
        results = together(
            lambda: three[0].submit(request(0, ((0, 1, 2), 0, 1))),
            lambda: three[1].submit(request(1, ((0, 1), 0, 1))),
            lambda: three[2].submit(request(2, ((0, 1, 2), 0, 1))),
        )
        assert results == [False] * 3


def test_several_votes_under_way():
    with job(2) as (zero, one):
        tickets = [zero.submit_async(request(0, (PAIR, turn, 1))) for turn in range(10)]
        assert one.submit(request(1, (PAIR, 0, 1))) is True
        mine = [one.submit_async(request(1, (PAIR, turn, 1))) for turn in range(1, 10)]
        assert [ticket.result() for ticket in reversed(tickets)] == [True] * 10
        assert [ticket.result() for ticket in mine] == [True] * 9
        assert tickets[3].result() is True and tickets[3].exchange is None
        assert zero.stats()["handshakes"] == 10


def test_a_ticket_from_several_threads_counts_once():
    with job(2, timeout_s=0.1) as (zero, _):
        ticket = zero.submit_async(request(0, (PAIR, 0, 1)))
        errors = together(*[ticket.result] * 5)
        assert all(isinstance(error, _vocabulary.HandshakeTimeoutError) for error in errors)
        assert zero.stats()["timeout"] == zero.stats()["handshakes"] == 1


def test_votes_of_two_threads_in_either_order():
    """As a split compiler does it: counted under a lock, submitted outside."""
    with job(2) as (zero, one):
        lock = threading.Lock()
        standing = _vocabulary.RankCollectiveCounts()
        group = _vocabulary.ProcessGroupId(PAIR)
        swap = threading.Barrier(2, timeout=PATIENCE_S)

        def compile_graphs():
            found = []
            for turn in range(20):
                with lock:
                    standing.increment_pg_collective_counts({group: 1})
                    snapshot = copy.deepcopy(standing)
                vote = _vocabulary.CollectiveHandshakeRequest(snapshot, "same", 0)
                found.append((snapshot[group].collective_count_before, zero.submit_async(vote)))
                if turn % 5 == 0:
                    swap.wait()
            return [(start, ticket.result()) for start, ticket in found]

        first, second, other = together(
            compile_graphs,
            compile_graphs,
            lambda: [one.submit(request(1, (PAIR, turn, 1))) for turn in range(40)],
        )
        assert sorted(first + second) == [(turn, True) for turn in range(40)]
        assert other == [True] * 40


def test_a_world_of_one_rank_starts_and_connects_nothing():
    threads = threading.active_count()
    with handshake.Handshake(0, world_size=1, port=1, host="no-such-host.invalid") as alone:
        assert alone.submit(request(0, ((0,), 0, 3))) is True
        assert alone.submit_async(request(0, ((0,), 3, 1))).result() is True
        assert alone.address is None and alone.stats()["handshakes"] == 0
        with pytest.raises(_vocabulary.HandshakeConfigError, match="outside a world of 1 ranks"):
            alone.submit(request(0, (PAIR, 0, 1)))
    assert threading.active_count() == threads


def test_a_group_of_one_rank_needs_nobody():
    rank = handshake.Handshake(1, world_size=4, port=1, host="no-such-host.invalid")
    assert rank.submit(request(1, ((1,), 0, 3), ((0, 1), 0, 0))) is True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "name"])
def test_hosts(host, monkeypatch):
    if ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname() if host == "name" else host)
    with handshake.Handshake(0, world_size=2, port=0, coordinator="thread", timeout_s=PATIENCE_S) as zero:
        with handshake.Handshake(1, world_size=2, port=zero.address[1], timeout_s=PATIENCE_S) as one:
            assert submit_all([zero, one], (PAIR, 0, 1)) == [True, True]


def test_groups_of_another_class():
    with job(2) as (zero, one):
        for turn, group in enumerate((Group(PAIR), Group(list(PAIR)), Group(PAIR))):
            counted = _vocabulary.RankCollectiveCounts({group: _vocabulary.ProcessGroupCollectiveCount(turn, 1)})
            vote = _vocabulary.CollectiveHandshakeRequest(counted, "same", 0)
            calls = [lambda v=vote: zero.submit(v), lambda t=turn: one.submit(request(1, (PAIR, t, 1)))]
            assert together(*calls) == [True, True]


def test_constructing_again_is_cheap_and_shares_the_connection():
    with job(2) as (zero, one):
        assert submit_all([zero, one], (PAIR, 0, 1)) == [True, True]
        port = zero.address[1]
        again = [
            handshake.Handshake(1, world_size=2, port=port, host="127.0.0.1", timeout_s=PATIENCE_S) for _ in range(200)
        ]
        assert all(h.stats() == one.stats() for h in again)
        assert submit_all([zero, again[-1]], (PAIR, 1, 1)) == [True, True]
        assert one.stats()["handshakes"] == 2


def test_other_arguments_mean_the_same_handshake_or_are_refused(rank_0, monkeypatch):
    """A process has one way to its coordinator, however its callers spell it."""
    mine = handshake.Handshake()
    same = [
        handshake.Handshake(0),
        handshake.Handshake(current_rank=0, world_size=2),
        handshake.Handshake(0, 0, timeout_s=PATIENCE_S),
        handshake.Handshake(0, coordinator="process", on_timeout="raise", stage="OFF"),
    ]
    assert {h.address for h in same} == {mine.address}
    monkeypatch.setenv(variable("TIMEOUT_S"), "7")
    monkeypatch.setenv(variable("PORT"), "1")
    assert handshake.Handshake(world_size=2).address == mine.address
    for keyword, other in {
        "timeout_s": 3,
        "on_timeout": "split",
        "secret": "x",
        "stage": "COMPILE_STAGE",
        "debug": "folder",
        "coordinator": "thread",
    }.items():
        with pytest.raises(_vocabulary.HandshakeConfigError, match=rf"with another {keyword}\. .*close\(\)"):
            handshake.Handshake(0, **{keyword: other})


@pytest.mark.parametrize("coordinator_rank", [0, 1])
def test_what_was_opened_by_keyword_serves_the_functions_that_take_none(monkeypatch, coordinator_rank):
    with job(2, coordinator_rank, stage="DISPATCH_STAGE") as (zero, one):
        monkeypatch.setenv("RANK", "0")  # both ranks are in this process
        assert handshake.Handshake().stats() == zero.stats()
        assert handshake.should_handshake({Group(PAIR): 1})
        gate = handshake.DispatchGate("same", {Group(PAIR): 1})
        results = together(gate.vote, lambda: one.submit(request(1, (PAIR, 0, 1))))
        assert results == [True, True]
        assert zero.stats()["handshakes"] == 1
    assert not handshake.should_handshake({Group(PAIR): 1}), "the stage was the handshake's that is closed now"


def test_one_that_is_open_needs_no_rank_and_of_several_one_must_be_named():
    with job(2, ranks=[0]) as (zero,):
        assert handshake.Handshake(world_size=2).address == zero.address
        with handshake.Handshake(1, world_size=2, host="127.0.0.1", port=zero.address[1]):
            with pytest.raises(_vocabulary.HandshakeConfigError, match=r"2 handshakes .* could be meant, of ranks 0-1"):
                handshake.Handshake()
            assert handshake.Handshake(0).address == zero.address


def test_threads_that_wait_for_one_attempt_to_connect_fail_with_it(monkeypatch):
    attempts = []
    one = handshake.Handshake(1, world_size=2, host="127.0.0.1", port=1)

    def connect(*arguments):
        attempts.append(arguments)
        until(lambda: waiting >= 4, "the other threads")
        raise _vocabulary.HandshakePeerLostError("nobody is there")

    waiting = 0
    lock = one._session._connecting

    class Counted:
        def __enter__(self):
            nonlocal waiting
            waiting += 1
            lock.acquire()

        def __exit__(self, *exception):
            lock.release()

    monkeypatch.setattr(_client, "connect", connect)
    monkeypatch.setattr(one._session, "_connecting", Counted())
    errors = together(*[lambda: one.submit(request(1, (PAIR, 0, 1)))] * 4)
    assert [type(error) for error in errors] == [_vocabulary.HandshakePeerLostError] * 4
    assert len(attempts) == 1
    with pytest.raises(_vocabulary.HandshakePeerLostError):
        one.submit(request(1, (PAIR, 0, 1)))
    assert len(attempts) == 2, "a later vote tries again"


def test_closing_ends_an_attempt_to_connect():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # nobody accepts: the attempt would go on for the whole timeout
        one = handshake.Handshake(1, world_size=2, host="127.0.0.1", port=port, timeout_s=10 * PATIENCE_S)
        session = one._session

        def close():
            until(session._connecting.locked)
            one.close()

        error, _ = together(lambda: one.submit(request(1, (PAIR, 0, 1))), close)
    assert isinstance(error, _vocabulary.HandshakeError) and "the handshake was closed" in str(error)


def test_close_is_idempotent_and_a_new_one_opens_again(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", 0.01)  # the new one knows nothing of the votes before
    with job(2) as (zero, one):
        assert submit_all([zero, one], (PAIR, 0, 1)) == [True, True]
        port = zero.address[1]
        one.close()
        one.close()
        with pytest.raises(_vocabulary.HandshakeError, match=r"the handshake was closed; make a new Handshake\(\)"):
            one.submit(request(1, (PAIR, 1, 1)))
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="rank 1 closed its handshake"):
            zero.submit(request(0, (PAIR, 1, 1)))
        with handshake.Handshake(1, world_size=2, port=port, host="127.0.0.1", timeout_s=PATIENCE_S) as again:
            tickets = [h.submit_async(request(h.rank, (PAIR, 2, 1))) for h in (again, zero)]
            assert [ticket.result() for ticket in tickets] == [True, True]


def test_closing_the_coordinators_rank_answers_those_who_wait():
    with job(2) as (zero, one):
        ticket = one.submit_async(request(1, (PAIR, 0, 1)))
        zero.close()
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="rank 0, which coordinates, closed") as error:
            ticket.result()
        assert error.value.ranks == (0,)


# ---------------------------------------------------------------------- when ranks do not come


def test_timeout_raises_with_the_facts():
    with job(3, timeout_s=0.5) as (zero, one, two):
        assert submit_all([zero, one, two], ((0, 1, 2), 0, 4)) == [True] * 3
        errors = submit_all([zero, two], ((0, 1, 2), 4, 2))
        for rank, error in zip((0, 2), errors, strict=True):
            assert isinstance(error, _vocabulary.HandshakeTimeoutError) and isinstance(error, TimeoutError)
            text = str(error)
            assert f"rank {rank}: gave up waiting for rank 1 at [4, 6) on ranks 0-2 (ranks 0, 2 voted)" in text
            assert variable("TIMEOUT_S") in text and variable("ON_TIMEOUT") in text
            assert (error.ranks, error.group, error.span) == ((1,), (0, 1, 2), (4, 6))
            assert 0 < error.seconds < PATIENCE_S
        with pytest.raises(_vocabulary.HandshakeTimeoutError, match=r"rank 1 \(.*\) is late at \[4, 6\) on") as error:
            one.submit(request(1, ((0, 1, 2), 4, 2)))
        assert "This rank is slower" in str(error.value) and "the log of" not in str(error.value)
        assert submit_all([zero, one, two], ((0, 1, 2), 6, 1)) == [True] * 3


def test_timeout_splits_on_request(caplog):
    with job(3, timeout_s=0.5, on_timeout="split") as (zero, one, two):
        assert submit_all([zero, two], ((0, 1, 2), 0, 2)) == [False, False]
        assert one.submit(request(1, ((0, 1, 2), 0, 2))) is False
        assert submit_all([zero, one, two], ((0, 1, 2), 2, 1)) == [True] * 3
        assert zero.stats()["timeout"] == 1
    texts = [record.getMessage() for record in caplog.records]
    assert any("waiting for rank 1" in text for text in texts)
    assert not any(variable("ON_TIMEOUT") in text for text in texts), "that is set already"


def test_a_lost_rank_has_fields_of_its_own():
    with job(3) as (zero, one, two):
        two.submit_async(request(2, ((1, 2), 0, 1)))
        ticket = zero.submit_async(request(0, ((0, 1, 2), 0, 1)))
        two.close()
        with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
            ticket.result()
        assert isinstance(error.value, ConnectionError)
        assert (error.value.ranks, error.value.group, error.value.span) == ((2,), (0, 1, 2), (0, 1))
        assert "rank 0 can't go on" in str(error.value) and "restart the job" in str(error.value)
        assert together(
            lambda: zero.submit(request(0, ((0, 1), 0, 1))), lambda: one.submit(request(1, ((0, 1), 0, 1)))
        ) == [True, True]


def test_a_vote_out_of_order(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", 10 * PATIENCE_S)  # a gap that was left behind would be noticed
    with job(2) as ranks:
        assert submit_all(ranks, (PAIR, 0, 4)) == [True, True]
        with pytest.raises(_vocabulary.HandshakeProtocolError, match="rank 0 voted out of order") as error:
            ranks[0].submit(request(0, (PAIR, 2, 1)))
        assert (error.value.ranks, error.value.group, error.value.span) == ((0,), PAIR, (2, 3))
        assert submit_all(ranks, (PAIR, 4, 1)) == [True, True], "the refused vote left no gap behind"


def test_split_is_logged_the_first_time_and_then_tenfold(caplog):
    with job(2) as ranks, caplog.at_level(logging.INFO, "torch_tpu.handshake"):
        for turn in range(12):
            assert submit_all(ranks, (PAIR, turn, 1), fingerprints=["a", "b"]) == [False, False]
    texts = [record.getMessage() for record in caplog.records if "rank 0 runs graph a split" in record.getMessage()]
    assert [text.partition("(time ")[2].partition(")")[0] for text in texts] == ["1", "10"]


# ---------------------------------------------------------------------- what can't be


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ("a string", _vocabulary.HandshakeTypeError, "expected a CollectiveHandshakeRequest, got str"),
        (None, _vocabulary.HandshakeTypeError, "got NoneType"),
        (b"{}", _vocabulary.HandshakeTypeError, "got bytes"),
        ({"rank": 0}, _vocabulary.HandshakeTypeError, "got dict"),
        (request(1, (PAIR, 0, 1)), _vocabulary.HandshakeConfigError, "a request of rank 1 was submitted on rank 0"),
        (request(0, ((0, 7), 0, 1)), _vocabulary.HandshakeConfigError, "outside a world of 2 ranks"),
    ],
)
def test_requests_that_can_not_be(wrong, kind, words):
    with job(2) as ranks:
        for submit in (ranks[0].submit, ranks[0].submit_async):
            with pytest.raises(kind, match=words) as error:
                submit(wrong)
            assert isinstance(error.value, ValueError)
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]
        with pytest.raises(kind):
            ranks[0].submit(wrong)
        assert submit_all(ranks, (PAIR, 1, 1)) == [True, True]


CONFIGURATIONS = [
    ({"PORT": "many"}, {}, variable("PORT") + "='many' is no port"),
    ({"PORT": "65536"}, {}, variable("PORT") + "='65536' is no port"),
    ({"PORT": "-1"}, {}, variable("PORT")),
    ({"PORT": "80.5"}, {}, variable("PORT")),
    ({}, {"port": 70000}, "port=70000 is no port"),
    ({}, {"port": "x"}, "port='x' is no port"),
    ({}, {"port": 3.7}, "port=3.7 is no port"),
    ({}, {"port": [1]}, "an argument of Handshake can't be [[1]]: unhashable type"),
    ({}, {"current_rank": 0.5}, "current_rank=0.5 is no whole number"),
    ({"TIMEOUT_S": "soon"}, {}, variable("TIMEOUT_S") + "='soon' is no timeout"),
    ({"TIMEOUT_S": "-3"}, {}, "positive number of seconds"),
    ({"TIMEOUT_S": "0"}, {}, variable("TIMEOUT_S")),
    ({"TIMEOUT_S": "nan"}, {}, variable("TIMEOUT_S")),
    ({"TIMEOUT_S": "inf"}, {}, variable("TIMEOUT_S")),
    ({}, {"timeout_s": -1}, "timeout_s=-1 is no timeout"),
    ({}, {"timeout_s": "x"}, "timeout_s='x' is no timeout"),
    ({}, {"timeout_s": True}, "timeout_s=True is no timeout"),
    ({"ON_TIMEOUT": "explode"}, {}, variable("ON_TIMEOUT") + "='explode' must be raise or split"),
    ({}, {"on_timeout": "explode"}, "on_timeout='explode'"),
    ({"STAGE": "SOMETIMES"}, {}, variable("STAGE") + "='SOMETIMES' is no stage"),
    ({}, {"stage": "SOMETIMES"}, "'SOMETIMES' is no stage"),
    ({}, {"coordinator": "rocket"}, 'coordinator must be "process" or "thread"'),
    ({}, {"current_rank": 2}, "current_rank 2 is outside a world of 2 ranks"),
    ({}, {"current_rank": -1}, "current_rank -1 is outside"),
    ({}, {"coordinator_rank": 2}, "coordinator_rank 2 is outside a world of 2 ranks"),
    ({}, {"current_rank": "first"}, "current_rank='first' is no whole number"),
    ({}, {"world_size": 0}, "world_size must be from 1"),
    ({}, {"world_size": 2**30}, "world_size must be from 1"),
    ({}, {"world_size": "all"}, "world_size='all' is no whole number"),
    ({}, {"coordinator_rank": "x"}, "coordinator_rank='x' is no whole number"),
    ({}, {"debug": 3}, "debug=3 is no folder"),
    ({}, {"secret": b"x"}, "secret must be text"),
    ({"SECRET": "\udcff"}, {}, variable("SECRET") + " must be text that UTF-8 can encode"),
]


@pytest.mark.parametrize(("variables", "keywords", "words"), CONFIGURATIONS)
def test_configuration_that_can_not_be(variables, keywords, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(variable(name), value)
    with pytest.raises(_vocabulary.HandshakeConfigError) as error:
        handshake.Handshake(**{"current_rank": 1, "world_size": 2, **keywords})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, r"current_rank is not known: initialise torch.distributed, set RANK, or pass Handshake\(current_rank=…\)"),
        ({"RANK": "0"}, "world_size is not known: .*WORLD_SIZE"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' is no whole number"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no whole number"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "5 is outside a world of 2"),
    ],
)
def test_ranks_that_are_not_known(variables, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(_vocabulary.HandshakeConfigError, match=words):
        handshake.Handshake()


def test_variables_are_read(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(variable("SECRET"), "hush")
    monkeypatch.setenv(variable("TIMEOUT_S"), "0.5")
    monkeypatch.setenv(variable("ON_TIMEOUT"), "split")
    with handshake.Handshake(0, port=0, host="127.0.0.1", coordinator="thread") as zero:
        monkeypatch.setenv(variable("PORT"), str(zero.address[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with handshake.Handshake() as one:
            assert (one.rank, one.world_size) == (1, 2)
            assert submit_all([zero, one], (PAIR, 0, 1)) == [True, True]
            assert one.submit(request(1, (PAIR, 1, 1))) is False
        with handshake.Handshake(secret="guess") as stranger:
            with pytest.raises(_vocabulary.HandshakeProtocolError, match=variable("SECRET")):
                stranger.submit(request(1, (PAIR, 2, 1)))


def test_a_port_that_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv(variable("PORT"), str(port))
        with pytest.raises(_vocabulary.HandshakeConfigError) as error:
            handshake.Handshake(0, world_size=2, host="127.0.0.1")
        assert f"port {port} can't be used on this host (Address already in use)" in str(error.value)
        assert f"set {variable('PORT')} to a free port, the same on all ranks" in str(error.value)
    with handshake.Handshake(0, world_size=2, host="127.0.0.1", coordinator="thread") as zero:
        assert zero.address == ("127.0.0.1", port), "the same call works once the port is free"


def test_select_handshake_port_gives_the_socket_that_it_found():
    place = _rendezvous.Place(0, "127.0.0.1", 0, "port", None, True)
    listener, endpoint = handshake._select_handshake_port(place)
    with listener:
        assert listener.getsockname()[1] == endpoint.port > 0
        socket.create_connection(("127.0.0.1", endpoint.port)).close()


def test_port_zero_is_for_the_coordinator():
    rank = handshake.Handshake(1, world_size=2, port=0)
    with pytest.raises(_vocabulary.HandshakeConfigError, match=r"port 0 .* the other ranks need the port"):
        rank.submit(request(1, (PAIR, 0, 1)))


def test_no_coordinator_within_the_time():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    rank = handshake.Handshake(1, world_size=2, host="127.0.0.1", port=port, timeout_s=0.1)
    with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
        rank.submit(request(1, (PAIR, 0, 1)))
    assert "rank 1 found no handshake coordinator within 0.1 s" in str(error.value)
    assert error.value.ranks == (0,)


def test_ranks_that_do_not_fit_are_refused_and_nobody_else_notices():
    mistakes = [
        ({"stage": "DISPATCH_STAGE"}, "stage differs: DISPATCH_STAGE on rank 2"),
        ({"on_timeout": "split"}, "on timeout differs: split on rank 2"),
        ({"secret": "loud"}, "does not know the secret"),
        ({"secret": None}, "does not know the secret"),
        ({"world_size": 4}, "world size differs: 4 on rank 2"),
    ]
    with job(3, stage="COMPILE_STAGE", secret="hush", ranks=PAIR) as ranks:
        port = ranks[0].address[1]
        right = {"world_size": 3, "port": port, "host": "127.0.0.1", "secret": "hush", "stage": "COMPILE_STAGE"}
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]

        def attempt(**wrong):
            with handshake.Handshake(2, timeout_s=PATIENCE_S, **{**right, **wrong}) as h:
                with pytest.raises(_vocabulary.HandshakeProtocolError) as error:
                    h.submit(request(2, ((1, 2), 0, 1)))
                return str(error.value)

        texts, votes = together(
            lambda: [attempt(**wrong) for wrong, _ in mistakes],
            lambda: [submit_all(ranks, (PAIR, turn, 1)) for turn in range(1, 30)],
        )
        assert votes == [[True, True]] * 29
        for text, (_, words) in zip(texts, mistakes, strict=True):
            assert words in text


def test_another_job_on_the_same_port(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    with job(2) as ranks:
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]
        ranks[1].close()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
        port = ranks[0].address[1]
        with handshake.Handshake(1, world_size=2, port=port, host="127.0.0.1") as stranger:
            with pytest.raises(_vocabulary.HandshakeProtocolError) as error:
                stranger.submit(request(1, (PAIR, 1, 1)))
        assert "session differs: job-8/ on rank 1" in str(error.value) and ", job-7/ on the" in str(error.value)


# ---------------------------------------------------------------------- stages


def test_should_handshake(monkeypatch):
    world = _vocabulary.ProcessGroupId(range(4096))
    cases = [
        ({world: 1}, True),
        ({world: 0}, False),
        ({}, False),
        ({_vocabulary.ProcessGroupId((3,)): 5}, False),
        ({_vocabulary.ProcessGroupId((3,)): 5, Group((2, 9)): 1}, True),
        ({Group([2, 9]): 1}, True),
        ({Group((2, 9)): 0, Group((1,)): 1}, False),
    ]
    for stage, answers in (("", False), ("OFF", False), ("COMPILE_STAGE", True), ("dispatch_stage", True)):
        monkeypatch.setenv(variable("STAGE"), stage)
        for counted, expected in cases:
            assert handshake.should_handshake(counted) is (answers and expected)
    monkeypatch.delenv(variable("STAGE"))
    assert handshake.should_handshake({world: 1}) is False
    for _ in range(2):
        monkeypatch.setenv(variable("STAGE"), "ALWAYS")
        with pytest.raises(_vocabulary.HandshakeConfigError, match=variable("STAGE") + "='ALWAYS' is no stage"):
            handshake.should_handshake({world: 1})


def play(h, *steps):
    """What the other rank does on the line of {0, 1}: ("vote", number, fingerprint) or ("eager", number)."""
    standing = _vocabulary.RankCollectiveCounts()
    group = _vocabulary.ProcessGroupId(PAIR)
    found = []
    for kind, number, *fingerprint in steps:
        if kind == "eager":
            standing.record_eager_collectives(group, number)
        else:
            standing.increment_pg_collective_counts({group: number})
            vote = _vocabulary.CollectiveHandshakeRequest(copy.deepcopy(standing), fingerprint[0], h.rank)
            found.append(h.submit(vote))
    return found


@pytest.mark.parametrize("stage", ["OFF", "DISPATCH_STAGE"])
def test_submit_handshake_counts_and_votes_whatever_the_stage(rank_0, monkeypatch, stage):
    monkeypatch.setattr(_client, "GAP_WAIT_S", PATIENCE_S)
    monkeypatch.setenv(variable("STAGE"), stage)
    group = Group(PAIR)

    def mine():
        first = handshake.submit_handshake("a", {group: 2})
        handshake.record_eager_collectives(group, 5)
        ticket = handshake.submit_handshake_async("b", {_vocabulary.ProcessGroupId(PAIR): 1})
        last = handshake.submit_handshake_async("mine", {group: 1}, "the graph")
        return first, ticket.result(), last.result()

    other = [("vote", 2, "a"), ("eager", 5), ("vote", 1, "b"), ("vote", 1, "theirs")]
    results = together(mine, lambda: play(rank_0, *other))
    assert results == [(True, True, False), [True, True, False]]


@pytest.mark.parametrize(
    ("fingerprint", "counted"),
    [("", {PAIR: 1}), ("x" * 5000, {PAIR: 1}), ("same", {PAIR: -1}), ("same", {(1, 2): 1}), ("same", {(0, 5): 1})],
)
def test_nothing_is_counted_after_an_error(rank_0, fingerprint, counted):
    with pytest.raises(_vocabulary.HandshakeConfigError):
        handshake.submit_handshake(fingerprint, {Group(ranks): number for ranks, number in counted.items()})
    results = together(
        lambda: handshake.submit_handshake("same", {Group(PAIR): 1}), lambda: play(rank_0, ("vote", 1, "same"))
    )
    assert results == [True, [True]]
    assert [group.ranks for group in handshake._counts] == [PAIR]


def test_a_graph_without_collectives_is_fat_whether_or_not_something_was_counted(rank_0):
    assert handshake.submit_handshake("same", {}) is True
    assert handshake.submit_handshake_async("same", {Group(PAIR): 0}).result() is True
    results = together(
        lambda: handshake.submit_handshake("same", {Group(PAIR): 1}), lambda: play(rank_0, ("vote", 1, "same"))
    )
    assert results == [True, [True]]
    assert handshake.submit_handshake("same", {}) is True


def test_threads_that_call_submit_handshake_are_counted_one_by_one(rank_0):
    results = together(
        *[lambda: [handshake.submit_handshake("same", {Group(PAIR): 1}) for _ in range(25)]] * 4,
        lambda: play(rank_0, *[("vote", 1, "same")] * 100),
    )
    assert results == [[True] * 25] * 4 + [[True] * 100]


def test_dispatch_gate_at_every_dispatch(rank_0, monkeypatch):
    """Fat, split while the ranks differ, and fat again."""
    monkeypatch.setenv(variable("STAGE"), "DISPATCH_STAGE")

    def mine():
        usual = handshake.DispatchGate("usual", {Group(PAIR): 1})
        odd = handshake.DispatchGate("odd", {Group(PAIR): 1}, lambda: "the graph")
        return [gate.vote() for gate in (usual, usual, odd, odd, usual)]

    results = together(mine, lambda: play(rank_0, *[("vote", 1, "usual")] * 5))
    assert results == [[True, True, False, False, True]] * 2


def test_dispatch_gate_at_compile_time(rank_0, monkeypatch):
    monkeypatch.setenv(variable("STAGE"), "COMPILE_STAGE")

    def mine():
        gates = [handshake.DispatchGate(fingerprint, {Group(PAIR): 1}) for fingerprint in ("usual", "odd")]
        return [gate.vote() for gate in gates * 3]

    results = together(mine, lambda: play(rank_0, *[("vote", 1, "usual")] * 2))
    assert results == [[True, False] * 3, [True, False]]
    assert handshake.Handshake().stats()["handshakes"] == 2


@pytest.mark.parametrize("stage", ["OFF", "COMPILE_STAGE", "DISPATCH_STAGE"])
@pytest.mark.parametrize("wrong", [None, 5, [], {1: 1}, {Group(PAIR): -1}, {Group(PAIR): float("nan")}])
def test_what_a_gate_is_made_of_is_checked_in_every_stage(stage, wrong):
    with pytest.raises((_vocabulary.HandshakeTypeError, _vocabulary.HandshakeConfigError)):
        handshake.DispatchGate("same", wrong, stage=stage)


def test_dispatch_gate_off_or_with_nothing_to_agree_on_starts_nothing(monkeypatch):
    monkeypatch.setattr(_client, "connect", lambda *arguments: pytest.fail("a connection"))
    assert handshake.DispatchGate("same", {Group(PAIR): 1}).vote() is False
    assert handshake.DispatchGate("same", {Group(PAIR): 1}, stage="OFF").vote() is False
    for stage in ("COMPILE_STAGE", handshake.HandshakeStage.DISPATCH_STAGE):
        for counted in ({}, {Group(PAIR): 0}, {Group((0,)): 3}):
            assert handshake.DispatchGate("same", counted, stage=stage).vote() is True
    monkeypatch.setenv(variable("STAGE"), "NEVER")
    with pytest.raises(_vocabulary.HandshakeConfigError, match="no stage"):
        handshake.DispatchGate("same", {})


def test_a_world_of_one_rank_by_variables(monkeypatch):
    monkeypatch.setattr(_client, "connect", lambda *arguments: pytest.fail("a connection"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert handshake.submit_handshake("same", {Group((0,)): 1}) is True
    assert handshake.DispatchGate("same", {Group((0,)): 1}, stage="DISPATCH_STAGE").vote() is True


# ---------------------------------------------------------------------- plans and graphs


def test_an_exchange_ends_in_one_plan_or_in_none():
    def take_part(h, turn, plan):
        ticket = h.submit_async(request(h.rank, ((0, 1, 2), turn, 1), fingerprint=f"graph {h.rank}"), partial=True)
        assert ticket.result() is False
        rounds = ticket.exchange
        reference = rounds.reference_rank()
        keys = rounds.share(b"keys" if h.rank == reference else None)
        common = [rounds.intersect(bytes([0xFF ^ 1 << h.rank])), rounds.intersect(bytes([1 << h.rank]))]
        return reference, keys, common, rounds.agree(plan)

    with job(3) as ranks:
        for turn, plans in enumerate(("ppp", "ppq", "ppp")):
            results = together(
                *(lambda h=h, t=turn, p=p: take_part(h, t, p) for h, p in zip(ranks, plans, strict=True))
            )
            assert results == [(0, b"keys", [b"\xf8", b"\x00"], plans == "ppp")] * 3


def test_an_exchange_that_a_rank_aborts_is_off_for_all():
    def take_part(h):
        ticket = h.submit_async(request(h.rank, (PAIR, 0, 1), fingerprint=f"graph {h.rank}"), partial=True)
        assert ticket.result() is False
        rounds = ticket.exchange
        assert rounds.reference_rank() == 0
        if h.rank == 1:
            rounds.abort("no memory left")
            return rounds.share(None), rounds.agree("plan")
        with pytest.raises(_vocabulary.HandshakeConfigError, match="the reference rank must give a payload"):
            rounds.share(None)
        rounds.share(b"keys")
        return rounds.intersect(b"\xff"), rounds.agree("plan")

    with job(2) as ranks:
        assert together(*(lambda h=h: take_part(h) for h in ranks)) == [(None, False)] * 2
        assert submit_all(ranks, (PAIR, 1, 1)) == [True, True]


def test_a_payload_that_is_too_large_is_off_for_all(monkeypatch):
    monkeypatch.setattr(_protocol, "MAX_PAYLOAD_BYTES", 100)

    def take_part(h):
        ticket = h.submit_async(request(h.rank, (PAIR, 0, 1), fingerprint=f"graph {h.rank}"), partial=True)
        assert ticket.result() is False
        ticket.exchange.reference_rank()
        return ticket.exchange.share(bytes(101) if h.rank == 0 else None)

    with job(2) as ranks:
        assert together(*(lambda h=h: take_part(h) for h in ranks)) == [None, None]


def test_who_does_not_take_part_opens_no_exchange():
    with job(2) as (zero, one):
        ticket = zero.submit_async(request(0, (PAIR, 0, 1), fingerprint="a"), partial=True)
        assert one.submit(request(1, (PAIR, 0, 1), fingerprint="b")) is False
        assert ticket.result() is False
        assert ticket.exchange is None or ticket.exchange.reference_rank() is None


def test_a_later_split_of_a_rank_is_not_promised_the_exchange_that_was_called_off():
    world = (0, 1, 2, 3)
    with job(4) as ranks:
        zero, one, two, _ = ranks

        def partial(h, before, number, fingerprint):
            vote = request(h.rank, (world, before, number), fingerprint=fingerprint)
            ticket = h.submit_async(vote, partial=True)
            return ticket, ticket.result()

        (first, _), _ = together(lambda: partial(zero, 0, 1, "d"), lambda: partial(one, 0, 1, "e"))
        assert first.exchange is not None
        late, _ = partial(two, 0, 2, "d")
        again, _ = partial(zero, 1, 1, "d")
        assert (late.exchange, again.exchange) == (None, None), "nobody would ever answer its rounds"
        assert first.exchange.reference_rank() is None


def test_an_exchange_that_nobody_uses_is_forgotten():
    with job(2) as ranks:
        votes = [h.submit_async(request(h.rank, (PAIR, 0, 1), fingerprint=f"{h.rank}"), partial=True) for h in ranks]
        assert [(ticket.result(), ticket.exchange is None) for ticket in votes] == [(False, False)] * 2
        theirs = votes.pop().exchange
        assert theirs.reference_rank() == 0
        votes.clear()
        gc.collect()
        # Rank 1 waits for rank 0 in the exchange, and rank 0 for rank 1 in its next vote.
        results = together(
            lambda: ranks[0].submit(request(0, (PAIR, 1, 1))),
            lambda: (theirs.share(None), ranks[1].submit(request(1, (PAIR, 1, 1)))),
        )
        assert results == [True, (None, True)]
        assert [len(h._session.connected._exchanges) for h in ranks] == [0, 0]


@pytest.mark.parametrize("vote", [lambda h, r: h.submit(r), lambda h, r: h.submit_async(r).result()])
def test_a_thread_that_goes_on_to_its_next_vote_has_left_its_exchange(vote):
    """Its ticket may be kept, as by a variable that is used again."""
    with job(2) as (zero, one):
        votes = [
            h.submit_async(request(h.rank, (PAIR, 0, 1), fingerprint=f"{h.rank}"), partial=True) for h in (zero, one)
        ]

        def go_through():
            assert votes[1].result() is False
            exchange = votes[1].exchange
            return exchange.reference_rank(), exchange.share(None), one.submit(request(1, (PAIR, 1, 1)))

        def go_on():
            assert votes[0].result() is False
            return vote(zero, request(0, (PAIR, 1, 1)))

        assert together(go_on, go_through) == [True, (0, None, True)]
        assert votes[0].exchange.reference_rank() is None and votes[0].exchange.agree("a plan") is False


def test_a_plan_is_undecided_while_its_last_answer_is_on_the_way():
    with job(2) as (zero, one):
        votes = [
            h.submit_async(request(h.rank, (PAIR, 0, 1), fingerprint=f"{h.rank}"), partial=True) for h in (zero, one)
        ]
        exchanges = [ticket.exchange for ticket in votes if ticket.result() is False]
        for exchange in exchanges:
            assert exchange.reference_rank() == 0
        exchanges[0].share(b"keys")
        exchanges[1].share(None)
        one.close()
        assert [exchange.is_undecided for exchange in exchanges] == [False, False]
        with pytest.raises(_vocabulary.HandshakeError):
            exchanges[1].agree("a plan")
        assert exchanges[1].is_undecided
        assert exchanges[0].agree("a plan") is False and not exchanges[0].is_undecided


def test_where_to_set_the_folder_for_reports(tmp_path, caplog):
    with job(2, ranks=[0]) as (zero,):
        port = zero.address[1]
        with handshake.Handshake(1, world_size=2, host="127.0.0.1", port=port, debug=tmp_path) as one:
            submit = [lambda h=h: h.submit(request(h.rank, (PAIR, 0, 1), fingerprint=f"{h.rank}")) for h in (zero, one)]
            assert together(*submit) == [False, False]
    texts = {record.args[0]: record.getMessage() for record in caplog.records}
    assert texts[0].endswith(f"Set {variable('DEBUG')} to a folder to see what differs and what to change")
    assert texts[1].endswith(f"To see why, set {variable('DEBUG')} on rank 0 too, which coordinates")


def test_graphs_are_printed_for_reports_only_and_once_a_fingerprint(tmp_path, caplog):
    printed = []

    def printer(name):
        def text():
            printed.append((name, threading.current_thread().name))
            return f"graph():\n    %x : [num_users=1] = placeholder[target={name}]\n    return x\n"

        return text

    def submit(h, turn, name):
        return h.submit(request(h.rank, ((0, 1, 2), turn, 1), fingerprint=name), printer(f"{name}{h.rank}"))

    with job(3) as ranks:
        assert together(*(lambda h=h, n=n: submit(h, 0, n) for h, n in zip(ranks, "abb", strict=True))) == [False] * 3
        assert printed == []
    with job(3, debug=tmp_path / "reports") as ranks:
        for turn, names in enumerate(("aaa", "abb", "abb")):
            results = together(*(lambda h=h, t=turn, n=n: submit(h, t, n) for h, n in zip(ranks, names, strict=True)))
            assert results == [names == "aaa"] * 3
        until(lambda: list((tmp_path / "reports").glob("*.txt")), "the report")
        until(lambda: any("why the ranks' graphs were split" in record.getMessage() for record in caplog.records))
    names = sorted(name for name, _ in printed)
    assert [name[0] for name in names] == ["a", "b"]
    assert {thread for _, thread in printed} == {"handshake-graph"}


def fail():
    raise RuntimeError("no text today")


@pytest.mark.parametrize("fail", [fail, lambda: None, lambda: b"bytes"])
def test_a_graph_that_can_not_be_printed_harms_nobody(tmp_path, caplog, fail):
    with job(2, debug=tmp_path) as ranks:
        calls = [
            lambda h=h: h.submit(request(h.rank, (PAIR, 0, 1), fingerprint=f"{h.rank}"), fail) for h in ranks
        ]
        assert together(*calls) == [False, False]
        until(lambda: any("could not be printed" in record.getMessage() for record in caplog.records))
        assert submit_all(ranks, (PAIR, 1, 1)) == [True, True]


# ---------------------------------------------------------------------- forks


@pytest.mark.parametrize("coordinator", ["process", "thread"])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_does_not_disturb_its_parent(coordinator):
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(job(2, coordinator=coordinator))
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]
        port = ranks[0].address[1]
        hold, release = os.pipe()
        said, say = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(release)
                try:
                    ranks[1].submit(request(1, (PAIR, 1, 1)))
                except _vocabulary.HandshakeError as error:
                    os.write(say, str(error).encode())
                with contextlib.suppress(_vocabulary.HandshakeError):
                    handshake.Handshake(0, world_size=2)
                    os.write(say, b"; it opened one more")
                for h in ranks:
                    h.close()
                handshake._close_all()
                os.write(say, b"; closed\n")
                os.read(hold, 1)  # stays until the parent has looked
            finally:
                os._exit(0)
        try:
            os.close(hold)
            os.close(say)
            text = b""
            while not text.endswith(b"\n"):
                text += os.read(said, 1000) or pytest.fail("the child ended early")
            assert text.startswith(b"this process is a fork of rank 1's, which votes for that rank: ")
            assert text.endswith(b"or make them ranks of their own; closed\n")
            for turn in range(1, 20):
                assert submit_all(ranks, (PAIR, turn, 1)) == [True, True]
            # What the parent closes is closed for everybody, though the child is still there.
            ticket = ranks[1].submit_async(request(1, (PAIR, 20, 1)))
            ranks[0].close()
            with pytest.raises(_vocabulary.HandshakePeerLostError):
                ticket.result()
            socket.create_server(("127.0.0.1", port)).close()
        finally:
            os.close(release)
            os.close(said)
            os.waitpid(child, 0)
