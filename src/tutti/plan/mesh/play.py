"""A pipeline's steps by a clock: what each rank does when, and what travels between them."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.cluster import Link
from tutti.parallel.pipeline.order import Action

_STEPS = 3
_LOSS_BYTES = 8


@dataclass(frozen=True)
class StageTime:
    """What a rank takes, of one microbatch and of a step."""

    forward_s: float
    backward_s: float
    """Of computing, and of talk that has a network of its own."""
    talk: tuple[Sequence[float], Sequence[float]]
    """Forward and backward, each time that it talks with those who split its layers, by the card that it sends with."""
    gives: Sequence[float]
    """Bytes of each tensor that goes to the next stage; as much comes back."""
    ending_s: float
    """When all microbatches are done: the exchange along `data`, and the optimiser."""


class Clockwork:
    """Plays one step after another: a rank goes on with the next when it has ended its own."""

    def __init__(self, orders: Sequence[Sequence[Action]], stages: Sequence[StageTime], link: Link) -> None:
        self._orders, self._stages, self._link = orders, stages, link
        self._clocks = [0.0] * len(stages)
        self._out, self._in = [_Card() for _ in stages], [_Card() for _ in stages]

    def seconds(self) -> float:
        """Of a step, once ranks have fallen into it."""
        ends = []
        for _ in range(_STEPS):
            self._step()
            ends.append(max(self._clocks))
        return ends[-1] - ends[-2]

    def _step(self) -> None:
        arrived: dict[Action, float] = {}
        next_of = [0] * len(self._orders)
        while (found := self._next(next_of, arrived)) is not None:
            start_s, rank = found
            action = self._orders[rank][next_of[rank]]
            next_of[rank] += 1
            self._clocks[rank] = self._work(action.kind == "F", rank, start_s)
            self._give(action, rank, arrived)
        last = len(self._stages) - 1
        told = [self._send(last, rank, [_LOSS_BYTES], self._clocks[last]) for rank in range(last)]
        for rank, told_s in enumerate(told):
            self._clocks[rank] = max(self._clocks[rank], told_s)
        for rank, stage in enumerate(self._stages):
            self._clocks[rank] = max(self._clocks[rank], self._out[rank].free_s) + stage.ending_s

    def _next(self, next_of: list[int], arrived: dict[Action, float]) -> tuple[float, int] | None:
        """Of all actions that could be done now, the one that would begin first: when, and whose."""
        ready = []
        for rank, actions in enumerate(self._orders):
            if next_of[rank] < len(actions):
                needed = [it for it in actions[next_of[rank]].needs(len(self._stages)) if it.stage != rank]
                if all(it in arrived for it in needed):
                    ready.append((max([self._clocks[rank], *(arrived[it] for it in needed)]), rank))
        assert ready or all(number == len(actions) for number, actions in zip(next_of, self._orders, strict=True))
        return min(ready, default=None)

    def _work(self, forward: bool, rank: int, start_s: float) -> float:
        """When it is done: it computes for a while, talks, and so on."""
        stage = self._stages[rank]
        computing_s, talks = (stage.forward_s if forward else stage.backward_s), stage.talk[not forward]
        now_s = start_s + (0.0 if talks else computing_s)
        for talk_s in talks:
            now_s = _book([self._out[rank], self._in[rank]], now_s + computing_s / len(talks), talk_s) + talk_s
        return now_s

    def _give(self, action: Action, rank: int, arrived: dict[Action, float]) -> None:
        target = rank + (1 if action.kind == "F" else -1)
        if 0 <= target < len(self._stages):
            arrived[action] = self._send(rank, target, self._stages[min(rank, target)].gives, self._clocks[rank])

    def _send(self, src: int, dst: int, sizes: Sequence[float], at_s: float) -> float:
        """When all of these messages have arrived."""
        arrives_s = at_s
        for num_bytes in sizes:
            takes_s = num_bytes * self._link.seconds_per_byte
            leaves_s = _book([self._out[src]], at_s, takes_s)
            arrives_s = _book([self._in[dst]], leaves_s + self._link.latency_s, takes_s) + takes_s
        return arrives_s


class _Card:
    """One direction of a rank's network card: when it is in use."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    @property
    def free_s(self) -> float:
        """From when on it is free for good."""
        return max((stop_s for _, stop_s in self._busy), default=0.0)

    def idle(self, at_s: float) -> float:
        """When it is idle, from then on at the earliest: who comes first goes first."""
        for start_s, stop_s in self._busy:
            if start_s <= at_s < stop_s:
                at_s = stop_s
        return at_s

    def take(self, at_s: float, takes_s: float) -> None:
        insort(self._busy, (at_s, at_s + takes_s))


def _book(cards: Sequence[_Card], at_s: float, takes_s: float) -> float:
    """Use all of these cards at once for so long, as soon as all are idle; returns from when on."""
    while any((later_s := card.idle(at_s)) > at_s for card in cards):
        at_s = later_s
    for card in cards:
        card.take(at_s, takes_s)
    return at_s
