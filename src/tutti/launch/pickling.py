"""Functions and values as bytes, for workers of this machine and back: by name where possible, else by value.

How it works. `pickle` sends a function or a class as its name, which the receiver imports. That is right for everything
in a module. It cannot work for lambdas and local functions, nor for what is defined in a notebook's cell or an
interactive session, whose `__main__` no worker can import. Those go by value, with the globals that they use, by
cloudpickle, which is imported only then.

A script's `__main__` can be imported by workers, under another name. So names in it stay names, unless the caller asks
for `by_value`: then workers do not run the script, which needs no `if __name__ == "__main__"`.

A class that came by value is known by a number of its own. A result that has it leads back to the class of the sender.
"""

import io
import os
import pickle
import sys
from collections.abc import Callable
from importlib import import_module
from multiprocessing import spawn
from types import FunctionType, ModuleType
from typing import Any

from tutti.errors import ConfigError


def packed_call(function: Callable[..., Any], args: tuple[Any, ...], *, by_value: bool = False) -> bytes:
    """Return two pickles, one behind the other: what a worker needs first, and then function and arguments.

    Args:
        by_value: whether what `__main__` defines is sent by value, so that workers need not import it.
    """
    # What multiprocessing does to make the caller's main module importable in the child, and no more.
    preparation = spawn.get_preparation_data("tutti")
    left_out = {"authkey", "start_method"}
    imports_main = not by_value and _main_is_importable(preparation)
    if not imports_main:
        left_out |= {"init_main_from_path", "init_main_from_name"}
    payload = _packed((function, args), imports_main, getattr(function, "__name__", repr(function)))
    return pickle.dumps({key: preparation[key] for key in preparation.keys() - left_out}) + payload


def packed_result(value: Any) -> bytes:
    """Return what a worker's function returned as bytes."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):  # Of a class that came by value, for example.
        import cloudpickle

        return bytes(cloudpickle.dumps(value))


def packing_mistake(value: Any) -> str:
    """Return why a value cannot be sent to workers by value; nothing if it can."""
    try:
        _by_value(value, imports_main=False)
    except Exception as error:  # Whatever the value's own methods raise.
        return f"{type(error).__name__}: {error}"
    return ""


def _packed(value: Any, imports_main: bool, name: str) -> bytes:
    if imports_main:
        try:
            return pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError):
            pass  # Something in it has no name.
    try:
        return _by_value(value, imports_main)
    except Exception as error:  # Whatever the methods of an argument raise.
        raise ConfigError(
            f"workers cannot get {name!r} and its arguments ({type(error).__name__}: {error}). Pass values that can "
            "be pickled: what is open or runs (files, locks, threads) cannot be sent. Make it in the function."
        ) from error


def _by_value(value: Any, imports_main: bool) -> bytes:
    """Return a value as bytes, with everything by value that workers cannot import."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """As cloudpickle's, which takes all of `__main__` by value."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:  # Such as one that imports its parts late.
                return import_module, (obj.__name__,)
            is_named = imports_main and isinstance(obj, type | FunctionType) and _is_in_main(obj)
            return NotImplemented if is_named else super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _is_in_main(obj: Any) -> bool:
    """Whether `__main__` has a function or class under its name, so that a worker which imports it has it too."""
    if obj.__module__ != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _main_is_importable(preparation: dict[str, Any]) -> bool:
    """Whether workers can import this process's `__main__` by what multiprocessing says of it."""
    if hasattr(sys, "ps1"):
        return False  # An interactive session, which has more in it than its file: a notebook, python -i.
    if "init_main_from_name" in preparation:
        return True
    path = preparation.get("init_main_from_path")
    return path is not None and os.path.exists(path)
