"""What a command is about: a recipe by name, or a model of the user's, as module:factory."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tutti.errors import ConfigError, UnknownName
from tutti.plan.profile.problem import Loss
from tutti.recipes import RECIPES, recipe
from tutti.replica.samples import num_rows

SubjectText = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|MODULE:FACTORY",
        help=f"One of {', '.join(RECIPES)}; or a function of yours that returns a model, or a model and a batch.",
    ),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch", help="Samples of a step; the recipe's or the factory's own by default.")
]
InputShape = Annotated[
    str | None,
    typer.Option("--input", metavar="SHAPE", help="Of a sample, such as 3x224x224, for a factory without a batch."),
]

_RETURNS = "A factory returns a model, or a model and a batch: (model, inputs) or (model, (inputs, targets))."


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and a batch to train it on."""

    name: str
    model: nn.Module
    batch: Any
    loss: Loss | None
    """None where nobody has said how the model is judged."""
    optimizer: torch.optim.Optimizer | None


def find_subject(
    text: str, options: dict[str, Any], batch_size: int | None = None, input_shape: str | None = None
) -> Subject:
    """The recipe or factory that `text` names, made with `options`, and a batch of so many samples."""
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"--batch must be 1 or more, got {batch_size}.")
    torch.manual_seed(0)
    if ":" in text:
        return _made(text, options, batch_size, input_shape)
    if input_shape is not None:
        raise ConfigError("--input is for factories that return no batch: a recipe has its own inputs.")
    try:
        found = recipe(text, **options)
    except UnknownName as error:
        error.add_note("A model of your own is MODULE:FACTORY, such as nets:make for make() in nets.py.")
        raise
    model = found.model()
    return Subject(
        name=found.name,
        model=model,
        batch=found.example(batch_size or found.batch_size),
        loss=found.loss,
        optimizer=found.optimizer(model),
    )


def _made(text: str, options: dict[str, Any], batch_size: int | None, input_shape: str | None) -> Subject:
    """What the user's factory returns."""
    with _this_folder():
        factory = _factory(text)
        try:
            returned = factory(**options)
        except Exception as error:
            raise ConfigError(f"{text} fails: {type(error).__name__}: {error}") from error
    model, batch = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{text} returned {_described(returned)}. {_RETURNS}")
    if batch is not None:
        if input_shape is not None:
            raise ConfigError(f"{text} returned a batch: --input is for factories that return none.")
        batch = batch if batch_size is None else resized(batch, batch_size)
    elif input_shape is not None:
        batch = torch.randn(batch_size or 32, *_shape(input_shape))
    else:
        raise ConfigError(f"{text} returned a model without a batch. Return both, or give --input, such as 3x224x224.")
    return Subject(name=text, model=model, batch=batch, loss=None, optimizer=None)


def _factory(text: str) -> Callable[..., Any]:
    module_name, _, name = text.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # A user's module may raise anything.
        if isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or ":"):
            raise ConfigError(
                f"no module '{module_name}', in this folder or installed. Wanted: MODULE:FACTORY."
            ) from None
        raise ConfigError(f"module '{module_name}' cannot be imported: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if factory is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownName(f"factory in module '{module_name}'", name, known)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise ConfigError(f"{text} is {_described(factory)}, and no function. {_RETURNS}")
    return factory


@contextmanager
def _this_folder() -> Iterator[None]:
    """Modules are looked for in the current folder first, as `python -m` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def resized(batch: Any, num_samples: int) -> Any:
    """The batch's samples, again from the first where there are too few, as a batch of so many."""
    rows = num_rows(batch)
    if rows == 0:
        raise ConfigError("the factory's batch has no samples to make one of another size from.")
    places = torch.arange(num_samples) % rows

    def take(tensor: Tensor) -> Tensor:
        return tensor[places.to(tensor.device)] if tensor.dim() and len(tensor) == rows else tensor

    return tree_map_only(Tensor, take, batch)


def _shape(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split("x")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--input takes sizes of 1 or more with x between, such as 3x224x224; got '{text}'.")
    return sizes


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return "nothing" if value is None else f"a {type(value).__name__}"
