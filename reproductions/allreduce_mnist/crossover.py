"""The message size from which the ring is faster than the tree: measured, and by the cost formulas."""

from itertools import pairwise
from pathlib import Path

from reproductions.allreduce_mnist.results import CollectiveComparison, CollectiveTimes
from reproductions.records import to_json
from reproductions.report import Section, figure, prose, table
from tutti.cluster import Link, format_size, format_time
from tutti.collectives import ALGORITHMS
from tutti.report.plots import plot_collectives


def crossover_section(comparison: CollectiveComparison, rate: str, folder: Path) -> Section:
    """Return the section on the crossover, and draw its figure."""
    workers, rows = comparison.workers, comparison.rows
    link = Link(comparison.link.bits_per_s, comparison.link.latency_s)
    title = f"All-reduce alone, {workers} hosts at {rate}"
    plot_collectives(to_json(comparison), title, folder / "collectives.png")
    fitted = [link_with_fitted_latency(name, rows[0], workers, link) for name in ("tree", "ring")]
    algorithms = ("tree", "ring", "butterfly")
    cells = [[format_size(row.num_bytes), *(_both(row, name) for name in algorithms)] for row in rows]
    return Section(
        "Crossover from tree to ring",
        [
            prose(f"""All-reduce alone, {workers} hosts at {rate}, wall-clock. The link measured by ping-pong: {link}.
            The cost formulas are 2 ⌈log₂ P⌉ (α + n β) for the tree and 2 (P−1) (α + n/P β) for the ring. The ring
            becomes faster than the tree at:"""),
            table(
                ("", "message size"),
                [
                    ("measured", _size_or_words(measured_crossover(rows))),
                    ("formulas with the measured link", format_size(predicted_crossover(workers, link, link))),
                    (
                        f"formulas with the latency fitted to each algorithm's smallest message ({workers} processes "
                        "share the cores)",
                        format_size(predicted_crossover(workers, *fitted)),
                    ),
                ],
                num_text_columns=1,
            ),
            "Measured / predicted time:",
            table(("message", *algorithms), cells, num_text_columns=0),
            prose("""From 16 KiB on, both are within a fifth of the formulas. For smaller messages the shaped link lets
            a burst of a few KiB through at once after a pause. A small message of the tree fits into that burst; the
            ring's messages follow each other too closely to profit."""),
            figure("Time of every all-reduce over message size, with predictions", "collectives.png"),
        ],
    )


def measured_crossover(rows: tuple[CollectiveTimes, ...]) -> float | None:
    """Return the size from which the ring is faster than the tree, interpolated; 0: always, None: never."""
    gaps = [(row.num_bytes, row.seconds["ring"] - row.seconds["tree"]) for row in rows]
    if gaps[0][1] <= 0:
        return 0.0
    for (small, before), (large, after) in pairwise(gaps):
        if after <= 0:
            return float(small + before / (before - after) * (large - small))
    return None


def predicted_crossover(workers: int, tree_link: Link, ring_link: Link) -> float:
    """Return the size at which the cost formulas of tree and ring, both linear in the size, are equal."""
    costs = [(ALGORITHMS["ring"].cost, ring_link), (ALGORITHMS["tree"].cost, tree_link)]
    gap_at_0, gap_at_1 = (
        ring_s - tree_s for ring_s, tree_s in ([cost(workers, size, link) for cost, link in costs] for size in (0, 1))
    )
    return max(0.0, gap_at_0 / (gap_at_0 - gap_at_1)) if gap_at_0 != gap_at_1 else 0.0


def link_with_fitted_latency(name: str, row: CollectiveTimes, workers: int, link: Link) -> Link:
    """Return the link with the latency that explains an algorithm's measured time at a small size."""
    cost = ALGORITHMS[name].cost
    num_latencies = cost(workers, 0, Link(link.bits_per_s, 1.0))
    transfer_s = cost(workers, row.num_bytes, Link(link.bits_per_s))
    return Link(link.bits_per_s, max(0.0, row.seconds[name] - transfer_s) / num_latencies)


def _size_or_words(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "none of the sizes"
    return format_size(num_bytes) if num_bytes else "all of the sizes"


def _both(row: CollectiveTimes, name: str) -> str:
    return f"{format_time(row.seconds[name])} / {format_time(row.predicted[name])}"
