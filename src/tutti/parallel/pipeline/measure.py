"""What each layer of a sequence costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tutti.parallel.pipeline.layers import Layers

_ROUNDS = 3


@dataclass(frozen=True)
class LayerCost:
    """One layer's part of a step, per microbatch."""

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int
    activation_bytes: int
    """Of its outputs."""
    gives: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype of every output."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    def memory_bytes(self, num_microbatches: int) -> int:
        """Parameters and their gradients, and the activations of so many microbatches."""
        return 2 * self.parameter_bytes + num_microbatches * self.activation_bytes


def measure(layers: Layers, example: Any) -> list[LayerCost]:
    """Run every layer alone, forward and backward, on what the one before it gives."""
    values = example if isinstance(example, tuple) else (example,)
    found = []
    for number, (name, layer) in enumerate(layers):
        cost, values = _measure_one(name, layer, values, first=number == 0)
        found.append(cost)
    return found


def _measure_one(
    name: str, layer: torch.nn.Module, values: tuple[Tensor, ...], first: bool
) -> tuple[LayerCost, tuple[Tensor, ...]]:
    forward_s, backward_s = [], []
    buffers = [(buffer, buffer.detach().clone()) for buffer in layer.buffers()]
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    made: tuple[Tensor, ...] = ()
    for _ in range(1 + _ROUNDS):
        taken = tuple(it.detach().requires_grad_(it.is_floating_point() and not first) for it in values)
        with torch.enable_grad():
            seconds, out = _timed(lambda taken=taken: layer(*taken), values[0].device)  # type: ignore[misc]
        made = out if isinstance(out, tuple) else (out,)
        forward_s.append(seconds)
        backward_s.append(_backward(made, [*trained, *(it for it in taken if it.requires_grad)], values[0].device))
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    cost = LayerCost(
        name,
        median(forward_s[1:]),
        median(backward_s[1:]),
        sum(parameter.nbytes for parameter in layer.parameters()),
        sum(it.nbytes for it in made),
        tuple((tuple(it.shape), str(it.dtype).removeprefix("torch.")) for it in made),
    )
    return cost, tuple(it.detach() for it in made)


def _backward(made: tuple[Tensor, ...], wanted: list[Tensor], device: torch.device) -> float:
    outputs = [it for it in made if it.requires_grad]
    if not outputs or not wanted:
        return 0.0
    ones = [torch.ones_like(it) for it in outputs]
    return _timed(lambda: torch.autograd.grad(outputs, wanted, ones, allow_unused=True), device)[0]


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    _wait_for(device)
    start = time.perf_counter()
    result = function()
    _wait_for(device)
    return time.perf_counter() - start, result


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
