"""Recipes: a model, its data, its optimiser and the accuracy to reach, for examples, benchmarks and reproductions.

A recipe is a function that returns a `Recipe`. `RECIPES` lists those that the command line knows by name; docs/data.md
lists the files that they need. To add one, write its function and add its line to `RECIPES`.

This package imports torch only when a recipe or a class is first used, so that `tutti --help` can list names quickly.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tutti.errors import ConfigError
from tutti.plugins import Registry, checked, load
from tutti.recipes.factory import call_factory, describe

if TYPE_CHECKING:
    from tutti.recipes.base import Recipe, accuracy, cross_entropy
    from tutti.recipes.data import ArrayDataset, MapDataset, Splits, collate
    from tutti.recipes.images import cifar_quick, digits, fashion_cnn, mnist_mlp
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

RECIPES: Registry["Callable[..., Recipe]"] = Registry(
    "recipe",
    "tutti.recipes",
    {
        "digits": "tutti.recipes.images:digits",
        "mnist-mlp": "tutti.recipes.images:mnist_mlp",
        "fashion-cnn": "tutti.recipes.images:fashion_cnn",
        "cifar-quick": "tutti.recipes.images:cifar_quick",
        "char-lstm": "tutti.recipes.text:char_lstm",
        "char-gpt": "tutti.recipes.text:char_gpt",
    },
    callable,
    "a function that returns a tutti.recipes.Recipe",
)
"""Functions that make a recipe, by name. Packages add theirs by entry points of the group `tutti.recipes`."""

OWN_RECIPE = "A recipe of your own is MODULE:FACTORY, such as nets:make for make() in nets.py."
"""Note of errors about an unknown recipe, for users of the command line."""

_FACTORY_RETURNS = "A factory to train returns a tutti.recipes.Recipe."

_MODULES = {
    "base": ("Recipe", "accuracy", "cross_entropy"),
    "data": ("ArrayDataset", "MapDataset", "Splits", "collate"),
    "images": ("cifar_quick", "digits", "fashion_cnn", "mnist_mlp"),
    "text": ("char_gpt", "char_lstm"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> Any:
    # PEP 562: called for names that the module does not have yet.
    for module, names in _MODULES.items():
        if name in names:
            return load(f"{__name__}.{module}:{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def recipe(name: str, **options: Any) -> "Recipe":
    """Make the recipe listed as `name` with its own `options`: `recipe("mnist-mlp", second_hidden=800)`.

    A name with a colon is a user's function that returns a `Recipe`: `recipe("my_recipes:tiny", width=64)` calls
    `tiny(width=64)` of `my_recipes.py`, in the working directory or installed.
    """
    from tutti.recipes.base import Recipe

    if ":" in name:
        returned = call_factory(name, options, _FACTORY_RETURNS)
        if not isinstance(returned, Recipe):
            raise ConfigError(f"{name} returned {describe(returned)}. {_FACTORY_RETURNS}")
        return returned
    make = RECIPES.find(name)
    known = inspect.signature(make).parameters
    if unknown := sorted(options.keys() - known.keys()):
        takes = f"Options: {', '.join(known)}." if known else "It takes none."
        raise ConfigError(f"recipe '{name}' has no option {', '.join(unknown)}. {takes}")
    made = checked(make(**options), Recipe, RECIPES, name)
    if made.name != name:  # Workers look a recipe up by its own name.
        raise ConfigError(f"the recipe listed as '{name}' calls itself '{made.name}': both names must be the same.")
    return made
