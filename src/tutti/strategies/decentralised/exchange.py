"""What all peers do, however they exchange: meet, leave, come back, stop, and count."""

from abc import abstractmethod
from math import isnan

from torch import Tensor

from tutti.events import EXCHANGE, PULL, Event
from tutti.replica import Replica
from tutti.strategies.base import Exchange
from tutti.strategies.decentralised.averaging_rounds import Meetings, Outcome, Purpose
from tutti.strategies.decentralised.flat_model import Images
from tutti.strategies.decentralised.peer_group import Company
from tutti.strategies.decentralised.wire import Head, Kind
from tutti.transports import SharesMemory, Transport
from tutti.transports.base import Operation

_BUCKET_BYTES = 4 * 2**20


class PeerExchange(Exchange):
    """A rank among equals: nobody serves, and whoever is lost is done without.

    Nothing is kept of it but the model: what is saved is saved within `consensus`, and what a codec has not said yet is
    dropped then.
    """

    tolerates_loss = True

    def __init__(self, replica: Replica, transport: Transport, name: str, exact_below: int = 0) -> None:
        super().__init__(replica, transport)
        plain = transport.inner if isinstance(transport, SharesMemory) else transport  # All of it travels in messages.
        self._wire = plain.channel(name)
        self._me = transport.rank
        replica.allocate(plain, _BUCKET_BYTES, exact_below)
        replica.arrange([slot.name for slot in replica.slots])
        self.images = Images(replica)
        self.base = self.images.read(self.images.room())
        """What the model had after the last exchange."""
        like = replica.buckets[0].flat
        self.company = Company(self._wire, self, like, self._most_bytes())
        self.meetings = Meetings(self.company, self.images.average, replica.sizes_only)
        self._own: Tensor | None = None
        self._away = False
        self._sent_before = 0

    def _begin(self) -> None:
        """Hear peers and answer to training from now on: the last thing that is done to make an exchange."""
        self.company.start()
        self.replica.listen(self, to="samples")

    def _most_bytes(self) -> int:
        """Of any message."""
        return 4 * self.images.num_meeting_bytes + 64 * self.transport.size + 2**16

    # What differs

    @abstractmethod
    def hear(self, peer: int, head: Head, payload: Tensor | None) -> None:
        """Act on what a peer says."""

    @abstractmethod
    def _step(self) -> None:
        """Exchange what the optimiser's step has changed."""

    @property
    @abstractmethod
    def _clock(self) -> int:
        """How many steps this rank has exchanged."""

    def _before_meeting(self) -> Operation:
        """Do what is to be done before others are told that this rank has come."""
        yield from ()

    def _ready(self) -> bool:
        """Whether all is here that was under way when everybody came to a meeting."""
        return True

    def _current(self) -> Tensor:
        """What this rank has, when everybody has come."""
        return self.base

    def _met(self, outcome: Outcome) -> None:
        """Go on from a meeting."""

    def lost(self, peer: int) -> None:
        """Go on without a peer."""
        self.meetings.lost(peer)

    # The events of training

    def before_step(self) -> None:
        weight = self.replica.take_samples()
        if isnan(weight):
            self._wait(self._stop())
        if weight == 0:  # A batch that does not count.
            self.replica.hide_gradients()
        self.company.check(self.replica.steps)

    def after_step(self) -> None:
        self.replica.show_gradients()
        start_s = self.transport.now()
        self._step()
        sent = self.bytes_sent
        self.events.record(Event(EXCHANGE, start_s, self.transport.now(), sent - self._sent_before))
        self._sent_before = sent

    def _stop(self) -> Operation:
        self.company.stop(self._me)
        yield from ()

    # Meetings

    def meet(self, purpose: Purpose) -> Outcome:
        """Wait until everybody is here; what comes of it."""
        start_s = self.transport.now()
        self._wait(self._meeting(purpose))
        self.events.record(Event(PULL, start_s, self.transport.now()))
        return self.meetings.outcome

    def _wait(self, steps: Operation) -> None:
        self.company.wait(steps, self.replica.steps)

    def _meeting(self, purpose: Purpose) -> Operation:
        yield from self._before_meeting()
        number = self.meetings.number
        bring = lambda: self.images.for_meeting(self._current())  # noqa: E731
        yield from self.meetings.attend(purpose, self._clock, self._ready, bring)
        if self.meetings.number > number and not self.company.over:
            self._met(self.meetings.outcome)

    def consensus(self) -> None:
        while (outcome := self.meet(Purpose.AGREE)).purpose != Purpose.AGREE:
            pass
        assert outcome.value is not None
        self._own = self.images.for_meeting(self.base)
        self.images.take_meeting(outcome.value)

    def restore_local(self) -> None:
        if self._own is not None:
            self.images.take_meeting(self._own)
            self._own = None

    def finish(self) -> None:
        while not self.meetings.parted:  # As often as others meet who go on meanwhile: all end with the same.
            self.consensus()
            self._own = None
            self._wait(self._parting())
        self.close()

    def _parting(self) -> Operation:
        yield from self._before_meeting()
        yield from self.meetings.part(self._clock)

    def close(self) -> None:
        self._wire.close()  # Nothing is heard any more when the model is let go.

    def leave(self) -> None:
        self._away = True
        self._wait(self._say(Kind.AWAY))

    def join(self) -> None:
        self._away = False

    def _say(self, kind: Kind) -> Operation:
        self.company.tell_all(Head(kind))
        yield from ()

    @property
    def bytes_sent(self) -> int:
        return self._wire.bytes_sent

    @property
    def is_leader(self) -> bool:
        return self._me == self.company.leader
