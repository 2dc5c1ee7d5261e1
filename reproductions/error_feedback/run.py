"""Seide et al. (2014) and Strom (2015): gradient compression with and without error feedback.

MNIST is trained with every codec: with error feedback over several seeds, without it with one. Learning curves are
recorded for an image and a text recipe.
"""

from typing import Any

from reproductions.context import ReproductionContext, machine
from reproductions.error_feedback.report import write_report
from reproductions.error_feedback.results import (
    EXACT,
    CompressedTraining,
    CurvePoint,
    ErrorFeedbackConfig,
    ErrorFeedbackResults,
    strategies,
)
from reproductions.records import save
from tutti.errors import NonFiniteLoss
from tutti.launch import init, launch
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.recipes import recipe
from tutti.recipes.training import TrainingConfig, train

QUICK = ErrorFeedbackConfig(
    workers=2,
    codecs=("onebit", "topk"),
    seeds=(0,),
    accuracy_recipe="digits",
    epochs=2,
    curve_recipes=("digits",),
    curve_epochs=2,
    curve_codecs=("onebit",),
)


def reproduce(context: ReproductionContext) -> str:
    """Train everything, and write results, figures and report; return the report."""
    config = QUICK if context.quick else ErrorFeedbackConfig()
    for name in (config.accuracy_recipe, *config.curve_recipes):
        recipe(name).data(context.data)  # A missing dataset must be reported before the training.
    accuracy_tasks, curve_tasks = _accuracy_tasks(config, context), _curve_tasks(config, context)
    runs = _train_all(accuracy_tasks + curve_tasks, config.workers, context)
    results = ErrorFeedbackResults(
        machine=machine(),
        quick=context.quick,
        config=config,
        accuracy=tuple(runs[: len(accuracy_tasks)]),
        curves=tuple(runs[len(accuracy_tasks) :]),
    )
    save(results, context.folder / "results.json")
    return write_report(results, context.folder)


def _accuracy_tasks(config: ErrorFeedbackConfig, context: ReproductionContext) -> list[TrainingConfig]:
    """Every codec with error feedback for every seed, and without it for the first seed."""
    tasks = []
    for seed in config.seeds:
        texts = [EXACT]
        for codec in config.codecs:
            texts += strategies(codec) if seed == config.seeds[0] else strategies(codec)[:1]
        tasks += [_task(config.accuracy_recipe, text, config.epochs, seed, context) for text in texts]
    return tasks


def _curve_tasks(config: ErrorFeedbackConfig, context: ReproductionContext) -> list[TrainingConfig]:
    texts = [EXACT, *(text for codec in config.curve_codecs for text in strategies(codec))]
    return [_task(name, text, config.curve_epochs, 0, context) for name in config.curve_recipes for text in texts]


def _task(name: str, strategy: str, epochs: int | None, seed: int, context: ReproductionContext) -> TrainingConfig:
    data = str(context.data) if context.data is not None else None
    return TrainingConfig(recipe=name, strategy=strategy, epochs=epochs, seed=seed, data=data)


def _train_all(tasks: list[TrainingConfig], workers: int, context: ReproductionContext) -> list[CompressedTraining]:
    """Train every task in one start of the workers, and return the outcomes with the points reported on the way."""
    points: list[list[CurvePoint]] = [[] for _ in tasks]
    current = 0

    def watch(rank: int, values: dict[str, Any]) -> None:
        nonlocal current
        if rank == 0 and "task" in values:
            current = values["task"]
            task = tasks[current]
            text = f"{task.recipe} with {task.strategy}, seed {task.seed}"
            context.progress(f"{current + 1} of {len(tasks)}: {text}")
        elif rank == 0:
            point = CurvePoint(epoch=values["epoch"], loss=values["loss"], accuracy=values.get("accuracy"))
            points[current].append(point)

    outcomes = launch(train_each, tasks, workers=workers, watch=watch)[0]
    return [
        CompressedTraining(
            recipe=task.recipe, strategy=task.strategy, seed=task.seed, accuracy=accuracy, bytes_per_step=sent,
            target=target, points=tuple(reported),
        )
        for task, (accuracy, sent, target), reported in zip(tasks, outcomes, points, strict=True)
    ]  # fmt: skip


TrainingOutcome = tuple[float, float, float] | tuple[None, None, None]


def train_each(tasks: list[TrainingConfig]) -> list[TrainingOutcome]:
    """Train every task on this rank; return accuracy, bytes per step and target, or None where the loss diverged."""
    world, pipe = init(), SupervisorPipe()
    outcomes: list[TrainingOutcome] = []
    for number, task in enumerate(tasks):
        if world.rank == 0:
            pipe.progress(task=number)
        try:
            result = train(task)
            outcomes.append((result.accuracy, result.bytes_sent / result.steps, result.target))
        except NonFiniteLoss:
            outcomes.append((None, None, None))
    return outcomes
