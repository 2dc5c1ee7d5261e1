"""Parts of recipes' data, dealt out without an end, and the accuracy on them: for experiments that are cut down."""

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
def some(name: str, num_train: int, num_test: int, root: Path | None) -> tuple[ArrayDataset, ArrayDataset]:
    """Of a recipe, samples to train on, in the same random choice every time, and samples to test on."""
    splits = recipe(name).data(root)
    chosen = []
    for whole, number in ((splits.train, num_train), (splits.test, num_test)):
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))[:number]
        batch = whole.__getitems__(order.tolist())  # type: ignore[attr-defined]  # of images
        chosen.append(ArrayDataset(batch.inputs, batch.targets))
    return chosen[0], chosen[1]


def endless(batch: int, train: ArrayDataset, job: Job, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's batches, epoch after epoch: a fast one begins its next while others are in theirs."""
    loader = DataLoader(train, batch, shuffle=True, drop_last=True, collate_fn=collate)
    dealt = shard(loader, seed=seed, world=job.world)
    while True:
        yield from dealt


def accuracy_of(made: Recipe, model: nn.Module, test: ArrayDataset) -> float:
    """Of this rank's own parameters, as they are; a copy without hooks is tested, so that it takes no virtual time."""
    tested = copy.deepcopy(model).eval()
    with torch.no_grad():
        parts = zip(test.inputs.split(250), test.targets.split(250), strict=True)
        right = sum(float(made.accuracy(tested(x), y)) * len(y) for x, y in parts)
    return round(right / len(test), 5)
