"""`SimulatedMember`: a rank's view of its job, whose waits take virtual time."""

from collections.abc import Callable

from tutti.coordination.description import MemberDescription, ProcessState
from tutti.coordination.frames import Message
from tutti.coordination.member import Member
from tutti.simulation.rank import Rank
from tutti.simulation.recovery import PATIENCE_S
from tutti.simulation.work import SimulatedWork


class _Word(SimulatedWork):
    """The next message of the coordinator."""

    def describe(self) -> str:
        return "the coordinator, which waits for other ranks"

    def come(self) -> None:
        """It has come, or is not waited for any more. An action of the engine."""
        if self.finish_s is None:
            self.complete(self.rank.engine.now)


class SimulatedMember(Member):
    """The member of a simulated rank, or of an observer, which is on a host and has no rank."""

    def __init__(
        self, description: MemberDescription, rank: Rank | None, process_state: Callable[[int], ProcessState]
    ) -> None:
        """Make a member without a connection; `process_state` tells the state of a process by its id."""
        super().__init__(description, (lambda: 0.0) if rank is None else (lambda: rank.time))
        self.place, self.patience_s = "the simulated coordinator", PATIENCE_S
        self._rank, self._process_state = rank, process_state
        self._word: _Word | None = None
        """What the rank waits for."""

    def wait(self, over: Callable[[], bool], check: Callable[[], None], timeout_s: float) -> bool:
        """Wait until `over`, in virtual time. Called by the rank's thread, with no lock held."""
        rank = self._rank
        assert rank is not None
        rank.waiter.catch_up()  # Whatever has come by now is known.
        deadline_s = rank.clock + timeout_s
        while not over():
            self.check()
            check()
            if rank.clock >= deadline_s:
                return False
            word = self._word = _Word(rank)
            if deadline_s < float("inf"):
                rank.engine.schedule(deadline_s, word.come)
            try:
                word.wait()  # Ended by `received`, at the deadline above, or at the rank's own timeout.
            finally:
                self._word = None
        return True

    def received(self, message: Message) -> None:
        """Take in a message. An action of the engine."""
        if message["op"] == "look":
            state = self._process_state(message["pid"])
            self.outbox.post({"op": "seen", "member": message["member"], "state": state})
            return
        super().received(message)
        if self._word is not None:
            self._word.come()
