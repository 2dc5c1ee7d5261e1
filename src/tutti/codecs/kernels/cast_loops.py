"""Shorter floating-point numbers on the CPU, in integer arithmetic, which vectorises on every processor.

A block of values at a time, so that what lies between two loops stays in the first-level cache. Every intermediate is
made an int32 again: the compiler takes a sum of integers for 64 bits, of which a vector holds half as many.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from tutti.codecs.kernels.compiled import compiled, compiled_in_order
from tutti.codecs.scale_groups import MAX_GROUP_NUMEL

_BLOCK = 1024
_INFINITE = np.int32(0x7F800000)
_HALF_NORMAL = np.int32(0x38800000)
"""2^-14: below it float16 has steps of 2^-24."""
_LEAST = np.float32(1e-35)
"""The smallest scale: 448 over it is finite."""

_FP8_LARGEST = np.float32(448)


@compiled
def _bits(value):  # type: ignore[no-untyped-def]
    return np.float32(value).view(np.int32)


@compiled
def _number(bits):  # type: ignore[no-untyped-def]
    return np.int32(bits).view(np.float32)


@compiled
def _magnitude(value):  # type: ignore[no-untyped-def]
    return np.int32(_bits(value) & np.int32(0x7FFFFFFF))


@compiled
def _signed(value, of):  # type: ignore[no-untyped-def]
    return _number(np.int32(_bits(value) | np.int32(_bits(of) & np.int32(-0x80000000))))


@compiled
def _rounded(bits, shift):  # type: ignore[no-untyped-def]
    """To the nearest whose lowest `shift` bits are zero, or to the even one of two."""
    odd = np.int32(np.int32(bits >> shift) & np.int32(1))
    below_middle = np.int32(np.int32(np.int32(1) << np.int32(shift - 1)) - np.int32(1))
    return np.int32(np.int32(np.int32(bits + odd) + below_middle) & np.int32(np.int32(-1) << shift))


@compiled
def _bf16(magnitude):  # type: ignore[no-untyped-def]
    return np.int32(_rounded(magnitude, np.int32(16)) >> np.int32(16))


@compiled
def _from_bf16(code):  # type: ignore[no-untyped-def]
    return _number(np.int32(code << np.int32(16)))


@compiled
def _half(magnitude):  # type: ignore[no-untyped-def]
    normal = np.int32(np.int32(_rounded(magnitude, np.int32(13)) - np.int32(112 << 23)) >> np.int32(13))
    # Beside 0.5 a float32 has steps of 2^-24, too.
    tiny = np.int32(_bits(_number(magnitude) + np.float32(0.5)) - np.int32(0x3F000000))
    return tiny if magnitude < _HALF_NORMAL else normal


@compiled
def _from_half(code):  # type: ignore[no-untyped-def]
    normal = _number(np.int32(np.int32(code << np.int32(13)) + np.int32(112 << 23)))
    return np.float32(code) * np.float32(2.0**-24) if code < np.int32(0x400) else normal


@cache
def cast_encode(half: bool, feedback: bool) -> Callable[..., None]:
    """To float16 if `half`, else to bfloat16: rounded to even, and what is finite stays finite."""
    most = np.int32(0x477FE000 if half else 0x7F7F0000)  # The largest number of the kind, as a float32.
    infinite, nan = (np.int32(0x7C00), np.int32(0x7E00)) if half else (np.int32(0x7F80), np.int32(0x7FC0))

    def kernel(values, residual, codes):  # type: ignore[no-untyped-def]
        wanted = np.empty(_BLOCK, np.float32)
        for begin in range(0, len(values), _BLOCK):
            source, target = values[begin : begin + _BLOCK], codes[begin : begin + _BLOCK]
            rest = residual[begin : begin + _BLOCK]
            for i in range(len(source)):
                wanted[i] = source[i] + rest[i] if feedback else source[i]
            largest = np.int32(0)
            for i in range(len(source)):
                largest = max(largest, _magnitude(wanted[i]))
            if largest <= most:
                for i in range(len(source)):
                    code = _half(_magnitude(wanted[i])) if half else _bf16(_magnitude(wanted[i]))
                    sign = np.int32(np.int32(_bits(wanted[i]) >> np.int32(16)) & np.int32(0x8000))
                    target[i] = np.int16(np.int32(code | sign))
                    if feedback:
                        said = _from_half(code) if half else _from_bf16(code)
                        rest[i] = wanted[i] - _signed(said, wanted[i])
                continue
            for i in range(len(source)):
                magnitude = _magnitude(wanted[i])
                near = min(magnitude, most)
                code = _half(near) if half else _bf16(near)
                if magnitude >= _INFINITE:
                    code = infinite if magnitude == _INFINITE else nan
                elif feedback:
                    said = _from_half(code) if half else _from_bf16(code)
                    rest[i] = wanted[i] - _signed(said, wanted[i])
                target[i] = np.int16(code | (0x8000 if _bits(wanted[i]) < 0 else 0))

    return compiled(kernel)


@compiled
def _fp8(magnitude):  # type: ignore[no-untyped-def]
    """e4m3 of what is at most 448, but for rounding, and so never more."""
    normal = np.int32(np.int32(_rounded(magnitude, np.int32(20)) >> np.int32(20)) - np.int32(120 << 3))
    # Beside 2^14 a float32 has steps of 2^-9, as e4m3 has below 2^-6.
    tiny = np.int32(_bits(_number(magnitude) + np.float32(16384)) - np.int32(0x46800000))
    return tiny if magnitude < np.int32(0x3C800000) else normal


@compiled
def _near_fp8(value):  # type: ignore[no-untyped-def]
    """The number that `_fp8` and its sign say."""
    magnitude = _magnitude(value)
    steps = np.int32(_bits(_number(magnitude) + np.float32(16384)) - np.int32(0x46800000))
    tiny = np.float32(steps) * np.float32(2.0**-9)
    near = tiny if magnitude < np.int32(0x3C800000) else _number(_rounded(magnitude, np.int32(20)))
    return _signed(near, value)


@compiled
def _from_fp8(code):  # type: ignore[no-untyped-def]
    normal = _number(np.int32(np.int32(code << np.int32(20)) + np.int32(120 << 23)))
    return np.float32(code) * np.float32(2.0**-9) if code < np.int32(8) else normal


@cache
def fp8_encode(feedback: bool) -> Callable[..., None]:
    """e4m3, rounded to even, scaled by the largest of each run."""

    def kernel(values, residual, starts, stops, offsets, scales, payload):  # type: ignore[no-untyped-def]
        wanted = np.empty(MAX_GROUP_NUMEL, np.float32)
        for run in range(len(starts)):
            source, target = values[starts[run] : stops[run]], payload[offsets[run] : offsets[run + 1]]
            rest = residual[starts[run] : stops[run]]
            for i in range(len(source)):
                wanted[i] = source[i] + rest[i] if feedback else source[i]
            largest = np.int32(0)
            for i in range(len(source)):
                largest = max(largest, _magnitude(wanted[i]))
            scale = scales[run] = _number(largest)
            usable = largest < _INFINITE and scale > _LEAST
            if not usable:
                target[:] = 0
                continue
            up, down = _FP8_LARGEST / scale, scale / _FP8_LARGEST
            for i in range(len(source)):
                code = _fp8(_magnitude(wanted[i] * up))
                sign = np.int32(np.int32(_bits(wanted[i]) >> np.int32(24)) & np.int32(0x80))
                target[i] = np.uint8(np.int32(code | sign))
            if feedback:
                for i in range(len(source)):
                    rest[i] = wanted[i] - _near_fp8(wanted[i] * up) * down

    return compiled_in_order(kernel)


@cache
def fp8_decode(add: bool) -> Callable[..., None]:
    def kernel(payload, scales, starts, stops, offsets, out):  # type: ignore[no-untyped-def]
        for run in range(len(starts)):
            source, target = payload[offsets[run] : offsets[run + 1]], out[starts[run] : stops[run]]
            down = scales[run] / _FP8_LARGEST
            for i in range(len(target)):
                code = np.int32(source[i])
                magnitude = np.int32(code & np.int32(0x7F))
                said = _from_fp8(magnitude)
                said = np.float32(np.nan) if magnitude == np.int32(0x7F) else said
                said = _signed(said, _number(np.int32(code << np.int32(24)))) * down
                target[i] = target[i] + said if add else said

    return compiled_in_order(kernel)
