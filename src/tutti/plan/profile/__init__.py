"""Time and memory of a model's training step, layer by layer, with the model left as it was."""

from tutti.plan.profile.profiler import profile

__all__ = ["profile"]
