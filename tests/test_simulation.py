# SPDX-License-Identifier: Apache-2.0
"""Whole jobs, simulated: see `simulation`."""

import collections
import contextlib
import shlex
from typing import Any

import pytest
import simulation
from oracle import FAT, PEER_LOST, SPLIT, TIMEOUT

SEEDS = 2_000


def test_no_job_is_told_what_is_not_so_and_all_come_to_an_end() -> None:
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(SEEDS):
        world = simulation.World(seed)
        try:
            world.play()
        except simulation.SimulationError:
            pytest.fail(str(simulation.shrunk(seed)))
        seen.update(world.told.values())
        seen.update(fault for fault in simulation.FAULTS if any(f"fault: {fault}," in line for line in world.trace))
        seen.update("come back" for line in world.trace if "comes back" in line)
        seen.update("late" for _ in world.late)
    assert {FAT, SPLIT, TIMEOUT, PEER_LOST, *simulation.FAULTS} <= seen.keys()


def test_one_seed_is_one_trace() -> None:
    traces = [[simulation.World(seed).play() for seed in range(50)] for _ in range(2)]
    assert traces[0] == traces[1]
    assert len({tuple(trace) for trace in traces[0]}) == 50


# ---------------------------------------------------------------------------------------------------------------
# Proof that it finds faults: each of these is one, planted in a method
# ---------------------------------------------------------------------------------------------------------------

Machine = simulation._consensus._CollectiveHandshakeConsensus
Server, Client = simulation._coordinator.Server, simulation._client.Client
Decoder = simulation._protocol.Decoder


def lose_what_is_passed(_: Any, machine: Any, voter: Any, places: Any) -> list[Any]:
    return []


def split_only_when_all_have_voted(original: Any, machine: Any, *vote: Any) -> list[Any]:
    return original(machine, *vote[:5], True)


def forget_latecomers(original: Any, machine: Any, component: Any, *finding: Any) -> list[Any]:
    settled = original(machine, component, *finding)
    for line in component.spans:
        line.findings.clear()
    return settled


def count_a_rank_twice(original: Any, machine: Any, voter: Any, *vote: Any) -> list[Any]:
    decisions = original(machine, voter, *vote)
    for own in voter.waiting:
        for component in machine._open:
            component.missing -= component.votes.get(voter) is own
    return decisions


def take_all_graphs_for_one(original: Any, machine: Any, voter: Any, places: Any, _: Any, *vote: Any) -> list[Any]:
    return original(machine, voter, places, b"one", *vote)


def never_look_at_the_clock(_: Any, machine: Any) -> None:
    return None


def see_no_cycles(_: Any, machine: Any) -> list[Any]:
    return []


def keep_the_lost_lost(original: Any, machine: Any, rank: int) -> None:
    pass


def answer_twice(original: Any, server: Any, decisions: Any) -> None:
    original(server, decisions)
    original(server, decisions)


def answer_the_first_alone(original: Any, server: Any, decisions: Any) -> None:
    original(server, decisions[:1])


def overtake_what_waits(original: Any, server: Any, connection: Any, data: Any = b"") -> None:
    if data and connection.unsent:
        with contextlib.suppress(OSError):
            connection.sock.send(data)
    else:
        original(server, connection, data)


def lose_what_the_socket_does_not_take(original: Any, server: Any, connection: Any, data: Any = b"") -> None:
    with contextlib.suppress(OSError):
        connection.sock.send(data)


def let_a_twin_in(original: Any, server: Any, *who: Any) -> str:
    return "" if "two processes" in (refusal := original(server, *who)) else refusal


def tell_nobody_of_the_lost(original: Any, server: Any, connection: Any, reason: str) -> None:
    connection.voter = None
    original(server, connection, reason)


def forget_why_it_ended(original: Any, server: Any, connection: Any, reason: str) -> None:
    original(server, connection, "it is gone")


def lose_the_last_byte_before_a_close(original: Any, client: Any, reason: str) -> None:
    original(client, reason)
    if client._sock is not None:
        del client._sock.outgoing.under_way[-1:]


def forget_the_beginning_of_a_frame(original: Any, decoder: Any, data: bytes) -> Any:
    decoder._rest.clear()
    return original(decoder, data)


def count_nothing_eager(_: Any, client: Any, group: Any, number: int) -> None:
    pass


def take_timeouts_for_fat(original: Any, client: Any, message: Any) -> None:
    if getattr(message, "outcome", 0) == simulation._protocol.TIMEOUT:
        message = message._replace(outcome=simulation._protocol.FAT)
    original(client, message)


@pytest.mark.parametrize(
    ("of_class", "method", "fault"),
    [
        (Machine, "_settle_cells_passed", lose_what_is_passed),
        (Machine, "cast", split_only_when_all_have_voted),
        (Machine, "_settle", forget_latecomers),
        (Machine, "cast", count_a_rank_twice),
        (Machine, "cast", take_all_graphs_for_one),
        (Machine, "next_deadline", never_look_at_the_clock),
        (Machine, "_wait_cycles", see_no_cycles),
        (Machine, "rejoin_rank", keep_the_lost_lost),
        (Server, "_answer", answer_twice),
        (Server, "_answer", answer_the_first_alone),
        (Server, "_send", overtake_what_waits),
        (Server, "_send", lose_what_the_socket_does_not_take),
        (Server, "_refusal", let_a_twin_in),
        (Server, "_drop", tell_nobody_of_the_lost),
        (Server, "_drop", forget_why_it_ended),
        (Decoder, "feed", forget_the_beginning_of_a_frame),
        (Client, "record_eager", count_nothing_eager),
        (Client, "close", lose_the_last_byte_before_a_close),
        (Client, "_handle", take_timeouts_for_fat),
    ],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, of_class: Any, method: str, fault: Any) -> None:
    original = getattr(of_class, method)
    monkeypatch.setattr(of_class, method, lambda *given: fault(original, *given))
    seed = next((seed for seed in range(SEEDS) if simulation.failure(seed) is not None), None)
    assert seed is not None, "not found"
    monkeypatch.undo()
    assert simulation.failure(seed) is None


def test_a_failing_seed_is_shrunk_and_says_how_to_play_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "_settle_cells_passed", lambda *_: [])
    seed = next(seed for seed in range(SEEDS) if simulation.failure(seed) is not None)
    with pytest.raises(SystemExit) as found:
        simulation.main([str(seed), str(seed + 1)])
    *_, command = str(found.value).splitlines()
    python, script, *arguments = shlex.split(command)
    assert (python, script, arguments[0]) == ("python", "tests/simulation.py", str(seed))
    assert "--without" in arguments
    with pytest.raises(simulation.SimulationError) as again:
        simulation.main(arguments)
    assert str(again.value) == str(found.value)
