"""Selection rules: the order in which blocks are proposed for an update.

A `SelectionRule` is a frozen description; `start` makes a `BlockSelector`, which keeps the state of one solution. Every
rank has a selector. They propose the same blocks, because they draw from the same seed and are told of the same
updates.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tutti.errors import ConfigError

_WINDOW = 8
"""The moving average of found urgency covers about the last eighth of all blocks."""


class BlockSelector(ABC):
    """A selection rule in use: the same on every rank."""

    uses_urgency = False
    """Whether `raise_urgency` is to be called."""

    @abstractmethod
    def candidates(self, max_blocks: int) -> list[int]:
        """Return at most `max_blocks` different blocks, the first choice first."""

    def mark_updated(self, blocks: list[int]) -> None:
        """Take note that these blocks, of the last candidates, were updated."""
        return None

    def raise_urgency(self, blocks: np.ndarray, increments: np.ndarray) -> None:
        """Add to the urgency of blocks; a block may be given several times."""
        return None


class SelectionRule(ABC):
    """A description of which blocks come next: frozen, without state."""

    @abstractmethod
    def start(self, num_blocks: int, seed: int) -> BlockSelector:
        """Return a selector for a problem of `num_blocks` blocks."""

    def operations(self, num_blocks: int) -> float:
        """Return the operations of a selection, for virtual time."""
        return 0.0


@dataclass(frozen=True)
class RoundRobin(SelectionRule):
    """One block after the other, again and again. Candidates that were rejected come first in the next round."""

    def start(self, num_blocks: int, seed: int) -> BlockSelector:
        return _RoundRobinSelector(num_blocks)


@dataclass(frozen=True)
class Random(SelectionRule):
    """Random blocks, all with the same probability (Shotgun, Bradley et al. 2011)."""

    def start(self, num_blocks: int, seed: int) -> BlockSelector:
        return _RandomSelector(num_blocks, np.random.default_rng(seed))


@dataclass(frozen=True)
class Dynamic(SelectionRule):
    """The most urgent blocks: those for which the problem expects a large change (`BlockProblem.urgency_increments`).

    Args:
        explore: smallest share of candidates that are taken in round-robin order, urgent or not, so that every block is
            visited. The share grows while such blocks turn out to be urgent.
        greedy: take the most urgent blocks. Otherwise blocks are drawn with probabilities in proportion to urgency.
    """

    explore: float = 0.1
    greedy: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.explore <= 1:
            raise ConfigError(
                f"Dynamic: explore must be above 0 and at most 1, got {self.explore}: with 0 a block that did not "
                "change once would never be updated again."
            )

    def start(self, num_blocks: int, seed: int) -> BlockSelector:
        return _DynamicSelector(num_blocks, self, np.random.default_rng(seed))

    def operations(self, num_blocks: int) -> float:
        return 2.0 * num_blocks  # The cumulative sum of urgencies, and searches in it.


SELECTION_RULES: dict[str, Callable[[], SelectionRule]] = {
    "dynamic": Dynamic,
    "round-robin": RoundRobin,
    "random": Random,
}
"""All selection rules, by name."""


class _RoundRobinSelector(BlockSelector):
    """A queue of all blocks: updated ones go to its end, rejected ones stay in front."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = deque(range(num_blocks))
        self._num_offered = 0

    def candidates(self, max_blocks: int) -> list[int]:
        self._num_offered = min(max_blocks, len(self._queue))
        return list(islice(self._queue, self._num_offered))

    def mark_updated(self, blocks: list[int]) -> None:
        updated = set(blocks)
        offered = [self._queue.popleft() for _ in range(self._num_offered)]
        self._queue.extend(block for block in offered if block in updated)
        # Reversed, because extendleft turns the order round: rejected ones keep theirs.
        self._queue.extendleft(block for block in reversed(offered) if block not in updated)


class _RandomSelector(BlockSelector):
    """Draws blocks without replacement."""

    def __init__(self, num_blocks: int, generator: np.random.Generator) -> None:
        self._num_blocks = num_blocks
        self._generator = generator

    def candidates(self, max_blocks: int) -> list[int]:
        number = min(max_blocks, self._num_blocks)
        drawn: list[int] = self._generator.choice(self._num_blocks, number, replace=False).tolist()
        return drawn


class _DynamicSelector(BlockSelector):
    """Mixes urgent blocks with blocks in round-robin order.

    The share of round-robin blocks follows what they turned out to be worth. `_found` is the mean urgency that such
    blocks caused when they were updated, of late. If all blocks are expected to be worth that much, their sum is to the
    sum of known urgencies as the round-robin blocks should be to the urgent ones.

    All ranks must compute the same bits. So sums are cumulative, hence in one order, and draws come from a generator
    of integers.
    """

    uses_urgency = True

    def __init__(self, num_blocks: int, rule: Dynamic, generator: np.random.Generator) -> None:
        self._urgency = np.zeros(num_blocks)
        self._round_robin = _RoundRobinSelector(num_blocks)
        self._explored: set[int] = set()
        """Candidates that were offered for their turn, not for their urgency."""
        self._explored_updates: list[int] = []
        """Those of them that were updated in the last round."""
        self._found = 0.0
        self._rule = rule
        self._generator = generator

    def candidates(self, max_blocks: int) -> list[int]:
        max_blocks = min(max_blocks, len(self._urgency))
        in_turn = self._round_robin.candidates(max_blocks)
        sums = np.cumsum(self._urgency)
        # Nothing is known to be urgent yet, or all urgency is used up: round-robin finds new urgency.
        if not sums[-1]:
            self._explored = set(in_turn)
            return in_turn
        # What all blocks together are worth if each is worth what the last explored ones were.
        expected = self._found * len(sums)
        share = max(self._rule.explore, expected / (expected + sums[-1]))
        num_in_turn = max(1, round(max_blocks * share))
        urgent = self._most_urgent(max_blocks) if self._rule.greedy else self._draw(sums, max_blocks)
        self._explored = set(in_turn).difference(urgent)
        return _interleave(in_turn, urgent, num_in_turn, max_blocks)

    def _most_urgent(self, max_blocks: int) -> list[int]:
        blocks = self._urgency.nonzero()[0]
        return list(blocks[np.argsort(-self._urgency[blocks], kind="stable")[:max_blocks]].tolist())

    def _draw(self, sums: np.ndarray, max_blocks: int) -> list[int]:
        """Draw blocks in proportion to urgency, by inverse transform sampling; twice as many, as some are equal."""
        blocks = np.searchsorted(sums, self._generator.random(2 * max_blocks) * sums[-1], side="right")
        return np.minimum(blocks, len(sums) - 1).tolist()  # Rounding may lead beyond the last block.

    def mark_updated(self, blocks: list[int]) -> None:
        self._round_robin.mark_updated(blocks)
        # The expected change has been made. What it means for other blocks is added by `raise_urgency`.
        self._urgency[blocks] = 0.0
        self._explored_updates = [block for block in blocks if block in self._explored]

    def raise_urgency(self, blocks: np.ndarray, increments: np.ndarray) -> None:
        np.add.at(self._urgency, blocks, increments)  # Adds repeatedly for blocks that are given several times.
        if self._explored_updates:
            # In proportion to the blocks explored, so that the window is a part of all blocks and not a number of
            # rounds.
            weight = min(1.0, _WINDOW * len(self._explored_updates) / len(self._urgency))
            mean = float(np.cumsum(self._urgency[self._explored_updates])[-1]) / len(self._explored_updates)
            self._found += weight * (mean - self._found)


def _interleave(in_turn: list[int], urgent: list[int], num_in_turn: int, max_blocks: int) -> list[int]:
    """Return `max_blocks` different blocks, `num_in_turn` of them in turn, evenly among the urgent ones.

    The first one is in turn: the first candidate is never rejected, so every block is updated some day. If there are
    too few urgent blocks, more are taken in turn.
    """
    chosen: dict[int, None] = {}  # A set that keeps its order.
    others = iter(dict.fromkeys(urgent))
    turn = iter(in_turn)
    for index in range(max_blocks):
        # Evenly spread: a turn comes wherever the running count `index * num_in_turn / max_blocks` passes an integer.
        is_turn = index * num_in_turn // max_blocks < (index + 1) * num_in_turn // max_blocks or index == 0
        # When the urgent ones are used up, the first block in turn stands in. It was chosen at index 0, so nothing is
        # added.
        chosen.setdefault(next(turn if is_turn else others, in_turn[0]))
    for block in turn:
        if len(chosen) == max_blocks:
            break
        chosen.setdefault(block)
    return list(chosen)
