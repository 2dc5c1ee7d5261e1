"""`demand_scaler`: a GradScaler that the job does not know of is found in the first step that it makes."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.amp.grad_scaler import GradScaler

from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.job.handle import Job

_MOST_FRAMES = 20
"""Calls between a scaler and the hooks of its optimiser: a few of torch's, and those of wrappers of the user's."""


def demand_scaler(job: "Job") -> None:
    """Raise `ConfigError` in the first step of the optimiser, if a GradScaler makes it and was not given to the job."""
    found, is_first = ref(job), True

    def before_step(*_: Any) -> None:
        nonlocal is_first
        tracked, was_first = found(), is_first
        is_first = False
        if not was_first or tracked is None:
            return
        if not any(isinstance(each, GradScaler) and each.is_enabled() for each in _callers()):
            return
        if not any(isinstance(part, GradScaler) for part in tracked._checkpoints.parts.parts.values()):
            raise ConfigError(
                "a GradScaler makes the steps of this optimiser, and a worker that joins would not know its scale. "
                "Give it to job.track(scaler) or job.restore(..., scaler) before the first batch."
            )

    job._replica.optimizer.register_step_pre_hook(before_step)  # It stays: torch goes through its hooks just then.


def _callers() -> Iterator[Any]:
    """Yield the objects whose methods are being called, the innermost first. Nothing links an optimiser to a scaler."""
    frame: Any = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame.f_locals.get("self")
        frame = frame.f_back
