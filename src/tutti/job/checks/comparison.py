"""Comparisons between replicas: a few numbers of each rank, and what they mean where they differ."""

import torch

from tutti.collectives import all_gather_json, recursive_doubling, run
from tutti.errors import ReplicaMismatch
from tutti.transports import Transport

RESERVED_TAG = 2**20
"""Tags of messages of checks begin here: the world's own collectives use small ones."""


def share(numbers: list[int], transport: Transport) -> list[list[int]]:
    """Return the numbers of every rank, by rank. Collective."""
    rows = torch.zeros(transport.size, len(numbers), dtype=torch.int64, device="cpu")
    rows[transport.rank] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    run(recursive_doubling.steps(rows, transport))
    return [[int(number) for number in row] for row in rows.tolist()]


def difference(names: list[str], local: list[int], transport: Transport, when: str) -> ReplicaMismatch:
    """Return the error that names the first tensor that differs, and the ranks. Collective."""
    by_rank = all_gather_json(local, transport)
    first = next(i for i in range(len(names)) if any(row[i] != by_rank[0][i] for row in by_rank))
    values = [row[first] for row in by_rank]
    # Named are the fewer ones: where one rank of many differs, that is the one to look at.
    groups: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    texts = ", ".join(" and ".join(f"rank {rank}" for rank in ranks) for ranks in sorted(groups.values(), key=len))
    differing = sum(any(row[i] != by_rank[0][i] for row in by_rank) for i in range(len(names)))
    return ReplicaMismatch(
        f"rank {transport.world_rank}: the models differ between ranks {when}, first in '{names[first]}' "
        f"({differing} of {len(names)} tensors): different values on {texts}. Something changed the model on some "
        "ranks only, load_state_dict for example. Do that before tutti.distribute, which copies rank 0's values to all "
        "ranks, or on every rank alike."
    )
