"""`History`: what a call of `tutti.fit` found in every epoch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, overload

from torch import nn

from tutti.errors import UnknownName


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One pass over the training data."""

    epoch: int
    """Its number, from 1."""
    steps: int
    """Steps of the whole training at its end."""
    loss: float
    """Mean training loss of its samples; in an epoch that was stopped, of those since it was continued. Where ranks
    are apart (`Strategy.synchronous` is False), of this rank's samples until the training ends, and in an elastic run
    also afterwards."""
    validation_loss: float | None
    """Mean loss of the validation set at its end; None without one, and where no rank evaluated."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the validation set, by name."""
    seconds: float
    """Time of its training and its evaluation."""
    samples_per_s: float
    """Samples of all ranks per second of training."""

    def values(self) -> dict[str, Any]:
        """Return all values by name: what is logged, printed and plotted."""
        return {
            "loss": self.loss,
            **({} if self.validation_loss is None else {"validation_loss": self.validation_loss}),
            **self.metrics,
            "seconds": self.seconds,
            "samples_per_s": self.samples_per_s,
        }


class History(Sequence[EpochRecord]):
    """The epochs of a training: a sequence of `EpochRecord`, printed as a table.

    `history["accuracy"]` is a list with the value of every epoch; `history.names` has the names.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model
        """The trained model."""
        self.epochs: list[EpochRecord] = []

    def __len__(self) -> int:
        return len(self.epochs)

    @overload
    def __getitem__(self, index: int) -> EpochRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[EpochRecord]: ...
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...
    def __getitem__(self, index: int | slice | str) -> Any:
        if not isinstance(index, str):
            return self.epochs[index]
        if index not in self.names:
            raise UnknownName("value of this history", index, self.names)
        return [epoch.values().get(index) for epoch in self.epochs]

    @property
    def names(self) -> list[str]:
        """Names of the values: the loss, those of the validation, the seconds, and samples per second."""
        return list(dict.fromkeys(name for epoch in self.epochs for name in epoch.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs, for a checkpoint."""
        return {"epochs": [asdict(epoch) for epoch in self.epochs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over epochs that `state_dict` returned."""
        self.epochs = [EpochRecord(**epoch) for epoch in state["epochs"]]

    def __str__(self) -> str:
        if not self.epochs:
            return "no epoch"
        rows = [["epoch", *(name.replace("_", " ") for name in self.names)]]
        for epoch in self.epochs:
            values = epoch.values()
            rows.append([str(epoch.epoch), *(format_value(name, values.get(name)) for name in self.names)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    __repr__ = __str__

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw losses and metrics over epochs; return the figure. Needs matplotlib.

        Args:
            path: a file to write the figure to as well.
        """
        from matplotlib.figure import Figure  # No state of pyplot's, whose backend belongs to the user.

        left_out = {"seconds", "samples_per_s"}
        names = [name for name in self.names if name not in left_out and _is_number(self[name])]
        losses = [name for name in names if name.endswith("loss")]
        panels = [panel for panel in (losses, [name for name in names if name not in losses]) if panel]
        figure = Figure(figsize=(5 * len(panels), 3.5), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0] if panels else []
        for each, panel in zip(axes, panels, strict=True):
            for name in panel:
                each.plot([epoch.epoch for epoch in self.epochs], self[name], marker="o", label=name.replace("_", " "))
            each.set_xlabel("epoch")
            each.legend(frameon=False)
        if path is not None:
            figure.savefig(path, dpi=130)
        return figure


def format_value(name: str, value: Any) -> str:
    """Return a value as it is shown in tables and progress lines."""
    if value is None or (isinstance(value, float) and isnan(value)):
        return "-"
    if name == "samples_per_s":
        return f"{value:,.0f}"
    if name == "seconds":
        return f"{value:.1f}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _is_number(values: Sequence[Any]) -> bool:
    return any(isinstance(value, int | float) for value in values) and not any(
        isinstance(value, list | dict | str) for value in values
    )
