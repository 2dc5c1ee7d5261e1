"""`gather_state`: the states of all ranks on every rank, to be saved."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.collectives import all_gather, all_gather_json, parts, run
from tutti.replica.state import pack, unpack
from tutti.transports import Transport


def gather_state(local: Any, transport: Transport) -> list[Any]:
    """Return the nested containers, numbers and tensors of every rank, by rank. Collective; the same on every rank."""
    if transport.size == 1:
        return [local]
    data = _to_bytes(local)
    sizes = all_gather_json(data.numel(), transport)
    # Every rank's bytes are padded to the longest, since the all-gather works on parts of equal size.
    rows = torch.zeros(max(sizes) * transport.size, dtype=torch.uint8, device="cpu")
    slices = parts(rows.numel(), transport.size)
    rows[slices[transport.rank]][: data.numel()] = data
    run(all_gather.steps(rows, transport))
    return [_from_bytes(rows[part][:size]) for part, size in zip(slices, sizes, strict=True)]


def _to_bytes(value: Any) -> Tensor:
    """Return 8 bytes of a length, JSON of that length, and the tensors' bytes one after the other."""
    tensors: list[Tensor] = []
    packed = pack(value, tensors)
    kinds = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
    head = json.dumps([packed, kinds]).encode()
    # In a dry run tensors have no values; their sizes still have to travel.
    tensors = [torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor for tensor in tensors]
    raw = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    length = torch.tensor([len(head)], device="cpu").view(torch.uint8)
    return torch.cat([length, torch.frombuffer(bytearray(head), dtype=torch.uint8), *raw])


def _from_bytes(data: Tensor) -> Any:
    length = int(data[:8].clone().view(torch.int64))  # Cloned: `view` to a wider dtype needs an aligned offset.
    packed, kinds = json.loads(data[8 : 8 + length].numpy().tobytes())
    tensors, start = [], 8 + length
    for shape, name in kinds:
        dtype = getattr(torch, name)
        stop = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        tensors.append(data[start:stop].clone().view(dtype).view(shape))
        start = stop
    return unpack(packed, tensors)
