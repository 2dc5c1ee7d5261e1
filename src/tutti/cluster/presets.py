"""Clusters by name. Where no source is given, a figure is a round one that is typical of its kind."""

from tutti.cluster.cluster import Cluster
from tutti.cluster.compute import Compute
from tutti.cluster.hosts import Host, Tier
from tutti.cluster.link import Link


def _africa_wan() -> Cluster:
    """Four sites joined over the internet.

    These are round, typical figures, not measurements: real paths vary by the hour and by the provider. Latencies are
    one way, about half of common round trips; much traffic between the west and the east goes by way of Europe.
    """
    access = {"cape-town": "500mbit", "nairobi": "200mbit", "lagos": "100mbit", "cairo": "200mbit"}
    paths = {
        ("cape-town", "nairobi"): Link("150mbit", "35ms"),
        ("cape-town", "lagos"): Link("100mbit", "50ms"),
        ("cape-town", "cairo"): Link("100mbit", "85ms"),
        ("nairobi", "lagos"): Link("50mbit", "100ms"),
        ("nairobi", "cairo"): Link("100mbit", "60ms"),
        ("lagos", "cairo"): Link("50mbit", "70ms"),
    }
    return Cluster(
        name="africa-wan",
        link=None,
        hosts=tuple(Host(name=name, link=Link(rate, "5ms")) for name, rate in access.items()),
        within=Link("10gbit", "50us"),  # A site is one host here: its ranks share a local network.
        links=paths,
    )


_ALL = (
    Cluster(name="ethernet-1g", link=Link("1gbit", "50us"), tiers=(Tier(32, 4, "5us"),)),
    Cluster(name="ethernet-10g", link=Link("10gbit", "30us"), tiers=(Tier(32, 3, "1us"),)),
    # Switches of 36 ports, 18 down and 18 up, in a fat tree.
    Cluster(name="infiniband-edr", link=Link("100gbit", "1.5us"), tiers=(Tier(18, 1, "100ns"),)),
    # Within: NVLink 3 carries 300 GB/s each way (NVIDIA A100 whitepaper, 2020). Between: eight ports of 200 Gbit/s a
    # host, as in a DGX A100. 60 TFLOP/s is a fifth of the 312 that the whitepaper gives as the peak in bfloat16.
    Cluster(
        name="nvlink-island",
        link=Link(8 * 200e9, "2us"),
        ranks_per_host=8,
        within=Link("2.4tbit", "3us"),
        compute=Compute("60tflops"),
    ),
    _africa_wan(),
)

PRESETS = {cluster.name: cluster for cluster in _ALL}
