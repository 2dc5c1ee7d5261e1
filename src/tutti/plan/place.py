"""Where ranks are, as cost formulas see it: the slowest link, how many share it, and who computes slowest."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import prod

from tutti.cluster import Cluster, Host, Link
from tutti.errors import NoLink


@dataclass(frozen=True, kw_only=True)
class Place:
    """So many ranks on the hosts of a cluster."""

    num_ranks: int
    num_hosts: int
    link: Link
    """Between neighbours, who have it to themselves: the slowest there is; on one host, its memory."""
    crowded: Link
    """The same if all ranks talk to all others: it is shared by those of a host, and below a switch."""
    within: Link
    """Between ranks of one host."""
    slowness: float
    """How many times as long as a rank of speed 1 the slowest computes."""
    even: bool
    """Whether formulas hold: one rank a host or one host, links and speeds alike, and nothing left to chance."""
    alone: float = 1.0
    """How many times as fast a link is while only two ranks use theirs."""

    @classmethod
    @lru_cache(maxsize=64)  # Every strategy asks.
    def of(cls, num_ranks: int, cluster: Cluster) -> "Place":
        """Where that many ranks would be. Raises `ConfigError` if the cluster has not so many places."""
        placed = cluster.place(num_ranks)
        hosts = list({host.name: host for host in placed}.values())
        per_host = Counter(host.name for host in placed)
        speeds = {cluster.speed_of(rank, host) for rank, host in enumerate(placed)}
        blocking, latency_s = _through_switches(cluster, len(hosts))
        link = cluster.within if len(hosts) == 1 else _slowest(cluster, hosts)
        link = link if len(hosts) == 1 else Link(link.bits_per_s, link.latency_s + latency_s)
        share = 1.0 if len(hosts) == 1 else max(per_host.values()) * blocking
        alike = len({host.link for host in hosts}) == 1 and not cluster.links and blocking == 1
        settled = cluster.jitter is None and cluster.pauses is None and not cluster.failures and len(speeds) == 1
        flat = len(hosts) == 1 or max(per_host.values()) == 1
        return cls(
            num_ranks=num_ranks,
            num_hosts=len(hosts),
            link=link,
            crowded=Link(link.bits_per_s / share, link.latency_s),
            within=cluster.within,
            slowness=1 / min(speeds),
            even=flat and settled and (alike or len(hosts) == 1),
        )

    def among(self, senders: float) -> Link:
        """A link while so many ranks send: whatever limits all of them together is shared by fewer."""
        times = max(1.0, min(self.alone, self.num_ranks / senders))
        return Link(self.crowded.bits_per_s * times, self.crowded.latency_s)

    @property
    def two_levels(self) -> bool:
        """Whether there are more hosts than one, and fewer than ranks."""
        return 1 < self.num_hosts < self.num_ranks


def quickest(cluster: Cluster, num_ranks: int) -> float:
    """How many times as long as a rank of speed 1 the quickest of so many takes."""
    return 1 / max(cluster.speed_of(rank, host) for rank, host in enumerate(cluster.place(num_ranks)))


def up_to(cluster: Cluster, num_ranks: int) -> Cluster:
    """The cluster with what it says of ranks beyond so many left out, so that fewer can be placed."""
    return replace(
        cluster,
        slow={rank: factor for rank, factor in cluster.slow.items() if rank < num_ranks},
        failures={rank: seconds for rank, seconds in cluster.failures.items() if rank < num_ranks},
    )


def _through_switches(cluster: Cluster, num_hosts: int) -> tuple[float, float]:
    """By how much switches between so many hosts divide what each can send at once, and the latency they add."""
    sizes = [prod(tier.size for tier in cluster.tiers[: level + 1]) for level in range(len(cluster.tiers))]
    passed = [tier for tier, size in zip(cluster.tiers, sizes, strict=True) if num_hosts > size]
    return prod(tier.oversubscription for tier in passed), sum(tier.latency_s for tier in passed)


def _slowest(cluster: Cluster, hosts: list[Host]) -> Link:
    if not cluster.links:  # Then the slowest is that of a host, and a thousand hosts have no need for pairs.
        ways: Iterable[Link | None] = [host.link for host in hosts]
    else:
        ways = [cluster.link_between(one, two) for one, two in combinations(hosts, 2)]
    found = [link for link in ways if link is not None]
    if not found:
        raise NoLink(
            f"no two hosts of the cluster '{cluster.name}' are joined: give it a link for every host, or links."
        )
    return Link(min(link.bits_per_s for link in found), max(link.latency_s for link in found))
