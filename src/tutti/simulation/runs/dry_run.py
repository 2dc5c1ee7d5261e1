"""`dry_run`: the time of a profiled step in virtual time, by sizes alone, where cost formulas do not hold."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from tutti.cluster import Cluster, Compute
from tutti.cost.bucket_loads import meta_tensor
from tutti.launch import init
from tutti.plan import Profile
from tutti.simulation.compute_clock import ComputeClock
from tutti.simulation.dry_replica import DryRunReplica
from tutti.simulation.runs.simulate import simulate
from tutti.simulation.workload import Workload
from tutti.strategies import Strategy, as_strategy
from tutti.strategies.poseidon.cost import achieved_flops, factored_layers

_LEAST_S = 1e-9
"""Least computing time of a sample in seconds, since `Compute` refuses 0."""

_STEPS, _UNEVEN_STEPS = 4, 12
"""Steps to simulate: for synchronous ranks that are all alike, and for others. The first third is not counted."""


def dry_run(strategy: Strategy | str, profile: Profile, workers: int, cluster: Cluster) -> float:
    """Return the seconds of a step of `workers` with such a profile, under a strategy on a cluster.

    Where ranks are not synchronous, it is the harmonic mean of their steps: as many samples per second in all.
    """
    strategy = as_strategy(strategy)
    computing_s = max(_LEAST_S, profile.forward_s + profile.backward_s)
    compute = Compute(
        sample_s=computing_s / profile.num_samples, step_s=profile.step_s, forward=profile.forward_s / computing_s
    )
    timed = replace(cluster, compute=compute, failures={})  # The profile's compute times; no rank dies.
    parts = _model(profile), _workload(profile)
    steps = _num_steps(strategy, cluster)
    ranks = workers + strategy.num_dedicated_servers
    done = simulate(_train, strategy, parts, profile.num_samples, steps, workers=ranks, cluster=timed)
    first = steps // 3
    # Servers return no times.
    steps_per_s = [(steps - first) / (ends[-1] - ends[first - 1]) for ends in done.results if ends]
    return len(steps_per_s) / sum(steps_per_s)


def _num_steps(strategy: Strategy, cluster: Cluster) -> int:
    """Return how many steps to simulate: three blocks at least, where the strategy has blocks."""
    uneven = not strategy.synchronous or cluster.jitter is not None or cluster.pauses is not None
    return max(3 * (strategy.steps_per_exchange or 1), _UNEVEN_STEPS if uneven else _STEPS)


def _train(strategy: Strategy, parts: tuple[nn.Module, Workload], num_samples: int, steps: int) -> list[float]:
    """Return when each step ended on this rank: none on a server. All share the model, which has no values."""
    model, workload = parts
    transport = init().transport.channel("job")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = DryRunReplica(model, optimizer, ComputeClock(transport, workload))
    if transport.rank >= transport.size - strategy.num_dedicated_servers:
        strategy.serve(replica, transport)
        return []
    exchange, ends = strategy.attach(replica, transport), []
    for _ in range(steps):
        replica.step(num_samples)
        ends.append(transport.now())
    if not strategy.synchronous:
        exchange.finish()  # Else the others would take this rank for lost.
    return ends


def _model(profile: Profile) -> nn.Module:
    """Return a module with parameters of the profile's shapes, in reverse: a replica takes the last of them first."""
    model = nn.Module()
    factored = {shape.name for shape in factored_layers(profile)}
    for number, gradient in reversed(list(enumerate(profile.gradients))):
        # A `Linear` is what `factorable` looks for; its own weight is replaced at once.
        layer = nn.Linear(1, 1, bias=False, device="meta") if gradient.name in factored else nn.Module()
        layer.register_parameter("weight", nn.Parameter(meta_tensor(gradient)))
        model.add_module(f"p{number}", layer)
    return model


def _workload(profile: Profile) -> Workload:
    """Return the computation whose gradients become ready at the times that were profiled."""
    ready = [0.0, *(gradient.ready_s for gradient in profile.gradients)]
    # The share of a gradient is the time since the one before it. Measured times may be out of order.
    gaps = [max(0.0, later - earlier) for earlier, later in pairwise(ready)]
    total = max(sum(gaps), _LEAST_S)
    factored = {shape.name: shape for shape in factored_layers(profile)}
    names = [f"p{number}.weight" for number in range(len(profile.gradients))]
    rows = {
        name: factored[gradient.name].rows / profile.num_samples
        for name, gradient in zip(names, profile.gradients, strict=True)
        if gradient.name in factored
    }
    # Forward is a third of forward and backward together, by the convention of `Workload`.
    flops = achieved_flops(profile) * (profile.forward_s + profile.backward_s) / 3 / profile.num_samples
    return Workload(flops, {name: gap / total for name, gap in zip(names, gaps, strict=True)}, rows)
