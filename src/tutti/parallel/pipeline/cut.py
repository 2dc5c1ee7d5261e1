"""Where to cut a sequence of layers, so that the slowest stage is as quick as it can be."""

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

from tutti.cluster import format_size
from tutti.errors import ConfigError

LayerRange = tuple[int, int]
"""First layer of a stage, and the first after it."""


def balanced_cut(
    seconds: Sequence[float],
    num_stages: int,
    memory: Sequence[Sequence[int]] | None = None,
    limits: Sequence[int] | None = None,
) -> list[LayerRange] | None:
    """Consecutive layers for every stage, one or more each; None if no cut fits into memory.

    By dynamic programming over where the last stage begins: the best cut of all, in time O(stages x layers²).

    Args:
        memory: by stage, what each layer would take in it.
        limits: by stage, what it may take.
    """
    num_layers = len(seconds)
    until = [0.0, *accumulate(seconds)]
    bytes_until = [[0, *accumulate(each)] for each in memory or [[0] * num_layers] * num_stages]

    def cost(stage: int, start: int, stop: int) -> float:
        too_large = limits is not None and bytes_until[stage][stop] - bytes_until[stage][start] > limits[stage]
        return float("inf") if too_large else until[stop] - until[start]

    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    begins = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_layers + 1):
            for start in range(stage - 1, stop):
                slowest = max(best[stage - 1][start], cost(stage - 1, start, stop))
                if slowest < best[stage][stop]:
                    best[stage][stop], begins[stage][stop] = slowest, start
    if best[num_stages][num_layers] == float("inf"):
        return None
    spans, stop = list[LayerRange](), num_layers
    for stage in range(num_stages, 0, -1):
        start = begins[stage][stop]
        spans.append((start, stop))
        stop = start
    return spans[::-1]


def cut_from_counts(counts: Sequence[int], num_stages: int, num_layers: int) -> list[LayerRange]:
    """The spans of stages of so many layers each."""
    if len(counts) != num_stages or sum(counts) != num_layers:
        raise ConfigError(
            f"the cut {list(counts)} is of {len(counts)} stages and {sum(counts)} layers; the mesh has {num_stages} "
            f"stages and the model {num_layers} layers."
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
        each = ", ".join(f"'{name}' {format_size(size)}" for name, size in large)
        raise ConfigError(
            f"a rank may take {format_size(limit_bytes)}, and these layers alone need more: {each}. Allow more, use "
            "smaller microbatches, or split layers along tensor too."
        )


def bytes_per_rank(spans: Sequence[LayerRange], memory: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """By rank, what its stages take; `memory` is by stage and layer, and stage s is on rank s modulo `num_ranks`."""
    found = [0] * num_ranks
    for stage, (start, stop) in enumerate(spans):
        found[stage % num_ranks] += sum(memory[stage][start:stop])
    return found


def check_ranks_fit(
    spans: Sequence[LayerRange], memory: Sequence[Sequence[int]], num_ranks: int, limit_bytes: int | None
) -> None:
    """Refuse a cut of which some rank's part does not fit."""
    needed = bytes_per_rank(spans, memory, num_ranks)
    if limit_bytes is None or max(needed) <= limit_bytes:
        return
    large = ", ".join(f"{format_size(each)} on rank {rank}" for rank, each in enumerate(needed) if each > limit_bytes)
    raise ConfigError(
        f"a rank may take {format_size(limit_bytes)}, and this cut needs {large} of the pipeline. Cut otherwise, or "
        "leave out the cut and have it found."
    )


def balanced_cut_within(
    seconds: Sequence[float], memory: Sequence[Sequence[int]], num_ranks: int, limit_bytes: int
) -> list[LayerRange] | None:
    """As `balanced_cut`, so that no rank's stages take more than `limit_bytes` together; None if none was found.

    Where a rank has several stages, its memory is shared among them in all ways of eighths, alike on all ranks.
    """
    num_stages = len(memory)
    best = balanced_cut(seconds, num_stages, memory, [limit_bytes] * num_stages)
    if best is None or max(bytes_per_rank(best, memory, num_ranks)) <= limit_bytes:
        return best
    per_rank = num_stages // num_ranks
    found = []
    for cuts in combinations(range(1, 8), per_rank - 1):
        shares = [limit_bytes * (stop - start) // 8 for start, stop in pairwise([0, *cuts, 8])]
        spans = balanced_cut(seconds, num_stages, memory, [shares[stage // num_ranks] for stage in range(num_stages)])
        if spans is not None:
            found.append((max(sum(seconds[start:stop]) for start, stop in spans), spans))
    return min(found)[1] if found else None
