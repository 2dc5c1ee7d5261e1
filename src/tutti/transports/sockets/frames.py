"""The byte format of a connection: one hello, then messages, each a header followed by the bytes of a tensor.

All integers are little-endian. Data goes in one direction only, from the rank that opened the connection.
"""

import struct

import torch
from torch import Tensor

HELLO = struct.Struct("<16sI")
"""The receiver's token, which proves that the sender can read the job's store; the sender's rank in the channel."""
HEADER = struct.Struct("<qQI")
"""Tag, number of bytes that follow, index of the dtype in `DTYPES`."""

DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
"""All dtypes of torch, in an order that is the same on every rank."""

DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy."""
    # An empty tensor has no memory that a view could refer to.
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat = tensor.detach().reshape(-1)
    return memoryview((flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)).numpy())  # type: ignore[arg-type]
