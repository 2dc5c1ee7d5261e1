"""The equivalence suite over MPI: a program for `mpirun -n 3`, since MPI's ranks are processes.

One launch checks everything: sums by every algorithm in worlds of 1 to 3 ranks, training by a third of them in each,
and every scenario and strategy in the whole world. Each rank compares with plain torch by itself.
"""

from dataclasses import replace
from datetime import timedelta

import torch

import tutti
from equivalence.algorithms import check_all, reference
from equivalence.scenarios import EXACT, OWN, SCENARIOS, assert_close, train
from tutti.world import World

STEPS = 2
"""Steps of each scenario. Threads run all of them; over MPI only the messages differ."""


def check_scenarios(world: World) -> None:
    """Every scenario with plain all-reduce, and all of them together with every other strategy, for a few steps."""
    for name, whole in SCENARIOS.items():
        scenario = replace(whole, steps=STEPS)
        for strategy in OWN if name != "all together" else EXACT:
            if "soft-sync" not in strategy:  # Each update is clipped by itself there, not their mean.
                assert_close(train(world, EXACT[strategy], scenario), reference(scenario), 1e-10)


def main() -> None:
    torch.set_num_threads(1)
    world = tutti.init(transport="mpi", timeout=timedelta(seconds=40))
    for size in range(1, world.size + 1):
        if world.rank < size:
            some = world.transport.channel(f"first {size}", range(size))
            check_all(replace(world, size=size, transport=some), size % 3)
    check_scenarios(world)
    print(f"rank {world.rank} is content", flush=True)
