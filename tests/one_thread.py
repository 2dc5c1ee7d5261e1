"""Ranks without threads: worlds whose collective calls are answered one after the other, for sharded data."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tutti.collectives.packing import from_bytes, to_bytes
from tutti.data.sharded_data import ShardedData
from tutti.transports import SingleRankTransport
from tutti.world import World

MODEL = nn.Linear(1, 1)
"""Stands for a distributed model: batches given out while it is there wait for a step."""


def worlds(size: int, trains: bool = True) -> list[World]:
    """Every rank's world. With `trains`, a distributed model takes steps by `step`; otherwise nobody trains."""
    made = [World(rank, size, rank, "host", SingleRankTransport()) for rank in range(size)]
    for world in made if trains else ():
        world.sample_counts.distributed.add(MODEL)
        world.sample_counts.models.add(MODEL)
    return made


class _Asked(Exception):
    def __init__(self, value: Any, combine: Callable[[dict[int, Any]], Any]) -> None:
        self.value, self.combine = value, combine


class _Calls:
    """The collective calls of one rank: the first ones are answered, the next one is raised as a question."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self._answers = iter(answers)

    def call(self, name: str, value: Any, combine: Callable[[dict[int, Any]], Any], elastic: bool) -> Any:
        for answer in self._answers:
            return from_bytes(answer)
        raise _Asked(from_bytes(to_bytes(value)), combine)


def state_of(shards: Sequence[ShardedData], lost: Sequence[int] = ()) -> dict[str, Any]:
    """The state of all ranks' data, which `lost` ranks do not take part in."""
    answers: list[Any] = []
    present = [rank for rank in range(len(shards)) if rank not in lost]
    while True:
        asked, states = {}, []
        for rank in present:
            vars(shards[rank]._world)["calls"] = _Calls(answers)
            try:
                states.append(shards[rank].state_dict())
            except _Asked as question:
                asked[rank] = question
        assert not (asked and states), "ranks make different numbers of calls"
        if states:
            assert all(same(state, states[0]) for state in states), "the state is the same on every rank"
            return _as_read(from_bytes(to_bytes(states[0])))
        answer = asked[present[0]].combine({rank: question.value for rank, question in asked.items()})
        answers.append(to_bytes(answer))


def _as_read(value: Any) -> Any:
    """A value as it comes from a file: its tensors are parts of a larger one."""
    if isinstance(value, torch.Tensor):
        return torch.cat([torch.ones(1, dtype=value.dtype), value])[1:]
    if isinstance(value, dict):
        return {key: _as_read(item) for key, item in value.items()}
    return [_as_read(item) for item in value] if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    """Whether two nests of tensors and plain values are equal."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def step(*worlds: World) -> None:
    """Take a step of the optimiser on these ranks."""
    for world in worlds:
        world.sample_counts.commit()
