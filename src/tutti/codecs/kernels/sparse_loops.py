"""Loops of sparse codecs on the CPU: picking large values, Golomb codes of indices, and random indices."""

from collections.abc import Callable
from functools import cache

import numpy as np

from tutti.codecs.kernels.compiled import compiled
from tutti.codecs.kernels.loops import noise

_ONES_OF_BYTE = np.array([next((n for n in range(8) if not byte >> n & 1), 8) for byte in range(256)], np.uint8)
"""For every byte, how many of its lowest bits are one before the first zero."""

BLOCK = 1024
"""Values that are tested at once."""


@compiled
def _magnitude(value):  # type: ignore[no-untyped-def]
    """Return the bits of a value without its sign. They are in the order of magnitudes, with NaN above infinity."""
    return np.int32(np.float32(value).view(np.int32) & np.int32(0x7FFFFFFF))


MOST_BITS = 40
"""Longest symbol that the decoder accepts. Longer ones would not fit its buffer of 64 bits."""


@cache
def pick(feedback: bool) -> Callable[..., tuple[int, int]]:
    """Return the kernel that picks values which are large enough, from `begin` on, while another block fits the output.

    It returns where it stopped and how many values it has picked in all. For each block:

    1. Flag large values, one byte each. The loop has no branches, so it vectorises.
    2. List the groups of eight flags that have any, by one 64-bit comparison each.
    3. Go through those eights, which are few, and write every index and value.

    In 2 and 3 every candidate is written, and the write position moves on only if it counts: the processor would guess
    a branch wrong too often.
    """

    def kernel(values, residual, at_least, begin, count, indices, picked):  # type: ignore[no-untyped-def]
        flags64, eights = np.zeros(BLOCK // 8, np.uint64), np.zeros(BLOCK // 8 + 1, np.int64)
        flags = flags64.view(np.uint8)
        old = np.empty(BLOCK, np.float32)
        least = max(_magnitude(at_least), np.int32(1))  # Zeros are never sent.
        infinite = np.int32(0x7F800000)
        # A block can add at most BLOCK values, so inside the loop no write needs a check.
        while begin < len(values) and count + BLOCK < len(indices):
            source, residual_part = values[begin : begin + BLOCK], residual[begin : begin + BLOCK]
            # With feedback the sums are stored in the residual right away.
            wanted = residual_part if feedback else source
            for i in range(len(source)):
                value = source[i] + residual_part[i] if feedback else source[i]
                if feedback:
                    old[i] = residual_part[i]
                    residual_part[i] = value
                flags[i] = np.uint8(_magnitude(value) >= least)
            flags[len(source) :] = 0
            num_eights = 0
            for eight in range(BLOCK // 8):
                eights[num_eights] = eight
                num_eights += np.int64(flags64[eight] != 0)
            first = count
            for number in range(num_eights):
                for i in range(8 * eights[number], min(8 * eights[number] + 8, len(source))):
                    indices[count] = begin + i
                    picked[count] = wanted[i]
                    count += np.int64(flags[i])
            if feedback:  # Values that are not finite are among the large ones. Their residual is restored.
                for number in range(first, count):
                    if _magnitude(picked[number]) >= infinite:
                        residual_part[indices[number] - begin] = old[indices[number] - begin]
            begin += BLOCK
        return begin, count

    return compiled(kernel)


@compiled
def golomb_encode(symbols, order, out):  # type: ignore[no-untyped-def]
    """Write the exponential-Golomb code of `symbols` to `out`, and return the number of bytes.

    A symbol s becomes s + 2^order, a number of b + 1 bits. It is written as b - order ones, a zero, and its b lowest
    bits. Bits are filled into bytes from the lowest on.
    """
    buffer, filled, size = np.uint64(0), 0, 0
    for number in range(len(symbols)):
        # Raised so that every number has its leading one at bit `order` or above: that bit is not written.
        raised = np.uint64(symbols[number] + (np.int64(1) << np.int64(order)))
        bits = order
        while raised >> np.uint64(bits + 1):
            bits += 1
        ones = bits - order
        buffer |= ((np.uint64(1) << np.uint64(ones)) - np.uint64(1)) << np.uint64(filled)
        # The zero after the ones is already there: the buffer is empty above `filled`.
        filled += ones + 1
        while filled >= 8:
            out[size] = buffer & np.uint64(255)
            buffer >>= np.uint64(8)
            filled -= 8
            size += 1
        buffer |= (raised & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))) << np.uint64(filled)
        filled += bits
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
def golomb_decode(data, order, most, symbols):  # type: ignore[no-untyped-def]
    """Decode `len(symbols)` symbols, none above `most`, and return whether `data` holds these and nothing else.

    `buffer` holds `filled` bits that are not yet used, the next one lowest. Every read is checked, because `data` may
    be malformed: it returns False instead of reading on.
    """
    buffer, filled, at = np.uint64(0), 0, 0
    for number in range(len(symbols)):
        bits = np.int64(order)
        while True:
            # Eight more bits fit into the buffer of 64.
            while filled <= 48 and at < len(data):
                buffer |= np.uint64(data[at]) << np.uint64(filled)
                filled += 8
                at += 1
            num_ones = np.int64(_ONES_OF_BYTE[buffer & np.uint64(255)])
            bits += num_ones
            # The ones run to the end of the data, or announce a number that is too long.
            if num_ones >= filled or bits > MOST_BITS:
                return False
            buffer >>= np.uint64(num_ones)
            filled -= num_ones
            # Eight ones: the run may go on in the next byte.
            if num_ones < 8:
                break
        buffer >>= np.uint64(1)
        filled -= 1
        while filled < bits and at < len(data):
            buffer |= np.uint64(data[at]) << np.uint64(filled)
            filled += 8
            at += 1
        if filled < bits:
            return False
        low = buffer & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))
        # The leading one of the raised number is not sent.
        symbol = np.int64(low | (np.uint64(1) << np.uint64(bits))) - (np.int64(1) << np.int64(order))
        buffer >>= np.uint64(bits)
        filled -= bits
        if symbol > most:
            return False
        symbols[number] = symbol
    # Only the padding of the last byte may be left, and it must be zero.
    return at == len(data) and filled < 8 and buffer == np.uint64(0)


@compiled
def draw(numel, seed, indices):  # type: ignore[no-untyped-def]
    """Fill in one random index of each of `len(indices)` nearly equal stretches of `numel` elements.

    Stretch k begins at k numel // count; the remainder is carried along as in Bresenham's line algorithm.
    """
    count = len(indices)
    base_size, remainder = numel // count, numel % count
    start, over = 0, 0
    for number in range(count):
        size = base_size
        over += remainder
        if over >= count:
            over -= count
            size += 1
        drawn = np.int64(noise(np.uint32(seed), number) * np.float32(size))
        # The product may be rounded up to `size` itself in a very long stretch.
        indices[number] = start + min(drawn, size - 1)
        start += size
