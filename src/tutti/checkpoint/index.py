"""The index of a checkpoint, the list of a run's checkpoints, and their verification. Imports no torch.

The index file is `{"sha256": "...", "index": {...}}` and a line end. The hash covers the bytes of the inner object, and
everything around it is fixed: a file with any other byte, or cut off anywhere, is refused. This outer form is the same
in all versions of the format; the version is inside.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import tutti as package
from tutti.errors import CheckpointError

_log = logging.getLogger("tutti")

FORMAT = 1
"""The newest version of the format that this Tutti reads, and the one that it writes."""

INDEX = "checkpoint.json"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.safetensors"
FILES = (MODEL, OPTIMIZER, STATE)
"""The files of a checkpoint, besides its index. Where several ranks have written it, each has written three."""

_MOST_PARTS = 65536

_MOST_LISTS = 10
"""How often checkpoints are listed anew because a writer has deleted all of them for newer ones."""

REPLACED = ".replaced-"
"""Prefix of a checkpoint while another of the same step takes its place. It counts while the other is missing."""

_BEFORE, _BETWEEN, _AFTER = b'{"sha256":"', b'","index":', b"}\n"
_FOLDER = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"(model|optimizer|state)(-\d{5}-of-\d{5})?\.safetensors")

Read = TypeVar("Read")


class NewerFormat(CheckpointError):
    """The index of a checkpoint that a newer Tutti has written."""


@dataclass(frozen=True)
class StoredFile:
    """The size and SHA-256 of a file as it was written."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The content of an index file."""

    serial: int
    """Number in the order of writing: after a return to an older checkpoint, not the order of steps."""
    steps: int
    strategy: str
    world_size: int
    time: str
    """When it was written, in UTC and ISO 8601."""
    torch: str
    python: str
    files: dict[str, StoredFile]
    trees: dict[str, Any]
    """The model, the optimiser's state and the other state, encoded by `tutti.checkpoint.tree`; by file."""
    parts: int = 1
    """Number of ranks that have written it: those that hold one replica of a split model together."""
    tutti: str = package.__version__
    format: int = FORMAT

    def __post_init__(self) -> None:
        if not all(isinstance(number, int) for number in (self.serial, self.steps, self.world_size)):
            raise TypeError("serial, steps and world_size must be whole numbers")
        if not isinstance(self.parts, int) or not 0 < self.parts <= _MOST_PARTS:
            raise TypeError(f"parts must be a whole number of 1 to {_MOST_PARTS}")

    @property
    def state_tree(self) -> Any:
        """The tree of the first file of other state, which has all that belongs to no parameter."""
        return self.trees[part_file(STATE, 0, self.parts)]

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "CheckpointIndex":
        """Make it from JSON values, as `asdict` gave them."""
        files = {name: StoredFile(**entry) for name, entry in fields["files"].items()}
        return cls(**{**fields, "files": files})


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint in a list."""

    folder: Path
    steps: int
    size: int = 0
    """Bytes of all files of tensors."""
    index: CheckpointIndex | None = None
    """None where it cannot be read."""
    problem: str | None = None
    """Why it cannot be used, as far as one sees without reading the tensors; None if it is complete."""
    is_newer: bool = False
    """Whether that is its format, which a newer Tutti reads."""


def part_file(name: str, part: int, parts: int) -> str:
    """Return the name of a file of one of several parts; "model.safetensors" becomes model-00002-of-00004."""
    if parts == 1:
        return name
    stem, _, suffix = name.partition(".")
    return f"{stem}-{part + 1:05d}-of-{parts:05d}.{suffix}"


def is_foreign(folder: Path) -> bool:
    """Whether a folder has no index, but files of another program: it is none of Tutti's, whatever its name."""
    names = {entry.name for entry in folder.iterdir()}
    return INDEX not in names and not all(map(_FILE.fullmatch, names))


def folder_name(steps: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{steps:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint, and not a run that holds checkpoints."""
    return _FOLDER.fullmatch(name) is not None


def index_bytes(index: CheckpointIndex) -> bytes:
    """Return the content of an index file."""
    body = json.dumps(asdict(index), separators=(",", ":"), allow_nan=False).encode()
    return _BEFORE + hashlib.sha256(body).hexdigest().encode() + _BETWEEN + body + _AFTER


def read_index(folder: Path) -> CheckpointIndex:
    """Read the index of a checkpoint. Raises `CheckpointError` if it is missing, damaged or of a newer format."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is not a checkpoint: there is no {path}. Give a folder such as RUN/step-00000100; "
            "tutti checkpoints RUN lists them."
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. Use another checkpoint.") from error
    body = data[len(_BEFORE) + 64 + len(_BETWEEN) : -len(_AFTER)]
    if data != _BEFORE + hashlib.sha256(body).hexdigest().encode() + _BETWEEN + body + _AFTER:
        raise CheckpointError(
            f"{path} is damaged: its checksum does not fit its content of {len(data)} bytes. Use another checkpoint."
        )
    return _parsed(path, body)


def _parsed(path: Path, body: bytes) -> CheckpointIndex:
    try:
        fields = json.loads(body)
        version = fields["format"]
        if version == FORMAT:
            index = CheckpointIndex.from_fields(fields)
            expected = {part_file(name, part, index.parts) for part in range(index.parts) for name in FILES}
            if not set(index.files) == set(index.trees) == expected:
                raise ValueError(f"it lists the files {', '.join(sorted(index.files))}")
            return index
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of Tutti's ({error}). Use another checkpoint.") from error
    raise NewerFormat(
        f"{path} has format version {version}, and Tutti {package.__version__} reads version {FORMAT}. It was written "
        "by a newer Tutti: pip install --upgrade tutti-train"
    )


def checkpoints(run: Path) -> list[CheckpointInfo]:
    """Return the checkpoints of a run, the newest first. Those whose index cannot be read stand before all others."""
    found = [_info(folder, steps) for steps, folder in _folders(run).items()]
    return sorted(found, key=lambda info: (info.index is None, info.index.serial if info.index else 0, info.steps))[
        ::-1
    ]


def _folders(run: Path) -> dict[int, Path]:
    try:
        entries = sorted(run.iterdir())  # Hidden names come first: a visible folder of the same step takes precedence.
    except OSError as error:
        raise CheckpointError(
            f"cannot list the checkpoints of {run}: {error.strerror}. Give a run's folder."
        ) from error
    found = {}
    for entry in entries:
        match = _FOLDER.fullmatch(entry.name.removeprefix(REPLACED))
        if match and entry.is_dir():
            found[int(match[1])] = entry
    return found


def _info(folder: Path, steps: int) -> CheckpointInfo:
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return CheckpointInfo(folder=folder, steps=steps, problem=str(error), is_newer=isinstance(error, NewerFormat))
    problems = [] if index.steps == steps else [f"{folder} holds step {index.steps}: it was renamed"]
    problems += [problem for name, file in index.files.items() if (problem := size_problem(folder / name, file))]
    size = sum(file.size for file in index.files.values())
    return CheckpointInfo(folder=folder, steps=steps, size=size, index=index, problem="; ".join(problems) or None)


def size_problem(path: Path, expected: StoredFile) -> str | None:
    """Return what is wrong with a file, as far as one sees without reading it; None if it has the right size."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None if size == expected.size else f"{path} has {size} bytes, and {expected.size} were written"


def verify(folder: Path) -> list[str]:
    """Read all of a checkpoint, and return what is wrong with it: nothing if it is as it was written."""
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return [str(error)]
    return [problem for name, file in index.files.items() if (problem := _file_problem(folder / name, file))]


def _file_problem(path: Path, expected: StoredFile) -> str | None:
    if problem := size_problem(path, expected):
        return problem
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None if found == expected.sha256 else f"{path} is damaged: its checksum is not that of what was written"


def newest_complete(run: Path) -> Path | None:
    """Return the newest checkpoint in which every byte is as written; None if the run has no checkpoint at all.

    Logs a warning for each damaged one that it skips. Raises `CheckpointError` if all are damaged.
    """
    found = first_complete(run, _verified)
    return None if found is None else found[0]


def _verified(folder: Path) -> None:
    if problems := verify(folder):
        raise CheckpointError("; ".join(problems))


def first_complete(run: Path, read: Callable[[Path], Read]) -> tuple[Path, Read] | None:
    """Return the newest checkpoint that `read` can read, and the result; None if the run has no checkpoint at all.

    `read` raises `CheckpointError` for one that is damaged: a warning says so, and the one before is taken. One that a
    writer has deleted meanwhile is not damaged: there are newer ones then.
    """
    for _ in range(_MOST_LISTS):
        found = candidates(run)
        _refuse_newer(run, found)
        for info in found:
            try:
                return info.folder, read(info.folder)
            except CheckpointError as error:
                if info.folder.exists():
                    _log.warning("checkpoint %s is skipped: %s", info.folder, error)
        if all(info.folder.exists() for info in found):
            break
    _refuse_if_any(run)
    return None


def candidates(run: Path) -> list[CheckpointInfo]:
    """Return the checkpoints of a run, the newest first; none if its folder does not exist yet."""
    try:
        exists = run.exists()
    except OSError as error:
        raise CheckpointError(
            f"cannot list the checkpoints of {run}: {error.strerror}. Give a run's folder."
        ) from error
    return checkpoints(run) if exists else []


def _refuse_newer(run: Path, found: list[CheckpointInfo]) -> None:
    """Raise `CheckpointError` if a newer Tutti has continued the run: an older one would go back behind that."""
    last = max((info.steps for info in found if info.index is not None), default=-1)
    for info in found:
        if info.is_newer and info.steps > last:
            raise CheckpointError(
                f"{run} was continued by a newer Tutti: {info.problem}. To go back to an earlier checkpoint, give its "
                "folder."
            )


def _refuse_if_any(run: Path) -> None:
    """Raise `CheckpointError` if there are checkpoints: a start from the beginning would hide the damage."""
    if found := candidates(run):
        raise CheckpointError(
            f"none of the {len(found)} checkpoints of {run} is complete; the newest: "
            f"{(found[0].problem or 'damaged').rstrip('.')}. "
            f"See tutti checkpoints {run} --verify, or remove the folder to start from the beginning."
        )
