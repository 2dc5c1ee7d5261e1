"""The placement of a mesh's ranks along one axis: their link, and how many rows share it."""

from collections import Counter
from dataclasses import replace

from tutti.cluster import Cluster, Link
from tutti.cost import Placement
from tutti.parallel import Mesh
from tutti.parallel.mesh import Axis


def placement_along(axis: Axis, mesh: Mesh, cluster: Cluster) -> Placement:
    """Return the placement of one row of ranks along an axis, while all other rows communicate too.

    Rows that cross hosts share the links of their hosts.
    """
    world = Placement.from_cluster(mesh.size, cluster)
    hosts = [host.name for host in cluster.place(mesh.size)]
    # Every rank of a row gives the same row: each is kept once.
    rank_rows = dict.fromkeys(tuple(mesh.ranks_along(axis, rank)) for rank in range(mesh.size))
    rows = [tuple(hosts[rank] for rank in row) for row in rank_rows]
    # Rows may lie differently on hosts: the one over most hosts is the slowest, and all others wait for it.
    widest = max(rows, key=lambda row: len(set(row)))
    if len(set(widest)) == 1:
        return replace(world, num_ranks=len(widest), num_hosts=1, link=cluster.within, shared_link=cluster.within)
    # Number of rows that use the link of the same host, where that is most.
    rows_per_link = max(Counter(host for row in rows if len(set(row)) > 1 for host in set(row)).values())
    ranks_per_host = max(Counter(widest).values())
    # `world.shared_link` is the link divided by the ranks of a host and by the oversubscription of switches.
    sharing = world.link.bits_per_s / world.shared_link.bits_per_s
    oversubscription = max(1.0, sharing / max(Counter(hosts).values()))
    row_link = Link(world.link.bits_per_s / rows_per_link, world.link.latency_s)
    return replace(
        world,
        num_ranks=len(widest),
        num_hosts=len(set(widest)),
        link=row_link,
        shared_link=Link(row_link.bits_per_s / (ranks_per_host * oversubscription), row_link.latency_s),
    )
