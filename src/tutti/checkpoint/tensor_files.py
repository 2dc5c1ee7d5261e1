"""Files of tensors in the safetensors format, written without a second copy in memory and hashed meanwhile.

How it works. A file is the length of its header (8 bytes), the header (JSON: dtype, shape and place of each tensor),
and the values of the tensors, one after the other. `write_tensors` knows the header before it touches any value. It
then sends the memory of each tensor to the file in blocks. A thread computes the SHA-256 of the same blocks, in
order; the calling thread stays at most `_AHEAD` blocks ahead, so that copies of tensors that are not contiguous, or not
on the CPU, do not pile up. Larger items come first, which aligns every tensor for readers that map the file.

`read_file` reads the file once, into one buffer, of which the tensors are views; a thread hashes what has arrived.
The safetensors package reads these files and is not needed here: it would copy the values, and could not hash them.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tutti.checkpoint.durable import named_errors, opened, write_all
from tutti.checkpoint.index import StoredFile
from tutti.checkpoint.tree import SAFE_DTYPES
from tutti.errors import CheckpointError

_BLOCK_BYTES = 8 * 2**20
_SMALL_BYTES = 2**16
_AHEAD = 4
_NAMES = {dtype: name for name, dtype in SAFE_DTYPES.items()}


class BackgroundHash:
    """The SHA-256 of blocks, computed by a thread of its own."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._blocks: SimpleQueue[Any] = SimpleQueue()
        self._free = Semaphore(_AHEAD)
        # Not a `ThreadPoolExecutor`, which refuses work once the main thread has come to the end of the script: a
        # checkpoint that is still being written then would be lost.
        self._thread = Thread(target=self._compute, name="tutti-checksum")
        self._thread.start()

    def __enter__(self) -> "BackgroundHash":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._blocks.put(None)
        self._thread.join()  # Ended by the line before, after `_AHEAD` blocks at most.

    def update(self, block: Any) -> None:
        """Hash a block after those before it. Its memory must stay as it is until `hexdigest`."""
        self._free.acquire()  # Ended by the thread, which only computes.
        self._blocks.put(block)

    def hexdigest(self) -> str:
        """Wait for the thread, and return the hash of all blocks."""
        self._blocks.put(None)
        self._thread.join()  # Ended by the line before, after `_AHEAD` blocks at most.
        return self._hash.hexdigest()

    def _compute(self) -> None:
        while (block := self._blocks.get()) is not None:  # Ended by `hexdigest` or `__exit__`.
            self._hash.update(block)
            self._free.release()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """Write the tensors to a new file, and return its size and SHA-256. The file has reached the disk then."""
    return write_blocks(path, tensor_blocks(tensors))


def tensor_blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the content of a file of tensors, in blocks of some megabytes."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    yield from _blocks(_header(ordered), ordered)


def write_blocks(path: Path, blocks: Iterable[memoryview]) -> StoredFile:
    """As `write_tensors`, for the content of a file. The memory of a block must stay as it is afterwards."""
    size = 0
    with opened(path) as file, BackgroundHash() as checksum:
        for block in blocks:
            checksum.update(block)
            write_all(file, block)
            if hasattr(os, "posix_fadvise"):
                # The system starts to write these pages to the disk now, and not only at the final fsync.
                os.posix_fadvise(file, size, len(block), os.POSIX_FADV_DONTNEED)
            size += len(block)
        digest = checksum.hexdigest()
    return StoredFile(size, digest)


def read_file(path: Path, expected: StoredFile) -> Tensor:
    """Return the bytes of a file. Raises `CheckpointError` if it is not the one that was written."""
    buffer = torch.empty(expected.size, dtype=torch.uint8)
    content = _view(buffer)
    try:
        with named_errors(path), path.open("rb", buffering=0) as file, BackgroundHash() as checksum:
            done = 0
            while count := file.readinto(content[done : done + _BLOCK_BYTES]):
                checksum.update(content[done : done + count])
                done += count
            intact = done == expected.size and not file.read(1) and checksum.hexdigest() == expected.sha256
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. Use another checkpoint.") from error
    if not intact:
        raise CheckpointError(
            f"{path} is damaged: it is not the file of {expected.size} bytes with SHA-256 {expected.sha256[:12]}... "
            "that was written. Use another checkpoint."
        )
    return buffer


def parse_tensors(name: str, content: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a file whose bytes are `content`, as views of it. Errors give the file this `name`."""
    try:
        return _parsed(content, _view(content))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"{name} is not a safetensors file that can be read here ({error}). Use another checkpoint."
        ) from error


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.itemsize
        place = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        entries[name] = place
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(header: bytes, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the content of the file: large tensors in several blocks, small ones joined."""
    small = bytearray(header)
    for tensor in tensors.values():
        values = _memory(tensor)
        if len(values) < _SMALL_BYTES:
            small += values
            if len(small) < _BLOCK_BYTES:
                continue
        if small:
            yield memoryview(small)
            small = bytearray()
        if len(values) >= _SMALL_BYTES:
            for begin in range(0, len(values), _BLOCK_BYTES):
                yield values[begin : begin + _BLOCK_BYTES]
    if small:
        yield memoryview(small)


def _memory(tensor: Tensor) -> memoryview:
    """The values of a tensor as bytes: its own memory, or a copy if it is not contiguous or not on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _view(plain.reshape(-1).view(torch.uint8))


def _view(octets: Tensor) -> memoryview:
    array: Any = octets.numpy()  # Before Python 3.12, type checkers do not know that arrays are buffers.
    return memoryview(array)


def _parsed(buffer: Tensor, content: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a file whose bytes are in `buffer`, as views of it."""
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(bytes(content[8:start]))
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        dtype, shape, (begin, end) = SAFE_DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not 0 <= begin <= end <= len(buffer) - start or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor '{name}' of shape {shape} cannot lie at {begin} to {end}")
        part = buffer[start + begin : start + end]
        found[name] = (part.view(dtype) if part.numel() else part.new_empty(0, dtype=dtype)).reshape(shape)
    return found
