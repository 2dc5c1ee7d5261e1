"""The MODEL argument of `tutti plan` and `tutti profile`: a recipe by name, or a user's model as module:factory.

The factory is a function, or a class of models that is called without arguments.

This module imports torch; commands import it when they run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tutti.errors import ConfigError, UnknownName
from tutti.plan.profile.training_pass import Loss
from tutti.recipes import Recipe, recipe
from tutti.recipes.factory import call_factory, describe
from tutti.replica.samples import num_rows

_RETURNS = "A factory returns a model, or a model and a batch: (model, inputs) or (model, (inputs, targets))."
"""Shown in errors. A factory may also return a `Recipe`, as `tutti train` needs it."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with a batch to train it on."""

    name: str
    model: nn.Module
    batch: Any
    loss: Loss | None
    """None for a user's model, whose loss is not known."""
    optimizer: torch.optim.Optimizer | None


def load_model(
    text: str, options: dict[str, Any], batch_size: int | None = None, input_shape: str | None = None
) -> LoadedModel:
    """Make the model that `text` names, with a batch.

    Args:
        text: a recipe's name, or "module:factory".
        options: keyword arguments of the recipe or factory.
        batch_size: samples of the batch. Default: the recipe's or the factory's own.
        input_shape: shape of one sample, such as "3x224x224", for a factory that returns no batch.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"--batch must be 1 or more, got {batch_size}.")
    # The same model every time: data-dependent paths, and so measured times, do not change between two calls.
    torch.manual_seed(0)
    if ":" in text:
        return _from_factory(text, options, batch_size, input_shape)
    try:
        made = recipe(text, **options)
    except UnknownName as error:
        error.add_note("A model of your own is MODULE:FACTORY, such as nets:make for make() in nets.py.")
        raise
    return _from_recipe(text, made, batch_size, input_shape)


def _from_recipe(name: str, made: Recipe, batch_size: int | None, input_shape: str | None) -> LoadedModel:
    """Take model, example batch, loss and optimiser from a recipe."""
    if input_shape is not None:
        raise ConfigError("--input is for factories that return no batch: a recipe has its own inputs.")
    model = made.model()
    return LoadedModel(
        name=name,
        model=model,
        batch=made.example(batch_size or made.batch_size),
        loss=made.loss,
        optimizer=made.optimizer(model),
    )


def _from_factory(text: str, options: dict[str, Any], batch_size: int | None, input_shape: str | None) -> LoadedModel:
    """Call the user's factory and check what it returns."""
    returned = call_factory(text, options, _RETURNS, model_classes=True)
    if isinstance(returned, Recipe):
        return _from_recipe(text, returned, batch_size, input_shape)
    model, batch = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{text} returned {describe(returned)}. {_RETURNS}")
    if batch is not None:
        if input_shape is not None:
            raise ConfigError(f"{text} returned a batch: --input is for factories that return none.")
        batch = batch if batch_size is None else resized(batch, batch_size)
    elif input_shape is not None:
        # 32 samples where nothing says how many: a common batch, and enough for stable times.
        batch = torch.randn(batch_size or 32, *_shape(input_shape))
    else:
        raise ConfigError(f"{text} returned a model without a batch. Return both, or give --input, such as 3x224x224.")
    return LoadedModel(name=text, model=model, batch=batch, loss=None, optimizer=None)


def resized(batch: Any, num_samples: int) -> Any:
    """A batch of `num_samples`, made from the samples of `batch`, which are repeated if they are too few."""
    rows = num_rows(batch)
    if rows == 0:
        raise ConfigError("the factory's batch has no samples to make one of another size from.")
    # Only tensors with as many rows as the batch are samples; others (a mask, a scalar) are passed on as they are.
    indices = torch.arange(num_samples) % rows

    def take(tensor: Tensor) -> Tensor:
        return tensor[indices.to(tensor.device)] if tensor.dim() and len(tensor) == rows else tensor

    return tree_map_only(Tensor, take, batch)


def _shape(text: str) -> list[int]:
    """Read the shape of one sample, without the batch dimension, such as "3x224x224"."""
    try:
        sizes = [int(part) for part in text.split("x")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--input takes sizes of 1 or more with x between, such as 3x224x224; got '{text}'.")
    return sizes
