"""What a step would take under a strategy: by formula where one holds, else as a simulation says."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tutti.cluster import Cluster
from tutti.errors import ConfigError
from tutti.plan.blocks import blocks
from tutti.plan.gradients import all_reduce
from tutti.plan.loads import slowed
from tutti.plan.peers import gossip, peer_updates
from tutti.plan.place import Place
from tutti.plan.poseidon import poseidon
from tutti.plan.profile.record import Profile
from tutti.plan.servers import parameter_server
from tutti.plan.toll import Toll
from tutti.strategies import (
    AllReduce,
    Averaging,
    BlockMomentum,
    Gossip,
    ParameterServer,
    PeerUpdates,
    Poseidon,
    Strategy,
)

Simulated = Callable[[Strategy], float]
"""Seconds a step under a strategy, simulated; it costs no time there to encode."""

Price = Callable[[Any, Profile, Place], Toll]

PRICES: dict[type[Strategy], Price] = {
    AllReduce: all_reduce,
    Poseidon: poseidon,
    ParameterServer: parameter_server,
    Averaging: blocks,
    BlockMomentum: blocks,
    PeerUpdates: peer_updates,
    Gossip: gossip,
}
"""By the class of a strategy: what it adds to a step of a worker with this profile, on ranks placed like this."""


_ROUNDING = 1e-9
"""What a clock may differ by."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of every worker under one strategy."""

    strategy: Strategy
    workers: int
    """Those that train."""
    num_samples: int
    """Of each worker; of the one that has most, where they are not alike."""
    total_samples: int
    """Of all workers, a step."""
    step_s: float
    computing_s: float
    """Of the slowest worker."""
    exposed_s: float
    """Communication, encoding and decoding that is not hidden under computing."""
    bytes_per_step: float
    """Sent by a worker."""
    memory_bytes: float
    """About; of a worker."""
    simulated: bool = False
    """Whether `step_s` is a simulation's, and not a formula's."""

    @property
    def efficiency(self) -> float:
        """The part of a step that is computing."""
        return self.computing_s / self.step_s if self.step_s else 1.0

    @property
    def samples_per_s(self) -> float:
        """Of all workers."""
        return self.total_samples / self.step_s if self.step_s else 0.0

    @property
    def exact(self) -> bool:
        """Whether the workers do what one would with all of their samples."""
        return self.strategy.exact

    def as_dict(self) -> dict[str, Any]:
        named = {**asdict(replace(self, strategy=AllReduce())), "strategy": str(self.strategy), "exact": self.exact}
        return {**named, "efficiency": self.efficiency, "samples_per_s": self.samples_per_s}


def price(
    strategy: Strategy,
    profile: Profile,
    workers: int,
    cluster: Cluster,
    simulated: Simulated | None = None,
    toll_of: Price | None = None,
) -> Prediction:
    """What a step of so many workers would take, each with the batch of `profile`.

    Formulas go by the slowest link and the slowest worker, and hold where all are alike. Where they are not (several
    ranks on each of several hosts, links or speeds that differ, switches that are shared, jitter), `simulated` is asked
    if it is given. Servers of their own come to the workers. What the profile's `overhead` says comes to either.
    `toll_of` is asked in place of what `PRICES` has, about what is at work and knows more of itself.
    """
    toll_of = toll_of or formula_of(strategy)
    place = Place.of(workers + (strategy.num_dedicated_servers if workers > 1 else 0), cluster)
    place = replace(place, alone=profile.overhead.alone)
    own = slowed(profile, place.slowness)
    computing_s = own.forward_s + own.backward_s + own.step_s
    toll = toll_of(_meant(strategy), own, place) if workers > 1 else Toll(0.0, 0.0, num_exchanges=0.0)
    overhead_s = own.overhead.seconds(toll)
    by_simulation = simulated is not None and not place.even and workers > 1
    step_s = computing_s + max(0.0, toll.exposed_s + overhead_s)
    if simulated is not None and by_simulation:
        step_s = simulated(strategy) + max(0.0, toll.coding_s + overhead_s)
    return Prediction(
        strategy=strategy,
        workers=workers,
        num_samples=profile.num_samples,
        total_samples=workers * profile.num_samples,
        step_s=step_s,
        computing_s=min(computing_s, step_s),
        exposed_s=step_s - computing_s if step_s - computing_s > _ROUNDING * computing_s else 0.0,
        bytes_per_step=toll.num_bytes,
        memory_bytes=profile.peak_bytes + toll.memory_bytes,
        simulated=by_simulation,
    )


def formula_of(strategy: Strategy) -> Price:
    """What prices it; `ConfigError` if nothing does."""
    kinds = type(_meant(strategy)).__mro__
    if (found := next((PRICES[kind] for kind in kinds if kind in PRICES), None)) is None:
        raise ConfigError(f"nobody knows what {type(strategy).__name__} costs: list it in tutti.plan.cost.PRICES.")
    return found


def _meant(strategy: Strategy) -> Strategy:
    """Poseidon that leaves consistency to servers is those servers."""
    return strategy.servers or strategy if isinstance(strategy, Poseidon) else strategy
