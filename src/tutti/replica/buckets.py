"""Buckets: flat runs of gradients that travel together."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.transports import SharesMemory, Transport

_ALIGNMENT = 16
"""Elements: tensors start on cache lines, so vector loads are whole and ranks never share a line."""


class Slot:
    """One tensor's place in a bucket: a parameter's gradient, or a buffer that is kept equal."""

    __slots__ = ("__weakref__", "arrived", "bucket", "is_parameter", "name", "tensor", "touched", "view")

    bucket: "Bucket"

    def __init__(self, name: str, tensor: Tensor, is_parameter: bool) -> None:
        self.name = name
        self.tensor = tensor
        self.is_parameter = is_parameter
        self.view = tensor  # Until the slot is in a bucket.
        self.touched = False  # Whether it got a gradient since the last exchange.
        self.arrived = False  # Whether it got one in this backward pass.


@dataclass(eq=False)
class Bucket:
    """A run of slots in one piece of memory, followed by one element per slot that says "I have one".

    Those marks are averaged with the rest: a mark of zero tells every rank that no rank had a
    gradient for that parameter, so it keeps none, as it would on one machine.
    """

    index: int
    slots: list[Slot]
    flat: Tensor
    marks: Tensor

    def __post_init__(self) -> None:
        self._num_parameters = sum(slot.is_parameter for slot in self.slots)
        self.waits_for_end = self._num_parameters < len(self.slots)
        for slot in self.slots:
            slot.bucket = self
            slot.arrived = False
        self.missing = self._num_parameters

    def expect(self) -> None:
        """Get ready for the next backward pass."""
        for slot in self.slots:
            slot.arrived = slot.touched = False
        self.missing = self._num_parameters

    def fill(self) -> list[tuple[Slot, Tensor]]:
        """Move gradients into the bucket's memory; return what untouched parameters held, to give back."""
        views, sources, kept = [], [], []
        for slot in self.slots:
            grad = slot.tensor.grad if slot.is_parameter else slot.tensor
            if grad is None:
                slot.view.zero_()
                continue
            if not slot.touched and slot.is_parameter:
                kept.append((slot, grad.clone()))
            if grad is not slot.view:
                _refuse_sparse(slot, grad)
                views.append(slot.view)
                sources.append(grad)
                if slot.is_parameter:
                    slot.tensor.grad = slot.view
        if views:
            torch._foreach_copy_(views, sources)
        if kept or not all(slot.touched or not slot.is_parameter for slot in self.slots):
            self.marks.copy_(torch.tensor([float(slot.touched or not slot.is_parameter) for slot in self.slots]))
        else:
            self.marks.fill_(1)
        return kept


def _refuse_sparse(slot: Slot, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise ConfigError(
            f"parameter '{slot.name}' has a sparse gradient; only dense ones can be exchanged. Build its embedding "
            "with sparse=False."
        )


class Memory:
    """All bucket memory of one device and dtype, allocated once and cut again as buckets change."""

    def __init__(self, slots: Sequence[Slot], transport: Transport) -> None:
        tensor = slots[0].tensor
        # Room for every way of cutting: per slot its elements, a mark, and padding for both.
        numel = sum(_aligned(slot.tensor.numel()) + 2 * _ALIGNMENT for slot in slots)
        if tensor.device.type == "cpu" and isinstance(transport, SharesMemory):
            self.flat = transport.empty(numel, tensor.dtype)
        else:
            self.flat = torch.empty(numel, dtype=tensor.dtype, device=tensor.device)
        self.flat.zero_()
        self._used = 0

    def start_over(self) -> None:
        self._used = 0

    def take(self, index: int, slots: list[Slot]) -> Bucket:
        """Cut the next bucket, for `slots`."""
        start = self._used
        for slot in slots:
            slot.view = _like(self.flat[self._used : self._used + slot.tensor.numel()], slot.tensor)
            self._used += _aligned(slot.tensor.numel())
        marks = self.flat[self._used : self._used + len(slots)]
        flat = self.flat[start : self._used + len(slots)]
        self._used += _aligned(len(slots))
        return Bucket(index, slots, flat, marks)


def cut(
    slots: Iterable[Slot], memories: dict[tuple[torch.device, torch.dtype], Memory], max_bytes: int
) -> list[Bucket]:
    """Cut `slots`, in the order given, into buckets of about `max_bytes`, one device and dtype each."""
    for memory in memories.values():
        memory.start_over()
    runs = list(_runs(slots, max_bytes))
    return [memories[kind_of(run[0].tensor)].take(index, run) for index, run in enumerate(runs)]


def kind_of(tensor: Tensor) -> tuple[torch.device, torch.dtype]:
    return tensor.device, tensor.dtype


def _runs(slots: Iterable[Slot], max_bytes: int) -> Iterator[list[Slot]]:
    open_runs: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
    for slot in slots:
        run = open_runs.setdefault(kind_of(slot.tensor), [])
        run.append(slot)
        if sum(member.tensor.nbytes for member in run) >= max_bytes:
            yield open_runs.pop(kind_of(slot.tensor))
    yield from open_runs.values()


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    """`flat` in the shape and, where it is dense, the memory order of `tensor`, as autograd would make it."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if tensor.permute(order).is_contiguous():
        return flat.as_strided(tensor.shape, tensor.stride())
    return flat.view(tensor.shape)
