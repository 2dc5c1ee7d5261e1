"""Proof, on a new connection, that both ends know the job's secret.

Between hosts the connection is TLS with certificates from the secret (`certificates`). On loopback, and where
encryption is turned off, it is plain, and starts with three messages of fixed length:

1. member: greeting, 32 random bytes;
2. coordinator: greeting, 32 random bytes, and a MAC of both random values under the secret's key;
3. member: another MAC of both.

Each end verifies the other's MAC before it reads anything else. The MACs have different labels, so none can be sent
back as the answer; and new random values make a recorded proof useless.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
import sys

from tutti.coordination.certificates import context
from tutti.coordination.frames import ProtocolError
from tutti.coordination.secret import Secret

GREETING = b"TUTTI/1\n"
_NONCE_BYTES = 32
_MIN_RTT_AT = 148
"""Where the kernel's `tcp_info` has the shortest round trip, in microseconds."""
_UNKNOWN_RTT = 0xFFFFFFFF

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WrongSecret(ProtocolError):
    """The other end does not know this job's secret."""


def is_loopback(address: str) -> bool:
    """Whether an address is reached from this host alone."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def tls(secret: Secret, address: str, *, server: bool) -> ssl.SSLContext | None:
    """The context for connections to a listener at `address`; None where they are not encrypted."""
    if secret.is_open or not secret.encrypt or is_loopback(address):
        return None
    return context(secret, server=server)


def set_timeouts(connection: socket.socket, patience_s: float) -> None:
    """Have the kernel end a connection whose other end does not acknowledge for `patience_s`.

    That is a host that is down, or cut off. A process that is stopped is not: its kernel still acknowledges.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(patience_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(patience_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience_s * 1000))


def round_trip_s(connection: socket.socket) -> float:
    """The shortest round trip that the kernel has seen on a connection of late; 0 if it does not say."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    except OSError:  # It has just ended.
        return 0.0
    found = int.from_bytes(info[_MIN_RTT_AT:], sys.byteorder) if len(info) == _MIN_RTT_AT + 4 else 0
    return 0.0 if found == _UNKNOWN_RTT else found / 1e6


async def prove_as_member(streams: Streams, secret: Secret) -> None:
    """The member's end of the proof. Raises `WrongSecret`."""
    reader, writer = streams
    nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(GREETING + nonce)
    answer = await reader.readexactly(len(GREETING) + _NONCE_BYTES + 32)
    greeting, other, mac = answer[:8], answer[8 : 8 + _NONCE_BYTES], answer[8 + _NONCE_BYTES :]
    if greeting != GREETING:
        raise ProtocolError("what answers is no coordinator of Tutti, or one of another version")
    if not hmac.compare_digest(mac, _mac(secret, b"coordinator", nonce + other)):
        raise WrongSecret("the coordinator has another secret")
    writer.write(member_proof(secret, nonce + other))


async def prove_as_coordinator(streams: Streams, secret: Secret) -> None:
    """The coordinator's end of the proof. Raises `ProtocolError`, having said nothing that a stranger could use."""
    reader, writer = streams
    if await reader.readexactly(len(GREETING)) != GREETING:
        raise ProtocolError("no greeting")
    other = await reader.readexactly(_NONCE_BYTES)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(GREETING + nonce + _mac(secret, b"coordinator", other + nonce))
    try:
        proof = await reader.readexactly(32)
    except EOFError:
        # It has seen the coordinator's proof, and does not accept it.
        raise WrongSecret("a member has another secret") from None
    if not hmac.compare_digest(proof, member_proof(secret, other + nonce)):
        raise WrongSecret("a member has another secret")


def member_proof(secret: Secret, nonces: bytes) -> bytes:
    """What a member sends to prove that it knows the secret, after the random values of both ends."""
    return _mac(secret, b"member", nonces)


def _mac(secret: Secret, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.key("control connection"), label + nonces, hashlib.sha256)
