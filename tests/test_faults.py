# SPDX-License-Identifier: Apache-2.0
"""Processes that die, strangers at the door, and what is left when it is over: with real processes."""

import contextlib
import errno
import json
import logging
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from layout import TESTS, child_environment, load
from ranks import PATIENCE_S, Peer, handshake, job, request, submit_all, until

_child = load("_child")
_coordinator = load("_coordinator")
_protocol = load("_protocol")
_vocabulary = load("_vocabulary")

WORLD = (0, 1, 2)
# "They know within 1 s": the promise to ranks that wait for one that is gone.
PROMISED_S = 1.0

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and process ids are used as POSIX has them")


class RankProcess:
    """A rank in a process of its own; see rank_process.py."""

    def __init__(self, **variables):
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "rank_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(**variables),
        )
        self.others = []  # process ids to end with it

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        for pid in self.others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def pid(self):
        return self.process.pid

    def send(self, command, **arguments):
        self.process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(PATIENCE_S), "a rank's process does not answer"
        return json.loads(self.process.stdout.readline())

    def call(self, command, **arguments):
        self.send(command, **arguments)
        return self.answer()

    def make(self, rank, port, world_size=3, **options):
        options = {"host": "127.0.0.1", "timeout_s": PATIENCE_S, **options}
        return self.call("make", current_rank=rank, world_size=world_size, port=port, **options)["value"]


def is_alive(pid):
    """Whether the process runs; a zombie doesn't."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def assert_ends(pid):
    until(lambda: not is_alive(pid), f"the end of process {pid}")


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks at processes through /proc")


def wait_in_vote(*ranks):
    """Submits without waiting, and makes sure that the votes have arrived: a later one of each rank was answered."""
    tickets = [h.submit_async(request(h.rank, (WORLD, 0, 1))) for h in ranks]
    barrier = [h.submit_async(request(h.rank, (tuple(h.rank for h in ranks), 0, 1))) for h in ranks]
    assert [ticket.result() for ticket in barrier] == [True] * len(ranks)
    return tickets


# ---------------------------------------------------------------------- a rank is gone


@pytest.mark.parametrize("end", ["SIGKILL", "exit", "SIGKILL with a forked child"])
def test_a_rank_that_is_gone_is_known_to_those_who_wait_for_it(end):
    with job(3, coordinator="process", ranks=(0, 1)) as ranks, RankProcess() as lost:
        lost.make(2, ranks[0].address[1])
        tickets = wait_in_vote(*ranks)
        lost.send("submit", spans=[[[1, 2], 0, 1]])
        assert ranks[1].submit(request(1, ((1, 2), 0, 1))) is True
        assert lost.answer() == {"value": True}
        if end.endswith("forked child"):
            lost.others.append(lost.call("fork")["value"])
        if end == "exit":
            lost.send("exit_now")
        else:
            lost.process.kill()
        started = time.monotonic()
        for rank, ticket in enumerate(tickets):
            with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
                ticket.result()
            assert time.monotonic() - started < PROMISED_S
            assert error.value.ranks == (2,) and error.value.group == WORLD
            assert f"rank {rank} can't go on" in str(error.value)
            assert f"rank 2 ({socket.gethostname()}:{lost.pid}), its process exited" in str(error.value)
        assert submit_all(ranks, ((0, 1), 1, 1)) == [True, True], "nothing else is disturbed"

        with RankProcess() as again:
            again.make(2, ranks[0].address[1])
            assert again.call("connect") == {"value": None}
            again.send("submit", spans=[[[0, 2], 0, 1]])
            assert ranks[0].submit(request(0, ((0, 2), 0, 1))) is True, "a rank that is back takes part again"


@needs_proc
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "exit", "a normal end", "SIGKILL with a forked child"])
def test_the_coordinators_rank_is_gone(end):
    with RankProcess() as zero, contextlib.ExitStack() as stack:
        about = zero.make(0, 0)
        port = about["address"][1]
        zero.others.append(about["coordinator"])
        assert is_alive(about["coordinator"])
        ranks = [
            stack.enter_context(
                handshake.Handshake(rank, world_size=3, port=port, host="127.0.0.1", timeout_s=PATIENCE_S)
            )
            for rank in (1, 2)
        ]
        tickets = wait_in_vote(*ranks)
        if end.endswith("forked child"):
            zero.others.append(zero.call("fork")["value"])
        if end == "exit":
            zero.send("exit_now")
        elif end == "a normal end":
            zero.process.stdin.close()
        else:
            zero.process.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
        started = time.monotonic()
        for rank, ticket in zip((1, 2), tickets, strict=True):
            with pytest.raises(_vocabulary.HandshakePeerLostError) as error:
                ticket.result()
            assert time.monotonic() - started < PROMISED_S + (1.0 if end == "a normal end" else 0.0)
            assert error.value.ranks == (0,)
            text = str(error.value)
            assert f"rank {rank}: the coordinator (rank 0, {socket.gethostname()}:{zero.pid}) is lost" in text
            assert "rank 0, which coordinates, closed the handshake or exited" in text and "restart the job" in text
        assert_ends(about["coordinator"])
        socket.create_server(("127.0.0.1", port)).close()


def test_the_coordinators_process_is_killed():
    with job(3, coordinator="process") as ranks:
        tickets = wait_in_vote(*ranks[:2])
        os.kill(ranks[0]._session._coordinator.pid, signal.SIGKILL)
        started = time.monotonic()
        for ticket in tickets:
            with pytest.raises(_vocabulary.HandshakePeerLostError, match=r"the coordinator \(rank 0, .* is lost"):
                ticket.result()
            assert time.monotonic() - started < PROMISED_S
        for h in ranks[:2]:
            with pytest.raises(_vocabulary.HandshakePeerLostError, match="is lost"):
                h.submit(request(h.rank, (WORLD, 1, 1)))


def test_the_coordinators_process_is_not_ended_by_what_is_meant_for_its_rank():
    with job(2, coordinator="process") as ranks:
        pid = ranks[0]._session._coordinator.pid
        for turn, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGINT)):
            os.kill(pid, number)
            assert submit_all(ranks, ((0, 1), turn, 1)) == [True, True]


@needs_proc
def test_closing_leaves_no_process_no_zombie_and_no_descriptor():
    handshake.Handshake(0, world_size=2, port=0, host="127.0.0.1").close()  # what is imported once is
    before = sorted(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for coordinator in ("process", "thread"):
        with job(2, coordinator=coordinator) as ranks:
            assert submit_all(ranks, ((0, 1), 0, 1)) == [True, True]
            pid, port = ranks[0]._session._coordinator.pid, ranks[0].address[1]
            assert pid is None or is_alive(pid)
        if pid is not None:
            assert not os.path.exists(f"/proc/{pid}"), "a process, or a zombie"
        socket.create_server(("127.0.0.1", port)).close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


def test_two_processes_with_the_same_rank():
    with job(2, coordinator="process") as ranks, RankProcess() as twin:
        assert submit_all(ranks, ((0, 1), 0, 1)) == [True, True]
        twin.make(1, ranks[0].address[1], world_size=2)
        answer = twin.call("submit", spans=[[[0, 1], 1, 1]])
        assert answer["error"] == "HandshakeProtocolError"
        host = socket.gethostname()
        assert f"two processes say that they are rank 1: {host}:{os.getpid()}, which is connected" in answer["text"]
        assert f"and {host}:{twin.pid}. Give each process a RANK of its own" in answer["text"]
        assert submit_all(ranks, ((0, 1), 1, 1)) == [True, True]


# ---------------------------------------------------------------------- strangers, while ranks vote


def _knock(port, data, end="close"):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(data)
        if end == "wait":
            while sock.recv(65536):
                pass
        elif end == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_strangers_disturb_nobody():
    seed = 7
    rng = random.Random(seed)
    hello = _protocol.hello({"rank": 1, "world_size": 3, "session": "/"}, b"guess", bytes(16))
    data = {
        "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "wait"),
        "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500), "wait"),
        "too large a frame": (struct.pack("!IB", 2**31, _protocol.HELLO), "wait"),
        "a first frame of the largest size later on": (struct.pack("!IB", 2**24, _protocol.HELLO), "wait"),
        "a vote before a hello": (_protocol.vote(1, 0, bytes(16), [(0, 0, 1)]), "wait"),
        "a wrong proof": (hello, "wait"),
        "half a hello": (hello[:30], "close"),
        "half a hello and a reset": (hello[:30], "reset"),
        "nothing": (b"", "close"),
        "nested": (_protocol.frame(_protocol.HELLO, bytes(16), b"[" * 4000), "wait"),
        "a verdict": (_protocol.verdict(1, _protocol.FAT), "wait"),
    }
    data |= {f"random {place}": (b"\xff" + rng.randbytes(rng.randrange(1, 3000)), "wait") for place in range(20)}
    with job(3, coordinator="process", secret="hush") as ranks:
        port = ranks[0].address[1]
        results = []
        silent = [Peer(port) for _ in range(10)]  # they stay, and say nothing
        slow = Peer(port)
        slow.send(hello[:7])
        # The last turn is the one that rank 0 lets end in a split.
        last = threading.Event()

        def vote_until_told(h):
            turn = 0
            while True:
                fat = h.submit(request(h.rank, (WORLD, turn, 1), fingerprint=str(h.rank == 0 and last.is_set())))
                results.append(fat)
                if not fat:
                    return
                turn += 1

        threads = [threading.Thread(target=vote_until_told, args=(h,), daemon=True) for h in ranks]
        for thread in threads:
            thread.start()
        for content, end in data.values():
            _knock(port, content, end)
        last.set()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"a rank hangs (seed {seed})"
        for peer in (*silent, slow):
            peer.sock.close()
        # All fat until rank 0 differed, which all the others saw.
        assert results.count(False) == 3 and results.count(True) >= 3, f"seed {seed}"
        assert [h.stats()["split"] for h in ranks] == [1, 1, 1]


# ---------------------------------------------------------------------- a coordinator in trouble


class Serving:
    """A coordinator's server in a thread, and peers that are played frame by frame."""

    def __init__(self, parent=None, listener=None, **facts):
        self.facts = {"rank": 0, "world_size": 2, "session": "s", "stage": "DISPATCH_STAGE", "host": "here", "pid": 1}
        self.facts |= facts
        listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.control, theirs = socket.socketpair()
        config = _coordinator.Config(0, self.facts, "", 30.0, "")
        self.server = _coordinator.Server(listener, theirs, config, parent)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.peers = []

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.control.close()
        for peer in self.peers:
            peer.sock.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def peer(self):
        self.peers.append(Peer(self.port))
        return self.peers[-1]

    def rank(self, rank, **facts):
        """A peer, and the answer to its hello."""
        peer = self.peer()
        facts = self.facts | {"host": "there", "pid": 70 + rank} | facts
        del facts["rank"]
        return peer, peer.hello(rank, **facts)

    def end(self, *peers):
        """Ends it; returns what these peers had not received yet."""
        self.control.close()
        return [list(iter(peer.receive, None)) for peer in peers]


def goodbye(reason):
    return [_protocol.Goodbye(reason)]


def test_an_error_in_the_coordinator_is_named_to_everybody(monkeypatch, caplog):
    def fail(server, connection, message):
        raise KeyError("what a surprise")

    monkeypatch.setattr(_coordinator.Server, "_declare", fail)
    with job(2) as ranks:
        for h in ranks:
            h._session.client()
        for error in submit_all(ranks, ((0, 1), 0, 1)):
            assert isinstance(error, _vocabulary.HandshakePeerLostError)
            assert "the coordinator failed: KeyError: 'what a surprise'" in str(error)
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert record.exc_info[0] is KeyError and "KeyError" in record.getMessage()


def test_the_reason_where_the_parent_is_looked_at(monkeypatch):
    def fail(pid):
        raise OSError(errno.ENOSYS, "no pidfd here")

    monkeypatch.setattr(os, "pidfd_open", fail, raising=False)
    monkeypatch.setattr(_coordinator, "LOOK_AT_PARENT_S", 0.01)
    with Serving(parent=os.getppid()) as serving:
        peer, _ = serving.rank(1)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert list(iter(peer.receive, None)) == goodbye("rank 0, which coordinates, closed the handshake or exited")


class FailingListener:
    """Fails to accept, `failures` times in a row, in each of several episodes."""

    def __init__(self, *failures):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.failures = [error for count in failures for error in [*[errno.EMFILE] * count, None]]

    def __getattr__(self, name):
        return getattr(self.listener, name)

    def accept(self):
        error = self.failures.pop(0) if self.failures else None
        if error:
            raise OSError(error, os.strerror(error))
        return self.listener.accept()


def test_running_out_of_descriptors_is_said_once_each_time(monkeypatch):
    monkeypatch.setattr(_coordinator, "ACCEPT_AGAIN_S", 0.001)
    told = {"log": "connections can't be accepted: Too many open files; raise `ulimit -n`"}
    listener = FailingListener(5, 0, 0)
    with Serving(listener=listener) as serving:
        one, _ = serving.rank(1)
        zero, welcome = serving.rank(0)
        assert isinstance(welcome, _protocol.Welcome)
        assert zero.receive() == _protocol.Report(told), "as soon as it is there"
        listener.failures[:] = [errno.EMFILE] * 3
        serving.peer().receive()
        messages = serving.end(zero, one)
        reason = goodbye("rank 0, which coordinates, closed the handshake or exited")
        assert messages == [[_protocol.Report(told), *reason], reason]


def test_a_peer_that_is_gone_when_its_socket_is_set_up(monkeypatch):
    prepare_socket = _coordinator.prepare_socket
    faults = [OSError(errno.EINVAL, "Invalid argument")]

    def prepare(sock):
        if faults:
            raise faults.pop()
        prepare_socket(sock)

    monkeypatch.setattr(_coordinator, "prepare_socket", prepare)
    with Serving() as serving:
        assert serving.peer().receive() is None
        assert isinstance(serving.rank(1)[1], _protocol.Welcome)


def test_the_goodbyes_to_ranks_that_read_nothing_are_waited_for_together(monkeypatch):
    monkeypatch.setattr(_coordinator, "CLOSE_WITHIN_S", 0.2)
    with Serving(world_size=8) as serving:
        for rank in range(8):
            serving.rank(rank)
        for connection in serving.server._connections:
            connection.unsent.append(memoryview(bytes(2**24)))  # more than a socket's buffers hold
        started = time.monotonic()
        serving.control.close()
        serving.thread.join(PATIENCE_S)
        assert time.monotonic() - started < 8 * 0.2 - 0.1


def _read_nothing(serving, rank, monkeypatch):
    """Whatever is sent to this rank from now on is too much."""
    monkeypatch.setattr(_coordinator, "MAX_UNSENT_BYTES", 1)
    serving.server._of_rank[rank].unsent.append(memoryview(b"x"))


def test_a_rank_that_reads_nothing_ends_an_exchange_after_the_others_were_promised_it(monkeypatch):
    world = (0, 1, 2)
    with Serving(world_size=3) as serving:
        peers = [serving.rank(rank)[0] for rank in world]
        _read_nothing(serving, 1, monkeypatch)
        for rank, digest in ((1, b"a"), (2, b"a"), (0, b"b")):
            vote = _protocol.vote(1, _protocol.PARTIAL, digest * 16, [(0, 0, 1)])
            peers[rank].send(_protocol.group(0, world), vote)
            until(lambda rank=rank: rank == 0 or serving.server._consensus.oldest_waiting(rank))
        for rank in (0, 2):
            detail, verdict, reference, end = [peers[rank].receive() for _ in range(4)]
            assert isinstance(detail, _protocol.Detail)
            assert verdict == _protocol.Verdict(1, _protocol.SPLIT, 0, reference.exchange)
            assert (reference.round, reference.ok) == (_protocol.REFERENCE, 1)
            assert end == _protocol.Result(verdict.exchange, _protocol.ABORT, 0, b"rank 1 is gone")
        assert peers[1].receive() is None


def test_a_rank_that_reads_nothing_is_dropped_though_nothing_else_happens(monkeypatch):
    with Serving(world_size=3) as serving:
        zero, _ = serving.rank(0)
        zero.send(_protocol.group(0, (0, 2)), _protocol.vote(1, 0, bytes(16), [(0, 0, 1)]))  # waits for seconds
        one, _ = serving.rank(1, timeout_s=0.05)
        _read_nothing(serving, 1, monkeypatch)
        one.send(_protocol.group(0, (0, 1)), _protocol.vote(1, 0, bytes(16), [(0, 0, 1)]))
        started = time.monotonic()
        assert one.receive() is None, "the answer, that its time is up, was too much"
        assert time.monotonic() - started < PROMISED_S


@needs_proc
@pytest.mark.parametrize("executable", ["", "/does/not/exist", "/bin/false"])
def test_a_child_that_can_not_be_started_leaves_no_descriptor(monkeypatch, executable):
    handshake.Handshake(0, world_size=2, port=0, host="127.0.0.1").close()  # what is imported once is
    monkeypatch.setattr(_coordinator.sys, "executable", executable)
    before = sorted(os.listdir("/proc/self/fd"))
    handshake.Handshake(0, world_size=2, port=0, host="127.0.0.1").close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_welcome_says_how_long_the_coordinator_waits():
    with Serving() as serving:
        assert serving.rank(1)[1].facts["timeout_s"] == 30.0


# ---------------------------------------------------------------------- a rank that is refused


@pytest.mark.parametrize(
    ("fact", "theirs", "words"),
    [
        ("stage", "COMPILE_STAGE", "TORCH_TPU_INTERNAL_HANDSHAKE_STAGE"),
        ("on_timeout", "split", "TORCH_TPU_INTERNAL_HANDSHAKE_ON_TIMEOUT"),
        ("session", "run 7", "It is made of TORCHELASTIC_RUN_ID and MASTER_PORT"),
        ("torch", "2.0", "Install the same version"),
    ],
)
def test_a_refusal_says_what_to_do_to_the_rank_and_to_the_coordinators_rank(fact, theirs, words):
    with Serving(on_timeout="raise", torch="2.13.0") as serving:
        (_, first), (_, again) = [serving.rank(1, **{fact: theirs}) for _ in range(2)]
        assert isinstance(first, _protocol.Refused) and again == first
        ours = serving.facts[fact]
        assert f"differs: {theirs} on rank 1 (there:71), {ours} on the coordinator (rank 0, here:1). " in first.reason
        assert words in first.reason
        zero, _ = serving.rank(0)
        logged = _protocol.Report({"log": f"a connection from 127.0.0.1 was refused: {first.reason}"})
        assert zero.receive() == logged
        _, later = serving.rank(1, **{fact: "else\nwhere"})
        assert "\n" not in later.reason
        assert zero.receive().facts["log"].endswith(later.reason)
        assert [len(messages) for messages in serving.end(zero)] == [1], "each is logged once; then comes the goodbye"


def test_who_is_no_rank_is_named_to_the_coordinators_rank_once():
    with Serving() as serving:
        zero, _ = serving.rank(0)
        for data in (b"GET / HTTP/1.1\r\n", b"GET /again HTTP/1.1\r\n", _protocol.vote(1, 0, bytes(16), [(0, 0, 1)])):
            stranger = serving.peer()
            stranger.receive()
            stranger.send(data)
            assert stranger.receive() is None
        what = "not a frame of this protocol: it starts with b'GET / HTTP/1.1"
        told, *rest = serving.end(zero)[0]
        assert f"a connection from 127.0.0.1 was closed: {what}" in told.facts["log"]
        assert [type(message) for message in rest] == [_protocol.Goodbye], "each address is named once"


def test_connections_that_say_nothing_make_room_and_are_mentioned(monkeypatch):
    monkeypatch.setattr(_coordinator, "MAX_STRANGERS", 3)
    with Serving() as serving:
        zero, _ = serving.rank(0)
        idle = [serving.peer() for _ in range(20)]
        _, welcome = serving.rank(1)
        assert isinstance(welcome, _protocol.Welcome), "although they are all still there"
        assert zero.receive().facts == {
            "log": "5 connections said nothing: the oldest, from 127.0.0.1, was closed to make room"
        }
        assert [type(message) for message in serving.end(zero)[0]] == [_protocol.Goodbye], "once"
        ends = [list(iter(peer.receive, None)) for peer in idle]
        assert [len(messages) for messages in ends] == [1] * 16 + [2] * 4, "the oldest first; others got the goodbye"


def test_a_hello_that_has_arrived_is_read_before_its_connection_makes_room(monkeypatch):
    """Ranks said hello while the coordinator was busy, and then came many who say nothing."""
    free, busy = threading.Event(), threading.Event()
    free.set()
    prepare_socket = _coordinator.prepare_socket

    def prepare(sock):
        if not free.is_set():
            busy.set()
            assert free.wait(PATIENCE_S)
        prepare_socket(sock)

    monkeypatch.setattr(_coordinator, "prepare_socket", prepare)
    monkeypatch.setattr(_coordinator, "MAX_STRANGERS", 1)
    with Serving(world_size=4) as serving:
        peers = [serving.peer() for _ in range(4)]
        nonces = [peer.receive().nonce for peer in peers]
        free.clear()
        for _ in range(10):
            serving.peer()
        assert busy.wait(PATIENCE_S)
        for rank, (peer, nonce) in enumerate(zip(peers, nonces, strict=True)):
            peer.send(_protocol.hello(serving.facts | {"rank": rank}, b"", nonce))
        free.set()
        assert [type(peer.receive()) for peer in peers] == [_protocol.Welcome] * 4


def test_messages_are_bounded(monkeypatch):
    monkeypatch.setattr(_coordinator, "MAX_MESSAGES", 3)
    with Serving() as serving:
        zero, _ = serving.rank(0)
        for number in range(6):
            serving.rank(1, session=str(number))
        assert len(serving.end(zero)[0]) == 3 + 1


def test_messages_that_the_coordinators_rank_never_fetched_go_to_its_own_log(caplog):
    with Serving() as serving:
        _, refused = serving.rank(1, session="other")
    assert f"was refused: {refused.reason}" in caplog.text


def test_who_waits_for_a_rank_that_was_refused_is_told_so():
    with job(2, timeout_s=0.3, ranks=(0,), stage="DISPATCH_STAGE") as (zero,):
        with Peer(zero.address[1]) as peer:
            assert isinstance(peer.hello(1, stage="OFF", world_size=2), _protocol.Refused)
        with pytest.raises(_vocabulary.HandshakeTimeoutError) as error:
            zero.submit(request(0, ((0, 1), 0, 1)))
        assert "rank 1 (somewhere:12345, which was refused: stage differs: OFF on rank 1" in str(error.value)
        assert "neither connected" not in str(error.value)


# ---------------------------------------------------------------------- what the child is made of


DECOYS = (
    *("multiprocessing", "distributed", "torch", "torch_tpu", "handshake", "sitecustomize", "usercustomize"),
    *("socket", "selectors", "json", "logging", "struct", "enum", "subprocess", "tempfile", "zlib", "hmac", "hashlib"),
    *("_protocol", "_consensus", "_splits", "_vocabulary", "_reports", "_coordinator", "_child", "startup"),
)


def test_nothing_around_it_gets_into_the_child(tmp_path, monkeypatch):
    for name in DECOYS:
        marks = str(tmp_path / "marks")
        (tmp_path / f"{name}.py").write_text(f"open({marks!r}, 'a').write({name!r}); raise SystemExit(9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "startup.py"))
    monkeypatch.setenv("PYTHONINSPECT", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with job(2, coordinator="process") as ranks:
        assert ranks[0]._session._coordinator.kind == "process"
        assert submit_all(ranks, ((0, 1), 0, 1)) == [True, True]
    assert not (tmp_path / "marks").exists()


@pytest.mark.parametrize(
    "sent", [b"", b'{"rank": 0, "facts": {"world_size": 2}, "secret": "", "timeout_s": 1, "debug": ""}\n']
)
def test_a_child_whose_rank_has_ended_before_it_ends_without_a_word(sent):
    control, theirs = socket.socketpair()
    with theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        with control:
            control.sendall(sent)
        child = subprocess.run(
            _child.command("_coordinator", str(listener.fileno()), str(theirs.fileno()), str(os.getpid())),
            pass_fds=(listener.fileno(), theirs.fileno()),
            capture_output=True,
            timeout=PATIENCE_S,
        )
    assert (child.returncode, child.stdout, child.stderr) == (0, b"", b"")


def test_the_child_imports_the_standard_library_and_these_files_alone():
    command = _child.command("_coordinator")
    assert "-I" in command and "-S" in command
    code = command.index("-c") + 1
    setup, _, call = command[code].rpartition(";")
    assert "main" in call
    command[code] = (
        f"{setup};import json;importlib.import_module('torch_tpu_handshake._coordinator');"
        "print(json.dumps([[name, getattr(module, '__file__', None)] for name, module in sys.modules.items()]))"
    )
    modules = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S).stdout)
    ours = str(load("_coordinator").__file__).rpartition(os.sep)[0]
    names = set()
    for name, file in modules:
        top = name.partition(".")[0]
        if top == "torch_tpu_handshake":
            names.add(name.rpartition(".")[2])
            assert file is None or os.path.dirname(file) == ours
        else:
            assert top in sys.stdlib_module_names or top == "__main__", name
    assert "_consensus" in names and "_graph" not in names and "handshake" not in names


# ---------------------------------------------------------------------- torch's stores


def test_two_jobs_at_once_find_their_own_coordinators_through_their_stores(tmp_path):
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        tcp_port = str(free.getsockname()[1])
    jobs = [("tcp", tcp_port, 0), ("file", str(tmp_path / "store"), 1)]
    environment = child_environment(MASTER_ADDR="127.0.0.1")
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "store_worker.py"), str(rank), kind, place, str(coordinator_rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for kind, place, coordinator_rank in jobs
        for rank in (0, 1)
    ]
    killer = threading.Timer(100, lambda: [process.kill() for process in processes])
    killer.start()
    try:
        addresses = [json.loads(process.stdout.readline() or '"ended early"') for process in processes]
        assert [address is None for address in addresses] == [False, True, True, False], addresses
        ports = [address[1] for address in addresses if address is not None]
        assert len(set(ports)) == 2 and handshake._rendezvous.DEFAULT_PORT not in ports
        # Who has not read the store does not get in.
        for port in ports:
            for secret in ("", "guess"):
                with Peer(port) as stranger:
                    answer = stranger.hello(1, secret, world_size=2)
                    assert isinstance(answer, _protocol.Refused) and "does not know the secret" in answer.reason
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
    finally:
        killer.cancel()
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * 4
    for place, one in enumerate(found):
        rank, coordinator_rank = place % 2, jobs[place // 2][2]
        assert one["who"] == [rank, 2] and one["fat"] == [True] * 400
        if rank == coordinator_rank:
            assert f"the coordinator, rank {1 - rank}, has not published its address within 0.3 s" in one["alone"]
            assert "make a Handshake() on that rank too" in one["alone"]
            assert one["seconds"] < 3.0
