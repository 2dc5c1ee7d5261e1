"""Who we are: this rank among all of them."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from tutti.errors import ConfigError
from tutti.replica import SampleCounts
from tutti.strategies import Strategy
from tutti.transports import Transport


@dataclass(frozen=True, eq=False)
class World:
    """This rank's place in the run, and its transport to the others."""

    rank: int
    size: int
    local_rank: int
    host: str
    transport: Transport
    sample_counts: SampleCounts = field(default_factory=SampleCounts, repr=False)
    strategy: Strategy | None = None
    """What the launcher was told to use, whatever the script says."""
    leave: Callable[[], None] = field(default=lambda: None, repr=False)
    tolerate_loss: Callable[[bool], None] = field(default=lambda yes: None, repr=False)
    """Tells whoever started this rank whether the others would go on without it."""

    def close(self) -> None:
        """Leave: peers that still wait for this rank are told. `tutti.init` may follow. Idempotent."""
        self.leave()
        self.transport.close()
        if _current.get() is self:
            _current.set(None)


_current: ContextVar[World | None] = ContextVar("tutti_world", default=None)


def world() -> World:
    """The world that `tutti.init` made."""
    if (current := _current.get()) is None:
        raise ConfigError("there is no world yet: call tutti.init() first.")
    return current


def set_world(new: World) -> World:
    """Make `new` what `world()` returns, in this thread."""
    _current.set(new)
    return new


def current_world() -> World | None:
    return _current.get()
