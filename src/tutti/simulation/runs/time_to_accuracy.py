"""How long a recipe takes until it is as accurate as asked, under the strategies that a planner would consider.

How long a step takes, the planner predicts; how many it takes, nobody can: they are taken, by ranks in virtual time
with real data. What is exact learns the same however it is exchanged, and is trained once, by one worker.
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
class Reach:
    """How far a strategy came."""

    prediction: Prediction
    epochs: float
    """Until the accuracy was reached; infinite where it was not."""
    accuracy: float
    """The best of any epoch."""
    seconds: float
    """As long as these epochs take, by the predicted speed; infinite where they would not do."""

    def as_dict(self) -> dict[str, Any]:
        numbers = {key: getattr(self, key) for key in ("epochs", "accuracy", "seconds")}
        finite = {key: value if isfinite(value) else None for key, value in numbers.items()}
        return {"strategy": str(self.prediction.strategy), **finite}


def reach(
    made: Plan, profile: Profile, cluster: Cluster, task: TrainingConfig, say: Callable[[str], None] = lambda text: None
) -> list[Reach]:
    """The plan's choice and the fastest of every other kind, trained until `task.until`; the soonest there first.

    Args:
        made: whose predictions say what there is, and how fast.
        profile: of a worker.
        task: what to train; its strategy is of no account.
    """
    assert task.until is not None
    computing = Compute(sample_s=profile.seconds / profile.num_samples)
    place = replace(cluster, compute=computing)
    found = []
    for prediction in _first_of_each_kind(made.predictions):
        strategy = prediction.strategy
        say(f"training with {'one worker, as all exact strategies do' if prediction.exact else strategy}")
        if prediction.exact:
            epochs, accuracy, samples = _trained(replace(task, strategy="native"), 1, Cluster(compute=computing))
        else:
            epochs, accuracy, samples = _trained(replace(task, strategy=str(strategy)), _ranks(strategy, made), place)
        found.append(
            Reach(
                prediction=prediction,
                epochs=epochs,
                accuracy=accuracy,
                seconds=epochs * samples / prediction.samples_per_s if epochs < inf else inf,
            )
        )
    return sorted(found, key=lambda each: (each.seconds, -each.accuracy))


def _first_of_each_kind(predictions: tuple[Prediction, ...]) -> list[Prediction]:
    """What is exact is of one kind, and each other class of strategies is: the first, as a plan has them in order."""
    kinds: dict[object, Prediction] = {}
    for each in predictions:
        kinds.setdefault("exact" if each.exact else type(each.strategy), each)
    return list(kinds.values())


def _ranks(strategy: Strategy, made: Plan) -> int:
    return made.workers + (strategy.num_dedicated_servers if made.workers > 1 else 0)


def _trained(task: TrainingConfig, ranks: int, place: Cluster) -> tuple[float, float, float]:
    """Epochs until the accuracy asked for, the best accuracy, and the samples of an epoch."""
    assert task.until is not None
    tested: list[tuple[float, float]] = []

    def note(rank: int, values: dict[str, Any]) -> None:
        if values["kind"] == "epoch":
            tested.append((values["epoch"], values["accuracy"]))

    try:
        outcomes = simulate(train, task, workers=ranks, cluster=place, watch=note).results
    except WorkerFailed as failure:
        if "NonFiniteLoss" not in failure.reason:
            raise
        return inf, nan, nan  # It diverged.
    outcome = next(each for each in outcomes if isinstance(each, TrainingResult))
    epochs = next((epoch for epoch, accuracy in tested if accuracy >= task.until), inf)
    return epochs, max(accuracy for _, accuracy in tested), outcome.samples / max(epoch for epoch, _ in tested)
