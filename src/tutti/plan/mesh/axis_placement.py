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
    rank_rows = dict.fromkeys(tuple(mesh.ranks_along(axis, rank)) for rank in range(mesh.size))
    rows = [tuple(hosts[rank] for rank in row) for row in rank_rows]
    widest = max(rows, key=lambda row: len(set(row)))
    if len(set(widest)) == 1:
        return replace(world, num_ranks=len(widest), num_hosts=1, link=cluster.within, shared_link=cluster.within)
    shared = max(Counter(host for row in rows if len(set(row)) > 1 for host in set(row)).values())
    ranks_per_host = max(Counter(widest).values())
    switched = world.link.bits_per_s / world.shared_link.bits_per_s / max(Counter(hosts).values())
    return replace(
        world,
        num_ranks=len(widest),
        num_hosts=len(set(widest)),
        link=Link(world.link.bits_per_s / shared, world.link.latency_s),
        shared_link=Link(world.link.bits_per_s / (shared * ranks_per_host * max(1.0, switched)), world.link.latency_s),
    )
