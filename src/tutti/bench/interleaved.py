"""Time several ways of doing the same, in turn, so that noise is noise to all of them."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from tutti.collectives import all_gather_json, recursive_doubling, run
from tutti.transports import Transport

Candidates = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class InterleavedTimer:
    """How often to do what."""

    rounds: int
    round_s: float
    """A round repeats a way for about so long."""
    most_repeats: int
    total_s: float
    """All of it takes no longer than about this, as far as the fewest rounds allow."""
    fewest: int = 3
    before: Candidates = field(default_factory=dict)
    """What is done before a way is timed, by name: what it leaves under way is then there at the start too."""
    after: Candidates = field(default_factory=dict)
    """And after it: what is still under way would be in the way of the next."""

    def medians(
        self, ways: Candidates, transport: Transport, say: Callable[[str], object] = lambda text: None
    ) -> dict[str, float]:
        """Median over rounds of the slowest rank's seconds, of every way; the same on all ranks."""
        first = self._times(ways, transport, dict.fromkeys(ways, 1))
        guess = {name: max(seconds) for name, seconds in _by_way(first, ways, transport).items()}
        repeats = {name: max(1, min(self.most_repeats, int(self.round_s / guess[name]))) for name in ways}
        per_round = sum(guess[name] * repeats[name] for name in ways)
        rounds = max(min(self.fewest, self.rounds), min(self.rounds, int(self.total_s / per_round)))
        samples = []
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            # Each time in another order, the same on all ranks: what follows a certain one may suffer from it.
            turned = {name: ways[name] for name in Random(number).sample(list(ways), len(ways))}
            samples.append(_by_way(self._times(turned, transport, repeats), turned, transport))
        return {name: statistics.median(max(sample[name]) for sample in samples) for name in ways}

    def _times(self, ways: Candidates, transport: Transport, repeats: dict[str, int]) -> list[float]:
        times = []
        for name, way in ways.items():
            self.before.get(name, _nothing)()
            run(recursive_doubling.steps(torch.zeros(1), transport))  # All start together.
            start = transport.now()
            for _ in range(repeats[name]):
                way()
            times.append((transport.now() - start) / repeats[name])
            self.after.get(name, _nothing)()
        return times


def _nothing() -> None:
    return None


def _by_way(times: list[float], ways: Candidates, transport: Transport) -> dict[str, list[float]]:
    """Every rank's seconds, the same on all ranks."""
    everyones = all_gather_json(times, transport)
    return {name: [mine[number] for mine in everyones] for number, name in enumerate(ways)}
