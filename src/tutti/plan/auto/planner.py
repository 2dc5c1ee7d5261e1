"""`JobPlanner`: chooses a strategy for a running job from the recorded steps of all its ranks."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from tutti.cluster import Cluster, format_time
from tutti.collectives import broadcast_json
from tutti.cost import Profile
from tutti.plan.auto.step_recorder import profile_from_summary
from tutti.plan.candidates import candidates, least_steps
from tutti.plan.choose import choose
from tutti.plan.network import cluster_with, measure_network
from tutti.plan.prediction import Prediction, price
from tutti.plan.scaling import priced
from tutti.replica import HookedReplica
from tutti.strategies import Exchange, Strategy, parse
from tutti.strategies.poseidon import LayerShape
from tutti.strategies.poseidon.speed import product_speed
from tutti.transports import Transport

GAIN = 1.05
"""Another strategy must be predicted to be this many times as fast as the one in use."""


class Choice(NamedTuple):
    """The planner's decision: the strategy to use from now on."""

    prediction: Prediction
    """The prediction of the strategy to use: another one, or the one in use."""
    switch: bool
    """Whether the strategy to use is another one than the one in use."""
    present: Prediction | None
    """With a switch: the strategy in use, with its measured step; None if that is not known."""
    message: str
    """The text that rank 0 prints."""


class JobPlanner:
    """Measures the links between a job's ranks, predicts every strategy, and chooses. The same on every rank."""

    def __init__(self, replica: HookedReplica, transport: Transport, lossy: bool) -> None:
        self._replica, self._transport, self._lossy = replica, transport, lossy

    def choose(
        self,
        summaries: list[dict[str, Any]],
        strategy: Strategy,
        exchange: Exchange,
        prediction: Prediction | None,
        refused: Collection[Strategy],
    ) -> Choice:
        """Choose from the summaries of all ranks' recorded steps. Collective.

        Predictions are compared with predictions. If the strategy in use was chosen by one, its measured step shows how
        far predictions are off here, and all are scaled by that factor.

        Args:
            strategy: the strategy in use, and `exchange` its exchange.
            prediction: its prediction, if it was planned.
            refused: strategies that must not be chosen.
        """
        # All ranks wait for the one whose passes take longest. Backward ends with its last gradient.
        slowest = max(summaries, key=lambda seen: seen["forward_s"] + max(seen["ready_s"].values(), default=0.0))
        # Quickly, because all ranks stop training for it.
        network = measure_network(self._transport, quickly=True)
        cluster = cluster_with(network, "measured")
        profile = profile_from_summary(self._replica, slowest, self._flops(slowest))
        workers = self._transport.size
        present = price(strategy, profile, workers, cluster, exchange=exchange)
        groups = self._candidates(profile, cluster, refused)
        best = choose(*(priced(group, profile, workers, cluster) for group in groups))
        # Measurements differ a little between ranks: rank 0 decides for all.
        text = broadcast_json(str(best.strategy) if best.step_s * GAIN < present.step_s else "", self._transport)
        # Each rank makes its strategy from the text, so that all have the same even if they would choose differently.
        chosen = price(parse(text), profile, workers, cluster) if text else present
        # Measured step of the strategy in use, relative to its prediction.
        factor = max(seen["wall_s"] for seen in summaries) / present.step_s if present.step_s else 0.0
        if prediction is not None and factor:
            chosen = _scaled(chosen, factor)
        # `_judge` compares the new strategy with this measured step, and not with a prediction.
        measured = _scaled(present, factor) if text and factor else None
        doubts = [*network["doubts"], *(seen["doubt"] for seen in summaries if seen["doubt"])]
        message = ". ".join([_describe(chosen, cluster, profile.seconds), *doubts[:1]])
        return Choice(chosen, bool(text), measured, message)

    def _flops(self, seen: dict[str, Any]) -> float:
        """Return rank 0's floating-point operations per second, on all ranks."""
        if self._replica.compute_clock is not None:  # In a simulation the speed is given.
            return self._replica.compute_clock.speed
        tensors = {slot.name: slot.tensor for slot in self._replica.slots}
        shapes = [
            LayerShape(name, len(tensors[name]), tensors[name].shape[1], rows) for name, rows in seen["rows"].items()
        ]
        device = self._replica.slots[0].tensor.device
        # Only rank 0 measures: ranks of one host would slow each other down.
        measured = product_speed(shapes, device, self._transport) if self._transport.rank == 0 else 0.0
        return float(broadcast_json(measured, self._transport))

    def _candidates(
        self, profile: Profile, cluster: Cluster, refused: Collection[Strategy]
    ) -> tuple[list[Strategy], list[Strategy]]:
        """Return exact candidates, and lossy ones if allowed; only synchronous ones can be switched between steps."""
        offered = candidates(profile, self._transport.size, cluster)
        exact, lossy = (
            [strategy for strategy in group if strategy.synchronous and strategy not in refused]
            for group in (offered.exact, offered.lossy if self._lossy else [])
        )
        return exact, lossy


def _scaled(prediction: Prediction, factor: float) -> Prediction:
    """Return the prediction with a step `factor` times as long; what is not computation is communication."""
    step_s = factor * prediction.step_s
    computing_s = min(prediction.computing_s, step_s)
    return replace(prediction, step_s=step_s, computing_s=computing_s, exposed_s=step_s - computing_s)


def _describe(prediction: Prediction, cluster: Cluster, alone_s: float) -> str:
    link = cluster.within if cluster.hosts == 1 else cluster.link
    # In one step all workers train `workers` batches, for which one worker would take as many steps.
    pays = prediction.step_s < prediction.workers * alone_s
    doubt = "" if pays else "; one worker alone would be as fast: do not distribute this"
    # The length of a running job is not known here, so the user has to judge.
    needed = least_steps(prediction.strategy)
    length = f"; for runs of {needed} steps or more" if needed > 1 else ""
    return (
        f"{prediction.strategy} on {link}: {format_time(prediction.step_s)} a step predicted, of which "
        f"{format_time(prediction.exposed_s)} communication{length}{doubt}"
    )
