"""`Recipe`: everything that a training run needs except the synchronisation strategy."""

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
    """A model, its data, its optimiser and the test accuracy to reach.

    `model` draws its parameters from torch's random state, which `tutti train` seeds. `data` and `example` return the
    same every time and leave that state unchanged.

    Example, for `tutti train my_recipes:tiny`:

        def tiny(width: int = 32) -> Recipe:
            return Recipe(
                name="tiny",
                summary="a small perceptron on random data",
                model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)),
                data=lambda folder: Splits(train=make_data(1000), test=make_data(200)),
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                loss=cross_entropy,
                accuracy=accuracy,
                batch_size=64,
                epochs=3,
                target=0.9,
                example=lambda size: (torch.randn(size, 8), torch.randint(2, (size,))),
            )

    `make_data` returns an `ArrayDataset(inputs, targets)`, or any dataset with a length and items (input, target).
    """

    name: str
    """Lower-case letters, digits and single hyphens. It names the folder of a run."""
    summary: str
    """One line that describes the recipe."""
    model: Callable[[], nn.Module]
    """Makes a new model."""
    data: Callable[[Path | None], Splits]
    """Loads the training and the test set from the data folder, which is None if none was given."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Makes the optimiser of a model."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """The mean loss over samples, from the model's output and the targets."""
    accuracy: Callable[[Tensor, Tensor], Tensor]
    """The fraction of correct predictions (of characters, for text), from the model's output and the targets."""
    batch_size: int
    """Samples per step over all workers."""
    epochs: int
    """Passes over the training data."""
    target: float
    """Test accuracy that a run of `epochs` should reach, from 0 to 1."""
    example: Callable[[int], tuple[Tensor, Tensor]]
    """Makes a random batch of so many samples, for planning and benchmarks without data."""

    def __post_init__(self) -> None:
        mistakes = []
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            mistakes.append(f"name needs lower-case letters, digits and single hyphens, got {self.name!r}")
        if not self.summary.strip() or "\n" in self.summary:
            mistakes.append(f"summary needs one line of text, got {self.summary!r}")
        for field in ("model", "data", "optimizer", "loss", "accuracy", "example"):
            if not callable(getattr(self, field)):
                mistakes.append(f"{field} needs a function, got {getattr(self, field)!r}")
        for field in ("batch_size", "epochs"):
            if getattr(self, field) < 1:
                mistakes.append(f"{field} needs 1 or more, got {getattr(self, field)}")
        if not 0 < self.target <= 1:
            mistakes.append(f"target needs a fraction above 0 and up to 1, got {self.target}")
        if mistakes:
            raise ConfigError(f"recipe {self.name!r}: {'; '.join(mistakes)}.")


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of scores (..., class) for targets (...): over samples, or over characters."""
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


def accuracy(scores: Tensor, targets: Tensor) -> Tensor:
    """Fraction of targets (...) that have the highest of the scores (..., class)."""
    return (scores.argmax(-1) == targets).float().mean()
