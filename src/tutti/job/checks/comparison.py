"""Comparisons between replicas: a few numbers of each rank, and what they mean where they differ."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from tutti.collectives import all_gather_json, recursive_doubling, run
from tutti.errors import RankLost, ReplicaMismatch
from tutti.transports import Transport, Work

RESERVED_TAG = 2**14
"""Tags of messages of checks begin here: collectives use small ones, and MPI guarantees tags up to 32,767."""

_NUM_JOBS = 2**12
"""Numbers of jobs that are told apart: messages of one that failed are not taken for those of the next."""


def tag_of(kind: int, job: int) -> int:
    """Return the tag of a kind of message, from 0 to 3, of the job with a number."""
    return RESERVED_TAG + kind * _NUM_JOBS + job % _NUM_JOBS


def share(numbers: list[int], transport: Transport) -> list[list[int]]:
    """Return the numbers of every rank, by rank. Collective."""
    rows = torch.zeros(transport.size, len(numbers), dtype=torch.int64, device="cpu")
    rows[transport.rank] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    run(recursive_doubling.steps(rows, transport))
    return rows.tolist()


def share_among_living(numbers: list[int], transport: Transport, tag: int) -> dict[int, list[int]]:
    """Return the numbers of every rank that is not lost, by rank. Collective among them.

    Every rank sends directly to all others, so that no rank waits for one that waits for a lost one.
    """
    local = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    messages = Messages(local, transport, tag)
    return {rank: row.tolist() for rank, row in messages.wait().items()}


class Messages:
    """A tensor that is sent to every other rank, and theirs that come. A rank that is lost is left out, not waited for.

    Starting a message may find that the peer is gone, as waiting for it may.
    """

    def __init__(self, local: Tensor, transport: Transport, tag: int) -> None:
        self._rank, self._local = transport.rank, local
        self._rows = {peer: torch.empty_like(local) for peer in range(transport.size) if peer != transport.rank}
        # Receives first: a peer may leave as soon as it has what it is sent here, and none can be started from it then.
        self._receives = {peer: _started(transport.irecv, row, peer, tag) for peer, row in self._rows.items()}
        self._sends = [_started(transport.isend, local, peer, tag) for peer in self._rows]

    def done(self) -> bool:
        """Whether every message has been sent and received, and no peer is lost."""
        return all(work is not None and work.done() for work in [*self._sends, *self._receives.values()])

    def wait_for(self, seconds: float) -> dict[int, Tensor]:
        """Return the tensors of this rank and of those whose messages come within some seconds, by rank."""
        deadline = time.monotonic() + seconds
        # A lost peer has no message left to wait for: its work is done, or was never started.
        while any(work is not None and not work.done() for work in self._receives.values()):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        came = {peer: row for peer, row in self._rows.items() if _has_come(self._receives[peer])}
        return dict(sorted({**came, self._rank: self._local}.items()))

    def wait(self) -> dict[int, Tensor]:
        """Return the tensors of this rank and of all that sent theirs, by rank. One that was lost after that counts."""
        for work in self._sends:
            _completes(work)
        came = {peer: self._rows[peer] for peer, work in self._receives.items() if _completes(work)}
        return dict(sorted({**came, self._rank: self._local}.items()))


def _started(start: Callable[[Tensor, int, int], Work], tensor: Tensor, peer: int, tag: int) -> Work | None:
    """Start a message; None if the peer is lost."""
    try:
        return start(tensor, peer, tag)
    except RankLost:
        return None


def _has_come(work: Work | None) -> bool:
    """Whether a message is here. Does not wait."""
    return work is not None and work.done() and _completes(work)


def _completes(work: Work | None) -> bool:
    """Wait for a message; False if the peer is lost."""
    try:
        if work is not None:
            work.wait()
    except RankLost:
        return False
    return work is not None


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
        f"{len(names)} tensors): different values on {texts}. Something changed the model on some ranks only. "
        "Load states before distribute, which copies rank 0's values to all ranks, or on every rank. Give a scheduler "
        'that looks at the loss the mean of all ranks, job.reduce(loss, "mean"). Every rank must enter job.consensus() '
        "as often as the others."
    )


def gathered(local: list[int], transport: Transport) -> dict[int, list[int]]:
    """Return the fingerprints of every rank. Collective."""
    return dict(enumerate(all_gather_json(local, transport)))
