"""`SynchronousStart`: the part of a job that takes the first steps of a training synchronously.

How it works
------------
A strategy names another one, exact and synchronous, whose steps it takes first (`Strategy.synchronous_start`). There
are two ways.

*In place* (`Strategy.starts_in_place`): the strategy's own exchange takes such steps while
`Replica.starts_synchronously`. Nothing else happens. Parameter servers do so, except for updates in any order where
workers step in shared memory.

*By another exchange*: before the first step, `start_synchronously` finishes the exchange that `distribute` has
attached, and attaches that of the start. Before the first forward pass behind the start the same is done the other way
round. An exchange that finishes leaves the same model on every rank, and the optimiser's state in the user's optimiser.
The next one begins from these, as after `distribute`. Each has a channel of its own, so that late messages cannot be
mistaken.

Both changes are collective, and no rank can miss one: steps of the start are synchronous, so all ranks come to its end
after the same step. A rank that is about to be away instead changes first. A loss ends the wait of the others. Where a
model calls no hooks (it was compiled after `distribute`), the start could not end: that is an error in the second step
behind it.

*Losses.* In a world of fixed size, a loss in the start ends the run as it does under all-reduce, unless the start is in
place: the strategy is attached between all ranks. In an elastic world, ranks change in both cases as after a loss
(`ElasticJob.regroup`), and the strategy is attached that the next step needs. So are those of ranks that are lost, or
join, in either part.

*Checkpoints.* The present exchange saves its state. Before `job.restore` loads, it attaches the strategy that the next
step needs: the state is loaded into the one that saved it, unless the start has another length now.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn

from tutti.errors import ConfigError
from tutti.job.attach import attach_again, detach, strategy_of_next_step
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.replica import HookedReplica
from tutti.replica.owned_hooks import OwnedHook
from tutti.strategies import Exchange, Strategy
from tutti.transports import for_devices
from tutti.world import World


class SynchronousStart:
    """Takes the first steps of a training under another strategy. `Job` sets the fields."""

    strategy: Strategy
    world: World
    _replica: HookedReplica
    _exchange: Exchange
    _attached: Strategy
    """The strategy of the exchange."""
    _expected: dict[str, Any]
    _model_on_mesh: ModelOnMesh | None
    _num_changes = 0
    _start_hooks: Sequence[Any] = ()

    def start_synchronously(self, num_steps: int) -> None:
        """Take the first `num_steps` steps of the training synchronously; call it before the first one. Collective.

        For strategies with updates that are old, local or compressed. Their steps are exact and synchronous first, as
        under `ps:bsp` or all-reduce. Steps count from the start of the training, also in a run that continues from a
        checkpoint. Every rank gives the same number; `LearningRateRule.synchronous_steps` has it.
        """
        if num_steps == 0:
            return  # Without a call: most strategies need none, and their scripts may say so.
        if self.world.elastic is not None and self.world.elastic.has_joined:
            return  # It starts, or goes on, as the others do.
        mistake = self._start_mistake(num_steps)
        with self.world.waiting():  # Raises what is wrong on any rank on all of them.
            self.world.call(
                "job.start_synchronously",
                ConfigError(mistake) if mistake else num_steps,
                _same_number,
                elastic=self._exchange.tolerates_loss,
            )
        self._replica.synchronous_steps = num_steps
        self._attach_for_next_step()

    def _start_mistake(self, num_steps: int) -> str:
        """Return what is wrong with a start of so many steps; empty if nothing is."""
        if num_steps < 0:
            return f"job.start_synchronously needs 0 steps or more, got {num_steps}."
        if self.strategy.synchronous_start is None:
            return (
                f"strategy '{self.strategy}' has no synchronous start: it is for updates that are old, local or "
                "compressed. Leave job.start_synchronously out."
            )
        if self._model_on_mesh is not None:
            return "on a mesh there is no synchronous start. Leave job.start_synchronously out."
        return ""

    @property
    def starts_synchronously(self) -> bool:
        """Whether the next step is one of the synchronous start (`start_synchronously`)."""
        return self._replica.starts_synchronously

    @property
    def _must_change(self) -> bool:
        """Whether the next step is of another strategy than the one that is attached."""
        return strategy_of_next_step(self.strategy, self._replica, self._exchange.transport) != self._attached

    def _attach_for_step_after(self, num_steps: int) -> None:
        """Attach the strategy that the step after `num_steps` of the whole training needs, to load a state. Collective.

        The state may be refused: so the number of steps stays as it is.
        """
        before, self._replica.steps = self._replica.steps, num_steps
        try:
            self._attach_for_next_step()
        finally:
            self._replica.steps = before

    def _attach_for_next_step(self) -> None:
        """Attach the strategy of the next step, if that is another one. Between two steps. Collective then."""
        if not self._must_change:
            return
        elastic = self.world.elastic
        if elastic is not None and elastic.regrouping is not None:
            elastic.regrouping.regroup(in_call=True)
            return
        replica, before = self._replica, self._exchange
        with self.world.waiting(before):
            try:
                before.finish()
            except ConfigError as error:  # It names the calls in which ranks are.
                raise ConfigError(
                    f"{error} Here job.finish() stands for the end of the synchronous start, to which all ranks come "
                    "after the same step."
                ) from None
        detach(replica, before, self.world)
        before.transport.close()
        self._num_changes += 1
        channel = for_devices(self.world.transport, replica.device_types).channel(f"job {self._num_changes}")
        self._attached = strategy_of_next_step(self.strategy, replica, channel)
        self._exchange = attach_again(replica, self._attached, self.world, self._expected, channel)
        # One log: it has the totals of the whole run.
        self._exchange.events, self._exchange.on_exchange = before.events, before.on_exchange
        self.world.usage.exchanges.add(self._exchange)
        self._remove_start_hooks()
        hook = _StartHook(self)
        self._start_hooks = [
            # The last hook of the model: a change removes hooks, and those of this forward pass have been called then.
            replica.model.register_forward_pre_hook(hook, with_kwargs=True),
            replica.optimizer.register_step_pre_hook(hook.before_step),
        ]
        # A strategy that goes on without a lost rank does so from now on.
        self.world.tolerate_loss(self._exchange.tolerates_loss and not replica.starts_synchronously)

    def _remove_start_hooks(self) -> None:
        for hook in self._start_hooks:
            hook.remove()
        self._start_hooks = ()


def _same_number(numbers: dict[int, int]) -> None:
    """Raise `ConfigError` if ranks want to start with another number of steps."""
    first = min(numbers)
    for rank, number in numbers.items():
        if number != numbers[first]:
            raise ConfigError(
                f"job.start_synchronously differs between ranks: rank {first} gave {numbers[first]} steps, rank {rank} "
                f"gave {number}. Every rank must give the same."
            )


class _StartHook(OwnedHook):
    """Ends the start of a job before a forward pass that trains."""

    def __init__(self, start: SynchronousStart) -> None:
        self._start = ref(start)  # Weak: the model holds this hook, and must not keep the job alive.

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or (start := self._start()) is None:
            return
        # In an elastic world ranks change between two batches.
        if start.world.elastic is None and start._must_change:
            start._attach_for_next_step()
            if (on_forward := start._replica.on_forward) is not None:  # The new checks see this batch, too.
                on_forward(args, kwargs)

    def before_step(self, *_: Any) -> None:
        """Refuse a step of the optimiser behind the start, if no forward pass has come here that could end it."""
        start = self._start()
        if start is None or start.world.elastic is not None or not start._must_change:
            return
        replica = start._replica
        if replica.steps > replica.synchronous_steps:  # One step more: a forward pass may be for two.
            raise ConfigError(
                f"rank {start.world.rank}: the synchronous start of '{start.strategy}' is over after "
                f"{replica.synchronous_steps} steps, and ends in a forward pass of the distributed model, but its "
                "hooks are not called. Call the model itself, not its forward method; compile first, and pass the "
                "result of torch.compile to distribute."
            )
