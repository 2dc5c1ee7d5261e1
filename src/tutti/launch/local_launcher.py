"""`LocalLauncher`: workers on this machine, or on the hosts of a lab, which are network namespaces of it."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tutti.errors import ConfigError
from tutti.launch.control_service import announce_run, serve_coordinator
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.fork_client import ForkChannel, ForkedProcess, describe_status
from tutti.launch.lab import namespaces
from tutti.launch.lab.lab import Lab, LabSpec
from tutti.launch.lab.placement import ProcessPlacement, here
from tutti.launch.launcher import Launcher, Variables, check_fits, signal_group
from tutti.launch.out_of_memory import oom_kills, suspected_oom
from tutti.launch.run_control import RunControl
from tutti.launch.run_store import RunStore
from tutti.launch.start import Process, Program, WorkerStarter, common_environment


class LocalProcess:
    """A worker of this machine (`WorkerProcess`). It is the leader of its own session, and so of its group."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._oom_kills = oom_kills()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its status, or None if it runs."""
        return self._process.poll()

    def wait(self, timeout: float) -> None:
        """Wait until it has ended; `subprocess.TimeoutExpired` if it has not within `timeout` seconds."""
        self._process.wait(timeout)

    def describe_end(self) -> str:
        """How it ended, as the predicate of a sentence about it."""
        status = self._process.returncode
        end = self._process.describe_end() if isinstance(self._process, ForkedProcess) else describe_status(status)
        return end + (suspected_oom(self._oom_kills) if status == -signal.SIGKILL else "")

    def send_signal(self, sign: signal.Signals) -> None:
        """Send a signal to the worker alone."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sign)

    def signal_group(self, sign: signal.Signals) -> None:
        """Send a signal to the worker and all that it has started."""
        signal_group(self.pid, sign)


class LocalLauncher(Launcher):
    """Starts workers as processes of this machine."""

    def __init__(self, placement: ProcessPlacement, at_close: Callable[[], None] | None = None) -> None:
        """Start workers where `placement` says, and call `at_close` when none is left."""
        self.placement = placement
        self._at_close = at_close
        self._starter: WorkerStarter | None = None
        self._store: RunStore | None = None
        self._announcement: Path | None = None
        """The file by which `tutti status` finds this run."""

    @property
    def num_workers(self) -> int:
        """Number of places of all hosts."""
        return self.placement.num_workers

    @property
    def ends(self) -> ForkChannel | None:
        """The connection to the fork server; None if all workers are spawned."""
        return None if self._starter is None else self._starter.channel

    def open(self, program: Program, variables: Variables) -> None:
        """Start the fork server: it imports while the rest is set up."""
        self._starter = WorkerStarter(program, self.placement, self._environment(variables))

    def place_coordinator(self, variables: Variables, elastic: ElasticRun | None) -> RunControl:
        """Serve it in this process."""
        listen = None if elastic is None else elastic.listen
        listening = None if listen is not None else (self.placement.listen(), self.placement.address)
        coordinator = serve_coordinator(listening, variables, elastic, self.num_workers)
        if self.placement.store_host.namespace is None:  # Otherwise its address is one that this machine cannot reach.
            self._announcement = announce_run(coordinator, variables, self.num_workers)
        return coordinator

    def place_store(self, variables: Variables) -> RunStore:
        """Serve it in this process, or in one of the fork server."""
        assert self._starter is not None
        namespace = self.placement.store_host.namespace
        listening, environment = self.placement.listen(), self._environment(variables)
        self._store = RunStore(listening, self._starter, environment, namespace)
        variables["MASTER_PORT"] = str(self._store.port)
        return self._store

    def start(self, slot: int, number: int, variables: Variables, files: Sequence[int]) -> LocalProcess:
        """Fork or spawn a worker."""
        assert self._starter is not None
        own = self.placement.environment(slot, number)
        return LocalProcess(self._starter.start(slot, {**self._environment(variables), **own, **variables}, files))

    def close(self) -> None:
        """End what runs in the fork server, and the store."""
        if self._announcement is not None:
            self._announcement.unlink(missing_ok=True)
        try:
            if self._store is not None:
                self._store.close()
        finally:
            if self._starter is not None:
                self._starter.close()  # The fork server then kills what it forked, if that has not been done.
            if self._at_close is not None:
                self._at_close()

    def link(self, host: int, *, up: bool) -> None:
        """Put the link of a lab's host up or down."""
        namespaces.batch("ip", [f"link set eth0 {'up' if up else 'down'}"], self.placement.hosts[host].namespace)

    def _environment(self, variables: Variables) -> Variables:
        return common_environment(variables, self.num_workers)


def on_this_machine(text: str, workers: int | ElasticRun | None) -> LocalLauncher:
    """Make the launcher "local"; two workers unless the number is given."""
    if text:
        raise ConfigError(f"the launcher 'local' has no options, got '{text}'.")
    if isinstance(workers, ElasticRun):
        return LocalLauncher(here(workers.num_started))
    return LocalLauncher(here(2 if workers is None else workers))


def in_lab(lab: Lab, workers: int | ElasticRun | None) -> LocalLauncher:
    """Make a launcher on the hosts of a lab, which has its own number of workers."""
    check_fits(lab.placement.num_workers, workers, describe_lab(lab))
    return LocalLauncher(lab.placement)


def in_new_lab(text: str, workers: int | ElasticRun | None) -> LocalLauncher:
    """Make the launcher "lab": a lab as `text` describes it, which is removed at the end."""
    spec = LabSpec.parse(text)
    check_fits(spec.num_workers, workers, f"the lab '{spec}'")
    lab = Lab(spec)
    return LocalLauncher(lab.placement, lab.close)


def describe_lab(lab: Lab) -> str:
    """A lab and its hosts, for messages."""
    return f"the lab '{lab.name}': it has {lab.spec.hosts} hosts with {lab.spec.ranks_per_host} each"
