"""Records of which worker used which samples in which step, and the judgement whether each was used once.

What a step is depends on the strategy:

- *together*: all workers take it together. A void step is tried again in a later generation, and the last try counts.
- *alone*: it is one worker's. The steps of a worker that was lost, or has left, count as far as the others know them,
  from the first on. What the others have not got of it, they use themselves, or they count it as lost.
- *block*: it is one worker's until the next agreement. The steps since then of a worker that was lost, or that was
  behind, are dropped and come again, so a sample may be recorded more than once; none may be missing.
"""

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

from tutti.bench.checkpoints.training import NUM_SAMPLES

Sample = tuple[int, int]
"""An epoch, and the number of a sample."""


class StepRecord:
    """The steps of one worker, in a file. A step is written before it is taken, because the worker may be killed."""

    def __init__(self, folder: Path, number: int) -> None:
        """Open the file of a worker."""
        self._file = (folder / f"worker-{number}.jsonl").open("a", buffering=1)

    def step(self, generation: int, step: int, epoch: int, samples: list[int]) -> None:
        """Write down a step that is about to be taken."""
        self._file.write(f"{json.dumps([generation, step, epoch, samples])}\n")

    def void(self) -> None:
        """The last step was void."""
        self._file.write("null\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def misused(folder: Path, num_epochs: int, kind: str, ended: Collection[int]) -> tuple[int, int]:
    """Return how many samples were not used, and how many were used more than once.

    Args:
        folder: that of the records.
        num_epochs: number of epochs.
        kind: what a step is: "together", "alone" or "block".
        ended: numbers of the workers that have come to the end.
    """
    wanted = {(epoch, number) for epoch in range(num_epochs) for number in range(NUM_SAMPLES)}
    steps = {int(path.stem.removeprefix("worker-")): _lines(path) for path in folder.glob("worker-*.jsonl")}
    if kind == "together":
        used = _last_tries([line for lines in steps.values() for line in lines if line is not None])
        return len(wanted - used.keys()), sum(count > 1 for count in used.values())
    if kind == "block":
        tried = {sample for lines in steps.values() for line in lines if line is not None for sample in _samples(line)}
        return len(wanted - tried), 0
    used = Counter(sample for worker in steps.keys() & set(ended) for step in _alone(steps[worker]) for sample in step)
    missing = wanted - used.keys()
    for worker in steps.keys() - set(ended):
        for step in _alone(steps[worker]):
            if not missing.issuperset(step):
                break
            missing -= set(step)
    return len(missing), sum(count > 1 for count in used.values())


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _samples(line: Any) -> list[Sample]:
    return [(line[2], number) for number in line[3]]


def _last_tries(lines: list[Any]) -> Counter[Sample]:
    tries: dict[tuple[int, int], list[Any]] = {}
    for line in lines:
        tries.setdefault((line[2], line[1]), []).append(line)
    used: Counter[Sample] = Counter()
    for found in tries.values():
        last = max(line[0] for line in found)
        used.update(sample for line in found if line[0] == last for sample in _samples(line))
    return used


def _alone(lines: list[Any]) -> list[list[Sample]]:
    """The samples of each step of a worker that was not void."""
    steps: list[list[Sample]] = []
    for line in lines:
        if line is None:
            steps.pop()
        else:
            steps.append(_samples(line))
    return steps
