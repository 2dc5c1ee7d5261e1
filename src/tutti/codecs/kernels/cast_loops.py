"""Casts to fp16, bf16 and fp8 on the CPU, in integer arithmetic, which vectorises on every processor.

A float32 is 1 sign bit, 8 bits of exponent (bias 127) and 23 bits of mantissa. Shortening the mantissa by s bits is
rounding the integer to a multiple of 2^s; a carry runs into the exponent, which is right. Changing the bias is a
subtraction in the exponent.

| format | sign | exponent (bias) | mantissa | mantissa bits dropped | bias difference |
| --- | --- | --- | --- | --- | --- |
| fp16 | 1 | 5 (15) | 10 | 13 | 112 |
| bf16 | 1 | 8 (127) | 7 | 16 | 0 |
| fp8 e4m3 | 1 | 4 (7) | 3 | 20 | 120 |

Numbers below the smallest normal one of a format (subnormals) have a fixed step. Adding a constant whose own last
mantissa bit is worth that step makes the float32 addition round to it: 0.5 for fp16 (steps of 2^-24), 16384 for fp8
(steps of 2^-9).

Work goes block by block, so that scratch memory stays in the first-level cache. Every intermediate is converted to
int32 again: Numba makes 64-bit integers of sums, and a vector holds half as many of those.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from tutti.codecs.kernels.compiled import compiled, compiled_in_order
from tutti.codecs.scale_groups import MAX_GROUP_NUMEL

_BLOCK = 1024
"""Values per block of fp16 and bf16, which have no scale groups."""
_INFINITE = np.int32(0x7F800000)
"""Bits of float32 infinity. Larger magnitudes are NaN."""
_HALF_NORMAL = np.int32(0x38800000)
"""Bits of 2^-14, the smallest normal float16. Below it float16 has steps of 2^-24."""
_LEAST = np.float32(1e-35)
"""Smallest usable scale. 448 divided by it is still finite."""

_FP8_LARGEST = np.float32(448)
"""Largest number of e4m3: 1.75 × 2^8."""


@compiled
def _bits(value):  # type: ignore[no-untyped-def]
    """Return the bits of a float32 as an int32."""
    return np.float32(value).view(np.int32)


@compiled
def _number(bits):  # type: ignore[no-untyped-def]
    """Return the float32 that has these bits."""
    return np.int32(bits).view(np.float32)


@compiled
def _magnitude(value):  # type: ignore[no-untyped-def]
    """Return the bits of a value without its sign. They are in the order of magnitudes, with NaN above infinity."""
    return np.int32(_bits(value) & np.int32(0x7FFFFFFF))


@compiled
def _signed(value, sign_source):  # type: ignore[no-untyped-def]
    """Return `value` with the sign bit of `sign_source`."""
    return _number(np.int32(_bits(value) | np.int32(_bits(sign_source) & np.int32(-0x80000000))))


@compiled
def _rounded(bits, shift):  # type: ignore[no-untyped-def]
    """Round to the nearest number whose lowest `shift` bits are zero; of two equally near ones to the even one.

    Adding just below one half, plus 1 if the bit that stays last is odd, carries exactly when rounding up is right.
    """
    odd = np.int32(np.int32(bits >> shift) & np.int32(1))
    below_middle = np.int32(np.int32(np.int32(1) << np.int32(shift - 1)) - np.int32(1))
    return np.int32(np.int32(np.int32(bits + odd) + below_middle) & np.int32(np.int32(-1) << shift))


@compiled
def _bf16(magnitude):  # type: ignore[no-untyped-def]
    """Return the bf16 code of a magnitude: its upper 16 bits, rounded."""
    return np.int32(_rounded(magnitude, np.int32(16)) >> np.int32(16))


@compiled
def _from_bf16(code):  # type: ignore[no-untyped-def]
    """Return the number of a bf16 code without sign."""
    return _number(np.int32(code << np.int32(16)))


@compiled
def _half(magnitude):  # type: ignore[no-untyped-def]
    """Return the fp16 code of a magnitude up to 65,504."""
    normal = np.int32(np.int32(_rounded(magnitude, np.int32(13)) - np.int32(112 << 23)) >> np.int32(13))
    # From 0.5 on, float32 has steps of 2^-24, too: the addition rounds, and the difference of bits counts the steps.
    tiny = np.int32(_bits(_number(magnitude) + np.float32(0.5)) - np.int32(0x3F000000))
    return tiny if magnitude < _HALF_NORMAL else normal


@compiled
def _from_half(code):  # type: ignore[no-untyped-def]
    """Return the number of an fp16 code without sign."""
    normal = _number(np.int32(np.int32(code << np.int32(13)) + np.int32(112 << 23)))
    return np.float32(code) * np.float32(2.0**-24) if code < np.int32(0x400) else normal


@cache
def cast_encode(half: bool, feedback: bool) -> Callable[..., None]:
    """Return the encoder to float16 if `half`, else to bfloat16. It rounds to even, and finite values stay finite."""
    most = np.int32(0x477FE000 if half else 0x7F7F0000)  # Bits of the largest fp16 or bf16 number as a float32.
    infinite, nan = (np.int32(0x7C00), np.int32(0x7E00)) if half else (np.int32(0x7F80), np.int32(0x7FC0))

    def kernel(values, residual, codes):  # type: ignore[no-untyped-def]
        wanted = np.empty(_BLOCK, np.float32)
        for begin in range(0, len(values), _BLOCK):
            source, target = values[begin : begin + _BLOCK], codes[begin : begin + _BLOCK]
            residual_part = residual[begin : begin + _BLOCK]
            for i in range(len(source)):
                wanted[i] = source[i] + residual_part[i] if feedback else source[i]
            largest = np.int32(0)
            for i in range(len(source)):
                largest = max(largest, _magnitude(wanted[i]))
            if largest <= most:  # The usual case: nothing to clip, so that the loop has no branches.
                for i in range(len(source)):
                    code = _half(_magnitude(wanted[i])) if half else _bf16(_magnitude(wanted[i]))
                    sign = np.int32(np.int32(_bits(wanted[i]) >> np.int32(16)) & np.int32(0x8000))
                    target[i] = np.int16(np.int32(code | sign))
                    if feedback:
                        decoded = _from_half(code) if half else _from_bf16(code)
                        residual_part[i] = wanted[i] - _signed(decoded, wanted[i])
                continue
            for i in range(len(source)):
                magnitude = _magnitude(wanted[i])
                # Magnitudes are compared as integers, which are in the same order.
                near = min(magnitude, most)
                code = _half(near) if half else _bf16(near)
                if magnitude >= _INFINITE:
                    code = infinite if magnitude == _INFINITE else nan
                elif feedback:
                    decoded = _from_half(code) if half else _from_bf16(code)
                    residual_part[i] = wanted[i] - _signed(decoded, wanted[i])
                target[i] = np.int16(code | (0x8000 if _bits(wanted[i]) < 0 else 0))

    return compiled(kernel)


@compiled
def _fp8(magnitude):  # type: ignore[no-untyped-def]
    """Return the e4m3 code of a magnitude up to 448. A rounding error of the scaling beyond 448 is rounded away."""
    normal = np.int32(np.int32(_rounded(magnitude, np.int32(20)) >> np.int32(20)) - np.int32(120 << 3))
    # From 2^14 on, float32 has steps of 2^-9, as e4m3 has below 2^-6 (bits 0x3C800000).
    tiny = np.int32(_bits(_number(magnitude) + np.float32(16384)) - np.int32(0x46800000))
    return tiny if magnitude < np.int32(0x3C800000) else normal


@compiled
def _near_fp8(value):  # type: ignore[no-untyped-def]
    """Return the number that a value becomes in e4m3, without making the code: it vectorises better."""
    magnitude = _magnitude(value)
    steps = np.int32(_bits(_number(magnitude) + np.float32(16384)) - np.int32(0x46800000))
    tiny = np.float32(steps) * np.float32(2.0**-9)
    near = tiny if magnitude < np.int32(0x3C800000) else _number(_rounded(magnitude, np.int32(20)))
    return _signed(near, value)


@compiled
def _from_fp8(code):  # type: ignore[no-untyped-def]
    """Return the number of an e4m3 code without sign."""
    normal = _number(np.int32(np.int32(code << np.int32(20)) + np.int32(120 << 23)))
    return np.float32(code) * np.float32(2.0**-9) if code < np.int32(8) else normal


@cache
def fp8_encode(feedback: bool) -> Callable[..., None]:
    """Return the encoder to e4m3, rounded to even and scaled by the largest magnitude of each group."""

    def kernel(values, residual, starts, stops, offsets, scales, payload):  # type: ignore[no-untyped-def]
        wanted = np.empty(MAX_GROUP_NUMEL, np.float32)
        for group in range(len(starts)):
            source, target = values[starts[group] : stops[group]], payload[offsets[group] : offsets[group + 1]]
            residual_part = residual[starts[group] : stops[group]]
            for i in range(len(source)):
                wanted[i] = source[i] + residual_part[i] if feedback else source[i]
            largest = np.int32(0)
            for i in range(len(source)):
                largest = max(largest, _magnitude(wanted[i]))
            scale = scales[group] = _number(largest)
            usable = largest < _INFINITE and scale > _LEAST
            if not usable:
                # Decoded as 0 times the scale: 0 if it is tiny, NaN if it is not finite.
                target[:] = 0
                if feedback and largest < _INFINITE:
                    for i in range(len(source)):
                        residual_part[i] = wanted[i]  # All of it: it may add up to something that can be sent.
                continue
            up, down = _FP8_LARGEST / scale, scale / _FP8_LARGEST
            for i in range(len(source)):
                code = _fp8(_magnitude(wanted[i] * up))
                # The sign bit of a float32, moved to that of a byte.
                sign = np.int32(np.int32(_bits(wanted[i]) >> np.int32(24)) & np.int32(0x80))
                target[i] = np.uint8(np.int32(code | sign))
            if feedback:
                for i in range(len(source)):
                    residual_part[i] = wanted[i] - _near_fp8(wanted[i] * up) * down

    return compiled_in_order(kernel)


@cache
def fp8_decode(add: bool) -> Callable[..., None]:
    """Return the decoder from e4m3, which overwrites or adds."""

    def kernel(payload, scales, starts, stops, offsets, out):  # type: ignore[no-untyped-def]
        for group in range(len(starts)):
            source, target = payload[offsets[group] : offsets[group + 1]], out[starts[group] : stops[group]]
            down = scales[group] / _FP8_LARGEST
            for i in range(len(target)):
                code = np.int32(source[i])
                magnitude = np.int32(code & np.int32(0x7F))
                decoded = _from_fp8(magnitude)
                decoded = np.float32(np.nan) if magnitude == np.int32(0x7F) else decoded
                # The code's sign bit, moved to that of a float32.
                decoded = _signed(decoded, _number(np.int32(code << np.int32(24)))) * down
                target[i] = target[i] + decoded if add else decoded

    return compiled_in_order(kernel)
