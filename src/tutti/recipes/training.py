"""The training of `tutti train`: a recipe on this rank, by the loop that `tutti.fit` has too (`loop`).

Every rank runs `train`. It calls `init`, `distribute` and `shard` as any script does. `GlobalBatches` make the steps
of N workers see the samples that the steps of one worker see, so that N workers give the result of one.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tutti.collectives import native
from tutti.data import GlobalBatches, ShardedLoader, shard
from tutti.job import Job, distribute
from tutti.job.metrics import Changes
from tutti.launch import init
from tutti.recipes import Recipe, collate, recipe
from tutti.recipes.data import MapDataset
from tutti.recipes.learning_rate import LearningRate, RateSchedule, rule_of_batch, set_rate
from tutti.recipes.loop import RunCheckpoints, TrainingLoop, measure_agreed
from tutti.recipes.progress_reports import ProgressReports
from tutti.strategies import as_strategy
from tutti.world import World

# For memory and speed only: the accuracy does not depend on it.
_TEST_BATCH_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The configuration of a training run; the same on every worker."""

    recipe: str
    """A recipe's name, or "module:function" of a function that returns a `Recipe`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the recipe."""
    strategy: str = "native"
    data: str | None = None
    """Folder that contains the datasets."""
    epochs: int | None = None
    """Passes over the training data. Default: the recipe's."""
    batch_size: int | None = None
    """Samples per step over all workers. Default: the recipe's."""
    until: float | None = None
    """Test accuracy at which training stops, at the end of an epoch. Synchronous strategies only."""
    seed: int = 0
    """Seed of the initial parameters and of the shuffling."""
    lr: LearningRate = None
    """Learning rate. Default: the recipe's. "auto" changes it by the rules of the strategy and of the batch size."""
    double: bool = False
    """Whether to train in float64, in which runs on different numbers of workers can be compared closely."""
    checkpoints: str | None = None
    """Folder of the run's checkpoints: training continues from the newest, if there is one. None to write none."""
    checkpoint_every: str = "5m"
    """How often to write one: a number of steps, or a time. One more is written at the end."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run on one rank."""

    loss: float
    """Loss of this rank's last step."""
    accuracy: float
    """Test accuracy. Under a strategy that is not synchronous it is NaN on every rank but the leader."""
    target: float
    """Test accuracy that the recipe should reach."""
    steps: int
    lr: float
    """Learning rate of the last step."""
    momentum: float | None
    """Momentum of the optimiser in the last step; None if it has no such option."""
    synchronous_steps: int
    """Steps at the start that `lr="auto"` has made synchronous, at the rate and momentum of one worker."""
    samples: int
    """Samples that all ranks trained on."""
    seconds: float
    """Seconds from the start of the job to its end, with its start, its evaluations and whatever is exchanged there."""
    step_s: float
    """Mean seconds of a step of this rank: forward, backward, exchange and optimiser, without the rest of `seconds`."""
    bytes_sent: int
    """Bytes that this rank sent."""
    waiting_share: float
    """Part of the time that this rank waited for others."""
    strategy_metrics: dict[str, Any]
    """The metrics of the strategy, `job.metrics.strategy`."""
    changes: Changes
    """What changes of the workers have cost, `job.metrics.changes`."""
    parameters: Tensor
    """All parameters of the trained model, flattened."""

    def as_dict(self) -> dict[str, Any]:
        """All fields but the parameters."""
        return {name: value for name, value in asdict(self).items() if name != "parameters"}


def train(config: TrainingConfig) -> TrainingResult:
    """Train a recipe on this rank, together with all other ranks, and report progress to the launcher. Collective."""
    # 1. Model, optimiser and data, the same on every rank: all of them seed alike.
    world = init()
    training_recipe = recipe(config.recipe, **config.options)
    torch.manual_seed(config.seed)  # Before the model draws its parameters.
    model = training_recipe.model().double() if config.double else training_recipe.model()
    optimizer = training_recipe.optimizer(model)
    splits = training_recipe.data(Path(config.data) if config.data else None)
    num_samples, epochs = len(splits.train), config.epochs or training_recipe.epochs
    evaluation = _Evaluation(training_recipe, model, splits.test, config.double)
    schedule = _set_rate(optimizer, config, training_recipe, world, num_samples)
    # 2. Training, with each rank's part of every global batch.
    with distribute(model, optimizer, config.strategy, world=world) as job:
        batches, steps_per_epoch = _batches(splits.train, config, training_recipe, job.world)
        job.start_synchronously(schedule.synchronous_steps)
        checkpoints = _checkpoints(config, job, batches)
        reports = ProgressReports(job, epochs, steps_per_epoch, num_samples)
        steps_before, accuracy = job.steps, nan  # Of a continued run.

        def after_epoch(loss: Tensor) -> bool:
            nonlocal accuracy
            accuracy = _evaluate_epoch(evaluation, job, reports, loss, last=batches.epoch == epochs)
            # Equal on all ranks under a synchronous strategy, so all of them leave here. NaN never is large enough.
            return config.until is not None and accuracy >= config.until

        def forward(batch: Any) -> Tensor:
            return training_recipe.loss(model(_in_precision(batch[0], config.double)), batch[1])

        loop = TrainingLoop(
            job=job, optimizer=optimizer, batches=batches, forward=forward, schedule=schedule, checkpoints=checkpoints,
            after_step=reports.step, after_epoch=after_epoch,
        )  # fmt: skip
        loss = loop.run(epochs)
        if job.steps == steps_before:  # A run that had ended before it was continued.
            accuracy = _evaluate_epoch(evaluation, job, reports, loss, last=True)
        checkpoints.end()
        # Read before the job ends, whose clean-up sends messages of its own.
        metrics, synchronous, is_leader = job.metrics, job.strategy.synchronous, job.is_leader
    if not synchronous and is_leader:  # 3. The final accuracy. Leaving the job has made all parameters the same.
        accuracy = evaluation.accuracy()
        reports.evaluation(loss, accuracy)
    return TrainingResult(
        loss=float(loss.detach()),
        accuracy=accuracy,
        target=training_recipe.target,
        steps=metrics.steps,
        lr=float(optimizer.param_groups[0]["lr"]),
        momentum=optimizer.param_groups[0].get("momentum"),
        synchronous_steps=schedule.synchronous_steps,
        samples=round((batches.epoch - steps_before / steps_per_epoch) * num_samples),
        seconds=metrics.seconds,
        step_s=loop.steps_s / max(1, metrics.steps - steps_before),
        bytes_sent=metrics.bytes_sent,
        waiting_share=metrics.waiting_share,
        strategy_metrics=metrics.strategy,
        changes=metrics.changes,
        parameters=torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
    )


def _batches(
    data: MapDataset, config: TrainingConfig, training_recipe: Recipe, world: World
) -> tuple[ShardedLoader, int]:
    """This rank's part of every global batch, and the number of steps of an epoch."""
    size = config.batch_size or training_recipe.batch_size
    sampler = GlobalBatches(len(data), size, world.size, config.seed)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    # The sampler yields the parts of all ranks, so a step is as many of them as there are ranks.
    return cast(ShardedLoader, shard(loader, world=world)), len(sampler) // sampler.num_parts


def _checkpoints(config: TrainingConfig, job: Job, batches: ShardedLoader) -> RunCheckpoints:
    """Return the checkpoints of the run, continued from the newest one. Collective."""
    extra = {"config": {**asdict(config), "checkpoints": None}}
    return RunCheckpoints(job, config.checkpoints, config.checkpoint_every, (batches,), extra)


def _set_rate(
    optimizer: Optimizer, config: TrainingConfig, training_recipe: Recipe, world: World, num_samples: int
) -> RateSchedule:
    """Set the learning rate before the job starts, whose servers take it over; `num_samples` of an epoch."""
    strategy = world.strategy or as_strategy(config.strategy)  # As `distribute` chooses.
    # Dedicated servers take no batch, so they do not count as workers; a single rank runs without servers.
    num_workers = world.size - (strategy.num_dedicated_servers if world.size > 1 else 0)
    reference = training_recipe.batch_size
    batch_size = config.batch_size or reference
    num_steps = (config.epochs or training_recipe.epochs) * (num_samples // batch_size)  # As `GlobalBatches` cut them.
    of_batch = rule_of_batch(optimizer, batch_size, reference, num_steps)
    return set_rate(optimizer, config.lr, strategy.learning_rate(num_workers), of_batch, num_steps)


def _in_precision(inputs: Tensor, double: bool) -> Tensor:
    """The inputs in float64 if the model is; token numbers stay integers."""
    return inputs.double() if double and inputs.is_floating_point() else inputs


def _evaluate_epoch(
    evaluation: "_Evaluation", job: Job, reports: ProgressReports, loss: Tensor, *, last: bool
) -> float:
    """Measure and report the test accuracy at the end of an epoch; NaN where ranks do not measure it together."""

    def measure(together: bool) -> float:
        accuracy = evaluation.accuracy(job.world if together else None)
        reports.evaluation(loss, accuracy)
        return accuracy if together else nan

    measured = measure_agreed(job, measure, last=last)
    return nan if measured is None else measured


@dataclass(frozen=True)
class _Evaluation:
    """The test data of a recipe, and the model to evaluate on it."""

    training_recipe: Recipe
    model: nn.Module
    test: MapDataset
    double: bool

    def accuracy(self, world: World | None = None) -> float:
        """The test accuracy of the model as it is. With a world, each rank evaluates a part. Collective then."""
        loader = DataLoader(self.test, batch_size=_TEST_BATCH_SIZE, collate_fn=collate)
        batches: Iterable[Any] = loader if world is None else shard(loader, world=world)
        right_and_total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            self.model.eval()
            for x, y in batches:
                scores = self.model(_in_precision(x, self.double))
                # Weighted by samples: the last batch may be smaller. Sums in float64, which are added over ranks below.
                right_and_total += torch.tensor([float(self.training_recipe.accuracy(scores, y)) * len(y), len(y)])
            self.model.train()
        if world is not None:
            native(right_and_total, world.transport)
        return float(right_and_total[0] / right_and_total[1])
