"""The planner's current choice, as `job.metrics.strategy["planned"]` reports it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanStatus:
    """Which strategy `Auto` has chosen, and how its prediction compares with the measured step."""

    chosen: str
    """The text of the strategy at work."""
    predicted_s: float | None
    """Seconds that a step should take; None before there is a plan."""
    step_s: float | None
    """Median seconds of the latest steps; None before the first."""
    settled: bool
    """Whether no steps are being profiled and no change of strategy is pending or on trial."""
