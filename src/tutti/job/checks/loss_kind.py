"""`is_sum_loss`: whether the loss of the backward pass that runs now is a sum over samples, read from its graph.

Gradients are averaged over ranks. That is what one machine would compute if the loss is a mean over samples. With a
sum, N ranks step 1/N as far as one machine.

How it works. In a hook of a gradient the frame of torch's `backward` is still on the stack of the thread that called
it, with the loss in it. From the loss the graph is followed through additions to the nodes that reduce a tensor to a
number. Anything else is not judged: a product or a quotient may make a mean of a sum, and autograd has let go of the
factor when the first gradient is there.
"""

import sys
from math import prod
from types import FrameType
from typing import Any

from torch import Tensor

SUM_LOSS = (
    "rank {rank}: the loss is a sum over samples, and gradients are averaged over {size} ranks: each step would be "
    '1/{size} of that on one machine. Call job.expect(loss="sum") to add gradients up, or job.expect(loss="mean") to '
    "average them all the same."
)
"""The error for a loss that is a sum."""

_REDUCTION_OF_SUM = 2
"""`at::Reduction::Sum`, as loss functions of torch save it."""

_BACKWARD_FRAME = "_engine_run_backward"
"""The function of torch in which autograd's engine runs."""

_MAX_NODES = 64


def is_sum_loss(thread: int) -> bool:
    """Return whether the backward pass that `thread` has called is surely that of a sum. False where it is unknown."""
    loss = _loss_of(sys._current_frames().get(thread))
    return loss is not None and loss.grad_fn is not None and _is_sum(loss.grad_fn)


def _loss_of(frame: FrameType | None) -> Tensor | None:
    while frame is not None:
        if frame.f_code.co_name == _BACKWARD_FRAME:
            outputs = frame.f_locals.get("t_outputs", ())
            return outputs[0] if len(outputs) == 1 and isinstance(outputs[0], Tensor) else None
        frame = frame.f_back
    return None


def _is_sum(root: Any) -> bool:
    """Whether all terms of the loss are sums. A sum beside a mean is a penalty, which samples have no part in."""
    pending, num_sums = [root], 0
    for _ in range(_MAX_NODES):
        if not pending:
            return num_sums > 0
        node = pending.pop()
        kind = node.name()
        inputs = [parent for parent, _ in node.next_functions if parent is not None]
        if kind in ("AddBackward0", "StackBackward0") or (kind == "SumBackward0" and not _sums_samples(node)):
            pending += inputs
        elif kind == "SumBackward0" and any(_may_be_a_mean(parent) for parent in inputs):
            return False
        elif kind == "SumBackward0" or getattr(node, "_saved_reduction", None) == _REDUCTION_OF_SUM:
            num_sums += 1
        else:
            return False
    return False


def _may_be_a_mean(node: Any) -> bool:
    """Whether the terms of a sum are multiplied by constants, which may sum up to 1."""
    return node.name() in ("MulBackward0", "DivBackward0") and any(parent is None for parent, _ in node.next_functions)


def _sums_samples(node: Any) -> bool:
    """Whether a `SumBackward0` node sums over samples: not over several losses, nor over the features of one sample."""
    shape = getattr(node, "_saved_self_sym_sizes", (2,))
    stacked = any(parent is not None and parent.name() == "StackBackward0" for parent, _ in node.next_functions)
    return prod(shape) > 1 and shape[0] > 1 and not stacked
