"""One of four workers pauses now and then: how long do the others wait under each consistency?

Parameter servers let fast workers run ahead: SSP by a bounded number of steps, async without a bound. The cluster is
simulated, so the result is the same on every machine. `python examples/stragglers.py`
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.cluster import Compute, Pauses
from tutti.recipes import digits


def train(strategy: str) -> float:
    tutti.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)  # Stale gradients need a lower learning rate.
    job = tutti.distribute(model, optimizer, strategy=strategy)
    batches = tutti.shard(DataLoader(digits().data(None).train, batch_size=32, shuffle=True))
    for _ in range(3):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return job.metrics.waiting_share


if __name__ == "__main__":
    cluster = tutti.Cluster(
        hosts=4,
        link=tutti.Link("1gbit", "50us"),
        compute=Compute(sample_s="200us"),
        pauses=Pauses(every_s="200ms", length_s="50ms"),  # Each rank, at random.
        seed=1,
    )
    for strategy in ["ps:bsp", "ps:ssp=3", "ps:async"]:
        run = tutti.simulate(train, strategy, workers=4, cluster=cluster)
        waiting = sum(run.results) / len(run.results)
        print(f"{strategy:10} {run.seconds:6.2f} virtual seconds, {waiting:4.0%} of them spent waiting")
