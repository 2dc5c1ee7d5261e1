"""The contract of strategies: `Strategy` describes how replicas are synchronised, `Exchange` does it on one replica.

A strategy is a frozen record that compares by value and prints as the text that makes it. `attach` puts it to work on
one replica and returns an exchange, which answers the events of training:

    backward_started -> bucket_ready ... -> backward_done -> before_step -> after_step

in every step; `consensus` and `restore_local` around evaluation and saving; `finish` and `close` at the end.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch.optim import Optimizer

from tutti.codecs import Codec
from tutti.cost import CommunicationCost, Placement, Profile
from tutti.errors import ConfigError, NotPriced
from tutti.events import EventLog
from tutti.replica import Bucket, FactoredLayer, Replica
from tutti.replica.state import share_buffers
from tutti.strategies.compatibility import ADDED_SUMS, COMMON, OWN_SUMS, WORKS, Support
from tutti.strategies.rates import SAME_RATE, LearningRateRule
from tutti.strategies.resumable import Resumable
from tutti.transports import Transport


class Exchange(Resumable):
    """A strategy at work on one replica: it answers the events of training.

    An exchange reads the time from its transport and waits only through its transport, so that the same code runs in
    virtual time. The base class does nothing in a step: a strategy overrides the events it needs.
    """

    equal_after_steps: bool = False
    """Whether all ranks hold the same parameters after every step, and take the same backward passes together."""
    agreed_on_first: bool = False
    """Whether rank 0 holds between steps what all ranks agree on, in memory of its own: the parameters, the buffers and
    the optimiser's state. It can then save them without a consensus, while the others train on."""
    adds_up: bool = False
    """Whether it adds gradients up over ranks where their weight is `ADD_UP`; otherwise it makes means only."""
    cost: Callable[[Profile, Placement], CommunicationCost] | None = None
    """Replaces `Strategy.cost` in a running job, for an exchange that decided something in its first steps and keeps to
    it; None if the strategy's own formula holds."""

    num_cut_short: int = 0
    """Number of steps of a part of the model that a lost rank had begun, and that count as taken."""
    leaves_without_data: bool = False
    """Whether others wait for updates of a rank that has taken its last step, unless it leaves."""

    def __init__(self, replica: Replica, transport: Transport) -> None:
        self.replica = replica
        self.transport = transport
        self.events = EventLog()
        self.on_exchange: Callable[[], Callable[[], None]] | None = None
        """Called when an exchange of local steps starts; what it returns is called when these steps of all ranks have
        come into what all agree on. Not called where every step does so (`equal_after_steps`)."""

    def backward_started(self, weight: float) -> None:
        """The first gradient of a backward pass is there; the pass counts for `weight` samples."""
        return None

    def bucket_ready(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are in its memory. Called in the order of the buckets' indices."""
        return None

    def factors_ready(self, layer: FactoredLayer) -> None:
        """All factors of the gradient of `layer` are there. Called in any order, for layers sent as factors."""
        return None

    def backward_done(self) -> None:
        """Backward is over; the buckets' contents when this returns become `p.grad`."""
        return None

    def before_step(self) -> None:
        """The optimiser is about to step."""
        return None

    def after_step(self) -> None:
        """The optimiser has stepped."""
        return None

    def consensus(self, optimizer: bool = False) -> None:
        """Set the model's parameters and buffers to the values all ranks agree on. Collective.

        With `optimizer`, also give the user's optimiser the state that belongs to them, where that is kept elsewhere.

        The default is right where parameters never differ between ranks: buffers become rank 0's.
        """
        share_buffers(self.replica.model, self.transport)

    def restore_local(self) -> None:
        """Put back this rank's own parameters and state, which `consensus` replaced; none by default."""
        return None

    def finish(self) -> None:
        """Complete pending communication and leave the same model on every rank. Collective."""
        self.consensus()

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensor data that this rank has sent, or that others have read from its memory."""
        return self.transport.bytes_sent

    def metrics(self) -> dict[str, Any]:
        """Return what only this strategy can report, by name, such as staleness. `job.metrics.strategy` holds it.

        Values are numbers, histograms (`dict[int, int]`) or frozen dataclasses of these, so that they can be
        pickled, written as JSON and printed by `tutti train`.
        """
        return {}

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of the ranks that are left."""
        return self.transport.rank == 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a call in which this rank waits for others between steps, while they may still wait for this rank."""
        yield

    @contextmanager
    def out_of_data(self) -> Iterator[None]:
        """Around the wait of a rank that has taken its last step, and may get more to do if another one is lost."""
        if not self.leaves_without_data:
            with self.waiting():
                yield
            return
        self.leave()
        try:
            yield
        finally:
            self.join()

    @property
    def tolerates_loss(self) -> bool:
        """Whether the other ranks continue when this one is lost."""
        return False

    @property
    def num_lost(self) -> int:
        """Number of ranks without which this one goes on."""
        return 0

    def leave(self) -> None:
        """Take no part until `join`, while the other ranks continue."""
        raise ConfigError(
            f"rank {self.transport.world_rank}: under this strategy every rank takes part in every step. Parameter "
            "servers, peers' updates and gossip let a worker go away for a while."
        )

    def join(self) -> None:
        """Take part again, after `leave`."""
        raise NotImplementedError

    def close(self) -> None:
        """Detach from the model. Not collective. Idempotent."""
        return None


class Strategy(ABC):
    """A description of how replicas are synchronised: frozen, equal by value, printed as the text that makes it."""

    preference: ClassVar[int] = 4
    """Which strategy the planner takes among about equally fast ones: the lowest. 0 is a sum of all gradients in every
    step, 2 is servers, 3 is models averaged now and then."""

    codec: Codec | None = None
    """The codec that compresses what ranks send; None if it is sent exactly. Strategies with codecs make it a field."""

    @abstractmethod
    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        """Start synchronising `replica` with those of the transport's other ranks. Collective."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether N workers compute what one worker would with all their samples, up to rounding of sums."""

    @property
    def averages_gradients(self) -> bool:
        """Whether `p.grad` after backward is the mean of all ranks' gradients of this step, exact or compressed."""
        return False

    def cost(self, profile: Profile, placement: Placement) -> CommunicationCost:
        """Return what this strategy adds to a worker's step, for the planner.

        Args:
            profile: the step of one worker that trains alone.
            placement: two ranks or more, dedicated servers included.

        A strategy without a formula can be used, but not compared: it raises `NotPriced`.
        """
        raise NotPriced(
            f"strategy '{self}' has no cost formula, so it cannot be compared with others: implement "
            f"{type(self).__module__}.{type(self).__qualname__}.cost."
        )

    def candidates(self, profile: Profile, placement: Placement) -> Iterator["Strategy"]:
        """Yield the settings of this family that the planner should compare; by default this one alone.

        The planner asks one strategy of each class, made with default options.
        """
        yield self

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        """Return how the learning rate of one worker with the whole batch must change for `num_workers` workers.

        `lr="auto"` applies it, and `tutti train` warns by it. The default suits strategies that take the steps of one
        worker, exactly or nearly.
        """
        return SAME_RATE

    @property
    def synchronous(self) -> bool:
        """Whether all ranks take the same steps together, so that other collective calls fit between steps."""
        return True

    @property
    def synchronous_start(self) -> "Strategy | None":
        """The strategy whose steps this one takes first after `job.start_synchronously`; None if it cannot do that."""
        return None

    def starts_in_place(self, transport: Transport) -> bool:
        """Whether the exchange of this strategy takes the steps of a synchronous start itself, on such a transport.

        It does while `replica.starts_synchronously`. Otherwise they are taken by that of `synchronous_start`.
        """
        return False

    @property
    def needs_all_ranks(self) -> bool:
        """Whether every step waits for all ranks, so that no rank can be absent (`job.away()`) without a pause."""
        return self.synchronous

    @property
    def steps_by_mean_gradient(self) -> bool:
        """Whether every step uses the mean of all ranks' gradients, wherever the optimiser runs."""
        return self.averages_gradients

    @property
    def steps_per_exchange(self) -> int | None:
        """Number of steps from one exchange to the next; None if it depends on time."""
        return 1

    @property
    def needs_whole_model(self) -> bool:
        """Whether each rank must hold the whole model, so that it cannot be split by tensor or pipeline parallelism."""
        return False

    @property
    def num_dedicated_servers(self) -> int:
        """Number of ranks, the last ones, that serve the others and do not train."""
        return 0

    @property
    def mistake_in_fixed_world(self) -> str:
        """Why it cannot be used where workers do not come and go; empty if it can."""
        return ""

    def check_size(self, size: int) -> None:
        """Raise `ConfigError` if this strategy cannot be used by `size` ranks, dedicated servers included."""
        return None

    def mistakes(self, optimizer: Optimizer, size: int) -> list[str]:
        """Return everything that is wrong with using this strategy with `optimizer` on `size` ranks."""
        try:
            self.check_size(size)
        except ConfigError as error:
            return [str(error)]
        return []

    def support(self, technique: str) -> Support:
        """Return how a technique of `tutti.strategies.compatibility.TECHNIQUES` works under this strategy."""
        if technique == "sum losses":
            return ADDED_SUMS if self.steps_by_mean_gradient else OWN_SUMS
        return COMMON.get(technique, WORKS)

    def serve(self, replica: Replica, transport: Transport) -> None:
        """Run a dedicated server until no worker is left. Collective with the workers' `attach`."""
        raise AssertionError(f"{type(self).__name__} has no servers")

    @abstractmethod
    def __str__(self) -> str: ...
