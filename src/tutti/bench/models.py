"""The models that benchmarks train, by name: perceptrons of three sizes, and the models of the recipes.

This module imports torch only when a model is made, so that `tutti bench --help` can list names quickly.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tutti.errors import UnknownName
from tutti.recipes import OWN_RECIPE, RECIPES, recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

MLPS = {"mlp-0.1M": (784, 128, 10), "mlp-1.9M": (784, 1024, 1024, 10), "mlp-20M": (784, 4096, 4096, 10)}
"""Perceptrons by their approximate number of parameters: the width of each layer."""

MODEL_NAMES = (*MLPS, *RECIPES)

_MLP_BATCH_SIZE = 64
"""Samples of each rank, whatever their number: steps of a perceptron stay comparable."""


class BenchmarkModel(NamedTuple):
    """A model, one rank's batch and a loss."""

    model: "nn.Module"
    batch: "tuple[Tensor, Tensor]"
    """Inputs and targets."""
    loss: "Callable[[Tensor, Tensor], Tensor]"


def check_model_names(names: "list[str] | tuple[str, ...]") -> None:
    """Raise `ConfigError` if one of `names` is neither in `MODEL_NAMES` nor the "module:factory" of a recipe."""
    for name in names:
        if ":" in name:
            recipe(name)  # Calls the factory, so that its mistakes are reported before ranks are started.
        elif name not in MODEL_NAMES:
            error = UnknownName("model", name, MODEL_NAMES)
            error.add_note(OWN_RECIPE)
            raise error


def make_benchmark_model(name: str, workers: int, batch_size: int | None = None) -> BenchmarkModel:
    """Make the model listed as `name`, or of the recipe that "module:factory" returns, with a batch of random samples.

    Args:
        workers: number of ranks that share the recipe's batch size.
        batch_size: samples of one rank. Default: an equal share of the recipe's batch size; 64 for a perceptron.
    """
    # Imported here, and not with the module, so that listing names stays quick.
    import torch
    import torch.nn.functional as F

    from tutti.recipes.models import mlp

    if name in MLPS:
        size = batch_size or _MLP_BATCH_SIZE
        batch = torch.randn(size, 784), torch.randint(0, 10, (size,))
        return BenchmarkModel(mlp(*MLPS[name]), batch, F.cross_entropy)
    # Strong scaling: ranks divide the recipe's batch, so that each computes less when there are more.
    made = recipe(name)
    return BenchmarkModel(made.model(), made.example(batch_size or max(1, made.batch_size // workers)), made.loss)
