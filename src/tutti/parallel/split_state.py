"""`SplitNames`: saved states of a split model, put together from the parts of ranks and cut for them again.

A strategy on a mesh saves what belongs to the parameters of its rank: those of its stages, under the names that they
have there, and of each its shard. A saved state has the whole model's names and whole tensors, as without a mesh, so
that it loads under any mesh. Which values belong to parameters is seen by their keys: a dict whose keys are all names
of parameters or buffers has an entry for each of them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from tutti.parallel.shards import Shard, marked, merged
from tutti.replica.gathered import gather_state
from tutti.transports import Transport


class SplitNames:
    """The names of this rank's parameters and buffers, here and in the whole model, and its shards of them."""

    def __init__(self, model: nn.Module, local_module: nn.Module, shards: Mapping[nn.Parameter, Shard]) -> None:
        """Compare the names of the whole model and of the part of it that this rank holds."""
        whole = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        local = [*local_module.named_parameters(), *local_module.named_buffers()]
        self._whole_names = {name: whole[id(tensor)] for name, tensor in local if id(tensor) in whole}
        self._local_names = {other: name for name, other in self._whole_names.items()}
        self._all_names = set(whole.values())
        names = {id(tensor): whole[id(tensor)] for tensor in shards}
        self._shards = {names[id(tensor)]: shard for tensor, shard in shards.items()}

    def gather(self, state: dict[str, Any], transport: Transport) -> dict[str, Any]:
        """Return the whole state, from those of all ranks that hold a replica together. Collective."""
        if transport.size == 1 and not self._shards:
            return state
        shards = {name: asdict(shard) for name, shard in self._shards.items()}
        parts = gather_state([self._renamed(state), shards], transport)
        whole: dict[str, Any] = merged(
            [marked(part, {name: Shard(**place) for name, place in places.items()}) for part, places in parts]
        )
        return whole

    def part(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's state under the names of the whole model, with its shards marked."""
        part: dict[str, Any] = marked(self._renamed(state), self._shards)
        return part

    def cut(self, state: Any) -> Any:
        """Return this rank's part of a whole state: the entries of its parameters, under its names, cut to shards."""
        if isinstance(state, list):
            if state and all(isinstance(name, str) and name in self._all_names for name in state):
                return [self._local_names[name] for name in state if name in self._local_names]
            return [self.cut(each) for each in state]
        if not isinstance(state, dict):
            return state
        if state and state.keys() <= self._all_names:
            mine = [name for name in state if name in self._local_names]
            return {self._local_names[name]: self._sharded(state[name], self._shards.get(name)) for name in mine}
        kept = {}
        for key, value in state.items():
            # Factors of a matrix are by "name@parameter". They say nothing about a shard of it.
            name, _, parameter = key.partition("@") if isinstance(key, str) else (key, "", "")
            if parameter not in self._all_names:
                kept[key] = self.cut(value)
            elif parameter in self._local_names and parameter not in self._shards:
                kept[f"{name}@{self._local_names[parameter]}"] = value
        return kept

    def _sharded(self, value: Any, shard: Shard | None) -> Any:
        """Cut what belongs to one parameter."""
        if isinstance(value, dict):
            return {key: self._sharded(each, shard) for key, each in value.items()}
        if shard is None or not isinstance(value, Tensor) or tuple(value.shape) != shard.shape:
            return value
        return shard.of(value)

    def _renamed(self, state: Any) -> Any:
        """Return this rank's state with the names of the whole model."""
        if isinstance(state, list):
            if state and all(isinstance(name, str) and name in self._whole_names for name in state):
                return [self._whole_names[name] for name in state]
            return [self._renamed(each) for each in state]
        if not isinstance(state, dict):
            return state
        if state and state.keys() <= self._whole_names.keys():
            return {self._whole_names[name]: value for name, value in state.items()}
        renamed = {}
        for key, value in state.items():
            name, at, parameter = key.partition("@") if isinstance(key, str) else (key, "", "")
            if parameter not in self._whole_names:
                renamed[key] = self._renamed(value)
            # A factor of a shard says nothing about the whole matrix.
            elif self._whole_names[parameter] not in self._shards:
                renamed[name + at + self._whole_names[parameter]] = value
        return renamed
