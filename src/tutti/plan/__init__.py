"""What training a model costs here, and on many workers: measured, predicted, and chosen."""

from tutti.plan.profile import Gradient, LayerProfile, Profile

__all__ = ["Gradient", "LayerProfile", "Profile"]
