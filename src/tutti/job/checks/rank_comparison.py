"""`RankComparison`: how the ranks of one job compare what they hold.

How it works
------------
Under strategies that keep all replicas equal after every step (`Exchange.equal_after_steps`), all ranks pass through
the same points of training and can compare there: `together`. They share a few numbers by a collective, and take the
same branch. Under other strategies a rank may be at any step, or lost. Those that are left compare at the end, when
`finish` has left the same model on each: `among_living`. There every rank sends directly to every other, so that none
waits for one that waits for a lost one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.collectives import all_gather_json
from tutti.errors import RankLost
from tutti.job.checks.compared import Compared, SameTensors, SameTensorsByDigest, compare
from tutti.job.checks.comparison import Messages, share, share_among_living, tag_of
from tutti.job.checks.digest_messages import DigestMessages
from tutti.replica import HookedReplica
from tutti.strategies import Exchange
from tutti.world import World

_SOON_SECONDS = 1.0
"""How long a rank that has found an infinite gradient waits for what others know about it."""


class RankComparison:
    """Comparisons of one rank with the others. In virtual time it sends nothing."""

    def __init__(self, replica: HookedReplica, exchange: Exchange, world: World) -> None:
        """Agree on a number for the job. Collective, unless time is simulated."""
        self._replica, self._exchange, self._world = replica, exchange, world
        self.simulated = world.transport.cluster is not None
        """Whether this is virtual time, in which nothing is sent for checks."""
        self._job = world.usage.num_jobs if self.simulated else _agreed_number(world)

    @property
    def possible_in_steps(self) -> bool:
        """Whether all ranks pass through the same steps with the same parameters, so that they can be compared."""
        return self._exchange.equal_after_steps and not self.simulated

    def digest_messages(self) -> DigestMessages | None:
        """Return messages for a number that ranks compare without a common step; None where they have common steps."""
        return None if self.simulated or self.possible_in_steps else DigestMessages(self._world.transport, self._job)

    def together(self, checks: Sequence[Compared]) -> None:
        """Let checks compare all ranks. Collective."""
        compare(checks, self._share)

    def among_living(self, checks: Sequence[Compared]) -> None:
        """Let checks compare the ranks that are left, at the end of the job. Collective among them."""
        compare(checks, self._share_among_living)

    def same_parameters(self, when: str) -> SameTensorsByDigest:
        """Return the check that all ranks have the same parameters now; `when` names this moment."""
        named: list[tuple[str, Tensor]] = list(self._replica.model.named_parameters())
        return SameTensorsByDigest(SameTensors(named, self._world.rank, when), self._world.transport)

    def same_models(self, when: str) -> SameTensors:
        """Return the check of all parameters, and of the buffers that `finish` makes equal."""
        named: list[tuple[str, Tensor]] = list(self._replica.model.named_parameters())
        if self._exchange.equal_after_steps:
            named += self._replica.model.named_buffers()
        else:
            named += [(slot.name, slot.tensor) for slot in self._replica.statistics]
        return SameTensors(named, self._world.rank, when)

    def flags(self, local: bool) -> dict[int, int]:
        """Return the flags of this rank and of those that are here too, or come soon. Others are not waited for."""
        flag = torch.tensor([int(local)], dtype=torch.int64, device="cpu")
        rows = Messages(flag, self._world.transport, tag_of(2, self._job)).wait_for(_SOON_SECONDS)
        return {rank: int(row) for rank, row in rows.items()}

    def _share(self, numbers: list[int]) -> dict[int, list[int]]:
        return dict(enumerate(share(numbers, self._world.transport)))

    def _share_among_living(self, numbers: list[int]) -> dict[int, list[int]]:
        rows = share_among_living(numbers, self._world.transport, tag_of(1, self._job))
        if len(rows) < self._world.size and not self._exchange.tolerates_loss:
            raise RankLost(f"rank {self._world.rank}: a rank was lost before all had come to the end of job.finish().")
        return rows


def _agreed_number(world: World) -> int:
    """Return a number for a new job that all its ranks agree on. Collective.

    Ranks count the jobs of their process, of which some may be in other worlds that not all ranks are in.
    """
    if world.elastic is not None:
        return 1  # The only one of its world: each generation has a transport of its own.
    world.usage.num_jobs = max(all_gather_json(world.usage.num_jobs, world.transport))
    return world.usage.num_jobs
