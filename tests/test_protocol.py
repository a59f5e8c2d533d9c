# SPDX-License-Identifier: Apache-2.0
"""The wire: every frame comes back as it was, however it is cut up; everything else raises one error, for ever."""

import contextlib
import json
import random
import struct
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layout import load

_protocol = load("_protocol")
_vocabulary = load("_vocabulary")

DIGEST = bytes(range(16))
NONCE = b"n" * _protocol.NONCE_BYTES
WORLD_SIZE = 2**20
MAX_POSITION = 2**64 - 1
KINDS = frozenset(_protocol._KINDS)
SIDES = (_protocol.FROM_STRANGER, _protocol.FROM_RANK, _protocol.FROM_COORDINATOR)

MESSAGES = {
    "greeting": _protocol.Greeting(_protocol.MAGIC, _protocol.VERSION, NONCE),
    "greeting of a later version, which says more": _protocol.Greeting(_protocol.MAGIC, 77, NONCE, b"more"),
    "hello": _protocol.Hello(NONCE, b"p" * _protocol.PROOF_BYTES, b'{"rank":3}'),
    "answer": _protocol.Answer(b"p" * _protocol.PROOF_BYTES, b'{"rank":0}'),
    "goodbye": _protocol.Goodbye("done"),
    "goodbye without a word": _protocol.Goodbye(""),
    "group": _protocol.Group(4, (0, 2, 4, 7)),
    "vote on one group": _protocol.Vote(9, 1, DIGEST, (0, 5, 1)),
    "vote on three groups": _protocol.Vote(2**32 - 1, 255, DIGEST, (0, 5, 1, 1, 0, 2, 7, MAX_POSITION - 1, 1)),
    "fat verdict": _protocol.Verdict(9, _protocol.FAT),
    "split verdict": _protocol.Verdict(2**32 - 1, _protocol.SPLIT, _protocol.PLAN),
    "detail": _protocol.Detail(9, {"reason": "lost: ü", "ranks": [[0, 3, 2]], "group": None, "span": [7, 9]}),
    "notice": _protocol.Notice("waiting for rank 1"),
    "program": _protocol.Program(DIGEST, b'{"name":"layer 3","collectives":[["all_reduce sum float32 8"]]}'),
    "wait": _protocol.Wait(0.5),
    "extra": _protocol.Extra(_protocol.PLANS, 9, 3, b"\x00\xff"),
    "extra without a payload": _protocol.Extra(_protocol.REPORTS, 9, 255, b""),
}
FRAMES = {name: _protocol.encode(message) for name, message in MESSAGES.items()}


def frame(kind, *body):
    """A frame of any content."""
    return struct.pack("!IB", len(b"".join(body)) + 1, kind) + b"".join(body)


def run(first, count, step):
    return struct.pack("!III", first, count, step)


ONE_SPAN = struct.pack("!IQI", 0, 5, 1)
VOTE_WITHOUT_SPANS = struct.pack("!IB", 1, 0) + DIGEST
GROUP_1 = struct.pack("!I", 1)

# What no decoder may take for a message.
BAD = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "unknown kind": frame(255),
    "length 0": struct.pack("!IB", 0, _protocol.VOTE),
    "longest length": struct.pack("!IB", 2**32 - 1, _protocol.VOTE),
    "greeting cut short": frame(_protocol.GREETING, b"TPU"),
    "hello without a proof": frame(_protocol.HELLO, b"{}"),
    "detail that is not json": frame(_protocol.DETAIL, bytes(4), b"{"),
    "detail that is not an object": frame(_protocol.DETAIL, bytes(4), b"[1]"),
    "detail that is not utf-8": frame(_protocol.DETAIL, bytes(4), b'{"a":"\xff\xff"}'),
    "detail nested without end": frame(_protocol.DETAIL, bytes(4), b"[" * 100_000),
    "detail with a number without end": frame(_protocol.DETAIL, bytes(4), b'{"a":' + b"9" * 5000 + b"}"),
    "detail without a reason": frame(_protocol.DETAIL, bytes(4), b'{"broken":"x"}'),
    "detail of a whole book": frame(_protocol.DETAIL, bytes(4), b'{"reason":"' + b"x" * 2**23 + b'"}'),
    "vote cut short": frame(_protocol.VOTE, bytes(5)),
    "vote without spans": frame(_protocol.VOTE, VOTE_WITHOUT_SPANS),
    "vote with half a span": frame(_protocol.VOTE, VOTE_WITHOUT_SPANS, ONE_SPAN[:8]),
    "vote with bytes left over": frame(_protocol.VOTE, VOTE_WITHOUT_SPANS, ONE_SPAN, b"\x00"),
    "vote on too many groups": frame(_protocol.VOTE, VOTE_WITHOUT_SPANS, ONE_SPAN * (_protocol.MAX_SPANS + 1)),
    "verdict cut short": frame(_protocol.VERDICT, bytes(5)),
    "verdict with bytes left over": frame(_protocol.VERDICT, bytes(7)),
    "group with half a run": frame(_protocol.GROUP, GROUP_1, run(0, 2, 1)[:8]),
    "group with an empty run": frame(_protocol.GROUP, GROUP_1, run(0, 0, 1)),
    "group with a step of 0": frame(_protocol.GROUP, GROUP_1, run(0, 2, 0)),
    "group beyond the world": frame(_protocol.GROUP, GROUP_1, run(2**32 - 1, 1, 1)),
    "group larger than the world": frame(_protocol.GROUP, GROUP_1, run(0, 2**20, 1), run(0, 1, 1)),
    "detail without a vote": frame(_protocol.DETAIL, b"{}"),
    "extra cut short": frame(_protocol.EXTRA, bytes(5)),
}


def decoder():
    return _protocol.Decoder(KINDS, WORLD_SIZE)


def feed_in_pieces(data, cuts, into=None):
    """What a decoder makes of `data` that comes in pieces."""
    reading, found = into or decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        found += reading.feed(data[start:end])
    return found


# ---------------------------------------------------------------------- frames come back as they were


@pytest.mark.parametrize("name", MESSAGES)
def test_a_frame_read_whole_byte_by_byte_and_among_others(name):
    data, message = FRAMES[name], MESSAGES[name]
    assert list(decoder().feed(data)) == [message]
    reading = decoder()
    for byte in data[:-1]:
        assert list(reading.feed(bytes([byte]))) == []
    assert list(reading.feed(data[-1:] + data + data[:-1])) == [message, message]
    assert list(reading.feed(data[-1:] + FRAMES["goodbye"])) == [message, MESSAGES["goodbye"]]
    assert type(message) is type(next(decoder().feed(data)))


def test_every_kind_is_covered_and_is_somebodys():
    assert {data[4] for data in FRAMES.values()} == KINDS
    assert frozenset().union(*SIDES) == KINDS - {_protocol.GREETING, _protocol.ANSWER}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_frames_cut_anywhere(data):
    names = data.draw(st.lists(st.sampled_from(sorted(MESSAGES)), max_size=6))
    stream = b"".join(FRAMES[name] for name in names)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    assert feed_in_pieces(stream, cuts) == [MESSAGES[name] for name in names]


spans = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, MAX_POSITION), st.integers(0, 2**32 - 1))


@given(st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(min_size=16, max_size=16), st.lists(spans, min_size=1))
@settings(max_examples=60, deadline=None)
def test_the_quick_encoders_make_the_same_frames(number, flags, digest, places):
    flat = tuple(field for place in places for field in place)
    assert _protocol.encode_vote(number, flags, digest, flat) == _protocol.encode(
        _protocol.Vote(number, flags, digest, flat)
    )
    assert _protocol.encode_verdict(number, 2, flags) == _protocol.encode(_protocol.Verdict(number, 2, flags))


def test_each_message_is_to_be_handled_before_the_next_is_decoded():
    """As a hello is, after which other kinds may come, in the same segment too."""
    reading = _protocol.Decoder(_protocol.FROM_STRANGER)
    found = []
    for message in reading.feed(FRAMES["hello"] + FRAMES["group"] + FRAMES["vote on one group"][:9]):
        found.append(message)
        reading.kinds, reading.world_size = _protocol.FROM_RANK, 8
    found += reading.feed(FRAMES["vote on one group"][9:])
    assert found == [MESSAGES[name] for name in ("hello", "group", "vote on one group")]


def test_a_proof_is_of_the_secret_over_the_very_bytes():
    of = {"secret": "secret", "session": "s", "nonces": 2 * NONCE, "side": "rank", "said": b'{"rank":3}'}
    proof = _protocol.proof(**of)
    assert proof == _protocol.proof(**of) and len(proof) == _protocol.PROOF_BYTES
    others = [("secret", "other"), ("session", "t"), ("nonces", NONCE + b"m" * len(NONCE)), ("side", "coordinator")]
    for name, value in [*others, ("said", b'{"rank":4}')]:
        assert _protocol.proof(**{**of, name: value}) != proof


# ---------------------------------------------------------------------- what is not a frame


@pytest.mark.parametrize("pieces", ["whole", "byte by byte, after a good one"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_frame_raises_and_keeps_raising(name, pieces):
    data, reading = BAD[name], decoder()
    with pytest.raises(_vocabulary.HandshakeProtocolError, match="a malformed frame of kind") as first:
        if pieces == "whole":
            list(reading.feed(data))
        else:
            assert list(reading.feed(FRAMES["notice"])) == [MESSAGES["notice"]]
            for place in range(0, len(data), max(1, len(data) // 1000)):
                assert list(reading.feed(data[place : place + max(1, len(data) // 1000)])) == []
    for more in (FRAMES["goodbye"], b""):
        with pytest.raises(_vocabulary.HandshakeProtocolError) as again:
            list(reading.feed(more))
        assert str(again.value) == str(first.value)


def test_what_comes_before_a_bad_frame_is_still_given():
    found = []
    with pytest.raises(_vocabulary.HandshakeProtocolError):
        for message in decoder().feed(FRAMES["notice"] + FRAMES["fat verdict"] + BAD["http"]):
            found.append(message)
    assert found == [MESSAGES["notice"], MESSAGES["fat verdict"]]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=3))
@example(struct.pack("!IB", 1, _protocol.VOTE), [])
@settings(max_examples=250, deadline=None)
def test_random_bytes_raise_nothing_else(data, cuts):
    with contextlib.suppress(_vocabulary.HandshakeProtocolError):
        feed_in_pieces(data, sorted(cuts))


@given(kind=st.sampled_from(sorted(KINDS)), body=st.binary(max_size=80))
@settings(max_examples=400, deadline=None)
def test_a_random_body_of_any_kind_is_a_message_or_raises_the_one_error(kind, body):
    with contextlib.suppress(_vocabulary.HandshakeProtocolError):
        assert len(list(decoder().feed(frame(kind, body)))) == 1


@given(st.sampled_from(sorted(FRAMES)), st.integers(0), st.integers(0, 255))
@settings(max_examples=400, deadline=None)
def test_one_byte_changed_raises_nothing_else(name, place, byte):
    changed = bytearray(FRAMES[name])
    changed[place % len(changed)] = byte
    with contextlib.suppress(_vocabulary.HandshakeProtocolError):
        list(decoder().feed(bytes(changed)))


# ---------------------------------------------------------------------- who may send what


@pytest.mark.parametrize("kinds", SIDES)
@pytest.mark.parametrize("name", MESSAGES)
def test_what_may_not_come_now_is_refused_at_its_fifth_byte(name, kinds):
    data = FRAMES[name]
    reading = _protocol.Decoder(kinds, WORLD_SIZE)
    if data[4] in kinds:
        assert list(reading.feed(data)) == [MESSAGES[name]]
    else:
        assert list(reading.feed(data[:4])) == []
        with pytest.raises(_vocabulary.HandshakeProtocolError, match="can't come here"):
            list(reading.feed(data[4:5]))


@contextlib.contextmanager
def allocates_less_than(number_of_bytes):
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before < number_of_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kinds", "data"),
    [
        (_protocol.FROM_STRANGER, frame(_protocol.GROUP, GROUP_1, run(0, 2**20, 1))),
        (_protocol.FROM_STRANGER, frame(_protocol.DETAIL, bytes(4), b"[" * 100_000)),
        (KINDS, struct.pack("!IB", 2**31, _protocol.EXTRA)),
        (KINDS, struct.pack("!IB", _protocol.MAX_HELLO_BYTES * 2, _protocol.HELLO)),
        (KINDS, frame(_protocol.GROUP, GROUP_1, run(0, 2**32 - 1, 1))),
        (KINDS, frame(_protocol.GROUP, GROUP_1, *[run(0, 2**32 - 1, 1)] * 300)),
        (KINDS, frame(_protocol.GROUP, GROUP_1, run(0, 9, 1))),  # in a world of 8
    ],
)
def test_what_is_refused_costs_nothing(kinds, data):
    reading = _protocol.Decoder(kinds, 8)
    with allocates_less_than(200_000), pytest.raises(_vocabulary.HandshakeProtocolError):
        list(reading.feed(data))


# ---------------------------------------------------------------------- groups


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60, unique=True))
@settings(max_examples=150, deadline=None)
def test_ranks_survive_their_runs(ranks):
    ranks = tuple(sorted(ranks))
    runs = _protocol.runs(ranks)
    assert len(runs) <= len(ranks)
    assert _protocol.ranks_of(runs) == ranks
    assert _protocol.ranks_of(json.loads(json.dumps(runs))) == ranks  # as a detail carries them


@pytest.mark.parametrize("world_size", [2, 8, 4096, _protocol.MAX_WORLD_SIZE])
def test_a_group_in_equal_steps_takes_one_run_at_any_size(world_size):
    for ranks in (range(world_size), range(1, world_size, 2)):
        data = _protocol.encode(_protocol.Group(0, tuple(ranks)))
        assert len(data) == len(_protocol.encode(_protocol.Group(0, (0, 1))))
        assert list(_protocol.Decoder(KINDS, world_size).feed(data)) == [_protocol.Group(0, tuple(ranks))]


@pytest.mark.parametrize("ranks", [(7,), (0, 8), (6, 7, 8), (0, 3, 9)])
def test_a_group_outside_its_world_is_refused_and_no_other(ranks):
    """Also where the same bytes are a group of a larger world's."""
    data = _protocol.encode(_protocol.Group(0, ranks))
    assert list(_protocol.Decoder(KINDS, ranks[-1] + 1).feed(data)) == [_protocol.Group(0, ranks)]
    with pytest.raises(_vocabulary.HandshakeProtocolError):
        list(_protocol.Decoder(KINDS, ranks[-1]).feed(data))


def test_a_group_may_be_as_irregular_as_it_likes():
    """Two ranks a run at least: a group of any order fits into a frame."""
    ranks = tuple(sorted(random.Random(5).sample(range(6000), 3000)))
    assert len(_protocol.runs(ranks)) <= len(ranks) // 2
    data = _protocol.encode(_protocol.Group(0, ranks))
    assert list(_protocol.Decoder(KINDS, 6000).feed(data)) == [_protocol.Group(0, ranks)]


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize("groups", [1, 2, 3, 64, _protocol.MAX_SPANS])
def test_a_vote_is_at_most_32_bytes_and_16_a_group(groups):
    flat = [field for number in range(groups) for field in (number, 2**63, 2**32 - 1)]
    data = _protocol.encode_vote(2**32 - 1, 255, DIGEST, flat)
    assert len(data) <= 32 + 16 * groups
    assert list(decoder().feed(data)) == [_protocol.Vote(2**32 - 1, 255, DIGEST, tuple(flat))]


def test_a_verdict_is_at_most_24_bytes():
    assert len(_protocol.encode_verdict(2**32 - 1, _protocol.SPLIT, 255)) <= 24


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda tail: _protocol.Hello(NONCE, bytes(_protocol.PROOF_BYTES), tail), _protocol.MAX_HELLO_BYTES),
        (lambda tail: _protocol.Answer(bytes(_protocol.PROOF_BYTES), tail), _protocol.MAX_ANSWER_BYTES),
        (lambda tail: _protocol.Extra(_protocol.PLANS, 1, 1, tail), _protocol.MAX_PAYLOAD_BYTES),
    ],
)
def test_the_longest_tail_is_taken_and_a_longer_one_is_not(make, limit):
    message = make(bytes(limit))
    assert list(decoder().feed(_protocol.encode(message))) == [message]
    with pytest.raises(_vocabulary.HandshakeProtocolError, match=r"it has \d+ bytes"):
        list(decoder().feed(_protocol.encode(make(bytes(limit + 1)))))


@pytest.mark.parametrize("text", ["x" * 300_000, "ü" * 300_000, "\udcff half a character"])
def test_long_and_odd_texts_are_cut_and_still_read(text):
    bounds = {_protocol.Goodbye: _protocol.MAX_REASON_BYTES, _protocol.Notice: _protocol.MAX_TEXT_BYTES}
    for of_class, most in bounds.items():
        data = _protocol.encode(of_class(text))
        assert len(data) <= most + 16
        [message] = decoder().feed(data)
        assert type(message) is of_class and message[0][:5] in (text[:5], "? hal")
    facts = _protocol.detail_facts(text, (0, 2, 4), (0, 1, 2, 3, 4), (7, MAX_POSITION + 2**32))
    [detail] = decoder().feed(_protocol.encode(_protocol.Detail(9, facts)))
    assert detail.facts["reason"][:5] == text[:5] and len(detail.facts["reason"]) <= _protocol.MAX_REASON_BYTES
    assert _protocol.ranks_of(detail.facts["ranks"]) == (0, 2, 4)
    assert _protocol.ranks_of(detail.facts["group"]) == (0, 1, 2, 3, 4)
    assert detail.facts["span"] == [7, MAX_POSITION + 2**32]
    assert detail.facts["broken"] is None
