"""Training steps under parameter servers, beside all-reduce and beside workers that exchange nothing."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tutti.bench.rounds import Rounds, Ways
from tutti.bench.step import Case, make_case, solo, stepper
from tutti.job import Job, distribute
from tutti.launch import init
from tutti.launch.link import Link
from tutti.strategies import parse
from tutti.world import World

WARM_UP = 4

RULES = ("ps:bsp", "ps:ssp=3", "ps:async")


@dataclass(frozen=True)
class Request:
    """What to time."""

    model: str
    ways: tuple[str, ...]
    """Strategies, which need the same ranks to train; "solo" is beside them."""
    rounds: int
    slowness: float = 1.0
    """How many times as long the last worker takes to compute."""


def measure(request: Request) -> dict[str, Any]:
    """Time a step of every way, on this rank and its peers: seconds, the slowest rank's, and bytes, on every rank.

    A rank that serves only takes part in the one way there is then, and gives nothing.
    """
    world, link = init(), Link()
    torch.manual_seed(0)
    num_serving = parse(request.ways[0]).num_serving
    case = make_case(request.model, world.size - num_serving)
    link.progress(doing="warming up")
    jobs: dict[str, Job] = {}
    ways: Ways = {}
    for text in request.ways:
        ways[text], jobs[text] = _tutti(case, text, world)
    trains = jobs[request.ways[0]].world
    ways = {"solo": solo(case), **ways}
    if request.slowness > 1 and trains.rank == trains.size - 1:
        extra_s = (request.slowness - 1) * _seconds(ways["solo"])
        ways = {name: _slowed(way, extra_s) for name, way in ways.items()}
    for way in ways.values():
        for _ in range(WARM_UP):
            way()
    seconds = Rounds(request.rounds, round_s=1.0, most_repeats=200, total_s=150.0).medians(
        ways, trains.transport, lambda text: link.progress(doing=f"{text} of {len(ways)} ways")
    )
    metrics = {text: job.metrics for text, job in jobs.items()}
    for job in jobs.values():
        job.finish()
    return {
        "model": request.model,
        "workers": trains.size,
        "slowness": request.slowness,
        "seconds": seconds,
        "bytes_sent": {text: its.bytes_sent / its.steps for text, its in metrics.items()},
        "staleness": {text: its.staleness for text, its in metrics.items()},
    }


def _tutti(case: Case, text: str, world: World) -> tuple[Callable[[], None], Job]:
    model = copy.deepcopy(case.model)
    step, optimizer = stepper(model, case)
    return step, distribute(model, optimizer, parse(text), world=world)


def _seconds(way: Callable[[], Any], repeats: int = 10) -> float:
    for _ in range(WARM_UP):
        way()
    start = time.perf_counter()
    for _ in range(repeats):
        way()
    return (time.perf_counter() - start) / repeats


def _slowed(way: Callable[[], Any], extra_s: float) -> Callable[[], None]:
    """The same on a slower machine, which takes nothing from the others."""

    def slow() -> None:
        time.sleep(extra_s)
        way()

    return slow
