"""The strategies that the planner compares: what each registered family offers."""

from collections.abc import Iterable
from typing import NamedTuple

from tutti.cluster import Cluster
from tutti.cost import Placement, Profile
from tutti.errors import ConfigError, NoLink
from tutti.strategies import STRATEGIES, Strategy, parse


class Candidates(NamedTuple):
    """Strategies to compare, in the order in which ties are decided."""

    exact: list[Strategy]
    """Strategies under which workers compute what one would."""
    lossy: list[Strategy]
    """Strategies that change the result: compression, staleness, local steps."""
    not_priced: list[Strategy]
    """Strategies without a cost formula, which cannot be compared."""


def candidates(profile: Profile, workers: int, cluster: Cluster) -> Candidates:
    """Return what every registered family offers for such a worker on such a cluster (`Strategy.candidates`).

    A family is asked through the strategy that its name alone makes; one that needs options offers nothing.
    """
    try:
        placement = Placement.from_cluster(workers, cluster)
    except NoLink:  # No two hosts are joined: no strategy can be used.
        return Candidates([], [], [])
    offered = [strategy for family in _families() for strategy in family.candidates(profile, placement)]
    priced = [strategy for strategy in offered if has_cost(strategy)]
    return Candidates(
        exact=[strategy for strategy in priced if strategy.exact],
        lossy=[strategy for strategy in priced if not strategy.exact],
        not_priced=[strategy for strategy in offered if not has_cost(strategy)],
    )


def has_cost(strategy: Strategy) -> bool:
    """Whether the strategy's class implements `cost`."""
    return type(strategy).cost is not Strategy.cost


def _families() -> Iterable[Strategy]:
    """Return one strategy of each class that has a name, with default options."""
    families: dict[type[Strategy], Strategy] = {}
    for name in STRATEGIES:
        try:
            strategy = parse(name)
        except ConfigError:
            continue
        families.setdefault(type(strategy), strategy)
    return families.values()
