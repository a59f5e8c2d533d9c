# SPDX-License-Identifier: Apache-2.0
"""The public face: what a compiler calls, how it is configured, and what it says when that can't work."""

import contextlib
import functools
import logging
import os
import pickle
import queue
import socket
import threading
import types

import pytest
from layout import load, needs
from rank_process import RankProcess
from ranks import PATIENCE_S, counts, handshake, job, open_rank, request, submit_all, together, until

_client = load("_client")
_consensus = load("_consensus")
_coordinator = load("_coordinator")
_rendezvous = load("_rendezvous")
_vocabulary = load("_vocabulary")

PAIR = (0, 1)
WORLD = (0, 1, 2)
VARIABLES = ("STAGE", "GROUPS", "PORT", "TIMEOUT_S", "ON_TIMEOUT", "ON_MISMATCH", "SECRET", "DEBUG")
OLD_STAGE_VARIABLE = "TORCH_TPU_SPMD_HANDSHAKE_STAGE"  # torch_tpu 0.2.0's


def variable(name):
    return f"TORCH_TPU_INTERNAL_HANDSHAKE_{name}"


LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No setting of the machine's own; nothing left open."""
    for name in (*map(variable, VARIABLES), OLD_STAGE_VARIABLE, *LAUNCHERS):
        monkeypatch.delenv(name, raising=False)
    yield
    handshake._close()


@contextlib.contextmanager
def two_ranks(**options):
    """This process is rank 0 of two. Gives its handshake, and one with a session of its own that plays rank 1."""
    options = {"world_size": 2, "host": "127.0.0.1", "timeout_s": PATIENCE_S, **options}
    with handshake.Handshake(0, port=0, **{"coordinator": "thread", **options}) as zero:
        with open_rank(1, port=zero.address[1], **options) as one:
            yield zero, one


class Group:
    """Another package's process group: anything with `.ranks`."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __hash__(self):
        return hash(tuple(self.ranks))

    def __eq__(self, other):
        return tuple(self.ranks) == tuple(other.ranks)


def vote_in_turn(h, *fingerprints, start=0):
    """What a rank votes on the line of {0, 1}, one collective a graph."""
    return [
        h.submit(request(h.rank, (PAIR, start + turn, 1), fingerprint=fingerprint))
        for turn, fingerprint in enumerate(fingerprints)
    ]


def messages(caplog, *words):
    """The logged messages that contain all these words."""
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if all(word in text for word in words)]


# ---------------------------------------------------------------------- handshakes


@pytest.mark.parametrize("coordinator", ["process", "thread"])
def test_fat_split_and_fat_again(coordinator, caplog):
    world = (0, 1, 2, 3)
    with job(4, coordinator=coordinator) as ranks, caplog.at_level(logging.DEBUG, "torch_tpu.handshake"):
        assert submit_all(ranks, (world, 0, 2)) == [True] * 4
        assert caplog.records == []
        assert submit_all(ranks, (world, 2, 1), fingerprints=["a", "a", "b", "a"]) == [False] * 4
        assert submit_all(ranks, (world, 3, 1)) == [True] * 4
        for h in ranks:
            stats = h.stats()
            assert (stats["handshakes"], stats["fat"], stats["split"]) == (3, 2, 1)
            assert 0 < stats["longest_wait_s"] <= stats["waited_s"]
            assert 0 < stats["bytes_sent"] < 300
    # One rank of each graph warns; the others say the same at DEBUG.
    warned = sorted(record.getMessage().split()[5] for record in caplog.records if record.levelno == logging.WARNING)
    assert warned == ["a", "b"] and len(caplog.records) == 4
    for rank, fingerprint in enumerate("aaba"):
        [text] = messages(caplog, f"rank {rank} runs graph {fingerprint} split")
        assert "fingerprints differ at [2, 3) on ranks 0-3" in text and variable("DEBUG") in text


SUM, MAX = "all_reduce sum float32 8", "all_reduce max float32 8"


class Counted(dict):
    """What `_graph.count_collectives` gives: counts, and what the collectives are."""

    def __init__(self, ranks, *collectives):
        super().__init__({Group(ranks): len(collectives)})
        self.sequences = {_vocabulary.ProcessGroupId(ranks): list(collectives)}


def split_of_two(theirs, **options):
    """Rank 0's gate and rank 1's vote differ; rank 1's collectives are these. Gives rank 0's answer."""
    with two_ranks(stage="DISPATCH_STAGE", **options) as (_, one):
        client = one._session.client
        client.declare(_vocabulary.fingerprint_digest("theirs"), "theirs", [theirs])
        gate = handshake.DispatchGate("mine", Counted(PAIR, SUM, SUM), label="layer 3 backward")
        vote = request(1, (PAIR, 0, 2), fingerprint="theirs")
        answer, _ = together(gate.vote, lambda: one.submit(vote))
        return answer


@pytest.mark.parametrize(
    ("theirs", "level", "text"),
    [
        ([SUM, SUM], "WARNING", "Their collectives agree, so this is slower, and right"),
        ([SUM, MAX], "ERROR", "wrong numbers, split or not: [1, 2) on ranks 0-1 is "),
        ([], "WARNING", "fingerprints differ"),
    ],
)
def test_a_split_tells_slower_from_broken_and_names_the_graph(theirs, level, text, caplog):
    assert split_of_two(theirs) is False
    [record] = [record for record in caplog.records if "rank 0 runs" in record.getMessage()]
    assert record.levelname == level and text in record.getMessage()
    assert 'rank 0 runs graph "layer 3 backward" (mine) split at its collectives (time 1)' in record.getMessage()
    assert '"layer 3 backward" (mine) on rank 0' in record.getMessage() and "theirs on rank 1" in record.getMessage()
    assert theirs or "collectives agree" not in record.getMessage()
    assert level != "ERROR" or (f"{SUM} on rank 0" in record.getMessage() and f"{MAX} on rank 1" in record.getMessage())


def test_what_is_broken_is_an_error_where_it_is_asked_for():
    error = split_of_two([SUM, MAX], on_mismatch="raise")
    assert isinstance(error, handshake.HandshakeMismatchError) and error.ranks == PAIR and error.span == (0, 2)
    assert "layer 3 backward" in str(error) and SUM in str(error)
    assert split_of_two([SUM, SUM], on_mismatch="raise") is False


def test_subgroups_at_the_same_time_and_without_the_coordinators_rank():
    with job(6, coordinator_rank=1) as ranks:
        groups = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3), 4: (4, 5), 5: (4, 5)}

        def votes(h):
            fingerprints = [str(h.rank) if turn % 2 else "same" for turn in range(20)]
            spans = [(groups[h.rank], turn, 1) for turn in range(20)]
            return [h.submit(request(h.rank, s, fingerprint=f)) for s, f in zip(spans, fingerprints, strict=True)]

        assert together(*(lambda h=h: votes(h) for h in ranks)) == [[True, False] * 10] * 6
        assert [h.address is not None for h in ranks] == [False, True, False, False, False, False]


def test_a_two_dimensional_mesh():
    lines = {0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 3)], 2: [(2, 3), (0, 2)], 3: [(2, 3), (1, 3)]}

    def vote(h, turn, fingerprint):
        return h.submit(request(h.rank, *((group, turn, 1) for group in lines[h.rank]), fingerprint=fingerprint))

    with job(4) as ranks:
        for turn, names in enumerate(("aaaa", "aaab", "aaaa")):
            results = together(*(lambda h=h, n=n, t=turn: vote(h, t, n) for h, n in zip(ranks, names, strict=True)))
            assert results == [names == "aaaa"] * 4


def test_ranks_that_wait_for_one_another_are_split(monkeypatch):
    monkeypatch.setattr(_consensus, "CYCLE_GRACE_S", 0.01)
    with job(3) as three:
        spans = [(WORLD, 0, 1), (PAIR, 0, 1), (WORLD, 0, 1)]
        votes = [lambda h=h, s=s: h.submit(request(h.rank, s)) for h, s in zip(three, spans, strict=True)]
        assert together(*votes) == [False] * 3


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
    with job(2, timeout_s=1.0) as (zero, _):
        ticket = zero.submit_async(request(0, (PAIR, 0, 1)))
        errors = together(*[ticket.result] * 5)
        assert all(isinstance(error, _vocabulary.HandshakeTimeoutError) for error in errors)
        assert zero.stats()["timeout"] == zero.stats()["handshakes"] == 1


@pytest.mark.parametrize("by_variable", [True, False])
def test_where_there_is_nobody_to_meet_nothing_is_started_or_connected(by_variable, monkeypatch):
    monkeypatch.setattr(_client, "connect", lambda *arguments: pytest.fail("a connection"))
    threads = threading.active_count()
    in_larger_world = open_rank(1, world_size=4, port=1, host="no-such-host.invalid")
    assert in_larger_world.submit(request(1, ((1,), 0, 3), ((0, 1), 0, 0))) is True, "it meets nobody"
    if by_variable:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    else:
        handshake.Handshake(0, world_size=1, port=1, host="no-such-host.invalid")
    alone = handshake.Handshake()
    assert alone.submit(request(0, ((0,), 0, 3))) is True
    assert alone.submit_async(request(0, ((0,), 3, 1))).result() is True
    assert handshake.submit_handshake("same", {Group((0,)): 1}) is True
    assert handshake.DispatchGate("same", {Group((0,)): 1}, stage="DISPATCH_STAGE").vote() is True
    assert alone.address is None and alone.stats()["handshakes"] == 0
    with pytest.raises(_vocabulary.HandshakeConfigError, match="outside a world of 1 ranks"):
        alone.submit(request(0, (PAIR, 0, 1)))
    assert threading.active_count() == threads


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "name"])
def test_hosts(host, monkeypatch):
    if ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname() if host == "name" else host)
    with job(2, host=None) as ranks:
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]


def test_groups_of_another_class_in_any_order_of_ranks():
    """torch.distributed.new_group([1, 0]) has the ranks [1, 0]; it is the group {0, 1}."""
    groups = [Group(PAIR), Group([0, 1]), Group((1, 0)), _vocabulary.ProcessGroupId([1, 0])]
    with job(2) as (zero, one):
        for turn, group in enumerate(groups):
            counted = _vocabulary.RankCollectiveCounts({group: _vocabulary.ProcessGroupCollectiveCount(turn, 1)})
            vote = _vocabulary.CollectiveHandshakeRequest(counted, "same", 0)
            assert vote.participating_ranks == [0, 1]
            mine, theirs = together(lambda v=vote: zero.submit(v), lambda t=turn: one.submit(request(1, (PAIR, t, 1))))
            assert (mine, theirs) == (True, True), group.ranks


# ---------------------------------------------------------------------- one session a process


def test_all_handshakes_of_a_process_are_one(monkeypatch):
    with two_ranks() as (zero, one):
        monkeypatch.setenv(variable("TIMEOUT_S"), "7")  # it is read when the first is made
        again = [
            handshake.Handshake(),
            handshake.Handshake(0),
            handshake.Handshake(current_rank=0, world_size=2),
            handshake.Handshake(0, 0, timeout_s=PATIENCE_S, on_timeout="raise", stage="OFF", groups="role"),
            handshake.Handshake(coordinator="thread", host="127.0.0.1"),
        ]
        for turn, h in enumerate(again):
            assert submit_all([h, one], (PAIR, turn, 1)) == [True, True]
        assert zero.stats()["handshakes"] == len(again)
        assert {h.address for h in again} == {zero.address}


@pytest.mark.parametrize(
    ("keyword", "other"),
    [
        ("current_rank", 1), ("coordinator_rank", 1), ("world_size", 3), ("host", "localhost"), ("port", 1),
        ("timeout_s", 3), ("on_timeout", "split"), ("secret", "x"), ("stage", "COMPILE_STAGE"), ("groups", "exact"),
        ("debug", "folder"), ("coordinator", "process"),
    ],
)  # fmt: skip
def test_a_second_one_with_other_arguments_is_refused(keyword, other):
    with two_ranks() as (zero, one):
        with pytest.raises(_vocabulary.HandshakeConfigError, match=r"close\(\)") as error:
            handshake.Handshake(**{keyword: other})
        assert keyword in str(error.value)
        assert submit_all([zero, one], (PAIR, 0, 1)) == [True, True]


def test_what_was_opened_by_keyword_serves_the_functions_that_take_none():
    with two_ranks(stage="DISPATCH_STAGE") as (zero, one):
        assert handshake.should_handshake({Group(PAIR): 1})
        gate = handshake.DispatchGate("same", {Group(PAIR): 1})
        assert together(gate.vote, lambda: vote_in_turn(one, "same")) == [True, [True]]
        assert zero.stats()["handshakes"] == 1
    assert not handshake.should_handshake({Group(PAIR): 1}), "the stage was the handshake's that is closed now"


def test_how_groups_are_named_is_the_open_handshakes():
    with two_ranks(groups="exact") as (first, _):
        assert _vocabulary.group_naming() == "exact"
    assert _vocabulary.group_naming() == "role"
    with two_ranks(groups="exact"):
        first.close()
        assert _vocabulary.group_naming() == "exact", "that of another one was closed, once more"


def test_a_handshake_from_before_the_job_had_a_store_is_found_when_it_has_one(monkeypatch):
    class Store(dict):
        set = dict.__setitem__

        def check(self, keys):
            return all(key in self for key in keys)

    store = Store()
    distributed = types.SimpleNamespace(
        get_rank=lambda: 0,
        get_world_size=lambda: 2,
        distributed_c10d=types.SimpleNamespace(_get_default_store=lambda: store),
    )
    monkeypatch.setenv(variable("PORT"), "0")
    zero = handshake.Handshake(0, world_size=2, coordinator="thread", timeout_s=PATIENCE_S)
    monkeypatch.setattr(_rendezvous, "torch_distributed", lambda: distributed)
    assert handshake.Handshake().address == zero.address
    assert store, "others find it now, whether or not this rank ever votes"
    with open_rank(1, timeout_s=PATIENCE_S) as one:
        assert submit_all([zero, one], (PAIR, 0, 1)) == [True, True]


def test_threads_that_wait_for_one_attempt_to_connect_fail_with_it(monkeypatch):
    attempts, waiting = [], []
    one = open_rank(1, world_size=2, host="127.0.0.1", port=1)
    lock = one._session._connecting

    class Counted:
        def __enter__(self):
            waiting.append(1)
            lock.acquire()

        def __exit__(self, *exception):
            lock.release()

    def connect(*arguments):
        attempts.append(arguments)
        until(lambda: len(waiting) >= 4, "the other threads")
        raise _vocabulary.HandshakePeerLostError("nobody is there")

    monkeypatch.setattr(_client, "connect", connect)
    monkeypatch.setattr(one._session, "_connecting", Counted())
    errors = together(*[lambda: one.submit(request(1, (PAIR, 0, 1)))] * 4)
    assert [type(error) for error in errors] == [_vocabulary.HandshakePeerLostError] * 4
    assert len(attempts) == 1
    with pytest.raises(_vocabulary.HandshakePeerLostError):
        one.submit(request(1, (PAIR, 0, 1)))
    assert len(attempts) == 2, "a later vote tries again"


def test_closing_ends_an_attempt_to_connect(monkeypatch):
    monkeypatch.setattr(_client, "ATTEMPT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the attempt would go on for the whole timeout
        silent.settimeout(PATIENCE_S)
        one = open_rank(1, world_size=2, host="127.0.0.1", port=silent.getsockname()[1], timeout_s=10 * PATIENCE_S)

        def close():
            silent.accept()[0].close()
            one.close()

        error, _ = together(lambda: one.submit(request(1, (PAIR, 0, 1))), close)
    assert isinstance(error, _vocabulary.HandshakeError) and "the handshake was closed" in str(error)


def test_close_is_idempotent_and_tells_the_others(monkeypatch):
    with job(2) as (zero, one):
        assert submit_all([zero, one], (PAIR, 0, 1)) == [True, True]
        ticket = zero.submit_async(request(0, (PAIR, 1, 1)))
        one.close()
        one.close()
        with pytest.raises(_vocabulary.HandshakeError, match=r"the handshake was closed; make a new Handshake\(\)"):
            one.submit(request(1, (PAIR, 1, 1)))
        with pytest.raises(_vocabulary.HandshakePeerLostError, match="rank 1 closed its handshake"):
            ticket.result()


def test_a_new_handshake_starts_at_the_beginning_of_each_line():
    """A gate from before goes on with it."""
    gate = handshake.DispatchGate("same", {Group(PAIR): 1}, stage="DISPATCH_STAGE")
    for votes in (3, 2):
        with two_ranks() as (zero, one):
            mine, theirs = ["same"] * votes, lambda h=one, n=votes: vote_in_turn(h, *["same"] * n)
            assert together(lambda names=mine: [gate.vote() for _ in names], theirs) == [[True] * votes] * 2
            assert zero.stats()["handshakes"] == votes
        with pytest.raises(_vocabulary.HandshakeError, match="the handshake was closed"):
            zero.submit(request(0, (PAIR, votes, 1)))


@pytest.mark.parametrize("replaced", [0, 2])
def test_a_rank_is_replaced_and_all_start_anew(replaced):
    """The others close(), and make a new Handshake()."""

    def votes(processes):
        for turn in range(2):
            for rank, process in enumerate(processes):
                process.send("dispatch", ranks=WORLD, fingerprint=str(rank * turn))
            assert [process.answer() for process in processes] == [{"value": turn == 0}] * 3

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(RankProcess()) for _ in WORLD]
        for is_again in (False, True):
            if is_again:
                processes[replaced].process.kill()
                processes[replaced].process.wait()
                for rank in {*WORLD} - {replaced}:
                    processes[rank].call("close")
                processes[replaced] = stack.enter_context(RankProcess())
            about = processes[0].make(0, 0, stage="DISPATCH_STAGE")
            for rank in (1, 2):
                processes[rank].make(rank, about["address"][1], stage="DISPATCH_STAGE")
            votes(processes)


# ---------------------------------------------------------------------- when ranks do not come


def vote_at_once(*ranks):
    """These ranks vote on the world, all before the first of them can run out of time."""
    for h in ranks:
        h._session.connected()
    tickets = [h.submit_async(request(h.rank, (WORLD, 0, 2))) for h in ranks]
    return together(*(ticket.result for ticket in tickets))


def test_timeout_raises_with_the_facts():
    with job(3, timeout_s=1.0) as (zero, one, two):
        for rank, error in zip((0, 2), vote_at_once(zero, two), strict=True):
            assert isinstance(error, _vocabulary.HandshakeTimeoutError) and isinstance(error, TimeoutError)
            text = str(error)
            assert f"rank {rank}: gave up waiting for rank 1 at [0, 2) on ranks 0-2" in text
            assert variable("TIMEOUT_S") in text and variable("ON_TIMEOUT") in text
            assert "Look at the log of rank 1: compiling since its last vote, hung, slower" in text
            assert (error.ranks, error.group, error.span) == ((1,), WORLD, (0, 2))
            assert error.seconds > 0
        [error] = vote_at_once(one)
        assert isinstance(error, _vocabulary.HandshakeTimeoutError) and error.ranks == (1,)
        assert "This rank is slower" in str(error) and "the log of" not in str(error)


def test_timeout_splits_on_request(caplog):
    with job(3, timeout_s=1.0, on_timeout="split") as (zero, one, two):
        assert vote_at_once(zero, two) == [False, False]
        assert vote_at_once(one) == [False]
        assert zero.stats()["timeout"] == 1
    assert messages(caplog, "waiting for rank 1")
    assert not messages(caplog, variable("ON_TIMEOUT")), "that is set already"


def test_a_lost_rank_has_fields_of_its_own():
    with job(3) as (zero, one, two):
        two.submit_async(request(2, ((1, 2), 0, 1)))
        ticket = zero.submit_async(request(0, (WORLD, 0, 1)))
        two.close()
        with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
            ticket.result()
        assert isinstance(error.value, ConnectionError)
        assert (error.value.ranks, error.value.group, error.value.span) == ((2,), WORLD, (0, 1))
        assert "rank 0 can't go on" in str(error.value) and "restart the job" in str(error.value)
        assert submit_all([zero, one], (PAIR, 0, 1)) == [True, True]


def test_a_vote_out_of_order(monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", 10 * PATIENCE_S)  # a gap that was left behind would be noticed
    with job(2) as ranks:
        assert submit_all(ranks, (PAIR, 0, 4)) == [True, True]
        with pytest.raises(_vocabulary.HandshakeProtocolError, match=r"rank 0 \(.*\) voted out of order") as error:
            ranks[0].submit(request(0, (PAIR, 2, 1)))
        assert (error.value.ranks, error.value.group, error.value.span) == ((0,), PAIR, (2, 3))
        assert submit_all(ranks, (PAIR, 4, 1)) == [True, True], "the refused vote left no gap behind"
        assert ranks[0].stats()["refused"] == 1


def test_split_is_logged_the_first_time_and_then_tenfold(caplog):
    with job(2) as ranks, caplog.at_level(logging.INFO, "torch_tpu.handshake"):
        for turn in range(12):
            assert submit_all(ranks, (PAIR, turn, 1), fingerprints=["a", "b"]) == [False, False]
    texts = messages(caplog, "rank 0 runs graph a split")
    assert [text.partition("(time ")[2].partition(")")[0] for text in texts] == ["1", "10"]


# ---------------------------------------------------------------------- what can't be


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ("a string", _vocabulary.HandshakeTypeError, "expected a CollectiveHandshakeRequest, got str"),
        (None, _vocabulary.HandshakeTypeError, "got NoneType"),
        (request(1, (PAIR, 0, 1)), _vocabulary.HandshakeConfigError, "a request of rank 1 was submitted on rank 0"),
        (request(0, ((0, 7), 0, 1)), _vocabulary.HandshakeConfigError, "outside a world of 2 ranks"),
    ],
)
def test_requests_that_can_not_be(wrong, kind, words):
    with job(2) as ranks:
        for turn in range(2):  # before there is a connection, and after
            for submit in (ranks[0].submit, ranks[0].submit_async):
                with pytest.raises(kind, match=words) as error:
                    submit(wrong)
                assert isinstance(error.value, ValueError)
            assert submit_all(ranks, (PAIR, turn, 1)) == [True, True]


# What each keyword and variable takes is `_rendezvous`'s; here it is that whoever makes a Handshake is told.
@pytest.mark.parametrize(
    ("variables", "keywords", "words"),
    [
        ({"PORT": "many"}, {}, variable("PORT") + "='many'"),
        ({}, {"port": 70000}, "port=70000"),
        ({}, {"port": [1]}, "port=[1]"),
        ({"TIMEOUT_S": "soon"}, {}, variable("TIMEOUT_S") + "='soon'"),
        ({"TIMEOUT_S": "inf"}, {}, variable("TIMEOUT_S")),
        ({}, {"timeout_s": -1}, "timeout_s=-1"),
        ({"ON_TIMEOUT": "explode"}, {}, variable("ON_TIMEOUT") + "='explode'"),
        ({"STAGE": "SOMETIMES"}, {}, variable("STAGE") + "='SOMETIMES'"),
        ({}, {"stage": "SOMETIMES"}, "stage='SOMETIMES'"),
        ({"GROUPS": "colour"}, {}, variable("GROUPS")),
        ({}, {"groups": "colour"}, "groups="),
        ({}, {"coordinator": "rocket"}, "coordinator"),
        ({}, {"current_rank": 2}, "current_rank"),
        ({}, {"coordinator_rank": 2}, "coordinator_rank"),
        ({}, {"current_rank": "first"}, "current_rank='first'"),
        ({}, {"world_size": 0}, "world_size"),
        ({}, {"debug": 3}, "debug=3"),
        ({}, {"secret": b"x"}, "secret"),
    ],
)
def test_configuration_that_can_not_be(variables, keywords, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(variable(name), value)
    with pytest.raises(_vocabulary.HandshakeConfigError) as error:
        handshake.Handshake(**{"current_rank": 1, "world_size": 2, **keywords})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, ["current_rank", "RANK", "torch.distributed"]),
        ({"RANK": "0"}, ["world_size", "WORLD_SIZE"]),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, ["RANK='zero'"]),
        ({"RANK": "0", "WORLD_SIZE": "two"}, ["WORLD_SIZE='two'"]),
        ({"RANK": "5", "WORLD_SIZE": "2"}, ["5", "a world of 2"]),
    ],
)
def test_ranks_that_are_not_known(variables, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(_vocabulary.HandshakeConfigError) as error:
        handshake.Handshake()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_variables_are_read(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(variable("SECRET"), "hush")
    monkeypatch.setenv(variable("TIMEOUT_S"), "1.0")
    monkeypatch.setenv(variable("ON_TIMEOUT"), "split")
    with open_rank(0, port=0, host="127.0.0.1", coordinator="thread", timeout_s=PATIENCE_S) as zero:
        monkeypatch.setenv(variable("PORT"), str(zero.address[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with handshake.Handshake() as one:
            assert (one.rank, one.world_size) == (1, 2)
            zero.submit_async(request(0, (PAIR, 0, 1)))
            assert one.submit(request(1, (PAIR, 0, 1))) is True
            assert one.submit(request(1, (PAIR, 1, 1))) is False
        with handshake.Handshake(secret="guess") as stranger:
            with pytest.raises(_vocabulary.HandshakePeerLostError, match=variable("SECRET")):
                stranger.submit(request(1, (PAIR, 2, 1)))


def test_a_port_that_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv(variable("PORT"), str(port))
        with pytest.raises(_vocabulary.HandshakeConfigError) as error:
            handshake.Handshake(0, world_size=2, host="127.0.0.1")
        assert f"port {port} can't be used on this host (Address already in use)" in str(error.value)
        assert f"{variable('PORT')} to a free port, the same on all ranks" in str(error.value)
    with handshake.Handshake(0, world_size=2, host="127.0.0.1", coordinator="thread") as zero:
        assert zero.address == ("127.0.0.1", port), "the same call works once the port is free"


def test_port_zero_is_for_the_coordinator():
    rank = open_rank(1, world_size=2, port=0)
    with pytest.raises(_vocabulary.HandshakeConfigError, match=r"port 0 .* the other ranks need the port"):
        rank.submit(request(1, (PAIR, 0, 1)))


@pytest.mark.parametrize(
    ("keywords", "variables", "words"),
    [
        ({"stage": "DISPATCH_STAGE"}, {}, "stage differs: DISPATCH_STAGE on rank 2"),
        ({"groups": "role"}, {}, "groups differs: role on rank 2"),
        ({"groups": None}, {variable("GROUPS"): "role"}, "groups differs: role on rank 2"),
        ({"groups": None}, {variable("GROUPS"): "exact"}, "True"),
        ({}, {"TORCHELASTIC_RUN_ID": "job-8"}, "the coordinator there is another job's"),
        ({"on_timeout": "split"}, {}, "on timeout differs: split on rank 2"),
        ({"secret": "loud"}, {}, "the coordinator there is another job's"),
        ({"secret": None}, {}, "the coordinator there is another job's"),
        ({"world_size": 4}, {}, "world size differs: 4 on rank 2"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_and_nobody_else_notices(keywords, variables, words, monkeypatch):
    right = {"stage": "COMPILE_STAGE", "groups": "exact", "secret": "hush"}
    with job(3, ranks=PAIR, **right) as ranks:
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        right |= {"world_size": 3, "port": ranks[0].address[1], "timeout_s": 2.0}
        with open_rank(2, **{**right, **keywords}) as other:
            answer, *votes = together(
                lambda: other._session.connected().is_connected,
                *(lambda h=h: vote_in_turn(h, *["same"] * 5, start=1) for h in ranks),
            )
        assert votes == [[True] * 5] * 2
        assert words in str(answer) and isinstance(answer, bool | _vocabulary.HandshakeError)


# ---------------------------------------------------------------------- stages


def test_should_handshake(monkeypatch):
    world = _vocabulary.ProcessGroupId(range(4096))
    cases = [
        ({world: 1}, True),
        ({world: 0}, False),
        ({}, False),
        ({_vocabulary.ProcessGroupId((3,)): 5}, False),
        ({_vocabulary.ProcessGroupId((3,)): 5, Group((2, 9)): 1}, True),
        ({Group([9, 2]): 1}, True),
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
        with pytest.raises(_vocabulary.HandshakeConfigError, match=variable("STAGE") + "='ALWAYS'"):
            handshake.should_handshake({world: 1})


@pytest.mark.parametrize(
    ("new", "old", "stage"),
    [
        (None, "DISPATCH_STAGE", "DISPATCH_STAGE"),
        ("DISPATCH_STAGE", None, "DISPATCH_STAGE"),
        ("", "COMPILE_STAGE", "COMPILE_STAGE"),
        ("COMPILE_STAGE", "compile_stage", "COMPILE_STAGE"),
        ("COMPILE_STAGE", "DISPATCH_STAGE", None),
        ("OFF", "DISPATCH_STAGE", None),
    ],
)
def test_the_stage_by_either_variable(new, old, stage, monkeypatch):
    for name, value in ((variable("STAGE"), new), (OLD_STAGE_VARIABLE, old)):
        if value is not None:
            monkeypatch.setenv(name, value)
    uses = [
        lambda: handshake.DispatchGate("same", {}).stage.name,
        lambda: handshake.HandshakeStage.from_env().name,
        lambda: handshake.Handshake(0, world_size=1)._session.settings.stage.name,
    ]
    for use in uses:
        if stage is not None:
            assert use() == stage
            continue
        with pytest.raises(_vocabulary.HandshakeConfigError) as error:
            use()
        assert variable("STAGE") in str(error.value) and OLD_STAGE_VARIABLE in str(error.value)


@pytest.mark.parametrize("stage", ["OFF", "DISPATCH_STAGE"])
def test_submit_handshake_counts_and_votes_whatever_the_stage(stage, monkeypatch):
    monkeypatch.setattr(_client, "GAP_WAIT_S", PATIENCE_S)

    def mine():
        assert handshake.submit_handshake("idle", {}) and handshake.submit_handshake("idle", {Group(PAIR): 0})
        first = handshake.submit_handshake("a", {Group(PAIR): 2})
        handshake.record_eager_collectives(Group(PAIR), 5)
        ticket = handshake.submit_handshake_async("b", {_vocabulary.ProcessGroupId(PAIR): 1})
        last = handshake.submit_handshake_async("mine", {Group(PAIR): 1}, "the graph")
        return first, ticket.result(), last.result()

    def theirs(h):
        spans = [(PAIR, 0, 2), (PAIR, 7, 1), (PAIR, 8, 1)]
        standing = counts((PAIR, 0, 2))
        standing.record_eager_collectives(_vocabulary.ProcessGroupId(PAIR), 5)
        standing.increment_pg_collective_counts({_vocabulary.ProcessGroupId(PAIR): 1})
        found = [h.submit(request(1, spans[0], fingerprint="a"))]
        found.append(h.submit(_vocabulary.CollectiveHandshakeRequest(standing, "b", 1)))
        return (*found, h.submit(request(1, spans[2], fingerprint="theirs")))

    with two_ranks(stage=stage) as (_, one):
        assert together(mine, lambda: theirs(one)) == [(True, True, False)] * 2


def test_eager_collectives_are_recorded_without_a_session_and_start_none(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def both(other, start):
        vote = request(1, (PAIR, start, 1), fingerprint="same")
        return together(lambda: handshake.submit_handshake("same", {Group(PAIR): 1}), lambda: other.submit(vote))

    for first in (3, 5):
        handshake.record_eager_collectives(Group(PAIR), first)
        handshake.record_eager_collectives(_vocabulary.ProcessGroupId(PAIR), 2)
        with pytest.raises(_vocabulary.HandshakeConfigError):
            handshake.record_eager_collectives(Group(PAIR), 2**64)
        assert handshake._session is None or handshake._session.closed
        with two_ranks() as (_, one):
            handshake.record_eager_collectives(Group(PAIR), 1)
            assert both(one, first + 3) == [True, True]
    with two_ranks() as (_, one):
        assert both(one, 0) == [True, True]


@pytest.mark.parametrize(
    ("fingerprint", "counted"),
    [
        ("", {PAIR: 1}),
        ("same", {PAIR: -1}),
        ("same", {PAIR: 1, (1, 2): 1}),
        ("same", {PAIR: 1, (0, 5): 1}),
    ],
)
def test_nothing_is_counted_after_an_error(fingerprint, counted):
    def good(h):
        return together(lambda: handshake.submit_handshake("same", {Group(PAIR): 1}), lambda: vote_in_turn(h, "same"))

    with two_ranks(world_size=3) as (_, one):
        with pytest.raises(_vocabulary.HandshakeConfigError):
            handshake.submit_handshake(fingerprint, {Group(ranks): number for ranks, number in counted.items()})
        assert good(one) == [True, [True]]


def test_threads_that_call_submit_handshake_are_counted_one_by_one():
    with two_ranks() as (_, one):
        results = together(
            *[lambda: [handshake.submit_handshake("same", {Group(PAIR): 1}) for _ in range(25)]] * 4,
            lambda: vote_in_turn(one, *["same"] * 100),
        )
    assert results == [[True] * 25] * 4 + [[True] * 100]


@pytest.mark.parametrize(
    ("stage", "of_others", "expected"),
    [
        ("COMPILE_STAGE", ["usual"] * 2, [True, True, False, False, True]),  # as was agreed when each was first asked
        ("DISPATCH_STAGE", ["usual"] * 5, [True, True, False, False, True]),
        ("DISPATCH_STAGE", ["usual", "usual", "odd", "usual", "odd"], [True, True, True, False, False]),
    ],
)
def test_a_gate_votes_when_it_is_first_asked_or_at_each_dispatch(stage, of_others, expected):
    """Fat, split while the ranks differ, and fat again."""

    def mine():
        usual = handshake.DispatchGate("usual", {Group(PAIR): 1})
        odd = handshake.DispatchGate("odd", {Group(PAIR): 1}, lambda: "the graph")
        return [gate.vote() for gate in (usual, usual, odd, odd, usual)]

    with two_ranks(stage=stage) as (zero, one):
        found, _ = together(mine, lambda: vote_in_turn(one, *of_others))
        assert found == expected
        assert zero.stats()["handshakes"] == len(of_others)


@pytest.mark.parametrize("stage", ["OFF", "COMPILE_STAGE", "DISPATCH_STAGE"])
@pytest.mark.parametrize("wrong", [None, 5, [], {1: 1}, {Group(PAIR): -1}, {Group(PAIR): float("nan")}])
def test_what_a_gate_is_made_of_is_checked_in_every_stage(stage, wrong):
    with pytest.raises(_vocabulary.HandshakeConfigError):
        handshake.DispatchGate("same", wrong, stage=stage)


def test_a_graph_with_a_collective_whose_group_is_not_known_is_never_fat():
    own = {Group((0,)): 1}
    for stage in ("OFF", "COMPILE_STAGE", "DISPATCH_STAGE"):
        assert not handshake.DispatchGate("unhashable-01", own, stage=stage).vote()
        assert handshake.DispatchGate("unhashable-01", {}, stage=stage).vote()
        assert handshake.DispatchGate("01", own, stage=stage).vote()
    with handshake.Handshake(0, world_size=2, port=0):
        assert not handshake.submit_handshake("unhashable-01", own)
        assert handshake.submit_handshake("01", own)


def test_dispatch_gate_off_or_with_nothing_to_agree_on_starts_nothing():
    session = handshake._session  # none, or one of an earlier test, closed
    for stage in (None, "OFF"):
        off = handshake.DispatchGate("same", {Group(PAIR): 1}, stage=stage)
        assert off.vote() is off.vote_async().result() is off.answer is False
    for stage in ("OFF", "COMPILE_STAGE", handshake.HandshakeStage.DISPATCH_STAGE):
        for counted in ({}, {Group(PAIR): 0}, {Group((0,)): 3}):
            gate = handshake.DispatchGate("same", counted, stage=stage)
            assert gate.vote() is gate.vote_async().result() is gate.answer is True
    gate.abandon("nothing was agreed")
    assert handshake._session is session


def test_a_graph_that_is_never_run_takes_no_place_and_ranks_may_compile_in_other_orders():
    """In COMPILE_STAGE, where a gate votes once."""

    def gates(names):
        return {name: handshake.DispatchGate(name, {Group(PAIR): 1}) for name in names}

    with two_ranks(stage="COMPILE_STAGE") as (zero, one):
        mine = gates(["backward", "compiled and never run", "forward"])
        runs = ["forward", "backward", "forward", "backward"]
        found, _ = together(lambda: [mine[name].vote() for name in runs], lambda: vote_in_turn(one, *runs[:2]))
        assert found == [True] * 4
        assert [mine[name].answer for name in mine] == [True, None, True]
        assert zero.stats()["handshakes"] == 2


def test_threads_that_ask_a_gate_at_once_vote_once_in_the_compile_stage():
    with two_ranks(stage="COMPILE_STAGE") as (zero, one):
        gate = handshake.DispatchGate("same", {Group(PAIR): 1})
        *found, theirs = together(*[gate.vote] * 5, lambda: vote_in_turn(one, "same"))
        assert found == [True] * 5 and theirs == [True]
        assert zero.stats()["handshakes"] == 1


def test_what_was_not_answered_is_not_voted_on_again_in_the_compile_stage():
    with two_ranks(stage="COMPILE_STAGE", timeout_s=0.2) as (zero, _):
        gate = handshake.DispatchGate("same", {Group(PAIR): 1})
        texts = [error_of(gate.vote) for _ in range(2)]
        assert texts[0] == texts[1] and gate.answer is None
        assert "This graph was agreed before" not in texts[0]
        assert zero.stats()["handshakes"] == 1
    with two_ranks(stage="COMPILE_STAGE") as (_, one):  # all start anew
        assert together(gate.vote, lambda: vote_in_turn(one, "same")) == [True, [True]]


def test_a_rank_that_alone_compiles_again_is_told_that_this_was_agreed_before():
    with two_ranks(stage="COMPILE_STAGE", timeout_s=1.0) as (_, one):
        first = handshake.DispatchGate("same", {Group(PAIR): 1})
        assert together(first.vote, lambda: vote_in_turn(one, "same")) == [True, [True]]
        text = error_of(handshake.DispatchGate("same", {Group(PAIR): 1}).vote)
        assert "This graph was agreed before: most likely only this rank has compiled it again" in text


def test_facts_of_a_dispatch_are_part_of_its_fingerprint(caplog):
    with two_ranks(stage="DISPATCH_STAGE") as (_, one):
        mine, theirs = (handshake.DispatchGate("graph", {Group(PAIR): 1}) for _ in range(2))
        theirs._session = one._session  # rank 1's
        theirs._takes = one._session.client.resolve({_vocabulary.ProcessGroupId(PAIR): 1})
        one._session.connected()
        sides = [(None, None), ("8", "8"), ("8", "9"), ("8", None), (b"8", "8"), (None, None), ("", "")]
        found = together(
            lambda: [mine.vote(facts) for facts, _ in sides], lambda: [theirs.vote(facts) for _, facts in sides]
        )
        assert found == [[True, True, False, False, True, True, True]] * 2
        [text] = messages(caplog, "rank 0 runs graph \"graph with '8'\" (graph) split", "\"graph with '9'\" (graph)")
        assert "\"graph with '8'\" (graph) on rank 0" in text
        with pytest.raises(_vocabulary.HandshakeTypeError):
            mine.vote(8)
        assert together(mine.vote, theirs.vote) == [True, True], "what can't be facts was not counted"


def test_a_gate_is_loaded_from_a_compile_cache():
    gates = [
        handshake.DispatchGate("graph", {Group(PAIR): 1}, lambda: "the graph", stage="OFF"),
        handshake.DispatchGate("x" * 5000, {Group(PAIR): 1}, "the graph", stage="DISPATCH_STAGE", partial=True),
    ]
    with two_ranks(stage="COMPILE_STAGE") as (_, one):
        loaded = [pickle.loads(pickle.dumps(gate)) for gate in gates]
        assert [gate.stage.name for gate in loaded] == ["COMPILE_STAGE"] * 2, "that of the process"
        assert [(gate._text, gate.partial) for gate in loaded] == [(None, False), ("the graph", True)]
        found = together(lambda: [gate.vote() for gate in loaded], lambda: vote_in_turn(one, "graph", "x" * 5000))
        assert found == [[True, True]] * 2


@pytest.mark.parametrize("of_coordinator", [True, False])
def test_a_rank_that_can_not_run_what_was_agreed_tells_the_others_why(of_coordinator, caplog):
    with two_ranks(stage="DISPATCH_STAGE", world_size=3) as (zero, one):
        with open_rank(2, world_size=3, port=zero.address[1], host="127.0.0.1", stage="DISPATCH_STAGE") as two:
            gate = handshake.DispatchGate("same", {Group(PAIR): 1})
            assert together(gate.vote, lambda: vote_in_turn(one, "same")) == [True, [True]]
            for h in (one, two):
                h._session.connected()
            left, other = (zero, one) if of_coordinator else (one, zero)
            (gate if of_coordinator else one).abandon("OSError: main.so: file too short")
            (gate if of_coordinator else one).abandon("OSError: main.so: file too short")
            reason = "it can't run what was agreed: OSError: main.so: file too short"
            for ranks in (PAIR, WORLD):
                with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
                    other.submit(request(other.rank, (ranks, 1, 1)))
                assert error.value.ranks == (left.rank,)
                assert f"rank {left.rank} (" in str(error.value) and reason in str(error.value)
            assert reason in error_of(lambda: left.submit(request(left.rank, (PAIR, 1, 1))))
            among = (other.rank, two.rank)
            assert submit_all([other, two], (among, 0, 1)) == [True, True], "they don't need it"
            zero.close()
            assert (reason in error_of(lambda: two.submit(request(2, (among, 1, 1))))) == of_coordinator
    assert len(messages(caplog, f"rank {left.rank} tells the others that {reason}")) == 1


def test_a_timeout_can_be_changed_at_run_time():
    with two_ranks(timeout_s=10 * PATIENCE_S) as (zero, one):
        waiting = zero.submit_async(request(0, (PAIR, 0, 1)))
        for h in (zero, one):
            h.set_timeout(0.2)
        assert zero._session.wait_s < PATIENCE_S
        text = error_of(lambda: zero.submit(request(0, (PAIR, 1, 1))))
        assert "gave up waiting for rank 1 at [1, 2)" in text and "set_timeout(seconds)" in text
        assert one.submit(request(1, (PAIR, 0, 1))) is True and waiting.result() is True, "that was cast before"
        for wrong in (0, -1, "soon", float("inf")):
            with pytest.raises(_vocabulary.HandshakeConfigError, match="seconds="):
                zero.set_timeout(wrong)


def test_the_port_of_the_coordinator(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(variable("PORT"), "0")
    port = handshake._select_handshake_port(0, 0)
    assert port == handshake._select_handshake_port() == handshake.Handshake().address[1] > 0


def test_all_that_a_process_has_can_be_reset():
    """As the tests of torch_tpu do it on every rank."""
    for _ in range(2):
        with two_ranks() as (_, one):
            vote = functools.partial(handshake.submit_handshake, "a", {Group(PAIR): 1})
            assert together(vote, lambda: vote_in_turn(one, "a")) == [True, [True]]
            handshake.Handshake._reset_instances()
            handshake.record_eager_collectives(Group(PAIR), 5)
        handshake.Handshake._reset_instances()


# ---------------------------------------------------------------------- plans and graphs


def split_partially(h, turn=0):
    """A vote that is split, with a plan to be looked for."""
    ticket = h.submit_async(request(h.rank, (PAIR, turn, 1), fingerprint=f"graph {h.rank}"), partial=True)
    assert ticket.result() is False
    return ticket


def go_through(exchange):
    """A plan that all ranks agree on, of the reference rank's making."""
    is_reference = exchange.reference_rank() == exchange.rank
    keys = exchange.share(b"keys" if is_reference else None)
    return keys, exchange.intersect(b"\x01"), exchange.agree("a plan")


AGREED = (b"keys", b"\x01", True)


@needs("_graph_plan")
def test_ranks_that_all_can_agree_on_a_plan():
    with job(2) as ranks:
        for turn in range(2):
            found = together(*(lambda h=h, t=turn: go_through(split_partially(h, t).exchange) for h in ranks))
            assert found == [AGREED] * 2


def test_who_does_not_take_part_opens_no_exchange():
    with job(2) as (zero, one):
        ticket = zero.submit_async(request(0, (PAIR, 0, 1), fingerprint="a"), partial=True)
        assert one.submit(request(1, (PAIR, 0, 1), fingerprint="b")) is False
        assert ticket.result() is False and ticket.exchange is None


@needs("_graph_plan")
@pytest.mark.parametrize("vote", [lambda h, r: h.submit(r), lambda h, r: h.submit_async(r).result()])
def test_a_thread_that_goes_on_to_its_next_vote_has_left_its_exchange(vote):
    """Its ticket may be kept, as by a variable that is used again."""
    with job(2) as (zero, one):

        def go_on():
            ticket = split_partially(zero)
            answer = vote(zero, request(0, (PAIR, 1, 1)))
            return answer, ticket.exchange.agree("a plan")

        def stay():
            found = go_through(split_partially(one).exchange)
            return one.submit(request(1, (PAIR, 1, 1))), found[-1]

        assert together(go_on, stay) == [(True, False)] * 2


def in_thread_of(identity, call):
    """What `call` returned in a new thread, which has the identity of an ended one, or any if that is None; and its
    identity."""
    answers, release = queue.Queue(), threading.Event()

    def run():
        if identity in (None, threading.get_ident()):
            answers.put((call(), threading.get_ident()))
        else:
            answers.put(None)
            release.wait(PATIENCE_S)  # keeps its own identity, so that the next thread gets another

    found, threads = None, []
    while found is None and len(threads) < 100:
        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        found = answers.get(timeout=PATIENCE_S)
    release.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found or pytest.skip("no thread gets the identity of an ended one here")


@needs("_graph_plan")
def test_a_thread_with_the_identity_of_an_ended_one_calls_nothing_off():
    with job(2) as (zero, one):
        theirs = one.submit_async(request(1, (PAIR, 0, 1), fingerprint="graph 1"), partial=True)
        ticket, identity = in_thread_of(None, lambda: split_partially(zero))
        one.submit_async(request(1, (PAIR, 1, 1)))
        answer, _ = in_thread_of(identity, lambda: zero.submit(request(0, (PAIR, 1, 1))))
        assert (answer, theirs.result()) == (True, False)
        assert together(*(lambda t=t: go_through(t.exchange) for t in (ticket, theirs))) == [AGREED] * 2


@needs("_graph_report")
def test_where_to_set_the_folder_for_reports(tmp_path, caplog):
    with job(2, ranks=[0]) as (zero,):
        with open_rank(1, world_size=2, host="127.0.0.1", port=zero.address[1], debug=tmp_path) as one:
            assert submit_all([zero, one], (PAIR, 0, 1), fingerprints="ab") == [False, False]
    [of_zero] = messages(caplog, "rank 0 runs")
    [of_one] = messages(caplog, "rank 1 runs")
    assert of_zero.endswith(f"Set {variable('DEBUG')} to a folder to see what differs and what to change")
    assert of_one.endswith(f"To see why, set {variable('DEBUG')} on rank 0 too, which coordinates")


@needs("_graph_report")
def test_graphs_are_printed_for_reports_only_and_once_a_fingerprint(tmp_path, caplog):
    printed = []

    def printer(name):
        def text():
            printed.append((name, threading.current_thread().name))
            return f"graph():\n    %x : [num_users=1] = placeholder[target={name}]\n    return x\n"

        return text

    def submit_with_graph(h, turn, name):
        vote = request(h.rank, (WORLD, turn, 1), fingerprint=name)
        return h.submit(vote, printer(f"{name}{h.rank}"))

    def submit(ranks, turn, names):
        return together(
            *(lambda h=h, n=n: submit_with_graph(h, turn, n) for h, n in zip(ranks, names, strict=True))
        )

    with job(3) as ranks:
        assert submit(ranks, 0, "abb") == [False] * 3
        assert printed == []
    with job(3, debug=tmp_path / "reports") as ranks:
        for turn, names in enumerate(("aaa", "abb", "abb")):
            assert submit(ranks, turn, names) == [names == "aaa"] * 3
        until(lambda: list((tmp_path / "reports").glob("*.txt")), "the report")
        until(lambda: messages(caplog, "why the ranks' graphs were split"))
    assert sorted(name[0] for name, _ in printed) == ["a", "b"]
    assert {thread for _, thread in printed} == {"handshake-graph"}


def test_without_what_makes_plans_and_reports_that_is_said_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(_coordinator, "find_extra", lambda name: None)
    monkeypatch.setattr(handshake, "_absent", set())

    def vote(h, turn):
        ticket = h.submit_async(request(h.rank, (PAIR, turn, 1), fingerprint=str(h.rank)), "a graph", partial=True)
        return ticket.result(), ticket.exchange

    with job(2, debug=tmp_path) as ranks:
        for turn in range(3):
            assert together(*(lambda h=h, t=turn: vote(h, t) for h in ranks)) == [(False, None)] * 2
    assert len(messages(caplog, "_graph_report.py is not beside")) == 1
    assert len(messages(caplog, "_graph_plan.py is not beside")) == 1
    for text in messages(caplog, "runs graph"):
        assert variable("DEBUG") not in text, "that is set, on all ranks"


# ---------------------------------------------------------------------- forks


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


@contextlib.contextmanager
def forked(child):
    """Forks a process that calls `child()`, which yields lines of text. Gives a function that reads the next line. The
    process stays until the parent has looked at everything."""
    hold, release = os.pipe()
    said, say = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(release)
            for text in child():
                os.write(say, f"{text}\n".encode())
            os.read(hold, 1)
        except BaseException as error:
            os.write(say, f"{error!r}\n".encode())
        finally:
            os._exit(0)
    os.close(hold)
    os.close(say)
    with open(said) as lines:
        try:
            yield lambda: lines.readline().rstrip("\n")
        finally:
            os.close(release)
            os.waitpid(pid, 0)


def error_of(call):
    """The text of the HandshakeError that `call` raises."""
    with pytest.raises(_vocabulary.HandshakeError) as error:
        call()
    return str(error.value)


@needs_fork
@pytest.mark.parametrize("coordinator", ["process", "thread"])
def test_a_forked_child_does_not_disturb_its_parent(coordinator):
    with two_ranks(coordinator=coordinator) as (zero, one):
        assert submit_all([zero, one], (PAIR, 0, 1)) == [True, True]
        port = zero.address[1]

        def child():
            yield error_of(lambda: zero.submit(request(0, (PAIR, 1, 1))))
            yield error_of(lambda: handshake.Handshake(0, world_size=2))
            yield error_of(handshake.Handshake)  # its parent had rank and world size from keywords
            zero.close()
            handshake._close()
            yield "closed"

        with forked(child) as read:
            for _ in range(3):
                text = read()
                assert text.startswith("rank 0: this process is a fork of that rank's, which votes for it: ")
                assert text.endswith("or make them ranks of their own")
            assert read() == "closed"
            for turn in range(1, 20):
                assert submit_all([zero, one], (PAIR, turn, 1)) == [True, True]
            # What the parent closes is closed for everybody, though the child is still there.
            ticket = one.submit_async(request(1, (PAIR, 20, 1)))
            zero.close()
            with pytest.raises(_vocabulary.HandshakePeerLostError):
                ticket.result()
            socket.create_server(("127.0.0.1", port)).close()


@needs_fork
def test_a_forked_child_may_be_a_rank_of_its_own():
    with handshake.Handshake(0, world_size=2, port=0, host="127.0.0.1", timeout_s=PATIENCE_S) as zero:

        def child():
            one = handshake.Handshake(1, world_size=2, port=zero.address[1], host="127.0.0.1", timeout_s=PATIENCE_S)
            yield one.submit(request(1, (PAIR, 0, 1)))

        with forked(child) as read:
            assert zero.submit(request(0, (PAIR, 0, 1))) is True
            assert read() == "True"


@needs_fork
def test_a_fork_of_a_process_that_has_closed_its_handshake_may_be_that_rank():
    options = {"world_size": 2, "port": 0, "host": "127.0.0.1"}
    handshake.Handshake(0, **options).close()

    def child():
        yield handshake.Handshake(0, **options).rank

    with forked(child) as read:
        assert read() == "0"
