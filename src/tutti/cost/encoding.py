"""The cost of a codec: the time to encode and decode a bucket, and the size of its message."""

from tutti.codecs import Codec, CodecSpeed
from tutti.collectives.compressed.messages import aligned
from tutti.cost.bucket_loads import BucketLoad


def coding_seconds(speed: CodecSpeed, numel: float, encoded: float, decoded: float) -> float:
    """Return the seconds to encode `numel` elements `encoded` times and to decode them `decoded` times, on one core."""
    # Speeds are in bytes of float32 input: 4 per element.
    return 4 * numel * (encoded / speed.encode_bytes_per_s + decoded / speed.decode_bytes_per_s)


def message_bytes(load: BucketLoad, codec: Codec | None) -> int:
    """Return the bytes of one message that holds the whole bucket, compressed by `codec` if there is one."""
    if codec is None or not load.numel:
        return load.num_bytes
    # Laid out as by `join`: the exact values, padded, then the packet.
    return aligned(load.exact_bytes) + aligned(codec.packet_bytes(load.numel, load.groups))
