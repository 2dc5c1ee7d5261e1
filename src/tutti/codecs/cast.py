"""`Cast`: every value as a shorter floating-point number (fp16, bf16, or fp8 with scales)."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tutti.codecs import kernels
from tutti.codecs.base import Codec, CodecSpeed, Packet, State, copy_back, flat_float32, flat_view, groups_or_rows
from tutti.codecs.packet import HEADER, Header, expect, floats, new_packet, read
from tutti.codecs.scale_groups import ScaleGroups
from tutti.errors import ConfigError

_KIND = 3
"""Number of this codec in packets."""

Number = Literal["fp16", "bf16", "fp8"]
_NAMES: tuple[Number, ...] = get_args(Number)
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(Codec):
    """Rounds every value to a shorter floating-point number. Finite values stay finite: large ones are clipped.

    Args:
        to: "fp16" (11 bits of precision, up to 65,504), "bf16" (8 bits of precision, float32's range), or "fp8" (e4m3,
            4 bits of precision, scaled so that the largest value of each group becomes 448, the largest of e4m3).
    """

    to: Number = "fp16"
    name = "cast"
    speed = CodecSpeed(7.9e9, 21e9)

    def __post_init__(self) -> None:
        if self.to not in _NAMES:
            raise ConfigError(f"Cast: to must be one of {', '.join(_NAMES)}, got {self.to!r}.")

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        values = flat_float32(tensor, "Cast")
        scaled = groups_or_rows(tensor, groups) if self.to == "fp8" else None
        count = len(scaled) if scaled is not None else 0
        # The number format travels as the header's parameter: a receiver that expects another one refuses the packet.
        header = Header(_KIND, count, values.numel(), _NAMES.index(self.to))
        packet, payload = new_packet(header, self._payload_bytes(values.numel(), scaled), values.device)
        if scaled is None:
            codes = payload.view(_DTYPES[self.to])
            kernels.for_device(values.device).cast_encode(values, residual, codes)
        else:
            # Payload: one float32 per group, then one byte per value.
            table = scaled.table(8, values.device)
            scales, codes = payload[: 4 * count].view(torch.float32), payload[4 * count :]
            kernels.for_device(values.device).fp8_encode(values, residual, table, scales, codes)
        return packet, state

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        scaled = groups_or_rows(out, groups) if self.to == "fp8" else None
        count = len(scaled) if scaled is not None else 0
        # All of it is checked before the first element of `out` is written.
        header, payload = read(packet, _KIND, out.numel())
        expect("number format", header.parameter, _NAMES.index(self.to))
        expect("scale groups", header.count, count)
        expect("payload bytes", payload.numel(), self._payload_bytes(out.numel(), scaled))
        flat = flat_view(out)
        if scaled is None:
            # A view as 16-bit numbers needs an even address, which a packet within a message may not have.
            aligned = payload.clone() if payload.storage_offset() % 2 else payload
            numbers = aligned.view(_DTYPES[self.to])
            if add:
                flat.add_(numbers, alpha=scale)
            else:
                flat.copy_(numbers)
                if scale != 1:
                    flat.mul_(scale)
        else:
            table = scaled.table(8, out.device)
            kernels.for_device(flat.device).fp8_decode(
                payload[4 * count :], floats(payload, count, scale), table, flat, add
            )
        copy_back(flat, out)

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        scaled = ScaleGroups.from_shape((numel,)) if groups is None else groups
        return HEADER.size + self._payload_bytes(numel, scaled if self.to == "fp8" else None)

    def _payload_bytes(self, numel: int, scaled: ScaleGroups | None) -> int:
        """Return the bytes of a payload: two per value, or with fp8 one, and a scale for each group."""
        return 2 * numel if scaled is None else 4 * len(scaled) + scaled.num_bytes(8)

    def __str__(self) -> str:
        return self.to
