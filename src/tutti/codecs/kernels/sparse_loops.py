"""What sparse codecs do on the CPU: find the large values, and say their places in few bits."""

from collections.abc import Callable
from functools import cache

import numpy as np

from tutti.codecs.kernels.compiled import compiled

_BLOCK = 1024


@cache
def pick(feedback: bool) -> Callable[..., int]:
    """The places of values that are large enough; every place is written down, and kept by moving on."""

    def kernel(values, residual, at_least, places, found):  # type: ignore[no-untyped-def]
        wanted = np.empty(_BLOCK, np.float32)
        keys = wanted.view(np.int32)
        limit = np.empty(1, np.float32)
        limit[0] = at_least
        least = max(limit.view(np.int32)[0], np.int32(1))  # Zeros are never sent.
        infinite = np.int32(0x7F800000)
        count = 0
        for begin in range(0, len(values), _BLOCK):
            size = min(_BLOCK, len(values) - begin)
            source = values[begin : begin + size]
            if feedback:
                rest = residual[begin : begin + size]
                for i in range(size):
                    wanted[i] = source[i] + rest[i]
                for i in range(size):
                    rest[i] = wanted[i] if keys[i] & np.int32(0x7FFFFFFF) < infinite else np.float32(0)
            else:
                for i in range(size):
                    wanted[i] = source[i]
            for i in range(size):
                places[count] = begin + i
                found[count] = wanted[i]
                count += np.int64((keys[i] & np.int32(0x7FFFFFFF)) >= least)
        return count

    return compiled(kernel)


@compiled
def rice_encode(symbols, width, out):  # type: ignore[no-untyped-def]
    """Golomb-Rice: the low `width` bits of every symbol after as many ones as the rest counts, and a zero.

    Returns the number of bytes.
    """
    buffer, filled, size = np.uint64(0), 0, 0
    for number in range(len(symbols)):
        symbol = np.uint64(symbols[number])
        ones = np.int64(symbol >> np.uint64(width))
        while ones >= 24:
            buffer |= np.uint64(0xFFFFFF) << np.uint64(filled)
            filled += 24
            ones -= 24
            while filled >= 8:
                out[size] = buffer & np.uint64(255)
                buffer >>= np.uint64(8)
                filled -= 8
                size += 1
        buffer |= ((np.uint64(1) << np.uint64(ones)) - np.uint64(1)) << np.uint64(filled)
        filled += ones + 1
        while filled >= 8:
            out[size] = buffer & np.uint64(255)
            buffer >>= np.uint64(8)
            filled -= 8
            size += 1
        buffer |= (symbol & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))) << np.uint64(filled)
        filled += width
        while filled >= 8:
            out[size] = buffer & np.uint64(255)
            buffer >>= np.uint64(8)
            filled -= 8
            size += 1
    if filled:
        out[size] = buffer & np.uint64(255)
        size += 1
    return size


@compiled
def rice_decode(data, width, most, symbols):  # type: ignore[no-untyped-def]
    """Read as many symbols as there is room for, none above `most`; whether that was all of `data`, and only that."""
    buffer, filled, at = np.uint64(0), 0, 0
    for number in range(len(symbols)):
        ones = np.int64(0)
        while True:
            while filled <= 48 and at < len(data):
                buffer |= np.uint64(data[at]) << np.uint64(filled)
                filled += 8
                at += 1
            if filled == 0:
                return False
            if not buffer & np.uint64(1):
                break
            buffer >>= np.uint64(1)
            filled -= 1
            ones += 1
            if ones << np.int64(width) > most:
                return False
        buffer >>= np.uint64(1)
        filled -= 1
        while filled < width and at < len(data):
            buffer |= np.uint64(data[at]) << np.uint64(filled)
            filled += 8
            at += 1
        if filled < width:
            return False
        symbol = (ones << np.int64(width)) | np.int64(buffer & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))
        buffer >>= np.uint64(width)
        filled -= width
        if symbol > most:
            return False
        symbols[number] = symbol
    return at == len(data) and filled < 8 and buffer == np.uint64(0)
