"""Hosts with an ssh server each: network namespaces of a lab, with a server that only a key of the test opens.

Everything is in a folder of the test: keys, configurations, known hosts. Nothing of the user's ~/.ssh is read.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tutti.launch.lab.lab import Lab, LabSpec, address
from tutti.launch.lab.namespaces import missing
from tutti.launch.ssh.command import SSH

_PORT = 22
_SERVER = "/usr/sbin/sshd"
_START_S = 20.0


def lacking() -> str | None:
    """What this machine lacks for such hosts, in one line; None if nothing."""
    if not (os.path.exists(_SERVER) and shutil.which("ssh") and shutil.which("ssh-keygen")):
        return "needs an ssh server and client: apt-get install openssh-server openssh-client"
    return missing()


@dataclass
class SshHosts:
    """Hosts with ssh servers, of which the one in front, the switch of their lab, reaches all."""

    lab: Lab
    folder: Path
    servers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the hosts, which are known on all of them."""
        return [f"host{number}" for number in range(self.lab.spec.hosts)]

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which Tutti uses the ssh client of these tests."""
        return {SSH: f"ssh -F {self.folder / 'client'}"}

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command, on the switch."""
        namespace = self.lab.placement.store_host.namespace
        assert namespace is not None
        return ["ip", "netns", "exec", namespace, *command]

    def start(self, number: int, first: str = "") -> None:
        """Start the server of a host; `first` is a shell command that it runs before, and sees the effect of."""
        namespace = self.lab.placement.hosts[number].namespace
        assert namespace is not None
        # Mounts of `first` are seen by this server and what it starts alone: ip gives it a mount namespace of its own.
        shell = f"{first or ':'}; exec {_SERVER} -D -e -f {self.folder / 'server'} -E {self.folder / f'log{number}'}"
        self.servers[number] = subprocess.Popen(["ip", "netns", "exec", namespace, "sh", "-c", shell])
        deadline = time.monotonic() + _START_S
        while not self._listens(number):
            assert time.monotonic() < deadline, (self.folder / f"log{number}").read_text()
            time.sleep(0.02)

    def stop(self, number: int) -> None:
        """End the server of a host. Its connections stay."""
        if (server := self.servers.pop(number, None)) is not None:
            server.kill()
            server.wait(_START_S)

    def set_link(self, number: int, *, up: bool) -> None:
        """Put the link of a host up or down."""
        namespace = self.lab.placement.hosts[number].namespace
        subprocess.run(
            ["ip", "-n", str(namespace), "link", "set", "eth0", "up" if up else "down"], check=True, timeout=20
        )

    def _listens(self, number: int) -> bool:
        probe = f"import socket; socket.create_connection(('{address(number)}', {_PORT}), 5).close()"
        ended = subprocess.run(
            self.inside(["python3", "-S", "-c", probe]), capture_output=True, check=False, timeout=_START_S
        )
        return ended.returncode == 0


@contextmanager
def ssh_hosts(folder: Path, spec: str = "hosts=2", start: bool = True) -> Iterator[SshHosts]:
    """Make hosts with servers. They are gone at the end."""
    with Lab(LabSpec.parse(spec)) as lab:
        hosts = SshHosts(lab, folder)
        _configure(folder, _PORT, {name: address(number) for number, name in enumerate(hosts.names)})
        try:
            for number in range(lab.spec.hosts if start else 0):
                hosts.start(number)
            yield hosts
        finally:
            for number in list(hosts.servers):
                hosts.stop(number)


@contextmanager
def ssh_to_this_machine(folder: Path) -> Iterator[str]:
    """Serve ssh on loopback; the value is the ssh command that reaches it, for "localhost"."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _configure(folder, port, {"localhost": "127.0.0.1"})
    server = subprocess.Popen([_SERVER, "-D", "-e", "-f", str(folder / "server"), "-E", str(folder / "log")])
    try:
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 5).close()
                break
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.02)
        yield f"ssh -F {folder / 'client'}"
    finally:
        server.kill()
        server.wait(_START_S)


def _configure(folder: Path, port: int, addresses: dict[str, str]) -> None:
    """Write keys and configurations of server and client into a folder."""
    Path("/run/sshd").mkdir(exist_ok=True)  # Where the server's unprivileged process is locked in.
    for name in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=20)
    listen = "ListenAddress 127.0.0.1\n" if port != _PORT else ""
    (folder / "server").write_text(
        f"Port {port}\n{listen}HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nPidFile none\nMaxStartups 100\n"
    )
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    known = "".join(f"{name},{own},[{own}]:{port},[{name}]:{port} {key}\n" for name, own in addresses.items())
    (folder / "known_hosts").write_text(known)
    aliases = "".join(f"Host {name}\n  HostName {own}\n" for name, own in addresses.items())
    (folder / "client").write_text(
        f"{aliases}Host *\n  Port {port}\n  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
        f"  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  StrictHostKeyChecking yes\n"
    )
