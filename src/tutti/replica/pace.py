"""How long a simulated rank computes: laid over forward, over each gradient's part of backward, and over the step."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tutti.cluster import Cluster
from tutti.replica.samples import num_rows
from tutti.transports import Transport


@dataclass(frozen=True)
class Workload:
    """What a model asks of a processor for one sample."""

    forward_flops: float
    """Backward takes twice as many."""
    shares: dict[str, float]
    """The part of backward that each parameter's gradient takes, by name; one together."""

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Workload":
        """Count floating-point operations in a forward pass of a copy without values.

        A model that cannot be run without values counts two for each parameter.
        """
        sizes = {name: float(p.numel()) for name, p in model.named_parameters()}
        try:
            counts = _count(model, args, kwargs)
        except Exception:
            counts = {}
        rows = max(1, num_rows(args or kwargs))
        by_layer = {name: counts.get(f"{type(model).__name__}.{name.rpartition('.')[0]}", 0.0) for name in sizes}
        owned = {
            name: sum(size for other, size in sizes.items() if _layer(other) == _layer(name))
            for name, size in sizes.items()
        }
        raw = {name: by_layer[name] * size / owned[name] or 1e-3 * size for name, size in sizes.items()}
        total = sum(raw.values()) or 1.0
        flops = counts.get("Global", 0.0) / rows or 2 * sum(sizes.values())
        return cls(flops, {name: value / total for name, value in raw.items()})

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


def _count(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Operations of each module, by its path from the model's class name on, and of all as "Global"."""
    values = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(value): _bare(value) for value in values}
    bare = copy.deepcopy(model, memo).eval()
    for module in bare.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    bare_args, bare_kwargs = tree_map_only(Tensor, _bare, (args, kwargs))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        bare(*bare_args, **bare_kwargs)
    return {path: float(sum(ops.values())) for path, ops in counter.get_flop_counts().items()}


def _bare(value: Tensor) -> Tensor:
    made = torch.empty_like(value, device="meta")
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made


class Pace:
    """Lets a simulated rank's time pass as its model computes.

    Its hooks come before those of the replica, so that what a gradient sets off happens when the gradient is there.
    """

    def __init__(self, transport: Transport, workload: Workload | None = None) -> None:
        assert transport.cluster is not None
        self._cluster = transport.cluster
        self._elapse = transport.elapse
        self._workload = workload
        self._rng = random.Random(f"{self._cluster.seed} {transport.rank} jitter")
        self._factor = 1.0
        self._backward_s = 0.0
        self._in_backward = False
        self._handles: list[Any] = []

    def listen(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Follow what a model and its optimiser do."""
        mine = ref(self)

        def began(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (pace := mine()) is not None:
                pace._workload = pace._workload or Workload.of(module, args, kwargs)
                pace.forward(num_rows(args or kwargs), torch.is_grad_enabled())

        def stepping(*_: Any) -> None:
            if (pace := mine()) is not None:
                pace.step()

        def arrived(name: str) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                if (pace := mine()) is not None:
                    pace.gradient(name)

            return hook

        self._handles.append(model.register_forward_pre_hook(began, with_kwargs=True))
        self._handles.append(optimizer.register_step_pre_hook(stepping))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(arrived(name)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward(self, rows: int, backward_follows: bool) -> None:
        """A forward pass of so many samples."""
        assert self._workload is not None
        jitter = self._cluster.jitter
        self._factor = jitter.draw(self._rng) if jitter is not None else 1.0
        self._elapse(self._factor * self._workload.forward_s(rows, self._cluster))
        if backward_follows:
            before_s = (
                0.0 if self._in_backward else self._backward_s
            )  # Several passes forward may come before one back.
            self._backward_s = before_s + self._factor * self._workload.backward_s(rows, self._cluster)
            self._in_backward = False

    def gradient(self, name: str) -> None:
        """The gradient of a parameter is there."""
        if self._workload is None:
            return  # Only parts of the model were called, so nobody knows what was computed.
        self._in_backward = True
        self._elapse(self._backward_s * self._workload.shares[name])

    def step(self) -> None:
        """The optimiser steps."""
        self._elapse(self._factor * self._cluster.compute.step_s)
