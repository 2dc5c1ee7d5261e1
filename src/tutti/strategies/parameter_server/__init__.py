"""Parameter servers, from lockstep to none at all."""

from tutti.strategies.parameter_server.consistency import BSP, SSP, Async, Consistency, SoftSync, StalenessAware
from tutti.strategies.parameter_server.strategy import ParameterServer, read

__all__ = ["BSP", "SSP", "Async", "Consistency", "ParameterServer", "SoftSync", "StalenessAware", "read"]
