"""Each layer exchanged in the cheapest way for its shape (Zhang et al. 2015)."""

from tutti.strategies.poseidon.rule import METHODS, Decision, LayerShape
from tutti.strategies.poseidon.strategy import Poseidon, read

__all__ = ["METHODS", "Decision", "LayerShape", "Poseidon", "read"]
