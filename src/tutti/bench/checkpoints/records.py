"""Records of a run's steps: which samples each rank used in which step of which attempt.

How it works. Each rank of each attempt appends to a file of its own, one line of JSON per step. A line is written in
one call, which the system completes even if the process is killed then. The first line is the step from which the
attempt continued. Steps of an attempt that lie after the start of the next one were lost with it, and do not count.
"""

import json
import os
from collections import Counter
from pathlib import Path
from types import TracebackType


class Record:
    """The file to which one rank of one attempt appends."""

    def __init__(self, folder: Path, attempt: int, rank: int, start: int) -> None:
        """`start`: the step from which the attempt continues."""
        path = folder / f"attempt-{attempt:04d}-rank-{rank}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._write([start])

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def append(self, step: int, epoch: int, samples: list[int]) -> None:
        """Record a step that was taken."""
        self._write([step, epoch, *samples])

    def _write(self, numbers: list[int]) -> None:
        os.write(self._file, f"{json.dumps(numbers)}\n".encode())


def uses(folder: Path) -> dict[int, Counter[int]]:
    """Return how often committed steps have used each sample, by epoch."""
    attempts: dict[int, list[list[list[int]]]] = {}
    for path in sorted(folder.glob("attempt-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        attempts.setdefault(int(path.name.split("-")[1]), []).append(lines)
    found: dict[int, Counter[int]] = {}
    end = None  # Of the attempt that is looked at; None for the last one, all of whose steps count.
    for _, ranks in sorted(attempts.items(), reverse=True):
        for _, *steps in ranks:
            for step, epoch, *samples in steps:
                if end is None or step <= end:
                    found.setdefault(epoch, Counter()).update(samples)
        end = ranks[0][0][0]
    return found


def misused(folder: Path, num_samples: int, num_epochs: int) -> int:
    """Return how many samples of all epochs were not used exactly once by committed steps."""
    found = uses(folder)
    wrong = sum(len(found[epoch]) for epoch in found if not 0 <= epoch < num_epochs)
    for epoch in range(num_epochs):
        counts = found.get(epoch, Counter())
        wrong += sum(counts[number] != 1 for number in range(num_samples))
    return wrong
