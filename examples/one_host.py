"""Train on this machine's cores: four processes, gradients averaged by an all-reduce in every step.

python examples/one_host.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.recipes import digits


def train(epochs: int = 3) -> float:
    world = tutti.init()
    torch.manual_seed(0)
    data = digits().data(None)  # Handwritten digits: 8 x 8 pixels, ten classes; part of Tutti.
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = tutti.distribute(model, optimizer)  # The default strategy: an exact all-reduce of gradients.
    batches = tutti.shard(DataLoader(data.train, batch_size=32, shuffle=True))  # This rank's part of every epoch.
    for _ in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # p.grad is now the mean over all ranks.
            optimizer.step()
            optimizer.zero_grad()
    job.finish()

    x, y = next(iter(DataLoader(data.test, batch_size=len(data.test))))
    correct = (model(x).argmax(1) == y).float().mean().item()
    if world.rank == 0:
        print(f"{world.size} workers: {correct:.1%} of the test digits are recognised")
    return correct


if __name__ == "__main__":
    tutti.launch(train, workers=4)
