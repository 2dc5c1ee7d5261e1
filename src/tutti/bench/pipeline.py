"""`tutti bench pipeline`: a model in pipeline stages under every schedule, beside the whole model in one process."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tutti.bench.interleaved import InterleavedTimer
from tutti.job import Job, distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.parallel import Mesh, Pipeline
from tutti.parallel.pipeline.settings import ScheduleName
from tutti.parallel.pipeline.step import PipelineStep
from tutti.parallel.pipeline.timeline import ActionSpan, PipelineTimeline, simulate_schedule
from tutti.recipes.models import mlp
from tutti.world import World

_SOLO = "one process"


@dataclass(frozen=True)
class PipelineBenchmark:
    """Schedules to time on a perceptron of equal layers, or on layers that take `layer_s` per sample."""

    schedules: Sequence[ScheduleName]
    microbatches: int
    """Number of microbatches that a batch is cut into."""
    rounds: int
    width: int = 256
    """Inputs and outputs of every layer."""
    depth: int = 32
    """Number of layers."""
    batch: int = 4096
    """Samples per step."""
    layer_s: float | None = None
    """Seconds of one layer's forward pass per sample; None for a perceptron that computes."""


def measure(benchmark: PipelineBenchmark) -> dict[str, Any]:
    """Time all schedules on all ranks, each on one core. Returns the same on every rank."""
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)  # The same model on every rank.
    torch.set_num_threads(1)  # Also in one process: otherwise it would use the cores of all stages.
    model = mlp(*[benchmark.width] * (benchmark.depth + 1))
    if benchmark.layer_s is not None:
        model = nn.Sequential(*(_FixedTimeLayer(benchmark.layer_s) for _ in range(benchmark.depth)))
    # Inputs and targets are of the same width: every stage has the same work, and sends equally long messages.
    batch = torch.randn(benchmark.batch, benchmark.width), torch.randn(benchmark.batch, benchmark.width)
    candidates: dict[str, Callable[[], Any]] = {_SOLO: _solo(model, batch, world)}
    pipelines: dict[str, tuple[Job, PipelineStep]] = {}
    for schedule in benchmark.schedules:
        supervisor.progress(doing=f"cutting the model for {schedule}")
        settings = Pipeline(schedule=schedule, microbatches=benchmark.microbatches)
        candidates[schedule], job, pipeline = _pipelined(model, batch, world, settings)
        pipelines[schedule] = job, pipeline
    rounds = InterleavedTimer(benchmark.rounds, round_s=0.5, most_repeats=4, total_s=90)
    seconds = rounds.medians(candidates, world.transport, lambda text: supervisor.progress(doing=text))
    rows = []
    for name, (job, pipeline) in pipelines.items():
        supervisor.progress(doing=f"waiting in {name}")
        rows.append(
            {"schedule": name, "seconds": seconds[name], **_bubbles(candidates[name], pipeline, benchmark.rounds)}
        )
        job.finish()
    return {"workers": world.size, "microbatches": benchmark.microbatches, "solo_s": seconds[_SOLO], "rows": rows}


class _FixedTimeLayer(nn.Module):
    """A layer that takes a fixed time per sample in forward, and twice that in backward."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self._sample_s = sample_s
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Spin.apply(x * self.scale, self._sample_s * len(x))
        return out


class _Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _spin(seconds)
        return x.view_as(x)  # A new tensor: autograd must see this function's output, not its input.

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _spin(2 * ctx.seconds)
        return grad, None


def _spin(seconds: float) -> None:
    """Keep the core busy, as computing would. Sleeping would let another rank have it."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def _solo(model: nn.Module, batch: tuple[Tensor, Tensor], world: World) -> Callable[[], Any]:
    """Return a step of the whole model, which rank 0 takes alone."""
    replica = copy.deepcopy(model)
    optimizer = SGD(replica.parameters(), lr=1e-3)

    def step() -> None:
        if world.rank == 0:  # The other ranks wait in the timer's barrier, and take no core from it.
            optimizer.zero_grad()
            F.mse_loss(replica(batch[0]), batch[1]).backward()
            optimizer.step()

    return step


def _pipelined(
    model: nn.Module, batch: tuple[Tensor, Tensor], world: World, settings: Pipeline
) -> tuple[Callable[[], Any], Job, PipelineStep]:
    """Return a step of the model in stages, its job and its pipeline. Collective."""
    replica = copy.deepcopy(model)
    optimizer = SGD(replica.parameters(), lr=1e-3)
    job = distribute(replica, optimizer, world=world, mesh=Mesh(pipe=world.size, pipeline=settings), example=batch[0])
    pipeline = job.pipeline(F.mse_loss)

    def step() -> None:
        optimizer.zero_grad()
        pipeline(*batch)
        optimizer.step()

    return step, job, pipeline


def _bubbles(step: Callable[[], Any], pipeline: PipelineStep, rounds: int) -> dict[str, Any]:
    """Return the share of the time that ranks wait: measured, from the stages' median times, and by formula."""
    # Steps of their own, after the timed rounds.
    timelines = []
    for _ in range(max(3, rounds)):
        step()
        timelines.append(pipeline.timeline())
    # The timeline of one real step, that with the median bubble: an average would fit no step.
    middle = sorted(timelines, key=lambda timeline: timeline.bubble)[len(timelines) // 2]
    # The same schedule with each action's median time and free communication: the bubble that uneven stages explain.
    clock = simulate_schedule(pipeline.plan.actions_by_rank, _median_times(timelines))
    return {
        "bubble": middle.bubble,
        "clock_bubble": clock.bubble,
        "ideal_bubble": middle.ideal_bubble,
        "spans": [vars(span) for span in middle.spans],
        "clock_spans": [vars(span) for span in clock.spans],
    }


def _median_times(timelines: list[PipelineTimeline]) -> Callable[[Any], float]:
    """Return a function from an action to the median seconds of its kind of work on its stage."""
    times: dict[tuple[str, int], list[float]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            times.setdefault((span.kind, span.stage), []).append(span.stop_s - span.start_s)
    return lambda action: statistics.median(times[action.kind, action.stage])


def timeline_from(spans: Sequence[dict[str, Any]], result: dict[str, Any]) -> PipelineTimeline:
    """Make a timeline from the spans that `measure` returned."""
    return PipelineTimeline(result["workers"], result["microbatches"], tuple(ActionSpan(**span) for span in spans))
