"""`time_to_accuracy`: how long a recipe takes to a given accuracy, under the strategies that a planner considers.

The planner predicts the time of a step. The number of steps cannot be predicted: ranks in virtual time take them, with
real data. Exact strategies all learn the same, so they are trained once, by one worker.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import Any, NamedTuple

from tutti.cluster import Cluster, Compute
from tutti.errors import WorkerFailed
from tutti.plan import Plan, Prediction, Profile
from tutti.plan.prediction import price
from tutti.recipes.training import TrainingConfig, TrainingResult, train
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class TimeToAccuracy:
    """The result of training with one strategy."""

    prediction: Prediction
    epochs: float
    """Epochs until the accuracy was reached; infinite where it was not."""
    accuracy: float
    """The best accuracy of any epoch."""
    seconds: float
    """Time of these epochs at the predicted speed, that of a synchronous start included; infinite where the accuracy
    was not reached."""

    def as_dict(self) -> dict[str, Any]:
        numbers = {key: getattr(self, key) for key in ("epochs", "accuracy", "seconds")}
        finite = {key: value if isfinite(value) else None for key, value in numbers.items()}
        return {"strategy": str(self.prediction.strategy), **finite}


def time_to_accuracy(
    plan: Plan, profile: Profile, cluster: Cluster, task: TrainingConfig, log: Callable[[str], None] = lambda text: None
) -> list[TimeToAccuracy]:
    """Train the plan's choice and the fastest strategy of every other kind until `task.until`; the soonest comes first.

    Args:
        plan: its predictions are the strategies to try, and how fast each is.
        profile: the measured step of a worker.
        task: what to train; its strategy is not used.
        log: called with a line of text before each training run.
    """
    assert task.until is not None
    # Every rank computes as the profiled worker did. The network is that of the cluster.
    computing = Compute(sample_s=profile.seconds / profile.num_samples)
    timed = replace(cluster, compute=computing)
    results = []
    for prediction in _first_of_each_kind(plan.predictions):
        strategy = prediction.strategy
        log(f"training with {'one worker, as all exact strategies do' if prediction.exact else strategy}")
        if prediction.exact:
            # No cluster: with one worker there is nothing to send, and only the number of epochs is of interest.
            trained = _trained(replace(task, strategy="native"), 1, Cluster(compute=computing))
        else:
            trained = _trained(replace(task, strategy=str(strategy)), _ranks(strategy, plan), timed)
        seconds = trained.seconds(prediction, _start(prediction, plan, profile, cluster))
        results.append(
            TimeToAccuracy(prediction=prediction, epochs=trained.epochs, accuracy=trained.accuracy, seconds=seconds)
        )
    return sorted(results, key=lambda result: (result.seconds, -result.accuracy))


def _first_of_each_kind(predictions: tuple[Prediction, ...]) -> list[Prediction]:
    """Return the first prediction of each kind. All exact strategies are one kind; each other class is one."""
    kinds: dict[object, Prediction] = {}
    for prediction in predictions:
        kinds.setdefault("exact" if prediction.exact else type(prediction.strategy), prediction)
    return list(kinds.values())


def _ranks(strategy: Strategy, plan: Plan) -> int:
    return plan.workers + (strategy.num_dedicated_servers if plan.workers > 1 else 0)


def _start(prediction: Prediction, plan: Plan, profile: Profile, cluster: Cluster) -> Prediction:
    """Return the prediction of the steps that the training starts with: others, if it starts synchronously."""
    strategy = prediction.strategy.synchronous_start
    if strategy is None:
        return prediction
    planned = next((other for other in plan.predictions if other.strategy == strategy), None)
    start = planned or price(strategy, profile, plan.workers, cluster)
    return replace(start, total_samples=prediction.total_samples)


class _Trained(NamedTuple):
    """The result of one training run."""

    epochs: float
    """Epochs until the accuracy was reached; infinite where it was not."""
    accuracy: float
    """The best accuracy of any epoch."""
    samples: float
    """Samples of an epoch."""
    synchronous_epochs: float
    """Epochs at the start with synchronous steps."""

    def seconds(self, prediction: Prediction, start: Prediction) -> float:
        """Return the time until the accuracy: of synchronous epochs at the speed of `start`, then of `prediction`."""
        if self.epochs == inf:
            return inf
        first = min(self.epochs, self.synchronous_epochs)
        return self.samples * (first / start.samples_per_s + (self.epochs - first) / prediction.samples_per_s)


def _trained(task: TrainingConfig, ranks: int, cluster: Cluster) -> _Trained:
    """Train until the accuracy, or for all epochs."""
    assert task.until is not None
    tested: list[tuple[float, float]] = []

    def record_epoch(rank: int, values: dict[str, Any]) -> None:
        if values["kind"] == "epoch":
            tested.append((values["epoch"], values["accuracy"]))

    try:
        outcomes = simulate(train, task, workers=ranks, cluster=cluster, watch=record_epoch).results
    except WorkerFailed as failure:
        if "NonFiniteLoss" not in failure.reason:
            raise
        return _Trained(inf, nan, nan, nan)  # It diverged, which is a result and no failure.
    outcome = next(result for result in outcomes if isinstance(result, TrainingResult))  # Servers return none.
    epochs = next((epoch for epoch, accuracy in tested if accuracy >= task.until), inf)
    num_epochs = max(epoch for epoch, _ in tested)
    synchronous_epochs = outcome.synchronous_steps * num_epochs / outcome.steps
    accuracy = max(accuracy for _, accuracy in tested)
    return _Trained(epochs, accuracy, outcome.samples / num_epochs, synchronous_epochs)
