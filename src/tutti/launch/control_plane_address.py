"""Addresses of coordinators that other hosts reach, as users write them: ADDRESS or ADDRESS:PORT."""

import socket

from tutti.errors import ConfigError


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Return the address and the port of a text, 0 for no port. Raises `ConfigError`."""
    address, colon, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "0")
    if not address or not port.isdecimal() or not 0 <= int(port) < 65_536 or (colon and port == "0"):
        raise ConfigError(f"{name} must be an address, or ADDRESS:PORT with a port up to 65535; got '{text}'.")
    return address, int(port)


def listen_on(text: str) -> tuple[socket.socket, str]:
    """Listen on an address of this host; return the socket and the address. Raises `ConfigError`."""
    address, port = parse_address(text, "--listen")
    try:
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
    except OSError as error:
        raise ConfigError(f"--listen: '{address}' is not known here ({error.strerror}).") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(found)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--listen: cannot listen on {text} ({error.strerror}). Give an address of this host that others reach."
        ) from error
    return listener, address
