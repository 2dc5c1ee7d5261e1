"""How far predictions are off, and whether what the planner would choose is what was fastest."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tutti.plan import Prediction
from tutti.plan.choose import choose

NEAR_BEST = 1.1
"""A choice is right if it takes no longer than this times the fastest that was measured."""

Allowed = Literal["exact", "lossy too"]


@dataclass(frozen=True)
class PredictionCheck:
    """One strategy for one model on one link, predicted and measured."""

    model: str
    rate: str
    prediction: Prediction
    measured_s: float

    @property
    def strategy(self) -> str:
        return str(self.prediction.strategy)

    @property
    def error(self) -> float:
        """How far the prediction is off, relative to what was measured."""
        return self.prediction.step_s / self.measured_s - 1

    def as_dict(self) -> dict[str, Any]:
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
    """What the planner puts first for one model on one link, beside what was fastest."""

    model: str
    rate: str
    allowed: Allowed
    chosen: str
    fastest: str
    times: float
    """What was chosen takes so many times as long as the fastest, both as measured."""

    @property
    def right(self) -> bool:
        return self.times <= NEAR_BEST

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "right": self.right}


def planner_choices(rows: Sequence[PredictionCheck]) -> list[PlannerChoice]:
    """For every model and link: among exact strategies, and among all if others were measured too."""
    cases: dict[tuple[str, str], list[PredictionCheck]] = {}
    for row in rows:
        cases.setdefault((row.model, row.rate), []).append(row)
    found = []
    for case in cases.values():
        exact = [row for row in case if row.prediction.exact]
        if exact:
            found.append(_choice(exact, "exact"))
        if len(exact) < len(case):
            found.append(_choice(case, "lossy too"))
    return found


def _choice(rows: Sequence[PredictionCheck], allowed: Allowed) -> PlannerChoice:
    exacts, lossies = ([row.prediction for row in rows if row.prediction.exact is yes] for yes in (True, False))
    first = choose(exacts, lossies)
    chosen = next(row for row in rows if row.prediction is first)
    fastest = min(rows, key=lambda row: row.measured_s)
    times = chosen.measured_s / fastest.measured_s
    return PlannerChoice(chosen.model, chosen.rate, allowed, chosen.strategy, fastest.strategy, times)


def error_summary(rows: Sequence[PredictionCheck]) -> tuple[float, float]:
    """The median and the worst of the errors, too fast or too slow."""
    errors = [abs(row.error) for row in rows]
    return statistics.median(errors), max(errors)


def num_right(choices: Sequence[PlannerChoice], allowed: Allowed) -> tuple[int, int]:
    """How many of the choices among these are right, and of how many."""
    alike = [choice for choice in choices if choice.allowed == allowed]
    return sum(choice.right for choice in alike), len(alike)
