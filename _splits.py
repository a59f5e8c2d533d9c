# SPDX-License-Identifier: Apache-2.0
"""What follows a split: which votes belong together, the rounds of a partial plan, and the graphs to compare.

The consensus machine answers SPLIT and forgets. Here the votes of one split component are kept together for a while,
in a `Record`, for two purposes. No socket, no clock, no thread.

*The exchange.* Ranks whose votes were marked `partial` go on to look for the part that their graphs have in common.
That takes some rounds, each a gathering of all the ranks of the component, answered to all of them at once:

    REFERENCE   complete when every member of every group has voted the same span; says who the reference rank is
    SHARE       the reference rank's payload, to all the others
    INTERSECT   the bitwise AND of everybody's bitmap; as often as they need it
    AGREE       whether all gave the same digest

Only a yes in AGREE lets anybody run anything fat. An exchange is called off for all, in one step, as soon as it can't
complete: spans differ, a rank does not take part, says that it can't go on, is lost, has gone past, or is blocked
elsewhere; or once the coordinator's timeout has passed since the split, whichever ranks take part and whatever their
own timeouts are. The ranks run skinny then, as they would without it.

*No cycle of waits.* A rank may have several votes under way. It is taken to wait for their answers, and to go through
the exchanges that they were promised, in the order in which it cast them. So a rank that an exchange lacks is blocked
by any vote of its without an answer and by any other exchange; one that is in it, by those of its earlier votes. An
exchange is called off if it waits for a rank that is blocked by a vote (whom that waits for is not known here), or,
through other exchanges, for itself. It goes on to wait for a rank that is merely behind, or in an exchange that will
end. What a rank does in another order the timeout ends.

*The report.* So that the difference can be explained, one graph is asked for each distinct fingerprint, of one rank. A
rank that was asked and does not send it keeps others from being asked for `GRAPH_WITHIN_S`. A set of fingerprints is
explained again only where graphs of it have come in since: a job may split at every step.
"""

import hashlib
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

if __package__:
    from ._consensus import Span
    from ._protocol import ABORT, AGREE, INTERSECT, REFERENCE, SHARE
    from ._vocabulary import format_ranks
else:
    from _consensus import Span
    from _protocol import ABORT, AGREE, INTERSECT, REFERENCE, SHARE
    from _vocabulary import format_ranks

# Split components that are kept at once. A job that splits at every step settles one before the next; this many
# means that their ranks never come, and the oldest are given up.
MAX_RECORDS = 256
# Graphs that one report compares; with one variant for each rank, further ones show nothing new.
MAX_VARIANTS = 64
# Graphs, compressed, that are kept for reports or on their way; past either bound no more are asked for.
MAX_GRAPHS = 1024
MAX_GRAPHS_BYTES = 256 * 2**20
# Reports of one job. What differs between its graphs is known long before.
MAX_REPORTS = 1024
# A report is made when the component is complete and its graphs are in, or so long after the split.
REPORT_WAIT_S = 10.0
# A graph that was asked for and has not come by then is asked of others; printing one of 100,000 nodes takes seconds.
GRAPH_WITHIN_S = 60.0

_RANK = struct.Struct("!I")


class SplitVote(NamedTuple):
    """One vote that was answered SPLIT. `number` is the rank's own number of it; they rise."""

    rank: int
    number: int
    spans: list[Span]
    digest: bytes
    partial: bool
    has_graph: bool


class Reply(NamedTuple):
    """What to tell one rank of an exchange: the outcome of a round; `ok` is False when it is called off."""

    rank: int
    exchange: int
    round: int
    ok: bool
    payload: bytes


class Record:
    """One split component."""

    __slots__ = (
        "agreed",
        "bitmap",
        "compared",
        "digests",
        "heard",
        "kept_until",
        "left_out",
        "missing",
        "number",
        "plan",
        "promised",
        "reason",
        "reference",
        "report_due",
        "round",
        "spans",
        "votes",
        "waits_for",
    )

    def __init__(self, number: int, reason: str, kept_until: float) -> None:
        self.number = number
        self.reason = reason
        self.kept_until = kept_until
        self.votes: dict[int, SplitVote] = {}
        self.digests: set[bytes] = set()
        self.spans: dict[Span, None] = {}  # in the order in which they were voted on
        self.missing: set[int] = set()
        # The exchange: open until it is agreed or called off.
        self.plan = True
        self.promised: list[int] = []  # ranks that wait for its outcome
        self.waits_for: set[int] = set()  # other exchanges, in which ranks are blocked for it; some may have ended
        self.reference = -1
        self.round = REFERENCE
        self.heard: set[int] = set()
        self.bitmap = b""
        self.agreed: set[bytes] = set()
        # The report: made by then at the latest; None if there is none to be made.
        self.report_due: float | None = None
        self.compared: set[bytes] = set()  # the fingerprints whose graphs it compares: those that came first
        self.left_out: dict[bytes, str] = {}  # the others that have graphs, and which bound leaves them out

    def overlaps(self, spans: Iterable[Span]) -> bool:
        """Whether any of the spans meets one of the component's."""
        return any(
            group is mine and start < end_of_mine and start_of_mine < end
            for group, start, end in spans
            for mine, start_of_mine, end_of_mine in self.spans
        )

    def variants(self) -> dict[bytes, list[int]]:
        """The ranks of each fingerprint, the largest set first, then by lowest rank."""
        ranks: dict[bytes, list[int]] = {}
        for rank in sorted(self.votes):
            ranks.setdefault(self.votes[rank].digest, []).append(rank)
        return dict(sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1][0])))


class _Asked(NamedTuple):
    """Who was asked for a graph, and when it is asked of others."""

    rank: int
    vote_number: int
    until: float


class Splits:
    """The split components of a job, and their exchanges."""

    def __init__(self, timeout_s: float, explain: bool, oldest_waiting: Callable[[int], int | None]) -> None:
        """
        Args:
            timeout_s: how long after the split an exchange may take, in seconds: the coordinator's timeout.
            explain: whether graphs are asked for and reports made.
            oldest_waiting: the number of a rank's oldest vote that has no answer, or None.
        """
        self._oldest_waiting = oldest_waiting
        self._timeout_s = timeout_s
        self._explain = explain
        self._records: dict[int, Record] = {}
        self._numbers = 0
        self._graphs: dict[bytes, bytes] = {}  # compressed, by digest
        self._graphs_bytes = 0
        self._asked: dict[bytes, _Asked] = {}  # graphs that are on their way, by digest
        self._explained: set[bytes] = set()

    # ------------------------------------------------------------------ votes

    def add(self, votes: Sequence[SplitVote], reason: str, now: float) -> tuple[Record, list[Reply]]:
        """Takes votes that were answered SPLIT together. Returns their record, and what ranks must be told.

        The ranks in the record's `promised` afterwards take part in the exchange of its number.
        """
        for digest in [digest for digest, asked in self._asked.items() if asked.until <= now]:
            del self._asked[digest]
        replies: list[Reply] = []
        # Thousands of votes that are answered together mostly have the same spans.
        spans = {span for vote in votes for span in vote.spans}
        met = [record for record in self._records.values() if record.overlaps(spans)]
        if met:
            record = met[0]
        else:
            self._make_room(replies)
            self._numbers += 1
            record = self._records[self._numbers] = Record(self._numbers, reason, now + self._timeout_s)
            if self._explain and len(self._explained) < MAX_REPORTS:
                record.report_due = now + REPORT_WAIT_S
        waited_for = set(record.missing)
        for vote in votes:
            replies += self._include(record, vote)
        for other in met[1:]:
            replies += self._call_off(other, "its ranks met those of another split")
            replies += self._call_off(record, "its ranks met those of another split")
        if record.plan:
            replies += self._call_off(record, self._why_not_all_come(record, votes, record.missing - waited_for))
        if record.plan:
            record.promised += [vote.rank for vote in votes]
            if not record.missing:
                replies += self._name_reference(record)
        self._forget_if_done(record)
        return record, replies

    def note_vote(self, rank: int) -> list[Reply]:
        """A rank has cast a vote: exchanges that lack it are called off if it has gone past them, or has to wait."""
        replies: list[Reply] = []
        for record in self._open_plans():
            if rank in record.missing:
                replies += self._call_off(record, self._why_not_come(record, [rank]))
        return replies

    def drop_rank(self, rank: int) -> list[Reply]:
        """A rank is gone."""
        for digest in [digest for digest, asked in self._asked.items() if asked.rank == rank]:
            del self._asked[digest]
        replies: list[Reply] = []
        for record in self._open_plans():
            if rank in record.missing or rank in record.votes:
                replies += self._call_off(record, f"rank {rank} is gone")
        return replies

    def expire(self, now: float) -> list[Reply]:
        """Calls off the exchanges, and forgets the records, whose time is up."""
        replies: list[Reply] = []
        for record in list(self._records.values()):
            if record.kept_until <= now:
                late = record.missing or record.votes.keys() - record.heard
                if record.round == SHARE:
                    late = {record.reference}
                replies += self._call_off(record, f"{format_ranks(late)} did not come in time")
                if record.report_due is None:
                    self._records.pop(record.number, None)
                else:
                    record.kept_until = record.report_due
        return replies

    def next_deadline(self) -> float | None:
        """When `expire` or `reports_due` should be called next, or None."""
        deadlines = [record.kept_until for record in self._records.values()]
        deadlines += [record.report_due for record in self._records.values() if record.report_due is not None]
        return min(deadlines, default=None)

    # ------------------------------------------------------------------ exchanges

    def contribute(self, rank: int, exchange: int, round_number: int, payload: bytes) -> list[Reply]:
        """Takes one rank's part in one round, `payload` being what the round asks for.

        A part of another round than the exchange is in, or a second one of the same rank, calls the exchange off. A
        part in an exchange that has ended, or of a rank that does not belong to it, is ignored.
        """
        record = self._records.get(exchange)
        if record is None or not record.plan or rank not in record.votes:
            return []  # it was called off, and the rank has been told
        if round_number == ABORT:
            return self._call_off(record, f"rank {rank} can't go on: {payload.decode('utf-8', 'replace')}")
        if record.round == INTERSECT and not record.heard and round_number == AGREE:
            record.round = AGREE  # enough intersections: the first rank to say so speaks for all
        if round_number != record.round or round_number == REFERENCE or rank in record.heard:
            return self._call_off(record, f"rank {rank} is out of step")
        if round_number == SHARE:
            if rank != record.reference:
                return self._call_off(record, f"rank {rank} is not the reference rank")
            return self._complete(record, INTERSECT, {other: payload for other in record.votes if other != rank})
        if round_number == INTERSECT:
            if record.heard and len(payload) != len(record.bitmap):
                return self._call_off(record, f"rank {rank} has a bitmap of another length")
            record.bitmap = _and(record.bitmap, payload) if record.heard else payload
        else:
            record.agreed.add(payload)
        record.heard.add(rank)
        if len(record.heard) < len(record.votes):
            return []
        if round_number == INTERSECT:
            return self._complete(record, INTERSECT, dict.fromkeys(record.votes, record.bitmap))
        verdict = b"\x01" if len(record.agreed) == 1 else b"\x00"
        replies = self._complete(record, AGREE, dict.fromkeys(record.votes, verdict))
        record.plan = False
        self._forget_if_done(record)
        return replies

    # ------------------------------------------------------------------ reports

    def asks_for_graph(self, record: Record, vote: SplitVote, now: float) -> bool:
        """Whether this vote's rank should send its graph: its report is to compare it, and nobody has sent one of its
        fingerprint or is about to."""
        digest = vote.digest
        if record.report_due is None or not vote.has_graph:
            return False
        if digest not in record.compared and len(record.compared) >= MAX_VARIANTS:
            record.left_out[digest] = f"left out: a report compares at most {MAX_VARIANTS} graphs"
            return False
        is_known = digest in self._graphs or digest in self._asked
        if not is_known:
            if len(self._graphs) + len(self._asked) >= MAX_GRAPHS or self._graphs_bytes >= MAX_GRAPHS_BYTES:
                record.left_out[digest] = (
                    f"left out: at most {MAX_GRAPHS:,} graphs of a job are kept, and {MAX_GRAPHS_BYTES >> 20} MiB"
                )
                return False
            self._asked[digest] = _Asked(vote.rank, vote.number, now + GRAPH_WITHIN_S)
        record.compared.add(digest)
        return not is_known

    def add_graph(self, rank: int, vote_number: int, compressed: bytes) -> None:
        """Takes a graph that was asked for. Others are ignored."""
        for digest, asked in self._asked.items():
            if (asked.rank, asked.vote_number) == (rank, vote_number):
                del self._asked[digest]
                self._graphs[digest] = compressed
                self._graphs_bytes += len(compressed)
                return

    def graph(self, record: Record, digest: bytes) -> tuple[bytes, str]:
        """The graph of one of the record's fingerprints, compressed, for its report; where there is none, empty, and
        why."""
        if digest not in record.compared:
            return b"", record.left_out.get(digest, "no graph was given; pass graph_module_str to the vote")
        graph = self._graphs.get(digest)
        return (b"", "the graph was asked for and has not come") if graph is None else (graph, "")

    def reports_due(self, now: float) -> list[Record]:
        """The records whose report can be made now: their ranks and graphs are all in, or have been waited for long
        enough. Each is returned once, and none whose fingerprints were explained before with the same graphs."""
        due = []
        for record in [record for record in self._records.values() if record.report_due is not None]:
            complete = not record.missing and self._asked.keys().isdisjoint(record.compared)
            if complete or (record.report_due is not None and record.report_due <= now):
                record.report_due = None
                key = self._key_of_report(record)
                if key not in self._explained and len(self._explained) < MAX_REPORTS:
                    self._explained.add(key)
                    due.append(record)
                self._forget_if_done(record)
        return due

    def _key_of_report(self, record: Record) -> bytes:
        """Equal for records with the same fingerprints and the same graphs to compare. A hash: there may be
        thousands of each."""
        graphs = sorted(record.compared & self._graphs.keys())
        return hashlib.sha256(b"".join((*sorted(record.digests), b"graphs", *graphs))).digest()

    # ------------------------------------------------------------------ within

    @property
    def has_records(self) -> bool:
        """Whether any split component is kept."""
        return bool(self._records)

    @property
    def has_open_plans(self) -> bool:
        """Whether any exchange is under way."""
        return bool(self._records) and any(record.plan for record in self._records.values())

    def _open_plans(self) -> list[Record]:
        return [record for record in self._records.values() if record.plan]

    def _include(self, record: Record, vote: SplitVote) -> list[Reply]:
        """Puts the vote into the record, and finds whether the record can still have a plan."""
        why_not = ""
        if vote.rank in record.votes:
            why_not = f"rank {vote.rank} takes part with two graphs"
        elif not vote.partial:
            why_not = f"rank {vote.rank} does not take part"
        record.votes[vote.rank] = vote
        record.digests.add(vote.digest)
        record.missing.discard(vote.rank)
        for span in vote.spans:
            if span in record.spans:
                continue
            group, start, end = span
            if any(g is group and s < end and start < e for g, s, e in record.spans):
                why_not = why_not or "spans differ"
            record.spans[span] = None
            record.missing |= group.members - record.votes.keys()
            if any(other in group.members and span not in their.spans for other, their in record.votes.items()):
                why_not = why_not or "spans differ"
        for span in record.spans:
            if vote.rank in span[0].members and span not in vote.spans:
                why_not = why_not or "spans differ"
        return self._call_off(record, why_not)

    def _why_not_all_come(self, record: Record, votes: Sequence[SplitVote], new: Collection[int]) -> str:
        """Why the record, with these votes, can't wait for its ranks, `new` being those that it lacks since then; empty
        if it can."""
        if why_not := self._why_not_come(record, new):
            return why_not
        for vote in votes:
            oldest = self._oldest_waiting(vote.rank)
            if oldest is not None and oldest < vote.number:
                return f"rank {vote.rank} can't go on: blocked in an earlier vote"
        for other in self._open_plans():
            if other is not record:
                self._note_waits(record, votes, new, other)
        return "its ranks are in an exchange that waits for it" if self._waits_for_itself(record) else ""

    def _why_not_come(self, record: Record, missing: Collection[int]) -> str:
        """Which of these missing ranks have gone past the record, or are blocked in a vote; empty if none."""
        past = [
            rank
            for rank in missing
            if any(rank in group.members and group.frontier.get(rank, 0) > start for group, start, _ in record.spans)
        ]
        if past:
            return f"{format_ranks(past)} went on without it"
        blocked = [rank for rank in missing if self._oldest_waiting(rank) is not None]
        return f"{format_ranks(blocked)} can't come: blocked in another vote" if blocked else ""

    @staticmethod
    def _note_waits(record: Record, votes: Sequence[SplitVote], new: Collection[int], other: Record) -> None:
        """Notes whether these votes, and the ranks lacked since then, make one exchange wait for the other."""
        if any(rank in other.votes for rank in new):
            record.waits_for.add(other.number)
        for vote in votes:
            theirs = other.votes.get(vote.rank)
            if theirs is not None and theirs.number < vote.number:
                record.waits_for.add(other.number)
            elif theirs is not None or vote.rank in other.missing:
                other.waits_for.add(record.number)

    def _waits_for_itself(self, record: Record) -> bool:
        """Whether an exchange waits for itself, through others that are open."""
        seen: set[int] = set()
        follow = [record]
        while follow:
            for number in follow.pop().waits_for - seen:
                seen.add(number)
                other = self._records.get(number)
                if other is record:
                    return True
                if other is not None and other.plan:
                    follow.append(other)
        return False

    def _call_off(self, record: Record, why: str) -> list[Reply]:
        """Unless `why` is empty."""
        if not (record.plan and why):
            return []
        record.plan = False
        self._forget_if_done(record)
        return [Reply(rank, record.number, ABORT, False, why.encode()) for rank in record.promised]

    def _name_reference(self, record: Record) -> list[Reply]:
        record.reference = next(iter(record.variants().values()))[0]
        return self._complete(record, SHARE, dict.fromkeys(record.votes, _RANK.pack(record.reference)))

    @staticmethod
    def _complete(record: Record, next_round: int, payloads: dict[int, bytes]) -> list[Reply]:
        finished, record.round = record.round, next_round
        record.heard = set()
        return [Reply(rank, record.number, finished, True, payload) for rank, payload in payloads.items()]

    def _forget_if_done(self, record: Record) -> None:
        """Forgets a record once nobody can still join it and nothing is left to do for it."""
        if not record.missing and not record.plan and record.report_due is None:
            self._records.pop(record.number, None)

    def _make_room(self, replies: list[Reply]) -> None:
        while len(self._records) >= MAX_RECORDS:
            oldest = self._records.pop(next(iter(self._records)))
            replies += self._call_off(oldest, "too many splits are open")


def _and(left: bytes, right: bytes) -> bytes:
    return (int.from_bytes(left, "big") & int.from_bytes(right, "big")).to_bytes(len(left), "big")
