"""The coordinator: the service of a job that knows its members, in a thread of the launcher or of rank 0.

How it works
------------
One thread runs an event loop, and nothing else touches `CoordinatorState`. Each connection goes through these states:

1. stranger: it has `_HANDSHAKE_S` to prove the secret (`handshake`) and to say hello. At most `_MOST_STRANGERS` are in
   this state; one more ends the oldest. So strangers cost a bounded number of files and bytes, and a member, which
   needs milliseconds, gets in beside them. Nothing that a stranger sends is parsed before the proof.
2. member: its messages go to the state, in the order they come.
3. over: at the end of the connection the state decides whether the member is lost.

Messages to members are written without waiting. A member that does not read them has its connection ended when
`_MOST_UNREAD_BYTES` have gathered; it connects again, and is sent what it needs.

The waits: for strangers until their deadline, for members until they send or their connection ends, which the kernel
does after `patience` without acknowledgements. `tick` evicts those that are connected and silent.
"""

import asyncio
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

from tutti.coordination import frames
from tutti.coordination.diagnosis import HeldUp
from tutti.coordination.forks import close_in_children
from tutti.coordination.frames import Message, ProtocolError
from tutti.coordination.handshake import (
    Streams,
    WrongSecret,
    prove_as_coordinator,
    round_trip_s,
    set_timeouts,
    tls,
)
from tutti.coordination.launchers import ManagementRequest
from tutti.coordination.secret import Secret
from tutti.coordination.state import CoordinatorState, Refused

PATIENCE = timedelta(seconds=10)
"""How long a member may be silent before it is evicted, unless the user says otherwise."""

_HANDSHAKE_S = 10.0
_MOST_STRANGERS = 128
_MOST_UNREAD_BYTES = 16 << 20
_CLOSE_S = 5.0
_TICK_S, _DISCONNECTED_TICK_S = 0.25, 0.01
_REFUSAL_S = 1.0
"""How long a member that is refused has to read why."""


class Coordinator:
    """Serves one job on a listening socket, from its creation until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        *,
        host_id: str,
        address: str | None = None,
        patience: timedelta = PATIENCE,
    ) -> None:
        """Serve on `listener`, which it takes over.

        Args:
            address: the name by which members reach it, where that is not the address it listens on. Both ends decide
                by it whether the connection is encrypted.
            host_id: of this host, as members of it describe themselves: their processes can be looked at.
            patience: how long a member may be silent.
        """
        close_in_children(listener).setblocking(False)
        self._listener, self._secret = listener, secret
        bound, self.port = listener.getsockname()[:2]
        self.address: str = address or bound
        self._patience_s = patience.total_seconds()
        self._tls = tls(secret, self.address, server=True)
        self._state = CoordinatorState(self._patience_s, host_id, time.monotonic())
        self.evicted = self._state.evicted
        """Members that were evicted while their processes may still be there, and why. Its reader empties it."""
        self.requests = self._state.launchers.requests
        """What users have asked of the launcher. Its reader takes them out, and answers."""
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._refused: WeakSet[asyncio.StreamWriter] = WeakSet()
        """Connections on which nothing is written any more: they end as soon as the other side has read why."""
        self._strangers: dict[asyncio.Task[None], None] = {}  # A dict, because it keeps the order.
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._disconnected = asyncio.Event()
        """The connection of a member has ended."""
        self._told_of_secret = False
        self._thread = threading.Thread(target=self._run, name="tutti coordinator", daemon=True)
        self._thread.start()

    is_gone = False
    """Whether the process that serves it has ended, for a launcher; never where that is its own."""

    def close(self) -> None:
        """End the service and all connections. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(_CLOSE_S)

    @property
    def held_up(self) -> tuple[HeldUp, ...]:
        """Ranks that others wait for, as of the last diagnosis. A new tuple each time, so any thread may read it."""
        return self._state.held_up

    def present(self, but: Collection[str] = ()) -> list[int]:
        """Ranks of the members that have neither left nor been lost, but some."""
        members = self._state.members
        return self._ask(
            lambda: sorted(
                each.description.rank for id, each in members.items() if id not in but and not each.is_observer
            )
        )

    def set_limits(self, minimum: int, maximum: int, first_number: int) -> None:
        """Let workers come and go; `first_number` is that of the first one after those that the launcher starts."""

        def change() -> None:
            self._state.launchers.limits, self._state.launchers.next_number = (minimum, maximum), first_number

        self._ask(change)

    def take_numbers(self, count: int) -> int:
        """Return the first of `count` numbers for workers, which nobody else gets."""
        return int(self._ask(lambda: self._state.launchers.take(count)))

    def replaces_workers(self, yes: bool) -> None:
        """Say whether more workers come from this launcher: with too few members, the others wait for them."""
        self._ask(lambda: self._state.generations.replaces.update({"": yes}))

    def answer(self, asked: ManagementRequest, text: str, *, done: bool) -> None:
        """Answer one of `requests`."""

        def send() -> None:
            self._state.launchers.answer(asked, text, done=done)
            self._deliver()

        self._ask(send)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Call a function in the thread of the service. Ended by that thread, which waits for nothing."""

        async def answer() -> Any:
            return question()

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(_CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        tasks = [self._loop.create_task(self._accept()), self._loop.create_task(self._tick())]
        try:
            await self._over.wait()  # Ended by `close`, or with the process.
        finally:
            for task in (*tasks, *self._tasks):
                task.cancel()
            await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        # Ended by `_serve`, which cancels it.
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError:  # Too many open files, most likely: those of strangers are given back.
                self._end_oldest_stranger()
                await asyncio.sleep(0.05)
                continue
            if len(self._strangers) >= _MOST_STRANGERS:
                self._end_oldest_stranger()
            task = self._loop.create_task(self._handle(close_in_children(connection)))
            self._strangers[task] = None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda ended: self._strangers.pop(ended, None))

    def _end_oldest_stranger(self) -> None:
        if self._strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()

    async def _tick(self) -> None:
        # Ended by `_serve`, which cancels it.
        while True:
            delay_s = _TICK_S
            try:
                delay_s = self._state.tick(time.monotonic())
                self._deliver()
            except Exception:
                # A mistake of ours. The run must not go on unwatched because of it.
                traceback.print_exc()
            # A member whose connection has ended is looked at soon, and often.
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._disconnected.wait()  # Ended by the end of a connection, or the limit above.
                await asyncio.sleep(_DISCONNECTED_TICK_S)
            self._disconnected.clear()

    async def _handle(self, connection: socket.socket) -> None:
        """One connection, from its first byte to its end."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                set_timeouts(connection, self._patience_s)
                reader, writer = await self._streams(connection)
                if self._tls is None:
                    await prove_as_coordinator((reader, writer), self._secret)
                hello = await read_message(reader)
            if hello["op"] != "hello":
                raise ProtocolError("a member says hello first")
            self._strangers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
            await self._serve_member(hello, reader, writer)
        except WrongSecret:
            self._report_wrong_secret(connection)
        except (OSError, EOFError, ssl.SSLError, ProtocolError, Refused):
            pass  # Nobody is told why: who may know has the reason in a message.
        finally:
            connection.close()
            if writer is not None:
                with suppress(Exception):
                    writer.transport.abort()

    def _report_wrong_secret(self, connection: socket.socket) -> None:
        """Print once that somebody has another secret: a rank that has it sees only that the others do not come."""
        if not self._told_of_secret:
            self._told_of_secret = True
            print(
                f"tutti: the coordinator of this run has refused a process at {_peer(connection)}, which does not know "
                "its secret. If that is a rank of this run, give all ranks the same TUTTI_SECRET.",
                file=sys.stderr,
                flush=True,
            )

    async def _streams(self, connection: socket.socket) -> Streams:
        reader = asyncio.StreamReader(limit=1 << 16)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _serve_member(self, hello: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            record = self._state.connect(hello, time.monotonic())
        except Refused as refused:
            writer.write(frames.encode({"op": "refused", "reason": str(refused)}))
            async with asyncio.timeout(_HANDSHAKE_S):
                await writer.drain()
                await reader.read(1)  # Until the other end has read it and closes.
            raise
        member = record.description.id
        if (before := self._writers.get(member)) is not None:
            before.transport.abort()  # Its end has not come here yet.
        self._writers[member] = writer
        self._deliver()
        connection = writer.get_extra_info("socket")
        try:
            while True:
                # Ended by the member, by the kernel when its host does not answer, and by `_deliver` when it is lost.
                message = await read_message(reader)
                if self._writers.get(member) is not writer:
                    break  # It has connected anew, and has sent all that counts again.
                record.round_trip_s = round_trip_s(connection) or record.round_trip_s
                self._state.receive(member, message, time.monotonic())
                self._deliver()
        except ProtocolError as error:
            # Otherwise it would connect and send the same again, without end.
            reason = f"the coordinator cannot read what it sent: {error}"
            self._refused.add(writer)
            writer.write(frames.encode({"op": "refused", "reason": reason}))
            if writer.can_write_eof():
                writer.write_eof()
            async with asyncio.timeout(_REFUSAL_S):
                # Were bytes left unread, the kernel would reset the connection, and drop what was just written.
                while await reader.read(1 << 16):
                    pass
            raise
        finally:
            # A member that connected anew has another writer by now.
            if self._writers.get(member) is writer:
                del self._writers[member]
                self._state.disconnect(member, time.monotonic())
                self._disconnected.set()
                self._deliver()

    def _deliver(self) -> None:
        """Write what the state has to say."""
        for member, message in self._state.drain():
            writer = self._writers.get(member)
            if writer is None or writer.is_closing() or writer in self._refused:
                continue
            try:
                writer.write(frames.encode(message))
            except ProtocolError:  # Too long: this member cannot be served, and the others must be.
                writer.transport.abort()
                continue
            if message["op"] == "refused":
                writer.close()  # After what was written.
            elif writer.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
                writer.transport.abort()


def _peer(connection: socket.socket) -> str:
    """The address of the other end, for messages."""
    try:
        return str(connection.getpeername()[0])
    except OSError:  # It is gone already.
        return "an address that is gone"


async def read_message(reader: asyncio.StreamReader) -> Message:
    """Read one message. Raises `EOFError` at the end of the connection, `ProtocolError` for anything else."""
    header = await reader.readexactly(frames.HEADER.size)
    return frames.decode(await reader.readexactly(frames.length(header)))
