"""`tutti submit kubernetes`: manifests against the schemas of `tests/schemas`, and what kubectl gets."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from command import Call
from tutti.launch.kubernetes import KubernetesJob, manifest_text

SCHEMAS = json.loads((Path(__file__).parents[1] / "schemas" / "kubernetes.json").read_text())

IMAGE = ("--image", "registry.example/train:1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def parsed(text: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(text))


def check(manifest: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = {**SCHEMAS, "$ref": f"#/$defs/{manifest['kind']}"}
    jsonschema.Draft202012Validator(schema).validate(manifest)


def test_a_job_set(folder: Path, call: Call) -> None:
    words = ("--nodes", "4", "--workers-per-node", "2", "--gpus-per-node", "2", "--claim", "runs:/runs")
    words += ("--namespace", "vision", "--strategy", "bmuf:every=16", "--checkpoint-every", "5m", "--restarts", "3")
    ended = call("submit", "kubernetes", *IMAGE, *words, "--print", "train.py", "--text", "$(HOME): 'x' # \"y\"")
    assert ended.out.startswith("# Once, before it: kubectl create secret generic train-secret --from-literal=secret=")
    (manifest,) = parsed(ended.out)
    check(manifest)
    assert manifest["metadata"] == {"name": "train", "namespace": "vision"}
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 3}
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (4, 4, "Indexed")
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == [
        "torchrun",
        "--nnodes=4",
        "--node-rank=$(NODE_RANK)",
        "--master-addr=train-node-0-0.train",
        "--master-port=29500",
        "--nproc-per-node=2",
        "train.py",
        "--text",
        "$$(HOME): 'x' # \"y\"",
    ]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert (variables["TUTTI_STRATEGY"], variables["TUTTI_CHECKPOINT_EVERY"]) == ("bmuf:every=16", "5m")
    assert {"name": "shared", "mountPath": "/runs"} in container["volumeMounts"]


def test_a_train_job_and_its_runtime(folder: Path, call: Call) -> None:
    words = ("--kind", "trainjob", "--nodes", "2", "--workers-per-node", "8")
    runtime, job = parsed(call("submit", "kubernetes", *IMAGE, *words, "--print", "train.py", "--lr", "0.1").out)
    check(runtime)
    check(job)
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert job["spec"]["trainer"] == {
        "numNodes": 2,
        "numProcPerNode": 8,
        "command": ["torchrun", "--nproc-per-node=8", "train.py", "--lr", "0.1"],
    }


def test_the_schemas_refuse_what_is_wrong() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    job = KubernetesJob(command=["train.py"], image="x")
    (manifest,) = job.job_set()
    for path, value in ((("spec", "restarts"), 3), (("apiVersion",), "v1"), (("spec", "replicatedJobs"), [])):
        wrong = json.loads(json.dumps(manifest))
        inner = wrong
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


def test_what_is_written_is_what_was_meant() -> None:
    """Also texts that YAML would take for something else."""
    texts = ["no", "1", "1e3", "~", "", " x", "a: b", "- a", "#", "é", "null", "[a]", "a\nb", "*x", "ok", "/a/b.c"]
    job = KubernetesJob(command=["train.py", *texts], image="x")
    (manifest,) = parsed(manifest_text(job.job_set(), job))
    assert manifest == job.job_set()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--nodes", "0", "--restarts", "-1"],
            "--nodes must be 1 or more, got 0; --restarts must be 0 or more, got -1",
        ),
        (
            ["--name", "My Run"],
            "--name is up to 40 small letters, digits and '-', and begins with a letter; got 'My Run'",
        ),
        (["--claim", "runs"], "--claim is CLAIM:/PATH, got 'runs'"),
        (["--kind", "pod"], "--kind is jobset or trainjob, got 'pod'"),
    ],
)
def test_what_cannot_work(words: list[str], message: str, call: Call, folder: Path) -> None:
    ended = call("submit", "kubernetes", *IMAGE, *words, "--print", "train.py")
    assert ended.status == 2
    assert message in " ".join(ended.err.split())


def test_no_image_and_no_kubectl(folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--image is missing" in call("submit", "kubernetes", "train.py").err
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no kubectl here" in call("submit", "kubernetes", *IMAGE, "train.py").err


@pytest.mark.parametrize("works", [True, False])
def test_kubectl_gets_the_manifest(works: bool, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "kubectl"
    ends = "echo jobset/train created" if works else "echo 'no matches for kind JobSet' >&2; exit 1"
    tool.write_text(f'#!/bin/sh\necho "$@" > given; cat > manifest\n{ends}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    ended = call("submit", "kubernetes", *IMAGE, "train.py")
    assert (folder / "given").read_text() == "apply -f -\n"
    assert parsed((folder / "manifest").read_text())[0]["kind"] == "JobSet"
    assert (ended.status, ended.out) == ((0, "jobset/train created\n") if works else (2, ""))
    assert works or "Kubernetes refuses the job: no matches for kind JobSet" in ended.err


def test_a_dockerfile(folder: Path, call: Call) -> None:
    text = call("submit", "kubernetes", "--dockerfile", "train.py").out
    assert re.search(
        r"^FROM python:3.11-slim\nWORKDIR /work\nRUN pip install .*torch==[\d.]+ tutti-train==\S+\nCOPY", text
    )
    (folder / "requirements.txt").touch()
    assert (
        "pip install --no-cache-dir -r requirements.txt" in call("submit", "kubernetes", "--dockerfile", "train.py").out
    )
