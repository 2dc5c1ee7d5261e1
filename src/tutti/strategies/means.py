"""Means over ranks of the buckets of one backward pass, exact ones."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tutti.collectives import Collective
from tutti.collectives.mean import local_weights, share_weights, weigh
from tutti.replica import Bucket
from tutti.transports import Averages, Transport, Work
from tutti.transports.base import CompletedWork, Operation


class Mean(Protocol):
    """Weighted means over ranks, of all buckets of one backward pass."""

    def begin(self, weight: float) -> Work:
        """Tell the other ranks this rank's weight; `start` may follow when the work is done."""
        ...

    def start(self, bucket: Bucket) -> Work: ...

    def flush(self) -> None:
        """All buckets of this pass have been started: hold nothing back."""
        ...

    def finish(self, bucket: Bucket) -> None:
        """Do what is left once the work that `start` gave is done."""
        ...


class TransportMean:
    """The transport weighs by itself."""

    def __init__(self, transport: Averages) -> None:
        self._transport = transport

    def begin(self, weight: float) -> Work:
        self._weight = weight
        return CompletedWork()

    def start(self, bucket: Bucket) -> Work:
        return self._transport.average(bucket.flat, self._weight)

    def flush(self) -> None:
        return None

    def finish(self, bucket: Bucket) -> None:
        return None


class NativeSumMean:
    """The transport sums: ranks tell each other their weights first, while backward goes on."""

    def __init__(self, transport: Transport, all_reduce: Callable[[Tensor], Work]) -> None:
        self._transport = transport
        self._all_reduce = all_reduce

    def begin(self, weight: float) -> Work:
        self._weights = local_weights(weight, self._transport)
        return self._all_reduce(self._weights)

    def start(self, bucket: Bucket) -> Work:
        weigh(bucket.flat, self._weights, self._transport.rank)
        return self._all_reduce(bucket.flat)

    def flush(self) -> None:
        return None

    def finish(self, bucket: Bucket) -> None:
        bucket.flat.div_(self._transport.size)


class CollectiveMean:
    """A collective sums, step by step, beside backward: the weights first, then bucket after bucket."""

    def __init__(self, transport: Transport, choose: Callable[[int], Collective]) -> None:
        self._transport = transport
        self._choose = choose

    def begin(self, weight: float) -> Work:
        self._weights = start_sharing_weights(weight, self._transport)
        return CompletedWork()

    def start(self, bucket: Bucket) -> Work:
        return self._transport.start(when_filled(bucket.flat, self.steps(bucket, self._weights)))

    def flush(self) -> None:
        return None

    def finish(self, bucket: Bucket) -> None:
        return None

    def steps(self, bucket: Bucket, weights: Tensor) -> Operation:
        """What `start` has taken, for ranks of these weights."""
        yield from self.of_flat(bucket.flat, weights)

    def of_flat(self, flat: Tensor, weights: Tensor) -> Operation:
        """The same for any flat tensor."""
        weigh(flat, weights, self._transport.rank)
        yield from self._choose(flat.nbytes).steps(flat, self._transport)
        flat.div_(self._transport.size)


def start_sharing_weights(weight: float, transport: Transport) -> Tensor:
    """The weights of all ranks, for steps that are started after this: those are taken in order, and need not wait."""
    weights = local_weights(weight, transport)
    transport.start(share_weights(weights, transport))
    return weights


def when_filled(tensor: Tensor, steps: Operation) -> Operation:
    """The same steps, for another thread than the one that fills `tensor`: on a GPU each waits for the other."""
    if not tensor.is_cuda:
        return steps
    filled = torch.cuda.Event()
    filled.record()

    def waiting() -> Operation:
        filled.synchronize()
        yield from steps
        torch.cuda.synchronize(tensor.device)

    return waiting()
