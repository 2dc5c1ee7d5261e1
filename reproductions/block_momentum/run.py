"""Chen & Huo (2016), as Kim (2016) shows it for CNTK: block momentum against averaging and 1-bit SGD, on many workers.

Everything in virtual time, with real gradients. Cells are independent, and as many are done at once as there are cores.
"""

import copy
import json
import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from reproductions.block_momentum.report import write_report
from reproductions.context import ReproductionContext, machine
from tutti.cluster import Cluster, Compute, Link
from tutti.data.shard import ShardedLoader
from tutti.job import distribute
from tutti.launch import init
from tutti.recipes import MapDataset, Recipe, collate, recipe
from tutti.recipes.models import mlp
from tutti.recipes.training import GlobalBatches
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import parse
from tutti.world import World

STEP_S = 0.040
"""What a worker computes in a step."""
DELAY = "1ms"
"""Of every link."""
SINGLE = "single worker"

METHODS = {
    SINGLE: "native",
    "averaging": "averaging:every={every}",
    "BMUF": "bmuf:every={every}",
    "1-bit": "onebit",
    "BMUF and 1-bit": "bmuf:every={every}+onebit",
}
"""Each by the strategy that does it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A task, and how it is trained in all of its cells."""

    name: str
    recipe: str
    wide: bool = False
    """The perceptron 784-1024-1024-10 instead of the recipe's model."""
    batch: int
    """Of a worker."""
    every: int
    epochs: int
    rate: float
    """The learning rate of plain SGD, which falls to 0 in a straight line."""
    workers: tuple[int, ...]
    methods: tuple[str, ...]
    most: dict[str, int] | None = None
    """The largest number of workers for some methods, where it is not that of all."""
    seeds: int = 1
    link: str = "100mbit"
    """Of every worker's host."""
    tests: int = 1
    """In an epoch."""
    target: float | None = None
    """An accuracy, to which the time is measured."""
    strategies: dict[str, str] | None = None
    """Instead of those of `METHODS`."""

    def strategy(self, method: str) -> str:
        return (self.strategies or METHODS)[method].format(every=self.every)

    def rate_of(self, method: str, workers: int) -> float:
        """1-bit SGD takes steps of larger batches, not more of them: its rate grows with their root."""
        return self.rate * (math.sqrt(workers) if method == "1-bit" else 1.0)


TEXT = Part(
    name="char-lstm", recipe="char-lstm", batch=2, every=2, epochs=6, rate=1.0, workers=(4, 8, 16, 32, 64),
    methods=tuple(METHODS), most={"1-bit": 16},  # As in the table that this follows.
)  # fmt: skip
SIXTEEN = Part(
    name="mnist-mlp", recipe="mnist-mlp", batch=16, every=2, epochs=8, rate=0.1, workers=(16,),
    methods=(SINGLE, "averaging", "BMUF"),
)  # fmt: skip
WIDE = Part(
    name="MNIST, 784-1024-1024-10", recipe="mnist-mlp", wide=True, batch=64, every=16, epochs=5, rate=0.4, workers=(4,),
    methods=("all-reduce", "bmuf", "bmuf and 1-bit"), seeds=3,
    strategies={
        "all-reduce": "ring", "bmuf": "bmuf:every=16", "bmuf and 1-bit": "bmuf:every=16+onebit",
    },
)  # fmt: skip
SLOW = replace(
    WIDE,
    name="10 Mbit/s",
    epochs=3,
    seeds=1,
    link="10mbit",
    tests=20,
    target=0.97,
    methods=("all-reduce", "bmuf and 1-bit"),
)
PLAN = (TEXT, SIXTEEN, WIDE, SLOW)
QUICK = (
    replace(TEXT, name="digits", recipe="digits", batch=4, every=4, epochs=2, rate=0.1, workers=(4,)),
    replace(SIXTEEN, name="digits again", recipe="digits", batch=2, every=4, epochs=1, rate=0.1),
    replace(SLOW, name="slow digits", recipe="digits", wide=False, epochs=2, tests=2, batch=8, target=0.5),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    part: Part
    method: str
    workers: int
    seed: int
    data: Path | None


def reproduce(context: ReproductionContext) -> str:
    """Do all of it; the report, in Markdown."""
    plan = QUICK if context.quick else PLAN
    for part in plan:
        recipe(part.recipe).data(context.data)  # A missing file is better said before the work than in it.
    cells = [cell for part in plan for cell in _cells(part, context.data)]
    return conclude(plan, run_all(cells, context), context)


def _cells(part: Part, data: Path | None) -> Iterator[Cell]:
    for seed in range(part.seeds):
        for method in part.methods:
            most = (part.most or {}).get(method, part.workers[-1])
            for workers in (1,) if method == SINGLE else [size for size in part.workers if size <= most]:
                yield Cell(part=part, method=method, workers=workers, seed=seed, data=data)


def run_all(cells: list[Cell], context: ReproductionContext) -> list[dict[str, Any]]:
    """What came of each, in their order."""
    if context.quick:  # Processes would take longer to start than to work.
        return [one(cell) for cell in cells]
    found: dict[int, dict[str, Any]] = {}
    cores = len(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(cores, len(cells)), mp_context=spawn) as pool:
        started = {pool.submit(one, cell): number for number, cell in enumerate(cells)}
        try:
            for done in as_completed(started):
                number = started[done]
                found[number] = done.result()
                context.progress(f"{len(found)} of {len(cells)}: {_in_words(cells[number], found[number])}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return [found[number] for number in range(len(cells))]


def _in_words(cell: Cell, result: dict[str, Any]) -> str:
    unit = "perplexity" if result["metric"] == "perplexity" else "accuracy"
    return f"{cell.part.name}, {cell.method}, {cell.workers} workers, seed {cell.seed}: {unit} {result['value']:.4g}"


def conclude(plan: tuple[Part, ...], runs: list[dict[str, Any]], context: ReproductionContext) -> str:
    """Write down what was measured; the report."""
    about = {"machine": machine(), "quick": context.quick, "step_s": STEP_S, "delay": DELAY}
    result = {**about, "plan": [asdict(part) for part in plan], "runs": runs}
    lines = json.dumps(result).replace('{"part"', '\n{"part"')
    (context.folder / "results.json").write_text(lines + "\n")
    return write_report(result, context.folder)


def one(cell: Cell) -> dict[str, Any]:
    """Train once in virtual time, and how it went."""
    compute = Compute(sample_s=STEP_S / cell.part.batch)
    cluster = Cluster(link=Link(cell.part.link, DELAY), compute=compute)
    simulation = simulate(_train, cell, workers=cell.workers, cluster=cluster)
    first = simulation.results[0]
    return {
        "part": cell.part.name, "method": cell.method, "workers": cell.workers, "seed": cell.seed,
        "strategy": cell.part.strategy(cell.method), "value": first["points"][-1][2], **first,
    }  # fmt: skip


def _train(cell: Cell) -> dict[str, Any]:
    world, part, made = init(), cell.part, recipe(cell.part.recipe)
    torch.set_num_threads(1)  # Cells share the cores: two threads would mostly wait for each other.
    torch.manual_seed(cell.seed)
    model = nn.Sequential(nn.Flatten(), mlp(784, 1024, 1024, 10)) if part.wide else made.model()
    rate = part.rate_of(cell.method, cell.workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    splits = made.data(cell.data)
    points: list[list[float]] = []
    with distribute(model, optimizer, parse(part.strategy(cell.method)), world=world) as job:
        loader = _loader(splits.train, cell, world)
        total, start_s = part.epochs * len(loader), job.metrics.seconds
        for x, y in chain.from_iterable(repeat(loader, part.epochs)):
            optimizer.param_groups[0]["lr"] = rate * (1 - job.steps / total)
            made.loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if job.steps * part.tests // len(loader) == (job.steps - 1) * part.tests // len(loader):
                continue
            began_s = job.metrics.seconds
            with job.consensus():
                if world.rank == 0:
                    epochs, seconds = job.steps / len(loader), began_s - start_s
                    points.append([round(epochs, 4), round(seconds, 3), _quality(made, model, splits.test)])
            start_s += job.metrics.seconds - began_s  # Coming together to be tested is no part of training.
        sent = job.metrics.bytes_sent / job.steps
    return {"points": points, "bytes_per_step": round(sent), "metric": _metric(made), "rate": rate, "steps": total}


def _loader(train: Any, cell: Cell, world: World) -> ShardedLoader:
    batches = GlobalBatches(len(train), cell.part.batch * world.size, world.size, cell.seed)
    return ShardedLoader(DataLoader(train, batch_sampler=batches, collate_fn=collate), 0, world)


def _metric(made: Recipe) -> str:
    return "perplexity" if made.name.startswith("char") else "accuracy"


def _quality(made: Recipe, model: nn.Module, test: MapDataset) -> float:
    """Of a copy without hooks, so that testing takes no virtual time."""
    tested = copy.deepcopy(model).eval()
    metric = made.loss if _metric(made) == "perplexity" else made.accuracy
    with torch.no_grad():
        batches = DataLoader(test, batch_size=256, collate_fn=collate)
        mean = sum(float(metric(tested(x), y)) * len(y) for x, y in batches) / len(test)
    return round(math.exp(mean) if _metric(made) == "perplexity" else mean, 5)
