"""The time of a worker's pushes: during backward, or in the optimiser's step if gradients are changed between both.

How it works
------------
The user may change gradients between backward and step, by clipping or a `GradScaler` for example. What was pushed
during backward would miss that. So the first step always pushes in the step. If gradients were changed by then, or if
the strategy has no overlap, all later steps do the same. Otherwise later steps push during backward, and a change that
comes after that is an error.

Workers need not decide alike: to the servers, one that pushes later is a slower worker.
"""

import logging

from tutti.errors import ConfigError
from tutti.replica import Replica
from tutti.replica.gradient_marks import GradientMarks
from tutti.replica.loss_scaling import LossScaling

_log = logging.getLogger("tutti")


class PushTiming:
    """Whether the pushes of one worker wait for the optimiser's step."""

    def __init__(self, replica: Replica, rank: int, overlap: bool) -> None:
        """Watch the gradients of `replica`, unless pushes always wait because there is no overlap."""
        self.waits_for_step = True
        """Whether pushes wait for the step, in this iteration."""
        self._replica = replica
        self._rank = rank
        self._decided = not overlap
        # A dry run has no gradients that anyone could change.
        if not replica.sizes_only:
            replica.loss_scaling = LossScaling(replica.optimizer)
            replica.marks = GradientMarks() if overlap else None

    def before_step(self, num_backwards: int) -> None:
        """Decide for later iterations, in the first step. Raises `ConfigError` if gradients changed after their push.

        Called before the pushes that wait for this step, with the number of backward passes since the last one.
        """
        if self._decided and not self.waits_for_step and self._changed():
            raise ConfigError(
                f"rank {self._rank}: gradients were changed between backward and optimizer.step(), but those of this "
                "step had been pushed to the servers during backward, because nothing had changed gradients in the "
                "first step. Use ParameterServer(overlap=False) (ps:bsp,overlap=0), which pushes in optimizer.step(); "
                "or ParameterServer(clip=...), which clips on the servers."
            )
        # A second backward pass has added to the gradients of the first.
        if not self._decided and (num_backwards > 1 or self._changed()):
            self._decided = True
            # All ranks run the same script, so one warning is enough. The other ranks log it at a lower level.
            _log.log(
                logging.WARNING if self._rank == 0 else logging.INFO,
                "rank %d: gradients are changed between backward and optimizer.step(), so they are pushed to the "
                "servers in optimizer.step(), and not during backward. They are this worker's own gradients: "
                "ParameterServer(clip=...) clips their mean.",
                self._rank,
            )

    def after_step(self) -> None:
        """Push during backward from now on, if the first step has shown that nothing changes gradients after it."""
        if not self._decided:
            self._decided, self.waits_for_step = True, False
            if self._replica.marks is not None:
                self._replica.marks.trust_versions()

    def _changed(self) -> bool:
        """Whether gradients were changed since backward."""
        scaling, marks = self._replica.loss_scaling, self._replica.marks
        # A scaler that is in use counts as a change by itself: it divides gradients by its scale before the step.
        return (scaling is not None and scaling.in_use) or (marks is not None and marks.differ(self._replica.buckets))
