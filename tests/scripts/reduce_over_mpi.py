"""Tell where this rank is and how long an all-reduce over MPI takes, in seconds: of 4 bytes, and of 4 MiB.

The shortest of several, since a busy machine delays some.
"""

import json
import socket
import sys
import time

import torch

import tutti

torch.set_num_threads(1)
world = tutti.init(transport=sys.argv[1])
seconds = []
for numel, rounds in ((1, 10), (2**20, 1)):
    tensor, times = torch.ones(numel), []
    world.transport.all_reduce(tensor).wait()  # A barrier.
    for power in range(2, rounds + 2):
        start = time.perf_counter()
        world.transport.all_reduce(tensor).wait()
        times.append(time.perf_counter() - start)
        assert torch.equal(tensor, torch.full((numel,), float(world.size) ** power))
    seconds.append(min(times))
hosts = len(set(world.transport.hosts))
name = world.transport.native_name(2**22)
told = {"rank": world.rank, "host": socket.gethostname(), "hosts": hosts, "name": name, "seconds": seconds}
sys.stdout.write(json.dumps(told) + "\n")
