"""Compact encoding of the indices in sparse packets: exponential-Golomb codes of the gaps between them.

Indices are in ascending order. Each is stored as its gap: the number of elements between it and the index before it.
Large values cluster in some rows and columns, so most gaps are short and a few are long, which this code suits: a gap g
takes about 2 log₂(1 + g / 2^order) + order + 1 bits. The order is chosen for each packet. docs/codecs.md compares other
codes.
"""

import math

import numpy as np
import torch
from torch import Tensor

from tutti.codecs.packet import as_array
from tutti.errors import ConfigError, PacketError

HIGHEST_ORDER = 32
"""Highest order that a packet may have. Higher ones are refused as malformed."""

_SAMPLE = 256
"""Gaps from which the order is chosen."""


def check_room(numel: int) -> None:
    """Raise `ConfigError` if a tensor is too long for indices in 31 bits, the int32 of kernels."""
    if numel >= 2**31:
        raise ConfigError(
            f"a tensor of {numel:,} elements is too long for a sparse codec (up to 2,147,483,647). Use a dense "
            "codec such as onebit, or smaller buckets."
        )


def order_for(symbols: np.ndarray) -> int:
    """Return the order whose code takes the fewest bits for these numbers, judged by a sample of them."""
    sample = symbols[:: max(1, len(symbols) // _SAMPLE)]
    if not len(sample):
        return 0
    orders = np.arange(24)[:, None]
    # 24 orders × samples. With s + 2^order of `bits` + 1 bits, the code takes 2 `bits` - order + 1 bits.
    bits = np.floor(np.log2(sample + (1 << orders)))
    return int((2 * bits - orders).sum(1).argmin())


def index_bytes(numel: int, density: float) -> int:
    """Estimate the bytes of the indices of `density` of `numel` elements that are spread evenly."""
    count = max(1, round(density * numel))
    return math.ceil(count * (math.log2(max(2.0, numel / count)) + 1.9) / 8)


def encode_symbols(symbols: np.ndarray, order: int) -> np.ndarray:
    """Return the code of this order for these numbers, as bytes."""
    from tutti.codecs.kernels.sparse_loops import golomb_encode  # Imported here, because it imports the compiler.

    # An upper bound for the bits of one symbol.
    longest = 2 * int(symbols.max(initial=0) + (1 << order)).bit_length()
    out = np.empty(len(symbols) * longest // 8 + 8, np.uint8)
    return out[: golomb_encode(symbols, order, out)]


def decode_symbols(data: Tensor, count: int, order: int, most: int) -> np.ndarray:
    """Decode `count` numbers from all of `data`.

    Raises:
        PacketError: `data` holds fewer or more numbers, or one above `most`.
    """
    from tutti.codecs.kernels.sparse_loops import golomb_decode

    if order > HIGHEST_ORDER or count > 8 * data.numel():  # Every number takes a bit or more.
        raise PacketError(f"a packet with {count} indices in {data.numel()} bytes, in a code of order {order}")
    symbols = np.empty(count, np.int64)
    if not golomb_decode(as_array(data.cpu().contiguous()), order, most, symbols):
        raise PacketError(f"a packet whose {data.numel()} bytes are not {count} indices")
    return symbols


def gaps(indices: np.ndarray) -> np.ndarray:
    """Return how many elements lie between each index and the one before it."""
    # The first gap counts from the start, so that index 0 has the gap 0.
    return np.diff(indices.astype(np.int64), prepend=-1) - 1


def from_gaps(steps: np.ndarray, numel: int) -> Tensor:
    """Return the indices that have these gaps. Raises `PacketError` if one is `numel` or more."""
    # The last index is the sum of all gaps + 1 each, less 1.
    if len(steps) > numel or float(steps.sum()) + len(steps) > numel:
        raise PacketError(f"a packet with an index beyond {numel} elements")
    return torch.from_numpy(np.cumsum(steps + 1) - 1)
