"""`GatherFallbackMode`: operators that DTensor cannot compute on shards are computed on gathered tensors.

How it works
------------
A model's forward pass runs inside this mode, which sees every torch function before DTensor does. A function is
computed in one of four ways:

1. Functions that read properties (`METADATA`) run as they are.
2. Dropout draws its mask for the full tensor on every rank, as one process would, and each rank applies its part. This
   needs no communication, since the generators of the ranks are equal.
3. Functions that are not known to be correct on shards (`operators.needs_gather`) run on full tensors: every DTensor
   argument is gathered, every rank computes the same, and the results are replicated DTensors again. An in-place
   function runs on a copy, which is then written back to the shards.
4. All others are given to DTensor. If it refuses them, they run as in 3, unless they are in-place functions.

So a gather costs communication, and never changes the result. The first time that it happens at a layer, rank 0 logs a
warning. The choice depends only on names, shapes and placements, which are the same on all ranks: so all of them take
part in every gather. If a rank is lost, the collective of the gather fails on the others.

In-place functions need care, because a gathered view is a copy: changes to it would not reach the tensor it is a part
of. Such views are marked (`_is_gathered_view`), and in-place changes of them are refused.
"""

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
    """Within it, functions that DTensor cannot compute on shards are computed on full tensors."""

    def __init__(self, mesh: DeviceMesh, names: Mapping[nn.Module, str]) -> None:
        """Compute on `mesh`; `names` are those of the model's modules, for warnings."""
        super().__init__()
        self._mesh, self._names = mesh, names
        self._warned: set[tuple[str, str]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in METADATA:
            return func(*args, **kwargs)
        in_place = is_in_place(func, args, kwargs)
        if in_place:
            _refuse_lost_change(name, kwargs.get("out", args[0] if args else None))
        if name in ("dropout", "dropout_") and isinstance(args[0] if args else kwargs.get("input"), DTensor):
            return self._dropout(func, args, kwargs)
        if needs_gather(name, args, kwargs) or (in_place and _writes_to_plain_tensor(args, kwargs)):
            # `loss.item()` and the like need all values by nature: no warning can help there.
            if name not in VALUE_READS and any(map(is_sharded, tree_leaves((args, kwargs)))):
                self._warn(name, "it needs all of it")
            return self._gathered_in_place(func, args, kwargs) if in_place else self._gathered(func, args, kwargs)
        return self._on_shards(func, args, kwargs)

    def _on_shards(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let DTensor compute a function; gather its arguments if DTensor refuses."""
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            # An in-place function is not tried again: it would change the gathered copy.
            # Neither is an error of Tutti, such as a lost rank: it is no refusal by DTensor.
            if isinstance(error, TuttiError) or not _has_dtensors((args, kwargs)) or is_in_place(func, args, kwargs):
                raise
            self._warn(getattr(func, "__name__", str(func)), str(error).partition("\n")[0])
        return self._gathered(func, args, kwargs)

    def _gathered(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute a function on full tensors."""
        args, kwargs = to_full_tensors((args, kwargs))
        full_result = func(*args, **kwargs)
        result = to_dtensors(full_result, self._mesh)
        storages = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for full, wrapped in zip(tree_leaves(full_result), tree_leaves(result), strict=True):
            if isinstance(full, Tensor) and full._is_view() and _storage(full) in storages:
                wrapped._is_gathered_view = True
        return result

    def _gathered_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an in-place function on a full copy, and write the copy back to the shards."""
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, DTensor):
            return self._gathered(func, args, kwargs)
        if "out" in kwargs or isinstance(target.placements[0], Partial):
            # `ShardedModel` recognises this error by its words (`is_sharding_error`), and adds the layer and the
            # remedy.
            raise RuntimeError(f"'{func.__name__}' changes all of a DTensor that is sharded over ranks.")
        args, kwargs = to_full_tensors((args, kwargs))
        full = args[0].clone()  # The full tensor of a replicated target is the target's own memory.
        func(full, *args[1:], **kwargs)
        return target.copy_(to_dtensors(full, self._mesh))

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw the mask of the full tensor on every rank, as one process would, and apply this rank's part of it."""
        x, p, training, in_place = _dropout_arguments(func, *args, **kwargs)
        if not training or not p:
            return x
        # With the strides of the tensor: the order in which numbers are drawn is that of memory.
        ones = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1)
        mask = to_dtensors(torch.dropout(ones, p, True), self._mesh)
        return self._on_shards(Tensor.mul_ if in_place else torch.mul, (x, mask), {})

    def _warn(self, operator: str, reason: str) -> None:
        """Warn on rank 0, once for each layer and operator."""
        location = self._location()
        if (location, operator) in self._warned or self._mesh.get_group().rank() != 0:
            return
        self._warned.add((location, operator))
        _log.warning(
            "%s gathers the inputs of '%s', which cannot be computed on shards (%s): this costs communication. "
            "Mesh(split=...) can replicate the layers that compute these inputs.",
            location, operator, reason,
        )  # fmt: skip

    def _location(self) -> str:
        """Return the innermost named module on the call stack."""
        # Read from the call stack, only when a warning is due: hooks on all modules would cost time in every pass.
        frame = sys._getframe(1)
        while frame is not None and frame.f_back is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and self._names.get(module):
                return f"layer '{self._names[module]}'"
            frame = frame.f_back
        return "the model"


def is_sharding_error(error: Exception) -> bool:
    """Whether an operator failed because of the placements of its arguments."""
    return not isinstance(error, TuttiError) and ("shard" in str(error).lower() or "DTensor" in str(error))


def _dropout_arguments(
    func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> tuple[Any, float, bool, bool]:
    """Return tensor, probability, training and in-place of a call; torch's several functions name them differently."""
    return input, p, training and train, inplace or func.__name__.endswith("_")


def _has_dtensors(value: Any) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in tree_leaves(value))


def _writes_to_plain_tensor(args: Any, kwargs: Any) -> bool:
    """Whether an in-place function changes a plain tensor, such as a buffer, by values that are sharded."""
    target = kwargs.get("out", args[0] if args else None)
    return not isinstance(target, DTensor) and any(map(is_sharded, tree_leaves((args, kwargs))))


def _refuse_lost_change(name: str, x: Any) -> None:
    """Refuse an in-place change of a view that is a copy here: for one process it would change the base as well."""
    if not isinstance(x, DTensor):
        return
    # A view normally lies in the memory of its base. After a redistribution it has memory of its own.
    base = x._base if x._is_view() else None
    is_copy = isinstance(base, DTensor) and _storage(x._local_tensor) != _storage(base._local_tensor)
    if is_copy or hasattr(x, "_is_gathered_view") or hasattr(base, "_is_gathered_view"):
        raise RuntimeError(f"'{name}' changes in place a part of a DTensor that is sharded over ranks.")


def _storage(x: Tensor) -> int:
    # Sparse tensors have no storage that a view could share.
    return 0 if x.is_sparse else x.untyped_storage().data_ptr()
