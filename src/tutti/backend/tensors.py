"""Any tensor as a flat one in host memory, and back."""

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.transports.base import Operation


class Flats:
    """The tensors of one operation.

    As with Gloo, what is written to them goes unnoticed by autograd.
    """

    def __init__(self, me: int) -> None:
        """Of this rank, by its number in the whole world."""
        self._me = me
        self.filled: list[Tensor] = []
        """Those that the operation writes to."""
        self._homes: list[tuple[Tensor, Tensor]] = []

    def inputs(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors that are read."""
        return [self._flat(tensor, read=True, written=False) for tensor in tensors]

    def outputs(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors that are written to, all of them."""
        self.filled += tensors
        return [self._flat(tensor, read=False, written=True) for tensor in tensors]

    def inout(self, *tensors: Tensor) -> list[Tensor]:
        self.filled += tensors
        return [self._flat(tensor, read=True, written=True) for tensor in tensors]

    def landed(self, steps: Operation) -> Operation:
        """Take `steps`, and put what they left elsewhere where it belongs."""
        if not self._homes:
            return steps
        return self._landed(steps)

    def _landed(self, steps: Operation) -> Operation:
        yield from steps
        for home, flat in self._homes:
            home.copy_(flat.view(home.shape))

    def _flat(self, tensor: Tensor, read: bool, written: bool) -> Tensor:
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"rank {self._me}: backend 'tutti' takes dense tensors, got one of layout {tensor.layout}; call "
                "to_dense()."
            )
        data = tensor.data
        if data.is_complex():
            data = torch.view_as_real(data)
        if data.dtype is torch.bool:
            data = data.view(torch.uint8)  # Gloo adds them as such.
        if data.is_contiguous() and data.device.type == "cpu":
            return data.view(-1)
        room = torch.empty(0 if read else data.numel(), dtype=data.dtype, device="cpu")
        flat = data.cpu().contiguous().view(-1) if read else room
        if written:
            self._homes.append((data, flat))
        return flat
