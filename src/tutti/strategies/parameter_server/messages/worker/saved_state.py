"""`SavedShards`: what a worker and its servers save, and how another run continues from it."""

from typing import Any

from torch import Tensor

from tutti.codecs import Codec
from tutti.codecs.base import State
from tutti.strategies.compressed_state import CodecMemory, Span, owed
from tutti.strategies.parameter_server.kept_shards import NOTHING
from tutti.strategies.parameter_server.messages.config import ServerGroupConfig
from tutti.strategies.parameter_server.messages.server import Server
from tutti.strategies.parameter_server.messages.wire import RequestKind
from tutti.strategies.parameter_server.messages.worker.requests import RequestSender
from tutti.strategies.parameter_server.messages.worker.shard import WorkerShard
from tutti.strategies.parameter_server.worker import ParameterServerWorker
from tutti.strategies.saved_state import PerRank, own_buffers
from tutti.strategies.user_changes import record_loaded
from tutti.transports import Transport, Work
from tutti.transports.base import Operation

_SETTLE_S = 1.0
"""How long workers wait for each other after a loss, so that what they have pushed is applied."""
_LOOK_S = 0.001


def _copy_served(server: Server, served: list[dict[str, Any]]) -> Operation:
    """Let a server apply all that has arrived, and copy what it holds. Runs in its thread."""
    served += server.copy_after_loss()
    yield from ()


class SavedShards(ParameterServerWorker):
    """Saves and loads the servers' state, and what this worker has not pushed yet. `MessageWorker` has the fields."""

    _channel: Transport
    _config: ServerGroupConfig
    _server: Server | None
    _shards: list[WorkerShard]
    _shards_by_server: dict[int, list[WorkerShard]]
    _requests: RequestSender
    _completed = 0
    """Where steps are exact: the version that the last one has made on all shards."""

    def _pull_all(self, kind: RequestKind) -> None:
        raise NotImplementedError

    def _enter_barriers(self) -> list[Work]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the servers' optimisers by parameter, and what this worker's codec has not pushed yet."""
        self.consensus()
        states = self._requests.fetch_states(self.replica.slots)
        self._pull_all(RequestKind.BARRIER)  # No worker pushes again before all have read.
        state = {"optimizer": states, "buffers": PerRank(own_buffers(self.replica))}
        if self._config.codec is not None:
            memory = CodecMemory.collect(self._codec_states)
            state["residuals"] = memory.state_dict(self._config.codec, self.gradient_share)
        return state

    def state_after_loss(self) -> dict[str, Any]:
        """Return what this rank serves, and what its codec has not pushed yet.

        A lost rank takes its shards with it, but for those that have copies. Of the others the model holds the values
        that were read last, and what the optimiser kept for them is lost. What the ranks that are left have is brought
        together by `load_state_dict`.
        """
        if not self._config.exact:
            self._settle_after_loss()
        served: list[dict[str, Any]] = []
        if self._server is not None:
            self._channel.spawn(_copy_served(self._server, served)).wait()
        own = {
            "exact": self._config.exact,
            "completed": self._completed,
            "num_shards": len(self._shards),
            "shards": served,
        }
        state: dict[str, Any] = {
            # Also of a rank that takes over the state of another one: nobody else may have it.
            "served": PerRank(own, new=NOTHING, stays=True),
            "buffers": PerRank(own_buffers(self.replica)),
        }
        if self._config.codec is not None:
            memory = CodecMemory.collect(self._codec_states)
            state["residuals"] = memory.state_dict(self._config.codec, self.gradient_share)
        return state

    def _settle_after_loss(self) -> None:
        """Let the servers that are left apply what was pushed, if the other workers are there soon.

        They may be in a call in which they wait for this rank to go: so the wait is short. Updates that have not
        arrived by then are lost in part.
        """
        if self._strategy.clips_means or (self._consistency.bound is None and self._consistency.quorum > 1):
            return  # Servers that step together wait for the lost one.
        transport = self._channel
        deadline_s = transport.now() + _SETTLE_S
        works = self._enter_barriers()
        while not all(work.done() for work in works) and transport.now() < deadline_s:
            transport.sleep(_LOOK_S)

    def load_state_dict(self, state: dict[str, Any]) -> set[str]:
        """Make servers start again from the model as it is here, and from this state of the optimiser."""
        self._load_buffers(state)
        used = {"buffers"}
        state = self._with_kept(state)
        if "optimizer" in state:
            used.add("optimizer")
            self._restart_servers(state)
            self.restore_local()  # Servers have the state now that `job.restore` may have loaded into the optimiser.
        if self._config.codec is not None and "residuals" in state:
            used.add("residuals")
            self._load_residuals(state["residuals"], self._config.codec)
        return set(state) - used

    @property
    def _codec_states(self) -> list[tuple[State, list[Span]]]:
        """The codec's state of each shard whose gradients are compressed, with the parameters in it."""
        found = []
        for shard in self._shards:
            slots = self.replica.buckets[shard.spec.bucket_index].slots
            spans = [Span(slots[each.slot_index], each.start, each.stop, each.offset) for each in shard.spec.segments]
            found += [(shard.codec_state, spans)] if shard.spec.groups is not None else []
        return found

    def _load_residuals(self, saved: dict[str, Any], codec: Codec) -> None:
        """Take over what workers had not pushed yet; what the codec cannot keep goes with the next gradient."""
        states = self._codec_states
        memory = CodecMemory.inherited(saved, codec, self.gradient_share, self._rank, self._config.workers)
        memory.distribute(states)
        self.add_to_gradient(owed(saved, codec, [span.slot.name for _, spans in states for span in spans]))

    def _restart_servers(self, state: dict[str, Any]) -> None:
        """Load all servers. Each rank that serves loads its own; dedicated servers are loaded by the leader."""
        self._expect_new_parameters(taken=True)
        # Before the consensus, which loads the servers' old values into the model.
        images = {bucket.index: bucket.image() for bucket in self.replica.buckets}
        self.consensus()
        works = [
            self._channel.spawn(self._load_server(server, state, images))
            for server in self._requests.servers
            if server == self._rank or (self.is_leader and self._server is None)
        ]
        for work in works:
            work.wait()
        for shard in self._shards:
            # With its old clock, this worker would ask for versions that the servers reach much later.
            shard.clock = 0  # Servers start again from version 0.
        # The rank that loads a server enters the barrier afterwards: so all have loaded when it completes.
        self._pull_all(RequestKind.BARRIER)
        record_loaded(self._user_changes)

    def _load_server(self, server: int, state: dict[str, Any], images: dict[int, Tensor]) -> Operation:
        """Send a server the values of its shards, cut from `images` by bucket, and the state."""
        shards = [shard.spec for shard in self._shards_by_server.get(server, ())]
        shards += [shard.spec for shard in self._shards if self._config.copy_of(shard.spec) == server]
        values = {str(shard.index): images[shard.bucket_index][shard.bucket_range].clone() for shard in shards}
        server_state = {"values": values, "optimizer": state["optimizer"]}
        yield from self._requests.load_state(server, server_state, shards[0].index)
