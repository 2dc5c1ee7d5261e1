"""Only values beyond a threshold, and of them only the sign."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.codecs import kernels
from tutti.codecs.base import Codec, CodecSpeed, Packet, State, copy_back, flat_float32, flat_view
from tutti.codecs.indices import check_room, decode_symbols, encode_symbols, from_gaps, gaps, index_bytes, order_for
from tutti.codecs.packet import HEADER, Header, floats, new_packet, read
from tutti.codecs.scale_groups import ScaleGroups
from tutti.codecs.selection import about_largest
from tutti.errors import ConfigError, PacketError

_KIND = 4
_LARGEST = torch.finfo(torch.float32).max
_FIXED = 8
"""Bytes of a payload before the symbols: the threshold, and how many values are not finite."""


@dataclass(frozen=True)
class Threshold(Codec):
    """Values beyond ±τ are sent as ±τ, with their indices, and nothing is said of the others (Strom 2015).

    What is not finite is sent as it is.

    Args:
        tau: the threshold; by default it is chosen anew each time so that about `density` of the values are beyond it.
        density: the share of values to send.
    """

    tau: float | None = None
    density: float = 0.01
    name = "threshold"
    sparse = True
    speed = CodecSpeed(3.6e9, 11e9)

    def __post_init__(self) -> None:
        mistakes = []
        if self.tau is not None and not 0 < self.tau <= _LARGEST:
            mistakes.append(
                f"tau must be above 0 and at most {_LARGEST:.2g}, got {self.tau!r}; leave it out to have it chosen"
            )
        if not 0 < self.density <= 1:
            mistakes.append(f"density must be above 0 and at most 1, got {self.density!r}")
        if mistakes:
            raise ConfigError(f"Threshold: {'; '.join(mistakes)}.")

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        values = flat_float32(tensor, "Threshold")
        check_room(values.numel())
        tau = self.tau or about_largest(values, residual, self.density) or _mean_magnitude(values, residual)
        indices, found = kernels.for_device(values.device).pick(values, residual, tau)
        finite = found.isfinite()
        if residual is not None:
            sent, said = indices[finite].long(), found[finite]
            residual.scatter_(0, sent, said - tau * torch.sign(said))
        return _packet(indices, found, finite, tau, values), state

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        header, payload = read(packet, _KIND, out.numel())
        if payload.numel() < _FIXED:
            raise PacketError(f"a packet with {payload.numel()} bytes of payload, wanted {_FIXED} or more")
        tau = floats(payload, 1, scale)
        if not bool((tau >= 0) & (tau < math.inf)):
            raise PacketError(f"a packet with a threshold of {float(tau)}")
        num_odd = int(payload[4:8].cpu().clone().view(torch.int32))
        fixed = _FIXED + 8 * num_odd
        if num_odd < 0 or payload.numel() < fixed:
            raise PacketError(f"a packet that says {num_odd} values in {payload.numel()} bytes")
        odd_indices = payload[_FIXED : _FIXED + 4 * num_odd].cpu().clone().view(torch.int32).long()
        odd = payload[_FIXED + 4 * num_odd : fixed].clone().view(torch.float32)
        if ((odd_indices < 0) | (odd_indices >= out.numel())).any():
            raise PacketError(f"a packet that says a place beyond {out.numel()} elements")
        if (odd_indices.diff() <= 0).any():
            raise PacketError("a packet that says indices in no order")
        symbols = decode_symbols(payload[fixed:], header.count, header.parameter, 2 * out.numel() + 1)
        indices = from_gaps(symbols >> 1, out.numel()).to(out.device)
        said = tau * torch.from_numpy(1 - 2 * (symbols & 1)).to(out.device)
        flat = flat_view(out)
        if add:
            flat.index_add_(0, indices, said)
        else:
            flat.zero_()
            flat.scatter_(0, indices, said)
        if num_odd:
            flat[odd_indices.to(out.device)] += odd
        copy_back(flat, out)

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        return HEADER.size + _FIXED + index_bytes(numel, self.density) + math.ceil(self.density * numel / 8)

    def __str__(self) -> str:
        tau = [] if self.tau is None else [repr(self.tau)]
        density = [] if self.density == type(self)().density else [f"density={self.density!r}"]
        return f"{self.name}:{','.join([*tau, *density])}".rstrip(":")


def _mean_magnitude(values: Tensor, residual: Tensor | None) -> float:
    """Of those that are not zero, where they are fewer than would be sent; 0 if there are none."""
    wanted = values if residual is None else values + residual
    some = wanted[(wanted != 0) & wanted.isfinite()].abs()
    return min(float(some.double().mean()), _LARGEST) if some.numel() else 0.0


def _packet(indices: Tensor, found: Tensor, finite: Tensor, tau: float, values: Tensor) -> Packet:
    rare = (~finite).nonzero().flatten()
    odd_indices, odd = indices[rare].to(torch.int32), found[rare]
    if len(rare):
        indices, found = indices[finite], found[finite]
    sent, negative = indices.cpu().numpy(), (found < 0).cpu().numpy()
    symbols = 2 * gaps(sent) + negative
    order = order_for(symbols)
    encoded = torch.from_numpy(encode_symbols(symbols, order))
    fixed = _FIXED + 8 * len(odd)
    packet, payload = new_packet(
        Header(_KIND, len(symbols), values.numel(), order), fixed + encoded.numel(), values.device
    )
    payload[:4].view(torch.float32).fill_(tau)
    payload[4:8].view(torch.int32).fill_(len(odd))
    payload[_FIXED : _FIXED + 4 * len(odd)].view(torch.int32).copy_(odd_indices)
    payload[_FIXED + 4 * len(odd) : fixed].view(torch.float32).copy_(odd)
    payload[fixed:].copy_(encoded)
    return packet
