"""A plan: the parallel style of each layer, and why. Any plan computes the same; a good one talks little."""

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
    """What becomes of one layer."""

    name: str
    kind: str
    """Its class."""
    shape: tuple[int, ...]
    """Of its weight, or its first parameter."""
    style: ParallelStyle
    reason: str


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of every layer that has parameters, in the model's order. Prints as a table."""

    num_ranks: int
    layers: tuple[LayerSplit, ...]

    def style_of(self, name: str) -> ParallelStyle:
        return next((layer.style for layer in self.layers if layer.name == name), "replicate")

    def __str__(self) -> str:
        rows = [("layer", "kind", "weight", "split by", "why")]
        rows += [(it.name, it.kind, " x ".join(map(str, it.shape)), it.style, it.reason) for it in self.layers]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(f"{text:<{width}}" for text, width in zip(row[:4], widths, strict=True)), row[4]])
            for row in rows
        ]
        return "\n".join([f"over {self.num_ranks} ranks:", *lines])


def tensor_plan(model: nn.Module, num_ranks: int, split: Mapping[str, ParallelStyle] | None = None) -> TensorPlan:
    """How `model` would be split over `num_ranks` ranks: `Mesh(tensor=num_ranks, split=split)` does it.

    Linear layers that follow each other are split in pairs, by outputs and by inputs, so that each pair needs one sum;
    attention by heads; embeddings by words; convolutions by channels. What is not split is whole on every rank.
    """
    split = split or {}
    layers = {name: module for name, module in model.named_modules() if _has_own_parameters(module)}
    found = rules.styles(model, num_ranks)
    made = []
    for name, module in layers.items():
        style, why = found.get(name, ("replicate", f"no rule for {type(module).__name__}"))
        shape = next((tuple(p.shape) for p in module.parameters(recurse=False)), ())
        made.append(LayerSplit(name, type(module).__name__, shape, style, why))
    unknown = [key for key in split if not any(fnmatchcase(name, key) for name in layers)]
    mistakes = [f"no layer with parameters is called '{key}'{_meant(key, layers)}" for key in unknown]
    for index, layer in enumerate(made):
        wanted = [style for key, style in split.items() if fnmatchcase(layer.name, key)]
        if wanted:
            if wrong := rules.refusal(layers[layer.name], wanted[-1], num_ranks):
                mistakes.append(f"layer '{layer.name}' ({layer.kind}) cannot be split by {wanted[-1]}: {wrong}")
            made[index] = replace(layer, style=wanted[-1], reason="as asked")
    if mistakes:
        raise ConfigError(f"{'; '.join(mistakes)}. Styles are {', '.join(PARALLEL_STYLES)}.")
    return TensorPlan(num_ranks, tuple(made))


def nothing_split_mistakes(plan: TensorPlan) -> list[str]:
    """What is wrong with a plan that splits nothing."""
    if any(layer.style != "replicate" for layer in plan.layers):
        return []
    each = "; ".join(f"'{layer.name}' ({layer.kind}): {layer.reason}" for layer in plan.layers)
    return [f"none of the model's layers can be split over {plan.num_ranks} ranks: {each or 'it has none'}."]


def _has_own_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _meant(key: str, layers: Iterable[str]) -> str:
    close = get_close_matches(key, layers, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
