# SPDX-License-Identifier: Apache-2.0
"""bench.py, with few ranks and votes: its tables are whole, and what they hold was measured."""

import re
import subprocess
import sys

import pytest
from layout import PROJECT, child_environment

pytestmark = pytest.mark.flat_only

PATIENCE_S = 100.0


def bench(*arguments, files=None):
    """What it prints; with a limit on its open files, if one is given."""
    limited = ["sh", "-c", f'ulimit -n {files} && exec "$0" "$@"'] if files else []
    finished = subprocess.run(
        [*limited, sys.executable, str(PROJECT / "bench.py"), *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def printed():
    return bench("--ranks", "4", "--simulated", "16", "--rounds", "1", "--votes", "40")


def rows(text, title):
    """The cells of each row of the table of that title, but for its head."""
    table = text.split(title, 1)[1].split("\n\n")[1]
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()][1:]


def test_what_a_dispatch_calls_comes_first(printed):
    table = rows(printed, "What a dispatch pays")
    assert [row[0] for row in table[:4]] == [
        "DispatchGate.vote(), one group",
        "DispatchGate.vote(), two groups",
        "Handshake.submit(), one group",
        "DispatchGate.vote(), one group, observing",
    ]
    for _, ranks, handshake, star, ratio, _cpu in table[:4]:
        assert ranks == "4"
        seconds, floor = (float(figure.removesuffix(" µs")) for figure in (handshake, star))
        assert floor > 0
        # The ratio is of what was measured, and the times are printed to whole microseconds.
        assert (seconds - 0.5) / (floor + 0.5) - 0.01 <= float(ratio) <= (seconds + 0.5) / (floor - 0.5) + 0.01
    # One size: the mean of all is its own.
    assert [row[-1] for row in table[4:]] == [row[4] for row in table[:4]]


def test_other_worlds():
    # With so few files as can hold 16 ranks, and not 4,096.
    text = bench("--ranks", "2", "3", "--simulated", "16", "4096", "--rounds", "1", "--votes", "40", files=200)
    table = rows(text, "What a dispatch pays")
    one, two = (f"DispatchGate.vote(), {groups}" for groups in ("one group", "two groups"))
    submit, observe = "Handshake.submit(), one group", f"{one}, observing"
    two_ranks, three_ranks = [one, submit, observe], [one, two, submit, observe]
    assert [row[:2] for row in table[:3]] == [[name, "2"] for name in two_ranks]
    assert [row[:2] for row in table[3:7]] == [[name, "3"] for name in three_ranks]
    assert [row[:2] for row in table[7:]] == [[name, "all"] for name in three_ranks]
    [simulated, left_out] = rows(text, "The coordinator's own CPU")
    assert simulated[0] == "16" and len(simulated) == 5
    assert left_out == ["4096", "left out: at most 200 files can be open (ulimit -n)"]


def test_simulated_ranks_and_small_figures(printed):
    [[ranks, star, *_]] = rows(printed, "The coordinator's own CPU")
    assert ranks == "16"
    assert float(star.removesuffix(" µs")) > 0
    figures = dict(rows(printed, "Other figures"))
    assert figures["bytes of a vote on 1, 2, 8 groups, whatever the world"] == "42, 58, 154"
    assert figures["bytes of a verdict that is fat"] == "11"


def test_graphs_where_torch_is(printed):
    pytest.importorskip("torch")
    assert all(cost.endswith(" ms") for _, cost in rows(printed, "Graphs"))
