"""Support of training techniques by parameter servers, where it is not as on one worker."""

from collections.abc import Mapping

from tutti.strategies.compatibility import SPARSE_GRADIENTS, Support

_IN_THE_STEP = (
    "If gradients are changed in the first step, they are pushed to the servers in `optimizer.step()` from then on, "
    "and not during backward. A change that begins later is refused, unless `overlap=0`"
)

SUPPORT: Mapping[str, Support] = {
    "clipping": Support(
        "adapts",
        f"{_IN_THE_STEP}. Each worker clips its own gradient; `ParameterServer(clip=...)` clips the mean, as one "
        "worker would.",
    ),
    "changed gradients": Support("adapts", f"{_IN_THE_STEP}."),
    "loss scaling": Support(
        "adapts",
        f"{_IN_THE_STEP}. Under `bsp` an infinite gradient of one worker voids the step of all, otherwise its own "
        "update.",
    ),
    "accumulation": Support("adapts", f"{_IN_THE_STEP}. `job.no_sync()` keeps the overlap."),
    "averaged weights": Support(
        "adapts",
        "Parameters arrive in the next forward pass, so a copy that is updated after `optimizer.step()` is one step "
        "older. `ParameterServer(overlap=False)` avoids that.",
    ),
    "closures": Support(
        "adapts",
        "A closure of torch's optimisers is called once, before the step. Other optimisers may call it several times, "
        "and are refused.",
    ),
    "LBFGS": Support(
        "refuses",
        "LBFGS needs the whole model at once and calls the loss again in every step, but each server holds a part of "
        "it. Use SGD, Adam or another that takes gradients as they are, or AllReduce.",
    ),
    "sparse gradients": SPARSE_GRADIENTS,
    "changed parameters": Support(
        "refuses",
        "Servers hold the parameters, so the change would be lost. Load states before distribute; to change parameters "
        "while training, use AllReduce, with the same change on every rank.",
    ),
}
"""By technique; those that are not listed work."""
