"""Generations of an elastic world: who is in the next one, told what happened and when."""

from typing import Any

import pytest
from test_coordinator_state import Job

from tutti.coordination.description import MemberDescription
from tutti.coordination.frames import Message, ProtocolError

Told = list[tuple[str, Message]]


class ElasticJob(Job):
    """Members of one elastic world of 1 to 3, which 3 members begin."""

    minimum, maximum = 1, 3

    def __init__(self, size: int = 3) -> None:
        super().__init__(*"a" * size)
        for rank in range(size):
            self.enter(rank)
        self.told()

    def enter(self, rank: int, after: int = -1, *, ready: bool = False, **info: Any) -> Told:
        limits = {"minimum": self.minimum, "maximum": self.maximum, "expected": 3}
        return self.send(rank, "enter", scope="w", after=after, ready=int(ready), info=info, **limits)

    def send(self, sender: int, op: str, **fields: Any) -> Told:
        limits = {"minimum": self.minimum, "maximum": self.maximum, "expected": 3}
        return super().send(sender, op, **({**limits, **fields} if op in ("want", "boundary", "depart") else fields))

    def newcomer(self) -> int:
        rank = len(self.members)
        self.members.append(MemberDescription(f"m{rank}", rank, "a", "a", rank, 1))
        self.hello(self.members[-1])
        self.told()
        return rank

    def kill(self, rank: int) -> Told:
        self.processes[rank] = "ended"
        self.state.disconnect(f"m{rank}", self.now)
        return self.told()


def generation(told: Told) -> list[str]:
    """The members of the generation that was formed, by rank; all of them are told, and nobody else."""
    found = [message for _, message in told if message["op"] == "generation"]
    assert found, told
    members = [each["member"]["id"] for each in found[0]["members"]]
    assert [to for to, message in told if message["op"] == "generation"] == members
    return members


def said(told: Told, op: str) -> dict[str, Any]:
    return {to: message.get("reason") for to, message in told if message["op"] == op}


def test_the_first_generation_waits_for_the_minimum_also_where_fewer_are_started() -> None:
    job = Job("a", "a")
    limits = {"minimum": 2, "maximum": 4, "expected": 1}
    ask = {"scope": "w", "after": -1, "ready": 0, "info": {}, **limits}
    assert job.send(0, "enter", **ask) == []
    assert job.wait(30) == []
    assert generation(job.send(1, "enter", **ask) + job.wait(3)) == ["m0", "m1"]


def test_a_member_that_wants_to_leave_is_let_go() -> None:
    job = ElasticJob()
    told = job.send(1, "want", scope="w", number=0)
    assert set(said(told, "change")) == {"m0", "m1", "m2"}
    for rank, steps in enumerate((7, 9, 8)):
        told = job.send(rank, "boundary", scope="w", number=0, steps=steps)
    assert [message["steps"] for _, message in told] == [9, 9, 9]
    early = job.enter(0, 0) + job.enter(1, 0, leaving=1)
    assert not {message["op"] for _, message in early} & {"generation", "released"}
    told = job.enter(2, 0)
    assert said(told, "released") == {"m1": None}
    assert generation(told) == ["m0", "m2"]


def test_a_member_that_was_let_go_hears_it_again_on_a_new_connection() -> None:
    job = ElasticJob()
    job.enter(0, 0)
    job.enter(1, 0, leaving=1)
    job.enter(2, 0)
    assert said(job.enter(1, 0, leaving=1), "released") == {"m1": None}
    # Its end is no loss: nobody is asked to stop.
    job.send(1, "depart", scope="w", finished=0)
    assert said(job.kill(1), "change") == {}


def test_members_that_all_leave_go_on_together_once_more() -> None:
    job = ElasticJob()
    for rank in (0, 1):
        job.enter(rank, 0, leaving=1)
    told = job.enter(2, 0, leaving=1)
    assert said(told, "released") == {}
    assert generation(told) == ["m0", "m1", "m2"]


def test_a_member_that_leaves_makes_room_for_a_new_one() -> None:
    job = ElasticJob()
    new = job.newcomer()
    assert said(job.enter(new), "running") == {"m3": None}
    # A worker in place of one whose loss is not known yet has a moment.
    assert said(job.enter(new, ready=True), "conflict") == {}
    assert said(job.wait(2), "conflict") == {"m3": "the job has 3 workers, which is its maximum"}
    job.enter(0, 0)
    job.enter(1, 0, leaving=1)
    job.enter(2, 0)
    late = job.newcomer()
    assert said(job.enter(late), "running") == {"m4": None}
    told = job.enter(late, ready=True)
    assert set(said(told, "change")) == {"m0", "m2"}
    job.enter(0, 1)
    assert generation(job.enter(2, 1)) == ["m0", "m2", "m4"]


def test_leaving_members_wait_for_a_new_one_that_takes_over_their_state() -> None:
    job = ElasticJob(3)
    job.enter(0, 0)
    job.enter(1, 0)
    job.kill(2)
    new = job.newcomer()
    job.enter(new)
    job.enter(new, ready=True)
    for rank in (0, 1):
        told = job.enter(rank, 1, leaving=1)
    assert generation(told) == ["m0", "m1", "m3"]
    assert said(told, "released") == {}
    for rank in (0, 1):
        job.enter(rank, 2, leaving=1)
    told = job.enter(new, 2)
    assert set(said(told, "released")) == {"m0", "m1"}
    assert generation(told) == ["m3"]


def test_too_few_members_wait_while_workers_come() -> None:
    job = ElasticJob()
    job.state.generations.replaces[""] = True
    job.minimum = job.state.generations._worlds["w"].minimum = 3
    job.enter(0, 0)
    job.enter(1, 0)
    assert not [message for _, message in job.kill(2) if message["op"] == "generation"]
    assert not [message for _, message in job.wait(20) if message["op"] == "generation"]
    new = job.newcomer()
    job.enter(new)
    assert generation(job.enter(new, ready=True)) == ["m0", "m1", "m3"]


def test_too_few_members_end_when_no_workers_come() -> None:
    job = ElasticJob()
    job.minimum = job.state.generations._worlds["w"].minimum = 3
    job.enter(0, 0)
    job.enter(1, 0)
    told = job.kill(2) + job.wait(1)
    assert not [message for _, message in told if message["op"] == "generation"], "launchers have yet to notice it"
    told = job.wait(2)
    assert generation(told) == ["m0", "m1"]
    assert all(message["too_few"] for _, message in told if message["op"] == "generation")


def test_another_launcher_that_brings_workers_counts_until_it_is_gone() -> None:
    job = ElasticJob()
    job.minimum = job.state.generations._worlds["w"].minimum = 3
    job.hello(MemberDescription("launcher", -1, "b", "b", 90, 1))
    job.state.receive("launcher", {"op": "replaces", "yes": 1}, job.now)
    job.enter(0, 0)
    job.enter(1, 0)
    job.kill(2)
    assert not [message for _, message in job.wait(5) if message["op"] == "generation"]
    job.state.receive("launcher", {"op": "bye"}, job.now)
    assert generation(job.told() + job.wait(1)) == ["m0", "m1"]


def test_who_comes_after_the_end_is_told_so() -> None:
    job = ElasticJob()
    new = job.newcomer()
    job.kill(2)
    job.enter(0, 0)
    job.enter(1, 0)
    assert said(job.enter(new), "running") == {"m3": None}
    job.send(0, "depart", scope="w", finished=1)
    late = job.newcomer()
    assert said(job.enter(late), "conflict") == {"m4": "the training has ended"}
    told = job.send(1, "depart", scope="w", finished=1)
    assert said(told, "conflict") == {"m3": "the training has ended"}, "it waits for nobody"
    assert said(job.enter(new, ready=True), "conflict") == {"m3": "the training has ended"}


def test_after_the_loss_of_all_the_world_begins_anew() -> None:
    job = ElasticJob()
    job.kill(2)
    job.enter(0, 0)
    job.enter(1, 0)
    waiting = job.newcomer()
    job.enter(waiting)
    job.kill(0)
    told = job.kill(1)
    assert said(told, "conflict") == {"m3": "all workers that this one was to join are lost"}
    job.kill(waiting)
    fresh = job.newcomer()
    assert job.enter(fresh) == []
    assert generation(job.wait(5)) == ["m4"]


def test_numbers_of_workers_are_given_once() -> None:
    job = ElasticJob()
    assert job.send(0, "numbers", request=1, count=2)[0][1] == {
        "op": "numbered", "request": 1, "first": -1, "minimum": 0, "maximum": 0, "present": 3
    }  # fmt: skip
    job.state.launchers.limits, job.state.launchers.next_number = (1, 3), 3
    first = [job.send(0, "numbers", request=number, count=2)[0][1]["first"] for number in range(3)]
    assert first == [3, 5, 7]
    assert job.state.launchers.take(1) == 9
    with pytest.raises(ProtocolError, match="1 to 5000"):
        job.send(0, "numbers", request=1, count=0)


def test_requests_of_users_wait_for_the_launcher() -> None:
    job = ElasticJob()
    told = job.send(0, "manage", request=4, action="add", number=1)
    assert (told[0][1]["done"], "fixed number of workers" in told[0][1]["text"]) == (0, True)
    job.state.launchers.limits = (1, 3)
    assert job.send(0, "manage", request=5, action="remove", number=2) == []
    asked = job.state.launchers.requests.popleft()
    assert (asked.action, asked.number) == ("remove", 2)
    job.state.launchers.answer(asked, "rank 2 is asked to leave", done=True)
    assert job.told() == [("m0", {"op": "managed", "request": 5, "done": 1, "text": "rank 2 is asked to leave"})]
    for number in range(100):
        job.send(0, "manage", request=number, action="add", number=1)
    told = job.send(0, "manage", request=101, action="add", number=1)
    assert "too many requests" in told[0][1]["text"]
    with pytest.raises(ProtocolError, match="launchers do not know 'stop'"):
        job.send(0, "manage", request=6, action="stop", number=1)
