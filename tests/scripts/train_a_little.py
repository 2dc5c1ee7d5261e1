"""Train a few steps, however one was started, and say where the parameters ended, to the bit."""

import hashlib

import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti

world = tutti.init()
torch.manual_seed(world.rank)  # Each starts elsewhere: `distribute` makes them one.
data = TensorDataset(torch.arange(44.0).reshape(22, 2).cos(), torch.arange(22.0).sin())
model = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with tutti.distribute(model, optimizer) as job:
    for _ in range(2):
        for x, y in tutti.shard(DataLoader(data, batch_size=4, shuffle=True)):
            (model(x).squeeze(1) - y).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = job.metrics.steps
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
kind = type(world.transport).__name__
world.close()
print(f"rank {world.rank} of {world.size}, local {world.local_rank}, {steps} steps, {kind}: {digest}", flush=True)
