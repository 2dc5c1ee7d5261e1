"""Refusal of parameters that the user changes by hand between steps, under strategies that cannot follow such a change.

Servers send their parameters before the next forward pass, so a change by hand would be lost without a word. Peers add
up the changes of all ranks, so it would count once for every rank. The check runs in the first forward pass after a
step, or in the first call that writes parameters: until then nothing of Tutti's does.

Forward passes without gradients are evaluations. Other weights may be in the model for them, such as an average over
steps, if the parameters are put back before the next pass with gradients.
"""

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from tutti.errors import ConfigError
from tutti.replica.buckets import Slot
from tutti.replica.owned_hooks import OwnedHook
from tutti.replica.replica import Replica
from tutti.replica.value_samples import ValueSamples

_NUM_COMPARED_BY_VALUE = 3
"""Steps after which values are compared. A script that changes parameters usually does so from the start."""


class UserChanges:
    """Remembers parameters as the last step left them, and refuses others in the next forward pass with gradients.

    A change in place gives a tensor another version. Changes through `p.data` do not, so values are compared as well:
    all of them in the first passes, and a sample later (`ValueSamples`). Where a script evaluates with other weights,
    values are kept from then on, because parameters that were put back have another version too. For the first such
    evaluation there may be none: then other weights count as put back if the sample is the same again, and the model
    holds something else than in the evaluation.
    """

    def __init__(self, replica: Replica, rank: int, remedy: str) -> None:
        """Watch the parameters of `replica`; `rank` is named in errors, which end with the `remedy`."""
        self._replica = ref(replica)  # Weak: the replica holds this through its listener.
        self._slots = replica.slots
        self._rank = rank
        self._remedy = remedy
        self._versions: list[int] | None = None
        self._values: list[Tensor] = []
        self._samples = ValueSamples([slot.tensor for slot in replica.slots])
        self._num_records = 0
        self._evaluated: list[Tensor] = []
        """What the parameters were in an evaluation since the last step, if that is not what the step left."""
        self._keeps_values = False
        self._handle = replica.model.register_forward_pre_hook(_CheckBeforeForward(self))
        self.record()

    def record(self, keep_values: bool = False) -> None:
        """Remember the parameters as they are now; with `keep_values`, also what they are, whatever the step."""
        self._versions = [slot.tensor._version for slot in self._slots]
        self._num_records += 1
        self._evaluated = []
        by_value = keep_values or self._keeps_values or self._num_records <= _NUM_COMPARED_BY_VALUE
        self._values = [slot.tensor.detach().clone() for slot in self._slots] if by_value else []
        if not by_value:
            self._samples.take()

    def changed(self) -> list[Slot]:
        """Return the parameters that are not as `record` found them. Asked once: Tutti may write them then."""
        changed = self._changed()
        self._versions = None
        return changed

    def _changed(self) -> list[Slot]:
        if self._versions is None:
            return []
        if self._values:  # Values that are the same were put back, whatever their versions are.
            return [s for s, value in zip(self._slots, self._values, strict=True) if not _same(s.tensor, value)]
        # Versions and samples cost little to read, so they are compared in every step.
        in_sample = [self._slots[index] for index in self._samples.changed()]
        evaluated = zip(self._slots, self._evaluated, strict=False)
        # One that is not what it was in the evaluation was put back; others may be equal in both.
        if any(not _same(slot.tensor, value) for slot, value in evaluated):
            return in_sample
        versions = zip(self._slots, self._versions, strict=True)
        return [slot for slot, version in versions if slot.tensor._version != version] or in_sample

    def before_forward(self) -> None:
        """Check before a forward pass with gradients; before an evaluation, note that there are other weights."""
        replica = self._replica()
        if replica is not None and replica.in_consensus:
            return  # The parameters are not this rank's own, and on a mesh not even of their shape.
        if torch.is_grad_enabled():
            self.check()
        elif not self._evaluated and self._changed():
            self._evaluated = [slot.tensor.detach().clone() for slot in self._slots]
            self._keeps_values = True

    def check(self) -> None:
        """Raise `ConfigError` if a parameter is not as `record` found it. Checks once, as `changed`."""
        if changed := self.changed():
            raise ConfigError(
                f"rank {self._rank}: parameter '{changed[0].name}' was changed between optimizer.step() and the next "
                f"forward pass, or after tutti.distribute. {self._remedy}"
            )

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def record_loaded(changes: UserChanges | None) -> None:
    """Parameters were loaded outside of a step: the user may use others until the next one, and puts these back."""
    if changes is not None:
        changes.record(keep_values=True)


class _CheckBeforeForward(OwnedHook):
    """The hook of one model; its copies do without it."""

    def __init__(self, changes: UserChanges) -> None:
        self._changes = ref(changes)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # Not while torch.compile traces the model: the check looks at real tensors, and is no part of the graph.
        if not torch.compiler.is_compiling() and (changes := self._changes()) is not None:
            changes.before_forward()


def _same(tensor: Tensor, value: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals itself."""
    return torch.equal(tensor.detach().contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))
