"""Handing open files to the other ranks of a host, over Unix sockets.

How it works
------------
`exchange_files` is collective. Each rank

1. listens on a Unix socket whose name nobody can guess, and sets the name and a token as a value for the other members;
2. connects to the sockets of all others, and sends them their token with its own rank. Connecting needs nothing from
   the other side but that it listens, so no rank waits for another here;
3. answers each connection that shows the token of its own socket with its file (SCM_RIGHTS), and takes the files that
   the others send.

When it returns, every rank has been given this rank's file, which may be closed then.

Only processes of the same user are let in (SO_PEERCRED), and only members of the job know the token. A stranger has its
connection closed, at most `_MOST_STRANGERS` wait for their turn, and nothing that it sends is interpreted. The names
are abstract (they start with a zero byte): there is no file that could be left behind.

The wait ends when all files are there, when a rank is gone, or after the membership's timeout.
"""

import os
import secrets
import select
import socket
import struct
import time
from contextlib import ExitStack

from tutti.transports.membership import Membership

_CHECK_S = 0.1
_MOST_STRANGERS = 256

_TOKEN_BYTES = 16
_REQUEST = struct.Struct(f"<{_TOKEN_BYTES}sI")
"""The token of the socket, and the rank of who asks."""
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
        for rank, location in enumerate(membership.await_values(keys, "memory of all ranks")):
            if rank != membership.rank:
                exchange.ask(rank, location)
        exchange.finish()
        files, exchange.files = exchange.files, {}
        return [files[rank] for rank in range(membership.size)]


class _Exchange:
    """One rank's part in an exchange."""

    def __init__(self, membership: Membership, file: int) -> None:
        self._membership, self._file = membership, file
        self.files = {membership.rank: os.dup(file)}
        """Descriptors of the files that are here, by rank."""
        self._given: set[int] = set()
        """Ranks that have this rank's file."""
        self._token = secrets.token_bytes(_TOKEN_BYTES)
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

    def ask(self, rank: int, location: str) -> None:
        """Connect to a rank and ask for its file."""
        identifier, token = location.split()
        asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked[asked.fileno()] = asked, rank
        try:
            # Blocks only while the other's queue of connections is full, no longer than this.
            asked.settimeout(self._membership.timeout.total_seconds())
            asked.connect(f"\0tutti-{identifier}")
            asked.send(_REQUEST.pack(bytes.fromhex(token), self._membership.rank))
        except OSError as error:  # It has given up, or its process has ended.
            raise self._membership.explain_error(error) from error
        asked.setblocking(False)
        self._poll.register(asked, select.POLLIN)

    def finish(self) -> None:
        """Answer and take files until all ranks have all."""
        size, check_at = self._membership.size, time.monotonic() + _CHECK_S
        deadline = check_at + self._membership.timeout.total_seconds()
        while len(self.files) < size or len(self._given) < size - 1:
            for number, _ in self._poll.poll(1000 * _CHECK_S):
                if number == self._listener.fileno():
                    self._accept()
                elif number in self._asked:
                    self._take(*self._asked[number])
                elif number in self._strangers:
                    self._answer(self._strangers[number])
            if time.monotonic() > check_at:
                check_at = time.monotonic() + _CHECK_S
                self._check(deadline)

    def _check(self, deadline: float) -> None:
        """Raise if the others will not come any more."""
        membership = self._membership
        membership.check()
        if gone := membership.gone():
            raise membership.loss_error(gone)
        if time.monotonic() > deadline:
            here = self.files.keys() & (self._given | {membership.rank})
            late = [str(number) for rank, number in enumerate(membership.world_ranks) if rank not in here]
            raise membership.timeout_error(f"rank {', '.join(late)} to share memory")

    def _accept(self) -> None:
        try:
            stranger, _ = self._listener.accept()
        except OSError:
            return  # It went away again.
        stranger.setblocking(False)
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(next(iter(self._strangers.values())))
        self._strangers[stranger.fileno()] = stranger
        self._poll.register(stranger, select.POLLIN)

    def _answer(self, stranger: socket.socket) -> None:
        """Give the file to a rank that shows the token; let nobody else in."""
        try:
            request = stranger.recv(_REQUEST.size + 1)
            credentials = stranger.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, user, _ = _CREDENTIALS.unpack(credentials)
            if user == os.getuid() and len(request) == _REQUEST.size:
                token, rank = _REQUEST.unpack(request)
                if secrets.compare_digest(token, self._token) and rank < self._membership.size:
                    socket.send_fds(stranger, [b"\0"], [self._file])
                    self._given.add(rank)
        except OSError:
            pass  # It went away again.
        self._drop(stranger)

    def _drop(self, stranger: socket.socket) -> None:
        del self._strangers[stranger.fileno()]
        self._poll.unregister(stranger)
        stranger.close()

    def _take(self, asked: socket.socket, rank: int) -> None:
        """Take the file that a rank has sent."""
        try:
            _, files, _, _ = socket.recv_fds(asked, 1, 1)
        except OSError:
            files = []
        del self._asked[asked.fileno()]
        self._poll.unregister(asked)
        asked.close()
        # Without a file the rank has given up: `_check` says why.
        if files:
            os.set_inheritable(files[0], False)
            self.files[rank] = files[0]
