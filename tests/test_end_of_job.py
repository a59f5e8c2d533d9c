# SPDX-License-Identifier: Apache-2.0
"""How jobs end: each rank is a process of its own that runs to its end, in whatever order."""

import contextlib
import subprocess
import sys

import pytest
from layout import child_environment, load, needs
from ranks import PATIENCE_S, open_rank

_vocabulary = load("_vocabulary")

# What each of these programs begins with. `vote` casts the next vote of this rank on some ranks.
BEGINNING = """
import sys
from layout import load
handshake, _coordinator, _vocabulary = load("handshake"), load("_coordinator"), load("_vocabulary")
_coordinator.Coordinator.STAY_S = 200
rank, port, world_size = map(int, sys.argv[1:])
options = {"world_size": world_size, "port": port, "host": "127.0.0.1", "timeout_s": 60, "secret": "hush"}
options |= {} if rank else {"coordinator": "COORDINATOR"}

def vote(*ranks, fingerprint="same", text=None):
    return handshake.submit_handshake(fingerprint, {_vocabulary.ProcessGroupId(ranks): 1}, text)

def say(what):
    print(what, flush=True)
"""


class Job:
    """Programs of ranks. Rank 0's must `say(h.address[1])` first. Leaving it kills what has not ended."""

    def __init__(self, world_size, first, coordinator="process"):
        self._world_size, self._coordinator = world_size, coordinator
        self._stack = contextlib.ExitStack()
        self._port = "0"
        self.zero = self.start(0, first)
        self._port = self.zero.stdout.readline().strip()
        assert self._port.isdigit(), self.zero.communicate()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def start(self, rank, program):
        text = BEGINNING.replace("COORDINATOR", self._coordinator) + program
        pipe = subprocess.PIPE
        process = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", text, str(rank), self._port, str(self._world_size)],
                stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=child_environment(),
            )
        )  # fmt: skip
        self._stack.callback(process.kill)
        return process

    @staticmethod
    def end(process):
        """Its exit status, and what it printed; but what was read already, and how slow the machine is."""
        output, errors = process.communicate(timeout=PATIENCE_S)
        printed = (output + errors).splitlines(keepends=True)
        return process.returncode, "".join(line for line in printed if "still waits" not in line)


OPEN = "h = handshake.Handshake(rank, **options)\n"
both_kinds = pytest.mark.parametrize("coordinator", ["process", "thread"])


@both_kinds
@pytest.mark.parametrize("end", ["h.close()", "", "sys.exit()"])
def test_the_coordinators_rank_waits_for_those_who_have_yet_to_connect_and_says_so(coordinator, end):
    with Job(4, f"{OPEN}say(h.address[1])\n{end}", coordinator) as job:
        told = job.zero.stderr.readline()
        assert "rank 0 has closed its handshake; for a moment it still coordinates for " in told
        assert "ranks 1-3 (not connected yet)" in told
        others = [job.start(rank, f"{OPEN}assert vote(1, 2, 3) and vote(1, 2, 3)") for rank in (1, 2, 3)]
        assert [job.end(process) for process in others] == [(0, "")] * 3
        assert job.end(job.zero) == (0, ""), "it is said once"


@both_kinds
def test_the_coordinators_rank_waits_for_those_who_are_connected(coordinator):
    with Job(3, f"{OPEN}say(h.address[1])\nvote(0, 1, 2)", coordinator) as job:
        others = [job.start(rank, f"{OPEN}vote(0, 1, 2)\ninput()\nassert vote(1, 2)") for rank in (1, 2)]
        assert "for ranks 1-2 (connected)" in job.zero.stderr.readline()
        for process in others:
            process.stdin.write("\n")
            process.stdin.flush()
        assert [job.end(process) for process in (*others, job.zero)] == [(0, "")] * 3


def test_whoever_still_waits_for_the_coordinators_rank_is_told_at_once_that_it_has_left():
    with Job(2, f"{OPEN}say(h.address[1])") as job:
        status, printed = job.end(job.start(1, f"{OPEN}vote(0, 1)"))
        assert status == 1 and "rank 1 can't go on: a member of ranks 0-1 is gone" in printed
        assert "it closed its handshake. Look at the end of the log of rank 0" in printed


def test_the_coordinators_rank_ends_first_and_the_others_print_nothing():
    stays_not = "_coordinator.Coordinator.STAY_S = 0.01\n"
    with Job(3, f"{stays_not}{OPEN}say(h.address[1])\nassert vote(0, 1, 2)") as job:
        others = [job.start(rank, f"{OPEN}assert vote(0, 1, 2)\ninput()") for rank in (1, 2)]
        assert job.end(job.zero) == (0, "")
        for process in others:
            process.stdin.write("\n")
        assert [job.end(process) for process in others] == [(0, "")] * 2


@both_kinds
@pytest.mark.parametrize("crash", ["raise KeyError('out')", "with h:\n    raise KeyError('out')"])
def test_a_coordinators_rank_that_fails_waits_for_nobody(coordinator, crash):
    with Job(3, f"{OPEN}say(h.address[1])\nassert vote(0, 1)\n{crash}", coordinator) as job:
        one = job.start(1, f"{OPEN}assert vote(0, 1)\nvote(0, 1)")
        status, printed = job.end(job.zero)
        assert status == 1 and "KeyError: 'out'" in printed and "coordinates for" not in printed
        status, printed = job.end(one)
        assert status == 1 and "HandshakePeerLostError" in printed


def test_a_rank_that_comes_when_the_coordinator_has_closed_is_told_of_that_cause():
    zero = open_rank(0, world_size=2, port=0, host="127.0.0.1", coordinator="thread")
    zero.close()
    one = open_rank(1, world_size=2, port=zero.address[1], host="127.0.0.1", timeout_s=0.1)
    with pytest.raises(_vocabulary.HandshakePeerLostError, match="and not closed it already"):
        one._session.connected()


@needs("_graph_report")
@both_kinds
@pytest.mark.parametrize("end", ["", "raise KeyError"])
def test_the_report_of_a_short_job_is_logged_before_it_ends(tmp_path, coordinator, end):
    slow = "lambda: __import__('time').sleep(0.2) or 'graph of rank %d' % rank"
    program = f"vote(0, 1, fingerprint=str(rank), text={slow})"
    debug = f"options['debug'] = {str(tmp_path)!r}\n"
    with Job(2, f"{debug}{OPEN}say(h.address[1])\n{program}\n{end}", coordinator) as job:
        one = job.start(1, f"{OPEN}{program}")
        status, printed = job.end(job.zero)
        assert status == bool(end) and "ranks 0-1 have 2 different graphs" in printed, printed
        assert "the graph was asked for and has not come" not in printed
        assert f":{job.zero.pid}" in printed and f":{one.pid}" in printed, "the processes are named, though gone"
        assert job.end(one)[0] == 0


@pytest.mark.parametrize("thread", ["concurrent.futures.ThreadPoolExecutor().submit", "run"])
def test_a_main_thread_that_raises_ends_the_process_though_another_waits_in_a_vote(thread):
    """Python waits for other threads then, before it closes anything; and so would the other ranks."""
    run = "import concurrent.futures, threading\nrun = lambda call: threading.Thread(target=call).start()\n"
    waits = f"{run}{thread}(lambda: vote(0, 1))\nwhile not h._session.client._readers: pass\nraise KeyError('main')"
    with Job(3, f"{OPEN}say(h.address[1])\nvote(0, 1)\nvote(0, 1)") as job:
        one = job.start(1, f"{OPEN}assert vote(0, 1)\n{waits.replace('vote(0, 1)', 'vote(1, 2)')}")
        status, printed = job.end(one)
        assert status == 1 and "KeyError: 'main'" in printed
        status, printed = job.end(job.zero)
        assert status == 1 and "rank 1 closed its handshake" in printed
