"""`ModelChecks`: a distributed model keeps its parameters, and only its own optimiser changes them.

How it works
------------
torch calls a hook before each step of every optimiser in the process. It runs in the thread that steps, so a rank that
is a thread looks at its own optimisers only. A hook before the model's forward pass compares the parameters with those
that were distributed. Both only read Python objects and addresses, and wait for nothing.
"""

import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tutti.job.checks.layout import LayoutCheck
from tutti.job.checks.optimizers import OptimizerCheck
from tutti.replica import HookedReplica
from tutti.replica.owned_hooks import OwnedHook


class ModelChecks:
    """Refuses other optimisers, and a model that was moved, cast or given other parameters."""

    def __init__(self, replica: HookedReplica, rank: int) -> None:
        self._layout = LayoutCheck(replica, rank)
        self._optimizers = OptimizerCheck(replica, rank)
        self._replica = replica
        self._thread = threading.get_ident()
        self._handles = [replica.model.register_forward_pre_hook(_CheckedForward(self))]
        _change_active(lambda active: (*active, ref(self)))

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at an optimiser that is about to step in this thread."""
        if threading.get_ident() == self._thread:
            self._optimizers.before_step(optimizer)

    def before_forward(self) -> None:
        """Look at the parameters before a forward pass for training."""
        if not self._replica.in_consensus:
            self._layout()

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizers.close()
        _change_active(lambda active: tuple(each for each in active if each() not in (None, self)))


class _CheckedForward(OwnedHook):
    """The hook of one model; its copies do without it."""

    def __init__(self, checks: ModelChecks) -> None:
        self._checks = ref(checks)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and (checks := self._checks()) is not None:
            checks.before_forward()


_active: tuple[ref[ModelChecks], ...] = ()
"""The checks of all jobs in this process. Replaced, never changed: another thread may be reading it."""
_active_lock = threading.Lock()


def _change_active(change: Callable[[tuple[ref[ModelChecks], ...]], tuple[ref[ModelChecks], ...]]) -> None:
    global _active  # noqa: PLW0603  (torch's hooks of all optimisers are one list for the process, too)
    with _active_lock:
        _active = change(_active)


def _before_any_step(optimizer: Optimizer, *_: Any) -> None:
    for each in _active:
        if (checks := each()) is not None:
            checks.before_step(optimizer)


# Once, for good: torch goes through its list of hooks without a lock, so none may come or go while others step.
register_optimizer_step_pre_hook(_before_any_step)
