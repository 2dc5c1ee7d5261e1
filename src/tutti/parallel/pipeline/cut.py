"""Cuts of a sequence of layers into pipeline stages, such that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

from tutti.cluster import format_size
from tutti.errors import ConfigError

LayerRange = tuple[int, int]
"""The first layer of a stage, and the first layer after it."""


def balanced_cut(
    seconds: Sequence[float],
    num_stages: int,
    memory: Sequence[Sequence[int]] | None = None,
    limits: Sequence[int] | None = None,
) -> list[LayerRange] | None:
    """Return consecutive layers for each stage, at least one each; None if no cut fits into memory.

    Dynamic programming over the first layer of the last stage finds an optimal cut in O(stages x layers²).

    Args:
        seconds: the time of each layer.
        memory: for each stage, the bytes that each layer would take in it.
        limits: for each stage, the bytes that it may take.
    """
    num_layers = len(seconds)
    # Prefix sums: the time and the bytes of any range of layers are one subtraction.
    seconds_before = [0.0, *accumulate(seconds)]
    bytes_before = [[0, *accumulate(layers)] for layers in memory or [[0] * num_layers] * num_stages]

    def cost(stage: int, start: int, stop: int) -> float:
        too_large = limits is not None and bytes_before[stage][stop] - bytes_before[stage][start] > limits[stage]
        return float("inf") if too_large else seconds_before[stop] - seconds_before[start]

    # best[n][stop]: the time of the slowest of n stages over the first `stop` layers; begins: where the last begins.
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    begins = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        # Each stage has one layer at least: the first `stage` need `stage` layers, those before the last one fewer.
        for stop in range(stage, num_layers + 1):
            for start in range(stage - 1, stop):
                slowest = max(best[stage - 1][start], cost(stage - 1, start, stop))
                # Strictly: of equally good cuts the first is kept, on every rank the same.
                if slowest < best[stage][stop]:
                    best[stage][stop], begins[stage][stop] = slowest, start
    if best[num_stages][num_layers] == float("inf"):
        return None
    # Walk back from the last stage to the first along the recorded beginnings.
    ranges, stop = list[LayerRange](), num_layers
    for stage in range(num_stages, 0, -1):
        start = begins[stage][stop]
        ranges.append((start, stop))
        stop = start
    return ranges[::-1]


def cut_from_counts(counts: Sequence[int], num_stages: int, num_layers: int) -> list[LayerRange]:
    """Return the cut in which each stage has the given number of layers."""
    if len(counts) != num_stages or sum(counts) != num_layers:
        raise ConfigError(
            f"the cut {list(counts)} is of {len(counts)} stages and {sum(counts)} layers; the mesh has {num_stages} "
            f"stages and the model has {num_layers} layers. Give one number per stage, of {num_layers} in all."
        )
    ends = list(accumulate(counts))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def check_layers_fit(names: Sequence[str], num_stages: int, memory: Sequence[int], limit_bytes: int | None) -> None:
    """Refuse more stages than layers, and a layer that is too large for any stage."""
    if num_stages > len(names):
        raise ConfigError(
            f"{num_stages} stages need as many layers or more, and the model has {len(names)} ({', '.join(names)}). "
            "Use fewer ranks along pipe, or fewer stages per rank."
        )
    if limit_bytes is None:
        return
    if large := [(name, size) for name, size in zip(names, memory, strict=True) if size > limit_bytes]:
        layers = ", ".join(f"'{name}' {format_size(size)}" for name, size in large)
        raise ConfigError(
            f"a rank may take {format_size(limit_bytes)}, and these layers alone need more: {layers}. Allow more, use "
            "smaller microbatches, or split layers along tensor too."
        )


def bytes_per_rank(ranges: Sequence[LayerRange], memory: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return the bytes of the stages of each rank.

    `memory` is by stage and layer, and stage s is on rank s modulo `num_ranks`.
    """
    num_bytes = [0] * num_ranks
    for stage, (start, stop) in enumerate(ranges):
        num_bytes[stage % num_ranks] += sum(memory[stage][start:stop])
    return num_bytes


def check_ranks_fit(
    ranges: Sequence[LayerRange], memory: Sequence[Sequence[int]], num_ranks: int, limit_bytes: int | None
) -> None:
    """Refuse a cut that gives a rank more than `limit_bytes`."""
    needed = bytes_per_rank(ranges, memory, num_ranks)
    if limit_bytes is None or max(needed) <= limit_bytes:
        return
    large = ", ".join(f"{format_size(size)} on rank {rank}" for rank, size in enumerate(needed) if size > limit_bytes)
    raise ConfigError(
        f"a rank may take {format_size(limit_bytes)}, and this cut needs {large} of the pipeline. Use another cut, or "
        "omit it to have one computed."
    )


def balanced_cut_within(
    seconds: Sequence[float], memory: Sequence[Sequence[int]], num_ranks: int, limit_bytes: int
) -> list[LayerRange] | None:
    """As `balanced_cut`, such that the stages of no rank take more than `limit_bytes` together; None if none was found.

    Where a rank has several stages, its memory is divided between them in eighths, alike on all ranks, and
    every such division is tried.
    """
    num_stages = len(memory)
    best = balanced_cut(seconds, num_stages, memory, [limit_bytes] * num_stages)
    # The first cut limits each stage alone. With one stage per rank, and often with several, it is the answer.
    if best is None or max(bytes_per_rank(best, memory, num_ranks)) <= limit_bytes:
        return best
    stages_per_rank = num_stages // num_ranks
    fitting = []
    # Eighths are fine enough in practice, and few: for two stages per rank there are 7 divisions, for three 21.
    for ends in combinations(range(1, 8), stages_per_rank - 1):
        shares = [limit_bytes * (stop - start) // 8 for start, stop in pairwise([0, *ends, 8])]
        # Stage s is number s // num_ranks of its rank, and gets the share of that number.
        ranges = balanced_cut(seconds, num_stages, memory, [shares[stage // num_ranks] for stage in range(num_stages)])
        if ranges is not None:
            fitting.append((max(sum(seconds[start:stop]) for start, stop in ranges), ranges))
    return min(fitting)[1] if fitting else None
