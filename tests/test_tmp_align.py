# SPDX-License-Identifier: Apache-2.0
"""Alignment of sequences, against a longest common subsequence computed the slow way."""

import itertools
import random

import pytest
from layout import load

_align = load("_graph_plan")


def slow_lcs_length(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        above = row[:]
        for j, y in enumerate(b, 1):
            row[j] = above[j - 1] + 1 if x == y else max(row[j - 1], above[j])
    return row[-1]


def check(a, b, pairs):
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))


@pytest.mark.parametrize("seed", range(60))
def test_finds_a_longest_common_subsequence_when_the_edits_suffice(seed):
    random_ = random.Random(seed)
    for _ in range(25):
        letters = random_.choice(["ab", "abcde", "abcdefghijklmnop"])
        a = random_.choices(letters, k=random_.randint(0, 14))
        b = random_.choices(letters, k=random_.randint(0, 14))
        pairs = _align.align(a, b, 40)
        check(a, b, pairs)
        assert len(pairs) == slow_lcs_length(a, b), (a, b)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("max_edits", [0, 1, 3])
def test_stays_valid_when_the_edits_do_not_suffice(seed, max_edits):
    random_ = random.Random(seed)
    for _ in range(10):
        letters = random_.choice(["ab", "abcdefgh", "abcdefghijklmnopqrstuvwxyz"])
        a = random_.choices(letters, k=random_.randint(0, 300))
        b = random_.choices(letters, k=random_.randint(0, 300))
        check(a, b, _align.align(a, b, max_edits))


def test_equal_sequences_match_throughout():
    assert _align.align("abc", "abc") == [(0, 0), (1, 1), (2, 2)]
    assert _align.align([], []) == []
    assert _align.align("abc", "") == []


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.99])
def test_an_inserted_item_costs_no_other_match(length, place):
    a = list(range(length))
    at = int(place * length)
    pairs = _align.align(a, [*a[:at], "new", *a[at:]])
    assert pairs == [(i, i + (i >= at)) for i in range(length)]


def test_many_changes_in_repeated_layers_are_followed():
    """More edits than are looked for, and no key is unique: each layer has the same items and a change of its own."""
    layer = [f"op{k}" for k in range(30)]
    a = layer * 200
    b = []
    for number in range(200):
        at = number % 25
        b += [*layer[:at], *(layer[k] for k in (3, 1, 4)), *layer[at + 1 :]]
    pairs = _align.align(a, b, 100)
    check(a, b, pairs)
    assert len(pairs) > 0.9 * len(a)


def test_sides_of_any_difference_are_aligned_without_quadratic_work():
    """Quadratic work would be 2,500,000,000 steps for each pair: far beyond the time that a test is given."""
    size = 50_000
    random_ = random.Random(3)
    keys = [random_.getrandbits(64) for _ in range(size)]
    edited = [*keys[:3000], 1, *keys[3000:7000], *keys[7001:]]
    few = random_.choices(range(40), k=size)
    for a, b in (
        (keys, edited),
        (keys, [-key for key in keys]),
        (keys, random_.sample(keys, size)),
        (few, random_.choices(range(40), k=size)),
    ):
        check(a, b, _align.align(a, b))
    assert len(_align.align(keys, edited)) == size - 1
