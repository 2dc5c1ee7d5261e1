"""The planner: profile a training step, predict it under every strategy, and choose one."""

from tutti.cost import Gradient, LayerProfile, Overhead, Profile
from tutti.plan.choose import Plan, plan
from tutti.plan.prediction import Prediction, price
from tutti.plan.scaling import RunSize

__all__ = ["Gradient", "LayerProfile", "Overhead", "Plan", "Prediction", "Profile", "RunSize", "plan", "price"]
