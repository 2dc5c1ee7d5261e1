"""Train two epochs with workers that may be lost, and say where the parameters ended: `elastic_training.py STRATEGY`.

Before step 10 rank 0 says so and waits for a line on its input, while the others wait for it. It does the same when
workers have come or gone, if its second argument is "gated".
"""

import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti

world = tutti.init()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randn(120, 8), torch.randn(120, 4))
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
waited = False
print("pid", os.getpid(), flush=True)
with tutti.distribute(model, optimizer, sys.argv[1]) as job:
    changes = []
    if "gated" in sys.argv and world.rank == 0:
        job.on_membership(changes.append)
    batches = tutti.shard(DataLoader(data, batch_size=2, shuffle=True))
    for epoch in batches.epochs(2):
        for inputs, targets in epoch:
            if job.steps == 10 and world.rank == 0 and not waited:  # The step may be void, and come again.
                waited = True
                print("step", job.steps, flush=True)
                sys.stdin.readline()
            if changes:
                print("changed", changes.pop().after, flush=True)
                sys.stdin.readline()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
size, norm = world.size, sum(float(each.detach().square().sum()) for each in model.parameters())
world.close()
print("end", job.steps, size, f"{norm:.12f}", flush=True)
