"""Random subsets of the recipes' datasets, unending batches of them, and the test accuracy of a model."""

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tutti.data.shard import shard
from tutti.job import Job
from tutti.recipes import ArrayDataset, Recipe, collate, recipe


@cache
def subset(name: str, num_train: int, num_test: int, root: Path | None) -> tuple[ArrayDataset, ArrayDataset]:
    """Return random training and test samples of an image recipe; the choice is the same in every call."""
    splits = recipe(name).data(root)
    chosen = []
    for split, num_samples in ((splits.train, num_train), (splits.test, num_test)):
        order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:num_samples]
        batch = split.__getitems__(order.tolist())  # type: ignore[attr-defined]  # Image datasets have it.
        chosen.append(ArrayDataset(batch.inputs, batch.targets))
    return chosen[0], chosen[1]


def endless_batches(batch: int, train: ArrayDataset, job: Job, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this worker's batches epoch after epoch: a fast worker starts its next epoch before the others."""
    loader = DataLoader(train, batch, shuffle=True, drop_last=True, collate_fn=collate)
    sharded = shard(loader, seed=seed, world=job.world)
    while True:
        yield from sharded


def local_accuracy(made: Recipe, model: nn.Module, test: ArrayDataset) -> float:
    """Return the test accuracy of this rank's parameters.

    A copy of the model without hooks is evaluated, so that testing takes no virtual time.
    """
    tested = copy.deepcopy(model).eval()
    with torch.no_grad():
        chunks = zip(test.inputs.split(250), test.targets.split(250), strict=True)
        num_correct = sum(float(made.accuracy(tested(x), y)) * len(y) for x, y in chunks)
    return round(num_correct / len(test), 5)
