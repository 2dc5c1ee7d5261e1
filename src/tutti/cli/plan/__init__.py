"""`tutti plan`: predicted step times of every strategy on a cluster, and the one to use."""

from tutti.cli.plan.command import plan

__all__ = ["plan"]
