"""The places of a few values among many, in few bits: gaps between them, coded by Golomb-Rice.

Of the ways tried on the gaps of random places, this took the fewest bytes and the least time: see docs/codecs.md.
"""

import math

import numpy as np
import torch
from torch import Tensor

from tutti.codecs.packet import as_array
from tutti.errors import PacketError

WIDEST = 32
"""The most low bits of a symbol."""


def width_for(numel: int, count: int) -> int:
    """How many low bits to write as they are, for `count` gaps that fill `numel`."""
    mean = numel / max(1, count)
    return max(0, math.floor(math.log2(max(1.0, mean * math.log(2)))))


def coded_bytes(numel: int, density: float) -> int:
    """About how many bytes the places of a share of `numel` elements take."""
    count = max(1, round(density * numel))
    width = width_for(numel, count)
    return math.ceil(count * (width + 1 + (numel / count) / 2**width / 1.4) / 8)


def encode_symbols(symbols: np.ndarray, width: int) -> np.ndarray:
    """Bytes that say these numbers, the low `width` bits of each as they are."""
    from tutti.codecs.kernels.sparse_loops import rice_encode  # Costs a compiler's import.

    most = int((symbols >> width).sum()) + len(symbols) * (width + 1)
    out = np.empty(most // 8 + 8, np.uint8)
    return out[: rice_encode(symbols, width, out)]


def decode_symbols(data: Tensor, count: int, width: int, most: int) -> np.ndarray:
    """The `count` numbers that all of `data` says, none above `most`. Raises `PacketError`."""
    from tutti.codecs.kernels.sparse_loops import rice_decode

    if width > WIDEST or count > 8 * data.numel():  # Every symbol takes a bit or more.
        raise PacketError(f"a packet that says {count} places in {data.numel()} bytes, {width} bits wide")
    symbols = np.empty(count, np.int64)
    if not rice_decode(as_array(data.cpu().contiguous()), width, most, symbols):
        raise PacketError(f"a packet whose {data.numel()} bytes are not {count} places")
    return symbols


def gaps(places: np.ndarray) -> np.ndarray:
    """How many elements lie before each place and after the one before it."""
    return np.diff(places.astype(np.int64), prepend=-1) - 1


def from_gaps(steps: np.ndarray, numel: int) -> Tensor:
    """The places that these gaps say. Raises `PacketError` if one is beyond `numel`."""
    if len(steps) > numel or float(steps.sum()) + len(steps) > numel:
        raise PacketError(f"a packet that says a place beyond {numel} elements")
    return torch.from_numpy(np.cumsum(steps + 1) - 1)
