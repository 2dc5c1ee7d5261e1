"""Members of an elastic world as threads: losses, new members and leaves at moments that nobody chose."""

import random
import threading
from dataclasses import dataclass, field

import pytest

from tutti.coordination import LocalCoordinator
from tutti.coordination.description import MemberDescription
from tutti.coordination.elastic_member import ElasticMember, Generation, WorldLimits
from tutti.coordination.member import Member
from tutti.errors import RankLost

NUM_FIRST, NUM_LATER, NUM_STEPS = 4, 4, 60
WITHIN_S = 50.0


class Stopped(Exception):
    """This worker ends in the middle of training."""


@dataclass
class Training:
    """What workers have seen, and how they meet: synchronously, in every step."""

    seed: int
    synchronous: bool
    coordinator: LocalCoordinator = field(default_factory=LocalCoordinator)
    changed: threading.Condition = field(default_factory=threading.Condition)
    generations: dict[int, list[str]] = field(default_factory=dict)
    begun: dict[int, dict[str, int]] = field(default_factory=dict)
    away: dict[int, set[str]] = field(default_factory=dict)
    stops: dict[int, set[int]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    has_begun: threading.Event = field(default_factory=threading.Event)

    def worker(self, rank: int) -> None:
        """The life of a worker: some leave, some are lost, and the rest train to the end."""
        draw = random.Random(f"{self.seed} {rank}")
        # Rank 0 stays, so that there is somebody to join.
        fate = draw.choice(["stays", "leaves", "is lost", "is evicted"]) if rank else "stays"
        ends_at = draw.randrange(5, NUM_STEPS)
        if rank >= NUM_FIRST:
            self.has_begun.wait(WITHIN_S)
        description = MemberDescription.this_process(rank, "host", "host")
        member = self.coordinator.member(description)
        elastic = ElasticMember(member, "w", WorldLimits(1, NUM_FIRST + NUM_LATER, NUM_FIRST))
        try:
            self.train(member, elastic, fate, ends_at)
        except Stopped:
            if fate == "is lost":
                self.leave(elastic)
            else:
                self.evict(member)
        except Exception as error:
            self.failures.append(f"rank {rank}: {error!r}")
        finally:
            self.leave(elastic)
            member.bye()

    def train(self, member: Member, elastic: ElasticMember, fate: str, ends_at: int) -> None:
        progress = 0
        generation = elastic.enter({"progress": progress}, ready=False)
        if generation is None:
            generation = elastic.enter({"progress": progress})
        while True:
            assert generation is not None
            progress = max(progress, *(each.info["progress"] for each in generation.members))
            self.entered(member, generation)
            while progress < NUM_STEPS:
                if fate != "stays" and progress >= ends_at:
                    if fate != "leaves":
                        raise Stopped
                    elastic.leave()
                if elastic.stops_here():
                    with self.changed:
                        self.stops.setdefault(generation.number, set()).add(elastic._steps)
                    break
                if not self.step(member, elastic, generation):
                    break
                progress += 1
            self.leave(elastic)
            if progress >= NUM_STEPS or (fate == "leaves" and progress >= ends_at):
                elastic.depart(finished=progress >= NUM_STEPS)
                self.finished.append(member.description.rank)
                return
            generation = elastic.enter({"progress": progress})

    def entered(self, member: Member, generation: Generation) -> None:
        ids = [each.description.id for each in generation.members]
        with self.changed:
            assert self.generations.setdefault(generation.number, ids) == ids
            assert member.description.id in ids
        self.has_begun.set()

    def step(self, member: Member, elastic: ElasticMember, generation: Generation) -> bool:
        """Take a step with all others; return False if one is gone."""
        if not self.synchronous:
            return True
        number, step = generation.number, elastic._steps
        with self.changed:
            begun = self.begun.setdefault(number, {})
            begun[member.description.id] = step
            self.changed.notify_all()
            while missing := {each for each in self.generations[number] if begun.get(each, 0) < step}:
                if missing & (self.away.get(number, set()) | set(member.known.lost)):
                    return False
                member.check()
                self.changed.wait(0.05)
        return True

    def leave(self, elastic: ElasticMember) -> None:
        """Take no more part in the steps of a generation."""
        with self.changed:
            self.away.setdefault(elastic.number, set()).add(elastic.member.description.id)
            self.changed.notify_all()

    def evict(self, member: Member) -> None:
        """Have the coordinator go on without a member."""
        with self.coordinator._lock:
            state = self.coordinator._state
            state._lose(state.members[member.description.id], "it was silent", 0.0)
            self.coordinator._deliver()
        self.coordinator._handle()
        with pytest.raises(RankLost, match="it was silent"):
            member.check()


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_workers_come_and_go(seed: int, synchronous: bool) -> None:
    training = Training(seed, synchronous)
    threads = [
        threading.Thread(target=training.worker, args=(rank,), name=f"worker {rank}")
        for rank in range(NUM_FIRST + NUM_LATER)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
        assert not thread.is_alive(), f"{thread.name} waits; generations so far: {training.generations}"
    late = [failure for failure in training.failures if "the training has ended" in failure]
    assert training.failures == late
    assert 0 in training.finished
    assert all(len(steps) == 1 for steps in training.stops.values()), training.stops
    numbers = sorted(training.generations)
    assert numbers == list(range(len(numbers)))
