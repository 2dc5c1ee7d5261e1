"""Checks before a step of the optimiser: everything that it is about to change is exchanged with the other ranks.

Each finds a change that the user made after `distribute`, which would otherwise leave ranks with different models. The
checks read Python objects only, no tensors, and those that look at every parameter run ever more rarely.
"""

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.replica.buckets import Slot


class StepChecks:
    """The state of a model, its optimiser and its hooks when they were distributed, to compare with before a step."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, slots: list[Slot], distributed: Iterable[nn.Module]
    ) -> None:
        """Note the present state.

        Args:
            model: the model that this rank trains.
            optimizer: its optimiser, which may also hold parameters of other models.
            slots: the trained parameters of the model.
            distributed: all models that are distributed when the first step is taken.
        """
        self._optimizer = optimizer
        self._distributed = distributed
        self._num_parameters = _num_parameters(optimizer)
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._hooks = [(slot, len(_hooks(slot))) for slot in slots]
        self._num_checks = 0

    def check(self, *, gradients: bool) -> None:
        """Raise `ConfigError` if the next step would change what other ranks do not know of.

        Args:
            gradients: whether gradients are exchanged in backward, before hooks registered after `distribute` run.
        """
        if _num_parameters(self._optimizer) != self._num_parameters:
            raise ConfigError(
                "the optimiser was given parameters after tutti.distribute, which are not exchanged: each rank would "
                "train its own. Call optimizer.add_param_group before distribute, with parameters of the model; or "
                "call job.finish(), add them, and distribute again."
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise unfrozen(name)
        self._num_checks += 1
        if self._num_checks == 1:
            self._refuse_parameters_of_no_model()
        if self._num_checks & (self._num_checks - 1):  # Checks 1, 2, 4, 8, ... look at every parameter.
            return
        if gradients:
            # Hooks run in the order of registration: the first `number` were there when the model was distributed.
            for slot, number in self._hooks:
                if any(not _is_own(hook) for hook in _hooks(slot)[number:]):
                    raise ConfigError(
                        f"a hook was registered on the gradient of '{slot.name}' after tutti.distribute "
                        "(register_post_accumulate_grad_hook). It runs when the gradient is on its way to other ranks "
                        "already. Register it before distribute, or use register_hook."
                    )

    def _refuse_parameters_of_no_model(self) -> None:
        """Raise if the optimiser trains parameters outside of every distributed model: those of a loss, for example."""
        exchanged = {id(p) for model in self._distributed for p in model.parameters()}
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        if foreign := sum(p.requires_grad and id(p) not in exchanged for p in held):
            raise ConfigError(
                f"the optimiser also trains {foreign} parameters that are in no distributed model, so each rank would "
                "train its own. Distribute one module that holds everything the optimiser trains, such as "
                "nn.ModuleList([model, loss])."
            )


def unfrozen(name: str) -> ConfigError:
    """Return the error for a parameter that was frozen in `distribute` and is trained now."""
    return ConfigError(
        f"parameter '{name}' was frozen when the model was distributed and is trained now, so no other "
        "rank gets its gradient. Call job.finish() and tutti.distribute(...) again after unfreezing."
    )


def _num_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _hooks(slot: Slot) -> list[Callable[..., None]]:
    return list((slot.tensor._post_accumulate_grad_hooks or {}).values())


def _is_own(hook: Callable[..., None]) -> bool:
    """Whether a hook is Tutti's: the planner times gradients by hooks of its own, which change nothing."""
    return (getattr(hook, "__module__", None) or "").startswith("tutti.")
