"""Train 30 steps and say where the parameters ended, to the bit: `gated_training.py STRATEGY [FAULT]`.

Before steps 10 and 20 rank 0 says so and waits for a line on its input, while the others wait for it. A FAULT happens
to rank 1 there: "stop" stops its process.
"""

import hashlib
import os
import signal
import sys

import torch

import tutti

world = tutti.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
fault = sys.argv[2] if len(sys.argv) > 2 else ""
print("pid", os.getpid(), flush=True)
with tutti.distribute(model, optimizer, sys.argv[1]):
    torch.manual_seed(world.rank)
    for step in range(30):
        if step in (10, 20) and world.rank == 0:
            print("step", step, flush=True)
            sys.stdin.readline()
        if step == 10 and world.rank == 1 and fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
world.close()
print("digest", digest, flush=True)
