# SPDX-License-Identifier: Apache-2.0
"""A rank in a process of its own: commands in as lines of JSON on stdin, answers out as lines of JSON on stdout.

It ends when its stdin ends, as a program does that has nothing left to do. `RankProcess` is its other side, for tests.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time

from layout import TESTS, child_environment, load
from ranks import PATIENCE_S, request

_vocabulary = load("_vocabulary")
handshake = load("handshake")


class RankProcess:
    """Starts a rank, and talks to it. Leaving it kills it, and what it has left behind."""

    def __init__(self, variables=None, **options):
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "rank_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(**(variables or {})),
            start_new_session=True,
            **options,
        )
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def send(self, command, **arguments):
        self.process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(PATIENCE_S), "a rank's process does not answer"
        return json.loads(self.process.stdout.readline() or '"it ended"')

    def call(self, command, **arguments):
        self.send(command, **arguments)
        return self.answer()

    def make(self, rank, port, world_size=3, **options):
        options = {"timeout_s": PATIENCE_S, **options}
        return self.call("make", current_rank=rank, world_size=world_size, port=port, **options)["value"]


# ---------------------------------------------------------------------- what it can do


def make(**arguments):
    """Makes the process's handshake."""
    h = handshake.Handshake(**arguments)
    coordinator = h._session._coordinator
    return {"address": h.address, "coordinator": coordinator and coordinator.pid}


def connect():
    """Connects now, and not at the first vote."""
    handshake.Handshake()._session.connected()


def submit(spans, fingerprint="same", partial=False):
    """Submits a vote, with spans [[ranks, before, number], …]."""
    h = handshake.Handshake()
    return h.submit_async(request(h.rank, *spans, fingerprint=fingerprint), partial=partial).result()


def dispatch(ranks, number=1, fingerprint="same"):
    """Votes at the position that the process has counted itself."""
    return handshake.DispatchGate(fingerprint, {_vocabulary.ProcessGroupId(ranks): number}).vote()


def close():
    """Closes the process's handshake."""
    handshake.Handshake().close()


def fork():
    """Forks a child that does nothing, as a data loader's worker does between two batches."""
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    return child


def exit_now():
    """Ends the process without a goodbye."""
    os._exit(0)


COMMANDS = {command.__name__: command for command in (make, connect, submit, dispatch, close, fork, exit_now)}


def main():
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = {"value": COMMANDS[command](**arguments)}
        except _vocabulary.HandshakeError as error:
            answer = {"error": type(error).__name__, "text": str(error), "ranks": error.ranks}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
