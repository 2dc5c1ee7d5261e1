"""Is a codec worth it here: training steps with each, beside exact ones, DDP and its hooks."""

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

WARM_UP = 4

EXACT = ("ddp", "native")
"""What is exact and always timed, beside the exact strategy that was asked for."""

GAIN = 1.1
"""What is lossy must be faster than what is exact by this to be worth it."""

NEAR = 1.15
"""What takes no longer than this times the fastest is about as fast."""


@dataclass(frozen=True)
class CompressionReport:
    """What was found for one model and one link."""

    model: str
    num_parameters: int
    workers: int
    seconds: dict[str, float]
    """A step, by way: "solo", "ddp" and its hooks, and strategies as texts."""
    bytes_sent: dict[str, float]
    """By a rank in a step, by strategy."""
    exact: str
    """The exact strategy that codecs are compared with."""

    @property
    def codecs(self) -> list[str]:
        return [way for way in self.bytes_sent if way not in (*EXACT, self.exact)]

    def recommendation(self) -> str:
        """Which to use, or none, and why: the one that says most among those that are about as fast as the fastest."""
        exact = min((way for way in self.seconds if way in (*EXACT, self.exact)), key=self.seconds.__getitem__)
        fastest = min(self.codecs, key=self.seconds.__getitem__)
        gain = self.seconds[exact] / self.seconds[fastest]
        if gain < GAIN:
            share = f"takes {1 / gain:.0%} of the time of {exact}"
            return f"none: the fastest codec, {fastest}, {share}. Do not compress here."
        near = [way for way in self.codecs if self.seconds[way] <= NEAR * self.seconds[fastest]]
        best = max(near, key=self.bytes_sent.__getitem__)
        text = f"use {best}: {self.seconds[exact] / self.seconds[best]:.1f} times as fast as {exact}"
        if best != fastest:
            text += f"; {fastest} is {gain:.1f} times as fast, and says less"
        return f"{text}. Accuracy was not measured."


def measure(model: str, exact: str, codecs: list[str], peers: bool, rounds: int) -> dict[str, Any]:
    """Time a step of every way, on this rank and its peers; the fields of `CompressionReport`, on every rank."""
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)
    case = make_benchmark_model(model, world.size)
    supervisor.progress(doing="warming up")
    with torch_group(world):
        ways: Candidates = {"solo": solo_step(case), "ddp": ddp_step(case)}
        if peers:
            ways |= {"ddp fp16": _hooked(case, None, fp16_compress_hook), "ddp powersgd": _power_sgd(case)}
        jobs: dict[str, Job] = {}
        for text in [*dict.fromkeys(("native", exact)), *codecs]:
            ways[text], jobs[text] = tutti_step(case, world, text)
        for way in ways.values():
            for _ in range(WARM_UP):
                way()
        seconds = InterleavedTimer(rounds, round_s=0.3, most_repeats=20, total_s=240.0).medians(
            ways, world.transport, lambda text: supervisor.progress(doing=f"{text} of {len(ways)} ways")
        )
    sent = {text: job.metrics.bytes_sent / job.metrics.steps for text, job in jobs.items()}
    for job in jobs.values():
        job.finish()
    return {
        "model": model,
        "num_parameters": sum(p.numel() for p in case.model.parameters()),
        "workers": world.size,
        "seconds": seconds,
        "bytes_sent": sent,
        "exact": exact,
    }


def _hooked(case: BenchmarkModel, state: Any, hook: Callable[..., Any], **options: Any) -> Callable[[], None]:
    model = DistributedDataParallel(copy.deepcopy(case.model), gradient_as_bucket_view=True, **options)
    model.register_comm_hook(state, hook)
    return make_step(model, case)[0]


def _power_sgd(case: BenchmarkModel) -> Callable[[], None]:
    """torch's own, of rank 1, in one bucket: with several it hangs on Gloo."""
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return _hooked(case, state, powerSGD_hook, bucket_cap_mb=10_000)
