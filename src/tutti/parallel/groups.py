"""torch's process groups along an axis of a mesh: what DTensor and torch's pipeline schedules talk through."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tutti.backend import GroupConnection, group_over
from tutti.transports import Transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_numbers = count()
"""torch looks groups up by names, of which a process may use each once; ranks may be threads of one process."""


@contextmanager
def process_group(transport: Transport) -> Iterator[dist.ProcessGroup]:
    """A torch process group of the ranks of `transport`. Collective.

    It is not, and needs no, default group. When a rank is lost, what waits for it fails at once.
    """
    group = group_over(GroupConnection(transport.channel("group"), transport.world_rank, lambda: None))
    with registered(group):
        yield group


@contextmanager
def registered(group: Any) -> Iterator[None]:
    """Let torch find a group by its name; it is shut down in the end."""
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
    """The row of ranks of `group`, as DTensor wants to see it."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh: Any = DeviceMesh(device_type, list(range(group.size())), _init_backend=False, _rank=group.rank())
    mesh._dim_group_names = [group.group_name]
    mesh._pg_registry = {group.group_name: group}
    mesh._thread_id = next(_numbers)  # DTensor takes equal meshes for one, and groups of other ranks or jobs are not.
    yield mesh
    mesh._pg_registry.clear()  # DTensor remembers meshes for as long as the process lives: not their groups too.
