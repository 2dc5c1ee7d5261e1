"""Models as sequences of layers, and `StageModule`, a part of such a sequence."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tutti.errors import ConfigError

Layers = list[tuple[str, nn.Module]]
"""Named layers; each takes what the one before it returns."""


def sequential_layers(model: nn.Module, example: Any) -> Layers:
    """Return the layers of `model`: those of an `nn.Sequential`, or what `torch.export` finds with an example."""
    if is_sequential(model):
        return list(_flattened(model))
    from tutti.parallel.pipeline.traced import traced_layers  # Imports torch's compiler, which is slow.

    return traced_layers(model, example)


def is_sequential(model: nn.Module) -> bool:
    """Whether a model runs its children one after the other, as an `nn.Sequential` does."""
    # The class is not enough: a subclass with a `forward` of its own may do anything with its children.
    return type(model).forward is nn.Sequential.forward and len(model._modules) > 0


def check_no_shared_parameters(layers: Layers) -> None:
    """Refuse a parameter that two layers share, since they may be on different ranks."""
    owner: dict[int, str] = {}
    for name, layer in layers:
        for key, parameter in layer.named_parameters():
            # Modules within one layer may share a parameter, since a layer is never cut.
            if (other := owner.setdefault(id(parameter), name)) != name:
                raise ConfigError(
                    f"layers '{other}' and '{name}' share the parameter '{key}', and could be in different stages. "
                    "Give each its own, or use only the mesh axes data and tensor."
                )


class StageModule(nn.Module):
    """Consecutive layers of a model. Takes and returns tuples of tensors."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        for name, layer in layers:
            self.add_module(name.replace(".", "/"), layer)  # Names of modules may not contain dots.

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        for layer in self._modules.values():
            assert layer is not None
            output = layer(*values)
            values = output if isinstance(output, tuple) else (output,)
        return values


def _flattened(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of an `nn.Sequential`, with those of nested ones in their place."""
    for name, child in model._modules.items():
        assert child is not None
        if is_sequential(child):
            yield from _flattened(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
