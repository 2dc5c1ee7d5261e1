"""`distribute`, which makes a model a distributed one, and `Job`, the handle that it returns."""

from tutti.job.checkpoints.restored import Restored
from tutti.job.distribution import distribute, measure_link, sync_batchnorm
from tutti.job.handle import Job
from tutti.job.membership import MembershipChange
from tutti.job.metrics import Changes, Metrics

__all__ = ["Changes", "Job", "MembershipChange", "Metrics", "Restored", "distribute", "measure_link", "sync_batchnorm"]
