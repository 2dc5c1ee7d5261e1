"""`Notices`: one number from every rank to every other, which nobody waits for while training."""

import torch

from tutti.job.checks.comparison import RESERVED_TAG, completes
from tutti.transports import Transport, Work


class Notices:
    """Sends this rank's number, and receives those of the others as they come.

    Every rank sends exactly one: in training, or at the latest in `complete`, in which all ranks that are left wait
    for each other. So no message is left over. A rank that is lost is not waited for.
    """

    def __init__(self, transport: Transport, number: int) -> None:
        """Receive from now on; `number` is that of the job, so that another job's messages are not mistaken."""
        self._transport, self._tag = transport, RESERVED_TAG + number % RESERVED_TAG
        self._numbers = torch.zeros(transport.size, 1, dtype=torch.int64, device="cpu")
        self._peers = [rank for rank in range(transport.size) if rank != transport.rank]
        self._receives: list[Work] = []
        self._sends: list[Work] = []

    def send(self, number: int) -> None:
        """Send this rank's number to all others. Does not wait."""
        self._numbers[self._transport.rank] = number
        rows = self._numbers.unbind()
        self._sends = [self._transport.isend(rows[self._transport.rank], peer, self._tag) for peer in self._peers]
        self._receives = [self._transport.irecv(rows[peer], peer, self._tag) for peer in self._peers]

    def received(self) -> dict[int, int] | None:
        """Return the numbers of all ranks; None while some have not come."""
        if not self._sends or not all(work.done() for work in [*self._receives, *self._sends]):
            return None
        return dict(enumerate(self._numbers.flatten().tolist()))

    def complete(self, number: int) -> dict[int, int]:
        """Send `number` if nothing was sent before; wait, and return the numbers of all ranks that sent one.

        Collective among the ranks that are left. A rank that was lost after it had sent its number counts.
        """
        if not self._sends:
            self.send(number)
        for work in self._sends:
            completes(work)
        came = [peer for peer, work in zip(self._peers, self._receives, strict=True) if completes(work)]
        return {rank: int(self._numbers[rank]) for rank in sorted([*came, self._transport.rank])}
