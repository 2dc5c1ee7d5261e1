"""Sums with linear codecs: the small tensors that the codec makes are summed by a plain all-reduce.

A linear codec's packets may be added before they are decoded, so every round of the codec (one for random k, two for
low rank) is an all-reduce of a short tensor. Its algorithm is the cheapest one for that length.
"""

from typing import cast

import torch
from torch import Tensor

from tutti.codecs.base import Codec, LinearCodec, State, TensorLayout
from tutti.collectives import cheapest
from tutti.collectives.compressed.base import CompressedSum, ReductionContext
from tutti.simulation.sizes import SizeOnlyTensor
from tutti.transports import Transport
from tutti.transports.base import Operation


class LinearSum(CompressedSum):
    """All-reduces what the codec makes of the tensor, as many times as the codec has rounds."""

    def __init__(self, codec: Codec, layout: TensorLayout, numel: int, context: ReductionContext) -> None:
        super().__init__(codec, layout, numel, context)
        self._state = self._start(numel, 0, slice(None))  # One seed, so that all ranks draw the same.

    def states(self) -> list[State]:
        return [self._state]

    def steps(self, values: Tensor, exact: Tensor, transport: Transport) -> Operation:
        linear = cast(LinearCodec, self.codec)
        if values.is_meta:
            sizes = linear.round_sizes(self.layout)
            for size in [sizes[0] + exact.numel(), *sizes[1:]]:
                yield from self._mean(cast(Tensor, SizeOnlyTensor(size, torch.float32, 4)), transport)
            return
        with_first = exact.dtype == torch.float32  # Joined to the first round, so that there is one wait less.
        if not with_first:
            yield from self._mean(exact, transport)
        rounds = linear.rounds(values, self.layout, self._state)
        while True:
            try:
                summands = next(rounds)
            except StopIteration as end:
                # The codec's generator returns its new state.
                self._state = end.value
                return
            if with_first:
                joined = torch.cat([summands, exact])
                yield from self._mean(joined, transport)
                summands.copy_(joined[: summands.numel()])
                exact.copy_(joined[summands.numel() :])
                with_first = False
            else:
                yield from self._mean(summands, transport)

    def _mean(self, summands: Tensor, transport: Transport) -> Operation:
        """Sum one round over ranks and divide it.

        Dividing every round divides the result once: the last round is linear in the result, and of earlier ones only
        the directions count (low rank makes an orthonormal basis of them).
        """
        yield from cheapest(transport.size, summands.nbytes)(summands, transport)
        summands.div_(self.context.divisor)
