"""Fourie (2019): tree, butterfly and ring all-reduce on MNIST, over the size of the message and the number of workers.

Three parts. `time_steps` times training steps of every algorithm, interleaved, on loopback and in the lab; the whole
model is one message, as it was there. `train_fully` trains to the end, for accuracy. `measure_rounding` compares the
sums that the algorithms make of the same numbers with the exact ones.
"""

import json
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from reproductions.allreduce_mnist.report import write_report
from reproductions.context import ReproductionContext, machine
from tutti.bench import collectives as collectives_bench
from tutti.bench import under_mpi
from tutti.bench.under_mpi import communicator
from tutti.collectives import ALGORITHMS, all_gather_json, recursive_doubling, run
from tutti.job import distribute
from tutti.launch import init, mpi
from tutti.launch.lab.lab import lab as make_lab
from tutti.launch.lab.lab import missing
from tutti.recipes import recipe
from tutti.recipes.training import TrainingConfig, train
from tutti.strategies import AllReduce
from tutti.world import World, set_world

ONE_MESSAGE = 2**40
"""A bucket that holds any model."""

MESSAGES = ("butterfly", "tree", "ring_blocking", "ring")
"""Fourie's tree/butterfly, and the rings with blocking and non-blocking calls. "mpi" is Open MPI's own."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to do."""

    widths: tuple[int, ...] = (25, 400, 1600, 6400)
    workers: tuple[int, ...] = (2, 4, 8)
    rounds: int = 5
    accuracy_of: str = "mnist-mlp"
    epochs: int = 20
    seeds: tuple[int, ...] = (0, 1, 2)
    accuracy_workers: int = 4
    sizes: tuple[int, ...] = tuple(2**exponent for exponent in range(10, 23))


QUICK = Plan(
    widths=(25, 200), workers=(2,), rounds=2, accuracy_of="digits", epochs=3, seeds=(0,), accuracy_workers=2,
    sizes=(2**10, 2**18),
)  # fmt: skip


def reproduce(context: ReproductionContext) -> str:
    """Do all of it; the report, in Markdown."""
    plan = QUICK if context.quick else Plan()
    recipe(plan.accuracy_of).data(context.data)  # A missing file is better said before the hour's work than in it.
    places: dict[str, str | None] = {"loopback": None}
    if (lacking := missing()) is None:
        places[f"lab, {context.rate}"] = context.rate
    else:
        context.progress(f"without the lab: {lacking}")
    result: dict[str, Any] = {"machine": machine(), "plan": asdict(plan), "rate": context.rate, "lab_missing": lacking}
    result["times"] = _all_times(plan, places, context)
    result["collectives"] = _crossover(plan, context) if lacking is None else None
    context.progress(f"rounding, and training to the end with every algorithm, seeds {', '.join(map(str, plan.seeds))}")
    result |= under_mpi.run(round_and_train, _tasks(plan, context), workers=plan.accuracy_workers)
    (context.folder / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    return write_report(result, context.folder)


def _all_times(plan: Plan, places: dict[str, str | None], context: ReproductionContext) -> list[dict[str, Any]]:
    rows = []
    for place, rate in places.items():
        for workers in plan.workers:
            context.progress(f"training steps, {place}, {workers} workers")
            with nullcontext() if rate is None else make_lab(workers, rate) as hosts:
                where = {"workers": workers} if hosts is None else {"lab": hosts}
                found = under_mpi.run(time_steps, list(plan.widths), plan.rounds, **where)
            rows += [{"place": place, "workers": workers, **row} for row in found]
    return rows


def _crossover(plan: Plan, context: ReproductionContext) -> dict[str, Any]:
    context.progress(f"all-reduce alone, lab, {context.rate}, {plan.accuracy_workers} workers")
    with make_lab(plan.accuracy_workers, context.rate) as hosts:
        return dict(under_mpi.run(collectives_bench.measure, list(plan.sizes), 5, lab=hosts))


def _tasks(plan: Plan, context: ReproductionContext) -> list[dict[str, Any]]:
    data = str(context.data) if context.data is not None else None
    options = {"recipe": plan.accuracy_of, "epochs": plan.epochs, "data": data}
    return [{**options, "seed": seed} for seed in plan.seeds]


def time_steps(widths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Seconds a training step takes with every algorithm, over widths of the second hidden layer; on every rank."""
    world, worlds = _worlds()
    rows = []
    for width in widths:
        steps = {name: _stepper(width, name, its_world) for name, its_world in worlds.items()}
        seconds = _interleaved({name: step for name, (step, _) in steps.items()}, world, rounds)
        for _, close in steps.values():
            close()
        model = recipe("mnist-mlp", second_hidden=width).model()
        rows.append({"width": width, "num_bytes": 4 * sum(p.numel() for p in model.parameters()), "seconds": seconds})
    return rows


def _worlds() -> tuple[World, dict[str, World]]:
    """The ranks as joined by sockets, and how each algorithm joins them: Open MPI's own needs MPI."""
    world = init(transport="process_group")
    worlds = dict.fromkeys(MESSAGES, world)
    if communicator() is not None:
        worlds["mpi"] = replace(world, transport=mpi.connect(world.transport.membership))  # type: ignore[attr-defined]
    return world, worlds


def _strategy(name: str) -> AllReduce:
    return AllReduce("native" if name == "mpi" else name, ONE_MESSAGE)


def _stepper(width: int, name: str, world: World) -> tuple[Callable[[], None], Callable[[], None]]:
    """A training step under an algorithm, and what ends it."""
    made = recipe("mnist-mlp", second_hidden=width)
    torch.manual_seed(0)
    model = made.model()
    optimizer = made.optimizer(model)
    job = distribute(model, optimizer, _strategy(name), world=world)
    x, y = made.example(max(1, made.batch_size // world.size))

    def step() -> None:
        made.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, job.finish


def _interleaved(steps: dict[str, Callable[[], None]], world: World, rounds: int) -> dict[str, float]:
    """Median over rounds of the slowest rank's time, each algorithm in turn; the first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            run(recursive_doubling.steps(torch.zeros(1), world.transport))
            start = world.transport.now()
            step()
            samples[name].append(max(all_gather_json(world.transport.now() - start, world.transport)))
    return {name: statistics.median(values[1:]) for name, values in samples.items()}


def round_and_train(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """What takes no lab, in one start of the ranks."""
    return {"rounding": measure_rounding(), "accuracy": train_fully(tasks)}


def train_fully(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train a recipe to the end with every algorithm: test accuracy, and how far apart the parameters ended."""
    rows, worlds = [], _worlds()[1]
    for options in tasks:
        first = None
        for name, world in worlds.items():
            set_world(world)
            outcome = train(TrainingConfig(strategy=str(_strategy(name)), **options))
            first = outcome.parameters if first is None else first
            distance = float((outcome.parameters - first).norm() / first.norm())
            row = {"algorithm": name, "seed": options["seed"], "accuracy": outcome.accuracy, "distance": distance}
            rows.append({**row, "seconds": outcome.seconds})
    return rows


def measure_rounding() -> dict[str, dict[str, float]]:
    """How far each algorithm's sums of a million numbers per rank are from the exact ones, in roundings of float32."""
    transport = init(transport="process_group").transport
    generator = torch.Generator().manual_seed(transport.rank)
    mine = torch.randn(1_000_000, generator=generator)
    exact = mine.double()
    run(ALGORITHMS["ring"].steps(exact, transport))
    sums = {}
    for name in MESSAGES:
        sums[name] = mine.clone()
        run(ALGORITHMS[name].steps(sums[name], transport))
    if (everyone := communicator()) is not None:
        from mpi4py import MPI

        sums["mpi"] = mine.clone()
        everyone.Allreduce(MPI.IN_PLACE, sums["mpi"].numpy())
    unit = torch.finfo(torch.float32).eps * exact.abs().mean()
    errors = {name: (total.double() - exact) / unit for name, total in sums.items()}
    return {
        name: {
            "mean": float(error.abs().mean()),
            "most": float(error.abs().max()),
            "bias": float(error.mean()),
            "differ": float((sums[name] != sums[MESSAGES[0]]).double().mean()),
        }
        for name, error in errors.items()
    }
