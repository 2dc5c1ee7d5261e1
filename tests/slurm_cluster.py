"""A Slurm cluster of one host, in a folder of its own: munged, slurmctld and slurmd, started by hand on free ports."""

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
_START_S = 40.0


def lacking() -> str | None:
    """What this machine lacks for such a cluster, in one line; None if nothing."""
    if "TUTTI_TEST_SLURM" not in os.environ:
        return "takes minutes: make test-slurm runs it"
    if os.geteuid() != 0:
        return "needs root, to start Slurm's daemons"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]:
        return f"needs Slurm ({', '.join(missing)} missing): make test-slurm installs it"
    return None


@contextmanager
def slurm_cluster(folder: Path, cpus: int = 8) -> Iterator[dict[str, str]]:
    """Start the cluster; the value is the variable by which Slurm's commands find it."""
    key, munge_socket = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    folder.chmod(0o755)
    ports = _free_ports(2)
    host = socket.gethostname()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(
        f"""ClusterName=tutti
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={munge_socket}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=15
MinJobAge=300
ReturnToService=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES State=UP MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes={host} State=UP MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
    )
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    # The daemons serve several tests, so they do not belong to the one that started them (conftest.py).
    everything = {name: value for name, value in os.environ.items() if name != "TUTTI_TEST_RUN"} | environment
    commands = [
        ["/usr/sbin/munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}",
         f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", f"--log-file={folder}/munged.log"],
        ["/usr/sbin/slurmctld", "-D", "-i", "-L", str(folder / "slurmctld.log")],
        ["/usr/sbin/slurmd", "-D", "-L", str(folder / "slurmd.log")],
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            log = (folder / f"{Path(command[0]).name}.out").open("wb")
            with log:
                daemons.append(subprocess.Popen(command, env=everything, stdout=log, stderr=log))
        _wait(folder, everything)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(15)


def _wait(folder: Path, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        ended = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False, timeout=20
        )
        if "idle" in ended.stdout:
            return
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("*.[lo][ou][gt]")))
        assert time.monotonic() < deadline, f"{ended.stdout}{ended.stderr}\n{logs}"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Free ports below those that the kernel gives to connections, which might take them before the daemons do."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(12_000, 20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found += [port] if port not in found else []
    return found
