# SPDX-License-Identifier: Apache-2.0
"""Groups, counts, requests, stages and errors."""

import copy
import enum
import importlib.util
import json
import pickle
import random

import pytest
from layout import load

_vocabulary = load("_vocabulary")
LAST = _vocabulary.MAX_LINE_POSITION
Count = _vocabulary.ProcessGroupCollectiveCount
Counts = _vocabulary.RankCollectiveCounts
Group = _vocabulary.ProcessGroupId
Request = _vocabulary.CollectiveHandshakeRequest
Response = _vocabulary.CollectiveHandshakeResponse

WORLD = Group(range(4))
EVEN = Group([0, 2])


class ForeignGroup:
    """A group class of somebody else's, known by its ranks."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __hash__(self) -> int:
        return hash(tuple(self.ranks))


class Whole:
    """An integer of somebody else's, as numpy has them."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


# Kinds of integers that are as good as Python's.
WHOLE = [Whole]
if importlib.util.find_spec("numpy"):
    import numpy

    WHOLE += [numpy.int64, numpy.uint8]
NOT_WHOLE = [True, False, 1.0, 1.5, "1", b"1", None, float("nan"), 1j, [1]]


# ---------------------------------------------------------------------------------------------------------------
# Errors and stages
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (_vocabulary.HandshakeTimeoutError, TimeoutError),
        (_vocabulary.HandshakePeerLostError, ConnectionError),
        (_vocabulary.HandshakeConfigError, ValueError),
        (_vocabulary.HandshakeTypeError, TypeError),
        (_vocabulary.HandshakeProtocolError, ValueError),
    ],
)
def test_errors_can_be_caught_as_what_they_are_and_keep_their_fields_on_the_way_to_another_process(error, also) -> None:
    raised = error("ranks 2, 3 did not come", ranks=[3, 2], group=(0, 2, 3), span=(4, 6), seconds=60.0)
    for seen in (raised, pickle.loads(pickle.dumps(raised))):
        assert type(seen) is error
        assert isinstance(seen, also)
        assert isinstance(seen, _vocabulary.HandshakeError)
        assert isinstance(seen, RuntimeError)
        assert str(seen) == "ranks 2, 3 did not come"
        assert (seen.ranks, seen.group, seen.span, seen.seconds) == ((2, 3), (0, 2, 3), (4, 6), 60.0)


def test_an_error_need_not_know_more_than_its_text() -> None:
    raised = _vocabulary.HandshakeError("no")
    assert (raised.ranks, raised.group, raised.span, raised.seconds) == ((), None, None, None)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch):
    """Sets variables; all that this module reads are unset before."""
    for name in (*_vocabulary.STAGE_VARIABLES, _vocabulary.GROUPS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_vocabulary, "given_group_naming", None)
    return monkeypatch.setenv


@pytest.mark.parametrize("variable", _vocabulary.STAGE_VARIABLES)
@pytest.mark.parametrize(
    ("value", "stage"),
    [
        ("", "OFF"),
        ("  ", "OFF"),
        ("OFF", "OFF"),
        ("COMPILE_STAGE", "COMPILE_STAGE"),
        (" dispatch_stage ", "DISPATCH_STAGE"),
    ],
)
def test_either_variable_gives_the_stage(variables, variable: str, value: str, stage: str) -> None:
    variables(variable, value)
    assert _vocabulary.HandshakeStage.from_env() is _vocabulary.HandshakeStage[stage]


def test_both_variables_may_be_set_only_to_the_same(variables) -> None:
    assert _vocabulary.HandshakeStage.from_env() is _vocabulary.HandshakeStage.OFF
    one, other = _vocabulary.STAGE_VARIABLES
    assert {one, other} == {"TORCH_TPU_INTERNAL_HANDSHAKE_STAGE", "TORCH_TPU_SPMD_HANDSHAKE_STAGE"}
    variables(one, "compile_stage")
    variables(other, "")
    assert _vocabulary.HandshakeStage.from_env() is _vocabulary.HandshakeStage.COMPILE_STAGE
    variables(other, "COMPILE_STAGE")
    assert _vocabulary.HandshakeStage.from_env() is _vocabulary.HandshakeStage.COMPILE_STAGE
    variables(other, "OFF")
    with pytest.raises(_vocabulary.HandshakeConfigError) as raised:
        _vocabulary.HandshakeStage.from_env()
    assert f"{one}=COMPILE_STAGE and {other}=OFF are different stages" in str(raised.value)


@pytest.mark.parametrize("variable", _vocabulary.STAGE_VARIABLES)
def test_a_stage_that_is_not_valid_names_the_variable_and_the_choices(variables, variable: str) -> None:
    variables(variable, "ON")
    with pytest.raises(_vocabulary.HandshakeConfigError) as raised:
        _vocabulary.HandshakeStage.from_env()
    for part in (f"{variable}='ON' is not a valid stage", "OFF", "COMPILE_STAGE", "DISPATCH_STAGE"):
        assert part in str(raised.value)


def test_a_stage_is_taken_as_it_is() -> None:
    for stage in _vocabulary.HandshakeStage:
        assert _vocabulary.HandshakeStage.parse(stage, "stage") is stage
    theirs = enum.Enum("HandshakeStage", {"DISPATCH_STAGE": 2})  # as another package has it
    assert _vocabulary.HandshakeStage.parse(theirs.DISPATCH_STAGE, "stage").name == "DISPATCH_STAGE"
    with pytest.raises(_vocabulary.HandshakeConfigError, match=r"^stage=5 is not a valid stage"):
        _vocabulary.HandshakeStage.parse(5, "stage")


def test_groups_are_named_as_given_else_as_the_handshake_was_told_else_by_the_variable(variables, monkeypatch) -> None:
    assert _vocabulary.group_naming() == "role"
    variables(_vocabulary.GROUPS_VARIABLE, "exact")
    assert _vocabulary.group_naming() == "exact"
    monkeypatch.setattr(_vocabulary, "given_group_naming", "role")
    assert _vocabulary.group_naming() == "role"
    assert _vocabulary.group_naming("exact") == "exact"
    with pytest.raises(_vocabulary.HandshakeConfigError, match="'ranks' is not a way to name groups"):
        _vocabulary.group_naming("ranks")


def test_a_way_to_name_groups_that_is_not_valid_names_the_variable(variables) -> None:
    variables(_vocabulary.GROUPS_VARIABLE, "ranks")
    with pytest.raises(_vocabulary.HandshakeConfigError, match=_vocabulary.GROUPS_VARIABLE):
        _vocabulary.group_naming()


# ---------------------------------------------------------------------------------------------------------------
# Whole numbers
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WHOLE)
def test_every_kind_of_integer_is_taken_and_becomes_pythons_own(kind) -> None:
    group = Group([kind(0), kind(2)], kind(4))
    counts = Counts()
    counts.increment_pg_collective_counts({group: kind(2)})
    counts.record_eager_collectives(group, kind(1))
    counts.increment_pg_collective_counts({group: kind(2)})
    request = Request(counts, "A", kind(2))
    count = counts[group]
    numbers = [
        *(*group.ranks, group.world_size, request.rank, counts._eager[group]),
        *(count.collective_count_before, count.num_collectives_in_graph),
        *(Count(kind(3), kind(2)).end, _vocabulary.whole_number(kind(5), "n")),
    ]
    assert numbers == [0, 2, 4, 2, 1, 3, 2, 5, 5]
    assert {type(number) for number in numbers} == {int}
    assert group == _vocabulary.as_process_group_id(ForeignGroup([kind(0), kind(2)]))
    assert Request.from_bytes(request.to_bytes()) == request


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_what_is_not_an_integer_is_refused_wherever_one_is_wanted(value) -> None:
    counts = Counts({WORLD: Count(3, 1)})
    for wants, name in [
        (lambda: _vocabulary.whole_number(value, "PLACE"), "PLACE="),
        (lambda: Group([0, value]), "ranks"),
        (lambda: Group([value, 2]), "ranks"),
        (lambda: Count(value, 1), "collective_count_before="),
        (lambda: Count(1, value), "num_collectives_in_graph="),
        (lambda: counts.increment_pg_collective_counts({WORLD: value}), "num_collectives on ranks 0-3="),
        (lambda: counts.record_eager_collectives(WORLD, value), "num_collectives"),
        (lambda: Request(counts, "A", value), "rank="),
        *([] if value is None else [(lambda: Group([0], value), "world_size=")]),
    ]:
        with pytest.raises(_vocabulary.HandshakeConfigError) as raised:
            wants()
        assert name in str(raised.value)
    assert dict(counts) == {WORLD: Count(3, 1)}


def test_the_error_for_a_number_below_the_least_says_the_least() -> None:
    assert _vocabulary.whole_number(1, "world_size", least=1) == 1
    with pytest.raises(_vocabulary.HandshakeConfigError, match=r"^world_size=0 is not a whole number of at least 1$"):
        _vocabulary.whole_number(0, "world_size", least=1)


def test_digits_are_a_number_where_variables_give_them() -> None:
    assert _vocabulary.whole_number(" 12\n", "RANK", text=True) == 12
    assert _vocabulary.whole_number("-1", "RANK", text=True) == -1
    for text in ["", " ", "1.0", "one", "0x10", "9" * 5000]:
        with pytest.raises(_vocabulary.HandshakeConfigError, match=r"^RANK=") as raised:
            _vocabulary.whole_number(text, "RANK", text=True)
        assert len(str(raised.value)) < 300


# ---------------------------------------------------------------------------------------------------------------
# Groups
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([3, 3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([8, 2, 0, 3, 1], "ranks 0-3, 8"),
        ([0, 2, 4], "ranks 0, 2, 4"),
        (range(4096), "ranks 0-4095"),
        (range(0, 100, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 34 more"),
    ],
)
def test_format_ranks(ranks, text: str) -> None:
    assert _vocabulary.format_ranks(ranks) == text
    assert _vocabulary.format_ranks([0, 2, 3, 10, 11, 12], most_ranges=2) == "ranks 0, 2-3 and 3 more"


def test_a_group_behaves_as_its_ranks() -> None:
    group = Group([0, 2, 5], world_size=6)
    assert group.ranks == (0, 2, 5)
    assert group.world_size == 6
    assert list(group) == [0, 2, 5]
    assert len(group) == 3
    assert (group[0], group[-1]) == (0, 5)
    assert 2 in group
    assert 1 not in group
    assert "0, 2, 5" in repr(group)


def test_ranks_come_in_any_order() -> None:
    group = Group([5, 0, 2])
    assert group.ranks == (0, 2, 5)
    assert group == Group([0, 2, 5])
    assert _vocabulary.as_process_group_id(ForeignGroup((2, 0))) == EVEN


def test_groups_of_the_same_ranks_are_one_key() -> None:
    assert Group([0, 1]) == Group((0, 1), world_size=8)
    assert hash(Group([0, 1])) == hash(Group((0, 1), world_size=8))
    assert Group([0, 1]) != Group([0, 1, 2])
    assert Group([0, 1]) != (0, 1)
    assert Group([0, 1]) == ForeignGroup([0, 1])
    assert {Group([0, 1]): "found"}[Group(range(2))] == "found"


def test_copies_and_pickles_of_a_group_equal_it() -> None:
    group = Group([1, 3], world_size=4)
    for arrived in (copy.copy(group), copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert arrived == group
        assert hash(arrived) == hash(group)
        assert arrived.world_size == 4


@pytest.mark.parametrize(
    ("ranks", "world_size", "said"),
    [
        ([], None, "from 0 on, each once"),
        ([-1, 0], None, "from 0 on, each once, got [-1, 0]"),
        ([1, 0, 1], None, "from 0 on, each once, got [1, 0, 1]"),
        ([0, 1.5], None, "integers"),
        (["0"], None, "integers"),
        (7, None, "integers"),
        (None, None, "integers"),
        ([0, 4], 4, "outside a world of 4"),
        ([0], 0, "outside a world of 0"),
        ([0, 1], "2", "world_size='2' is not a whole number"),
        ("01", None, "integers"),
        (b"\x00\x01", None, "integers"),
        ({0: "a", 1: "b"}, None, "integers"),
        ([False, True], None, "integers"),
    ],
)
def test_a_group_that_is_not_valid(ranks, world_size, said: str) -> None:
    with pytest.raises(_vocabulary.HandshakeConfigError) as raised:
        Group(ranks, world_size)
    assert said in str(raised.value)


@pytest.mark.parametrize("ranks", [[*range(100_000), 5], ["0"] * 100_000], ids=["repeated", "text"])
def test_the_error_for_a_huge_group_stays_short(ranks) -> None:
    with pytest.raises(_vocabulary.HandshakeConfigError) as raised:
        Group(ranks)
    assert len(str(raised.value)) < 400


def test_other_group_classes_are_taken_by_their_ranks() -> None:
    ranks = (0, 2)
    assert _vocabulary.as_process_group_id(ForeignGroup(ranks)) == EVEN
    assert _vocabulary.as_process_group_id(ForeignGroup(ranks)) is _vocabulary.as_process_group_id(ForeignGroup(ranks))
    assert _vocabulary.as_process_group_id(EVEN) is EVEN


def test_a_foreign_group_whose_list_of_ranks_changes_is_not_mistaken_for_what_it_was() -> None:
    foreign = ForeignGroup([0, 1])
    assert _vocabulary.as_process_group_id(foreign) == Group([0, 1])
    foreign.ranks.append(2)
    assert _vocabulary.as_process_group_id(foreign) == Group([0, 1, 2])


def test_many_short_lived_foreign_groups_are_each_their_own() -> None:
    draw = random.Random(5)
    for _ in range(3 * _vocabulary.MAX_FOREIGN_GROUPS):
        ranks = tuple(sorted(draw.sample(range(8), 3)))
        assert _vocabulary.as_process_group_id(ForeignGroup(ranks)).ranks == ranks
    assert len(_vocabulary._foreign_groups) <= _vocabulary.MAX_FOREIGN_GROUPS


@pytest.mark.parametrize("thing", [None, "0", 3, (0, 1), object()], ids=repr)
def test_what_has_no_ranks_is_not_a_group_and_the_error_says_how_to_make_one(thing) -> None:
    counts = Counts({WORLD: Count(0, 1)})
    for wants in [
        lambda: _vocabulary.as_process_group_id(thing),
        lambda: _vocabulary.collectives_by_group({thing: 1}),
        lambda: Counts({thing: Count(0, 1)}),
        lambda: Request({thing: Count(0, 1)}, "A", 0),
        lambda: counts.increment_pg_collective_counts({thing: 1}),
        lambda: counts.record_eager_collectives(thing, 1),
        lambda: counts.collective_count(thing),
        lambda: counts[thing],
    ]:
        with pytest.raises(_vocabulary.HandshakeTypeError, match=r"\.ranks") as raised:
            wants()
        assert "ProcessGroupId(torch.distributed.get_process_group_ranks(group))" in str(raised.value)
    assert thing not in counts
    assert WORLD != thing


def test_a_group_of_torch_distributeds_has_no_ranks() -> None:
    c10d = pytest.importorskip("torch.distributed")
    with pytest.raises(_vocabulary.HandshakeTypeError, match="get_process_group_ranks"):
        _vocabulary.as_process_group_id(c10d.ProcessGroup(0, 2))


@pytest.mark.parametrize("ranks", [3, "ab", lambda: (0, 1), [0, None]], ids=["number", "text", "method", "None"])
def test_what_calls_something_else_its_ranks_is_not_a_group(ranks) -> None:
    other = ForeignGroup(ranks)
    assert WORLD != other
    with pytest.raises(_vocabulary.HandshakeTypeError, match="ranks of a process group must be integers"):
        _vocabulary.as_process_group_id(other)


# ---------------------------------------------------------------------------------------------------------------
# Counts
# ---------------------------------------------------------------------------------------------------------------


def test_a_count_moves_on_in_place() -> None:
    count = Count(0, 2)
    count.increment_num_collectives_in_graph(3)
    assert count == Count(2, 3)
    count.increment_num_collectives_in_graph(0)
    assert count == Count(5, 0)
    with pytest.raises(_vocabulary.HandshakeConfigError):
        count.increment_num_collectives_in_graph(-1)
    assert count == Count(5, 0)


def test_a_count_is_a_span() -> None:
    assert Count(2, 3).end == 5
    assert Count(2, 0).end == 2
    assert Count(2, 3) == Count(2, 3)
    assert hash(Count(2, 3)) == hash(Count(2, 3))
    assert Count(2, 3) != Count(3, 2)
    assert Count(2, 3) != (2, 3)
    assert Count(LAST - _vocabulary.MAX_COLLECTIVES_IN_GRAPH, _vocabulary.MAX_COLLECTIVES_IN_GRAPH).end == LAST


@pytest.mark.parametrize(
    ("before", "number"),
    [(-1, 0), (0, -1), (0.0, 1), (0, "1"), (None, 1), (LAST, 1), (LAST + 1, 0), (0, 2**32)],
)
def test_a_count_that_is_not_valid(before, number) -> None:
    with pytest.raises(_vocabulary.HandshakeConfigError):
        Count(before, number)


def test_each_graph_starts_where_the_last_one_ended() -> None:
    counts = Counts()
    counts.increment_pg_collective_counts({WORLD: 2})
    assert dict(counts) == {WORLD: Count(0, 2)}
    counts.increment_pg_collective_counts({WORLD: 1, EVEN: 3})
    assert dict(counts) == {WORLD: Count(2, 1), EVEN: Count(0, 3)}
    counts.increment_pg_collective_counts({EVEN: 1})
    assert dict(counts) == {WORLD: Count(3, 0), EVEN: Count(3, 1)}
    counts.increment_pg_collective_counts({})
    assert dict(counts) == {WORLD: Count(3, 0), EVEN: Count(4, 0)}
    assert counts.collective_count(EVEN) == 4
    assert counts.collective_count(ForeignGroup((0, 2))) == 4


def test_eager_collectives_move_the_line_without_a_span() -> None:
    counts = Counts()
    counts.record_eager_collectives(WORLD, 2)
    assert counts[WORLD] == Count(2, 0)
    counts.increment_pg_collective_counts({WORLD: 1})
    counts.record_eager_collectives(WORLD, 3)
    assert counts[WORLD] == Count(6, 0)
    counts.increment_pg_collective_counts({WORLD: 1})
    assert counts[WORLD] == Count(6, 1)


@pytest.mark.parametrize("bad", [{WORLD: 1, EVEN: -1}, {WORLD: 1, EVEN: 1.5}, {WORLD: 1, "even": 1}])
def test_a_bad_increment_moves_nothing(bad) -> None:
    counts = Counts({WORLD: Count(3, 1), EVEN: Count(0, 2)})
    with pytest.raises(_vocabulary.HandshakeConfigError):
        counts.increment_pg_collective_counts(bad)
    with pytest.raises(_vocabulary.HandshakeConfigError):
        counts.record_eager_collectives(WORLD, -1)
    assert dict(counts) == {WORLD: Count(3, 1), EVEN: Count(0, 2)}
    assert not counts._eager


def test_a_vote_on_a_large_group_writes_none_of_its_ranks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments):
        raise AssertionError("to write 4,096 ranks takes longer than a vote may")

    monkeypatch.setattr(_vocabulary, "format_ranks", fail)
    group = Group(range(4096))
    counts = Counts()
    counts.increment_pg_collective_counts({group: 2})
    assert Request(copy.copy(counts), "A", 5).participating_groups == [group]


def test_counts_are_a_mapping_that_takes_any_group() -> None:
    counts = Counts({ForeignGroup((0, 2)): Count(1, 1)})
    assert list(counts) == [EVEN]
    assert len(counts) == 1
    assert EVEN in counts
    assert ForeignGroup((0, 2)) in counts
    assert WORLD not in counts
    assert "even" not in counts
    assert list(counts.items()) == [(EVEN, Count(1, 1))]
    assert counts[ForeignGroup((0, 2))] == counts.get(ForeignGroup([2, 0])) == Count(1, 1)
    assert counts.get(WORLD) is None
    with pytest.raises(KeyError):
        counts.collective_count(WORLD)


def test_one_group_under_two_keys_is_one_line() -> None:
    both = {ForeignGroup((0, 2)): 1, ForeignGroup((0, 2)): 2}
    assert len(both) == 2
    assert _vocabulary.collectives_by_group(both) == {EVEN: 3}
    counts = Counts({EVEN: Count(3, 1)})
    counts.increment_pg_collective_counts(both)
    assert counts[EVEN] == Count(4, 3)
    with pytest.raises(_vocabulary.HandshakeConfigError, match="counted twice"):
        Counts({group: Count(0, 1) for group in both})


def test_a_plain_number_is_not_a_count() -> None:
    for wants in [lambda: Counts({EVEN: 1}), lambda: Request({EVEN: 1}, "A", 0)]:
        with pytest.raises(_vocabulary.HandshakeTypeError) as raised:
            wants()
        assert "ProcessGroupCollectiveCount(before, in_graph), got {ProcessGroupId(ranks 0, 2): 1}" in str(raised.value)


@pytest.mark.parametrize("thing", [[], [EVEN], "even", 3, EVEN], ids=repr)
def test_what_is_not_a_mapping_of_counts(thing) -> None:
    counts = Counts({WORLD: Count(3, 1)})
    for wants in [
        lambda: Counts(thing),
        lambda: Request(thing, "A", 0),
        lambda: counts.increment_pg_collective_counts(thing),
    ]:
        with pytest.raises(_vocabulary.HandshakeTypeError, match="mapping from process group"):
            wants()
    assert dict(counts) == {WORLD: Count(3, 1)}


def test_copies_of_counts_go_their_own_way() -> None:
    counts = Counts({WORLD: Count(0, 1)})
    counts.record_eager_collectives(EVEN, 1)
    for copied in (copy.copy(counts), copy.deepcopy(counts), copy.deepcopy({"counts": counts})["counts"]):
        assert copied == counts
        copied.increment_pg_collective_counts({WORLD: 5})
        copied.record_eager_collectives(EVEN, 2)
        assert dict(copied) == {WORLD: Count(1, 5), EVEN: Count(3, 0)}
        assert (copied._eager, counts._eager) == ({EVEN: 3}, {EVEN: 1})
        assert all(mine is theirs for mine, theirs in zip(copied, counts, strict=True))
    assert dict(counts) == {WORLD: Count(0, 1), EVEN: Count(1, 0)}


@pytest.mark.parametrize(
    ("one", "other", "match"),
    [
        ({WORLD: (0, 1)}, {WORLD: (0, 1)}, True),
        ({WORLD: (0, 1)}, {WORLD: (0, 2)}, False),
        ({WORLD: (0, 1)}, {WORLD: (1, 1)}, False),
        ({WORLD: (0, 1)}, {WORLD: (0, 0)}, False),
        ({WORLD: (0, 0)}, {WORLD: (7, 0)}, True),  # idle on both
        ({WORLD: (0, 1), EVEN: (4, 0)}, {WORLD: (0, 1)}, True),
        # {0,1,2,3} and {0,2}: a rank of EVEN belongs to the world, so it lacks a span there.
        ({EVEN: (0, 1)}, {EVEN: (0, 1), WORLD: (0, 1)}, False),
        # A rank of the world need not be in {0,2}.
        ({WORLD: (0, 1)}, {WORLD: (0, 1), EVEN: (0, 1)}, True),
        # Rows and columns of a mesh: both may be strangers to the group that only the other names.
        (
            {Group([0, 1]): (0, 1), Group([0, 2]): (0, 1)},
            {Group([0, 1]): (0, 1), Group([1, 3]): (0, 1)},
            True,
        ),
        ({}, {WORLD: (0, 1)}, True),
    ],
)
def test_matches(one, other, match: bool) -> None:
    one = Counts({group: Count(*count) for group, count in one.items()})
    other = Counts({group: Count(*count) for group, count in other.items()})
    assert one.matches(other) is match
    assert other.matches(one) is match


def test_counts_survive_json() -> None:
    counts = Counts({WORLD: Count(3, 2), EVEN: Count(7, 0)})
    assert Counts.from_json(counts.to_json()) == counts
    assert Counts.from_json(json.dumps(counts.to_json())) == counts
    assert Counts.from_json([]) == Counts()


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{",
        "null",
        "3",
        "[3]",
        "[{}]",
        '[{"process_group": [0], "collective_count_before": 0}]',
        '[{"process_group": [1, 1], "collective_count_before": 0, "num_collectives_in_graph": 1}]',
        '[{"process_group": [0], "collective_count_before": -1, "num_collectives_in_graph": 1}]',
        '[{"process_group": "01", "collective_count_before": 0, "num_collectives_in_graph": 1}]',
        '[{"process_group": [0], "collective_count_before": true, "num_collectives_in_graph": 1}]',
        '[{"process_group": [0], "collective_count_before": 0, "num_collectives_in_graph": 1},'
        ' {"process_group": [0], "collective_count_before": 1, "num_collectives_in_graph": 1}]',
    ],
)
def test_json_that_is_not_of_counts(data: str) -> None:
    with pytest.raises(_vocabulary.HandshakeProtocolError):
        Counts.from_json(data)


# ---------------------------------------------------------------------------------------------------------------
# Requests and responses
# ---------------------------------------------------------------------------------------------------------------


def test_a_request_survives_its_bytes() -> None:
    request = Request(Counts({WORLD: Count(3, 2), EVEN: Count(7, 0)}), "ä fingerprint", 2)
    arrived = Request.from_bytes(request.to_bytes())
    assert arrived == request
    assert (arrived.rank, arrived.executable_fingerprint) == (2, "ä fingerprint")
    assert arrived != Request(Counts({WORLD: Count(3, 2), EVEN: Count(7, 0)}), "ä fingerprint", 0)


def test_participating_ranks_are_those_that_the_graph_meets() -> None:
    row, column = Group([0, 1]), Group([0, 2])
    for counts, groups, ranks in [
        ({row: Count(0, 1), column: Count(0, 2)}, [row, column], [0, 1, 2]),
        ({row: Count(0, 1), column: Count(4, 0)}, [row], [0, 1]),
        ({row: Count(9, 0)}, [], []),
    ]:
        request = Request(Counts(counts), "A", 0)
        assert request.participating_groups == groups
        assert request.participating_ranks == ranks


def test_a_long_fingerprint_stands_for_itself_by_its_digest() -> None:
    """As a graph's text may be given in its fingerprint's place."""
    text = "x" * 10_000_000
    request, same, other = (Request(Counts({WORLD: Count(0, 1)}), each, 0) for each in (text, text, text + "y"))
    assert request.executable_fingerprint == same.executable_fingerprint != other.executable_fingerprint
    assert len(request.to_bytes()) < 1000
    digests = [_vocabulary.fingerprint_digest(each.executable_fingerprint) for each in (request, other)]
    assert digests[0] == _vocabulary.fingerprint_digest(text) != digests[1]


def test_a_request_takes_a_plain_mapping_of_foreign_groups() -> None:
    request = Request({ForeignGroup((0, 2)): Count(0, 1)}, "A", 2)
    assert request.pg_collective_counts == Counts({EVEN: Count(0, 1)})


@pytest.mark.parametrize(
    ("counts", "fingerprint", "rank", "said"),
    [
        ({WORLD: Count(0, 1)}, "", 0, "a string that is not empty"),
        ({WORLD: Count(0, 1)}, None, 0, "executable_fingerprint"),
        ({WORLD: Count(0, 1)}, b"A" * 10_000, 0, "executable_fingerprint"),
        ({WORLD: Count(0, 1)}, "A", -1, "rank"),
        ({WORLD: Count(0, 1)}, "A", "0", "rank"),
        ({WORLD: Count(0, 1)}, "A", 4, "not in"),
        ({}, "A", 0, "at least one process group"),
    ],
)
def test_a_request_that_is_not_valid(counts, fingerprint, rank, said: str) -> None:
    with pytest.raises(_vocabulary.HandshakeConfigError) as raised:
        Request(Counts(counts), fingerprint, rank)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_request_may_know_of_groups_of_others_that_are_idle() -> None:
    assert Request(Counts({EVEN: Count(4, 0)}), "A", 1).participating_ranks == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'{"rank": 0}',
        b'{"rank": 0, "executable_fingerprint": "", "pg_collective_counts": []}',
        b'{"rank": -1, "executable_fingerprint": "A", "pg_collective_counts": '
        b'[{"process_group": [0], "collective_count_before": 0, "num_collectives_in_graph": 1}]}',
    ],
)
def test_bytes_that_are_not_a_request(data: bytes) -> None:
    with pytest.raises(_vocabulary.HandshakeProtocolError):
        Request.from_bytes(data)


def test_a_response_survives_its_bytes() -> None:
    for success in (True, False):
        response = Response(success)
        assert Response.from_bytes(response.to_bytes()).success is success
        assert Response.from_bytes(response.to_bytes()) == response
        assert hash(Response.from_bytes(response.to_bytes())) == hash(response)
    assert Response(True) != Response(False)


@pytest.mark.parametrize("data", [b"", b"\x02", b"\x01\x01", b"true", b"x" * 10_000])
def test_bytes_that_are_not_a_response(data: bytes) -> None:
    with pytest.raises(_vocabulary.HandshakeProtocolError) as raised:
        Response.from_bytes(data)
    assert len(str(raised.value)) < 300


# ---------------------------------------------------------------------------------------------------------------
# Fingerprints on the wire
# ---------------------------------------------------------------------------------------------------------------


def test_facts_are_part_of_a_digest() -> None:
    digests = [_vocabulary.fingerprint_digest(fingerprint) for fingerprint in "ab"]
    facts = ["", "bucket 8", b"bucket 9", "\udc80", "x" * 10_000]
    found = {_vocabulary.digest_with_facts(digest, fact) for digest in digests for fact in facts}
    assert len(found | {*digests}) == 2 * len(facts) + 2
    assert {len(digest) for digest in found} == {_vocabulary.DIGEST_BYTES}
    assert _vocabulary.digest_with_facts(digests[0], "8") == _vocabulary.digest_with_facts(digests[0], b"8")
    for wrong in (8, ["8"], bytearray(b"8")):
        with pytest.raises(_vocabulary.HandshakeTypeError, match="a short text or bytes"):
            _vocabulary.digest_with_facts(digests[0], wrong)


def test_a_fingerprint_in_hex_is_its_own_digest() -> None:
    assert _vocabulary.fingerprint_digest("00ff" * 8) == bytes.fromhex("00ff" * 8)


@pytest.mark.parametrize("fingerprint", ["A", "00FF" * 8, "00ff" * 7, "zz" * 16, "ä", "\udc80", "x" * 1024])
def test_any_fingerprint_has_a_digest_of_its_own(fingerprint: str) -> None:
    digest = _vocabulary.fingerprint_digest(fingerprint)
    assert len(digest) == _vocabulary.DIGEST_BYTES
    assert digest == _vocabulary.fingerprint_digest(str(fingerprint))
    others = ["B", "00ff" * 8, "00FF" * 7 + "00FE", fingerprint + "x"]
    assert digest not in map(_vocabulary.fingerprint_digest, others)
