"""`tutti bench rates`: which recipes reach their target with which strategies at `lr="auto"`, in virtual time."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from typing import Any

from tutti.cluster import PRESETS
from tutti.errors import NonFiniteLoss, WorkerFailed
from tutti.recipes.training import TrainingConfig, TrainingResult, train
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import STRATEGIES, parse

CLUSTER = "ethernet-1g"
"""The cluster on which the runs are simulated. It decides how stale updates are."""

FAMILIES = (
    "native", "poseidon", "fp16", "quantize:4", "onebit", "topk:0.01", "lowrank", "ps:bsp", "ps:ssp=3", "ps:softsync=2",
    "ps:async", "ps:async,aware", "averaging:every=16", "bmuf:every=16", "diloco:every=100", "gossip",
    "gossip:graph=ring", "gossip:pairs=async", "peers", "peers+threshold",
)  # fmt: skip
"""Strategies of every built-in family, with default settings where there are any."""


def measured_strategies() -> list[str]:
    """Return the texts of `FAMILIES`, and the names of strategies that other packages offer."""
    return [*FAMILIES, *(name for name in STRATEGIES if name not in STRATEGIES.built_in)]


@dataclass(frozen=True)
class TargetRun:
    """The result of one training run."""

    recipe: str
    strategy: str
    workers: int
    seed: int
    lr: float
    momentum: float | None
    accuracy: float
    """Test accuracy at the end; NaN if the loss became infinite."""
    target: float

    @property
    def reached(self) -> bool:
        """Whether the recipe's target was reached."""
        return self.accuracy >= self.target

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        accuracy = None if isnan(self.accuracy) else self.accuracy
        return {**asdict(self), "accuracy": accuracy, "reached": self.reached}


def target_runs(
    recipes: Sequence[str], strategies: Sequence[str], worker_counts: Sequence[int], seeds: int, data: str | None
) -> Iterator[TargetRun]:
    """Train every combination with `lr="auto"`, and yield each result."""
    for recipe in recipes:
        for strategy in strategies:
            for workers in worker_counts:
                for seed in range(seeds):
                    config = TrainingConfig(recipe=recipe, strategy=strategy, seed=seed, data=data, lr="auto")
                    yield _target_run(config, workers)


def _target_run(config: TrainingConfig, workers: int) -> TargetRun:
    """Train once in virtual time. A run whose loss did not stay finite counts, with NaN as its results."""
    ranks = workers + parse(config.strategy).num_dedicated_servers
    try:
        results = simulate(train, config, workers=ranks, cluster=PRESETS[CLUSTER]).results
    except WorkerFailed as error:
        if not isinstance(error.__cause__, NonFiniteLoss):
            raise
        return TargetRun(config.recipe, config.strategy, workers, config.seed, nan, None, nan, nan)
    # Servers have no result, and under strategies that are not synchronous only the leader knows the accuracy.
    known: list[TrainingResult] = [result for result in results if result is not None and not isnan(result.accuracy)]
    last = known[0]
    rate = last.lr, last.momentum
    return TargetRun(config.recipe, config.strategy, workers, config.seed, *rate, last.accuracy, last.target)
