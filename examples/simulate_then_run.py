"""Ask the simulator how a job would run on a cluster, then run the same function in real processes.

python examples/simulate_then_run.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.recipes import digits


def train(epochs: int) -> list[float]:
    tutti.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tutti.distribute(model, optimizer, strategy="ring")
    batches = tutti.shard(DataLoader(digits().data(None).train, batch_size=32, shuffle=True))
    for _ in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return model[1].weight.detach().flatten().tolist()


if __name__ == "__main__":
    for workers in (2, 8, 32):
        run = tutti.simulate(train, 1, workers=workers, cluster=tutti.Cluster.load("ethernet-1g"))
        print(f"{workers:3} simulated workers: {run.seconds:.3f} s of virtual time per epoch")
    simulated = tutti.simulate(train, 1, workers=2).results[0]
    real = tutti.launch(train, 1, workers=2)[0]
    print("simulated and real weights are equal to the last bit:", simulated == real)
