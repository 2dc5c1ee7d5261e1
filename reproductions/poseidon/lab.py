"""Poseidon in the lab: steps of small models on real hosts, timed in turns, and the bytes they send."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from reproductions.poseidon.results import NO_EXCHANGE, LabRun
from reproductions.poseidon.traffic import widths
from tutti.bench.interleaved import Candidates, InterleavedTimer
from tutti.bench.models import BenchmarkModel
from tutti.bench.training_steps import make_step, solo_step
from tutti.job import distribute
from tutti.launch import init, launch
from tutti.launch.lab.lab import lab
from tutti.recipes.models import CifarQuick, GoogLeNet, mlp
from tutti.strategies import parse

BATCHES = {"cifar-quick": 16, "alexnet": 8, "googlenet": 2}
"""Batch size of a worker: a step must be short where eight workers share the cores of one machine."""


@dataclass(frozen=True)
class LabRequest:
    """What to time."""

    strategies: dict[str, tuple[str, ...]]
    """Strategies by model."""
    narrowing: int
    rounds: int
    round_s: float


def make_benchmark_model(model: str, narrowing: int) -> BenchmarkModel:
    """Return a small form: of AlexNet only narrowed fully connected layers, of GoogLeNet all, on 64 × 64 images."""
    batch = BATCHES[model]
    labels = torch.randint(0, 10, (batch,))
    if model == "alexnet":
        shape = widths(narrowing)
        return BenchmarkModel(mlp(*shape), (torch.randn(batch, shape[0]), labels), F.cross_entropy)
    if model == "googlenet":
        return BenchmarkModel(GoogLeNet(), (torch.randn(batch, 3, 64, 64), labels), F.cross_entropy)
    return BenchmarkModel(CifarQuick(), (torch.randn(batch, 3, 32, 32), labels), F.cross_entropy)


def time_strategies(model: str, request: LabRequest) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds per step with every strategy and with no exchange, and bytes that this rank sends per step."""
    world = init()
    torch.manual_seed(0)
    benchmark = make_benchmark_model(model, request.narrowing)
    candidates: Candidates = {NO_EXCHANGE: solo_step(benchmark)}
    jobs, sent = [], {}
    for strategy in request.strategies[model]:
        replica = copy.deepcopy(benchmark.model)
        step, optimizer = make_step(replica, benchmark)
        jobs.append(distribute(replica, optimizer, parse(strategy), world=world))
        step()  # In the first step the strategy decides how each layer is sent from then on.
        before = jobs[-1].metrics.bytes_sent
        step()
        sent[strategy] = float(jobs[-1].metrics.bytes_sent - before)
        candidates[strategy] = step
    timer = InterleavedTimer(request.rounds, request.round_s, most_repeats=20, total_s=120.0)
    seconds = timer.medians(candidates, world.transport)
    for job in jobs:
        job.finish()
    return seconds, sent


def measure(
    request: LabRequest, workers: tuple[int, ...], rate: str, progress: Callable[[str], None]
) -> Iterator[LabRun]:
    """Measure every model on every number of hosts."""
    for number in workers:
        with lab(number, rate) as hosts:
            for model, strategies in request.strategies.items():
                progress(f"lab, {rate}, {number} hosts: {model}")
                ranks = launch(time_strategies, model, request, on=hosts)
                yield LabRun(
                    model=model,
                    workers=number,
                    batch=BATCHES[model],
                    seconds=ranks[0][0],
                    sent_bytes={text: sum(sent[text] for _, sent in ranks) / number for text in strategies},
                )
