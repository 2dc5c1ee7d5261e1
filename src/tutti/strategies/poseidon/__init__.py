"""Each layer exchanged in the cheapest way for its shape (Zhang et al. 2015)."""

from tutti.strategies.poseidon.rule import METHODS, Decision, Shape
from tutti.strategies.poseidon.strategy import Poseidon, read

__all__ = ["METHODS", "Decision", "Poseidon", "Shape", "read"]
