"""Training over MPI, and Open MPI between network namespaces that stand for hosts."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from tutti.errors import ConfigError
from tutti.launch.lab.ownership import Claim
from tutti.launch.mpirun import available, mpirun, mpirun_in_lab

pytestmark = pytest.mark.xdist_group("labs")

SCRIPTS = Path(__file__).parents[1] / "scripts"

MEGABITS = 100


@pytest.mark.skipif(not available(), reason="needs mpi4py and mpirun: pip install 'tutti-train[mpi]'")
def test_training_over_mpi() -> None:
    """With torch.distributed on Tutti first, then with Tutti itself."""
    ended = subprocess.run(
        mpirun(3, [*warm.python(), str(SCRIPTS / "torch_over_mpi.py")]),
        env={**os.environ, "TUTTI_TRANSPORT": "mpi", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    digests = re.findall(r"of 3, local \d, \d+ steps, MpiTransport: ([0-9a-f]{64})", ended.stdout)
    assert len(digests) == 3
    assert len(set(digests)) == 1


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, timeout=10, stdin=subprocess.DEVNULL, capture_output=True)


def shape(namespace: str, device: str) -> None:
    """Let so much leave a device and no more."""
    rate = ["tbf", "rate", f"{MEGABITS}mbit", "burst", "64kb", "latency", "100ms"]
    ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *rate)


@pytest.fixture
def lab() -> Iterator[tuple[list[str], list[str]]]:
    """Two namespaces and the wire between them, 100 Mbit/s each way: their names and addresses."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))) or not available():
        pytest.skip("needs root, ip, tc and unshare, and tutti-train[mpi]")
    # As labs are named, with a living owner: tests beside this one see whose they are, and no lab that starts removes
    # them as orphans.
    claim = Claim.mine("mpi")
    names = [claim.host(number) for number in range(2)]
    addresses = ["10.77.9.1", "10.77.9.2"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
            for name, address in zip(names, addresses, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
                ip("-n", name, "link", "set", "wire", "up")
                ip("-n", name, "link", "set", "lo", "up")
                shape(name, "wire")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel or container has no namespaces to give: {error.stderr}")
        yield names, addresses
    finally:
        for name in names:
            if Path("/run/netns", name).exists():
                ip("netns", "delete", name)


@pytest.mark.parametrize(("ranks_per_host", "transport", "name"), [(1, "mpi", "rabenseifner"), (2, "mpi:ring", "ring")])
def test_ranks_in_namespaces(lab: tuple[list[str], list[str]], ranks_per_host: int, transport: str, name: str) -> None:
    names, addresses = lab
    argv = [*warm.python(), str(SCRIPTS / "reduce_over_mpi.py"), transport]
    with mpirun_in_lab(names, addresses, argv, ranks_per_host=ranks_per_host) as command:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=55, check=False, stdin=subprocess.DEVNULL
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = sorted((json.loads(line) for line in ended.stdout.splitlines()), key=lambda it: it["rank"])
    assert [it["host"] for it in told] == [host for host in names for _ in range(ranks_per_host)]
    assert {it["hosts"] for it in told} == {2}
    assert {it["name"] for it in told} == {name}
    # Each host sends at least 2 (n - 1) / n of the tensor; the shaper may let its burst and a little more pass.
    size = len(told)
    least_s = 2 * (size - 1) / size * 2**22 * 8 / (MEGABITS * 1e6)
    small_s, large_s = (max(it["seconds"][number] for it in told) for number in range(2))
    assert large_s > 0.9 * least_s
    assert small_s < large_s / 3


def test_hosts_without_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 2 and 1"), mpirun_in_lab(["a", "b"], ["10.77.9.1"], ["true"]):
        pass
