"""Measured costs of layers: time, parameters and outputs of each layer in a sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.parallel.pipeline.layers import Layers
from tutti.parallel.pipeline.stage_runner import protect_inputs

_ROUNDS = 5
"""Timed repetitions, after one that is not timed."""


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer, or of the layers of a stage, for one microbatch."""

    name: str
    """Name of the layer, or of the first one of a stage."""
    forward_s: float
    """Seconds of the forward pass."""
    backward_s: float
    """Seconds of the backward pass."""
    parameter_bytes: int
    """Bytes of the parameters."""
    activation_bytes: int
    """Bytes of the outputs, of all layers of a stage."""
    output_shapes: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype of each output."""

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward_s + self.backward_s

    def memory_bytes(self, num_microbatches: int) -> int:
        """Return the bytes of parameters, of their gradients, and of the activations of `num_microbatches`."""
        return 2 * self.parameter_bytes + num_microbatches * self.activation_bytes


def measure_layers(layers: Layers, example: Any, now: Callable[[], float]) -> list[LayerCost]:
    """Run every layer alone, forward and backward, on the output of the layer before; `now` is the clock.

    The time of a layer is the least of several runs, because other load on the machine hits layers at random. Buffers
    and the random state are as before afterwards.
    """
    buffers = [(buffer, buffer.detach().clone()) for _, layer in layers for buffer in layer.buffers()]
    # Only one rank measures: without the fork, its random numbers would then differ from those of the others.
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        # The first round allocates memory and chooses kernels, and is dropped.
        rounds = [_run_layers(layers, example, now) for _ in range(1 + _ROUNDS)][1:]
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return [_cost(name, layer, runs) for (name, layer), *runs in zip(layers, *rounds, strict=True)]


def _run_layers(layers: Layers, example: Any, now: Callable[[], float]) -> list["_TimedRun"]:
    """Run every layer once, each on what the one before it made."""
    values = example if isinstance(example, tuple) else (example,)
    runs: list[_TimedRun] = []
    for _, layer in layers:
        runs.append(_TimedRun(layer, values, not runs, now))
        values = runs[-1].outputs
    return runs


def _cost(name: str, layer: nn.Module, runs: list["_TimedRun"]) -> LayerCost:
    """Return the cost of a layer from its timed runs: the least time of each pass."""
    outputs = runs[0].outputs
    return LayerCost(
        name,
        min(run.forward_s for run in runs),
        min(run.backward_s for run in runs),
        sum(parameter.nbytes for parameter in layer.parameters()),
        sum(output.nbytes for output in outputs),
        tuple((tuple(output.shape), str(output.dtype).removeprefix("torch.")) for output in outputs),
    )


class _TimedRun:
    """Forward and backward pass of one layer, timed. The first layer computes no gradients of its inputs."""

    def __init__(self, layer: nn.Module, values: tuple[Tensor, ...], is_first: bool, now: Callable[[], float]) -> None:
        # A graph of this layer alone, so that its backward pass ends here and is timed by itself.
        inputs = tuple(value.detach().requires_grad_(value.is_floating_point() and not is_first) for value in values)
        leaves = [tensor for tensor in [*layer.parameters(), *inputs] if tensor.requires_grad]
        start_s = _synchronised_now(now, inputs)
        with torch.enable_grad():
            output = layer(*protect_inputs(layer, inputs))
        middle_s = _synchronised_now(now, inputs)
        outputs = output if isinstance(output, tuple) else (output,)
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        if roots and leaves:
            # `grad` and not `backward`: the parameters' own gradients must stay as they are.
            # Ones will do: the time of a backward pass does not depend on the values.
            torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
        self.forward_s, self.backward_s = middle_s - start_s, _synchronised_now(now, inputs) - middle_s
        # Without the graph, so that what the layer kept for its backward pass is freed before the next one runs.
        self.outputs = tuple(tensor.detach() for tensor in outputs)


def _synchronised_now(now: Callable[[], float], tensors: tuple[Tensor, ...]) -> float:
    """Return the time at which all kernels submitted so far have ended."""
    if tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
    return now()
