"""State of samplers of the user's own: the batches that they gave, their random generators, their own state."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader


def pack(batches: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return batches of sample numbers as two tensors, in the smallest integer type that holds them."""
    numbers = torch.tensor([number for batch in batches for number in batch], dtype=torch.int64)
    small = not len(numbers) or int(numbers.abs().max()) < 2**31
    return {
        "samples": numbers.to(torch.int32) if small else numbers,
        "sizes": torch.tensor([len(batch) for batch in batches], dtype=torch.int32),
    }


def unpack(packed: dict[str, Tensor]) -> list[list[int]]:
    """Return the batches of `pack`."""
    return [batch.tolist() for batch in packed["samples"].long().split(packed["sizes"].tolist())]


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Give the number of an epoch to samplers that want it, as a loop written for `DistributedSampler` would."""
    for _, owner in _owners(loader):
        if callable(method := getattr(owner, "set_epoch", None)):
            method(epoch)


def generator_states(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the states of random generators that the samplers of a loader hold, and of samplers that have a state.

    Generators are those of torch, NumPy and Python, in attributes of a sampler; the state of a sampler is what its
    method `state_dict` returns.
    """
    return {name: read() for name, read, _ in _parts(loader)}


def load_generators(loader: DataLoader[Any], states: dict[str, Any]) -> None:
    """Set the generators and the samplers to states of `generator_states`."""
    for name, _, write in _parts(loader):
        write(states[name])


def set_generator(generator: torch.Generator, state: Tensor) -> None:
    """Set a generator of torch to a state."""
    # Copied: torch reads it from the start of its memory, even if it is a part of a larger tensor.
    generator.set_state(state.clone())


_Part = tuple[str, Callable[[], Any], Callable[[Any], Any]]


def _owners(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the samplers of a loader, each once."""
    batches: Any = loader.batch_sampler
    # `loader.sampler` means nothing beside a batch sampler of the user's own.
    found = {"batch_sampler": batches, "sampler": getattr(batches, "sampler", None)}
    yield from ((name, owner) for name, owner in found.items() if owner is not None)


def _parts(loader: DataLoader[Any]) -> Iterator[_Part]:
    """Yield everything in the samplers that has a state: a name, how to read it, and how to set it."""
    seen: set[int] = set()
    for owner_name, owner in _owners(loader):
        if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
            yield owner_name, owner.state_dict, owner.load_state_dict
            continue
        for name, value in getattr(owner, "__dict__", {}).items():
            part = _generator(value)
            if part is not None and id(value) not in seen:
                seen.add(id(value))
                yield f"{owner_name}.{name}", *part


def _generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return how to read and to set the state of a random generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state, lambda state: set_generator(value, state)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return lambda: _plain(bits.state), lambda state: setattr(bits, "state", _with_arrays(state))
    if isinstance(value, np.random.RandomState):
        legacy: Any = value
        return lambda: _plain(legacy.get_state(legacy=False)), lambda state: legacy.set_state(_with_arrays(state))
    if isinstance(value, random.Random):
        return lambda: _plain(value.getstate()), lambda state: value.setstate(_as_tuples(state))
    return None


def _plain(value: Any) -> Any:
    """Return the state of a generator in JSON values."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _with_arrays(value: Any) -> Any:
    """Return the state of a NumPy generator from the values of `_plain`."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"array", "dtype"}:
        return np.array(value["array"], dtype=value["dtype"])
    return {key: _with_arrays(item) for key, item in value.items()}


def _as_tuples(value: Any) -> Any:
    """Return the state of a Python generator from the values of `_plain`."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
