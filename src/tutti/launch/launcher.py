"""The contract of launchers: where the workers of a run are, and how they are started there.

How it works. A `Supervisor` judges the workers of every run: which have ended well, which are lost, which take their
place. A `Launcher` starts them for it, and knows nothing of that. The calls come from one thread, in this order:

1. `open`: reach the hosts, and refuse, with all that is wrong at once, what could not run there;
2. `place_coordinator` and `place_store`: serve what workers find each other by, where all of them reach it;
3. `start`, any number of times, also while others run. It returns at once. The worker's output and its messages to the
   supervisor go into pipes, whose other ends the supervisor reads: a launcher of other hosts writes into them what
   comes from there;
4. `close`, after all workers were told to end: nothing of the run is left anywhere when it returns.

A process that cannot be reached any more has ended (`poll` says so): otherwise the supervisor would wait for it.
Before `poll` first returns a status, all that the worker has reported is in its pipe.

Launchers of other packages: an entry point of the group "tutti.launchers", which names a `MakeLauncher`."""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from tutti.errors import ConfigError
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.fork_client import ForkChannel
from tutti.launch.run_control import RunControl
from tutti.launch.run_store import RunStore
from tutti.launch.start import Program

Variables = dict[str, str]
"""Environment variables of a run, beside those that a process on each host has anyway."""


class WorkerProcess(Protocol):
    """A worker that a launcher has started."""

    @property
    def pid(self) -> int:
        """Its process id on its own host; 0 while that is not known."""
        ...

    def poll(self) -> int | None:
        """Return its status, as `subprocess.Popen.poll` does; None if it runs."""
        ...

    def wait(self, timeout: float) -> None:
        """Wait until it has ended; `subprocess.TimeoutExpired` if it has not within `timeout` seconds."""
        ...

    def describe_end(self) -> str:
        """How it ended, as the predicate of a sentence about it."""
        ...

    def send_signal(self, sign: signal.Signals) -> None:
        """Send a signal to the worker alone. Does nothing once it has ended."""
        ...

    def signal_group(self, sign: signal.Signals) -> None:
        """Send a signal to the worker and all that it has started, even if it has ended itself."""
        ...


class Launcher(ABC):
    """Starts the workers of one run."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers that are started at the beginning: one for each slot from 0 on."""

    @abstractmethod
    def open(self, program: Program, variables: Variables) -> None:
        """Reach the hosts, which will run `program`. Raises `ConfigError` with all that is wrong on any of them."""

    @abstractmethod
    def place_coordinator(self, variables: Variables, elastic: ElasticRun | None) -> RunControl:
        """Serve the run's coordinator; add the variables by which workers find it (`serve_coordinator`)."""

    @abstractmethod
    def place_store(self, variables: Variables) -> RunStore | None:
        """Serve torch's store for process groups of the script's own at MASTER_ADDR and MASTER_PORT; None for none."""

    @abstractmethod
    def start(self, slot: int, number: int, variables: Variables, files: Sequence[int]) -> WorkerProcess:
        """Start a worker; return at once. One that cannot start is a process that ends with a status other than 0.

        Args:
            slot: its place. The first `num_workers` are filled at the beginning; further ones are added to the hosts in
                turn. The place of a lost worker is used again.
            number: its RANK.
            variables: those of the run. They overrule what the host says, and what the launcher adds to it (RANK,
                WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR).
            files: where its stdout, its stderr and its messages to the supervisor go. The caller closes them; a
                launcher that needs them longer copies them, and closes its copies when there is no more to come.
        """

    @abstractmethod
    def close(self) -> None:
        """End all that is left of the run. May be called again, and if `open` has failed."""

    @property
    def ends(self) -> ForkChannel | None:
        """What tells of the ends of workers, for a selector; None if only `poll` does."""
        return None

    def link(self, host: int, *, up: bool) -> None:
        """Put the network link of a host up or down."""
        raise ConfigError(f"the link of host {host} cannot be put {'up' if up else 'down'}: only those of a lab can.")


class MakeLauncher(Protocol):
    """Makes a launcher from the text of `tutti run --on NAME:TEXT`."""

    def __call__(self, text: str, workers: int | ElasticRun | None) -> Launcher:
        """Return a launcher that is not open yet; `ConfigError` if text and number of workers do not fit.

        Args:
            text: what follows the name, without the colon; may be empty.
            workers: the number of workers, or how they may come and go; None if the user has not said.
        """
        ...


def signal_group(group: int, sign: signal.Signals) -> None:
    """Send a signal to a process group of this host, if there is one of this number."""
    with suppress(ProcessLookupError):
        os.killpg(group, sign)


def check_fits(places: int, workers: int | ElasticRun | None, where: str) -> None:
    """Refuse a number of workers that contradicts the number of places of the hosts, which are described by `where`."""
    if isinstance(workers, ElasticRun):
        if not workers.minimum <= places <= workers.maximum:
            raise ConfigError(
                f"{workers.minimum} to {workers.maximum} workers do not fit {where}, on which {places} are started. "
                f"Give limits with {places} between them."
            )
    elif workers not in (None, places):
        raise ConfigError(f"{workers} workers do not fit {where}. Leave workers out, or make it {places}.")
