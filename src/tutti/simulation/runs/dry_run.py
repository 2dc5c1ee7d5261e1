"""A profiled step in virtual time, by sizes alone: what formulas cannot tell."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from tutti.cluster import Cluster, Compute
from tutti.cost.bucket_loads import meta_tensor
from tutti.launch import init
from tutti.plan import Profile
from tutti.simulation.compute_clock import ComputeClock, Workload
from tutti.simulation.dry_replica import DryRunReplica
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import Strategy
from tutti.strategies.poseidon.cost import achieved_flops, factored_layers

_LEAST_S = 1e-9
"""No sample takes no time."""

_STEPS, _UNEVEN_STEPS = 4, 12
"""Of ranks in lockstep that are all alike, and of others; the first third is not counted."""


def dry_run(strategy: Strategy, profile: Profile, workers: int, cluster: Cluster) -> float:
    """Seconds a step that `workers` with such a profile would take under a strategy on a cluster.

    Where each goes at its own compute_clock, it is the step of those who would train as many samples a second together.
    """
    computing_s = max(_LEAST_S, profile.forward_s + profile.backward_s)
    compute = Compute(
        sample_s=computing_s / profile.num_samples, step_s=profile.step_s, forward=profile.forward_s / computing_s
    )
    paced = replace(cluster, compute=compute, failures={})
    parts = _model(profile), _workload(profile)
    steps = _num_steps(strategy, cluster)
    ranks = workers + strategy.num_dedicated_servers
    done = simulate(_train, strategy, parts, profile.num_samples, steps, workers=ranks, cluster=paced)
    first = steps // 3
    steps_a_s = [(steps - first) / (ends[-1] - ends[first - 1]) for ends in done.results if ends]
    return len(steps_a_s) / sum(steps_a_s)


def _num_steps(strategy: Strategy, cluster: Cluster) -> int:
    """Whole blocks, where there are any."""
    every = getattr(strategy, "every", 1)
    uneven = not strategy.synchronous or cluster.jitter is not None or cluster.pauses is not None
    return max(3 * every if isinstance(every, int) else 1, _UNEVEN_STEPS if uneven else _STEPS)


def _train(strategy: Strategy, parts: tuple[nn.Module, Workload], num_samples: int, steps: int) -> list[float]:
    """When each step ended on this rank. All ranks share the model: it has no values. A rank that serves has none."""
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
        exchange.finish()  # Or the others would take them for lost.
    return ends


def _model(profile: Profile) -> nn.Module:
    """Parameters of the same shapes, and nothing else; a replica takes the last of them first."""
    model = nn.Module()
    factored = {shape.name for shape in factored_layers(profile)}
    for number, gradient in reversed(list(enumerate(profile.gradients))):
        layer = nn.Linear(1, 1, bias=False, device="meta") if gradient.name in factored else nn.Module()
        layer.register_parameter("weight", nn.Parameter(meta_tensor(gradient)))
        model.add_module(f"p{number}", layer)
    return model


def _workload(profile: Profile) -> Workload:
    ready = [0.0, *(gradient.ready_s for gradient in profile.gradients)]
    gaps = [max(0.0, later - earlier) for earlier, later in pairwise(ready)]
    total = max(sum(gaps), _LEAST_S)
    factored = {shape.name: shape for shape in factored_layers(profile)}
    names = [f"p{number}.weight" for number in range(len(profile.gradients))]
    rows = {
        name: factored[each.name].rows / profile.num_samples
        for name, each in zip(names, profile.gradients, strict=True)
        if each.name in factored
    }
    flops = achieved_flops(profile) * (profile.forward_s + profile.backward_s) / 3 / profile.num_samples
    return Workload(flops, {name: gap / total for name, gap in zip(names, gaps, strict=True)}, rows)
