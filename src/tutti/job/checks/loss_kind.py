"""`is_sum_loss`: whether the loss of the backward pass that runs now is a sum over samples, read from its graph.

Gradients are averaged over ranks. That is what one machine would compute if the loss is a mean over samples. With a
sum, N ranks step 1/N as far as one machine.

How it works. In a hook of a gradient the frame of torch's `backward` is still on the stack of the thread that called
it, with the loss in it. From the loss the graph is followed through additions to the nodes that reduce a tensor to a
number. Anything else is not judged: a product or a quotient may make a mean of a sum, and autograd has let go of the
factor when the first gradient is there.
"""

import sys
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

_ADDITIONS = ("AddBackward0", "SubBackward0", "NegBackward0")
"""Nodes that add terms of the loss, with either sign."""

_ELEMENTWISE = (
    *_ADDITIONS,
    "MulBackward0",
    "DivBackward0",
    "PowBackward0",
    "AbsBackward0",
    "ExpBackward0",
    "LogBackward0",
)
"""Nodes whose result has a value for each sample where their inputs have."""

_NOT_OF_SAMPLES = ("Mean", "Sum", "Stack", "Cat", "Norm", "LinalgVectorNorm", "Prod", "Logsumexp", "Max", "Min")
"""Beginnings of the names of nodes after which values are no longer one for each sample."""


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
    """Whether the loss has a term that a loss function sums, or nothing but terms that are sums over samples.

    A plain `.sum()` beside a mean is not judged: it may be a penalty, which samples have no part in.
    """
    pending, num_sums, unknown = [root], 0, False
    for _ in range(_MAX_NODES):
        if not pending:
            break
        node = pending.pop()
        kind = node.name()
        if getattr(node, "_saved_reduction", None) == _REDUCTION_OF_SUM:
            return True
        if kind in _ADDITIONS or (kind == "SumBackward0" and not _sums_samples(node)):
            pending += [parent for parent, _ in node.next_functions if parent is not None]
        elif kind in ("SumBackward0", "SumBackward1") and _sums_samples(node) and _is_of_samples(node):
            num_sums += 1
        else:
            unknown = True
    return num_sums > 0 and not unknown and not pending


def _sums_samples(node: Any) -> bool:
    """Whether a node that sums does so over a first dimension of more than 1: else over features of one sample."""
    shape: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
    dimensions = {dimension % len(shape) for dimension in getattr(node, "_saved_dim", ())} if shape else set()
    return len(shape) > 0 and shape[0] > 1 and (node.name() == "SumBackward0" or 0 in dimensions)


def _is_of_samples(node: Any) -> bool:
    """Whether what a node sums is computed from samples element by element.

    Several losses that are stacked, means over samples, and terms with constant weights, which may add up to 1, are
    not.
    """
    pending: list[Any] = [parent for parent, _ in node.next_functions if parent is not None]
    for _ in range(_MAX_NODES):
        if not pending:
            return True
        below = pending.pop()
        kind = below.name()
        weighted = any(parent is None for parent, _ in below.next_functions)
        if kind.startswith(_NOT_OF_SAMPLES) or (kind in ("MulBackward0", "DivBackward0") and weighted):
            return False
        if kind in _ELEMENTWISE:
            pending += [parent for parent, _ in below.next_functions if parent is not None]
    return True
