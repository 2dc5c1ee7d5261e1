"""Messages of compressed sums: exact values first, padded to 8 bytes, then a packet."""

import torch
from torch import Tensor

from tutti.simulation.sizes import SizeOnlyTensor

_ALIGNED = 8
"""Bytes. Views as float64 or int64 need tensors that start at a multiple of it."""


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to the next multiple of 8."""
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def new_message(num_bytes: int, like: Tensor) -> Tensor:
    """Return an empty message of so many bytes; one without values if `like` has none."""
    if like.is_meta:
        return SizeOnlyTensor(num_bytes, torch.uint8, 1)  # type: ignore[return-value]
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def join(packet: Tensor, exact: Tensor) -> Tensor:
    """Return a packet and exact numbers as one message. The numbers come first, so that they are aligned."""
    start = aligned(exact.nbytes)
    message = torch.empty(start + packet.numel(), dtype=torch.uint8, device="cpu")
    # torch cannot view an empty tensor as another dtype.
    if exact.numel():
        message[: exact.nbytes] = exact.contiguous().view(torch.uint8)
    message[start:] = packet
    return message


def split(message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packet of a message and its exact numbers, with the length, dtype and device of `like`."""
    exact = message[: like.nbytes].view(like.dtype).to(like.device)
    return message[aligned(like.nbytes) :].to(like.device), exact
