"""Files and folders that survive a crash: written, synchronised with the disk, and only then given their name.

A name that a reader looks for is only ever made by a rename, after everything under it has reached the disk. A process
that is killed leaves either the old state or the new one, and hidden leftovers.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tutti.errors import CheckpointError

_NEXT_STEP = {
    errno.ENOSPC: "The disk is full: free some space, or keep fewer checkpoints.",
    errno.EDQUOT: "Your quota on this disk is used up: free some space, or keep fewer checkpoints.",
    errno.EFBIG: "The file is larger than this process or file system allows: see ulimit -f.",
    errno.EACCES: "Choose a folder that you may write to.",
    errno.EPERM: "Choose a folder that you may write to.",
    errno.EROFS: "The file system is mounted read-only: choose another folder.",
    errno.ENOTDIR: "A file is where a folder is needed: choose another folder.",
    errno.EEXIST: "A file is where a folder is needed: choose another folder.",
}

_NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""What file systems answer that cannot synchronise folders, such as some shared folders of virtual machines."""


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Create a file for writing; synchronise it with the disk at the end. Errors name the file."""
    with named_errors(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)


def write_all(file: int, data: memoryview) -> None:
    """Write all of `data`, in as many calls as the system needs."""
    while data:
        data = data[os.write(file, data) :]


def sync_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk."""
    with named_errors(folder):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(file)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, as far as they are missing, whose names reach the disk too."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        with suppress(PermissionError):  # One may write to some folders, and not read them.
            sync_folder(each.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file beside `path`, and rename it to `path`."""
    beside = path.with_name(f".{path.name}.new")
    with opened(beside) as file:
        write_all(file, memoryview(data))
    os.replace(beside, path)
    sync_folder(path.parent)


def remove_folder(folder: Path, hidden: Path) -> None:
    """Delete a folder, which is renamed to `hidden` first: what is half deleted must not be found by its name."""
    os.rename(folder, hidden)
    shutil.rmtree(hidden)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add the file to errors that do not name one, such as those of a write."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def explained_errors(what: str) -> Iterator[None]:
    """Turn errors of the system into a `CheckpointError`, which names the file and says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        next_step = _NEXT_STEP.get(error.errno or 0, "See whether the disk and the folder are in order.")
        raise CheckpointError(f"cannot {what}: {error.filename}: {reason}. {next_step}") from error
