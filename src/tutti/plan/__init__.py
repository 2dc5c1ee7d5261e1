"""What training a model costs here, and on many workers: measured, predicted, and chosen."""

from tutti.plan.choose import Plan, plan
from tutti.plan.cost import PRICES, Prediction, price
from tutti.plan.overhead import Overhead
from tutti.plan.profile.record import Gradient, LayerProfile, Profile

__all__ = ["PRICES", "Gradient", "LayerProfile", "Overhead", "Plan", "Prediction", "Profile", "plan", "price"]
