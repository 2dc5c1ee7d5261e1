"""`JobProgress`: the part of a job that reports how far it is. Nothing here communicates with other ranks."""

from typing import Any

from torch import nn

from tutti.events import EXCHANGE, PULL, EventLog
from tutti.job.metrics import Changes, Metrics
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.replica import HookedReplica
from tutti.strategies import Exchange
from tutti.world import World


class JobProgress:
    """What this rank has done so far. `Job` sets the fields."""

    _model_on_mesh: ModelOnMesh | None
    _model: nn.Module
    _replica: HookedReplica
    _exchange: Exchange
    world: World
    _started_s: float
    _finished: bool
    _was_leader: bool

    @property
    def metrics(self) -> Metrics:
        """Counters of this rank so far."""
        totals = self._exchange.events.totals
        total = totals[EXCHANGE]
        return Metrics(
            steps=self._replica.steps,
            exchanges=total.count,
            bytes_sent=total.num_bytes,
            seconds=self._exchange.transport.now() - self._started_s,
            # Strategies with servers record exchanges without duration, and their waits as pulls; others wait in
            # exchanges.
            waiting_s=total.seconds + totals[PULL].seconds,
            strategy=self._exchange.metrics(),
            changes=self._changes,
        )

    @property
    def _changes(self) -> Changes:
        elastic = self.world.elastic
        regrouping = None if elastic is None else elastic.regrouping
        return Changes() if regrouping is None else regrouping.changes

    @property
    def model(self) -> nn.Module:
        """The model, of which a mesh has split each layer or stage but in `consensus`."""
        return self._model

    @property
    def steps(self) -> int:
        """Steps of the optimiser that this rank has taken."""
        return self._replica.steps

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first that still trains: the one to report, save or evaluate."""
        first = self._model_on_mesh is None or self._model_on_mesh.is_replica_leader
        return self._was_leader if self._finished else first and self._exchange.is_leader

    def status(self) -> list[dict[str, Any]]:
        """Return what each rank of the run is doing, as the coordinator knows it: a row per rank, as `tutti status`.

        Any rank may call it, at any time. A row has the rank, its host and process, and under "status" its step, its
        phase and the ranks that it waits for. Empty in a simulation, for one rank alone, or while no coordinator is
        there.
        """
        return self.world.status() or []

    @property
    def events(self) -> EventLog:
        """The newest events of the exchange on this rank, and their totals."""
        return self._exchange.events
