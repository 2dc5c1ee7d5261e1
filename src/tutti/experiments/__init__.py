"""Experiments of the papers that Tutti comes from, done again: one module for each."""

from collections.abc import Callable

from tutti.experiments import (
    allreduce_mnist,
    block_momentum,
    decentralised,
    error_feedback,
    horovod_scaling,
    poseidon,
    staleness,
    strads,
)
from tutti.experiments.setting import Setting

EXPERIMENTS: dict[str, Callable[[Setting], str]] = {
    "allreduce-mnist": allreduce_mnist.reproduce,
    "block-momentum": block_momentum.reproduce,
    "decentralised": decentralised.reproduce,
    "error-feedback": error_feedback.reproduce,
    "horovod-scaling": horovod_scaling.reproduce,
    "poseidon": poseidon.reproduce,
    "staleness": staleness.reproduce,
    "strads": strads.reproduce,
}
"""By name: each does its work, puts figures and numbers into the setting's folder and returns a report in Markdown."""

__all__ = ["EXPERIMENTS", "Setting"]
