"""A model as a sequence of layers, each of which takes what the one before gives."""

from typing import Any

from torch import Tensor, nn

from tutti.errors import ConfigError

Layers = list[tuple[str, nn.Module]]


def sequential_layers(model: nn.Module, example: Any) -> Layers:
    """The layers of `model`, by name: those of an `nn.Sequential`, or what `torch.export` finds by an example."""
    if is_sequential(model):
        return list(_flat(model))
    from tutti.parallel.pipeline.traced import traced_layers  # Costs a compiler's import.

    return traced_layers(model, example)


def is_sequential(model: nn.Module) -> bool:
    return type(model).forward is nn.Sequential.forward and len(model._modules) > 0


def check_no_shared_parameters(layers: Layers) -> None:
    """Refuse a parameter that two layers have, which may come to be on different ranks."""
    owner: dict[int, str] = {}
    for name, layer in layers:
        for key, parameter in layer.named_parameters():
            if (other := owner.setdefault(id(parameter), name)) != name:
                raise ConfigError(
                    f"layers '{other}' and '{name}' share the parameter '{key}': they may not be in different stages. "
                    "Give each its own, or use mesh axes data and tensor alone."
                )


class StageModule(nn.Module):
    """Some layers, one after the other: takes and gives tuples of tensors."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        for name, layer in layers:
            self.add_module(name.replace(".", "/"), layer)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        for layer in self._modules.values():
            assert layer is not None
            made = layer(*values)
            values = made if isinstance(made, tuple) else (made,)
        return values


def _flat(model: nn.Module, prefix: str = "") -> Any:
    for name, child in model._modules.items():
        assert child is not None
        if is_sequential(child):
            yield from _flat(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
