"""Ways of keeping replicas together."""

from tutti.strategies.allreduce import AllReduce
from tutti.strategies.base import Exchange, Strategy
from tutti.strategies.parameter_server import BSP, SSP, Async, ParameterServer, SoftSync, StalenessAware
from tutti.strategies.parse import STRATEGIES, parse

__all__ = [
    "BSP",
    "SSP",
    "STRATEGIES",
    "AllReduce",
    "Async",
    "Exchange",
    "ParameterServer",
    "SoftSync",
    "StalenessAware",
    "Strategy",
    "parse",
]
