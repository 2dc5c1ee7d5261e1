"""Simulated ranks: threads of one process, of which one runs at a time, over a modelled network in virtual time."""

from tutti.transports.simulated.engine import Engine
from tutti.transports.simulated.network import Network
from tutti.transports.simulated.rank import Rank
from tutti.transports.simulated.transport import SimulatedTransport, Stage

__all__ = ["Engine", "Network", "Rank", "SimulatedTransport", "Stage"]
