"""`plan`: predict every strategy, choose the best one, and say why; or advise against distributing."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from tutti.cluster import Cluster
from tutti.cost import Profile
from tutti.cost.placement import least_slowness, restricted_to
from tutti.cost.scaled_profile import slowed
from tutti.errors import ConfigError, NoLink
from tutti.plan.candidates import candidates
from tutti.plan.goodput import FailureRates, goodput, restart_goodput
from tutti.plan.prediction import Prediction, Simulator, price
from tutti.plan.reason import describe_plan, fastest_means
from tutti.plan.scaling import UNKNOWN_SIZE, Profiles, RunSize, Scaling, predict_scaling, priced, worker_profile
from tutti.strategies import AllReduce

GAIN = 1.1
"""A lossy strategy must be this many times as fast as the fastest exact one to be chosen; a codec, as no codec."""

TIE = 1.02
"""Exact strategies within this factor of the fastest count as equally fast: `Strategy.preference` decides."""

NEAR = 1.05
"""Lossy strategies within this factor of the fastest count as equally fast: `Strategy.preference` decides."""

_MAX_SIMULATED = 6
"""Largest number of exact strategies, and of lossy ones, that are simulated, the fastest by formula first."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planner's answer: the strategy to use, predictions of all strategies, and the reasons."""

    workers: int
    """Number of training workers, as asked for."""
    alone: Prediction
    """The prediction of one worker without exchange, on the fastest host."""
    predictions: tuple[Prediction, ...]
    """The strategy to use, then the others, fastest first."""
    distribute: bool
    """Whether the chosen strategy trains more samples per second than one worker alone."""
    compress: bool | None
    """Whether a codec pays, in the chosen strategy or in a mean of gradients; None if lossy ones were not allowed."""
    num_steps: int | None
    """Steps of the whole run, if its length is known: strategies for longer runs were not considered."""
    scaling: Scaling
    """Predicted throughput by number of workers, and where adding workers stops paying."""
    reason: str
    """The decisions, in sentences."""
    not_priced: dict[str, str] = field(default_factory=dict)
    """Strategies that could not be compared, and why."""
    failures: FailureRates | None = None
    """How often workers fail, if strategies were compared by their useful work under failures."""
    restart_share: float | None = None
    """The share of useful work of the chosen strategy, if all workers were started again at every change."""

    @property
    def best(self) -> Prediction:
        """The strategy to use."""
        return self.predictions[0]

    @property
    def stops_paying_at(self) -> int | None:
        """The number of workers beyond which adding more does not pay; None if it pays up to `most_workers`."""
        return self.scaling.stops_paying_at

    @property
    def most_workers(self) -> int:
        """The largest number of workers that was tested for whether it pays."""
        return self.scaling.most_workers

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "workers": self.workers,
            "distribute": self.distribute,
            "compress": self.compress,
            "num_steps": self.num_steps,
            "stops_paying_at": self.stops_paying_at,
            "most_workers": self.most_workers,
            "scaling": [row._asdict() for row in self.scaling.rows],
            "reason": self.reason,
            "not_priced": self.not_priced,
            "restart_share": self.restart_share,
            "failures": None if self.failures is None else asdict(self.failures),
            "alone": self.alone.as_dict(),
            "predictions": [prediction.as_dict() for prediction in self.predictions],
        }


def plan(
    profile: Profile | Profiles,
    workers: int,
    cluster: Cluster,
    *,
    allow_lossy: bool = False,
    run: RunSize = UNKNOWN_SIZE,
    simulator: Simulator | None = None,
) -> Plan:
    """Predict every strategy that `workers` workers can use on a cluster, and choose one.

    Args:
        profile: the step of one worker of speed 1; or a function from the number of workers to it, where workers slow
            each other down because they share cores.
        allow_lossy: also consider strategies that change the result (compression, staleness, local steps).
        run: samples per step of all workers together, and of the whole run, where they are known. Strategies whose
            blocks of local steps do not fit into the run `LEAST_EXCHANGES` times are not considered. Where workers
            fail, strategies are compared by their useful work.
        simulator: asked about the few fastest strategies, where formulas do not hold.

    Raises `NoLink` if the cluster's hosts are not joined as any strategy needs.
    """
    if workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    cluster = restricted_to(cluster, workers)
    cluster.place(workers)  # Raises `ConfigError` if the cluster has too few slots.
    worker, failures = worker_profile(profile, workers, run), run.failures
    num_steps = run.num_steps(worker, workers)
    offered = candidates(worker, workers, cluster, num_steps)
    groups = (offered.exact, offered.lossy if allow_lossy else [])
    predicted = (priced(group, worker, workers, cluster, run.global_batch) for group in groups)
    exact, lossy = (_simulate_fastest(group, worker, cluster, simulator) for group in predicted)
    if not exact and not lossy:
        raise NoLink(f"hosts of the cluster '{cluster.name}' are not joined as any strategy needs: give them links.")
    if failures is not None:
        exact, lossy = ([_under(failures, each, worker, cluster) for each in group] for group in (exact, lossy))
    chosen = choose(exact, lossy)
    restart_share = None
    if failures is not None and workers > 1:
        restart_share = restart_goodput(chosen.strategy, worker, workers, cluster, failures).share
    # By speed, but for the chosen one: an exact strategy may be preferred to a lossy one that is a little faster.
    others = sorted((other for other in (*exact, *lossy) if other is not chosen), key=_useful_step_s)
    # One worker would train on the fastest rank's host, and with the whole global batch if there is one.
    single = slowed(worker_profile(profile, 1, run), least_slowness(cluster, workers))
    alone = price(AllReduce(), single, 1, Cluster())
    result = Plan(
        workers=workers,
        alone=alone,
        predictions=(chosen, *others),
        distribute=chosen.samples_per_s * chosen.goodput > alone.samples_per_s,
        compress=_compress([chosen, *others]) if allow_lossy else None,
        num_steps=num_steps,
        scaling=predict_scaling(profile, cluster, allow_lossy, run, chosen, alone),
        not_priced=offered.not_priced,
        reason="",
        failures=failures,
        restart_share=restart_share,
    )
    return replace(result, reason=describe_plan(result))


def choose(exact: Sequence[Prediction], lossy: Sequence[Prediction]) -> Prediction:
    """Choose an exact strategy, unless lossy ones are `GAIN` times as fast; then the preferred one of the fastest.

    There must be a prediction in one of the two.
    """
    fastest_s = min(map(_useful_step_s, exact), default=inf)
    # Within the error of predictions, the simpler family is the safer choice.
    tied = [prediction for prediction in exact if prediction.useful_step_s <= TIE * fastest_s]
    best = min(tied, key=lambda prediction: prediction.strategy.preference, default=None)
    faster = [each for each in lossy if best is None or each.useful_step_s * GAIN <= best.useful_step_s]
    if best is not None and not faster:
        return best
    fastest_s = min(map(_useful_step_s, faster))
    near = [prediction for prediction in faster if prediction.useful_step_s <= NEAR * fastest_s]
    # Within a family, the one that sends most compresses least, and so probably loses least accuracy.
    return min(near, key=lambda prediction: (prediction.strategy.preference, -prediction.bytes_per_step))


def _step_s(prediction: Prediction) -> float:
    return prediction.step_s


def _useful_step_s(prediction: Prediction) -> float:
    return prediction.useful_step_s


def _under(failures: FailureRates, prediction: Prediction, worker: Profile, cluster: Cluster) -> Prediction:
    """Return a prediction with the share of useful work under failures."""
    if prediction.workers == 1:
        return prediction
    # A run that cannot go on without a lost worker is started again from a checkpoint.
    predict = restart_goodput if prediction.strategy.num_dedicated_servers else goodput
    return replace(
        prediction, goodput=predict(prediction.strategy, worker, prediction.workers, cluster, failures).share
    )


def _simulate_fastest(
    predictions: list[Prediction], profile: Profile, cluster: Cluster, simulator: Simulator | None
) -> list[Prediction]:
    """Simulate the fastest prediction until the fastest is a simulated one, where formulas do not hold."""
    # A simulated step may be longer than its formula, and another candidate is then the fastest: go on until that one
    # has been simulated. Candidates that are slow by formula never are.
    num_simulated = 0
    while simulator is not None and predictions and num_simulated < _MAX_SIMULATED:
        fastest = min(predictions, key=_step_s)
        if fastest.simulated:
            break
        # Replaced where it was: of equally fast and preferred predictions, `choose` takes the first.
        index = predictions.index(fastest)
        del predictions[index]
        with suppress(NoLink):  # It would send between hosts that are not joined, so it cannot be used.
            simulated = price(fastest.strategy, profile, fastest.workers, cluster, simulator)
            predictions.insert(index, replace(simulated, total_samples=fastest.total_samples))
            num_simulated += 1
            if not simulated.simulated:  # The formula holds for this placement, and so for all strategies.
                break
    return predictions


def _compress(predictions: Sequence[Prediction]) -> bool:
    """Whether a codec makes the mean of gradients `GAIN` times as fast, or is in the chosen strategy, the first."""
    compressed, plain = fastest_means(predictions)
    gains = compressed is not None and (plain is None or compressed.step_s * GAIN <= plain.step_s)
    return predictions[0].strategy.codec is not None or gains
