"""The sum in two phases: pieces to their owners, sums of pieces to everyone."""

import torch
from torch import Tensor

from tutti.codecs.base import Codec, State, TensorLayout
from tutti.codecs.scale_groups import ScaleGroups
from tutti.collectives import parts
from tutti.collectives.compressed.base import STAGE_BOUNDARY, CompressedSum, ReductionContext
from tutti.collectives.compressed.messages import aligned, join, room, split
from tutti.transports import Transport
from tutti.transports.base import Operation, Work

_PIECES, _SUMS = 1, 2
"""Tags of the two phases: those of several sums overlap."""


class TwoPhaseSum(CompressedSum):
    """Every rank owns a piece. It gets that piece of all others, encoded, adds up, encodes the sum and sends it to all.

    That is 2 (P-1)/P of a packet from every rank (Seide et al. 2014). What the first encoding leaves out stays with
    its sender, what the second leaves out with the owner: a rank never encodes its own piece for itself, so one
    residual holds both.
    """

    num_boundaries = 2

    def __init__(self, codec: Codec, layout: TensorLayout, numel: int, context: ReductionContext) -> None:
        super().__init__(codec, layout, numel, context)
        self._pieces = ScaleGroups.from_layout(layout, numel).cut(context.size)
        self._packet_bytes = [codec.packet_bytes(groups.numel, groups) for _, groups in self._pieces]
        self._states = [
            self._start(groups.numel, (context.seed * context.size + context.rank) * context.size + piece, part)
            for piece, (part, groups) in enumerate(self._pieces)
        ]

    def states(self) -> list[State]:
        return self._states

    def steps(self, values: Tensor, exact: Tensor, transport: Transport) -> Operation:
        exacts = [exact[part] for part in parts(exact.numel(), self.context.size)]
        mine = self.context.rank
        others = [(mine + step) % self.context.size for step in range(1, self.context.size)]
        sending: list[Work] = []
        arriving = {src: self._receive(mine, src, values, exacts, transport) for src in reversed(others)}
        for dst in others:
            sending.append(transport.isend(self._message(dst, values, exacts), dst, _PIECES))
        yield STAGE_BOUNDARY
        for src in sorted(others):  # In the order of ranks: sums have the same bits in every run.
            message, work = arriving[src]
            yield work
            self._take(message, mine, values, exacts, add=True)
        result = self._message(mine, values, exacts)
        arriving = {src: self._receive(src, src, values, exacts, transport) for src in reversed(others)}
        sending += [transport.isend(result, dst, _SUMS) for dst in others]
        self._take(result, mine, values, exacts, add=False)
        yield STAGE_BOUNDARY
        for src in reversed(others):
            message, work = arriving[src]
            yield work
            self._take(message, src, values, exacts, add=False)
        yield from sending

    def _receive(
        self, piece: int, src: int, values: Tensor, exacts: list[Tensor], transport: Transport
    ) -> tuple[Tensor, Work]:
        message = room(self._num_bytes(piece, exacts), values)
        return message, transport.irecv(message, src, _PIECES if piece == self.context.rank else _SUMS)

    def _num_bytes(self, piece: int, exacts: list[Tensor]) -> int:
        return aligned(exacts[piece].nbytes) + self._packet_bytes[piece]

    def _message(self, piece: int, values: Tensor, exacts: list[Tensor]) -> Tensor:
        if values.is_meta:
            return room(self._num_bytes(piece, exacts), values)
        part, groups = self._pieces[piece]
        packet, self._states[piece] = self.codec.encode(values[part], self._states[piece], groups=groups)
        return join(packet, exacts[piece])

    def _take(self, message: Tensor, piece: int, values: Tensor, exacts: list[Tensor], add: bool) -> None:
        if values.is_meta:
            return
        part, groups = self._pieces[piece]
        packet, exact = split(message, exacts[piece])
        if add:
            self.codec.decode(packet, values[part], groups=groups, add=True)
            exacts[piece].add_(exact)
        else:
            self.codec.decode(packet, values[part], groups=groups, scale=1 / self.context.divisor)
            torch.div(exact, self.context.divisor, out=exacts[piece])
