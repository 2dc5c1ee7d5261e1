"""`StepRecorder`: times the forward pass and the gradients of a model as it trains, by hooks.

How it works. Hooks of the model, its parameters and its layers with factors note moments of the clock: the beginning
and end of each forward pass, and the arrival of each gradient. `take` turns the moments since the last call into
seconds. On a GPU moments are events on its stream; `take` waits for them. Hooks hold weak references and do nothing
once the recorder is gone; a copy of the model has none of them.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakMethod, ref

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
class RecordedStep:
    """The recorded times of one step, in seconds."""

    forward_s: float = 0.0
    """Seconds of all forward passes."""
    ready_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the end of forward to each gradient, by parameter."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of the inputs of layers that have factors, by parameter."""
    num_samples: int = 0

    @property
    def complete(self) -> bool:
        """Whether a forward and a backward pass were recorded: a compiled model may call no hooks."""
        return bool(self.ready_s)


class TransportClock(Clock):
    """The clock of a rank's transport: virtual time in a simulation."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def now(self) -> Moment:
        return self._transport.now()

    def seconds(self, earlier: Moment, later: Moment) -> float:
        return float(later - earlier)

    def settle(self) -> None:
        pass


def clock_for(replica: Replica, transport: Transport) -> Clock:
    """Return the clock for a replica's device: the GPU's stream, which runs behind its rank, or the rank's own."""
    device = replica.slots[0].tensor.device
    return clock_of(device) if device.type == "cuda" else TransportClock(transport)


def factorable_layers(replica: Replica) -> dict[str, nn.Module]:
    """Return the layers that have factors, by parameter. Call it before an exchange takes over any of them."""
    names = {id(slot.tensor): slot.name for slot in replica.slots}
    return {names[id(module.weight)]: module for module in factorable(replica.model) if id(module.weight) in names}


class StepRecorder:
    """Records the steps of a model until it is detached."""

    def __init__(self, replica: HookedReplica, clock: Clock, layers: dict[str, nn.Module]) -> None:
        self._replica, self._clock = replica, clock
        self._reset()
        self._handles: list[Any] = [
            replica.model.register_forward_pre_hook(_RecorderHook(self.began), with_kwargs=True),
            replica.model.register_forward_hook(_RecorderHook(self.ended)),
        ]
        for slot in replica.slots:
            self._handles.append(slot.tensor.register_post_accumulate_grad_hook(self._hook(slot.name)))
        for name, module in layers.items():
            self._handles.append(module.register_forward_pre_hook(_RecorderHook(self.rows, name)))
        # A gradient that is sent as factors is never accumulated, so its hook does not run: the replica calls this.
        replica.on_caught = self.arrived

    def _reset(self) -> None:
        self._step = RecordedStep()
        self._began: Moment = None
        self._passes: list[tuple[Moment, Moment]] = []
        self._arrived: dict[str, tuple[Moment, Moment]] = {}
        """The end of forward and the arrival of the gradient, by parameter."""

    def began(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._began = self._clock.now()
        self._step.num_samples += num_rows(args or kwargs)

    def ended(self, *_: Any) -> None:
        if self._began is not None:
            self._passes.append((self._began, self._clock.now()))

    def rows(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        # All leading dimensions together (samples, positions): the weight is [out, in], the input [..., in].
        number = args[0].numel() // module.get_parameter("weight").shape[1] if args else 0
        self._step.rows[name] = self._step.rows.get(name, 0) + number

    def arrived(self, name: str) -> None:
        # With several backward passes in a step, the last arrival counts: only then can the gradient be exchanged.
        if self._passes:
            self._arrived[name] = self._passes[-1][1], self._clock.now()

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        # Weak: the parameter holds the hook, and the recorder should not live as long as the model.
        weak_self = ref(self)

        def arrived(_: Tensor) -> None:
            if (recorder := weak_self()) is not None:
                recorder.arrived(name)

        return arrived

    def take(self) -> RecordedStep:
        """Return what was recorded since the last call; waits until the GPU has computed it."""
        self._clock.settle()  # GPU events have no time before the GPU has reached them.
        step, seconds = self._step, self._clock.seconds
        step.forward_s = sum(seconds(start, end) for start, end in self._passes)
        step.ready_s = {name: seconds(start, end) for name, (start, end) in self._arrived.items()}
        self._reset()
        return step

    def detach(self) -> None:
        self._replica.on_caught = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _RecorderHook(OwnedHook):
    """Calls a method of a recorder, if it still exists, in passes that train."""

    def __init__(self, method: Callable[..., None], *args: str) -> None:
        self._method, self._args = WeakMethod(method), args

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or (method := self._method()) is None:
            return
        method(*self._args, *args)


def summarise(steps: list[RecordedStep], step_s: float) -> dict[str, Any]:
    """Return medians over steps as JSON types; `step_s` is what a step takes besides forward and backward."""
    # A dict as an ordered set: gradients in the order in which they first came. The median is over steps that had one.
    names = {name: None for step in steps for name in step.ready_s}
    return {
        "forward_s": statistics.median(step.forward_s for step in steps),
        "ready_s": {
            name: statistics.median(step.ready_s[name] for step in steps if name in step.ready_s) for name in names
        },
        "rows": steps[-1].rows,
        "num_samples": max(1, steps[-1].num_samples),
        "step_s": step_s,
    }


def profile_from_summary(replica: Replica, seen: dict[str, Any], flops: float) -> Profile:
    """Make a profile from what `summarise` returned on some rank; `flops` are operations per second."""
    sizes = {slot.name: slot.tensor for slot in replica.slots}
    backward_s = max(seen["ready_s"].values(), default=0.0)
    # A parameter without a gradient counts as ready at the end of backward.
    ready = {name: seen["ready_s"].get(name, backward_s) for name in sizes}
    gradients = tuple(
        Gradient(name=name, shape=tuple(sizes[name].shape), num_bytes=sizes[name].nbytes, ready_s=ready[name])
        for name in sorted(sizes, key=lambda name: ready[name])
    )
    # Only layers with factors were recorded: all operations that fit into the time are shared among them.
    layers = [_layer(name, rows, sizes[name], ready[name]) for name, rows in seen["rows"].items() if rows]
    # `flops` counts a multiplication and its addition as two operations, and `work` as one.
    scale = flops / 2 * (seen["forward_s"] + backward_s) / (sum(layer.work for layer in layers) or 1.0)
    layers = [replace(layer, work=scale * layer.work) for layer in layers]
    return Profile(
        num_samples=seen["num_samples"], layers=tuple(layers), gradients=gradients, forward_s=seen["forward_s"],
        backward_s=backward_s, step_s=seen["step_s"], peak_bytes=0,
    )  # fmt: skip


def _layer(name: str, rows: int, weight: Tensor, ready_s: float) -> LayerProfile:
    """Return the profile of a layer with factors, as far as cost formulas read it; other fields are 0."""
    # Work: forward, the gradient by the weight and the one by the input are a product of the same size each.
    return LayerProfile(
        name=name.removesuffix("weight").removesuffix("."), kind="", forward_s=0.0, backward_s=0.0,
        gradient_bytes=weight.nbytes, ready_s=ready_s, activation_bytes=0, rows=rows,
        work=3.0 * rows * weight.numel(), depth=1.0,
    )  # fmt: skip
