"""`SavedPosition`: what a state of sharded data says, once it is found to fit the data."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tutti.data.stages import Stage
from tutti.errors import ConfigError

_REQUIRED = ("kind", "num_parts", "positions", "stages", "worker_seeds")


@dataclass(frozen=True)
class SavedPosition:
    """The position of all ranks of the world that saved it."""

    num_parts: int
    positions: tuple[tuple[int, int], ...]
    """Of each rank: its epoch, and the items of it that are committed."""
    stages: tuple[Stage, ...]
    worker_seeds: tuple[int | None, ...]
    loop_epoch: int = 0
    """Epoch that loops are in, where it is later than the positions: sent to ranks that join an elastic world."""

    @classmethod
    def read(cls, state: Any, data: Mapping[str, Any]) -> "SavedPosition":
        """Return what a state says. Raises `ConfigError` if it is none, or of other data than `data` describes."""
        refuse_foreign(state, data)
        with refusing_damage():
            stages = tuple(
                Stage(_count(stage["num_parts"], 1), _counts(stage["epochs"]), _counts(stage["steps"]))
                for stage in state["stages"]
            )
            positions = tuple((_count(epoch), _count(steps)) for epoch, steps in state["positions"])
            seeds = tuple(None if seed is None else _count(seed) for seed in state["worker_seeds"])
            if not positions or any(not stage.epochs or len(stage.epochs) != len(stage.steps) for stage in stages):
                raise ValueError("it has no ranks")
            if len(seeds) != len(positions):
                raise ValueError(f"{len(positions)} ranks have {len(seeds)} seeds")
            loop_epoch = _count(state.get("loop_epoch", 0))
            return cls(_count(state["num_parts"], 1), positions, stages, seeds, loop_epoch)


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Around the reading of a state: raise `ConfigError` for one that has not the form that it should have."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"shard.load_state_dict: the position is damaged ({type(error).__name__}: {error}). Give a state that "
            "state_dict() returned, such as that of an earlier checkpoint."
        ) from None


def refuse_foreign(state: Any, data: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a value is no state of sharded data, or one of other data."""
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"shard.load_state_dict: this is no position in data, but a {type(state).__name__}. Give what "
            "state_dict() of sharded data returned."
        )
    if missing := [name for name in _REQUIRED if name not in state]:
        raise ConfigError(
            f"shard.load_state_dict: this is no position in data: it has no {', '.join(missing)}. Give what "
            "state_dict() of sharded data returned."
        )
    if found := differences(state, data):
        raise ConfigError(
            f"shard.load_state_dict: the position was saved in other data: {found}. Use the same data, or leave the "
            "position out and begin an epoch with set_epoch."
        )


def differences(state: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Describe how the data of a state differs from that which `data` describes; nothing if it is the same."""
    return "; ".join(
        f"its {name} was {state.get(name)}, and is {value} now"
        for name, value in data.items()
        if state.get(name) != value
    )


def _count(value: Any, at_least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{value!r} is no number of {at_least} or more")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)
