# SPDX-License-Identifier: Apache-2.0
"""Aligns two sequences: which item of one is which item of the other.

Two items can be matched when their keys are equal; matched pairs never cross. For sequences that differ little the
result is a longest common subsequence; for others it is a common subsequence that is found in bounded time.

The steps, each of which leaves less for the next:

1. The common prefix and suffix match.
2. Items whose key the other side doesn't have can match nothing: they are left out. (Nothing is lost by this, and two
   sequences that have nothing in common end here.)
3. Myers' greedy algorithm [1] looks for the shortest edit script of up to `max_edits` edits: time and memory grow with
   edits², not with the product of the lengths.
4. Past that, the keys that occur once on both sides are matched as in patience diff (longest increasing
   subsequence), and Myers' algorithm works on the gaps between them.
5. In a gap that still needs more edits, it is run `_WINDOW_EDITS` edits at a time: the furthest path so far is taken
   as it is, and the search starts again at its end. That is no longer the longest, but it finds its way back after
   each change, and costs time linear in the length.

[1] E. W. Myers, "An O(ND) difference algorithm and its variations", Algorithmica 1, 1986.
"""

import bisect
from collections.abc import Hashable, Sequence

# Myers' algorithm keeps a list of 2 · edits numbers per edit: 130,000 numbers for 256 edits, which took 20 ms.
DEFAULT_MAX_EDITS = 256

# Edits that one window of step 5 looks ahead: a run of added items longer than this may be aligned badly there.
_WINDOW_EDITS = 64

_Pairs = list[tuple[int, int]]


def align(a_keys: Sequence[Hashable], b_keys: Sequence[Hashable], max_edits: int = DEFAULT_MAX_EDITS) -> _Pairs:
    """The pairs `(i, j)` of positions that match, strictly ascending in both, with `a_keys[i] == b_keys[j]`.

    Args:
        a_keys: one side's keys.
        b_keys: the other side's keys.
        max_edits: as long as the sides are at most this many edits apart (items to leave out on either side, those
            of step 2 not counted), as many pairs as possible are found.
    """
    a = list(a_keys)
    b = list(b_keys)
    start = _common_prefix(a, b)
    a_end, b_end = len(a), len(b)
    suffix = _common_prefix(a[start:][::-1], b[start:][::-1])
    a_end -= suffix
    b_end -= suffix
    pairs = [(i, i) for i in range(start)]
    if start < a_end and start < b_end:
        in_a = set(a[start:a_end])
        in_b = set(b[start:b_end])
        a_left = [i for i in range(start, a_end) if a[i] in in_b]
        b_left = [j for j in range(start, b_end) if b[j] in in_a]
        middle = _align_middle([a[i] for i in a_left], [b[j] for j in b_left], max_edits)
        pairs.extend((a_left[i], b_left[j]) for i, j in middle)
    pairs.extend((a_end + k, b_end + k) for k in range(suffix))
    return pairs


def _common_prefix(a: list[Hashable], b: list[Hashable]) -> int:
    """The length of the common prefix. Slices are compared, in doubling steps, which is 10 times as fast as items."""
    most = min(len(a), len(b))
    low, step = 0, 64
    while low < most:
        high = min(low + step, most)
        if a[low:high] == b[low:high]:
            low, step = high, step * 2
        elif high - low <= 16:
            while low < high and a[low] == b[low]:
                low += 1
            return low
        else:
            step = (high - low) // 2
            most = high
    return low


def _align_middle(a: list[Hashable], b: list[Hashable], max_edits: int) -> _Pairs:
    pairs: _Pairs = []
    if _myers(a, 0, len(a), b, 0, len(b), max_edits, pairs) == (len(a), len(b)):
        return pairs
    pairs.clear()
    i = j = 0
    for next_i, next_j in [*_unique_anchors(a, b), (len(a), len(b))]:
        while i < next_i and j < next_j:
            i, j = _myers(a, i, next_i, b, j, next_j, _WINDOW_EDITS, pairs)
        if next_i < len(a):
            pairs.append((next_i, next_j))
        i, j = next_i + 1, next_j + 1
    return pairs


def _myers(
    a: list[Hashable], i: int, a_end: int, b: list[Hashable], j: int, b_end: int, max_edits: int, pairs: _Pairs
) -> tuple[int, int]:
    """Follows the furthest path from (i, j) with at most `max_edits` edits and appends its matches to `pairs`.

    Returns:
        Where it ends: `(a_end, b_end)` if these edits are enough, else a place further on than (i, j).
    """
    # `reached[k]` is the furthest x that a path reaches on diagonal k = x - y; negative k count from the list's end.
    # A path may leave the rectangle by one step (x = n + 1 or y = m + 1); nothing is gained there, it needs no check.
    n, m = a_end - i, b_end - j
    max_edits = max(1, min(max_edits, n + m))
    reached = [0] * (2 * max_edits + 3)
    rows: list[list[int]] = []
    for edits in range(max_edits + 1):
        for k in range(-edits, edits + 1, 2):
            x = _step(reached, k, edits)
            y = x - k
            while x < n and y < m and a[i + x] == b[j + y]:
                x += 1
                y += 1
            reached[k] = x
            if x >= n and y >= m:
                _trace(rows, x, y, i, j, pairs)
                return a_end, b_end
        rows.append(reached.copy())
    inside = [(2 * reached[k] - k, k) for k in range(-max_edits, max_edits + 1, 2) if 0 <= reached[k] <= n]
    inside = [(furthest, k) for furthest, k in inside if reached[k] - k <= m]
    k = max(inside)[1]
    x = reached[k]
    rows.pop()
    _trace(rows, x, x - k, i, j, pairs)
    return i + x, j + x - k


def _step(reached: list[int], k: int, edits: int) -> int:
    """Where a path enters diagonal k with its last edit: from k - 1 (leaves out an item of a) or k + 1 (one of b)."""
    if edits == 0:
        return 0
    if k == -edits or (k != edits and reached[k - 1] < reached[k + 1]):
        return reached[k + 1]
    return reached[k - 1] + 1


def _trace(rows: list[list[int]], x: int, y: int, i: int, j: int, pairs: _Pairs) -> None:
    """Appends the matches on the path that ends at (x, y) after `len(rows)` edits."""
    matches: _Pairs = []
    for edits in range(len(rows), -1, -1):
        k = x - y
        entered = _step(rows[edits - 1], k, edits) if edits else 0
        while x > entered:
            x -= 1
            y -= 1
            matches.append((i + x, j + y))
        if edits:
            # Undo the edit itself: back to the diagonal that the path came from.
            if k == -edits or (k != edits and rows[edits - 1][k - 1] < rows[edits - 1][k + 1]):
                y -= 1
            else:
                x -= 1
    pairs.extend(reversed(matches))


def _unique_anchors(a: list[Hashable], b: list[Hashable]) -> _Pairs:
    """Pairs of keys that occur once on both sides, a longest chain of them that doesn't cross."""
    once_in_b: dict[Hashable, int] = {}
    for j, key in enumerate(b):
        once_in_b[key] = -1 if key in once_in_b else j
    once_in_a: dict[Hashable, int] = {}
    for i, key in enumerate(a):
        once_in_a[key] = -1 if key in once_in_a else i
    candidates = [(i, once_in_b[key]) for key, i in once_in_a.items() if i >= 0 and once_in_b.get(key, -1) >= 0]
    # Longest increasing subsequence by patience: `tails[k]` is the least end of a chain of k + 1 candidates.
    tails: list[int] = []
    tail_index: list[int] = []
    previous: list[int] = []
    for index, (_, j) in enumerate(candidates):
        k = bisect.bisect_left(tails, j)
        previous.append(tail_index[k - 1] if k else -1)
        if k == len(tails):
            tails.append(j)
            tail_index.append(index)
        else:
            tails[k] = j
            tail_index[k] = index
    chain: _Pairs = []
    index = tail_index[-1] if tail_index else -1
    while index >= 0:
        chain.append(candidates[index])
        index = previous[index]
    return chain[::-1]
