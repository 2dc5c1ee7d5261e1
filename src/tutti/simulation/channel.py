"""`SimulatedChannel`: all messages of a group of simulated ranks under one name, and the ranks that have closed it."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tutti.errors import RankLost
from tutti.simulation.mailboxes import AnySourceMailbox, Mailbox
from tutti.simulation.network import Network
from tutti.transports.membership import rank_lost_error

if TYPE_CHECKING:
    from tutti.simulation.rank import Rank


class SimulatedChannel:
    """The mailboxes of one group of ranks under one name: messages of other channels never mix with these.

    Ranks are numbered by their position in the group here; `Rank.number` is their number in the world.
    """

    def __init__(self, name: str, ranks: Sequence["Rank"], network: Network, on_closed: Callable[[], None]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.network = network
        self._on_closed = on_closed
        """Called when all ranks have closed this channel."""
        self.mailboxes: dict[tuple[int, int, int], Mailbox] = {}
        """Mailboxes by sender, receiver and tag."""
        self._mailboxes_of: dict[int, list[Mailbox]] = {}
        """The mailboxes in which a rank sends or receives, by rank."""
        self.any_source_mailboxes: dict[tuple[int, int], AnySourceMailbox] = {}
        """Mailboxes of receives from ANY rank, by receiver and tag."""
        self.closed: dict[int, str] = {}
        """The ranks that have closed this channel, with their reasons."""
        self.host_sums: dict[int, Any] = {}
        """Sums in shared memory that not all ranks have joined yet, by number (see `shared_memory`)."""

    def mailbox(self, src: int, dst: int, tag: int) -> Mailbox:
        """Return the mailbox from `src` to `dst` under a tag; made when it is first asked for."""
        mailbox = self.mailboxes.get((src, dst, tag))
        if mailbox is None:
            mailbox = self.mailboxes[src, dst, tag] = Mailbox(self, src, dst, tag)
            for rank in (src, dst):
                self._mailboxes_of.setdefault(rank, []).append(mailbox)
        return mailbox

    def any_source_mailbox(self, dst: int, tag: int) -> AnySourceMailbox:
        """Return the mailbox in which `dst` receives from ANY rank under a tag; made when it is first asked for."""
        if (dst, tag) not in self.any_source_mailboxes:
            self.any_source_mailboxes[dst, tag] = AnySourceMailbox(self, dst, tag)
        return self.any_source_mailboxes[dst, tag]

    def close(self, rank: "Rank", why: str) -> None:
        """Close this channel for a rank, and fail the waits that only that rank could end. Idempotent.

        Messages that the rank has sent before still arrive.
        """
        index = self.ranks.index(rank)
        if index in self.closed:
            return
        # Recorded first: the errors and the checks below read it.
        self.closed[index] = why
        for mailbox in self._mailboxes_of.get(index, ()):
            # Receives from this rank could never end; receives by this rank are abandoned.
            receives, mailbox.receives = mailbox.receives, deque()
            for receive in receives:
                receive.fail(self.loss_error(receive.rank, index))
        # A receive from ANY fails only if no rank is left that could end it.
        for any_source in self.any_source_mailboxes.values():
            any_source.fail_hopeless()
        for host_sum in list(self.host_sums.values()):  # Sums that not all ranks have joined.
            host_sum.fail(index)
        if len(self.closed) == len(self.ranks):
            self._on_closed()

    def loss_error(self, waiting: "Rank", lost: int) -> RankLost:
        """Return the error for a rank that waits for `lost`, which is gone.

        It names the ranks that went first: those that left only because they lost a peer are a consequence.
        """
        if self.ranks[lost] is waiting:
            return RankLost(f"rank {waiting.number}: this channel was closed while it waited for a peer.")
        # Any rank of the group may be the first cause, not only the one that is waited for.
        causes = {rank.number: rank.gone for rank in self.ranks if rank.gone is not None and not rank.lost_a_peer}
        return rank_lost_error(waiting.number, causes or {self.ranks[lost].number: self.closed[lost]})
