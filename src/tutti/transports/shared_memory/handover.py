"""Handing open files to the other ranks of a host, over Unix sockets.

How it works
------------
`exchange_files` is collective. Each rank

1. listens on a Unix socket whose name nobody can guess, and sets the name and a token as a value for the other members;
2. connects to the sockets of all others, and sends them their token with its own rank. Connecting needs nothing from
   the other side but that it listens. While the queue of a listener is full, it is tried again later: no rank waits
   for another here without answering others;
3. answers each connection that shows the token of its own socket with its file (SCM_RIGHTS), and takes the files that
   the others send.

When it returns, every rank has been given this rank's file, which may be closed then.

Both ends look whose process the other is (SO_PEERCRED): it must be that of the rank. So a name that was taken over
after its owner closed it gets no token, and a token that leaked opens nothing. A stranger has its connection closed, at
most `_MOST_STRANGERS` wait for their turn, and nothing that it sends is interpreted. A rank whose connection was closed
without a file asks again: it may have been closed for others. The names are abstract (they start with a zero byte):
there is no file that could be left behind.

The wait ends when all files are there, when a rank is gone or does not listen any more, or after the membership's
timeout.
"""

import os
import secrets
import select
import socket
import struct
import time
from contextlib import ExitStack

from tutti.errors import ConfigError
from tutti.transports.membership import Membership

_CHECK_S = 0.1
_MOST_STRANGERS = 256

_TOKEN_BYTES = 16
_REQUEST = struct.Struct(f"<{_TOKEN_BYTES}sI")
"""The token of the socket, and the rank of who asks."""
_FILE = struct.Struct("i")
"""A descriptor, as SCM_RIGHTS gives it."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED gives them."""


def exchange_files(membership: Membership, name: str, file: int) -> list[int]:
    """Give an open file to every other rank, and return a descriptor of every rank's, by rank. Collective.

    Args:
        name: of this exchange, unique in the membership's scope.
        file: this rank's. The list has a duplicate of it; the caller closes all.
    """
    with ExitStack() as stack:
        exchange = stack.enter_context(_Exchange(membership, file))
        membership.set(f"{name}/at/{membership.rank}", exchange.location)
        keys = [f"{name}/at/{rank}" for rank in range(membership.size)]
        exchange.finish(membership.await_values(keys, "memory of all ranks"))
        files, exchange.files = exchange.files, {}
        return [files[rank] for rank in range(membership.size)]


class _Exchange:
    """One rank's part in an exchange."""

    def __init__(self, membership: Membership, file: int) -> None:
        self._membership, self._file = membership, file
        self.files = {membership.rank: os.dup(file)}
        """Descriptors of the files that are here, by rank."""
        self._given = {membership.rank}
        """Ranks that have this rank's file."""
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._locations: list[str] = []
        self._to_ask: set[int] = set()
        """Ranks that have to be asked for their file."""
        self._asked: dict[int, tuple[socket.socket, int]] = {}
        """Connections on which files are awaited, each with the rank that sends it, by number."""
        self._strangers: dict[int, socket.socket] = {}
        """Connections that have not shown the token, by number; the oldest first."""
        self._poll = select.poll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        identifier = secrets.token_hex(16)
        self._listener.bind(f"\0tutti-{identifier}")
        self._listener.listen(4096)
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.POLLIN)
        self.location = f"{identifier} {self._token.hex()}"
        """What another rank needs to ask for the file: a secret of the job."""

    def __enter__(self) -> "_Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        sockets = [self._listener, *self._strangers.values(), *(asked for asked, _ in self._asked.values())]
        for opened in sockets:
            opened.close()
        for file in self.files.values():
            os.close(file)

    def finish(self, locations: list[str]) -> None:
        """Ask at all `locations`, answer, and take files, until all ranks have all."""
        self._locations = locations
        everyone, check_at = set(range(self._membership.size)), time.monotonic() + _CHECK_S
        self._to_ask = everyone - {self._membership.rank}
        deadline = check_at + self._membership.timeout.total_seconds()
        while self._to_ask or self.files.keys() != everyone or self._given != everyone:
            for rank in list(self._to_ask):
                self._ask(rank)
            for number, _ in self._poll.poll(1000 * _CHECK_S):
                if number == self._listener.fileno():
                    self._accept()
                elif number in self._asked:
                    self._take(*self._asked[number])
                elif number in self._strangers:
                    self._answer(self._strangers[number])
            if time.monotonic() > check_at:
                check_at = time.monotonic() + _CHECK_S
                self._poll.register(self._listener, select.POLLIN)  # After a pause; otherwise it changes nothing.
                self._check(deadline)

    def _check(self, deadline: float) -> None:
        """Raise if the others will not come any more."""
        membership = self._membership
        membership.member.check()
        if gone := membership.gone():
            raise membership.loss_error(gone)
        if time.monotonic() > deadline:
            here = self.files.keys() & self._given
            late = [str(number) for rank, number in enumerate(membership.world_ranks) if rank not in here]
            raise membership.timeout_error(f"rank {', '.join(late)} to share memory")

    def _is_process_of(self, rank: int, connection: socket.socket) -> bool:
        """Whether the other end of a connection is the process of a rank."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(credentials)
        return user == os.getuid() and process == self._membership.peers[rank].process.pid

    # Asking

    def _ask(self, rank: int) -> None:
        """Connect to a rank and ask for its file."""
        identifier, token = self._locations[rank].split()
        asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            asked.setblocking(False)
            asked.connect(f"\0tutti-{identifier}")
            if not self._is_process_of(rank, asked):
                raise ConnectionRefusedError("another process listens in its place")
            asked.send(_REQUEST.pack(bytes.fromhex(token), self._membership.rank))
        except BlockingIOError:
            asked.close()  # The queue of its listener is full. It stays in `_to_ask`.
        except (ConnectionResetError, BrokenPipeError):
            asked.close()  # Its listener had too many connections, or closes: to ask again tells.
        except OSError as error:  # It has given up, or its process has ended.
            asked.close()
            raise self._membership.explain_error(error, rank) from error
        else:
            self._to_ask.discard(rank)
            self._asked[asked.fileno()] = asked, rank
            self._poll.register(asked, select.POLLIN)

    def _take(self, asked: socket.socket, rank: int) -> None:
        """Take the file that a rank has sent."""
        try:
            # Closed on exec from the start: `socket.recv_fds` cannot do that.
            _, control, flags, _ = asked.recvmsg(1, socket.CMSG_SPACE(_FILE.size), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            control, flags = [], 0
        del self._asked[asked.fileno()]
        self._poll.unregister(asked)
        asked.close()
        files = [_FILE.unpack(data[: _FILE.size])[0] for _, kind, data in control if kind == socket.SCM_RIGHTS]
        if files:
            if rank in self.files:  # It was asked twice.
                os.close(self.files[rank])
            self.files[rank] = files[0]
        elif flags & socket.MSG_CTRUNC:
            sender = self._membership.peers[rank].rank
            raise ConfigError(
                f"rank {self._membership.world_rank}: no file descriptor is left for memory that rank {sender} shares. "
                "Raise the limit (ulimit -n), or open fewer files."
            )
        else:
            # It has given up, which asking again shows; or it had too many connections.
            self._to_ask.add(rank)

    # Answering

    def _accept(self) -> None:
        try:
            stranger, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptors left, most likely, which the poll would report at once again, without end.
            if self._strangers:
                self._drop(next(iter(self._strangers.values())))
            self._poll.unregister(self._listener)  # Until the next check.
            return
        stranger.setblocking(False)
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(next(iter(self._strangers.values())))
        self._strangers[stranger.fileno()] = stranger
        self._poll.register(stranger, select.POLLIN)
        self._answer(stranger)  # A rank has sent its request already, and so never waits behind strangers.

    def _answer(self, stranger: socket.socket) -> None:
        """Give the file to a rank that shows the token; let nobody else in."""
        try:
            request = stranger.recv(_REQUEST.size + 1)
            if len(request) == _REQUEST.size:
                token, rank = _REQUEST.unpack(request)
                if secrets.compare_digest(token, self._token) and self._may_have(rank, stranger):
                    socket.send_fds(stranger, [b"\0"], [self._file])
                    self._given.add(rank)
        except BlockingIOError:
            return  # It has sent nothing yet.
        except OSError:
            pass  # It went away again.
        self._drop(stranger)

    def _may_have(self, rank: int, connection: socket.socket) -> bool:
        """Whether a connection is that of another rank of this exchange."""
        is_other = rank < self._membership.size and rank != self._membership.rank
        return is_other and self._is_process_of(rank, connection)

    def _drop(self, stranger: socket.socket) -> None:
        del self._strangers[stranger.fileno()]
        self._poll.unregister(stranger)
        stranger.close()
