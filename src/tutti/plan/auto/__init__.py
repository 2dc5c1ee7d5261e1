"""The planner at work on a job: it times its steps, chooses, and looks whether it was right."""

from tutti.plan.auto.exchange import AutoExchange
from tutti.plan.auto.status import PlanStatus
from tutti.plan.auto.strategy import Auto, read

__all__ = ["Auto", "AutoExchange", "PlanStatus", "read"]
