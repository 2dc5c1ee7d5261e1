"""`tutti bench control`: a training step with and without heartbeats and phases, and their cost alone."""

import statistics
import time
from typing import Any

import torch

from tutti.bench.models import make_benchmark_model
from tutti.bench.training_steps import tutti_step
from tutti.collectives import all_gather_json
from tutti.coordination import frames
from tutti.coordination.activity import Activity
from tutti.coordination.link import ConnectedMember
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe

_ROUND_S = 0.25
"""Approximate time of one half of a round. A pause of the heartbeats that is as short changes nothing else."""
_WARM_UP_STEPS = 64
_OWN_ROUNDS, _OWN_REPEATS = 7, 2000
"""Repetitions of phases and of heartbeats alone."""
_BEATS_PER_SECOND = 4
_PHASES_PER_STEP = 4
"""Loading data, forward, backward, optimizer."""


class _Switch:
    """Turns phases and heartbeats of this process on and off."""

    def __init__(self, activity: Activity, member: ConnectedMember | None) -> None:
        self._activity, self._member = activity, member

    def set(self, on: bool) -> None:
        if self._member is not None:
            self._member.sends_heartbeats = on
        for name in ("enter", "stepped"):
            if on:
                vars(self._activity).pop(name, None)
            else:  # In front of the method, for this object alone.
                setattr(self._activity, name, lambda *_: None)


def measure(model: str, rounds: int) -> list[dict[str, Any]]:
    """Time rounds of steps with and without, in turn; the same on every rank. Collective.

    The ratio is the median of the rounds' ratios: both halves of a round are close in time, so that a disturbance
    mostly affects both. Half of the rounds begin with each.
    """
    world, supervisor = init(), SupervisorPipe()
    torch.set_num_threads(1)
    torch.manual_seed(world.rank)
    step, job = tutti_step(make_benchmark_model(model, world.size), world)
    member = world.transport.membership.member  # type: ignore[attr-defined]
    switch = _Switch(job._replica.activity, member)
    started = time.monotonic()
    for _ in range(_WARM_UP_STEPS):
        step()
    slowest_s = max(all_gather_json(time.monotonic() - started, world.transport)) / _WARM_UP_STEPS
    num_steps = max(4, int(_ROUND_S / slowest_s))
    samples: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds):
        supervisor.progress(done=number, total=rounds, model=model)
        for name in sorted(samples, reverse=bool(number % 2)):
            switch.set(name == "with")
            all_gather_json(0, world.transport)  # A barrier: all ranks start together.
            start = time.perf_counter()
            for _ in range(num_steps):
                step()
            seconds = max(all_gather_json(time.perf_counter() - start, world.transport))
            samples[name].append(seconds / num_steps)
    switch.set(True)
    phase_s, beat_s = (max(all_gather_json(own, world.transport)) for own in _own_seconds())
    job.finish()
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    ratios = [on / off for on, off in zip(samples["with"], samples["without"], strict=True)]
    # Processor time that a second of training loses, divided by that second.
    share = _PHASES_PER_STEP * phase_s / seconds["without"] + _BEATS_PER_SECOND * beat_s
    return [
        {
            "model": model,
            "workers": world.size,
            "transport": type(world.transport).__name__,
            "seconds": seconds,
            "ratio": statistics.median(ratios),
            "spread": statistics.quantiles(ratios, n=4)[2] - statistics.quantiles(ratios, n=4)[0],
            "phase_s": phase_s,
            "beat_s": beat_s,
            "share": share,
        }
    ]


def _own_seconds() -> tuple[float, float]:
    """Processor time of one change of phase, and of one heartbeat, without the system call that sends it."""
    activity, phases, beats = Activity(), [], []
    for _ in range(_OWN_ROUNDS):
        start = time.thread_time()
        for number in range(_OWN_REPEATS):
            activity.enter("forward" if number % 2 else "backward")
        phases.append((time.thread_time() - start) / _OWN_REPEATS)
        start = time.thread_time()
        for _ in range(_OWN_REPEATS):
            frames.encode({"op": "beat", "status": activity.status()})
        beats.append((time.thread_time() - start) / _OWN_REPEATS)
    # The least: whatever else the processor does makes a round longer, never shorter.
    return min(phases), min(beats)
