"""Buckets: flat runs of gradients that travel together."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.simulation.sizes import SizeOnlyTensor
from tutti.transports import SharesMemory, Transport

_LINE_BYTES = 64
"""Tensors start on cache lines, so that vector loads are whole and ranks never share a line."""


class Slot:
    """One tensor's place in a bucket: a parameter's gradient, or a buffer that is kept equal."""

    __slots__ = ("__weakref__", "arrived", "bucket", "fresh", "name", "tensor", "touched", "view")

    bucket: "Bucket"

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.view = tensor  # Until the slot is in a bucket.
        self.touched = False  # Whether it got a gradient since the last exchange.
        self.arrived = False  # Whether it got one in this backward pass.
        self.fresh = False  # Whether that gradient was the first since it had none.


@dataclass(eq=False)
class Bucket:
    """A run of gradients, or of buffers, in one piece of memory, followed by a mark for each: "I have one".

    The marks are averaged with the rest: a mark of zero tells every rank that no rank had a gradient
    for that parameter, so it keeps none, as it would on one machine.
    """

    index: int
    slots: list[Slot]
    flat: Tensor
    """All of it: what travels."""
    values: Tensor
    """Gradients that may be sent in a lossy way: the first part of `flat`."""
    exact: Tensor
    """The rest: small gradients, and marks."""
    marks: Tensor
    starts: list[int]
    """Where in `flat` each slot begins."""
    of_parameters: bool

    def __post_init__(self) -> None:
        for slot in self.slots:
            slot.bucket = self
            slot.arrived = False
        self.missing = len(self.slots)

    def expect(self) -> None:
        """Get ready for the next backward pass."""
        for slot in self.slots:
            slot.arrived = slot.touched = False
        self.missing = len(self.slots)

    def image(self) -> Tensor:
        """The parameters or buffers themselves, on the CPU, as gradients lie in the bucket; 0 between and for marks."""
        flat = torch.zeros(self.flat.numel(), dtype=self.flat.dtype, device="cpu")
        for view, slot in zip(self.views(flat), self.slots, strict=True):
            view.copy_(slot.tensor.detach())
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """The slots' places in memory that is cut like this bucket."""
        ends = [(start, start + slot.tensor.numel()) for start, slot in zip(self.starts, self.slots, strict=True)]
        return [like(flat[start:stop], slot.tensor) for (start, stop), slot in zip(ends, self.slots, strict=True)]

    def fill(self) -> list[tuple[Slot, Tensor]]:
        """Move gradients into the bucket's memory; return what untouched parameters held, to give back."""
        if not self.of_parameters:
            torch._foreach_copy_([slot.view for slot in self.slots], [slot.tensor for slot in self.slots])
            self.marks.fill_(1)
            return []
        views, sources, kept, whole = [], [], [], True
        for slot in self.slots:
            grad = slot.tensor.grad
            if grad is None:
                slot.touched = whole = False
                slot.view.zero_()
                continue
            if not slot.touched:
                whole = False
                kept.append((slot, grad.detach().clone()))
            slot.fresh = grad is not slot.view
            if slot.fresh:
                _refuse_sparse(slot, grad)
                views.append(slot.view)
                sources.append(grad)
                slot.tensor.grad = slot.view
        if views:
            torch._foreach_copy_(views, sources)
        if whole:
            self.marks.fill_(1)
        else:
            self.marks.copy_(torch.tensor([float(slot.touched) for slot in self.slots], device="cpu"))
        return kept


def _refuse_sparse(slot: Slot, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise ConfigError(
            f"parameter '{slot.name}' has a sparse gradient; only dense ones can be exchanged. Build its embedding "
            "with sparse=False."
        )


class Memory:
    """All bucket memory of one device and dtype, allocated once and cut again as buckets change."""

    def __init__(
        self, slots: Sequence[Slot], transport: Transport, sizes_only: bool = False, exact_below: int = 0
    ) -> None:
        tensor = slots[0].tensor
        self._exact_below = exact_below
        # Room for every way of cutting: per slot its elements, a mark, and padding for both.
        self._line = max(1, _LINE_BYTES // tensor.itemsize)
        numel = sum(self._aligned(slot.tensor.numel()) + 2 * self._line for slot in slots)
        if sizes_only:
            self.flat = cast(Tensor, SizeOnlyTensor(numel, tensor.dtype, tensor.itemsize))
        elif tensor.device.type == "cpu" and isinstance(transport, SharesMemory):
            self.flat = transport.empty(numel, tensor.dtype)
        else:
            self.flat = torch.empty(numel, dtype=tensor.dtype, device=tensor.device)
        self.flat.zero_()
        self._sizes_only = sizes_only
        self._used = 0

    def start_over(self) -> None:
        """Cut anew from the start; what lies between tensors is zero again."""
        self._used = 0
        self.flat.zero_()

    def take(self, index: int, slots: list[Slot], of_parameters: bool) -> Bucket:
        """Cut the next bucket, for `slots`, small ones last."""
        start = lossy = self._used
        slots = sorted(slots, key=self._is_small)
        starts = []
        for slot in slots:
            starts.append(self._used - start)
            if not self._sizes_only:
                slot.view = like(self.flat[self._used : self._used + slot.tensor.numel()], slot.tensor)
            self._used += self._aligned(slot.tensor.numel())
            if of_parameters and not self._is_small(slot):
                lossy = self._used
        marks = self.flat[self._used : self._used + len(slots)]
        stop = self._used + len(slots)
        flat, values, exact = self.flat[start:stop], self.flat[start:lossy], self.flat[lossy:stop]
        self._used += self._aligned(len(slots))
        return Bucket(index, slots, flat, values, exact, marks, starts, of_parameters)

    def _is_small(self, slot: Slot) -> bool:
        return slot.tensor.numel() < max(1, self._exact_below) or not slot.tensor.is_floating_point()

    def _aligned(self, numel: int) -> int:
        return -(-numel // self._line) * self._line


Kind = tuple[torch.device, torch.dtype]


def cut(groups: tuple[list[Slot], list[Slot]], memories: dict[Kind, Memory], max_bytes: int) -> list[Bucket]:
    """Cut parameters, then buffers, in the order given, into buckets of about `max_bytes`, of one kind each."""
    for memory in memories.values():
        memory.start_over()
    runs = [(run, group is groups[0]) for group in groups for run in _runs(group, max_bytes)]
    return [memories[kind_of(run[0].tensor)].take(index, run, own) for index, (run, own) in enumerate(runs)]


def kind_of(tensor: Tensor) -> Kind:
    return tensor.device, tensor.dtype


def _runs(slots: Iterable[Slot], max_bytes: int) -> Iterator[list[Slot]]:
    open_runs: dict[Kind, tuple[list[Slot], int]] = {}
    for slot in slots:
        kind = kind_of(slot.tensor)
        run, num_bytes = open_runs.get(kind, ([], 0))
        run.append(slot)
        open_runs[kind] = run, num_bytes + slot.tensor.nbytes
        if open_runs[kind][1] >= max_bytes:
            yield open_runs.pop(kind)[0]
    yield from (run for run, _ in open_runs.values())


def like(flat: Tensor, tensor: Tensor) -> Tensor:
    """`flat` in the shape and, where it is dense, the memory order of `tensor`, as autograd would make it."""
    return flat.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else flat.view(tensor.shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, in whatever order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a tensor as one dimension, in the order of `like`; its own memory, where it is dense."""
    data = tensor.detach()
    return data.as_strided((data.numel(),), (1,)) if is_dense(data) else data.view(-1)
