"""Elastic runs in which anything happens in any order: losses, new members, leaves, breaks, coordinators that restart.

The coordinator's state and the members are the real ones. Of their threads one runs at a time, and stops wherever it
waits: so the order of all that happens is drawn, and an example that fails is repeated exactly.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tutti import __version__
from tutti.coordination.description import MemberDescription
from tutti.coordination.elastic_member import ElasticMember, Generation, WorldLimits
from tutti.coordination.frames import Message, decode, encode
from tutti.coordination.member import Member
from tutti.coordination.state import CoordinatorState, Refused
from tutti.errors import DeadlineExceeded, EnvironmentConflict, RankLost

PATIENCE_S = 4.0
MOST_PROCESSES = 7
RECONNECTED_S = 1.5
"""When all that run have connected to a new coordinator."""
LATENCY_S = 1.0
"""When all has arrived that was sent before."""
MOST_ROUNDS = 1500
RARE = 20
"""One of so many happenings is a fault."""


Key = tuple[int, tuple[str, ...]]


class Killed(BaseException):
    """Ends the thread of a process that is killed."""


class Baton:
    """Lets one thread run until it stops."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._work = work
        self.is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._killed:
                self._work()
        except Killed:
            pass
        finally:
            self.is_over = True
            self._stopped.release()

    def resume(self) -> None:
        """Let the thread run until it stops or ends."""
        if not self.is_over:
            self._go.release()
            self._stopped.acquire()

    def stop(self) -> None:
        """Called by the thread: stop here until it is resumed."""
        self._stopped.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        self._killed = True
        self.resume()
        self._thread.join(10)


class ScheduledMember(Member):
    """A member that stops wherever it would wait."""

    stop: Callable[[], None]
    clock: Callable[[], float]

    def wait(self, over: Callable[[], bool], check: Callable[[], None], timeout_s: float) -> bool:
        deadline = self.clock() + timeout_s
        while not over():
            self.check()
            check()
            if self.clock() > deadline:
                return False
            self.stop()
        return True


@dataclass(eq=False)
class Process:
    """A worker: its training, and its connection to the coordinator."""

    run: "Run"
    rank: int
    baton: Baton = field(init=False)
    to_coordinator: deque[Message] = field(default_factory=deque)
    to_member: deque[Message] = field(default_factory=deque)
    is_linked: bool = False
    linked_at: float = 0.0
    is_frozen: bool = False
    is_dead: bool = False
    wants_to_leave: bool = False
    is_training: bool = False
    """Whether it is in a generation, and does not ask for the next one."""
    progress: int = 0
    outcome: str = ""
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.member = ScheduledMember(MemberDescription(f"m{self.rank}", self.rank, "host", "host", self.rank, 1))
        self.elastic = ElasticMember(self.member, "w", self.run.limits)
        self.baton = Baton(self._live)
        self.member.stop, self.member.clock = self.baton.stop, lambda: self.run.now

    @property
    def id(self) -> str:
        return self.member.description.id

    @property
    def key(self) -> Key:
        """The number and the members of its generation."""
        assert self.elastic.generation is not None
        return self.elastic.number, tuple(each.description.id for each in self.elastic.generation.members)

    @property
    def runs(self) -> bool:
        return not (self.is_dead or self.is_frozen or self.baton.is_over)

    def _live(self) -> None:
        try:
            self.outcome = self._train()
        except (RankLost, EnvironmentConflict, DeadlineExceeded) as error:
            self.outcome = f"{type(error).__name__}: {error}"
        except Exception as error:
            self.failure = error
        self.is_training = False
        self.member.bye()

    def _train(self) -> str:
        first = self._enter(ready=False)
        if first is None:
            self.baton.stop()  # It builds its model.
            first = self._enter(ready=True)
            assert first is not None
        while not first.too_few:
            if self.progress >= self.run.total_steps:
                self.run.left(self)
                self.elastic.depart(finished=True)
                return "finished"
            if self.wants_to_leave:
                self.elastic.leave()
            if self.run.synchronous and self.elastic.lost():
                ends = True
            elif ends := self.elastic.stops_here():
                if self.wants_to_leave:
                    self.run.departed.add(self.id)
                self.run.stopped(self)
            if ends or not self._step():
                self.run.left(self)
                if self.wants_to_leave:
                    break
                entered = self._enter(ready=True)
                assert entered is not None
                first = entered
        self.run.left(self)
        self.elastic.depart(finished=False)
        return "left"

    def _enter(self, *, ready: bool) -> Generation | None:
        lost, before = set(self.member.known.lost), self.elastic.number
        self.is_training = False
        timeout = None if ready else timedelta(seconds=60)
        generation = self.elastic.enter({"progress": self.progress}, ready=ready, timeout=timeout)
        if generation is not None:
            self.is_training = True
            self.run.entered(self, generation, before, lost)
            self.progress = max(self.progress, *(each.info["progress"] for each in generation.members))
        return generation

    def _step(self) -> bool:
        """Take a step, with all others if they are synchronous; return False if it is void."""
        switch = self.elastic._switch
        assert switch is None or self.elastic._steps <= switch, "it passes the place where all stop"
        self.baton.stop()
        if self.run.synchronous and not self.run.step_together(self):
            return False
        self.progress += 1
        return True


class Run:
    """A coordinator and processes."""

    def __init__(self, workers: int, minimum: int, synchronous: bool, replaces: bool) -> None:
        self.limits = WorldLimits(minimum, workers + 1, workers)
        self.synchronous, self.replaces, self.total_steps = synchronous, replaces, 12
        self.now = 100.0
        self.processes: list[Process] = []
        self.generations: dict[int, list[str]] = {}
        self.steps: dict[Key, dict[str, int]] = {}
        """By generation: the step that each member has begun."""
        self.away: dict[Key, set[str]] = {}
        """By generation: members that have ended their part in it."""
        self.stops: dict[Key, dict[str, int]] = {}
        self.taken: dict[Key, set[str]] = {}
        """By generation: members that have heard of it."""
        self.ever_lost: set[str] = set()
        """And those that were stopped before they could connect to a new coordinator: it may never hear of them."""
        self.departed: set[str] = set()
        self.start_coordinator()
        for _ in range(workers):
            self.add_process()

    # What the processes report

    def entered(self, process: Process, generation: Generation, before: int, lost: set[str]) -> None:
        ids = [each.description.id for each in generation.members]
        number = generation.number
        if self.generations.get(number) != ids and not self._is_known(number, process):
            self.generations[number] = ids
        assert self.generations[number] == ids, "two generations have one number"
        assert process.id in ids
        self.taken.setdefault(process.key, set()).add(process.id)
        assert number > before
        assert not lost & set(ids), "a lost member has come back"
        assert len(ids) <= self.limits.maximum
        if process.id in self.ever_lost:
            return  # All others were gone for longer. Had they not been, it would not be here.
        for other in self.processes:
            # Who is known to the coordinator and not lost has ended its part.
            if other.is_training and other.elastic.number < number and not self._may_be_unknown(other):
                assert other.id not in self.state.members, f"{other.id} is still in generation {other.elastic.number}"

    def _may_be_unknown(self, process: Process) -> bool:
        """Whether a new coordinator may go on without a process, which is told so and ends."""
        generation = process.elastic.generation
        assert generation is not None
        before = {each.description.id for each in generation.members if each.after >= 0}
        # New members that alone have heard of their generation took no step with those for whom they came.
        is_alone = (
            generation.number > 0
            and process.id not in before
            and not (before - self.departed) & self.taken[process.key]
        )
        return is_alone or process.id in self.ever_lost

    def _is_known(self, number: int, but: Process) -> bool:
        """Whether a process that is there knows a generation. If all that know it are gone, a world begins anew."""
        return any(
            each is not but and each.is_training and each.elastic.number == number
            for each in self.processes
            if not each.is_frozen and each.id not in self.ever_lost
        )

    def left(self, process: Process) -> None:
        self.away.setdefault(process.key, set()).add(process.id)
        if process.wants_to_leave or process.progress >= self.total_steps:
            self.departed.add(process.id)

    def stopped(self, process: Process) -> None:
        stops = self.stops.setdefault(process.key, {})
        stops[process.id] = process.elastic._steps
        there = {each.id for each in self.processes if not each.is_dead and not each.baton.is_over}
        found = {steps for each, steps in stops.items() if each in there - self.ever_lost - self.departed}
        assert len(found) <= 1, f"members stop after {stops} steps"

    def step_together(self, process: Process) -> bool:
        (_, members), step = process.key, process.elastic._steps
        begun = self.steps.setdefault(process.key, {})
        begun[process.id] = step
        while not all(begun.get(each, 0) >= step for each in members):
            missing = {each for each in members if begun.get(each, 0) < step}
            if missing & (self.away.get(process.key, set()) | process.member.known.lost.keys()):
                gone = {each.id for each in self.processes if each.is_dead} | self.ever_lost | self.departed
                assert gone & set(members), "a step is void, and nobody is lost"
                return False
            process.member.check()
            process.baton.stop()
        return True

    # What may happen

    def start_coordinator(self) -> None:
        self.started = self.now
        self.state = CoordinatorState(PATIENCE_S, "host", self.now, self._look)
        self.state.generations.replaces["launcher"] = self.replaces
        self.ever_lost |= {each.id for each in self.processes if each.is_frozen}
        for process in self.processes:
            self._unlink(process)

    def _look(self, pid: int, started: int) -> Any:
        process = self.processes[pid]
        over = process.is_dead or (process.baton.is_over and not process.to_coordinator)
        return "ended" if over else "stopped" if process.is_frozen else "running"

    def add_process(self) -> None:
        self.processes.append(Process(self, len(self.processes)))

    def connect(self, process: Process) -> None:
        try:
            self.state.connect(process.member.hello(__version__), self.now)
        except Refused as refused:
            process.member.exclude(str(refused))
            return
        process.is_linked, process.linked_at = True, self.now
        self._take_outbox()
        process.member.received(process.to_member.popleft())  # The welcome.
        process.member.attach(process.to_coordinator.append)

    def _unlink(self, process: Process) -> None:
        process.is_linked = False
        process.to_coordinator.clear()
        process.to_member.clear()
        process.member.detach()

    def disconnect(self, process: Process) -> None:
        self._unlink(process)
        self.state.disconnect(process.id, self.now)
        self._take_outbox()

    def kill(self, process: Process) -> None:
        process.is_dead, process.is_training = True, False
        process.baton.kill()
        if process.is_linked:
            self.disconnect(process)

    def freeze(self, process: Process) -> None:
        process.is_frozen = True
        if not process.is_linked:
            self.ever_lost.add(process.id)

    def deliver_up(self, process: Process) -> None:
        message = decode(encode(process.to_coordinator.popleft())[4:])
        self.state.receive(process.id, message, self.now)
        self._take_outbox()
        if process.baton.is_over and not process.to_coordinator and process.is_linked:
            self.disconnect(process)

    def deliver_down(self, process: Process) -> None:
        message = process.to_member.popleft()
        process.member.received(message)
        if message["op"] == "refused":
            self._unlink(process)

    def pass_time(self) -> None:
        self.now += 0.25
        for process in self.processes:
            if self.may_connect(process) and self.now - self.started >= RECONNECTED_S / 2:
                self.connect(process)
            while process.runs and process.to_coordinator and self.now - process.linked_at >= LATENCY_S:
                self.deliver_up(process)
            if process.is_linked and process.runs:
                self.state.receive(process.id, {"op": "beat", "status": {}}, self.now)
        self.state.tick(self.now)
        self._take_outbox()

    def may_connect(self, process: Process) -> bool:
        can = process.runs and not process.is_linked and process.member.known.refused is None
        # Else a few new ones could be taken for the whole world that a coordinator before this one has begun.
        is_fresh = process.elastic.number < 0 and process.rank >= self.limits.expected
        return can and (not is_fresh or not self.generations or self.now - self.started >= RECONNECTED_S)

    def _take_outbox(self) -> None:
        self.ever_lost |= self.state.lost.keys()
        for to, message in self.state.drain():
            process = self.processes[int(to[1:])]
            if process.is_linked:
                process.to_member.append(decode(encode(message)[4:]))

    def let_happen(self, choice: int) -> None:
        """Let something happen: in one of so many cases a fault, or what a user does."""
        is_rare, number = choice % RARE == 0, choice // RARE
        found = (self._faults() if is_rare else []) or self._next_steps()
        found[number % len(found)]()

    def _next_steps(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = [self.pass_time]
        for process in self.processes:
            found += [lambda p=process: p.baton.resume()] * process.runs
            found += [lambda p=process: self.deliver_up(p)] * bool(process.is_linked and process.to_coordinator)
            found += [lambda p=process: self.deliver_down(p)] * bool(process.runs and process.to_member)
            found += [lambda p=process: self.connect(p)] * self.may_connect(process)
        return found

    def _faults(self) -> list[Callable[[], None]]:
        has_begun = all(each.elastic.number >= 0 or each.is_dead for each in self.processes[: self.limits.expected])
        found = [self.start_coordinator] * 2 * has_begun
        found += [self.add_process] * 2 * (len(self.processes) < MOST_PROCESSES and bool(self.generations))
        for process in self.processes:
            if process.runs:
                found.append(lambda p=process: self.kill(p))
                found.append(lambda p=process: setattr(p, "wants_to_leave", True))
                found += [lambda p=process: self.disconnect(p)] * process.is_linked
                found += [lambda p=process: self.freeze(p)] * has_begun
            elif process.is_frozen:
                found += [lambda p=process: setattr(p, "is_frozen", False)] * 3
        return found

    def come_to_rest(self) -> None:
        """No more faults: all that is sent arrives, and everybody runs until all have ended."""
        self.replaces = self.state.generations.replaces["launcher"] = False
        for number in count():
            running = [each for each in self.processes if not each.is_dead and not each.baton.is_over]
            if not running:
                return
            waiting = [(each.id, each.elastic.number, each.is_training, each.progress) for each in running]
            assert number < MOST_ROUNDS, f"they wait without end: {waiting}"
            for process in self.processes:
                process.is_frozen = False
                while process.is_linked and process.to_coordinator:
                    self.deliver_up(process)
                while process.is_linked and process.to_member:
                    self.deliver_down(process)
                process.baton.resume()
            self.pass_time()

    def close(self) -> None:
        for process in self.processes:
            process.baton.kill()


def play(workers: int, minimum: int, synchronous: bool, replaces: bool, choices: list[int]) -> Run:
    """Let what `choices` draw happen to an elastic run, and let it end."""
    run = Run(workers, min(minimum, workers), synchronous, replaces)
    try:
        for choice in choices:
            run.let_happen(choice)
        run.come_to_rest()
        for process in run.processes:
            if process.failure is not None:
                raise process.failure
    finally:
        run.close()
    return run


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    workers=st.integers(1, 4),
    minimum=st.integers(1, 3),
    synchronous=st.booleans(),
    replaces=st.booleans(),
    choices=st.lists(st.integers(0, 10_000), max_size=250),
)
def test_members_agree_whatever_happens(
    workers: int, minimum: int, synchronous: bool, replaces: bool, choices: list[int]
) -> None:
    play(workers, minimum, synchronous, replaces, choices)


@pytest.mark.parametrize("seed", range(8))
def test_members_agree_in_long_runs(seed: int) -> None:
    """As above, with as many happenings as hypothesis seldom draws."""
    draw = random.Random(seed)
    for _ in range(40):
        choices = [draw.randrange(10**6) for _ in range(draw.choice([100, 200, 400]))]
        play(draw.randint(1, 4), draw.randint(1, 3), draw.random() < 0.5, draw.random() < 0.5, choices)


@example(synchronous=True)
@example(synchronous=False)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(synchronous=st.booleans())
def test_without_faults_all_finish_in_one_generation(synchronous: bool) -> None:
    run = play(3, 1, synchronous, False, [])
    assert [process.outcome for process in run.processes] == ["finished"] * 3
    assert list(run.generations) == [0]
