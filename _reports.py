# SPDX-License-Identifier: Apache-2.0
"""Has the graphs of a split compared, in a process of its own, so that no verdict waits for it.

A thread feeds one comparison after the other: a folder on a file system that hangs stops nothing but the reports. The
graphs stay as the ranks sent them; unpacking and comparing them is the process's (`_report_job`). What comes back is a
text for the log and a page to look at, both in the debug folder.
"""

import json
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

if __package__:
    from . import _child
    from ._splits import MAX_REPORTS, Record, Splits
    from ._vocabulary import format_ranks
else:
    import _child
    from _splits import MAX_REPORTS, Record, Splits
    from _vocabulary import format_ranks

# Comparisons under way: one runs, since the host's cores belong to the job, and the others wait. A job that splits in
# more ways at once is explained by the first ones.
MAX_WAITING = 64
# What one comparison may take.
COMPARE_WITHIN_S = 120.0
# How often it is looked whether a comparison has ended.
LOOK_EVERY_S = 0.05
# A report's text, which goes into a log: it has a screen or two.
MAX_REPORT_CHARACTERS = 2**18
# What a comparison that runs at the end may still take.
CLOSE_WITHIN_S = 1.0

VERSIONS = ("python", "torch", "torch_tpu")


class Finished(NamedTuple):
    """What came of a comparison: its text and the path of its page, empty if there is none; the ranks of the split;
    and what failed, or empty."""

    text: str
    path: str
    ranks: set[int]
    failure: str


class _Job(NamedTuple):
    """What goes to the process, see `_report_job`; and the ranks of the split."""

    head: dict[str, Any]
    graphs: list[bytes]
    ranks: set[int]


class Reports:
    """The comparisons of one coordinator, that wait or run."""

    def __init__(self, folder: str) -> None:
        """`folder` is where the reports go; it is made when the first one is."""
        self._folder = folder
        self._number = 0
        self._under_way = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._finished: deque[Finished] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="handshake-reports", daemon=True)
        self._thread.start()

    def add(self, record: Record, splits: Splits, facts: Mapping[int, Mapping[str, Any]], before: list[str]) -> None:
        """Takes a split component to be explained.

        Args:
            record: the component.
            splits: where its graphs are.
            facts: what each rank said of itself when it connected.
            before: the handshakes on its largest group before it, a line each.
        """
        self._under_way += 1
        if self._under_way > MAX_WAITING:
            failure = f"splits are left unexplained: {MAX_WAITING} wait for their turn"
            self._finished.append(Finished("", "", set(), failure))
            return
        variants = []
        graphs = []
        lacking: dict[str, list[int]] = {}
        for digest, ranks in record.variants().items():
            graph, why_none = splits.graph(record, digest)
            graphs.append(graph)
            if why_none:
                lacking.setdefault(why_none, []).extend(ranks)
            hosts = {rank: f"{facts[rank].get('host')}:{facts[rank].get('pid')}" for rank in ranks if rank in facts}
            variants.append({"ranks": ranks, "fingerprint": digest.hex(), "bytes": len(graph), "hosts": hosts})
        notes = [f"{format_ranks(ranks)}: {note}" for note, ranks in lacking.items()]
        if record.missing:
            notes.append(f"{format_ranks(record.missing)} had not voted when this was written")
        self._number += 1
        if self._number == MAX_REPORTS:
            notes.append(f"this is report {MAX_REPORTS:,} of the job, and the last")
        spans = sorted(record.spans, key=lambda span: (-len(span[0].ranks), span[1]))
        context = {
            "groups": [{"ranks": list(group.ranks), "span": [start, end]} for group, start, end in spans],
            "before": before,
            "reason": record.reason,
            "notes": notes,
            "versions": {
                rank: {name: facts[rank][name] for name in VERSIONS if facts[rank].get(name)}
                for rank in record.votes
                if rank in facts
            },
        }
        stem = os.path.join(self._folder, f"handshake-split-{os.getpid()}-{self._number:04d}")
        head = {"variants": variants, "context": context, "out_text": stem + ".txt", "out_html": stem + ".html"}
        self._jobs.put(_Job(head, graphs, set(record.votes)))

    def next_look(self) -> float | None:
        """When to call `finished`, or None if nothing is under way."""
        return time.monotonic() + LOOK_EVERY_S if self._under_way else None

    def finished(self) -> list[Finished]:
        """The comparisons that have ended since the last call."""
        ended = [self._finished.popleft() for _ in range(len(self._finished))]
        self._under_way -= len(ended)
        return ended

    def close(self) -> None:
        """Ends what runs, after a moment for it to finish. Leaves no process behind."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(CLOSE_WITHIN_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join(CLOSE_WITHIN_S)

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            self._finished.append(self._compare(job))

    def _compare(self, job: _Job) -> Finished:
        said, text, failure = b"", "", ""
        try:
            os.makedirs(self._folder, exist_ok=True)
            command = _child.command("_report_job")
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                self._process = process
                try:
                    if not self._closed:
                        data = b"".join((json.dumps(job.head).encode(), b"\n", *job.graphs))
                        said, _ = process.communicate(data, COMPARE_WITHIN_S)
                finally:
                    process.kill()  # if it has not ended
            if process.returncode:
                failure = said.decode("utf-8", "replace") or f"its process ended with status {process.returncode}"
            if os.path.exists(job.head["out_text"]):
                with open(job.head["out_text"], encoding="utf-8", errors="replace") as file:
                    text = file.read(MAX_REPORT_CHARACTERS)
        except subprocess.TimeoutExpired:
            failure = f"a comparison took more than {COMPARE_WITHIN_S:.0f} s"
        except Exception as error:
            # Without the file's name: the same for every split that it hinders.
            failure = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        if failure:
            failure = f"splits can't be explained in {self._folder}: {failure}"
        path = job.head["out_html"]
        return Finished(text, path if os.path.exists(path) else "", job.ranks, failure)
