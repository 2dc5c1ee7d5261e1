"""Weighted means over ranks: each rank's tensor counts in proportion to its weight, such as its number of samples."""

import torch
from torch import Tensor

from tutti.collectives.collective import Collective, compare
from tutti.collectives.doubling import recursive_doubling
from tutti.collectives.steps import run
from tutti.errors import ConfigError, DifferentCalls, WeightRefused
from tutti.transports.base import Operation, Transport

FIRST_CALL = -(2.0**20)
"""Weights from here downwards are no weights: they number the collective calls of a job that ranks may be in."""


def mean(tensor: Tensor, transport: Transport, algorithm: Collective, weight: float = 1.0) -> None:
    """Replace `tensor` by its weighted mean over ranks, the same bits on all of them.

    With equal weights, all 0 included, it is the sum divided by the number of ranks, to the bit. Beside others a rank
    of weight 0 contributes nothing, NaN included. A weight of NaN raises `WeightRefused` on every rank.
    """
    compare(tensor, transport, f"mean by {algorithm.name}")  # First, so that all ranks raise together, or none.
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"rank {transport.world_rank}: the mean of {tensor.dtype} tensors is not an integer; use a sum, or convert "
            "first."
        )
    weights = local_weights(weight, transport)
    run(share_weights(weights, transport))
    weigh(tensor, weights, transport)
    run(algorithm.steps(tensor, transport))
    tensor.detach().div_(transport.size)


def local_weights(weight: float, transport: Transport) -> Tensor:
    """Return a vector for the weights of all ranks in which only this rank's is filled in, and the others are 0."""
    weights = torch.zeros(transport.size, dtype=torch.float64, device="cpu")
    weights[transport.rank] = weight
    return weights


def share_weights(weights: Tensor, transport: Transport) -> Operation:
    """Fill in the other ranks' weights, by a sum over ranks of such vectors."""
    yield from recursive_doubling(weights, transport)


def weigh(tensor: Tensor, weights: Tensor, transport: Transport) -> None:
    """Scale this rank's tensor so that the sum over ranks, divided by their number, is the weighted mean.

    Equal weights leave the tensor as it is, so that the result has the bits of a plain mean.

    Raises:
        WeightRefused: a rank's weight is NaN, which is how a rank says that its loss is not finite.
        DifferentCalls: a rank's weight is `FIRST_CALL` or less, which is how a rank says that it is in a call.
        ConfigError: a weight is negative.
    """
    if bad := torch.isnan(weights).nonzero().flatten().tolist():
        raise WeightRefused(transport.world_ranks[rank] for rank in bad)
    if (weights <= FIRST_CALL).any():
        raise DifferentCalls(weights.tolist())
    if negative := (weights < 0).nonzero().flatten().tolist():
        raise ConfigError(
            f"rank {transport.world_rank}: weights must be 0 or more, but rank {transport.world_ranks[negative[0]]} "
            f"gave {weights[negative[0]]:g}."
        )
    if (weights != weights[0]).any():
        share = float(weights[transport.rank] * len(weights) / weights.sum())
        if share == 0:
            tensor.detach().zero_()  # Not a product: 0 × NaN would still be NaN.
        else:
            tensor.detach().mul_(share)
