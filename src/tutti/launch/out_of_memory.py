"""Whether a worker that was killed was most likely killed by the kernel, which had run out of memory.

The kernel tells nobody whom it kills, except in its log, which users often may not read. But it counts: a count that
has grown since a worker was started makes it the likely reason for a SIGKILL. Kills within the memory limit of a
container or of a batch job are in the same count.
"""

from pathlib import Path

_COUNTS = Path("/proc/vmstat")


def oom_kills(counts: Path = _COUNTS) -> int:
    """Number of processes of this machine that its kernel has killed for want of memory; 0 if it does not say."""
    try:
        lines = counts.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def suspected_oom(before: int, counts: Path = _COUNTS) -> str:
    """What to add to "was killed by SIGKILL" if the kernel has killed processes since it had killed `before`."""
    number = oom_kills(counts) - before
    if number <= 0:
        return ""
    processes = "a process" if number == 1 else f"{number} processes"
    return f", most likely for want of memory: the kernel has killed {processes} for that since it was started"
