"""`DrawnOrder`: batches of a sampler of the user's own, which cannot be drawn a second time."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from tutti.collectives import broadcast_json
from tutti.data import sampler_state
from tutti.data.division import Batch
from tutti.data.epoch_order import KEPT_EPOCHS, EpochOrder
from tutti.world import World


class DrawnOrder(EpochOrder):
    """Batches that rank 0's sampler gave, or every rank's own where it says that it gives the same on all of them."""

    name = "that of a sampler"
    needs_one_call = False

    def __init__(self, loader: DataLoader[Any], world: World) -> None:
        assert loader.batch_sampler is not None
        self._loader = loader
        self._sampler = loader.batch_sampler
        self._world = world
        self._drawn: dict[int, Sequence[Batch]] = {}
        """Batches of epochs that may be continued."""

    def batches(self, epoch: int, num_parts: int, first_epoch: int) -> Sequence[Batch]:
        self._drawn = {known: batches for known, batches in self._drawn.items() if known >= first_epoch - KEPT_EPOCHS}
        if epoch in self._drawn:
            return self._drawn[epoch]
        sampler_state.set_epoch(self._loader, epoch)
        if getattr(self._sampler, "same_on_every_rank", False):
            self._drawn[epoch] = self._draw()
            return self._drawn[epoch]
        # A sampler of the user's own may use any generator: rank 0's batches hold for all.
        batches = self._draw() if self._world.rank == 0 else None
        with self._world.waiting():
            drawn = self._world.collective(lambda: broadcast_json(batches, self._world.transport))
        if drawn is not None:  # Else the other ranks had drawn it, and this one has taken it over from them.
            self._drawn[epoch] = drawn
        return self._drawn[epoch]

    def _draw(self) -> Sequence[Batch]:
        return [list(map(int, batch)) for batch in self._sampler]

    def own_state(self, first_epoch: int) -> Any:
        epochs = [epoch for epoch in self._drawn if epoch >= first_epoch]
        return [first_epoch, epochs, max(self._drawn, default=-1), sampler_state.generator_states(self._loader)]

    def merge(self, values: dict[int, Any], positions: list[list[int]]) -> dict[str, Any]:
        # The sampler that has drawn most, the first rank's among equal ones, is beyond all epochs that are saved.
        _, _, last_epoch, generators = max(values.values(), key=lambda value: value[2])
        epochs = range(min(epoch for epoch, *_ in positions), last_epoch + 1)
        missing = [rank for rank, (_, known, _, _) in values.items() if not set(epochs) <= set(known)]
        return {"drawn": list(epochs), "generators": generators, "missing": missing}

    def complete(self, state: dict[str, Any], world: World) -> dict[str, Any]:
        """Return the state with the batches of its epochs, from this rank or, if some lack them, from those that know.

        Under asynchronous strategies ranks may be in different epochs. One that is behind may be about to draw what
        others have forgotten already.
        """
        if not state.pop("missing"):
            return {**state, "drawn": [[epoch, sampler_state.pack(self._drawn[epoch])] for epoch in state["drawn"]]}
        positions: list[list[int]] = state["positions"]
        first_epoch = positions[world.rank][0]
        known = [[epoch, sampler_state.pack(batches)] for epoch, batches in self._drawn.items()]
        for epoch in state["drawn"]:
            if epoch >= first_epoch and epoch not in self._drawn:
                known.append([epoch, sampler_state.pack(self.batches(epoch, 0, first_epoch))])
        elastic = any(exchange.tolerates_loss for exchange in world.usage.exchanges)
        with world.waiting():
            known = world.call("shard.state_dict", known, _union, elastic=elastic)
        return {**state, "drawn": [[epoch, batches] for epoch, batches in known if epoch in state["drawn"]]}

    def load(self, state: dict[str, Any]) -> None:
        self._drawn = {epoch: sampler_state.unpack(batches) for epoch, batches in state["drawn"]}
        sampler_state.load_generators(self._loader, state["generators"])


def _union(values: dict[int, Any]) -> list[Any]:
    """Return the batches of every epoch that a rank knows."""
    drawn = dict(pair for known in values.values() for pair in known)
    return [[epoch, batches] for epoch, batches in sorted(drawn.items())]
