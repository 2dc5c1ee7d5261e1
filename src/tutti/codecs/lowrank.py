"""`LowRank`: each matrix as a product of two thin ones (PowerSGD, Vogels et al. 2019).

One step for a gradient M of m rows and n columns, with rank r and the factor Q (r × n) of the step before:

1. Every rank computes P = M Qᵀ (m × r). P is summed over ranks, and its columns are made orthonormal.
2. Every rank computes Q = Pᵀ M (r × n). Q is summed over ranks.
3. The decoded gradient is P Q. Q starts the next step, so that over steps it follows the leading singular vectors.

Both products are linear in M, so sums over ranks need no decoding. All ranks compute the basis from the same sum with
the same order of operations (`kernels.orthogonal`), and get the same bits.
"""

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
"""Number of this codec in packets."""


class _MatrixBlock(NamedTuple):
    """One parameter in the flat tensor, as a matrix. One of rank 0 is sent uncompressed."""

    start: int
    """First element in the flat tensor."""
    rows: int
    columns: int
    rank: int
    """Columns of P and rows of Q."""

    @property
    def stop(self) -> int:
        """Element after the last one in the flat tensor."""
        return self.start + self.rows * self.columns

    def matrix_in(self, flat: Tensor) -> Tensor:
        """Return the view of the flat tensor that is this matrix."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


@dataclass(frozen=True)
class LowRank(Codec):
    """Approximates each matrix by P Q of low rank: one step of power iteration per call, from the last Q.

    Tensors of one dimension are sent uncompressed, and so are matrices that are less than twice as large as their
    factors.

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
        # A copy: `rounds` overwrites its argument, and the caller's tensor stays as it is.
        values = flat_float32(tensor, "LowRank").clone()
        sent: list[Tensor] = []
        rounds = self.rounds(values, ((0, tuple(tensor.shape)),), state, residual)
        while True:
            try:
                sent.append(next(rounds))
            except StopIteration as end:
                state = end.value
                break
        if len(sent) > 1:  # A receiver needs the basis that was made of the first factor.
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
        # Two rounds: P (rows × rank) and Q (rank × columns). One round: the tensor was sent as it is.
        if len(sizes) == 2:
            part = next(self._parts(((0, tuple(out.shape)),)))
            p, q = numbers.split(sizes)
            matrix = torch.empty(part.rows, part.columns, dtype=torch.float32, device=out.device)
            multiply(p.view(part.rows, part.rank), q.view(part.rank, part.columns), matrix)
            numbers = matrix.view(-1)
        flat = flat_view(out)
        if add:
            flat.add_(numbers, alpha=scale)
        else:
            torch.mul(numbers, scale, out=flat)
        copy_back(flat, out)

    def rounds(self, values: Tensor, layout: TensorLayout, state: State, residual: Tensor | None = None) -> SumRounds:
        wanted = values if residual is None else values + residual
        parts = list(self._parts(layout))
        compressed, plain = [part for part in parts if part.rank], [part for part in parts if not part.rank]
        old_factors = [self._factor(part, state, values.device) for part in compressed]
        # Round 1 is one flat tensor: every P (rows × rank) one after the other, then the uncompressed tensors.
        sizes = [part.rows * part.rank for part in compressed] + [part.stop - part.start for part in plain]
        first = torch.empty(sum(sizes), dtype=torch.float32, device=values.device)
        pieces = first.split(sizes)
        for part, q, piece in zip(compressed, old_factors, pieces, strict=False):
            torch.mm(part.matrix_in(wanted), q.T, out=piece.view(part.rows, part.rank))
        for part, piece in zip(plain, pieces[len(compressed) :], strict=True):
            piece.copy_(wanted[part.start : part.stop])
        yield first  # The caller sums it over ranks, in place, before it resumes this generator.
        for part, piece in zip(plain, pieces[len(compressed) :], strict=True):
            values[part.start : part.stop] = piece
            if residual is not None:
                residual[part.start : part.stop] = 0.0
        if not compressed:
            return state
        # All ranks make the bases from the same sums, so they get the same bits.
        bases = [
            orthogonalize(piece.view(part.rows, part.rank)) for part, piece in zip(compressed, pieces, strict=False)
        ]
        # Round 2: every Q = Pᵀ M (rank × columns), of this rank's own matrices.
        second = torch.cat([(p.T @ part.matrix_in(wanted)).view(-1) for part, p in zip(compressed, bases, strict=True)])
        local = second.clone()  # This rank's own share: P times it is what this rank has sent.
        yield second
        sizes = [part.columns * part.rank for part in compressed]
        new_factors = {}
        for part, p, q, local_q, old in zip(
            compressed, bases, second.split(sizes), local.split(sizes), old_factors, strict=True
        ):
            new, sent = q.view(part.rank, part.columns), local_q.view(part.rank, part.columns)
            # The residual is M - P Q with this rank's own Q. It stays as it was if NaN or infinity was sent.
            if residual is not None and bool(torch.isfinite(sent).all()):
                torch.addmm(part.matrix_in(wanted), p, sent, alpha=-1, out=part.matrix_in(residual))
            multiply(p, new, part.matrix_in(values))
            # Rows of Q are divided by a power of two, their largest magnitude rounded down. P is orthonormal whatever
            # the scale of Q, and without this an overflow in one step would stay in all later ones. The bits of the
            # exponent alone (mask 0x7F800000) are that power of two.
            power = (new.abs().amax(1, keepdim=True).view(torch.int32) & 0x7F800000).view(torch.float32)
            usable = torch.isfinite(new).all(1, keepdim=True) & (power > 0)
            new_factors[f"q@{part.start}"] = torch.where(usable, new / power, old)
        return {**state, **new_factors}

    def round_sizes(self, layout: TensorLayout) -> list[int]:
        parts = list(self._parts(layout))
        plain = sum(part.stop - part.start for part in parts if not part.rank)
        compressed = [part for part in parts if part.rank]
        sizes = [plain + sum(part.rows * part.rank for part in compressed)]
        return [*sizes, sum(part.columns * part.rank for part in compressed)] if compressed else sizes

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        """Return the length of a packet for a square matrix of so many elements."""
        # Both factors of a square matrix are equally long.
        return HEADER.size + 4 * self.round_sizes(((0, (math.isqrt(numel), math.isqrt(numel))),))[0] * 2

    def _parts(self, layout: TensorLayout) -> Iterator[_MatrixBlock]:
        """Yield every tensor of the layout as a matrix, with the first dimension as rows."""
        for start, shape in layout:
            numel = math.prod(shape)
            rows = shape[0] if len(shape) > 1 else 1
            columns = numel // rows if rows else 0
            rank = min(self.rank, rows, columns)
            # Worth it only if P and Q together are at most half as long as the matrix.
            pays = len(shape) > 1 and 2 * rank * (rows + columns) <= numel and numel > 0
            yield _MatrixBlock(start, rows, columns, rank) if pays else _MatrixBlock(start, 1, numel, 0)

    def _factor(self, part: _MatrixBlock, state: State, device: torch.device) -> Tensor:
        """Return the last Q, or at first a random one, drawn from the matrix's position and width."""
        if (last := state.get(f"q@{part.start}")) is not None:
            return last.to(device)
        # All ranks must start from the same Q, so it is drawn on the CPU, from what all of them know.
        generator = torch.Generator(device="cpu").manual_seed(part.start * 31 + part.columns)
        shape = part.rank, part.columns
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    def __str__(self) -> str:
        return self.name if self == type(self)() else f"{self.name}:{self.rank}"
