"""Things to train: model, data, optimiser and the accuracy to reach, for examples, benchmarks and papers.

A recipe is a function that returns a `Recipe`; `RECIPES`
lists those the command line knows by name. docs/data.md says which files they need.
"""

import inspect
from collections.abc import Callable
from typing import Any

from tutti.errors import ConfigError, UnknownName
from tutti.recipes.data import ArrayDataset, MapDataset, Splits, collate
from tutti.recipes.images import cifar_quick, digits, fashion_cnn, mnist_mlp
from tutti.recipes.recipe import Recipe, accuracy, cross_entropy
from tutti.recipes.text import char_gpt, char_lstm

__all__ = [
    "RECIPES",
    "ArrayDataset",
    "MapDataset",
    "Recipe",
    "Splits",
    "accuracy",
    "char_gpt",
    "char_lstm",
    "cifar_quick",
    "collate",
    "cross_entropy",
    "digits",
    "fashion_cnn",
    "mnist_mlp",
    "recipe",
]

RECIPES: dict[str, Callable[..., Recipe]] = {
    "digits": digits,
    "mnist-mlp": mnist_mlp,
    "fashion-cnn": fashion_cnn,
    "cifar-quick": cifar_quick,
    "char-lstm": char_lstm,
    "char-gpt": char_gpt,
}


def recipe(name: str, **options: Any) -> Recipe:
    """The recipe listed as `name`, made with `options`: `recipe("mnist-mlp", second_hidden=800)`."""
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES)
    known = inspect.signature(RECIPES[name]).parameters
    if unknown := sorted(options.keys() - known.keys()):
        takes = f"Options: {', '.join(known)}." if known else "It takes none."
        raise ConfigError(f"recipe '{name}' has no option {', '.join(unknown)}. {takes}")
    return RECIPES[name](**options)
