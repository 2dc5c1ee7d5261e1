"""How much memory a computation uses at most, beyond what was in use before."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        self._known = {tensor.untyped_storage()._cdata for tensor in there}
        self._now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._note(leaf.untyped_storage())
        return returned

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes()).atexit = False

    def _gone(self, place: int, num_bytes: int) -> None:
        self._known.discard(place)
        self._now -= num_bytes


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of tensors some of which may be views of others, or given twice."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
