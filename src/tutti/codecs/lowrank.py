"""A matrix as the product of two thin ones."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.codecs.base import (
    Codec,
    CodecSpeed,
    Packet,
    State,
    SumRounds,
    TensorLayout,
    copy_back,
    flat_float32,
    flat_view,
)
from tutti.codecs.kernels.orthogonal import multiply, orthogonalize
from tutti.codecs.packet import HEADER, Header, expect, floats, new_packet, read
from tutti.codecs.scale_groups import ScaleGroups
from tutti.errors import ConfigError

_KIND = 7


class _MatrixBlock(NamedTuple):
    """A tensor in the flat one: a matrix to be approximated, or, of rank 0, something sent as it is."""

    start: int
    rows: int
    columns: int
    rank: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.rows, self.columns)


@dataclass(frozen=True)
class LowRank(Codec):
    """Each matrix M as P Q, few columns and few rows: a step of power iteration from the last Q (Vogels et al. 2019).

    P = M Qᵀ is summed over ranks and made orthogonal, Q = Pᵀ M is summed: any number of ranks and buckets. Tensors
    with one dimension, and matrices so small that it would not pay, are sent as they are.

    Args:
        rank: columns of P and rows of Q.
    """

    rank: int = 2
    name = "lowrank"
    linear = True
    speed = CodecSpeed(1.4e9, 6.5e9)  # Of a matrix of 1024 by 1024; larger ones are slower.

    def __post_init__(self) -> None:
        if not (isinstance(self.rank, int) and self.rank >= 1):
            raise ConfigError(f"LowRank: rank must be a whole number of 1 or more, got {self.rank!r}.")

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        values = flat_float32(tensor, "LowRank").clone()
        sent: list[Tensor] = []
        rounds = self.rounds(values, ((0, tuple(tensor.shape)),), state, residual)
        while True:
            try:
                sent.append(next(rounds))
            except StopIteration as end:
                state = end.value
                break
        if len(sent) > 1:  # What was made of the first factor, not the factor itself.
            part = next(self._parts(((0, tuple(tensor.shape)),)))
            sent[0] = orthogonalize(sent[0].view(part.rows, part.rank)).view(-1)
        numbers = torch.cat(sent)
        header = Header(_KIND, numbers.numel(), values.numel(), len(sent))
        packet, payload = new_packet(header, numbers.nbytes, values.device)
        payload.view(torch.float32).copy_(numbers)
        return packet, state

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        header, payload = read(packet, _KIND, out.numel())
        sizes = [size for size in self.round_sizes(((0, tuple(out.shape)),)) if size]
        expect("rounds", header.parameter, max(1, len(sizes)))
        expect("numbers", header.count, sum(sizes))
        expect("payload bytes", payload.numel(), 4 * sum(sizes))
        numbers = floats(payload, sum(sizes))
        if len(sizes) == 2:
            part = next(self._parts(((0, tuple(out.shape)),)))
            p, q = numbers.split(sizes)
            said = torch.empty(part.rows, part.columns, dtype=torch.float32, device=out.device)
            multiply(p.view(part.rows, part.rank), q.view(part.rank, part.columns), said)
            numbers = said.view(-1)
        flat = flat_view(out)
        if add:
            flat.add_(numbers, alpha=scale)
        else:
            torch.mul(numbers, scale, out=flat)
        copy_back(flat, out)

    def rounds(self, values: Tensor, layout: TensorLayout, state: State, residual: Tensor | None = None) -> SumRounds:
        wanted = values if residual is None else values + residual
        parts = list(self._parts(layout))
        thin, plain = [part for part in parts if part.rank], [part for part in parts if not part.rank]
        old = [self._factor(part, state, values.device) for part in thin]
        sizes = [part.rows * part.rank for part in thin] + [part.stop - part.start for part in plain]
        first = torch.empty(sum(sizes), dtype=torch.float32, device=values.device)
        pieces = first.split(sizes)
        for part, q, piece in zip(thin, old, pieces, strict=False):
            torch.mm(part.of(wanted), q.T, out=piece.view(part.rows, part.rank))
        for part, piece in zip(plain, pieces[len(thin) :], strict=True):
            piece.copy_(wanted[part.start : part.stop])
        yield first
        for part, piece in zip(plain, pieces[len(thin) :], strict=True):
            values[part.start : part.stop] = piece
            if residual is not None:
                residual[part.start : part.stop] = 0.0
        if not thin:
            return state
        ps = [orthogonalize(piece.view(part.rows, part.rank)) for part, piece in zip(thin, pieces, strict=False)]
        second = torch.cat([(p.T @ part.of(wanted)).view(-1) for part, p in zip(thin, ps, strict=True)])
        own = second.clone()
        yield second
        shares = [part.columns * part.rank for part in thin]
        news = {}
        for part, p, q, mine, before in zip(thin, ps, second.split(shares), own.split(shares), old, strict=True):
            new, told = q.view(part.rank, part.columns), mine.view(part.rank, part.columns)
            if residual is not None and bool(torch.isfinite(told).all()):
                torch.addmm(part.of(wanted), p, told, alpha=-1, out=part.of(residual))
            multiply(p, new, part.of(values))
            # Over a power of two, which changes no bit of what is said: else its products could overflow for ever.
            power = (new.abs().amax(1, keepdim=True).view(torch.int32) & 0x7F800000).view(torch.float32)
            alive = torch.isfinite(new).all(1, keepdim=True) & (power > 0)
            news[f"q@{part.start}"] = torch.where(alive, new / power, before)
        return {**state, **news}

    def round_sizes(self, layout: TensorLayout) -> list[int]:
        parts = list(self._parts(layout))
        plain = sum(part.stop - part.start for part in parts if not part.rank)
        thin = [part for part in parts if part.rank]
        sizes = [plain + sum(part.rows * part.rank for part in thin)]
        return [*sizes, sum(part.columns * part.rank for part in thin)] if thin else sizes

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        """As if it were square."""
        return HEADER.size + 4 * self.round_sizes(((0, (math.isqrt(numel), math.isqrt(numel))),))[0] * 2

    def _parts(self, layout: TensorLayout) -> Iterator[_MatrixBlock]:
        for start, shape in layout:
            numel = math.prod(shape)
            rows = shape[0] if len(shape) > 1 else 1
            columns = numel // rows if rows else 0
            rank = min(self.rank, rows, columns)
            pays = len(shape) > 1 and 2 * rank * (rows + columns) <= numel and numel > 0
            yield _MatrixBlock(start, rows, columns, rank) if pays else _MatrixBlock(start, 1, numel, 0)

    def _factor(self, part: _MatrixBlock, state: State, device: torch.device) -> Tensor:
        """The last Q, or the first: drawn from where the matrix lies and its shape, so alike on all ranks."""
        if (kept := state.get(f"q@{part.start}")) is not None:
            return kept.to(device)
        generator = torch.Generator(device="cpu").manual_seed(part.start * 31 + part.columns)
        shape = part.rank, part.columns
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    def __str__(self) -> str:
        return self.name if self == type(self)() else f"{self.name}:{self.rank}"
