"""State of one server that its parts share."""

from collections.abc import Callable
from dataclasses import dataclass

from tutti.events import EventLog
from tutti.strategies.parameter_server.messages.config import ServerGroupConfig
from tutti.strategies.parameter_server.messages.server.membership import WorkerMembership
from tutti.transports import Transport
from tutti.transports.base import Operation


@dataclass(frozen=True, eq=False)
class ServerContext:
    """The group, the workers and the records of one server, for its parts."""

    config: ServerGroupConfig
    transport: Transport
    """The group's channel."""
    membership: WorkerMembership
    other_servers: list[int]
    """The other ranks that hold shards."""
    events: EventLog
    spawn: Callable[[Operation], None]
    """Runs a generator in the server's thread, concurrently with the others. If it fails, the server does."""
