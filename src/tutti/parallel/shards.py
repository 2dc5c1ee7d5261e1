"""Shards of tensors, marked with their place in the whole, and states of several ranks merged into one.

A state is a nest of dicts and lists. The ranks of a split model have different parts of it: `marked` says which of its
tensors are shards, `merged` makes the whole state of the marked parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """The place of a shard in the whole tensor."""

    dim: int
    shape: tuple[int, ...]
    """The shape of the whole."""
    pieces: tuple[tuple[int, int], ...]
    """Start and length, along `dim` of the whole, of each piece that the shard consists of, in the shard's order."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        length = sum(length for _, length in self.pieces)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """Return the shard of a tensor, copied."""
        return torch.cat([whole.narrow(self.dim, start, length) for start, length in self.pieces], self.dim)


@dataclass(frozen=True, eq=False)
class TensorShard:
    """A tensor that is a shard of a larger one."""

    tensor: Tensor
    place: Shard

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.place.local_shape:
            raise ValueError(f"a shard of shape {tuple(self.tensor.shape)} cannot be at {self.place}")


def marked(state: Any, shards: Mapping[str, Shard], place: Shard | None = None) -> Any:
    """Return a state in which every shard is a `TensorShard`.

    A tensor is one if it has the shape of the shard of the parameter under whose name it is.

    Args:
        shards: the places of this rank's shards, by the name of the parameter.
        place: that of the parameter to which all of the state belongs, if it belongs to one.
    """
    if isinstance(state, dict):
        return {key: marked(value, shards, shards.get(key, place)) for key, value in state.items()}
    if isinstance(state, list):
        return [marked(each, shards, place) for each in state]
    if isinstance(state, Tensor) and place is not None and tuple(state.shape) == place.local_shape:
        return TensorShard(state, place)
    return state


def merged(states: Sequence[Any]) -> Any:
    """Return the state of which ranks have these parts. Raises `ValueError` if they do not make a whole.

    Dicts have the entries of all parts; lists of names the names of all, other lists are merged item by item. Of what
    is neither and of which no rank has a shard, the first one counts.
    """
    first = states[0]
    if isinstance(first, dict):
        # One after the other: the parameters of a stage stay together.
        keys = dict.fromkeys(key for state in states for key in state)
        return {key: merged([state[key] for state in states if key in state]) for key in keys}
    if isinstance(first, list):
        if len(states) > 1 and all(isinstance(each, str) for state in states for each in state):
            return list(dict.fromkeys(each for state in states for each in state))
        return [merged(each) for each in zip(*states, strict=True)]
    return _whole(states) if isinstance(first, TensorShard) else first


def _whole(shards: Sequence[TensorShard]) -> Tensor:
    """Return the tensor whose shards these are."""
    dim, shape = shards[0].place.dim, shards[0].place.shape
    pieces = sorted(piece for shard in shards for piece in shard.place.pieces if piece[1])
    end = 0
    for start, length in pieces:
        if start != end:
            break
        end += length
    if end != shape[dim] or any((shard.place.dim, shard.place.shape) != (dim, shape) for shard in shards):
        raise ValueError(f"the shards {[shard.place for shard in shards]} do not make a tensor of shape {shape}")
    whole = shards[0].tensor.new_empty(shape)
    for shard in shards:
        lengths = [length for _, length in shard.place.pieces]
        for (start, length), values in zip(shard.place.pieces, shard.tensor.split(lengths, dim), strict=True):
            whole.narrow(dim, start, length).copy_(values)
    return whole
