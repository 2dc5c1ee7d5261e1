"""Hooks of the whole process, on every optimiser and every module, for the checks of all jobs in it.

torch calls such hooks by iterating over a dict, which must not change meanwhile. Ranks may be threads of one process,
so one of them must not add or remove a hook while another steps. Therefore each hook is registered once, by the first
job, and stays: it goes through a registry of checks.
"""

from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tutti.replica.weak_registry import WeakRegistry


class ProcessCheck(Protocol):
    """A check that is called for all optimisers, or all modules, of the process."""

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """An optimiser is about to step."""
        ...

    def member_added(self, module: nn.Module) -> None:
        """A parameter or a module was added to a module."""
        ...


def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_module_parameter_registration_hook(_member_added)
    register_module_module_registration_hook(_member_added)


CHECKS: WeakRegistry[ProcessCheck] = WeakRegistry(_install)
"""The checks of all jobs of this process, which are called from when they are added."""


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for check in CHECKS.living():
        check.optimizer_steps(optimizer)


def _member_added(module: nn.Module, *_: Any) -> None:
    for check in CHECKS.living():
        check.member_added(module)
