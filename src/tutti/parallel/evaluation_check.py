"""`EvaluationCheck`: ranks that split a model evaluate it together, or learn that they do not."""

import torch
import torch.distributed as dist

from tutti.parallel.support import together

_NUM_BYTES = 7
"""A length that no tensor of a model has in bytes, so that nothing that the model sends is taken for this message."""


class EvaluationCheck:
    """Makes an evaluation on some ranks an error at once.

    A forward pass without gradients begins with a message of its own between the ranks of `group`. If another rank is
    in a step of training meanwhile, it is in an operation of other tensors, and both get the error that says so.
    Otherwise the pass of the one would be answered by that of the other, and both would wait for each other much later.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._message = torch.zeros(_NUM_BYTES, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        """Take part in an evaluation, if this forward pass has no gradients. Collective then."""
        if not torch.is_grad_enabled():
            with together():
                self._group.allreduce([self._message]).wait()
