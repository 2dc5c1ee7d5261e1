"""`price`: predict a training step under a strategy, by its formula where that holds, otherwise by simulation."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from tutti.cluster import Cluster
from tutti.cost import CommunicationCost, Placement, Profile
from tutti.cost.scaled_profile import slowed
from tutti.strategies import AllReduce, Exchange, Strategy, as_strategy

Simulator = Callable[[Strategy], float]
"""Simulates a strategy and returns the seconds of a step. Encoding takes no time in a simulation."""

_ROUNDING = 1e-9
"""Relative difference below which two times count as equal."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted step of every worker under one strategy."""

    strategy: Strategy
    workers: int
    """Number of training workers, without dedicated servers."""
    num_samples: int
    """Samples per step of one worker; of the one that has most, where they differ."""
    total_samples: int
    """Samples per step of all workers."""
    step_s: float
    """Seconds of a step."""
    computing_s: float
    """Seconds of computation of the slowest worker."""
    exposed_s: float
    """Seconds of communication, encoding and decoding that computation does not hide."""
    bytes_per_step: float
    """Bytes sent by one worker per step."""
    memory_bytes: float
    """Approximate memory of one worker, in bytes."""
    simulated: bool = False
    """Whether `step_s` comes from a simulation and not from a formula."""
    goodput: float = 1.0
    """The share of useful work under failures, where these are to be expected (`tutti.plan.goodput`)."""

    @property
    def efficiency(self) -> float:
        """The share of a step that is computation."""
        return self.computing_s / self.step_s if self.step_s else 1.0

    @property
    def useful_step_s(self) -> float:
        """Seconds for the useful work of a step, under failures."""
        return self.step_s / self.goodput if self.goodput > 0 else inf

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all workers."""
        return self.total_samples / self.step_s if self.step_s else 0.0

    @property
    def exact(self) -> bool:
        """Whether the workers compute what one would with all of their samples."""
        return self.strategy.exact

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and properties, with the strategy as text."""
        # `asdict` would take the strategy apart field by field, so it gets a placeholder. The text replaces that.
        named = {**asdict(replace(self, strategy=AllReduce())), "strategy": str(self.strategy), "exact": self.exact}
        return {**named, "efficiency": self.efficiency, "samples_per_s": self.samples_per_s}


def price(
    strategy: Strategy | str,
    profile: Profile,
    workers: int,
    cluster: Cluster,
    simulator: Simulator | None = None,
    exchange: Exchange | None = None,
) -> Prediction:
    """Predict a step of `workers` workers, each with the batch of `profile`.

    Formulas use the slowest link and the slowest worker, and hold where all are alike. Where they are not (several
    ranks on each of several hosts, links or speeds that differ, shared switches, jitter), `simulator` is asked if it
    is given. Dedicated servers are added to the workers. The profile's overhead is added in both cases.

    Args:
        exchange: the strategy at work in a running job; its own cost counts, if it has one.

    Raises `NotPriced` if the strategy has no cost formula.
    """
    strategy = as_strategy(strategy)
    num_servers = strategy.num_dedicated_servers if workers > 1 else 0  # One worker has nobody to exchange with.
    placement = Placement.from_cluster(workers + num_servers, cluster)
    placement = replace(placement, uncontended_factor=profile.overhead.uncontended_factor)
    scaled = slowed(profile, placement.slowness)
    computing_s = scaled.seconds
    added = CommunicationCost(0.0, 0.0, num_exchanges=0.0)
    if workers > 1:
        own_cost = None if exchange is None else exchange.cost
        added = (own_cost or strategy.cost)(scaled, placement)
    overhead_s = scaled.overhead.seconds(added)
    by_simulation = simulator is not None and not placement.uniform and workers > 1
    # Overhead is negative where `coding_factor` is below 1, but a step is never shorter than its computation.
    step_s = computing_s + max(0.0, added.exposed_s + overhead_s)
    if simulator is not None and by_simulation:
        # In a simulation encoding takes no time. It is added in full, as if nothing hid it.
        step_s = simulator(strategy) + max(0.0, added.coding_s + overhead_s)
    # Where workers do not wait for each other, a simulated step may be shorter than the slowest one's computation.
    difference_s = step_s - computing_s
    return Prediction(
        strategy=strategy,
        workers=workers,
        num_samples=profile.num_samples,
        total_samples=workers * profile.num_samples,
        step_s=step_s,
        computing_s=min(computing_s, step_s),
        exposed_s=difference_s if difference_s > _ROUNDING * computing_s else 0.0,
        bytes_per_step=added.num_bytes,
        memory_bytes=profile.peak_bytes + added.memory_bytes,
        simulated=by_simulation,
    )
