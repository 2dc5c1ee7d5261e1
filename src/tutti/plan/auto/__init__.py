"""The `auto` strategy: the planner times a job's first steps, chooses a strategy, and checks its prediction."""

from tutti.plan.auto.exchange import AutoExchange
from tutti.plan.auto.status import PlanStatus
from tutti.plan.auto.strategy import Auto, read

__all__ = ["Auto", "AutoExchange", "PlanStatus", "read"]
