"""What each layer of a sequence costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.parallel.pipeline.layers import Layers
from tutti.parallel.pipeline.stage_runner import protect_inputs

_ROUNDS = 5


@dataclass(frozen=True)
class LayerCost:
    """One layer's part of a step, per microbatch."""

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int
    activation_bytes: int
    """Of its outputs."""
    output_shapes: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype of every output."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    def memory_bytes(self, num_microbatches: int) -> int:
        """Parameters and their gradients, and the activations of so many microbatches."""
        return 2 * self.parameter_bytes + num_microbatches * self.activation_bytes


def measure_layers(layers: Layers, example: Any, now: Callable[[], float]) -> list[LayerCost]:
    """Run every layer alone, forward and backward, on what the one before it gives; `now` is the clock.

    Each takes what it took at its best: whatever else the machine does hits one layer or another.
    """
    buffers = [(buffer, buffer.detach().clone()) for _, layer in layers for buffer in layer.buffers()]
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # Whoever measures draws no more than the others.
        rounds = [_round(layers, example, now) for _ in range(1 + _ROUNDS)][1:]
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return [_cost(name, layer, runs) for (name, layer), *runs in zip(layers, *rounds, strict=True)]


def _round(layers: Layers, example: Any, now: Callable[[], float]) -> list["_TimedRun"]:
    values = example if isinstance(example, tuple) else (example,)
    found: list[_TimedRun] = []
    for _, layer in layers:
        found.append(_TimedRun(layer, values, not found, now))
        values = found[-1].made
    return found


def _cost(name: str, layer: nn.Module, runs: list["_TimedRun"]) -> LayerCost:
    made = runs[0].made
    return LayerCost(
        name,
        min(it.forward_s for it in runs),
        min(it.backward_s for it in runs),
        sum(parameter.nbytes for parameter in layer.parameters()),
        sum(it.nbytes for it in made),
        tuple((tuple(it.shape), str(it.dtype).removeprefix("torch.")) for it in made),
    )


class _TimedRun:
    """A layer's forward and backward pass, timed. The first layer need not say what its inputs' gradients are."""

    def __init__(self, layer: nn.Module, values: tuple[Tensor, ...], first: bool, now: Callable[[], float]) -> None:
        taken = tuple(it.detach().requires_grad_(it.is_floating_point() and not first) for it in values)
        wanted = [it for it in [*layer.parameters(), *taken] if it.requires_grad]
        start_s = _at(now, taken)
        with torch.enable_grad():
            out = layer(*protect_inputs(layer, taken))
        middle_s = _at(now, taken)
        made = out if isinstance(out, tuple) else (out,)
        outputs = [it for it in made if it.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(it) for it in outputs], allow_unused=True)
        self.forward_s, self.backward_s = middle_s - start_s, _at(now, taken) - middle_s
        self.made = tuple(it.detach() for it in made)


def _at(now: Callable[[], float], tensors: tuple[Tensor, ...]) -> float:
    if tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
    return now()
