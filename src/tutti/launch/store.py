"""The key-value store through which the ranks of a run meet: torch's own, served by the launcher.

The launcher keeps it, not rank 0, so that no worker's death takes it away.
"""

from torch.distributed import TCPStore


def serve(address: str, port: int, listener: int) -> TCPStore:
    """Serve a store on a socket that listens at `address` and `port` already; it takes the socket over."""
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
