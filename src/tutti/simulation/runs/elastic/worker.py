"""`SimulatedWorker`: a simulated rank, and what its launcher knows of it."""

from dataclasses import dataclass

from tutti.simulation.rank import Rank


@dataclass(eq=False)
class SimulatedWorker:
    """A rank, and what its launcher knows of it."""

    rank: Rank
    slot: int
    """Its place."""
    is_new: bool
    """Whether it comes to others that have begun."""
    started_s: float
    has_joined: bool = False
    """Whether it has trained with the others."""
    is_asked_to_leave: bool = False
    has_left: bool = False
    is_removed: bool = False
    """Whether it was ended because nobody needs it."""

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.rank.gone is None

    @property
    def has_finished(self) -> bool:
        """Whether it has come to the end of the training."""
        thread = self.rank.thread
        ended = thread.ended and not thread.died and thread.error is None
        return ended and not self.runs and not self.has_left and not self.is_removed
