"""Sums of packets in two phases: a reduce-scatter to owners of pieces, and an all-gather of their sums.

```
            rank 0 owns a           rank 1 owns b           rank 2 owns c
phase 1     sends b, c encoded      sends a, c encoded      sends a, b encoded
            ── stage boundary ──
            decodes and adds a      decodes and adds b      decodes and adds c
phase 2     encodes a, to all       encodes b, to all       encodes c, to all
            ── stage boundary ──
            decodes b, c            decodes a, c            decodes a, b
```

An owner also decodes its own encoded sum, because it must end with the bits that the others get.
"""

import torch
from torch import Tensor

from tutti.codecs.base import Codec, State, TensorLayout
from tutti.codecs.scale_groups import ScaleGroups
from tutti.collectives import parts
from tutti.collectives.compressed.base import STAGE_BOUNDARY, CompressedSum, ReductionContext
from tutti.collectives.compressed.messages import aligned, join, new_message, split
from tutti.transports import Transport
from tutti.transports.base import Operation, Work

_PIECES, _SUMS = 1, 2
"""Tags of the two phases. Messages of several buckets are under way at once."""


class TwoPhaseSum(CompressedSum):
    """Every rank owns a piece: it sums that piece of all ranks, encodes the sum and sends it to all (Seide et al.
    2014).

    Every rank sends 2 (P-1)/P of a packet. The error of the first encoding stays in the sender's residual, and that of
    the second in the owner's. A rank never encodes its own piece in the first phase, so one residual per element holds
    both.
    """

    num_boundaries = 2

    def __init__(self, codec: Codec, layout: TensorLayout, numel: int, context: ReductionContext) -> None:
        super().__init__(codec, layout, numel, context)
        self._pieces = ScaleGroups.from_layout(layout, numel).cut(context.size)
        self._packet_bytes = [codec.packet_bytes(groups.numel, groups) for _, groups in self._pieces]
        self._states = [
            # Another seed for each tensor, rank and piece.
            self._start(groups.numel, (context.seed * context.size + context.rank) * context.size + piece, part)
            for piece, (part, groups) in enumerate(self._pieces)
        ]

    def states(self) -> list[State]:
        return self._states

    def steps(self, values: Tensor, exact: Tensor, transport: Transport) -> Operation:
        exacts = [exact[part] for part in parts(exact.numel(), self.context.size)]
        rank = self.context.rank
        others = [(rank + step) % self.context.size for step in range(1, self.context.size)]
        sending: list[Work] = []
        # Receives first, in the order in which messages come here: rank - 1 sends to this rank first.
        arriving = {src: self._receive(rank, src, values, exacts, transport) for src in reversed(others)}
        for dst in others:
            # Encoded and sent piece by piece: the first is on its way while the next is encoded.
            sending.append(transport.isend(self._message(dst, values, exacts), dst, _PIECES))
        yield STAGE_BOUNDARY
        for src in sorted(others):  # In the order of ranks, so that sums have the same bits in every run.
            message, work = arriving[src]
            yield work
            self._take(message, rank, values, exacts, add=True)
        result = self._message(rank, values, exacts)
        arriving = {src: self._receive(src, src, values, exacts, transport) for src in reversed(others)}
        sending += [transport.isend(result, dst, _SUMS) for dst in others]
        # This rank decodes its own packet, so that it has the rounded sum that all others get.
        self._take(result, rank, values, exacts, add=False)
        yield STAGE_BOUNDARY
        for src in reversed(others):
            message, work = arriving[src]
            yield work
            self._take(message, src, values, exacts, add=False)
        yield from sending

    def _receive(
        self, piece: int, src: int, values: Tensor, exacts: list[Tensor], transport: Transport
    ) -> tuple[Tensor, Work]:
        """Post the receive of a piece from `src`: a contribution to this rank's own piece, or the sum of another."""
        message = new_message(self._num_bytes(piece, exacts), values)
        return message, transport.irecv(message, src, _PIECES if piece == self.context.rank else _SUMS)

    def _num_bytes(self, piece: int, exacts: list[Tensor]) -> int:
        """Return the length of a message for this piece. Dense packets have a fixed length, so receivers know it."""
        return aligned(exacts[piece].nbytes) + self._packet_bytes[piece]

    def _message(self, piece: int, values: Tensor, exacts: list[Tensor]) -> Tensor:
        """Encode a piece and join it with its share of the exact values."""
        if values.is_meta:
            return new_message(self._num_bytes(piece, exacts), values)
        part, groups = self._pieces[piece]
        packet, self._states[piece] = self.codec.encode(values[part], self._states[piece], groups=groups)
        return join(packet, exacts[piece])

    def _take(self, message: Tensor, piece: int, values: Tensor, exacts: list[Tensor], add: bool) -> None:
        """Decode a message: add it to this rank's piece in phase 1, or store the divided sum in phase 2."""
        if values.is_meta:
            return
        part, groups = self._pieces[piece]
        packet, exact = split(message, exacts[piece])
        if add:
            self.codec.decode(packet, values[part], groups=groups, add=True)
            exacts[piece].add_(exact)
        else:
            # The division is part of decoding (`scale`), which saves a pass over the values. Exact values are few.
            self.codec.decode(packet, values[part], groups=groups, scale=1 / self.context.divisor)
            torch.div(exact, self.context.divisor, out=exacts[piece])
