"""The tensors of one operation as flat CPU tensors, with results copied back where needed."""

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.transports.base import Operation


class FlatTensors:
    """Flat CPU views, or copies, of the tensors of one operation.

    As with Gloo, autograd does not notice what is written to them.
    """

    def __init__(self, world_rank: int) -> None:
        """Collect tensors of `world_rank`, which error messages name."""
        self._world_rank = world_rank
        self.written: list[Tensor] = []
        """The caller's tensors that the operation writes to."""
        self._copy_back: list[tuple[Tensor, Tensor]] = []

    def inputs(self, *tensors: Tensor) -> list[Tensor]:
        """Flatten tensors that are only read."""
        return [self._flat(tensor, read=True, written=False) for tensor in tensors]

    def outputs(self, *tensors: Tensor) -> list[Tensor]:
        """Flatten tensors that are written completely, and not read."""
        self.written += tensors
        return [self._flat(tensor, read=False, written=True) for tensor in tensors]

    def inout(self, *tensors: Tensor) -> list[Tensor]:
        """Flatten tensors that are read and written."""
        self.written += tensors
        return [self._flat(tensor, read=True, written=True) for tensor in tensors]

    def with_copy_back(self, operation: Operation) -> Operation:
        """Run `operation`, then copy results from flat copies to the caller's tensors."""
        if not self._copy_back:
            return operation
        return self._with_copy_back(operation)

    def _with_copy_back(self, operation: Operation) -> Operation:
        """The generator behind `with_copy_back`, apart from it so that operations without copies stay as they are."""
        yield from operation
        # Within the operation: when its work is over, the results are where the caller looks for them.
        for tensor, flat in self._copy_back:
            tensor.copy_(flat.view(tensor.shape))

    def _flat(self, tensor: Tensor, read: bool, written: bool) -> Tensor:
        """Return a flat CPU tensor of real numbers: a view of the caller's memory where that is possible."""
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"rank {self._world_rank}: backend 'tutti' takes dense tensors, got one of layout {tensor.layout}; "
                "call to_dense()."
            )
        if torch.is_inference_mode_enabled():
            # Other threads may run the operation, and only this one is in inference mode.
            with torch.inference_mode(False):
                return self._flat(tensor, read, written)
        # Not `detach`, which shares the version counter: autograd would refuse a saved tensor that was written to.
        data = _normal_tensor(tensor) if tensor.is_inference() else tensor.data
        if data.is_complex():
            data = torch.view_as_real(data)
        if data.dtype is torch.bool:
            data = data.view(torch.uint8)  # Gloo adds booleans as bytes.
        if data.is_contiguous() and data.device.type == "cpu":
            return data.view(-1)
        # A tensor that is only written needs memory, but no copy from its device.
        empty = torch.empty(0 if read else data.numel(), dtype=data.dtype, device="cpu")
        flat = data.cpu().contiguous().view(-1) if read else empty
        if written:
            self._copy_back.append((data, flat))
        return flat


def _normal_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor on the memory of an inference tensor, which only threads in inference mode may write to."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
