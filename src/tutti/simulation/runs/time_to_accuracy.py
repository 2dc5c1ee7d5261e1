"""`time_to_accuracy`: how long a recipe takes to a given accuracy, under the strategies that a planner considers.

The planner predicts the time of a step. The number of steps cannot be predicted: ranks in virtual time take them, with
real data. Exact strategies all learn the same, so they are trained once, by one worker.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import Any

from tutti.cluster import Cluster, Compute
from tutti.errors import WorkerFailed
from tutti.plan import Plan, Prediction, Profile
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
    """Time of these epochs at the predicted speed; infinite where the accuracy was not reached."""

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
            epochs, accuracy, samples = _trained(replace(task, strategy="native"), 1, Cluster(compute=computing))
        else:
            epochs, accuracy, samples = _trained(replace(task, strategy=str(strategy)), _ranks(strategy, plan), timed)
        results.append(
            TimeToAccuracy(
                prediction=prediction,
                epochs=epochs,
                accuracy=accuracy,
                seconds=epochs * samples / prediction.samples_per_s if epochs < inf else inf,
            )
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


def _trained(task: TrainingConfig, ranks: int, cluster: Cluster) -> tuple[float, float, float]:
    """Return the epochs until the accuracy, the best accuracy, and the samples of an epoch."""
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
        return inf, nan, nan  # It diverged, which is a result and no failure.
    outcome = next(result for result in outcomes if isinstance(result, TrainingResult))  # Servers return none.
    epochs = next((epoch for epoch, accuracy in tested if accuracy >= task.until), inf)
    samples_per_epoch = outcome.samples / max(epoch for epoch, _ in tested)
    return epochs, max(accuracy for _, accuracy in tested), samples_per_epoch
