"""Parameter shards: buckets cut into contiguous ranges, each held by one server (Li et al. 2014).

A *shard* is a contiguous range of one bucket's flat memory. It holds, of each parameter that it overlaps, one
*segment*. Every rank cuts the same buckets with the same arguments, so all ranks agree on the shards without a message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tutti.codecs.scale_groups import ScaleGroups
from tutti.replica import Bucket

_MIN_SHARD_BYTES = 4096
"""Smaller shards would cost more as messages than they save a server."""

_MANY_SERVERS = 64
"""From this number of servers on, a bucket is spread over some of them only."""


@dataclass(frozen=True)
class ShardSegment:
    """The elements of one parameter that a shard holds, counted in the parameter's memory order."""

    slot_index: int
    """Position of the parameter among its bucket's slots."""
    start: int
    """First element of the parameter that the shard holds."""
    stop: int
    """One past the last element of the parameter that the shard holds."""
    offset: int
    """Position in the shard at which the segment begins."""
    is_whole: bool
    """Whether the segment is the whole parameter."""

    @property
    def shard_range(self) -> slice:
        """The segment's elements within the shard."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """A contiguous range of a bucket, and the server that holds it."""

    index: int
    """Position among all shards of the model."""
    bucket_index: int
    """Index of the bucket that it is cut from."""
    bucket_range: slice
    """Its elements in the bucket's flat memory."""
    segments: tuple[ShardSegment, ...]
    """Its parameters, in the order of memory."""
    groups: ScaleGroups | None
    """Groups of elements that share a scale, if its gradients are compressed; None if they are sent exactly."""
    is_trained: bool
    """False for running statistics, of which servers keep the mean."""
    itemsize: int
    """Bytes per element."""
    server: int = 0
    """Position of its server among the ranks that serve."""

    @property
    def numel(self) -> int:
        return self.bucket_range.stop - self.bucket_range.start

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize


def cut_into_shards(
    buckets: Sequence[Bucket], num_servers: int, keep_whole: bool, compress: bool, first_index: int = 0
) -> list[ParameterShard]:
    """Cut every bucket so that all servers hold about the same number of bytes, in total and of each bucket.

    Args:
        buckets: the buckets to cut.
        num_servers: how many servers the shards are assigned to.
        keep_whole: whether a parameter must not be split between shards.
        compress: whether gradients that may be compressed are.
        first_index: the index of the first shard.
    """
    shards: list[ParameterShard] = []
    total_bytes = sum(bucket.flat.nbytes for bucket in buckets)
    for bucket in buckets:
        num_parts = num_servers
        if num_servers >= _MANY_SERVERS:
            # A shard on every server for every bucket would be too many messages.
            # In proportion to its bytes, all buckets together make about one shard per server.
            num_parts = max(1, num_servers * bucket.flat.nbytes // total_bytes)
        for bucket_range, groups in _bucket_ranges(bucket, num_parts, keep_whole):
            # No range reaches from the compressible part into the rest, so its end tells which part it is of.
            lossy = compress and bucket_range.stop <= bucket.values.numel()
            shards.append(
                ParameterShard(
                    index=first_index + len(shards),
                    bucket_index=bucket.index,
                    bucket_range=bucket_range,
                    segments=tuple(_segments(bucket, bucket_range)),
                    groups=groups if lossy else None,
                    is_trained=bucket.of_parameters,
                    itemsize=bucket.flat.itemsize,
                )
            )
    return _assign_servers(shards, num_servers)


def _bucket_ranges(bucket: Bucket, num_parts: int, keep_whole: bool) -> Iterator[tuple[slice, ScaleGroups | None]]:
    """Yield the ranges of a bucket: of what may be compressed, then one of all the rest except the `has_grad` flags."""
    # Those flags, one per slot at the end, are not sent: each request has flags per segment instead.
    numel, end = bucket.values.numel(), bucket.flat.numel() - len(bucket.slots)
    if numel:
        num_parts = min(num_parts, max(1, numel * bucket.flat.itemsize // _MIN_SHARD_BYTES))
        layout = [
            (start, tuple(slot.tensor.shape))
            for start, slot in zip(bucket.starts, bucket.slots, strict=True)
            if start < numel
        ]
        groups = ScaleGroups.from_layout(layout, numel)
        if keep_whole:
            yield from _ranges_of_whole_parameters(bucket, numel, num_parts, groups)
        else:
            yield from ((part, part_groups) for part, part_groups in groups.cut(num_parts) if part.stop > part.start)
    if end > numel:
        yield slice(numel, end), None


def _ranges_of_whole_parameters(
    bucket: Bucket, numel: int, num_parts: int, groups: ScaleGroups
) -> Iterator[tuple[slice, ScaleGroups]]:
    """Yield about equal ranges that begin and end where parameters do."""
    starts = [start for start in bucket.starts if start < numel]
    ideal_edges = [numel * part / num_parts for part in range(1, num_parts)]
    # The start of a parameter nearest to each ideal edge; a set, because two edges may come to the same start.
    edges = sorted({0, numel, *(min(starts, key=lambda start: abs(start - ideal)) for ideal in ideal_edges)})
    for begin, end in pairwise(edges):
        # Scale groups never span two parameters, so each is wholly inside one range.
        inside = (groups.starts >= begin) & (groups.starts < end)
        yield slice(begin, end), ScaleGroups(groups.starts[inside] - begin, groups.stops[inside] - begin, end - begin)


def _segments(bucket: Bucket, bucket_range: slice) -> Iterator[ShardSegment]:
    """Yield the part of each parameter that a range of its bucket holds."""
    for slot_index, (begin, slot) in enumerate(zip(bucket.starts, bucket.slots, strict=True)):
        numel = slot.tensor.numel()
        # The overlap of the parameter [begin, begin + numel) with the range, relative to the parameter.
        start = max(begin, bucket_range.start) - begin
        stop = min(begin + numel, bucket_range.stop) - begin
        if start < stop:
            offset = begin + start - bucket_range.start
            yield ShardSegment(slot_index, start, stop, offset, is_whole=stop - start == numel)


def _assign_servers(shards: list[ParameterShard], num_servers: int) -> list[ParameterShard]:
    """Assign each shard, the largest first, to the server that holds the fewest bytes so far."""
    loads = [0] * num_servers
    servers = {}
    # A stable sort, and the first of equal servers: every rank assigns alike.
    for shard in sorted(shards, key=lambda shard: -shard.num_bytes):
        servers[shard.index] = loads.index(min(loads))
        loads[servers[shard.index]] += shard.num_bytes
    return [replace(shard, server=servers[shard.index]) for shard in shards]
