"""`OneBit`: one bit per value, the side of zero that it is on (Seide et al. 2014)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.codecs import kernels
from tutti.codecs.base import Codec, CodecSpeed, Packet, State, copy_back, flat_float32, flat_view, groups_or_rows
from tutti.codecs.packet import HEADER, Header, expect, floats, new_packet, read
from tutti.codecs.scale_groups import ScaleGroups

_KIND = 1
"""Number of this codec in packets."""


@dataclass(frozen=True)
class OneBit(Codec):
    """Replaces values above zero by their mean and the others by theirs, with a pair of means for every group.

    A group is a row of a weight as torch has it, which is a column in Seide et al. 2014. Means rather than a fixed
    magnitude make the error as small as one bit allows. Use it with `ErrorFeedback`.
    """

    name = "onebit"
    speed = CodecSpeed(8.0e9, 27e9)
    delay = 1  # Of values with a normal distribution, a packet has 2/π of the energy. What is left takes 0.57 steps.

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        values, groups = flat_float32(tensor, "OneBit"), groups_or_rows(tensor, groups)
        count, table = len(groups), groups.table(1, values.device)
        packet, payload = new_packet(Header(_KIND, count, values.numel()), 8 * count + table.num_bytes, values.device)
        # Payload: low and high mean of every group, two float32, then one bit per value.
        scales, codes = payload[: 8 * count].view(torch.float32), payload[8 * count :]
        kernels.for_device(values.device).onebit_encode(values, residual, table, scales, codes)
        return packet, state

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        groups = groups_or_rows(out, groups)
        header, payload = read(packet, _KIND, out.numel())
        count, table = len(groups), groups.table(1, out.device)
        # All checks before `out` is touched: a wrong packet must not leave half of it overwritten.
        expect("scale groups", header.count, count)
        expect("parameter", header.parameter, 0)
        expect("payload bytes", payload.numel(), 8 * count + table.num_bytes)
        flat = flat_view(out)
        kernels.for_device(flat.device).onebit_decode(
            payload[8 * count :], floats(payload, 2 * count, scale), table, flat, add
        )
        copy_back(flat, out)

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        groups = ScaleGroups.from_shape((numel,)) if groups is None else groups
        return HEADER.size + 8 * len(groups) + groups.num_bytes(1)

    def __str__(self) -> str:
        return self.name
