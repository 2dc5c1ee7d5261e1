"""`SshLauncher`: workers on other hosts, which this process starts over ssh, and whose coordinator it serves.

How it works. On each host an agent runs (`tutti.launch.ssh.agent`), at the other end of an ssh connection
(`tutti.launch.ssh.connection`). All agents start at the same time. When all have reported, what is wrong on any of
them is one error; otherwise the fork servers of all hosts start to import, while the coordinator is placed here, at the
address that the hosts have come from: each of them says whether it reaches it.

A host is lost when its connection ends, and then so are its workers. In an elastic run, the workers that take their
places are started on the same host: each attempt connects anew, and counts as a lost worker if the host is still away.

The secret of the run is among the variables of each worker, which go through the standard input of ssh."""

import json
import os
import queue
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tutti.cluster.hosts import LOOPBACK
from tutti.coordination import Coordinator
from tutti.coordination.handshake import is_loopback
from tutti.errors import ConfigError
from tutti.launch.control_service import announce_run, serve_coordinator
from tutti.launch.control_settings import find_patience
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.host import interface_address, network_address
from tutti.launch.lab.placement import here
from tutti.launch.launcher import Launcher, Variables, check_fits
from tutti.launch.run_control import RunControl
from tutti.launch.run_store import RunStore
from tutti.launch.ssh.command import agent_command, own_python, passed_variables, remote_shell, ssh_environment
from tutti.launch.ssh.connection import HostConnection, RemoteProcess
from tutti.launch.ssh.frames import PROGRAM, REACH
from tutti.launch.ssh.hosts import SshHost, parse_hosts
from tutti.launch.ssh.report import problems_in
from tutti.launch.start import WORKER, Program, WorkerStarter, common_environment
from tutti.launch.supervisor_pipe import HOST

_ANSWER_S = 30.0
_SILENCE = 6.0
"""How many times the patience the launcher may be silent before an agent ends its workers."""


class SshLauncher(Launcher):
    """Starts workers on hosts that are reached over ssh."""

    def __init__(self, hosts: Sequence[SshHost], shell: Callable[[SshHost], list[str]] | None = None) -> None:
        """Start nothing yet. `shell`: what goes before a command to run it on a host; ssh by default."""
        self._hosts, self._shell = tuple(hosts), shell or ssh_to
        self._program: Program | None = None
        self._environment: dict[str, str] = {}
        self._connections: list[HostConnection] = []
        self._address = LOOPBACK
        """Of this host, as the others reach it."""
        self._starter: WorkerStarter | None = None
        """Of the store, which is served on this host."""
        self._store: RunStore | None = None
        self._announcement: Path | None = None

    @property
    def num_workers(self) -> int:
        """Number of workers on all hosts."""
        return sum(host.num_workers for host in self._hosts)

    def open(self, program: Program, variables: Variables) -> None:
        """Start an agent on every host, and refuse what could not work there."""
        self._program, self._environment = program, {**passed_variables(), **variables}
        for host in self._hosts:
            self._connections.append(self._connect(host))
        for connection in self._connections:
            connection.ready.wait()  # Ended by the connection's own deadline.
        self._check()
        for connection in self._connections:
            connection.send(PROGRAM, 0, program.payload or b"")

    def place_coordinator(self, variables: Variables, elastic: ElasticRun | None) -> RunControl:
        """Serve it in this process, on the interface that faces the hosts."""
        if elastic is not None and elastic.listen is not None:
            listening = None
        else:
            self._address = self._find_address()
            listening = _listener(self._address), self._address
        coordinator = serve_coordinator(listening, variables, elastic, self.num_workers)
        try:
            self._check_reached(coordinator)
        except BaseException:
            coordinator.close()
            raise
        self._address = coordinator.address
        self._announcement = announce_run(coordinator, variables, self.num_workers)
        return coordinator

    def place_store(self, variables: Variables) -> RunStore:
        """Serve it on this host, in a small process of its own if this one has not imported torch."""
        environment = common_environment(variables)
        self._starter = WorkerStarter(Program([], modules=WORKER), here(1), environment)
        self._store = RunStore(_listener(self._address), self._starter, environment)
        variables["MASTER_PORT"] = str(self._store.port)
        return self._store

    def start(self, slot: int, number: int, variables: Variables, files: Sequence[int]) -> RemoteProcess:
        """Have the agent of the slot's host start a worker. A host that was lost is connected to again."""
        host, local_rank = self._place(slot)
        connection = self._connections[host]
        if connection.end is not None:
            assert self._program is not None
            connection.close()
            connection = self._connections[host] = self._connect(self._hosts[host])
            connection.send(PROGRAM, 0, self._program.payload or b"")
        own = {
            HOST: self._hosts[host].name,
            "RANK": str(number),
            "WORLD_SIZE": str(self.num_workers),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self._hosts[host].num_workers),
            "MASTER_ADDR": self._address,
        }
        return connection.start(number, {**own, **variables}, files)

    def close(self) -> None:
        """End all agents, and what they have started."""
        if self._announcement is not None:
            self._announcement.unlink(missing_ok=True)
        try:
            if self._store is not None:
                self._store.close()
                self._store = None
            if self._starter is not None:
                self._starter.close()
        finally:
            self._close_connections()

    def _close_connections(self) -> None:
        closing, self._connections = self._connections, []
        for connection in closing:
            connection.ask_to_end()
        for connection in closing:
            if not connection.close():
                text = f"tutti: host {connection.name} has not confirmed that its workers have ended"
                print(text, file=sys.stderr, flush=True)

    def _connect(self, host: SshHost) -> HostConnection:
        program, folder = self._program, str(Path.cwd())
        assert program is not None
        script = _script_of(program)
        patience_s = find_patience({**os.environ, **self._environment}).total_seconds()
        hello: dict[str, Any] = {
            "environment": self._environment,
            "folder": folder,
            "script": script,
            "num_workers": host.num_workers,
            "silence_s": _SILENCE * patience_s,
            "program": {
                "arguments": list(program.arguments),
                "has_payload": program.payload is not None,
                "is_command": program.is_command,
                "modules": list(program.modules),
            },
        }
        command = [*self._shell(host), agent_command(folder, own_python())]
        check = partial(problems_in, script=script, folder=folder)
        try:
            return HostConnection(host.name, command, hello, check, patience_s, ssh_environment())
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]} ({error.strerror}): install it.") from error

    def _check(self) -> None:
        """Raise one error with all that is wrong on any host."""
        wrong = [(each.name, problem) for each in self._connections for problem in each.problems]
        seen: dict[str, str] = {}
        for each in self._connections:
            if not each.problems and (other := seen.setdefault(each.report["host_id"], each.name)) != each.name:
                wrong.append((each.name, f"this is the same host as {other}: give it once, with all its workers"))
        if wrong:
            number = len({name for name, _ in wrong})
            lines = "".join(f"\n  {name}: {problem}" for name, problem in wrong)
            raise ConfigError(f"{number} of {len(self._hosts)} hosts cannot take part:{lines}")

    def _find_address(self) -> str:
        """The address of this host that faces the others."""
        # What they see first: it is the right one of several interfaces. Behind a gateway it is none of this host's.
        seen = sorted((each.report["client"] for each in self._connections), key=is_loopback)
        named = (host.name for host in self._hosts)
        chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        candidates = [_on_interface(chosen), *filter(_is_own, seen), *map(_facing, named)]
        found = next((each for each in candidates if each is not None), None)
        if found is None:
            raise ConfigError(
                "this host has no network address by which the others could reach it. Start the run on one of them."
            )
        return found

    def _check_reached(self, coordinator: Coordinator) -> None:
        where = coordinator.address, coordinator.port
        for each in self._connections:
            each.send(REACH, 0, json.dumps(where).encode())
        wrong = []
        for each in self._connections:
            try:
                answer = each.answers.get(timeout=_ANSWER_S)
            except queue.Empty:
                answer = "no answer"
            if answer is not None:
                wrong.append(f"\n  {each.name}: {answer}")
        if wrong:
            raise ConfigError(
                f"{len(wrong)} of {len(self._hosts)} hosts cannot connect to this one, at {where[0]} port {where[1]}, "
                f"because of a firewall or another network:{''.join(wrong)}"
            )

    def _place(self, slot: int) -> tuple[int, int]:
        """Return the host of a slot, and the slot's number there."""
        left = slot
        for number, host in enumerate(self._hosts):
            if left < host.num_workers:
                return number, left
            left -= host.num_workers
        turn, number = divmod(left, len(self._hosts))
        return number, self._hosts[number].num_workers + turn


def ssh_to(host: SshHost) -> list[str]:
    """The words before a command that ssh runs on a host."""
    return [*remote_shell(), host.target]


def over_ssh(text: str, workers: int | ElasticRun | None) -> SshLauncher:
    """Make the launcher "ssh"; `text` names the hosts, such as a:2,b:4."""
    hosts = parse_hosts(text)
    check_fits(sum(host.num_workers for host in hosts), workers, f"the hosts '{text}'")
    if isinstance(workers, ElasticRun) and workers.start is not None:
        raise ConfigError("--start has no effect with --hosts, which says how many workers are started: leave it out.")
    return SshLauncher(hosts)


def _script_of(program: Program) -> str | None:
    """The file that every host must have; for a function, the one that defines the caller's main module."""
    if program.is_command:
        return None
    if program.payload is None:
        return program.arguments[0]
    return getattr(sys.modules["__main__"], "__file__", None)


def _is_own(address: str) -> bool:
    """Whether an address is one of this host's, on which it can listen."""
    try:
        _listener(address).close()
    except OSError:
        return False
    return bool(address)


def _on_interface(name: str) -> str | None:
    """The address of an interface that the user has named; None if this host has none of that name."""
    with suppress(OSError):
        return interface_address(name) if name else None
    return None


def _facing(host: str) -> str | None:
    with suppress(OSError):
        return network_address(host)
    return None


def _listener(address: str) -> socket.socket:
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family)
    try:
        listener.bind((address, 0))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return listener
