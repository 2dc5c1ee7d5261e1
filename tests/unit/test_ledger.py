"""The ledger of a shard: which updates make a version, and who may read it, in every order of events."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.strategies.parameter_server import BSP, SSP, Async, Consistency, SoftSync, StalenessAware
from tutti.strategies.parameter_server.ledger import Ledger, Update

RULES: list[Consistency] = [
    BSP(), SSP(0), SSP(1), SSP(3), SoftSync(1), SoftSync(2), SoftSync(4), Async(),
    StalenessAware(SSP(2)), StalenessAware(Async()),
]  # fmt: skip

every_rule = pytest.mark.parametrize("rule", RULES, ids=str)
events = st.lists(
    st.tuples(st.sampled_from(["step", "step", "step", "step", "leave", "join"]), st.integers(0, 4)), max_size=60
)


def update(worker: int, base: int = 0) -> Update:
    return Update(worker, base, 1.0, 0.0, None, None, None)


@dataclass
class Worker:
    """As a worker sees itself."""

    clock: int = 0
    version: int = 0
    """Of what it has read."""
    wanted: int | None = None
    """While it waits."""


@dataclass
class World:
    """A ledger, and workers that wait as real ones do."""

    rule: Consistency
    num_workers: int
    sent: list[Update] = field(default_factory=list)
    applied: dict[int, int] = field(default_factory=dict)
    """By update: the version that it is first in."""

    def __post_init__(self) -> None:
        self.members = set(range(self.num_workers))
        self.ledger = Ledger(self.rule, self.members)
        self.workers = [Worker() for _ in range(self.num_workers)]

    def step(self, number: int) -> None:
        worker = self.workers[number]
        if number not in self.members or worker.wanted is not None:
            return
        self.check_read(number)
        self.sent.append(update(number, worker.version))
        self.ledger.push(self.sent[-1])
        assert self.sent[-1].clock == worker.clock
        worker.clock += 1
        needed = 0 if self.rule.bound is None else worker.clock - self.rule.bound
        if self.rule.bound is None or worker.version < needed:
            worker.wanted = needed

    def leave(self, number: int) -> None:
        self.members.discard(number)
        self.workers[number].wanted = None

    def join(self, number: int) -> None:
        if number not in self.members:
            self.members.add(number)
            self.ledger.join(number)
            clock = self.workers[number].clock
            if self.rule.bound is not None:
                clock = max(clock, self.ledger.version)
            self.workers[number] = Worker(clock, self.ledger.version, clock - (self.rule.bound or 0))
            self.settle()

    def settle(self) -> None:
        """Take what is due, and let read who may."""
        while True:
            before = self.ledger.version
            if not (due := self.ledger.take_due()):
                assert self.ledger.version == before
                break
            self.check_step(due, before)
            self.applied.update({id(each): self.ledger.version for each in due})
        for number, worker in enumerate(self.workers):
            if worker.wanted is not None:
                readable = self.ledger.is_readable(number, worker.wanted)
                self.check_exactly(number, worker.wanted, readable)
                if readable:
                    worker.version, worker.wanted = self.ledger.version, None

    def check_step(self, due: list[Update], before: int) -> None:
        assert [each.worker for each in due] == sorted(each.worker for each in due)
        assert not {id(each) for each in due} & self.applied.keys(), "applied twice"
        for each in due:
            assert each.staleness == self.ledger.version - 1 - each.base_version >= 0
        if self.rule.bound is None:
            assert self.ledger.version == before + 1
            everything = len(self.sent) - len(self.applied)
            assert len(due) == min(self.rule.quorum, len(self.members) or everything)
        else:
            assert {each.clock for each in due} == {self.ledger.version - 1}
            assert self.ledger.version > before
            assert {each.worker for each in due} >= self.members, "somebody who is here was not waited for"

    def check_read(self, number: int) -> None:
        """The promise of the rule, for a worker that computes from what it has read."""
        worker = self.workers[number]
        if self.rule.bound is None:
            promised = [each for each in self.sent if each.worker == number]
        else:
            oldest = worker.clock - self.rule.bound
            promised = [each for each in self.sent if each.clock < oldest]
            assert all(self.ledger.clock(other) >= oldest for other in self.members)
        for each in promised:
            if self.rule.bound is not None or id(each) in self.applied or not self.left_since(each):
                assert self.applied[id(each)] <= worker.version, f"{each} is not in version {worker.version}"

    def left_since(self, each: Update) -> bool:
        """Whether its worker was away since it sent this: then nobody waited for it."""
        return id(each) in self.abandoned

    abandoned: set[int] = field(default_factory=set)

    def check_exactly(self, number: int, wanted: int, readable: bool) -> None:
        """Nobody waits for more than the rule promises."""
        if self.rule.bound is None:
            waiting = any(each.worker == number and id(each) not in self.applied for each in self.sent)
            assert readable is not waiting
        elif not readable:
            missing = [other for other in self.members if self.ledger.clock(other) <= self.ledger.version]
            assert missing, "waits though everybody has sent"
            assert self.ledger.version < wanted

    def check_progress_is_possible(self) -> None:
        assert not self.members or any(self.workers[number].wanted is None for number in self.members)


@every_rule
@settings(max_examples=60)
@given(num_workers=st.integers(1, 5), events=events)
def test_every_order_of_events(rule: Consistency, num_workers: int, events: list[tuple[str, int]]) -> None:
    world = World(rule, num_workers)
    for what, number in events:
        if number >= num_workers:
            continue
        if what == "leave":
            gone = [each for each in world.sent if each.worker == number and id(each) not in world.applied]
            world.abandoned.update(id(each) for each in gone)
        getattr(world, what)(number)
        world.settle()
        world.check_progress_is_possible()
        if rule.bound is not None:
            clocks = [world.workers[number].clock for number in world.members]
            assert not clocks or max(clocks) - min(clocks) <= rule.bound + 1  # One waits, the other is about to send.
    for number in range(num_workers):
        world.leave(number)
        world.settle()
    assert len(world.applied) == len(world.sent), "what was sent is lost"


@every_rule
@settings(max_examples=20)
@given(events=st.lists(st.integers(0, 2), min_size=30, max_size=60))
def test_all_workers_end_at_the_same_version(rule: Consistency, events: list[int]) -> None:
    """Three workers, in any order, until each has taken four steps."""
    world = World(rule, 3)
    for number in [*events, *([0, 1, 2] * 12)]:
        if sum(each.worker == number for each in world.sent) == 4 and world.workers[number].wanted is None:
            world.leave(number)
        elif sum(each.worker == number for each in world.sent) < 4:
            world.step(number)
        world.settle()
    assert not world.members
    assert len(world.applied) == len(world.sent) == 12
    if rule.bound is not None:
        assert world.ledger.version == 4
        assert sorted(world.applied.values()) == sorted([1, 2, 3, 4] * 3)
    else:
        assert 12 / rule.quorum <= world.ledger.version <= 12


def test_a_quorum_shrinks_with_the_number_of_workers() -> None:
    members = {0, 1, 2, 3}
    ledger = Ledger(SoftSync(3), members)
    ledger.push(update(0))
    ledger.push(update(1))
    assert not ledger.take_due()
    members.discard(3)
    assert not ledger.take_due()
    members.discard(2)
    assert [each.worker for each in ledger.take_due()] == [0, 1]
    members.add(2)
    ledger.join(2)
    ledger.push(update(1))
    ledger.push(update(0))
    assert not ledger.take_due()
    assert not ledger.is_readable(0, 0)
    assert ledger.is_readable(2, 0)
    ledger.push(update(2))
    assert [each.worker for each in ledger.take_due()] == [0, 1, 2]
    assert ledger.version == 2


def test_a_version_is_made_of_the_first_updates() -> None:
    ledger = Ledger(SoftSync(2), {0, 1, 2})
    for worker in (2, 1, 0):
        ledger.push(update(worker))
    assert [each.worker for each in ledger.take_due()] == [1, 2]
    assert not ledger.take_due()


def test_updates_of_a_worker_that_left_still_count() -> None:
    members = {0, 1}
    ledger = Ledger(SSP(2), members)
    for _ in range(3):
        ledger.push(update(1))
    assert not ledger.take_due()
    members.discard(0)
    assert [ledger.take_due()[0].clock for _ in range(3)] == [0, 1, 2]
    assert ledger.version == 3


def test_skipping_and_starting_again() -> None:
    members = {0, 1}
    ledger = Ledger(BSP(), members)
    assert ledger.awaits_updates
    assert ledger.next_clock is None
    ledger.skip(4)
    assert ledger.version == 5
    ledger.skip(2)
    assert ledger.version == 5, "never back"
    ledger.push(update(0))
    ledger.restart()
    assert (ledger.version, ledger.clock(0), ledger.next_clock) == (0, 0, None)


@pytest.mark.parametrize("staleness", range(6))
def test_scales(staleness: int) -> None:
    for rule in (BSP(), SSP(2), SoftSync(2), Async()):
        assert rule.scale(staleness, 4) == 1.0
    assert StalenessAware(Async()).scale(staleness, 2) == (1.0 if staleness < 2 else 1 / staleness)
    # Among more workers an update counts as one of usual staleness, however fresh it is.
    assert StalenessAware(Async()).scale(staleness, 4) == 1 / max(3, staleness)
    assert StalenessAware(SoftSync(2)).scale(staleness, 4) == (1.0 if staleness < 2 else 1 / staleness)
    assert StalenessAware(SSP(4), lambda late: 0.5**late).scale(staleness, 4) == 0.5**staleness


class Loose(SSP):
    """Allows one step more than it says: what the checks above must notice."""

    @property
    def bound(self) -> int:
        return self.staleness + 1


def test_the_checks_would_notice_a_bound_that_is_one_too_large() -> None:
    for rule in (SSP(1), Loose(1)):
        world = World(rule, 2)
        for _ in range(4):
            world.step(0)
            world.settle()
        world.rule = SSP(1)
        if type(rule) is SSP:
            assert world.workers[0].clock == 2
            assert world.workers[0].wanted == 1
        else:
            with pytest.raises(AssertionError):
                world.check_read(0)


def synchronous(worker: int) -> Update:
    return Update(worker, 0, 1.0, 0.0, None, None, None, is_synchronous=True)


@pytest.mark.parametrize("rule", [Async(), SoftSync(2)], ids=str)
class TestSynchronousStart:
    """Under a counting rule: a version of an update of every worker, as long as one of these is pending."""

    def test_a_version_is_made_of_an_update_of_every_member(self, rule: Consistency) -> None:
        ledger = Ledger(rule, {0, 1, 2})
        for worker in (2, 0):
            ledger.push(synchronous(worker))
            assert ledger.take_due() == []
            assert not ledger.is_readable(worker, 0)
        ledger.push(synchronous(1))
        assert [each.worker for each in ledger.take_due()] == [0, 1, 2]
        assert (ledger.version, ledger.is_idle) == (1, True)

    def test_what_a_lost_worker_pushed_counts_with_the_others(self, rule: Consistency) -> None:
        members = {0, 1, 2}
        ledger = Ledger(rule, members)
        ledger.push(synchronous(2))
        members.discard(2)
        ledger.push(synchronous(0))
        assert ledger.take_due() == [], "worker 1 is still to come"
        ledger.push(synchronous(1))
        assert [each.worker for each in ledger.take_due()] == [0, 1, 2]

    def test_the_last_one_that_is_waited_for_may_leave(self, rule: Consistency) -> None:
        members = {0, 1, 2}
        ledger = Ledger(rule, members)
        ledger.push(synchronous(0))
        ledger.push(synchronous(1))
        members.discard(2)
        assert len(ledger.take_due()) == 2

    def test_a_worker_that_is_past_the_start_is_not_waited_for(self, rule: Consistency) -> None:
        """One that was away is behind the others, and goes on alone."""
        ledger = Ledger(rule, {0, 1})
        ledger.push(synchronous(0))
        ledger.push(update(1))
        assert len(ledger.take_due()) == 2
        ledger.push(synchronous(0))
        assert [each.worker for each in ledger.take_due()] == [0]

    def test_afterwards_the_rule_holds(self, rule: Consistency) -> None:
        ledger = Ledger(rule, {0, 1, 2})
        for worker in range(3):
            ledger.push(synchronous(worker))
        ledger.take_due()
        for worker in range(rule.quorum):
            ledger.push(update(worker))
        assert len(ledger.take_due()) == rule.quorum

    def test_a_restart_waits_for_all_again(self, rule: Consistency) -> None:
        ledger = Ledger(rule, {0, 1})
        for worker in (0, 1):
            ledger.push(update(worker))
        ledger.take_due()
        ledger.restart()
        ledger.push(synchronous(0))
        assert ledger.take_due() == []
