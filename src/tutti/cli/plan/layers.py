"""The output of `tutti plan --per-layer`: how Poseidon would exchange each layer, beside the alternatives."""

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
    """Poseidon's method for every layer whose gradient has sufficient factors; empty for one worker."""
    return layer_decisions(Poseidon(), profile, Placement.from_cluster(workers, cluster)) if workers > 1 else []


def layer_table(decisions: list[Decision], profile: Profile, workers: int) -> Table:
    """A row per layer in the order of forward; layers without factors share the last row."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="Exchange of each layer under Poseidon")
    table.caption = (
        "time and bytes of one worker by each method; published: the choice of the rule of Zhang et al. (2015)"
    )
    table.add_column("", overflow="fold", min_width=10)
    for heading in ("out × in", "rows", *METHODS, "chosen", "published"):
        table.add_column(heading, justify="right")
    for decision in decisions:
        shape = decision.shape
        # Time and bytes in one cell, because twice as many columns would not fit.
        costs = [
            f"{format_time(decision.seconds[method])}\n{format_size(round(decision.sent_bytes[method]))}"
            for method in METHODS
        ]
        size = f"{shape.num_out} ×\n{shape.num_in}"
        table.add_row(
            shape.name.removesuffix(".weight"),
            size,
            str(shape.rows),
            *costs,
            decision.method,
            published(shape, workers),
        )
    # Biases, norms and embeddings have no factors that could be sent instead.
    named = {decision.shape.name for decision in decisions}
    rest = sum(gradient.num_bytes for gradient in profile.gradients if gradient.name not in named)
    table.add_row("other parameters", "", "", format_size(rest), "", "", "full", "full")
    return table


def as_dicts(decisions: list[Decision], workers: int) -> list[dict[str, Any]]:
    """The decisions for `--json`."""
    return [
        {**vars(decision.shape), "method": decision.method, "published": published(decision.shape, workers),
         "seconds": decision.seconds, "sent_bytes": decision.sent_bytes}
        for decision in decisions
    ]  # fmt: skip
