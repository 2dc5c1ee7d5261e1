"""Compare strategies on a slow link: four hosts at 100 Mbit/s, in virtual time.

Gradients are real, so the losses are what real workers would reach; the clock is modelled.

python examples/slow_network.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.recipes import digits

STRATEGIES = ["ring", "onebit", "averaging:every=8", "bmuf:every=8+onebit"]
"""Exact; gradients compressed to one bit per value; local steps between averages; both together."""


def train(strategy: str) -> float:
    tutti.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = tutti.distribute(model, optimizer, strategy=strategy)
    batches = tutti.shard(DataLoader(digits().data(None).train, batch_size=32, shuffle=True))
    for _ in range(3):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return loss.item()


if __name__ == "__main__":
    cluster = tutti.Cluster(hosts=4, link=tutti.Link("100mbit", "100us"))
    for strategy in STRATEGIES:
        run = tutti.simulate(train, strategy, workers=4, cluster=cluster)
        print(f"{strategy:24} {run.seconds:7.2f} virtual seconds, last loss {run.results[0]:.3f}")
