"""The datasets of the recipes: tensors in memory, from which a whole batch is taken by one indexing.

Each function takes the data folder and returns `Splits`; docs/data.md has the layout of the folder. Datasets of the
same files share their tensors within a process. Images are stored as bytes, a quarter of the memory of float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from tutti.errors import DataError
from tutti.recipes.files import Shape, Source, cached, read_idx, read_npz, read_text

Sample = tuple[Tensor, Tensor]

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The 65 characters of tinyshakespeare; a character's id is its position."""

_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


class MapDataset(Dataset[Sample], ABC):
    """A dataset of (input, target) pairs."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...


class Splits(NamedTuple):
    """The training set and the test set of a recipe."""

    train: MapDataset
    test: MapDataset


@dataclass(frozen=True, eq=False)
class Batch(Sequence[Sample]):
    """Samples that were fetched by one indexing and are stacked already.

    `DataLoader` passes it to its collate function, which expects a list of samples. So that torch's default function
    works too, a batch is also a sequence of samples; `collate` takes the stacked tensors directly.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # nobody slices a batch
        return self.inputs[index], self.targets[index]


def collate(samples: Sequence[Sample]) -> Sample:
    """The stacked inputs and targets of a batch: without a copy for a `Batch`, as torch does for anything else."""
    if isinstance(samples, Batch):
        return samples.inputs, samples.targets
    inputs, targets = default_collate(list(samples))
    return inputs, targets


class ArrayDataset(MapDataset):
    """A dataset of the rows of two tensors; with `collate_fn=collate` a `DataLoader` takes a batch in one indexing.

    `prepare` turns stored inputs, one row or many, into the model's input. Items are copies: other datasets may share
    `inputs` and `targets`, which must not be written to.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, *, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"each input needs one target, got {len(inputs)} inputs and {len(targets)} targets.")
        self.inputs = inputs
        self.targets = targets
        self.prepare = prepare

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:
        return self._prepared(self.inputs[index].clone()), self.targets[index].clone()

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        # `DataLoader` calls it with all indices of a batch, where a dataset has it.
        rows = torch.as_tensor(indices, dtype=torch.long)
        return Batch(self._prepared(self.inputs[rows]), self.targets[rows])

    def _prepared(self, inputs: Tensor) -> Tensor:
        return inputs if self.prepare is None else self.prepare(inputs)


@dataclass(frozen=True)
class Normalize:
    """Converts bytes of shape (..., channel, height, width) to floats with mean 0 and deviation 1 per channel.

    `mean` and `std` have one number per channel, in units of `full_scale`, the largest byte.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    full_scale: int = 255

    def __call__(self, images: Tensor) -> Tensor:
        mean, std = torch.tensor([self.mean, self.std]).unsqueeze(-1).unsqueeze(-1)  # Each of shape (channel, 1, 1).
        # Contiguous, because CIFAR is stored channels last and indexing would keep that.
        floats = images.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        # (x / full_scale - mean) / std, in two operations in place.
        return floats.mul_(1 / (self.full_scale * std)).sub_(mean / std)


def digits(root: Path | None = None) -> Splits:
    """1,437 and 360 images of 8 x 8: the set that ships with Tutti, so `root` is not used.

    Every fifth image is a test image. Consecutive rows seem to be by one writer, so a split at one row would measure
    how much a few writers differ (0.91 on the last 360, 0.95 on the first, 0.97 on every fifth). This split is for
    comparing runs; it says little about unknown writers.
    """
    prepare = Normalize(mean=(0.3053,), std=(0.3760,), full_scale=16)
    train, test = (ArrayDataset(images, labels, prepare=prepare) for images, labels in _embedded_digits())
    return Splits(train, test)


@cached(maxsize=1)
def _embedded_digits() -> tuple[Sample, Sample]:
    """Return the training and the test samples of the digits that come with Tutti; every fifth is for tests."""
    arrays = read_npz(Path(__file__).with_name("digits.npz"), {"images": (1797, 8, 8), "labels": (1797,)})
    images, labels = arrays["images"].unsqueeze(1), arrays["labels"]
    testing = torch.arange(len(labels)) % 5 == 0
    return (images[~testing], labels[~testing]), (images[testing], labels[testing])


def mnist(root: Path | None) -> Splits:
    """60,000 and 10,000 handwritten digits of 28 x 28 (LeCun 1998)."""
    origin = "MNIST's page, yann.lecun.com/exdb/mnist, or any mirror with MD5 {}"
    return _idx_splits(
        root,
        {f"mnist/{file}": origin.format(md5) for file, md5 in _MNIST_MD5.items()},
        Normalize((0.1307,), (0.3081,)),
    )


def fashion_mnist(root: Path | None) -> Splits:
    """60,000 and 10,000 pieces of clothing of 28 x 28 (Xiao 2017)."""
    origin = "github.com/zalandoresearch/fashion-mnist, folder data/fashion, MD5 {}"
    return _idx_splits(
        root,
        {f"fashion-mnist/{file}": origin.format(md5) for file, md5 in _FASHION_MD5.items()},
        Normalize((0.2860,), (0.3530,)),
    )


def cifar10_subset(root: Path | None) -> Splits:
    """10,000 and 2,000 photographs of 3 x 32 x 32: the first of each class of CIFAR-10 (Krizhevsky 2009)."""
    path = Source(
        "cifar10/cifar10_subset_10k_2k.npz",
        "CIFAR-10's page, www.cs.toronto.edu/~kriz/cifar.html, by the script in Tutti's docs/data.md",
    ).under(root)
    images: Shape = (None, 32, 32, 3)
    arrays = read_npz(path, {"x_train": images, "y_train": (None,), "x_test": images, "y_test": (None,)})
    # Means and deviations of the red, green and blue channels over CIFAR-10's 50,000 training images, for pixels in 0
    # to 1.
    prepare = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    train, test = (
        # Stored as height × width × channels; convolutions take channels first.
        _labelled(path, arrays[f"x_{part}"].permute(0, 3, 1, 2), arrays[f"y_{part}"], prepare)
        for part in ("train", "test")
    )
    return Splits(train, test)


def tinyshakespeare(root: Path | None, window: int = 64) -> Splits:
    """A megabyte of Shakespeare (Karpathy 2015) in windows: characters, and the character after each.

    Windows do not overlap, so an epoch reads every character once. The last tenth is for testing.
    """
    origin = "github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt"
    path = Source("tinyshakespeare/input.txt", origin).under(root)
    tokens = read_text(path, ALPHABET)
    start = len(tokens) - len(tokens) // 10
    if len(tokens) - start <= window:
        raise DataError(f"{path} is cut off: {len(tokens)} characters are too few for windows of {window}.")
    return Splits(train=windows(tokens[:start], window), test=windows(tokens[start:], window))


def windows(tokens: Tensor, length: int) -> ArrayDataset:
    """Every whole window of `length` tokens, each with the same window one token later as its target."""
    # The last target needs one more token.
    num_windows = (len(tokens) - 1) // length
    size = num_windows * length
    return ArrayDataset(tokens[:size].view(-1, length), tokens[1 : size + 1].view(-1, length))


def _idx_splits(root: Path | None, origins: dict[str, str], prepare: Normalize) -> Splits:
    """Images and labels for training, then for testing, from four idx files in that order."""
    paths = [Source(path, origin).under(root) for path, origin in origins.items()]
    for path in paths[::2]:  # Images; labels are between them.
        if (shape := read_idx(path, 3).shape[1:]) != (28, 28):
            raise DataError(f"{path} is not the idx file wanted: images are {tuple(shape)}, wanted (28, 28).")
    train, test = (
        _labelled(images, read_idx(images, 3).unsqueeze(1), read_idx(labels, 1), prepare)
        for images, labels in (paths[:2], paths[2:])
    )
    return Splits(train, test)


def _labelled(path: Path, images: Tensor, labels: Tensor, prepare: Normalize) -> ArrayDataset:
    if len(images) != len(labels):
        raise DataError(f"{path} has {len(images)} images for {len(labels)} labels. Are its files of one set?")
    if labels.max() > 9:
        raise DataError(f"the labels for {path} go up to {int(labels.max())}, wanted 0 to 9.")
    return ArrayDataset(images, labels, prepare=prepare)
