"""`RateScaling`: the learning rate of each step, scaled by the number of workers that take it.

How it works. The rate is scaled when the optimiser steps, and put back behind the step. So schedulers, checkpoints and
workers that join have the rate of the schedule, for any members, and nothing has to be undone when workers come back.
"""

from collections.abc import Callable
from math import sqrt
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.strategies import Strategy
from tutti.strategies.rates import is_adaptive
from tutti.world import World

if TYPE_CHECKING:
    from tutti.job.handle import Job


class RateScaling:
    """Scales the learning rates of one optimiser for the duration of each step."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[], float]) -> None:
        """`factor` is asked before each step."""
        self._optimizer, self._factor = ref(optimizer), factor
        self._unscaled: list[Any] | None = None
        """The rates of the groups, during a step."""
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._scale()),
            optimizer.register_step_post_hook(lambda *_: self.put_back()),
        ]

    def close(self) -> None:
        """Scale no further step."""
        for hook in self._hooks:
            hook.remove()
        self.put_back()

    def _scale(self) -> None:
        self.put_back()  # After a step that has failed.
        optimizer, factor = self._optimizer(), self._factor()
        if optimizer is not None and factor != 1.0:
            self._unscaled = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def put_back(self) -> None:
        """Put the rates of the schedule back: a step is over, or turns out to be void."""
        optimizer = self._optimizer()
        if self._unscaled is not None and optimizer is not None:
            for group, rate in zip(optimizer.param_groups, self._unscaled, strict=True):
                group["lr"] = rate
        self._unscaled = None


def scale_rate(job: "Job", num_workers: int) -> None:
    """As `Job.scale_learning_rate`."""
    mistake = _mistake(job.strategy, num_workers)
    if mistake:
        raise ConfigError(f"job.scale_learning_rate: {mistake}")
    optimizer, world = job._replica.optimizer, job.world
    adaptive = is_adaptive(optimizer)

    def factor() -> float:
        ratio = world.size / num_workers
        if ratio != 1.0:
            _refuse_global_batches(world)
        return sqrt(ratio) if adaptive else ratio

    if job._rate_scaling is not None:
        job._rate_scaling.close()
    job._rate_scaling = RateScaling(optimizer, factor)


def _mistake(strategy: Strategy, num_workers: Any) -> str:
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        return f"the number of workers is 1 or more, got {num_workers!r}."
    if not strategy.averages_gradients:
        return (
            f"under '{strategy}' workers do not step by the mean of their gradients, so the rate does not follow their "
            "number in this way. tutti.strategies.parse(...).learning_rate(num_workers) has the rule of a strategy."
        )
    return ""


def _refuse_global_batches(world: World) -> None:
    """Raise `ConfigError` if the batch of all workers stays the same when their number changes."""
    if world.elastic is not None and any(data.keeps_global_batch for data in world.elastic.data):
        raise ConfigError(
            "job.scale_learning_rate: the batch of all workers stays as it is when workers come and go, and so must "
            'the learning rate. Leave it out, or keep the batch per worker: tutti.shard(loader, keep="local").'
        )
