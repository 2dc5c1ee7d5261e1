"""`EndOfData`: ranks whose strategy lets them take different numbers of steps wait for each other behind the last one.

How it works
------------
A rank that is lost before all have come to the end may leave something to the others. So each rank that has no more
steps comes here (`wait`), and they meet in a collective call. What can happen meanwhile:

- All come: the training is over.
- A loss ends the call, or not all that have come are left: ranks change. If something is left, the loops go on.
- Ranks were about to change when this one took its last step, after which all may stop: it changes with them. From here
  on it does not stop them any more (`ElasticMember.comes_to_end`): new ranks are too late then.

Whenever ranks have changed and nothing is left, all of them come here again, those that have joined as well: so all
make the same calls. A rank that finds that the others had completed the call before a loss goes on as they do.
"""

from contextlib import ExitStack

from tutti.data.cursor import Cursor
from tutti.world import World

_LOOK_S = 0.002
"""How often a rank looks whether ranks change, after a loss."""


class _RanksHaveChanged(Exception):
    """Ends a wait for ranks that are others now."""


class EndOfData:
    """The place behind the last step of a rank."""

    def __init__(self, world: World, cursor: Cursor) -> None:
        self._world, self._cursor = world, cursor

    def wait(self, loop_epoch: int) -> bool:
        """Wait for the other ranks; return whether one was lost and has left something. Collective.

        Args:
            loop_epoch: the number of the last loop.
        """
        elastic, counts, cursor = self._world.elastic, self._world.sample_counts, self._cursor
        if elastic is None or elastic.regrouping is None or not counts.in_training:
            return False
        if all(exchange.equal_after_steps for exchange in self._world.usage.exchanges):
            return False  # All ranks take their last step together.
        while not cursor.goes_on(loop_epoch):
            before = cursor.num_regroupings
            if elastic.member.comes_to_end():
                self._world.boundary(is_over=True)
                continue
            try:
                present = self._world.collective(lambda number=before: self._who_has_come(number))  # type: ignore[misc]
            except _RanksHaveChanged:
                continue
            if present is None:  # The others had all come here before a loss, and have gone on.
                break
            elastic.member.all_are_at_end()
            if not self._follow_a_loss(present, before):
                break
        return cursor.goes_on(loop_epoch)

    def _who_has_come(self, num_regroupings: int) -> list[int]:
        """Return the ranks that have come to the end of the last loop. Collective."""
        if self._cursor.num_regroupings != num_regroupings:
            raise _RanksHaveChanged  # What a lost rank has left comes first.
        exchanges = list(self._world.usage.exchanges)
        elastic = any(exchange.tolerates_loss for exchange in exchanges)  # Else a loss ends the wait.
        with ExitStack() as waits:
            for exchange in exchanges:
                waits.enter_context(exchange.out_of_data())
            present: list[int] = self._world.calls.call("the end of the data", None, sorted, elastic=elastic)
            return present

    def _follow_a_loss(self, present: list[int], before: int) -> bool:
        """If not all ranks have come to the end, wait until ranks change; return whether they have."""
        started_s = self._world.transport.now()
        while len(present) < self._world.size and self._cursor.num_regroupings == before:
            self._world.boundary(is_over=True)
            transport = self._world.transport  # It may have changed.
            if transport.now() - started_s > transport.timeout.total_seconds():
                break
            transport.sleep(_LOOK_S)
        return self._cursor.num_regroupings != before
