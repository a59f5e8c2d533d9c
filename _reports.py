# SPDX-License-Identifier: Apache-2.0
"""Has the graphs of a split compared, in a process of its own, so that no verdict waits for it.

The comparison is `_divergence`'s. What goes to it is a job file in the debug folder; what comes back are a text for the
log and a page to look at, both in that folder.
"""

import json
import logging
import os
import subprocess
import time
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

if __package__:
    from . import _child
    from ._splits import Record, Splits
    from ._vocabulary import format_ranks
else:
    import _child
    from _splits import Record, Splits
    from _vocabulary import format_ranks

logger = logging.getLogger("torch_tpu.handshake")

# Comparisons at once; the host's cores belong to the job.
MAX_PROCESSES = 1
# Comparisons that wait for their turn; further splits go unexplained.
MAX_WAITING = 64
# What one comparison may take.
COMPARE_WITHIN_S = 120.0
# How often a comparison that runs is looked at.
LOOK_EVERY_S = 0.05
# A graph's text, unpacked; the rest is cut, and the report says so.
MAX_TEXT_BYTES = 64 * 2**20
# What a comparison that runs at the end may still take.
CLOSE_WITHIN_S = 1.0

VERSIONS = ("python", "torch", "torch_tpu")


class Finished(NamedTuple):
    """A comparison that has ended: its text, the path of its page (empty if there is none), the ranks of the split."""

    text: str
    path: str
    ranks: set[int]


class _Running(NamedTuple):
    process: "subprocess.Popen[bytes]"
    job_path: str
    text_path: str
    html_path: str
    ranks: set[int]
    until: float


class Reports:
    """The comparisons of one coordinator, that wait or run."""

    def __init__(self, folder: str) -> None:
        """`folder` is where the reports go; it is made when the first one is."""
        self._folder = folder
        self._waiting: list[tuple[dict[str, Any], set[int]]] = []
        self._running: list[_Running] = []
        self._number = 0

    def add(self, record: Record, splits: Splits, facts: Mapping[int, Mapping[str, Any]], before: list[str]) -> None:
        """Takes a split component to be explained.

        Args:
            record: the component.
            splits: where its graphs are.
            facts: what each rank said of itself when it connected.
            before: the handshakes on its largest group before it, a line each.
        """
        if len(self._waiting) >= MAX_WAITING:
            logger.warning("handshake: too many splits wait to be explained; one is left out: %s", record.reason)
            return
        variants = []
        lacking: dict[str, list[int]] = {}
        for digest, ranks in record.variants().items():
            text, note = _unpack(splits.graph(digest))
            if note:
                lacking.setdefault(note, []).extend(ranks)
            hosts = {rank: f"{facts[rank].get('host')}:{facts[rank].get('pid')}" for rank in ranks if rank in facts}
            variants.append({"ranks": ranks, "fingerprint": digest.hex(), "text": text, "hosts": hosts})
        notes = [f"{format_ranks(ranks)}: {note}" for note, ranks in lacking.items()]
        if record.missing:
            notes.append(f"{format_ranks(record.missing)} had not voted when this was written")
        spans = sorted(record.voters_at, key=lambda span: (-len(span[0].ranks), span[1]))
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
        self._waiting.append(({"variants": variants, "context": context}, set(record.votes)))
        self._start()

    def next_look(self) -> float | None:
        """When to call `finished`, or None if nothing runs."""
        return time.monotonic() + LOOK_EVERY_S if self._running else None

    def finished(self, now: float) -> list[Finished]:
        """The comparisons that have ended since the last call."""
        ended = [running for running in self._running if running.process.poll() is not None or running.until <= now]
        found = []
        for running in ended:
            self._running.remove(running)
            _end(running.process)
            try:
                with open(running.text_path, encoding="utf-8") as file:
                    found.append(Finished(file.read(), running.html_path, running.ranks))
            except OSError as error:
                found.append(Finished(f"the graphs could not be compared: {error}", "", running.ranks))
            _remove(running.job_path)
        if ended:
            self._start()
        return found

    def close(self) -> None:
        """Ends what runs, after a moment for it to finish. Leaves no process behind."""
        for running in self._running:
            try:
                running.process.wait(CLOSE_WITHIN_S)
            except subprocess.TimeoutExpired:
                pass
            _end(running.process)
            _remove(running.job_path)

    def _start(self) -> None:
        while self._waiting and len(self._running) < MAX_PROCESSES:
            job, ranks = self._waiting.pop(0)
            self._number += 1
            stem = os.path.join(self._folder, f"handshake-split-{os.getpid()}-{self._number:04d}")
            job["out_text"], job["out_html"] = stem + ".txt", stem + ".html"
            job_path = stem + ".job.json"
            try:
                os.makedirs(self._folder, exist_ok=True)
                with open(job_path, "w", encoding="utf-8") as file:
                    json.dump(job, file)
                process = subprocess.Popen(
                    _child.command("_divergence", "--job", job_path),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except OSError as error:
                logger.warning("handshake: a split can't be explained in %s: %s", self._folder, error)
                continue
            until = time.monotonic() + COMPARE_WITHIN_S
            self._running.append(_Running(process, job_path, stem + ".txt", stem + ".html", ranks, until))


def _unpack(compressed: bytes | None) -> tuple[str, str]:
    """A graph's text, and a note on what is missing of it."""
    if compressed is None:
        return "", "no graph was received; pass graph_module_str to the vote"
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(compressed, MAX_TEXT_BYTES).decode("utf-8", "replace")
    except zlib.error as error:
        return "", f"the graph could not be unpacked: {error}"
    return text, f"the graph was cut at {MAX_TEXT_BYTES} bytes" if unpacker.unconsumed_tail else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # it is only a leftover
