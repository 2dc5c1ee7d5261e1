"""A few values, chosen at random, the same ones on every rank."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.codecs import kernels
from tutti.codecs.base import CPU, Codec, CodecSpeed, Packet, State, SumRounds, TensorLayout, flat_float32
from tutti.codecs.kernels.reference import edges
from tutti.codecs.packet import HEADER, Header, expect, floats, new_packet, read
from tutti.codecs.scale_groups import ScaleGroups
from tutti.codecs.topk import put
from tutti.errors import ConfigError

_KIND = 6


@dataclass(frozen=True)
class RandomK(Codec):
    """One value out of every stretch of 1/density, at random (Stich, Cordonnier & Jaggi 2018).

    All ranks choose the same indices, so packets can be summed without decoding, and no index is sent.
    Nothing is scaled up: without feedback, what arrives is the smaller by the density.

    Args:
        density: the share of values to send.
    """

    density: float = 0.5
    name = "randomk"
    linear = True
    speed = CodecSpeed(0.8e9, 2.5e9)

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"RandomK: density must be above 0 and at most 1, got {self.density!r}.")

    def start(self, numel: int, seed: int = 0, device: torch.device = CPU) -> State:
        return {"step": 0}  # Whatever the seed: ranks must choose alike.

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        values = flat_float32(tensor, "RandomK")
        chosen = self._choose(state["step"], values)
        found = _take(values, residual, chosen)
        header = Header(_KIND, len(chosen), values.numel(), state["step"])
        packet, payload = new_packet(header, 4 * len(chosen), values.device)
        payload.view(torch.float32).copy_(found)
        return packet, {"step": state["step"] + 1}

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        header, payload = read(packet, _KIND, out.numel())
        count = self._count(out.numel())
        expect("values", header.count, count)
        expect("payload bytes", payload.numel(), 4 * count)
        put(self._choose(header.parameter, out), floats(payload, count, scale), out, add)

    def rounds(self, values: Tensor, layout: TensorLayout, state: State, residual: Tensor | None = None) -> SumRounds:
        chosen = self._choose(state["step"], values)
        found = _take(values, residual, chosen)
        yield found
        put(chosen, found, values, add=False)
        return {**state, "step": state["step"] + 1}

    def round_sizes(self, layout: TensorLayout) -> list[int]:
        return [self._count(max((start + math.prod(shape) for start, shape in layout), default=0))]

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        return HEADER.size + 4 * self._count(numel)

    def _count(self, numel: int) -> int:
        return math.ceil(self.density * numel)

    def _choose(self, step: int, like: Tensor) -> Tensor:
        count = self._count(like.numel())
        seed = step * 0xC2B2AE35 % 2**32
        return kernels.for_device(like.device).draw(like.numel(), count, seed, like.device)

    def __str__(self) -> str:
        return self.name if self == type(self)() else f"{self.name}:{self.density!r}"


def _take(values: Tensor, residual: Tensor | None, chosen: Tensor) -> Tensor:
    """The chosen values, taken out of the residual; what is not finite takes the place of what was chosen beside it."""
    wanted = values if residual is None else values + residual
    found = wanted[chosen]
    odd = (~wanted.isfinite()).nonzero().flatten() if not bool(torch.isfinite(wanted.sum())) else None
    if residual is not None:
        residual.copy_(wanted if odd is None else torch.where(wanted.isfinite(), wanted, residual))
        residual.index_fill_(0, chosen if odd is None else chosen[found.isfinite()], 0.0)
    if odd is not None:
        stretches = edges(values.numel(), len(chosen), values.device)
        found[torch.searchsorted(stretches, odd, right=True) - 1] = wanted[odd]
    return found
