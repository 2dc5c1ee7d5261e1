"""Chen & Huo (2016), as Kim (2016) presents it for CNTK: block momentum, averaging and 1-bit SGD on many workers.

All training is simulated: gradients are real and time is virtual. The runs are independent of each other, so as many
are simulated at once as there are cores.
"""

import copy
import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from reproductions.block_momentum.report import write_report
from reproductions.block_momentum.results import (
    SINGLE,
    BlockMomentumResults,
    BlockMomentumRun,
    BlockMomentumTask,
    LearningPoint,
    Metric,
)
from reproductions.context import ReproductionContext, machine
from reproductions.records import save
from tutti.cluster import Cluster, Compute, Link
from tutti.data import GlobalBatches
from tutti.data.loader import ShardedLoader
from tutti.job import distribute
from tutti.launch import init
from tutti.recipes import MapDataset, Recipe, collate, recipe
from tutti.recipes.models import mlp
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import parse
from tutti.world import World

STEP_S = 0.040
"""Virtual seconds of computation per step of a worker."""
LATENCY = "1ms"
"""Latency of every link."""

METHODS = {
    SINGLE: "native",
    "averaging": "averaging:every={block_steps}",
    "BMUF": "bmuf:every={block_steps}",
    "1-bit": "onebit",
    "BMUF and 1-bit": "bmuf:every={block_steps}+onebit",
}
"""Strategies by method."""

TEXT = BlockMomentumTask(
    name="char-lstm", recipe="char-lstm", batch=2, block_steps=2, epochs=6, learning_rate=1.0,
    workers=(4, 8, 16, 32, 64), methods=tuple(METHODS), max_workers={"1-bit": 16},  # As in Kim's table.
)  # fmt: skip
SIXTEEN = BlockMomentumTask(
    name="mnist-mlp", recipe="mnist-mlp", batch=16, block_steps=2, epochs=8, learning_rate=0.1, workers=(16,),
    methods=(SINGLE, "averaging", "BMUF"),
)  # fmt: skip
WIDE = BlockMomentumTask(
    name="MNIST, 784-1024-1024-10", recipe="mnist-mlp", wide=True, batch=64, block_steps=16, epochs=5,
    learning_rate=0.4, workers=(4,), methods=("all-reduce", "bmuf", "bmuf and 1-bit"), seeds=3,
    strategies={"all-reduce": "ring", "bmuf": "bmuf:every=16", "bmuf and 1-bit": "bmuf:every=16+onebit"},
)  # fmt: skip
SLOW_LINK = replace(
    WIDE,
    name="10 Mbit/s",
    epochs=3,
    seeds=1,
    link="10mbit",
    tests_per_epoch=20,
    target=0.97,
    methods=("all-reduce", "bmuf and 1-bit"),
)
FULL = (TEXT, SIXTEEN, WIDE, SLOW_LINK)
QUICK = (
    replace(TEXT, name="digits", recipe="digits", batch=4, block_steps=4, epochs=1, learning_rate=0.1, workers=(4,)),
    replace(SIXTEEN, name="digits again", recipe="digits", batch=4, block_steps=4, epochs=1, learning_rate=0.1),
    replace(
        SLOW_LINK, name="slow digits", recipe="digits", wide=False, epochs=2, tests_per_epoch=2, batch=8, target=0.5
    ),
)


@dataclass(frozen=True, kw_only=True)
class BlockMomentumJob:
    """One run to simulate: a task with one method, number of workers and seed."""

    task: BlockMomentumTask
    method: str
    workers: int
    seed: int
    data: Path | None

    @property
    def strategy(self) -> str:
        """Text of the strategy."""
        return (self.task.strategies or METHODS)[self.method].format(block_steps=self.task.block_steps)

    @property
    def learning_rate(self) -> float:
        """The task's, but 1-bit SGD's grows with the square root of its batch: it makes larger, not more steps."""
        return self.task.learning_rate * (math.sqrt(self.workers) if self.method == "1-bit" else 1.0)


def reproduce(context: ReproductionContext) -> str:
    """Simulate everything, and write results, figures and report; return the report."""
    tasks = QUICK if context.quick else FULL
    for task in tasks:
        recipe(task.recipe).data(context.data)  # A missing dataset must be reported before the training.
    jobs = [job for task in tasks for job in _jobs(task, context.data)]
    results = BlockMomentumResults(
        machine=machine(),
        quick=context.quick,
        step_s=STEP_S,
        latency=LATENCY,
        tasks=tasks,
        runs=tuple(_run_all(jobs, context)),
    )
    save(results, context.folder / "results.json")
    return write_report(results, context.folder)


def _jobs(task: BlockMomentumTask, data: Path | None) -> Iterator[BlockMomentumJob]:
    for seed in range(task.seeds):
        for method in task.methods:
            most = task.max_workers.get(method, task.workers[-1])
            for workers in (1,) if method == SINGLE else [size for size in task.workers if size <= most]:
                yield BlockMomentumJob(task=task, method=method, workers=workers, seed=seed, data=data)


def _run_all(jobs: list[BlockMomentumJob], context: ReproductionContext) -> list[BlockMomentumRun]:
    """Simulate all jobs, and return their results in the same order."""
    if context.quick:  # Processes would take longer to start than to work.
        return [simulate_job(job) for job in jobs]
    finished: dict[int, BlockMomentumRun] = {}
    num_cores = len(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(num_cores, len(jobs)), mp_context=spawn) as pool:
        futures = {pool.submit(simulate_job, job): number for number, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                run = finished[futures[future]] = future.result()
                text = f"{run.task}, {run.method}, {run.workers} workers, seed {run.seed}"
                context.progress(f"{len(finished)} of {len(jobs)}: {text}: {run.metric} {run.value:.4g}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return [finished[number] for number in range(len(jobs))]


def simulate_job(job: BlockMomentumJob) -> BlockMomentumRun:
    """Train once in virtual time."""
    compute = Compute(sample_s=STEP_S / job.task.batch)
    cluster = Cluster(link=Link(job.task.link, LATENCY), compute=compute)
    run: BlockMomentumRun = simulate(_train, job, workers=job.workers, cluster=cluster).results[0]
    return run


def _train(job: BlockMomentumJob) -> BlockMomentumRun:
    """Train on this rank; rank 0's result has the tests."""
    world, task, made = init(), job.task, recipe(job.task.recipe)
    torch.set_num_threads(1)  # The runs share the cores: more threads would mostly wait for each other.
    torch.manual_seed(job.seed)
    model = nn.Sequential(nn.Flatten(), mlp(784, 1024, 1024, 10)) if task.wide else made.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate)
    splits = made.data(job.data)
    points: list[LearningPoint] = []
    with distribute(model, optimizer, parse(job.strategy), world=world) as handle:
        loader = _loader(splits.train, job, world)
        total, start_s = task.epochs * len(loader), handle.metrics.seconds
        for x, y in chain.from_iterable(repeat(loader, task.epochs)):
            optimizer.param_groups[0]["lr"] = job.learning_rate * (1 - handle.steps / total)
            made.loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tests = task.tests_per_epoch
            if handle.steps * tests // len(loader) == (handle.steps - 1) * tests // len(loader):
                continue
            test_start_s = handle.metrics.seconds
            with handle.consensus():
                if world.rank == 0:
                    epochs, seconds = round(handle.steps / len(loader), 4), round(test_start_s - start_s, 3)
                    points.append(LearningPoint(epochs, seconds, _test_value(made, model, splits.test)))
            start_s += handle.metrics.seconds - test_start_s  # Averaging for a test is not part of training.
        bytes_per_step = handle.metrics.bytes_sent / handle.steps
    return BlockMomentumRun(
        task=task.name,
        method=job.method,
        workers=job.workers,
        seed=job.seed,
        strategy=job.strategy,
        metric=_metric(made),
        value=points[-1].value if points else math.nan,
        bytes_per_step=round(bytes_per_step),
        learning_rate=job.learning_rate,
        steps=total,
        points=tuple(points),
    )


def _loader(train: Any, job: BlockMomentumJob, world: World) -> ShardedLoader:
    batches = GlobalBatches(len(train), job.task.batch * world.size, world.size, job.seed)
    return ShardedLoader(DataLoader(train, batch_sampler=batches, collate_fn=collate), 0, "global", world)


def _metric(made: Recipe) -> Metric:
    return "perplexity" if made.name.startswith("char") else "accuracy"


def _test_value(made: Recipe, model: nn.Module, test: MapDataset) -> float:
    """Return test perplexity or accuracy of a copy without hooks, so that testing takes no virtual time."""
    tested = copy.deepcopy(model).eval()
    metric = made.loss if _metric(made) == "perplexity" else made.accuracy
    with torch.no_grad():
        batches = DataLoader(test, batch_size=256, collate_fn=collate)
        mean = sum(float(metric(tested(x), y)) * len(y) for x, y in batches) / len(test)
    return round(math.exp(mean) if _metric(made) == "perplexity" else mean, 5)
