"""Replicas that stay together without a server: peers' updates, and gossip."""

from tutti.strategies.decentralised.graphs import Graph
from tutti.strategies.decentralised.strategies import Gossip, PeerUpdates, read_gossip, read_peers

__all__ = ["Gossip", "Graph", "PeerUpdates", "read_gossip", "read_peers"]
