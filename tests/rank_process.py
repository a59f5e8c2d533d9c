# SPDX-License-Identifier: Apache-2.0
"""A rank in a process of its own: commands in as lines of JSON on stdin, answers out as lines of JSON on stdout.

It ends when its stdin ends, as a program does that has nothing left to do.
"""

import json
import os
import sys
import time

from layout import load

_vocabulary = load("_vocabulary")
handshake = load("handshake")

made = {}


def make(**arguments):
    """Makes the process's handshake."""
    h = made["handshake"] = handshake.Handshake(**arguments)
    coordinator = h._session._coordinator
    return {"address": h.address, "coordinator": coordinator and coordinator.pid}


def connect():
    """Connects now, and not at the first vote."""
    made["handshake"]._session.connected()


def submit(spans, fingerprint="same"):
    """Submits a vote, with spans [[ranks, before, number], …]."""
    h = made["handshake"]
    counted = {
        _vocabulary.ProcessGroupId(ranks): _vocabulary.ProcessGroupCollectiveCount(before, number)
        for ranks, before, number in spans
    }
    vote = _vocabulary.CollectiveHandshakeRequest(_vocabulary.RankCollectiveCounts(counted), fingerprint, h.rank)
    return h.submit(vote)


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


def main():
    commands = {"make": make, "connect": connect, "submit": submit, "fork": fork, "exit_now": exit_now}
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = {"value": commands[command](**arguments)}
        except _vocabulary.HandshakeError as error:
            answer = {"error": type(error).__name__, "text": str(error), "ranks": error.ranks}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
