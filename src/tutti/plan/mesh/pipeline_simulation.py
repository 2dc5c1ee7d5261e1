"""`PipelineSimulation`: the steps of a pipeline in virtual time, with the messages between its stages.

How it works. Each rank has a clock and a list of actions, in the order of its schedule. The simulation always runs the
action that can begin first, over all ranks: a rank's next one, once the ranks that it depends on have sent their
outputs. A network card carries one message at a time in each direction; a tensor-parallel collective takes both.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.cluster import Link
from tutti.parallel.pipeline.schedules import Action

_STEPS = 3
"""Simulated steps: the last is measured, when ranks no longer start together."""

_LOSS_BYTES = 8
"""Bytes of the loss, which the last stage sends to all others at the end of a step."""


@dataclass(frozen=True)
class StageTime:
    """The times of one rank, for one microbatch and for a step."""

    forward_s: float
    """Seconds of forward, with collectives that do not use the network card."""
    backward_s: float
    """Seconds of backward, with collectives that do not use the network card."""
    network_collectives_s: tuple[Sequence[float], Sequence[float]]
    """Seconds of each tensor-parallel collective over the network card, in forward and in backward."""
    output_bytes: Sequence[float]
    """Bytes of each tensor that is sent to the next stage; as many come back as gradients."""
    ending_s: float
    """Seconds after the last microbatch: the exchange along `data`, and the optimiser."""


class PipelineSimulation:
    """Simulates one step after another; a rank begins the next step when it has ended its own."""

    def __init__(self, orders: Sequence[Sequence[Action]], stages: Sequence[StageTime], link: Link) -> None:
        self._orders, self._stages, self._link = orders, stages, link
        self._clocks = [0.0] * len(stages)
        self._outgoing, self._incoming = [_CardDirection() for _ in stages], [_CardDirection() for _ in stages]

    def seconds(self) -> float:
        """Return the seconds of a step in the steady state."""
        ends = []
        for _ in range(_STEPS):
            self._step()
            ends.append(max(self._clocks))
        # In the first step all ranks start together. Later, early stages begin while late ones still end theirs.
        return ends[-1] - ends[-2]

    def _step(self) -> None:
        arrived: dict[Action, float] = {}  # When the output of an action is at the rank that needs it.
        next_of = [0] * len(self._orders)
        while (startable := self._next(next_of, arrived)) is not None:
            start_s, rank = startable
            action = self._orders[rank][next_of[rank]]
            next_of[rank] += 1
            self._clocks[rank] = self._run(action.kind == "F", rank, start_s)
            self._send_output(action, rank, arrived)
        # Every rank returns the loss of the batch, so it waits for the last stage.
        last = len(self._stages) - 1
        loss_arrives = [self._send(last, rank, [_LOSS_BYTES], self._clocks[last]) for rank in range(last)]
        for rank, arrives_s in enumerate(loss_arrives):
            self._clocks[rank] = max(self._clocks[rank], arrives_s)
        for rank, stage in enumerate(self._stages):
            # A rank also waits until all its messages have left.
            self._clocks[rank] = max(self._clocks[rank], self._outgoing[rank].free_s) + stage.ending_s

    def _next(self, next_of: list[int], arrived: dict[Action, float]) -> tuple[float, int] | None:
        """Return the action that can begin first, of those whose inputs are known: its time and its rank."""
        ready = []
        for rank, actions in enumerate(self._orders):
            if next_of[rank] < len(actions):
                # What the rank itself must have done before comes earlier in its own list.
                needed = [
                    action for action in actions[next_of[rank]].dependencies(len(self._stages)) if action.stage != rank
                ]
                if all(action in arrived for action in needed):
                    ready.append((max([self._clocks[rank], *(arrived[action] for action in needed)]), rank))
        # Otherwise ranks would wait for each other for ever: the schedule would be wrong.
        assert ready or all(number == len(actions) for number, actions in zip(next_of, self._orders, strict=True))
        return min(ready, default=None)

    def _run(self, forward: bool, rank: int, start_s: float) -> float:
        """Return when a pass ends: equal parts of computation, each followed by a collective."""
        stage = self._stages[rank]
        computing_s = stage.forward_s if forward else stage.backward_s
        # Forward is at index 0 and backward at 1.
        collectives = stage.network_collectives_s[not forward]
        now_s = start_s + (0.0 if collectives else computing_s)
        # A collective sends and receives at the same time.
        card = [self._outgoing[rank], self._incoming[rank]]
        for collective_s in collectives:
            now_s = _reserve(card, now_s + computing_s / len(collectives), collective_s) + collective_s
        return now_s

    def _send_output(self, action: Action, rank: int, arrived: dict[Action, float]) -> None:
        """Send activations to the next stage, or gradients to the one before, and note when they arrive."""
        target = rank + (1 if action.kind == "F" else -1)
        if 0 <= target < len(self._stages):
            # A gradient has the size of the activation it belongs to: the output of the earlier of both stages.
            arrived[action] = self._send(rank, target, self._stages[min(rank, target)].output_bytes, self._clocks[rank])

    def _send(self, src: int, dst: int, sizes: Sequence[float], at_s: float) -> float:
        """Return when all of these messages have arrived."""
        arrives_s = at_s
        for num_bytes in sizes:
            duration_s = num_bytes * self._link.seconds_per_byte
            # The first byte arrives one latency after it has left; the receiver's card is then busy as long again.
            leaves_s = _reserve([self._outgoing[src]], at_s, duration_s)
            arrives_s = _reserve([self._incoming[dst]], leaves_s + self._link.latency_s, duration_s) + duration_s
        return arrives_s


class _CardDirection:
    """One direction of a rank's network card, and the intervals in which it is in use."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    @property
    def free_s(self) -> float:
        """When the last interval ends."""
        return max((stop_s for _, stop_s in self._busy), default=0.0)

    def idle(self, at_s: float) -> float:
        """Return the first moment from `at_s` on at which it is idle."""
        # In the order of their starts: where one moves the moment on, those after it are looked at as well.
        for start_s, stop_s in self._busy:
            if start_s <= at_s < stop_s:
                at_s = stop_s
        return at_s

    def reserve(self, at_s: float, duration_s: float) -> None:
        insort(self._busy, (at_s, at_s + duration_s))


def _reserve(directions: Sequence[_CardDirection], at_s: float, duration_s: float) -> float:
    """Reserve all directions at once for `duration_s`, as soon as all are idle; return the moment."""
    # Only the start is checked: actions run in order of time, so what is reserved already is mostly earlier.
    while any((later_s := direction.idle(at_s)) > at_s for direction in directions):
        at_s = later_s
    for direction in directions:
        direction.reserve(at_s, duration_s)
    return at_s
