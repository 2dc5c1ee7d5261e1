"""Checks while training: mistakes that would end a run normally, with other weights than one worker's."""

from tutti.job.checks.model_checks import ModelChecks

__all__ = ["ModelChecks"]
