"""`TopK`: only the largest values with their indices (Deep Gradient Compression, Lin et al. 2018)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.codecs.base import CPU, Codec, CodecSpeed, Packet, State, copy_back, flat_float32, flat_view
from tutti.codecs.indices import decode_symbols, encode_symbols, from_gaps, gaps, index_bytes, order_for
from tutti.codecs.packet import HEADER, Header, floats, new_packet, read
from tutti.codecs.scale_groups import ScaleGroups
from tutti.codecs.selection import largest
from tutti.errors import ConfigError, PacketError

_KIND = 5
"""Number of this codec in packets, and of chains that begin with it."""

_WARM_DENSITY = 0.25
"""Density in the first step of a warm-up, as in the paper."""


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the values of largest magnitude, unchanged, with their indices. The others count as zero.

    Args:
        density: the share of values to send.
        warmup_steps: steps in which the density falls exponentially from a quarter to `density`.
        momentum: accumulate velocities instead of gradients, and reset the velocity of values that are sent. These are
            the momentum correction and the momentum factor masking of Lin et al. 2018, for an optimiser that has no
            momentum of its own. It needs `ErrorFeedback`.
    """

    density: float = 0.01
    warmup_steps: int = 0
    momentum: float = 0.0
    name = "topk"
    sparse = True
    speed = CodecSpeed(3.2e9, 14e9)

    def __post_init__(self) -> None:
        mistakes = []
        if not (isinstance(self.density, int | float) and 0 < self.density <= 1):
            mistakes.append(f"density must be above 0 and at most 1, got {self.density!r}")
        if not (isinstance(self.warmup_steps, int) and self.warmup_steps >= 0):
            mistakes.append(f"warmup_steps must be 0 or more, got {self.warmup_steps!r}")
        if not 0 <= self.momentum < 1:
            mistakes.append(f"momentum must be at least 0 and below 1, got {self.momentum!r}")
        if mistakes:
            raise ConfigError(f"TopK: {'; '.join(mistakes)}.")

    @property
    def delay(self) -> int:
        # Measured (docs/learning-rates.md): far less than 1 / density, because large values come again.
        return 0 if self.density == 1 else 3

    @property
    def needs_feedback(self) -> bool:
        return self.momentum > 0

    def start(self, numel: int, seed: int = 0, device: torch.device = CPU) -> State:
        state: State = {"step": 0} if self.warmup_steps else {}
        return {**state, "velocity": torch.zeros(numel, dtype=torch.float32, device=device)} if self.momentum else state

    def select(self, tensor: Tensor, state: State, residual: Tensor | None) -> tuple[Tensor, Tensor, State]:
        """Return the indices and values to send, and the new state. What is sent is removed from the residual."""
        values = flat_float32(tensor, "TopK")
        if self.momentum:
            if residual is None:
                raise ConfigError("TopK: momentum accumulates in a residual: use ErrorFeedback(TopK(momentum=...)).")
            # Velocity u ← m u + g. The residual accumulates velocities, not gradients (momentum correction).
            values = self.momentum * state["velocity"] + values
            state["velocity"].copy_(torch.where(values.isfinite(), values, state["velocity"]))
        count = math.ceil(self._density_at(state.get("step", 0)) * values.numel())
        indices, chosen = largest(values, residual, count)
        if residual is not None:
            sent = indices[chosen.isfinite()].long()
            # Momentum factor masking: the velocity of what was sent starts again at zero, as its residual does.
            for memory in (residual, *([state["velocity"]] if self.momentum else [])):
                memory.index_fill_(0, sent, 0.0)
        return indices, chosen, {**state, "step": state["step"] + 1} if self.warmup_steps else state

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        indices, chosen, state = self.select(tensor, state, residual)
        # torch cannot view an empty tensor as another dtype.
        data = chosen.view(torch.uint8) if len(chosen) else chosen.to(torch.uint8)
        return pack(indices, data, tensor.numel()), state

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        indices, data = unpack(packet, out.numel())
        if data.numel() != 4 * len(indices):
            raise PacketError(f"a packet of {len(indices)} indices with {data.numel()} bytes of values")
        put(indices, floats(data, len(indices), scale), out, add)

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        return HEADER.size + 8 + 4 * math.ceil(self.density * numel) + index_bytes(numel, self.density)

    def _density_at(self, step: int) -> float:
        """Return the density of a step: a geometric interpolation during warm-up, and `density` after it."""
        if step >= self.warmup_steps:
            return self.density
        share = step / self.warmup_steps
        return max(self.density, _WARM_DENSITY ** (1 - share) * self.density**share)

    def __str__(self) -> str:
        default = type(self)()
        more = [
            f"{key}={getattr(self, key)!r}"
            for key in ("warmup_steps", "momentum")
            if getattr(self, key) != getattr(default, key)
        ]
        if self.density == default.density and not more:
            return self.name
        return f"{self.name}:{','.join([repr(self.density), *more])}"


def pack(indices: Tensor, values: Tensor, numel: int) -> Packet:
    """Return a packet of indices and of `values`, the bytes that encode the values at those indices.

    Payload: 8 bytes for the length of `values`, `values`, padding to a multiple of 8, and the Golomb code of the gaps.
    """
    steps = gaps(indices.cpu().numpy())
    order = order_for(steps)
    encoded = torch.from_numpy(encode_symbols(steps, order))
    padded_bytes = -(-values.numel() // 8) * 8
    packet, payload = new_packet(
        Header(_KIND, len(indices), numel, order), 8 + padded_bytes + encoded.numel(), values.device
    )
    payload[:8].view(torch.int64).fill_(values.numel())
    payload[8 : 8 + values.numel()] = values
    # Zeros, so that equal tensors give equal packets.
    payload[8 + values.numel() : 8 + padded_bytes] = 0
    payload[8 + padded_bytes :] = encoded.to(values.device)
    return packet


def unpack(packet: Packet, numel: int) -> tuple[Tensor, Tensor]:
    """Return the indices of a packet, and the bytes that encode its values. Raises `PacketError`."""
    header, payload = read(packet, _KIND, numel)
    if payload.numel() < 8:
        raise PacketError(f"a packet with {payload.numel()} bytes of payload, wanted 8 or more")
    # Cloned: a view as int64 needs memory aligned to 8 bytes, which a packet inside a larger message may not be. The
    # number comes from another rank, so it is checked before anything is cut by it.
    num_bytes = int(payload[:8].cpu().clone().view(torch.int64))
    padded_bytes = -(-num_bytes // 8) * 8
    if num_bytes < 0 or 8 + padded_bytes > payload.numel():
        raise PacketError(
            f"a packet whose payload gives {num_bytes} bytes of values, and that has {payload.numel() - 8}"
        )
    steps = decode_symbols(payload[8 + padded_bytes :], header.count, header.parameter, numel)
    return from_gaps(steps, numel), payload[8 : 8 + num_bytes]


def put(indices: Tensor, values: Tensor, out: Tensor, add: bool) -> None:
    """Overwrite `out` with `values` at `indices` and zeros elsewhere, or add them to it."""
    flat = flat_view(out)
    indices = indices.to(flat.device)
    if add:
        flat.index_add_(0, indices, values)
    else:
        flat.zero_()
        flat.scatter_(0, indices, values)
    copy_back(flat, out)
