"""The state of the user's optimiser, which servers have while a job runs: taken from it, and given back to it."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tutti.replica.buckets import Slot
from tutti.replica.state import in_order_of

_log = logging.getLogger("tutti")


class UserOptimizerState:
    """Empties the user's optimiser while servers step in its place, and fills it with their state.

    It is filled inside `job.consensus()`, to be saved, and after `job.finish()`, to go on without servers.
    """

    def __init__(self, optimizer: Optimizer, slots: Sequence[Slot]) -> None:
        """Watch an optimiser whose state servers have copied; `slots` are the parameters that they step."""
        self._optimizer = optimizer
        self._slots = slots
        self._is_current = False
        self._has_warned = False
        self._handle: Any = optimizer.register_state_dict_pre_hook(self._before_state_dict)
        self.clear()

    def clear(self) -> None:
        """Drop the state: from here on servers change theirs."""
        self._is_current = False
        for slot in self._slots:
            self._optimizer.state.pop(slot.tensor, None)

    def fill(self, states: dict[str, dict[str, Any]]) -> None:
        """Replace the state by that of the servers, by name of parameter."""
        self.clear()
        self._is_current = True
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for slot in self._slots:
            if state := states.get(slot.name):
                # Such optimisers read the count of steps on the device, as a CUDA graph or a fused kernel must;
                # others on the CPU.
                on_device = groups[id(slot.tensor)].get("capturable") or groups[id(slot.tensor)].get("fused")
                self._optimizer.state[slot.tensor] = {
                    key: _for_parameter(key, value, slot.tensor, bool(on_device)) for key, value in state.items()
                }

    def close(self) -> None:
        """Leave the optimiser as it is. Idempotent."""
        self._handle.remove()

    def _before_state_dict(self, _: Optimizer) -> None:
        if not self._is_current and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "optimizer.state_dict() is empty while parameter servers step in place of the optimiser: call it "
                "inside job.consensus() or after job.finish(), or use job.state_dict()."
            )


def _for_parameter(key: str, value: Any, parameter: Tensor, on_device: bool) -> Any:
    """Return a state as `Optimizer.load_state_dict` would: on the parameter's device, except counts of steps."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        return value.to(parameter.device) if on_device else value
    value = value.to(parameter.device, parameter.dtype if parameter.is_floating_point() else value.dtype)
    return in_order_of(parameter, value)
