"""Factories by "module:function", by which the command line finds a user's own model or recipe.

The module is looked for in the working directory first, as `python -m` does. Nothing here imports torch.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from tutti.errors import ConfigError


def call_factory(text: str, options: dict[str, Any], wanted: str, model_classes: bool = False) -> Any:
    """Call the factory that `text` names with `options`, and return its result.

    Args:
        text: "module:function", such as "nets:make" for make() in nets.py.
        wanted: a sentence about what the factory should return, for error messages.
        model_classes: whether the factory may be a class of models, `torch.nn.Module`, which is called like a function.

    Raises `ConfigError` if there is no such module or function, if it is not callable, or if it raises.
    """
    with _working_directory_importable():
        factory = _find(text, wanted, model_classes)
        try:
            return factory(**options)
        except Exception as error:  # A user's function may raise anything.
            raise ConfigError(f"{text} fails: {type(error).__name__}: {error}") from error


def describe(value: Any) -> str:
    """The type of a value, for error messages."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _find(text: str, wanted: str, model_classes: bool) -> Any:
    module_name, _, name = text.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # A user's module may raise anything.
        # Else the module was found, and something that it imports is missing.
        if isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or ":"):
            raise ConfigError(
                f"no module '{module_name}', in this folder or installed. Wanted: MODULE:FACTORY."
            ) from None
        raise ConfigError(f"module '{module_name}' cannot be imported: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if factory is None:
        raise ConfigError(_no_function(module, name, model_classes))
    # A model can be called too, but it is a result of a factory, not a factory.
    if not callable(factory) or (hasattr(factory, "state_dict") and not (model_classes and isinstance(factory, type))):
        kind = "a class" if isinstance(factory, type) else describe(factory)
        raise ConfigError(f"{text} is {kind}, not a function. {wanted}")
    return factory


def _no_function(module: ModuleType, name: str, model_classes: bool) -> str:
    """The message for a function that `module` does not have, with those that it defines itself."""
    # Only what the module itself defines: names that it merely imported would make the list long and misleading.
    known = sorted(
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and (inspect.isfunction(value) or (model_classes and isinstance(value, type) and hasattr(value, "state_dict")))
    )
    close = get_close_matches(name, known, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    listed = f"It has: {', '.join(known)}." if known else "It defines none."
    return f"module '{module.__name__}' has no function '{name}'.{hint} {listed}"


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
