"""`LossScaling`: `torch.amp.GradScaler` under strategies whose `p.grad` is the rank's own gradient.

How it works
------------
A `GradScaler` calls `optimizer.step()` only if the gradients are finite. Where each rank has gradients of its own,
ranks would then take different numbers of steps. For an optimiser that says that it handles scaling itself
(`_step_supports_amp_scaling`, as torch's fused ones do), the scaler always calls `step`, and puts `grad_scale` (None if
the user has called `unscale_`) and `found_inf` on the optimiser for the duration of that call.

So the distributed optimiser says so. Before its step `unscale` divides the gradients by the scale, in place, and tells
whether the step is void. Both attributes are set to None, not removed: the scaler deletes them after the step, and a
fused optimiser that finds them would unscale a second time.

Under a strategy with a global gradient all ranks find the same inf, skip the same steps, and need none of this.
"""

from typing import Any

import torch
from torch.optim import Optimizer

_FLAG = "_step_supports_amp_scaling"


class LossScaling:
    """Unscales the gradients of one optimiser in place of its `GradScaler`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._before: bool | None = vars(optimizer).get(_FLAG)
        setattr(optimizer, _FLAG, True)
        self.in_use = False
        """Whether a scaler has called the present step."""

    def unscale(self) -> bool:
        """Unscale the gradients, if a scaler has called this step; return whether one of them is not finite."""
        optimizer = self._optimizer
        found_inf = getattr(optimizer, "found_inf", None)
        self.in_use = found_inf is not None
        if found_inf is None:
            return False
        scale = optimizer.grad_scale
        optimizer.grad_scale = optimizer.found_inf = None
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if scale is not None and grads:
            # As `GradScaler.unscale_` computes it: the result then has the same bits.
            torch._foreach_mul_(grads, float(scale.double().reciprocal().float()))
        return bool(found_inf)

    def detach(self) -> None:
        """Let the optimiser handle scaling as it did before. Idempotent."""
        if self._before is None:
            vars(self._optimizer).pop(_FLAG, None)
        else:
            setattr(self._optimizer, _FLAG, self._before)
