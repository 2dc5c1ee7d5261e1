"""`GlobalOrder`: the order of `GlobalBatches`, which every rank draws from a generator of its own."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tutti.data.division import Batch
from tutti.data.epoch_order import KEPT_EPOCHS, EpochOrder
from tutti.data.global_batches import GlobalBatches
from tutti.data.sampler_state import set_generator


class GlobalOrder(EpochOrder):
    """Batches that follow from the generator's state at the start of their epoch, which is all that is saved."""

    name = "global batches"

    def __init__(self, sampler: GlobalBatches) -> None:
        self._sampler = sampler
        self._starts: dict[int, Tensor] = {}
        """The generator's state before the draw of an epoch, of epochs that may be continued."""
        self._last = -1
        """The last epoch that was drawn from the generator."""

    def batches(self, epoch: int, num_parts: int, first_epoch: int) -> Sequence[Batch]:
        sampler = self._sampler
        # Steps of the world that the run began with, which `shard` splits between the ranks that are there now.
        sampler.num_parts = num_parts
        self._starts = {known: start for known, start in self._starts.items() if known >= first_epoch - KEPT_EPOCHS}
        now = sampler.generator.get_state()
        if epoch > self._last or epoch not in self._starts:
            self._starts[epoch], self._last = now, max(epoch, self._last)
            return list(sampler)
        set_generator(sampler.generator, self._starts[epoch])
        batches = list(sampler)
        self._starts.setdefault(epoch + 1, sampler.generator.get_state())
        sampler.generator.set_state(now)
        return batches

    def own_state(self, first_epoch: int) -> Any:
        starts = [[epoch, start] for epoch, start in self._starts.items() if epoch >= first_epoch]
        return [[*starts, [self._last + 1, self._sampler.generator.get_state()]], self._last]

    def merge(self, values: dict[int, Any], positions: list[list[int]]) -> dict[str, Any]:
        # All ranks draw the same sequence. Where one is epochs behind, the starts between follow from an earlier one.
        starts = dict(start for known, _ in values.values() for start in known)
        return {"starts": [[epoch, start] for epoch, start in sorted(starts.items())]}

    def load(self, state: dict[str, Any]) -> None:
        self._starts = dict(state["starts"])
        self._last = max(self._starts) - 1
        set_generator(self._sampler.generator, self._starts.pop(self._last + 1))
