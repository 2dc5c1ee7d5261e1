"""Worker that pushes and pulls by messages. `messages/worker/__init__.py` says how it works."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tutti.errors import RankLost
from tutti.events import PULL, Event
from tutti.replica import Bucket, Replica
from tutti.replica.buckets import Slot
from tutti.strategies.parameter_server.messages.group import join_group
from tutti.strategies.parameter_server.messages.wire import RequestKind
from tutti.strategies.parameter_server.messages.worker.context import WorkerContext
from tutti.strategies.parameter_server.messages.worker.puller import ShardPuller
from tutti.strategies.parameter_server.messages.worker.pusher import ShardPusher
from tutti.strategies.parameter_server.messages.worker.requests import RequestSender
from tutti.strategies.parameter_server.messages.worker.saved_state import SavedShards
from tutti.strategies.parameter_server.messages.worker.shard import WorkerShard, make_worker_shard
from tutti.strategies.resumable import KnownSteps
from tutti.strategies.user_changes import record_loaded
from tutti.transports import Transport, Work
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer


class MessageWorker(SavedShards):
    """A worker of parameter servers, together with the server of its rank if that serves too."""

    def __init__(self, replica: Replica, transport: Transport, strategy: "ParameterServer") -> None:
        super().__init__(replica, transport, strategy)
        group = join_group(replica, transport, strategy)
        self._channel, self._config = group.transport, group.config
        # Before this worker pushes anything: those of other ranks may push here at once.
        self._server = group.start_server(replica) if self._rank in self._config.servers else None
        self._shards = [
            make_worker_shard(shard, replica, self._config, self._rank, self._server) for shard in group.shards
        ]
        # Three indexes of the same shards: pushes come by bucket, replies by server, and waits of modules by slot.
        self._shards_by_bucket: dict[int, list[WorkerShard]] = {bucket.index: [] for bucket in replica.buckets}
        self._shards_by_server: dict[int, list[WorkerShard]] = {}
        self._shards_by_slot: dict[Slot, list[WorkerShard]] = {}
        for shard in self._shards:
            self._shards_by_bucket[shard.spec.bucket_index].append(shard)
            self._shards_by_server.setdefault(shard.server, []).append(shard)
            for segment in shard.spec.segments:
                slot = replica.buckets[shard.spec.bucket_index].slots[segment.slot_index]
                self._shards_by_slot.setdefault(slot, []).append(shard)
        # Those that only have copies, too: they must know who is there.
        config = self._config
        holders = {rank for shard in group.shards for rank in (config.server_of(shard), config.copy_of(shard))}
        servers = sorted(rank for rank in holders if rank is not None)
        self._num_steps = 0
        self._barriers: dict[int, Work] = {}
        """The last barrier at each server."""
        self._requests = RequestSender(self._channel, self._config, self._server, servers)
        context = WorkerContext(replica, self._config, self._channel, self.events, self._staleness)
        self._puller = ShardPuller(context, self._shards, self._requests)
        self._pusher = ShardPusher(context, self._requests, self._puller)
        if self._server is not None:
            # Before the first push, to which that server may reply at once.
            self._server.connect_local_worker(self._puller.deliver_locally)
        self._bytes_sent_before = self._channel.bytes_sent  # Setting up is no part of the first step.
        self.equal_after_steps = self._config.exact
        if self._config.factors:
            replica.keep_factors()
        self._start_listening()

    @property
    def bytes_sent(self) -> int:
        return self._channel.bytes_sent

    @property
    def version(self) -> int:
        """The oldest version that the model holds of any shard."""
        return min(shard.version for shard in self._shards)

    @property
    def is_leader(self) -> bool:
        return self._rank == self._puller.leader

    @property
    def tolerates_loss(self) -> bool:
        return self._server is None  # Otherwise a server, and its shards, would be lost with this rank.

    def steps_of(self, rank: int) -> KnownSteps | None:
        if self._config.exact:
            return None  # A step counts on all ranks or on none.
        pushed = [] if self._server is None else self._server.num_pushed(rank)
        if not pushed:
            # No shard is here: the servers of others know. If there is none left, it was about as far as this rank.
            return KnownSteps(0, self._num_steps, is_estimate=True)
        # Its own shards are those that the others had read last, which may be a step behind.
        return KnownSteps(max(0, min(pushed) - 1), max(pushed))

    # Joining and leaving

    def consensus(self, optimizer: bool = False) -> None:
        self._expect_new_parameters()
        self._wait_for_pending()
        self._pull_all(RequestKind.BARRIER)
        if optimizer and self._user_state is not None:
            self._user_state.fill(self._requests.fetch_states(self.replica.slots))
            self._pull_all(RequestKind.BARRIER)  # No worker pushes again before all have read.
        record_loaded(self._user_changes)

    def leave(self) -> None:
        """Take no part until `join`: the others go on without this worker.

        Where means are clipped, all servers step together, and could not agree on when this worker is back. Then
        nothing is sent, and the others wait for it. They do so, too, where a step counts on all workers or on none.
        """
        self._expect_new_parameters()
        self._wait_for_pending()
        if not self._config.needs_all_workers:
            self._requests.send_to_all(RequestKind.LEAVE)
        record_loaded(self._user_changes)

    def join(self) -> None:
        """Take part again, from the servers' present versions."""
        self._expect_new_parameters()
        if not self._config.needs_all_workers:
            self._pull_all(RequestKind.JOIN)
        record_loaded(self._user_changes)

    def finish(self) -> None:
        self.consensus()  # Every worker is here: no server has an update left to apply.
        if self._user_state is not None:
            self._user_state.fill(self._requests.fetch_states(self.replica.slots))
        self._requests.disconnect()
        self.close()

    def _request_stop(self) -> None:
        # First to all servers, then leave: a server that lost this worker before STOP would go on without it.
        self._requests.send_to_all(RequestKind.STOP)
        self._requests.disconnect_after_stop()

    # Pushing and pulling

    def before_step(self) -> None:
        super().before_step()
        if self._config.exact:
            # Here and not in the next forward pass: this step counts if all servers have taken it, or is void.
            self._wait_for_pending()
            self._completed = self.version

    def _push(self, bucket: Bucket, norm: float) -> None:
        shards = self._shards_by_bucket[bucket.index]
        self._num_steps += bucket.index == 0
        self._pusher.push(shards, bucket, self._weight, norm, self._options, self._is_void(bucket))

    def _wait_for_all(self) -> None:
        for shard in self._shards:
            self._puller.wait(shard)

    def _wait_for_slots(self, slots: Iterable[Slot]) -> None:
        if self.replica.lost is not None:
            return  # The step that begins is void.
        try:
            for slot in slots:
                for shard in self._shards_by_slot[slot]:
                    if shard.pending_pull is not None:
                        self._puller.wait(shard)
        except RankLost as error:
            # In a forward pass, where nobody else would note it.
            if not self.replica.survives:
                raise
            self.replica.lost = error

    def _wait_for_pending(self) -> None:
        """Wait for every pull that was asked for."""
        for shard in self._shards:
            self._puller.wait(shard, force=True)

    def _load_arrived(self) -> None:
        for shard in self._shards:
            if shard.pending_pull is not None and shard.pending_pull.done():
                self._puller.wait(shard, force=True)

    def _pull_all(self, kind: RequestKind) -> None:
        """Send a request that every server answers with all of its shards, and load them."""
        start_s = self.transport.now()
        for shard in self._shards:
            shard.reply = None  # Replies of earlier pulls must not be taken for those of this request.
        # All servers are asked before any is waited for: where they step jointly, none can complete its barrier alone.
        works = {server: self._channel.spawn(self._pull_from(server, kind)) for server in self._requests.servers}
        self._barriers = works if kind == RequestKind.BARRIER else {}
        for work in works.values():
            self._requests.wait(work)
        for shard in self._shards:
            self._puller.load(shard)
            if self._consistency.bound is not None:
                # As the server's ledger does for a worker that joins: its next push is for the next version.
                shard.clock = max(shard.clock, shard.version)
        self.events.record(Event(PULL, start_s, self.transport.now()))

    def _enter_barriers(self) -> list[Work]:
        # One that was entered before the loss was noticed, and is not over, is the same as that of the others.
        return [
            work
            if (work := self._barriers.get(server)) is not None and not work.done()
            else self._channel.spawn(self._pull_from(server, RequestKind.BARRIER))
            for server in self._requests.servers
        ]

    def _pull_from(self, server: int, kind: RequestKind) -> Operation:
        """Send a request to a server, and receive the replies about all of its shards."""
        yield from self._requests.send(server, kind)
        # One after the other, though replies come in another order: each shard has its own tags.
        for shard in self._shards_by_server.get(server, ()):
            yield from self._puller.receive(shard)
