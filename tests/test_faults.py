# SPDX-License-Identifier: Apache-2.0
"""Processes that die, strangers at the door, and what is left when it is over: with real processes."""

import contextlib
import errno
import json
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest
from layout import TESTS, child_environment, load, module_file, run
from rank_process import RankProcess
from ranks import PATIENCE_S, Peer, Refused, Welcome, job, open_rank, request, submit_all, together, until

_coordinator = load("_coordinator")
_protocol = load("_protocol")
_rendezvous = load("_rendezvous")
_vocabulary = load("_vocabulary")

PAIR = (0, 1)
WORLD = (0, 1, 2)
# A test waits so long for what comes when a timeout ends it; it has failed long before.
NEVER_S = 10 * PATIENCE_S

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and process ids are used as POSIX has them")
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks at processes through /proc")


def is_alive(pid):
    """Whether the process runs; a zombie doesn't."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def wait_in_vote(*ranks):
    """Submits without waiting, and makes sure that the votes have arrived: a later one of each rank was answered."""
    tickets = [h.submit_async(request(h.rank, (WORLD, 0, 1))) for h in ranks]
    barrier = [h.submit_async(request(h.rank, (tuple(h.rank for h in ranks), 0, 1))) for h in ranks]
    assert [ticket.result() for ticket in barrier] == [True] * len(ranks)
    return tickets


def lost(*tickets):
    """What these tickets raise, which must be HandshakePeerLostError: at once, since their timeout is far away."""
    errors = together(*(ticket.result for ticket in tickets))
    assert [type(error) for error in errors] == [_vocabulary.HandshakePeerLostError] * len(tickets)
    return errors


# ---------------------------------------------------------------------- a rank is gone


@pytest.mark.parametrize("end", ["SIGKILL", "exit", "SIGKILL with a forked child"])
def test_a_rank_that_is_gone_is_known_to_those_who_wait_for_it(end):
    with job(3, coordinator="process", ranks=PAIR, timeout_s=NEVER_S) as ranks, RankProcess() as two:
        two.make(2, ranks[0].address[1])
        tickets = wait_in_vote(*ranks)
        two.send("submit", spans=[[[1, 2], 0, 1]])
        assert ranks[1].submit(request(1, ((1, 2), 0, 1))) is True
        assert two.answer() == {"value": True}
        if end.endswith("forked child"):
            two.call("fork")
        if end == "exit":
            two.send("exit_now")
        else:
            two.process.kill()
        for rank, error in enumerate(lost(*tickets)):
            assert error.ranks == (2,) and error.group == WORLD
            assert f"rank {rank} can't go on" in str(error)
            assert f"rank 2 ({socket.gethostname()}:{two.pid}), its process exited" in str(error)
        assert submit_all(ranks, (PAIR, 1, 1)) == [True, True], "nothing else is disturbed"

        with RankProcess() as again:
            again.make(2, ranks[0].address[1])
            answer = again.call("connect")
            host = socket.gethostname()
            restarted = f"it was restarted alone ({host}:{two.pid}, then {host}:{again.pid}): restart the job, or"
            assert answer["error"] == "HandshakeProtocolError" and restarted in answer["text"]
            for error in lost(*(h.submit_async(request(h.rank, (WORLD, 1, 1))) for h in ranks)):
                assert restarted in str(error), "at once, and to all"


def test_a_rank_that_was_restarted_before_it_has_voted_takes_part():
    with job(2, ranks=(0,)) as (zero,):
        for _ in range(2):
            with RankProcess() as one:
                one.make(1, zero.address[1], world_size=2)
                assert one.call("connect") == {"value": None}
        with RankProcess() as one:
            one.make(1, zero.address[1], world_size=2)
            assert one.call("connect") == {"value": None}
            one.send("submit", spans=[[PAIR, 0, 1]])
            assert zero.submit(request(0, (PAIR, 0, 1))) is True


def test_ranks_close_and_open_anew_in_any_order():
    """Rank 1 comes back to the old coordinator, which has yet to end, and waits for the new one on the same port."""
    with job(2) as ranks:
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]
        options = {"host": "127.0.0.1", "port": ranks[0].address[1], "world_size": 2, "timeout_s": PATIENCE_S}
        told = ranks[0]._session._coordinator._server._messages

        def open_and_vote(rank):
            if rank == 0:
                until(lambda: any("closed its handshake and made another" in text for text in told), "rank 1")
            ranks[rank].close()
            with open_rank(rank, coordinator="thread", **options) as again:
                return again.submit(request(rank, (PAIR, 0, 1)))

        assert together(lambda: open_and_vote(0), lambda: open_and_vote(1)) == [True, True]


@needs_proc
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "exit", "SIGKILL with a forked child"])
def test_the_coordinators_rank_is_gone(end):
    with RankProcess() as zero, contextlib.ExitStack() as stack:
        about = zero.make(0, 0)
        port = about["address"][1]
        assert is_alive(about["coordinator"])
        options = {"world_size": 3, "port": port, "host": "127.0.0.1", "timeout_s": NEVER_S}
        ranks = [stack.enter_context(open_rank(rank, **options)) for rank in (1, 2)]
        tickets = wait_in_vote(*ranks)
        if end.endswith("forked child"):
            zero.call("fork")
        if end == "exit":
            zero.send("exit_now")
        else:
            zero.process.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
        for rank, error in zip((1, 2), lost(*tickets), strict=True):
            assert error.ranks == (0,)
            text = str(error)
            child = f"its child process {about['coordinator']}"
            assert f"rank {rank}: the coordinator (rank 0, {socket.gethostname()}:{zero.pid}, {child}) is lost" in text
            assert "rank 0, which coordinates, closed the handshake or exited" in text and "restart the job" in text
        until(lambda: not is_alive(about["coordinator"]), "the end of the coordinator")
        socket.create_server(("127.0.0.1", port)).close()


def test_the_coordinators_process_is_killed():
    with job(3, coordinator="process", timeout_s=NEVER_S) as ranks:
        tickets = wait_in_vote(*ranks[:2])
        pid = ranks[0]._session._coordinator.pid
        os.kill(pid, signal.SIGKILL)
        zero, one = map(str, lost(*tickets))
        name = f"the coordinator (rank 0, {socket.gethostname()}:{os.getpid()}, its child process {pid}) is lost"
        assert f"{name}: it was killed by SIGKILL." in zero
        assert f"{name}: its process exited, or its host is gone." in one
        for error in submit_all(ranks[:2], (WORLD, 1, 1)):
            assert isinstance(error, _vocabulary.HandshakePeerLostError) and "is lost" in str(error)


@needs_proc
@pytest.mark.parametrize("on_timeout", ["raise", "split"])
def test_a_coordinator_that_was_stopped_and_goes_on(on_timeout):
    """A rank that has given it up takes no answer of it any more, and the others know that this rank is lost."""
    with job(2, coordinator="process", timeout_s=NEVER_S, on_timeout=on_timeout) as ranks:
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]
        pid = ranks[0]._session._coordinator.pid
        os.kill(pid, signal.SIGSTOP)
        ranks[0]._session.wait_s = 0.1
        zero, one = [h.submit_async(request(h.rank, (PAIR, 1, 1))) for h in ranks]
        error = together(zero.result)[0]
        assert type(error) is _vocabulary.HandshakePeerLostError and "it has not answered in time" in str(error)
        assert f"its child process {pid}" in str(error) and "Other ranks may have been answered" in str(error)
        os.kill(pid, signal.SIGCONT)
        assert one.result() is True
        with pytest.raises(_vocabulary.HandshakePeerLostError, match=r"rank 0 .*its process exited"):
            ranks[1].submit(request(1, (PAIR, 2, 1)))


def test_the_coordinators_process_is_not_ended_by_what_is_meant_for_its_rank():
    with job(2, coordinator="process") as ranks:
        pid = ranks[0]._session._coordinator.pid
        for turn, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            os.kill(pid, number)
            assert submit_all(ranks, (PAIR, turn, 1)) == [True, True]


@needs_proc
def test_closing_leaves_no_process_no_zombie_and_no_descriptor():
    open_rank(0, world_size=2, port=0, host="127.0.0.1").close()  # what is imported once is
    before, threads = descriptors(), threading.active_count()
    for coordinator in ("process", "thread"):
        with job(2, coordinator=coordinator) as ranks:
            assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]
            pid, port = ranks[0]._session._coordinator.pid, ranks[0].address[1]
            assert pid is None or is_alive(pid)
        if pid is not None:
            assert not os.path.exists(f"/proc/{pid}"), "a process, or a zombie"
        socket.create_server(("127.0.0.1", port)).close()
    assert descriptors() == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_rank_whose_stdin_or_stdout_is_closed(closed):
    """Its sockets get these numbers then, which are the child's for what it reads and writes."""
    made = "Handshake(0, world_size=2, port=0, host='127.0.0.1', secret='hush')"
    with_it = "import sys; sys.exit(h._session._coordinator.pid is None or not h.submit(request(0, (PAIR, 0, 1))))"
    one = "o = open_rank(1, world_size=2, port=h.address[1], host='127.0.0.1', secret='hush')"
    votes = "t = o.submit_async(request(1, (PAIR, 0, 1)))"
    program = f"from ranks import *; PAIR = (0, 1); h = handshake.{made}; {one}; {votes}; {with_it}"
    shell = ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    ended = run(shell, PATIENCE_S, env=child_environment())
    assert (ended.returncode, ended.stdout) == (0, "")


def test_two_processes_with_the_same_rank():
    with job(2, coordinator="process") as ranks, RankProcess() as twin:
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]
        twin.make(1, ranks[0].address[1], world_size=2)
        answer = twin.call("submit", spans=[[PAIR, 1, 1]])
        assert answer["error"] == "HandshakeProtocolError"
        host = socket.gethostname()
        assert f"two processes say that they are rank 1: {host}:{os.getpid()}, which is connected" in answer["text"]
        assert f"and {host}:{twin.pid}. Give each process a RANK of its own" in answer["text"]
        assert submit_all(ranks, (PAIR, 1, 1)) == [True, True]


# ---------------------------------------------------------------------- strangers, while ranks vote


def knock(port, data, end="wait"):
    """Sends bytes, and waits for the end of the connection, closes it, or resets it."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(data)
        if end == "wait":
            while sock.recv(65536):
                pass
        elif end == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_strangers_disturb_nobody():
    rng = random.Random(7)
    hello = _protocol.encode(_protocol.Hello(bytes(16), bytes(16), b'{"rank":1,"world_size":3,"session":"/"}'))
    calls = [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),),  # TLS
        (struct.pack("!IB", 2**31, _protocol.HELLO),),
        (struct.pack("!IB", 2**24, _protocol.HELLO),),  # a length that later frames may have
        (_protocol.encode_vote(1, 0, bytes(16), [0, 0, 1]),),
        (_protocol.encode_verdict(1, _protocol.FAT),),
        (_protocol.encode(_protocol.Hello(bytes(16), bytes(16), b"[" * 4000)),),
        (hello,),  # a wrong proof
        (hello[:30], "close"),
        (hello[:30], "reset"),
        (b"", "close"),
        *((b"\xff" + rng.randbytes(rng.randrange(1, 3000)),) for _ in range(20)),
    ]
    with job(3, coordinator="process", secret="hush") as ranks, contextlib.ExitStack() as stack:
        port = ranks[0].address[1]
        silent = [stack.enter_context(Peer(port)) for _ in range(11)]  # they stay, and say nothing
        silent[0].send(hello[:7])  # or not enough
        last = threading.Event()  # rank 0 lets the next turn end in a split

        def vote_until_told(h):
            turn = 0
            while h.submit(request(h.rank, (WORLD, turn, 1), fingerprint=str(h.rank == 0 and last.is_set()))):
                turn += 1
            return turn

        def knock_at_the_door():
            for call in calls:
                knock(port, *call)
            last.set()

        *turns, _ = together(*(lambda h=h: vote_until_told(h) for h in ranks), knock_at_the_door)
        assert turns[0] > 0 and turns == turns[:1] * 3, "all fat until rank 0 differed, which all saw"


# ---------------------------------------------------------------------- a coordinator in trouble


class Serving:
    """A coordinator's server in a thread, and peers that are played frame by frame."""

    def __init__(self, parent=None, listener=None, **facts):
        self.facts = {"rank": 0, "world_size": 2, "session": "s", "stage": "DISPATCH_STAGE", "host": "here", "pid": 1}
        self.facts |= {"timeout_s": 30.0, **facts}
        listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.control, theirs = socket.socketpair()
        self.server = _coordinator.Server(listener, theirs, _coordinator.Config(self.facts, "", ""), parent)
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
        return peer, peer.hello(**{**self.facts, "host": "there", "pid": 70 + rank, "rank": rank, **facts})

    def end(self, *peers):
        """Ends it; returns what these peers had not received yet."""
        self.control.close()
        return [list(iter(peer.receive, None)) for peer in peers]


ENDED = _protocol.Goodbye("rank 0, which coordinates, closed the handshake or exited")


def notice(text):
    return _protocol.Notice(f"coordinator: {text}")


def test_an_error_in_the_coordinator_is_named_to_everybody(monkeypatch, caplog):
    def fail(server, connection, vote):
        raise KeyError("what a surprise")

    monkeypatch.setattr(_coordinator.Server, "_vote", fail)
    with job(2) as ranks:
        for h in ranks:
            h._session.connected()
        for error in submit_all(ranks, (PAIR, 0, 1)):
            assert isinstance(error, _vocabulary.HandshakePeerLostError)
            assert "the coordinator failed: KeyError: 'what a surprise'" in str(error)
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert record.exc_info[0] is KeyError and "KeyError" in record.getMessage()


def test_a_coordinator_whose_parent_is_gone_ends_though_its_channel_is_open(monkeypatch):
    """As where a process that the rank forked holds the channel."""
    monkeypatch.setattr(_coordinator, "LOOK_UP_S", 0.01)
    with Serving(parent=os.getppid()) as serving:
        peer, _ = serving.rank(1)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert list(iter(peer.receive, None)) == [ENDED]


class FailingListener:
    """Fails to accept as often as `failures` is long."""

    def __init__(self, failures):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.failures = failures

    def __getattr__(self, name):
        return getattr(self.listener, name)

    def accept(self):
        if self.failures:
            error = self.failures.pop()
            raise OSError(error, os.strerror(error))
        return self.listener.accept()


def test_running_out_of_descriptors_is_said_and_ranks_are_let_in_when_there_are_some(monkeypatch):
    monkeypatch.setattr(_coordinator, "LOOK_UP_S", 0.001)
    told = notice("connections can't be accepted: Too many open files; raise `ulimit -n`")
    with Serving(listener=FailingListener([errno.EMFILE] * 5)) as serving:
        one, _ = serving.rank(1)
        zero, welcome = serving.rank(0)
        assert isinstance(welcome, Welcome)
        assert serving.end(zero, one) == [[told, ENDED], [ENDED]], "once, and to the coordinator's rank alone"


def test_the_goodbyes_to_ranks_that_read_nothing_are_waited_for_together(monkeypatch):
    ranks = 64
    monkeypatch.setattr(_coordinator, "CLOSE_WITHIN_S", 2 * PATIENCE_S / ranks)  # one by one: twice the patience
    with Serving(world_size=ranks) as serving:
        for rank in range(ranks):
            serving.rank(rank)
        for connection in serving.server._connections.values():
            connection.unsent += bytes(2**24)  # more than a socket's buffers hold
        serving.control.close()
        serving.thread.join(PATIENCE_S)
        assert not serving.thread.is_alive()


def test_a_rank_that_reads_nothing_is_dropped_though_nothing_else_happens(monkeypatch):
    with Serving(world_size=3) as serving:
        zero, _ = serving.rank(0)
        one, _ = serving.rank(1, timeout_s=0.05)
        monkeypatch.setattr(_coordinator, "MAX_UNSENT_BYTES", 1)
        waits = _protocol.encode(_protocol.Extra(_protocol.PLANS, 1, 1, bytes(2**24)))  # more than buffers hold
        serving.server._of_rank[1].unsent += waits  # whatever is sent to it now is too much
        vote = _protocol.encode_vote(1, 0, bytes(16), [0, 0, 1])
        zero.send(_protocol.Group(0, (0, 2)), vote)  # waits for long
        one.send(_protocol.Group(0, PAIR), vote)
        assert one.receive() is None, "the answer, that its time is up, was too much"


def test_who_does_not_say_who_it_is_is_closed_and_ranks_are_not(monkeypatch):
    monkeypatch.setattr(_coordinator, "LOOK_UP_S", 0.01)
    with Serving() as serving:
        one, _ = serving.rank(1)
        monkeypatch.setattr(_coordinator, "HELLO_WITHIN_S", 0.0)
        stranger = serving.peer()
        assert isinstance(stranger.receive(), _protocol.Greeting)
        assert stranger.receive() is None
        assert serving.end(one) == [[ENDED]]


class Echo:
    """An extra that sends back what it is sent, many times."""

    def take(self, rank, number, step, payload, now):
        return [(rank, number, repetition, payload) for repetition in range(1, 17)]

    def drop_rank(self, rank, now):
        return []

    def next_deadline(self):
        return None

    def close(self):
        return []


def test_a_rank_that_reads_late_gets_all_whole_and_in_order():
    """More than a socket's buffers hold; meanwhile the others vote."""
    with Serving() as serving:
        serving.server._extras[_protocol.PLANS] = Echo()
        (zero, _), (one, _) = serving.rank(0), serving.rank(1)
        payload = random.Random(1).randbytes(2**20)
        one.send(_protocol.Extra(_protocol.PLANS, 7, 0, payload))
        until(lambda: serving.server._of_rank[1].unsent, "a frame that does not fit")
        zero.send(_protocol.Group(0, (0,)), _protocol.encode_vote(1, 0, bytes(16), [0, 0, 1]))
        assert zero.receive() == _protocol.Verdict(1, _protocol.FAT)
        for repetition in range(1, 17):
            assert one.receive() == _protocol.Extra(_protocol.PLANS, 7, repetition, payload)


@pytest.mark.parametrize("where", ["socketpair", "epoll"])
def test_a_coordinator_that_gets_no_descriptor_is_a_handshake_error(monkeypatch, where):
    def fail(*arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    module = _coordinator.socket if where == "socketpair" else _coordinator.select
    monkeypatch.setattr(module, where, fail)
    with pytest.raises(_vocabulary.HandshakeError, match=r"Too many open files.*raise `ulimit -n`"):
        open_rank(0, world_size=2, port=0, host="127.0.0.1", coordinator="thread")


@needs_proc
@pytest.mark.parametrize("executable", ["", "/does/not/exist", "/bin/false"])
def test_a_child_that_can_not_be_started_leaves_no_descriptor(monkeypatch, executable):
    open_rank(0, world_size=2, port=0, host="127.0.0.1").close()  # what is imported once is
    monkeypatch.setattr(_coordinator.sys, "executable", executable)
    before = descriptors()
    open_rank(0, world_size=2, port=0, host="127.0.0.1").close()
    assert descriptors() == before


# ---------------------------------------------------------------------- what the coordinator's rank is told


@pytest.mark.parametrize(
    ("fact", "theirs", "words"),
    [
        ("stage", "COMPILE_STAGE", "TORCH_TPU_INTERNAL_HANDSHAKE_STAGE"),
        ("groups", "exact", "TORCH_TPU_INTERNAL_HANDSHAKE_GROUPS"),
        ("on_timeout", "split", "TORCH_TPU_INTERNAL_HANDSHAKE_ON_TIMEOUT"),
        ("session", "run 7", "It is made of the user, TORCHELASTIC_RUN_ID, MASTER_PORT and"),
        ("torch", "2.0", "Install the same version"),
    ],
)
def test_a_refusal_says_what_to_do_to_the_rank_and_to_the_coordinators_rank(fact, theirs, words):
    with Serving(on_timeout="raise", groups="role", torch="2.13.0") as serving:
        (_, first), (_, again) = [serving.rank(1, **{fact: theirs}) for _ in range(2)]
        assert isinstance(first, Refused) and again == first
        ours = serving.facts[fact]
        assert f"differs: {theirs} on rank 1 (there:71), {ours} on the coordinator (rank 0, here:1). " in first.reason
        assert words in first.reason
        zero, _ = serving.rank(0)
        assert zero.receive() == notice(f"a connection from 127.0.0.1 was refused: {first.reason}")
        _, later = serving.rank(1, **{fact: "else\nwhere"})
        assert "\n" not in later.reason
        assert zero.receive().text.endswith(later.reason)
        assert serving.end(zero) == [[ENDED]], "each is logged once"


def test_who_is_no_rank_is_named_to_the_coordinators_rank_once():
    with Serving() as serving:
        zero, _ = serving.rank(0)
        vote = _protocol.encode_vote(1, 0, bytes(16), [0, 0, 1])
        for data in (b"GET / HTTP/1.1\r\n", b"GET /again HTTP/1.1\r\n", vote):
            knock(serving.port, data)
        told, *rest = serving.end(zero)[0]
        assert told == notice("a connection from 127.0.0.1 was closed: it is not a rank's")
        assert rest == [ENDED], "each address is named once"


def test_who_does_not_know_the_secret_is_named_once_by_its_address_and_in_no_words_of_its_own():
    with job(2, ranks=(0,), secret="hush", timeout_s=0.5) as (zero,):
        server = zero._session._coordinator._server
        for number in range(50):
            with Peer(zero.address[1]) as stranger:
                refused = stranger.hello(1, "guess", host=f"win a prize {number}", world_size=2)
                assert isinstance(refused, Refused) and "does not know the secret" in refused.reason
        with pytest.raises(_vocabulary.HandshakeTimeoutError, match=r"127\.0\.0\.1, which was refused") as error:
            zero.submit(request(0, (PAIR, 0, 1)))
        assert server._messages == {"127.0.0.1"}
        assert "prize" not in str(error.value)


def test_strangers_leave_room_for_what_ranks_are_told(monkeypatch):
    monkeypatch.setattr(_coordinator, "MAX_MESSAGES", 4)
    with Serving() as serving:
        zero, _ = serving.rank(0)
        for number in range(10):
            serving.server._tell(f"a connection from {number} was closed", str(number))
        _, refused = serving.rank(1, stage="OFF")
        told = serving.end(zero)[0]
    assert len(told) == 2 + 1 + 1 and told[2] == notice(f"a connection from 127.0.0.1 was refused: {refused.reason}")


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
    with job(2, timeout_s=1.0, ranks=(0,), stage="DISPATCH_STAGE") as (zero,):
        with Peer(zero.address[1]) as peer:
            assert isinstance(peer.hello(1, stage="OFF", world_size=2), Refused)
        with pytest.raises(_vocabulary.HandshakeTimeoutError) as error:
            zero.submit(request(0, (PAIR, 0, 1)))
        assert "rank 1 (somewhere:12345, which was refused: stage differs: OFF on rank 1" in str(error.value)
        assert "neither connected" not in str(error.value)


# ---------------------------------------------------------------------- what the child is made of


DECOYS = (
    *("multiprocessing", "distributed", "torch", "torch_tpu", "handshake", "sitecustomize", "usercustomize"),
    *("socket", "select", "json", "logging", "struct", "enum", "subprocess", "tempfile", "zlib", "hmac", "hashlib"),
    *("_protocol", "_consensus", "_vocabulary", "_coordinator", "_graph_plan", "_graph_report", "startup"),
)


def test_nothing_around_it_gets_into_the_child(tmp_path, monkeypatch, caplog):
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
        assert ranks[0]._session._coordinator.pid is not None, caplog.text
        assert submit_all(ranks, (PAIR, 0, 1)) == [True, True]
    assert not (tmp_path / "marks").exists()


@pytest.mark.parametrize(
    "sent", [b"", b'{"facts": {"rank": 0, "world_size": 2, "timeout_s": 1}, "secret": "", "debug": ""}\n']
)
def test_a_child_whose_rank_has_ended_before_it_ends_without_a_word(sent):
    control, theirs = socket.socketpair()
    with theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        with control:
            control.sendall(sent)
        given = (listener.fileno(), theirs.fileno())
        command = _coordinator.child_command("_coordinator", *map(str, (*given, os.getpid())))
        child = run(command, PATIENCE_S, pass_fds=given)
    assert (child.returncode, child.stdout) == (0, "")


def test_the_child_imports_the_standard_library_and_these_files_alone():
    command = _coordinator.child_command("_coordinator")
    assert "-I" in command and "-S" in command
    code = command.index("-c") + 1
    setup, _, call = command[code].rpartition(";")
    assert "main" in call
    command[code] = (
        f"{setup};import json;importlib.import_module('torch_tpu_handshake._coordinator');"
        "print(json.dumps([[name, getattr(module, '__file__', None)] for name, module in sys.modules.items()]))"
    )
    ours = module_file("_coordinator").parent
    names = set()
    for name, file in json.loads(run(command, PATIENCE_S).stdout):
        top = name.partition(".")[0]
        if top == "torch_tpu_handshake":
            names.add(name.rpartition(".")[2])
            assert file is None or os.path.dirname(file) == str(ours)
        else:
            assert top in sys.stdlib_module_names or top == "__main__", name
    assert names == {"torch_tpu_handshake", "_coordinator", "_consensus", "_protocol", "_vocabulary"}


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
        for rank in PAIR
    ]
    killer = threading.Timer(100, lambda: [process.kill() for process in processes])
    killer.start()
    try:
        addresses = [json.loads(process.stdout.readline() or '"ended early"') for process in processes]
        assert [address is None for address in addresses] == [False, True, True, False], addresses
        ports = [address[1] for address in addresses if address is not None]
        assert len(set(ports)) == 2 and _rendezvous.DEFAULT_PORT not in ports
        # Who has not read the store does not get in.
        for port in ports:
            for secret in ("", "guess"):
                with Peer(port) as stranger:
                    answer = stranger.hello(1, secret, world_size=2)
                    assert isinstance(answer, Refused) and "does not know the secret" in answer.reason
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
            assert f"the coordinator, rank {1 - rank}, has not published its address" in one["alone"]
            assert "make a Handshake() on that rank too" in one["alone"]
