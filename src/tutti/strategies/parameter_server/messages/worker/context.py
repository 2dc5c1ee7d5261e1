"""State of one message worker that its parts share."""

from collections import Counter
from dataclasses import dataclass

from tutti.events import EventLog
from tutti.replica import Replica
from tutti.strategies.parameter_server.messages.config import ServerGroupConfig
from tutti.transports import Transport


@dataclass(frozen=True)
class WorkerContext:
    """The model, the group and the records of one worker, for its parts."""

    replica: Replica
    config: ServerGroupConfig
    transport: Transport
    """The group's channel."""
    events: EventLog
    staleness: Counter[int]
    """Number of pushes by staleness; only the first shard is counted, so that each iteration counts once."""
