"""Interleaved timing: candidates are timed in turn, so that noise affects all of them alike."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from tutti.collectives import all_gather_json, recursive_doubling, run
from tutti.measurement import CpuUse, Spread
from tutti.transports import Transport

Candidates = dict[str, Callable[[], Any]]
"""Functions to time, by name. Every rank has the same names in the same order."""


@dataclass(frozen=True)
class InterleavedTimer:
    """Times candidates in rounds: every round calls each of them several times, in another order."""

    rounds: int
    """Number of rounds, unless `total_s` allows fewer only."""
    round_s: float
    """Approximate time of one candidate in one round; it sets the number of calls."""
    most_repeats: int
    """Largest number of calls of one candidate in one round."""
    total_s: float
    """Approximate limit of the whole measurement."""
    fewest: int = 3
    """Number of rounds that are made even if they exceed `total_s`."""
    before: Candidates = field(default_factory=dict)
    """Functions to call, untimed, before a candidate: they bring it into the state that it has in the long run."""
    after: Candidates = field(default_factory=dict)
    """Functions to call, untimed, after a candidate: they complete work that would disturb the next one."""

    def medians(
        self, candidates: Candidates, transport: Transport, show: Callable[[str], object] = lambda text: None
    ) -> dict[str, float]:
        """Return the median over rounds of the slowest rank's seconds per call; the same on all ranks. Collective."""
        # One call of each gives an estimate, which sets how often each is called in a round. Times of the slowest rank
        # are used, so that all ranks call equally often: a candidate is a collective operation.
        first = self._time(candidates, transport, dict.fromkeys(candidates, 1))
        estimates = {name: max(seconds) for name, seconds in _by_name(first, candidates, transport).items()}
        repeats = {name: max(1, min(self.most_repeats, int(self.round_s / estimates[name]))) for name in candidates}
        per_round_s = sum(estimates[name] * repeats[name] for name in candidates)
        # As many rounds as fit into `total_s`, but at least `fewest` and at most `rounds`.
        rounds = max(min(self.fewest, self.rounds), min(self.rounds, int(self.total_s / per_round_s)))
        samples = []
        before = CpuUse.now()
        for number in range(rounds):
            show(f"round {number + 1} of {rounds}")
            # Another order in every round, the same on all ranks: a candidate may suffer from the one before it.
            order = Random(number).sample(list(candidates), len(candidates))
            shuffled = {name: candidates[name] for name in order}
            samples.append(_by_name(self._time(shuffled, transport, repeats), shuffled, transport))
        # The slowest rank counts in each round; the median over rounds ignores those that were disturbed.
        slowest = {name: [max(sample[name]) for sample in samples] for name in candidates}
        _print_doubt(slowest, _others(before, transport), transport)
        return {name: statistics.median(times) for name, times in slowest.items()}

    def _time(self, candidates: Candidates, transport: Transport, repeats: dict[str, int]) -> list[float]:
        """Return this rank's seconds per call of every candidate, in order."""
        times = []
        for name, candidate in candidates.items():
            self.before.get(name, _nothing)()
            run(recursive_doubling.steps(torch.zeros(1), transport))  # A barrier: all ranks start together.
            start = transport.now()
            for _ in range(repeats[name]):
                candidate()
            times.append((transport.now() - start) / repeats[name])
            self.after.get(name, _nothing)()
        return times


def _nothing() -> None:
    """Stands in for what a candidate does not need before or after it."""
    return None


def _others(before: CpuUse | None, transport: Transport) -> float:
    """Return the share of this machine's CPU that processes other than the ranks used since `before`. Collective."""
    after = CpuUse.now()
    if before is None or after is None:  # Alike on all ranks, which run the same system.
        return 0.0
    # Ranks on other machines are counted as well, which can only hide others here. Emulated hosts are one machine.
    return before.others(after, sum(all_gather_json(after.own_s - before.own_s, transport)))


def _print_doubt(slowest: dict[str, list[float]], others: float, transport: Transport) -> None:
    """Print on rank 0 why the times should not be trusted, if so, with the candidate that differs most."""
    spreads = {name: Spread.of(times, others) for name, times in slowest.items()}
    worst = max(spreads, key=lambda name: spreads[name].relative)
    if transport.rank == 0 and transport.cluster is None and spreads[worst].doubt:
        print(f"{worst}: {spreads[worst]}. {spreads[worst].doubt}", file=sys.stderr)


def _by_name(times: list[float], candidates: Candidates, transport: Transport) -> dict[str, list[float]]:
    """Gather the seconds of every rank, and return them by candidate; the same on all ranks. Collective."""
    by_rank = all_gather_json(times, transport)
    return {name: [rank_times[number] for rank_times in by_rank] for number, name in enumerate(candidates)}
