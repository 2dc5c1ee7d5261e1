"""The table of `tutti plan --per-layer`: how Poseidon would exchange each layer, and what else it could do."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tutti.cluster import Cluster, format_size, format_time
from tutti.cost import Placement
from tutti.plan import Profile
from tutti.strategies import Poseidon
from tutti.strategies.poseidon import METHODS, Decision
from tutti.strategies.poseidon.cost import layer_decisions
from tutti.strategies.poseidon.rule import published


def decisions(profile: Profile, workers: int, cluster: Cluster) -> list[Decision]:
    """Of every layer that has factors; none for one worker."""
    return layer_decisions(Poseidon(), profile, Placement.from_cluster(workers, cluster)) if workers > 1 else []


def table_of(found: list[Decision], profile: Profile, workers: int) -> Table:
    """Layers in the order of forward; those without factors together in the last row."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="each layer, by poseidon")
    table.caption = "a worker's time and bytes, each way; published: what the rule of Zhang et al. (2015) takes"
    table.add_column("", overflow="fold", min_width=10)
    for heading in ("out × in", "rows", *METHODS, "takes", "published"):
        table.add_column(heading, justify="right")
    for each in found:
        shape = each.shape
        costs = [f"{format_time(each.seconds[way])}\n{format_size(round(each.sent_bytes[way]))}" for way in METHODS]
        size = f"{shape.num_out} ×\n{shape.num_in}"
        table.add_row(
            shape.name.removesuffix(".weight"), size, str(shape.rows), *costs, each.method, published(shape, workers)
        )
    named = {each.shape.name for each in found}
    rest = sum(gradient.num_bytes for gradient in profile.gradients if gradient.name not in named)
    table.add_row("the rest", "", "", format_size(rest), "", "", "full", "full")
    return table


def as_dicts(found: list[Decision], workers: int) -> list[dict[str, Any]]:
    return [
        {**vars(each.shape), "method": each.method, "published": published(each.shape, workers),
         "seconds": each.seconds, "sent_bytes": each.sent_bytes}
        for each in found
    ]  # fmt: skip
