"""For `tutti run`: say in one line of JSON what this rank was given, and end as told.

--exit STATUS: rank 1 ends with it. --raise: rank 1 raises. --train: also train a step, and say with which strategy.
"""

import json
import sys

import torch

import tutti

world = tutti.init()
facts = {"rank": world.rank, "size": world.size, "args": sys.argv[1:], "name": __name__, "folder": sys.path[0]}
if "--train" in sys.argv:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tutti.distribute(model, optimizer, tutti.AllReduce(bucket_bytes=1234)) as job:
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
    facts["bucket_bytes"] = job.strategy.bucket_bytes
print(json.dumps(facts))
world.close()
if world.rank == 1 and "--raise" in sys.argv:
    raise LookupError("nothing to be found")
if world.rank == 1 and "--exit" in sys.argv:
    sys.exit(int(sys.argv[sys.argv.index("--exit") + 1]))
