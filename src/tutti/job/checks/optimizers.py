"""`OptimizerCheck`: only the optimiser that `distribute` was given may change the trained parameters."""

from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.replica import HookedReplica


class OptimizerCheck:
    """Refuses a step of another optimiser that holds trained parameters of the model.

    A wrapper that calls the given optimiser's `step` is an optimiser of its own to torch. So a step of another one is
    judged at its end: it is refused if the given optimiser has not stepped meanwhile.
    """

    def __init__(self, replica: HookedReplica, rank: int) -> None:
        self._replica, self._rank = replica, rank
        self._trained = {id(slot.tensor): slot.name for slot in replica.slots}
        self._unrelated: WeakSet[Optimizer] = WeakSet()
        """Optimisers that were found to hold none of them."""
        self._steps_before: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Other optimisers that hold some, and the steps of the given one when each of them began to step."""
        self._handles: list[Any] = []

    def close(self) -> None:
        """Remove the hooks of other optimisers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._steps_before.clear()

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at an optimiser that is about to step. The given one must cost next to nothing."""
        if optimizer is self._replica.optimizer or optimizer in self._unrelated:
            return
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._trained]
        if not held:
            self._unrelated.add(optimizer)
            return
        if optimizer not in self._steps_before:
            name, check_ref = self._trained[id(held[0])], ref(self)

            def after_step(other: Optimizer, *_: Any) -> None:
                if (check := check_ref()) is not None:
                    check._after_step(other, name)

            # Not removed after the step: torch iterates over the hooks while it calls them.
            self._handles.append(optimizer.register_step_post_hook(after_step))
        self._steps_before[optimizer] = self._replica.steps

    def _after_step(self, optimizer: Optimizer, name: str) -> None:
        if self._steps_before.get(optimizer) == self._replica.steps:
            raise self._error(optimizer, name)

    def _error(self, optimizer: Optimizer, name: str) -> ConfigError:
        return ConfigError(
            f"rank {self._rank}: an optimiser that tutti.distribute was not given ({type(optimizer).__name__}) stepped "
            f"and holds '{name}' of the distributed model. Create the optimiser before tutti.distribute, pass that "
            "one, and step no other."
        )

    def check_used(self, num_passes: int) -> None:
        """Raise if there were backward passes, so many, in which the given optimiser never stepped."""
        if num_passes:
            raise ConfigError(
                f"rank {self._rank}: {num_passes} backward passes, and the optimiser that tutti.distribute was given "
                f"({type(self._replica.optimizer).__name__}) never stepped, so the model was not trained. Pass the "
                "optimiser that the training loop steps."
            )
