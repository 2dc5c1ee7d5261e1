"""Parts of a saved state: `PerRank` marks what every rank has its own of, and `gather_ranks` brings it together.

An exchange knows its own rank's state only. The job replaces every `PerRank` by what it makes of all ranks' values, in
one gather for all of them (`job/state.py`, `job/checkpoints/`). So strategies have no gather of their own, and a
checkpoint that one rank writes is sent to that rank alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.collectives.calls import CollectiveCalls
from tutti.collectives.packing import from_bytes, to_bytes
from tutti.replica import Replica
from tutti.replica.buckets import Slot
from tutti.replica.state import load_optimizer_state


def _in_order(values: dict[int, Any]) -> Any:
    return [values[rank] for rank in sorted(values)]


@dataclass(frozen=True)
class PerRank:
    """A value in a saved state of which every rank has its own."""

    value: Any
    """This rank's: a nest of containers, numbers and tensors."""
    merge: Callable[[dict[int, Any]], Any] = _in_order
    """From the values by rank, of the ranks that are there, to what the state has of them; by default their list."""
    new: Any = None
    """What a rank begins with that joins the others; None if it is the same as this rank's."""
    stays: bool = False
    """Whether a rank that takes over the state of another one keeps its own."""


def gather_ranks(state: dict[str, Any], calls: CollectiveCalls, elastic: bool, everywhere: bool) -> dict[str, Any]:
    """Replace every `PerRank` by what it makes of the values of all living ranks. Collective.

    Args:
        state: has a `PerRank` at the same places on every rank.
        calls: calls among the ranks.
        elastic: whether a lost rank is left out, rather than an error.
        everywhere: whether every rank gets the state of the first; else there are empty lists on all others.
    """
    marks = marks_of(state)
    if not marks:
        return state
    own = [mark.value for mark in marks]
    gathered: list[dict[str, Any]] = []

    def combine(values: dict[int, Any]) -> Any:
        # Copied on a single rank, where nothing was sent: the values are those that training goes on to change.
        ranks = values if len(values) > 1 else {0: from_bytes(to_bytes(own))}
        found = iter(merged_marks(marks, ranks))
        gathered.append(_replace(state, lambda _: next(found)))
        return gathered[0] if everywhere else None

    answer = calls.call("job.state_dict", own, combine, elastic)
    # The first rank has what it has made itself: its answer would be a copy.
    return gathered[0] if gathered else answer or _replace(state, lambda _: [])


def marks_of(state: Any) -> list[PerRank]:
    """Return every `PerRank` in nested dicts, in their order."""
    marks: list[PerRank] = []
    _replace(state, marks.append)
    return marks


def without_marks(state: dict[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, ...], PerRank]]:
    """Return nested dicts without each `PerRank`, and these by the keys that led to them."""
    marks: dict[tuple[str, ...], PerRank] = {}
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, PerRank):
            marks[key,] = value
        elif isinstance(value, dict):
            plain[key], inner = without_marks(value)
            marks |= {(key, *path): mark for path, mark in inner.items()}
        else:
            plain[key] = value
    return plain, marks


def merged_marks(marks: Sequence[PerRank], values: dict[int, Sequence[Any]]) -> list[Any]:
    """Return what each of several marks makes of its values; `values` has those of all marks, by rank."""
    return [mark.merge({rank: each[number] for rank, each in values.items()}) for number, mark in enumerate(marks)]


_EACH_RANK = "of each rank"
"""Key that marks a `PerRank` in a state that is sent."""


def of_this_rank(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return a state with the lists of `size` ranks, of which only this rank's value is known here.

    For ranks that go on together, each from its own state. Of the others nothing is needed, so they owe nothing here.
    """
    return _replace(state, lambda part: _alone(part.value, rank, size))


def for_new_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank begins with that joins the others, as values that can be sent."""
    return _replace(state, lambda part: {_EACH_RANK: part.value if part.new is None else part.new})


def from_sent(state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the state that `for_new_ranks` returned on another rank, as the state of this one.

    `own` is the state that this one had, of which some parts stay.
    """
    if isinstance(own, PerRank) and own.stays:
        return own
    if state.keys() == {_EACH_RANK}:
        return PerRank(state[_EACH_RANK])  # type: ignore[return-value]
    inner = own if isinstance(own, dict) else {}
    return {
        key: from_sent(value, inner.get(key, {})) if isinstance(value, dict) else value for key, value in state.items()
    }


def _alone(value: Any, rank: int, size: int) -> list[Any]:
    without = {key: {} if isinstance(each, dict) else each for key, each in value.items()}
    return [value if other == rank else without for other in range(size)]


def _replace(tree: Any, replacement: Callable[[PerRank], Any]) -> Any:
    """Return a copy of nested dicts in which each `PerRank` is what `replacement` returns for it."""
    if isinstance(tree, PerRank):
        return replacement(tree)
    return {key: _replace(value, replacement) for key, value in tree.items()} if isinstance(tree, dict) else tree


def optimizer_states(optimizer: Optimizer, slots: Iterable[Slot]) -> dict[str, dict[str, Any]]:
    """Return the optimiser's state of each parameter, by name: the tensors themselves, not copies."""
    return {slot.name: dict(optimizer.state[slot.tensor]) for slot in slots if optimizer.state.get(slot.tensor)}


def load_optimizer_states(optimizer: Optimizer, slots: Iterable[Slot], states: dict[str, Any]) -> None:
    """Replace the optimiser's state of parameters by copies of these, by name; its options stay as they are."""
    packed = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for slot in slots:
        packed["state"].pop(numbers[id(slot.tensor)], None)
        if state := states.get(slot.name):
            # Copied: the optimiser changes its state in place, and the saved one is the user's.
            packed["state"][numbers[id(slot.tensor)]] = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
            }
    load_optimizer_state(optimizer, packed)


def own_buffers(replica: Replica, values: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
    """Return the buffers that each rank has by itself, by name: all but running statistics, which are averaged.

    `values` are those of all buffers, where the model holds others for the moment.
    """
    averaged = {id(slot.tensor) for slot in replica.statistics}
    named = list(replica.model.named_buffers())
    present = zip(named, values or [buffer for _, buffer in named], strict=True)
    return {name: value.detach() for (name, buffer), value in present if id(buffer) not in averaged}


@torch.no_grad()
def load_own_buffers(replica: Replica, saved: dict[str, Tensor]) -> None:
    """Copy saved buffers into the model."""
    for name, buffer in replica.model.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])
