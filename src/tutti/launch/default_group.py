"""torch's default process group over the ranks of a world, for `tutti.init(torch_distributed=True)`."""

import torch.distributed as dist

from tutti.transports import Membership, Transport
from tutti.transports.base import TransportWrapper
from tutti.transports.torch_store import torch_store
from tutti.world import World


def make_default_group(world: World) -> None:
    """Make torch's default group, unless there is one, and have it destroyed when the world is closed. Collective."""
    if dist.is_initialized():
        return
    if world.transport.cluster is not None:  # A simulated rank has a store of the simulation's.
        dist.init_process_group("tutti")
    else:
        membership = _membership(world.transport)
        store = dist.HashStore() if membership is None else torch_store(membership, "torch")
        dist.init_process_group(
            "tutti", store=store, rank=world.rank, world_size=world.size, timeout=world.transport.timeout
        )
    group = dist.group.WORLD

    def destroy() -> None:
        # The user may have destroyed it, and made another.
        if dist.is_initialized() and dist.group.WORLD is group:
            dist.destroy_process_group()

    world.at_close.append(destroy)


def _membership(transport: Transport) -> Membership | None:
    """Return the ranks that a transport joins; None if it joins one alone."""
    while isinstance(transport, TransportWrapper):
        transport = transport.inner
    return getattr(transport, "membership", None)
