"""Gradients of linear layers as sufficient factors, which servers multiply (Zhang et al. 2017, Poseidon).

The gradient of a linear layer is the product of the output gradients and the inputs of the batch. For a small batch
the two factors are fewer bytes than their product.

A message holds, for each segment of the shard, an int64 number of rows; then, for each segment, either the rows of
both factors or, for a row count of -1, the segment's gradient itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.errors import PacketError
from tutti.replica import Bucket
from tutti.replica.factors import Pair
from tutti.strategies.parameter_server.shards import ParameterShard, ShardSegment

_NOT_FACTORED = -1
"""The row count of a segment that is sent as its gradient."""

MatrixShape = tuple[int, int]
"""Outputs and inputs of a layer; (1, numel) for a parameter that is no matrix."""


def pack(
    shard: ParameterShard, values: Tensor, shapes: Sequence[MatrixShape], pairs: Sequence[Pair | None]
) -> Tensor | None:
    """Pack a shard's gradient as bytes, in factors where there are any.

    Args:
        shard: the shard.
        values: its gradient.
        shapes: the shape of the parameter of each segment.
        pairs: the factors of the parameter of each segment; None for one that is sent as its gradient.

    Returns:
        The message, or None if it would not be smaller than the gradient.
    """
    num_rows = [_NOT_FACTORED if pair is None else len(pair[0]) for pair in pairs]
    parts = [torch.tensor(num_rows, dtype=torch.int64, device="cpu").view(torch.uint8)]
    for segment, shape, pair in zip(shard.segments, shapes, pairs, strict=True):
        if pair is None:
            parts.append(values[segment.shard_range].to("cpu").view(torch.uint8))
        else:
            # Output gradients [rows, num_outputs] and inputs [rows, num_inputs]. The gradient is outputs.T @ inputs.
            outputs, inputs = (factor.to("cpu", values.dtype) for factor in pair)
            # Only the columns of outputs whose matrix rows the segment overlaps; inputs are needed whole.
            outputs = outputs[:, _output_range(segment, shape)]
            parts += [factor.reshape(-1).view(torch.uint8) for factor in (outputs, inputs)]
    num_bytes = sum(part.numel() for part in parts)
    return torch.cat(parts) if num_bytes < shard.num_bytes else None


def unpack(payload: Tensor, shard: ParameterShard, shapes: Sequence[MatrixShape], values: Tensor) -> None:
    """Fill `values` with the gradient that `pack` was given.

    Raises `PacketError` if the payload cannot have been made by `pack` for this shard.
    """
    # The buffer was used before, and elements between segments must not keep what it held.
    values.zero_()
    dtype, reader = values.dtype, _PayloadReader(payload)
    row_counts = reader.read_row_counts(len(shard.segments))
    for segment, shape, num_rows in zip(shard.segments, shapes, row_counts, strict=True):
        target = values[segment.shard_range]
        if num_rows == _NOT_FACTORED:
            target.copy_(reader.read(target.numel(), dtype))
            continue
        output_range = _output_range(segment, shape)
        num_outputs = output_range.stop - output_range.start
        outputs = reader.read(num_rows * num_outputs, dtype).view(num_rows, num_outputs)
        inputs = reader.read(num_rows * shape[1], dtype).view(num_rows, shape[1])
        # [num_outputs, num_rows] x [num_rows, num_inputs], flattened row by row as the parameter is.
        product = torch.mm(outputs.t(), inputs).view(-1)
        # The product holds whole rows of the matrix; the segment may begin and end within a row.
        first = segment.start - output_range.start * shape[1]
        target.copy_(product[first : first + target.numel()])
    reader.expect_end()


def matrix_shapes(shard: ParameterShard, bucket: Bucket) -> list[MatrixShape]:
    """Return the shape of the parameter of each segment."""
    tensors = [bucket.slots[segment.slot_index].tensor for segment in shard.segments]
    return [(tensor.shape[0], tensor.shape[1]) if tensor.dim() > 1 else (1, tensor.numel()) for tensor in tensors]


def concatenate(pairs: list[Pair]) -> Pair:
    """Return the rows of several uses of one layer as one pair of factors."""
    return torch.cat([outputs for outputs, _ in pairs]), torch.cat([inputs for _, inputs in pairs])


def _output_range(segment: ShardSegment, shape: MatrixShape) -> slice:
    """Return the rows of the matrix that the segment overlaps."""
    return slice(segment.start // shape[1], -(-segment.stop // shape[1]))


class _PayloadReader:
    """Reads a payload from front to back."""

    def __init__(self, payload: Tensor) -> None:
        self._payload, self._position = payload, 0

    def read_row_counts(self, num_segments: int) -> list[int]:
        """Return the number of rows of each segment. Raises `PacketError` if one is impossible."""
        row_counts = self.read(num_segments, torch.int64).tolist()
        # Checked before `read` multiplies it: a row takes at least a byte, so a larger count cannot be right.
        if any(num_rows < _NOT_FACTORED or num_rows > self._payload.numel() for num_rows in row_counts):
            raise PacketError(f"factors of {row_counts} rows in {self._payload.numel()} bytes")
        return row_counts

    def read(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the next `numel` elements. Raises `PacketError` if the payload is too short."""
        num_bytes = numel * dtype.itemsize
        stop = self._position + num_bytes
        if stop > self._payload.numel():
            raise PacketError(f"factors in {self._payload.numel()} bytes, wanted {stop} or more")
        # A copy is aligned for its dtype, wherever in the payload it was.
        part = self._payload[self._position : stop].clone().view(dtype)
        self._position = stop
        return part

    def expect_end(self) -> None:
        """Raise `PacketError` if there are bytes left."""
        if self._position != self._payload.numel():
            raise PacketError(f"factors in {self._payload.numel()} bytes, wanted {self._position}")
