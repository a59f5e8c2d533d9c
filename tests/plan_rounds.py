# SPDX-License-Identifier: Apache-2.0
"""Ranks of a split component, each a thread of this process, that agree on a plan; a coordinator's rounds between."""

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from layout import load

_graph_plan = load("_graph_plan")


class Line(NamedTuple):
    """A group's line, as the coordinator has it."""

    ranks: tuple[int, ...]


class Settled(NamedTuple):
    rank: int
    number: int
    digest: bytes
    spans: Sequence[tuple[Line, int, int]]
    reason: str = "fingerprints differ"


class Component:
    """Ranks of one split component, and a coordinator between them. `aborts` are the reasons that ranks gave, `sent`
    how many bytes of bitmaps each sent."""

    def __init__(self, size: int) -> None:
        self.rounds = _graph_plan.Rounds(60.0)
        self.lock = threading.Lock()
        self.frames = [queue.SimpleQueue() for _ in range(size)]
        self.aborts: list[str] = []
        self.sent = [0] * size
        line = Line(tuple(range(size)))
        self._deliver(self.rounds.settled([Settled(rank, 7, bytes([rank]), [(line, 0, 1)]) for rank in line.ranks], 0))

    def exchange(self, rank: int) -> Any:
        return _graph_plan.Exchange(Channel(self, rank), rank)

    def take(self, rank: int, step: int, payload: bytes) -> None:
        with self.lock:
            if step == _graph_plan.ABORT:
                self.aborts.append(payload.decode())
            if step == _graph_plan.INTERSECT:
                self.sent[rank] += len(payload)
            self._deliver(self.rounds.take(rank, 7, step, payload, 0.0))

    def _deliver(self, replies: list[Any]) -> None:
        for rank, number, step, payload in replies:
            assert number == 7
            self.frames[rank].put((step, payload))


class Channel:
    def __init__(self, component: Component, rank: int) -> None:
        self.component = component
        self.rank = rank

    def send(self, step: int, payload: bytes) -> None:
        self.component.take(self.rank, step, payload)

    def receive(self) -> tuple[int, bytes]:
        return self.component.frames[self.rank].get(timeout=60)

    def close(self) -> None:
        pass

    def abandon(self, step: int, payload: bytes) -> None:
        self.component.take(self.rank, step, payload)


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def plans_of(graphs: Sequence[Any], reference: int = 0, groups: str | None = None) -> tuple[list[Any], Component]:
    """Each graph's plan, that at place `reference` being the reference's: it is rank 0's, the next one rank 1's …"""
    component = Component(len(graphs))
    calls = []
    for place, graph in enumerate(graphs):
        exchange = component.exchange((place - reference) % len(graphs))
        calls.append(functools.partial(_graph_plan.agree_on_plan, exchange, graph, groups))
    plans = in_threads(calls)
    assert len({plan is None for plan in plans}) == 1, "all ranks get a plan, or none does"
    return plans, component
