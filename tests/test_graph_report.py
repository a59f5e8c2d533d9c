# SPDX-License-Identifier: Apache-2.0
"""Reports of splits: made in another process, from the graphs as they came; with nothing left behind and everything
said, whatever the folder or the process does."""

import os
import time
import zlib
from pathlib import Path

import pytest
from layout import load
from ranks import Peer, job, request, submit_all, together, until

_consensus = load("_consensus")
_protocol = load("_protocol")
_reports = load("_reports")
_splits = load("_splits")

FACTS = {rank: {"host": "here", "pid": 100 + rank, "python": "3.11.7"} for rank in range(8)}


def graph(constant):
    """The text of a graph."""
    lines = (
        f"    %mul : [num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%x, {constant}))",
        "    return mul",
    )
    return "\n".join(("graph():", "    %x : [num_users=1] = placeholder[target=x]", *lines, ""))


def compressed(constant):
    return zlib.compress(graph(constant).encode())


def split(*graphs, start=0):
    """A component in which each rank has another fingerprint, and the graphs that came; None: it has none."""
    world = _consensus.Group(tuple(range(len(graphs))))
    splits = _splits.Splits(30.0, True, lambda rank: False)
    votes = [
        _splits.SplitVote(rank, 1, [(world, start, start + 1)], bytes([rank]) * 16, False, graph is not None)
        for rank, graph in enumerate(graphs)
    ]
    record, _ = splits.add(votes, "fingerprints differ", 0.0)
    for vote in votes:
        if splits.asks_for_graph(record, vote, 0.0):
            splits.add_graph(vote.rank, vote.number, graphs[vote.rank])
    return record, splits


@pytest.fixture
def reports(tmp_path):
    made = []

    def make(folder=tmp_path / "reports"):
        made.append(_reports.Reports(str(folder)))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one._thread is None or not one._thread.is_alive()
        assert one._process is None or one._process.returncode is not None, "a process is left"


def finished(made, number=1):
    found = []
    until(lambda: found.extend(made.finished()) or len(found) >= number, "the report")
    assert made.next_look() is None, "nothing is under way any more"
    return found if number > 1 else found[0]


# ---------------------------------------------------------------------- what comes out


def test_a_report(reports, tmp_path):
    made = reports()
    assert made.next_look() is None and not (tmp_path / "reports").exists()
    made.add(*split(compressed(2), compressed(3)), FACTS, ["[0, 1) on ranks 0-1: fat"])
    assert made.next_look() is not None
    found = finished(made)
    assert found.failure == "" and found.ranks == {0, 1}
    assert "ranks 0-1 have 2 different graphs" in found.text and "here:100" in found.text
    assert "[0, 1) on ranks 0-1: fat" in found.text and "Reason: fingerprints differ" in found.text
    assert Path(found.path).read_text().startswith("<!")
    assert {path.suffix for path in (tmp_path / "reports").iterdir()} == {".txt", ".html"}, "nothing else is left"


def test_what_a_report_lacks_is_said_in_it(reports, monkeypatch):
    monkeypatch.setattr(_splits, "MAX_VARIANTS", 4)
    made = reports()
    whole = compressed(2)
    made.add(*split(whole, None, b"no zlib at all", whole[:-6], compressed(3), compressed(4)), FACTS, [])
    text = finished(made).text
    assert "Note: rank 1: no graph was given; pass graph_module_str to the vote" in text
    assert "Note: rank 2: the graph can't be unpacked" in text
    assert "Note: rank 3: the graph came cut off" in text
    assert "Note: rank 5: left out: a report compares at most 4 graphs" in text


def test_a_graph_that_was_asked_for_and_has_not_come(reports):
    record, splits = split(compressed(2), compressed(3))
    splits._graphs.popitem()
    made = reports()
    made.add(record, splits, FACTS, [])
    assert "Note: rank 1: the graph was asked for and has not come" in finished(made).text


def test_the_last_report_says_so(reports, monkeypatch):
    monkeypatch.setattr(_reports, "MAX_REPORTS", 2)
    made = reports()
    for start in range(2):
        made.add(*split(compressed(2), compressed(3), start=start), FACTS, [])
    assert ["this is report 2 of the job, and the last" in one.text for one in finished(made, 2)] == [False, True]


# ---------------------------------------------------------------------- what may go wrong


def _file(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file", "File exists"


def _below_a_file(tmp_path):
    return _file(tmp_path)[0] / "reports", "Not a directory"


def _read_only(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("this user may write everywhere")
    tmp_path.chmod(0o500)
    return tmp_path / "reports", "Permission denied"


def _no_file_can_be_made(tmp_path):
    # As a full disk: what is there already is a folder where the files should go.
    for suffix in (".txt", ".html"):
        (tmp_path / f"handshake-split-{os.getpid()}-0001{suffix}").mkdir()
    return tmp_path, "Is a directory"


@pytest.mark.parametrize("fault", [_file, _below_a_file, _read_only, _no_file_can_be_made])
def test_a_folder_that_can_not_be_used(reports, tmp_path, fault):
    folder, words = fault(tmp_path)
    made = reports(folder)
    made.add(*split(compressed(2), compressed(3)), FACTS, [])
    found = finished(made)
    assert found.text == "" and found.failure == f"splits can't be explained in {folder}: {words}"
    tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/does/not/exist"], "No such file or directory"),
        (["/bin/sh", "-c", "kill -9 $$"], "its process ended with status -9"),
        (["/bin/sh", "-c", "exit 3"], "its process ended with status 3"),
        (["/bin/sleep", "60"], "a comparison took more than 0 s"),
    ],
)
def test_a_process_that_does_not_do_it(reports, tmp_path, monkeypatch, command, words):
    monkeypatch.setattr(_reports._child, "command", lambda *_: command)
    if command[0] == "/bin/sleep":
        monkeypatch.setattr(_reports, "COMPARE_WITHIN_S", 0.1)
    made = reports()
    made.add(*split(os.urandom(10**6), compressed(3)), FACTS, [])  # more than a pipe holds
    found = finished(made)
    assert found.failure == f"splits can't be explained in {tmp_path / 'reports'}: {words}"
    assert list((tmp_path / "reports").iterdir()) == []


def test_comparisons_that_wait_are_bounded(reports, monkeypatch):
    monkeypatch.setattr(_reports, "MAX_WAITING", 2)
    monkeypatch.setattr(_reports._child, "command", lambda *_: ["/bin/sleep", "60"])
    monkeypatch.setattr(_reports, "CLOSE_WITHIN_S", 0.0)
    made = reports()
    for start in range(5):
        made.add(*split(compressed(2), compressed(3), start=start), FACTS, [])
    assert [one.failure for one in made.finished()] == ["splits are left unexplained: 2 wait for their turn"] * 3


def test_closing_ends_a_comparison_that_runs(reports, monkeypatch):
    monkeypatch.setattr(_reports._child, "command", lambda *_: ["/bin/sleep", "60"])
    monkeypatch.setattr(_reports, "CLOSE_WITHIN_S", 0.01)
    made = reports()
    made.add(*split(os.urandom(10**6), compressed(3)), FACTS, [])
    process = until(lambda: made._process, "the process")
    made.close()
    until(lambda: process.poll() is not None, "its end")


# ---------------------------------------------------------------------- within a job


def _split_all(ranks, turn, text):
    """All ranks vote on different graphs."""
    world = tuple(h.rank for h in ranks)
    votes = [request(h.rank, (world, turn, 1), fingerprint=f"{turn}.{h.rank}") for h in ranks]
    return together(*(lambda h=h, v=v: h.submit(v, text) for h, v in zip(ranks, votes, strict=True)))


def test_no_vote_waits_for_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(_reports._child, "command", lambda *_: ["/bin/sleep", "60"])
    monkeypatch.setattr(_reports, "CLOSE_WITHIN_S", 0.01)
    with job(2, debug=tmp_path) as ranks:
        assert _split_all(ranks, 0, "".join(map(str, range(10**5)))) == [False, False]
        server = ranks[0]._session._coordinator._server
        until(lambda: server._reports._process, "the process")
        started = time.monotonic()
        for turn in range(1, 21):
            assert submit_all(ranks, ((0, 1), turn, 1)) == [True, True]
        assert time.monotonic() - started < 5.0


def test_each_cause_is_logged_once_on_the_coordinators_rank(tmp_path):
    (tmp_path / "file").write_text("")
    with job(2, ranks=(0,), coordinator="thread", debug=tmp_path / "file") as (zero,):
        # Both ranks are played frame by frame: then what is sent to them is seen.
        peers = [Peer(zero.address[1]) for _ in range(2)]
        for rank, peer in enumerate(peers):
            assert isinstance(peer.hello(rank, world_size=2), _protocol.Welcome)
            peer.send(_protocol.group(0, (0, 1)))
        reports = zero._session._coordinator._server._reports
        logged = []
        for turn in range(3):
            for rank, peer in enumerate(peers):
                digest = bytes([turn, rank]) * 8
                peer.send(_protocol.vote(turn, _protocol.HAS_GRAPH, digest, [(0, turn, turn + 1)]))
            for rank, peer in enumerate(peers):
                while not isinstance(message := peer.receive(), _protocol.Verdict):
                    if isinstance(message, _protocol.Report):
                        logged.append((rank, message.facts))
                assert message.flags == _protocol.SEND_GRAPH
                peer.send(_protocol.graph(turn, compressed(rank)))
            until(lambda turn=turn: reports._number > turn and not reports._under_way, "the report")
        zero.close()
        for rank, peer in enumerate(peers):
            while not isinstance(message := peer.receive(), _protocol.Goodbye):
                logged.append((rank, message.facts))
            peer.sock.close()
    assert logged == [(0, {"log": f"splits can't be explained in {tmp_path / 'file'}: File exists"})]
