"""torch's process groups along an axis of a mesh: what DTensor and torch's pipeline schedules talk through."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tutti.errors import ConfigError
from tutti.transports import ProcessGroupTransport, Transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_numbers = count()
"""torch looks groups up by names, of which a process may use each once; ranks may be threads of one process."""


@contextmanager
def process_group(transport: Transport) -> Iterator[dist.ProcessGroup]:
    """A torch process group of the ranks of `transport`, which is its own. Collective.

    It is not, and needs no, default group. When a rank is lost, what waits for it fails at once.
    """
    group = _gloo(transport)
    name: Any = f"tutti-{next(_numbers)}"
    group._set_group_name(name)
    group._set_group_desc("tutti")
    c10d._register_process_group(name, group)
    c10d._world.pg_map[group] = ("gloo", group.get_group_store())
    c10d._world.pg_names[group] = name
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(transport.size)}
    try:
        yield group
    finally:
        c10d._unregister_process_group(name)
        for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
            table.pop(group, None)


def device_mesh(group: dist.ProcessGroup, device_type: str) -> "DeviceMesh":
    """The row of ranks of `group`, as DTensor wants to see it."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh: Any = DeviceMesh(device_type, list(range(group.size())), _init_backend=False, _rank=group.rank())
    mesh._dim_group_names = [group.group_name]
    mesh._pg_registry = {group.group_name: group}
    mesh._thread_id = threading.get_ident()  # Meshes of ranks that are threads are not the same.
    return mesh


def _gloo(transport: Transport) -> Any:
    beneath = transport
    while not isinstance(beneath, ProcessGroupTransport):
        if (inner := getattr(beneath, "inner", None)) is None:
            raise ConfigError(
                f"rank {transport.rank}: tensor and pipeline parallelism do not run over {type(transport).__name__}. "
                "Use sockets or shared memory."
            )
        beneath = inner
    gloo = beneath.gloo()
    kind = dist.ProcessGroup.BackendType.GLOO
    group: Any = dist.ProcessGroup(dist.HashStore(), transport.rank, transport.size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    return group
