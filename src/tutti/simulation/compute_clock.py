"""`ComputeClock`: advances a simulated rank's clock as its model computes forward, backward and steps.

How it works
------------
Real gradients are computed in real time, which does not count. Hooks on the model advance the virtual clock instead:

- after the forward pass, by the time of a forward pass of so many samples;
- when backward reaches the output of that pass, the time of the backward pass is noted (`backward`);
- at each parameter's gradient, by that parameter's share of it, so that exchanges begin while backward still runs;
- before a step of the optimiser, by the time of a step.

These hooks are registered before those of the replica, so the time of a gradient has passed when the replica hands it
over. All hooks run in the rank's thread: ranks compute on the CPU, where backward runs in the thread that calls it.

`_in_backward` separates passes: the first gradient sets it, and the next `backward` that finds it set starts anew.
Several outputs may be summed before one backward; `backward` calls without a gradient between them add up.

Jitter: each forward pass draws a factor, which holds for its backward pass and step.

Hooks refer to the clock weakly, and a copy of the model does not take them along (`OwnedHook`).
"""

import random
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tutti.replica.owned_hooks import OwnedHook
from tutti.replica.samples import num_rows
from tutti.simulation import operator_clock
from tutti.simulation.workload import Workload
from tutti.transports import Transport


class ComputeClock:
    """Advances the virtual clock of one rank as its model computes."""

    def __init__(self, transport: Transport, workload: Workload | None = None) -> None:
        assert transport.cluster is not None
        self._cluster = transport.cluster
        self._elapse = transport.elapse
        self._workload = workload
        self._rng = random.Random(f"{transport.seed} jitter")  # The seed has the rank in it: ranks vary independently.
        self._factor = 1.0
        """Jitter of the current step."""
        self._backward_s = 0.0
        """Seconds of the current backward pass, divided between gradients by their shares."""
        self._in_backward = False
        """Whether a gradient has come since `backward` was last called."""
        self._computed: set[str] = set()
        """Parameters whose time has passed in this backward pass, by caught factors or by the gradient itself."""
        self._handles: list[Any] = []
        self._exits = ExitStack()

    def listen(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Register hooks on a model and its optimiser, and count no operators meanwhile."""
        # Else a process group's operator clock would count the same computation a second time.
        self._exits.enter_context(operator_clock.suspended())
        # Weak: parameters keep their hooks in C++, out of sight of the garbage collector.
        clock_ref = ref(self)

        def on_step(*_: Any) -> None:
            if (clock := clock_ref()) is not None:
                clock.step()

        def on_gradient(name: str) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                if (clock := clock_ref()) is not None:
                    clock.gradient(name)

            return hook

        self._handles.append(model.register_forward_pre_hook(_BeforeForward(self), with_kwargs=True))
        self._handles.append(model.register_forward_hook(_AfterForward(self), with_kwargs=True))
        # A hook before the step: its time has passed when the replica's own hook, registered later, starts to wait.
        self._handles.append(optimizer.register_step_pre_hook(on_step))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(on_gradient(name)))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._exits.close()

    def count_operations(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the operations of the model, before its first forward pass."""
        if self._workload is None:
            self._workload = Workload.from_model(model, args, kwargs)
            if self._workload.guessed and self._cluster.compute.sample_s is None:
                warnings.warn(
                    f"the operations of {type(model).__name__} cannot be counted, so its computing time "
                    "is a guess: two operations for each parameter. Give the cluster Compute(sample_s=...).",
                    stacklevel=2,
                )

    def forward(self, rows: int) -> float:
        """Advance the clock by a forward pass of so many samples; return the seconds of its backward pass."""
        assert self._workload is not None
        jitter = self._cluster.jitter
        self._factor = jitter.draw(self._rng) if jitter is not None else 1.0
        self._elapse(self._factor * self._workload.forward_s(rows, self._cluster))
        return self._factor * self._workload.backward_s(rows, self._cluster)

    def backward(self, seconds: float) -> None:
        """Note a backward pass that takes so long; several add up to one, if their losses were summed."""
        # Gradients have come since the last call: this is a new pass, not a further output of the same one.
        self._backward_s = seconds if self._in_backward else self._backward_s + seconds
        self._in_backward = False

    def gradient(self, name: str) -> None:
        """Advance the clock by the share of the backward pass that a parameter's gradient takes."""
        if not self._in_backward:  # The first gradient of a pass.
            self._computed.clear()
        if self._workload is not None and name not in self._computed:  # None before the first forward pass.
            self._in_backward = True
            self._computed.add(name)
            # A factored weight that is used elsewhere as well comes here twice: its time passes once.
            self._elapse(self._backward_s * self._workload.shares.get(name, 0.0))

    @property
    def workload(self) -> Workload | None:
        """The computation of the model; None before its first forward pass."""
        return self._workload

    @property
    def speed(self) -> float:
        """Floating-point operations per second of this rank at speed 1."""
        return self._cluster.compute.flops if self._workload is None else self._workload.speed(self._cluster)

    def operations(self, number: float) -> None:
        """Advance the clock by so many floating-point operations, in addition to those of the model."""
        self._elapse(self._factor * number / self.speed)

    def step(self) -> None:
        """Advance the clock by a step of the optimiser."""
        self._elapse(self._factor * self._cluster.compute.step_s)


class _BeforeForward(OwnedHook):
    """Hook before a forward pass: counts the operations of the model the first time."""

    def __init__(self, compute_clock: ComputeClock) -> None:
        self._compute_clock = ref(compute_clock)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and (clock := self._compute_clock()) is not None:
            clock.count_operations(module, args, kwargs)


class _AfterForward(OwnedHook):
    """Hook after a forward pass: advances the clock, and notes the backward pass when that reaches the output."""

    def __init__(self, compute_clock: ComputeClock) -> None:
        self._compute_clock = ref(compute_clock)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or (clock := self._compute_clock()) is None:
            return
        backward_s = clock.forward(num_rows(args or kwargs))
        # One output is enough: its gradient comes before those of the parameters that it depends on.
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(_backward_begins, self._compute_clock, backward_s))
                return


def _backward_begins(clock_ref: "ref[ComputeClock]", seconds: float, _: Tensor) -> None:
    """Note the start of a backward pass. A hook of a model's output, called with its gradient."""
    if (clock := clock_ref()) is not None:
        clock.backward(seconds)
