"""The planner at work on a job: it times its steps, chooses, and looks whether it was right."""

from tutti.plan.auto.exchange import AutoExchange
from tutti.plan.auto.status import PlanStatus

__all__ = ["AutoExchange", "PlanStatus"]
