"""The kernels for CUDA tensors, in Triton: one program per scale group, which reads each of its values once.

A group stays in registers from the reduction that makes its scale to the residual that is stored, so the memory traffic
is that of a copy. Groups are padded to a power of two; lanes beyond the end are masked. Layouts are those of
`tutti.codecs.kernels`. Picking and drawing indices use the torch operations of `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.codecs.kernels.reference import draw, pick
from tutti.codecs.scale_groups import GroupTable

__all__ = [
    "cast_encode",
    "draw",
    "fp8_decode",
    "fp8_encode",
    "onebit_decode",
    "onebit_encode",
    "pick",
    "quantize_decode",
    "quantize_encode",
]

_CAST_BLOCK = 2048
"""Values per program of casts to fp16 and bf16, which have no groups."""


def onebit_encode(values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor) -> None:
    _run(_onebit_encode, table, values, *_or_unused(residual, values), scales, codes)


def onebit_decode(codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
    _run(_onebit_decode, table, out, add, scales, codes)


def quantize_encode(
    values: Tensor, residual: Tensor | None, table: GroupTable, bits: int, seed: int, scales: Tensor, codes: Tensor
) -> None:
    signed = seed - 2**32 if seed >= 2**31 else seed  # As int32, so that the compiler takes 32 bits for every seed.
    _run(_quantize_encode, table, values, *_or_unused(residual, values), scales, codes, signed, bits)


def quantize_decode(codes: Tensor, scales: Tensor, table: GroupTable, bits: int, out: Tensor, add: bool) -> None:
    _run(_quantize_decode, table, out, add, scales, codes, bits)


def cast_encode(values: Tensor, residual: Tensor | None, codes: Tensor) -> None:
    if values.numel():
        memory, feedback = _or_unused(residual, values)
        with torch.cuda.device_of(values):
            _cast_encode[(triton.cdiv(values.numel(), _CAST_BLOCK),)](
                values, memory, feedback, codes, values.numel(), torch.finfo(codes.dtype).max, _CAST_BLOCK
            )


def fp8_encode(values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor) -> None:
    _run(_fp8_encode, table, values, *_or_unused(residual, values), scales, codes)


def fp8_decode(codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
    _run(_fp8_decode, table, out, add, scales, codes)


def _or_unused(residual: Tensor | None, values: Tensor) -> tuple[Tensor, bool]:
    # Triton needs a tensor for every argument. Without feedback this one is never read.
    return (values, False) if residual is None else (residual, True)


def _run(kernel, table: GroupTable, flat: Tensor, *args) -> None:  # type: ignore[no-untyped-def]
    """Start a program for every group; few warps each, so that many groups are on their way from memory at once."""
    if not len(table.starts):
        return
    # Triton's ranges are powers of two; `_put_codes` needs at least one whole byte of codes.
    block = max(16, triton.next_power_of_2(table.longest))
    with torch.cuda.device_of(flat):
        kernel[(len(table.starts),)](
            table.starts,
            table.stops,
            table.offsets,
            flat,
            *args,
            ALIGNED=table.aligned,
            BLOCK=block,
            # 16 values per thread at 32 threads per warp.
            num_warps=max(1, min(8, block // 512)),
        )


@triton.jit
def _span(starts, stops, offsets, BITS: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of this program's group, its first element, its length, and the byte where its codes begin."""
    group = tl.program_id(0)
    start = tl.load(starts + group)
    size = (tl.load(stops + group) - start).to(tl.int32)
    offset = tl.load(offsets + group)
    if ALIGNED:  # Lets the compiler load several values with one instruction.
        start = tl.multiple_of(start, 16)
        size = tl.multiple_of(size, 16)
        # 16 codes of BITS bits are 2 × BITS bytes.
        offset = tl.multiple_of(offset, 2 * BITS)
    return group, start, size, offset


@triton.jit
def _is_finite(value):  # type: ignore[no-untyped-def]
    """Test the bits: an exponent of all ones is infinity or NaN."""
    return (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def _wanted(values, residual, FEEDBACK: tl.constexpr, start, inside, i):  # type: ignore[no-untyped-def]
    """Load a group's values, with the residual added; lanes beyond the end hold 0."""
    wanted = tl.load(values + start + i, mask=inside, other=0.0)
    if FEEDBACK:
        wanted += tl.load(residual + start + i, mask=inside, other=0.0)
    return wanted


@triton.jit
def _largest(wanted):  # type: ignore[no-untyped-def]
    """Return the largest magnitude, by its bits (NaN above infinity above all), and whether one can divide by it."""
    scale = tl.max(wanted.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)
    return scale, _is_finite(scale) & (scale > 1e-35)


@triton.jit
def _put(out, decoded, ADD: tl.constexpr, inside):  # type: ignore[no-untyped-def]
    """Store decoded values, or add them to what is there."""
    if ADD:
        decoded += tl.load(out, mask=inside, other=0.0)
    tl.store(out, decoded, mask=inside)


@triton.jit
def _put_codes(target, code, size, BITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store codes packed into bytes, the first code in the lowest bits."""
    if BITS == 8:
        i = tl.arange(0, BLOCK)
        tl.store(target + i, code.to(tl.uint8), mask=i < size)
    else:
        PER_BYTE: tl.constexpr = 8 // BITS
        shifts = BITS * tl.arange(0, PER_BYTE)
        # Codes of a byte do not overlap after the shifts, so their sum is their bitwise or.
        joined = tl.sum(tl.reshape(code, [BLOCK // PER_BYTE, PER_BYTE]) << shifts[None, :], axis=1)
        j = tl.arange(0, BLOCK // PER_BYTE)
        tl.store(target + j, joined.to(tl.uint8), mask=j * PER_BYTE < size)


@triton.jit
def _codes(source, i, inside, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the codes of elements `i`."""
    PER_BYTE: tl.constexpr = 8 // BITS
    joined = tl.load(source + i // PER_BYTE, mask=inside, other=0).to(tl.int32)
    return (joined >> (BITS * (i % PER_BYTE))) & (2**BITS - 1)


@triton.jit
def _onebit_encode(  # type: ignore[no-untyped-def]
    starts, stops, offsets, values, residual, FEEDBACK: tl.constexpr, scales, codes,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, start, size, offset = _span(starts, stops, offsets, 1, ALIGNED)
    i = tl.arange(0, BLOCK)
    wanted = _wanted(values, residual, FEEDBACK, start, i < size, i)
    # Lanes beyond the end hold 0: they count as low and add nothing to `below`; `size` leaves them out.
    is_high = wanted > 0
    count = tl.sum(is_high.to(tl.int32), axis=0)
    above = tl.sum(tl.where(is_high, wanted, 0.0), axis=0)
    below = tl.sum(tl.where(is_high, 0.0, wanted), axis=0)
    high = above / tl.maximum(count, 1).to(tl.float32)
    low = below / tl.maximum(size - count, 1).to(tl.float32)
    tl.store(scales + 2 * group, low)
    tl.store(scales + 2 * group + 1, high)
    if FEEDBACK:
        # NaN or infinity in a group: the mask is empty, and its residual stays as it was.
        kept = tl.where(_is_finite(low) & _is_finite(high), size, 0)
        tl.store(residual + start + i, wanted - tl.where(is_high, high, low), mask=i < kept)
    _put_codes(codes + offset, is_high.to(tl.int32), size, 1, BLOCK)


@triton.jit
def _onebit_decode(  # type: ignore[no-untyped-def]
    starts, stops, offsets, out, ADD: tl.constexpr, scales, codes, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    group, start, size, offset = _span(starts, stops, offsets, 1, ALIGNED)
    i = tl.arange(0, BLOCK)
    low, high = tl.load(scales + 2 * group), tl.load(scales + 2 * group + 1)
    decoded = tl.where(_codes(codes + offset, i, i < size, 1) > 0, high, low)
    _put(out + start + i, decoded, ADD, i < size)


@triton.jit
def _noise(seed, index):  # type: ignore[no-untyped-def]
    """Return numbers in [0, 1) that depend on the seed and the index alone; see `loops.noise`."""
    x = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return (x >> 8).to(tl.float32) * (1.0 / 16777216)


@triton.jit(do_not_specialize=["seed"])
def _quantize_encode(  # type: ignore[no-untyped-def]
    starts, stops, offsets, values, residual, FEEDBACK: tl.constexpr, scales, codes, seed, BITS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    MIDDLE: tl.constexpr = 2 ** (BITS - 1) - 1
    group, start, size, offset = _span(starts, stops, offsets, BITS, ALIGNED)
    i = tl.arange(0, BLOCK)
    wanted = _wanted(values, residual, FEEDBACK, start, i < size, i)
    scale, usable = _largest(wanted)
    tl.store(scales + group, scale)
    # From -MIDDLE to MIDDLE. A group without a usable scale gets the code of zero.
    scaled = tl.where(usable, wanted * (MIDDLE / scale), 0.0)
    # See `loops.quantize_encode`: truncation after + 0.5 rounds to the nearest, after + noise stochastically.
    chance = 0.5 if FEEDBACK else _noise(seed, start + i)
    code = tl.minimum(tl.maximum((scaled + (MIDDLE + chance)).to(tl.int32), 0), 2 * MIDDLE)
    if FEEDBACK:
        down = tl.where(usable, scale / MIDDLE, 0.0)
        error = wanted - (code - MIDDLE).to(tl.float32) * down
        tl.store(residual + start + i, error, mask=i < tl.where(_is_finite(scale), size, 0))
    # Zeros beyond the end, so that the padding of the last byte is the same as on a CPU.
    _put_codes(codes + offset, tl.where(i < size, code, 0), size, BITS, BLOCK)


@triton.jit
def _quantize_decode(  # type: ignore[no-untyped-def]
    starts, stops, offsets, out, ADD: tl.constexpr, scales, codes, BITS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    MIDDLE: tl.constexpr = 2 ** (BITS - 1) - 1
    group, start, size, offset = _span(starts, stops, offsets, BITS, ALIGNED)
    i = tl.arange(0, BLOCK)
    code = _codes(codes + offset, i, i < size, BITS)
    decoded = (code - MIDDLE).to(tl.float32) * (tl.load(scales + group) / MIDDLE)
    _put(out + start + i, decoded, ADD, i < size)


@triton.jit
def _cast_encode(values, residual, FEEDBACK: tl.constexpr, codes, numel, limit, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # In 64 bits, for tensors of more than 2^31 elements.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = start + i < numel
    wanted = _wanted(values, residual, FEEDBACK, start, inside, i)
    # Finite values are clipped to the largest number of the format; others are sent as they are.
    near = tl.minimum(tl.maximum(wanted, -limit), limit)
    decoded = tl.where(_is_finite(wanted), near, wanted).to(codes.dtype.element_ty)
    tl.store(codes + start + i, decoded, mask=inside)
    if FEEDBACK:
        error = wanted - decoded.to(tl.float32)
        tl.store(residual + start + i, error, mask=inside & _is_finite(error))


@triton.jit
def _to_fp8(scaled):  # type: ignore[no-untyped-def]
    """Return e4m3 codes, rounded to even, of magnitudes up to 448. In integers, because not every GPU has the format.

    The arithmetic is that of `cast_loops`, which explains it.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    key = bits & 0x7FFFFFFF
    # 960 is 120 << 3, the difference of the biases at the place of e4m3's exponent. 0x7E is 448, the largest number.
    normal = tl.minimum(((key + 0x7FFFF + ((key >> 20) & 1)) >> 20) - 960, 0x7E)
    # From 2^14 on, float32 has steps of 2^-9, as e4m3 has below 2^-6.
    tiny = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(key < 0x3C800000, tiny, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _from_fp8(code):  # type: ignore[no-untyped-def]
    """Return the numbers of e4m3 codes, with their signs."""
    magnitude = code & 0x7F
    # The mantissa's 3 bits move up by 20; 0x3C000000 is 120 << 23, the difference of the exponents' biases.
    normal = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * (1.0 / 512), normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@triton.jit
def _fp8_encode(  # type: ignore[no-untyped-def]
    starts, stops, offsets, values, residual, FEEDBACK: tl.constexpr, scales, codes,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, start, size, offset = _span(starts, stops, offsets, 8, ALIGNED)
    i = tl.arange(0, BLOCK)
    wanted = _wanted(values, residual, FEEDBACK, start, i < size, i)
    scale, usable = _largest(wanted)
    tl.store(scales + group, scale)
    code = _to_fp8(tl.where(usable, wanted * (448.0 / scale), 0.0))
    if FEEDBACK:
        error = wanted - _from_fp8(code) * (scale / 448.0)
        # A group whose scale is too small to divide by is sent as zeros, and stays in the residual as a whole.
        tl.store(residual + start + i, error, mask=i < tl.where(_is_finite(scale), size, 0))
    _put_codes(codes + offset, code, size, 8, BLOCK)


@triton.jit
def _fp8_decode(  # type: ignore[no-untyped-def]
    starts, stops, offsets, out, ADD: tl.constexpr, scales, codes, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    group, start, size, offset = _span(starts, stops, offsets, 8, ALIGNED)
    i = tl.arange(0, BLOCK)
    decoded = _from_fp8(_codes(codes + offset, i, i < size, 8)) * (tl.load(scales + group) / 448.0)
    _put(out + start + i, decoded, ADD, i < size)
