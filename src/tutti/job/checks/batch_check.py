"""`BatchCheck`: ranks train on different batches. It compares the first two of each rank.

Where all ranks pass through the same steps, the digest of the batches is one of the numbers that they compare then.
Where they do not, it is sent after the second batch, and looked at when those of all ranks have come.
"""

from typing import Any

from tutti.errors import ConfigError, RankLost
from tutti.job.checks.batches import NUM_BATCHES, BatchRecord, refuse_same_batches
from tutti.job.checks.digest_messages import DigestMessages
from tutti.replica import SampleCounts

_SOON_SECONDS = 1.0
"""How long a rank that has lost a peer waits for the digests of others."""


class BatchCheck:
    """The first batches of this rank, compared with those of the others. A `Compared` number."""

    def __init__(self, sample_counts: SampleCounts, rank: int, messages: DigestMessages | None) -> None:
        """Send the digest by `messages`, or not at all if ranks compare it themselves."""
        self._rank, self._messages = rank, messages
        self._record: BatchRecord | None = BatchRecord(sample_counts)

    def allow_same(self) -> None:
        """Compare no batches: the user says that they may be the same."""
        self._record = self._messages = None

    def forward(self, inputs: Any, num_passes: int) -> None:
        """The model is given `inputs`, after so many backward passes."""
        if self._record is not None and num_passes < NUM_BATCHES:
            self._record.forward(inputs)

    def pass_started(self, num_passes: int) -> None:
        """A backward pass has begun, with which there are so many. All but the first few are ignored."""
        if self._record is None or num_passes > NUM_BATCHES:
            return
        self._record.add()
        if self._messages is not None and num_passes == NUM_BATCHES:
            self._messages.send(self._record.digest)

    def numbers(self) -> list[int]:
        """Return the digest of the batches; 0 where it says nothing."""
        return [0 if self._record is None else self._record.digest]

    def refuse(self, by_rank: dict[int, list[int]]) -> None:
        """Raise `ConfigError` if two ranks had the same batches."""
        refuse_same_batches({rank: digest for rank, (digest,) in by_rank.items()}, self._rank)

    def look(self) -> None:
        """Compare the digests that were sent, once those of all ranks have come."""
        self._compare(None if self._messages is None else self._messages.received())

    def complete(self) -> None:
        """Wait for the digests that are sent, and compare them. Collective among the ranks that are left."""
        self._compare(None if self._messages is None else self._messages.complete(*self.numbers()))

    def _compare(self, digests: dict[int, int] | None) -> None:
        if digests is not None:
            self._messages = None
            refuse_same_batches(digests, self._rank)

    def cause_of(self, error: RankLost) -> Exception:
        """Return the mistake that a peer found first, and for which it has ended; else the error itself."""
        # A peer that has ended for the same batches has sent its digest before. Others may still compute, and are not
        # waited for: the error must come soon.
        if self._messages is not None and self._messages.sent:
            try:
                refuse_same_batches(self._messages.arrived(_SOON_SECONDS), self._rank)
            except ConfigError as mistake:
                return mistake
        return error
