"""`World`: this rank, the number of ranks, and the transport between them; and the world of the current thread.

The ranks of an elastic world change between steps: it then goes on as another generation, with other numbers and
another transport (`tutti.job.elastic`). Its object stays the same, so read its fields anew when they are needed.
"""

import builtins
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakSet

from tutti.collectives.calls import CollectiveCalls, Combine
from tutti.coordination.elastic_member import ElasticMember, Generation
from tutti.errors import ConfigError
from tutti.replica import SampleCounts
from tutti.strategies import Exchange, Strategy
from tutti.transports import Transport


@dataclass
class WorldUsage:
    """How a process has used its world so far."""

    num_jobs: int = 0
    """Models that were distributed."""
    num_data: int = 0
    """What `shard` has returned."""
    exchanges: WeakSet[Exchange] = field(default_factory=WeakSet)
    """Those of the jobs that are not finished. Weak: a job may be dropped without `finish`."""


@dataclass(frozen=True)
class CheckpointSettings:
    """What the launcher says about checkpoints."""

    every: str | None = None
    """How often to write (`tutti run --checkpoint-every`), which overrules the script's."""
    grace_s: float = 30.0
    """Seconds that this process may go on after it was asked to stop."""
    announce: Callable[[float], None] = field(default=lambda grace_s: None, repr=False)
    """Informs the launcher that this process saves its state before it stops, and how long that may take."""


class Regrouping(Protocol):
    """What a job does so that training goes on with other ranks (`tutti.job.elastic`)."""

    changes: Any
    """What this has cost so far (`tutti.job.metrics.Changes`)."""
    membership: Any
    """The functions that are called after changes (`tutti.job.membership.MembershipListeners`)."""

    def arrive(self) -> None:
        """This rank is about to train: join the others, if it has come to them and waits for that."""
        ...

    def boundary(self, *, at_end: bool = False, is_over: bool = False) -> None:
        """This rank is between two batches, or behind the last of a loop: change the ranks, if it is time."""
        ...

    def arrived(self) -> None:
        """This rank is behind the last batch, as the others are: it may have joined too late for one."""
        ...

    def call(self, name: str, value: Any, combine: Combine, *, elastic: bool) -> Any:
        """Make a collective call among the ranks that are there, also if some are lost meanwhile."""
        ...

    def collective(self, work: Callable[[], Any], *, same_answer: bool) -> Any:
        """Do what all ranks do together, again if some are lost meanwhile, if others had not done it."""
        ...

    def regroup(self, *, in_call: bool = False) -> bool:
        """Go on with the ranks that are there now, with the strategy attached anew; all ranks do. Between two steps."""
        ...


class Connections(Protocol):
    """The transports of an elastic world, one for each generation."""

    def connect(self, generation: Generation) -> Transport:
        """Open the transport between the members of a generation. Collective among them."""
        ...

    def disconnect(self) -> None:
        """Tell the members of the last generation that this process has ended its part in it."""
        ...

    def leave(self) -> None:
        """Tell the launcher that this process ends before the training does, because it was asked to."""
        ...


@dataclass(eq=False)
class Elasticity:
    """How the ranks of a world change."""

    member: ElasticMember
    connections: Connections
    requested: Callable[[], int]
    """Returns the number of the signal that asked this process to stop; 0 if none did."""
    is_new: bool
    """Whether this process comes to a world that has begun without it, and has distributed no model yet."""
    has_joined: bool = False
    """Whether this process has distributed its model in a world that had begun without it."""
    regrouping: Regrouping | None = None
    """The job's part, once a model is distributed."""
    data_states: list[dict[str, Any]] = field(default_factory=list)
    """For a process that has joined: the positions in the data, until `shard` has taken them over."""
    data: WeakSet[Any] = field(default_factory=WeakSet)
    """What `shard` has returned and the model is trained on."""
    evaluated: WeakSet[Any] = field(default_factory=WeakSet)
    """What `shard` has returned and was iterated over, and the model is not trained on."""
    evaluated_epochs: dict[int, int] = field(default_factory=dict)
    """For a process that has joined: the next epochs of such data, by the data's number, until it begins one."""


@dataclass(eq=False)
class World:
    """This rank's number in the run, and its transport to the others."""

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""
    local_rank: int
    """Number of this rank among those of its host, from 0."""
    host: str
    """Name of its host."""
    transport: Transport
    """Connects it to the other ranks."""
    sample_counts: SampleCounts = field(default_factory=SampleCounts, repr=False)
    """The samples that `shard` has given out, from which gradients get their weights."""
    usage: WorldUsage = field(default_factory=WorldUsage, repr=False)
    """How this process has used the world."""
    strategy: Strategy | None = None
    """The strategy that the launcher was given (`tutti run --strategy`), which overrules the script's."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """When checkpoints are written, and how long that may take in the end."""
    leave: Callable[[], None] = field(default=lambda: None, repr=False)
    """Announces to the other ranks that this one leaves."""
    tolerate_loss: Callable[[bool], None] = field(default=lambda yes: None, repr=False)
    """Informs the launcher whether the others continue training if this rank is lost."""

    confirm: Callable[[], None] = field(default=lambda: None, repr=False)
    """Raises `RankLost` if this rank is cut off, so that the others go on without it."""

    status: Callable[[], list[dict[str, Any]] | None] = field(default=list, repr=False)
    """Returns what the run's coordinator knows of every rank; nothing where there is none."""

    elastic: Elasticity | None = field(default=None, repr=False)
    """How its ranks change; None if they stay the same (`tutti run --workers 2:8`)."""

    at_close: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Called when it is closed, while all ranks can still be reached; once, the last one first."""

    @cached_property
    def calls(self) -> CollectiveCalls:
        """Calls of all its ranks with small values. Collective when first used: `distribute` does."""
        return CollectiveCalls(self.transport)

    def renew(self, rank: int, size: int, transport: Transport) -> None:
        """Go on as another generation."""
        self.rank, self.size, self.transport = rank, size, transport
        self.__dict__.pop("calls", None)

    def call(self, name: str, value: Any, combine: Combine, *, elastic: bool) -> Any:
        """Make a collective call, as `CollectiveCalls.call`, which also survives a change of the ranks. Collective."""
        if self.elastic is not None and self.elastic.regrouping is not None:
            return self.elastic.regrouping.call(name, value, combine, elastic=elastic)
        return self.calls.call(name, value, combine, elastic=elastic)

    def collective(self, work: Callable[[], Any], *, same_answer: bool = False) -> Any:
        """Do what all ranks do together. Collective.

        In an elastic world it is done again if ranks are lost meanwhile, unless other ranks had done it before the
        loss; this rank has taken over their state then.

        Args:
            work: makes collective calls of this world's transport, or of `calls`.
            same_answer: whether it returns the same on all ranks, as values that can be sent. Then a rank that finds it
                done by others returns their answer; otherwise None.
        """
        if self.elastic is not None and self.elastic.regrouping is not None:
            return self.elastic.regrouping.collective(work, same_answer=same_answer)
        return work()

    def boundary(self, *, at_end: bool = False, is_over: bool = False) -> None:
        """Change the ranks of an elastic world, if it is time. Called between two batches, and behind the last one.

        Args:
            at_end: whether the last batch of a loop was given out.
            is_over: whether that was the last batch of all.
        """
        if self.elastic is not None and self.elastic.regrouping is not None:
            self.elastic.regrouping.boundary(at_end=at_end, is_over=is_over)

    def arrive(self) -> None:
        """Join the other ranks of an elastic world that had begun without this one. Called before it trains."""
        if self.elastic is not None and self.elastic.regrouping is not None:
            self.elastic.regrouping.arrive()

    @contextmanager
    def waiting(self, own: Exchange | None = None) -> Iterator[None]:
        """Around a call in which this rank waits for the others, while they may still wait for its part in a step.

        Under peers' updates, for example, a rank that is ahead waits until this one has applied its updates. If this
        rank waits for that one in `shard`, neither would ever go on.

        Args:
            own: the exchange that the call is of, which knows by itself that it waits.
        """
        with ExitStack() as waits:
            for exchange in list(self.usage.exchanges):
                # Most strategies do nothing while they wait.
                if exchange is not own and type(exchange).waiting is not Exchange.waiting:
                    waits.enter_context(exchange.waiting())
            yield

    def close(self) -> None:
        """Leave the world: peers that still wait for this rank get an error. `tutti.init` may follow. Idempotent."""
        while self.at_close:
            self.at_close.pop()()
        self.leave()  # Before the transport closes: peers then see that it left, and not that it was lost.
        self.transport.close()
        if _current.get() is self:
            _current.set(None)


# Per thread: simulated ranks, and ranks of tests, are threads of one process.
_current: ContextVar[World | None] = ContextVar("tutti_world", default=None)


def world() -> World:
    """Return the world that `tutti.init` made in this thread. Raises `ConfigError` if there is none."""
    if (current := _current.get()) is None:
        raise ConfigError("there is no world yet: call tutti.init() first.")
    return current


def set_world(new: World) -> World:
    """Make `new` the world of this thread, and return it."""
    _current.set(new)
    return new


def current_world() -> World | None:
    """Return the world of this thread; None if there is none."""
    return _current.get()


def print(*values: object, **options: Any) -> None:
    """Print as Python's `print` does, on the first rank of all only; without a world, always.

    Where rank 0 may be lost and the others continue, `if job.is_leader: print(...)` prints on the first that is left.
    """
    # Its number among all ranks: on a mesh every row of the world along `data` has a rank 0 of its own.
    if (current := _current.get()) is None or current.transport.world_rank == 0:
        builtins.print(*values, **options)
