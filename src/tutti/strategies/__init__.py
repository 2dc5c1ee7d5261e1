"""Strategies: how replicas are synchronised. One folder or file per family; the contract is in `base`.

Each strategy says itself whether it is exact and synchronous, what it costs, which settings the planner should compare,
and what it reports. To add one, write its file and add its line to `STRATEGIES` in `parse`, or offer it from another
package by an entry point of the group `tutti.strategies`.
"""

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
