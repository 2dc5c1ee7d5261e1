"""Factories by "module:function", by which the command line finds a user's own model or recipe.

The module is looked for in the working directory first, as `python -m` does. Nothing here imports torch.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tutti.errors import ConfigError, UnknownName


def call_factory(text: str, options: dict[str, Any], wanted: str) -> Any:
    """Call the factory that `text` names with `options`, and return its result.

    Args:
        text: "module:function", such as "nets:make" for make() in nets.py.
        wanted: a sentence about what the factory should return, for error messages.

    Raises `ConfigError` if there is no such module or function, if it is not callable, or if it raises.
    """
    with _working_directory_importable():
        factory = _find(text, wanted)
        try:
            return factory(**options)
        except Exception as error:  # A user's function may raise anything.
            raise ConfigError(f"{text} fails: {type(error).__name__}: {error}") from error


def describe(value: Any) -> str:
    """The type of a value, for error messages."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _find(text: str, wanted: str) -> Any:
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
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownName(f"factory in module '{module_name}'", name, known)
    # A model can be called too, but it is a result of a factory, not a factory.
    if not callable(factory) or hasattr(factory, "state_dict"):
        raise ConfigError(f"{text} is {describe(factory)}, and no function. {wanted}")
    return factory


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
