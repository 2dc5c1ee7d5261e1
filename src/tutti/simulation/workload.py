"""`Workload`: the floating-point operations of a model for one sample, and each parameter's share of backward.

A copy of the model is run forward once under torch's `FlopCounterMode`: on device "meta" if it can be (no values, no
time), else with values. Operations are attributed to a parameter by the module that owns it.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tutti.cluster import Cluster
from tutti.replica.factors import factorable
from tutti.replica.samples import num_rows


@dataclass(frozen=True)
class Workload:
    """The computation of a model for one sample."""

    forward_flops: float
    """Floating-point operations of the forward pass; backward takes twice as many."""
    shares: dict[str, float]
    """The share of backward that each trained parameter's gradient takes, by name; they add up to 1."""
    rows: dict[str, float] = field(default_factory=dict)
    """Rows that a sample makes in the input of a layer whose gradient can be factored, by parameter."""
    guessed: bool = False
    """Whether operations could not be counted, and `forward_flops` is two for each parameter."""

    @classmethod
    def from_model(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Workload":
        """Count floating-point operations in a forward pass of a copy: without values, or with them if it needs any.

        A model that can be run in neither way is taken to do two operations for each parameter.
        """
        sizes = {name: float(p.numel()) for name, p in model.named_parameters() if p.requires_grad}
        counts: dict[str, float] = {}
        layer_rows: dict[str, int] = {}
        for stand_in in (_without_values, _with_values):
            # A model may refuse meta tensors by any error. Random states are restored for the user's own pass.
            with suppress(Exception), torch.random.fork_rng(devices=[]):
                counts, layer_rows = _count(model, args, kwargs, stand_in)
                break
        rows = max(1, num_rows(args or kwargs))
        # The counter names modules by their path from the model's class name on.
        by_layer = {name: counts.get(f"{type(model).__name__}.{_layer(name)}", 0.0) for name in sizes}
        layer_sizes = {
            name: sum(size for other, size in sizes.items() if _layer(other) == _layer(name))
            for name, size in sizes.items()
        }
        # A layer's operations are divided between its parameters by size. Layers without a count (normalisation) get a
        # small share by size, since their gradients take some time too.
        raw = {name: by_layer[name] * size / layer_sizes[name] or 1e-3 * size for name, size in sizes.items()}
        total = sum(raw.values()) or 1.0
        counted = counts.get("Global", 0.0) / rows
        shares = {name: value / total for name, value in raw.items()}
        flops = counted or 2.0 * sum(p.numel() for p in model.parameters())
        rows_per_sample = {name: number / rows for name, number in layer_rows.items()}
        return cls(flops, shares, rows_per_sample, guessed=not counted)

    def speed(self, cluster: Cluster) -> float:
        """Return floating-point operations per second, on a rank of speed 1."""
        compute = cluster.compute
        # One forward pass, and a backward pass of twice as many operations.
        return compute.flops if compute.sample_s is None else 3 * self.forward_flops / compute.sample_s

    def forward_s(self, rows: int, cluster: Cluster) -> float:
        """Return the seconds of a forward pass of so many samples."""
        compute = cluster.compute
        if compute.sample_s is not None:
            return rows * compute.sample_s * compute.forward
        return rows * self.forward_flops / compute.flops

    def backward_s(self, rows: int, cluster: Cluster) -> float:
        """Return the seconds of a backward pass of so many samples."""
        compute = cluster.compute
        if compute.sample_s is not None:
            return rows * compute.sample_s * (1 - compute.forward)
        return 2 * rows * self.forward_flops / compute.flops


def _layer(name: str) -> str:
    """Return the path of the module that owns a parameter."""
    return name.rpartition(".")[0]


def _count(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stand_in: Callable[[Tensor], Tensor]
) -> tuple[dict[str, float], dict[str, int]]:
    """Count the operations of each module, by its path from the model's class name on ("Global" for all), and rows."""
    from torch.utils.flop_counter import FlopCounterMode  # Imports a compiler, which is slow.

    values = [*model.parameters(), *model.buffers()]
    # `deepcopy` takes what is in its memo for copied already, so no parameter is ever copied.
    memo: dict[int, Any] = {id(value): stand_in(value) for value in values}
    model_copy = copy.deepcopy(model, memo).eval()
    # Hooks of the user and of this library must not see this pass.
    for module in model_copy.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    names = {module: f"{name}.weight".lstrip(".") for name, module in model_copy.named_modules()}
    rows: dict[str, int] = {}

    def count_rows(module: nn.Module, args: tuple[Any, ...]) -> None:
        num_in = module.get_parameter("weight").shape[1]
        rows[names[module]] = rows.get(names[module], 0) + args[0].numel() // num_in

    for module in factorable(model_copy):
        module.register_forward_pre_hook(count_rows)
    copy_args, copy_kwargs = tree_map_only(Tensor, stand_in, (args, kwargs))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model_copy(*copy_args, **copy_kwargs)
    return {path: float(sum(ops.values())) for path, ops in counter.get_flop_counts().items()}, rows


def _without_values(value: Tensor) -> Tensor:
    """Return a tensor of the same shape and kind on device "meta"."""
    empty = torch.empty_like(value, device="meta")
    return nn.Parameter(empty, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _with_values(value: Tensor) -> Tensor:
    return value
