"""`TrainingChecks`: the checks of one job, called by its replica in every step and by the job at its end.

How it works
------------
Checks of one rank alone (`LayoutCheck`, `OptimizerCheck`, one element of a gradient) run in every step.

Comparisons between ranks run where all ranks pass through the same point. Under strategies that keep all replicas
equal after every step (`Exchange.equal_after_steps`) that is the end of an exchanged backward pass, which all ranks
have taken part in: of the second, third, fifth, ninth and so on, and then of every `_INTERVAL`-th. All ranks then
share a few numbers, and take the same branch. Under other strategies, ranks may be at any step, or lost. There they
compare at the end, when `finish` has left the same model on every rank that is left. The digest of batches is sent
there without waiting, after the second batch, and looked at when it has come.

In virtual time nothing is sent: a simulated run takes as long as it would without checks.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import ConfigError, RankLost
from tutti.job.checks import process_hooks
from tutti.job.checks.batches import NUM_BATCHES, BatchRecord, refuse_same_batches
from tutti.job.checks.comparison import difference, gathered, share, share_among_living
from tutti.job.checks.fingerprints import combined, fingerprints, first_non_finite
from tutti.job.checks.finite import FiniteCheck
from tutti.job.checks.layout import LayoutCheck
from tutti.job.checks.loss_kind import SUM_LOSS, is_sum_loss
from tutti.job.checks.notices import Notices
from tutti.job.checks.optimizers import OptimizerCheck
from tutti.replica import HookedReplica
from tutti.strategies import Exchange, Strategy
from tutti.world import World

_INTERVAL = 2048
"""Backward passes between two comparisons, after the first ones."""


class TrainingChecks:
    """The checks of one rank of several."""

    def __init__(self, replica: HookedReplica, exchange: Exchange, strategy: Strategy, world: World) -> None:
        self._replica, self._exchange, self._world = replica, exchange, world
        self._rank = world.rank
        self._silent = world.transport.cluster is not None
        """Whether this is virtual time, in which checks send nothing."""
        self._num_passes = 0
        self._due = 2
        self._watches_loss = strategy.steps_by_mean_gradient
        self._thread = threading.get_ident()
        self._layout = LayoutCheck(replica, self._rank)
        self._optimizers = OptimizerCheck(replica, self._rank)
        self._finite = FiniteCheck(replica, self._rank)
        self._batches: BatchRecord | None = BatchRecord(world.sample_counts)
        self._notices: Notices | None = None
        if not self._silent and not exchange.equal_after_steps:
            self._notices = Notices(world.transport, world.usage.num_jobs)
        self.open()

    def open(self) -> None:
        """Attach to the replica, its optimiser and its modules."""
        process_hooks.add(self)
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
            self._batches = self._notices = None

    def _forward(self, args: Any, kwargs: Any) -> None:
        """A forward pass that trains, and is not compiled, begins."""
        self._thread = threading.get_ident()
        # Before a strategy loads parameters in the forward pass, as servers do.
        if not self._replica.in_consensus:
            self._layout()
        if self._batches is not None:
            self._batches.forward((args, kwargs))

    def pass_started(self) -> None:
        """An exchanged backward pass has begun."""
        self._layout()
        self._finite.first_gradient()
        if self._watches_loss:
            self._watches_loss = False
            if is_sum_loss(self._thread):
                raise ConfigError(SUM_LOSS.format(rank=self._rank, size=self._world.size))
        self._count()

    def pass_finished(self) -> None:
        """An exchanged backward pass is over: all ranks have taken part in it."""
        if self._num_passes == self._due:
            self._due += min(self._due - 1, _INTERVAL)
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
        process_hooks.remove(self)
        self._optimizers.close()
        self._replica.checks = self._replica.on_forward = None

    @property
    def _together(self) -> bool:
        """Whether all ranks pass through the same steps with the same parameters, so that they can be compared."""
        return self._exchange.equal_after_steps and not self._silent

    def _count(self) -> None:
        self._num_passes += 1
        if self._num_passes <= NUM_BATCHES:
            self._first_passes()

    def _first_passes(self) -> None:
        if self._batches is not None:
            self._batches.add()
            if self._notices is not None and self._num_passes == NUM_BATCHES:
                self._notices.send(self._batches.digest)
        if self._num_passes >= NUM_BATCHES and self._exchange.equal_after_steps:
            self._replica.on_forward = None  # Nothing more to see there, in every step.

    @torch.no_grad()
    def _compare(self) -> None:
        """Compare what ranks hold and were given, or look at this rank alone where they cannot be compared now."""
        names, tensors = self._parameters()
        non_finite = first_non_finite(tensors)
        if self._together:
            digest = self._batches.digest if self._batches is not None and self._num_passes == NUM_BATCHES else 0
            prints = fingerprints(tensors)
            self._judge(names, prints, non_finite, digest)
            return
        if non_finite is not None:
            self._finite.stop_all(f"parameter '{names[non_finite]}'")
        self._check_notices(wait=False)

    def cause_of(self, error: RankLost) -> Exception:
        """Return the mistake that a peer found first, and for which it has ended; else the error itself."""
        try:
            if self._notices is not None:
                self._check_notices(wait=True)
        except ConfigError as mistake:
            return mistake
        return error

    def _check_notices(self, wait: bool) -> None:
        """Compare the batches of all ranks, if their digests have come."""
        if self._notices is None or self._batches is None:
            return
        digests = self._notices.complete(self._batches.digest) if wait else self._notices.received()
        if digests is not None:
            self._notices = None
            refuse_same_batches(digests, self._rank)

    def finished(self) -> None:
        """Compare the replicas that `finish` has left. Collective."""
        # Where gradients are exchanged in backward, the user may step without an optimiser.
        unused = self._num_passes if not self._exchange.equal_after_steps and not self._replica.steps else 0
        if self._silent:
            self._optimizers.check_used(unused)
            return
        self._check_notices(wait=True)  # A rank that has ended for the same batches is not among the living.
        names, tensors = self._parameters(buffers=True)
        prints, non_finite = fingerprints(tensors), first_non_finite(tensors)
        digest = 0 if self._batches is None else self._batches.digest
        local = [digest, 0 if non_finite is None else non_finite + 1, unused, *prints]
        rows = share_among_living(local, self._world.transport)
        if len(rows) < self._world.size and not self._exchange.tolerates_loss:
            raise RankLost(f"rank {self._rank}: a rank was lost before all had come to the end of job.finish().")
        refuse_same_batches({rank: row[0] for rank, row in rows.items()}, self._rank)
        self._optimizers.check_used(max(row[2] for row in rows.values()))
        if (error := self._finite.parameter_error(names, {rank: row[1] for rank, row in rows.items()})) is not None:
            raise error
        if any(row[3:] != prints for row in rows.values()):
            raise difference(names, {rank: row[3:] for rank, row in rows.items()}, self._rank, "after job.finish()")

    def _judge(self, names: list[str], prints: list[int], non_finite: int | None, digest: int) -> None:
        """Share this rank's numbers, and raise the same error on every rank if they are not as they should be."""
        number = 0 if non_finite is None else non_finite + 1
        rows = share([combined(prints), number, digest], self._world.transport)
        refuse_same_batches({rank: row[2] for rank, row in enumerate(rows)}, self._rank)
        if (error := self._finite.parameter_error(names, {rank: row[1] for rank, row in enumerate(rows)})) is not None:
            raise error
        if any(row[0] != rows[0][0] for row in rows):
            by_rank = gathered(prints, self._world.transport)
            raise difference(names, by_rank, self._rank, f"at backward pass {self._num_passes}")

    def _stop_for_gradient(self) -> None:
        """The optimiser is about to use a gradient that is not finite: end training on every rank."""
        if self._together:
            rows = share([int(not self._finite.local)], self._world.transport)
            raise self._finite.gradient_error([row[0] for row in rows])
        if self._replica.contribution.last_weight != 0:
            self._finite.stop_all(self._finite.which())

    def _parameters(self, buffers: bool = False) -> tuple[list[str], list[Tensor]]:
        """Return names and values of all parameters; with `buffers`, also of those that `finish` makes equal."""
        named: list[tuple[str, Tensor]] = list(self._replica.model.named_parameters())
        if buffers and self._exchange.equal_after_steps:
            named += self._replica.model.named_buffers()
        elif buffers:
            named += [(slot.name, slot.tensor) for slot in self._replica.statistics]
        return [name for name, _ in named], [tensor for _, tensor in named]
