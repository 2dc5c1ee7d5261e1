"""1-bit and quantised codes on the CPU, one scale group at a time, so that each value is read from memory once.

A group has at most 4,096 values: its scratch arrays (16 KiB) stay in the first-level cache between loops. Each inner
loop has no branches and one output, which is what lets the compiler vectorise it; a loop that did everything at once
would not be vectorised.

A group that contains NaN or infinity gets a scale that is not finite, because sums and maxima carry it along. Its
residual is then left as it was, and what it decodes to is not finite either.

Kernels are made by functions of their options (`feedback`, `bits`, `add`) and cached: inside a kernel the option is a
constant, and its branches are compiled away. Bit layouts are described in `tutti.codecs.kernels`.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from tutti.codecs.kernels.compiled import compiled, compiled_in_order
from tutti.codecs.scale_groups import MAX_GROUP_NUMEL

_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_FLAGS_OF_BYTE = np.ascontiguousarray(_BITS_OF_BYTE).view(np.uint64).reshape(-1)
"""For every byte, its eight bits as eight bytes of 0 or 1 in one 64-bit number, the lowest bit first."""

_GATHER_BITS = np.uint64(0x0102040810204080)
"""Multiplier that packs eight flags into a byte.

Byte i of the factor holds flag i, 0 or 1. This constant has bit 56 - 7 i set for i = 0..7. The product then has flag i
at bit 56 + i, where no two terms collide, and the highest byte is the eight flags with the first in the lowest bit.
"""


@cache
def onebit_encode(feedback: bool) -> Callable[..., None]:
    """Return the 1-bit encoder; with `feedback` it adds the residual and stores the new one."""

    def kernel(values, residual, starts, stops, offsets, scales, payload):  # type: ignore[no-untyped-def]
        wanted = np.empty(MAX_GROUP_NUMEL, np.float32)
        flags64 = np.zeros(MAX_GROUP_NUMEL // 8, np.uint64)
        # One byte per value, or eight values as one 64-bit number: two views of the same memory.
        flags = flags64.view(np.uint8)
        for group in range(len(starts)):
            start, size = starts[group], stops[group] - starts[group]
            source = values[start : start + size]
            if feedback:
                residual_part = residual[start : start + size]
                for i in range(size):
                    wanted[i] = source[i] + residual_part[i]
            else:
                for i in range(size):
                    wanted[i] = source[i]
            # Three loops instead of one: each is a plain reduction, which vectorises.
            above, below, count = np.float32(0), np.float32(0), np.int32(0)
            for i in range(size):
                above += wanted[i] if wanted[i] > 0 else np.float32(0)
            for i in range(size):
                below += np.float32(0) if wanted[i] > 0 else wanted[i]
            for i in range(size):
                count += np.int32(1) if wanted[i] > 0 else np.int32(0)
            high = above / np.float32(count) if count else np.float32(0)
            low = below / np.float32(size - count) if count < size else np.float32(0)
            scales[2 * group] = low
            scales[2 * group + 1] = high
            for i in range(size):
                flags[i] = wanted[i] > 0
            for i in range(size, (size + 7) // 8 * 8):
                flags[i] = 0  # Padding of the last byte, so that packets have no random bits.
            if feedback and np.isfinite(low) and np.isfinite(high):
                for i in range(size):
                    residual_part[i] = wanted[i] - (high if wanted[i] > 0 else low)
            target = payload[offsets[group] : offsets[group + 1]]
            for i in range(len(target)):
                target[i] = (flags64[i] * _GATHER_BITS) >> np.uint64(56)

    return compiled(kernel)


@cache
def onebit_decode(add: bool) -> Callable[..., None]:
    """Return the 1-bit decoder, which overwrites or adds."""

    def kernel(payload, scales, starts, stops, offsets, out):  # type: ignore[no-untyped-def]
        flags64 = np.zeros(MAX_GROUP_NUMEL // 8, np.uint64)
        flags = flags64.view(np.uint8)
        for group in range(len(starts)):
            start, size = starts[group], stops[group] - starts[group]
            source = payload[offsets[group] : offsets[group + 1]]
            # One table look-up and one 64-bit store spread the eight bits of a byte over eight bytes.
            for i in range(len(source)):
                flags64[i] = _FLAGS_OF_BYTE[source[i]]
            low, high = scales[2 * group], scales[2 * group + 1]
            target = out[start : start + size]
            # Two loops instead of a choice within one: each of them is a plain pass that the compiler can vectorise.
            if add:
                for i in range(size):
                    target[i] += high if flags[i] else low
            else:
                for i in range(size):
                    target[i] = high if flags[i] else low

    return compiled(kernel)


@compiled
def noise(seed, number):  # type: ignore[no-untyped-def]
    """Return a number in [0, 1) that depends on the seed and the index alone.

    It is a multiplicative integer hash of 32 bits (two xor-shift-multiply rounds), whose upper 24 bits become the
    mantissa of a float32. The same index draws the same number on every device, however the work is split.
    """
    x = np.uint32(np.uint32(number) * np.uint32(0x9E3779B1) + seed)
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97))
    return np.float32(np.int32(np.uint32(x >> np.uint32(8)))) * np.float32(2.0**-24)


@cache
def quantize_encode(bits: int, feedback: bool) -> Callable[..., None]:
    """Return the encoder for 8, 4 or 2 bits: nearest rounding with `feedback`, stochastic rounding without."""
    levels = 2 ** (bits - 1) - 1
    most = np.int32(2 * levels)
    middle, per_byte = np.float32(levels), 8 // bits

    def kernel(values, residual, starts, stops, offsets, seed, scales, payload):  # type: ignore[no-untyped-def]
        wanted = np.empty(MAX_GROUP_NUMEL, np.float32)
        codes32 = np.zeros(MAX_GROUP_NUMEL, np.int32)
        seed = np.uint32(seed)
        for group in range(len(starts)):
            start, size = starts[group], stops[group] - starts[group]
            source = values[start : start + size]
            if feedback:
                residual_part = residual[start : start + size]
                for i in range(size):
                    wanted[i] = source[i] + residual_part[i]
            else:
                for i in range(size):
                    wanted[i] = source[i]
            keys = wanted.view(np.int32)
            largest = np.int32(0)
            for i in range(size):
                largest = max(largest, keys[i] & np.int32(0x7FFFFFFF))  # By bits, NaN > infinity > finite.
            # The bits of a non-negative float32 are in the order of its values, so the largest is found among integers,
            # and NaN is not lost as it would be in comparisons. Two views of one array turn the bits back into a float.
            codes32[0] = largest
            scale = codes32.view(np.float32)[0]
            scales[group] = scale
            # Below 1e-35, middle / scale could overflow. Such values count as zero, and stay in the residual.
            usable = np.isfinite(scale) and scale > np.float32(1e-35)
            up = middle / scale if usable else np.float32(0)
            down = scale / middle if usable else np.float32(0)
            for i in range(size):
                chance = np.float32(0.5) if feedback else noise(seed, start + i)
                # Truncation rounds down here, since the sum is not negative: + 0.5 is the nearest level, + noise in [0,
                # 1) the level above with a probability of the remainder.
                code = np.int32(wanted[i] * up + (middle + chance))
                codes32[i] = min(max(code, np.int32(0)), most)
            if feedback and np.isfinite(scale):
                for i in range(size):
                    residual_part[i] = wanted[i] - (np.float32(codes32[i]) - middle) * down
            # Padding of the last byte, so that equal values give equal packets.
            for i in range(size, (size + per_byte - 1) // per_byte * per_byte):
                codes32[i] = 0
            target = payload[offsets[group] : offsets[group + 1]]
            for i in range(len(target)):
                if bits == 8:
                    target[i] = codes32[i]
                elif bits == 4:
                    target[i] = codes32[2 * i] | (codes32[2 * i + 1] << 4)
                else:
                    target[i] = (
                        codes32[4 * i]
                        | (codes32[4 * i + 1] << 2)
                        | (codes32[4 * i + 2] << 4)
                        | (codes32[4 * i + 3] << 6)
                    )

    return compiled_in_order(kernel)


@cache
def quantize_decode(bits: int, add: bool) -> Callable[..., None]:
    """Return the decoder for 8, 4 or 2 bits, which overwrites or adds."""
    levels = 2 ** (bits - 1) - 1
    middle, per_byte, mask = np.float32(levels), 8 // bits, np.uint8(2**bits - 1)

    def kernel(payload, scales, starts, stops, offsets, out):  # type: ignore[no-untyped-def]
        codes = np.zeros(MAX_GROUP_NUMEL, np.uint8)
        for group in range(len(starts)):
            start, size = starts[group], stops[group] - starts[group]
            source = payload[offsets[group] : offsets[group + 1]]
            down = scales[group] / middle
            if bits == 8:
                for i in range(size):
                    codes[i] = source[i]
            else:
                for i in range(len(source)):
                    # The first value is in the lowest bits of a byte. Behind the last value of a group, codes are
                    # padding.
                    for part in range(per_byte):
                        codes[per_byte * i + part] = (source[i] >> np.uint8(bits * part)) & mask
            target = out[start : start + size]
            if add:
                for i in range(size):
                    target[i] += (np.float32(codes[i]) - middle) * down
            else:
                for i in range(size):
                    target[i] = (np.float32(codes[i]) - middle) * down

    return compiled_in_order(kernel)
