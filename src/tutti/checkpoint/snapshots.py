"""Snapshots of a training run in memory: as they are given, taken apart, copied, and encoded.

How it works. The training loop goes through these, and waits no longer than for the copy:

    Snapshot          the values themselves, which the next step changes
    TakenApart        copies of their containers, and a list of their tensors; what cannot be stored is refused here
    EncodedSnapshot   JSON values and tensors by file; a copy is encoded by the thread that writes it

To look for values that cannot be stored takes longer than to copy a small state. It is done where a snapshot has
another layout of tensors than the one before, or values of other types than are always stored. If a value is changed
to one of those without that, the thread that writes refuses it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from tutti.checkpoint.copies import Containers, Layout, TensorCopies, layout_of, put_together
from tutti.checkpoint.index import MODEL, OPTIMIZER, STATE
from tutti.checkpoint.tree import encode
from tutti.errors import ConfigError

ValuePath = tuple[str, ...]
"""The keys that lead to a value in nested dicts."""

Added = Callable[[], Mapping[ValuePath, Any]]

_ROOTS = {MODEL: "model", OPTIMIZER: "optimizer", STATE: ""}
"""How paths of values begin in errors, by file."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that a checkpoint holds."""

    steps: int
    """Number of steps that were trained."""
    model: Mapping[str, Tensor]
    """The model's state, by its own names."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """The optimiser's state: values that `tutti.checkpoint.tree` encodes."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """All other state, likewise."""
    strategy: str = ""
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"a checkpoint needs a number of steps of 0 or more, got {self.steps}.")

    @property
    def sections(self) -> dict[str, dict[Any, Any]]:
        """The values by file."""
        return {MODEL: dict(self.model), OPTIMIZER: dict(self.optimizer), STATE: dict(self.state)}


class TakenApart:
    """A snapshot whose tensors are still to be copied, before the next step."""

    def __init__(self, snapshot: Snapshot, known_layout: Layout | None = None) -> None:
        """Take a snapshot apart. Raises `CheckpointError` for values that cannot be stored.

        `known_layout` is that of an earlier copy, whose tensors could be stored.
        """
        containers = Containers()
        sections = snapshot.sections
        self._snapshot = snapshot
        self._values = {file: containers.take_apart(values) for file, values in sections.items()}
        self._tensors = containers.tensors
        self._layout = layout_of(containers.tensors)
        if containers.has_others or self._layout != known_layout:
            _encoded(sections)

    def copied(self, memory: TensorCopies | None = None, added: Added = dict) -> "EncodedSnapshot":
        """Return a copy, so that training can go on.

        Args:
            memory: tensors of an earlier copy that nobody needs any more. They are overwritten where they fit: the
                system gives out new memory page by page, which takes several times as long as copying.
            added: returns more values of the other state, which nobody changes. Called by the thread that writes.
        """
        return EncodedSnapshot(
            steps=self._snapshot.steps,
            strategy=self._snapshot.strategy,
            world_size=self._snapshot.world_size,
            values=self._values,
            copies=TensorCopies(self._tensors, self._layout, memory),
            added=added,
        )


@dataclass(frozen=True, kw_only=True)
class EncodedSnapshot:
    """A snapshot as JSON values and tensors, which is what is written. They are made when they are first asked for."""

    steps: int
    strategy: str
    world_size: int
    values: dict[str, Any]
    """By file; taken apart if there are `copies`."""
    copies: TensorCopies | None = None
    """The tensors of a copy."""
    added: Added = dict
    """Returns the values that a copy has besides."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> "EncodedSnapshot":
        """Encode the values of a snapshot themselves."""
        return cls(
            steps=snapshot.steps,
            strategy=snapshot.strategy,
            world_size=snapshot.world_size,
            values=snapshot.sections,
        )

    @property
    def trees(self) -> dict[str, Any]:
        """JSON values by file. Raises `CheckpointError` for values that cannot be stored."""
        return {file: tree for file, (tree, _) in self._encoded.items()}

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by file and name."""
        return {file: tensors for file, (_, tensors) in self._encoded.items()}

    @cached_property
    def _encoded(self) -> dict[str, tuple[Any, dict[str, Tensor]]]:
        if self.copies is None:
            return _encoded(self.values)
        sections = put_together(self.values, iter(self.copies.tensors))
        for (*parents, key), value in self.added().items():
            place = sections[STATE]
            for parent in parents:
                place = place[parent]
            place[key] = value
        return _encoded(sections)


def _encoded(sections: Mapping[str, Any]) -> dict[str, tuple[Any, dict[str, Tensor]]]:
    return {file: encode(values, _ROOTS[file]) for file, values in sections.items()}
