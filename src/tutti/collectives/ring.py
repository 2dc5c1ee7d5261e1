"""Rings: every rank talks to its two neighbours only, and all links carry the same, all the time.

The tensor is cut into one block per rank. Blocks travel round the ring once and are added up on the way, then once more
to be handed out (Patarasuk & Yuan 2009). `ring` cuts blocks into chunks and passes each on as soon as it is added, so
that a link is busy while its ends compute; `ring_blocking` sends and receives in turns, as programs with blocking calls
must.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import ceil

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.steps import parts, room_like
from tutti.transports.base import Operation, Transport, Work

_CHUNK_BYTES = 256 * 2**10
_AHEAD = 4
"""Receives that are under way at once, so that the next chunk has somewhere to go while one is added."""

_UNCHECKED = 8
"""Sends that are not looked after; what was sent before them has long gone."""


def ring(flat: Tensor, transport: Transport) -> Operation:
    """Sum over ranks, in place."""
    num_adds = transport.size - 1
    return pass_on(_chunked(flat, transport.size), transport, transport.rank, num_adds, 2 * num_adds)


def ring_blocking(flat: Tensor, transport: Transport) -> Operation:
    """Sum over ranks, in place: in every step even ranks send before they receive, and odd ones the other way round."""
    rank, size = transport.rank, transport.size
    blocks = parts(flat.numel(), size)
    for step in range(2 * (size - 1)):
        mine, theirs = flat[blocks[(rank - step) % size]], flat[blocks[(rank - step - 1) % size]]
        received = room_like(theirs) if step < size - 1 else theirs
        if rank % 2 == 0:
            yield transport.isend(mine, (rank + 1) % size)
            yield transport.irecv(received, (rank - 1) % size)
        else:
            yield transport.irecv(received, (rank - 1) % size)
            yield transport.isend(mine, (rank + 1) % size)
        if step < size - 1:
            theirs += received


def reduce_scatter(flat: Tensor, transport: Transport) -> Operation:
    """Sum over ranks; each rank ends with its own part of the sum, and the rest of `flat` is spoilt."""
    num_steps = transport.size - 1
    return pass_on(_chunked(flat, transport.size), transport, transport.rank - 1, num_steps, num_steps)


def all_gather(flat: Tensor, transport: Transport) -> Operation:
    """Give every rank every other's part of `flat`."""
    return pass_on(_chunked(flat, transport.size), transport, transport.rank, 0, transport.size - 1)


def ring_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """2 (P-1) (α + n/P β): the fewest bytes there can be, and many messages.

    With long blocks, 2 (P-1) n/P β + α: latencies pass while other chunks of a block are sent.
    """
    block = num_bytes / num_ranks
    num_chunks = ceil(block / _CHUNK_BYTES)
    if num_chunks <= 1:
        return 2 * round_cost(num_ranks, num_bytes, link)
    hop_s = max(block * link.seconds_per_byte, link.seconds(block / num_chunks))
    return 2 * (num_ranks - 1) * hop_s + link.latency_s


def ring_blocking_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """4 (P-1) (α + n/P β): a link is used in one direction at a time."""
    return 4 * round_cost(num_ranks, num_bytes, link)


def round_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """(P-1) (α + n/P β): once round, as `reduce_scatter` and `all_gather` go."""
    return (num_ranks - 1) * link.seconds(num_bytes / num_ranks)


def _add(mine: Tensor, theirs: Tensor) -> None:
    mine.add_(theirs)


def pass_on(
    blocks: list[list[Tensor]],
    transport: Transport,
    first: int,
    num_adds: int,
    num_steps: int,
    add: Callable[[Tensor, Tensor], object] = _add,
) -> Operation:
    """Send block `first` to the right and pass on what comes from the left. A block is a list of chunks.

    In each of `num_steps` steps the block before the last one arrives: in the first `num_adds` it is added to, after
    them it is replaced. A block is replaced only after it has been round, so its old content has long been sent.
    """
    size = transport.size
    left, right = (transport.rank - 1) % size, (transport.rank + 1) % size
    sending = deque(transport.isend(chunk, right) for chunk in (blocks[first % size] if num_steps else []))
    arriving: deque[tuple[Tensor, Work]] = deque()
    to_ask = _coming(blocks, first, num_steps)
    for step, chunk in islice(to_ask, _AHEAD):
        received = room_like(chunk) if step < num_adds else chunk
        arriving.append((received, transport.irecv(received, left)))
    for step, chunk in _coming(blocks, first, num_steps):
        received, work = arriving.popleft()
        yield work
        if step < num_adds:
            add(chunk, received)
        if step + 1 < num_steps:
            sending.append(transport.isend(chunk, right))
            if len(sending) > _UNCHECKED:
                yield sending.popleft()
        for later, following in to_ask:
            received = room_like(following) if later < num_adds else following
            arriving.append((received, transport.irecv(received, left)))
            break
    yield from sending


def _coming(blocks: list[list[Tensor]], first: int, num_steps: int) -> Iterator[tuple[int, Tensor]]:
    """Each chunk that comes from the left, and in which step."""
    for step in range(num_steps):
        for chunk in blocks[(first - step - 1) % len(blocks)]:
            yield step, chunk


def _chunked(flat: Tensor, num_blocks: int) -> list[list[Tensor]]:
    """Blocks of chunks, none of them empty."""
    blocks = [flat[part] for part in parts(flat.numel(), num_blocks)]
    if blocks[0].nbytes <= _CHUNK_BYTES:
        # Extents of one length are one object, and a thousand lists of it would only be in the way.
        lists = {id(block): [block] if block.numel() else [] for block in blocks}
        return [lists[id(block)] for block in blocks]
    return [in_chunks(block, blocks[0].nbytes) for block in blocks]


def in_chunks(block: Tensor, largest_bytes: int) -> list[Tensor]:
    """A block as chunks, none of them empty: as many as the largest block has."""
    num_chunks = max(1, -(-largest_bytes // _CHUNK_BYTES))
    return [block[part] for part in parts(block.numel(), num_chunks) if part.start < part.stop]
