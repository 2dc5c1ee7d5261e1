"""Refusal of what the user changes by hand while servers hold it: parameters between steps, and the optimiser's state.

Servers send their parameters before the next forward pass, so a change by hand would be lost without a word. The check
runs in the first forward pass after a step: until then nothing of Tutti's writes parameters.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.replica.buckets import Slot
from tutti.replica.owned_hooks import OwnedHook
from tutti.strategies.parameter_server.support import SUPPORT

_NUM_COMPARED_BY_VALUE = 3
"""Forward passes in which values are compared. A script that changes parameters usually does so from the start."""


class UserChanges:
    """Remembers parameters as the last step left them, and refuses others in the next forward pass.

    A change in place gives a tensor another version. Changes through `p.data` do not, so values are compared as well in
    the first passes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, slots: Sequence[Slot], rank: int) -> None:
        """Watch `slots`, the parameters of `model` that servers hold; `rank` is named in errors."""
        self._slots = slots
        self._rank = rank
        self._versions: list[int] | None = None
        self._values: list[Tensor] = []
        self._num_checks = 0
        self._handles = [
            model.register_forward_pre_hook(_CheckBeforeForward(self)),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
        ]
        self.record()

    def record(self) -> None:
        """Remember the parameters as they are now."""
        self._versions = [slot.tensor._version for slot in self._slots]
        by_value = self._num_checks < _NUM_COMPARED_BY_VALUE
        self._values = [slot.tensor.detach().clone() for slot in self._slots] if by_value else []

    def forget(self) -> None:
        """Check nothing until the next `record`: parameters are about to be written by Tutti."""
        self._versions = None

    def check(self) -> None:
        """Raise `ConfigError` if a parameter is not as `record` found it. Checks once; later passes load parameters."""
        versions, self._versions = self._versions, None
        if versions is None:
            return
        self._num_checks += 1
        # Versions cost nothing to read, so they are compared in every step; values only in the first few passes.
        changed = [slot for slot, version in zip(self._slots, versions, strict=True) if slot.tensor._version != version]
        # Not strict: there are values in the first passes only.
        changed += [s for s, value in zip(self._slots, self._values, strict=False) if not _same(s.tensor, value)]
        if changed:
            raise ConfigError(
                f"rank {self._rank}: parameter '{changed[0].name}' was changed between optimizer.step() and the next "
                f"forward pass, or after tutti.distribute. {SUPPORT['changed parameters'].text}"
            )

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_load(self, _: Optimizer, __: dict[str, Any]) -> None:
        raise ConfigError(
            f"rank {self._rank}: optimizer.load_state_dict after tutti.distribute: servers hold the optimiser's state "
            "and would not see it. Load the state before distribute."
        )


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
