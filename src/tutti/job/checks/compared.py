"""`compare`: checks that each have a few numbers of every rank share them in one message.

A check that compares ranks is a `Compared`: it says this rank's numbers, and is given those of all ranks. They raise in
their order, the same error on every rank, because all ranks have the same numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from torch import Tensor

from tutti.errors import NonFiniteValues
from tutti.job.checks.comparison import difference, gathered
from tutti.job.checks.fingerprints import combined, fingerprints, first_non_finite
from tutti.job.checks.optimizers import OptimizerCheck
from tutti.job.checks.shards import refuse_different_shards
from tutti.replica import SampleCounts
from tutti.replica.buckets import Slot
from tutti.transports import Transport


class Compared(Protocol):
    """A check of numbers that every rank has. They are as many on every rank."""

    def numbers(self) -> list[int]:
        """Return the numbers of this rank."""
        ...

    def refuse(self, by_rank: dict[int, list[int]]) -> None:
        """Raise if the numbers of the ranks are not as they should be."""
        ...


def compare(checks: Sequence[Compared], share: Callable[[list[int]], dict[int, list[int]]]) -> None:
    """Share the numbers of all checks, and let each look at its own. Collective.

    Args:
        share: returns the numbers of every rank, given this rank's.
    """
    numbers = [check.numbers() for check in checks]
    by_rank = share(list(chain(*numbers)))
    for check, local in zip(checks, numbers, strict=True):
        check.refuse({rank: row[: len(local)] for rank, row in by_rank.items()})
        by_rank = {rank: row[len(local) :] for rank, row in by_rank.items()}


@dataclass(frozen=True)
class SameShards:
    """`tutti.shard` was given the same on every rank."""

    sample_counts: SampleCounts
    rank: int

    def numbers(self) -> list[int]:
        """Return the settings of `tutti.shard`."""
        return list(self.sample_counts.shard)

    def refuse(self, by_rank: dict[int, list[int]]) -> None:
        """Raise `ConfigError` if settings differ."""
        refuse_different_shards(by_rank, self.rank)


@dataclass(frozen=True)
class SteppedOptimizer:
    """The optimiser that was distributed has stepped on every rank."""

    check: OptimizerCheck
    num_unused: int
    """Backward passes of this rank, if the optimiser has not stepped after any of them; else 0."""

    def numbers(self) -> list[int]:
        """Return the number of passes without a step."""
        return [self.num_unused]

    def refuse(self, by_rank: dict[int, list[int]]) -> None:
        """Raise `ConfigError` if a rank has such passes."""
        self.check.check_used(max(number for (number,) in by_rank.values()))


@dataclass(frozen=True)
class FiniteTensors:
    """Tensors that are learned are finite on every rank."""

    slots: list[Slot]
    rank: int
    step: int

    def first_wrong(self) -> str | None:
        """Return the name of this rank's first tensor that is not finite, if there is one."""
        (number,) = self.numbers()
        return self.slots[number - 1].name if number else None

    def numbers(self) -> list[int]:
        """Return the number of the first tensor that is not finite, from 1; 0 if all are."""
        index = first_non_finite([slot.tensor for slot in self.slots])
        return [0 if index is None else index + 1]

    def refuse(self, by_rank: dict[int, list[int]]) -> None:
        """Raise `NonFiniteValues` for the first rank that has such a tensor, with all ranks that have."""
        wrong = {rank: number for rank, (number,) in by_rank.items() if number}
        if wrong:
            name = self.slots[next(iter(wrong.values())) - 1].name
            raise NonFiniteValues(self.rank, list(wrong), f"parameter '{name}'", self.step)


class SameTensors:
    """Tensors have the same bits on every rank: a fingerprint of each is compared."""

    def __init__(self, named: list[tuple[str, Tensor]], rank: int, when: str) -> None:
        """Name the moment of the comparison `when`, for the error."""
        self._names, self._rank, self._when = [name for name, _ in named], rank, when
        self._prints = fingerprints([tensor for _, tensor in named])

    def numbers(self) -> list[int]:
        """Return the fingerprint of every tensor."""
        return self._prints

    def refuse(self, by_rank: dict[int, list[int]]) -> None:
        """Raise `ReplicaMismatch` if a tensor differs."""
        if any(row != self._prints for row in by_rank.values()):
            raise difference(self._names, by_rank, self._rank, self._when)


@dataclass(frozen=True)
class SameTensorsByDigest:
    """As `SameTensors`, by one number for all of them: for comparisons in training. All ranks must be there."""

    tensors: SameTensors
    transport: Transport

    def numbers(self) -> list[int]:
        """Return a number that depends on all fingerprints."""
        return [combined(self.tensors.numbers())]

    def refuse(self, by_rank: dict[int, list[int]]) -> None:
        """Raise `ReplicaMismatch` if a tensor differs. Collective in that case, to find out which."""
        if len({number for (number,) in by_rank.values()}) > 1:
            self.tensors.refuse(gathered(self.tensors.numbers(), self.transport))
