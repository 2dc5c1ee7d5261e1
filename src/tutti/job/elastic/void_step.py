"""`VoidStep`: what a training loop moves on in a step that does not count, and that is put back behind it."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

if TYPE_CHECKING:
    from tutti.job.handle import Job


class VoidStep:
    """States of schedulers and the like, and the optimiser's options, from when a step became void."""

    def __init__(self, job: "Job") -> None:
        self._job = ref(job)  # Weak: the job holds this.
        self._parts: dict[str, Any] | None = None
        self._options: list[dict[str, Any]] = []
        """By group of the optimiser."""

    def begin(self) -> None:
        """A step has become void: remember what it must not change, unless that is known already."""
        if self._parts is None:
            self.keep()

    def keep(self) -> None:
        """Remember what the rest of this step must not change, as it is now."""
        job = self._job()
        assert job is not None
        self._parts = deepcopy(job._checkpoints.parts.states())
        if job._rate_scaling is not None:
            job._rate_scaling.put_back()
        # Schedulers also change the optimiser's options, which are no part of their state.
        groups = job._replica.optimizer.param_groups
        self._options = [{key: group[key] for key in group.keys() - {"params"}} for group in groups]

    def last_until_next_batch(self) -> None:
        """Let whatever the loop does before its next batch change nothing, and drop the gradients that it has."""
        self.keep()
        job = self._job()
        assert job is not None
        job._replica.waits_for_batch = True
        for slot in job._replica.slots:
            if slot.tensor.grad is not None:
                slot.tensor.grad = torch.zeros_like(slot.tensor)

    def put_back(self) -> bool:
        """The void step is over: put back what it has changed; return whether there was one."""
        job = self._job()
        if self._parts is None or job is None:
            return False
        job._checkpoints.parts.load(self._parts)
        for group, options in zip(job._replica.optimizer.param_groups, self._options, strict=True):
            group.update(options)
        self._parts = None
        return True
