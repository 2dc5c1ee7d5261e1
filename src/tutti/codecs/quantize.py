"""`Quantize`: a few bits per value, by stochastic rounding (QSGD, Alistarh et al. 2017; TernGrad, Wen et al. 2017)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tutti.codecs import kernels
from tutti.codecs.base import CPU, Codec, CodecSpeed, Packet, State, copy_back, flat_float32, flat_view, groups_or_rows
from tutti.codecs.packet import HEADER, Header, expect, floats, new_packet, read
from tutti.codecs.scale_groups import ScaleGroups
from tutti.errors import ConfigError

_KIND = 2
"""Number of this codec in packets."""
_BITS = (8, 4, 2)


@dataclass(frozen=True)
class Quantize(Codec):
    """Rounds every value to one of 2^bits - 1 evenly spaced levels between ± the largest magnitude of its block.

    Rounding is stochastic: up or down with probabilities that make the expected result the value itself (Alistarh et
    al. 2017). With a residual it is to the nearest level, because error feedback repairs a bias, and noise as coarse as
    two bits could make the residual grow without bound.

    Args:
        bits: 8, 4 or 2 per value. With 2 the levels are -1, 0 and 1 times the largest (Wen et al. 2017).
        block: largest number of values that share a scale.
    """

    bits: Literal[8, 4, 2] = 8
    block: int = 512
    name = "quantize"
    speed = CodecSpeed(8.7e9, 25e9)

    def __post_init__(self) -> None:
        mistakes = []
        if not (isinstance(self.bits, int) and self.bits in _BITS):
            mistakes.append(f"bits must be one of {', '.join(map(str, _BITS))}, got {self.bits!r}")
        if not (isinstance(self.block, int) and 16 <= self.block <= 4096):
            mistakes.append(f"block must be between 16 and 4096 values, got {self.block!r}")
        if mistakes:
            raise ConfigError(f"Quantize: {'; '.join(mistakes)}.")

    def start(self, numel: int, seed: int = 0, device: torch.device = CPU) -> State:
        return {"seed": seed, "step": 0}

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        values, groups = flat_float32(tensor, "Quantize"), groups_or_rows(tensor, groups).blocks(self.block)
        count, table = len(groups), groups.table(self.bits, values.device)
        packet, payload = new_packet(
            Header(_KIND, count, values.numel(), self.bits), 4 * count + table.num_bytes, values.device
        )
        # Payload: one float32 per block, then the codes.
        scales, codes = payload[: 4 * count].view(torch.float32), payload[4 * count :]
        # Odd multipliers of 32 bits spread seeds and steps, so that streams of neighbouring ones do not overlap.
        seed = (state["seed"] * 0x85EBCA6B + state["step"] * 0xC2B2AE35) % 2**32
        kernels.for_device(values.device).quantize_encode(values, residual, table, self.bits, seed, scales, codes)
        return packet, {**state, "step": state["step"] + 1}

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        groups = groups_or_rows(out, groups).blocks(self.block)
        header, payload = read(packet, _KIND, out.numel())
        count, table = len(groups), groups.table(self.bits, out.device)
        # All checks before `out` is touched: a wrong packet must not leave half of it overwritten.
        expect("bits", header.parameter, self.bits)
        expect("blocks", header.count, count)
        expect("payload bytes", payload.numel(), 4 * count + table.num_bytes)
        flat = flat_view(out)
        kernels.for_device(flat.device).quantize_decode(
            payload[4 * count :], floats(payload, count, scale), table, self.bits, flat, add
        )
        copy_back(flat, out)

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        blocks = (ScaleGroups.from_shape((numel,)) if groups is None else groups).blocks(self.block)
        return HEADER.size + 4 * len(blocks) + blocks.num_bytes(self.bits)

    def __str__(self) -> str:
        block = "" if self.block == type(self)().block else f",block={self.block}"
        return f"{self.name}:{self.bits}{block}"
