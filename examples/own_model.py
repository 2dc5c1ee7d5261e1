"""A model of one's own in `tutti plan` and `tutti train`. In this folder:

tutti plan own_model:model_and_batch --workers 8 --cluster ethernet-1g
tutti train own_model:recipe --workers 2
"""

import torch
from torch import nn

from tutti.recipes import ArrayDataset, Recipe, Splits, accuracy, cross_entropy


def parity_batch(num_samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    bits = torch.randint(2, (num_samples, 4), generator=torch.Generator().manual_seed(seed))
    return bits.float(), bits.sum(1) % 2  # Four random bits, and whether the number of ones is odd.


def parity_data(root: object) -> Splits:  # `root` is the data folder, which this recipe does not need.
    return Splits(train=ArrayDataset(*parity_batch(4096)), test=ArrayDataset(*parity_batch(512, seed=1)))


def parity_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    """For `tutti profile` and `tutti plan`."""
    return parity_model(), parity_batch(64)[0]


def recipe() -> Recipe:
    """For `tutti train` and `tutti simulate`."""
    return Recipe(
        name="parity",
        summary="whether the number of ones among four bits is odd",
        model=parity_model,
        data=parity_data,
        optimizer=adam,
        loss=cross_entropy,
        accuracy=accuracy,
        batch_size=64,
        epochs=5,
        target=0.95,
        example=parity_batch,
    )
