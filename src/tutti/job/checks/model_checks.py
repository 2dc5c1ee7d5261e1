"""`ModelChecks`: a distributed model keeps its parameters, and only its own optimiser changes them.

How it works
------------
torch calls a hook before each step of every optimiser in the process. It runs in the thread that steps, so a rank that
is a thread looks at its own optimisers only. A hook before the model's forward pass compares the parameters with those
that were distributed. Both only read Python objects and addresses, and wait for nothing.
"""

import threading
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
        thread, checks_ref = threading.get_ident(), ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if (checks := checks_ref()) is not None and threading.get_ident() == thread:
                checks._optimizers.before_step(optimizer)

        self._handles = [
            register_optimizer_step_pre_hook(before_step),
            replica.model.register_forward_pre_hook(_CheckedForward(self)),
        ]

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


class _CheckedForward(OwnedHook):
    """The hook of one model; its copies do without it."""

    def __init__(self, checks: ModelChecks) -> None:
        self._checks = ref(checks)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and (checks := self._checks()) is not None:
            checks.before_forward()
