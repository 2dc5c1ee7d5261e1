"""Readers of idx.gz, npz and text files, with exact messages about files that cannot be used.

Nothing here unpickles. The contents of a file are cached, because simulated ranks in one process would otherwise each
unpack and hold a copy. A file is read again when its size or modification time changes. Callers must not write into
the tensors that they receive.
"""

import gzip
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from threading import Lock
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from tutti.errors import DataError

Shape = tuple[int | None, ...]
"""The shape of an array; None stands for any size."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def cached(maxsize: int) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Cache the last `maxsize` results of a function. Concurrent calls share one result; errors are not cached."""

    def decorate(read: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        lock = Lock()
        remembered: Callable[_Arguments, _Result] = lru_cache(maxsize)(read)  # type: ignore[assignment]  # typed for any

        @wraps(read)
        def locked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            with lock:  # Without the lock, threads that miss at the same time would each compute and hold a result.
                return remembered(*args, **kwargs)

        return locked

    return decorate


@dataclass(frozen=True)
class Source:
    """One data file: its path under the data folder, and where to get it."""

    path: str
    origin: str

    def under(self, root: Path | None) -> Path:
        """The full path of the file; raises `DataError` if there is no such file."""
        if root is None:
            raise DataError(
                f"no data folder given, and '{self.path}' is needed. "
                f"Give one with --data FOLDER or set TUTTI_DATA. Origin of the file: {self.origin}."
            )
        path = (root / self.path).resolve()
        if not path.is_file():
            raise DataError(f"missing data file {path}. Get it from {self.origin}, and put it at that path.")
        return path


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Read a gzipped idx file, the format of MNIST (LeCun 1998). One dimension is read as labels, in int64."""
    return _read_idx(path, num_dims, _stamp(path))


def read_npz(path: Path, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Read the byte arrays named in `shapes` from an npz file. One dimension is read as labels, in int64."""
    return dict(_read_npz(path, tuple(shapes.items()), _stamp(path)))


def read_text(path: Path, alphabet: str) -> Tensor:
    """Read a text as int64 indices into `alphabet`, whose characters are ASCII."""
    return _read_text(path, alphabet, _stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    """Return the size and modification time of a file: part of the cache key, so that a changed file is read again."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error
    return status.st_size, status.st_mtime_ns


@cached(maxsize=8)
def _read_idx(path: Path, num_dims: int, stamp: tuple[int, int]) -> Tensor:
    """Read a gzipped idx file: a magic number with the dtype and the dimensions, the sizes, then the bytes."""
    try:
        with gzip.open(path) as file:
            raw = bytearray(file.read())  # Writable, as torch.frombuffer requires.
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot unpack {path}: {error}. It is cut off or not gzip: fetch it again.") from error
    header, magic = 4 + 4 * num_dims, bytes([0, 0, 8, num_dims])  # 8 is the idx code of unsigned bytes.
    if raw[:4] != magic:
        raise DataError(
            f"{path} is not the idx file wanted: it starts with 0x{raw[:4].hex()}, "
            f"and bytes in {num_dims} dimensions start with 0x{magic.hex()}. Are two files swapped?"
        )
    # Sizes are big-endian, 4 bytes each.
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, header, 4)]
    wanted, got = int(np.prod(shape, dtype=np.int64)), len(raw) - header
    if got != wanted:
        fault = "cut off" if got < wanted else "too long"
        raise DataError(f"{path} is {fault}: shape {tuple(shape)} takes {wanted} bytes, got {max(got, 0)}.")
    if wanted == 0:
        raise DataError(f"{path} holds no samples: its shape is {tuple(shape)}.")
    return _widened(torch.frombuffer(raw, dtype=torch.uint8, offset=header).view(shape))


@cached(maxsize=4)
def _read_npz(
    path: Path, shapes: tuple[tuple[str, Shape], ...], stamp: tuple[int, int]
) -> tuple[tuple[str, Tensor], ...]:
    try:
        # Opened here, because np.load leaves a file that it cannot read open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            names = list(file)
            arrays = {name: file[name] for name, _ in shapes if name in names}
    except (
        OSError,
        EOFError,
        ValueError,
        AttributeError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(f"cannot unpack {path}: {error}. It is cut off or not npz: fetch it again.") from error
    faults = [_fault(name, shape, arrays.get(name)) for name, shape in shapes]
    if any(faults):
        raise DataError(f"{path} is not the npz file wanted: {'; '.join(filter(None, faults))}. Has: {names}.")
    return tuple((name, _widened(torch.from_numpy(array))) for name, array in arrays.items())


def _widened(array: Tensor) -> Tensor:
    """Convert labels to int64, which losses require. Done before caching, so that no copy is needed later."""
    return array.long() if array.dim() == 1 else array


def _fault(name: str, shape: Shape, array: np.ndarray | None) -> str | None:
    """Return what is wrong with an array of an npz file; None if it is as wanted."""
    if array is None:
        return f"no array '{name}'"
    if array.dtype != np.uint8:
        return f"'{name}' is {array.dtype}, wanted uint8"
    fits = array.ndim == len(shape) and all(want in (None, got) for got, want in zip(array.shape, shape, strict=True))
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    return None if fits and array.size else f"'{name}' has shape {array.shape}, wanted ({wanted})"


@cached(maxsize=2)
def _read_text(path: Path, alphabet: str, stamp: tuple[int, int]) -> Tensor:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error
    if not raw:
        raise DataError(f"{path} is empty: fetch it again.")
    # A table from byte to token; -1 for bytes that are not in the alphabet.
    codes = np.full(256, -1)
    codes[np.frombuffer(alphabet.encode("ascii"), dtype=np.uint8)] = np.arange(len(alphabet))
    tokens = codes[np.frombuffer(raw, dtype=np.uint8)]
    if (tokens < 0).any():
        at = int(np.argmax(tokens < 0))
        raise DataError(
            f"{path} is not the text wanted: byte {at} is 0x{raw[at]:02x}, "
            f"which is none of the {len(alphabet)} characters {alphabet!r}."
        )
    return torch.from_numpy(tokens)
