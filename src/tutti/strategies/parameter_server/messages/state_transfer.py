"""Transfer of an optimiser's state between a server and a worker: a JSON description, then the bytes of its tensors.

Each transfer is two messages under `STATE_TAG`: the sizes (bytes of the description, bytes in all), then the data.
"""

import json
from typing import Any

import torch
from torch import Tensor

from tutti.collectives.packing import pack, unpack
from tutti.strategies.parameter_server.messages.wire import STATE_TAG
from tutti.transports import Transport
from tutti.transports.base import Operation


def send_state(state: Any, peer: int, transport: Transport) -> Operation:
    """Send a nest of containers, numbers and tensors to a rank."""
    tensors: list[Tensor] = []
    packed = pack(state, tensors)
    layouts = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
    description = torch.frombuffer(bytearray(json.dumps([packed, layouts]).encode()), dtype=torch.uint8)
    parts = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    data = torch.cat([description, *parts])
    # Sizes first, so that the receiver can allocate. One tag: they arrive in the order of sending.
    yield transport.isend(torch.tensor([description.numel(), data.numel()], device="cpu"), peer, STATE_TAG)
    yield transport.isend(data, peer, STATE_TAG)


def receive_state(peer: int, transport: Transport) -> Any:
    """Receive what a rank sent by `send_state`: a generator that returns it."""
    # Two messages: the bytes of the JSON text and of all together, then the text followed by the tensors' bytes.
    sizes = torch.empty(2, dtype=torch.int64, device="cpu")
    yield transport.irecv(sizes, peer, STATE_TAG)
    data = torch.empty(int(sizes[1]), dtype=torch.uint8, device="cpu")
    yield transport.irecv(data, peer, STATE_TAG)
    packed, layouts = json.loads(data[: int(sizes[0])].numpy().tobytes())
    tensors, position = [], int(sizes[0])
    for shape, dtype in layouts:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        if tensor.numel():
            # Copied as bytes: the position need not be aligned for the dtype.
            tensor.view(-1).view(torch.uint8).copy_(data[position : position + tensor.nbytes])
        tensors.append(tensor)
        position += tensor.nbytes
    return unpack(packed, tensors)
