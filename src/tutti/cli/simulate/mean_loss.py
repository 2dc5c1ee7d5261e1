"""The mean loss over all simulated ranks."""

from collections import defaultdict, deque
from statistics import fmean
from typing import Any, Self

from tutti.launch.supervisor_pipe import Watcher

_MOST_HELD = 20
"""Reports of the leader that wait for other ranks. The oldest is forwarded with the mean of those that arrived."""


class MeanLoss:
    """Forwards the reports of one rank with the mean loss over ranks, once every rank has reported that step.

    That rank, the leader, is rank 0. Where it is lost, it is the first one that has gone on for long without it.
    """

    def __init__(self, workers: int, forward: Watcher) -> None:
        self._workers, self._forward = workers, forward
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._held: deque[dict[str, Any]] = deque()
        self._mean = float("nan")
        self._leader = self._newest = 0
        """The rank whose reports are forwarded, and its last step."""

    def report(self, rank: int, values: dict[str, Any]) -> None:
        """Take a report of any rank; a watcher of `tutti.simulate`."""
        if values["kind"] == "step":
            # Ranks of a simulation run one at a time and reach a step at different virtual times.
            self._losses[values["step"]].append(values["loss"])
            if values["step"] > self._newest + _MOST_HELD:
                self._leader = rank
        if rank == self._leader:
            self._held.append(values)
            self._newest = values.get("step", self._newest)
        # Ranks that run far behind, or have died, are not waited for.
        while self._held and (len(self._held) > _MOST_HELD or self._complete(self._held[0])):
            self._forward_oldest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            self._forward_oldest()

    def _complete(self, values: dict[str, Any]) -> bool:
        """Whether a report can be forwarded: all ranks have reported its step, or it is about no step."""
        return values["kind"] != "step" or len(self._losses[values["step"]]) >= self._workers

    def _forward_oldest(self) -> None:
        """Forward the oldest report of the leader with the mean loss; an evaluation gets the mean of the last step."""
        values = self._held.popleft()
        if values["kind"] == "step":
            # Of a step that was void and is tried again, the others may have reported before.
            self._mean = fmean(self._losses.pop(values["step"], [values["loss"]]))
        values["loss"] = self._mean
        self._forward(0, values)
