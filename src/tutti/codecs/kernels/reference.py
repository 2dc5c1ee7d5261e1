"""The kernels in plain torch operations: the reference of tests, and what devices other than CPUs and CUDA use."""

import torch
from torch import Tensor

from tutti.codecs.scale_groups import GroupTable


def onebit_encode(values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor) -> None:
    for group, (start, stop) in enumerate(_bounds(table)):
        wanted = _wanted(values, residual, start, stop)
        high = wanted > 0
        count = int(high.sum())
        above, below = wanted[high].sum(), wanted[~high].sum()
        # Each sign is decoded to the mean of its values, the nearest single number in the sense of least squares.
        scales[2 * group] = below / (stop - start - count) if count < stop - start else 0.0
        scales[2 * group + 1] = above / count if count else 0.0
        decoded = torch.where(high, scales[2 * group + 1], scales[2 * group])
        _store_residual(residual, start, stop, wanted - decoded, scales[2 * group : 2 * group + 2])
        codes[_byte_range(table, group)] = _packed(high.to(torch.uint8), 1)


def onebit_decode(codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
    for group, (start, stop) in enumerate(_bounds(table)):
        high = _unpacked(codes[_byte_range(table, group)], 1, stop - start).bool()
        _put(out[start:stop], torch.where(high, scales[2 * group + 1], scales[2 * group]), add)


def quantize_encode(
    values: Tensor, residual: Tensor | None, table: GroupTable, bits: int, seed: int, scales: Tensor, codes: Tensor
) -> None:
    middle = 2 ** (bits - 1) - 1
    for group, (start, stop) in enumerate(_bounds(table)):
        wanted = _wanted(values, residual, start, stop)
        # The largest magnitude, found among bits, which are in its order and keep NaN above infinity.
        key = (wanted.view(torch.int32) & 0x7FFFFFFF).max().reshape(1)
        scale = scales[group] = key.view(torch.float32)[0]
        usable = bool(torch.isfinite(scale) and scale > 1e-35)
        up = middle / scale if usable else torch.zeros_like(scale)
        down = scale / middle if usable else torch.zeros_like(scale)
        index = torch.arange(start, stop, device=values.device)
        # Not finite values get the code of zero: the scale already tells the receiver.
        noisy = (wanted * up).nan_to_num(0, 0, 0) + (middle + (noise(seed, index) if residual is None else 0.5))
        code = noisy.to(torch.int32).clamp(0, 2 * middle)
        _store_residual(residual, start, stop, wanted - (code - middle).to(torch.float32) * down, scales[group])
        codes[_byte_range(table, group)] = _packed(code.to(torch.uint8), bits)


def quantize_decode(codes: Tensor, scales: Tensor, table: GroupTable, bits: int, out: Tensor, add: bool) -> None:
    middle = 2 ** (bits - 1) - 1
    for group, (start, stop) in enumerate(_bounds(table)):
        code = _unpacked(codes[_byte_range(table, group)], bits, stop - start).to(torch.float32)
        _put(out[start:stop], (code - middle) * (scales[group] / middle), add)


def cast_encode(values: Tensor, residual: Tensor | None, codes: Tensor) -> None:
    wanted = values if residual is None else values + residual
    limit = torch.finfo(codes.dtype).max
    codes.copy_(torch.where(wanted.isfinite(), wanted.clamp(-limit, limit), wanted))
    if residual is not None:
        error = wanted - codes.to(torch.float32)
        residual.copy_(torch.where(error.isfinite(), error, residual))


def fp8_encode(values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor) -> None:
    for group, (start, stop) in enumerate(_bounds(table)):
        wanted = _wanted(values, residual, start, stop)
        key = (wanted.view(torch.int32) & 0x7FFFFFFF).max().reshape(1)
        scale = scales[group] = key.view(torch.float32)[0]
        usable = bool(torch.isfinite(scale) and scale > 1e-35)
        # 448 is the largest finite number of float8_e4m3fn, so the group's largest magnitude maps onto it.
        scaled = wanted * (448.0 / scale) if usable else torch.zeros_like(wanted)
        code = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        # A group whose scale is too small to divide by is sent as zeros, and stays in the residual as a whole.
        _store_residual(residual, start, stop, wanted - code.to(torch.float32) * (scale / 448), scales[group])
        codes[_byte_range(table, group)] = code.view(torch.uint8)


def fp8_decode(codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
    for group, (start, stop) in enumerate(_bounds(table)):
        decoded = codes[_byte_range(table, group)].view(torch.float8_e4m3fn).to(torch.float32)
        _put(out[start:stop], decoded * (scales[group] / 448), add)


def pick(values: Tensor, residual: Tensor | None, at_least: float) -> tuple[Tensor, Tensor]:
    wanted = values if residual is None else values + residual
    large = ~(wanted.abs() < at_least) & (wanted != 0)  # Not "abs() >= at_least", which is false for NaN.
    if residual is not None:
        residual.copy_(torch.where(torch.isfinite(wanted), wanted, residual))
    indices = large.nonzero().flatten()
    return indices.to(torch.int32), wanted[indices]


def draw(numel: int, count: int, seed: int, device: torch.device) -> Tensor:
    starts = edges(numel, count, device)
    sizes = starts.diff()
    drawn = noise(seed, torch.arange(count, device=device)) * sizes.to(torch.float32)
    # Noise just below 1 times a size may round up to the size in float32.
    return starts[:-1] + torch.minimum(drawn.long(), sizes - 1)


def edges(numel: int, count: int, device: torch.device) -> Tensor:
    """Return where `count` stretches of nearly equal length begin, and where the last one ends."""
    return torch.arange(count + 1, device=device) * numel // max(1, count)


def noise(seed: int, index: Tensor) -> Tensor:
    """Return numbers in [0, 1) that depend on the seed and the index alone; see `loops.noise`."""
    x = (index * 0x9E3779B1 + seed) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return (x >> 8).to(torch.float32) * 2.0**-24


def _bounds(table: GroupTable) -> list[tuple[int, int]]:
    """Return the first element of every group and the one after its last."""
    return list(zip(table.starts.tolist(), table.stops.tolist(), strict=True))


def _byte_range(table: GroupTable, group: int) -> slice:
    """Return the bytes of a group's codes."""
    return slice(int(table.offsets[group]), int(table.offsets[group + 1]))


def _wanted(values: Tensor, residual: Tensor | None, start: int, stop: int) -> Tensor:
    return values[start:stop].clone() if residual is None else values[start:stop] + residual[start:stop]


def _store_residual(residual: Tensor | None, start: int, stop: int, error: Tensor, scales: Tensor) -> None:
    """Store the new residual of a group, unless its scales are not finite."""
    if residual is not None and torch.isfinite(scales).all():
        residual[start:stop] = error


def _put(target: Tensor, decoded: Tensor, add: bool) -> None:
    """Store decoded values, or add them to those that are there."""
    if add:
        target += decoded
    else:
        target.copy_(decoded)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of `bits` bits into bytes, the first code in the lowest bits."""
    per_byte = 8 // bits
    # One row per byte, one column per code in it.
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % per_byte)).view(-1, per_byte)
    shifts = bits * torch.arange(per_byte, device=codes.device)
    return (padded.to(torch.int32) << shifts).sum(1).to(torch.uint8)


def _unpacked(data: Tensor, bits: int, count: int) -> Tensor:
    """Unpack `count` codes of `bits` bits from bytes."""
    shifts = bits * torch.arange(8 // bits, device=data.device)
    # Bytes × codes per byte; codes beyond `count` are padding.
    return ((data.to(torch.int32)[:, None] >> shifts) & (2**bits - 1)).flatten()[:count]
