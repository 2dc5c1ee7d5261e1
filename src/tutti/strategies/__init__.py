"""Ways of keeping replicas together."""

from tutti.strategies.allreduce import AllReduce
from tutti.strategies.base import Exchange, Strategy
from tutti.strategies.parse import STRATEGIES, parse

__all__ = ["STRATEGIES", "AllReduce", "Exchange", "Strategy", "parse"]
