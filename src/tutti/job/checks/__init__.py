"""Checks that run while a model is trained: mistakes that would otherwise end in wrong weights without an error."""

from tutti.job.checks.expectations import LossKind, agree, follow
from tutti.job.checks.training_checks import TrainingChecks

__all__ = ["LossKind", "TrainingChecks", "agree", "follow"]
