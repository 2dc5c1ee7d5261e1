"""A checkpoint, read by one rank, sent to all ranks, and loaded by each.

Only the leader reads: hosts need not share a file system, and every byte is read and checked once.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.checkpoint.index import INDEX, CheckpointIndex, is_checkpoint_name, read_index
from tutti.checkpoint.storage import Snapshot, StoredSnapshot, read, read_newest
from tutti.collectives import broadcast_all, broadcast_json
from tutti.errors import CheckpointError, ConfigError
from tutti.job.state import refuse_another_model
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.replica.state import load_model_state, load_optimizer_state
from tutti.transports import Transport


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The checkpoint from which a run continues."""

    folder: Path
    steps: int
    """Steps that were trained before it."""
    strategy: str
    """The strategy that trained them."""
    world_size: int
    """The number of ranks that did."""
    extra: dict[str, Any]
    """What `job.checkpoint(extra=...)` was given."""

    @classmethod
    def of(cls, folder: Path, snapshot: Snapshot) -> "Restored":
        """Describe a snapshot that was read from a folder."""
        return cls(
            folder=folder,
            steps=snapshot.steps,
            strategy=snapshot.strategy,
            world_size=snapshot.world_size,
            extra=snapshot.state["extra"],
        )


def receive(transport: Transport, run: Path) -> tuple[Path, Snapshot] | None:
    """Read on rank 0 and send to the others; every rank gets the same snapshot, None or error."""
    found, mistake = None, ""
    if transport.rank == 0:
        try:
            found = (run, read(run)) if (run / INDEX).exists() else read_newest(run)
            if found is None and is_checkpoint_name(run.name):
                # One that was deleted, or has lost its index, is no run that is yet to start.
                read_index(run)
        except (CheckpointError, OSError) as error:  # A path that is too long, for example.
            mistake = str(error)
    header = None if found is None else {"folder": str(found[0]), "index": asdict(found[1].index)}
    mistake, header = broadcast_json([mistake, header], transport)
    if mistake:
        raise CheckpointError(f"rank {transport.world_rank}: {mistake}")
    if header is None:
        return None
    index = CheckpointIndex.from_fields(header["index"])
    contents = (
        found[1].contents
        if found is not None
        else {name: torch.empty(file.size, dtype=torch.uint8) for name, file in index.files.items()}
    )
    broadcast_all([contents[name] for name in index.files], transport)
    return Path(header["folder"]), StoredSnapshot(index, contents).decoded()


def load_model(snapshot: Snapshot, optimizer: Optimizer, model: nn.Module, model_on_mesh: ModelOnMesh | None) -> None:
    """Load the whole model and the state of its optimiser, also into a model that is split. Collective on a mesh."""
    split = nullcontext() if model_on_mesh is None else model_on_mesh.full_model(optimizer=True, keep_changes=True)
    with split, torch.no_grad():
        _check_model(snapshot.model, model.state_dict())
        load_model_state(model, snapshot.model)
        _load_optimizer(optimizer, snapshot.optimizer)


def _check_model(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if names or shapes of two models' states differ, with the first difference."""
    shapes = [
        {name: list(value.shape) if isinstance(value, torch.Tensor) else [] for name, value in state.items()}
        for state in (saved, present)
    ]
    refuse_another_model(shapes[0], shapes[1], what="this checkpoint")


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimiser's state. Raises `ConfigError` if it is of another optimiser."""
    try:
        load_optimizer_state(optimizer, dict(state))
        # Options that its first step would look for. Those that older versions of torch did not have are added by it.
        for option in sorted(optimizer.defaults):
            if not all(option in group for group in optimizer.param_groups):
                raise ValueError(f"it has no '{option}'")
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"this checkpoint was saved with another optimiser than this {type(optimizer).__name__}: {error}"
        ) from error
