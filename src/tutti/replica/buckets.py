"""Buckets: gradients in one piece of flat memory, which are exchanged together.

How it works
------------
`Memory` is allocated once for each device and dtype: in shared memory, where the transport has some, so that ranks of
one host reduce in place. It is cut into buckets by `cut_buckets`, and again whenever the order of parameters changes.

The memory of a bucket is `flat`: first `values` (gradients that may be compressed), then `exact` (small gradients, then
`has_grad`, one flag per slot). Each tensor starts on a cache line.

`Slot.view` is the part of `flat` that belongs to a parameter, in the parameter's shape. After an
exchange `p.grad` is that view itself. If it stays so (`zero_grad(set_to_none=False)`), autograd accumulates directly
into the bucket, and `Bucket.fill` has nothing to copy.

Between `fill` and the end of the exchange the memory belongs to the exchange; the user's code runs before and after.
"""

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
    """The part of a bucket that belongs to one tensor: a parameter's gradient, or a buffer that is kept equal."""

    __slots__ = ("__weakref__", "arrived", "bucket", "fresh", "name", "tensor", "touched", "view")

    bucket: "Bucket"

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.view = tensor
        """Its memory in the bucket; the tensor itself until the slot is in a bucket."""
        self.touched = False
        """Whether it got a gradient since the last exchange."""
        self.arrived = False
        """Whether it got one in this backward pass."""
        self.fresh = False
        """Whether autograd made the gradient outside the bucket, so that `p.grad` was None before."""


@dataclass(eq=False)
class Bucket:
    """Gradients, or buffers, in one piece of memory, followed by a `has_grad` flag for each: 1 if this rank has one.

    Flags are averaged with the rest: 0 then means that no rank had a gradient for that parameter,
    so `p.grad` stays None, as it would on one machine.
    """

    index: int
    """Its position in the order of exchanges, the same on every rank."""
    slots: list[Slot]
    flat: Tensor
    """All of its memory: what is exchanged."""
    values: Tensor
    """Gradients that may be compressed: the first part of `flat`."""
    exact: Tensor
    """The rest of `flat`: small gradients, and `has_grad`."""
    has_grad: Tensor
    """One flag per slot, of shape (num_slots,): the last part of `exact`."""
    starts: list[int]
    """Index in `flat` at which each slot begins."""
    of_parameters: bool
    """Whether it holds gradients of parameters; else buffers."""

    def __post_init__(self) -> None:
        for slot in self.slots:
            slot.bucket = self
            slot.arrived = False
        self.missing = len(self.slots)
        """Gradients that have not arrived in this backward pass."""

    def expect(self) -> None:
        """Get ready for the next backward pass."""
        for slot in self.slots:
            slot.arrived = slot.touched = False
        self.missing = len(self.slots)

    def image(self) -> Tensor:
        """Return the parameters or buffers themselves, on the CPU, laid out as in the bucket; 0 elsewhere."""
        flat = torch.zeros(self.flat.numel(), dtype=self.flat.dtype, device="cpu")
        for view, slot in zip(self.views(flat), self.slots, strict=True):
            view.copy_(slot.tensor.detach())
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the slots' parts of memory that is laid out like this bucket."""
        ends = [(start, start + slot.tensor.numel()) for start, slot in zip(self.starts, self.slots, strict=True)]
        return [like(flat[start:stop], slot.tensor) for (start, stop), slot in zip(ends, self.slots, strict=True)]

    def fill(self) -> list[tuple[Slot, Tensor]]:
        """Move gradients into the bucket's memory and set the `has_grad` flags.

        Returns copies of gradients from before this pass, of parameters that this pass did not reach, to be put back.
        """
        if not self.of_parameters:
            # One call for all slots: on a GPU a few kernels instead of one per tensor.
            torch._foreach_copy_([slot.view for slot in self.slots], [slot.tensor for slot in self.slots])
            self.has_grad.fill_(1)
            return []
        views, sources, kept, all_touched = [], [], [], True
        for slot in self.slots:
            grad = slot.tensor.grad
            if grad is None:
                # Backward did not reach it, or the user has dropped it since: this rank contributes zeros.
                slot.touched = all_touched = False
                slot.view.zero_()
                continue
            if not slot.touched:
                # The exchange overwrites the view; `_settle` puts this back if no rank has a new gradient.
                all_touched = False
                kept.append((slot, grad.detach().clone()))
            # True in the first pass, and always after `zero_grad(set_to_none=True)`.
            slot.fresh = grad is not slot.view
            if slot.fresh:
                _refuse_sparse(slot, grad)
                views.append(slot.view)
                sources.append(grad)
                # From here on autograd accumulates into the bucket itself, until the user sets the gradient to None.
                slot.tensor.grad = slot.view
        if views:
            torch._foreach_copy_(views, sources)
        if all_touched:
            self.has_grad.fill_(1)
        else:
            # One copy from the host, rather than one write to the device per slot.
            self.has_grad.copy_(torch.tensor([float(slot.touched) for slot in self.slots], device="cpu"))
        return kept


def _refuse_sparse(slot: Slot, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise ConfigError(
            f"parameter '{slot.name}' has a sparse gradient; only dense ones can be exchanged. Build its embedding "
            "with sparse=False."
        )


class Memory:
    """All bucket memory of one device and dtype, allocated once and cut anew as buckets change."""

    def __init__(
        self, slots: Sequence[Slot], transport: Transport, sizes_only: bool = False, exact_below: int = 0
    ) -> None:
        tensor = slots[0].tensor
        self._exact_below = exact_below
        # Enough for any division into buckets: per slot its elements, a flag, and padding for both.
        self._line = max(1, _LINE_BYTES // tensor.itemsize)
        numel = sum(self._aligned(slot.tensor.numel()) + 2 * self._line for slot in slots)
        if sizes_only:
            self.flat = cast(Tensor, SizeOnlyTensor(numel, tensor.dtype, tensor.itemsize))
        elif tensor.device.type == "cpu" and isinstance(transport, SharesMemory):
            # Shared memory: the other ranks of this host read and sum it in place.
            self.flat = transport.empty(numel, tensor.dtype)
        else:
            self.flat = torch.empty(numel, dtype=tensor.dtype, device=tensor.device)
        self.flat.zero_()
        self._sizes_only = sizes_only
        self._used = 0

    def start_over(self) -> None:
        """Cut anew from the start. The padding between tensors must be 0, because it is summed with the rest."""
        self._used = 0
        self.flat.zero_()

    def take(self, index: int, slots: list[Slot], of_parameters: bool) -> Bucket:
        """Cut the next bucket for `slots`, small ones last."""
        start = values_end = self._used
        # The sort is stable: slots keep the order of arrival within both parts.
        slots = sorted(slots, key=self._is_small)
        starts = []
        for slot in slots:
            starts.append(self._used - start)
            if not self._sizes_only:
                slot.view = like(self.flat[self._used : self._used + slot.tensor.numel()], slot.tensor)
            self._used += self._aligned(slot.tensor.numel())
            # Buffers never advance `values_end`: all of them are exchanged exactly.
            if of_parameters and not self._is_small(slot):
                values_end = self._used
        has_grad = self.flat[self._used : self._used + len(slots)]
        stop = self._used + len(slots)
        flat, values, exact = self.flat[start:stop], self.flat[start:values_end], self.flat[values_end:stop]
        # The next bucket starts on a cache line: two exchanges may write to both at once.
        self._used += self._aligned(len(slots))
        return Bucket(index, slots, flat, values, exact, has_grad, starts, of_parameters)

    def _is_small(self, slot: Slot) -> bool:
        return slot.tensor.numel() < max(1, self._exact_below) or not slot.tensor.is_floating_point()

    def _aligned(self, numel: int) -> int:
        return -(-numel // self._line) * self._line


Kind = tuple[torch.device, torch.dtype]


def cut_buckets(groups: tuple[list[Slot], list[Slot]], memories: dict[Kind, Memory], max_bytes: int) -> list[Bucket]:
    """Cut parameters, then buffers, in the order given, into buckets of about `max_bytes` and of one kind."""
    for memory in memories.values():
        memory.start_over()
    parts = [(part, group is groups[0]) for group in groups for part in _divided(group, max_bytes)]
    return [
        memories[kind_of(part[0].tensor)].take(index, part, of_parameters)
        for index, (part, of_parameters) in enumerate(parts)
    ]


def kind_of(tensor: Tensor) -> Kind:
    """Return the device and dtype of a tensor: tensors that differ in either cannot share a bucket."""
    return tensor.device, tensor.dtype


def _divided(slots: Iterable[Slot], max_bytes: int) -> Iterator[list[Slot]]:
    """Divide slots into lists of one kind each, which are closed when they have `max_bytes`."""
    # Lists of several kinds fill at the same time. A tensor is never cut, so a list may exceed `max_bytes`.
    unfinished: dict[Kind, tuple[list[Slot], int]] = {}
    for slot in slots:
        kind = kind_of(slot.tensor)
        part, num_bytes = unfinished.get(kind, ([], 0))
        part.append(slot)
        unfinished[kind] = part, num_bytes + slot.tensor.nbytes
        # The order of closing is the order of exchanges: a bucket comes when its last slot does.
        if unfinished[kind][1] >= max_bytes:
            yield unfinished.pop(kind)[0]
    yield from (part for part, _ in unfinished.values())


def like(flat: Tensor, tensor: Tensor) -> Tensor:
    """Return `flat` in the shape and, where that is dense, the memory order of `tensor`, as autograd would make it."""
    return flat.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else flat.view(tensor.shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill their memory without gaps, in whatever order."""
    # A permuted dense tensor (channels_last, for example) is contiguous once its strides decrease.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor in one dimension, in the order of `like`; its own memory where it is dense."""
    data = tensor.detach()
    return data.as_strided((data.numel(),), (1,)) if is_dense(data) else data.view(-1)
