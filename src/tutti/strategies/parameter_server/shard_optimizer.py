"""The optimiser of a piece: the user's class with the user's groups, on what one server holds."""

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
from tutti.strategies.parameter_server.consistency import Consistency
from tutti.strategies.parameter_server.ledger import Update
from tutti.strategies.parameter_server.pieces import Piece, Share

Kernel = Callable[[np.ndarray, np.ndarray, int, int, np.ndarray, float], None]

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop,
)  # fmt: skip
"""Optimisers that do to each element what they would do if it were alone: for them parameters may be cut anywhere."""


def keeps_whole(optimizer: Optimizer) -> bool:
    """Whether an optimiser may need a parameter whole: norms of rows, say. Known ones do not."""
    return type(optimizer) not in ELEMENTWISE


def refusal(optimizer: Optimizer) -> str | None:
    """Why an optimiser cannot run on servers, if it cannot."""
    if isinstance(optimizer, optim.LBFGS):
        return (
            "LBFGS needs the whole model at once and calls the loss again in every step, but each server holds a part "
            "of it. Use SGD, Adam or another that takes gradients as they are, or AllReduce."
        )
    return None


def clip_factor(most: float, norm: float) -> float:
    """What a gradient of that norm is multiplied by, as `torch.nn.utils.clip_grad_norm_` has it."""
    return min(1.0, most / (norm + 1e-6))


Choice = tuple[int, str, int | None, type]
"""A number among an optimiser's options: of which group, which, where in a tuple, and what it is."""


class Options:
    """The numbers among an optimiser's options, which schedulers change: said as one array."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._choices: list[Choice] = []
        for number, group in enumerate(optimizer.param_groups):
            for key in sorted(group.keys() - {"params"}):
                value = group[key]
                if isinstance(value, tuple | list):
                    self._choices += [(number, key, place, type(each)) for place, each in enumerate(value)]
                elif isinstance(value, int | float | Tensor):
                    self._choices.append((number, key, None, float if isinstance(value, Tensor) else type(value)))

    def __len__(self) -> int:
        return len(self._choices)

    def now(self) -> np.ndarray:
        """As they are now."""
        groups = self._optimizer.param_groups
        values = [
            groups[number][key] if place is None else groups[number][key][place]
            for number, key, place, _ in self._choices
        ]
        return np.array(values, dtype=np.float64)

    def put(self, groups: list[dict[str, Any]], values: np.ndarray) -> None:
        """Give groups of an optimiser like this one these options."""
        for (number, key, place, kind), value in zip(self._choices, values.tolist(), strict=True):
            if number >= len(groups):
                continue
            if place is None:
                groups[number][key] = kind(value)
            else:
                old = groups[number][key]
                groups[number][key] = type(old)((*old[:place], kind(value), *old[place + 1 :]))


def scales_of(updates: Sequence[Update], piece: Piece, rule: Consistency, clip: float | None) -> list[float]:
    """What each update is multiplied by: for its staleness, and for its norm if each is clipped by itself."""
    if not piece.trained:
        return [1.0] * len(updates)  # Means and variances are not to shrink.
    factors = [1.0 if clip is None else clip_factor(clip, update.norm) for update in updates]
    return [rule.scale(update.staleness) * factor for update, factor in zip(updates, factors, strict=True)]


class Stepper:
    """Takes the optimiser's steps on the values of one piece."""

    def __init__(self, piece: Piece, bucket: Bucket, optimizer: Optimizer, values: Tensor) -> None:
        """`values` is the piece's memory: the parameters themselves, which steps change."""
        self.piece = piece
        self.values = values
        self.kernel: Kernel | None = None
        """Makes means in one pass, where it is at hand."""
        self._slots = [bucket.slots[share.slot] for share in piece.shares]
        self._parts = [_part(values, share, slot) for share, slot in zip(piece.shares, self._slots, strict=True)]
        self._wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
        self._sum = torch.zeros_like(values, dtype=self._wide)
        self._mean = self._sum
        self._viewed: tuple[int, list[Tensor]] = (0, [])
        self._put = np.empty(0)
        if piece.trained:
            self._options = Options(optimizer)
            self._optimizer = _like_it(optimizer, self._slots, self._parts)
            self.load({slot.name: optimizer.state.get(slot.tensor, {}) for slot in self._slots})

    def combine(self, updates: Sequence[Update], scales: Sequence[float]) -> np.ndarray:
        """Make the mean of updates, weighted by samples, each scaled; which shares have a gradient."""
        if len(updates) == 1 and scales[0] == 1.0 and updates[0].values.dtype == self.values.dtype:
            self._mean = updates[0].values
            return np.asarray(updates[0].marks)
        self._mean = self._sum
        weights = [update.weight for update in updates]
        equal = all(weight == weights[0] for weight in weights)
        divisor = float(len(weights)) if equal else sum(weights)
        marks = np.zeros(len(self.piece.shares), dtype=bool)
        factors = [scale if equal else scale * weight for scale, weight in zip(scales, weights, strict=True)]
        counting = [(update, factor) for update, factor in zip(updates, factors, strict=True) if factor]
        for update, _ in counting:
            marks |= update.marks
        if not counting:
            self._sum.zero_()
        elif self.kernel is not None:
            sources = np.array([update.values.data_ptr() for update, _ in counting])
            targets, numel = np.array([self._sum.data_ptr()]), self._sum.numel()
            self.kernel(sources, targets, 0, numel, np.array([factor for _, factor in counting]), divisor)
        else:
            torch.mul(counting[0][0].values, counting[0][1], out=self._sum)
            for update, factor in counting[1:]:
                self._sum.add_(update.values, alpha=factor)
            self._sum.div_(divisor)
        return marks

    def square_norm(self, marks: np.ndarray) -> float:
        """Of the mean, as far as it is a gradient."""
        if not self.piece.trained:
            return 0.0
        shares = [share for share, mark in zip(self.piece.shares, marks, strict=True) if mark]
        parts = [self._mean[share.offset : share.offset + share.stop - share.start] for share in shares]
        return sum(float(part.double().square().sum()) for part in parts)

    def step(self, marks: np.ndarray, options: np.ndarray, factor: float = 1.0) -> None:
        """Step by the mean, times `factor`, with these options."""
        if not self.piece.trained:
            self.values.copy_(self._mean)
            return
        if factor != 1.0:
            torch.mul(self._mean, factor, out=self._sum)
            self._mean = self._sum
        gradients = self._views_of(self._mean)
        if not np.array_equal(options, self._put):
            self._options.put(self._optimizer.param_groups, options)
            self._put = options
        for part, gradient, mark in zip(self._parts, gradients, marks, strict=True):
            part.grad = gradient if mark else None
        self._optimizer.step()

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """A gradient's shares, in the dtype of the parameters."""
        if flat.dtype != self.values.dtype:
            flat = flat.to(self.values.dtype)
        if flat.data_ptr() != self._viewed[0]:
            views = [_part(flat, share, slot) for share, slot in zip(self.piece.shares, self._slots, strict=True)]
            self._viewed = flat.data_ptr(), views
        return self._viewed[1]

    def state_of(self, share: int) -> dict[str, Any]:
        """What the optimiser remembers of one share: the very dictionary that it uses."""
        return self._optimizer.state[self._parts[share]] if self.piece.trained else {}

    def state(self) -> Iterator[tuple[str, Share, dict[str, Any]]]:
        """What the optimiser remembers of every share, by parameter: copies, which steps leave alone."""
        if self.piece.trained:
            for slot, share, part in zip(self._slots, self.piece.shares, self._parts, strict=True):
                yield slot.name, share, copy.deepcopy(self._optimizer.state.get(part, {}))

    def load(self, states: dict[str, dict[str, Any]]) -> None:
        """Remember what belongs to these shares of what is remembered of whole parameters."""
        if not self.piece.trained:
            return
        self._optimizer.state = defaultdict(dict)
        for slot, share, part in zip(self._slots, self.piece.shares, self._parts, strict=True):
            if state := states.get(slot.name):
                self._optimizer.state[part] = {key: _share_of(value, share, slot) for key, value in state.items()}


def _part(flat: Tensor, share: Share, slot: Slot) -> Tensor:
    part = flat[share.offset : share.offset + share.stop - share.start]
    return like(part, slot.tensor) if share.whole else part


def _share_of(value: Any, share: Share, slot: Slot) -> Any:
    """A share's own copy of what is remembered of a whole parameter."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.detach().to("cpu", copy=True)
    if share.whole or value.shape != slot.tensor.shape:
        return value
    flat = torch.empty(value.numel(), dtype=value.dtype)
    like(flat, slot.tensor).copy_(value)
    return flat[share.start : share.stop].clone()


def _like_it(optimizer: Optimizer, slots: Sequence[Slot], parts: Sequence[Tensor]) -> Optimizer:
    """An optimiser of the same class with the same groups, on `parts`."""
    made = copy.copy(optimizer)
    # What else it has, but for what belongs to the one it was copied from: hooks, and a scheduler's eye on its steps.
    for name, value in vars(optimizer).items():
        if name not in vars(made) and name != "step":
            setattr(made, name, value)
    places = {id(slot.tensor): part for slot, part in zip(slots, parts, strict=True)}
    made.param_groups = [
        {**group, "params": [places[id(p)] for p in group["params"] if id(p) in places]}
        for group in optimizer.param_groups
    ]
    made.state = defaultdict(dict)
    return made


def whole_states(shares: Sequence[tuple[str, Share, dict[str, Any]]], slots: dict[str, Slot]) -> dict[str, Any]:
    """What is remembered of whole parameters, put together from what is remembered of shares."""
    found: dict[str, dict[str, Any]] = {}
    for name, share, state in shares:
        tensor = slots[name].tensor
        whole = found.setdefault(name, {})
        for key, value in state.items():
            if share.whole or not isinstance(value, Tensor) or value.shape != (share.stop - share.start,):
                whole[key] = value.clone() if isinstance(value, Tensor) else value  # Servers go on with theirs.
                continue
            if key not in whole:
                whole[key] = torch.zeros(tensor.numel(), dtype=value.dtype)
            whole[key][share.start : share.stop] = value
    for name, whole in found.items():
        for key, value in whole.items():
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == slots[name].tensor.numel():
                whole[key] = like(value, slots[name].tensor).clone()
    return found


def refuse_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an optimiser's step was given a closure; a hook that comes before it."""
    if any(callable(given) for given in (*args[1:], *kwargs.values())):
        raise ConfigError(
            "optimizer.step was given a closure, which calls the loss again within the step: servers take the steps, "
            "and have no loss to call. Call backward yourself, then step()."
        )
