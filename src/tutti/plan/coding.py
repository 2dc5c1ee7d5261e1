"""What a codec costs: how long it takes to say and to understand a bucket, and in how many bytes."""

from tutti.codecs import Codec, CodecSpeed
from tutti.collectives.compressed.messages import aligned
from tutti.plan.loads import Load


def coding_seconds(speed: CodecSpeed, numel: float, encoded: float, decoded: float) -> float:
    """Seconds to encode `numel` elements `encoded` times and to decode them `decoded` times, on one core."""
    return 4 * numel * (encoded / speed.encode_bytes_per_s + decoded / speed.decode_bytes_per_s)


def message_bytes(load: Load, codec: Codec | None) -> int:
    """Of a whole bucket in one message."""
    if codec is None or not load.numel:
        return load.num_bytes
    return aligned(load.exact_bytes) + aligned(codec.packet_bytes(load.numel, load.groups))
