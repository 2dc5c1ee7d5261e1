"""The layout of packets: a header of 32 bytes, little-endian, and a payload that the codec knows.

| bytes | what |
| --- | --- |
| 0-1 | `Tt` |
| 2 | version of this layout |
| 3 | kind: which codec made it |
| 4-7 | how many groups have a scale, or how many values are sent |
| 8-15 | elements of the tensor |
| 16-23 | bytes of the packet, header included |
| 24-31 | a parameter of the codec's: bits, seed, or the length of a code |
"""

from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from tutti.errors import PacketError

VERSION = 1
HEADER = Struct("<2sBBIQQQ")
_MAGIC = b"Tt"


@dataclass(frozen=True)
class Header:
    """What a packet says of itself."""

    kind: int
    count: int
    numel: int
    parameter: int = 0


def new_packet(header: Header, payload_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for a packet, its header filled in; the packet, and its payload to be filled."""
    packet = torch.empty(HEADER.size + payload_bytes, dtype=torch.uint8, device=device)
    packet[: HEADER.size] = _header(header, packet.numel(), device)
    return packet, packet[HEADER.size :]


@lru_cache(maxsize=1024)
def _header(header: Header, num_bytes: int, device: torch.device) -> Tensor:
    fields = (header.kind, header.count, header.numel, num_bytes, header.parameter)
    data = HEADER.pack(_MAGIC, VERSION, *fields)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def read(packet: Tensor, kind: int, numel: int) -> tuple[Header, Tensor]:
    """The header and the payload of a packet of this kind for so many elements. Raises `PacketError`."""
    if packet.dtype != torch.uint8 or packet.dim() != 1:
        raise PacketError(f"a packet is one dimension of bytes, got {packet.dtype} {tuple(packet.shape)}")
    if packet.numel() < HEADER.size:
        raise PacketError(f"a packet has {HEADER.size} bytes or more, got {packet.numel()}: it is truncated")
    head = packet[: HEADER.size].cpu().numpy().tobytes()
    magic, version, got_kind, count, got_numel, num_bytes, parameter = HEADER.unpack(head)
    if magic != _MAGIC:
        raise PacketError(f"this is no packet: it begins with {magic!r}, wanted {_MAGIC!r}")
    if version != VERSION:
        raise PacketError(f"a packet of version {version}, wanted {VERSION}: run the same Tutti on every rank")
    if got_kind != kind:
        raise PacketError(f"a packet of kind {got_kind}, wanted {kind}: use the same codec on every rank")
    if got_numel != numel:
        raise PacketError(f"a packet of {got_numel} elements, wanted {numel}")
    if num_bytes != packet.numel():
        raise PacketError(f"a packet says that it has {num_bytes} bytes, and has {packet.numel()}")
    return Header(kind, count, numel, parameter), packet.contiguous()[HEADER.size :]


def expect(what: str, got: int, wanted: int) -> None:
    """Raise `PacketError` if a packet says `got` where it must say `wanted`."""
    if got != wanted:
        raise PacketError(f"a packet with {what} {got}, wanted {wanted}")


def floats(payload: Tensor, count: int, scale: float = 1.0) -> Tensor:
    """The first `count` float32 of a payload, times `scale`; in place where that is 1 and memory allows it."""
    part = payload[: 4 * count]
    numbers = part.clone().view(torch.float32) if part.storage_offset() % 4 else part.view(torch.float32)
    return numbers if scale == 1 else numbers * scale


def as_array(tensor: Tensor) -> np.ndarray:
    """The memory of a CPU tensor, for kernels."""
    return tensor.numpy()
