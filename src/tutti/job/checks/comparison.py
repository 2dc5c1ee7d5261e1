"""Comparisons between replicas: a few numbers of each rank, and what they mean where they differ."""

import torch

from tutti.collectives import all_gather_json, recursive_doubling, run
from tutti.errors import RankLost, ReplicaMismatch
from tutti.transports import Transport, Work

RESERVED_TAG = 2**14
"""Tags of messages of checks begin here: collectives use small ones, and MPI guarantees tags up to 32,767."""

_LAST_TAG = RESERVED_TAG - 1
"""Tag of the comparison at the end."""


def share(numbers: list[int], transport: Transport) -> list[list[int]]:
    """Return the numbers of every rank, by rank. Collective."""
    rows = torch.zeros(transport.size, len(numbers), dtype=torch.int64, device="cpu")
    rows[transport.rank] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    run(recursive_doubling.steps(rows, transport))
    return rows.tolist()


def share_among_living(numbers: list[int], transport: Transport) -> dict[int, list[int]]:
    """Return the numbers of every rank that is not lost, by rank. Collective among them.

    Every rank sends directly to all others, so that no rank waits for one that waits for a lost one.
    """
    local = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    rows = {peer: torch.empty_like(local) for peer in range(transport.size) if peer != transport.rank}
    sends = [transport.isend(local, peer, _LAST_TAG) for peer in rows]
    receives = {peer: transport.irecv(row, peer, _LAST_TAG) for peer, row in rows.items()}
    living = {peer: rows[peer].tolist() for peer, work in receives.items() if completes(work)}
    for work in sends:
        completes(work)
    return dict(sorted({**living, transport.rank: numbers}.items()))


def completes(work: Work) -> bool:
    """Wait for a message; False if the peer is lost."""
    try:
        work.wait()
    except RankLost:
        return False
    return True


def difference(names: list[str], prints: dict[int, list[int]], rank: int, when: str) -> ReplicaMismatch:
    """Return the error that names the first tensor that differs, and the ranks; `prints` are those of each rank."""
    columns = list(zip(*prints.values(), strict=True))
    differing = [index for index, column in enumerate(columns) if len(set(column)) > 1]
    groups: dict[int, list[int]] = {}
    for other, row in prints.items():
        groups.setdefault(row[differing[0]], []).append(other)
    # The fewer come first: where one rank of many differs, that is the one to look at.
    texts = ", ".join(" and ".join(f"rank {other}" for other in ranks) for ranks in sorted(groups.values(), key=len))
    return ReplicaMismatch(
        f"rank {rank}: the models differ between ranks {when}, first in '{names[differing[0]]}' ({len(differing)} of "
        f"{len(names)} tensors): different values on {texts}. Something changed the model on some ranks only, "
        "load_state_dict for example. Do that before tutti.distribute, which copies rank 0's values to all ranks, or "
        "on every rank alike."
    )


def gathered(local: list[int], transport: Transport) -> dict[int, list[int]]:
    """Return the fingerprints of every rank. Collective."""
    return dict(enumerate(all_gather_json(local, transport)))
