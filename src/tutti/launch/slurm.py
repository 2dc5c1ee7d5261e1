"""`SlurmJob`: a training run as a Slurm batch script, and its submission.

The script starts one task per worker by srun; `tutti.init` reads the variables that srun sets. Some time before the
job's time is up, Slurm sends SIGUSR1 to the workers, and SIGTERM when another job takes the nodes. Workers that save
checkpoints write one more, and end with 128 plus the number of the signal. The script then puts the job back into the
queue, and its next start continues from that checkpoint (`job.restore`). After `scancel`, Slurm ends the script itself:
nothing is queued.

The whole is a text of thirty lines that users can read, keep and change. A package such as submitit would pickle a
function and its arguments, and poll for results through files; a training run needs neither.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tutti.errors import ConfigError
from tutti.launch.elastic_run import parse_workers
from tutti.launch.launcher import check_fits

_COMMAND_S = 60.0
ARRAY_NUMBER = "%a"
"""Stands for the number of the array's task in the arguments of the script."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What is run, and on what."""

    command: Sequence[str]
    """A script and its arguments."""
    nodes: int = 1
    workers_per_node: int = 1
    workers: str | None = None
    """MIN:MAX if workers may be lost and replaced; None if the job ends with the first loss."""
    cpus_per_worker: int | None = None
    time: str | None = None
    """Limit of the job's time, as sbatch has it."""
    partition: str | None = None
    account: str | None = None
    array: str | None = None
    """Numbers of the tasks of an array, such as 0-7 or 1,3,5%2: each is a run of its own."""
    notice_s: int = 120
    """How long before the end of its time the workers are asked to save their state."""
    requeues: int = 20
    """How often the job is put back into the queue."""
    name: str | None = None
    extra: Sequence[str] = ()
    """Further options of sbatch."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the workers."""

    def __post_init__(self) -> None:
        mistakes = [
            f"{name} must be {least} or more, got {value}"
            for name, value, least in (
                ("--nodes", self.nodes, 1),
                ("--workers-per-node", self.workers_per_node, 1),
                ("--cpus-per-worker", 1 if self.cpus_per_worker is None else self.cpus_per_worker, 1),
                ("--notice", self.notice_s, 1),
                ("--requeues", self.requeues, 0),
            )
            if value < least
        ]
        if self.workers is not None:
            try:
                check_fits(self.nodes * self.workers_per_node, parse_workers(self.workers, "--workers"), "these nodes")
            except ConfigError as error:
                mistakes.append(str(error).rstrip("."))
        if self.time is not None and not re.fullmatch(r"\d+(-\d+)?(:\d+){0,2}|UNLIMITED|INFINITE", self.time):
            mistakes.append(f"--time is minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, got '{self.time}'")
        if self.array is not None and not re.fullmatch(r"[\d,:-]+(%\d+)?", self.array):
            mistakes.append(f"--array has numbers such as 0-7 or 1,3,5%2, got '{self.array}'")
        if self.array is None and any(ARRAY_NUMBER in word for word in self.command):
            mistakes.append(f"{ARRAY_NUMBER} in the script's arguments is the number of an array's task: give --array")
        for text in (self.partition, self.account, self.name, *self.extra):
            if text is not None and ("\n" in text or not text.strip()):
                mistakes.append(f"an option of sbatch is one line of text, got {text!r}")
        mistakes += [
            f"--extra is an option of sbatch, such as --gres=gpu:2, got '{each}'"
            for each in self.extra
            if not _option(each).startswith("-")
        ]
        if mistakes:
            raise ConfigError("; ".join(mistakes) + ".")

    @property
    def job_name(self) -> str:
        """The name that squeue shows."""
        return self.name or re.sub(r"[^\w.-]", "-", Path(self.command[0]).stem)

    @property
    def output(self) -> str:
        """The file with the output of all workers, as sbatch has it."""
        return f"{self.job_name}-{'%A_%a' if self.array else '%j'}.out"

    def script(self, folder: str, python: str = sys.executable) -> str:
        """Return the batch script, which runs in `folder`."""
        given = {
            "job-name": self.job_name,
            "nodes": self.nodes,
            "ntasks-per-node": self.workers_per_node,
            "cpus-per-task": self.cpus_per_worker,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "array": self.array,
            "chdir": folder,
            "output": self.output,
        }
        options = [f"--{name}={_quoted(str(value))}" for name, value in given.items() if value is not None]
        options += ["--open-mode=append", "--requeue" if self.requeues else "--no-requeue"]
        options += [f"--signal=USR1@{self.notice_s}", *map(_option, self.extra)]
        cpus = [] if self.cpus_per_worker is None else [f"--cpus-per-task={self.cpus_per_worker}"]
        if self.workers is None:
            note = "# Each worker is a task. --wait: when one has ended, the others get time to save or to report."
            start = ["srun", "--label", "--kill-on-bad-exit=0", "--wait=60", *cpus, shlex.quote(python)]
        else:
            options.append("--no-kill")  # When a node fails.
            note = "# Workers that are lost are replaced."
            start = [shlex.quote(python), "-m", "tutti", "run", "--workers", self.workers]
            start += ["--on", f"slurm:{self.workers_per_node}"]
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "",
            note,
            "export PYTHONUNBUFFERED=1",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(self.variables.items())),
            " ".join([*start, *map(_word, self.command)]),
            "status=$?",
            "",
        ]
        if self.requeues:
            lines += [
                "# 128 + SIGUSR1 or SIGTERM: the workers were asked to stop, and have saved a checkpoint. The next",
                "# start of the job continues from there.",
                'case "$status" in 138 | 143)',
                f'    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.requeues} ] &&',
                '        scontrol requeue "$SLURM_JOB_ID" && sleep 60',
                "    ;;",
                "esac",
            ]
        return "\n".join([*lines, 'exit "$status"', ""])


def submit(script: str) -> str:
    """Submit a batch script; return the number of the job. If it is refused, the error says what the cluster has."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no sbatch here. Submit from a host of the Slurm cluster, or take the script of --print there."
        )
    # Slurm takes jobs that can never run, and lets them wait: so it is asked whether this one could.
    for option in ("--test-only", "--parsable"):
        ended = _run("sbatch", option, text=script)
        if ended.returncode:
            said = " ".join(re.sub(r"sbatch: error:|allocation failure:", "", ended.stderr).split())
            raise ConfigError(f"Slurm refuses the job: {said}.{describe_cluster()}")
    return ended.stdout.strip().partition(";")[0]


def describe_cluster() -> str:
    """What the cluster has, as a sentence that begins with a space; empty if it does not say."""
    ended = _run("sinfo", "-h", "-o", "%R|%D|%c|%l")
    rows = [line.split("|") for line in ended.stdout.splitlines() if line.count("|") == 3]
    if ended.returncode or not rows:
        return ""
    parts = (f"{name}: {nodes} nodes with {cpus} CPUs, at most {limit}" for name, nodes, cpus, limit in rows)
    return f" Its partitions: {'; '.join(parts)}."


def _run(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{command[0]} has not answered for {_COMMAND_S:g} s: Slurm's controller is away.") from error


def _option(text: str) -> str:
    """An option of sbatch, which users may copy with its comment mark."""
    return text.strip().removeprefix("#SBATCH").strip()


def _quoted(value: str) -> str:
    """A value of a #SBATCH line, which takes double quotes."""
    return f'"{value}"' if " " in value else value


def _word(text: str) -> str:
    """A word of the command, quoted for the shell; the number of the array's task is put in when the job runs."""
    if ARRAY_NUMBER not in text:
        return shlex.quote(text)
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in text.split(ARRAY_NUMBER))
