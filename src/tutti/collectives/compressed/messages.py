"""Packets on their way: each with the part of what is sent exactly that goes the same way."""

import torch
from torch import Tensor

from tutti.simulation.sizes import SizeOnlyTensor

_ALIGNED = 8


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def room(num_bytes: int, like: Tensor) -> Tensor:
    """A message of so many bytes: to be filled, or, where nothing has values, of that size."""
    if like.is_meta:
        return SizeOnlyTensor(num_bytes, torch.uint8, 1)  # type: ignore[return-value]
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def join(packet: Tensor, exact: Tensor) -> Tensor:
    """A packet and exact numbers as one message, the numbers first, so that they are aligned."""
    start = aligned(exact.nbytes)
    message = torch.empty(start + packet.numel(), dtype=torch.uint8, device="cpu")
    if exact.numel():
        message[: exact.nbytes] = exact.contiguous().view(torch.uint8)
    message[start:] = packet
    return message


def split(message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The packet of a message, and its exact numbers, as many as `like` has."""
    exact = message[: like.nbytes].view(like.dtype).to(like.device)
    return message[aligned(like.nbytes) :].to(like.device), exact
