"""Peak memory of a computation, beyond what was in use before."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that have a storage of their own."""


def peak_bytes(compute: Callable[[], Any], resident: Iterable[Tensor], device: torch.device) -> int:
    """Return the peak bytes in use while `compute` runs, without the tensors `resident` before.

    On a GPU the allocator counts; on a CPU, the storages of tensors that operations return, while they are alive.
    """
    if device.type == "cuda":
        return _on_gpu(compute, device)
    count = _AllocationCounter(resident)
    with count:
        compute()
    return count.peak


def kept_bytes(compute: Callable[[], Any], resident: Iterable[Tensor], device: torch.device) -> int:
    """Return the bytes that the result of `compute` keeps alive, without the tensors `resident` before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        result = compute()  # Held while memory is counted, with all that its autograd graph has saved.
        num_bytes = torch.cuda.memory_allocated(device) - before
        del result
        return num_bytes
    count = _AllocationCounter(resident)
    with count:
        result = compute()
    num_bytes = count.current
    del result
    return num_bytes


def _on_gpu(compute: Callable[[], Any], device: torch.device) -> int:
    """Return the bytes that `compute` needs at its peak in addition to what is allocated now."""
    torch.cuda.synchronize(device)  # Work of before may still free memory.
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compute()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class _AllocationCounter(TorchDispatchMode):
    """Counts the storage of every tensor that an operation returns, until it is freed."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = set(_storages(resident))
        self.current = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # A wrapper subclass: the operations on its inner tensors come here, too.
        returned = func(*args, **(kwargs or {}))
        # Views and in-place operations return a storage that is known already.
        for key, storage in _storages(leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)).items():
            if key not in self._known:
                self._known.add(key)
                self.current += storage.nbytes()
                # Not at exit: nobody reads the count then.
                weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.current)
        return returned

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)  # The address may be used again, by another storage.
        self.current -= num_bytes


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages of some tensors, each storage once, though views share it."""
    return sum(storage.nbytes() for storage in _storages(tensors).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return storages by identity; sparse tensors have none of their own."""
    dense = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage._cdata: storage for storage in dense}
