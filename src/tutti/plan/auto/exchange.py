"""An exchange that begins as all-reduce, and becomes what the planner finds best."""

import statistics
import sys
from dataclasses import replace
from typing import Any
from weakref import ref

import torch

from tutti.cluster import Cluster, format_time
from tutti.collectives import gather_json, share_json
from tutti.events import EXCHANGE, PULL
from tutti.plan.auto.watch import Step, Watch, profile_of, summary
from tutti.plan.candidates import exact, lossy
from tutti.plan.choose import choose
from tutti.plan.cost import Prediction, price
from tutti.plan.network import cluster_with, measure_network
from tutti.plan.scaling import priced
from tutti.replica import HookedReplica
from tutti.replica.left_behind import LeftBehind
from tutti.strategies import AllReduce, Auto, Exchange, Poseidon, Strategy, parse
from tutti.strategies.averaging.strategy import Blocks
from tutti.strategies.base import Planned
from tutti.strategies.poseidon import Shape
from tutti.strategies.poseidon.speed import product_speed
from tutti.transports import Transport

FIRST_STEPS = 3
"""Before ranks agree on how many more are timed: the first may do more than others."""
WARM_UP_S, MOST_STEPS = 0.5, 20
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

    def __init__(self, replica: HookedReplica, transport: Transport, strategy: Auto) -> None:
        super().__init__(replica, transport)
        self._strategy = strategy
        self._number, self._sent_by_others = 0, 0
        self._steps: list[Step] = []
        self._walls: list[float] = []
        self._beside: list[float] = []
        """Of timed steps, what was neither computing nor waiting."""
        self._timed, self._wanted, self._wrong = 0, FIRST_STEPS, 0
        self._ended_s = transport.now()
        self._waited_s = 0.0
        self._seen: dict[str, Any] = {}
        self.chosen: Strategy = AllReduce()
        self.prediction: Prediction | None = None
        """Of what is at work; None until there is a plan."""
        self._next: Strategy | None = None
        """To be changed to when the next forward pass begins."""
        self._watch: Watch | None = Watch(replica, transport.now)
        self._before: Any = None
        self._attach()
        self._after = replica.optimizer.register_step_post_hook(lambda *_: self._stepped())

    @property
    def planned(self) -> Planned:
        predicted_s = None if self.prediction is None else self.prediction.step_s
        return Planned(
            str(self._next or self.chosen), predicted_s, statistics.median(self._walls) if self._walls else None
        )

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
            strategy, self._next = self._next, None
            self._change_to(strategy)

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
        now_s, waited_s = self.transport.now(), self._waited()
        self._walls.append(now_s - self._ended_s)
        if self._watch is not None:
            self._warm_up(self._watch.take(), waited_s - self._waited_s)
        elif self._timed % LOOK_EVERY == 0:
            self._look()
        self._walls = self._walls[-LOOK_EVERY:]
        self._timed += 1
        self._ended_s, self._waited_s = self.transport.now(), self._waited()

    def _waited(self) -> float:
        totals = self.events.totals
        return totals[EXCHANGE].seconds + totals[PULL].seconds

    def _warm_up(self, step: Step, waited_s: float) -> None:
        step.forward_s = min(step.forward_s, self._walls[-1])
        if self._timed:  # Not the first.
            self._steps.append(step)
            passes_s = step.forward_s + max(step.ready_s.values(), default=0.0)
            self._beside.append(max(0.0, self._walls[-1] - passes_s - waited_s))
        if self._timed + 1 < self._wanted:
            return
        if self._wanted == FIRST_STEPS:
            more = int(WARM_UP_S / max(1e-9, self._walls[-1]))
            self._wanted = share_json(FIRST_STEPS + min(more, MOST_STEPS - FIRST_STEPS), self.transport)
            if self._wanted > FIRST_STEPS:
                return
        assert self._watch is not None
        self._watch.detach()
        self._watch = None
        self._seen = summary(self._steps, statistics.median(self._beside))
        self._steps.clear()
        self._plan()
        self._walls.clear()

    def _look(self) -> None:
        """Compare what steps take with what was predicted; plan again if that was wrong for long. Collective."""
        assert self.prediction is not None
        measured_s = max(gather_json(statistics.median(self._walls), self.transport))
        off = abs(measured_s / self.prediction.step_s - 1) if self.prediction.step_s else 0.0
        self._wrong = self._wrong + 1 if off > TOLERANCE else 0
        if self._wrong >= PATIENCE:
            self._wrong = 0
            self._say(
                f"steps take {format_time(measured_s)}, not {format_time(self.prediction.step_s)} as was predicted: "
                "planning again"
            )
            self._plan(measured_s)

    # Choosing

    def _plan(self, measured_s: float | None = None) -> None:
        """Measure the link, price what there is, and change over if something is clearly faster. Collective."""
        everyones = gather_json(self._seen, self.transport)
        slowest = max(everyones, key=lambda seen: seen["forward_s"] + max(seen["ready_s"].values(), default=0.0))
        cluster = cluster_with(measure_network(self.transport, quickly=True), "measured")
        profile = profile_of(self.replica, slowest, self._speed(slowest))
        workers = self.transport.size
        present = price(self.chosen, profile, workers, cluster)
        best = choose(*(priced(group, profile, workers, cluster) for group in self._candidates(profile)))
        present_s = present.step_s if measured_s is None else measured_s
        changes = best.step_s * GAIN < present_s and best.strategy != self.chosen
        strategy = parse(share_json(str(best.strategy if changes else self.chosen), self.transport))
        if strategy != self.chosen:
            self._next, self.prediction = strategy, price(strategy, profile, workers, cluster)
        else:  # It takes what it takes.
            self.prediction = replace(present, step_s=present_s, computing_s=min(present.computing_s, present_s))
        self._report(cluster, profile.seconds)

    def _speed(self, seen: dict[str, Any]) -> float:
        """Operations a second of rank 0, on all."""
        if self.replica.pace is not None:
            return self.replica.pace.speed
        sizes = {slot.name: slot.tensor for slot in self.replica.slots}
        shapes = [Shape(name, len(sizes[name]), sizes[name].shape[1], rows) for name, rows in seen["rows"].items()]
        first = self.transport.rank == 0
        device = self.replica.slots[0].tensor.device
        return float(share_json(product_speed(shapes, device, self.transport) if first else 0.0, self.transport))

    def _candidates(self, profile: Any) -> list[list[Strategy]]:
        """Exact ones, and lossy ones if they are allowed, of those that leave the optimiser with this rank."""
        kinds = (AllReduce, Poseidon, Blocks)
        groups = [exact(profile), lossy() if self._strategy.lossy else iter(())]
        return [[each for each in group if isinstance(each, kinds)] for group in groups]

    def _report(self, cluster: Cluster, alone_s: float) -> None:
        assert self.prediction is not None
        found = self.prediction
        link = cluster.within if cluster.hosts == 1 else cluster.link
        pays = found.step_s < found.workers * alone_s
        doubt = "" if pays else "; one worker alone would be as fast: do not distribute this"
        self._say(
            f"{found.strategy} on {link}: {format_time(found.step_s)} a step predicted, of which "
            f"{format_time(found.exposed_s)} communication{doubt}"
        )

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

    def dissent(self) -> None:
        self._inner.dissent()

    def finish(self) -> None:
        self._inner.finish()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.detach()
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


class _Before(LeftBehind):
    """Tells an exchange that a forward pass begins in which its model trains."""

    def __init__(self, exchange: AutoExchange) -> None:
        self._exchange = ref(exchange)

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and (exchange := self._exchange()) is not None:
            exchange.change_if_due()
