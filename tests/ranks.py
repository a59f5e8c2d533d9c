# SPDX-License-Identifier: Apache-2.0
"""Ranks for the tests: several in one process, each in a thread, or a peer that says whatever a test wants."""

import contextlib
import os
import socket
import threading
import time
from typing import Any, NamedTuple

from layout import load

_client = load("_client")
_coordinator = load("_coordinator")
_protocol = load("_protocol")
_rendezvous = load("_rendezvous")
_vocabulary = load("_vocabulary")
handshake = load("handshake")

# A test that waits this long for anything has failed.
PATIENCE_S = 20.0
# Many tests leave out ranks, which rank 0 would wait for when it leaves.
_coordinator.Coordinator.STAY_S = 0.01


def counts(*spans):
    """Collective counts from spans `(ranks, before, number)`."""
    return _vocabulary.RankCollectiveCounts(
        {
            _vocabulary.ProcessGroupId(ranks): _vocabulary.ProcessGroupCollectiveCount(before, number)
            for ranks, before, number in spans
        }
    )


def request(rank, *spans, fingerprint="same"):
    """A vote of `rank`, with spans `(ranks, before, number)`."""
    return _vocabulary.CollectiveHandshakeRequest(counts(*spans), fingerprint, rank)


def open_rank(rank, coordinator_rank=0, **options):
    """A rank's `Handshake` with a session of its own: a process has one, but here several ranks share the process."""
    made = handshake.Handshake.__new__(handshake.Handshake)
    given = {"current_rank": rank, "coordinator_rank": coordinator_rank, **options}
    made._session = handshake._Session(_rendezvous.Settings.resolve(given))
    return made


@contextlib.contextmanager
def job(world_size, coordinator_rank=0, coordinator="thread", timeout_s=PATIENCE_S, ranks=None, **options):
    """The handshakes of all the ranks of a world, in this process. In the end they are closed, the coordinator last."""
    options = {"world_size": world_size, "timeout_s": timeout_s, **options}
    with contextlib.ExitStack() as stack:
        of_first = {"port": 0, "coordinator": coordinator, **options}
        first = stack.enter_context(open_rank(coordinator_rank, coordinator_rank, **of_first))
        made = {coordinator_rank: first}
        for rank in range(world_size) if ranks is None else ranks:
            if rank != coordinator_rank:
                made[rank] = stack.enter_context(open_rank(rank, coordinator_rank, port=first.address[1], **options))
        yield [made[rank] for rank in sorted(made)]


def together(*calls):
    """Runs each call in a thread of its own. Returns what each returned, or the exception that it raised."""
    results = [None] * len(calls)

    def run(place):
        try:
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a rank hangs"
    return results


def submit_all(handshakes, *spans, fingerprints=None):
    """All these ranks submit the same spans at once."""
    fingerprints = ["same"] * len(handshakes) if fingerprints is None else fingerprints
    return together(
        *(
            lambda h=h, f=f: h.submit(request(h.rank, *spans, fingerprint=f))
            for h, f in zip(handshakes, fingerprints, strict=True)
        )
    )


def until(condition, what="it"):
    """Looks until `condition()` is true, and returns what it gave."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)
    return found


class Welcome(NamedTuple):
    """What a coordinator said of itself when it let a rank in."""

    facts: dict[str, Any]


class Refused(NamedTuple):
    """Why it did not."""

    reason: str


class Peer:
    """A connection to a coordinator, frame by frame."""

    def __init__(self, port, host="127.0.0.1"):
        self.sock = socket.create_connection((host, port), timeout=PATIENCE_S)
        everything = frozenset(_protocol._KINDS)
        self.decoder = _protocol.Decoder(everything)
        self.messages = []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.sock.close()

    def send(self, *messages):
        """Messages, or frames as bytes."""
        frames = [message if isinstance(message, bytes) else _protocol.encode(message) for message in messages]
        self.sock.sendall(b"".join(frames))

    def receive(self):
        """The next message; None at the end of the connection."""
        while not self.messages:
            try:
                data = self.sock.recv(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            self.messages += self.decoder.feed(data)
        return self.messages.pop(0)

    def hello(self, rank, secret="", **facts):
        """Says who it is; returns the answer."""
        return self.hello_of({"rank": rank, "host": "somewhere", "pid": 12345, **facts}, secret, facts.get("session"))

    def hello_of(self, facts, secret="", session=None):
        """The same with any facts, or any bytes."""
        said, nonce = _protocol.write_facts(facts), os.urandom(_protocol.NONCE_BYTES)
        proof = _protocol.proof(secret, str(session), self.receive().nonce + nonce, "rank", said)
        self.send(_protocol.Hello(nonce, proof, said))
        answer = self.receive()
        if not isinstance(answer, _protocol.Answer):
            return answer
        about = _protocol.read_facts(answer.facts)
        return Refused(about["refused"]) if "refused" in about else Welcome(about)


def let_in(sock, facts, secret="secret", session="s", behind=b""):
    """Plays a coordinator, which lets in the rank that has connected; `behind` are frames behind its answer."""
    nonce = os.urandom(_protocol.NONCE_BYTES)
    sock.sendall(_protocol.encode(_protocol.Greeting(_protocol.MAGIC, _protocol.VERSION, nonce)))
    decoder = _protocol.Decoder(_protocol.FROM_STRANGER)
    messages = []
    while not messages:
        messages += decoder.feed(sock.recv(65536))
    said = _protocol.write_facts(facts)
    proof = _protocol.proof(secret, session, nonce + messages[0].nonce, "coordinator", said)
    sock.sendall(_protocol.encode(_protocol.Answer(proof, said)) + behind)
