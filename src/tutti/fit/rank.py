"""The part of `tutti.fit` that every rank runs: placement, data, training, evaluation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset

from tutti.data.shard import shard
from tutti.data.sharded_data import ShardedData
from tutti.fit.callbacks import Callbacks, Run
from tutti.fit.data import num_samples
from tutti.fit.evaluation import Evaluation
from tutti.fit.history import EpochRecord, History
from tutti.fit.interrupts import Interrupts
from tutti.fit.metrics import num_rows, plain
from tutti.fit.task import Task, make_optimizer
from tutti.job import Job, distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.recipes.learning_rate import RateSchedule, set_rate
from tutti.recipes.loop import RunCheckpoints, TrainingLoop, measure_agreed
from tutti.recipes.progress_reports import ProgressReports
from tutti.strategies.rates import SAME_RATE
from tutti.world import World

Send = Callable[..., None]
"""Takes a report, as `SupervisorPipe.progress`."""


def run_worker(task: Task) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Train on a worker that `fit` has started; the first one returns the state of the model, and the history."""
    world = init()
    torch.manual_seed(task.seed * 1_000_003 + world.rank)  # Dropout, for example, differs between ranks.
    history, is_leader = train(task, world, SupervisorPipe().progress)
    if not is_leader:
        return None
    # Copies: a parameter may be a part of a larger tensor, which would be sent as a whole.
    state = {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for name, value in task.model.state_dict().items()
    }
    return state, history.state_dict()


def train(task: Task, world: World, send: Send) -> tuple[History, bool]:
    """Train on this rank, together with all other ranks; return the history, and whether this rank is the first."""
    device = _device(task, world)
    before = next(task.model.parameters()).device
    task.model.to(device)
    if isinstance(task.loss, nn.Module):
        task.loss.to(device)
    optimizer = make_optimizer(task.optimizer, task.model)
    if optimizer is task.optimizer and device != before:
        optimizer.load_state_dict(optimizer.state_dict())  # Its state follows the parameters.
    schedule = _schedule(task, optimizer, world)
    try:
        with distribute(task.model, optimizer, task.strategy, world=world) as job:
            if task.loss_is_sum:
                job.expect(loss="sum")
            training = _RankTraining(task, job, optimizer, device, send)
            training.run(schedule)
        training.finished()
    finally:
        task.model.to(before)
    return training.history, job.is_leader


class _RankTraining:
    """A distributed model, its data, and what is found while it is trained."""

    def __init__(self, task: Task, job: Job, optimizer: Any, device: torch.device, send: Send) -> None:
        self._task, self._job, self._optimizer, self._device = task, job, optimizer, device
        self.history = History(task.model)
        self._run = Run(job, task.model, optimizer, self.history, task.epochs)
        self._callbacks = Callbacks(task.callbacks)
        self._has_length = not isinstance(task.loader.dataset, IterableDataset)
        self._batches: ShardedData = shard(task.loader, seed=task.seed, split_batches=self._has_length, world=job.world)
        self._send = send
        self._evaluation = None
        if task.validation is not None:
            self._evaluation = Evaluation(task.model, task.validation, task.metrics, self._to_device)
        self._total: Any = 0.0 if device.type == "cpu" else torch.zeros((), dtype=torch.float64, device=device)
        """Loss of this rank's samples in the epoch, added up; and their number."""
        self._num_samples = 0
        self._num_steps = 0
        self._totals: list[tuple[float, float, float]] = []
        """Of each epoch here: the loss added up, the number of samples, and the seconds of training."""
        self._interrupts = Interrupts()

    def run(self, schedule: RateSchedule) -> None:
        """Train. Collective."""
        task, job = self._task, self._job
        job.start_synchronously(schedule.synchronous_steps)
        self._callbacks.call("on_start", self._run)
        parts = (self.history, *self._callbacks.with_state, *self._run.tracked)
        job.track(*parts)
        checkpoints = RunCheckpoints(job, task.checkpoint, task.every, (self._batches, *parts))
        steps = len(self._batches) if self._has_length else None  # type: ignore[arg-type]
        self._reports = ProgressReports(job, task.epochs, steps, num_samples(task.loader), self._send)
        loop = TrainingLoop(
            job=job,
            optimizer=self._optimizer,
            batches=self._batches,
            forward=self._forward,
            schedule=schedule,
            checkpoints=checkpoints,
            after_step=self._after_step,
            after_epoch=self._after_epoch,
        )
        self._now, self._num_steps = job.world.transport.now, job.steps
        self._start_s = self._now()
        with self._interrupts.handled(checkpoints if job.world.size == 1 else None):
            loop.run(task.epochs)
        checkpoints.end()

    def finished(self) -> None:
        """The job is finished: all ranks hold the trained parameters. Collective."""
        if not self._job.strategy.synchronous and self._job.world.elastic is None:
            self._add_up()
        needs_evaluation = self._evaluation is not None and not self._job.strategy.synchronous
        if needs_evaluation and self._job.is_leader and self.history.epochs:
            assert self._evaluation is not None
            values = self._evaluation.alone()
            record = replace(self.history.epochs.pop(), validation_loss=values.pop("loss"), metrics=values)
            self._add(record)
        self._callbacks.call("on_end", self._run)

    def _to_device(self, batch: Any) -> Any:
        if self._device.type == "cpu":
            return batch
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), batch)

    def _forward(self, batch: Any) -> Tensor:
        inputs, targets = self._to_device(batch)
        # Of a batch that is split, a rank may have no sample: its loss has the weight 0 then.
        self._rows = self._job.world.sample_counts.num_samples if self._has_length else num_rows(targets)
        return self._task.loss(self._task.model(inputs), targets)

    def _after_step(self, loss: Tensor) -> None:
        # A step that is void, because a worker was lost, is no step: its batch comes again.
        counts, self._num_steps = self._job.steps != self._num_steps, self._job.steps
        if self._rows and counts:
            value = loss.detach()
            # A number where that waits for nothing: a GPU goes on while its losses are added up there.
            self._total += (value.item() if value.is_cpu else value) * (1 if self._task.loss_is_sum else self._rows)
            self._num_samples += self._rows
        self._reports.step(loss)
        if self._callbacks:
            self._callbacks.step(self._run, loss)
        self._interrupts.raise_any()

    def _after_epoch(self, _: Tensor) -> bool:
        """Evaluate and report; return whether to stop. Collective under synchronous strategies."""
        job, synchronous = self._job, self._job.strategy.synchronous
        trained_s = self._now() - self._start_s
        loss_sum, num_samples = float(self._total), float(self._num_samples)
        if synchronous:
            both = job.reduce({"loss": loss_sum, "samples": num_samples}, "sum")
            loss_sum, num_samples = both["loss"], both["samples"]
        self._totals.append((loss_sum, num_samples, trained_s))
        last = self._batches.epoch >= self._task.epochs
        values: dict[str, Any] = {}
        if self._evaluation is not None:
            evaluation = self._evaluation
            together = lambda all_ranks: evaluation.together(job) if all_ranks else evaluation.alone()  # noqa: E731
            values = measure_agreed(job, together, last=last) or {}
        record = EpochRecord(
            epoch=len(self.history) + 1,
            steps=job.steps,
            validation_loss=values.pop("loss", None),
            metrics=values,
            seconds=self._now() - self._start_s,
            **_rates(loss_sum, num_samples, trained_s),
        )
        # After the last epoch of ranks that are apart, the first one evaluates when the job is finished.
        self._add(record, reported=synchronous or not last or self._evaluation is None)
        self._start_s = self._now()
        self._total = self._total * 0
        self._num_samples = 0
        self._callbacks.call("on_epoch", self._run)
        if self._callbacks and synchronous:
            return bool(job.reduce(float(self._run.stops), "max"))
        return False

    def _add_up(self) -> None:
        """Put the samples of all ranks into the epochs, of which ranks that are apart knew their own. Collective."""
        own = [[loss, num_samples] for loss, num_samples, _ in self._totals]
        # Not a call of the job: as long as it trains, ranks that are behind may wait for the others' steps.
        found = self._job.world.call("tutti.fit", own, lambda totals: list(totals.values()), elastic=True)
        of_ranks = [totals for totals in found if len(totals) == len(own)]
        first = len(self.history) - len(own)  # Earlier epochs are from a checkpoint.
        for index, (*_, trained_s) in enumerate(self._totals):
            loss, num_samples = (sum(totals[index][part] for totals in of_ranks) for part in range(2))
            epochs = self.history.epochs
            epochs[first + index] = replace(epochs[first + index], **_rates(loss, num_samples, trained_s))

    def _add(self, record: EpochRecord, *, reported: bool = True) -> None:
        self.history.epochs.append(record)
        if reported:
            self._reports.epoch(record.loss, number=record.epoch, record=plain(record.values()))


def _rates(loss: float, num_samples: float, trained_s: float) -> dict[str, Any]:
    """Return the mean loss of samples, and samples per second."""
    return {
        "loss": loss / num_samples if num_samples else float("nan"),
        "samples_per_s": num_samples / trained_s if trained_s else 0.0,
    }


def _device(task: Task, world: World) -> torch.device:
    """Return where this rank computes."""
    present = next(task.model.parameters()).device
    if task.device == "auto" and (present.type != "cpu" or not torch.cuda.is_available()):
        return present
    device = torch.device("cuda" if task.device == "auto" else task.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _schedule(task: Task, optimizer: Any, world: World) -> RateSchedule:
    """Set the learning rate before the job starts, whose servers take it over."""
    strategy = world.strategy or task.strategy  # As `distribute` chooses.
    num_workers = world.size - (strategy.num_dedicated_servers if world.size > 1 else 0)
    num_steps = 0 if isinstance(task.loader.dataset, IterableDataset) else task.epochs * len(task.loader)
    # The batch is as large as that of one worker, for which the rate was chosen.
    return set_rate(optimizer, task.lr, strategy.learning_rate(num_workers), SAME_RATE, num_steps)
