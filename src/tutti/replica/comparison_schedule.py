"""`ComparisonSchedule`: after which steps ranks compare what they hold."""

_INTERVAL = 2048
"""Steps between two comparisons, after the first ones."""


class ComparisonSchedule:
    """Comparisons after steps 2, 3, 5, 9 and so on, and then after every `_INTERVAL`-th.

    Most mistakes show at once, and those that come later are found without a cost that can be measured.
    """

    def __init__(self) -> None:
        self._due = 2

    def is_due(self, num_steps: int) -> bool:
        """Whether to compare after so many steps. To be called after every step, with the same numbers on all ranks."""
        if num_steps != self._due:
            return False
        self._due += min(self._due - 1, _INTERVAL)
        return True
