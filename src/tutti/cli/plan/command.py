"""The arguments of `tutti plan`."""

from typing import Annotated

import typer

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import (
    DataFolder,
    Epochs,
    InputShape,
    JsonFile,
    ModelText,
    RecipeOptions,
    parse_recipe_options,
    refuse_given,
)
from tutti.cli.plan.request import ALLOWED, MEASURED, PlanRequest, parse_allowed, parse_failures, parse_memory
from tutti.cluster import PRESETS

_Workers = Annotated[
    int, typer.Option("--workers", "-n", help="Number of training workers. Dedicated servers are added on top.")
]
_Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help=f"Cluster: {', '.join(PRESETS)}, a TOML file, or '{MEASURED}' for processes on this machine.",
    ),
]
_Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="|".join(ALLOWED),
        help="Also consider strategies that change the result (compression, staleness, local steps).",
    ),
]
_Batch = Annotated[
    int | None, typer.Option("--batch", help="Samples per worker and step. Default: the recipe's batch.")
]
_GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", help="Samples per step over all workers, instead of --batch.")
]
_TargetAccuracy = Annotated[
    float | None,
    typer.Option(
        metavar="FRACTION",
        help="Also train the recipe in virtual time and report the time to this test accuracy, such as 0.97.",
    ),
]
_PerLayer = Annotated[
    bool, typer.Option("--per-layer", metavar="", help="Also show how Poseidon would exchange each layer.")
]
_Meshes = Annotated[
    bool, typer.Option("--meshes", metavar="", help="Also compare data, tensor and pipeline parallelism.")
]
_Mtbf = Annotated[
    str | None,
    typer.Option(
        "--mtbf",
        metavar="DURATION",
        help="Compare strategies by their useful work if a worker fails this often on average, such as 2h.",
    ),
]
_Repair = Annotated[
    str | None,
    typer.Option(
        "--repair", metavar="DURATION", help="With --mtbf: time until a lost worker is replaced.", show_default="10m"
    ),
]
_Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Memory of a worker, such as 16GiB. Implies --meshes."),
]


def plan(
    context: typer.Context,
    model: ModelText,
    workers: _Workers = 16,
    cluster: _Cluster = "ethernet-1g",
    allow: _Allow = None,
    batch: _Batch = None,
    global_batch: _GlobalBatch = None,
    input_shape: InputShape = None,
    option: RecipeOptions = None,
    target_accuracy: _TargetAccuracy = None,
    epochs: Epochs = None,
    data: DataFolder = None,
    per_layer: _PerLayer = False,
    meshes: _Meshes = False,
    memory: _Memory = None,
    mtbf: _Mtbf = None,
    repair: _Repair = None,
    json_file: JsonFile = None,
) -> None:
    """Predict the step time of every strategy on a cluster, and recommend one, or not to distribute at all.

    A step is measured on this machine first.

    The computation is assumed to take as long on the cluster, divided by the speed of its hosts.

    Example: tutti plan mnist-mlp --workers 8 --cluster ethernet-1g --allow lossy
    """
    check_writable(json_file)
    if target_accuracy is None:
        # An environment variable may name the folder all the same: then it serves to find the length of the run.
        refuse_given(context, ("data",), "changes nothing without --target-accuracy.")
    if mtbf is None:
        refuse_given(context, ("repair",), "changes nothing without --mtbf.")
    request = PlanRequest(
        model=model,
        options=parse_recipe_options(option),
        workers=workers,
        cluster=cluster,
        allow_lossy=parse_allowed(allow),
        batch=batch,
        global_batch=global_batch,
        input_shape=input_shape,
        target_accuracy=target_accuracy,
        epochs=epochs,
        data=data,
        per_layer=per_layer,
        # A limit on memory is a question about meshes: under data parallelism every worker holds the whole model.
        meshes=meshes or memory is not None,
        memory_bytes=parse_memory(memory),
        failures=parse_failures(mtbf, repair),
    )
    # Imports torch, so it comes last: a mistake in the arguments is reported at once.
    from tutti.cli.plan.planning import run

    write_json(json_file, run(request.resolved()))
