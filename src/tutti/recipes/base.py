"""What a recipe is: everything a run needs except how its workers stay together."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tutti.errors import ConfigError
from tutti.recipes.data import Splits


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its data, how it is optimised, and the test accuracy it must reach.

    Every callable is a function, class or `functools.partial` of one, so that a recipe can be sent to
    another process. `model` draws its parameters from the caller's random state; `data` and
    `example` give the same every time and leave that state alone.
    """

    name: str
    summary: str
    """One line for the command line's help."""
    model: Callable[[], nn.Module]
    data: Callable[[Path | None], Splits]
    """From the data folder to datasets for training and testing."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    """From the model's output and the targets to the mean over samples."""
    accuracy: Callable[[Tensor, Tensor], Tensor]
    """From the same to the fraction that is right in this batch, of characters where they are text."""
    batch_size: int
    """Over all workers together."""
    epochs: int
    target: float
    """Test accuracy that a run of `epochs` must reach, from 0 to 1."""
    example: Callable[[int], tuple[Tensor, Tensor]]
    """A made-up batch of so many samples, for planning and benchmarks without data."""

    def __post_init__(self) -> None:
        faults = []
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            faults.append(f"name needs lower-case letters, digits and single hyphens, got {self.name!r}")
        if not self.summary.strip() or "\n" in self.summary:
            faults.append(f"summary needs one line of text, got {self.summary!r}")
        for field in ("model", "data", "optimizer", "loss", "accuracy", "example"):
            if not callable(getattr(self, field)):
                faults.append(f"{field} needs a function, got {getattr(self, field)!r}")
        for field in ("batch_size", "epochs"):
            if getattr(self, field) < 1:
                faults.append(f"{field} needs 1 or more, got {getattr(self, field)}")
        if not 0 < self.target <= 1:
            faults.append(f"target needs a fraction above 0 and up to 1, got {self.target}")
        if faults:
            raise ConfigError(f"recipe {self.name!r}: {'; '.join(faults)}.")


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of scores (..., class) for targets (...): over samples, or over characters."""
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


def accuracy(scores: Tensor, targets: Tensor) -> Tensor:
    """Fraction of targets (...) that have the highest of the scores (..., class)."""
    return (scores.argmax(-1) == targets).float().mean()
