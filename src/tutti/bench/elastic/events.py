"""Events in workers of an elastic run: kills, stops and the like that a victim causes in itself; and newcomers."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tutti.launch.lab import namespaces
from tutti.world import Elasticity

_WAIT_S, _POLL_S = 40.0, 0.005
"""A worker that is started imports torch first."""
_MAX_AHEAD = 4
"""Strategies without a common step let workers be ahead of a victim by fewer steps, and otherwise wait for it."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _fail() -> None:
    raise RuntimeError("a mistake in the user's code")


def _cut() -> None:
    """Take down the link of this worker's host. The launcher puts it up again after the run."""
    namespaces.batch("ip", ["link set eth0 down"])


EVENTS: dict[str, Callable[[], None]] = {"kill": _kill, "stop": _stop, "leave": _leave, "fail": _fail, "cut": _cut}
"""The faults that a worker causes in itself, by name."""


class Newcomers:
    """Workers that come to a run which has begun. The others wait for them, so that training does not end before."""

    def __init__(self, count: int, folder: Path, elastic: Elasticity) -> None:
        """Wait for `count` workers."""
        self._count, self._folder, self._elastic = count, folder, elastic
        self._present = not count

    def come(self) -> None:
        """This worker is about to show its model: if it is new, say when that was."""
        if self._elastic.is_new:
            (self._folder / f"came-{os.environ['RANK']}").write_text(str(time.time()))
            self._present = True

    def await_from(self, step: int, now: int) -> None:
        """Wait until the new workers are in the world, or this generation is about to end.

        Args:
            step: that in which something happens to a victim.
            now: that of this worker. Nothing is waited for before all victims can have come to theirs.
        """
        if self._present or now <= step + _MAX_AHEAD:
            return
        member, deadline = self._elastic.member, time.monotonic() + _WAIT_S
        while True:
            assert member.generation is not None
            new = [each for each in member.generation.members if each.description.rank >= member.limits.expected]
            self._present = len(new) >= self._count
            if self._present or member.member.known.changes.get(member.name) == member.number:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no worker has come for {_WAIT_S:g} s")
            time.sleep(_POLL_S)
