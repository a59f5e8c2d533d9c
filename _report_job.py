# SPDX-License-Identifier: Apache-2.0
"""The process that compares the graphs of a split (`_reports` starts it) and writes the report.

The job is on its standard input: a line of JSON, which is a job of `run_job` but for the texts, and the graphs one
after the other, as the ranks sent them, each as long as the line says. What fails is said on the standard output.
"""

import json
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

if __package__:
    from ._divergence import Context, Variant, explain
    from ._divergence_page import page, write_file
    from ._vocabulary import format_ranks
else:
    from _divergence import Context, Variant, explain
    from _divergence_page import page, write_file
    from _vocabulary import format_ranks

# A graph's text, unpacked, and all texts of one comparison; the rest is cut, and the report says so.
MAX_TEXT_BYTES = 64 * 2**20
MAX_TEXTS_BYTES = 512 * 2**20
# What is said of a comparison that failed.
MAX_FAILURE_BYTES = 1000


def main(arguments: list[str]) -> int:
    """Does the job on the standard input. There are no arguments.

    Returns:
        The exit status.
    """
    try:
        run_job(_read_job(sys.stdin.buffer))
    except Exception as error:
        # Without the file's name, as `_reports` says it.
        failure = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        sys.stdout.buffer.write(failure.encode("utf-8", "replace")[:MAX_FAILURE_BYTES])
        return 2
    return 0


def _read_job(source: BinaryIO) -> dict[str, Any]:
    job: dict[str, Any] = json.loads(source.readline())
    left = MAX_TEXTS_BYTES
    notes: dict[str, list[int]] = {}
    for variant in job["variants"]:
        # By its length: whoever was forked meanwhile may hold the other end open.
        compressed = source.read(variant.pop("bytes"))
        text, note = _unpack(compressed, min(left, MAX_TEXT_BYTES))
        left -= len(text)
        variant["text"] = text.decode("utf-8", "replace")
        if note:
            notes.setdefault(note, []).extend(variant["ranks"])
    job["context"]["notes"] += [f"{format_ranks(ranks)}: {note}" for note, ranks in notes.items()]
    return job


def _unpack(compressed: bytes, most_bytes: int) -> tuple[bytes, str]:
    """A graph's text, and a note on what is missing of it."""
    if not compressed:
        return b"", ""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(compressed, most_bytes + 1)
    except zlib.error as error:
        return b"", f"the graph can't be unpacked: {error}"
    if len(text) > most_bytes:
        return text[:most_bytes], (
            f"the graph is cut: a comparison takes at most {MAX_TEXT_BYTES >> 20} MiB of one graph, and "
            f"{MAX_TEXTS_BYTES >> 20} MiB of all"
        )
    return text, "" if unpacker.eof else "the graph came cut off"


def run_job(job: Mapping[str, Any]) -> None:
    """Makes the report that a job asks for.

    A job is `{"variants": [{"ranks": [0], "fingerprint": "…", "text": "…", "hosts": {"0": "host:pid"}}],
    "context": {…}, "out_text": path, "out_html": path}`. In the context everything may be missing: `groups`
    (`[{"ranks": [0, 1], "span": [3, 4]}]`), `before` (lines), `reason`, `notes` (lines), `versions`
    (`{"0": {"torch": "2.13.0"}}`). The outputs appear whole or not at all. Whatever fails, the text says so:
    graphs that can't be compared, a page that can't be written.

    Raises:
        ValueError: this is no such job.
        OSError: the text can't be written.
    """
    try:
        out_text, out_html = str(job["out_text"]), str(job["out_html"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no job for a report: {error!r}") from error
    try:
        variants, context = _variants_from_json(job["variants"]), _context_from_json(job.get("context") or {})
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        message = f"this is no job for a report: {error!r}"
        write_file(out_text, f"{message}\n")
        raise ValueError(message) from error
    try:
        report = explain(variants, context)
        text, html = report.text(), page([report])
    except Exception as error:  # who reads it wants to know which ranks, even if a graph is too strange to compare
        bare = [variant._replace(text="") for variant in variants]
        note = f"the graphs could not be compared: {type(error).__name__}: {error}"
        report = explain(bare, context._replace(notes=(*context.notes, note)))
        text, html = report.text(), page([report])
    try:
        write_file(out_html, html)
    except OSError as error:
        text += f"Note: the page could not be written: {error}\n"
    write_file(out_text, text)


def _variants_from_json(items: Iterable[Mapping[str, Any]]) -> list[Variant]:
    return [
        Variant(
            tuple(sorted(item["ranks"])),
            str(item.get("fingerprint") or ""),
            str(item.get("text") or ""),
            {int(rank): str(address) for rank, address in (item.get("hosts") or {}).items()},
        )
        for item in items
    ]


def _context_from_json(fields: Mapping[str, Any]) -> Context:
    return Context(
        groups=tuple(
            (tuple(group["ranks"]), (group["span"][0], group["span"][1]) if group.get("span") else None)
            for group in fields.get("groups") or ()
        ),
        before=tuple(map(str, fields.get("before") or ())),
        reason=str(fields.get("reason") or ""),
        notes=tuple(map(str, fields.get("notes") or ())),
        versions={int(rank): dict(of_rank) for rank, of_rank in (fields.get("versions") or {}).items()},
    )
