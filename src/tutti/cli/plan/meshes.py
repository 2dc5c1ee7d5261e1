"""The output of `tutti plan --meshes`: predicted step times of data, tensor and pipeline parallelism."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.cluster import format_size, format_time
from tutti.plan.mesh import MeshPlan
from tutti.plan.mesh.choose import fits


def show(plan: MeshPlan, total_samples: int, console: Console) -> None:
    """Print the table of meshes, the meshes that are impossible and why, and the recommendation."""
    console.print(_table(plan, total_samples))
    for shape, reason in plan.refused.items():
        console.print(f"not {shape}: {reason}", highlight=False)
    console.print(plan.reason, highlight=False)


def _table(plan: MeshPlan, total_samples: int) -> Table:
    """A row per mesh; the recommended mesh comes first."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"Meshes, {total_samples} samples per step")
    table.caption = "tensor: all-reduces of split layers; waiting: for other pipeline stages"
    if plan.memory_bytes is not None:
        table.caption += "\n*: too large for the memory of a worker"
    for heading in ("data", "tensor", "pipe"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("step", "computing", "tensor", "waiting", "exposed", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for prediction in plan.predictions:
        shape = (str(prediction.mesh.shape[axis]) for axis in ("data", "tensor", "pipe"))
        times = (
            prediction.step_s,
            prediction.computing_s,
            prediction.tensor_s,
            prediction.waiting_s,
            prediction.exposed_s,
        )
        too_large = "" if fits(prediction, plan.memory_bytes) else "*"
        table.add_row(*shape, *map(format_time, times), f"{format_size(round(prediction.memory_bytes))}{too_large}")
    return table
