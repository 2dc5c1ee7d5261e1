"""Reductions in the order in which Gloo makes them, so that results are Gloo's to the bit.

Gloo's all-reduce is a ring: the tensor is cut into one block per rank, and block b starts on rank b - 1, goes down the
ranks and ends on rank b, each rank combining what it has with what came. How it is cut depends on the size of the
tensor, because blocks consist of segments of equal size, at least two and none above a megabyte. Found in Gloo's source
and checked against torch 2.13 by `tests/parallel/test_backend.py`.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from tutti.collectives.ring import in_chunks, pass_on
from tutti.transports.base import Operation, Transport, TransportWrapper, Work

_SEGMENT_BYTES = 2**20

Combine = Callable[[Tensor, Tensor], object]
"""Takes what a rank has and what came, and leaves the result in the first."""


def block_numel(numel: int, itemsize: int, size: int) -> int:
    """How many elements a block has; the last ones may be shorter, or empty."""
    largest = max(1, _SEGMENT_BYTES // itemsize)
    num_segments = max(-(-numel // largest), 2 * size)
    per_rank = -(-num_segments // size)
    segment = -(-(numel * itemsize) // (per_rank * size))  # In bytes, then rounded up to whole elements.
    return per_rank * -(-segment // itemsize)


def blocks(numel: int, itemsize: int, size: int) -> list[slice]:
    """The block of each rank, by rank."""
    length = block_numel(numel, itemsize, size)
    return [slice(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(size)]


def order(block: int, size: int) -> list[int]:
    """The ranks whose data a block collects, first to last."""
    return [(block - 1 - step) % size for step in range(size)]


def runs(cut: Sequence[slice], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Elements from `start` to `stop` as runs of one block each: the block, and from where to where."""
    for block, part in enumerate(cut):
        first, last = max(start, part.start), min(stop, part.stop)
        if first < last:
            yield block, first, last


class Renumbered(TransportWrapper):
    """The same conversation with its ranks numbered otherwise."""

    def __init__(self, inner: Transport, numbers: Sequence[int]) -> None:
        """`numbers` are the ranks of `inner` in their new order."""
        self.inner, self._numbers = inner, numbers
        self.rank, self.size, self.timeout = numbers.index(inner.rank), inner.size, inner.timeout
        self.hosts = tuple(inner.hosts[number] for number in numbers)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        return self.inner.isend(tensor, self._numbers[dst], tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        return self.inner.irecv(tensor, self._numbers[src], tag)

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> Transport:
        return self.inner.channel(name, None if ranks is None else [self._numbers[rank] for rank in ranks])

    def close(self) -> None:
        self.inner.close()


def rooted(transport: Transport, root: int) -> Transport:
    """The same ranks, counted from `root`."""
    return Renumbered(transport, [(root + rank) % transport.size for rank in range(transport.size)])


def ring(flat: Tensor, transport: Transport, combine: Combine, scattered: bool = False) -> Operation:
    """Reduce over ranks, in place. If `scattered`, each rank ends with its own block, and the rest is spoilt."""
    size = transport.size
    cut = blocks(flat.numel(), flat.itemsize, size)
    chunks = [in_chunks(flat[part], flat[cut[0]].nbytes) for part in cut]
    downwards = Renumbered(transport, [-rank % size for rank in range(size)])
    by_start = [chunks[(1 - rank) % size] for rank in range(size)]
    num_adds = size - 1
    return pass_on(by_start, downwards, downwards.rank, num_adds, num_adds if scattered else 2 * num_adds, combine)
