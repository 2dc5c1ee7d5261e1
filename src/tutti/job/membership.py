"""`MembershipChange`, and the part of a job that calls functions of the user's when its workers have changed."""

from collections.abc import Callable
from dataclasses import dataclass

from tutti.coordination.elastic_member import Generation
from tutti.errors import ConfigError
from tutti.job.rate_scaling import RateScaling, scale_rate
from tutti.world import World


@dataclass(frozen=True)
class MembershipChange:
    """A change of the workers that train."""

    generation: int
    """Number of the generation that has begun; that with which the training started has 0."""
    before: tuple[int, ...]
    """The workers until now, by rank: by the numbers that their launchers gave them, as `tutti status` shows them."""
    after: tuple[int, ...]
    """The workers from now on, by rank."""

    @property
    def lost(self) -> tuple[int, ...]:
        """Workers that were lost, or have left."""
        return tuple(number for number in self.before if number not in self.after)

    @property
    def joined(self) -> tuple[int, ...]:
        """New workers."""
        return tuple(number for number in self.after if number not in self.before)


OnMembership = Callable[[MembershipChange], object]


class MembershipListeners:
    """The functions that are called after changes, and the changes that they were not called with yet."""

    def __init__(self) -> None:
        """Start without any."""
        self.calls: list[OnMembership] = []
        self._pending: list[MembershipChange] = []
        self._is_notifying = False

    def note(self, old: Generation, new: Generation) -> None:
        """Remember a change, until `notify`."""
        before, after = (tuple(each.description.rank for each in found.members) for found in (old, new))
        if self.calls and before != after:  # A synchronous start begins and ends with a generation of its own.
            self._pending.append(MembershipChange(new.number, before, after))

    def notify(self) -> None:
        """Call the functions, between two steps. What they raise is raised."""
        while self._pending:
            change = self._pending.pop(0)
            self._is_notifying = True
            try:
                for call in list(self.calls):
                    call(change)
            finally:
                self._is_notifying = False

    def refuse_collective(self) -> None:
        """Raise `ConfigError` in a function that is called here: other workers may be elsewhere in their loops."""
        if self._is_notifying:
            raise ConfigError(
                "a collective call in a function given to job.on_membership: other workers may be elsewhere in their "
                "loops. Remember the change there, and make the call in the loop."
            )


class JobMembership:
    """The part of a job that calls functions of the user's after changes of the workers. `Job` sets the fields."""

    world: World
    _rate_scaling: RateScaling | None = None

    def on_membership(self, call: OnMembership) -> None:
        """Have a function called after each change of the workers of an elastic run.

        It is called with a `MembershipChange`, between two steps, on every worker that was there before: before the
        next batch comes, or after the last one. `job.world` has the new rank and size. A worker that joins does not
        call it for its own arrival. Collective calls are refused in it, because other workers may be elsewhere in their
        loops. An error in it ends this worker, as one in the loop would. With a fixed number of workers, none calls it.

        Args:
            call: the function. Several are called in the order in which they were given.
        """
        if not callable(call):
            raise ConfigError(f"job.on_membership takes a function of a MembershipChange, got {call!r}.")
        elastic = self.world.elastic
        if elastic is not None and elastic.regrouping is not None:
            elastic.regrouping.membership.calls.append(call)

    def scale_learning_rate(self, num_workers: int) -> None:
        """Scale the learning rate with the number of workers, where each keeps its batch (`shard(keep="local")`).

        The optimiser's rates are for `num_workers` workers. A step of N takes N / `num_workers` times that rate (Goyal
        et al. 2017), or its square root with Adam and its relatives (Malladi et al. 2022). The rate is put back after
        each step: schedulers go on as if nothing had changed. For strategies with the mean of all gradients.

        Args:
            num_workers: the same on all workers.
        """
        scale_rate(self, num_workers)  # type: ignore[arg-type]


def refuse_on_membership(world: World) -> None:
    """Raise `ConfigError` for a collective call in a function that was given to `on_membership`."""
    elastic = world.elastic
    if elastic is not None and elastic.regrouping is not None:
        elastic.regrouping.membership.refuse_collective()
