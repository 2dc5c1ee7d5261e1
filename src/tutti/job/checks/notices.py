"""`Notices`: a number that every rank sends to every other, which nobody waits for while training."""

import torch

from tutti.job.checks.comparison import RESERVED_TAG, Messages
from tutti.transports import Transport


class Notices:
    """Sends this rank's number, and receives those of the others as they come.

    Every rank sends exactly one: in training, or at the latest in `complete`, in which all ranks that are left wait
    for each other. So no message is left over. A rank that is lost is not waited for.
    """

    def __init__(self, transport: Transport, number: int) -> None:
        """Nothing is sent yet; `number` is that of the job, so that another job's messages are not mistaken."""
        self._transport, self._tag = transport, RESERVED_TAG + number % RESERVED_TAG
        self._messages: Messages | None = None

    def send(self, number: int) -> None:
        """Send this rank's number to all others. Does not wait."""
        local = torch.tensor([number], dtype=torch.int64, device="cpu")
        self._messages = Messages(local, self._transport, self._tag)

    def received(self) -> dict[int, int] | None:
        """Return the numbers of all ranks; None while some have not come."""
        if self._messages is None or not self._messages.done():
            return None
        return self.complete(0)

    def complete(self, number: int) -> dict[int, int]:
        """Send `number` if nothing was sent before; wait, and return the numbers of all ranks that sent one.

        Collective among the ranks that are left. A rank that was lost after it had sent its number counts.
        """
        if self._messages is None:
            self.send(number)
        assert self._messages is not None
        return {rank: int(row) for rank, row in self._messages.wait().items()}
