# SPDX-License-Identifier: Apache-2.0
"""Observing: votes are cast, and nobody waits for what comes of them."""

import contextlib
import json
import logging
import os
import signal

import pytest
from layout import load
from ranks import PATIENCE_S, handshake, open_rank, request, until

_coordinator = load("_coordinator")
_observe = load("_observe")

PAIR = (0, 1)


@contextlib.contextmanager
def observing(ranks=PAIR, **options):
    """These ranks of two, in this process; each observes. Rank 0 coordinates."""
    options = {"world_size": 2, "mode": "observe", "timeout_s": PATIENCE_S, **options}
    with contextlib.ExitStack() as stack:
        zero = stack.enter_context(open_rank(0, port=0, **{"coordinator": "thread", **options}))
        port = until(lambda: zero.address, "the coordinator")[1]
        yield [zero, *(stack.enter_context(open_rank(rank, port=port, **options)) for rank in ranks[1:])]


def vote(h, step, fingerprint="same", **options):
    answer = h.submit(request(h.rank, (PAIR, step, 1), fingerprint=fingerprint), **options)
    assert answer is True
    return answer


def observed(h, name, **counts):
    """Waits until this is what was observed of a graph."""
    until(lambda: h.stats()["graphs"].get(name) == counts, f"{counts} of {name} on rank {h.rank}")


def warnings(caplog, words):
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records if words in record.getMessage()]


def test_what_would_have_been_fat_is_counted_by_graph_and_nothing_is_logged(caplog):
    with observing() as ranks:
        for step in range(5):
            vote(ranks[0], step)  # nobody else is there yet
        for step in range(5):
            vote(ranks[1], step, label=None)
        for h in ranks:
            observed(h, "same", votes=5, fat=5)
    assert not caplog.records


def test_what_would_have_been_split_is_logged_and_reported_and_runs_whole(caplog, tmp_path):
    folder = tmp_path / "reports"
    with observing(debug=str(folder)) as ranks:
        for step in range(10):
            for h in ranks:
                vote(h, step, f"graph of {h.rank}", graph_text="", label="layer 3")
        for h in ranks:
            observed(h, f'"layer 3" (graph of {h.rank})', votes=10, split=10)
        lines = warnings(caplog, "whole, which the handshake would have split")
        assert sorted(line.split("(time ")[1].split(")")[0] for line in lines) == ["1", "1", "10", "10"]
        assert 'rank 0 runs graph "layer 3" (graph of 0)' in "".join(lines)
        assert "fingerprints differ at [0, 1)" in lines[0]
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("handshake-observed-rank*.json"))]
    assert [file["rank"] for file in files] == [0, 1]
    assert files[1]["votes"]["split"] == 10 and files[1]["graphs"]['"layer 3" (graph of 1)']["split"] == 10


def test_a_rank_that_does_not_come_is_said_once_and_nobody_waits_for_it(caplog):
    with observing(ranks=[0], timeout_s=0.2) as [zero]:
        for step in range(3):
            vote(zero, step)
        observed(zero, "same", votes=3, timeout=3)
    [line] = warnings(caplog, "gave up waiting")
    assert "rank 1" in line and "Graph: same" in line and "this rank ran whole all the same" in line


def test_votes_without_an_answer_are_bounded(caplog):
    with observing(ranks=[0]) as [zero]:
        for step in range(_observe.MAX_UNANSWERED + 500):
            vote(zero, step)
        assert len(zero._session.client._votes) == _observe.MAX_UNANSWERED
        assert zero._session.observer.let_go == 500
        until(lambda: warnings(caplog, "votes without an answer"), "the warning")
    assert len(warnings(caplog, "votes without an answer")) == 1


def test_a_coordinator_that_is_not_there_is_one_warning(caplog):
    options = {"world_size": 2, "mode": "observe", "timeout_s": 0.2}
    with open_rank(0, port=0, coordinator="thread", **options) as zero:
        port = until(lambda: zero.address, "the coordinator")[1]
    with open_rank(1, port=port, **options) as one:
        vote(one, 0)
        until(lambda: warnings(caplog, "observes no more"), "the warning")
        for step in range(1, 2000):
            vote(one, step)
    [line] = warnings(caplog, "handshake")
    assert "rank 1 observes no more, and the job goes on without" in line and f"port {port}" in line


@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL])
def test_a_coordinator_that_is_stopped_or_killed_holds_nobody_up(what, caplog):
    with observing(coordinator="process") as ranks:
        for h in ranks:
            vote(h, 0)
        for h in ranks:
            observed(h, "same", votes=1, fat=1)
        child = ranks[0]._session._coordinator.pid
        os.kill(child, what)
        for step in range(1, 3000):
            for h in ranks:
                vote(h, step)
        if what == signal.SIGKILL:
            until(lambda: len(warnings(caplog, "observes no more")) == 2, "the warnings")
        else:
            os.kill(child, signal.SIGCONT)
            for h in ranks:
                until(lambda h=h: h.stats()["fat"] == _observe.MAX_UNANSWERED + 1, "the verdicts")


def test_modes_must_agree():
    with observing(ranks=[0]) as [zero]:
        with open_rank(1, port=zero.address[1], world_size=2) as one:
            with pytest.raises(handshake.HandshakeProtocolError, match="mode differs: enforce on rank 1"):
                one.submit(request(1, (PAIR, 0, 1)))


def test_it_needs_its_file(monkeypatch, caplog):
    monkeypatch.setattr(_coordinator, "find_extra", lambda name: None)
    monkeypatch.setattr(handshake, "_absent", set())
    with pytest.raises(handshake.HandshakeConfigError, match=r"_observe\.py"):
        open_rank(0, world_size=2, mode="observe")
