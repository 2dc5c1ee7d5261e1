"""`broadcast_nested`: a nest of tensors and plain values, sent by one rank to all others."""

from typing import Any

import torch
from torch import Tensor

from tutti.collectives.broadcast import broadcast_all
from tutti.collectives.messages import broadcast_json
from tutti.collectives.packing import pack, unpack
from tutti.transports import Transport


def broadcast_nested(value: Any, transport: Transport, source: int) -> Any:
    """Return on every rank the nest that rank `source` gives; the others give None. Collective."""
    order = [source, *(rank for rank in range(transport.size) if rank != source)]
    # Numbered so that the source has rank 0 there, from which values are broadcast.
    channel = transport.channel("state", order)
    try:
        tensors: list[Tensor] = []
        packed = None if channel.rank else pack(value, tensors)
        kinds = [[list(each.shape), str(each.dtype).removeprefix("torch.")] for each in tensors]
        packed, kinds = broadcast_json([packed, kinds], channel)
        if channel.rank:
            tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for shape, dtype in kinds]
        else:
            tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
        broadcast_all([tensor for tensor in tensors if tensor.numel()], channel)
        return unpack(packed, tensors)
    finally:
        channel.close()
