"""Ring all-reduce: every rank sends to its right neighbour and receives from its left one (Patarasuk & Yuan 2009).

The tensor is cut into P blocks, one per rank. In a reduce-scatter of P-1 steps each block travels once round the ring
and is summed on the way. In an all-gather of P-1 further steps the finished blocks travel round once more. With 3
ranks, where `a0` is rank 0's block a and `a` alone is the finished sum:

```
            rank 0            rank 1            rank 2
start       a0 b0 c0          a1 b1 c1          a2 b2 c2
step 1      sends a0          sends b1          sends c2           reduce-scatter
            c0+c2             a0+a1             b1+b2
step 2      sends c0+c2       sends a0+a1       sends b1+b2
            b                 c                 a
step 3      sends b           sends c           sends a            all-gather
step 4      sends a           sends b           sends c
end         a b c             a b c             a b c
```

Every rank sends 2 (P-1)/P of the tensor, which is the least that an all-reduce can send, and all links are in use in
every step. Each block is summed in the same order of ranks, so all ranks end with the same bits.

`ring` also cuts each block into chunks and sends a chunk on as soon as it is summed. A link is then busy while its ends
compute, and latencies pass while other chunks are on their way. `ring_blocking` sends and receives in turns, as
programs with blocking calls must; it is there to be compared with (Fourie 2019).
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import ceil

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.steps import buffer_like, parts
from tutti.transports.base import Operation, Transport, Work

_CHUNK_BYTES = 256 * 2**10
"""Longest chunk. Shorter ones cost more messages; longer ones leave the link idle while a chunk is summed."""

_RECEIVES_AHEAD = 4
"""Receives that are posted at once, so that the next chunks have somewhere to go while one is summed."""

_MAX_UNAWAITED_SENDS = 8
"""Sends that may be unfinished before the oldest of them is waited for. By then it has almost always been sent."""


def ring(flat: Tensor, transport: Transport) -> Operation:
    """Sum `flat` over ranks, in place, by a ring of chunks."""
    num_adds = transport.size - 1
    return pass_blocks_around(_chunked(flat, transport.size), transport, transport.rank, num_adds, 2 * num_adds)


def ring_blocking(flat: Tensor, transport: Transport) -> Operation:
    """Sum `flat` over ranks, in place, waiting for every send and every receive.

    In each step even ranks send before they receive, and odd ranks receive before they send. Otherwise all would wait
    in a send that nobody receives. With an odd number of ranks, ranks P-1 and 0 are both even: rank 0's receive then
    follows its own send, which rank 1 takes, so the chain resolves one link after another.
    """
    rank, size = transport.rank, transport.size
    blocks = parts(flat.numel(), size)
    for step in range(2 * (size - 1)):
        outgoing, incoming = flat[blocks[(rank - step) % size]], flat[blocks[(rank - step - 1) % size]]
        # The first P-1 steps add what arrives; the others replace the block by the finished sum.
        # Blocks are finished in the second half: what arrives is the sum, and is received where it belongs.
        received = buffer_like(incoming) if step < size - 1 else incoming
        if rank % 2 == 0:
            yield transport.isend(outgoing, (rank + 1) % size)
            yield transport.irecv(received, (rank - 1) % size)
        else:
            yield transport.irecv(received, (rank - 1) % size)
            yield transport.isend(outgoing, (rank + 1) % size)
        if step < size - 1:
            incoming += received


def reduce_scatter(flat: Tensor, transport: Transport) -> Operation:
    """Sum over ranks; each rank ends with its `local_part` of the sum, and the rest of `flat` is overwritten."""
    num_steps = transport.size - 1
    # Starting one block earlier than `ring` lets rank r end with block r instead of block r + 1.
    return pass_blocks_around(_chunked(flat, transport.size), transport, transport.rank - 1, num_steps, num_steps)


def all_gather(flat: Tensor, transport: Transport) -> Operation:
    """Fill `flat` on every rank with the `local_part` of every rank."""
    return pass_blocks_around(_chunked(flat, transport.size), transport, transport.rank, 0, transport.size - 1)


def ring_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """2 (P-1) (α + n/P β) seconds, for P ranks, n bytes, latency α and β seconds per byte.

    There are 2 (P-1) steps, each of one message of n/P bytes. With blocks of several chunks it is 2 (P-1) n/P β + α,
    because all latencies but one pass while other chunks are sent; unless a chunk's own time, α included, is longer.
    """
    block = num_bytes / num_ranks
    # As `_chunked` cuts it; with one chunk per block nothing overlaps, and every latency is waited for.
    num_chunks = ceil(block / _CHUNK_BYTES)
    if num_chunks <= 1:
        return 2 * round_cost(num_ranks, num_bytes, link)
    # A block is passed on chunk by chunk: a hop takes the time of its bytes, or that of one chunk on a slow link.
    hop_s = max(block * link.seconds_per_byte, link.seconds(block / num_chunks))
    return 2 * (num_ranks - 1) * hop_s + link.latency_s


def ring_blocking_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """4 (P-1) (α + n/P β): as the ring, but sends and receives take turns, so each step takes two messages' time."""
    return 4 * round_cost(num_ranks, num_bytes, link)


def round_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """(P-1) (α + n/P β): once round the ring, as `reduce_scatter` and `all_gather` go."""
    return (num_ranks - 1) * link.seconds(num_bytes / num_ranks)


def _add(local: Tensor, received: Tensor) -> None:
    local.add_(received)


def pass_blocks_around(
    blocks: list[list[Tensor]],
    transport: Transport,
    first: int,
    num_adds: int,
    num_steps: int,
    add: Callable[[Tensor, Tensor], object] = _add,
) -> Operation:
    """Send block `first` to the right neighbour, and pass on what comes from the left one.

    In each step the block before the last one arrives. A block is overwritten only after it has been round the ring, so
    its old content was sent long before: every send of it was received by the neighbour that the new content went
    through.

    Args:
        blocks: the chunks of every block, by block. All ranks cut alike.
        first: number of the block that this rank sends first; other ranks start with those before and after it.
        num_adds: steps, the first ones, in which what arrives is combined with the block; after them it replaces it.
        num_steps: steps in all.
        add: combines a local chunk with a received one, and leaves the result in the local one.
    """
    size = transport.size
    # One neighbour to each side, whichever block is on its way: so every link carries one message at a time.
    left, right = (transport.rank - 1) % size, (transport.rank + 1) % size
    # The first block is sent at once: it depends on nothing that arrives.
    sending = deque(transport.isend(chunk, right) for chunk in (blocks[first % size] if num_steps else []))
    arriving: deque[tuple[Tensor, Work]] = deque()
    to_request = _incoming_chunks(blocks, first, num_steps)
    # `to_request` goes through the same chunks as the loop below, `_RECEIVES_AHEAD` of them earlier.
    for step, chunk in islice(to_request, _RECEIVES_AHEAD):
        # What is to be added needs a buffer of its own; what replaces a chunk is received in place.
        received = buffer_like(chunk) if step < num_adds else chunk
        arriving.append((received, transport.irecv(received, left)))
    for step, chunk in _incoming_chunks(blocks, first, num_steps):
        received, work = arriving.popleft()
        yield work
        if step < num_adds:
            add(chunk, received)
        # What arrives in the last step has been everywhere.
        if step + 1 < num_steps:
            # From the tensor itself, without a copy: the chunk is not written again before it has been round the ring.
            sending.append(transport.isend(chunk, right))
            if len(sending) > _MAX_UNAWAITED_SENDS:
                yield sending.popleft()
        # One more receive for the one that was taken. Messages from one rank arrive in the order of their receives.
        for later, following in to_request:
            received = buffer_like(following) if later < num_adds else following
            arriving.append((received, transport.irecv(received, left)))
            break
    yield from sending


def _incoming_chunks(blocks: list[list[Tensor]], first: int, num_steps: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each chunk that comes from the left neighbour, in order, with the number of its step."""
    for step in range(num_steps):
        for chunk in blocks[(first - step - 1) % len(blocks)]:
            yield step, chunk


def _chunked(flat: Tensor, num_blocks: int) -> list[list[Tensor]]:
    """Cut `flat` into blocks, and blocks into chunks, none of them empty."""
    blocks = [flat[part] for part in parts(flat.numel(), num_blocks)]
    if blocks[0].nbytes <= _CHUNK_BYTES:
        # Size-only tensors of one length are one object. One shared list per object keeps dry runs of a thousand ranks
        # from making a million lists.
        lists = {id(block): [block] if block.numel() else [] for block in blocks}
        return [lists[id(block)] for block in blocks]
    return [split_into_chunks(block, blocks[0].nbytes) for block in blocks]


def split_into_chunks(block: Tensor, largest_bytes: int) -> list[Tensor]:
    """Cut a block into as many chunks as a block of `largest_bytes` has, and leave out empty ones.

    The number comes from the largest block, so that all ranks agree on it whichever block they cut.
    """
    num_chunks = max(1, -(-largest_bytes // _CHUNK_BYTES))
    return [block[part] for part in parts(block.numel(), num_chunks) if part.start < part.stop]
