"""Times the steps of a job as it trains, as a profile would be measured."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from tutti.cost import Gradient, LayerProfile, Profile
from tutti.plan.profile.clock import Clock, Moment, clock_of
from tutti.replica import HookedReplica, Replica
from tutti.replica.factors import factorable
from tutti.replica.owned_hooks import OwnedHook
from tutti.replica.samples import num_rows
from tutti.transports import Transport


@dataclass
class Step:
    """What was seen of one, in seconds."""

    forward_s: float = 0.0
    ready_s: dict[str, float] = field(default_factory=dict)
    """After the end of forward, by parameter."""
    rows: dict[str, int] = field(default_factory=dict)
    """Of the inputs of layers that have factors, by parameter."""
    num_samples: int = 0

    @property
    def seen(self) -> bool:
        """Whether it went forward and back before anybody's eyes: a model that is compiled may call no hooks."""
        return bool(self.ready_s)


class TransportClock(Clock):
    """A rank's own, in virtual time if that is where it trains."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def now(self) -> Moment:
        return self._transport.now()

    def seconds(self, earlier: Moment, later: Moment) -> float:
        return float(later - earlier)

    def settle(self) -> None:
        pass


def clock_for(replica: Replica, transport: Transport) -> Clock:
    """The clock that a replica computes by: a GPU's, which works behind its rank, or the rank's."""
    device = replica.slots[0].tensor.device
    return clock_of(device) if device.type == "cuda" else TransportClock(transport)


def layers_in(replica: Replica) -> dict[str, nn.Module]:
    """Those that have factors, by parameter; to be asked before an exchange catches any."""
    names = {id(slot.tensor): slot.name for slot in replica.slots}
    return {names[id(module.weight)]: module for module in factorable(replica.model) if id(module.weight) in names}


class Watch:
    """Follows a model from its forward pass to its gradients, until it is detached."""

    def __init__(self, replica: HookedReplica, clock: Clock, layers: dict[str, nn.Module]) -> None:
        self._replica, self._clock = replica, clock
        self._forget()
        self._handles: list[Any] = [
            replica.model.register_forward_pre_hook(_Told(self, "began"), with_kwargs=True),
            replica.model.register_forward_hook(_Told(self, "ended")),
        ]
        for slot in replica.slots:
            self._handles.append(slot.tensor.register_post_accumulate_grad_hook(self._hook(slot.name)))
        for name, module in layers.items():
            self._handles.append(module.register_forward_pre_hook(_Told(self, "rows", name)))
        replica.on_caught = self.arrived

    def _forget(self) -> None:
        self._step = Step()
        self._began: Moment = None
        self._passes: list[tuple[Moment, Moment]] = []
        self._arrived: dict[str, tuple[Moment, Moment]] = {}
        """When forward had ended, and when the gradient was there."""

    def began(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._began = self._clock.now()
        self._step.num_samples += num_rows(args or kwargs)

    def ended(self, *_: Any) -> None:
        if self._began is not None:
            self._passes.append((self._began, self._clock.now()))

    def rows(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        number = args[0].numel() // module.get_parameter("weight").shape[1] if args else 0
        self._step.rows[name] = self._step.rows.get(name, 0) + number

    def arrived(self, name: str) -> None:
        if self._passes:
            self._arrived[name] = self._passes[-1][1], self._clock.now()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        mine = ref(self)

        def arrived(_: Tensor) -> None:
            if (watch := mine()) is not None:
                watch.arrived(name)

        return arrived

    def take(self) -> Step:
        """What was seen since this was last asked; waits until all that was asked of a GPU is done."""
        self._clock.settle()
        step, seconds = self._step, self._clock.seconds
        step.forward_s = sum(seconds(*both) for both in self._passes)
        step.ready_s = {name: seconds(*both) for name, both in self._arrived.items()}
        self._forget()
        return step

    def detach(self) -> None:
        self._replica.on_caught = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Told(OwnedHook):
    """A hook that tells a watch, if it still watches, of passes that train."""

    def __init__(self, watch: Watch, what: str, *about: str) -> None:
        self._watch, self._what, self._about = ref(watch), what, about

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or (watch := self._watch()) is None:
            return
        getattr(watch, self._what)(*self._about, *args)


def summary(steps: list[Step], step_s: float) -> dict[str, Any]:
    """Medians over steps, as something that can be sent; `step_s` is all that a step takes beside its two passes."""
    names = {name: None for step in steps for name in step.ready_s}
    return {
        "forward_s": statistics.median(step.forward_s for step in steps),
        "ready_s": {name: statistics.median(step.ready_s.get(name, 0.0) for step in steps) for name in names},
        "rows": steps[-1].rows,
        "num_samples": max(1, steps[-1].num_samples),
        "step_s": step_s,
    }


def profile_of(replica: Replica, seen: dict[str, Any], speed: float) -> Profile:
    """A profile from what `summary` said, on whichever rank; `speed` is operations a second."""
    sizes = {slot.name: slot.tensor for slot in replica.slots}
    backward_s = max(seen["ready_s"].values(), default=0.0)
    ready = {name: seen["ready_s"].get(name, backward_s) for name in sizes}  # Without a gradient: at the end.
    gradients = tuple(
        Gradient(name=name, shape=tuple(sizes[name].shape), num_bytes=sizes[name].nbytes, ready_s=ready[name])
        for name in sorted(sizes, key=lambda name: ready[name])
    )
    # Only some layers were seen: operations are as many as the time would hold, shared among those.
    layers = [_layer(name, rows, sizes[name], ready[name]) for name, rows in seen["rows"].items() if rows]
    scale = speed / 2 * (seen["forward_s"] + backward_s) / (sum(layer.work for layer in layers) or 1.0)
    layers = [replace(layer, work=scale * layer.work) for layer in layers]
    return Profile(
        num_samples=seen["num_samples"], layers=tuple(layers), gradients=gradients, forward_s=seen["forward_s"],
        backward_s=backward_s, step_s=seen["step_s"], peak_bytes=0,
    )  # fmt: skip


def _layer(name: str, rows: int, weight: Tensor, ready_s: float) -> LayerProfile:
    """Of a layer that has factors, as much as a price needs to know."""
    return LayerProfile(
        name=name.removesuffix("weight").removesuffix("."), kind="", forward_s=0.0, backward_s=0.0,
        gradient_bytes=weight.nbytes, ready_s=ready_s, activation_bytes=0, rows=rows,
        work=3.0 * rows * weight.numel(), depth=1.0,
    )  # fmt: skip
