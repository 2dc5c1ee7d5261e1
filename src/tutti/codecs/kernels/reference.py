"""The kernels in plain torch operations: what the others are tested against, and what other devices use."""

import torch
from torch import Tensor

from tutti.codecs.scale_groups import GroupTable


def onebit_encode(values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor) -> None:
    for run, (start, stop) in enumerate(_spans(table)):
        wanted = _wanted(values, residual, start, stop)
        high = wanted > 0
        count = int(high.sum())
        above, below = wanted[high].sum(), wanted[~high].sum()
        scales[2 * run] = below / (stop - start - count) if count < stop - start else 0.0
        scales[2 * run + 1] = above / count if count else 0.0
        said = torch.where(high, scales[2 * run + 1], scales[2 * run])
        _leave(residual, start, stop, wanted - said, scales[2 * run : 2 * run + 2])
        codes[_bytes(table, run)] = _joined(high.to(torch.uint8), 1)


def onebit_decode(codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
    for run, (start, stop) in enumerate(_spans(table)):
        high = _parted(codes[_bytes(table, run)], 1, stop - start).bool()
        _put(out[start:stop], torch.where(high, scales[2 * run + 1], scales[2 * run]), add)


def quantize_encode(
    values: Tensor, residual: Tensor | None, table: GroupTable, bits: int, seed: int, scales: Tensor, codes: Tensor
) -> None:
    middle = 2 ** (bits - 1) - 1
    for run, (start, stop) in enumerate(_spans(table)):
        wanted = _wanted(values, residual, start, stop)
        key = (wanted.view(torch.int32) & 0x7FFFFFFF).max().reshape(1)
        scale = scales[run] = key.view(torch.float32)[0]
        usable = bool(torch.isfinite(scale) and scale > 1e-35)
        up = middle / scale if usable else torch.zeros_like(scale)
        down = scale / middle if usable else torch.zeros_like(scale)
        place = torch.arange(start, stop, device=values.device)
        noisy = (wanted * up).nan_to_num(0, 0, 0) + (middle + (noise(seed, place) if residual is None else 0.5))
        code = noisy.to(torch.int32).clamp(0, 2 * middle)
        _leave(residual, start, stop, wanted - (code - middle).to(torch.float32) * down, scales[run])
        codes[_bytes(table, run)] = _joined(code.to(torch.uint8), bits)


def quantize_decode(codes: Tensor, scales: Tensor, table: GroupTable, bits: int, out: Tensor, add: bool) -> None:
    middle = 2 ** (bits - 1) - 1
    for run, (start, stop) in enumerate(_spans(table)):
        code = _parted(codes[_bytes(table, run)], bits, stop - start).to(torch.float32)
        _put(out[start:stop], (code - middle) * (scales[run] / middle), add)


def cast_encode(values: Tensor, residual: Tensor | None, codes: Tensor) -> None:
    wanted = values if residual is None else values + residual
    limit = torch.finfo(codes.dtype).max
    codes.copy_(torch.where(wanted.isfinite(), wanted.clamp(-limit, limit), wanted))
    if residual is not None:
        rest = wanted - codes.to(torch.float32)
        residual.copy_(torch.where(rest.isfinite(), rest, residual))


def fp8_encode(values: Tensor, residual: Tensor | None, table: GroupTable, scales: Tensor, codes: Tensor) -> None:
    for run, (start, stop) in enumerate(_spans(table)):
        wanted = _wanted(values, residual, start, stop)
        key = (wanted.view(torch.int32) & 0x7FFFFFFF).max().reshape(1)
        scale = scales[run] = key.view(torch.float32)[0]
        usable = bool(torch.isfinite(scale) and scale > 1e-35)
        scaled = wanted * (448.0 / scale) if usable else torch.zeros_like(wanted)
        code = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        if usable:
            _leave(residual, start, stop, wanted - code.to(torch.float32) * (scale / 448), scales[run])
        codes[_bytes(table, run)] = code.view(torch.uint8)


def fp8_decode(codes: Tensor, scales: Tensor, table: GroupTable, out: Tensor, add: bool) -> None:
    for run, (start, stop) in enumerate(_spans(table)):
        said = codes[_bytes(table, run)].view(torch.float8_e4m3fn).to(torch.float32)
        _put(out[start:stop], said * (scales[run] / 448), add)


def pick(values: Tensor, residual: Tensor | None, at_least: float) -> tuple[Tensor, Tensor]:
    wanted = values if residual is None else values + residual
    found = ~(wanted.abs() < at_least) & (wanted != 0)  # NaN is more than any number.
    if residual is not None:
        residual.copy_(torch.where(torch.isfinite(wanted), wanted, residual))
    indices = found.nonzero().flatten()
    return indices.to(torch.int32), wanted[indices]


def draw(numel: int, count: int, seed: int, device: torch.device) -> Tensor:
    starts = edges(numel, count, device)
    sizes = starts.diff()
    drawn = noise(seed, torch.arange(count, device=device)) * sizes.to(torch.float32)
    return starts[:-1] + torch.minimum(drawn.long(), sizes - 1)


def edges(numel: int, count: int, device: torch.device) -> Tensor:
    """Where `count` stretches of nearly equal length begin, and where the last one ends."""
    return torch.arange(count + 1, device=device) * numel // max(1, count)


def noise(seed: int, place: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on the seed and the place alone: a hash of 32 bits, its upper 24 used."""
    x = (place * 0x9E3779B1 + seed) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return (x >> 8).to(torch.float32) * 2.0**-24


def _spans(table: GroupTable) -> list[tuple[int, int]]:
    return list(zip(table.starts.tolist(), table.stops.tolist(), strict=True))


def _bytes(table: GroupTable, run: int) -> slice:
    return slice(int(table.offsets[run]), int(table.offsets[run + 1]))


def _wanted(values: Tensor, residual: Tensor | None, start: int, stop: int) -> Tensor:
    return values[start:stop].clone() if residual is None else values[start:stop] + residual[start:stop]


def _leave(residual: Tensor | None, start: int, stop: int, rest: Tensor, scales: Tensor) -> None:
    if residual is not None and torch.isfinite(scales).all():
        residual[start:stop] = rest


def _put(target: Tensor, said: Tensor, add: bool) -> None:
    if add:
        target += said
    else:
        target.copy_(said)


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Codes of a few bits, as many to a byte as fit, the first lowest."""
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % per_byte)).view(-1, per_byte)
    shifts = bits * torch.arange(per_byte, device=codes.device)
    return (padded.to(torch.int32) << shifts).sum(1).to(torch.uint8)


def _parted(data: Tensor, bits: int, count: int) -> Tensor:
    shifts = bits * torch.arange(8 // bits, device=data.device)
    return ((data.to(torch.int32)[:, None] >> shifts) & (2**bits - 1)).flatten()[:count]
