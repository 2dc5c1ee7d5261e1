"""Broadcast of many tensors from rank 0, in few large messages."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tutti.collectives.steps import on_flat, run
from tutti.collectives.tree import broadcast
from tutti.transports import Transport

_CHUNK_BYTES = 32 * 2**20
"""Tensors are joined up to about this size, which bounds the copy that a broadcast needs."""


def broadcast_all(tensors: Iterable[Tensor], transport: Transport) -> None:
    """Overwrite tensors on every rank with rank 0's. Collective.

    Ranks give tensors of the same shapes, dtypes and devices in the same order. Small ones travel together.
    """
    if transport.size == 1:
        return
    for group in groups(tensors):
        if len(group) == 1 and group[0].is_contiguous():
            run(on_flat(broadcast)(group[0].detach().view(-1), transport))  # In place: large tensors are not copied.
            continue
        # One message for many small tensors: a model has hundreds, and each would cost ⌈log₂ P⌉ latencies.
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        run(on_flat(broadcast)(flat, transport))
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of tensors of one device and dtype, in the same order on every rank.

    Each has about a chunk, or one tensor that is as large by itself, so that nothing large is joined with others.
    """
    open_groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        if tensor.nbytes >= _CHUNK_BYTES:
            yield [tensor]
            continue
        kind = (tensor.device, tensor.dtype)
        group, num_bytes = open_groups.get(kind, ([], 0))
        group.append(tensor)
        open_groups[kind] = group, num_bytes + tensor.nbytes
        if open_groups[kind][1] >= _CHUNK_BYTES:
            yield open_groups.pop(kind)[0]
    # A dict keeps the order of insertion, which is the same on every rank.
    yield from (group for group, _ in open_groups.values())
