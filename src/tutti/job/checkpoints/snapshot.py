"""The state of a whole run, put together on the rank that writes it.

How it works. All ranks are in `take`, between two steps. What follows is collective, so that the parts belong together:

1. Every rank sends the position of its data. (Random states came with the call in which ranks agreed.)
2. The strategy's state is gathered (`job.state_dict`).
3. In `job.consensus()` the model holds what all ranks agree on. The leader encodes everything and copies it.
4. A last call: nobody trains on before the leader has its copy. Under Hogwild the model itself lies in memory that
   other ranks write. It also carries the leader's error, a value that cannot be stored, to all ranks.

After that the copy belongs to the leader's background writer.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from tutti.checkpoint.storage import EncodedSnapshot, Snapshot
from tutti.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from tutti.job.handle import Job

Call = Callable[[str, Any, Callable[[dict[int, Any]], Any]], Any]
"""A collective call of all ranks that save together: its name, this rank's value, and what is made of all values."""


def take(
    job: "Job",
    optimizer: Optimizer,
    parts: Mapping[str, Any],
    state: Mapping[str, Any],
    call: Call,
    memory: EncodedSnapshot | None,
) -> EncodedSnapshot | None:
    """Return a copy of the state of all ranks on the leader, and None on others. Collective.

    Args:
        state: what is known already: the random state of every rank, and values of the user's own.
        call: makes a collective call of all ranks that save together.
        memory: an earlier copy that is overwritten, if there is one.
    """
    copies = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    # Also on ranks that do not write: the state of sharded data is put together by all ranks.
    states = {name: part.state_dict() for name, part in parts.items() if name not in copies}
    strategy = job.state_dict(everywhere=False)  # On the leader, which writes it.
    taken: EncodedSnapshot | None = None
    mistake: CheckpointError | None = None
    with job.consensus(*copies.values()) as model:
        if job.is_leader:
            states |= {name: part.state_dict() for name, part in copies.items()}
            snapshot = Snapshot(
                steps=job.steps,
                model=model.state_dict(),
                optimizer=optimizer.state_dict(),
                state={**state, "job": strategy, "parts": states},
                strategy=str(job.strategy),
                world_size=len(state["random"]),
            )
            try:
                taken = EncodedSnapshot.of(snapshot).copied(memory)
            except CheckpointError as error:
                mistake = error
        # A `ConfigError` in place of the value is raised on every rank.
        value = ConfigError(str(mistake)) if mistake else None
        call("job.checkpoint", value, lambda values: None)
    return taken
