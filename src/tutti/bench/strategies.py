"""Training steps under any strategies, beside each other, torch's own ways, and workers that exchange nothing."""

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tutti.bench.interleaved import Candidates, InterleavedTimer
from tutti.bench.models import BenchmarkModel, make_benchmark_model
from tutti.bench.training_steps import ddp_step, make_step, solo_step, torch_group, tutti_step
from tutti.job import Job
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.strategies import parse

WARM_UP = 4


@dataclass(frozen=True)
class StrategyBenchmark:
    """What to time."""

    model: str
    strategies: tuple[str, ...]
    """Strategies, which need the same ranks to train; "solo" is beside them."""
    rounds: int
    slowness: float = 1.0
    """How many times as long the last worker takes to compute."""
    post_local_sgd: int | None = None
    """Also time DDP, and PostLocalSGD that averages every so many steps."""
    batch_size: int | None = None
    """Of a worker; the model's own by default."""


def measure(benchmark: StrategyBenchmark) -> dict[str, Any]:
    """Time a step of every way, on this rank and its peers: seconds, the slowest rank's, and bytes, on every rank.

    A rank that serves only takes part in the one way there is then, and gives nothing.
    """
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)
    num_dedicated_servers = parse(benchmark.strategies[0]).num_dedicated_servers
    case = make_benchmark_model(benchmark.model, world.size - num_dedicated_servers, benchmark.batch_size)
    supervisor.progress(doing="warming up")
    jobs: dict[str, Job] = {}
    ways: Candidates = {}
    for text in benchmark.strategies:
        ways[text], jobs[text] = tutti_step(case, world, text)
    trains = jobs[benchmark.strategies[0]].world
    ways = {"solo": solo_step(case), **ways}
    with ExitStack() as stack:
        if benchmark.post_local_sgd is not None:
            stack.enter_context(torch_group(world))
            ways |= {
                "DDP": ddp_step(case),
                f"PostLocalSGD({benchmark.post_local_sgd})": _post_local_sgd(case, benchmark.post_local_sgd),
            }
        seconds = _timed(ways, jobs, benchmark, supervisor)
    metrics = {text: job.metrics for text, job in jobs.items()}
    for job in jobs.values():
        job.finish()
    return {
        "model": benchmark.model,
        "workers": trains.size,
        "slowness": benchmark.slowness,
        "seconds": seconds,
        "bytes_sent": {text: its.bytes_sent / its.steps for text, its in metrics.items()},
        "staleness": {text: its.strategy.get("staleness", {}) for text, its in metrics.items()},
    }


def _timed(
    ways: Candidates, jobs: dict[str, Job], benchmark: StrategyBenchmark, supervisor: SupervisorPipe
) -> dict[str, float]:
    """Seconds a step, of every way."""
    trains = jobs[benchmark.strategies[0]].world
    if benchmark.slowness > 1 and trains.rank == trains.size - 1:
        extra_s = (benchmark.slowness - 1) * _seconds(ways["solo"])
        ways = {name: _slowed(way, extra_s) for name, way in ways.items()}
    lengths = {name: _block(name, benchmark) for name in ways}
    blocks: Candidates = {name: _repeated(way, lengths[name]) for name, way in ways.items()}
    # What is still under way would be in the way of others, and peers wait for those who train elsewhere.
    settled = [name for name in jobs if lengths[name] > 1 or not parse(name).synchronous]
    settle: Candidates = {name: partial(_settle, jobs[name]) for name in settled}
    for name, block in blocks.items():
        for _ in range(-(-WARM_UP // lengths[name])):
            block()
        settle.get(name, _nothing)()
    rounds = InterleavedTimer(
        benchmark.rounds,
        round_s=1.0,
        most_repeats=200,
        total_s=240.0,
        before={name: blocks[name] for name in jobs if lengths[name] > 1},
        after=settle,
    )
    seconds = rounds.medians(
        blocks, trains.transport, lambda text: supervisor.progress(doing=f"{text} of {len(ways)} ways")
    )
    return {name: each / lengths[name] for name, each in seconds.items()}


def _block(name: str, benchmark: StrategyBenchmark) -> int:
    """After how many steps a way has done all that it does."""
    if name not in benchmark.strategies:
        return benchmark.post_local_sgd if benchmark.post_local_sgd and name.startswith("Post") else 1
    every = getattr(parse(name), "every", 1)
    return every if isinstance(every, int) else 1


def _nothing() -> None:
    return None


def _settle(job: Job) -> None:
    with job.consensus():
        return


def _repeated(way: Callable[[], Any], times: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(times):
            way()

    return block


def _post_local_sgd(case: BenchmarkModel, every: int) -> Callable[[], None]:
    """torch's own: gradients stay on each rank, and parameters are averaged by a flat all-reduce."""
    # They cost a compiler's import, and a warning.
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(copy.deepcopy(case.model), gradient_as_bucket_view=True)
    alone, _ = dist.new_subgroups(1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=0)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=every, warmup_steps=0)
    return make_step(model, case, wrap_optimizer=lambda optimizer: PostLocalSGDOptimizer(optimizer, averager))[0]


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
