"""Data of `tutti.fit`, in any of its forms, as a DataLoader whose batches are those of a step over all workers."""

from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tutti.data.epoch_order import is_seeded
from tutti.errors import ConfigError
from tutti.recipes.data import ArrayDataset, MapDataset, collate

BATCH_SIZE = 32
"""Samples per step where nobody says otherwise."""

_WANTED = "a dataset, a DataLoader, or two tensors (inputs, targets)"


def as_loader(data: Any, batch_size: int | None, name: str, *, shuffle: bool) -> DataLoader[Any]:
    """Return data as a DataLoader. Raises `ConfigError` for what is none.

    Args:
        batch_size: samples per batch; of a DataLoader, its own.
        name: of the argument, for messages.
    """
    if isinstance(data, DataLoader):
        if batch_size is not None:
            raise ConfigError(f"{name} is a DataLoader, which has a batch size of its own: leave batch_size out.")
        _refuse_empty(data.dataset, name)
        return data
    if isinstance(data, IterableDataset):
        raise ConfigError(f"{name} is an IterableDataset: wrap it in a DataLoader. Its batches go to workers in turn.")
    dataset = _dataset(data, name)
    _refuse_empty(dataset, name)
    collate_fn = collate if isinstance(dataset, MapDataset) else None
    return DataLoader(dataset, batch_size or BATCH_SIZE, shuffle=shuffle, collate_fn=collate_fn)


def first_batch(loader: DataLoader[Any]) -> Any:
    """Return up to two samples as a batch, without a change to the loader; None where that cannot be done."""
    if isinstance(loader.dataset, IterableDataset) or not is_seeded(loader):
        return None
    dataset: Any = loader.dataset
    indices = list(range(min(2, len(dataset))))
    samples = dataset.__getitems__(indices) if hasattr(dataset, "__getitems__") else [dataset[i] for i in indices]
    return loader.collate_fn(samples)


def num_samples(loader: DataLoader[Any]) -> int | None:
    """Return the number of samples of an epoch; None if it is not known."""
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        return None
    return len(loader.dataset)


def _dataset(data: Any, name: str) -> Any:
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, tuple | list) and data and all(isinstance(each, Tensor | np.ndarray) for each in data):
        if len(data) != 2:
            raise ConfigError(f"{name} must be {_WANTED}, got {len(data)} tensors.")
        inputs, targets = map(torch.as_tensor, data)
        if len(inputs) != len(targets):
            raise ConfigError(f"{name} has {len(inputs)} inputs and {len(targets)} targets: each input needs one.")
        return ArrayDataset(inputs, targets)
    # Sequences of samples are datasets too; texts, dicts and single tensors have a length and mean something else.
    is_dataset = hasattr(data, "__getitem__") and isinstance(data, Sized)
    if not is_dataset or isinstance(data, str | bytes | dict | Tensor | np.ndarray):
        raise ConfigError(f"{name} must be {_WANTED}, got {'nothing' if data is None else f'a {type(data).__name__}'}.")
    return data


def _refuse_empty(dataset: Any, name: str) -> None:
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ConfigError(f"{name} is empty (length 0). Look at its path, its filter or its split.")
