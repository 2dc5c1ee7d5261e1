"""`Command`: a `tutti` command in a process of its own, whose output a test follows while it runs."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import warm


class Command:
    """A `tutti` command in a process of its own, and what it has printed."""

    def __init__(self, folder: Path, *words: str, prefix: Sequence[str] = (), **variables: str) -> None:
        """Start it in `folder`. `prefix`: what goes before the command, to run it in a network namespace."""
        self._process = subprocess.Popen(
            [*prefix, *warm.main_of("tutti.cli"), *words],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
        )
        self.lines: list[str] = []

    def until(self, *texts: str) -> str:
        """Read until each text was in a line, in any order; return the last line."""
        assert self._process.stdout is not None
        missing, line = set(texts), ""
        while missing:
            line = self._process.stdout.readline()
            assert line, self.lines
            self.lines.append(line)
            missing -= {text for text in missing if text in line}
        return line

    def give(self, text: str) -> None:
        """Write to its standard input, and close it."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Wait until it has ended; return its status."""
        assert self._process.stdout is not None
        self.lines += self._process.stdout.readlines()
        return self._process.wait(25)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):  # Nobody reads what was not written yet.
                stream.close()
