"""`tutti submit`: a script as a job of a cluster's scheduler."""

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.options import CheckpointEvery, checked_every
from tutti.cli.run_options import Arguments, Script, StrategyText
from tutti.errors import ConfigError

app = typer.Typer(help="Submit a script as a job of a cluster's scheduler.", no_args_is_help=True)

_SCRIPT_LAST = {"allow_interspersed_args": False, "ignore_unknown_options": False}

WorkersPerNode = Annotated[int, typer.Option("--workers-per-node", metavar="N", help="Number of workers on each node.")]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="MIN:MAX",
        help="Replace lost workers, and go on without lost nodes as long as MIN workers are left.",
    ),
]
Nodes = Annotated[int, typer.Option("--nodes", "-N", metavar="N", help="Number of nodes.")]
PrintOnly = Annotated[
    bool, typer.Option("--print", metavar="", help="Print what would be submitted, and submit nothing.")
]
Time = Annotated[
    str | None,
    typer.Option("--time", metavar="TIME", help="Limit of the job's time, as sbatch has it: 30, 4:00:00, 2-0."),
]
Partition = Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Partition of the cluster.")]
Account = Annotated[str | None, typer.Option("--account", metavar="NAME", help="Account that the job is charged to.")]
Array = Annotated[
    str | None,
    typer.Option(
        "--array",
        metavar="NUMBERS",
        help="One run for each number, such as 0-7. %a in the script's arguments is the number.",
    ),
]
Extra = Annotated[
    list[str] | None,
    typer.Option(
        "--extra", metavar="OPTION", help="Further option of sbatch, such as --gres=gpu:2. May be given several times."
    ),
]
Notice = Annotated[
    int,
    typer.Option("--notice", metavar="SECONDS", help="How long before its time is up the job saves its state."),
]
Requeues = Annotated[
    int, typer.Option("--requeues", metavar="N", help="How often a job that was stopped is put back into the queue.")
]
CpusPerWorker = Annotated[
    int | None, typer.Option("--cpus-per-worker", metavar="N", help="Number of cores for each worker.")
]

Name = Annotated[str | None, typer.Option("--name", help="Name of the job. Default: that of the script.")]
Image = Annotated[str | None, typer.Option("--image", metavar="NAME", help="Container image with the script.")]
GpusPerNode = Annotated[int, typer.Option("--gpus-per-node", metavar="N", help="Number of GPUs on each node.")]
Claim = Annotated[
    str | None,
    typer.Option("--claim", metavar="CLAIM:/PATH", help="PersistentVolumeClaim that all pods share, for checkpoints."),
]
Kind = Annotated[
    str, typer.Option("--kind", metavar="KIND", help="What to make: jobset, or trainjob with its runtime for Kubeflow.")
]
Namespace = Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="Namespace of the cluster.")]
Restarts = Annotated[
    int, typer.Option("--restarts", metavar="N", help="How often the job is started again after a failure.")
]
Dockerfile = Annotated[
    bool, typer.Option("--dockerfile", metavar="", help="Print a Dockerfile for the image, and submit nothing.")
]


@app.command("slurm", context_settings=_SCRIPT_LAST)
def slurm(
    script: Script,
    args: Arguments = None,
    nodes: Nodes = 1,
    workers_per_node: WorkersPerNode = 1,
    workers: Workers = None,
    cpus_per_worker: CpusPerWorker = None,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    array: Array = None,
    name: Name = None,
    extra: Extra = None,
    notice: Notice = 120,
    requeues: Requeues = 20,
    strategy: StrategyText = None,
    checkpoint_every: CheckpointEvery = None,
    print_only: PrintOnly = False,
) -> None:
    """Write a batch script for Slurm, and submit it. Options come before the script.

    Example: tutti submit slurm --nodes 4 --workers-per-node 2 --time 4:00:00 train.py

    A job whose time is up, or whose nodes another job takes, saves a checkpoint and continues when it is started again.
    """
    from tutti.launch.slurm import SlurmJob, submit

    if not Path(script).is_file():
        raise ConfigError(f"there is no script '{script}' in {Path.cwd()}.")
    job = SlurmJob(
        command=[script, *(args or [])],
        nodes=nodes,
        workers_per_node=workers_per_node,
        workers=workers,
        cpus_per_worker=cpus_per_worker,
        time=time,
        partition=partition,
        account=account,
        array=array,
        notice_s=notice,
        requeues=requeues,
        name=name,
        extra=extra or [],
        variables=_variables(strategy, checkpoint_every, nodes * workers_per_node),
    )
    text = job.script(str(Path.cwd()))
    if print_only:
        typer.echo(text, nl=False)
        return
    number = submit(text)
    output = job.output.replace("%j", number).replace("%A", number)
    typer.echo(f"job {number} was submitted; its output comes into {output}")


@app.command("kubernetes", context_settings=_SCRIPT_LAST)
def kubernetes(
    script: Script,
    args: Arguments = None,
    image: Image = None,
    nodes: Nodes = 1,
    workers_per_node: WorkersPerNode = 1,
    gpus_per_node: GpusPerNode = 0,
    claim: Claim = None,
    kind: Kind = "jobset",
    name: Name = None,
    namespace: Namespace = None,
    restarts: Restarts = 20,
    dockerfile: Dockerfile = False,
    strategy: StrategyText = None,
    checkpoint_every: CheckpointEvery = None,
    print_only: PrintOnly = False,
) -> None:
    """Write a JobSet or a TrainJob for Kubernetes, and apply it with kubectl. Options come before the script.

    Example: tutti submit kubernetes --image registry/train --nodes 4 --workers-per-node 2 --print train.py
    """
    from tutti.launch import kubernetes as manifests

    if not Path(script).is_file():
        raise ConfigError(f"there is no script '{script}' in {Path.cwd()}.")
    if dockerfile:
        typer.echo(manifests.dockerfile(Path.cwd()), nl=False)
        return
    if image is None:
        raise ConfigError("--image is missing: the container image in which the script is. --dockerfile prints one.")
    if kind not in ("jobset", "trainjob"):
        raise ConfigError(f"--kind is jobset or trainjob, got '{kind}'.")
    job = manifests.KubernetesJob(
        command=[script, *(args or [])],
        image=image,
        nodes=nodes,
        workers_per_node=workers_per_node,
        gpus_per_node=gpus_per_node,
        claim=claim,
        restarts=restarts,
        name=name,
        namespace=namespace,
        variables=_variables(strategy, checkpoint_every, nodes * workers_per_node),
    )
    text = manifests.manifest_text(job.job_set() if kind == "jobset" else job.train_job(), job)
    typer.echo(text if print_only else manifests.apply(text), nl=False)


def _variables(strategy: str | None, checkpoint_every: str | None, num_workers: int) -> dict[str, str]:
    """The environment variables that stand for options of `tutti run`."""
    from tutti.cli.run import checked_strategy

    variables = {} if strategy is None else {"TUTTI_STRATEGY": checked_strategy(strategy, num_workers)}
    if checkpoint_every is not None:
        variables["TUTTI_CHECKPOINT_EVERY"] = checked_every(checkpoint_every)
    return variables
