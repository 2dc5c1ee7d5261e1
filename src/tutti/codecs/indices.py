"""The indices of a few values among many, in few bits: gaps between them, encoded by exponential Golomb.

Large values keep together, in some rows and columns, so that most gaps are short and some are long: this code has room
for both. Others were tried: see docs/codecs.md.
"""

import math

import numpy as np
import torch
from torch import Tensor

from tutti.codecs.packet import as_array
from tutti.errors import ConfigError, PacketError

HIGHEST_ORDER = 32
_SAMPLE = 256


def check_room(numel: int) -> None:
    """TensorLayout are counted in 31 bits."""
    if numel >= 2**31:
        raise ConfigError(f"a tensor of {numel:,} elements is too long to say indices in; 2,147,483,647 can be.")


def order_for(symbols: np.ndarray) -> int:
    """The order of the code that says these numbers in the fewest bits, judged by some of them."""
    sample = symbols[:: max(1, len(symbols) // _SAMPLE)]
    if not len(sample):
        return 0
    orders = np.arange(24)[:, None]
    bits = np.floor(np.log2(sample + (1 << orders)))
    return int((2 * bits - orders).sum(1).argmin())


def index_bytes(numel: int, density: float) -> int:
    """About how many bytes the indices of a share of `numel` elements take, if they are anywhere."""
    count = max(1, round(density * numel))
    return math.ceil(count * (math.log2(max(2.0, numel / count)) + 1.9) / 8)


def encode_symbols(symbols: np.ndarray, order: int) -> np.ndarray:
    """Bytes that say these numbers, in the code of this order."""
    from tutti.codecs.kernels.sparse_loops import golomb_encode  # Costs a compiler's import.

    longest = 2 * int(symbols.max(initial=0) + (1 << order)).bit_length()
    out = np.empty(len(symbols) * longest // 8 + 8, np.uint8)
    return out[: golomb_encode(symbols, order, out)]


def decode_symbols(data: Tensor, count: int, order: int, most: int) -> np.ndarray:
    """The `count` numbers that all of `data` says, none above `most`. Raises `PacketError`."""
    from tutti.codecs.kernels.sparse_loops import golomb_decode

    if order > HIGHEST_ORDER or count > 8 * data.numel():  # Every symbol takes a bit or more.
        raise PacketError(f"a packet that says {count} indices in {data.numel()} bytes, in a code of order {order}")
    symbols = np.empty(count, np.int64)
    if not golomb_decode(as_array(data.cpu().contiguous()), order, most, symbols):
        raise PacketError(f"a packet whose {data.numel()} bytes are not {count} indices")
    return symbols


def gaps(indices: np.ndarray) -> np.ndarray:
    """How many elements lie before each place and after the one before it."""
    return np.diff(indices.astype(np.int64), prepend=-1) - 1


def from_gaps(steps: np.ndarray, numel: int) -> Tensor:
    """The indices that these gaps say. Raises `PacketError` if one is beyond `numel`."""
    if len(steps) > numel or float(steps.sum()) + len(steps) > numel:
        raise PacketError(f"a packet that says a place beyond {numel} elements")
    return torch.from_numpy(np.cumsum(steps + 1) - 1)
