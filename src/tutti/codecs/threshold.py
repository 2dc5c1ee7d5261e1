"""`Threshold`: the indices and signs of values beyond ±τ (Strom 2015)."""

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
"""Number of this codec in packets."""

_LARGEST = torch.finfo(torch.float32).max
_FIXED = 8
"""Bytes at the start of a payload: the threshold as float32, and the number of values that are not finite as int32."""


@dataclass(frozen=True)
class Threshold(Codec):
    """Sends values beyond ±τ as ±τ, with their indices. The others count as zero (Strom 2015).

    Values that are not finite are sent as they are. With error feedback a value of several τ is sent over several
    steps.

    Args:
        tau: the threshold. By default it is chosen in every call so that about `density` of the values are beyond it.
        density: the share of values to send, if `tau` is not given.
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
        # The sampled threshold is 0 where fewer values than `density` are not zero.
        tau = self.tau or about_largest(values, residual, self.density) or _mean_magnitude(values, residual)
        indices, picked = kernels.for_device(values.device).pick(values, residual, tau)
        finite = picked.isfinite()
        if residual is not None:
            sent, values_sent = indices[finite].long(), picked[finite]
            # `pick` has stored the sums in the residual: ±τ is subtracted where it is sent.
            residual.scatter_(0, sent, values_sent - tau * torch.sign(values_sent))
        return _packet(indices, picked, finite, tau, values), state

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        header, payload = read(packet, _KIND, out.numel())
        if payload.numel() < _FIXED:
            raise PacketError(f"a packet with {payload.numel()} bytes of payload, wanted {_FIXED} or more")
        tau = floats(payload, 1, scale)
        if not bool((tau >= 0) & (tau < math.inf)):
            raise PacketError(f"a packet with a threshold of {float(tau)}")
        num_not_finite = int(payload[4:8].cpu().clone().view(torch.int32))
        fixed = _FIXED + 8 * num_not_finite
        if num_not_finite < 0 or payload.numel() < fixed:
            raise PacketError(f"a packet with {num_not_finite} values that are not finite in {payload.numel()} bytes")
        # `clone` aligns the bytes, which a view as another dtype needs.
        special_indices = payload[_FIXED : _FIXED + 4 * num_not_finite].cpu().clone().view(torch.int32).long()
        special = payload[_FIXED + 4 * num_not_finite : fixed].clone().view(torch.float32)
        if ((special_indices < 0) | (special_indices >= out.numel())).any():
            raise PacketError(f"a packet with an index beyond {out.numel()} elements")
        if (special_indices.diff() <= 0).any():
            raise PacketError("a packet whose indices are not in ascending order")
        # A symbol is twice the gap, plus 1 for a negative sign.
        symbols = decode_symbols(payload[fixed:], header.count, header.parameter, 2 * out.numel() + 1)
        indices = from_gaps(symbols >> 1, out.numel()).to(out.device)
        # The lowest bit, 0 or 1, becomes the sign +1 or -1.
        decoded = tau * torch.from_numpy(1 - 2 * (symbols & 1)).to(out.device)
        flat = flat_view(out)
        if add:
            flat.index_add_(0, indices, decoded)
        else:
            flat.zero_()
            flat.scatter_(0, indices, decoded)
        if num_not_finite:
            # Added in both cases: where `add` is False, these elements were set to zero before.
            flat[special_indices.to(out.device)] += special
        copy_back(flat, out)

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        return HEADER.size + _FIXED + index_bytes(numel, self.density) + math.ceil(self.density * numel / 8)

    def __str__(self) -> str:
        tau = [] if self.tau is None else [repr(self.tau)]
        density = [] if self.density == type(self)().density else [f"density={self.density!r}"]
        return f"{self.name}:{','.join([*tau, *density])}".rstrip(":")


def _mean_magnitude(values: Tensor, residual: Tensor | None) -> float:
    """Return the mean magnitude of finite values that are not zero, or 0.

    It is the threshold where fewer values than the density asks for are not zero, so that the sampled one is 0.
    """
    wanted = values if residual is None else values + residual
    magnitudes = wanted[(wanted != 0) & wanted.isfinite()].abs()
    return min(float(magnitudes.double().mean()), _LARGEST) if magnitudes.numel() else 0.0


def _packet(indices: Tensor, picked: Tensor, finite: Tensor, tau: float, values: Tensor) -> Packet:
    """Return the packet: τ, the values that are not finite with their indices, and a Golomb code of gaps and signs."""
    # NaN and infinity cannot be sent as a sign of τ. They travel as they are, and are rare, so 8 bytes each do no
    # harm.
    not_finite = (~finite).nonzero().flatten()
    special_indices, special = indices[not_finite].to(torch.int32), picked[not_finite]
    if len(not_finite):
        indices, picked = indices[finite], picked[finite]
    sent, negative = indices.cpu().numpy(), (picked < 0).cpu().numpy()
    # Gap and sign in one number, so that one Golomb code covers both.
    symbols = 2 * gaps(sent) + negative
    order = order_for(symbols)
    encoded = torch.from_numpy(encode_symbols(symbols, order))
    fixed = _FIXED + 8 * len(special)
    packet, payload = new_packet(
        Header(_KIND, len(symbols), values.numel(), order), fixed + encoded.numel(), values.device
    )
    # In the order that `tutti.codecs.packet` gives for kind 4.
    payload[:4].view(torch.float32).fill_(tau)
    payload[4:8].view(torch.int32).fill_(len(special))
    payload[_FIXED : _FIXED + 4 * len(special)].view(torch.int32).copy_(special_indices)
    payload[_FIXED + 4 * len(special) : fixed].view(torch.float32).copy_(special)
    payload[fixed:].copy_(encoded)
    return packet
