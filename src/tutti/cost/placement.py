"""`Placement`: where ranks are, as cost formulas see it: the slowest link, its sharing, and the slowest rank."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import prod

from tutti.cluster import Cluster, Host, Link
from tutti.errors import NoLink


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A number of ranks on the hosts of a cluster, reduced to what cost formulas need."""

    num_ranks: int
    num_hosts: int
    link: Link
    """The slowest link between two hosts when one rank uses it; on one host, its memory."""
    shared_link: Link
    """The same link while every rank sends to every other: ranks of a host, and hosts below a switch, share it."""
    within: Link
    """The link between ranks of one host: its memory."""
    slowness: float
    """Computing time of the slowest rank, relative to a rank of speed 1."""
    uniform: bool
    """Whether formulas hold: one rank per host or one host, equal links and speeds, and no jitter or failures."""
    uncontended_factor: float = 1.0
    """Factor by which a link is faster while only two ranks use theirs (`Overhead.uncontended_factor`)."""

    @classmethod
    @lru_cache(maxsize=64)  # Computed once for all strategies that are compared.
    def from_cluster(cls, num_ranks: int, cluster: Cluster) -> "Placement":
        """Place `num_ranks` ranks on a cluster. Raises `ConfigError` if the cluster has too few slots for them."""
        placed = cluster.place(num_ranks)
        hosts = list({host.name: host for host in placed}.values())
        per_host = Counter(host.name for host in placed)
        speeds = {cluster.speed_of(rank, host) for rank, host in enumerate(placed)}
        # By how much switches divide a host's rate, and the latency that they add to every message.
        blocking, latency_s = _through_switches(cluster, len(hosts))
        # All ranks wait for the slowest pair in every synchronous step, so that one link decides.
        link = cluster.within if len(hosts) == 1 else _slowest(cluster, hosts)
        link = link if len(hosts) == 1 else Link(link.bits_per_s, link.latency_s + latency_s)
        # Ranks of one host share its link; oversubscribed switches divide it further.
        share = 1.0 if len(hosts) == 1 else max(per_host.values()) * blocking
        equal_links = len({host.link for host in hosts}) == 1 and not cluster.links and blocking == 1
        steady = cluster.jitter is None and cluster.pauses is None and not cluster.failures and len(speeds) == 1
        # With several ranks on several hosts there are two kinds of links at once, and no formula here has both.
        single_level = len(hosts) == 1 or max(per_host.values()) == 1
        return cls(
            num_ranks=num_ranks,
            num_hosts=len(hosts),
            link=link,
            shared_link=Link(link.bits_per_s / share, link.latency_s),
            within=cluster.within,
            slowness=1 / min(speeds),
            # Where this is False, the planner takes a simulated step time, if it has a simulator.
            uniform=single_level and steady and (equal_links or len(hosts) == 1),
        )

    def link_with_senders(self, num_senders: float) -> Link:
        """Return a rank's link while `num_senders` ranks send: fewer senders share what limits all of them."""
        # At most what was measured with two senders, at least the rate that all have together.
        factor = max(1.0, min(self.uncontended_factor, self.num_ranks / num_senders))
        return Link(self.shared_link.bits_per_s * factor, self.shared_link.latency_s)

    @property
    def two_levels(self) -> bool:
        """Whether there are several hosts, and several ranks on at least one of them."""
        return 1 < self.num_hosts < self.num_ranks


def least_slowness(cluster: Cluster, num_ranks: int) -> float:
    """Return the computing time of the fastest of `num_ranks` ranks, relative to a rank of speed 1."""
    return 1 / max(cluster.speed_of(rank, host) for rank, host in enumerate(cluster.place(num_ranks)))


def restricted_to(cluster: Cluster, num_ranks: int) -> Cluster:
    """Return the cluster without its settings for ranks from `num_ranks` on, so that fewer ranks can be placed."""
    return replace(
        cluster,
        slow={rank: factor for rank, factor in cluster.slow.items() if rank < num_ranks},
        failures={rank: seconds for rank, seconds in cluster.failures.items() if rank < num_ranks},
    )


def _through_switches(cluster: Cluster, num_hosts: int) -> tuple[float, float]:
    """Return the factor by which switches divide the rate of each of `num_hosts` hosts, and the latency they add."""
    sizes = [prod(tier.size for tier in cluster.tiers[: level + 1]) for level in range(len(cluster.tiers))]
    # A tier joins that many hosts. More hosts than that must send through the switch above it.
    passed = [tier for tier, size in zip(cluster.tiers, sizes, strict=True) if num_hosts > size]
    return prod(tier.oversubscription for tier in passed), sum(tier.latency_s for tier in passed)


def _slowest(cluster: Cluster, hosts: list[Host]) -> Link:
    """Return the lowest rate and the highest latency between any two of the hosts."""
    if not cluster.links:  # Hosts differ by their own links only: no need to look at every pair of a thousand.
        links: Iterable[Link | None] = [host.link for host in hosts]
    else:
        links = [cluster.link_between(one, two) for one, two in combinations(hosts, 2)]
    existing = [link for link in links if link is not None]
    if not existing:
        raise NoLink(
            f"no two hosts of the cluster '{cluster.name}' are joined: give it a link for every host, or links."
        )
    return Link(min(link.bits_per_s for link in existing), max(link.latency_s for link in existing))
