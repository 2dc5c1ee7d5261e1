"""Reductions in the order in which Gloo makes them, so that results equal Gloo's to the bit.

The backend for `torch.distributed` uses them: a program that moves from Gloo to Tutti gets the same numbers.

Gloo's all-reduce is a ring. The tensor is cut into one block per rank. Block b starts on rank b - 1, travels to lower
ranks and ends on rank b; each rank combines its own data with what arrived. With 3 ranks, block 0 is ((rank 2 + rank 1)
+ rank 0). Where it is cut depends on the size of the tensor: blocks consist of segments of equal size, at least two per
rank and none above a mebibyte. This was read in Gloo's source, and `tests/parallel/test_backend.py` checks it against
torch 2.13.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from tutti.collectives.ring import pass_blocks_around, split_into_chunks
from tutti.transports.base import Operation, Transport, TransportWrapper, Work

_SEGMENT_BYTES = 2**20
"""Longest segment of Gloo's ring."""

Combine = Callable[[Tensor, Tensor], object]
"""Combines a local tensor with a received one, and leaves the result in the local one."""


def block_numel(numel: int, itemsize: int, size: int) -> int:
    """Return how many elements a block has. The last blocks may be shorter, or empty."""
    # A block is `per_rank` segments, none of them longer than `_SEGMENT_BYTES`.
    largest = max(1, _SEGMENT_BYTES // itemsize)
    num_segments = max(-(-numel // largest), 2 * size)
    per_rank = -(-num_segments // size)
    segment = -(-(numel * itemsize) // (per_rank * size))  # In bytes, then rounded up to whole elements.
    return per_rank * -(-segment // itemsize)


def blocks(numel: int, itemsize: int, size: int) -> list[slice]:
    """Return the slice of the tensor that is each rank's block, by rank."""
    length = block_numel(numel, itemsize, size)
    return [slice(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(size)]


def reduction_order(block: int, size: int) -> list[int]:
    """Return the ranks in the order in which a block combines their data."""
    return [(block - 1 - step) % size for step in range(size)]


def split_by_block(cut: Sequence[slice], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Split the elements from `start` to `stop` at block edges: yield each block's number, first and last element."""
    for block, part in enumerate(cut):
        first, last = max(start, part.start), min(stop, part.stop)
        if first < last:
            yield block, first, last


class RenumberedTransport(TransportWrapper):
    """A transport whose ranks have other numbers, so that a ring can run in another direction or from another root."""

    def __init__(self, inner: Transport, numbers: Sequence[int]) -> None:
        """Wrap `inner`. `numbers[new]` is the rank of `inner` that has the number `new` here."""
        self.inner, self._numbers = inner, numbers
        self.rank, self.size, self.timeout = numbers.index(inner.rank), inner.size, inner.timeout
        self.hosts = tuple(inner.hosts[number] for number in numbers)

    @property
    def world_ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.inner.world_ranks[number] for number in self._numbers)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        return self.inner.isend(tensor, self._numbers[dst], tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        return self.inner.irecv(tensor, self._numbers[src], tag)

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> Transport:
        return self.inner.channel(name, None if ranks is None else [self._numbers[rank] for rank in ranks])

    def close(self) -> None:
        self.inner.close()


def renumbered_from(transport: Transport, root: int) -> Transport:
    """Return a transport whose ranks are counted from `root`, so that `root` is rank 0."""
    return RenumberedTransport(transport, [(root + rank) % transport.size for rank in range(transport.size)])


def ring(flat: Tensor, transport: Transport, combine: Combine, scattered: bool = False) -> Operation:
    """Reduce over ranks, in place, in Gloo's order.

    Args:
        combine: the reduction of two tensors.
        scattered: stop after the reduce-scatter: each rank ends with its own block, and the rest is overwritten.
    """
    size = transport.size
    cut = blocks(flat.numel(), flat.itemsize, size)
    # By the first block's length, the longest, so that all ranks agree on the number of chunks.
    chunks = [split_into_chunks(flat[part], flat[cut[0]].nbytes) for part in cut]
    # Gloo's blocks travel to lower ranks; with negated numbers that is to the right, as `pass_blocks_around` sends.
    downwards = RenumberedTransport(transport, [-rank % size for rank in range(size)])
    # Rank r starts with block r + 1, and its number here is -r.
    by_start = [chunks[(1 - rank) % size] for rank in range(size)]
    num_adds = size - 1
    return pass_blocks_around(
        by_start, downwards, downwards.rank, num_adds, num_adds if scattered else 2 * num_adds, combine
    )
