"""What exchanging takes that is in no formula: Python, system calls, and cores that ranks share."""

from dataclasses import dataclass, replace

from tutti.plan.toll import Toll


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Of one worker, measured where ranks train; nothing by default.

    None of it is hidden under computing: it takes the core that would compute.
    """

    exchange_s: float = 0.0
    """Of an exchange, however little is in it: hooks, threads that wake each other, waiting for the last rank."""
    bucket_s: float = 0.0
    """Of each bucket that is exchanged."""
    coding: float = 1.0
    """How many times as long as on a core of its own (`Codec.speed`) it takes to encode and decode."""
    crowding: float = 0.0
    """The part of computing that is lost while the link is in use, since the same cores move what is sent: from 0,
    where others do, to 1, where nothing is gained by exchanging while one computes."""

    alone: float = 1.0
    """How many times as fast a link is while few are in use as while all are: more than 1 where the cores that ranks
    share move less than the links could."""

    def seconds(self, toll: Toll) -> float:
        """A step, beyond what `toll` says."""
        hidden_s = max(0.0, toll.wire_s - max(0.0, toll.exposed_s - toll.coding_s))
        exchanging_s = self.exchange_s * toll.num_exchanges + self.bucket_s * toll.num_buckets
        return exchanging_s + (self.coding - 1) * toll.coding_s + self.crowding * hidden_s

    def slowed(self, factor: float) -> "Overhead":
        """Of a worker that takes so many times as long, but for codecs, whose speeds are not its own."""
        return replace(self, exchange_s=self.exchange_s * factor, bucket_s=self.bucket_s * factor)


NOTHING = Overhead()
