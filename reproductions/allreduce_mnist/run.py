"""Fourie (2019): tree, butterfly and ring all-reduce on MNIST, over message size and number of workers.

There are three measurements. `time_steps` times training steps with every algorithm, interleaved, on loopback and in
the lab; the gradients of the whole model are one message, as in the source. `train_to_the_end` trains to the last
epoch, for the accuracy. `measure_rounding` compares the float32 sums of the algorithms with the exact sum.

The functions named here run on every rank, under mpirun if it is installed: their arguments and results are JSON.
"""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from reproductions.allreduce_mnist.report import write_report
from reproductions.allreduce_mnist.results import (
    AlgorithmStepTimes,
    AllReduceConfig,
    AllReduceResults,
    CollectiveComparison,
    FinalAccuracy,
    Network,
    RoundingError,
)
from reproductions.context import ReproductionContext, machine
from reproductions.records import from_json, save, to_json
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

ONE_BUCKET_BYTES = 2**40
"""A bucket size that holds any model, so that its gradients are one message."""

MESSAGE_ALGORITHMS = ("butterfly", "tree", "ring_blocking", "ring")
"""Fourie's tree/butterfly, and the rings with blocking and non-blocking calls. "mpi" is Open MPI's own all-reduce."""

QUICK = AllReduceConfig(
    widths=(25, 200), workers=(2,), rounds=2, accuracy_recipe="digits", epochs=3, seeds=(0,), accuracy_workers=2,
    sizes=(2**10, 2**18),
)  # fmt: skip


def reproduce(context: ReproductionContext) -> str:
    """Measure everything, and write results, figures and report; return the report."""
    config = QUICK if context.quick else AllReduceConfig()
    recipe(config.accuracy_recipe).data(context.data)  # A missing dataset must be reported before the measurements.
    lab_missing = missing()
    if lab_missing is not None:
        context.progress(f"without the lab: {lab_missing}")
    step_times = _all_step_times(config, with_lab=lab_missing is None, context=context)
    collectives = _collectives_in_lab(config, context) if lab_missing is None else None
    context.progress(f"rounding, and training with every algorithm, seeds {', '.join(map(str, config.seeds))}")
    trained = under_mpi.run(round_and_train, _training_tasks(config, context), workers=config.accuracy_workers)
    results = AllReduceResults(
        machine=machine(),
        quick=context.quick,
        rate=context.rate,
        lab_missing=lab_missing,
        config=config,
        step_times=step_times,
        collectives=collectives,
        rounding=from_json(dict[str, RoundingError], trained["rounding"], "rounding"),
        accuracy=from_json(tuple[FinalAccuracy, ...], trained["accuracy"], "accuracy"),
    )
    save(results, context.folder / "results.json")
    return write_report(results, context.folder)


def _all_step_times(
    config: AllReduceConfig, with_lab: bool, context: ReproductionContext
) -> tuple[AlgorithmStepTimes, ...]:
    networks: dict[Network, str | None] = {"loopback": None}
    if with_lab:
        networks["lab"] = context.rate
    rows: list[AlgorithmStepTimes] = []
    for network, rate in networks.items():
        for workers in config.workers:
            context.progress(f"training steps, {network}, {workers} workers")
            with nullcontext() if rate is None else make_lab(workers, rate) as hosts:
                where = {"workers": workers} if hosts is None else {"on": hosts}
                timed = under_mpi.run(time_steps, list(config.widths), config.rounds, **where)
            rows += [from_json(AlgorithmStepTimes, {"network": network, "workers": workers, **row}) for row in timed]
    return tuple(rows)


def _collectives_in_lab(config: AllReduceConfig, context: ReproductionContext) -> CollectiveComparison:
    context.progress(f"all-reduce alone, lab, {context.rate}, {config.accuracy_workers} workers")
    with make_lab(config.accuracy_workers, context.rate) as hosts:
        measured = under_mpi.run(collectives_bench.measure, list(config.sizes), 5, on=hosts)
    return from_json(CollectiveComparison, measured, "all-reduce alone")


def _training_tasks(config: AllReduceConfig, context: ReproductionContext) -> list[dict[str, Any]]:
    data = str(context.data) if context.data is not None else None
    return [
        {"recipe": config.accuracy_recipe, "epochs": config.epochs, "data": data, "seed": seed} for seed in config.seeds
    ]


def time_steps(widths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of a training step with every algorithm, for each width; the same on every rank."""
    world, worlds = _worlds()
    rows = []
    for width in widths:
        steppers = {name: _stepper(width, name, its_world) for name, its_world in worlds.items()}
        seconds = _interleaved_medians({name: step for name, (step, _) in steppers.items()}, world, rounds)
        for _, finish in steppers.values():
            finish()
        model = recipe("mnist-mlp", second_hidden=width).model()
        rows.append({"width": width, "num_bytes": 4 * sum(p.numel() for p in model.parameters()), "seconds": seconds})
    return rows


def _worlds() -> tuple[World, dict[str, World]]:
    """Return the ranks connected by sockets, and the world of each algorithm: only Open MPI's own needs MPI."""
    world = init(transport="sockets")
    worlds = dict.fromkeys(MESSAGE_ALGORITHMS, world)
    if communicator() is not None:
        worlds["mpi"] = replace(world, transport=mpi.connect(world.transport.membership))  # type: ignore[attr-defined]
    return world, worlds


def _strategy(name: str) -> AllReduce:
    return AllReduce("native" if name == "mpi" else name, ONE_BUCKET_BYTES)


def _stepper(width: int, name: str, world: World) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a function that makes a training step with an algorithm, and one that finishes the job."""
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


def _interleaved_medians(steps: dict[str, Callable[[], None]], world: World, rounds: int) -> dict[str, float]:
    """Return the median over rounds of the slowest rank's time, each algorithm in turn; the first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            run(recursive_doubling.steps(torch.zeros(1), world.transport))  # A barrier: all ranks start together.
            start = world.transport.now()
            step()
            samples[name].append(max(all_gather_json(world.transport.now() - start, world.transport)))
    return {name: statistics.median(values[1:]) for name, values in samples.items()}


def round_and_train(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Make both measurements that need no lab, so that the ranks start only once."""
    return {"rounding": to_json(measure_rounding()), "accuracy": to_json(train_to_the_end(tasks))}


def train_to_the_end(tasks: list[dict[str, Any]]) -> list[FinalAccuracy]:
    """Train every task with every algorithm, and return test accuracies and distances of the parameters."""
    rows, worlds = [], _worlds()[1]
    for options in tasks:
        reference = None
        for name, world in worlds.items():
            set_world(world)
            outcome = train(TrainingConfig(strategy=str(_strategy(name)), **options))
            reference = outcome.parameters if reference is None else reference
            rows.append(
                FinalAccuracy(
                    algorithm=name,
                    seed=options["seed"],
                    accuracy=outcome.accuracy,
                    distance=float((outcome.parameters - reference).norm() / reference.norm()),
                    seconds=outcome.seconds,
                )
            )
    return rows


def measure_rounding() -> dict[str, RoundingError]:
    """Return the rounding error of each algorithm's sum of a million normally distributed numbers per rank."""
    transport = init(transport="sockets").transport
    generator = torch.Generator().manual_seed(transport.rank)
    local = torch.randn(1_000_000, generator=generator)
    exact = local.double()
    run(ALGORITHMS["ring"].steps(exact, transport))
    sums = {}
    for name in MESSAGE_ALGORITHMS:
        sums[name] = local.clone()
        run(ALGORITHMS[name].steps(sums[name], transport))
    if (mpi_world := communicator()) is not None:
        from mpi4py import MPI

        sums["mpi"] = local.clone()
        mpi_world.Allreduce(MPI.IN_PLACE, sums["mpi"].numpy())
    unit = torch.finfo(torch.float32).eps * exact.abs().mean()
    errors = {name: (total.double() - exact) / unit for name, total in sums.items()}
    return {
        name: RoundingError(
            mean=float(error.abs().mean()),
            largest=float(error.abs().max()),
            bias=float(error.mean()),
            fraction_differing=float((sums[name] != sums[MESSAGE_ALGORITHMS[0]]).double().mean()),
        )
        for name, error in errors.items()
    }
