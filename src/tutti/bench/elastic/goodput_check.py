"""The goodput model beside simulated elastic runs: does it predict how much work is done under the same failures?

A run with failures and one without are simulated, with real gradients. The model gets the times at which workers were
lost and came in the first of them, and says how much useful work that leaves. It is the work of the second run.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tutti.cluster import Cluster, Compute, Link
from tutti.cost import Profile
from tutti.cost.profile import Gradient
from tutti.data.shard import shard
from tutti.job.distribution import distribute
from tutti.launch import init
from tutti.plan.goodput import elastic_costs, useful_work
from tutti.simulation.runs.simulate import Simulation, simulate
from tutti.strategies import parse

_FEATURES, _BATCH, _SAMPLE_S = 64, 8, 0.01
_LINK = Link("1gbit", "50us")


@dataclass(frozen=True)
class GoodputCheck:
    """The useful work of a simulated run, and what the model says."""

    strategy: str
    workers: int
    losses: int
    simulated: float
    """Time of the run without failures, relative to that of the run with them."""
    predicted: float

    @property
    def error(self) -> float:
        """The difference, relative to the simulation."""
        return self.predicted / self.simulated - 1


def check(strategy: str, workers: int, chaos: str, num_steps: int = 100) -> GoodputCheck:
    """Simulate a run with failures, and predict its goodput."""
    cluster = Cluster(link=_LINK, compute=Compute(sample_s=_SAMPLE_S))
    wanted, done = (
        simulate(_train, strategy, workers, num_steps, workers=(1, workers), chaos=text, cluster=cluster)
        for text in (None, chaos)
    )
    begin_s, end_s, events = _events(done, workers)
    costs = elastic_costs(parse(strategy), _profile(cluster), workers, cluster)
    total_s, work = useful_work(costs, workers, [*events, (end_s - begin_s, 0)])
    first_s, last_s, _ = _events(wanted, workers)
    simulated = (last_s - first_s) / (end_s - begin_s)
    return GoodputCheck(strategy, workers, len(done.lost), simulated, work["useful"] / total_s)


def _train(strategy: str, workers: int, num_steps: int) -> list[tuple[float, int]]:
    """Train; return when each batch was drawn, and how many ranks there were. The function of every rank."""
    world = init()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(num_steps * workers * _BATCH, _FEATURES))
    model = nn.Linear(_FEATURES, _FEATURES, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = distribute(model, optimizer, strategy)
    times = []
    for epoch in shard(DataLoader(data, batch_size=_BATCH)).epochs(1):
        for (x,) in epoch:
            times.append((world.transport.now(), world.size))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return times


def _events(done: Simulation, workers: int) -> tuple[float, float, list[tuple[float, int]]]:
    """Return when training began and ended, and the changes of the number of ranks since then."""
    records = [result for result in done.results if result]
    begin_s = min(times[0][0] for times in records)
    losses = [(at_s - begin_s, -1) for number, at_s in done.lost.items() if number in done.joined]
    joins = [(at_s - begin_s, 1) for number, at_s in done.joined.items() if number >= workers]
    return begin_s, done.seconds, sorted([*losses, *joins])


def _profile(cluster: Cluster) -> Profile:
    """Return the step of a worker."""
    computing_s = _BATCH * _SAMPLE_S
    forward_s = computing_s * cluster.compute.forward
    num_bytes = 4 * _FEATURES**2
    gradient = Gradient(
        name="weight", shape=(_FEATURES, _FEATURES), num_bytes=num_bytes, ready_s=computing_s - forward_s
    )
    return Profile(
        num_samples=_BATCH,
        layers=(),
        gradients=(gradient,),
        forward_s=forward_s,
        backward_s=computing_s - forward_s,
        step_s=cluster.compute.step_s,
        peak_bytes=3 * num_bytes,
    )
