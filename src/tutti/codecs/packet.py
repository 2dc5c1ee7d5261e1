"""The layout of packets: a header of 32 bytes, little-endian, and a payload that depends on the codec.

| bytes | content |
| --- | --- |
| 0-1 | the letters `Tt` |
| 2 | version of this layout |
| 3 | kind: the number of the codec that made it |
| 4-7 | number of scale groups, or of values that are sent |
| 8-15 | elements of the tensor |
| 16-23 | bytes of the packet, header included |
| 24-31 | a parameter of the codec: bits, step, or the order of a Golomb code |

Payloads, by kind:

| kind | codec | payload |
| --- | --- | --- |
| 1 | 1-bit | low and high mean of every group as float32, then one bit per value |
| 2 | quantised | largest magnitude of every group as float32, then 8, 4 or 2 bits per value |
| 3 | cast | 2 bytes per value; for fp8 a float32 per group, then 1 byte per value |
| 4 | threshold | the threshold, the number of values that are not finite with them, then gaps and signs |
| 5 | top-k, chain | bytes of the values, the values (or the second codec's packet), padding to 8, then gaps |
| 6 | random k | the values as float32; their indices follow from the step in the header |
| 7 | low rank | the factors as float32 |

A decoder checks all of it before it writes anything, because packets come from other processes.
"""

from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from tutti.errors import PacketError

VERSION = 1
# Letters, version, kind, count, elements, bytes, parameter: the table above as a format. 32 bytes without padding.
HEADER = Struct("<2sBBIQQQ")
_MAGIC = b"Tt"


@dataclass(frozen=True)
class Header:
    """The fields of a header that differ between packets."""

    kind: int
    """Number of the codec."""
    count: int
    """Number of scale groups, or of values that are sent."""
    numel: int
    """Elements of the tensor."""
    parameter: int = 0
    """A number that depends on the codec: bits, step, or the order of a Golomb code."""


def new_packet(header: Header, payload_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a new packet with its header filled in, and a view of its payload to be filled in."""
    packet = torch.empty(HEADER.size + payload_bytes, dtype=torch.uint8, device=device)
    packet[: HEADER.size] = _header(header, packet.numel(), device)
    return packet, packet[HEADER.size :]


@lru_cache(maxsize=1024)
def _header(header: Header, num_bytes: int, device: torch.device) -> Tensor:
    """Return the bytes of a header. They are cached on the device, because buckets repeat every step."""
    fields = (header.kind, header.count, header.numel, num_bytes, header.parameter)
    data = HEADER.pack(_MAGIC, VERSION, *fields)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def read(packet: Tensor, kind: int, numel: int) -> tuple[Header, Tensor]:
    """Return the header and the payload of a packet of this kind for so many elements. Raises `PacketError`."""
    if packet.dtype != torch.uint8 or packet.dim() != 1:
        raise PacketError(f"a packet is one dimension of bytes, got {packet.dtype} {tuple(packet.shape)}")
    if packet.numel() < HEADER.size:
        raise PacketError(f"a packet has {HEADER.size} bytes or more, got {packet.numel()}: it is truncated")
    # One small copy from a GPU; the payload stays where it is.
    head = packet[: HEADER.size].cpu().numpy().tobytes()
    magic, version, got_kind, count, got_numel, num_bytes, parameter = HEADER.unpack(head)
    # From the most general mistake to the most special, so that the error names the real cause: bytes that are no
    # packet would fail every later test as well.
    if magic != _MAGIC:
        raise PacketError(f"not a packet: it begins with {magic!r}, wanted {_MAGIC!r}")
    if version != VERSION:
        raise PacketError(f"a packet of version {version}, wanted {VERSION}: run the same Tutti on every rank")
    if got_kind != kind:
        raise PacketError(f"a packet of kind {got_kind}, wanted {kind}: use the same codec on every rank")
    if got_numel != numel:
        raise PacketError(f"a packet of {got_numel} elements, wanted {numel}")
    if num_bytes != packet.numel():
        raise PacketError(f"a packet whose header gives {num_bytes} bytes, and that has {packet.numel()}")
    # Kernels read the payload's memory directly.
    return Header(kind, count, numel, parameter), packet.contiguous()[HEADER.size :]


def expect(what: str, got: int, wanted: int) -> None:
    """Raise `PacketError` if a field of a packet is `got` where it must be `wanted`."""
    if got != wanted:
        raise PacketError(f"a packet with {what} {got}, wanted {wanted}")


def floats(payload: Tensor, count: int, scale: float = 1.0) -> Tensor:
    """Return the first `count` float32 of a payload, times `scale`; a view of it if `scale` is 1 and it is aligned."""
    part = payload[: 4 * count]
    # A packet inside a message may begin at any byte; a view as float32 needs a multiple of 4.
    numbers = part.clone().view(torch.float32) if part.storage_offset() % 4 else part.view(torch.float32)
    return numbers if scale == 1 else numbers * scale


def as_array(tensor: Tensor) -> np.ndarray:
    """Return the memory of a CPU tensor as an array, for compiled kernels."""
    return tensor.numpy()
