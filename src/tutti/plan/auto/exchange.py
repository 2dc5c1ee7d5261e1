"""An exchange that begins as all-reduce, and becomes what the planner finds best."""

import statistics
import sys
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch

from tutti.cluster import Cluster, format_time
from tutti.collectives import all_gather_json, broadcast_json
from tutti.cost import Profile
from tutti.events import EXCHANGE, PULL
from tutti.plan.auto.status import PlanStatus
from tutti.plan.auto.survey import Survey
from tutti.plan.auto.watch import layers_in, profile_of
from tutti.plan.candidates import candidates
from tutti.plan.choose import choose
from tutti.plan.network import cluster_with, measure_network
from tutti.plan.prediction import Prediction, price
from tutti.plan.scaling import priced
from tutti.replica import HookedReplica
from tutti.replica.owned_hooks import OwnedHook
from tutti.strategies import AllReduce, Exchange, Poseidon, Strategy, parse
from tutti.strategies.averaging.strategy import LocalSteps
from tutti.strategies.poseidon import LayerShape
from tutti.strategies.poseidon.cost import communication_cost
from tutti.strategies.poseidon.exchange import PoseidonExchange
from tutti.strategies.poseidon.speed import product_speed
from tutti.transports import Transport

TRIAL_STEPS, LOST = 12, 1.02
"""After so many steps, or two blocks, ranks go back if they take so many times as long as under what was before."""
LOOK_EVERY = 50
"""Steps between looks at whether the prediction holds."""
TOLERANCE = 0.25
"""By how much steps may take longer, or shorter, than predicted."""
PATIENCE = 2
"""Looks in a row that find them so, before ranks plan again."""
GAIN = 1.05
"""By how much something else must be faster to be changed to."""


class AutoExchange(Exchange):
    """Steps are timed from outside: the replica talks to whichever exchange is at work."""

    replica: HookedReplica

    def __init__(self, replica: HookedReplica, transport: Transport, lossy: bool) -> None:
        super().__init__(replica, transport)
        self._lossy = lossy
        self._number, self._sent_by_others = 0, 0
        self._walls: list[float] = []
        self._timed, self._wrong = 0, 0
        self._ended_s = transport.now()
        self._waited_s = 0.0
        self.chosen: Strategy = AllReduce()
        """What is at work."""
        self.prediction: Prediction | None = None
        """Of what is at work; None while there is no plan."""
        self._next: tuple[Prediction, str] | None = None
        """To be changed to when the next forward pass begins, and what is said then."""
        self._rival: Prediction | None = None
        """What was at work before, as fast as it was, while what came after it is on trial."""
        self._refused: set[Strategy] = set()
        """What was slower, whatever formulas say."""
        self._layers = layers_in(replica)
        self._survey: Survey | None = Survey(replica, transport, self._layers)
        self._before: Any = None
        self._attach()
        self._after = replica.optimizer.register_step_post_hook(lambda *_: self._stepped())

    def metrics(self) -> dict[str, Any]:
        return {**self._inner.metrics(), "planned": self.planned}

    @property
    def planned(self) -> PlanStatus:
        predicted_s = None if self.prediction is None else self.prediction.step_s
        settled = self._survey is None and self._next is None and self._rival is None
        step_s = statistics.median(self._walls) if self._walls else None
        return PlanStatus(str(self.chosen), predicted_s, step_s, settled)

    def _attach(self) -> None:
        self._number += 1
        self._channel = self.transport.channel(f"plan {self._number}")
        self._inner = self.chosen.attach(self.replica, self._channel)
        self._inner.events = self.events
        # The last of the model's hooks: when it is called, those that go with the old exchange have been.
        if self._before is not None:
            self._before.remove()
        self._before = self.replica.model.register_forward_pre_hook(_Before(self))

    def change_if_due(self) -> None:
        """Between two steps, and not in a hook of the optimiser, since hooks of the optimiser change."""
        if self._next is not None:
            (prediction, text), self._next = self._next, None
            self._change_to(prediction.strategy)
            self.prediction = prediction
            self._walls.clear()
            self._say(text)

    def _change_to(self, strategy: Strategy) -> None:
        """Between two steps; everybody does. Collective."""
        self._inner.finish()
        self._inner.close()
        self._sent_by_others += self._inner.bytes_sent
        self.replica.detach()
        self._channel.close()
        self.chosen = strategy
        self._attach()

    # Timing

    def _stepped(self) -> None:
        if self._survey is not None:
            self._survey.settle()
        now_s, waited_s = self.transport.now(), self._waited()
        self._walls = [*self._walls, now_s - self._ended_s][-LOOK_EVERY:]
        self._timed += 1
        if self._next is not None:  # A whole step long no forward pass was seen to begin.
            self._stay()
        elif self._survey is not None:
            if self._survey.stepped(self._walls[-1], waited_s - self._waited_s):
                self._surveyed(self._survey)
        elif self._rival is not None and len(self._walls) >= _trial(self.chosen):
            self._judge(self._rival)
        elif self.prediction is not None and self._rival is None and self._timed % LOOK_EVERY == 0:
            self._look(self.prediction)
        self._ended_s, self._waited_s = self.transport.now(), self._waited()

    def _waited(self) -> float:
        totals = self.events.totals
        return totals[EXCHANGE].seconds + totals[PULL].seconds

    def _judge(self, rival: Prediction) -> None:
        """End the trial of what is at work: back to what was before, if that was faster. Collective."""
        every = statistics.fmean if isinstance(self.chosen, LocalSteps) else statistics.median
        measured_s = max(all_gather_json(every(self._walls[2:]), self.transport))  # In the first it may still settle.
        self._rival = None
        if measured_s <= LOST * rival.step_s:
            return
        self._refused.add(self.chosen)
        self._next = (
            rival,
            f"{self.chosen} takes {format_time(measured_s)} a step, more than {rival.strategy} did: back to it, at "
            f"{format_time(rival.step_s)} a step",
        )

    def _look(self, prediction: Prediction) -> None:
        """Compare what steps take with what was predicted; watch some again if that was wrong for long. Collective."""
        measured_s = max(all_gather_json(statistics.median(self._walls), self.transport))
        off = abs(measured_s / prediction.step_s - 1) if prediction.step_s else 0.0
        self._wrong = self._wrong + 1 if off > TOLERANCE else 0
        if self._wrong >= PATIENCE:
            self._wrong = 0
            self._refused.clear()  # Things have changed.
            self._say(
                f"steps take {format_time(measured_s)}, not {format_time(prediction.step_s)} as was predicted: "
                "planning again"
            )
            self._survey = Survey(self.replica, self.transport, self._layers)

    def _surveyed(self, survey: Survey) -> None:
        """Enough steps were watched: plan by them, if all ranks could see theirs. Collective."""
        survey.end()
        self._survey = None
        everyones = all_gather_json(survey.seen, self.transport)
        if None in everyones:
            self._stay()
        else:
            self._plan(everyones)
            self._walls.clear()

    def _stay(self) -> None:
        """With what is at work, without a plan: what cannot be seen can be neither timed nor changed between steps."""
        self._next = self._rival = self.prediction = None
        self._say(
            f"the model's forward passes cannot be seen, so it stays with {self.chosen}. If it is compiled, give "
            "tutti.distribute what torch.compile returned"
        )

    # Choosing

    def _plan(self, everyones: list[dict[str, Any]]) -> None:
        """Measure the link, price what there is, and change over if something is clearly faster. Collective.

        Formulas are compared with formulas. What is at work has shown how far they are off, if it was chosen by them,
        and by that much they are all taken to be.
        """
        slowest = max(everyones, key=lambda seen: seen["forward_s"] + max(seen["ready_s"].values(), default=0.0))
        cluster = cluster_with(measure_network(self.transport, quickly=True), "measured")
        profile = profile_of(self.replica, slowest, self._speed(slowest))
        workers = self.transport.size
        present = self._present(profile, cluster)
        best = choose(*(priced(group, profile, workers, cluster) for group in self._candidates(profile, cluster)))
        text = broadcast_json(str(best.strategy) if best.step_s * GAIN < present.step_s else "", self.transport)
        found = price(parse(text), profile, workers, cluster) if text else present
        times = max(seen["wall_s"] for seen in everyones) / present.step_s if present.step_s else 0.0
        if self.prediction is not None and times:
            found = _scaled(found, times)
        said = _in_words(found, cluster, profile.seconds)
        if text:
            self._next = found, said
            self._rival = _scaled(present, times) if times else None
        else:
            self.prediction = found
            self._say(said)

    def _present(self, profile: Profile, cluster: Cluster) -> Prediction:
        """What is at work: Poseidon goes as it decided when it began, perhaps with other batches."""
        inner = self._inner
        cost = None
        if isinstance(inner, PoseidonExchange) and isinstance(self.chosen, Poseidon):
            cost = partial(communication_cost, self.chosen, methods=inner.methods)
        return price(self.chosen, profile, self.transport.size, cluster, cost=cost)

    def _speed(self, seen: dict[str, Any]) -> float:
        """Operations a second of rank 0, on all."""
        if self.replica.compute_clock is not None:
            return self.replica.compute_clock.speed
        sizes = {slot.name: slot.tensor for slot in self.replica.slots}
        shapes = [LayerShape(name, len(sizes[name]), sizes[name].shape[1], rows) for name, rows in seen["rows"].items()]
        first = self.transport.rank == 0
        device = self.replica.slots[0].tensor.device
        return float(broadcast_json(product_speed(shapes, device, self.transport) if first else 0.0, self.transport))

    def _candidates(self, profile: Profile, cluster: Cluster) -> list[list[Strategy]]:
        """Return exact candidates, and lossy ones if allowed; only synchronous ones can be changed between steps."""
        offered = candidates(profile, self.transport.size, cluster)
        groups = [offered.exact, offered.lossy if self._lossy else []]
        return [[each for each in group if each.synchronous and each not in self._refused] for group in groups]

    def _say(self, text: str) -> None:
        if self.transport.rank == 0:
            print(f"auto: {text}", file=sys.stderr)

    # What the exchange at work does

    @property
    def bytes_sent(self) -> int:
        return self._sent_by_others + self._inner.bytes_sent

    def before_step(self) -> None:
        return None

    def after_step(self) -> None:
        return None

    def consensus(self) -> None:
        self._inner.consensus()

    def restore_local(self) -> None:
        self._inner.restore_local()

    def finish(self) -> None:
        self._inner.finish()

    def close(self) -> None:
        if self._survey is not None:
            self._survey.end()
        self._before.remove()
        self._after.remove()
        self._inner.close()

    def state_dict(self) -> dict[str, Any]:
        return {"strategy": str(self.chosen), "state": self._inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:  # Of one that trained alone.
            return
        if (strategy := parse(state["strategy"])) != self.chosen:
            self._change_to(strategy)
        self._inner.load_state_dict(state["state"])


def _trial(strategy: Strategy) -> int:
    """Steps after which it can be judged."""
    every = getattr(strategy, "every", 1)
    return min(LOOK_EVERY, max(TRIAL_STEPS, 2 * every + 2 if isinstance(every, int) else TRIAL_STEPS))


def _scaled(prediction: Prediction, times: float) -> Prediction:
    """The same if a step takes so many times as long; what is not computing is communication."""
    step_s = times * prediction.step_s
    computing_s = min(prediction.computing_s, step_s)
    return replace(prediction, step_s=step_s, computing_s=computing_s, exposed_s=step_s - computing_s)


def _in_words(found: Prediction, cluster: Cluster, alone_s: float) -> str:
    link = cluster.within if cluster.hosts == 1 else cluster.link
    pays = found.step_s < found.workers * alone_s
    doubt = "" if pays else "; one worker alone would be as fast: do not distribute this"
    return (
        f"{found.strategy} on {link}: {format_time(found.step_s)} a step predicted, of which "
        f"{format_time(found.exposed_s)} communication{doubt}"
    )


class _Before(OwnedHook):
    """Tells an exchange that a forward pass begins in which its model trains."""

    def __init__(self, exchange: AutoExchange) -> None:
        self._exchange = ref(exchange)

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and (exchange := self._exchange()) is not None:
            exchange.change_if_due()
