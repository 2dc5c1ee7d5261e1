"""Of candidates, those that can be updated at once; and who updates which."""

import numpy as np


def select_independent(dependence: np.ndarray, limit: float, number: int) -> list[int]:
    """Places of at most `number` candidates, no two of which depend on each other by more than `limit`.

    The first candidates come first: who depends on one that was chosen stands back.
    """
    refused: set[int] = set()
    firsts, seconds = np.triu(dependence > limit, 1).nonzero()  # By the first of each pair.
    for first, second in zip(firsts.tolist(), seconds.tolist(), strict=True):
        if first not in refused:
            refused.add(second)
    return [place for place in range(len(dependence)) if place not in refused][:number]


def balance_loads(loads: list[float], relative_times: np.ndarray) -> list[list[int]]:
    """Places of `loads`, by rank, so that ranks end at about the same time: the heaviest first, to who is done first.

    A rank of pace 2 takes twice as long for the same load as one of pace 1.
    """
    ends = np.zeros(len(relative_times))
    shares: list[list[int]] = [[] for _ in relative_times]
    for place in sorted(range(len(loads)), key=lambda place: -loads[place]):
        done = ends + loads[place] * relative_times
        rank = int(done.argmin())
        ends[rank] = done[rank]
        shares[rank].append(place)
    return [sorted(share) for share in shares]
