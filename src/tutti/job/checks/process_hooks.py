"""Hooks of the whole process, on every optimiser and every module, for the checks of all jobs in it.

torch calls such hooks by iterating over a dict, which must not change meanwhile. Ranks may be threads of one process,
in simulations for example, so one of them must not add or remove a hook while another steps. Therefore each hook is
registered once, by the first job, and stays. It goes through a tuple of checks that is replaced as a whole. References
are weak: a job that is dropped without `finish` is collected with its model.
"""

from threading import Lock
from typing import Any, Protocol
from weakref import ref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class ProcessCheck(Protocol):
    """A check that is called for all optimisers, or all modules, of the process."""

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """An optimiser is about to step."""
        ...

    def member_added(self, module: nn.Module) -> None:
        """A parameter or a module was added to a module."""
        ...


_lock = Lock()
_checks: tuple["ref[ProcessCheck]", ...] = ()
_registered = False


def add(check: ProcessCheck) -> None:
    """Call `check` from now on."""
    global _checks, _registered  # noqa: PLW0603
    with _lock:
        _checks = (*(other for other in _checks if other() is not None), ref(check))
        if not _registered:
            _registered = True
            register_optimizer_step_pre_hook(_before_step)
            register_module_parameter_registration_hook(_member_added)
            register_module_module_registration_hook(_member_added)


def remove(check: ProcessCheck) -> None:
    """Call `check` no more. Idempotent."""
    global _checks  # noqa: PLW0603
    with _lock:
        _checks = tuple(other for other in _checks if other() not in (check, None))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for reference in _checks:
        if (check := reference()) is not None:
            check.optimizer_steps(optimizer)


def _member_added(module: nn.Module, *_: Any) -> None:
    for reference in _checks:
        if (check := reference()) is not None:
            check.member_added(module)
