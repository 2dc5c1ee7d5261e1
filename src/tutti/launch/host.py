"""This host: its name, its identity, and its addresses on the network."""

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from tutti.cluster.hosts import LOOPBACK
from tutti.errors import ConfigError
from tutti.launch.environment import RankEnvironment
from tutti.launch.supervisor_pipe import HOST

if TYPE_CHECKING:
    from tutti.transports import Membership  # Imports torch.

# From linux/sockios.h: asks for the address of an interface.
_SIOCGIFADDR = 0x8915

_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the route to it shows which interface faces other hosts."""


def listen_address(environment: RankEnvironment, membership: "Membership") -> str:
    """Choose where this rank's sockets listen: loopback on one host, else the address that faces rank 0."""
    # Nothing listens on the network where no other host has to connect.
    if membership.one_host:
        return LOOPBACK
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        try:
            return interface_address(names.split(",")[0])
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"rank {membership.world_rank}: GLOO_SOCKET_IFNAME names '{names}', which has no address here "
                f"({error.strerror}). Known: {known}."
            ) from None
    assert environment.address is not None
    if (address := network_address(environment.address)) is not None:
        return address
    raise ConfigError(
        f"rank {membership.world_rank}: this host has no network address by which others could reach it; its "
        "ranks are on several hosts. Name its network interface in GLOO_SOCKET_IFNAME."
    )


def network_address(towards: str) -> str | None:
    """An address by which other hosts reach this one, if it has any: the one on the route to `towards`, if possible."""
    # On the host whose address that is, the route is loopback: so towards any other host. Then whatever address an
    # interface has.
    candidates = [lambda: address_towards(towards), lambda: address_towards(_ELSEWHERE), *_interfaces()]
    for candidate in candidates:
        with suppress(OSError):
            address = candidate()
            if not address.startswith("127.") and address != "::1":
                return address
    return None


def address_towards(address: str | None) -> str:
    """This host's address on the route to another. Nothing is sent: connecting a datagram socket only picks a route."""
    family, _, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _interfaces() -> list[Callable[[], str]]:
    """Functions that return the address of each network interface but loopback; one without an address raises."""
    return [partial(interface_address, name) for _, name in socket.if_nameindex() if name != "lo"]


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface."""
    # struct ifreq of netdevice(7): the name, at most 15 bytes, and from byte 20 on the IPv4 address of the answer.
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


def host_name() -> str:
    """The name of this host for people: that of the lab's host, where the launcher gave it one."""
    return os.environ.get(HOST) or socket.gethostname()


def host_id() -> str:
    """An identifier that is equal for processes that share memory and loopback: one kernel, one network namespace."""
    try:
        # Containers of one machine share the kernel but not the network or the process numbers: all three have to
        # match.
        with open("/proc/sys/kernel/random/boot_id") as boot:
            kernel = boot.read().strip()
        return "/".join([kernel, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))])
    except FileNotFoundError:
        return socket.gethostname()
