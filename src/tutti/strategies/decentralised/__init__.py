"""Decentralised training: no server, and the other ranks go on when one is lost.

`PeerUpdates` sends every rank's changes to all others (Strom 2015). `Gossip` averages parameters with neighbours in a
graph, synchronously (Lian et al. 2017) or pairwise and asynchronously (Lian et al. 2018).

How it works
------------
`PeerExchange` answers the events of training, for any `PeerAlgorithm` (`SyncGossip`, `AsyncGossip`,
`PeerUpdatesAlgorithm`). All state that messages change lives in the transport's thread. The training thread hands in
generators and waits for them. `PeerGroup` sends, receives, and removes lost ranks. `AveragingRounds` brings all living
ranks to the same values when they must agree: to evaluate, to save, to finish, and after a loss. `FlatModel` is the
model as one block of bytes.
"""

from tutti.strategies.decentralised.graphs import Graph
from tutti.strategies.decentralised.strategies import Gossip, PeerUpdates, read_gossip, read_peers

__all__ = ["Gossip", "Graph", "PeerUpdates", "read_gossip", "read_peers"]
