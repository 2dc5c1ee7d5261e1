"""Metrics of an evaluation, exact over all ranks: each rank adds up its part, and the parts of all give the value.

A `ValidationMetric` keeps what it has seen as tensors and numbers (`state`). After the last batch the states of all
ranks are gathered, and every rank computes the value from all of them, in the order of ranks. So every sample counts
once, and all ranks have the same bits.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from tutti.errors import ConfigError, UnknownName

Metrics = Any
"""A metric, a sequence of metrics, or metrics by name. A metric is "accuracy", "f1", a torchmetrics metric, or a
function of (outputs, targets) of the whole validation set."""


class ValidationMetric(ABC):
    """A value of a whole evaluation, from the outputs of the model and the targets."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was seen."""

    @abstractmethod
    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""

    @abstractmethod
    def state(self) -> Any:
        """Return what was seen: tensors, numbers, and lists, tuples and dicts of them."""

    @abstractmethod
    def value(self, states: Sequence[Any]) -> Any:
        """Return the value over the states of all ranks."""


class ValidationLoss(ValidationMetric):
    """The mean loss of samples."""

    def __init__(self, loss: Callable[[Any, Any], Tensor], *, is_sum: bool = False) -> None:
        """`is_sum`: whether the loss of a batch is the sum over its samples, and not their mean."""
        self._loss, self._is_sum = loss, is_sum
        self.reset()

    def reset(self) -> None:
        self._total, self._num_samples = 0.0, 0

    def update(self, outputs: Any, targets: Any) -> None:
        num_samples = num_rows(targets)
        # In float64: the batches of ranks are of different sizes, and their sum must not depend on that.
        self._total += float(self._loss(outputs, targets)) * (1 if self._is_sum else num_samples)
        self._num_samples += num_samples

    def state(self) -> Any:
        return [self._total, self._num_samples]

    def value(self, states: Sequence[Any]) -> Any:
        total, num_samples = (sum(each) for each in zip(*states, strict=True))
        return total / num_samples if num_samples else float("nan")


class Accuracy(ValidationMetric):
    """The fraction of targets that have the highest score."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._right, self._num_targets = 0, 0

    def update(self, outputs: Any, targets: Any) -> None:
        predicted = predicted_classes("accuracy", outputs, targets)
        self._right += int((predicted == targets).sum())
        self._num_targets += targets.numel()

    def state(self) -> Any:
        return [self._right, self._num_targets]

    def value(self, states: Sequence[Any]) -> Any:
        right, num_targets = (sum(each) for each in zip(*states, strict=True))
        return right / num_targets if num_targets else float("nan")


class F1(ValidationMetric):
    """The mean over classes of 2 TP / (2 TP + FP + FN): macro F1, over the classes that were predicted or targets."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._counts = torch.zeros(3, 0, dtype=torch.int64)  # Hits, predictions and targets of each class.

    def update(self, outputs: Any, targets: Any) -> None:
        predicted = predicted_classes("f1", outputs, targets).flatten().cpu()
        targets = targets.flatten().cpu()
        classes = (predicted[predicted == targets], predicted, targets)
        self._counts = _added([self._counts, _padded([torch.bincount(each) for each in classes])])

    def state(self) -> Any:
        return self._counts

    def value(self, states: Sequence[Any]) -> Any:
        hits, predictions, targets = _added(states).double()
        total = predictions + targets  # 2 TP + FP + FN
        seen = total > 0
        return float((2 * hits[seen] / total[seen]).mean()) if seen.any() else float("nan")


class TorchMetric(ValidationMetric):
    """A metric of the package torchmetrics, whose states are reduced as it says itself."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def reset(self) -> None:
        self._metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        self._metric.to(outputs.device if isinstance(outputs, Tensor) else "cpu")
        self._metric.update(outputs, targets)

    def state(self) -> Any:
        tensors: list[Tensor] = []
        if self._metric.update_called:  # One that has seen nothing has nothing that could be reduced.
            # The tensors that it would send, in the order in which it would.
            self._metric.sync(dist_sync_fn=partial(_record, tensors), distributed_available=lambda: True)
            self._metric.unsync()
        return tensors

    def value(self, states: Sequence[Any]) -> Any:
        seen = [state for state in states if state]
        if not seen:
            return float("nan")
        sent = iter(zip(*seen, strict=True))
        metric = self._metric
        metric.dist_sync_fn = lambda tensor, group=None: [other.to(tensor.device) for other in next(sent)]
        metric.distributed_available_fn = lambda: True
        try:
            with warnings.catch_warnings():
                if not metric.update_called:  # This rank had no sample: `compute` warns, and has the others' states.
                    warnings.simplefilter("ignore", UserWarning)
                return metric.compute()
        finally:
            metric.dist_sync_fn, metric.distributed_available_fn = None, lambda: False


class WholeSet(ValidationMetric):
    """Any function of the outputs and the targets of the whole validation set."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function
        self.reset()

    def reset(self) -> None:
        self._batches: list[Any] = []

    def update(self, outputs: Any, targets: Any) -> None:
        self._batches.append(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), [outputs, targets]))

    def state(self) -> Any:
        return _concatenated(self._batches) if self._batches else None

    def value(self, states: Sequence[Any]) -> Any:
        seen = [state for state in states if state is not None]
        return self._function(*_concatenated(seen)) if seen else float("nan")


NAMED: dict[str, Callable[[], ValidationMetric]] = {"accuracy": Accuracy, "f1": F1}
"""Metrics by name."""


def make_metrics(metrics: Metrics) -> dict[str, ValidationMetric]:
    """Return the metrics by name. Raises `ConfigError` with everything that is wrong with them."""
    found: dict[str, ValidationMetric] = {}
    mistakes: list[str] = []
    for name, metric in _named(metrics):
        try:
            made = _made(name, metric)
        except ConfigError as error:
            mistakes.append(str(error))
            continue
        if taken := sorted(made.keys() & {*found, "loss"}):
            mistakes.append(f"two metrics are called '{taken[0]}': give them names, metrics={{'name': metric}}.")
        found |= made
    if mistakes:
        raise ConfigError(" ".join(mistakes))
    return found


def plain(value: Any) -> Any:
    """Return a metric's value as a number, or as lists and dicts of numbers."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value


def num_rows(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor."""
    sizes: list[int] = []
    tree_map_only(Tensor, lambda tensor: sizes.append(len(tensor) if tensor.dim() else 1), batch)
    return sizes[0] if sizes else len(batch)


def predicted_classes(name: str, outputs: Any, targets: Any) -> Tensor:
    """Return the class with the highest score of each target. Classes are the last dimension, or the one after the
    first, as for `torch.nn.CrossEntropyLoss`.
    """
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and not targets.is_floating_point():
        if outputs.shape[:-1] == targets.shape:
            return outputs.argmax(-1)
        if outputs.dim() > 1 and (outputs.shape[0], *outputs.shape[2:]) == targets.shape:
            return outputs.argmax(1)
    shapes = [
        f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
        for each in (outputs, targets)
    ]
    raise ConfigError(
        f"the metric '{name}' needs a score per class and integer targets, got outputs {shapes[0]} and targets "
        f"{shapes[1]}. For other outputs, give a torchmetrics metric, or a function of (outputs, targets)."
    )


def _named(metrics: Metrics) -> list[tuple[str | None, Any]]:
    if isinstance(metrics, Mapping) and not _is_torchmetrics(metrics):
        return list(metrics.items())
    if isinstance(metrics, list | tuple | set | frozenset):
        return [(None, metric) for metric in metrics]
    return [] if metrics is None else [(None, metrics)]


def _made(name: str | None, metric: Any) -> dict[str, ValidationMetric]:
    if isinstance(metric, str):
        if metric not in NAMED:
            raise UnknownName("metric", metric, NAMED, ["A torchmetrics metric or a function is given as an object"])
        return {name or metric: NAMED[metric]()}
    if _is_torchmetrics(metric):
        if hasattr(metric, "items"):  # A collection of metrics.
            prefix = f"{name}." if name else ""
            return {f"{prefix}{key}": TorchMetric(each.clone()) for key, each in metric.items()}
        return {name or type(metric).__name__: TorchMetric(metric.clone())}
    if not callable(metric) or isinstance(metric, type):
        raise ConfigError(
            f"a metric is {' or '.join(map(repr, NAMED))}, a torchmetrics metric, or a function of (outputs, targets), "
            f"got {metric!r}."
        )
    own_name = getattr(metric, "__name__", type(metric).__name__)
    return {name or ("metric" if own_name == "<lambda>" else own_name): WholeSet(metric)}


def _is_torchmetrics(metric: Any) -> bool:
    """Whether this is a metric of torchmetrics, or a collection of them; that package need not be there."""
    return hasattr(metric, "update") and hasattr(metric, "compute") and hasattr(metric, "clone")


def _record(tensors: list[Tensor], tensor: Tensor, group: Any = None) -> list[Tensor]:
    tensors.append(tensor.detach().clone())
    return [tensor]


def _concatenated(parts: Sequence[Any]) -> Any:
    """Return batches as one, tensor by tensor; what is no tensor is put into a list."""
    return tree_map(lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else list(each), *parts)


def _padded(counts: Sequence[Tensor]) -> Tensor:
    size = max(len(each) for each in counts)
    return torch.stack([torch.nn.functional.pad(each, (0, size - len(each))) for each in counts])


def _added(counts: Sequence[Tensor]) -> Tensor:
    """Add up counts of classes, of which some may have more than others."""
    size = max(each.shape[1] for each in counts)
    return torch.stack([torch.nn.functional.pad(each, (0, size - each.shape[1])) for each in counts]).sum(0)
