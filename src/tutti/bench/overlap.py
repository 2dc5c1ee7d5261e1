"""The benefit of overlap: how much of the communication that could run behind backward does."""

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

WAYS = ("poseidon", "poseidon:overlap=0")


@dataclass(frozen=True)
class OverlapReport:
    """Seconds a step of one model between some hosts."""

    model: str
    solo_s: float
    """Without exchange."""
    with_s: float
    without_s: float
    possible_s: float
    """What overlap could save: by formula, from the link, the moments at which gradients are ready, and the step."""

    @property
    def hidden_s(self) -> float:
        return self.without_s - self.with_s

    @property
    def share(self) -> float:
        """Of what could be hidden, what is."""
        return self.hidden_s / self.possible_s if self.possible_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "hidden_s": self.hidden_s, "share": self.share}


def in_lab(benchmark: StrategyBenchmark) -> tuple[PlannerInputs, dict[str, float]]:
    """What the formula needs, and the seconds of a step, on this rank and its peers."""
    return measure_planner_inputs(benchmark.model, init().transport), strategies.measure(benchmark)["seconds"]


def measure_overlap(model: str, hosts: Lab, rounds: int) -> OverlapReport:
    """Time steps with and without overlap in a lab, and say what could have been gained."""
    everyones = launch(in_lab, StrategyBenchmark(model, WAYS, rounds), lab=hosts)
    found, seconds = everyones[0]
    profile = slowed(found.profile, seconds["solo"] / found.profile.seconds)
    cluster = Cluster(link=Link(*found.link))
    quick_s, slow_s = (price(parse(way), profile, len(everyones), cluster).step_s for way in WAYS)
    with_s, without_s = (seconds[way] for way in WAYS)
    return OverlapReport(model, seconds["solo"], with_s, without_s, possible_s=max(0.0, slow_s - quick_s))
