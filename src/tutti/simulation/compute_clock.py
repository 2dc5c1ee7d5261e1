"""How long a simulated rank computes: laid over forward, over each gradient's part of backward, and over the step."""

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from tutti.cluster import Cluster
from tutti.replica.factors import factorable
from tutti.replica.owned_hooks import OwnedHook
from tutti.replica.samples import num_rows
from tutti.simulation import operator_clock
from tutti.transports import Transport


@dataclass(frozen=True)
class Workload:
    """What a model asks of a processor for one sample."""

    forward_flops: float
    """Backward takes twice as many."""
    shares: dict[str, float]
    """The part of backward that each trained parameter's gradient takes, by name; one together."""
    rows: dict[str, float] = field(default_factory=dict)
    """Of the inputs of layers whose gradients have factors, for one sample, by parameter."""
    guessed: bool = False
    """Whether operations could not be counted."""

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Workload":
        """Count floating-point operations in a forward pass of a copy: without values, or with them if it needs any.

        A model that can be run in neither way counts two for each parameter.
        """
        sizes = {name: float(p.numel()) for name, p in model.named_parameters() if p.requires_grad}
        counts: dict[str, float] = {}
        seen: dict[str, int] = {}
        for stand_in in (_bare, _itself):
            with suppress(Exception), torch.random.fork_rng(devices=[]):  # What it draws, it must draw again.
                counts, seen = _count(model, args, kwargs, stand_in)
                break
        rows = max(1, num_rows(args or kwargs))
        by_layer = {name: counts.get(f"{type(model).__name__}.{name.rpartition('.')[0]}", 0.0) for name in sizes}
        owned = {
            name: sum(size for other, size in sizes.items() if _layer(other) == _layer(name))
            for name, size in sizes.items()
        }
        raw = {name: by_layer[name] * size / owned[name] or 1e-3 * size for name, size in sizes.items()}
        total = sum(raw.values()) or 1.0
        counted = counts.get("Global", 0.0) / rows
        shares = {name: value / total for name, value in raw.items()}
        flops = counted or 2.0 * sum(p.numel() for p in model.parameters())
        each = {name: number / rows for name, number in seen.items()}
        return cls(flops, shares, each, guessed=not counted)

    def speed(self, cluster: Cluster) -> float:
        """Operations a second."""
        compute = cluster.compute
        return compute.flops if compute.sample_s is None else 3 * self.forward_flops / compute.sample_s

    def forward_s(self, rows: int, cluster: Cluster) -> float:
        compute = cluster.compute
        if compute.sample_s is not None:
            return rows * compute.sample_s * compute.forward
        return rows * self.forward_flops / compute.flops

    def backward_s(self, rows: int, cluster: Cluster) -> float:
        compute = cluster.compute
        if compute.sample_s is not None:
            return rows * compute.sample_s * (1 - compute.forward)
        return 2 * rows * self.forward_flops / compute.flops


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _count(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stand_in: Callable[[Tensor], Tensor]
) -> tuple[dict[str, float], dict[str, int]]:
    """Operations of each module, by its path from the model's class name on, and of all as "Global"; and rows."""
    from torch.utils.flop_counter import FlopCounterMode  # Costs a compiler's import.

    values = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(value): stand_in(value) for value in values}
    bare = copy.deepcopy(model, memo).eval()
    for module in bare.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    names = {module: f"{name}.weight".lstrip(".") for name, module in bare.named_modules()}
    rows: dict[str, int] = {}

    def count_rows(module: nn.Module, given: tuple[Any, ...]) -> None:
        num_in = module.get_parameter("weight").shape[1]
        rows[names[module]] = rows.get(names[module], 0) + given[0].numel() // num_in

    for module in factorable(bare):
        module.register_forward_pre_hook(count_rows)
    bare_args, bare_kwargs = tree_map_only(Tensor, stand_in, (args, kwargs))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        bare(*bare_args, **bare_kwargs)
    return {path: float(sum(ops.values())) for path, ops in counter.get_flop_counts().items()}, rows


def _bare(value: Tensor) -> Tensor:
    made = torch.empty_like(value, device="meta")
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made


def _itself(value: Tensor) -> Tensor:
    return value


class ComputeClock:
    """Lets a simulated rank's time pass as its model computes.

    Its hooks come before those of the replica, so that what a gradient sets off happens when the gradient is there.
    """

    def __init__(self, transport: Transport, workload: Workload | None = None) -> None:
        assert transport.cluster is not None
        self._cluster = transport.cluster
        self._elapse = transport.elapse
        self._workload = workload
        self._rng = random.Random(f"{transport.seed} jitter")
        self._factor = 1.0
        self._backward_s = 0.0
        self._in_backward = False
        self._computed: set[str] = set()
        """Gradients whose time has passed in this backward pass: of factors, and then of what they are factors of."""
        self._handles: list[Any] = []
        self._exits = ExitStack()

    def listen(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Follow what a model and its optimiser do, instead of counting the operators that run."""
        self._exits.enter_context(operator_clock.otherwise())
        mine = ref(self)

        def stepping(*_: Any) -> None:
            if (clock := mine()) is not None:
                clock.step()

        def arrived(name: str) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                if (clock := mine()) is not None:
                    clock.gradient(name)

            return hook

        self._handles.append(model.register_forward_pre_hook(_Began(self), with_kwargs=True))
        self._handles.append(model.register_forward_hook(_Ended(self), with_kwargs=True))
        self._handles.append(optimizer.register_step_pre_hook(stepping))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(arrived(name)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._exits.close()

    def meet(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out what the model asks for, before its first pass."""
        if self._workload is None:
            self._workload = Workload.of(model, args, kwargs)
            if self._workload.guessed and self._cluster.compute.sample_s is None:
                warnings.warn(
                    f"the operations of {type(model).__name__} cannot be counted, so its computing time "
                    "is a guess: two operations for each parameter. Give the cluster Compute(sample_s=...).",
                    stacklevel=2,
                )

    def forward(self, rows: int) -> float:
        """A forward pass of so many samples; returns how long going back will take."""
        assert self._workload is not None
        jitter = self._cluster.jitter
        self._factor = jitter.draw(self._rng) if jitter is not None else 1.0
        self._elapse(self._factor * self._workload.forward_s(rows, self._cluster))
        return self._factor * self._workload.backward_s(rows, self._cluster)

    def backward(self, seconds: float) -> None:
        """A backward pass begins that takes so long; several may be one, if what they began with was added up."""
        self._backward_s = seconds if self._in_backward else self._backward_s + seconds
        self._in_backward = False

    def gradient(self, name: str) -> None:
        """The gradient of a parameter is there."""
        if not self._in_backward:
            self._computed.clear()
        if self._workload is not None and name not in self._computed:  # Else nobody knows what was computed.
            self._in_backward = True
            self._computed.add(name)
            self._elapse(self._backward_s * self._workload.shares.get(name, 0.0))

    @property
    def workload(self) -> Workload | None:
        """What the model asks for, once it has been met."""
        return self._workload

    @property
    def speed(self) -> float:
        """Operations a second."""
        return self._cluster.compute.flops if self._workload is None else self._workload.speed(self._cluster)

    def operations(self, number: float) -> None:
        """So many are done beside those of the model."""
        self._elapse(self._factor * number / self.speed)

    def step(self) -> None:
        """The optimiser steps."""
        self._elapse(self._factor * self._cluster.compute.step_s)


class _Began(OwnedHook):
    """A forward pass begins."""

    def __init__(self, compute_clock: ComputeClock) -> None:
        self._compute_clock = ref(compute_clock)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and (clock := self._compute_clock()) is not None:
            clock.meet(module, args, kwargs)


class _Ended(OwnedHook):
    """A forward pass has ended: its time passes, and that of backward when backward comes to its output."""

    def __init__(self, compute_clock: ComputeClock) -> None:
        self._compute_clock = ref(compute_clock)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or (clock := self._compute_clock()) is None:
            return
        backward_s = clock.forward(num_rows(args or kwargs))
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(_go_back, self._compute_clock, backward_s))
                return


def _go_back(clock: "ref[ComputeClock]", seconds: float, _: Tensor) -> None:
    if (living := clock()) is not None:
        living.backward(seconds)
