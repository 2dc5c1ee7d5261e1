"""Operators that DTensor cannot compute in pieces are computed on the whole."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tutti.errors import TuttiError
from tutti.parallel.tensor.layers import enter_mesh, leave_mesh

_log = logging.getLogger("tutti")


class Gathering(TorchFunctionMode):
    """Within it, what an operator takes is gathered if there is no other way: that costs messages, and not the result.

    Which operators these are depends on the version of torch. One that changes a tensor in place must find it as it is.
    """

    def __init__(self, mesh: DeviceMesh, names: Mapping[nn.Module, str]) -> None:
        """Say, once for each of the modules that have `names`, what is gathered there."""
        super().__init__()
        self._mesh, self._names = mesh, names
        self._said: set[tuple[str, str]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            pieces = any(isinstance(each, DTensor) for each in tree_leaves((args, kwargs)))
            if not pieces or _in_place(func, kwargs) or not is_about_pieces(error):
                raise
            self._say(getattr(func, "__name__", str(func)), str(error).splitlines()[0])
        args, kwargs = leave_mesh((args, kwargs))
        return enter_mesh(func(*args, **kwargs), self._mesh)

    def _say(self, operator: str, why: str) -> None:
        where = self._where()
        if (where, operator) in self._said or self._mesh.get_group().rank() != 0:
            return
        self._said.add((where, operator))
        _log.warning(
            "%s gathers what '%s' takes, which cannot be computed in pieces (%s): that costs messages. "
            "Mesh(split=...) can keep whole the layers that it takes from.",
            where, operator, why,
        )  # fmt: skip

    def _where(self) -> str:
        frame = sys._getframe(1)
        while frame is not None and frame.f_back is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and self._names.get(module):
                return f"layer '{self._names[module]}'"
            frame = frame.f_back
        return "the model"


def is_about_pieces(error: Exception) -> bool:
    """Whether an operator failed because of how its tensors are spread."""
    return not isinstance(error, TuttiError) and ("shard" in str(error).lower() or "DTensor" in str(error))


def _in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") or name == "__setitem__" or kwargs.get("out") is not None or bool(kwargs.get("inplace"))
