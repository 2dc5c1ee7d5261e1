"""Callbacks of `tutti.fit`: functions and objects of the user's, which are called as training goes on.

A function is called with the `Run` after every epoch. An object has any of these methods, each called with the `Run`:

- `on_start(run)`: before the first step, when the model is distributed;
- `on_step(run)`: after every step;
- `on_epoch(run)`: after every epoch and its evaluation;
- `on_end(run)`: after the last step, when the model holds the parameters that all workers agree on.

Every worker calls its own copy. One with `state_dict` and `load_state_dict` is saved in checkpoints.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.fit.history import History
from tutti.job import Job

EVENTS = ("on_start", "on_step", "on_epoch", "on_end")


class Run:
    """A training under way, as callbacks see it on one worker."""

    def __init__(self, job: Job, model: nn.Module, optimizer: Optimizer, history: History, epochs: int) -> None:
        self.job = job
        """The handle on the distributed model: metrics, values of all ranks, `job.world`."""
        self.model, self.optimizer = model, optimizer
        self.history = history
        """The epochs so far; the last one is the newest."""
        self.epochs = epochs
        """Epochs of the whole training."""
        self.loss = torch.tensor(float("nan"))
        """Loss of this worker's last step."""
        self.tracked: list[Any] = []
        """What `track` was given."""
        self.stops = False
        """Whether training ends with this epoch."""

    @property
    def steps(self) -> int:
        """Steps of the optimiser so far."""
        return self.job.steps

    @property
    def is_leader(self) -> bool:
        """Whether this is the first worker: the one to print."""
        return self.job.is_leader

    def stop(self) -> None:
        """End the training with this epoch. It is enough that one worker calls it; for synchronous strategies only."""
        if not self.job.strategy.synchronous:
            raise ConfigError(
                f"run.stop() needs a strategy whose workers take the same steps, and '{self.job.strategy}' is not one."
            )
        self.stops = True

    def track(self, *parts: Any) -> None:
        """Have checkpoints save what callbacks made in `on_start`, such as a learning-rate scheduler."""
        self.tracked += parts


class Callbacks:
    """All callbacks of a run."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks
        self._of_event = {event: [call for each in callbacks if (call := _handler(each, event))] for event in EVENTS}

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, event: str, run: Run) -> None:
        """Call those that handle an event."""
        for handler in self._of_event[event]:
            handler(run)

    def step(self, run: Run, loss: Tensor) -> None:
        """Call those that handle a step."""
        run.loss = loss
        self.call("on_step", run)

    @property
    def with_state(self) -> list[Any]:
        """Those that are saved in checkpoints."""
        return [each for each in self._callbacks if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]


def callback_mistakes(callbacks: Any) -> list[str]:
    """Return what is wrong with callbacks, as given by the user."""
    if not isinstance(callbacks, Sequence):
        return [f"callbacks must be a list of functions and objects, got {callbacks!r}."]
    mistakes = []
    for each in callbacks:
        unknown = [name for name in dir(each) if name.startswith("on_") and name not in EVENTS]
        if unknown:
            mistakes.append(f"callback {type(each).__name__} has {unknown[0]}: known are {', '.join(EVENTS)}.")
        elif isinstance(each, type):
            mistakes.append(f"callback {each.__name__} is a class: give an object, {each.__name__}().")
        elif not callable(each) and not any(hasattr(each, event) for event in EVENTS):
            mistakes.append(f"a callback is a function, or has one of {', '.join(EVENTS)}; got {each!r}.")
    return mistakes


def _handler(callback: Any, event: str) -> Callable[[Run], Any] | None:
    if any(hasattr(callback, name) for name in EVENTS):
        return getattr(callback, event, None)
    return callback if event == "on_epoch" else None
