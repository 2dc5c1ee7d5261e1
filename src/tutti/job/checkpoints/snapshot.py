"""The state of a whole run, copied on the rank that writes it, or in parts on those that hold a split model.

Where the first rank alone has it, `first_rank` needs one collective call. This is how it is done elsewhere.

How it works. All ranks are in `take`, between two steps. What follows is collective, so that the parts belong together:

1. Every rank sends the position of its data. (Random states came with the call in which ranks agreed.)
2. The strategy's state is gathered, on a mesh between ranks that hold the same part.
3. The model holds what all ranks agree on (`Job._saved_part`). The leader encodes everything and copies it. If a mesh
   splits the model, each rank of the first replica does so with its own part, and no rank has the whole model; the
   leader alone has what belongs to no parameter.
4. A last call: nobody trains on before all copies are made. Under Hogwild the model itself lies in memory that other
   ranks write. It also carries an error, a value that cannot be stored, to all ranks. And all learn which ranks have a
   copy. If ranks were lost meanwhile, some may have taken the first replica for the one that saves, and some the next.
   What is written is a replica whose ranks all have a copy. If there is none, nobody writes or waits to write.

After that each copy belongs to the background writer of its rank.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tutti.checkpoint.copies import TensorCopies
from tutti.checkpoint.snapshots import EncodedSnapshot, Snapshot, TakenApart
from tutti.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from tutti.job.handle import Job

_log = logging.getLogger("tutti")

Call = Callable[[str, Any, Callable[[dict[int, Any]], Any]], Any]
"""A collective call of all ranks that save together: its name, this rank's value, and what is made of all values."""


def take(
    job: "Job",
    parts: Mapping[str, Any],
    state: Mapping[str, Any],
    call: Call,
    memory: TensorCopies | None,
    replica_ranks: Sequence[int],
) -> tuple[EncodedSnapshot | None, list[int]]:
    """Return a copy of the state of all ranks, or this rank's part, and which ranks have one. Collective.

    It is None on ranks that save nothing. Without a rank that has one, nobody does: all that had were lost.

    Args:
        state: what is known already: the random state of every rank, and values of the user's own.
        call: makes a collective call of all ranks that save together.
        memory: tensors of an earlier copy that are overwritten, if there is one.
        replica_ranks: the ranks that hold a replica of the model with this one, and itself.
    """
    copies = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    # Also on ranks that do not write: the state of sharded data is put together by all ranks.
    states = {name: part.state_dict() for name, part in parts.items() if name not in copies}
    taken: EncodedSnapshot | None = None
    mistake: CheckpointError | None = None
    with job._saved_part(*copies.values()) as part:
        if part is not None:
            own: dict[str, Any] = {}
            if job.is_leader:
                states |= {name: copy.state_dict() for name, copy in copies.items()}
                own = {**state, "parts": states}
            snapshot = Snapshot(
                steps=job.steps,
                model=part.model,
                optimizer=part.optimizer,
                state={**own, "job": part.job},
                strategy=str(job.strategy),
                world_size=len(state["random"]),
            )
            try:
                taken = TakenApart(snapshot, None if memory is None else memory.layout).copied(memory)
            except CheckpointError as error:
                mistake = error
        # A `ConfigError` in place of the value is raised on every rank.
        value = ConfigError(str(mistake)) if mistake else taken is not None
        savers = call("job.checkpoint", value, lambda values: [rank for rank, saves in values.items() if saves])
    if not savers and job.is_leader:
        _log.error("no checkpoint of step %d: the rank that copied it was lost. Training goes on.", job.steps)
    if taken is not None and not set(replica_ranks) <= set(savers):
        _log.error("no checkpoint of step %d: a rank was lost while it was copied. Training goes on.", taken.steps)
        return None, savers
    return taken, savers


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Put back this rank's own buffers, such as running statistics, where a consensus replaces them for good."""
    buffers = list(model.buffers())
    own = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in zip(buffers, own, strict=True):
                buffer.copy_(values)
