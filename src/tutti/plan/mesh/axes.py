"""Where the ranks of a mesh are along each axis: who has which link, and how many share it."""

from collections import Counter
from dataclasses import replace

from tutti.cluster import Cluster, Link
from tutti.cost import Placement
from tutti.parallel import Mesh
from tutti.parallel.mesh import Axis


def place_along(axis: Axis, mesh: Mesh, cluster: Cluster) -> Placement:
    """The ranks of a row along an axis, while all other rows do the same: rows that leave a host share its link."""
    world = Placement.from_cluster(mesh.size, cluster)
    hosts = [host.name for host in cluster.place(mesh.size)]
    rows = {tuple(hosts[rank] for rank in mesh.along(axis, each)): None for each in range(mesh.size)}
    every = [[hosts[rank] for rank in row] for row in {tuple(mesh.along(axis, it)) for it in range(mesh.size)}]
    widest = max(rows, key=lambda row: len(set(row)))
    if len(set(widest)) == 1:
        return replace(world, num_ranks=len(widest), num_hosts=1, link=cluster.within, shared_link=cluster.within)
    shared = max(Counter(host for row in every if len(set(row)) > 1 for host in set(row)).values())
    here = max(Counter(widest).values())
    switched = world.link.bits_per_s / world.shared_link.bits_per_s / max(Counter(hosts).values())
    return replace(
        world,
        num_ranks=len(widest),
        num_hosts=len(set(widest)),
        link=Link(world.link.bits_per_s / shared, world.link.latency_s),
        shared_link=Link(world.link.bits_per_s / (shared * here * max(1.0, switched)), world.link.latency_s),
    )
