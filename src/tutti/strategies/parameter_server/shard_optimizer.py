"""Optimiser of one shard: the user's optimiser class and parameter groups, over the segments that one server holds."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.replica import Bucket
from tutti.replica.buckets import Slot, like
from tutti.replica.optimizer_step import EvaluatedClosure
from tutti.replica.samples import ADD_UP
from tutti.replica.state import in_order_of
from tutti.strategies.parameter_server.consistency import Consistency
from tutti.strategies.parameter_server.ledger import Update
from tutti.strategies.parameter_server.optimizer_options import OptimizerOptions
from tutti.strategies.parameter_server.shards import ParameterShard, ShardSegment
from tutti.strategies.parameter_server.step_undo import StepUndo

MeanKernel = Callable[[np.ndarray, np.ndarray, int, int, np.ndarray, float], None]
"""Writes a weighted mean in one pass: source addresses, target addresses, first and last element, weights, divisor."""

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop,
)  # fmt: skip
"""Optimisers that update each element independently of the others: for them a parameter may be cut anywhere."""


def needs_whole_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimiser may use more than one element of a parameter at once, norms of rows for example.

    Only torch's own elementwise optimisers are known not to.
    """
    return type(optimizer) not in ELEMENTWISE


def reject_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `ConfigError` if `optimizer.step` was given a closure that is not evaluated yet. A step pre-hook."""
    if any(callable(each) and not isinstance(each, EvaluatedClosure) for each in (*args[1:], *kwargs.values())):
        raise ConfigError(
            f"{type(optimizer).__name__}.step was given a closure, which it may call several times within the step: "
            "servers take the steps, and have no loss to call. Call backward yourself, then step()."
        )


def clip_factor(max_norm: float, norm: float) -> float:
    """Return the factor by which a gradient of that norm is scaled, as in `torch.nn.utils.clip_grad_norm_`."""
    return min(1.0, max_norm / (norm + 1e-6))


def update_scales(
    updates: Sequence[Update], shard: ParameterShard, consistency: Consistency, num_workers: int, clip: float | None
) -> list[float]:
    """Return the factor of each update: for its staleness and, if each is clipped by itself, for its norm."""
    if not shard.is_trained:
        return [1.0] * len(updates)  # Running means and variances must not shrink.
    factors = [1.0 if clip is None else clip_factor(clip, update.norm) for update in updates]
    return [
        (1.0 if update.is_synchronous else consistency.scale(update.staleness, num_workers)) * factor
        for update, factor in zip(updates, factors, strict=True)
    ]


class ShardOptimizer:
    """Takes the optimiser's steps on the values of one shard.

    A step has two halves, so that the norm of the mean can be asked for between them: `combine` makes the mean of the
    updates, `step` applies it. One thread or lock holder at a time.
    """

    def __init__(self, shard: ParameterShard, bucket: Bucket, optimizer: Optimizer, values: Tensor) -> None:
        """Copy the optimiser for a shard, with its present state.

        Args:
            shard: the shard.
            bucket: the bucket that it is cut from.
            optimizer: the user's optimiser, which stays as it is.
            values: the parameters of the shard, flat; steps change them in place.
        """
        self.shard = shard
        self.values = values
        self.mean_kernel: MeanKernel | None = None
        """A kernel for means, where one is available; torch operations otherwise."""
        self._slots = [bucket.slots[segment.slot_index] for segment in shard.segments]
        self._parameters = self._segment_views(values)
        # The mean of half-precision gradients is summed in float32: in 16 bits, small updates would be rounded away.
        half_precision = values.dtype in (torch.float16, torch.bfloat16)
        self._sum = torch.zeros_like(values, dtype=torch.float32 if half_precision else values.dtype)
        self._mean = self._sum
        """The mean that `combine` made last: `_sum`, or the memory of an update that was alone."""
        self._cached_views: tuple[int, list[Tensor]] = (0, [])
        """Views of the segments of the last gradient, and the address of its memory."""
        self._current_options = np.empty(0)
        """The options that the optimiser has now; empty before the first step."""
        self._before: StepUndo | None = None
        """What the values and the state were before the last step, where that is kept."""
        if shard.is_trained:
            self._options = OptimizerOptions(optimizer)
            self._optimizer = _copy_for(optimizer, self._slots, self._parameters)
            self.load_state({slot.name: optimizer.state.get(slot.tensor, {}) for slot in self._slots})

    def combine(self, updates: Sequence[Update], scales: Sequence[float]) -> np.ndarray:
        """Make the mean of scaled updates, weighted by samples; or their sum, where the loss is one.

        Returns:
            One flag per segment: whether any update has a gradient for it.
        """
        # One update that needs no scaling is its own mean: no pass over memory at all.
        if len(updates) == 1 and scales[0] == 1.0 and updates[0].values.dtype == self.values.dtype:
            self._mean = updates[0].values
            return np.asarray(updates[0].has_grad)
        self._mean = self._sum
        weights = [update.weight for update in updates]
        # Equal weights divide by their number: multiplying by them first would round differently from a plain mean.
        equal = all(weight == weights[0] for weight in weights)
        divisor = float(len(weights)) if equal else sum(weights)
        if weights[0] == ADD_UP and self.shard.is_trained:
            divisor = 1.0  # Of the workers that are left: a lost one has no part in the sum.
        has_grad = np.zeros(len(self.shard.segments), dtype=bool)
        factors = [scale if equal else scale * weight for scale, weight in zip(scales, weights, strict=True)]
        # An update of factor 0 is left out, not multiplied: it may hold NaN.
        counted = [(update, factor) for update, factor in zip(updates, factors, strict=True) if factor]
        for update, _ in counted:
            has_grad |= update.has_grad
        if not counted:
            self._sum.zero_()
        elif self.mean_kernel is not None:
            sources = np.array([update.values.data_ptr() for update, _ in counted])
            targets, numel = np.array([self._sum.data_ptr()]), self._sum.numel()
            self.mean_kernel(sources, targets, 0, numel, np.array([factor for _, factor in counted]), divisor)
        else:
            torch.mul(counted[0][0].values, counted[0][1], out=self._sum)
            for update, factor in counted[1:]:
                self._sum.add_(update.values, alpha=factor)
            self._sum.div_(divisor)
        return has_grad

    def square_norm(self, has_grad: np.ndarray) -> float:
        """Return the squared norm of the mean, over the segments that have a gradient; 0 for running statistics."""
        if not self.shard.is_trained:
            return 0.0
        segments = [segment for segment, flag in zip(self.shard.segments, has_grad, strict=True) if flag]
        return sum(float(self._mean[segment.shard_range].double().square().sum()) for segment in segments)

    def step(self, has_grad: np.ndarray, options: np.ndarray, factor: float = 1.0) -> None:
        """Take one optimiser step with the mean that `combine` made.

        Args:
            has_grad: what `combine` returned; segments without a gradient are left alone.
            options: numeric options of the optimiser, as a worker pushed them.
            factor: what the mean is scaled by.
        """
        if self._before is not None:
            self._before.keep(self.values, self._states())
        if not self.shard.is_trained:
            self.values.copy_(self._mean)  # Running statistics: the mean over workers is the new value.
            return
        if factor != 1.0:
            # Not in place: the mean may be a worker's own memory (a single update in `combine`).
            torch.mul(self._mean, factor, out=self._sum)
            self._mean = self._sum
        gradients = self._gradient_views(self._mean)
        # Options change only when a scheduler steps; to write them costs more than to compare them.
        if not np.array_equal(options, self._current_options):
            self._options.write(self._optimizer.param_groups, options)
            self._current_options = options
        for parameter, gradient, flag in zip(self._parameters, gradients, has_grad, strict=True):
            # Without a gradient torch's optimisers skip a parameter, momentum included, as on one machine.
            parameter.grad = gradient if flag else None
        self._optimizer.step()

    def take_mean(self, mean: Tensor) -> None:
        """Let the next `step` apply a mean that another server has made of the same shard."""
        self._mean = mean

    @property
    def mean(self) -> Tensor:
        """The mean that `combine` made last. It changes with the next one."""
        return self._mean

    def keep_previous(self) -> None:
        """Keep what the values and the state were before each step, from now on."""
        self._before = StepUndo()

    def copy_before_step(self) -> tuple[Tensor, list[tuple[str, ShardSegment, dict[str, Any]]]]:
        """Return copies of the values and of the state (`copy_states`) as they were before the last step."""
        assert self._before is not None
        values, states = self._before.copies()
        return values, [
            (slot.name, segment, state)
            for slot, segment, state in zip(self._slots, self.shard.segments, states, strict=False)
        ]

    def segment_state(self, position: int) -> dict[str, Any]:
        """Return the optimiser's state of one segment: the dictionary that it uses, not a copy."""
        return self._optimizer.state[self._parameters[position]] if self.shard.is_trained else {}

    def _states(self) -> list[dict[str, Any]]:
        """Return the optimiser's state of each segment, not copies; nothing for running statistics."""
        if not self.shard.is_trained:
            return []
        return [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]

    def copy_states(self) -> Iterator[tuple[str, ShardSegment, dict[str, Any]]]:
        """Yield the parameter's name and a copy of the optimiser's state for every segment."""
        if self.shard.is_trained:
            for slot, segment, parameter in zip(self._slots, self.shard.segments, self._parameters, strict=True):
                yield slot.name, segment, copy.deepcopy(self._optimizer.state.get(parameter, {}))

    def load_state(self, states: dict[str, dict[str, Any]]) -> None:
        """Replace the optimiser's state by the segments' part of the state of whole parameters, by name."""
        if not self.shard.is_trained:
            return
        # A defaultdict, as torch's own: optimisers make the state of a parameter in its first step.
        self._optimizer.state = defaultdict(dict)
        for slot, segment, parameter in zip(self._slots, self.shard.segments, self._parameters, strict=True):
            if state := states.get(slot.name):
                self._optimizer.state[parameter] = {
                    key: _copy_segment(value, segment, slot) for key, value in state.items()
                }

    def _gradient_views(self, flat: Tensor) -> list[Tensor]:
        """Return the segments of a gradient, in the dtype of the parameters."""
        if flat.dtype != self.values.dtype:
            flat = flat.to(self.values.dtype)
        # The cached views keep their memory alive, so an equal address is the same memory.
        if flat.data_ptr() != self._cached_views[0]:
            self._cached_views = flat.data_ptr(), self._segment_views(flat)
        return self._cached_views[1]

    def _segment_views(self, flat: Tensor) -> list[Tensor]:
        """Return views of the segments: whole parameters in their shape and strides, others flat."""
        views = [flat[segment.shard_range] for segment in self.shard.segments]
        return [
            like(view, slot.tensor) if segment.is_whole else view
            for view, segment, slot in zip(views, self.shard.segments, self._slots, strict=True)
        ]


def _copy_segment(value: Any, segment: ShardSegment, slot: Slot) -> Any:
    """Return a copy of a segment's part of a value that is kept for a whole parameter."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.detach().to("cpu", copy=True)
    # A step count, for example, has no element per parameter element: every segment gets the whole.
    if segment.is_whole or value.shape != slot.tensor.shape:
        return in_order_of(slot.tensor, value)
    # Segments count elements in memory order, which `like` gives the flat copy.
    flat = torch.empty(value.numel(), dtype=value.dtype)
    like(flat, slot.tensor).copy_(value)
    return flat[segment.start : segment.stop].clone()


def _copy_for(optimizer: Optimizer, slots: Sequence[Slot], parameters: Sequence[Tensor]) -> Optimizer:
    """Return an optimiser of the same class with the same groups, over `parameters` in place of those of `slots`."""
    # A shallow copy: groups and state are replaced below, and are the copy's own.
    copied = copy.copy(optimizer)
    # Optimizer.__getstate__ leaves attributes of subclasses out: copy those too. The user's hooks are not copied, nor
    # `step`, which a scheduler replaces on the instance to count calls: the copy's steps are not the user's.
    for name, value in vars(optimizer).items():
        if name not in vars(copied) and name != "step":
            setattr(copied, name, value)
    replacements = {id(slot.tensor): parameter for slot, parameter in zip(slots, parameters, strict=True)}
    copied.param_groups = [
        {**group, "params": [replacements[id(p)] for p in group["params"] if id(p) in replacements]}
        for group in optimizer.param_groups
    ]
    copied.state = defaultdict(dict)
    return copied


def merge_segment_states(
    segment_states: Sequence[tuple[str, ShardSegment, dict[str, Any]]], slots: dict[str, Slot]
) -> dict[str, Any]:
    """Put the optimiser's state of whole parameters together from that of their segments.

    Args:
        segment_states: a parameter's name, the segment, and its state, for every segment.
        slots: the slot of each parameter, by name.

    Returns:
        The state of each parameter, by name.
    """
    merged: dict[str, dict[str, Any]] = {}
    for name, segment, state in segment_states:
        tensor = slots[name].tensor
        whole = merged.setdefault(name, {})
        for key, value in state.items():
            if segment.is_whole or not isinstance(value, Tensor) or value.shape != (segment.stop - segment.start,):
                # A whole tensor, or state that is equal in all segments. A copy, because servers keep changing theirs.
                whole[key] = value.clone() if isinstance(value, Tensor) else value
                continue
            if key not in whole:
                whole[key] = torch.zeros(tensor.numel(), dtype=value.dtype)
            whole[key][segment.start : segment.stop] = value
    for name, whole in merged.items():
        for key, value in whole.items():
            # Merged in memory order: back to the parameter's shape.
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == slots[name].tensor.numel():
                whole[key] = like(value, slots[name].tensor).clone()
    return merged
