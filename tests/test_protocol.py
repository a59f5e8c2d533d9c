# SPDX-License-Identifier: Apache-2.0
"""The wire: every frame comes back as it was, however it is cut up; everything else raises one error, for ever."""

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
FACTS = {"rank": 3, "world_size": 8, "host": "höst", "nothing": None}

# One frame of each kind as a sender makes it, and the message that a receiver must get.
FRAMES = {
    "greeting": (_protocol.greeting(NONCE), _protocol.Greeting(_protocol.VERSION, NONCE)),
    "greeting of another version": (_protocol.greeting(NONCE, 77), _protocol.Greeting(77, NONCE)),
    "welcome": (_protocol.welcome(FACTS), _protocol.Welcome(FACTS)),
    "refused": (_protocol.refused("rank 3 is unknown: ü"), _protocol.Refused("rank 3 is unknown: ü")),
    "goodbye": (_protocol.goodbye("done"), _protocol.Goodbye("done")),
    "goodbye without a word": (_protocol.goodbye(""), _protocol.Goodbye("")),
    "group": (_protocol.group(4, (0, 2, 4, 7)), _protocol.GroupDeclared(4, (0, 2, 4, 7))),
    "vote on one group": (_protocol.vote(9, 1, DIGEST, [(0, 5, 6)]), _protocol.Vote(9, 1, DIGEST, [(0, 5, 6)])),
    "vote on three groups": (
        _protocol.vote(10, 6, DIGEST, [(0, 5, 6), (1, 0, 2), (7, 2**64 - 2, 2**64 - 1)]),
        _protocol.Vote(10, 6, DIGEST, [(0, 5, 6), (1, 0, 2), (7, 2**64 - 2, 2**64 - 1)]),
    ),
    "fat verdict": (_protocol.verdict(9, _protocol.FAT), _protocol.Verdict(9, _protocol.FAT, 0, 0)),
    "split verdict": (
        _protocol.verdict(9, _protocol.SPLIT, _protocol.SEND_GRAPH, 2**40),
        _protocol.Verdict(9, _protocol.SPLIT, _protocol.SEND_GRAPH, 2**40),
    ),
    "detail": (
        _protocol.detail(9, _protocol.reason_facts("lost: ü", (0, 2, 4), (0, 1, 2, 3, 4), (7, 9))),
        _protocol.Detail(
            9, {"reason": "lost: ü", "ranks": [[0, 3, 2]], "group": [[0, 5, 1]], "span": [7, 9]}
        ),
    ),
    "notice": (_protocol.notice(9, "waiting for rank 1"), _protocol.Notice(9, "waiting for rank 1")),
    "graph": (_protocol.graph(9, b"\x00\xff"), _protocol.Graph(9, b"\x00\xff")),
    "no graph": (_protocol.graph(9, b""), _protocol.Graph(9, b"")),
    "report": (_protocol.report({"text": "differs"}), _protocol.Report({"text": "differs"})),
    "exchange": (
        _protocol.exchange(2**40, _protocol.SHARE, b"keys"),
        _protocol.Exchange(2**40, _protocol.SHARE, b"keys"),
    ),
    "result": (
        _protocol.result(2**40, _protocol.AGREE, True, b"\x01"),
        _protocol.Result(2**40, _protocol.AGREE, 1, b"\x01"),
    ),
}
# What no decoder may take for a message: (its bytes, a part of what the error must say).
BAD = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "not a frame of this protocol"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "not a frame of this protocol"),
    "unknown kind": (struct.pack("!IB", 1, 255), "not a frame of this protocol"),
    "length 0": (struct.pack("!IB", 0, _protocol.VOTE), "a frame of 0 bytes"),
    "longest length": (struct.pack("!IB", 2**32 - 1, _protocol.VOTE), "a frame of 4294967295 bytes"),
    "other magic": (_protocol.frame(_protocol.GREETING, b"TPU-XX\r\n", bytes(18)), "not a greeting"),
    "short greeting": (_protocol.frame(_protocol.GREETING, b"TPU"), "malformed"),
    "hello that is no json": (_protocol.frame(_protocol.HELLO, bytes(16), b"{"), "malformed"),
    "hello that is no object": (_protocol.frame(_protocol.HELLO, bytes(16), b"[1]"), "no JSON object"),
    "hello without a proof": (_protocol.frame(_protocol.HELLO, b"{}"), "malformed"),
    "hello nested without end": (_protocol.frame(_protocol.HELLO, bytes(16), b"[" * 4000), "malformed"),
    "hello with a number without end": (
        _protocol.frame(_protocol.HELLO, bytes(16), b'{"a":' + b"9" * 4100 + b"9" * 900 + b"}"),
        "malformed",
    ),
    "vote cut short": (_protocol.frame(_protocol.VOTE, b"\x00" * 5), "malformed"),
    "vote without spans": (_protocol.frame(_protocol.VOTE, bytes(23)), "a vote of 0 spans"),
    "vote that promises more spans": (
        _protocol.frame(_protocol.VOTE, struct.pack("!IB16sH", 1, 0, DIGEST, 3), bytes(12)),
        "a vote of 3 spans",
    ),
    "vote with bytes left over": (
        _protocol.frame(_protocol.VOTE, struct.pack("!IB16sH", 1, 0, DIGEST, 1), bytes(13)),
        "a vote of 1 spans",
    ),
    "verdict cut short": (_protocol.frame(_protocol.VERDICT, bytes(13)), "malformed"),
    "verdict with bytes left over": (_protocol.frame(_protocol.VERDICT, bytes(15)), "malformed"),
    "group that promises more runs": (_protocol.frame(_protocol.GROUP, struct.pack("!II", 1, 2**32 - 1)), "runs"),
    "group with an empty run": (_protocol.frame(_protocol.GROUP, struct.pack("!IIIII", 1, 1, 0, 0, 1)), "none"),
    "group with a step of 0": (_protocol.frame(_protocol.GROUP, struct.pack("!IIIII", 1, 1, 0, 2, 0)), "none"),
    "group beyond any world": (
        _protocol.frame(_protocol.GROUP, struct.pack("!IIIII", 1, 1, 2**32 - 1, 1, 1)),
        "ranks that are none",
    ),
    "detail without a number": (_protocol.frame(_protocol.DETAIL, b"{}"), "malformed"),
    "notice without a number": (_protocol.frame(_protocol.NOTICE), "malformed"),
    "graph without a number": (_protocol.frame(_protocol.GRAPH, b"1"), "malformed"),
    "exchange cut short": (_protocol.frame(_protocol.EXCHANGE, bytes(8)), "malformed"),
    "result cut short": (_protocol.frame(_protocol.RESULT, bytes(9)), "malformed"),
}


def _decoder():
    return _protocol.Decoder(_protocol.MAX_FRAME_BYTES)


def _messages(decoder):
    found = []
    while (message := decoder.next_message()) is not None:
        found.append(message)
    return found


# ---------------------------------------------------------------------- frames come back as they were


@pytest.mark.parametrize("name", FRAMES)
def test_frame_read_whole(name):
    data, message = FRAMES[name]
    decoder = _decoder()
    decoder.feed(data)
    assert decoder.next_message() == message
    assert decoder.next_message() is None
    assert not decoder.is_within_frame


@pytest.mark.parametrize("name", FRAMES)
def test_frame_read_byte_by_byte(name):
    data, message = FRAMES[name]
    decoder = _decoder()
    for place in range(len(data) - 1):
        decoder.feed(data[place : place + 1])
        assert decoder.next_message() is None
        assert decoder.is_within_frame
    decoder.feed(data[-1:])
    assert decoder.next_message() == message


@pytest.mark.parametrize("name", FRAMES)
def test_frame_read_with_trailing_data(name):
    data, message = FRAMES[name]
    decoder = _decoder()
    decoder.feed(data + data[:-1])
    assert _messages(decoder) == [message]
    assert decoder.is_within_frame
    decoder.feed(data[-1:] + FRAMES["goodbye"][0])
    assert _messages(decoder) == [message, FRAMES["goodbye"][1]]


def test_every_kind_that_is_decoded_is_covered():
    kinds = {data[4] for data, _ in FRAMES.values()} | {_protocol.HELLO}
    assert kinds == set(_protocol._DECODERS)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_frames_cut_anywhere(data):
    names = data.draw(st.lists(st.sampled_from(sorted(FRAMES)), max_size=6))
    stream = b"".join(FRAMES[name][0] for name in names)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, found = _decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        found += _messages(decoder)
    assert found == [FRAMES[name][1] for name in names]


def test_hello_proves_the_secret_over_the_very_bytes():
    decoder = _decoder()
    decoder.feed(_protocol.hello(FACTS, b"secret", NONCE))
    hello = decoder.next_message()
    assert hello.facts == FACTS
    assert json.loads(hello.signed) == FACTS
    assert hello.proof == _protocol.proof(b"secret", NONCE, hello.signed)
    assert hello.proof != _protocol.proof(b"other", NONCE, hello.signed)
    assert hello.proof != _protocol.proof(b"secret", b"m" * len(NONCE), hello.signed)
    assert hello.proof != _protocol.proof(b"secret", NONCE, hello.signed.replace(b"3", b"4"))


# ---------------------------------------------------------------------- what is no frame


@pytest.mark.parametrize("name", BAD)
def test_bad_frame_raises_and_keeps_raising(name):
    data, words = BAD[name]
    decoder = _decoder()
    decoder.feed(data)
    with pytest.raises(_vocabulary.HandshakeProtocolError, match=words) as first:
        decoder.next_message()
    decoder.feed(FRAMES["goodbye"][0])
    for _ in range(2):
        with pytest.raises(_vocabulary.HandshakeProtocolError) as again:
            decoder.next_message()
        assert str(again.value) == str(first.value)
    assert decoder.is_within_frame


@pytest.mark.parametrize("name", BAD)
def test_bad_frame_byte_by_byte_and_after_good_ones(name):
    data, words = BAD[name]
    decoder = _decoder()
    decoder.feed(FRAMES["notice"][0])
    assert decoder.next_message() == FRAMES["notice"][1]
    with pytest.raises(_vocabulary.HandshakeProtocolError, match=words):
        for place in range(len(data)):
            decoder.feed(data[place : place + 1])
            assert decoder.next_message() is None


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=3))
@example(b"\x00\x00\x00\x01" + bytes([_protocol.VOTE]), [])
@settings(max_examples=250, deadline=None)
def test_random_bytes_raise_nothing_else(data, cuts):
    decoder = _protocol.Decoder()
    try:
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
            decoder.feed(data[start:end])
            _messages(decoder)
    except _vocabulary.HandshakeProtocolError:
        with pytest.raises(_vocabulary.HandshakeProtocolError):
            decoder.next_message()


@given(kind=st.sampled_from(sorted(_protocol._DECODERS)), body=st.binary(max_size=80))
@settings(max_examples=400, deadline=None)
def test_random_body_of_every_kind_raises_nothing_else(kind, body):
    decoder = _decoder()
    decoder.feed(_protocol.frame(kind, body))
    try:
        message = decoder.next_message()
    except _vocabulary.HandshakeProtocolError:
        return
    assert message is not None


def test_one_byte_changed_raises_nothing_else():
    seed = 20260
    rng = random.Random(seed)
    for data, _ in FRAMES.values():
        for _ in range(60):
            changed = bytearray(data)
            changed[rng.randrange(len(changed))] = rng.randrange(256)
            decoder = _decoder()
            decoder.feed(bytes(changed))
            try:
                _messages(decoder)
            except _vocabulary.HandshakeProtocolError:
                pass


# ---------------------------------------------------------------------- sizes and bounds


@pytest.mark.parametrize("groups", [1, 2, 3, 64, _protocol.MAX_SPANS])
def test_a_vote_is_at_most_32_bytes_and_16_a_group(groups):
    spans = [(number, 2**63, 2**63 + 2**32 - 1) for number in range(groups)]
    assert len(_protocol.vote(2**32 - 1, 7, DIGEST, spans)) <= 32 + 16 * groups


def test_a_verdict_is_at_most_24_bytes():
    assert len(_protocol.verdict(2**32 - 1, _protocol.SPLIT, 255, 2**64 - 1)) <= 24


@pytest.mark.parametrize("world_size", [2, 8, 4096, _protocol.MAX_WORLD_SIZE])
def test_a_group_in_equal_steps_takes_one_run_at_any_size(world_size):
    ranks = range(world_size)
    assert len(_protocol.group(0, ranks)) == len(_protocol.group(0, (0, 1)))
    assert _protocol.ranks_of(_protocol.runs(ranks)) == tuple(ranks)
    column = range(1, world_size, 2)
    assert len(_protocol.group(0, column)) == len(_protocol.group(0, (0, 1)))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60, unique=True))
@settings(max_examples=150, deadline=None)
def test_ranks_survive_their_runs(ranks):
    ranks = tuple(sorted(ranks))
    runs = _protocol.runs(ranks)
    assert len(runs) <= len(ranks)
    assert _protocol.ranks_of(runs) == ranks
    assert _protocol.ranks_of(json.loads(json.dumps(runs))) == ranks  # as a detail carries them


@pytest.mark.parametrize(
    "runs", [[(0, 2**20 + 1, 1)], [(0, 2**19 + 1, 1), (2**19, 2**19, 1)], [(5, 1, 2**20), (2**20 - 5, 6, 1)]]
)
def test_ranks_beyond_the_largest_world_are_refused(runs):
    with pytest.raises(_vocabulary.HandshakeProtocolError):
        _protocol.ranks_of(runs)


def test_lengths_are_checked_before_anything_is_allocated():
    many_ranks = struct.pack("!II", 1, 300) + b"".join(struct.pack("!III", 0, 2**32 - 1, 1) for _ in range(300))
    attacks = [
        struct.pack("!IB", 2**31, _protocol.GRAPH),
        _protocol.frame(_protocol.GROUP, struct.pack("!IIIII", 1, 1, 0, 2**32 - 1, 1)),
        _protocol.frame(_protocol.GROUP, many_ranks),
        _protocol.frame(_protocol.VOTE, struct.pack("!IB16sH", 1, 0, DIGEST, 65535)),
    ]
    tracemalloc.start()
    try:
        for data in attacks:
            decoder = _decoder()
            decoder.feed(data)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with pytest.raises(_vocabulary.HandshakeProtocolError):
                decoder.next_message()
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 200_000
    finally:
        tracemalloc.stop()


def test_a_stranger_may_send_a_small_first_frame_only():
    decoder = _protocol.Decoder()
    decoder.feed(struct.pack("!IB", _protocol.MAX_FRAME_BYTES_AT_FIRST + 1, _protocol.HELLO))
    with pytest.raises(_vocabulary.HandshakeProtocolError, match=f"at most {_protocol.MAX_FRAME_BYTES_AT_FIRST}"):
        decoder.next_message()

    decoder = _protocol.Decoder()
    signed = json.dumps({"x": "y" * (_protocol.MAX_FRAME_BYTES_AT_FIRST - 1 - 16 - len('{"x": ""}'))}).encode()
    largest = _protocol.frame(_protocol.HELLO, bytes(16), signed)
    assert len(largest) == 4 + _protocol.MAX_FRAME_BYTES_AT_FIRST
    decoder.feed(largest)
    assert isinstance(decoder.next_message(), _protocol.Hello)


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda size: _protocol.graph(1, bytes(size)), _protocol.MAX_GRAPH_BYTES),
        (lambda size: _protocol.exchange(1, _protocol.SHARE, bytes(size)), _protocol.MAX_PAYLOAD_BYTES),
    ],
)
def test_graph_and_payload_have_limits_of_their_own(make, limit):
    decoder = _decoder()
    decoder.feed(make(limit))
    assert decoder.next_message() is not None
    decoder.feed(make(limit + 1))
    with pytest.raises(_vocabulary.HandshakeProtocolError, match=f"at most {limit}"):
        decoder.next_message()


def test_too_many_spans_are_refused():
    decoder = _decoder()
    decoder.feed(_protocol.vote(1, 0, DIGEST, [(n, 0, 1) for n in range(_protocol.MAX_SPANS + 1)]))
    with pytest.raises(_vocabulary.HandshakeProtocolError, match=f"{_protocol.MAX_SPANS + 1} spans"):
        decoder.next_message()


@pytest.mark.parametrize("text", ["x" * 100_000, "ü" * 100_000, "\udcff half a character"])
def test_long_and_odd_texts_are_cut_and_still_read(text):
    for make in (_protocol.refused, _protocol.goodbye, lambda text: _protocol.notice(1, text)):
        data = make(text)
        assert len(data) <= _protocol.MAX_TEXT_BYTES + 16
        decoder = _decoder()
        decoder.feed(data)
        message = decoder.next_message()
        assert (message.text if hasattr(message, "text") else message.reason)[:5] in (text[:5], "? hal")


# ---------------------------------------------------------------------- the shortcut


@pytest.mark.parametrize("name", FRAMES)
def test_shortcut_takes_its_own_frame_alone_and_nothing_else(name):
    data, message = FRAMES[name]
    vote = _protocol.vote_of_one(data)
    if name == "vote on one group":
        *_, number, start, num = vote
        assert vote[2:5] == message[:3] and [(number, start, start + num)] == message.spans
    else:
        assert vote is None
    for longer in (data + b"\x00", data + data, data[:-1]):
        assert _protocol.vote_of_one(longer) is None


@given(st.binary(min_size=44, max_size=44))
@settings(max_examples=200, deadline=None)
def test_shortcut_says_what_the_decoder_says(vote_bytes):
    vote_bytes = _protocol.vote(1, 0, DIGEST, [(0, 0, 1)])[:5] + vote_bytes[5:]
    fields = _protocol.vote_of_one(vote_bytes)
    if fields is not None:
        decoder = _decoder()
        decoder.feed(vote_bytes)
        *_, number, start, num = fields
        assert decoder.next_message() == _protocol.Vote(*fields[2:5], [(number, start, start + num)])
