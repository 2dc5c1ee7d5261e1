"""torch process groups over Tutti's transports, along an axis of a mesh: DTensor communicates through these."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tutti.backend import GroupConnection, group_over
from tutti.transports import Transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_numbers = count()
"""Numbers for names of groups. torch finds a group by its name in the process, where ranks may be threads."""


@contextmanager
def process_group(transport: Transport) -> Iterator[dist.ProcessGroup]:
    """Make a torch process group of the ranks of `transport`, for as long as the context. Collective.

    It is not the default group, and needs none. When a rank is lost, operations that wait for it fail at once.
    """
    group = group_over(GroupConnection(transport.channel("group"), transport.world_rank, lambda: None))
    with registered(group):
        yield group


@contextmanager
def registered(group: Any) -> Iterator[None]:
    """Let torch find a group by its name within the context, and shut the group down at its end."""
    name: Any = f"tutti-{next(_numbers)}"
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    try:
        yield
    finally:
        c10d._unregister_process_group(name)
        group.shutdown()


def broadcast(tensor: Tensor, root: int, group: dist.ProcessGroup) -> None:
    """Overwrite `tensor` with that of rank `root`. Collective."""
    options: Any = c10d.BroadcastOptions()
    options.rootRank = root
    group.broadcast([tensor], options).wait()


@contextmanager
def device_mesh(group: dist.ProcessGroup, device_type: str) -> Iterator["DeviceMesh"]:
    """Make the one-dimensional device mesh of the ranks of `group`, for DTensor.

    torch's own constructor needs a default group. So the mesh is made without groups, and `group` is put into it.
    """
    mesh = _mesh_without_groups(device_type, group.size(), group.rank())
    mesh._dim_group_names = [group.group_name]
    mesh._pg_registry = {group.group_name: group}
    # DTensor treats equal meshes as one, and those of other jobs, or of ranks in other threads, have other groups.
    mesh._thread_id = next(_numbers)
    try:
        yield mesh
    finally:
        mesh._pg_registry.clear()  # DTensor caches meshes for the life of the process; their groups must not live on.


def _mesh_without_groups(device_type: str, size: int, rank: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    make: Any = DeviceMesh
    if "_rank" in inspect.signature(make.__init__).parameters:
        return make(device_type, list(range(size)), _init_backend=False, _rank=rank)
    mesh = make.__new__(make)  # In torch 2.9, whose constructor and methods ask the default group for the rank.
    mesh.device_type, mesh.mesh, mesh.mesh_dim_names = device_type, torch.arange(size, dtype=torch.int), None
    mesh._flatten_mesh_list, mesh._coordinate_on_dim = tuple(range(size)), [rank]
    mesh.get_rank, mesh.get_local_rank = lambda: rank, lambda mesh_dim=None: rank
    return mesh
