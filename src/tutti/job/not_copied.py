"""`NotCopied`: base of objects that are attributes of a model and do not travel with its copies."""

from typing import Any


class NotCopied:
    """An object that a deep copy or a pickle of its owner has None in place of."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # A copy of a distributed model (for an average of weights, for example) is not distributed.

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
