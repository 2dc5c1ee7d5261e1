"""Worker whose parameters are in memory that all workers of the host share. `__init__.py` of this package says how."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from tutti.replica import Bucket, Replica
from tutti.replica.buckets import Slot
from tutti.strategies.parameter_server.optimizer_options import OptimizerOptions
from tutti.strategies.parameter_server.shard_optimizer import merge_segment_states
from tutti.strategies.parameter_server.shared_memory.context import (
    LocalBucket,
    SharedMemoryContext,
    applies_own_updates,
    steps_jointly,
)
from tutti.strategies.parameter_server.shared_memory.counters import CounterLayout, ShardCounters
from tutti.strategies.parameter_server.shared_memory.joint_stepping import JointStepper
from tutti.strategies.parameter_server.shared_memory.membership import ClockMembership
from tutti.strategies.parameter_server.shared_memory.parameters import SharedParameters, cut_for_host
from tutti.strategies.parameter_server.shared_memory.push_buffers import PushBuffers
from tutti.strategies.parameter_server.shared_memory.pushing import GradientPusher
from tutti.strategies.parameter_server.shared_memory.reading import ParameterReader
from tutti.strategies.parameter_server.shared_memory.shard_versions import ShardVersions
from tutti.strategies.parameter_server.shared_memory.stepping import ShardStepper, Stepper
from tutti.strategies.parameter_server.shared_memory.worker_registry import (
    CONSENSUS,
    FINISH,
    STATE,
    RegistryCounters,
    WorkerRegistry,
)
from tutti.strategies.parameter_server.worker import ParameterServerWorker
from tutti.strategies.resumable import KnownSteps
from tutti.strategies.saved_state import PerRank, own_buffers
from tutti.strategies.user_changes import record_loaded

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer
    from tutti.transports.shared_memory.transport import SharedMemoryTransport


class SharedMemoryWorker(ParameterServerWorker):
    """One worker among those of a host, all of which take steps on the shared parameters."""

    tolerates_loss = True

    def __init__(self, replica: Replica, transport: "SharedMemoryTransport", strategy: "ParameterServer") -> None:
        super().__init__(replica, transport, strategy)
        # Buckets in private memory: gradients are copied into shared rings, or used by this worker alone.
        replica.allocate(transport.inner, strategy.bucket_bytes)
        replica.arrange([slot.name for slot in replica.slots])
        self._context = context = self._map(transport)
        versions = ShardVersions(context)
        stepper: Stepper = (JointStepper if steps_jointly(strategy) else ShardStepper)(context, versions)
        self._pusher = GradientPusher(context, versions, stepper)
        self._reader = ParameterReader(context, stepper)
        self._membership = ClockMembership(context, versions, stepper, self._reader)
        self._start_listening()

    def _map(self, transport: "SharedMemoryTransport") -> SharedMemoryContext:
        """Map everything that is shared. Collective."""
        replica, strategy, consistency = self.replica, self._strategy, self._consistency
        buckets, applies_own = replica.buckets, applies_own_updates(consistency)
        shards = cut_for_host(replica, transport.size, whole_buckets=applies_own or steps_jointly(strategy))
        # 1. Indices of all counters, then the memory for them: the number of counters decides its size.
        layout = CounterLayout()
        registry_counters = RegistryCounters(layout, transport.size)
        counters = ShardCounters(layout, len(buckets), len(shards), transport.size)
        flags = transport.flags(layout.num_counters)
        counters.open(flags)
        registry = WorkerRegistry(
            transport,
            registry_counters,
            flags,
            # Bucket 0 stands for all: the log needs no more.
            clock=lambda worker: int(counters.values[counters.clock[0, worker]]),
            # Grows with every push and every step, so a wait goes on as long as any worker trains.
            progress=lambda: int(counters.values[counters.clock].sum() + counters.values[counters.version].sum()),
            on_loss=self._remove_lost,
        )
        if self._rank == 0:  # Once, for all: the last collective call below orders it before the others' first read.
            counters.values[counters.is_member] = 1
        # 2. Values and optimiser state, filled in by rank 0.
        parameters = SharedParameters(replica, transport, shards)
        # A worker may have bound + 1 updates that are not applied yet (`push_buffers.py`).
        depth = 0 if applies_own else (consistency.bound or 0) + 1
        num_options = len(OptimizerOptions(replica.optimizer))
        pushes = PushBuffers(replica, transport, parameters.by_bucket, num_options, depth)
        transport.shared_tensor(1, torch.uint8)  # Collective: no rank goes on before rank 0 has filled in its values.
        # 3. Private memory: which versions this worker's model holds.
        local = [LocalBucket([0] * len(shards_of_bucket)) for shards_of_bucket in parameters.by_bucket]
        return SharedMemoryContext(
            replica,
            transport,
            strategy,
            registry,
            counters,
            parameters,
            pushes,
            local,
            self.events,
            self._staleness,
        )

    def _remove_lost(self, worker: int) -> None:
        # The registry is older than the membership, but looks for lost workers only in waits: both exist by then.
        self._membership.remove_lost(worker)

    @property
    def bytes_sent(self) -> int:
        return self._pusher.num_bytes + self._reader.num_bytes

    @property
    def version(self) -> int:
        return min(local.version for local in self._context.buckets)

    @property
    def is_leader(self) -> bool:
        return self._context.registry.is_leader

    def steps_of(self, rank: int) -> KnownSteps:
        counters = self._context.counters
        pushed = counters.values[counters.num_steps[:, rank]]
        if applies_own_updates(self._consistency):
            # It steps shard by shard, and its clock says how many of these steps it has come to the end of.
            return KnownSteps(int(counters.values[counters.clock[:, rank]].min()), int(pushed.max()))
        if self._consistency.bound is None:
            return KnownSteps(int(pushed[0]), int(pushed[0]))  # Bucket 0 stands for the whole update.
        # What is pushed is applied, also after a loss; killed within its pushes, a rank is in some shards only.
        return KnownSteps(int(pushed.min()), int(pushed.max()))

    @property
    def num_cut_short(self) -> int:  # type: ignore[override]
        return self._context.counters.flags.value(self._context.counters.num_cut_short)

    def _push(self, bucket: Bucket, norm: float) -> None:
        self._pusher.push(bucket, self._weight, norm, self._options, self._is_void(bucket))

    def _wait_for_all(self) -> None:
        self._reader.wait_and_read(range(len(self._context.buckets)))

    def _wait_for_slots(self, slots: Iterable[Slot]) -> None:
        self._reader.wait_and_read({slot.bucket.index for slot in slots})

    def _request_stop(self) -> None:
        self._context.registry.request_stop()

    def consensus(self, optimizer: bool = False, call: str = CONSENSUS) -> None:
        """Wait for all living workers, which must be in the same call, and read what all updates have made."""
        self._expect_new_parameters()
        if optimizer and self._user_state is not None:
            self._user_state.fill(self._copy_states(call))  # In the barrier of the consensus.
        else:
            self._wait_for_all()
            self._membership.barrier(call=call)
        record_loaded(self._user_changes)

    def leave(self) -> None:
        self._expect_new_parameters()
        self._wait_for_all()
        self._membership.leave()
        record_loaded(self._user_changes)

    def join(self) -> None:
        self._expect_new_parameters()
        self._membership.join()
        self._wait_for_all()
        record_loaded(self._user_changes)

    def finish(self) -> None:
        self.consensus(optimizer=True, call=FINISH)
        # The barrier has made this worker a member again: others that still train must not wait for it.
        self._membership.withdraw()
        self._context.registry.leave()
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state by parameter, and this worker's own buffers."""
        return {"optimizer": self._copy_states(), "buffers": PerRank(own_buffers(self.replica))}

    def _copy_states(self, call: str = STATE) -> dict[str, Any]:
        """Return a copy of the optimiser's state, by parameter, in a barrier of all workers."""
        segment_states: list[Any] = []

        # Runs within the barrier, where no worker steps: state and values belong to one version.
        def copy(number: int) -> None:
            parameters = self._context.parameters
            for optimizer, state in zip(parameters.optimizers, parameters.states, strict=True):
                if state is not None:
                    state.refresh()
                    segment_states.extend(optimizer.copy_states())

        self._expect_new_parameters()
        self._wait_for_all()
        self._membership.barrier(copy, call)
        return merge_segment_states(segment_states, {slot.name: slot for slot in self.replica.slots})

    def load_state_dict(self, state: dict[str, Any]) -> set[str]:
        """Start again from the model as it is on the leader, and from this state of the optimiser."""
        self._load_buffers(state)
        state = self._with_kept(state)
        if "optimizer" not in state:
            return set(state) - {"buffers"}
        self._expect_new_parameters(taken=True)
        # First of all: the waits below overwrite the model with the old shared values.
        images = [bucket.image() for bucket in self.replica.buckets]

        def load() -> None:
            self._context.parameters.load(images, state["optimizer"])

        self._wait_for_all()
        self._membership.barrier(lambda number: self._context.registry.run_on_leader(number, load))
        self.restore_local()  # Servers have the state now that `job.restore` may have loaded into the optimiser.
        return set(state) - {"optimizer", "buffers"}
