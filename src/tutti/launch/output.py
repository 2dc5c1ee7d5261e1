"""Output of workers: whole lines, each with its rank before it."""

import sys

_MAX_LINE_BYTES = 65_536


class RankOutput:
    """One output stream of a worker. Prints whole lines; an unfinished one waits for its end, up to a limit."""

    def __init__(self, rank: int, *, is_stderr: bool) -> None:
        self._rank = rank
        self._is_stderr = is_stderr
        self._unfinished = bytearray()

    def write(self, data: bytes) -> None:
        """Print the lines that `data` completes. A carriage return ends a line too, as progress bars use it."""
        # Up to the last line that is complete. Both outputs of all workers share a terminal, and half lines would mix.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(self._unfinished) + len(data) < _MAX_LINE_BYTES:
            self._unfinished += data
            return
        # A line without an end that has become too long is printed in parts, so that memory stays bounded.
        end = end or len(data)
        text = bytes(self._unfinished + data[:end])
        self._unfinished[:] = data[end:]
        self._print(text)

    def finish(self) -> None:
        """Print what is left of a line without an end."""
        text = bytes(self._unfinished)
        self._unfinished.clear()
        self._print(text)

    def _print(self, data: bytes) -> None:
        if not data:
            return
        # Looked up now: a test, or a notebook, may have replaced it since the worker started.
        target = sys.stderr if self._is_stderr else sys.stdout
        text = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        for line in text.rstrip("\n").split("\n"):
            print(f"[rank {self._rank}] {line}", file=target)
        target.flush()
