"""Operators that DTensor cannot compute in pieces are computed on the whole."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tutti.errors import TuttiError
from tutti.parallel.tensor.layers import to_dtensors, to_full_tensors
from tutti.parallel.tensor.operators import METADATA, VALUE_READS, is_in_place, is_sharded, needs_gather

_log = logging.getLogger("tutti")


class GatherFallbackMode(TorchFunctionMode):
    """Within it, what an operator takes is gathered if DTensor cannot compute it on shards.

    Which operators these are depends on the version of torch. One that changes a tensor in place must find it as it is,
    unless it is known to need the whole. Random ones draw what one process would.
    """

    def __init__(self, mesh: DeviceMesh, names: Mapping[nn.Module, str]) -> None:
        """Say, once for each of the modules that have `names`, what is gathered there."""
        super().__init__()
        self._mesh, self._names = mesh, names
        self._said: set[tuple[str, str]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in METADATA:
            return func(*args, **kwargs)
        changes = is_in_place(func, args, kwargs)
        if changes:
            _refuse_lost(name, kwargs.get("out", args[0] if args else None))
        if name in ("dropout", "dropout_") and isinstance(args[0] if args else kwargs.get("input"), DTensor):
            return self._drop(func, args, kwargs)
        if needs_gather(name, args, kwargs) or (changes and _is_written_elsewhere(args, kwargs)):
            if name not in VALUE_READS and any(map(is_sharded, tree_leaves((args, kwargs)))):
                self._say(name, "it needs all of it")
            return self._changed_whole(func, args, kwargs) if changes else self._whole(func, args, kwargs)
        return self._tried(func, args, kwargs)

    def _tried(self, func: Any, args: Any, kwargs: Any) -> Any:
        """In pieces if that goes."""
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, TuttiError) or not _has_pieces((args, kwargs)) or is_in_place(func, args, kwargs):
                raise
            self._say(getattr(func, "__name__", str(func)), str(error).splitlines()[0])
        return self._whole(func, args, kwargs)

    def _whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = to_full_tensors((args, kwargs))
        made = func(*args, **kwargs)
        result = to_dtensors(made, self._mesh)
        taken = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for plain, given in zip(tree_leaves(made), tree_leaves(result), strict=True):
            if isinstance(plain, Tensor) and plain._is_view() and _memory(plain) in taken:
                given._is_part = True
        return result

    def _changed_whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        """With the changes of the whole put back into the pieces."""
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, DTensor):
            return self._whole(func, args, kwargs)
        if "out" in kwargs or isinstance(target.placements[0], Partial):
            raise RuntimeError(f"'{func.__name__}' changes all of a DTensor that is spread over ranks.")
        args, kwargs = to_full_tensors((args, kwargs))
        whole = args[0].clone()
        func(whole, *args[1:], **kwargs)
        return target.copy_(to_dtensors(whole, self._mesh))

    def _drop(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Every rank draws for the whole, as one process would, and takes its part: no messages."""
        x, p, training, changes = _dropout(func, *args, **kwargs)
        if not training or not p:
            return x
        ones = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1)
        kept = to_dtensors(torch.dropout(ones, p, True), self._mesh)
        return self._tried(Tensor.mul_ if changes else torch.mul, (x, kept), {})

    def _say(self, operator: str, reason: str) -> None:
        where = self._where()
        if (where, operator) in self._said or self._mesh.get_group().rank() != 0:
            return
        self._said.add((where, operator))
        _log.warning(
            "%s gathers what '%s' takes, which cannot be computed in pieces (%s): that costs messages. "
            "Mesh(split=...) can keep whole the layers that it takes from.",
            where, operator, reason,
        )  # fmt: skip

    def _where(self) -> str:
        frame = sys._getframe(1)
        while frame is not None and frame.f_back is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and self._names.get(module):
                return f"layer '{self._names[module]}'"
            frame = frame.f_back
        return "the model"


def is_sharding_error(error: Exception) -> bool:
    """Whether an operator failed because of how its tensors are spread."""
    return not isinstance(error, TuttiError) and ("shard" in str(error).lower() or "DTensor" in str(error))


def _dropout(
    func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> tuple[Any, float, bool, bool]:
    return input, p, training and train, inplace or func.__name__.endswith("_")


def _has_pieces(value: Any) -> bool:
    return any(isinstance(each, DTensor) for each in tree_leaves(value))


def _is_written_elsewhere(args: Any, kwargs: Any) -> bool:
    """Whether what is changed is a plain tensor, a buffer say, by something that is not."""
    target = kwargs.get("out", args[0] if args else None)
    return not isinstance(target, DTensor) and any(map(is_sharded, tree_leaves((args, kwargs))))


def _refuse_lost(name: str, x: Any) -> None:
    """What is a part of another tensor for one process, and was moved here: changes would not get there."""
    if not isinstance(x, DTensor):
        return
    base = x._base if x._is_view() else None
    moved = isinstance(base, DTensor) and _memory(x._local_tensor) != _memory(base._local_tensor)
    if moved or hasattr(x, "_is_part") or hasattr(base, "_is_part"):
        raise RuntimeError(f"'{name}' changes in place a part of a DTensor that is spread over ranks.")


def _memory(x: Tensor) -> int:
    return 0 if x.is_sparse else x.untyped_storage().data_ptr()
