"""Ways of keeping replicas together."""

from tutti.strategies.allreduce import AllReduce
from tutti.strategies.averaging import Averaging, BlockMomentum, DiLoCo
from tutti.strategies.base import Exchange, Strategy
from tutti.strategies.decentralised import Gossip, Graph, PeerUpdates
from tutti.strategies.parameter_server import BSP, SSP, Async, ParameterServer, SoftSync, StalenessAware
from tutti.strategies.parse import STRATEGIES, as_strategy, is_strategy_name, parse
from tutti.strategies.poseidon import Poseidon

__all__ = [
    "BSP",
    "SSP",
    "STRATEGIES",
    "AllReduce",
    "Async",
    "Averaging",
    "BlockMomentum",
    "DiLoCo",
    "Exchange",
    "Gossip",
    "Graph",
    "ParameterServer",
    "PeerUpdates",
    "Poseidon",
    "SoftSync",
    "StalenessAware",
    "Strategy",
    "as_strategy",
    "is_strategy_name",
    "parse",
]
