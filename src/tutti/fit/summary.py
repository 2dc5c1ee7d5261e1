"""`summary`: the layers of a model, their sizes, and what the workers exchange in every step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tutti.cluster import format_size
from tutti.errors import ConfigError
from tutti.replica.buckets import Kind, Memory, Slot, cut_buckets, kind_of
from tutti.replica.replica import running_statistics
from tutti.strategies import AllReduce
from tutti.transports import SingleRankTransport


@dataclass(frozen=True)
class LayerSummary:
    """A module that has parameters of its own, or no module inside it."""

    name: str
    kind: str
    outputs: str
    """Shapes of its outputs in its last call; empty if it was not called."""
    num_parameters: int
    """Own parameters; those that an earlier layer has too count there."""
    num_trainable: int
    gradient_bytes: int


@dataclass(frozen=True)
class Summary:
    """What `tutti.summary` found; printed as a table."""

    layers: tuple[LayerSummary, ...]
    buffer_bytes: int
    """Bytes of buffers, such as running statistics."""
    bucket_bytes: tuple[int, ...]
    """Bytes of each bucket that is exchanged in a step, with running statistics, in the order of the exchanges."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_trainable(self) -> int:
        """Elements of parameters that need a gradient."""
        return sum(layer.num_trainable for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.gradient_bytes for layer in self.layers)

    def __str__(self) -> str:
        rows = [["layer", "type", "output", "parameters", "trainable", "gradients"]]
        for layer in self.layers:
            sizes = _sizes(layer.num_parameters, layer.num_trainable, layer.gradient_bytes)
            rows.append([layer.name or "(model)", layer.kind, layer.outputs, *sizes])
        rows.append(["total", "", "", *_sizes(self.num_parameters, self.num_trainable, self.gradient_bytes)])
        if not any(layer.outputs for layer in self.layers):
            rows = [row[:2] + row[3:] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        num_texts = len(widths) - 3
        lines = [
            "  ".join(
                text.ljust(width) if column < num_texts else text.rjust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self._exchanged])

    __repr__ = __str__

    @property
    def _exchanged(self) -> str:
        number = len(self.bucket_bytes)
        if not number:
            return "No parameter is trained: nothing is exchanged."
        sizes = ", ".join(map(format_size, self.bucket_bytes[:4])) + (", ..." if number > 4 else "")
        total = f", {format_size(sum(self.bucket_bytes))} together" if number > 1 else ""
        return f"Exchanged in every step, before compression: {number} bucket{'s'[: number > 1]} ({sizes}){total}."


def summary(model: nn.Module, example: Any = None) -> Summary:
    """Return the layers of a model with their parameters and gradients, and what workers exchange in every step.

    Args:
        example: a batch of what the model takes, for the shapes of outputs. The model is evaluated on it once.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"summary needs a torch.nn.Module, got {model!r}.")
    outputs: dict[nn.Module, str] = {}
    if example is not None:
        with _evaluated(model, outputs):
            model(example)
    if lazy := [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]:
        raise ConfigError(f"summary: '{lazy[0]}' has no shape before the first batch: give one as example=.")
    return Summary(
        tuple(_layers(model, outputs)),
        sum(buffer.nbytes for buffer in model.buffers()),
        tuple(_bucket_bytes(model)),
    )


def _sizes(num_parameters: int, num_trainable: int, gradient_bytes: int) -> list[str]:
    if not num_parameters:
        return ["", "", ""]
    return [f"{num_parameters:,}", f"{num_trainable:,}", format_size(gradient_bytes) if gradient_bytes else "frozen"]


def _layers(model: nn.Module, outputs: dict[nn.Module, str]) -> Iterator[LayerSummary]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if not own and any(module.children()):
            continue
        new = [parameter for parameter in own if id(parameter) not in seen]
        seen.update(map(id, new))
        trained = [parameter for parameter in new if parameter.requires_grad]
        sizes = (sum(parameter.numel() for parameter in new), sum(parameter.numel() for parameter in trained))
        gradient_bytes = sum(parameter.nbytes for parameter in trained)
        yield LayerSummary(name, type(module).__name__, outputs.get(module, ""), *sizes, gradient_bytes)


@contextmanager
def _evaluated(model: nn.Module, outputs: dict[nn.Module, str]) -> Iterator[None]:
    """Note the shapes of outputs of all modules, in evaluation mode and without gradients."""
    modes = [(module, module.training) for module in model.modules()]
    handles = [module.register_forward_hook(partial(_note, outputs)) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for handle in handles:
            handle.remove()


def _note(outputs: dict[nn.Module, str], module: nn.Module, inputs: Any, found: Any) -> None:
    shapes = [list(leaf.shape) for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    outputs[module] = ", ".join(map(str, shapes))


def _bucket_bytes(model: nn.Module) -> Iterator[int]:
    """Yield the bytes of the buckets that an all-reduce exchanges, as a replica cuts them."""
    trained = [Slot(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    statistics = [Slot(name, buffer) for name, buffer in running_statistics(model)] if trained else []
    kinds: dict[Kind, list[Slot]] = {}
    for slot in [*trained, *statistics]:
        kinds.setdefault(kind_of(slot.tensor), []).append(slot)
    # With sizes only, so that nothing is allocated.
    memories = {kind: Memory(slots, SingleRankTransport(), sizes_only=True) for kind, slots in kinds.items()}
    for bucket in cut_buckets((trained[::-1], statistics), memories, AllReduce.bucket_bytes):
        yield bucket.flat.nbytes
