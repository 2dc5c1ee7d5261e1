"""`OptimizerCheck`: only the optimiser that `distribute` was given may change the trained parameters."""

from typing import Any
from weakref import WeakSet, ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
        self._handles: list[Any] = []

    def open(self) -> None:
        """Start to look at the steps of all optimisers of the process."""
        own, check_ref = ref(self._replica.optimizer), ref(self)

        def before_any_step(optimizer: Optimizer, *_: Any) -> None:
            # Called for every optimiser of the process: the given one must cost next to nothing.
            if optimizer is not own() and (check := check_ref()) is not None:
                check._foreign_step(optimizer)

        self._handles.append(register_optimizer_step_pre_hook(before_any_step))

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _foreign_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._unrelated:
            return
        held = [
            self._trained[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in self._trained
        ]
        if not held:
            self._unrelated.add(optimizer)
            return
        steps_before = self._replica.steps

        def after_step(*_: Any) -> None:
            handle.remove()
            if self._replica.steps == steps_before:
                raise self._error(optimizer, held)

        handle = optimizer.register_step_post_hook(after_step)

    def _error(self, optimizer: Optimizer, held: list[str]) -> ConfigError:
        return ConfigError(
            f"rank {self._rank}: an optimiser that tutti.distribute was not given ({type(optimizer).__name__}) stepped "
            f"and holds '{held[0]}' of the distributed model. Create the optimiser before tutti.distribute, pass that "
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
