"""The kind of file system that a folder is on, and whether a rename there is atomic.

On local Linux file systems, and on NFS, a rename either happens or does not, for every reader and after a crash. FAT
and exFAT keep no journal; what FUSE, 9p and SMB do depends on what is behind them, which nobody can see from here.
"""

import re
from pathlib import Path

_NOT_ATOMIC = re.compile(r"vfat|msdos|exfat|fuse\..*|fuseblk|fuse|9p|cifs|smb3|smbfs|drvfs|vboxsf|prl_fs")


def warn_about(run: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return a warning if checkpoints in this folder may be torn by a crash; None if not, or if nobody knows."""
    kind = file_system(run, mounts)
    if kind is None or not _NOT_ATOMIC.fullmatch(kind):
        return None
    return (
        f"{run} is on a file system of type {kind}, where renaming a folder may not be atomic: a crash while a "
        "checkpoint is written can damage it. Damage is found when a checkpoint is read, and an earlier one is used. A "
        "local disk or NFS is safer."
    )


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the file system of a folder, such as "ext4"; None where the system does not say."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
        where = folder.resolve()
    except OSError:
        return None
    found, longest = None, -1
    for line in lines:
        mount, separator, source = line.partition(" - ")
        fields = mount.split()
        if not separator or len(fields) < 5:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        # A later line of the same place is mounted over the earlier one.
        if where.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = source.split()[0], len(point.parts)
    return found
