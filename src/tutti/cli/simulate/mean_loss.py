"""One loss for all simulated ranks."""

from collections import defaultdict, deque
from statistics import fmean
from typing import Any, Self

from tutti.launch.supervisor_pipe import Watcher

_HELD = 20


class MeanLoss:
    """Passes rank 0's reports on, with the mean loss over ranks: as soon as all have reported that step."""

    def __init__(self, workers: int, show: Watcher) -> None:
        self._workers, self._show = workers, show
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._held: deque[dict[str, Any]] = deque()
        self._mean = float("nan")

    def show(self, rank: int, values: dict[str, Any]) -> None:
        """Take in a report."""
        if values["kind"] == "step":
            self._losses[values["step"]].append(values["loss"])
        if rank == 0:
            self._held.append(values)
        # Ranks that run far behind, or have died, are not waited for.
        while self._held and (len(self._held) > _HELD or self._complete(self._held[0])):
            self._pass_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            self._pass_on()

    def _complete(self, values: dict[str, Any]) -> bool:
        return values["kind"] != "step" or len(self._losses[values["step"]]) >= self._workers

    def _pass_on(self) -> None:
        values = self._held.popleft()
        if values["kind"] == "step":
            self._mean = fmean(self._losses.pop(values["step"]))
        values["loss"] = self._mean
        self._show(0, values)
