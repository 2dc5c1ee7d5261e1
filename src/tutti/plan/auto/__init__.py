"""The planner at work on a job: it times its steps, chooses, and looks whether it was right."""

from tutti.plan.auto.exchange import AutoExchange

__all__ = ["AutoExchange"]
