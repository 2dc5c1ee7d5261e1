"""What optimisers remember, as messages: JSON, and the bytes of tensors."""

import json
from typing import Any

import torch
from torch import Tensor

from tutti.replica.state import pack, unpack
from tutti.strategies.parameter_server.messages.wire import STATE
from tutti.transports import Transport
from tutti.transports.base import Operation


def tell(value: Any, peer: int, transport: Transport) -> Operation:
    """Send a nest of containers, numbers and tensors."""
    tensors: list[Tensor] = []
    packed = pack(value, tensors)
    kinds = [[list(each.shape), str(each.dtype).removeprefix("torch.")] for each in tensors]
    text = torch.frombuffer(bytearray(json.dumps([packed, kinds]).encode()), dtype=torch.uint8)
    parts = [each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in tensors if each.numel()]
    data = torch.cat([text, *parts])
    yield transport.isend(torch.tensor([text.numel(), data.numel()], device="cpu"), peer, STATE)
    yield transport.isend(data, peer, STATE)


def hear(peer: int, transport: Transport) -> Any:
    """Receive what `tell` sent: steps that return it."""
    sizes = torch.empty(2, dtype=torch.int64, device="cpu")
    yield transport.irecv(sizes, peer, STATE)
    data = torch.empty(int(sizes[1]), dtype=torch.uint8, device="cpu")
    yield transport.irecv(data, peer, STATE)
    packed, kinds = json.loads(data[: int(sizes[0])].numpy().tobytes())
    tensors, place = [], int(sizes[0])
    for shape, kind in kinds:
        made = torch.empty(shape, dtype=getattr(torch, kind), device="cpu")
        if made.numel():
            made.view(-1).view(torch.uint8).copy_(data[place : place + made.nbytes])
        tensors.append(made)
        place += made.nbytes
    return unpack(packed, tensors)
