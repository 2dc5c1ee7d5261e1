"""`goodput`: the share of useful work under failures, for any number of workers, by a model of what each failure costs.

How it works
------------
Workers fail at random, `mtbf` after they were started on average, and each is replaced `repair` after its failure.
While some are missing, the others do their work: how fast follows from the predicted step of so many workers. Each loss
and each arrival costs work (`FailureCosts`), by what elastic runs do:

- *Void work.* A loss ends the step in flight of a synchronous strategy, which is half over on average. Under a strategy
  of local steps, only the lost worker's part of the block is lost, and under an asynchronous one its part of a step.
- *A pause*, in which workers notice the loss, agree on the next generation, open connections and attach anew. The times
  are those of the simulation of elastic runs (`tutti.simulation.recovery`), and of messages over the cluster's links.
- *The state of a newcomer*, which the others wait for.

`RESTART` is what a launcher does that ends all workers at every change and starts those that are there from the last
checkpoint. Checkpoints are written at the interval that loses least (Young 1974, Daly 2006).

Events are drawn from a seed, so the same question has the same answer.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from heapq import heappop, heappush
from math import log2, sqrt
from typing import Any

from tutti.cluster import Cluster, Duration, format_time, parse_duration
from tutti.cost import Placement, Profile
from tutti.cost.scaled_profile import with_batch
from tutti.errors import ConfigError
from tutti.plan.prediction import price
from tutti.simulation.recovery import CONNECT_S, NOTICE_S, STARTUP_S
from tutti.strategies import Strategy

RESTART = "restart"
"""The name of the comparison with a launcher that restarts all workers from the last checkpoint."""

RESTART_S = 5.6 + STARTUP_S
"""Seconds until workers that are started anew train: torchrun takes 5.6 s for an empty script of 4 workers."""
DISK_BYTES_PER_S = 1e9
"""How fast a checkpoint is written and read."""
_DESCRIPTION_BYTES = 700
"""Bytes of one worker in the message that describes a generation. Each worker gets all of them."""
_ROUNDS = 16
"""Collective calls with small values in which workers agree on positions and attach a strategy."""
_LEAST_EVENTS, _LEAST_REPAIRS = 2_000, 20
"""How many events are drawn, and for how many times the repair, at least."""


@dataclass(frozen=True)
class FailureRates:
    """How often workers fail."""

    mtbf_s: float
    """Mean time between failures of one worker."""
    repair_s: float
    """Time until another worker is there in place of a lost one."""

    def __post_init__(self) -> None:
        if not (self.mtbf_s > 0 and self.repair_s > 0):
            raise ConfigError(f"mtbf and repair are above 0, got {self.mtbf_s:g} s and {self.repair_s:g} s.")

    @classmethod
    def parse(cls, mtbf: Duration, repair: Duration) -> "FailureRates":
        """Return the rates that texts such as "2h" and "10m" say."""
        return cls(parse_duration(mtbf, "mtbf").total_seconds(), parse_duration(repair, "repair").total_seconds())

    @property
    def availability(self) -> float:
        """The share of workers that are there on average."""
        return self.mtbf_s / (self.mtbf_s + self.repair_s)

    def __str__(self) -> str:
        return f"a worker fails every {_duration(self.mtbf_s)} and is replaced after {_duration(self.repair_s)}"


def _duration(seconds: float) -> str:
    """Return a time with the largest unit that leaves it above 1."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.4g} {unit}"
    return format_time(seconds)


@dataclass(frozen=True)
class FailureCosts:
    """What is done while so many workers are there, and what a change costs, as functions of their number."""

    rate: Callable[[int], float]
    """Useful work per second, relative to all workers without failures."""
    void_s: Callable[[int], float]
    """Seconds of the work of all that a loss makes void."""
    loss_pause_s: Callable[[int], float]
    """Seconds in which nothing is done after a loss."""
    join_pause_s: Callable[[int], float]
    """Seconds in which nothing is done when a worker comes."""
    overhead: float = 0.0
    """Share of the time that is spent on checkpoints."""
    join_void_s: float = 0.0
    """Seconds of work that are void when a worker comes."""


@dataclass(frozen=True)
class Goodput:
    """The share of useful work of one strategy and number of workers."""

    strategy: str
    workers: int
    share: float
    """Useful work, relative to that of all workers without failures."""
    missing: float
    """Share of it that workers which are being replaced would have done."""
    void: float
    """Share that was done in vain, and done again."""
    pauses: float
    """Share of the time in which workers regroup, start or read and write checkpoints."""
    loss_s: float
    """Seconds that one loss costs, void work and pause together."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return asdict(self)


def goodput(
    strategy: Strategy, profile: Profile, workers: int, cluster: Cluster, failures: FailureRates, seed: int = 0
) -> Goodput:
    """Predict the share of useful work under a strategy, in an elastic run.

    Args:
        profile: the step of one of `workers` workers.
    """
    check_elastic(strategy)
    costs = elastic_costs(strategy, profile, workers, cluster)
    return _measured(str(strategy), workers, costs, failures, seed)


def restart_goodput(
    strategy: Strategy, profile: Profile, workers: int, cluster: Cluster, failures: FailureRates, seed: int = 0
) -> Goodput:
    """Predict the share of useful work if all workers are ended and started from a checkpoint at every change."""
    rate, _ = _rates(strategy, profile, workers, cluster)
    write_s = (profile.gradient_bytes + profile.state_bytes) / DISK_BYTES_PER_S
    between_s = failures.mtbf_s / workers / 2  # A loss and an arrival each.
    interval_s = max(sqrt(2 * write_s * between_s), write_s)
    costs = FailureCosts(
        rate,
        void_s=lambda alive: interval_s / 2,
        loss_pause_s=lambda alive: RESTART_S + write_s,
        join_pause_s=lambda alive: RESTART_S + write_s,
        overhead=write_s / (interval_s + write_s),
        join_void_s=interval_s / 2,
    )
    return _measured(RESTART, workers, costs, failures, seed)


def check_elastic(strategy: Strategy) -> None:
    """Raise `ConfigError` for a strategy that cannot go on without a worker."""
    if strategy.num_dedicated_servers:
        raise ConfigError(
            f"'{strategy}' has dedicated servers, whose loss ends a run, so it has no goodput under failures. Let the "
            "workers serve (leave servers= out), or compare with 'restart'."
        )


def elastic_costs(strategy: Strategy, profile: Profile, workers: int, cluster: Cluster) -> FailureCosts:
    """Return what failures cost an elastic run of so many workers."""
    rate, step_s = _rates(strategy, profile, workers, cluster)
    link = Placement.from_cluster(workers, cluster).link
    state_s = 8 * (profile.gradient_bytes + profile.state_bytes) / link.bits_per_s

    def regroup_s(alive: int) -> float:
        rounds = _ROUNDS * max(1.0, log2(max(2, alive))) * link.latency_s
        return CONNECT_S + rounds + 8 * _DESCRIPTION_BYTES * alive**2 / link.bits_per_s

    return FailureCosts(
        rate,
        void_s=lambda alive: lost_steps(strategy, alive) * step_s(max(1, alive)),
        loss_pause_s=lambda alive: NOTICE_S + 4 * link.latency_s + regroup_s(alive),
        join_pause_s=lambda alive: regroup_s(alive) + state_s,
    )


def lost_steps(strategy: Strategy, workers: int) -> float:
    """Return how many steps of all workers the loss of one makes void, on average."""
    if not strategy.synchronous:
        return 0.5 / max(1, workers)  # Its own step; the others go on.
    local = strategy.steps_per_exchange or 1
    if local > 1:  # Its own steps since the last exchange. One in `local` steps is an exchange, which is tried again.
        return local / 2 / max(1, workers) + 0.5 / local
    return 0.5


def _rates(
    strategy: Strategy, profile: Profile, workers: int, cluster: Cluster
) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Return the useful work per second, relative to all workers, and the seconds of a step; by number of workers."""
    splits = strategy.synchronous and (strategy.steps_per_exchange or 1) == 1
    total = workers * profile.num_samples

    @cache
    def step_s(alive: int) -> float:
        # Strategies that take every step together divide the same samples among those that are there.
        own = with_batch(profile, -(-total // alive)) if splits else profile
        return price(strategy, own, alive, cluster).step_s

    def samples_per_s(alive: int) -> float:
        return (total if splits else alive * profile.num_samples) / step_s(alive)

    whole = samples_per_s(workers)
    return (lambda alive: samples_per_s(alive) / whole if alive else 0.0), step_s


def _measured(name: str, workers: int, costs: FailureCosts, failures: FailureRates, seed: int) -> Goodput:
    events = drawn_events(workers, failures, random.Random(f"{seed} {workers}"))
    end_s, done = useful_work(costs, workers, events)
    alive = max(1, round(workers * failures.availability))
    return Goodput(
        name,
        workers,
        share=done["useful"] / end_s,
        missing=done["missing"] / end_s,
        void=done["void"] / end_s,
        pauses=done["pauses"] / end_s,
        loss_s=costs.void_s(alive) + costs.loss_pause_s(alive),
    )


def drawn_events(workers: int, failures: FailureRates, draw: random.Random) -> Iterator[tuple[float, int]]:
    """Yield times and changes of the number of workers: -1 for a loss, 1 for an arrival; the last one has none."""
    down = round(workers * (1 - failures.availability))
    repairs: list[float] = []
    for _ in range(down):
        heappush(repairs, draw.uniform(0, failures.repair_s))
    yield 0.0, -down
    now, alive, number = 0.0, workers - down, 0
    while number < _LEAST_EVENTS or now < _LEAST_REPAIRS * failures.repair_s:
        number += 1
        fails_s = now + draw.expovariate(alive / failures.mtbf_s) if alive else float("inf")
        if repairs and repairs[0] <= fails_s:
            now, alive = heappop(repairs), alive + 1
            yield now, 1
        else:
            now, alive = fails_s, alive - 1
            heappush(repairs, now + failures.repair_s)
            yield now, -1
    yield now, 0


def useful_work(
    costs: FailureCosts, workers: int, events: Iterable[tuple[float, int]]
) -> tuple[float, dict[str, float]]:
    """Return the time of the last event, and the seconds of work by what became of them, relative to all workers.

    Args:
        events: times, and changes of the number of workers. A change at time 0 costs nothing.
    """
    done = {"useful": 0.0, "missing": 0.0, "void": 0.0, "pauses": 0.0}
    now, paused_until, alive = 0.0, 0.0, workers
    for at_s, change in events:
        rate = (1 - costs.overhead) * costs.rate(alive)
        working_s = max(0.0, at_s - max(now, paused_until))
        done["useful"] += rate * working_s
        done["pauses"] += at_s - now - working_s + costs.overhead * costs.rate(alive) * working_s
        done["missing"] += (1 - costs.rate(alive)) * working_s
        if at_s > 0 and change:
            # No more than what was done since the change before can be void.
            void = rate * min(working_s, costs.void_s(alive) if change < 0 else costs.join_void_s)
            done["useful"], done["void"] = done["useful"] - void, done["void"] + void
            pause_s = costs.loss_pause_s if change < 0 else costs.join_pause_s
            paused_until = max(at_s, paused_until) + pause_s(alive + change)
        now, alive = at_s, alive + change
    return now, done
