"""Buckets cut into pieces, each held by one server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tutti.codecs.scale_groups import ScaleGroups
from tutti.replica import Bucket

_SMALLEST_BYTES = 4096
"""Smaller pieces would cost more as messages than they spare a server."""

_MANY_SERVERS = 64


@dataclass(frozen=True)
class Share:
    """What a piece holds of one parameter, in the order of its memory."""

    slot: int
    """Which of its bucket's."""
    start: int
    stop: int
    offset: int
    """Where in the piece it begins."""
    whole: bool


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a bucket, and who serves it."""

    number: int
    bucket: int
    """Its index."""
    part: slice
    """Of the bucket's memory."""
    shares: tuple[Share, ...]
    groups: ScaleGroups | None
    """Where scales are shared, if it is sent in a lossy way."""
    trained: bool
    """False for running statistics, of which servers keep the mean."""
    itemsize: int
    server: int = 0

    @property
    def numel(self) -> int:
        return self.part.stop - self.part.start

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize


def cut(buckets: Sequence[Bucket], num_servers: int, whole: bool, compressed: bool, first: int = 0) -> list[Piece]:
    """Cut every bucket so that servers hold about the same number of bytes, together and of each bucket.

    Args:
        whole: whether a parameter has to stay in one piece.
        compressed: whether what may be sent in a lossy way is.
        first: the number of the first piece.
    """
    pieces: list[Piece] = []
    total = sum(bucket.flat.nbytes for bucket in buckets)
    for bucket in buckets:
        # Among many servers each bucket goes to some of them: a piece for everyone would be very many messages.
        among = num_servers if num_servers < _MANY_SERVERS else max(1, num_servers * bucket.flat.nbytes // total)
        for part, groups in _parts(bucket, among, whole):
            shares = tuple(_shares(bucket, part))
            lossy = groups if compressed and part.stop <= bucket.values.numel() else None
            pieces.append(
                Piece(
                    first + len(pieces), bucket.index, part, shares, lossy, bucket.of_parameters, bucket.flat.itemsize
                )
            )
    return _dealt(pieces, num_servers)


def _parts(bucket: Bucket, num_servers: int, whole: bool) -> Iterator[tuple[slice, ScaleGroups | None]]:
    """Stretches of a bucket's memory: of what may be lossy, and what is left but for the marks."""
    numel, end = bucket.values.numel(), bucket.flat.numel() - len(bucket.slots)
    if numel:
        num_parts = min(num_servers, max(1, numel * bucket.flat.itemsize // _SMALLEST_BYTES))
        layout = [
            (start, tuple(slot.tensor.shape))
            for start, slot in zip(bucket.starts, bucket.slots, strict=True)
            if start < numel
        ]
        groups = ScaleGroups.from_layout(layout, numel)
        if whole:
            yield from _at_parameters(bucket, numel, num_parts, groups)
        else:
            yield from ((part, own) for part, own in groups.cut(num_parts) if part.stop > part.start)
    if end > numel:
        yield slice(numel, end), None


def _at_parameters(
    bucket: Bucket, numel: int, num_parts: int, groups: ScaleGroups
) -> Iterator[tuple[slice, ScaleGroups]]:
    starts = [start for start in bucket.starts if start < numel]
    goals = [numel * part / num_parts for part in range(1, num_parts)]
    edges = sorted({0, numel, *(min(starts, key=lambda start: abs(start - goal)) for goal in goals)})
    for begin, end in pairwise(edges):
        inside = (groups.starts >= begin) & (groups.starts < end)
        yield slice(begin, end), ScaleGroups(groups.starts[inside] - begin, groups.stops[inside] - begin, end - begin)


def _shares(bucket: Bucket, part: slice) -> Iterator[Share]:
    for number, (begin, slot) in enumerate(zip(bucket.starts, bucket.slots, strict=True)):
        numel = slot.tensor.numel()
        start, stop = max(begin, part.start) - begin, min(begin + numel, part.stop) - begin
        if start < stop:
            yield Share(number, start, stop, begin + start - part.start, whole=stop - start == numel)


def _dealt(pieces: list[Piece], num_servers: int) -> list[Piece]:
    """The same, each with a server: the largest first, to whoever holds least."""
    loads = [0] * num_servers
    servers = {}
    for piece in sorted(pieces, key=lambda piece: -piece.num_bytes):
        servers[piece.number] = loads.index(min(loads))
        loads[servers[piece.number]] += piece.num_bytes
    return [replace(piece, server=servers[piece.number]) for piece in pieces]
