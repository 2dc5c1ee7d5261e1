"""A store of torch.distributed for the ranks of a membership: torch's own groups need one."""

import socket

from torch.distributed import Store, TCPStore

from tutti.transports.membership import Membership, address_family


def torch_store(membership: Membership, name: str) -> Store:
    """Make a store that all ranks share. Collective; rank 0 serves it.

    Args:
        name: unique among the stores of these ranks.
    """
    key, timeout = f"{name}/store", membership.timeout
    if membership.rank > 0:
        awaited = f"rank {membership.world_ranks[0]} to serve a store for torch"
        served = membership.await_values([key], awaited, owner=0)
        address, port_text = served[0].split()
        return TCPStore(address, int(port_text), is_master=False, wait_for_workers=False, timeout=timeout)
    address = membership.address
    # Torch itself would listen on all addresses of this host.
    listener = socket.create_server((address, 0), family=address_family(address), backlog=1024)
    port = listener.getsockname()[1]
    file = listener.detach()
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=file)
    membership.set(key, f"{address} {port}")
    return store
