"""The byte format of a connection: one hello, then messages, each a header followed by the bytes of a tensor.

All integers are little-endian. Data goes in one direction only, from the rank that opened the connection.

The hello proves that its sender is a member of the job: it has a MAC under the listener's key, which members get
through the control plane. The key itself is never sent here. The MAC covers the port and a random value, so a recorded
hello opens nothing at another listener, and is recognised at the same one.
"""

import hashlib
import hmac
import secrets
import struct
from typing import NamedTuple

import torch
from torch import Tensor

_VERSION = b"tuttims1"
"""The first bytes of a hello: which protocol, and its version. No TLS record starts like this."""
_PROVED = struct.Struct("<8sI16s")
"""Fields that the MAC covers, beside the port: version, the sender's rank in the channel, a random value."""
HELLO_BYTES = _PROVED.size + hashlib.sha256().digest_size
KEY_BYTES = 32

HEADER = struct.Struct("<qQI")
"""Tag, number of bytes that follow, index of the dtype in `DTYPES`."""

MAX_TENSOR_BYTES = 2**40
"""No tensor is larger: a header that says more was not written by Tutti."""

DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)
"""All dtypes of torch, in an order that is the same on every rank."""

DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Hello(NamedTuple):
    """What a verified hello says."""

    rank: int
    nonce: bytes


def make_hello(key: bytes, port: int, rank: int) -> bytes:
    """The first bytes that `rank` sends to the listener with this key and port."""
    proved = _PROVED.pack(_VERSION, rank, secrets.token_bytes(16))
    return proved + _mac(key, port, proved)


def verify_hello(key: bytes, port: int, data: bytes) -> Hello | None:
    """What a hello says; None if its sender does not know the key. Nothing is interpreted before that is known."""
    proved, mac = data[: _PROVED.size], data[_PROVED.size :]
    if not hmac.compare_digest(mac, _mac(key, port, proved)):
        return None
    version, rank, nonce = _PROVED.unpack(proved)
    return Hello(rank, nonce) if version == _VERSION else None


def _mac(key: bytes, port: int, proved: bytes) -> bytes:
    return hmac.digest(key, proved + port.to_bytes(2, "little"), hashlib.sha256)


def header_fault(num_bytes: int, dtype_code: int) -> str | None:
    """Why a header cannot be of a tensor; None if it can."""
    if dtype_code >= len(DTYPES):
        return f"it sent a message of the unknown dtype {dtype_code} (there are {len(DTYPES)})"
    dtype = DTYPES[dtype_code]
    if num_bytes > MAX_TENSOR_BYTES or num_bytes % dtype.itemsize:
        return f"it sent a message of {num_bytes} bytes of {dtype}, which no tensor has"
    return None


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy."""
    # An empty tensor has no memory that a view could refer to.
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat = tensor.detach().reshape(-1)
    return memoryview((flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)).numpy())  # type: ignore[arg-type]
