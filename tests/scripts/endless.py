"""Launch two workers that meet, say who they are and then reduce for ever. Exits 130 on Ctrl-C."""

import os
import sys

import torch

import tutti


def work() -> None:
    world = tutti.init()
    tensor = torch.ones(1)
    world.transport.all_reduce(tensor).wait()
    print("pid", os.getpid(), flush=True)
    while True:
        world.transport.all_reduce(tensor.fill_(1.0)).wait()


if __name__ == "__main__":
    try:
        tutti.launch(work, workers=2, transport=sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)
