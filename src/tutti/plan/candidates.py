"""The strategies that the planner compares, collected from every registered family (`Strategy.candidates`)."""

from typing import NamedTuple

from tutti.cluster import Cluster
from tutti.codecs import CODECS
from tutti.cost import Placement, Profile
from tutti.errors import ConfigError, NoLink
from tutti.strategies import STRATEGIES, Strategy, parse

LEAST_EXCHANGES = 4
"""A run must be this many times as long as a block of local steps: workers learn from others between blocks only."""


class Candidates(NamedTuple):
    """Strategies to compare, in the order in which ties are decided."""

    exact: list[Strategy]
    """Strategies under which workers compute what one would."""
    lossy: list[Strategy]
    """Strategies that change the result: compression, staleness, local steps."""
    not_priced: dict[str, str]
    """Why others cannot be compared, by name: they have no cost formula, or their package does not load."""


def candidates(profile: Profile, workers: int, cluster: Cluster, num_steps: int | None = None) -> Candidates:
    """Return what every registered family offers for such a worker on such a cluster (`Strategy.candidates`).

    Strategies of installed packages are included. A family is asked through the strategy that its name alone makes.
    If the run's number of steps is known, strategies for longer runs (`least_steps`) are left out.
    """
    try:
        placement = Placement.from_cluster(workers, cluster)
    except NoLink:  # No two hosts are joined: callers report that no strategy can be used.
        return Candidates([], [], {})
    families, not_priced = _families()
    offered = Candidates([], [], not_priced)
    for family in families:
        for strategy in family.candidates(profile, placement):
            # A strategy that exchanges in every step suits a run of any length.
            if num_steps is not None and 1 < least_steps(strategy) > num_steps:
                continue
            if has_cost(strategy):
                (offered.exact if strategy.exact else offered.lossy).append(strategy)
            else:
                not_priced[str(strategy)] = f"{type(strategy).__module__}.{type(strategy).__qualname__} has no cost"
    return offered


def least_steps(strategy: Strategy) -> int:
    """Return the number of steps of the shortest run for which a strategy is recommended."""
    # None: the strategy adapts its blocks to the time that an exchange takes, and exchanges sooner in the beginning.
    num_local = strategy.steps_per_exchange or 1
    return LEAST_EXCHANGES * num_local if num_local > 1 else 1


def has_cost(strategy: Strategy) -> bool:
    """Whether the strategy's class implements `cost`."""
    return type(strategy).cost is not Strategy.cost


def _families() -> tuple[list[Strategy], dict[str, str]]:
    """Return one strategy of each registered class, with default options, and why there is none for some names."""
    families: dict[type[Strategy], Strategy] = {}
    failures = CODECS.load_failures()  # Reported here, because `AllReduce.candidates` skips them.
    for name in STRATEGIES:
        try:
            strategy = parse(name)
        except ConfigError as error:
            failures[name] = str(error)  # One broken package must not stop the planner.
        else:
            # Several names may make one class (every all-reduce algorithm does): the class is asked once.
            families.setdefault(type(strategy), strategy)
    return list(families.values()), failures
