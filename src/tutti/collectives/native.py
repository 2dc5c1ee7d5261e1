"""The transport's own all-reduce."""

from torch import Tensor

from tutti.errors import ConfigError
from tutti.transports import AllReduces, Transport


def native(tensor: Tensor, transport: Transport) -> None:
    """Replace `tensor` by its sum over ranks, in whatever way the transport does best."""
    if not isinstance(transport, AllReduces):
        raise ConfigError(f"{type(transport).__name__} has no all-reduce of its own.")
    transport.all_reduce(tensor).wait()
