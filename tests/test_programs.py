# SPDX-License-Identifier: Apache-2.0
"""One graph's programs: compiled before the vote, each once, and what happens where that fails."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from layout import PROJECT, load
from ranks import PATIENCE_S, handshake, job, open_rank, request, together

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from plan_programs import made, matrix, reduce  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

_graph_plan = load("_graph_plan")
_vocabulary = load("_vocabulary")

PAIR = _vocabulary.ProcessGroupId([0, 1])


@pytest.fixture(scope="module", autouse=True)
def fake_group() -> Iterator[None]:
    """Process group '0', in which nothing is communicated."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def graph_of(constant: float) -> Any:
    """A multiplication of the rank's own, and two collectives with what all ranks do."""
    return made(lambda x: (reduce(torch.tanh(reduce(x * constant + 1)).sin()) * 3,), matrix())


class Rank:
    """One rank's graph and its programs. `compiled`: the graphs that were compiled, each with how many votes before."""

    def __init__(
        self, h: Any, constant: float, stage: str, partial: bool = False, fails_at: int = -1, collectives: int = 2
    ) -> None:
        self.graph, self.session, self.compiled = graph_of(constant), h._session, []
        self.gate = handshake.DispatchGate(f"graph {constant}", {PAIR: collectives}, stage=stage, partial=partial)
        self.fails_at = fails_at
        self.programs = _graph_plan.Programs(self.graph, self.gate, self.compile)
        if self.gate.answer is None:
            # A process has one session; here two ranks share the process.
            self.gate._session, self.gate._takes = h._session, h._session.client.resolve({PAIR: 2})
            h._session.connected()
            self.gate._flags = h._session.flags(None, self.gate.partial)

    def compile(self, graph_module: Any) -> Callable[[list[Any]], Any]:
        if len(self.compiled) == self.fails_at:
            raise OSError("main.so: file too short")
        self.compiled.append((graph_module, self.session.stats["handshakes"]))
        return lambda inputs: graph_module(*inputs)

    def dispatch(self) -> str:
        program = self.programs.agreed()
        assert torch.equal(program.run([matrix()])[0], self.graph(matrix())[0])
        return str(program.kind)


@pytest.mark.parametrize("stage", ["COMPILE_STAGE", "DISPATCH_STAGE"])
@pytest.mark.parametrize(("partial", "kind"), [(False, "skinny"), (True, "partial")])
def test_each_program_is_compiled_once_and_the_whole_graph_before_the_vote(stage, partial, kind):
    with job(2) as handshakes:
        ranks = [Rank(h, 2.0 + h.rank, stage, partial) for h in handshakes]
        assert [rank.compiled for rank in ranks] == [[(rank.graph, 0)] for rank in ranks]
        assert together(*(rank.dispatch for rank in ranks)) == [kind, kind]
        compiled = [len(rank.compiled) for rank in ranks]
        for _ in range(2):
            programs = together(*(rank.programs.agreed for rank in ranks))
            assert [program.num_segments for program in programs] == [number - 1 for number in compiled]
        assert [len(rank.compiled) for rank in ranks] == compiled
        votes = 1 if stage == "COMPILE_STAGE" else 3
        assert [rank.session.stats["handshakes"] for rank in ranks] == [votes, votes]


def test_fat_and_split_in_turn_compile_nothing_anew():
    with job(2) as (zero, one):
        mine = Rank(zero, 2.0, "DISPATCH_STAGE")
        same, other = Rank(one, 2.0, "DISPATCH_STAGE"), Rank(one, 3.0, "DISPATCH_STAGE")
        found = [together(mine.dispatch, theirs.dispatch) for theirs in (same, other, same, other)]
        assert found == [["fat", "fat"], ["skinny", "skinny"]] * 2
        assert len(mine.compiled) == 1 + 5


def test_a_graph_that_fails_to_compile_has_no_vote_and_may_be_compiled_again():
    with job(2) as (zero, one):
        mine = Rank(zero, 2.0, "COMPILE_STAGE")
        with pytest.raises(OSError, match="file too short"):
            Rank(one, 2.0, "COMPILE_STAGE", fails_at=0)
        again = Rank(one, 2.0, "COMPILE_STAGE")
        assert together(mine.dispatch, again.dispatch) == ["fat", "fat"]


@pytest.mark.parametrize("partial", [False, True])
def test_what_fails_to_compile_after_the_verdict_is_told_to_the_other_ranks(partial):
    with job(2) as (zero, one):
        mine = Rank(zero, 2.0, "DISPATCH_STAGE", partial)
        theirs = Rank(one, 3.0, "DISPATCH_STAGE", partial, fails_at=2)
        found, failed = together(mine.dispatch, theirs.dispatch)
        assert found == ("partial" if partial else "skinny") and isinstance(failed, OSError)
        for rank, kind in ((mine, _vocabulary.HandshakePeerLostError), (theirs, _vocabulary.HandshakeError)):
            with pytest.raises(kind, match=r"it can't run what was agreed: OSError: main\.so: file too short"):
                rank.dispatch()


@pytest.mark.parametrize(
    ("stage", "collectives", "kind"), [("OFF", 2, "skinny"), ("OFF", 0, "fat"), ("COMPILE_STAGE", 0, "fat")]
)
def test_where_nobody_votes_just_what_will_run_is_compiled(stage, collectives, kind):
    with job(2) as (zero, _):
        rank = Rank(zero, 2.0, stage, partial=True, collectives=collectives)
        compiled = len(rank.compiled)
        assert compiled == (5 if kind == "skinny" else 1)
        assert rank.dispatch() == kind
        assert len(rank.compiled) == compiled and rank.session.stats["handshakes"] == 0


def test_a_graph_that_can_not_be_hashed_looks_for_no_plan(monkeypatch, caplog):
    def unhashable(*arguments):
        raise _vocabulary.HandshakeError("it holds an object")

    with job(2) as (zero, one):
        mine = Rank(zero, 2.0, "DISPATCH_STAGE", partial=True)
        monkeypatch.setattr(_graph_plan, "OwnGraph", unhashable)
        theirs = Rank(one, 3.0, "DISPATCH_STAGE", partial=True)
        assert together(mine.dispatch, theirs.dispatch) == ["skinny", "skinny"]
        assert not caplog.records or "no plan" not in caplog.text


@pytest.mark.flat_only
@pytest.mark.parametrize(("fingerprint", "kind"), [(None, "fat"), ("another", "skinny")])
def test_the_readmes_way_to_call_it_runs_as_it_is(fingerprint, kind):
    text = (PROJECT / "README.md").read_text(encoding="utf-8").partition("## How a compiler calls it")[2]
    names: dict[str, Any] = {
        "graph_module": graph_of(2.0),
        "compile_graph": lambda graph_module: lambda inputs: graph_module(*inputs),
    }
    options = {"world_size": 2, "host": "127.0.0.1", "timeout_s": PATIENCE_S, "stage": "DISPATCH_STAGE"}
    with handshake.Handshake(0, port=0, coordinator="thread", **options) as zero:
        with open_rank(1, port=zero.address[1], **options) as one:
            exec(text.partition("```python\n")[2].partition("```")[0], names)
            other = fingerprint or names["gate"]._fingerprint
            votes = [request(1, (PAIR, turn, 2), fingerprint=other) for turn in (0, 2)]
            program, _ = together(names["programs"].agreed, lambda: one.submit(votes[0]))
            assert program.kind == kind
            value, _ = together(lambda: names["run"]([matrix()]), lambda: one.submit(votes[1]))
            assert torch.equal(value[0], names["graph_module"](matrix())[0])
