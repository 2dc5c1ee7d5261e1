"""All-reduce of gradients, bucket by bucket, while backward still runs."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from tutti.collectives import ALGORITHMS, Collective, choices
from tutti.collectives.mean import own_weight, share_weights, weigh
from tutti.errors import ConfigError, NonFiniteLoss, WeightRefused
from tutti.events import EXCHANGE, Event
from tutti.replica import Bucket, Replica
from tutti.replica.state import share_buffers
from tutti.strategies.base import Exchange, Strategy
from tutti.transports import AllReduces, Averages, HostsTransport, Transport, Work
from tutti.transports.base import Finished, Steps
from tutti.transports.hosts import hosts_are_shared

Algorithm = Literal[
    "native", "auto", "ring", "ring_blocking", "tree", "butterfly", "recursive_doubling", "hierarchical"
]

NAMES: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Every step, every rank gets the mean of all gradients, weighted by samples (Li et al. 2020).

    Args:
        algorithm: how the sum travels. "native" is the transport's own way, "auto" measures the link and takes the
            cheapest for each bucket, and the others are those of `tutti.collectives`.
        bucket_bytes: gradients that travel together. More start sooner if it is smaller, and each
            costs less if it is larger.
    """

    algorithm: Algorithm = "native"
    bucket_bytes: int = 4 * 2**20

    def __post_init__(self) -> None:
        mistakes = []
        if self.algorithm not in NAMES:
            mistakes.append(f"algorithm '{self.algorithm}' is not one of {', '.join(NAMES)}")
        if self.bucket_bytes < 1:
            mistakes.append(f"bucket_bytes must be 1 or more, got {self.bucket_bytes}")
        if mistakes:
            raise ConfigError(f"AllReduce: {'; '.join(mistakes)}.")

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        if self.algorithm == "hierarchical" and hosts_are_shared(transport):
            transport = transport if isinstance(transport, HostsTransport) else HostsTransport(transport)
        return AllReduceExchange(replica, transport, self.algorithm, self.bucket_bytes)

    def __str__(self) -> str:
        default = type(self)(self.algorithm)
        return self.algorithm + ("" if self == default else f":bucket_bytes={self.bucket_bytes}")


class _Mean(Protocol):
    """Weighted means over ranks, of all buckets of one backward pass."""

    def begin(self, weight: float) -> Work:
        """Tell the other ranks this rank's weight; `start` may follow when the work is done."""
        ...

    def start(self, tensor: Tensor) -> Work: ...

    def finish(self, tensor: Tensor) -> None:
        """Do what is left once the work that `start` gave is done."""
        ...


class _DirectMean:
    """The transport weighs by itself."""

    def __init__(self, transport: Averages) -> None:
        self._transport = transport

    def begin(self, weight: float) -> Work:
        self._weight = weight
        return Finished()

    def start(self, tensor: Tensor) -> Work:
        return self._transport.average(tensor, self._weight)

    def finish(self, tensor: Tensor) -> None:
        return None


class _CountedMean:
    """The transport sums: ranks tell each other their weights first, while backward goes on."""

    def __init__(self, transport: Transport, all_reduce: Callable[[Tensor], Work]) -> None:
        self._transport = transport
        self._all_reduce = all_reduce

    def begin(self, weight: float) -> Work:
        self._weights = own_weight(weight, self._transport)
        return self._all_reduce(self._weights)

    def start(self, tensor: Tensor) -> Work:
        weigh(tensor, self._weights, self._transport.rank)
        return self._all_reduce(tensor)

    def finish(self, tensor: Tensor) -> None:
        tensor.div_(self._transport.size)


class _SteppedMean:
    """A collective sums, step by step, beside backward: the weights first, then bucket after bucket."""

    def __init__(self, transport: Transport, choose: Callable[[int], Collective]) -> None:
        self._transport = transport
        self._choose = choose

    def begin(self, weight: float) -> Work:
        self._weights = own_weight(weight, self._transport)
        self._transport.start(share_weights(self._weights, self._transport))
        return Finished()  # Steps are taken in order: nobody has to wait for these.

    def start(self, tensor: Tensor) -> Work:
        filled = torch.cuda.Event() if tensor.is_cuda else None
        if filled is not None:
            filled.record()
        return self._transport.start(self._steps(tensor, self._weights, filled))

    def finish(self, tensor: Tensor) -> None:
        return None

    def _steps(self, tensor: Tensor, weights: Tensor, filled: torch.cuda.Event | None) -> Steps:
        if filled is not None:
            filled.synchronize()  # This is another thread than the one that fills buckets.
        weigh(tensor, weights, self._transport.rank)
        yield from self._choose(tensor.nbytes).steps(tensor, self._transport)
        tensor.div_(self._transport.size)
        if filled is not None:
            torch.cuda.synchronize(tensor.device)


class AllReduceExchange(Exchange):
    """Starts a bucket's reduction as soon as the bucket is full, and waits for all at the end of backward."""

    def __init__(self, replica: Replica, transport: Transport, algorithm: Algorithm, bucket_bytes: int) -> None:
        super().__init__(replica, transport)
        alone = transport.size == 1
        # On GPUs there is nothing to choose: what NCCL does there, nothing else does.
        on_gpu = algorithm == "auto" and not replica.device_types <= {"cpu", "meta"}
        self._mean = _mean_over(transport, "native" if on_gpu else algorithm)
        self._weights_known: Work = Finished()
        self._waiting: deque[Bucket] = deque()
        self._under_way: list[tuple[Bucket, Work]] = []
        if not alone:
            replica.allocate(transport, bucket_bytes)
        replica.listen(self, gradients=not alone)

    def backward_started(self, weight: float) -> None:
        self._sent_before = self.transport.bytes_sent
        self._weights_known = self._mean.begin(weight)

    def bucket_ready(self, bucket: Bucket) -> None:
        self._waiting.append(bucket)
        if self._weights_known.done():
            self._start_waiting()

    def backward_done(self) -> None:
        start_s = self.transport.now()
        self._weights_known.wait()
        self._start_waiting()
        for bucket, work in self._under_way:
            try:
                work.wait()
            except WeightRefused as refusal:
                raise self._stopped(refusal) from None
            self._mean.finish(bucket.flat)
        self._under_way.clear()
        num_bytes = self.transport.bytes_sent - self._sent_before
        self.events.record(Event(EXCHANGE, start_s, self.transport.now(), num_bytes))

    def before_step(self) -> None:
        return None

    def after_step(self) -> None:
        return None

    def consensus(self) -> None:
        share_buffers(self.replica.model, self.transport)

    def dissent(self) -> None:
        return None

    def finish(self) -> None:
        self.consensus()

    def _start_waiting(self) -> None:
        while self._waiting:
            bucket = self._waiting.popleft()
            try:
                self._under_way.append((bucket, self._mean.start(bucket.flat)))
            except WeightRefused as refusal:
                raise self._stopped(refusal) from None

    def _stopped(self, refusal: WeightRefused) -> NonFiniteLoss:
        return NonFiniteLoss(self.transport.rank, refusal.ranks, self.replica.steps)


def _mean_over(transport: Transport, algorithm: Algorithm) -> _Mean:
    if algorithm == "auto":
        return _SteppedMean(transport, choices(transport).best)
    if algorithm == "native" and isinstance(transport, Averages):
        return _DirectMean(transport)
    if algorithm == "native" and isinstance(transport, AllReduces):
        return _CountedMean(transport, transport.all_reduce)
    return _SteppedMean(transport, lambda num_bytes: ALGORITHMS[algorithm])
