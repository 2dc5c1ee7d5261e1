"""The mean of saved parameters, for checkpoints from the middle of a block that another number of ranks loads."""

from typing import Any

import torch
from torch import Tensor


def mean_parameters(ranks: list[Any]) -> dict[str, Tensor]:
    """Return the mean of all saved ranks' parameters, weighted by each rank's samples since its block started."""
    total = sum(rank["weight"] for rank in ranks)
    # Saved at the start of a block, no rank has samples yet, and all have the same parameters.
    shares = [rank["weight"] / total if total else 1 / len(ranks) for rank in ranks]
    return {
        name: torch.stack([share * rank["own"][name] for share, rank in zip(shares, ranks, strict=True)]).sum(0)
        for name in ranks[0]["own"]
    }
