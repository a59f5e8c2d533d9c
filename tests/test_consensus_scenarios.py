# SPDX-License-Identifier: Apache-2.0
"""Scenarios of the consensus machine as transcripts that read like documentation: `golden/*.txt`.

A transcript holds events, at the left margin, and what the machine answered, indented. The test plays the events and
compares the whole text. After a change to the wording of a reason, write the transcripts anew and read the difference:

    python tests/test_consensus_scenarios.py --update

Events:

    world: 4 ranks
    timeout: 60 s
    group even: 0 2
    rank 0 votes A: world [0,2), even [0,1)
    rank 0 votes A, partial: world [0,2)            it looks for a plan if all others do
    rank 3 is lost: its process exited
    rank 3 rejoins
    5 s pass                                        with whatever falls due in them
    end                                             says who still waits
"""

import re
import sys
import textwrap
from pathlib import Path

import pytest
from layout import load

_vocabulary = load("_vocabulary")
_consensus = load("_consensus")

GOLDEN = Path(__file__).resolve().parent / "golden"
TRANSCRIPTS = sorted(GOLDEN.glob("*.txt"))

VOTE = re.compile(r"rank (?P<rank>\d+) votes (?P<fingerprint>[^,:]+)(?P<partial>, partial)?: (?P<spans>.+)")
SPAN = re.compile(r"(?P<group>\w+) \[(?P<start>\d+),(?P<end>\d+)\)")


class Player:
    """Plays the events of one transcript; `play` returns the lines that belong under an event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timeout_s: float | None = None
        self.groups: dict[str, tuple[int, ...]] = {}
        self.made = None
        self.waiting: list[str] = []

    @property
    def machine(self):  # the lines that set it up come first
        if self.made is None:
            self.made = _consensus._CollectiveHandshakeConsensus(len(self.groups["world"]), self.timeout_s)
        return self.made

    def play(self, event: str) -> list[str]:
        if match := re.fullmatch(r"world: (\d+) ranks", event):
            self.groups["world"] = tuple(range(int(match[1])))
        elif match := re.fullmatch(r"timeout: (\d+) s", event):
            self.timeout_s = float(match[1])
        elif match := re.fullmatch(r"group (\w+): ([\d ]+)", event):
            self.groups[match[1]] = tuple(map(int, match[2].split()))
        elif match := VOTE.fullmatch(event):
            return self.vote(int(match["rank"]), match["fingerprint"], match["spans"], bool(match["partial"]))
        elif match := re.fullmatch(r"rank (\d+) is lost: (.+)", event):
            lines = self.answers(self.machine.drop_rank(int(match[1]), self.now, match[2]))
            self.waiting = [vote for vote in self.waiting if not vote.startswith(f"rank {match[1]} ")]
            return lines or ["  nobody waits for it"]
        elif match := re.fullmatch(r"rank (\d+) rejoins", event):
            self.machine.rejoin_rank(int(match[1]))
        elif match := re.fullmatch(r"(\d+(?:\.\d+)?) s pass(?:es)?", event):
            return self.let_pass(float(match[1]))
        elif event == "end":
            return [f"  still waiting: {', '.join(self.waiting) or 'nobody'}"]
        else:
            raise ValueError(f"no event: {event!r}")
        return []

    def vote(self, rank: int, fingerprint: str, spans: str, partial: bool) -> list[str]:
        counts = {}
        for text in spans.split(", "):
            span = SPAN.fullmatch(text)
            if span is None:
                raise ValueError(f"no span: {text!r}")
            start, end = int(span["start"]), int(span["end"])
            group = _vocabulary.ProcessGroupId(self.groups[span["group"]])
            counts[group] = _vocabulary.ProcessGroupCollectiveCount(start, end - start)
        try:
            of_rank = _vocabulary.RankCollectiveCounts(counts)
            request = _vocabulary.CollectiveHandshakeRequest(of_rank, fingerprint, rank)
            if partial:
                spans = [(group, (count.collective_count_before, count.end)) for group, count in counts.items()]
                places = [(self.machine.line(group), span) for group, span in spans]
                voter = self.machine.voter(rank)
                decisions = list(self.machine.cast(voter, places, fingerprint, request, self.now, partial=True))
            else:
                decisions = self.machine.put_request(request, self.now)
        except _vocabulary.HandshakeError as error:
            return self.wrapped(f"  refused, {type(error).__name__}: ", str(error))
        self.waiting.append(f"rank {rank} {fingerprint}")
        return (self.answers(decisions) or ["  waits"]) + self.let_pass(0.0)

    def answers(self, decisions: list) -> list[str]:
        together: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for decision in decisions:
            answered = (decision.rank, f"rank {decision.rank} {decision.request.executable_fingerprint}")
            self.waiting.remove(answered[1])
            outcome = decision.outcome.name + (", and looks for a plan" if decision.plan else "")
            together.setdefault((outcome, decision.reason), []).append(answered)
        lines = []
        for (outcome, reason), answered in sorted(together.items(), key=lambda item: min(item[1])):
            lines.append(f"  {outcome}: {', '.join(name for _, name in sorted(answered))}")
            if reason:
                lines += self.wrapped("    because ", reason)
        return lines

    def let_pass(self, seconds: float) -> list[str]:
        """Wakes the machine when it asks for it, as the coordinator does."""
        until = self.now + seconds
        lines = []
        while (deadline := self.machine.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            happened = self.answers(self.machine.expire(self.now))
            told: dict[str, list[int]] = {}
            for decision, text in self.machine.notices(self.now):
                told.setdefault(text, []).append(decision.rank)
            for text, ranks in told.items():
                happened += self.wrapped(f"  told to {_vocabulary.format_ranks(ranks)}: ", text)
            if happened:
                lines += [f"  at {self.now:g} s", *(f"  {line}" for line in happened)]
        self.now = until
        return lines

    @staticmethod
    def wrapped(start: str, text: str) -> list[str]:
        whole_spans = re.sub(r"(\[\d+,) (\d+\))", "\\1\0\\2", start + text)
        lines = textwrap.wrap(whole_spans, 108, subsequent_indent="        ", break_on_hyphens=False)
        return [line.replace("\0", " ") for line in lines]


def replay(transcript: str) -> str:
    """The transcript with what the machine answers now in the place of what stands there."""
    player = Player()
    lines = []
    for line in transcript.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += player.play(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    transcript = path.read_text(encoding="utf-8")
    assert replay(transcript) == transcript


def test_there_are_transcripts_and_each_is_whole() -> None:
    assert len(TRANSCRIPTS) >= 20
    for path in TRANSCRIPTS:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# "), f"{path.name} does not say what it shows"
        assert "end" in lines, f"{path.name} does not say who still waits at its end"


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(f"usage: {sys.argv[0]} --update")
    for transcript_path in TRANSCRIPTS:
        transcript_path.write_text(replay(transcript_path.read_text(encoding="utf-8")), encoding="utf-8")
