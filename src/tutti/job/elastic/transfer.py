"""The state of a job that ranks take over from another one, sent by that rank to all.

A rank needs it if it is new, or if it missed the end of a step that others have completed. It takes over all or
nothing: everything is received before anything is changed, because the rank that sends may be lost in the middle.
"""

from typing import Any

import torch
from torch import Tensor

from tutti.collectives import broadcast_all, broadcast_json
from tutti.collectives.packing import pack, unpack
from tutti.transports import Transport


def share_state(state: dict[str, Any] | None, transport: Transport, source: int) -> dict[str, Any]:
    """Return on every rank the state that rank `source` gives. Collective.

    Args:
        state: a nest of tensors and plain values; None on all other ranks.
    """
    order = [source, *(rank for rank in range(transport.size) if rank != source)]
    # Numbered so that the source has rank 0 there, from which values are broadcast.
    channel = transport.channel("state", order)
    try:
        tensors: list[Tensor] = []
        packed = None if state is None else pack(state, tensors)
        kinds = [[list(each.shape), str(each.dtype).removeprefix("torch.")] for each in tensors]
        packed, kinds = broadcast_json([packed, kinds], channel)
        if state is None:
            tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for shape, dtype in kinds]
        else:
            tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
        broadcast_all([tensor for tensor in tensors if tensor.numel()], channel)
        received: dict[str, Any] = unpack(packed, tensors)
        return received
    finally:
        channel.close()
