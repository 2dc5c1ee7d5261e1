"""`Evaluation`: the loss and the metrics of a model on a validation set, each sample once over all ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tutti.data.shard import shard
from tutti.fit.metrics import ValidationMetric, plain
from tutti.job import Job


class Evaluation:
    """Evaluates a model on a validation set."""

    def __init__(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        metrics: Mapping[str, ValidationMetric],
        to_device: Callable[[Any], Any],
    ) -> None:
        """`metrics`: by name, the loss among them."""
        self._model, self._loader, self._metrics, self._to_device = model, loader, metrics, to_device

    def together(self, job: Job) -> dict[str, Any]:
        """Evaluate with all other ranks, each a part; all get the same values. Collective.

        If ranks of an elastic run are lost meanwhile, the others evaluate all again.
        """
        splits = not isinstance(self._loader.dataset, IterableDataset)
        while True:
            place = [job.world.rank, job.world.size]
            self._see(shard(self._loader, split_batches=splits, world=job.world))
            parts = job.gather([place, {name: metric.state() for name, metric in self._metrics.items()}])
            # Of ranks that have changed meanwhile some parts are missing, or there twice.
            if [part and part[0] for part in parts] == [[rank, len(parts)] for rank in range(len(parts))]:
                return self._values([states for _, states in parts])

    def alone(self) -> dict[str, Any]:
        """Evaluate on this rank."""
        self._see(self._loader)
        return self._values([{name: metric.state() for name, metric in self._metrics.items()}])

    def _see(self, batches: Any) -> None:
        for metric in self._metrics.values():
            metric.reset()
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                for batch in batches:
                    inputs, targets = self._to_device(batch)
                    outputs = self._model(inputs)
                    for metric in self._metrics.values():
                        metric.update(outputs, targets)
        finally:
            self._model.train(was_training)

    def _values(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: plain(metric.value([state[name] for state in states])) for name, metric in self._metrics.items()}
