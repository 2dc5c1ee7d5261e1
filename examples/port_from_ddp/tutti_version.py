"""The same script with Tutti: torchrun or tutti run --workers 2 examples/port_from_ddp/tutti_version.py"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.recipes import digits


def main() -> None:
    world = tutti.init()
    torch.manual_seed(0)
    data = digits().data(None).train
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tutti.distribute(model, optimizer)
    batches = tutti.shard(DataLoader(data, batch_size=32, shuffle=True), seed=0)
    for _ in range(3):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    if world.rank == 0:
        print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
