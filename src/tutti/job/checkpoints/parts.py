"""States of what a training loop has besides its job: sharded data, schedulers, a GradScaler, copies of the model.

A part is any object with `state_dict` and `load_state_dict`. Its name in a checkpoint is that of its class, with a
number if there are several: "ShardedLoader", "StepLR", "StepLR 2". So parts of different classes may be given in any
order. A run may have other parts than the one that it continues; a line says which ones.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from tutti.data.sharded_data import ShardedData
from tutti.errors import ConfigError
from tutti.replica.state import load_model_state

_log = logging.getLogger("tutti")


def named_parts(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the parts by name. Raises `ConfigError` for one that has no state."""
    named: dict[str, Any] = {}
    for part in parts:
        if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
            raise ConfigError(
                f"checkpoint: a {type(part).__name__} has no state_dict and load_state_dict. Give what tutti.shard "
                "returned, schedulers, a GradScaler; plain values go into extra={...}."
            )
        if isinstance(part, DataLoader):
            raise ConfigError(
                f"checkpoint: a {type(part).__name__} has a position of its own on every rank. Give what tutti.shard("
                "loader) returned, and iterate over that."
            )
        kind = type(part).__name__
        number = 1 + sum(name.split(" ")[0] == kind for name in named)
        named[kind if number == 1 else f"{kind} {number}"] = part
    return named


class LocalParts:
    """The parts of a loop that every rank has by itself, such as schedulers: all but sharded data.

    Where ranks change, their states are kept over a void step, and go to ranks that join.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        """What the loop has given to be saved or restored, by name; sharded data too."""
        self._inherited: dict[str, Any] = {}
        """States that this rank has taken over from another one, until the loop gives the parts."""

    def add(self, named: Mapping[str, Any]) -> None:
        """Note parts, and load the states that this rank has inherited for them."""
        self.parts |= named
        for name in self._inherited.keys() & named.keys():
            load_part(named[name], name, self._inherited.pop(name))

    def refuse_unknown(self, optimizer: Optimizer) -> None:
        """Raise `ConfigError` if the loop has a part that others would not know, or lacks one that they have."""
        if self._inherited:
            names = ", ".join(sorted(self._inherited))
            raise ConfigError(
                f"this worker joins others, whose loop has a {names}. Give it to job.track(...) or job.restore(...) "
                "before the first batch: it gets their state."
            )
        # As torch marks the optimiser of a learning-rate scheduler.
        is_scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if is_scheduled and not any(isinstance(part, LRScheduler) for part in self.parts.values()):
            raise ConfigError(
                "a learning-rate scheduler moves this optimiser, and a worker that joins would not know where it is. "
                "Give it to job.track(scheduler) or job.restore(..., scheduler) before the first batch."
            )

    def states(self) -> dict[str, Any]:
        """Return their states."""
        return {name: part.state_dict() for name, part in self.parts.items() if not isinstance(part, ShardedData)}

    def load(self, states: Mapping[str, Any]) -> None:
        """Load what `states` returned."""
        for name in states.keys() & self.parts.keys():
            load_part(self.parts[name], name, states[name])

    def inherit(self, states: Mapping[str, Any]) -> None:
        """Load states of another rank: now, or when the loop gives the parts."""
        self._inherited = dict(states)
        self.add(self.parts)


def load_parts(named: Mapping[str, Any], states: Mapping[str, Any], is_leader: bool) -> None:
    """Load the states of parts, each under its name. Collective if a part's loading is."""
    for name, part in named.items():  # In the order of the call, which is the same on all ranks.
        if name in states:
            load_part(part, name, states[name])
    if not is_leader:
        return
    for name in sorted(named.keys() - states.keys()):
        _log.warning("job.restore: the checkpoint has no state of a %s: it starts anew.", name)
    for name in sorted(states.keys() - named.keys()):
        _log.warning("job.restore: the checkpoint has the state of a %s, which was not given: it is left out.", name)


def load_part(part: Any, name: str, state: Any) -> None:
    """Load the state of one part. Raises `ConfigError` if it does not fit."""
    try:
        if isinstance(part, nn.Module):
            load_model_state(part, state)
        else:
            part.load_state_dict(state)
    except ConfigError:
        raise
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(f"job.restore: the state of the {name} does not fit this one: {error}") from error
