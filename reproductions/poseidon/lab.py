"""Poseidon in the lab: steps of small stand-ins on real hosts, timed side by side, and what they send."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from reproductions.poseidon.traffic import widths
from tutti.bench.interleaved import Candidates, InterleavedTimer
from tutti.bench.models import BenchmarkModel
from tutti.bench.training_steps import make_step, solo_step
from tutti.job import distribute
from tutti.launch import init, launch
from tutti.launch.lab.lab import lab
from tutti.recipes.models import CifarQuick, GoogLeNet, mlp
from tutti.strategies import parse

NOTHING = "nothing"
"""The name of workers that exchange nothing."""
BATCHES = {"cifar-quick": 16, "alexnet": 8, "googlenet": 2}
"""Of each worker: a step must be short where eight workers share the cores of one machine."""


@dataclass(frozen=True)
class Request:
    """What to time."""

    texts: dict[str, tuple[str, ...]]
    """Strategies, by model."""
    narrower: int
    rounds: int
    round_s: float


def make_benchmark_model(model: str, narrower: int) -> BenchmarkModel:
    """A stand-in: of AlexNet the fully connected layers, made narrower; GoogLeNet whole, on images of 64 x 64."""
    batch = BATCHES[model]
    labels = torch.randint(0, 10, (batch,))
    if model == "alexnet":
        shape = widths(narrower)
        return BenchmarkModel(mlp(*shape), (torch.randn(batch, shape[0]), labels), F.cross_entropy)
    if model == "googlenet":
        return BenchmarkModel(GoogLeNet(), (torch.randn(batch, 3, 64, 64), labels), F.cross_entropy)
    return BenchmarkModel(CifarQuick(), (torch.randn(batch, 3, 32, 32), labels), F.cross_entropy)


def time_ways(model: str, request: Request) -> dict[str, dict[str, float]]:
    """Seconds a step under every strategy and with nothing exchanged, and bytes this rank sends in one."""
    world = init()
    torch.manual_seed(0)
    case = make_benchmark_model(model, request.narrower)
    ways: Candidates = {NOTHING: solo_step(case)}
    jobs, sent = [], {}
    for text in request.texts[model]:
        mine = copy.deepcopy(case.model)
        step, optimizer = make_step(mine, case)
        jobs.append(distribute(mine, optimizer, parse(text), world=world))
        step()  # In which it learns how each layer goes from then on.
        before = jobs[-1].metrics.bytes_sent
        step()
        sent[text] = float(jobs[-1].metrics.bytes_sent - before)
        ways[text] = step
    seconds = InterleavedTimer(request.rounds, request.round_s, most_repeats=20, total_s=120.0).medians(
        ways, world.transport
    )
    for job in jobs:
        job.finish()
    return {"seconds": seconds, "sent_bytes": sent}


def measure(request: Request, workers: tuple[int, ...], rate: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every model on every number of hosts."""
    rows = []
    for number in workers:
        with lab(number, rate) as hosts:
            for model, texts in request.texts.items():
                say(f"lab, {rate}, {number} hosts: {model}")
                ranks = launch(time_ways, model, request, lab=hosts)
                sent = {text: sum(rank["sent_bytes"][text] for rank in ranks) / number for text in texts}
                about = {"model": model, "workers": number, "batch": BATCHES[model]}
                rows.append({**about, "seconds": ranks[0]["seconds"], "sent_bytes": sent})
    return rows
