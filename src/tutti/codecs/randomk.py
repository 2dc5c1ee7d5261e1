"""`RandomK`: a random subset of values, the same on every rank (Stich, Cordonnier & Jaggi 2018)."""

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
"""Number of this codec in packets."""


@dataclass(frozen=True)
class RandomK(Codec):
    """Sends one random value out of every 1/density consecutive ones.

    All ranks choose the same indices, so packets can be summed without decoding, and no index is sent.
    Values are not scaled up, so without error feedback the decoded tensor is smaller than the original by the density.

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
        return {"step": 0}  # The seed is ignored, because all ranks must choose the same indices.

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        values = flat_float32(tensor, "RandomK")
        chosen = self._choose(state["step"], values)
        picked = _take(values, residual, chosen)
        header = Header(_KIND, len(chosen), values.numel(), state["step"])
        packet, payload = new_packet(header, 4 * len(chosen), values.device)
        payload.view(torch.float32).copy_(picked)
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
        picked = _take(values, residual, chosen)
        yield picked
        put(chosen, picked, values, add=False)
        return {**state, "step": state["step"] + 1}

    def round_sizes(self, layout: TensorLayout) -> list[int]:
        # The end of the last tensor is the length of the flat one.
        return [self._count(max((start + math.prod(shape) for start, shape in layout), default=0))]

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        return HEADER.size + 4 * self._count(numel)

    def _count(self, numel: int) -> int:
        return math.ceil(self.density * numel)

    def _choose(self, step: int, like: Tensor) -> Tensor:
        """Return the indices of a step, in order. They depend on the step and the length alone."""
        count = self._count(like.numel())
        # An odd multiplier spreads steps over 32 bits, so that neighbouring ones draw unrelated indices.
        seed = step * 0xC2B2AE35 % 2**32
        return kernels.for_device(like.device).draw(like.numel(), count, seed, like.device)

    def __str__(self) -> str:
        return self.name if self == type(self)() else f"{self.name}:{self.density!r}"


def _take(values: Tensor, residual: Tensor | None, chosen: Tensor) -> Tensor:
    """Return the values at the chosen indices, and remove them from the residual.

    A value that is not finite replaces the chosen one of its stretch, so that every rank sees it.
    """
    wanted = values if residual is None else values + residual
    picked = wanted[chosen]
    # One sum tells whether all values are finite, in less time than a test of each.
    not_finite = (~wanted.isfinite()).nonzero().flatten() if not bool(torch.isfinite(wanted.sum())) else None
    if residual is not None:
        # The residual takes over all values, and is then emptied where a finite value is sent.
        residual.copy_(wanted if not_finite is None else torch.where(wanted.isfinite(), wanted, residual))
        residual.index_fill_(0, chosen if not_finite is None else chosen[picked.isfinite()], 0.0)
    if not_finite is not None:
        stretches = edges(values.numel(), len(chosen), values.device)
        # `searchsorted` gives, for each of these indices, the number of the stretch that it lies in.
        picked[torch.searchsorted(stretches, not_finite, right=True) - 1] = wanted[not_finite]
    return picked
