"""Every all-reduce algorithm against one process, in a world of any size over any transport.

`check_all` makes all checks of one world. Threads, virtual time and MPI call the same function, so that a claim about
"every algorithm on every transport" is one list of worlds.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from equivalence.scenarios import (
    LONG_MESSAGES,
    SHORT,
    Scenario,
    assert_close,
    train,
    train_plainly,
)
from tutti.collectives import ALGORITHMS, all_gather_json
from tutti.strategies import AllReduce
from tutti.strategies.allreduce import NAMES
from tutti.world import World

FLOAT64_TOLERANCE = 1e-10

LENGTHS = (0, 1, 3, 1_000, 1_100, 20_000, 70_000)
"""Numbers of float32 elements around every limit of message sizes.

An empty tensor; fewer elements than ranks; both sides of a short socket frame (4 KiB); above what wakes a reader
(64 KiB); above an eager message and a chunk of the ring (256 KiB).
"""

LONGEST = 1_150_003
"""4.4 MiB: more than shared memory stages at once (4 MiB), and in 5 ranks every ring block still has several chunks.

Worlds of an odd number of ranks sum it: 3 divide it with a remainder too, and 5 have the shortest blocks.
"""

BUCKET_BYTES = 2_500
"""Small enough that `SHORT` has several buckets. A gradient is never cut, so `LONG_MESSAGES` keeps its long ones."""

reference = cache(train_plainly)


def check_all(world: World, third: int | None = None) -> bool:
    """Check sums and training by every algorithm in this world. Collective; raises where something differs.

    Args:
        third: 0, 1 or 2 to train by every third algorithm only, where other worlds of this size and other sizes on
            this transport train by the rest.
    """
    names = NAMES if third is None else NAMES[third::3]
    check_sums(world)
    check_training(world, SHORT, names)
    if world.size == 3:  # `check_sums` has long messages too.
        check_training(world, LONG_MESSAGES, names)
    return True


def check_sums(world: World) -> None:
    """Sum whole numbers, which are exact in any order, by every algorithm and with messages of every length."""
    for numel in (*LENGTHS, LONGEST) if world.size % 2 else LENGTHS:
        expected = _total(numel, world.size)
        for name, algorithm in ALGORITHMS.items():
            tensor = _whole_numbers(numel, world.rank).clone()
            algorithm(tensor, world.transport)
            assert torch.equal(tensor, expected), f"{name} of {numel} elements on {world.size} ranks"


def check_training(world: World, scenario: Scenario, names: Sequence[str]) -> None:
    """Train by each algorithm: near plain torch on whole batches, and with the same bits on all ranks."""
    for name in names:
        state = train(world, AllReduce(name, BUCKET_BYTES), scenario)
        assert_close(state, reference(scenario), FLOAT64_TOLERANCE)
        prints = all_gather_json(_fingerprint(state), world.transport)
        assert prints == prints[:1] * world.size, f"{name}: ranks differ, {prints}"


@cache
def _total(numel: int, size: int) -> Tensor:
    return torch.stack([_whole_numbers(numel, rank) for rank in range(size)]).sum(0)


@cache  # To make them takes longer than to add them up.
def _whole_numbers(numel: int, rank: int) -> Tensor:
    return ((torch.arange(numel) * 7 + 3 * rank) % 14).float()


def _fingerprint(state: dict[str, Tensor]) -> int:
    """A sum over the bits of every tensor: ranks that differ in one bit differ in it."""
    words = [tensor.reshape(-1).view(torch.int64) for tensor in state.values()]
    return int(sum((word * torch.arange(1, len(word) + 1)).sum() for word in words))
