"""Seide et al. (2014) and Strom (2015): gradients in few bits, with what is left out added next time, and without.

MNIST to the end with every codec, with feedback over several seeds and bare with one; and learning curves of an image
and a text recipe. The sentence behind it: a gradient may be said in one bit if the error is carried forward.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from reproductions.context import ReproductionContext, machine
from reproductions.error_feedback.report import EXACT, bare, write_report
from tutti.bench.compression import DEFAULT_CODECS
from tutti.errors import NonFiniteLoss
from tutti.launch import init, launch
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.recipes import recipe
from tutti.recipes.training import TrainingConfig, train


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to do."""

    workers: int = 4
    codecs: tuple[str, ...] = DEFAULT_CODECS
    seeds: tuple[int, ...] = (0, 1, 2)
    accuracy_of: str = "mnist-mlp"
    epochs: int = 4
    curves_of: tuple[str, ...] = ("cifar-quick", "char-lstm")
    curve_epochs: int | None = None
    """Of the curves; the recipe's own by default."""
    drawn: tuple[str, ...] = ("onebit", "topk", "lowrank")


QUICK = Plan(
    workers=2,
    codecs=("onebit", "topk"),
    seeds=(0,),
    accuracy_of="digits",
    epochs=2,
    curves_of=("digits",),
    curve_epochs=2,
    drawn=("onebit",),
)


def reproduce(context: ReproductionContext) -> str:
    """Do all of it; the report, in Markdown."""
    plan = QUICK if context.quick else Plan()
    data = str(context.data) if context.data is not None else None
    for name in (plan.accuracy_of, *plan.curves_of):
        recipe(name).data(context.data)  # A missing file is better said before the work than in it.
    result: dict[str, Any] = {"machine": machine(), "plan": asdict(plan), "quick": context.quick}
    accuracy = [
        {"recipe": plan.accuracy_of, "strategy": strategy, "epochs": plan.epochs, "seed": seed, "data": data}
        for seed in plan.seeds
        for strategy in (EXACT, *(_both(plan.codecs) if seed == plan.seeds[0] else _with(plan.codecs)))
    ]
    curves = [
        {"recipe": name, "strategy": strategy, "epochs": plan.curve_epochs, "seed": 0, "data": data}
        for name in plan.curves_of
        for strategy in (EXACT, *_both(plan.drawn))
    ]
    rows = _run(accuracy + curves, plan.workers, context)
    result["accuracy"], result["curves"] = rows[: len(accuracy)], rows[len(accuracy) :]
    (context.folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return write_report(result, context.folder)


def _with(codecs: tuple[str, ...]) -> list[str]:
    return list(codecs)


def _both(codecs: tuple[str, ...]) -> list[str]:
    return [text for codec in codecs for text in (codec, bare(codec))]


def _run(tasks: list[dict[str, Any]], workers: int, context: ReproductionContext) -> list[dict[str, Any]]:
    """Every task and how it went, with what was reported on the way."""
    reports: list[list[dict[str, Any]]] = [[] for _ in tasks]
    number = 0

    def watch(rank: int, values: dict[str, Any]) -> None:
        nonlocal number
        if rank == 0 and "task" in values:
            number = values["task"]
            task = tasks[number]
            what = f"{task['recipe']} with {task['strategy']}, seed {task['seed']}"
            context.progress(f"{number + 1} of {len(tasks)}: {what}")
        elif rank == 0:
            reports[number].append({key: values[key] for key in ("epoch", "loss", "accuracy") if key in values})

    outcomes = launch(train_each, tasks, workers=workers, watch=watch)[0]
    return [
        {**{key: task[key] for key in ("recipe", "strategy", "seed")}, **outcome, "reports": seen}
        for task, outcome, seen in zip(tasks, outcomes, reports, strict=True)
    ]


def train_each(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train every task on this rank and its peers; accuracy is None where the loss became infinite."""
    world, link = init(), SupervisorPipe()
    outcomes: list[dict[str, Any]] = []
    for number, task in enumerate(tasks):
        if world.rank == 0:
            link.progress(task=number)
        try:
            outcome = train(TrainingConfig(**task))
            sent = outcome.bytes_sent / outcome.steps
            outcomes.append({"accuracy": outcome.accuracy, "bytes_sent": sent, "target": outcome.target})
        except NonFiniteLoss:
            outcomes.append({"accuracy": None, "bytes_sent": None, "target": None})
    return outcomes
