"""`tutti bench compression`: training steps with every codec, beside exact strategies, DDP and its hooks."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tutti.bench.interleaved import Candidates, InterleavedTimer
from tutti.bench.models import BenchmarkModel, make_benchmark_model
from tutti.bench.training_steps import ddp_step, make_step, solo_step, torch_group, tutti_step
from tutti.codecs import CODECS, Chain, ErrorFeedback, Quantize, TopK, print_codec
from tutti.job import Job
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe

DEFAULT_CODECS = (*CODECS, "quantize:4", "topk:0.001", print_codec(ErrorFeedback(Chain(TopK(), Quantize(8)))))

_WARM_UP_STEPS = 4
"""Untimed steps of each candidate. PowerSGD compresses from its third step on (`start_powerSGD_iter`)."""

EXACT = ("ddp", "native")
"""Exact candidates that are always timed, beside the exact strategy that was asked for."""

GAIN = 1.1
"""Speed of a codec, relative to the fastest exact candidate, from which on it is recommended.

The same as `tutti.plan.choose.GAIN`: this benchmark checks by measurement what the planner predicts.
"""

NEAR = 1.15
"""Step time, relative to the fastest codec, up to which a codec counts as equally fast."""


@dataclass(frozen=True)
class CompressionReport:
    """Measured step times and traffic of one model on one link."""

    model: str
    num_parameters: int
    workers: int
    seconds: dict[str, float]
    """Seconds per step, by candidate: "solo", "ddp" and its hooks, and strategies."""
    bytes_sent: dict[str, float]
    """Bytes that one rank sends per step, by strategy."""
    exact: str
    """The exact strategy that codecs are compared with."""

    @property
    def codecs(self) -> list[str]:
        """The candidates that compress."""
        return [name for name in self.bytes_sent if name not in (*EXACT, self.exact)]

    def recommendation(self) -> str:
        """Say which codec to use, or none, and why.

        Among the codecs that are about as fast as the fastest, it is the one that sends most, and so loses least.
        """
        # Against the best of all exact candidates: a codec that only beats a slow one is not worth its loss.
        exact = min((name for name in self.seconds if name in (*EXACT, self.exact)), key=self.seconds.__getitem__)
        fastest = min(self.codecs, key=self.seconds.__getitem__)
        gain = self.seconds[exact] / self.seconds[fastest]
        if gain < GAIN:
            share = f"takes {1 / gain:.0%} of the time of {exact}"
            return f"none: the fastest codec, {fastest}, {share}. Do not compress here."
        # Sending more is a proxy for losing less: accuracy is not measured here.
        near = [name for name in self.codecs if self.seconds[name] <= NEAR * self.seconds[fastest]]
        best = max(near, key=self.bytes_sent.__getitem__)
        text = f"use {best}: {self.seconds[exact] / self.seconds[best]:.1f} times as fast as {exact}"
        if best != fastest:
            text += f"; {fastest} is {gain:.1f} times as fast, and sends less"
        return f"{text}. Accuracy was not measured."


def measure(model: str, exact: str, codecs: list[str], ddp_hooks: bool, rounds: int) -> dict[str, Any]:
    """Time a step of every candidate on all ranks. Returns the fields of a `CompressionReport`, on every rank."""
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)
    benchmark = make_benchmark_model(model, world.size)
    supervisor.progress(doing="warming up")
    # DDP has a group of its own in the same processes, so that all candidates share cores and links alike.
    with torch_group(world):
        candidates: Candidates = {"solo": solo_step(benchmark), "ddp": ddp_step(benchmark)}
        if ddp_hooks:
            candidates |= {
                "ddp fp16": _hooked(benchmark, None, fp16_compress_hook),
                "ddp powersgd": _power_sgd(benchmark),
            }
        jobs: dict[str, Job] = {}
        # `native` is always timed, but only once if it is also the exact strategy that was asked for.
        for text in [*dict.fromkeys(("native", exact)), *codecs]:
            candidates[text], jobs[text] = tutti_step(benchmark, world, text)
        for candidate in candidates.values():
            for _ in range(_WARM_UP_STEPS):
                candidate()
        seconds = InterleavedTimer(rounds, round_s=0.3, most_repeats=20, total_s=240.0).medians(
            candidates,
            world.transport,
            lambda text: supervisor.progress(doing=f"{text} of {len(candidates)} candidates"),
        )
    # Averages over all steps, those of the warm-up included.
    sent = {text: job.metrics.bytes_sent / job.metrics.steps for text, job in jobs.items()}
    for job in jobs.values():
        job.finish()
    return {
        "model": model,
        "num_parameters": sum(p.numel() for p in benchmark.model.parameters()),
        "workers": world.size,
        "seconds": seconds,
        "bytes_sent": sent,
        "exact": exact,
    }


def _hooked(benchmark: BenchmarkModel, state: Any, hook: Callable[..., Any], **options: Any) -> Callable[[], None]:
    """Return a step under DDP with one of torch's communication hooks."""
    model = DistributedDataParallel(copy.deepcopy(benchmark.model), gradient_as_bucket_view=True, **options)
    model.register_comm_hook(state, hook)
    return make_step(model, benchmark)[0]


def _power_sgd(benchmark: BenchmarkModel) -> Callable[[], None]:
    """Make a step with DDP's PowerSGD hook of rank 1, in one bucket: with several buckets it hangs on Gloo."""
    # Two is the least that torch allows with error feedback and warm start, both of which are on by default.
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return _hooked(benchmark, state, powerSGD_hook, bucket_cap_mb=10_000)
