"""`tutti bench strategies`: training steps under several strategies, beside DDP and workers that exchange nothing."""

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

_WARM_UP_STEPS = 4
"""Untimed steps of each candidate, rounded up to whole blocks."""


@dataclass(frozen=True)
class StrategyBenchmark:
    """A model and the strategies to time it under."""

    model: str
    strategies: tuple[str, ...]
    """Strategies that all need the same number of dedicated servers. "solo", without exchange, is added to them."""
    rounds: int
    """Repetitions, whose median is reported."""
    slowness: float = 1.0
    """Factor on the computing time of the last worker."""
    post_local_sgd: int | None = None
    """If given, also time DDP, and PostLocalSGD that averages every so many steps."""
    batch_size: int | None = None
    """Samples of a worker. Default: the model's own."""


def measure(benchmark: StrategyBenchmark) -> dict[str, Any]:
    """Time a step under every strategy on all ranks. Returns seconds of the slowest rank and bytes, on every rank.

    A rank that only serves takes part in the single strategy that there is then, and returns nothing useful.
    """
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)
    # A dedicated server stays in `distribute` until no worker is left. So it can only serve a single strategy.
    num_dedicated_servers = parse(benchmark.strategies[0]).num_dedicated_servers
    benchmark_model = make_benchmark_model(benchmark.model, world.size - num_dedicated_servers, benchmark.batch_size)
    supervisor.progress(doing="warming up")
    jobs: dict[str, Job] = {}
    candidates: Candidates = {}
    for text in benchmark.strategies:
        candidates[text], jobs[text] = tutti_step(benchmark_model, world, text)
    workers = jobs[benchmark.strategies[0]].world  # Without dedicated servers.
    candidates = {"solo": solo_step(benchmark_model), **candidates}
    with ExitStack() as stack:
        if benchmark.post_local_sgd is not None:
            stack.enter_context(torch_group(world))
            candidates |= {
                "DDP": ddp_step(benchmark_model),
                f"PostLocalSGD({benchmark.post_local_sgd})": _post_local_sgd(benchmark_model, benchmark.post_local_sgd),
            }
        seconds = _timed(candidates, jobs, benchmark, supervisor)
    metrics = {text: job.metrics for text, job in jobs.items()}
    for job in jobs.values():
        job.finish()
    return {
        "model": benchmark.model,
        "workers": workers.size,
        "slowness": benchmark.slowness,
        "seconds": seconds,
        "bytes_sent": {text: job_metrics.bytes_sent / job_metrics.steps for text, job_metrics in metrics.items()},
        "staleness": {text: job_metrics.strategy.get("staleness", {}) for text, job_metrics in metrics.items()},
    }


def _timed(
    candidates: Candidates, jobs: dict[str, Job], benchmark: StrategyBenchmark, supervisor: SupervisorPipe
) -> dict[str, float]:
    """Return the seconds per step of every candidate."""
    workers = jobs[benchmark.strategies[0]].world
    if benchmark.slowness > 1 and workers.rank == workers.size - 1:
        # Relative to computing alone: communication does not get slower.
        extra_s = (benchmark.slowness - 1) * _seconds(candidates["solo"])
        candidates = {name: _slowed(candidate, extra_s) for name, candidate in candidates.items()}
    # Whole blocks are timed, each with its exchange: a step within a block would look free.
    lengths = {name: _block(name, benchmark) for name in candidates}
    blocks: Candidates = {name: _repeated(candidate, lengths[name]) for name, candidate in candidates.items()}
    # An exchange that is still in progress would slow the next candidate down, and ranks of an asynchronous
    # strategy may wait for peers that already time the next candidate.
    settled = [name for name in jobs if lengths[name] > 1 or not parse(name).synchronous]
    settle: Candidates = {name: partial(_settle, jobs[name]) for name in settled}
    for name, block in blocks.items():
        for _ in range(-(-_WARM_UP_STEPS // lengths[name])):
            block()
        settle.get(name, _nothing)()
    rounds = InterleavedTimer(
        benchmark.rounds,
        round_s=1.0,
        most_repeats=200,
        total_s=240.0,
        # An untimed block first: an exchange that overlaps the next block is then in progress, as in the long run.
        before={name: blocks[name] for name in jobs if lengths[name] > 1},
        after=settle,
    )
    seconds = rounds.medians(
        blocks, workers.transport, lambda text: supervisor.progress(doing=f"{text} of {len(candidates)} candidates")
    )
    return {name: block_s / lengths[name] for name, block_s in seconds.items()}


def _block(name: str, benchmark: StrategyBenchmark) -> int:
    """Return the number of steps in which a candidate communicates once."""
    if name not in benchmark.strategies:
        return benchmark.post_local_sgd if benchmark.post_local_sgd and name.startswith("Post") else 1
    return parse(name).steps_per_exchange or 1


def _nothing() -> None:
    return None


def _settle(job: Job) -> None:
    """Complete the exchanges that are in progress: `consensus` waits for them, and nothing is evaluated in it."""
    with job.consensus(optimizer=False):
        return


def _repeated(candidate: Callable[[], Any], times: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(times):
            candidate()

    return block


def _post_local_sgd(benchmark_model: BenchmarkModel, every: int) -> Callable[[], None]:
    """Make a step under torch's PostLocalSGD: gradients stay on each rank, and parameters are averaged periodically."""
    # Imported here: these modules import a compiler and raise a warning.
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(copy.deepcopy(benchmark_model.model), gradient_as_bucket_view=True)
    # The hook averages gradients over the subgroup: over a group of one rank, that is nothing.
    single_rank, _ = dist.new_subgroups(1)
    state = PostLocalSGDState(process_group=None, subgroup=single_rank, start_localSGD_iter=0)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=every, warmup_steps=0)
    return make_step(
        model, benchmark_model, wrap_optimizer=lambda optimizer: PostLocalSGDOptimizer(optimizer, averager)
    )[0]


def _seconds(candidate: Callable[[], Any], repeats: int = 10) -> float:
    for _ in range(_WARM_UP_STEPS):
        candidate()
    start = time.perf_counter()
    for _ in range(repeats):
        candidate()
    return (time.perf_counter() - start) / repeats


def _slowed(candidate: Callable[[], Any], extra_s: float) -> Callable[[], None]:
    """Return the step of a slower worker. It sleeps, and so takes no core from the others."""

    def slow() -> None:
        time.sleep(extra_s)
        candidate()

    return slow
