"""`tutti bench overlap`: how much of the communication that could be hidden behind backward is hidden."""

from dataclasses import dataclass
from typing import Any

from tutti.bench import strategies
from tutti.bench.planner_inputs import PlannerInputs, measure_planner_inputs
from tutti.bench.strategies import StrategyBenchmark
from tutti.cluster import Cluster, Link
from tutti.cost.scaled_profile import slowed
from tutti.launch import init, launch
from tutti.launch.lab.lab import Lab
from tutti.plan import price
from tutti.strategies import parse

STRATEGIES = ("poseidon", "poseidon:overlap=0")
"""The same strategy with and without overlap: only when its communication starts differs."""


@dataclass(frozen=True)
class OverlapReport:
    """Seconds per step of one model, with and without overlap."""

    model: str
    solo_s: float
    """Seconds per step without any exchange."""
    with_s: float
    """Seconds per step with overlap."""
    without_s: float
    """Seconds per step without overlap."""
    possible_s: float
    """Seconds that overlap could save, by the cost formula for the measured link and gradient times."""

    @property
    def hidden_s(self) -> float:
        """Seconds per step that overlap saves."""
        return self.without_s - self.with_s

    @property
    def share(self) -> float:
        """The saving as a fraction of the possible one."""
        return self.hidden_s / self.possible_s if self.possible_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        return {**vars(self), "hidden_s": self.hidden_s, "share": self.share}


def in_lab(benchmark: StrategyBenchmark) -> tuple[PlannerInputs, dict[str, float]]:
    """Measure the inputs of the cost formula and the step times, on one rank of a lab. Collective."""
    return measure_planner_inputs(benchmark.model, init().transport), strategies.measure(benchmark)["seconds"]


def measure_overlap(model: str, lab: Lab, rounds: int) -> OverlapReport:
    """Time steps with and without overlap in a lab, and compute the saving that was possible."""
    by_rank = launch(in_lab, StrategyBenchmark(model, STRATEGIES, rounds), on=lab)
    inputs, seconds = by_rank[0]
    # The profile gives the moments of gradients, and "solo" the length of a step while all ranks compute.
    profile = slowed(inputs.profile, seconds["solo"] / inputs.profile.seconds)
    cluster = Cluster(link=Link(*inputs.link))
    overlapped_s, sequential_s = (
        price(parse(strategy), profile, len(by_rank), cluster).step_s for strategy in STRATEGIES
    )
    with_s, without_s = (seconds[strategy] for strategy in STRATEGIES)
    return OverlapReport(model, seconds["solo"], with_s, without_s, possible_s=max(0.0, sequential_s - overlapped_s))
