"""How much memory a computation uses at most, beyond what was in use before."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAIN = (Tensor, torch.nn.Parameter)


def most_bytes(compute: Callable[[], Any], there: Iterable[Tensor], device: torch.device) -> int:
    """In use at once while `compute` runs, besides what is `there`.

    On a GPU as the allocator counts; else by the tensors that operations return, for as long as they are kept.
    """
    if device.type == "cuda":
        return _on_gpu(compute, device)
    count = _Count(there)
    with count:
        compute()
    return count.most


def kept_bytes(compute: Callable[[], Any], there: Iterable[Tensor], device: torch.device) -> int:
    """In use because of what `compute` has returned, besides what is `there`."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        kept = compute()
        found = torch.cuda.memory_allocated(device) - before
        del kept
        return found
    count = _Count(there)
    with count:
        kept = compute()
    found = count.now
    del kept
    return found


def _on_gpu(compute: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compute()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class _Count(TorchDispatchMode):
    """Sees every tensor that an operation returns, and when its memory is given back."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = set(_storages(there))
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # Tensors made of others: what is done with those comes here again.
        returned = func(*args, **(kwargs or {}))
        for place, storage in _storages(leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)).items():
            if place not in self._known:
                self._known.add(place)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, place, storage.nbytes()).atexit = False
        self.most = max(self.most, self.now)
        return returned

    def _gone(self, place: int, num_bytes: int) -> None:
        self._known.discard(place)
        self.now -= num_bytes


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of tensors some of which may be views of others, or given twice."""
    return sum(storage.nbytes() for storage in _storages(tensors).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """By where they are; sparse tensors have none of their own."""
    dense = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage._cdata: storage for storage in dense}
