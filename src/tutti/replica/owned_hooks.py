"""`OwnedHook`: hooks that belong to one model, and that its copies do not take along."""

from collections.abc import Callable
from typing import Any


class OwnedHook:
    """Base of a hook on a model. A deep copy or a pickle of the model has a hook that does nothing in its place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_no_hook, ()


def _no_hook(*_: Any) -> None:
    """Do nothing: the hook of a copied model."""


def _make_no_hook() -> Callable[..., None]:
    return _no_hook
