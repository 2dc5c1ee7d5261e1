"""`TrainingChecks`: the checks of one job, called by its replica in every step and by the job at its end.

How it works
------------
Checks of one rank alone (`LayoutCheck`, `OptimizerCheck`, one element of a gradient) run in every step. Checks that
compare ranks are `Compared`, and share their numbers in one message (`RankComparison`).

Comparisons between ranks run where all ranks pass through the same point: at the end of an exchanged backward pass, as
often as `ComparisonSchedule` says, under strategies that keep replicas equal; and at the end of the job. Under the
other strategies the digest of batches is sent without waiting, after the second batch, and looked at when it has come.

In virtual time nothing is sent: a simulated run takes as long as it would without checks.
"""

import threading
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.errors import ConfigError, RankLost
from tutti.job.checks.batch_check import BatchCheck
from tutti.job.checks.batches import NUM_BATCHES
from tutti.job.checks.compared import FiniteTensors, SameShards, SteppedOptimizer
from tutti.job.checks.finite import FiniteCheck
from tutti.job.checks.layout import LayoutCheck
from tutti.job.checks.loss_kind import SUM_LOSS, is_sum_loss
from tutti.job.checks.optimizers import OptimizerCheck
from tutti.job.checks.process_hooks import CHECKS
from tutti.job.checks.rank_comparison import RankComparison
from tutti.replica import HookedReplica
from tutti.replica.buckets import Slot
from tutti.replica.comparison_schedule import ComparisonSchedule
from tutti.strategies import Exchange, Strategy
from tutti.world import World


class TrainingChecks:
    """The checks of one rank of several."""

    def __init__(self, replica: HookedReplica, exchange: Exchange, strategy: Strategy, world: World) -> None:
        self._replica, self._exchange, self._world = replica, exchange, world
        self._rank = world.rank
        self._num_passes = 0
        self._schedule = ComparisonSchedule()
        self._watches_loss = strategy.steps_by_mean_gradient
        self._thread = threading.get_ident()
        self._layout = LayoutCheck(replica, self._rank)
        self._optimizers = OptimizerCheck(replica, self._rank)
        self._finite = FiniteCheck(replica, self._rank)
        self._ranks = RankComparison(replica, exchange, world)
        self._batches = BatchCheck(world.sample_counts, self._rank, self._ranks.digest_messages())
        self.open()

    def open(self) -> None:
        """Attach to the replica, its optimiser and its modules."""
        CHECKS.add(self)
        self._replica.checks, self._replica.on_forward = self, self._forward

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """An optimiser of this process is about to step. Ranks may be threads, and each looks at its own only."""
        if threading.get_ident() == self._thread:
            self._optimizers.before_step(optimizer)

    def member_added(self, module: nn.Module) -> None:
        """A parameter or a module was added to a module of this process."""
        self._layout.member_added(module)

    def allow(self, *, any_loss: bool = False, same_batches: bool = False) -> None:
        """Do not look at the loss, or do not compare batches: the user says what they are."""
        self._watches_loss = self._watches_loss and not any_loss
        if same_batches:
            self._batches.allow_same()

    def _forward(self, args: Any, kwargs: Any) -> None:
        """A forward pass that trains, and is not compiled, begins."""
        self._thread = threading.get_ident()
        # Before a strategy loads parameters in the forward pass, as servers do.
        if not self._replica.in_consensus:
            self._layout()
        self._batches.forward((args, kwargs), self._num_passes)

    def pass_started(self, slot: Slot | None) -> None:
        """An exchanged backward pass has begun, with the gradient of `slot` where that is known."""
        self._layout()
        self._finite.first_gradient(slot)
        if self._watches_loss:
            self._watches_loss = False
            if is_sum_loss(self._thread):
                raise ConfigError(SUM_LOSS.format(rank=self._rank, size=self._world.size))
        self._count()

    def pass_finished(self) -> None:
        """An exchanged backward pass is over: all ranks have taken part in it."""
        if self._num_passes == 1 and self._ranks.possible_in_steps:
            self._ranks.together([SameShards(self._world.sample_counts, self._rank)])
        if self._schedule.is_due(self._num_passes):
            self._compare()

    def before_step(self) -> None:
        """The given optimiser is about to step."""
        if not self._replica.reports_passes:
            self._layout()
            self._count()
            self.pass_finished()
        if not self._finite.gradient():
            self._stop_for_gradient()

    def close(self) -> None:
        """Remove all hooks. Not collective. `open` may follow."""
        CHECKS.remove(self)
        self._optimizers.close()
        self._replica.checks = self._replica.on_forward = None

    def _count(self) -> None:
        self._num_passes += 1
        self._batches.pass_started(self._num_passes)
        if self._num_passes == NUM_BATCHES and self._exchange.equal_after_steps:
            self._replica.on_forward = None  # Nothing more to see there, in every step.

    @torch.no_grad()
    def _compare(self) -> None:
        """Compare what ranks hold and were given, or look at this rank alone where they cannot be compared now."""
        trained = FiniteTensors(self._replica.slots, self._rank, self._replica.steps)
        if self._ranks.possible_in_steps:
            same = self._ranks.same_parameters(f"at backward pass {self._num_passes}")
            self._ranks.together([self._batches, trained, same])
            return
        if (name := trained.first_wrong()) is not None:
            self._finite.stop_all(f"parameter '{name}'")
        self._batches.look()

    def cause_of(self, error: RankLost) -> Exception:
        """Return the mistake that a peer found first, and for which it has ended; else the error itself."""
        return self._batches.cause_of(error)

    def finished(self) -> None:
        """Compare the replicas that `finish` has left. Collective."""
        # Where gradients are exchanged in backward, the user may step without an optimiser.
        unused = self._num_passes if not self._exchange.equal_after_steps and not self._replica.steps else 0
        if self._ranks.simulated:
            self._optimizers.check_used(unused)
            return
        self._batches.complete()  # A rank that has ended for the same batches is not among the living.
        # Not all tensors: a mask or an observer may be infinite on purpose.
        learned = [*self._replica.slots, *self._replica.statistics]
        self._ranks.among_living(
            [
                SameShards(self._world.sample_counts, self._rank),
                self._batches,
                SteppedOptimizer(self._optimizers, unused),
                FiniteTensors(learned, self._rank, self._replica.steps),
                self._ranks.same_models("after job.finish()"),
            ]
        )

    def _stop_for_gradient(self) -> None:
        """The optimiser is about to use a gradient that is not finite: end training on every rank."""
        if self._ranks.possible_in_steps:
            # All ranks have the same mean, so that all come here; or this one alone, whose user changed its gradient.
            # Then nobody answers, and it must not wait for long.
            raise self._finite.gradient_error(self._ranks.flags(not self._finite.local))
        if self._replica.contribution.last_weight != 0:
            self._finite.stop_all(self._finite.first_name())
