"""What a codec costs: how long it takes to say and to understand a bucket, and in how many bytes."""

from typing import NamedTuple

from tutti.codecs import Codec, ErrorFeedback
from tutti.collectives.compressed.messages import aligned
from tutti.plan.loads import Load


class Speed(NamedTuple):
    """Bytes of float32 a second, on one core."""

    encode: float
    decode: float


SPEEDS: dict[str, Speed] = {
    "cast": Speed(7.9e9, 21e9),
    "onebit": Speed(8.0e9, 27e9),
    "quantize": Speed(8.7e9, 25e9),
    "threshold": Speed(3.6e9, 11e9),
    "topk": Speed(3.2e9, 14e9),
    "randomk": Speed(0.8e9, 2.5e9),
    "lowrank": Speed(1.4e9, 6.5e9),
    "chain": Speed(2.7e9, 12e9),
    "mixing": Speed(0.95e9, 8.3e9),
}
"""By a codec's name, with error feedback: as `tutti bench codecs` measured them (docs/benchmarks.md); low rank, which
is slower the larger a matrix is, for one of 1024 by 1024. "Mixing" is what gossip does to exact values: some six passes
over its own, and one over each neighbour's."""


def coding_seconds(codec: Codec | str, numel: float, encoded: float, decoded: float) -> float:
    """To encode so many elements `encoded` times, and to decode them `decoded` times."""
    inner = codec.inner if isinstance(codec, ErrorFeedback) else codec
    speed = SPEEDS[inner if isinstance(inner, str) else inner.name]
    return 4 * numel * (encoded / speed.encode + decoded / speed.decode)


def message_bytes(load: Load, codec: Codec | None) -> int:
    """Of a whole bucket in one message."""
    if codec is None or not load.numel:
        return load.num_bytes
    return aligned(load.exact_bytes) + aligned(codec.packet_bytes(load.numel, load.groups))
