"""One bit for every value: which side of zero it is on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.codecs import kernels
from tutti.codecs.base import Codec, Packet, State, flat_float32, flat_view, give_back, of_rows
from tutti.codecs.packet import HEADER, Header, expect, floats, new_packet, read
from tutti.codecs.runs import Runs

_KIND = 1


@dataclass(frozen=True)
class OneBit(Codec):
    """Values above zero become their mean, the others theirs, one pair of means for every run (Seide et al. 2014).

    A run is a row of a weight as torch has it: a column as the paper writes it.
    """

    name = "onebit"

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, runs: Runs | None = None
    ) -> tuple[Packet, State]:
        values, runs = flat_float32(tensor, "OneBit"), of_rows(tensor, runs)
        count, table = len(runs), runs.table(1, values.device)
        packet, payload = new_packet(Header(_KIND, count, values.numel()), 8 * count + table.num_bytes, values.device)
        scales, codes = payload[: 8 * count].view(torch.float32), payload[8 * count :]
        kernels.of(values.device).onebit_encode(values, residual, table, scales, codes)
        return packet, state

    def decode(
        self, packet: Packet, out: Tensor, *, runs: Runs | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        runs = of_rows(out, runs)
        header, payload = read(packet, _KIND, out.numel())
        count, table = len(runs), runs.table(1, out.device)
        expect("runs", header.count, count)
        expect("parameter", header.parameter, 0)
        expect("payload bytes", payload.numel(), 8 * count + table.num_bytes)
        flat = flat_view(out)
        kernels.of(flat.device).onebit_decode(payload[8 * count :], floats(payload, 2 * count, scale), table, flat, add)
        give_back(flat, out)

    def packet_bytes(self, numel: int, runs: Runs | None = None) -> int:
        runs = Runs.of((numel,)) if runs is None else runs
        return HEADER.size + 8 * len(runs) + runs.num_bytes(1)

    def __str__(self) -> str:
        return self.name
