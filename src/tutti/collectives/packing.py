"""Nested containers of tensors and plain values as bytes. Not by pickle: a received pickle can run code."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError


def pack(value: Any, tensors: list[Tensor]) -> Any:
    """Return a nested value as JSON values; its tensors are appended to `tensors` and replaced by their index there."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"items": [[pack(k, tensors), pack(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        # The type's name is kept beside the items, because JSON has one kind of list: `unpack` would make lists of
        # tuples.
        return {type(value).__name__: [pack(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"a {type(value).__name__} cannot be sent to other ranks; tensors, numbers, texts, None, and lists, tuples and "
        "dicts of them can."
    )


def unpack(value: Any, tensors: list[Tensor]) -> Any:
    """Return the value that `pack` made JSON values of."""
    if not isinstance(value, dict):
        return value
    # `pack` makes dicts of exactly one item; the user's dicts are under "items", since JSON keys must be texts.
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "items":
        return {unpack(k, tensors): unpack(v, tensors) for k, v in content}
    items = [unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def to_bytes(value: Any) -> Tensor:
    """Return 8 bytes of a length, JSON of that length, and the tensors' bytes one after the other."""
    tensors: list[Tensor] = []
    packed = pack(value, tensors)
    kinds = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
    head = json.dumps([packed, kinds]).encode()
    # In a dry run tensors have no values; their sizes still have to travel.
    tensors = [torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor for tensor in tensors]
    raw = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    begin = torch.frombuffer(bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8)
    return torch.cat([begin, *raw]) if raw else begin


def from_bytes(data: Tensor) -> Any:
    """Return the value that `to_bytes` made bytes of."""
    octets = data.numpy()
    length = int.from_bytes(octets[:8].tobytes(), "little")
    packed, kinds = json.loads(octets[8 : 8 + length].tobytes())
    tensors, start = [], 8 + length
    for shape, name in kinds:
        dtype = getattr(torch, name)
        stop = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        tensors.append(data[start:stop].clone().view(dtype).view(shape))
        start = stop
    return unpack(packed, tensors)
