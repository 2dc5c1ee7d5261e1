"""Files of checkpoints: their size beside the tensors in them, and reading them from the disk and not from memory."""

import os
import time
from pathlib import Path

from tutti.checkpoint.index import read_index

_BLOCK_BYTES = 8 * 2**20


def size_ratio(folder: Path) -> float:
    """Return the size of all files of a checkpoint, relative to the values of the tensors in them."""
    tensors = 0
    for name in read_index(folder).files:
        with (folder / name).open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        tensors += (folder / name).stat().st_size - 8 - header
    return sum(path.stat().st_size for path in folder.iterdir()) / tensors


def forget(folder: Path) -> None:
    """Have the system drop its copies of a checkpoint's files in memory, so that they are read from the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_to_read(folder: Path) -> float:
    """Read all files of a checkpoint into memory, and return the seconds that it took."""
    start_s = time.perf_counter()
    for path in folder.iterdir():
        content = memoryview(bytearray(path.stat().st_size))
        with path.open("rb", buffering=0) as file:
            done = 0
            while count := file.readinto(content[done : done + _BLOCK_BYTES]):
                done += count
    return time.perf_counter() - start_s
