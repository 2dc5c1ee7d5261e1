"""Snapshots of a training run, written to checkpoints and read from them.

How it works. `CheckpointWriter` holds the lock of the run's folder, so that there is one writer. A checkpoint goes
through these names, and only a rename leads from one to the next:

    .writing-step-N    its files are being written; each is synchronised with the disk, then the folder
    step-N             complete: readers look for this name only
    .replaced-step-N   moved away for another checkpoint of the same step; readers take it while step-N is missing
    .deleted-step-N    being deleted

The new checkpoint is complete before an old one is touched. A writer that is killed leaves hidden folders, which the
next write removes; a checkpoint under `.replaced-` goes back to its name if there is no other. `latest.json` is for
people and other programs: reading does not depend on it.
"""

import logging
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tutti.checkpoint import durable
from tutti.checkpoint.file_system import warn_about
from tutti.checkpoint.index import (
    INDEX,
    MODEL,
    OPTIMIZER,
    REPLACED,
    STATE,
    CheckpointIndex,
    candidates,
    checkpoints,
    folder_name,
    index_bytes,
    newest_complete,
    read_index,
    refuse_if_any,
    warn_skipped,
)
from tutti.checkpoint.parallel import in_parallel
from tutti.checkpoint.run_lock import RunLock
from tutti.checkpoint.tensor_files import parse_tensors, read_file, write_tensors
from tutti.checkpoint.tree import decode, encode
from tutti.errors import CheckpointError, ConfigError

_log = logging.getLogger("tutti")

_WRITING, _DELETED = ".writing-", ".deleted-"


__all__ = [
    "CheckpointWriter",
    "EncodedSnapshot",
    "Snapshot",
    "StoredSnapshot",
    "newest_complete",
    "read",
    "read_newest",
    "write",
]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that a checkpoint holds."""

    steps: int
    """Number of steps that were trained."""
    model: Mapping[str, Tensor]
    """The model's state, by its own names."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """The optimiser's state: values that `tutti.checkpoint.tree` encodes."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """All other state, likewise."""
    strategy: str = ""
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"a checkpoint needs a number of steps of 0 or more, got {self.steps}.")


@dataclass(frozen=True, kw_only=True)
class EncodedSnapshot:
    """A snapshot as JSON values and tensors: what is written. Made before the copy, so that mistakes show at once."""

    steps: int
    strategy: str
    world_size: int
    trees: dict[str, Any]
    """JSON values by file."""
    tensors: dict[str, dict[str, Tensor]]
    """Tensors by file and name; those of the snapshot itself until `copied`."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> "EncodedSnapshot":
        """Encode a snapshot. Raises `CheckpointError` for values that cannot be stored."""
        sections = (MODEL, "model", snapshot.model), (OPTIMIZER, "optimizer", snapshot.optimizer)
        encoded = {file: encode(dict(value), root) for file, root, value in (*sections, (STATE, "", snapshot.state))}
        return cls(
            steps=snapshot.steps,
            strategy=snapshot.strategy,
            world_size=snapshot.world_size,
            trees={file: tree for file, (tree, _) in encoded.items()},
            tensors={file: tensors for file, (_, tensors) in encoded.items()},
        )

    def copied(self, memory: "EncodedSnapshot | None" = None) -> "EncodedSnapshot":
        """Return the same with tensors of its own on the CPU, so that training can go on.

        `memory` is an earlier copy that nobody needs any more. Its tensors are overwritten where they fit: the system
        gives out new memory page by page, which takes several times as long as copying.
        """
        spare = {} if memory is None else memory.tensors
        copies = {
            file: {name: _copy(tensor, spare.get(file, {}).get(name)) for name, tensor in tensors.items()}
            for file, tensors in self.tensors.items()
        }
        return replace(self, tensors=copies)


def _copy(tensor: Tensor, memory: Tensor | None) -> Tensor:
    if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
        return tensor.to("cpu", copy=True)
    return memory.copy_(tensor)


@dataclass(frozen=True)
class StoredSnapshot:
    """A checkpoint as it was read from its folder, before its values are made of it. Any rank can be sent it."""

    index: CheckpointIndex
    contents: dict[str, Tensor]
    """The bytes of every file, whose checksums were compared."""

    def decoded(self) -> Snapshot:
        """Return the values. Raises `CheckpointError` if they cannot be made of the files."""
        tensors = {name: parse_tensors(name, content) for name, content in self.contents.items()}
        # Copied: who keeps a small one of these, such as the state of a generator, must not keep the whole file.
        tensors[STATE] = {name: tensor.clone() for name, tensor in tensors[STATE].items()}
        values = {name: decode(self.index.trees[name], tensors[name]) for name in self.contents}
        return Snapshot(
            steps=self.index.steps,
            model=values[MODEL],
            optimizer=values[OPTIMIZER],
            state=values[STATE],
            strategy=self.index.strategy,
            world_size=self.index.world_size,
        )


class CheckpointWriter:
    """The one writer of checkpoints in a run's folder, until `close`."""

    def __init__(self, run: Path, keep: int = 3) -> None:
        """Make the folder if needed, and lock it. `keep`: how many of the newest checkpoints stay."""
        if keep < 1:
            raise ConfigError(f"the number of checkpoints to keep must be 1 or more, got {keep}.")
        with durable.explained_errors(f"write checkpoints to {run}"):
            run.mkdir(parents=True, exist_ok=True)
        self._run, self.keep = run, keep
        self._lock = RunLock(run)
        if warning := warn_about(run):
            _log.warning("%s", warning)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let others write into the folder."""
        self._lock.close()

    def write(self, snapshot: EncodedSnapshot) -> Path:
        """Write a checkpoint, delete the oldest beyond `keep`, and return the new one's folder.

        After an error the earlier checkpoints are as before. Replaces a checkpoint of the same number of steps.
        """
        name = folder_name(snapshot.steps)
        with durable.explained_errors(f"write the checkpoint {self._run / name}"):
            self._remove_leftovers()
            temporary = self._run / f"{_WRITING}{name}"
            try:
                self._fill(temporary, snapshot)
                final = self._publish(temporary, name)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            durable.replace_file(self._run / "latest.json", f'{{"checkpoint": "{name}"}}\n'.encode())
            self._delete_old()
        return final

    def _fill(self, folder: Path, snapshot: EncodedSnapshot) -> None:
        """Write all files of a checkpoint into a new folder."""
        folder.mkdir()
        # All files at once: one core computes checksums no faster than a disk writes. A failure waits for the others.
        stored = in_parallel(write_tensors, [(folder / file, tensors) for file, tensors in snapshot.tensors.items()])
        index = CheckpointIndex(
            serial=1 + max((info.index.serial for info in checkpoints(self._run) if info.index), default=0),
            steps=snapshot.steps,
            strategy=snapshot.strategy,
            world_size=snapshot.world_size,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            torch=str(torch.__version__),
            python=platform.python_version(),
            files=dict(zip(snapshot.tensors, stored, strict=True)),
            trees=snapshot.trees,
        )
        with durable.opened(folder / INDEX) as file:
            durable.write_all(file, memoryview(index_bytes(index)))
        durable.sync_folder(folder)

    def _publish(self, temporary: Path, name: str) -> Path:
        """Give a complete checkpoint its name."""
        final, replaced = self._run / name, self._run / f"{REPLACED}{name}"
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        durable.sync_folder(self._run)
        if replaced.exists():
            durable.remove_folder(replaced, self._run / f"{_DELETED}{name}")
        return final

    def _remove_leftovers(self) -> None:
        """Remove what writers that were killed have left."""
        for pattern in (f"{_WRITING}*", f"{_DELETED}*"):
            for folder in self._run.glob(pattern):
                shutil.rmtree(folder)
        for folder in self._run.glob(f"{REPLACED}*"):
            name = folder.name.removeprefix(REPLACED)
            if (self._run / name).exists():
                durable.remove_folder(folder, self._run / f"{_DELETED}{name}")
            else:
                folder.rename(self._run / name)

    def _delete_old(self) -> None:
        """Delete complete checkpoints beyond the newest, and damaged ones of fewer steps than all that stay.

        Those of a newer format are not damaged: another Tutti reads them.
        """
        found = checkpoints(self._run)
        complete = [info for info in found if info.problem is None]
        first = min(info.steps for info in complete[: self.keep])
        damaged = [info for info in found if info.problem and not info.is_newer and info.steps < first]
        for info in (*complete[self.keep :], *damaged):
            try:
                durable.remove_folder(info.folder, self._run / f"{_DELETED}{info.folder.name}")
            except OSError as error:  # The new checkpoint is complete all the same.
                _log.warning("cannot delete the old checkpoint %s: %s", info.folder, error)


def write(run: Path, snapshot: Snapshot, keep: int = 3) -> Path:
    """Write one checkpoint, as `CheckpointWriter` does, and return its folder."""
    encoded = EncodedSnapshot.of(snapshot)
    with CheckpointWriter(run, keep) as writer:
        return writer.write(encoded)


def read(folder: Path) -> StoredSnapshot:
    """Read a checkpoint. Raises `CheckpointError` if anything in it is not as it was written."""
    index = read_index(folder)
    contents = in_parallel(read_file, [(folder / name, file) for name, file in index.files.items()])
    return StoredSnapshot(index, dict(zip(index.files, contents, strict=True)))


def read_newest(run: Path) -> tuple[Path, StoredSnapshot] | None:
    """Read the newest complete checkpoint, as `newest_complete` chooses it, with every file read only once."""
    for info in candidates(run):
        try:
            return info.folder, read(info.folder)
        except CheckpointError as error:
            warn_skipped(info, str(error))
    refuse_if_any(run)
    return None
