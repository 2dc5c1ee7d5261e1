"""The sum of what is linear: small tensors, summed as they are."""

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
    """What the codec makes of the tensor is summed by the cheapest all-reduce, as often as the codec asks for one."""

    def __init__(self, codec: Codec, layout: TensorLayout, numel: int, context: ReductionContext) -> None:
        super().__init__(codec, layout, numel, context)
        self._state = self._start(numel, 0, slice(None))  # One seed for all ranks: they draw alike.

    def states(self) -> list[State]:
        return [self._state]

    def steps(self, values: Tensor, exact: Tensor, transport: Transport) -> Operation:
        linear = cast(LinearCodec, self.codec)
        if values.is_meta:
            sizes = linear.round_sizes(self.layout)
            for size in [sizes[0] + exact.numel(), *sizes[1:]]:
                yield from self._mean(cast(Tensor, SizeOnlyTensor(size, torch.float32, 4)), transport)
            return
        with_first = exact.dtype == torch.float32  # In one sum, to wait once.
        if not with_first:
            yield from self._mean(exact, transport)
        rounds = linear.rounds(values, self.layout, self._state)
        while True:
            try:
                summands = next(rounds)
            except StopIteration as end:
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
        """Every round is divided: what is linear comes out divided once, and a basis has no length."""
        yield from cheapest(transport.size, summands.nbytes)(summands, transport)
        summands.div_(self.context.divisor)
