"""Gradients of linear layers as their factors, for servers that multiply them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.errors import PacketError
from tutti.replica import Bucket
from tutti.replica.factors import Pair
from tutti.strategies.parameter_server.pieces import Piece, Share

_IN_FULL = -1
"""In place of a number of rows."""

Shape = tuple[int, int]
"""Outputs and inputs of a layer; of another parameter, its elements as one row."""


def pack(piece: Piece, values: Tensor, shapes: Sequence[Shape], pairs: Sequence[Pair | None]) -> Tensor | None:
    """A piece's gradient as bytes: how many rows the factors of each share have, then those, or the share in full.

    None if that is no smaller than the piece itself. `values` are the piece's; shapes and pairs are of its shares.
    """
    rows = [_IN_FULL if pair is None else len(pair[0]) for pair in pairs]
    parts = [torch.tensor(rows, dtype=torch.int64, device="cpu").view(torch.uint8)]
    for share, shape, pair in zip(piece.shares, shapes, pairs, strict=True):
        if pair is None:
            whole = values[share.offset : share.offset + share.stop - share.start]
            parts.append(whole.to("cpu").view(torch.uint8))
        else:
            outputs, inputs = (factor.to("cpu", values.dtype) for factor in pair)
            parts += [each.reshape(-1).view(torch.uint8) for each in (outputs[:, _rows_of(share, shape)], inputs)]
    num_bytes = sum(part.numel() for part in parts)
    return torch.cat(parts) if num_bytes < piece.num_bytes else None


def unpack(payload: Tensor, piece: Piece, shapes: Sequence[Shape], values: Tensor) -> None:
    """Fill `values` with the gradient that `pack` was given. Raises `PacketError` if it cannot have been."""
    values.zero_()
    dtype, taken = values.dtype, _Reader(payload)
    for share, shape, rows in zip(piece.shares, shapes, taken.rows(len(piece.shares)), strict=True):
        out = values[share.offset : share.offset + share.stop - share.start]
        if rows == _IN_FULL:
            out.copy_(taken.take(out.numel(), dtype))
            continue
        part = _rows_of(share, shape)
        num_outputs = part.stop - part.start
        outputs = taken.take(rows * num_outputs, dtype).view(rows, num_outputs)
        inputs = taken.take(rows * shape[1], dtype).view(rows, shape[1])
        product = torch.mm(outputs.t(), inputs).view(-1)
        first = share.start - part.start * shape[1]
        out.copy_(product[first : first + out.numel()])
    taken.finish()


def shapes_of(piece: Piece, bucket: Bucket) -> list[Shape]:
    """Of the parameters of a piece's shares."""
    tensors = [bucket.slots[share.slot].tensor for share in piece.shares]
    return [(tensor.shape[0], tensor.shape[1]) if tensor.dim() > 1 else (1, tensor.numel()) for tensor in tensors]


def joined(pairs: list[Pair]) -> Pair:
    """The rows of several uses of a layer."""
    return torch.cat([outputs for outputs, _ in pairs]), torch.cat([inputs for _, inputs in pairs])


def _rows_of(share: Share, shape: Shape) -> slice:
    """The outputs of a layer that a share holds something of."""
    return slice(share.start // shape[1], -(-share.stop // shape[1]))


class _Reader:
    """Takes bytes from the front."""

    def __init__(self, payload: Tensor) -> None:
        self._payload, self._at = payload, 0

    def rows(self, number: int) -> list[int]:
        found = self.take(number, torch.int64).tolist()
        if any(rows < _IN_FULL or rows > self._payload.numel() for rows in found):
            raise PacketError(f"factors of {found} rows in {self._payload.numel()} bytes")
        return found

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        num_bytes = numel * dtype.itemsize
        if self._at + num_bytes > self._payload.numel():
            raise PacketError(f"factors in {self._payload.numel()} bytes, of which {self._at + num_bytes} are wanted")
        part = self._payload[self._at : self._at + num_bytes].clone().view(dtype)  # Aligned, wherever it was.
        self._at += num_bytes
        return part

    def finish(self) -> None:
        if self._at != self._payload.numel():
            raise PacketError(f"factors in {self._payload.numel()} bytes, of which only {self._at} are wanted")
