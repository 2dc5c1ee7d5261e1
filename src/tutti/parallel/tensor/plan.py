"""`TensorPlan`: the parallel style of every layer of a model, with the reason.

Every plan computes the same result; a good one needs little communication.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from tutti.errors import ConfigError
from tutti.parallel.tensor import rules
from tutti.parallel.tensor.styles import PARALLEL_STYLES, ParallelStyle


@dataclass(frozen=True)
class LayerSplit:
    """The split of one layer."""

    name: str
    """Name of the layer in the model."""
    kind: str
    """Name of its class."""
    shape: tuple[int, ...]
    """Shape of its weight, or of its first parameter."""
    style: ParallelStyle
    """The part of the layer that each rank holds."""
    reason: str
    """Why it has this style."""


@dataclass(frozen=True)
class TensorPlan:
    """The split of every layer with parameters, in the model's order. Prints as a table."""

    num_ranks: int
    """Number of ranks that split the layers."""
    layers: tuple[LayerSplit, ...]
    """All layers that have parameters of their own."""

    def style_of(self, name: str) -> ParallelStyle:
        """Return the style of the layer called `name`; a module without parameters is replicated."""
        return next((layer.style for layer in self.layers if layer.name == name), "replicate")

    def __str__(self) -> str:
        rows = [("layer", "kind", "weight", "style", "why")]
        rows += [
            (layer.name, layer.kind, " x ".join(map(str, layer.shape)), layer.style, layer.reason)
            for layer in self.layers
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(f"{text:<{width}}" for text, width in zip(row[:4], widths, strict=True)), row[4]])
            for row in rows
        ]
        return "\n".join([f"over {self.num_ranks} ranks:", *lines])


def tensor_plan(model: nn.Module, num_ranks: int, split: Mapping[str, ParallelStyle] | None = None) -> TensorPlan:
    """Return how `Mesh(tensor=num_ranks, split=split)` would split `model`.

    Linear layers that follow each other are split in pairs, by column and by row, so that each pair needs one
    all-reduce (Shoeybi et al. 2019). Attention is split by heads, embeddings by words, convolutions by channels. All
    other layers are replicated.

    Args:
        split: styles for layers that should have others than these, by name or pattern of names.
    """
    split = split or {}
    layers = {name: module for name, module in model.named_modules() if _has_own_parameters(module)}
    choices = rules.styles(model, num_ranks)
    splits = []
    for name, module in layers.items():
        style, reason = choices.get(name, ("replicate", f"no rule for {type(module).__name__}"))
        shape = next((tuple(parameter.shape) for parameter in module.parameters(recurse=False)), ())
        splits.append(LayerSplit(name, type(module).__name__, shape, style, reason))
    unknown = [key for key in split if not any(fnmatchcase(name, key) for name in layers)]
    mistakes = [f"no layer with parameters is called '{key}'{_suggestion(key, layers)}" for key in unknown]
    for index, layer in enumerate(splits):
        requested = [style for key, style in split.items() if fnmatchcase(layer.name, key)]
        if requested:  # Of several patterns that match, the last one counts.
            if wrong := rules.refusal(layers[layer.name], requested[-1], num_ranks):
                mistakes.append(f"layer '{layer.name}' ({layer.kind}) cannot be '{requested[-1]}': {wrong}")
            splits[index] = replace(layer, style=requested[-1], reason="as requested")
    if mistakes:
        raise ConfigError(f"{'; '.join(mistakes)}. Styles are {', '.join(PARALLEL_STYLES)}.")
    return TensorPlan(num_ranks, tuple(splits))


def nothing_split_mistakes(plan: TensorPlan) -> list[str]:
    """Return what is wrong with a plan that splits no layer; nothing if it splits one."""
    if any(layer.style != "replicate" for layer in plan.layers):
        return []
    reasons = "; ".join(f"'{layer.name}' ({layer.kind}): {layer.reason}" for layer in plan.layers)
    return [f"none of the model's layers can be split over {plan.num_ranks} ranks: {reasons or 'it has none'}."]


def _has_own_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _suggestion(key: str, layers: Iterable[str]) -> str:
    close = get_close_matches(key, layers, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
