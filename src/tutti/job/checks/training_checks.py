"""`TrainingChecks`: the checks of one job, called by its replica in every step and by the job at its end.

How it works
------------
Checks of one rank alone (`LayoutCheck`, `OptimizerCheck`, one element of a gradient) run in every step. Checks that
compare ranks are `Compared`, and share their numbers in one message.

Comparisons between ranks run where all ranks pass through the same point. Under strategies that keep all replicas
equal after every step (`Exchange.equal_after_steps`) that is the end of an exchanged backward pass, which all ranks
have taken part in, as often as `ComparisonSchedule` says. All ranks then share a few numbers, and take the same branch.
Under other strategies, ranks may be at any step, or lost. There they compare at the end, when `finish` has left the
same model on every rank that is left. The digest of batches is sent there without waiting, after the second batch, and
looked at when it has come.

In virtual time nothing is sent: a simulated run takes as long as it would without checks.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.collectives import all_gather_json
from tutti.errors import ConfigError, RankLost
from tutti.job.checks.batch_check import BatchCheck
from tutti.job.checks.batches import NUM_BATCHES
from tutti.job.checks.compared import (
    Compared,
    FiniteTensors,
    SameShards,
    SameTensors,
    SameTensorsByDigest,
    SteppedOptimizer,
    compare,
)
from tutti.job.checks.comparison import Messages, share, share_among_living, tag_of
from tutti.job.checks.digest_messages import DigestMessages
from tutti.job.checks.finite import FiniteCheck
from tutti.job.checks.layout import LayoutCheck
from tutti.job.checks.loss_kind import SUM_LOSS, is_sum_loss
from tutti.job.checks.optimizers import OptimizerCheck
from tutti.job.checks.process_hooks import CHECKS
from tutti.replica import HookedReplica
from tutti.replica.buckets import Slot
from tutti.replica.comparison_schedule import ComparisonSchedule
from tutti.strategies import Exchange, Strategy
from tutti.world import World

_SOON_SECONDS = 1.0
"""How long a rank that has found an infinite gradient waits for what others know about it."""


def _agreed_number(world: World) -> int:
    """Return a number for a new job that all its ranks agree on. Collective.

    Ranks count the jobs of their process, of which some may be in other worlds that not all ranks are in.
    """
    world.usage.num_jobs = max(all_gather_json(world.usage.num_jobs, world.transport))
    return world.usage.num_jobs


class TrainingChecks:
    """The checks of one rank of several."""

    def __init__(self, replica: HookedReplica, exchange: Exchange, strategy: Strategy, world: World) -> None:
        self._replica, self._exchange, self._world = replica, exchange, world
        self._rank = world.rank
        self._simulated = world.transport.cluster is not None
        """Whether this is virtual time, in which checks send nothing."""
        self._job = world.usage.num_jobs if self._simulated else _agreed_number(world)
        self._num_passes = 0
        self._schedule = ComparisonSchedule()
        self._watches_loss = strategy.steps_by_mean_gradient
        self._thread = threading.get_ident()
        self._layout = LayoutCheck(replica, self._rank)
        self._optimizers = OptimizerCheck(replica, self._rank)
        self._finite = FiniteCheck(replica, self._rank)
        at_any_step = not self._simulated and not exchange.equal_after_steps
        messages = DigestMessages(world.transport, self._job) if at_any_step else None
        self._batches = BatchCheck(world.sample_counts, self._rank, messages)
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
        if self._num_passes == 1 and self._ranks_comparable:
            compare([SameShards(self._world.sample_counts, self._rank)], self._share)
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

    @property
    def _ranks_comparable(self) -> bool:
        """Whether all ranks pass through the same steps with the same parameters, so that they can be compared."""
        return self._exchange.equal_after_steps and not self._simulated

    def _count(self) -> None:
        self._num_passes += 1
        self._batches.pass_started(self._num_passes)
        if self._num_passes == NUM_BATCHES and self._exchange.equal_after_steps:
            self._replica.on_forward = None  # Nothing more to see there, in every step.

    def _share(self, numbers: list[int]) -> dict[int, list[int]]:
        return dict(enumerate(share(numbers, self._world.transport)))

    @torch.no_grad()
    def _compare(self) -> None:
        """Compare what ranks hold and were given, or look at this rank alone where they cannot be compared now."""
        trained = FiniteTensors(self._replica.slots, self._rank, self._replica.steps)
        if self._ranks_comparable:
            named: list[tuple[str, Tensor]] = list(self._replica.model.named_parameters())
            same = SameTensors(named, self._rank, f"at backward pass {self._num_passes}")
            compare([self._batches, trained, SameTensorsByDigest(same, self._world.transport)], self._share)
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
        if self._simulated:
            self._optimizers.check_used(unused)
            return
        self._batches.complete()  # A rank that has ended for the same batches is not among the living.
        # Not all tensors: a mask or an observer may be infinite on purpose.
        learned = [*self._replica.slots, *self._replica.statistics]
        checks: list[Compared] = [
            SameShards(self._world.sample_counts, self._rank),
            self._batches,
            SteppedOptimizer(self._optimizers, unused),
            FiniteTensors(learned, self._rank, self._replica.steps),
            SameTensors(self._all_tensors(), self._rank, "after job.finish()"),
        ]
        compare(checks, self._share_among_living)

    def _share_among_living(self, numbers: list[int]) -> dict[int, list[int]]:
        rows = share_among_living(numbers, self._world.transport, tag_of(1, self._job))
        if len(rows) < self._world.size and not self._exchange.tolerates_loss:
            raise RankLost(f"rank {self._rank}: a rank was lost before all had come to the end of job.finish().")
        return rows

    def _stop_for_gradient(self) -> None:
        """The optimiser is about to use a gradient that is not finite: end training on every rank."""
        if self._ranks_comparable:
            # All ranks have the same mean, so that all come here; or this one alone, whose user changed its gradient.
            # Then nobody answers, and it must not wait for long.
            local = torch.tensor([int(not self._finite.local)], dtype=torch.int64, device="cpu")
            rows = Messages(local, self._world.transport, tag_of(2, self._job)).wait_for(_SOON_SECONDS)
            raise self._finite.gradient_error({rank: int(row) for rank, row in rows.items()})
        if self._replica.contribution.last_weight != 0:
            self._finite.stop_all(self._finite.first_name())

    def _all_tensors(self) -> list[tuple[str, Tensor]]:
        """Return names and values of all parameters, and of the buffers that `finish` makes equal."""
        named: list[tuple[str, Tensor]] = list(self._replica.model.named_parameters())
        if self._exchange.equal_after_steps:
            named += self._replica.model.named_buffers()
        else:
            named += [(slot.name, slot.tensor) for slot in self._replica.statistics]
        return named
