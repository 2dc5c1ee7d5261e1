"""What every rank has of its own in the middle of a block, for all of them to save."""

from typing import Any

import torch
from torch import Tensor


def mean(ranks: list[Any]) -> dict[str, Tensor]:
    """Of what ranks had, each counting for its samples since their block started."""
    total = sum(each["weight"] for each in ranks)
    shares = [each["weight"] / total if total else 1 / len(ranks) for each in ranks]
    return {
        name: torch.stack([share * each["own"][name] for share, each in zip(shares, ranks, strict=True)]).sum(0)
        for name in ranks[0]["own"]
    }
