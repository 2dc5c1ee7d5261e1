"""`ServedModel`: the part of a worker of parameter servers that continues from saved states."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tutti.strategies.parameter_server.consistency import Consistency
from tutti.strategies.parameter_server.kept_shards import load_kept
from tutti.strategies.resumable import Resumable
from tutti.strategies.saved_state import load_own_buffers

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer


class ServedModel(Resumable):
    """A model whose parameters and optimiser state servers hold, in messages or in shared memory."""

    _strategy: "ParameterServer"
    _consistency: Consistency
    _rank: int

    @property
    def num_workers(self) -> int:
        return len(self._strategy.roles(self.transport.size)[0])

    @property
    def gradient_share(self) -> float:
        # Under a counting consistency a version is the mean of so many updates; else of one of every worker.
        return 1 / (self.num_workers if self._consistency.bound is not None else self._consistency.quorum)

    def add_to_model(self, changes: dict[str, Tensor]) -> None:
        state = {"optimizer": self.state_dict()["optimizer"]}
        super().add_to_model(changes)
        self.load_state_dict(state)  # Servers hold the parameters, and start again from the model.

    def _with_kept(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with what the servers that are left after a loss have, loading their parameters. Collective.

        Their group may have been another one: by messages, where there is one host now.
        """
        if "served" not in state:
            return state
        rest = {name: part for name, part in state.items() if name != "served"}
        return {**rest, "optimizer": load_kept(state["served"][self._rank], self.replica, self.transport)}

    def _load_buffers(self, state: dict[str, Any]) -> None:
        """Load the buffers that this rank had by itself, if the same number of ranks had them."""
        if len(ranks := state.get("buffers", [])) == self.num_workers:
            load_own_buffers(self.replica, ranks[self._rank])
