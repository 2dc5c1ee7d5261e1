"""The connection of a member to its coordinator, kept by a thread of its own.

How it works
------------
The thread runs an event loop. It connects, proves the secret, says hello, and then passes messages on in both
directions and sends a heartbeat every `_BEAT_S`. When the connection breaks, it connects again, without end: training
goes on meanwhile, and `Member` keeps what there is to send.

Only two things exclude this process from the job: the coordinator refuses it (it was evicted), or it is cut off. Cut
off means that nothing answers at the coordinator's address for `patience`: packets are lost. A coordinator that is
stopped still has a kernel that lets connections in, and one that was killed has one that refuses them, so neither
counts. Only a new connection shows which it is: the kernel also ends one whose other end has read nothing for long.
"""

import asyncio
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import tutti
from tutti.coordination import frames
from tutti.coordination.coordinator import PATIENCE, read_message
from tutti.coordination.description import MemberDescription
from tutti.coordination.forks import close_in_children
from tutti.coordination.frames import Message, ProtocolError
from tutti.coordination.handshake import Streams, WrongSecret, prove_as_member, set_timeouts, tls
from tutti.coordination.member import Member
from tutti.coordination.secret import Secret
from tutti.errors import ConfigError, EnvironmentConflict, RankLost

_BEAT_S = 0.25
_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
_BYE_S, _CLOSE_S = 1.0, 2.0
_CONNECT_S = 2.0
"""How long to try to connect, at least, before this process is taken to be cut off."""


class _Unreachable(OSError):
    """No connection to the coordinator's host can be opened."""


@dataclass(frozen=True)
class Endpoint:
    """Where a coordinator listens."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class ConnectedMember(Member):
    """A member with a connection to a coordinator, from `connect_member`."""

    def __init__(self, description: MemberDescription, endpoint: Endpoint, secret: Secret, patience: timedelta) -> None:
        super().__init__(description)
        self.endpoint = endpoint
        self.place = f"the coordinator at {endpoint}"
        self.secret = self._secret = secret
        self.patience_s = patience.total_seconds()
        self._loop = asyncio.new_event_loop()
        self._over = False
        self._main: asyncio.Task[None] | None = None
        self.first_answer = threading.Event()
        """Set when the coordinator has let this process in, or has refused it."""
        self.error: str = ""
        """Why the last attempt to connect failed."""
        self.sends_heartbeats = True
        """Whether it reports. A benchmark turns that off for moments."""
        self._wrong_secret = False
        self._thread = threading.Thread(target=self._run, name="tutti coordination", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say bye and end the connection. Idempotent."""
        if self._over:
            return
        self._over = True
        if self.connected:
            self.bye()
            # Ended by the coordinator, which closes the connection when it has read that. If this end closed it first,
            # with something unread, the kernel would reset it, and what was sent would be lost: the others would take
            # this process for one that died.
            self._thread.join(_BYE_S)
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_CLOSE_S)

    def await_first_answer(self, timeout_s: float) -> None:
        """Wait until the coordinator has answered. Raises the error that says why it has not, or has refused."""
        came = self.first_answer.wait(timeout_s)
        rank, endpoint = self.description.rank, self.endpoint
        is_worker = rank >= 0
        who = f"rank {rank}: " if is_worker else ""
        if self._wrong_secret:
            raise ConfigError(
                f"{who}the coordinator at {endpoint} has another secret than this process. All processes of a job "
                "need one: set TUTTI_SECRET to the same text on every host, or copy the file tutti/secret in the "
                "user's configuration folder from one host to the others."
            )
        if self.known.refused is not None:
            raise EnvironmentConflict(f"{who}the coordinator at {endpoint} refuses this process: {self.known.refused}.")
        if not came:
            why = "Rank 0 or the launcher was not started, MASTER_ADDR or MASTER_PORT is wrong"
            if not is_worker:
                why = "The run's launcher has ended or is stopped, the address is another one"
            raise RankLost(
                f"{who}nobody answers at {endpoint} ({self.error or 'no connection'}). {why}, or a firewall is between."
            )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._connect_for_ever())
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
        finally:
            self._loop.close()

    def _cancel(self) -> None:
        if self._main is not None:
            # In the next round of the loop: what was posted before is written first.
            self._loop.call_soon(self._main.cancel)

    async def _connect_for_ever(self) -> None:
        retry_s = 0.0
        while not (self._over or self.known.refused):
            started, worked = time.monotonic(), False
            try:
                await self._session()
            except WrongSecret as error:
                self._refused(str(error))
                return
            except ssl.SSLCertVerificationError:
                self._refused("its certificate is of another secret")
                return
            except (OSError, EOFError, ProtocolError, ssl.SSLError) as error:
                self._note_failure(error)
            finally:
                worked = self.connected and time.monotonic() - started > _LONGEST_RETRY_S
                self.detach()
            retry_s = _next_retry_s(retry_s, worked)
            await asyncio.sleep(retry_s)

    def _refused(self, error: str) -> None:
        self._wrong_secret, self.error = True, error
        self.exclude("the coordinator has another secret")
        self.first_answer.set()

    def _note_failure(self, error: BaseException) -> None:
        """Remember why there is no connection; find out whether this process is cut off."""
        self.error = str(error) or type(error).__name__
        # The other host's kernel answers: the coordinator's process is gone, or was restarted.
        if isinstance(error, ConnectionError | EOFError):
            self.answered_at = time.monotonic()
        silent_s = time.monotonic() - self.answered_at
        if isinstance(error, _Unreachable) and silent_s > self.patience_s and self.first_answer.is_set():
            self.exclude(
                f"it is cut off from the coordinator at {self.endpoint}, which has not answered for {silent_s:.0f} s"
            )

    async def _session(self) -> None:
        """One connection, from its opening to its end."""
        reader, writer = await self._open()
        try:
            writer.write(frames.encode(self.hello(tutti.__version__)))
            async with asyncio.timeout(None) as limit:
                limit.reschedule(self._loop.time() + self.patience_s if not self.first_answer.is_set() else None)
                message = await read_message(reader)
            self.received(message)
            if message["op"] != "welcome":
                self.first_answer.set()
                return
            self.attach(lambda message: self._write(writer, message))
            self.first_answer.set()
            beats = self._loop.create_task(self._beat(writer))
            try:
                while True:
                    # Ended by the coordinator, by the kernel when its host does not answer, and by `close`.
                    message = await read_message(reader)
                    self.answered_at = time.monotonic()
                    self.received(message)
            finally:
                beats.cancel()
        except TimeoutError as error:
            # Of the kernel: its host has not acknowledged anything for `patience`, or has no room for more.
            self.answered_at = max(self.answered_at, time.monotonic() - self.patience_s)
            raise OSError(f"no answer from {self.endpoint}") from error
        finally:
            with suppress(Exception):
                # What is in the buffer still leaves, where the kernel takes it at once.
                writer.close()

    async def _open(self) -> Streams:
        """Connect and prove the secret."""
        context = tls(self._secret, self.endpoint.address, server=False)
        connection = await self._reach()
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self.patience_s):
                reader, writer = await asyncio.open_connection(
                    sock=connection, ssl=context, server_hostname=None if context is None else ""
                )
                if context is None:
                    await prove_as_member((reader, writer), self._secret)
        except BaseException:
            if writer is not None:
                writer.transport.abort()
            connection.close()
            raise
        finally:
            # Its kernel let the connection in. If nothing else came, the coordinator is stopped.
            self.answered_at = time.monotonic()
        return reader, writer

    async def _reach(self) -> socket.socket:
        """Open a connection. Raises `ConnectionError` if the other host refuses it, else `_Unreachable`."""
        limit_s = self.patience_s
        if self.first_answer.is_set():
            limit_s = min(limit_s, max(_CONNECT_S, self.answered_at + limit_s - time.monotonic()))
        try:
            async with asyncio.timeout(limit_s):
                return await self._connect()
        except ConnectionError:
            raise
        except OSError as error:  # Also at the time limit.
            raise _Unreachable(str(error) or "no answer") from error

    async def _connect(self) -> socket.socket:
        """Open a connection to the first address of the coordinator's host that answers."""
        endpoint = self.endpoint
        # In this thread, which has nothing else to do: the loop would ask a thread pool, which takes no work when
        # Python ends, and that may be while this process connects again.
        found = socket.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_STREAM)
        failure: OSError = OSError(f"no address for {endpoint.address}")
        for family, kind, protocol, _, address in found:
            connection = close_in_children(socket.socket(family, kind, protocol))
            try:
                connection.setblocking(False)
                set_timeouts(connection, self.patience_s)
                await self._loop.sock_connect(connection, address)
            except OSError as error:
                connection.close()
                failure = error
            else:
                return connection
        raise failure

    def _write(self, writer: asyncio.StreamWriter, message: Message) -> None:
        """Send a message, from any thread."""
        data = frames.encode(message)

        def write() -> None:
            if not writer.is_closing():
                writer.write(data)

        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(write)

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            if self.sends_heartbeats:
                writer.write(frames.encode({"op": "beat", "status": self.activity.status()}))
            await asyncio.sleep(_BEAT_S)


def _next_retry_s(before_s: float, worked: bool) -> float:
    """How long to wait before the next attempt, after one that `worked` for a while or did not.

    At once after a connection that worked: where nobody sees this process, it is soon taken for lost.
    """
    return 0.0 if worked else min(max(2 * before_s, _RETRY_S), _LONGEST_RETRY_S)


def connect_member(
    description: MemberDescription,
    endpoint: Endpoint,
    secret: Secret,
    *,
    timeout: timedelta,
    patience: timedelta = PATIENCE,
) -> ConnectedMember:
    """Connect this process to the coordinator of its job.

    Raises `RankLost` if nobody answers within `timeout`, `ConfigError` if the coordinator has another secret,
    `EnvironmentConflict` if it refuses this process.
    """
    member = ConnectedMember(description, endpoint, secret, patience)
    try:
        member.await_first_answer(timeout.total_seconds())
    except BaseException:
        member.close()
        raise
    return member
