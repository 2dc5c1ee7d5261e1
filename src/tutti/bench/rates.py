"""`tutti bench rates`: which recipes reach their target with which strategies at `lr="auto"`, in virtual time.

A run ends with the first epoch that reaches the target: later epochs would take as long and decide nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from typing import Any

from tutti.cluster import PRESETS
from tutti.errors import NonFiniteLoss, WorkerFailed
from tutti.recipes import Recipe, recipe
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
    synchronous_share: float
    """Share of the training, at its start, with synchronous steps at the recipe's rates: `lr` and `momentum` follow."""
    accuracy: float
    """Test accuracy at the end; NaN if the loss became infinite."""
    target: float
    epochs: float
    """Passes over the training data at the end: fewer than the recipe's if the target was reached before."""

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
    for name in recipes:
        for strategy in strategies:
            for workers in worker_counts:
                for seed in range(seeds):
                    config = TrainingConfig(recipe=name, strategy=strategy, seed=seed, data=data, lr="auto")
                    yield _target_run(config, workers)


def _target_run(config: TrainingConfig, workers: int) -> TargetRun:
    """Train once in virtual time. A run whose loss did not stay finite counts, with NaN as its accuracy."""
    trained = recipe(config.recipe)
    first = _FirstReached(trained.target)
    ranks = workers + parse(config.strategy).num_dedicated_servers
    accuracy, epochs = nan, float(trained.epochs)
    try:
        simulation = simulate(
            train, config, workers=ranks, cluster=PRESETS[CLUSTER], watch=first.watch, on_progress=first.stop
        )
    except _TargetReached as reached:
        accuracy, epochs = reached.accuracy, reached.epochs
    except WorkerFailed as error:
        if not isinstance(error.__cause__, NonFiniteLoss):
            raise
    else:
        # Servers have no result, and under strategies that are not synchronous only the leader knows the accuracy.
        results: list[TrainingResult] = [result for result in simulation.results if result is not None]
        accuracy = next(result.accuracy for result in results if not isnan(result.accuracy))
    rate = _rate(trained, config, workers)
    return TargetRun(config.recipe, config.strategy, workers, config.seed, *rate, accuracy, trained.target, epochs)


class _TargetReached(Exception):  # No error: it ends a simulation that is decided.
    """An epoch has ended with the target accuracy."""

    def __init__(self, accuracy: float, epochs: float) -> None:
        super().__init__(accuracy, epochs)
        self.accuracy, self.epochs = accuracy, epochs


class _FirstReached:
    """Ends a simulation after the first epoch whose accuracy is the target or more.

    Reports come from the threads of ranks, where an exception would be that rank's failure, and other ranks may go on
    without it. So it is raised in the thread that simulates, soon after.
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self._reached: _TargetReached | None = None

    def watch(self, rank: int, values: dict[str, Any]) -> None:
        """Note a report of a rank."""
        accuracy = values.get("accuracy", nan)
        if self._reached is None and accuracy >= self._target:
            self._reached = _TargetReached(accuracy, values["epoch"])

    def stop(self, seconds: float, num_messages: int) -> None:
        """End the simulation if the target has been reached."""
        if self._reached is not None:
            raise self._reached


def _rate(trained: Recipe, config: TrainingConfig, workers: int) -> tuple[float, float | None, float]:
    """Return the learning rate and the momentum at the end of such a run, as `train` sets them, and when they begin."""
    optimizer, rule = trained.optimizer(trained.model()), parse(config.strategy).learning_rate(workers)
    rule.apply(optimizer)
    group = optimizer.param_groups[0]
    return group["lr"], group.get("momentum"), rule.synchronous_share
