"""Progress reports of a training run, from the ranks to the process that launched them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tutti.job import Job
from tutti.launch.supervisor_pipe import SupervisorPipe

_NUM_REPORTS = 500
"""Approximate number of reports in a run of any length: enough for a curve."""

_REPORT_SECONDS = 2.0
"""Longest time between two reports, unless time is simulated."""


class ProgressReports:
    """Reports the progress of a run at regular steps, and after every evaluation.

    Only the leader reports. In a simulation every rank reports the loss of its steps: that costs nothing there, and
    the loss of one rank's part of a small batch is a poor estimate.
    """

    def __init__(
        self,
        job: Job,
        epochs: int,
        steps_per_epoch: int | None,
        samples_per_epoch: int | None,
        send: Callable[..., None] | None = None,
    ) -> None:
        """Report by `send`, to the launcher by default; None for a length of the data that is not known."""
        self._job, self._steps_per_epoch, self._samples_per_epoch = job, steps_per_epoch, samples_per_epoch
        self._total_steps = None if steps_per_epoch is None else epochs * steps_per_epoch
        self._steps_before = job.steps
        """Steps before the checkpoint from which the run continues."""
        transport = job.world.transport
        self._simulated = transport.cluster is not None
        self._report = send or SupervisorPipe().progress
        # Rounded up, so that there are not more reports than that.
        self._every = -(-(self._total_steps or _NUM_REPORTS) // _NUM_REPORTS)
        self._longest_s = float("inf") if self._simulated else _REPORT_SECONDS
        self._now = transport.now
        self._last_s = self._now()
        # Virtual time starts at 0. Real time is counted from when the job started.
        self._start_s = 0.0 if self._simulated else self._last_s - job.metrics.seconds

    def step(self, loss: Tensor) -> None:
        """Report the loss of a step, if a report is due."""
        # From the first step on. `1 % every` is 0 where every step is reported.
        regular = self._job.steps % self._every == 1 % self._every
        due = regular or self._now() - self._last_s > self._longest_s
        if due and (self._simulated or self._job.is_leader):
            self._send("step", loss=float(loss.detach()))

    def evaluation(self, loss: Tensor, accuracy: float) -> None:
        """Report the test accuracy, at the end of an epoch."""
        self.epoch(float(loss.detach()), accuracy=accuracy)

    def epoch(self, loss: float, **values: Any) -> None:
        """Report what was found at the end of an epoch."""
        if self._job.is_leader:
            self._send("epoch", loss=loss, **values)

    def _send(self, kind: str, **values: Any) -> None:
        metrics = self._job.metrics
        self._last_s = self._now()
        ages = metrics.strategy.get("staleness")  # Counts of updates by age: the mean age is reported.
        if ages:
            values["staleness"] = round(sum(age * count for age, count in ages.items()) / sum(ages.values()), 3)
        if self._steps_per_epoch is not None and self._samples_per_epoch is not None:
            epoch = metrics.steps / self._steps_per_epoch
            new_epochs = epoch - self._steps_before / self._steps_per_epoch
            values["epoch"] = round(epoch, 4)
            values["samples_per_s"] = round(new_epochs * self._samples_per_epoch / metrics.seconds, 1)
        self._report(
            kind=kind,
            step=metrics.steps,
            total_steps=self._total_steps,
            seconds=float(f"{self._last_s - self._start_s:.6g}"),
            bytes_sent=metrics.bytes_sent,
            waiting_share=round(metrics.waiting_share, 4),
            **values,
        )
