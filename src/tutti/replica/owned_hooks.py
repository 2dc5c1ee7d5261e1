"""Hooks that stay with the model they were made for."""

from collections.abc import Callable
from typing import Any


class OwnedHook:
    """A hook of a model that a copy of the model, also a pickled one, leaves behind."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_no_hook, ()


def _no_hook(*_: Any) -> None:
    """What a copied model has in place of a hook."""


def _make_no_hook() -> Callable[..., None]:
    return _no_hook
