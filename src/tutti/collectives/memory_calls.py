"""`MemoryCalls`: the exchange of a collective call in shared memory, for ranks of one host that all take part.

How it works
------------
Every rank has a page that all ranks map (`SharedMemoryRounds`). A call is one round:

    all ranks:  write the request to the own page, publish it, wait for those of all others
    root:       reads all requests, writes the answer to its page, publishes it
    others:     wait for the root's answer, and read it

A page begins with the length of its request and that of the answer, in fields of their own: all ranks read all lengths
of requests while the root writes the answer. A request or an answer that does not fit leaves only its length. All ranks
see that, and all of them make this call by messages.

Waits. Those for requests and for the answer end when a rank that is late is lost, or after the transport's timeout. An
error ends the rank's part in all later calls, as it leaves ranks in different rounds (`CollectiveCalls` keeps it).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.transports import SharesAll, SharesMemory, Transport

if TYPE_CHECKING:
    from tutti.transports.shared_memory.rounds import SharedMemoryRounds

_PAGE_BYTES = 2**17
_REQUEST, _ANSWER, _HEAD_BYTES = 0, 1, 16
"""Places of the two lengths, and the bytes of both."""
_ROOT = 0


class MemoryCalls:
    """Collective calls among all ranks of a transport that shares memory."""

    @classmethod
    def of(cls, transport: Transport) -> "MemoryCalls | None":
        """Allocate the pages; None where ranks share no memory. Collective."""
        # In virtual time messages take the time of the simulated host.
        if transport.cluster is not None or not isinstance(transport, SharesMemory):
            return None
        if not isinstance(transport, SharesAll):
            return None
        from tutti.transports.shared_memory.rounds import SharedMemoryRounds  # It imports a compiler: slow.

        return cls(SharedMemoryRounds(transport, _PAGE_BYTES, ("call",), "make the same call"))  # type: ignore[arg-type]

    def __init__(self, rounds: "SharedMemoryRounds") -> None:
        self._rounds = rounds
        self._pages: dict[int, list[_Page]] = {}
        """The pages of all ranks, of even and of odd rounds."""

    def exchange(self, request: Tensor, answer: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
        """Return what the root makes of the requests of all ranks; None if the call must be made by messages.

        Raises `RankLost` or `DeadlineExceeded` if a rank does not come.
        """
        rounds = self._rounds
        rounds.await_writable().wait()
        pages = self._present_pages()
        pages[rounds.rank].write(_REQUEST, request)
        rounds.publish_input("call", 0, torch.uint8).wait()
        requests = [page.read(_REQUEST) for page in pages]
        found = None
        if all(each is not None for each in requests):
            if rounds.rank == _ROOT:
                pages[_ROOT].write(_ANSWER, answer(requests))  # type: ignore[arg-type]
                rounds.publish_result()
            else:
                rounds.await_result(_ROOT).wait()
            found = pages[_ROOT].read(_ANSWER)
            # A copy: the page is written again in the round after the next.
            found = None if found is None else found.clone()
        rounds.finish()
        return found

    def _present_pages(self) -> list["_Page"]:
        half = self._rounds.number % 2
        if half not in self._pages:
            self._pages[half] = [_Page(buffer) for buffer in self._rounds.buffers(torch.uint8)]
        return self._pages[half]

    def late_ranks(self) -> Sequence[int]:
        """Ranks that have not made the call that this one is in."""
        return self._rounds.late_ranks()


class _Page:
    """The memory of one rank, with the lengths of its request and its answer and the content of one of them."""

    def __init__(self, memory: Tensor) -> None:
        self._lengths = memory[:_HEAD_BYTES].view(torch.int64).numpy()
        self._content = memory[_HEAD_BYTES:]

    def write(self, what: int, content: Tensor) -> None:
        """Write a request or an answer, as far as there is room for it, and its length."""
        length = self._lengths[what] = content.numel()
        if length <= self._content.numel():
            self._content[:length].copy_(content)

    def read(self, what: int) -> Tensor | None:
        """Return a request or an answer, in the page; None if it had no room there."""
        length = int(self._lengths[what])
        return self._content[:length] if length <= self._content.numel() else None
