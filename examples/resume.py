"""Save all state of a run while it trains, and continue it with other workers under another strategy.

python examples/resume.py
"""

import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.recipes import digits


def train(run: str, epochs: int, strategy: str = "native") -> list[torch.Tensor]:
    world = tutti.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = tutti.distribute(model, optimizer, strategy)
    batches = tutti.shard(DataLoader(digits().data(None).train, batch_size=24, shuffle=True))
    restored = job.restore(run, batches)  # None where there is no checkpoint yet.
    if world.rank == 0:
        print(f"{world.size} workers, {strategy}: from step {restored.steps if restored else 0}", end=" ")
    for epoch in batches.epochs(epochs):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            job.checkpoint(run, batches, every=20)  # Or a time: every="5m".
    job.checkpoint(run, batches)
    if world.rank == 0:
        print(f"to step {job.steps}")
    job.finish()
    return [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        whole = tutti.launch(train, f"{folder}/whole", 4, workers=2)[0]
        tutti.launch(train, f"{folder}/moved", 2, workers=2)
        moved = tutti.launch(train, f"{folder}/moved", 4, "ring", workers=3)[0]  # Stopped after 2 epochs, continued.
        difference = max(float((a - b).abs().max()) for a, b in zip(whole, moved, strict=True))
        print(f"stopped and continued elsewhere: parameters differ by {difference:.0e}")
