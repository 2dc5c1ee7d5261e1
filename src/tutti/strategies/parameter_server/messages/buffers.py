"""Pools of message buffers, which are reused instead of allocated for every push and pull."""

from collections import deque

from torch import Tensor

from tutti.collectives.compressed.messages import new_message


class BufferPool:
    """Buffers of one size. Any thread may take one and any thread may give it back (a deque needs no lock)."""

    def __init__(self, num_bytes: int, like: Tensor) -> None:
        """Make an empty pool of byte buffers; `like` says whether there are values or sizes only."""
        self._num_bytes, self._like = num_bytes, like
        self._free: deque[Tensor] = deque()

    def take(self) -> Tensor:
        """Return a free buffer, or a new one if there is none. Its contents are undefined."""
        try:
            return self._free.pop()
        except IndexError:
            return new_message(self._num_bytes, self._like)

    def give_back(self, buffer: Tensor) -> None:
        """Make a buffer free again; one of another size is dropped."""
        if buffer.numel() == self._num_bytes:
            self._free.append(buffer)
