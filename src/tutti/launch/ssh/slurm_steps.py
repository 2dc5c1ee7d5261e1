"""The launcher "slurm": workers on the nodes of a Slurm job, started by an agent on each, as over ssh.

It runs inside a job (`sbatch`, `salloc`). Each agent is a step of the job: srun starts it on its node, and joins it to
this process as ssh does. Workers that are lost are replaced, and nodes that are lost are lost hosts.
"""

import os
import subprocess
from collections.abc import Mapping

from tutti.errors import ConfigError
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.launcher import check_fits
from tutti.launch.ssh.hosts import SshHost
from tutti.launch.ssh.launcher import SshLauncher

_COMMAND_S = 30.0


def on_slurm_nodes(text: str, workers: int | ElasticRun | None) -> SshLauncher:
    """Make the launcher "slurm"; `text` is the number of workers on each node, by default that of the job's tasks."""
    hosts = _hosts(text, os.environ)
    check_fits(sum(host.num_workers for host in hosts), workers, f"the nodes of this job, {len(hosts)} in all")
    return SshLauncher(hosts, _step_on)


def _hosts(text: str, environment: Mapping[str, str]) -> list[SshHost]:
    nodes = environment.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise ConfigError("the launcher 'slurm' runs inside a Slurm job: use tutti submit slurm, or salloc.")
    given = text or environment.get("SLURM_NTASKS_PER_NODE", "1")
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"--on slurm:N has the number of workers on each node, 1 or more; got '{given}'.")
    try:
        ended = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=_COMMAND_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"scontrol does not say which nodes '{nodes}' are ({error}).") from error
    return [SshHost(name, int(given)) for name in ended.stdout.split()]


def _step_on(host: SshHost) -> list[str]:
    """The words before a command that srun runs on a node, beside other steps, with all that the job has there."""
    words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--cpu-bind=none"]
    return [*words, "--unbuffered", "--kill-on-bad-exit=0", "--quiet", "sh", "-c"]
