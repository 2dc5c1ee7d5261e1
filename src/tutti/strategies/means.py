"""Exact means over ranks of the buckets of one backward pass: by the transport, its all-reduce, or a collective.

Ranks count in proportion to their samples. A weighted mean is a sum of gradients that were scaled by weight × ranks /
total weight, divided by the number of ranks; equal weights are not scaled, so that the bits are those of a plain mean.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tutti.collectives import Collective
from tutti.collectives.mean import FIRST_CALL, local_weights, share_weights, weigh
from tutti.errors import DifferentCalls
from tutti.replica import Bucket
from tutti.transports import Averages, Transport, Work
from tutti.transports.base import CompletedWork, Operation


class Mean(Protocol):
    """Weighted means over ranks of all buckets of one backward pass: `begin`, `start` per bucket, `flush`, `finish`."""

    def begin(self, weight: float) -> Work:
        """Start to share this rank's weight with the others. `start` may be called when the work is done."""
        ...

    def start(self, bucket: Bucket) -> Work:
        """Start the mean of a full bucket, in place. All ranks start buckets in the same order."""
        ...

    def flush(self) -> None:
        """Run everything to its end: all buckets of this pass have been started."""
        ...

    def finish(self, bucket: Bucket) -> None:
        """Complete the mean once the work that `start` returned is done."""
        ...

    def agree(self, call: int) -> None:
        """Wait for all ranks, and raise `DifferentCalls` on each unless all are in the same call. Between passes."""
        ...


class TransportMean:
    """Leaves the weighted mean to the transport: shared memory reads every rank's weight beside its gradient."""

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

    def agree(self, call: int) -> None:
        # Another length for every call, and a weight that no backward pass has: ranks that reduce something else, a
        # bucket or that of another call, find that the entries differ.
        self._transport.average(torch.zeros(1 + call, device="cpu"), FIRST_CALL - call).wait()


class NativeSumMean:
    """Sums by the transport's own all-reduce. Ranks share their weights first, while backward runs."""

    def __init__(self, transport: Transport, all_reduce: Callable[[Tensor], Work]) -> None:
        self._transport = transport
        self._all_reduce = all_reduce

    def begin(self, weight: float) -> Work:
        self._weights = local_weights(weight, self._transport)
        return self._all_reduce(self._weights)

    def start(self, bucket: Bucket) -> Work:
        # `begin`'s work is done by now, so all weights are filled in.
        weigh(bucket.flat, self._weights, self._transport)
        return self._all_reduce(bucket.flat)

    def flush(self) -> None:
        return None

    def finish(self, bucket: Bucket) -> None:
        bucket.flat.div_(self._transport.size)

    def agree(self, call: int) -> None:
        weights = local_weights(FIRST_CALL - call, self._transport)
        self._all_reduce(weights).wait()
        refuse_different_calls(weights)


class CollectiveMean:
    """Sums by a collective that runs in the background: the weights first, then bucket after bucket.

    Operations of one transport run in the order in which they were started. Buckets started after the weights therefore
    find them complete, and `begin` need not wait.
    """

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

    def agree(self, call: int) -> None:
        agree_by_messages(call, self._transport)

    def steps(self, bucket: Bucket, weights: Tensor) -> Operation:
        """Return the operation that `start` runs, for ranks of these weights."""
        yield from self.of_flat(bucket.flat, weights)

    def of_flat(self, flat: Tensor, weights: Tensor) -> Operation:
        """Return the same operation for any flat tensor."""
        weigh(flat, weights, self._transport)
        yield from self._choose(flat.nbytes).steps(flat, self._transport)
        flat.div_(self._transport.size)


def start_sharing_weights(weight: float, transport: Transport) -> Tensor:
    """Start to share weights, and return the vector that will hold them.

    It is complete for operations that are started on the transport after this, because those run in order.
    """
    weights = local_weights(weight, transport)
    transport.start(share_weights(weights, transport))
    return weights


def agree_by_messages(call: int, transport: Transport) -> None:
    """Share which call this rank is in, as weights are shared, and raise unless all ranks are in the same."""
    weights = local_weights(FIRST_CALL - call, transport)
    transport.start(share_weights(weights, transport)).wait()
    refuse_different_calls(weights)


def refuse_different_calls(weights: Tensor) -> None:
    """Raise `DifferentCalls` unless the weights of all ranks are equal."""
    if (weights != weights[0]).any():
        raise DifferentCalls(weights.tolist())


def when_filled(tensor: Tensor, operation: Operation) -> Operation:
    """Return the operation for a background thread, ordered after what fills `tensor` on a GPU.

    CUDA streams are ordered within a thread only. The operation first waits for an event recorded here, after the
    kernels that fill the tensor. At its end it waits for its own kernels, so that the training thread may read the
    result.
    """
    if not tensor.is_cuda:
        return operation
    filled = torch.cuda.Event()
    # On the training thread's current stream, behind the kernels that fill the tensor.
    filled.record()

    def waiting() -> Operation:
        filled.synchronize()
        yield from operation
        # The work counts as done only when the kernels that this thread launched are.
        torch.cuda.synchronize(tensor.device)

    return waiting()
