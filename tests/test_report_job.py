# SPDX-License-Identifier: Apache-2.0
"""The process that makes a report: how it reads its job, what it writes, and what it says when it fails."""

import io
import json
import zlib

import pytest
from layout import load
from printed_graphs import VOCABULARY

_divergence = load("_divergence")
_report_job = load("_report_job")


def run_job(tmp_path, variants, context=None):
    job = {
        "variants": variants,
        "context": context or {},
        "out_text": str(tmp_path / "report.txt"),
        "out_html": str(tmp_path / "report.html"),
    }
    _report_job.run_job(job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.txt"]
    return (tmp_path / "report.txt").read_text(), (tmp_path / "report.html").read_text()


def test_a_job_gives_a_text_and_a_page(tmp_path):
    variants = [
        {
            "ranks": [rank],
            "fingerprint": f"{rank:032x}",
            "text": VOCABULARY[rank],
            "hosts": {str(rank): f"node0:{rank}"},
        }
        for rank in range(4)
    ]
    context = {
        "groups": [{"ranks": [0, 1, 2, 3], "span": [5, 6]}],
        "reason": "why",
        "versions": {"0": {"torch": "2.13"}},
    }
    text, page = run_job(tmp_path, variants, context)
    assert "18992 · rank" in text and "collectives [5, 6)" in text and "node0:3" in text
    assert "18992 · rank" in page


@pytest.mark.parametrize(
    "text", [None, "", "\0\ud800", "class GraphModule(torch.nn.Module):\n    def forward(", "x" * 10**6]
)
def test_a_job_with_a_strange_graph_says_so_in_the_report(tmp_path, text):
    variants = [{"ranks": [0], "text": VOCABULARY[0]}, {"ranks": [2, 1], "fingerprint": "f", "text": text}]
    report, page = run_job(tmp_path, variants)
    assert "ranks 1-2" in report and "not compared" in report and "not compared" in page


def test_a_failure_of_the_comparison_still_names_the_ranks(tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(_divergence, "compare", fail)
    variants = [{"ranks": [rank], "text": VOCABULARY[rank]} for rank in (0, 1)]
    report, _ = run_job(tmp_path, variants)
    assert "ranks 0-1" in report and "could not be compared: ZeroDivisionError: oops" in report


def test_a_job_without_room_for_its_page_says_so_in_the_text(tmp_path):
    variants = [{"ranks": [rank], "text": VOCABULARY[rank]} for rank in (0, 1)]
    page = tmp_path / "missing" / "report.html"
    _report_job.run_job({"variants": variants, "out_text": str(tmp_path / "report.txt"), "out_html": str(page)})
    text = (tmp_path / "report.txt").read_text()
    assert "18992 · rank" in text and "page could not be written" in text and str(page) in text
    with pytest.raises(OSError, match="missing"):
        _report_job.run_job({"variants": variants, "out_text": str(page), "out_html": str(page)})


@pytest.mark.parametrize("job", [[], {}, {"variants": []}, {"out_text": "x"}])
def test_a_job_that_says_not_where_its_report_goes_is_refused(job):
    with pytest.raises(ValueError, match="no job for a report"):
        _report_job.run_job(job)


@pytest.mark.parametrize(
    "fields", [{}, {"variants": 3}, {"variants": [{}]}, {"variants": [{"ranks": [0], "hosts": {"x": 1}}]}]
)
def test_a_job_that_is_none_leaves_a_text_that_says_so(tmp_path, fields):
    job = fields | {name: str(tmp_path / name) for name in ("out_text", "out_html")}
    with pytest.raises(ValueError, match="no job for a report"):
        _report_job.run_job(job)
    assert "no job for a report" in (tmp_path / "out_text").read_text()


# --- The process ---


def test_texts_are_bounded(monkeypatch):
    monkeypatch.setattr(_report_job, "MAX_TEXT_BYTES", 1000)
    monkeypatch.setattr(_report_job, "MAX_TEXTS_BYTES", 1500)
    graphs = [zlib.compress(b"x" * size) for size in (1000, 10**7, 100)]
    variants = [{"ranks": [rank], "bytes": len(graph)} for rank, graph in enumerate(graphs)]
    head = {"variants": variants, "context": {"notes": ["first"]}}
    job = _report_job._read_job(io.BytesIO(json.dumps(head).encode() + b"\n" + b"".join(graphs) + b"what follows"))
    assert [len(variant["text"]) for variant in job["variants"]] == [1000, 500, 0]
    assert job["context"]["notes"][0] == "first"
    assert job["context"]["notes"][1].startswith("ranks 1-2: the graph is cut")


def test_what_fails_in_the_process_is_said_without_the_names_of_files(monkeypatch, capfdbinary):
    def full(job):
        raise OSError(28, "No space left on device", "/somewhere/handshake-split-1-0007.txt")

    monkeypatch.setattr(_report_job, "_read_job", lambda source: {})
    monkeypatch.setattr(_report_job, "run_job", full)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert _report_job.main([]) == 2
    assert capfdbinary.readouterr().out == b"No space left on device"
