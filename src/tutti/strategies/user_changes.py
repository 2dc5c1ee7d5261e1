"""Refusal of parameters that the user changes by hand between steps, under strategies that cannot follow such a change.

Servers send their parameters before the next forward pass, so a change by hand would be lost without a word. Peers add
up the changes of all ranks, so it would count once for every rank. The check runs in the first forward pass after a
step, or in the first call that writes parameters: until then nothing of Tutti's does.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from tutti.errors import ConfigError
from tutti.replica.buckets import Slot
from tutti.replica.owned_hooks import OwnedHook

_NUM_COMPARED_BY_VALUE = 3
"""Steps after which values are compared. A script that changes parameters usually does so from the start."""


class UserChanges:
    """Remembers parameters as the last step left them, and refuses others in the next forward pass.

    A change in place gives a tensor another version. Changes through `p.data` do not, so values are compared as well in
    the first passes.
    """

    def __init__(self, model: nn.Module, slots: Sequence[Slot], rank: int, remedy: str) -> None:
        """Watch `slots`, parameters of `model`; `rank` is named in errors, which end with the `remedy`.

        Without a remedy forward passes check nothing: the caller asks for what has `changed`.
        """
        self._slots = slots
        self._rank = rank
        self._remedy = remedy
        self._versions: list[int] | None = None
        self._values: list[Tensor] = []
        self._num_records = 0
        self._handle = model.register_forward_pre_hook(_CheckBeforeForward(self)) if remedy else None
        self.record()

    def record(self) -> None:
        """Remember the parameters as they are now."""
        self._versions = [slot.tensor._version for slot in self._slots]
        self._num_records += 1
        by_value = self._num_records <= _NUM_COMPARED_BY_VALUE
        self._values = [slot.tensor.detach().clone() for slot in self._slots] if by_value else []

    def changed(self) -> list[Slot]:
        """Return the parameters that are not as `record` found them. Asked once: Tutti may write them then."""
        versions, self._versions = self._versions, None
        if versions is None:
            return []
        # Versions cost nothing to read, so they are compared in every step; values only after the first few.
        changed = [slot for slot, version in zip(self._slots, versions, strict=True) if slot.tensor._version != version]
        # Not strict: there are values in the first passes only.
        changed += [s for s, value in zip(self._slots, self._values, strict=False) if not _same(s.tensor, value)]
        return changed

    def check(self) -> None:
        """Raise `ConfigError` if a parameter is not as `record` found it. Checks once, as `changed`."""
        if changed := self.changed():
            raise ConfigError(
                f"rank {self._rank}: parameter '{changed[0].name}' was changed between optimizer.step() and the next "
                f"forward pass, or after tutti.distribute. {self._remedy}"
            )

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()


class _CheckBeforeForward(OwnedHook):
    """The hook of one model; its copies do without it."""

    def __init__(self, changes: UserChanges) -> None:
        self._changes = ref(changes)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # Not while torch.compile traces the model: the check looks at real tensors, and is no part of the graph.
        if not torch.compiler.is_compiling() and (changes := self._changes()) is not None:
            changes.check()


def _same(tensor: Tensor, value: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals itself."""
    return torch.equal(tensor.detach().contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))
