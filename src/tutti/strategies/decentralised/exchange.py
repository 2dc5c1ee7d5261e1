"""Exchange of a rank among peers: training events, consensus, leave and finish, around any decentralised algorithm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan
from typing import Any

from torch import Tensor

from tutti.events import EXCHANGE, PULL, Event
from tutti.replica import Replica
from tutti.strategies.base import Exchange
from tutti.strategies.compatibility import ADDED_CHANGES
from tutti.strategies.decentralised.algorithm import PeerAlgorithm, PeerContext
from tutti.strategies.decentralised.averaging_rounds import AveragingRounds, RoundPurpose, RoundResult
from tutti.strategies.decentralised.flat_model import FlatModel
from tutti.strategies.decentralised.peer_group import PeerGroup
from tutti.strategies.decentralised.saved_state import SavedReplica
from tutti.strategies.user_changes import UserChanges
from tutti.transports import SharesMemory, Transport
from tutti.transports.base import Operation

_BUCKET_BYTES = 4 * 2**20
"""Size of the buckets that `FlatModel` lays out one after another; codecs encode a bucket at a time."""


class PeerExchange(SavedReplica, Exchange):
    """A rank among equals: no rank serves, and the others go on without a rank that is lost."""

    tolerates_loss = True

    def __init__(
        self,
        replica: Replica,
        transport: Transport,
        name: str,
        make_algorithm: Callable[[PeerContext], PeerAlgorithm],
        exact_below: int = 0,
    ) -> None:
        """Start exchanging.

        Args:
            replica: the model.
            transport: connects all ranks.
            name: name of the channel.
            make_algorithm: makes the algorithm from the state that it shares with this exchange.
            exact_below: parameters of fewer elements are not compressed.
        """
        super().__init__(replica, transport)
        # Messages only: where the transport shares memory, the plain transport beneath it is used.
        plain = transport.inner if isinstance(transport, SharesMemory) else transport
        self._channel = plain.channel(name)
        replica.allocate(plain, _BUCKET_BYTES, exact_below)
        replica.arrange([slot.name for slot in replica.slots])
        model = FlatModel(replica)
        base = model.read_model(model.empty())
        # Above the largest message: a round's result (members and a full block), or packets that a codec makes larger.
        max_bytes = 4 * model.num_full_bytes + 64 * transport.size + 2**16
        group = PeerGroup(self._channel, replica.buckets[0].flat, max_bytes)
        rounds = AveragingRounds(group, model.average, replica.sizes_only)
        self.context = PeerContext(replica, model, base, group, rounds, self.run_round)
        self.algorithm = make_algorithm(self.context)
        self._local_values: Tensor | None = None
        """This rank's own values, while the model holds those of a consensus."""
        self._is_closed = False
        self._user_changes: UserChanges | None = None
        """Refuses changes by hand between steps; None where they are taken along, and in a dry run."""
        self._holds_own = not replica.sizes_only
        """Whether the model may hold what the user has changed since Tutti wrote this rank's parameters."""
        self._bytes_sent_before = 0
        """Bytes sent until the end of the last step."""
        # Receiving begins before this rank sends: peers may be ahead, and their messages need a listener.
        group.start(self.algorithm)
        replica.listen(self, to="samples")
        if self.algorithm.adds_changes and not replica.sizes_only:
            self._user_changes = UserChanges(replica, transport.world_rank, ADDED_CHANGES.text)
        self.algorithm.start()

    def metrics(self) -> dict[str, Any]:
        return self.algorithm.metrics()

    @property
    def bytes_sent(self) -> int:
        return self._channel.bytes_sent

    @property
    def is_leader(self) -> bool:
        return self.context.rank == self.context.group.leader

    @property
    def num_lost(self) -> int:
        return self.context.group.num_lost

    # Training

    def before_step(self) -> None:
        weight = self.replica.take_samples()
        if isnan(weight):
            # Raises `NonFiniteLoss` once STOP is sent.
            self.context.wait(_stop(self.context))
        if weight == 0:  # A batch that does not count: the optimiser finds no gradients.
            self.replica.hide_gradients()
        # A stop or a failure that arrived while this rank computed ends training before the step.
        self.context.group.check(self.replica.steps)

    def after_step(self) -> None:
        self.replica.show_gradients()
        start_s = self.transport.now()
        self.algorithm.exchange_step()
        self._parameters_written()
        bytes_sent = self.bytes_sent
        self.events.record(Event(EXCHANGE, start_s, self.transport.now(), bytes_sent - self._bytes_sent_before))
        self._bytes_sent_before = bytes_sent

    def _expect_new_parameters(self) -> None:
        """Note that parameters are about to be written outside of a step, over what the user may have changed."""
        if not self._holds_own:
            return
        self._holds_own = False
        if self._user_changes is not None:
            self._user_changes.check()
            return
        change = self.context.model.change_since(self.context.base)
        if self.context.model.changes_parameters(change):
            self.algorithm.add_change(change)

    def _parameters_written(self) -> None:
        """Parameters were written by Tutti, which is no change by the user."""
        self._holds_own = not self.replica.sizes_only
        if self._user_changes is not None:
            self._user_changes.record()

    # Averaging rounds

    def run_round(self, purpose: RoundPurpose) -> RoundResult:
        """Take part in an averaging round, wait for its result, and return it."""
        start_s = self.transport.now()
        self.context.wait(self._take_part(purpose))
        self.events.record(Event(PULL, start_s, self.transport.now()))
        return self.context.rounds.result

    def _take_part(self, purpose: RoundPurpose) -> Operation:
        """Prepare for a round, take part in it, and let the algorithm continue from its result."""
        algorithm, context = self.algorithm, self.context
        yield from algorithm.before_round()
        last_round = context.rounds.last_round

        def contribution() -> Tensor:
            return context.model.to_full(algorithm.values())

        yield from context.rounds.take_part(purpose, algorithm.clock, algorithm.is_ready, contribution)
        # Unless training is over, in which case the round has no result.
        if context.rounds.last_round > last_round and not context.group.is_over:
            algorithm.round_finished(context.rounds.result)

    def _agree(self) -> Tensor:
        """Take part in rounds until one has a mean, and return that, a full block. Nothing is under way then."""
        self._expect_new_parameters()
        # A round only regroups if any rank needs that: then there is no mean yet, and the next round makes it.
        while (result := self.run_round(RoundPurpose.AVERAGE)).purpose != RoundPurpose.AVERAGE:
            pass
        assert result.value is not None
        return result.value

    def consensus(self, optimizer: bool = False) -> None:
        agreed = self._agree()
        self._local_values = self.context.model.to_full(self.context.base)
        self.context.model.write_model_full(agreed)

    def restore_local(self) -> None:
        if self._local_values is not None:
            self.context.model.write_model_full(self._local_values)
            self._local_values = None
            self._parameters_written()

    def finish(self) -> None:
        # Others may still train and ask for rounds: take part in all of them, so that all ranks end with the same.
        while not self.context.rounds.is_finished:
            self.consensus()
            # The model keeps the mean: it is the result of training.
            self._local_values = None
            self.context.wait(self._finish())
        self.close()

    def _finish(self) -> Operation:
        yield from self.algorithm.before_round()
        yield from self.context.rounds.finish(self.algorithm.clock)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        # There is no training left to go on, or the model holds the values of a consensus, which must stay.
        if self.context.group.is_over or self._is_closed or self._local_values is not None:
            yield
            return
        self._expect_new_parameters()
        self.algorithm.set_waiting(True)
        try:
            yield
        finally:  # Also if the call failed: training may go on after a mistake in a metric, and must compute alone.
            if not (self.context.group.is_over or self._is_closed):
                self.algorithm.set_waiting(False)
                self._parameters_written()

    def leave(self) -> None:
        self.context.is_away = True
        self.algorithm.leave()

    def join(self) -> None:
        self.context.is_away = False
        self.algorithm.join()
        self._parameters_written()

    def close(self) -> None:
        self._is_closed = True
        if self._user_changes is not None:
            self._user_changes.close()
        self._channel.close()  # No message may arrive after the model is detached.


def _stop(context: PeerContext) -> Operation:
    context.group.stop(context.rank)
    yield from ()
