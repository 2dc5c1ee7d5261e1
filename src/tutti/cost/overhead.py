"""`Overhead`: time that exchanging takes beyond the formulas, such as Python, system calls and shared cores."""

from dataclasses import dataclass, replace

from tutti.cost.communication import CommunicationCost


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Overhead of one worker, measured on the machines it trains on; none by default.

    None of it is hidden behind computation: it takes the core that would compute.
    """

    exchange_s: float = 0.0
    """Seconds per exchange, whatever its size: hooks, threads that wake each other, waiting for the last rank."""
    bucket_s: float = 0.0
    """Seconds per exchanged bucket."""
    coding_factor: float = 1.0
    """Factor by which encoding and decoding are slower than `Codec.speed`, which is that of a core of its own."""
    contention: float = 0.0
    """Share of computing time that is lost while the link is in use, because the same cores move the data. 0 where
    other hardware moves it; 1 where overlapping communication with computation gains nothing."""

    uncontended_factor: float = 1.0
    """Factor by which a link is faster while few links are in use than while all are. More than 1 where the cores that
    ranks share move fewer bytes than the links could."""

    def seconds(self, cost: CommunicationCost) -> float:
        """Return the seconds per step that come on top of `cost.exposed_s`."""
        # Time on the wire that is not exposed, so that computation runs meanwhile on the same cores.
        hidden_s = max(0.0, cost.wire_s - max(0.0, cost.exposed_s - cost.coding_s))
        exchanging_s = self.exchange_s * cost.num_exchanges + self.bucket_s * cost.num_buckets
        # `cost` already contains the coding time once, at the codec's own speed.
        return exchanging_s + (self.coding_factor - 1) * cost.coding_s + self.contention * hidden_s

    def slowed(self, factor: float) -> "Overhead":
        """Return the overhead of a worker that computes `factor` times as slowly; codecs keep their speed."""
        return replace(self, exchange_s=self.exchange_s * factor, bucket_s=self.bucket_s * factor)


NO_OVERHEAD = Overhead()
