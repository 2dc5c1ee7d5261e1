"""Which blocks come next: in turn, at random, or the most urgent first."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tutti.errors import ConfigError

Numbers = np.ndarray

_MEMORY = 8
"""What is of late: an eighth of all blocks."""


class BlockSelector(ABC):
    """An order at work: the same on every rank, since it draws from the same seed and hears of the same commits."""

    uses_urgency = False
    """Whether it wants to know what is urgent."""

    @abstractmethod
    def candidates(self, number: int) -> list[int]:
        """At most so many blocks, the first choice first."""

    def mark_updated(self, blocks: list[int]) -> None:
        """These blocks were updated, of the candidates."""
        return None

    def raise_urgency(self, urgent: Numbers, amounts: Numbers) -> None:
        """These blocks are more urgent, each by its amount; some perhaps several times."""
        return None


class SelectionRule(ABC):
    """A description of which blocks come next: frozen, without state."""

    @abstractmethod
    def start(self, num_blocks: int, seed: int) -> BlockSelector: ...

    def operations(self, num_blocks: int) -> float:
        """What picking takes in a round, in virtual time."""
        return 0.0


@dataclass(frozen=True)
class RoundRobin(SelectionRule):
    """One block after the other, from the first to the last and again. Those that had to stand back come first."""

    def start(self, num_blocks: int, seed: int) -> BlockSelector:
        return _Turn(num_blocks)


@dataclass(frozen=True)
class Random(SelectionRule):
    """Any blocks, all equally likely (Shotgun, Bradley et al. 2011)."""

    def start(self, num_blocks: int, seed: int) -> BlockSelector:
        return _Drawn(num_blocks, np.random.default_rng(seed))


@dataclass(frozen=True)
class Dynamic(SelectionRule):
    """The most urgent blocks: those that a problem says have moved, or would, when they or what they depend on changed.

    Args:
        explore: the least share of every round that goes to all blocks in turn, urgent or not, so that none is
            forgotten; more does as long as blocks in turn are found to be in need.
        greedy: take the most urgent, and do not draw blocks with probabilities in proportion to their urgency.
    """

    explore: float = 0.1
    greedy: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.explore <= 1:
            raise ConfigError(
                f"Dynamic: explore must be above 0 and at most 1, got {self.explore}: with 0 a block that did not "
                "change once would never be looked at again."
            )

    def start(self, num_blocks: int, seed: int) -> BlockSelector:
        return _Urgent(num_blocks, self, np.random.default_rng(seed))

    def operations(self, num_blocks: int) -> float:
        return 2.0 * num_blocks  # Sums of urgencies, and the search in them.


SELECTION_RULES: dict[str, Callable[[], SelectionRule]] = {
    "dynamic": Dynamic,
    "round-robin": RoundRobin,
    "random": Random,
}
"""By name, for the command line."""


class _Turn(BlockSelector):
    def __init__(self, num_blocks: int) -> None:
        self._queue = deque(range(num_blocks))
        self._num_offered = 0

    def candidates(self, number: int) -> list[int]:
        self._num_offered = min(number, len(self._queue))
        return list(islice(self._queue, self._num_offered))

    def mark_updated(self, blocks: list[int]) -> None:
        updated = set(blocks)
        offered = [self._queue.popleft() for _ in range(self._num_offered)]
        self._queue.extend(block for block in offered if block in updated)
        self._queue.extendleft(block for block in reversed(offered) if block not in updated)


class _Drawn(BlockSelector):
    def __init__(self, num_blocks: int, draws: np.random.Generator) -> None:
        self._num_blocks = num_blocks
        self._draws = draws

    def candidates(self, number: int) -> list[int]:
        drawn: list[int] = self._draws.choice(self._num_blocks, min(number, self._num_blocks), replace=False).tolist()
        return drawn


class _Urgent(BlockSelector):
    """Sums are taken one after the other and draws are integers at heart: the same on any processor.

    As many blocks come in turn as are worth it: what those in turn were found to be in need of, of late, is expected of
    all. They are spread among the urgent ones, and the very first is one of them, so that it is never refused.
    """

    uses_urgency = True

    def __init__(self, num_blocks: int, order: Dynamic, draws: np.random.Generator) -> None:
        self._urgency = np.zeros(num_blocks)
        self._turn = _Turn(num_blocks)
        self._in_turn: set[int] = set()
        self._looked_at: list[int] = []
        self._found = 0.0
        self._order = order
        self._draws = draws

    def candidates(self, number: int) -> list[int]:
        number = min(number, len(self._urgency))
        in_turn = self._turn.candidates(number)
        sums = np.cumsum(self._urgency)
        if not sums[-1]:
            self._in_turn = set(in_turn)
            return in_turn
        expected = self._found * len(sums)
        num_in_turn = max(1, round(number * max(self._order.explore, expected / (expected + sums[-1]))))
        urgent = self._greedily(number) if self._order.greedy else self._drawn(sums, number)
        self._in_turn = set(in_turn).difference(urgent)
        return _spread(in_turn, urgent, num_in_turn, number)

    def _greedily(self, number: int) -> list[int]:
        waiting = self._urgency.nonzero()[0]
        return list(waiting[np.argsort(-self._urgency[waiting], kind="stable")[:number]].tolist())

    def _drawn(self, sums: Numbers, number: int) -> list[int]:
        places = np.searchsorted(sums, self._draws.random(2 * number) * sums[-1], side="right")
        return np.minimum(places, len(sums) - 1).tolist()

    def mark_updated(self, blocks: list[int]) -> None:
        self._turn.mark_updated(blocks)
        self._urgency[blocks] = 0.0
        self._looked_at = [block for block in blocks if block in self._in_turn]

    def raise_urgency(self, urgent: Numbers, amounts: Numbers) -> None:
        np.add.at(self._urgency, urgent, amounts)
        if self._looked_at:
            weight = min(1.0, _MEMORY * len(self._looked_at) / len(self._urgency))
            found = float(np.cumsum(self._urgency[self._looked_at])[-1]) / len(self._looked_at)
            self._found += weight * (found - self._found)


def _spread(in_turn: list[int], urgent: list[int], num_in_turn: int, number: int) -> list[int]:
    """So many different blocks, of which so many are in turn, evenly among others; more where others are too few."""
    chosen: dict[int, None] = {}
    others = iter(dict.fromkeys(urgent))
    turn = iter(in_turn)
    for place in range(number):
        due = place * num_in_turn // number < (place + 1) * num_in_turn // number or place == 0
        chosen.setdefault(next(turn if due else others, in_turn[0]))
    for block in turn:
        if len(chosen) == number:
            break
        chosen.setdefault(block)
    return list(chosen)
