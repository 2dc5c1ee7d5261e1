"""The accuracy of the planner: errors of its predictions, and its first choice beside the fastest strategy."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tutti.plan import Prediction
from tutti.plan.choose import choose

NEAR_BEST = 1.1
"""A choice is right if its measured time is at most this many times that of the fastest."""

Allowed = Literal["exact", "lossy too"]
"""The strategies that the planner could choose from: exact ones, or all."""


@dataclass(frozen=True)
class PredictionCheck:
    """One strategy for one model on one link, predicted and measured."""

    model: str
    rate: str
    prediction: Prediction
    measured_s: float
    """Seconds per step."""

    @property
    def strategy(self) -> str:
        """The strategy's text."""
        return str(self.prediction.strategy)

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.prediction.step_s / self.measured_s - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        return {
            "model": self.model,
            "rate": self.rate,
            "strategy": self.strategy,
            "exact": self.prediction.exact,
            "predicted_s": self.prediction.step_s,
            "measured_s": self.measured_s,
            "error": self.error,
        }


@dataclass(frozen=True)
class PlannerChoice:
    """The planner's first choice for one model on one link, beside the fastest strategy."""

    model: str
    rate: str
    allowed: Allowed
    chosen: str
    fastest: str
    times: float
    """Measured time of the choice, relative to that of the fastest."""

    @property
    def right(self) -> bool:
        """Whether the choice is about as fast as the fastest."""
        return self.times <= NEAR_BEST

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        return {**asdict(self), "right": self.right}


def planner_choices(rows: Sequence[PredictionCheck]) -> list[PlannerChoice]:
    """Return the planner's choices for every model and link: of exact strategies, and of all if there are others."""
    cases: dict[tuple[str, str], list[PredictionCheck]] = {}
    for row in rows:
        cases.setdefault((row.model, row.rate), []).append(row)
    choices = []
    for case in cases.values():
        exact = [row for row in case if row.prediction.exact]
        if exact:
            choices.append(_choice(exact, "exact"))
        if len(exact) < len(case):  # Otherwise the second question would be the first again.
            choices.append(_choice(case, "lossy too"))
    return choices


def _choice(rows: Sequence[PredictionCheck], allowed: Allowed) -> PlannerChoice:
    """Judge the planner's choice among these strategies by what was measured."""
    exact_predictions, lossy_predictions = (
        [row.prediction for row in rows if row.prediction.exact is wanted] for wanted in (True, False)
    )
    # The planner sees predictions only. Measurements then judge its choice.
    first = choose(exact_predictions, lossy_predictions)
    chosen = next(row for row in rows if row.prediction is first)
    fastest = min(rows, key=lambda row: row.measured_s)
    times = chosen.measured_s / fastest.measured_s
    return PlannerChoice(chosen.model, chosen.rate, allowed, chosen.strategy, fastest.strategy, times)


def error_summary(rows: Sequence[PredictionCheck]) -> tuple[float, float]:
    """Return the median and the largest absolute error."""
    errors = [abs(row.error) for row in rows]
    return statistics.median(errors), max(errors)


def num_right(choices: Sequence[PlannerChoice], allowed: Allowed) -> tuple[int, int]:
    """Return the number of right choices among those with this `allowed`, and the number of all of them."""
    selected = [choice for choice in choices if choice.allowed == allowed]
    return sum(choice.right for choice in selected), len(selected)
