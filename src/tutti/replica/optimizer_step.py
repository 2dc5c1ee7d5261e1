"""`OptimizerStep`: the hooks before and after each step of a replica's optimiser.

A step may be void: the optimiser finds no gradients then and changes nothing. Either a `GradScaler` has found an
infinite gradient, and the step counts as usual; or a rank was lost (`Replica.lost`), and the step does not count: its
samples come again.

A closure, which `optimizer.step(closure)` calls to compute loss and gradients, is called before all this, where the
optimiser calls it once: the gradients are there when the step begins, as in a loop without a closure. Any other
optimiser calls it in the middle of its step, which cannot be void then: it is refused where ranks come and go.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import LBFGS, Optimizer

from tutti.coordination.activity import IDLE
from tutti.errors import ConfigError, RankLost

if TYPE_CHECKING:
    from tutti.replica.hooks import HookedReplica

_MOST_VOID = 3
"""Steps that may be void one after the other: those of one batch, where a loop takes several."""


class EvaluatedClosure:
    """Stands in for a closure that has been called: returns its loss."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        with torch.enable_grad():
            self._loss = closure()

    def __call__(self) -> Any:
        return self._loss


class OptimizerStep:
    """Reports the steps of an optimiser to the exchange, and lets void ones change nothing."""

    def __init__(self, replica: "HookedReplica") -> None:
        self._replica = replica
        self._num_void = 0
        """Void steps since the last one that counted."""

    def begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The optimiser is about to step; return its arguments. A step pre-hook."""
        if _calls_closures_once(optimizer):
            args = (*args[:1], *map(_evaluated, args[1:]))
            kwargs = {name: _evaluated(value) for name, value in kwargs.items()}
        elif self._replica.survives and any(map(callable, (*args[1:], *kwargs.values()))):
            raise ConfigError(
                f"{type(optimizer).__name__}.step was given a closure, which it may call several times. If a worker is "
                "lost then, the step cannot be void: ranks would end with different parameters. Call backward "
                "yourself, then step(); or give a fixed number of workers."
            )
        self._begin()
        return args, kwargs

    def _begin(self) -> None:
        replica = self._replica
        if replica.in_consensus or replica.away:
            where = "job.consensus(), whose model is not this rank's own" if replica.in_consensus else "job.away()"
            raise ConfigError(f"a step of the optimiser inside {where}: train outside it.")
        replica.activity.enter("optimizer")
        if not replica.is_void:
            self._num_void = 0
            self._prepare()
        if replica.is_void:
            self._count_void()
            if replica.on_void is not None:
                replica.on_void()
            replica.hide_gradients()
        elif replica.step_is_void:
            replica.hide_gradients()

    def _count_void(self) -> None:
        """Raise `ConfigError` where no loop over sharded data would ever let the ranks change."""
        self._num_void += 1
        if self._num_void > _MOST_VOID:
            raise ConfigError(
                f"a rank was lost, and {_MOST_VOID} steps came after it without a batch of tutti.shard: in a run whose "
                "workers come and go, iterate over what tutti.shard returns. Ranks change between its batches."
            )

    def _prepare(self) -> None:
        """Exchange what is left to be exchanged, check it, and tell the exchange."""
        replica = self._replica
        replica.step_is_void = replica.loss_scaling is not None and replica.loss_scaling.unscale()
        if replica.step_checks is not None:
            replica.step_checks.check(gradients=replica.reports_passes)
        try:
            self._exchange_gathered()
            if replica.owed and not replica.reports_passes and not replica.step_is_void:
                replica.add_owed()
            # After the exchange, and not of a step that a GradScaler skips.
            if replica.checks is not None and not replica.step_is_void:
                replica.checks.before_step()
            replica.listener.before_step()
        except RankLost as error:
            replica.note_loss(error)

    def _exchange_gathered(self) -> None:
        """Exchange gradients that no backward pass has exchanged, if this step would use any.

        They come from `torch.autograd.grad`, from the user's own formula, or from backward passes of which the last
        was inside `no_sync`.
        """
        replica = self._replica
        if not replica.reports_passes or replica.has_exchanged:
            return
        if not any(
            slot.tensor.grad is not None and (slot.touched or slot.tensor.grad is not slot.view)
            for slot in replica.slots
        ):
            return
        if not replica.syncing:
            raise ConfigError(
                "optimizer.step() inside job.no_sync(), where gradients stay on this rank: ranks would take "
                "different steps. End the context before the last backward pass of a step."
            )
        replica.exchange_gathered()

    def end(self, *_: Any) -> None:
        """The optimiser has stepped."""
        replica = self._replica
        replica.has_exchanged = False
        if replica.is_void:  # The optimiser found no gradient.
            replica.show_gradients()
            return
        replica.steps += 1
        if replica.step_is_void:
            replica.show_gradients()
        # A step that a GradScaler skips has used its samples too: they do not come again.
        replica.sample_counts.commit()
        try:
            replica.listener.after_step()
        except RankLost as error:
            replica.note_loss(error)
        replica.activity.stepped()
        replica.activity.enter(IDLE)


def _calls_closures_once(optimizer: Optimizer) -> bool:
    """Whether an optimiser calls the closure of a step once, at its start: all of torch but LBFGS."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)


def _evaluated(argument: Any) -> Any:
    """Return an argument of `optimizer.step`, evaluated if it is a closure."""
    return EvaluatedClosure(argument) if callable(argument) else argument
