"""For `tutti run`: meet, say who one is and then reduce for ever."""

import os

import torch

import tutti

world = tutti.init()
tensor = torch.ones(1)
world.transport.all_reduce(tensor).wait()
print("pid", os.getpid(), flush=True)
while True:
    world.transport.all_reduce(tensor.fill_(1.0)).wait()
