"""`KubernetesJob`: a training run as a JobSet, or as a TrainJob of Kubeflow's, and the Dockerfile of its image.

Every node is a pod that runs torchrun, which starts the workers of its node and tells them who they are; `tutti.init`
reads that. The first pod is reached by the name that a JobSet gives it. If a pod fails or is evicted, the whole set is
started again, and continues from its last checkpoint (`job.restore`) on the volume that all pods share. Before a pod is
taken away its workers get SIGTERM, and time to save.

The secret of the run is a Secret of the cluster's, which the user makes: a manifest is often kept in a repository.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tutti
from tutti.errors import ConfigError

_PORT = 29_500
_GRACE_S = 60
_COMMAND_S = 60.0

_TRAINER = "trainer.kubeflow.org"

_NO_TEXTS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
"""Texts that YAML reads as values of other types."""

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What is run, and on what."""

    command: Sequence[str]
    """A script and its arguments, in the working folder of the image."""
    image: str
    nodes: int = 1
    workers_per_node: int = 1
    gpus_per_node: int = 0
    claim: str | None = None
    """A volume that all pods share, CLAIM:/PATH: the name of a PersistentVolumeClaim, and where the pods see it."""
    restarts: int = 20
    """How often the run is started again after a failure."""
    name: str | None = None
    namespace: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the workers."""

    def __post_init__(self) -> None:
        mistakes = [
            f"{name} must be {least} or more, got {value}"
            for name, value, least in (
                ("--nodes", self.nodes, 1),
                ("--workers-per-node", self.workers_per_node, 1),
                ("--gpus-per-node", self.gpus_per_node, 0),
                ("--restarts", self.restarts, 0),
            )
            if value < least
        ]
        # Names of pods add up to 20 letters to it, and have 63 at most.
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.job_name):
            mistakes.append(
                "--name is up to 40 small letters, digits and '-', and begins with a letter; "
                f"got '{self.job_name}'{'' if self.name else ' from the name of the script'}"
            )
        if not self.image.strip() or " " in self.image:
            mistakes.append(f"--image is the name of a container image, got '{self.image}'")
        if self.claim is not None and not re.fullmatch(r"[a-z0-9.-]+:/\S+", self.claim):
            mistakes.append(f"--claim is CLAIM:/PATH, got '{self.claim}'")
        if mistakes:
            raise ConfigError("; ".join(mistakes) + ".")

    @property
    def job_name(self) -> str:
        """The name of what is made in the cluster."""
        return self.name or re.sub(r"[^a-z0-9-]", "-", Path(self.command[0]).stem.lower())

    @property
    def secret_name(self) -> str:
        """The name of the cluster's Secret with the run's secret."""
        return f"{self.job_name}-secret"

    def job_set(self) -> list[Manifest]:
        """Return the manifest of a JobSet."""
        first = f"{self.job_name}-node-0-0.{self.job_name}"
        rendezvous = [f"--nnodes={self.nodes}", "--node-rank=$(NODE_RANK)"]
        rendezvous += [f"--master-addr={first}", f"--master-port={_PORT}"]
        rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        pod = self._pod([{"name": "NODE_RANK", "valueFrom": rank}], self._torchrun(rendezvous))
        job = {
            "parallelism": self.nodes,
            "completions": self.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": pod},
        }
        spec = {
            "failurePolicy": {"maxRestarts": self.restarts},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        }
        return [
            {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": self._metadata(), "spec": spec}
        ]

    def train_job(self) -> list[Manifest]:
        """Return the manifests of a TrainingRuntime and of a TrainJob that uses it."""
        step = {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}
        template = {"metadata": step, "spec": {"backoffLimit": 0, "template": {"spec": self._pod([], None)}}}
        runtime = {
            "mlPolicy": {"numNodes": self.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": self.restarts},
                    "replicatedJobs": [{"name": "node", "template": template}],
                }
            },
        }
        job = {
            "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": self.job_name},
            # Kubeflow gives torchrun the numbers of nodes and where the first one is, in variables.
            "trainer": {
                "numNodes": self.nodes,
                "numProcPerNode": self.workers_per_node,
                "command": self._torchrun([]),
            },
        }
        api, metadata = f"{_TRAINER}/v1alpha1", self._metadata()
        return [
            {"apiVersion": api, "kind": "TrainingRuntime", "metadata": metadata, "spec": runtime},
            {"apiVersion": api, "kind": "TrainJob", "metadata": metadata, "spec": job},
        ]

    def _metadata(self) -> Manifest:
        return {"name": self.job_name} | ({} if self.namespace is None else {"namespace": self.namespace})

    def _torchrun(self, rendezvous: Sequence[str]) -> list[str]:
        # Kubernetes would put variables in place of what looks like $(NAME).
        words = [word.replace("$(", "$$(") for word in self.command]
        return ["torchrun", *rendezvous, f"--nproc-per-node={self.workers_per_node}", *words]

    def _pod(self, variables: Sequence[Manifest], command: Sequence[str] | None) -> Manifest:
        secret = {"secretKeyRef": {"name": self.secret_name, "key": "secret"}}
        given = {"PYTHONUNBUFFERED": "1", **self.variables}
        container: Manifest = {
            "name": "node",
            "image": self.image,
            **({} if command is None else {"command": list(command)}),
            "env": [
                *variables,
                {"name": "TUTTI_SECRET", "valueFrom": secret},
                *({"name": name, "value": value} for name, value in given.items()),
            ],
            # Workers of a pod sum in shared memory, of which containers have 64 MB otherwise.
            "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
        }
        volumes: list[Manifest] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
        if self.gpus_per_node:
            container["resources"] = {"limits": {"nvidia.com/gpu": self.gpus_per_node}}
        if self.claim is not None:
            name, _, path = self.claim.partition(":")
            volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": name}})
            container["volumeMounts"].append({"name": "shared", "mountPath": path})
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _GRACE_S,
            "containers": [container],
            "volumes": volumes,
        }


def manifest_text(manifests: Sequence[Manifest], job: KubernetesJob) -> str:
    """Return manifests as YAML, with what has to be there before them."""
    comment = (
        "# Once, before it: kubectl create secret generic "
        f"{job.secret_name} --from-literal=secret=$(openssl rand -hex 32)\n"
    )
    return comment + "---\n".join("".join(f"{line}\n" for line in _yaml(each)) for each in manifests)


def _yaml(value: Any) -> list[str]:
    """Lines of YAML for mappings, lists, and plain values, which are written as in JSON where need be."""
    if isinstance(value, Mapping) and value:
        lines = []
        for name, each in value.items():
            inner = _yaml(each)
            if isinstance(each, Mapping | list) and each:
                lines += [f"{_plain(name)}:", *(f"  {line}" for line in inner)]
            else:
                lines.append(f"{_plain(name)}: {inner[0]}")
        return lines
    if isinstance(value, list) and value:
        return [f"{'- ' if not number else '  '}{line}" for each in value for number, line in enumerate(_yaml(each))]
    return [_plain(value) if isinstance(value, str) else json.dumps(value)]


def _plain(text: str) -> str:
    """A text without quotes where YAML takes it for one."""
    is_plain = re.fullmatch(r"[A-Za-z/][\w./-]*", text) and text.lower() not in _NO_TEXTS
    return text if is_plain else json.dumps(text)


def dockerfile(folder: Path) -> str:
    """Return a Dockerfile for the scripts in a folder, with the versions of this installation."""
    torch = version("torch").partition("+")[0]
    lines = ["FROM python:3.11-slim", "WORKDIR /work"]
    lines.append(f"RUN pip install --no-cache-dir torch=={torch} tutti-train=={tutti.__version__}")
    if (folder / "requirements.txt").is_file():
        lines += ["COPY requirements.txt .", "RUN pip install --no-cache-dir -r requirements.txt"]
    return "\n".join([*lines, "COPY . .", ""])


def apply(text: str) -> str:
    """Have kubectl make what the manifests say; return what it prints."""
    if shutil.which("kubectl") is None:
        raise ConfigError("there is no kubectl here: install it, or use --print and apply the manifest elsewhere.")
    try:
        ended = subprocess.run(
            ["kubectl", "apply", "-f", "-"],
            input=text,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"kubectl has not answered for {_COMMAND_S:g} s: the cluster is away.") from error
    if ended.returncode:
        raise ConfigError(f"Kubernetes refuses the job: {' '.join(ended.stderr.split())}")
    return ended.stdout
