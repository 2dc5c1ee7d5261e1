"""`Pipeline`: the user's settings of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tutti.errors import ConfigError

ScheduleName = Literal["sequential", "gpipe", "1f1b", "interleaved", "zero-bubble"]

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
"""Names of all schedules."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Settings of a pipeline: its schedule, microbatches and cut.

    Args:
        schedule: "sequential" runs one microbatch after the other, without pipelining. "gpipe" (Huang et al. 2019) runs
            all forward passes first. "1f1b" (Narayanan et al. 2019) keeps fewer activations. "interleaved" (Narayanan
            et al. 2021) gives every rank several stages. "zero-bubble" (Qi et al. 2023) computes gradients of weights
            while a rank would wait.
        microbatches: number of microbatches of a batch; by default twice the number of ranks along `pipe`.
        stages_per_rank: number of stages of a rank; by default 2 for "interleaved", 1 for the others.
        cut: number of layers of each stage, in order; by default computed from the measured time of each layer.
        memory_bytes: largest size of a rank's stages: parameters, their gradients, and the outputs of layers for the
            microbatches that the schedule keeps. Optimiser state comes on top.
    """

    schedule: ScheduleName = "1f1b"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    cut: Sequence[int] | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        mistakes = []
        if self.schedule not in SCHEDULES:
            mistakes.append(f"schedule '{self.schedule}' is not one of {', '.join(SCHEDULES)}")
        for name in ("microbatches", "stages_per_rank", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                mistakes.append(f"{name} must be a whole number, 1 or more, got {value!r}")
        counts = () if self.cut is None else self.cut
        if isinstance(counts, str) or not all(isinstance(count, int) and count > 0 for count in counts) or counts == []:
            mistakes.append(f"every stage of the cut needs 1 layer or more, got {self.cut!r}")
        if not mistakes and self.schedule in ("sequential", "gpipe", "1f1b") and (self.stages_per_rank or 1) > 1:
            mistakes.append(
                f"'{self.schedule}' has 1 stage per rank, got stages_per_rank={self.stages_per_rank}; use "
                "'interleaved' for several"
            )
        if mistakes:
            raise ConfigError(f"Pipeline: {'; '.join(mistakes)}.")

    @property
    def num_stages_per_rank(self) -> int:
        """Number of stages of a rank, with the schedule's default."""
        return self.stages_per_rank or (2 if self.schedule == "interleaved" else 1)
