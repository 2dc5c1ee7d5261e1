"""Snapshots of a training run, written to checkpoints and read from them.

How it works. `CheckpointWriter` holds the lock of the run's folder, so that there is one writer. A checkpoint goes
through these names, and only a rename leads from one to the next:

    .writing-step-N-*  its files are being written; each is synchronised with the disk, then the folder
    step-N             complete: readers look for this name only
    .replaced-step-N   moved away for another checkpoint of the same step; readers take it while step-N is missing
    .deleted-*         being deleted

The new checkpoint is complete before an old one is touched. A writer that is killed leaves hidden folders, which the
next write removes; a checkpoint under `.replaced-` goes back to its name if there is no other. `latest.json` is for
people and other programs: reading does not depend on it.

Ranks that hold a split model together write one checkpoint in parts (`tutti.checkpoint.parts`). Each part is a snapshot
of its own, of which some values are shards; reading merges them to the snapshot of the whole.
"""

import logging
import platform
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tutti.checkpoint import durable
from tutti.checkpoint.file_system import warn_about
from tutti.checkpoint.index import (
    FILES,
    INDEX,
    MODEL,
    OPTIMIZER,
    REPLACED,
    STATE,
    CheckpointIndex,
    CheckpointInfo,
    checkpoints,
    first_complete,
    folder_name,
    index_bytes,
    is_foreign,
    newest_complete,
    part_file,
    read_index,
)
from tutti.checkpoint.parallel import in_parallel
from tutti.checkpoint.parts import OtherParts, write_part
from tutti.checkpoint.run_lock import RunLock
from tutti.checkpoint.snapshots import EncodedSnapshot, Snapshot
from tutti.checkpoint.tensor_files import parse_tensors, read_file, write_tensors
from tutti.checkpoint.tree import decode, encode
from tutti.errors import CheckpointError, ConfigError
from tutti.parallel.shards import merged
from tutti.transports import SingleRankTransport, Transport

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
    "write_model",
]


@dataclass(frozen=True)
class StoredSnapshot:
    """A checkpoint as it was read from its folder, before its values are made of it. Any rank can be sent it."""

    index: CheckpointIndex
    contents: dict[str, Tensor]
    """The bytes of every file, whose checksums were compared."""

    def decoded(self) -> Snapshot:
        """Return the values. Raises `CheckpointError` if they cannot be made of the files."""
        values = {name: self.section(name) for name in FILES}
        return Snapshot(
            steps=self.index.steps,
            model=values[MODEL],
            optimizer=values[OPTIMIZER],
            state=values[STATE],
            strategy=self.index.strategy,
            world_size=self.index.world_size,
        )

    def section(self, name: str) -> Any:
        """Return the values of one of `FILES`, of all parts."""
        parts = []
        for part in range(self.index.parts):
            file = part_file(name, part, self.index.parts)
            tensors = parse_tensors(file, self.contents[file])
            if name == STATE:
                # Copied: who keeps a small one of these, such as the state of a generator, must not keep the whole
                # file.
                tensors = {key: tensor.clone() for key, tensor in tensors.items()}
            parts.append(decode(self.index.trees[file], tensors))
        try:
            return parts[0] if len(parts) == 1 else merged(parts)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"the {len(parts)} parts of the checkpoint do not fit together: {error}. Use another checkpoint."
            ) from error


class CheckpointWriter:
    """The one writer of checkpoints in a run's folder, until `close`."""

    def __init__(self, run: Path, keep: int = 3, ranks: Transport | None = None, continues: bool = True) -> None:
        """Make the folder if needed, and lock it.

        Args:
            keep: how many of the newest checkpoints stay.
            ranks: those that write together, of which this is the first; without them, this one writes alone.
            continues: whether checkpoints that are in the folder are of the same run. Those of another are not deleted.
        """
        if keep < 1:
            raise ConfigError(f"the number of checkpoints to keep must be 1 or more, got {keep}.")
        with durable.explained_errors(f"write checkpoints to {run}"):
            durable.make_folder(run)
        self._run, self.keep = run, keep
        self._others = OtherParts(ranks or SingleRankTransport())
        self._lock = RunLock(run)
        if warning := warn_about(run):
            _log.warning("%s", warning)
        self._first_serial = 0
        """That of the first checkpoint of this run. Those before are of others."""
        if not continues:
            try:
                with durable.explained_errors(f"write checkpoints to {run}"):
                    self._begin_anew()
            except BaseException:
                self._lock.close()
                raise

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let others write into the folder."""
        self._lock.close()

    def _begin_anew(self) -> None:
        """Note which checkpoints are there already, and say that they are of another run."""
        found = checkpoints(self._run)
        self._first_serial = _next_serial(found)
        if others := [info for info in found if info.problem is None]:
            _log.warning(
                "%s holds checkpoints of another run, the last of step %d, and this one does not continue from them. "
                "They stay, but for those of steps that this run saves too. Call job.restore before the first step, or "
                "give each run a folder of its own.",
                self._run,
                others[0].steps,
            )

    def write(self, snapshot: EncodedSnapshot) -> Path:
        """Write a checkpoint, delete the oldest beyond `keep`, and return the new one's folder.

        After an error the earlier checkpoints are as before. Replaces a checkpoint of the same number of steps.
        """
        name = folder_name(snapshot.steps)
        temporary = self._run / f"{_WRITING}{name}-{secrets.token_hex(8)}"
        try:
            with durable.explained_errors(f"write the checkpoint {self._run / name}"):
                self._remove_leftovers()
                self._fill(temporary, snapshot)
                final = self._publish(temporary, name)
                durable.replace_file(self._run / "latest.json", f'{{"checkpoint": "{name}"}}\n'.encode())
                self._delete_old()
        finally:
            self._others.end()
            # Is there after an error only. Other ranks have written into it until now.
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def _fill(self, folder: Path, snapshot: EncodedSnapshot) -> None:
        """Write all files of a checkpoint into a new folder."""
        folder.mkdir()
        self._others.begin(folder)
        own = write_part(folder, snapshot, 0, self._others.num_parts)
        parts = [own, *self._others.collect(folder)]
        index = CheckpointIndex(
            serial=_next_serial(checkpoints(self._run)),
            steps=snapshot.steps,
            strategy=snapshot.strategy,
            world_size=snapshot.world_size,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            torch=str(torch.__version__),
            python=platform.python_version(),
            files={name: file for part in parts for name, file in part.files.items()},
            trees={name: tree for part in parts for name, tree in part.trees.items()},
            parts=len(parts),
        )
        with durable.opened(folder / INDEX) as file:
            durable.write_all(file, memoryview(index_bytes(index)))
        durable.sync_folder(folder)

    def _publish(self, temporary: Path, name: str) -> Path:
        """Give a complete checkpoint its name."""
        final, replaced = self._run / name, self._run / f"{REPLACED}{name}"
        if final.exists():
            self._refuse_foreign(final)
            final.rename(replaced)
        temporary.rename(final)
        durable.sync_folder(self._run)
        if replaced.exists():
            self._delete(replaced)
        return final

    def _refuse_foreign(self, folder: Path) -> None:
        if is_foreign(folder):
            raise CheckpointError(
                f"{folder} is in the way, and is no checkpoint of Tutti's: it holds files of another program. Move it "
                "away, or write to another folder."
            )

    def _delete(self, folder: Path, unless: Callable[[Path], bool] = lambda folder: False) -> None:
        """Delete a folder, or say why it stays: the new checkpoint is complete all the same."""
        try:
            if not unless(folder):
                durable.remove_folder(folder, self._run / f"{_DELETED}{secrets.token_hex(8)}")
        except FileNotFoundError:
            return  # Somebody else has deleted it.
        except OSError as error:
            _log.warning("cannot delete the old checkpoint %s: %s", folder, error)

    def _remove_leftovers(self) -> None:
        """Remove what writers that were killed have left."""
        for pattern in (f"{_WRITING}*", f"{_DELETED}*"):
            for folder in self._run.glob(pattern):
                self._delete(folder)
        for folder in self._run.glob(f"{REPLACED}*"):
            name = folder.name.removeprefix(REPLACED)
            if (self._run / name).exists():
                self._delete(folder)
            else:
                folder.rename(self._run / name)

    def _delete_old(self) -> None:
        """Delete complete checkpoints beyond the newest, and damaged ones of fewer steps than all that stay.

        Those of a newer format are not damaged: another Tutti reads them. Nor are folders of other programs. Those of
        another run stay.
        """
        found = [info for info in checkpoints(self._run) if not info.index or info.index.serial >= self._first_serial]
        complete = [info for info in found if info.problem is None]
        first = min(info.steps for info in complete[: self.keep])
        damaged = [info for info in found if info.problem and not info.is_newer and info.steps < first]
        for info in (*complete[self.keep :], *damaged):
            self._delete(info.folder, unless=is_foreign)


def _next_serial(found: Sequence[CheckpointInfo]) -> int:
    return 1 + max((info.index.serial for info in found if info.index), default=0)


def write(run: Path, snapshot: Snapshot, keep: int = 3) -> Path:
    """Write one checkpoint, as `CheckpointWriter` does, and return its folder."""
    encoded = EncodedSnapshot.of(snapshot)
    with CheckpointWriter(run, keep) as writer:
        return writer.write(encoded)


def read(folder: Path, sections: Sequence[str] = FILES) -> StoredSnapshot:
    """Read a checkpoint, or some of its `FILES`. Raises `CheckpointError` if these are not as they were written."""
    index = read_index(folder)
    contents: dict[str, Tensor] = {}
    for part in range(index.parts):
        names = [part_file(name, part, index.parts) for name in sections]
        found = in_parallel(read_file, [(folder / name, index.files[name]) for name in names])
        contents.update(zip(names, found, strict=True))
    return StoredSnapshot(index, contents)


def write_model(folder: Path, to: Path) -> None:
    """Write the model of a checkpoint, whatever its parts, to one file under its own names."""
    _, tensors = encode(read(folder, [MODEL]).section(MODEL))
    write_tensors(to, tensors)


def read_newest(run: Path) -> tuple[Path, StoredSnapshot] | None:
    """Read the newest complete checkpoint, as `newest_complete` chooses it, with every file read only once."""
    return first_complete(run, read)
