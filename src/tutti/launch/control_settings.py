"""Settings of a run's control plane that its launcher or its user left: address, secret, patience.

The secret is looked for in this order: the variable TUTTI_SECRET, which `tutti run` sets for its workers; the file
tutti/secret in the user's configuration folder, which is made when it is missing. Ranks that srun, mpirun or torchrun
started on hosts with one home folder so share it without doing anything.
"""

import os
import secrets
import stat
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from tutti.cluster import parse_duration
from tutti.coordination import Secret
from tutti.coordination.coordinator import PATIENCE
from tutti.coordination.generations import MOST_WORKERS
from tutti.errors import ConfigError

COORDINATOR = "TUTTI_COORDINATOR"
"""Variable with address and port of the run's coordinator, where the launcher serves it."""

PATIENCE_VARIABLE = "TUTTI_PATIENCE"
"""Variable that says how long a rank may be silent before the others go on without it."""

SECRET = "TUTTI_SECRET"
"""Variable with the secret itself, or "none"."""

ENCRYPT = "TUTTI_ENCRYPT"
"""Variable that turns encryption between hosts off, by 0. Connections are authenticated all the same."""

ELASTIC = "TUTTI_ELASTIC"
"""Variable with the fewest and the most workers of a run whose workers may come and go, as MIN:MAX."""


def find_worker_range(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the fewest and the most workers; None where their number is fixed."""
    text = environment.get(ELASTIC)
    return None if text is None else parse_worker_range(text, ELASTIC)


def parse_worker_range(text: str, name: str) -> tuple[int, int]:
    """Return MIN and MAX of a text "MIN:MAX". Raises `ConfigError`."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{name} must be a number of workers, or MIN:MAX, got '{text}'.")
    minimum, maximum = map(int, parts)
    if not 1 <= minimum <= maximum:
        raise ConfigError(f"{name}: the minimum is 1 or more and not above the maximum, got '{text}'.")
    if maximum > MOST_WORKERS:
        raise ConfigError(f"{name}: a run whose workers come and go has {MOST_WORKERS} at most, got '{text}'.")
    return minimum, maximum


def find_patience(environment: Mapping[str, str] = os.environ) -> timedelta:
    """Return how long a rank may be silent."""
    text = environment.get(PATIENCE_VARIABLE)
    return PATIENCE if text is None else parse_duration(text, PATIENCE_VARIABLE)


def find_secret(environment: Mapping[str, str] = os.environ, *, make: bool = True) -> Secret:
    """Return the secret of this run.

    Args:
        environment: environment variables to read it from.
        make: whether a user who has none gets one. Otherwise that is a `ConfigError`.
    """
    how = environment.get(ENCRYPT, "1")
    if how not in ("0", "1"):
        raise ConfigError(f"{ENCRYPT} must be 0 or 1, got '{how}'.")
    text = environment.get(SECRET)
    file = secret_file(environment)
    if text is None and not make and not file.exists():
        raise ConfigError(
            f"this host has no secret: set {SECRET} to that of the run, or copy the file tutti/secret in the user's "
            f"configuration folder from the run's host to {file}."
        )
    return Secret(_from_file(file) if text is None else text.strip(), encrypt=how == "1")


def secret_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the user's secret is kept."""
    folder = environment.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path.home() / ".config") / "tutti" / "secret"


def _from_file(path: Path) -> str:
    """Read the file, which is made first if there is none. Refuses one that others may read or have written."""
    try:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            _make(path)
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"the secret of this run cannot be kept in {path} ({error.strerror}). Set {SECRET} to the same long text "
            "for every rank."
        ) from error
    with os.fdopen(file) as opened:
        about = os.fstat(opened.fileno())
        if about.st_uid != os.getuid():
            raise ConfigError(f"the secret in {path} belongs to another user. Remove it, or set {SECRET}.")
        if stat.S_IMODE(about.st_mode) & 0o077:
            raise ConfigError(
                f"others can read the secret in {path} (mode {stat.S_IMODE(about.st_mode):o}). Remove the file, so "
                "that a new one is made; or, if nobody has read it, chmod 600 it."
            )
        return opened.read(4096).strip()


def _make(path: Path) -> None:
    """Make the file with a new secret. Of several processes that do so at once, one is first, and all use its file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Complete before it gets its name. A link, unlike a renaming, never replaces the file of another process.
    draft = path.with_name(f"secret-{os.getpid()}-{secrets.token_hex(4)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, f"{secrets.token_hex(32)}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
