"""`ElasticJob`: how a job goes on with other ranks, after some were lost and when new ones come.

How it works
------------
Ranks change at two kinds of places, where no batch and no call is under way on this rank: between two batches
(`boundary`, called by what `tutti.shard` returned), and around collective calls (`call`, `collective`).

*A loss.* Wherever this rank waits for a lost one, `RankLost` ends the wait. In a step the replica notes it
(`Replica.lost`): the step becomes void, its gradients are dropped, and the optimiser does nothing. At the next place
this rank regroups. Ranks that do not wait for anybody see the loss there, too. Strategies that go on without a lost
rank, and changes without a loss, end the generation after the same step on all ranks (`ElasticMember.stops_here`).

*Regrouping.* 1. What the strategy has on this rank is saved in memory (`state_after_loss`, or `state_dict` where all
ranks are there), and the exchange and the transport are closed, which ends the waits of others for this rank. 2. The
rank enters the next generation, which waits for all that are alive. 3. The new transport is opened. 4. Ranks that miss
something take over the state of one that does not (`transfer`). 5. The positions in the data are those that are
committed, and every rank gets its share of the rest. 6. The strategy is attached anew, and continues from its state. A
loss in steps 3 to 6 starts again at 2: nothing was lost by then, because states are changed only by what is complete.

*Joining.* A new rank that has distributed its model asks to be in the next generation where it is about to train
(`arrive`). All that it prepares until then is prepared while the others train; only then do they stop for it. In step 4
it gets the state, from several ranks (`transfer`). If it or a rank that sends is lost meanwhile, all go on as after any
loss, and what it had received is dropped.

*Leaving.* A rank that is asked to stop (SIGTERM) has the generation end at a common place, and enters the next one with
"leaving". If others stay, it is let go and ends; nothing is void. If all leave, they save the state and end.

*Who misses something.* Ranks count what they complete together (`_progress`): steps of all ranks, ends of blocks,
collective calls. A rank can be behind others if a loss ended its wait and not theirs. Nobody can be ahead of a rank by
more than what it has contributed to, so the state of the one that is furthest has everything. A rank that was behind in
a collective call does not repeat it: it takes the answer that the others got.

The samples of a void step are not committed, so they come again. What a lost rank had done alone since the last
agreement (a block of local steps) is lost with it, and its samples come again, too.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from tutti.collectives.calls import CollectiveCalls, Combine
from tutti.coordination.elastic_member import Generation
from tutti.data.elastic_data import next_epoch
from tutti.data.sharded_data import ShardedData
from tutti.errors import ConfigError, RankLost
from tutti.job.attach import attach_again, detach, strategy_of_next_step
from tutti.job.elastic.ends import leave, stop_for_too_few
from tutti.job.elastic.positions import positions, with_losses
from tutti.job.elastic.transfer import SharedState, receive_state, send_state, state_bytes
from tutti.job.elastic.void_step import VoidStep
from tutti.job.membership import MembershipListeners
from tutti.job.metrics import Changes
from tutti.replica.state import load_model_state, load_optimizer_state
from tutti.strategies import Exchange
from tutti.strategies.saved_state import for_new_ranks, from_sent, of_this_rank
from tutti.transports import SingleRankTransport, for_devices
from tutti.world import Elasticity, World

if TYPE_CHECKING:
    from tutti.job.handle import Job

_log = logging.getLogger("tutti")


class ElasticJob:
    """The part of a job that changes its ranks."""

    def __init__(self, job: "Job", world: World, elastic: Elasticity) -> None:
        self._job = ref(job)  # Weak: the world holds this, and outlives the job.
        self._world, self._elastic = world, elastic
        self._num_calls = self._num_agreements = 0
        self._answer: Any = None
        """Of the last collective call."""
        self._state_of_strategy: dict[str, Any] = {}
        """While ranks change: the state from which the strategy continues."""
        self._is_agreed = False
        """Whether all ranks of the last generation had a part in it, so that it has everything."""
        self._has_state = not elastic.is_new
        """Whether this rank has all that the others have; not before a new one has taken it over."""
        self.void_step = VoidStep(job)
        self._waits_to_join = self._arriving = elastic.is_new
        """Whether this rank has come to others, and has not joined them; and has not come to its first batch."""
        self._has_trained = False
        """Whether it has come to its first batch."""
        self.membership = MembershipListeners()
        self.changes = Changes()
        """What changes of the ranks have cost so far."""

    # Places where ranks may change

    def boundary(self, *, at_end: bool = False, is_over: bool = False) -> None:
        """This rank is between two batches: change the ranks, if it is time.

        Args:
            at_end: whether the last batch of a loop was given out. Then ranks change only after a loss.
            is_over: whether the last batch of all was given out. Those that no step has used do not delay a change.
        """
        job = self._the_job
        if not (job._replica.in_consensus or job._replica.away):
            self._change_ranks(job, at_end, is_over)
            self.membership.notify()

    def _change_ranks(self, job: "Job", at_end: bool, is_over: bool) -> None:
        replica, counts = job._replica, self._world.sample_counts
        is_unused = False
        if not at_end:
            self.arrived(trains=True)
        if replica.lost is None:
            if replica.waits_for_batch:  # The rest of the batch in which ranks have changed is over.
                replica.waits_for_batch = False
                self.changes = self.changes.with_void_step(self.void_step.put_back())
            if counts.num_committed < counts.num_batches:
                counts.commit_void_steps()
            is_unused = counts.num_committed < counts.num_batches
            if is_unused and not is_over:
                return  # Gradients of several batches accumulate, or one was drawn and not trained on.
            if self._elastic.requested():
                self._elastic.member.leave()
            lost = self._elastic.member.lost() and not job._exchange.tolerates_loss
            # All ranks come here after the last step of a synchronous start, or after the same step as another.
            changes = not at_end and (job._must_change or self._elastic.member.stops_here())
            if not lost and not changes:
                return
            if lost:
                replica.lost = RankLost(f"rank {self._world.transport.world_rank}: a rank is lost.")
        self.regroup()
        if is_unused:  # Its samples come again: what was computed from them must change nothing.
            self.void_step.last_until_next_batch()

    def arrived(self, *, trains: bool = False) -> None:
        """This rank is where the others are: behind the last batch if it joined too late for one, or about to train."""
        # Whatever the others have in their loops, it must have by its first batch.
        is_first = trains and (self._arriving or not self._has_trained)
        if self._arriving:  # From here on it is in the calls of the others.
            self._world.renew(self._world.rank, self._world.size, self._world.transport)
        self._arriving, self._has_trained = False, self._has_trained or trains
        if is_first:
            self._the_job._checkpoints.parts.refuse_unknown(self._the_job._replica.optimizer)

    def call(self, name: str, value: Any, combine: Combine, *, elastic: bool) -> Any:
        """Make a collective call among the ranks that are there, also if some are lost meanwhile."""
        self.membership.refuse_collective()
        if self._arriving:
            if isinstance(value, ConfigError):
                raise value
            return combine({self._world.rank: value})

        def answer() -> Any:
            self._answer = self._world.calls.call(name, value, combine, elastic=elastic)
            return self._answer

        return self._complete(answer, lambda: self._answer)

    def collective(self, work: Callable[[], Any], *, same_answer: bool) -> Any:
        """Do what all ranks do together, again if some are lost meanwhile, if others had not done it."""
        self.membership.refuse_collective()
        if self._arriving:
            return work() if same_answer else None
        if not same_answer:
            return self._complete(work, lambda: None)

        def answer() -> Any:
            self._answer = work()
            return self._answer

        return self._complete(answer, lambda: self._answer)

    def _complete(self, work: Callable[[], Any], done_by_others: Callable[[], Any]) -> Any:
        """Do something until it is complete on this rank, or was on others before a loss."""
        number = self._num_calls
        while True:
            if self._the_job._replica.lost is not None:
                self._regroup_in_call()
            if self._num_calls > number:
                return done_by_others()
            try:
                result = work()
            except RankLost as error:
                self._the_job._replica.note_loss(error)
            else:
                self._num_calls += 1
                return result

    @property
    def _the_job(self) -> "Job":
        job = self._job()
        assert job is not None
        return job

    # Regrouping

    def _regroup_in_call(self) -> None:
        """Go on with the ranks that are there now, in the middle of a collective call.

        A batch may be under way, which comes again: the rest of it must change nothing. The same holds where this rank
        has taken over the state of one that is further. Nobody joins here, because the next thing is not a batch.
        """
        job = self._the_job
        replica, counts = job._replica, self._world.sample_counts
        in_batch = counts.num_committed < counts.num_batches
        in_consensus = replica.in_consensus
        took_over = self.regroup(in_call=True)
        if in_batch or took_over:
            self.void_step.last_until_next_batch()
        elif in_consensus:
            try:  # The model shows what all agree on, as before.
                job._exchange.consensus()
            except RankLost as error:
                replica.note_loss(error)

    @property
    def _progress(self) -> int:
        """What this rank has completed together with the others."""
        job = self._the_job
        steps = job._replica.steps if job._exchange.equal_after_steps else self._num_agreements
        return steps + self._num_calls

    def on_exchange(self) -> Callable[[], None]:
        """An exchange of local steps starts; return what to call when it has brought them together."""
        positions = [(data, data.position) for data in self._elastic.data]

        def agreed() -> None:
            self._num_agreements += 1
            for data, position in positions:
                data.agreed_position = position

        return agreed

    def regroup(self, *, in_call: bool = False) -> bool:
        """Go on with the ranks that are there now; return whether this rank has taken over the state of another."""
        job, started_s = self._the_job, self._world.transport.now()
        job._replica.activity.enter("membership")
        self._state_of_strategy = self._leave_exchange()
        info, took_over = {**self._info(job._exchange), "in_call": int(in_call)}, False
        before = self._elastic.member.generation
        assert before is not None
        while True:
            end_generation(job)
            self._elastic.connections.disconnect()
            old, new = self._elastic.member.generation, self._elastic.member.enter(info)
            assert old is not None
            if new is None:
                leave(job, self._elastic, alone=True)
            try:
                took_over |= self._go_on(old, new)
                break
            except RankLost as error:  # Another one. What is complete on this rank stays so.
                _log.info("rank %d: a loss while ranks change: %s", self._world.transport.world_rank, error)
                info = {**self._info(None), "in_call": int(in_call)}
        self.changes = replace(self.changes, seconds=self.changes.seconds + self._world.transport.now() - started_s)
        self.membership.note(before, new)
        if self._elastic.member.all_leave:
            leave(job, self._elastic, alone=False)
        if new.too_few:
            stop_for_too_few(job, self._elastic, new)
        return took_over

    def _leave_exchange(self) -> dict[str, Any]:
        """Return the strategy's state on this rank, which then takes no more part in exchanges."""
        job, self._is_agreed = self._the_job, False
        if job._replica.lost is None:
            try:
                state = job._exchange.state_dict()
                if job._exchange.tolerates_loss:  # What servers hold, for example.
                    job._exchange.consensus(optimizer=True)
                self._is_agreed = True
                return state
            except RankLost as error:  # While all wanted to end together, one was lost.
                job._replica.lost = error
        else:
            self.changes = self.changes.with_void_step(self.void_step.put_back())
        return job._exchange.state_after_loss()

    def _info(self, exchange: Exchange | None) -> dict[str, Any]:
        """Return what all others learn of this rank when it enters a generation.

        Args:
            exchange: that of the generation that ends; None if no step was taken in it.
        """
        known, cut_short = {}, 0
        if exchange is not None:
            others = (rank for rank in range(exchange.transport.size) if rank != exchange.transport.rank)
            known = {str(rank): exchange.steps_of(rank) for rank in others}
            cut_short = exchange.num_cut_short
        state, equal = self._state_of_strategy, self._the_job._exchange.equal_after_steps
        return {
            "progress": self._progress,
            "is_agreed": int(self._is_agreed),
            "leaving": int(bool(self._elastic.requested())),
            "digest": _digest(state),
            "positions": [list(data.position) for data in _data_of(self._elastic)],
            "agreed": [list(data.position if equal else data.agreed_position) for data in _data_of(self._elastic)],
            "trails": [] if equal else [data.trail for data in _data_of(self._elastic)],
            "steps": {rank: list(steps) for rank, steps in known.items() if steps is not None},
            "cut_short": cut_short,
            # Of a state that is the same on all ranks which have as much; 0 where each has its own.
            "equal_bytes": state_bytes(self._the_job._replica) if equal else 0,
            "synchronous_steps": self._the_job._replica.synchronous_steps,
            "has_residual": int(any(name.endswith("residuals") for name in state)),
        }

    def _go_on(self, old: Generation, new: Generation) -> bool:
        """Continue in a new generation; return whether this rank has taken over another one's state. Collective."""
        world = self._world
        source, data_here = _source(new), _data_of(self._elastic)
        found = [positions(data, old, new, source, number) for number, data in enumerate(data_here)]
        self.changes = with_losses(self.changes, data_here, old, new)
        world.rank, world.size = self._elastic.member.rank, len(new.members)
        # Before anything that may fail: all ranks that come here do the same with the same numbers.
        for data, each in zip(data_here, found, strict=True):
            data.regroup(each)
        transport = self._elastic.connections.connect(new)
        world.renew(transport.rank, transport.size, transport)
        took_over = self._synchronise(new)
        _start_as(self._the_job, new)
        begin_generation(self._the_job, of_this_rank(self._state_of_strategy, world.rank, world.size))
        return took_over

    def _synchronise(self, new: Generation) -> bool:
        """Let ranks that miss something take over the state of one that does not; return whether this one did.

        Collective.
        """
        source = _source(new)
        first = new.members[source].info
        misses = [
            each.after < 0 or any(each.info[name] != first[name] for name in ("progress", "is_agreed", "digest"))
            for each in new.members
        ]
        if not any(misses):
            return False
        rank, takers = self._world.rank, [taker for taker, missing in enumerate(misses) if missing]
        sources = [source]
        if first["equal_bytes"]:
            others = [other for other, each in enumerate(new.members) if not misses[other] and other != source]
            sources += [each for each in others if new.members[each].info["equal_bytes"] == first["equal_bytes"]]
        if misses[rank]:
            self._take_over(receive_state(self._world.transport, sources))
        elif rank in sources:
            some_return = any(new.members[taker].after >= 0 for taker in takers)
            send_state(self._state(with_answer=some_return), self._world.transport, sources, takers)
        return misses[rank]

    def _state(self, *, with_answer: bool) -> SharedState:
        """Return what another rank needs to go on as this one does.

        Args:
            with_answer: whether it may have missed the end of a collective call: not if it is new.
        """
        job = self._the_job
        model = dict(job._replica.model.state_dict())
        trained = {name: model.pop(name) for name in [slot.name for slot in job._replica.slots] if name in model}
        own = {
            "model": model,
            "steps": job._replica.steps,
            "num_calls": self._num_calls,
            "num_agreements": self._num_agreements,
            "is_agreed": self._is_agreed,
            "answer": self._answer if with_answer else None,
            "exchange": for_new_ranks(self._state_of_strategy),
            "data": [data.export() for data in _data_of(self._elastic)],
            "evaluated": [list(next_epoch(data)) for data in self._elastic.evaluated],
            "parts": job._checkpoints.parts.states(),
            "schedules": job._checkpoints.schedules.export(),
        }
        return SharedState({"model": trained, "optimizer": job._replica.optimizer.state_dict()}, own)

    def _take_over(self, received: SharedState) -> None:
        """Continue from the state of other ranks. Not collective: it is complete, or not done at all."""
        job, state = self._the_job, received.own
        with torch.no_grad():
            load_model_state(job._replica.model, {**state["model"], **received.equal["model"]})
            load_optimizer_state(job._replica.optimizer, received.equal["optimizer"])
        job._replica.steps = state["steps"]
        self._num_calls, self._num_agreements = state["num_calls"], state["num_agreements"]
        self._answer, self._is_agreed = state["answer"], state["is_agreed"]
        self._state_of_strategy, self._has_state = from_sent(state["exchange"], self._state_of_strategy), True
        known = {data.number: data for data in self._elastic.data}
        for position in state["data"]:
            if (data := known.get(position["number"])) is not None:
                data.load_state_dict(position)
                data.interrupted()
        self._elastic.data_states = [each for each in state["data"] if each["number"] not in known]
        self._elastic.evaluated_epochs = dict(state["evaluated"])
        job._checkpoints.parts.inherit(state["parts"])
        job._checkpoints.schedules.take_over(state["schedules"])

    def arrive(self) -> None:
        """Join the others, on a new rank that waits for that. Collective with the change of all of their ranks."""
        if not self._waits_to_join:
            return
        job, info = self._the_job, NOTHING
        while True:
            job._replica.activity.enter("membership")
            end_generation(job)
            self._elastic.connections.disconnect()
            new = self._elastic.member.enter(info)
            assert new is not None
            self._waits_to_join = False
            if all(each.info.get("progress", -1) < 0 for each in new.members):
                self._elastic.member.depart(finished=False, as_lost=True)
                raise RankLost(
                    f"rank {job.world.transport.world_rank}: all workers that this one was to take the state from are "
                    "lost. Start it again: it continues from the last checkpoint, if the script restores it."
                )
            try:
                transport = self._elastic.connections.connect(new)
                self._world.renew(transport.rank, transport.size, transport)
                # The others are in no call until this rank has come to its first batch.
                self._world.calls = CollectiveCalls(SingleRankTransport(transport.timeout, transport.world_rank))
                self._synchronise(new)
                _start_as(self._the_job, new)
                parts = of_this_rank(self._state_of_strategy, transport.rank, transport.size)
                begin_generation(job, parts)
                break
            except RankLost:
                # Before it has shown its data, it does not know the positions in it.
                knows_all = self._has_state and not self._elastic.data_states
                info = self._info(None) if knows_all else NOTHING
        self._world.tolerate_loss(True)


def end_generation(job: "Job") -> None:
    """Detach a model from ranks that may be lost. Not collective. Idempotent."""
    detach(job._replica, job._exchange, job.world)
    job.world.transport.close()


def begin_generation(job: "Job", state: dict[str, Any]) -> None:
    """Attach a model to the present ranks of its world, and continue from the strategy's state. Collective."""
    before, replica = job._exchange, job._replica
    channel = for_devices(job.world.transport, replica.device_types).channel("job")
    job._attached = strategy_of_next_step(job.strategy, replica, channel)
    job._exchange = exchange = attach_again(replica, job._attached, job.world, job._expected, channel)
    exchange.events, exchange.on_exchange = before.events, before.on_exchange
    exchange.load_state_dict(state)
    exchange.ranks_have_changed()
    job.world.usage.exchanges.add(exchange)


def _start_as(job: "Job", new: Generation) -> None:
    """Start synchronously as the others do, also where this rank has not come to that call, or has just joined."""
    replica = job._replica
    replica.synchronous_steps = max(
        replica.synchronous_steps, *(each.info.get("synchronous_steps", 0) for each in new.members)
    )


NOTHING: dict[str, Any] = {
    **{"progress": -1, "is_agreed": 0, "digest": "", "positions": [], "agreed": [], "trails": [], "steps": {}},
    **{"cut_short": 0, "has_residual": 0, "equal_bytes": 0, "synchronous_steps": 0},
}
"""What a rank says of itself that has joined, and has not taken over anything yet."""


def _data_of(elastic: Elasticity) -> list[ShardedData]:
    """Return what is divided between ranks, in an order that is the same on all of them."""
    return sorted(elastic.data, key=lambda data: data.number)


def _source(new: Generation) -> int:
    """Return the rank whose state others take over: the first that has completed most, of those that were there.

    Of equal ones, it is one that has the state to which all had a part.
    """
    infos = {rank: each.info for rank, each in enumerate(new.members) if each.after >= 0}
    return max(infos, key=lambda rank: (infos[rank]["progress"], infos[rank]["is_agreed"], -rank))


def _digest(parts: dict[str, Any]) -> str:
    """Return a digest of what must be the same on all ranks in a strategy's state, such as the order of buckets."""
    return hashlib.sha256(json.dumps(_plain(parts), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return the plain values of a nest: texts, numbers and their containers. Others are left out."""
    if isinstance(value, dict):
        return {str(key): plain for key, each in value.items() if (plain := _plain(each)) is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else None
