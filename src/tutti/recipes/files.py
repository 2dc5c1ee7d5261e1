"""Read idx.gz, npz and text files, and say exactly what is wrong with one that cannot be used.

Nothing here unpickles. A file read once is kept, because ranks that live in one process would
otherwise each unpack and hold their own copy; it is read again when its size or time changes. So
callers must not write into what they get.
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
"""An array's shape, with None where any size will do."""

_Arguments = ParamSpec("_Arguments")
_Kept = TypeVar("_Kept")


def kept(maxsize: int) -> Callable[[Callable[_Arguments, _Kept]], Callable[_Arguments, _Kept]]:
    """Keep the last `maxsize` results of a function, one copy even when threads ask at once; errors are not kept."""

    def decorate(read: Callable[_Arguments, _Kept]) -> Callable[_Arguments, _Kept]:
        lock = Lock()
        cached: Callable[_Arguments, _Kept] = lru_cache(maxsize)(read)  # type: ignore[assignment]  # typed for any

        @wraps(read)
        def locked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Kept:
            with lock:  # lru_cache alone lets each thread that misses compute, and keep, a result of its own
                return cached(*args, **kwargs)

        return locked

    return decorate


@dataclass(frozen=True)
class Source:
    """One data file: its path under the data folder, and where it can be had."""

    path: str
    origin: str

    def under(self, root: Path | None) -> Path:
        """The full path of the file, which exists."""
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
    """The bytes in a gzipped idx file, the format of MNIST (LeCun 1998); int64 if they are labels, in one dimension."""
    return _read_idx(path, num_dims, _stamp(path))


def read_npz(path: Path, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The arrays of bytes named in `shapes` from an npz file; int64 where they are labels, in one dimension."""
    return dict(_read_npz(path, tuple(shapes.items()), _stamp(path)))


def read_text(path: Path, alphabet: str) -> Tensor:
    """The text as int64 positions in `alphabet`, whose characters are ASCII."""
    return _read_text(path, alphabet, _stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error
    return status.st_size, status.st_mtime_ns


@kept(maxsize=8)
def _read_idx(path: Path, num_dims: int, stamp: tuple[int, int]) -> Tensor:
    try:
        with gzip.open(path) as file:
            raw = bytearray(file.read())  # writable, which torch.frombuffer wants
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot unpack {path}: {error}. It is cut off or not gzip: fetch it again.") from error
    header, magic = 4 + 4 * num_dims, bytes([0, 0, 8, num_dims])  # 8 stands for unsigned bytes
    if raw[:4] != magic:
        raise DataError(
            f"{path} is not the idx file wanted: it starts with 0x{raw[:4].hex()}, "
            f"and bytes in {num_dims} dimensions start with 0x{magic.hex()}. Are two files swapped?"
        )
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, header, 4)]
    wanted, got = int(np.prod(shape, dtype=np.int64)), len(raw) - header
    if got != wanted:
        fault = "cut off" if got < wanted else "too long"
        raise DataError(f"{path} is {fault}: shape {tuple(shape)} takes {wanted} bytes, got {max(got, 0)}.")
    if wanted == 0:
        raise DataError(f"{path} holds no samples: its shape is {tuple(shape)}.")
    return _widened(torch.frombuffer(raw, dtype=torch.uint8, offset=header).view(shape))


@kept(maxsize=4)
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
    """Labels as the int64 that losses want: here, so that what is kept needs no copy."""
    return array.long() if array.dim() == 1 else array


def _fault(name: str, shape: Shape, array: np.ndarray | None) -> str | None:
    if array is None:
        return f"no array '{name}'"
    if array.dtype != np.uint8:
        return f"'{name}' is {array.dtype}, wanted uint8"
    fits = array.ndim == len(shape) and all(want in (None, got) for got, want in zip(array.shape, shape, strict=True))
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    return None if fits and array.size else f"'{name}' has shape {array.shape}, wanted ({wanted})"


@kept(maxsize=2)
def _read_text(path: Path, alphabet: str, stamp: tuple[int, int]) -> Tensor:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error
    if not raw:
        raise DataError(f"{path} is empty: fetch it again.")
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
