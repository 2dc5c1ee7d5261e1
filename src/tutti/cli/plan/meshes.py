"""`tutti plan --meshes`: which of data, tensor and pipe."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.cluster import format_size, format_time, parse_size
from tutti.errors import ConfigError
from tutti.plan.mesh import MeshPlan
from tutti.plan.mesh.choose import fits


def memory_limit(text: str | None) -> int | None:
    """Bytes that a worker has, if that was said."""
    limit = None if text is None else parse_size(text)
    if limit is not None and limit < 1:
        raise ConfigError(f"--memory is what a worker has, such as 16GiB, got {text}.")
    return limit


def show(plan: MeshPlan, total_samples: int, console: Console) -> None:
    """A table, what cannot be, and what to use."""
    console.print(_table(plan, total_samples))
    for shape, why in plan.refused.items():
        console.print(f"not {shape}: {why}", highlight=False)
    console.print(plan.reason, highlight=False)


def _table(plan: MeshPlan, total_samples: int) -> Table:
    """Every mesh, the one to use first."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"meshes, {total_samples} samples a step")
    table.caption = "tensor, waiting: sums between those who split layers, and for other stages"
    if plan.memory_bytes is not None:
        table.caption += "; * too large"
    for heading in ("data", "tensor", "pipe"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("step", "computing", "tensor", "waiting", "exposed", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in plan.predictions:
        shape = (str(each.mesh.shape[axis]) for axis in ("data", "tensor", "pipe"))
        times = (each.step_s, each.computing_s, each.tensor_s, each.waiting_s, each.exposed_s)
        too_large = "" if fits(each, plan.memory_bytes) else "*"
        table.add_row(*shape, *map(format_time, times), f"{format_size(round(each.memory_bytes))}{too_large}")
    return table
