"""Sums of sparse packets by an all-gather: every rank receives every packet and adds them up.

Sparse packets cannot be summed on the way without growing: their indices differ between ranks. Their lengths differ
too, so each rank first sends the length of its message:

```
stage 1   encode; send length and message to all others
          ── stage boundary ──
stage 2   receive lengths, then messages; decode all of them in the order of ranks
```

All ranks decode the same packets in the same order, so they end with the same bits.
"""

import torch
from torch import Tensor

from tutti.codecs.base import Codec, State, TensorLayout
from tutti.collectives.compressed.base import STAGE_BOUNDARY, CompressedSum, ReductionContext
from tutti.collectives.compressed.messages import aligned, join, new_message, split
from tutti.transports import Transport
from tutti.transports.base import Operation, Work

_LENGTHS, _PACKETS = 1, 2
"""Tags of the two kinds of messages. Lengths of the next sum may be received before packets of this one."""


class GatheredSum(CompressedSum):
    """Every rank sends its packet to all others and adds up all packets in the order of ranks: P-1 packets per rank."""

    num_boundaries = 1

    def __init__(self, codec: Codec, layout: TensorLayout, numel: int, context: ReductionContext) -> None:
        super().__init__(codec, layout, numel, context)
        # Another seed for each tensor and rank.
        self._state = self._start(numel, context.seed * context.size + context.rank, slice(None))

    def states(self) -> list[State]:
        return [self._state]

    def steps(self, values: Tensor, exact: Tensor, transport: Transport) -> Operation:
        rank = self.context.rank
        # Each rank starts with another receiver, so that not all of them send to one at the same time.
        others = [(rank + step) % self.context.size for step in range(1, self.context.size)]
        message = self._message(values, exact)
        length = torch.tensor([message.numel()], device="cpu")
        sending: list[Work] = []
        for dst in others:  # Receivers cannot know the length of a sparse packet.
            sending += [transport.isend(length, dst, _LENGTHS), transport.isend(message, dst, _PACKETS)]
        lengths = {src: torch.zeros(1, dtype=torch.int64, device="cpu") for src in others}
        # In the order in which messages come here: rank - 1 sends to this rank first.
        lengths_received = {src: transport.irecv(lengths[src], src, _LENGTHS) for src in reversed(others)}
        yield STAGE_BOUNDARY
        arriving = {}
        for src in reversed(others):
            yield lengths_received[src]
            buffer = new_message(int(lengths[src]), values)
            arriving[src] = buffer, transport.irecv(buffer, src, _PACKETS)
        messages = {rank: message}
        for src in reversed(others):
            messages[src], work = arriving[src]
            yield work
        self._add_up([messages[src] for src in range(self.context.size)], values, exact)
        # Last: by now most sends are complete, and the message may be freed after them.
        yield from sending

    def _message(self, values: Tensor, exact: Tensor) -> Tensor:
        if values.is_meta:
            return new_message(aligned(exact.nbytes) + self.codec.packet_bytes(self.numel), values)
        packet, self._state = self.codec.encode(values, self._state)
        return join(packet, exact)

    def _add_up(self, messages: list[Tensor], values: Tensor, exact: Tensor) -> None:
        """Overwrite `values` and `exact` with the means of what all ranks sent, added in the order of ranks."""
        if values.is_meta:
            return
        pieces = [split(message, exact) for message in messages]
        # Only after `encode` has taken them: from here on `values` holds the mean. It also holds this rank's own
        # packet as decoded, like all others', so that every rank adds the same numbers and gets the same bits.
        values.zero_()
        for number, (packet, numbers) in enumerate(pieces):
            self.codec.decode(packet, values, add=True, scale=1 / self.context.divisor)
            if number:
                exact.add_(numbers)
            else:
                exact.copy_(numbers)
        exact.div_(self.context.divisor)
