"""Choices within one round: candidates that can be updated together, and the rank that computes each block."""

import numpy as np


def select_independent(dependence: np.ndarray, limit: float, max_blocks: int) -> list[int]:
    """Return indices of at most `max_blocks` candidates, no two of which depend on each other by more than `limit`.

    Candidates are considered in order: one that depends on a candidate chosen before is rejected.

    Args:
        dependence: matrix of the dependence between each pair of candidates.
    """
    rejected: set[int] = set()
    # Pairs in the order of their first candidate: when a pair is reached, it is decided whether the first is rejected.
    firsts, seconds = np.triu(dependence > limit, 1).nonzero()
    for first, second in zip(firsts.tolist(), seconds.tolist(), strict=True):
        if first not in rejected:
            rejected.add(second)
    return [index for index in range(len(dependence)) if index not in rejected][:max_blocks]


def balance_loads(loads: list[float], relative_times: np.ndarray) -> list[list[int]]:
    """Return the indices of the loads of each rank, such that ranks end at about the same time.

    Greedy: the heaviest load first, each to the rank that would end it first (Graham 1969).

    Args:
        loads: the work of each block.
        relative_times: how long each rank takes for the same load, relative to the others.
    """
    ends = np.zeros(len(relative_times))
    shares: list[list[int]] = [[] for _ in relative_times]
    # `sorted` is stable and `argmin` returns the first of equals, so all ranks decide alike.
    for index in sorted(range(len(loads)), key=lambda index: -loads[index]):
        would_end = ends + loads[index] * relative_times
        rank = int(would_end.argmin())
        ends[rank] = would_end[rank]
        shares[rank].append(index)
    return [sorted(share) for share in shares]
