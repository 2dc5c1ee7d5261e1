"""Which generations of an elastic world are formed, told what its members say: no sockets, no clock."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tutti import __version__
from tutti.coordination.description import MemberDescription
from tutti.coordination.frames import MAX_BYTES, Message, ProtocolError, decode, encode
from tutti.coordination.generations import LONGEST_INFO, MOST_WORKERS
from tutti.coordination.state import CoordinatorState

PATIENCE_S = 10.0
LIMITS = {"minimum": 2, "maximum": 4, "expected": 3}


class ElasticRun:
    """A coordinator, and members of one elastic world, of which `say` sends what one says."""

    def __init__(self, size: int = 0, **limits: int) -> None:
        self.limits = {**LIMITS, "expected": size or LIMITS["expected"], **limits}
        self.now = 100.0
        self.ended: set[int] = set()
        self.start_coordinator()
        for rank in range(size):
            self.hello(rank)
        for rank in range(size):
            self.enter(rank, ready=0)
        self.told()

    def start_coordinator(self) -> None:
        """Start it, or start it anew: it then knows nobody."""
        self.state = CoordinatorState(
            PATIENCE_S, "host", self.now, lambda pid, _: "ended" if pid in self.ended else "running"
        )

    def hello(self, rank: int, **fields: Any) -> None:
        message = {"version": __version__, "member": described(rank), "known": [], "lost": {}, **fields}
        self.state.connect({"op": "hello", **message}, self.now)

    def say(self, rank: int, op: str, **fields: Any) -> list[tuple[str, Message]]:
        """Send a message about the world; return what members of it are told."""
        sent = decode(encode({"op": op, "scope": "w", **fields})[4:])
        self.state.receive(f"m{rank}", sent, self.now)
        return self.told()

    def enter(self, rank: int, after: int = -1, ready: int = 1, **info: Any) -> list[tuple[str, Message]]:
        return self.say(rank, "enter", **self.limits, after=after, ready=ready, info=info)

    def belongs(self, rank: int, number: int) -> list[tuple[str, Message]]:
        return self.say(rank, "belongs", **self.limits, number=number)

    def depart(self, rank: int, finished: int = 0) -> list[tuple[str, Message]]:
        return self.say(rank, "depart", **self.limits, finished=finished)

    def lose(self, rank: int) -> list[tuple[str, Message]]:
        self.ended.add(rank)
        self.state.disconnect(f"m{rank}", self.now)
        return self.told()

    def told(self) -> list[tuple[str, Message]]:
        """What members are told about the world; every message fits the schema."""
        messages = list(self.state.drain())
        for _, message in messages:
            decode(encode(message)[4:])
        ops = ("generation", "running", "change", "switch", "recall", "conflict")
        return [(to, message) for to, message in messages if message["op"] in ops]

    def wait(self, seconds: float) -> list[tuple[str, Message]]:
        """Let time pass, in which all members report."""
        told = []
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for member, record in self.state.members.items():
                if record.closed_at is None:
                    self.state.receive(member, {"op": "beat", "status": {}}, self.now)
            self.state.tick(self.now)
            told += self.told()
        return told


def described(rank: int) -> dict[str, Any]:
    return MemberDescription(f"m{rank}", rank, "host", "host", rank, 1).to_json()


def formed(told: list[tuple[str, Message]]) -> dict[str, tuple[int, list[str]]]:
    """Numbers and members of the generations that members are told of."""
    return {
        to: (message["number"], [each["member"]["id"] for each in message["members"]])
        for to, message in told
        if message["op"] == "generation"
    }


def everyone(number: int, *ranks: int) -> dict[str, tuple[int, list[str]]]:
    """What `formed` returns for a generation of these ranks, in this order."""
    ids = [f"m{rank}" for rank in ranks]
    return dict.fromkeys(ids, (number, ids))


def plain(told: list[tuple[str, Message]]) -> list[tuple[Any, ...]]:
    """Who is told what, without scopes and reasons."""
    names = ("number", "steps")
    return [(to, message["op"], *[message[name] for name in names if name in message]) for to, message in told]


# --- the first generation ---


def test_the_first_generation_is_formed_when_all_that_were_started_have_asked() -> None:
    run = ElasticRun()
    for rank in range(3):
        run.hello(rank)
    assert run.enter(2, ready=0) == []
    assert run.enter(0, ready=0) == []
    # By the launcher's numbers, not in the order in which they came.
    assert formed(run.enter(1, ready=0)) == everyone(0, 0, 1, 2)


def test_the_first_generation_does_not_wait_for_ever_for_those_that_never_come() -> None:
    run = ElasticRun()
    run.wait(3)
    for rank in (0, 1):
        run.hello(rank)
        run.enter(rank, ready=0)
    assert formed(run.wait(0.75)) == {}
    assert formed(run.wait(0.5)) == everyone(0, 0, 1)
    run.hello(2)
    assert plain(run.enter(2, ready=0)) == [("m2", "running")], "it comes as a new member"


def test_who_was_started_later_does_not_complete_the_first_generation() -> None:
    """Of a coordinator that was started anew, it may be the first."""
    run = ElasticRun(expected=1, minimum=1)
    run.hello(1)
    assert run.enter(1, ready=0) == []
    assert formed(run.wait(3)) == everyone(0, 1)


def test_fewer_than_the_minimum_do_not_begin() -> None:
    run = ElasticRun()
    run.hello(0)
    run.enter(0, ready=0)
    assert run.wait(60) == []


def test_who_is_lost_before_the_first_generation_is_not_in_it() -> None:
    run = ElasticRun()
    for rank in range(4):
        run.hello(rank)
    run.enter(0, ready=0)
    run.enter(1, ready=0)
    run.lose(1)
    run.enter(2, ready=0)
    assert formed(run.enter(3, ready=0)) == {}
    assert formed(run.wait(4)) == everyone(0, 0, 2, 3)


def test_more_than_the_maximum_do_not_begin() -> None:
    run = ElasticRun(expected=6)
    for rank in range(6):
        run.hello(rank)
    told = [each for rank in range(6) for each in run.enter(rank, ready=0)]
    assert formed(told) == everyone(0, 0, 1, 2, 3)
    assert plain(told)[-2:] == [("m4", "running"), ("m5", "running")]


# --- the next ones ---


def test_the_next_generation_is_formed_when_all_living_members_have_asked() -> None:
    run = ElasticRun(3)
    assert formed(run.lose(1)) == {}
    assert formed(run.enter(2, after=0, steps=7)) == {}
    told = run.enter(0, after=0, steps=8)
    assert formed(told) == everyone(1, 0, 2)
    members = told[-1][1]["members"]
    assert [(each["after"], each["info"]) for each in members] == [(0, {"steps": 8}), (0, {"steps": 7})]


def test_a_loss_ends_the_wait_for_that_member() -> None:
    run = ElasticRun(3)
    run.enter(0, after=0)
    run.enter(2, after=0)
    assert formed(run.lose(1)) == everyone(1, 0, 2)


def test_a_loss_is_told_before_the_generation_without_that_member() -> None:
    run = ElasticRun(3)
    run.enter(0, after=0)
    run.enter(2, after=0)
    run.ended.add(1)
    run.state.disconnect("m1", run.now)
    ops = [message["op"] for to, message in run.state.drain() if to == "m0"]
    assert ops.index("lost") < ops.index("generation")


def test_who_has_ended_is_not_waited_for() -> None:
    run = ElasticRun(3)
    run.enter(0, after=0)
    assert formed(run.depart(1)) == {}
    assert formed(run.enter(2, after=0)) == everyone(1, 0, 2)
    run.lose(1)
    assert run.wait(1) == [], "its end ends no generation that it is not in"


def test_who_has_ended_does_not_return() -> None:
    run = ElasticRun(3)
    run.depart(1)
    [(to, message)] = run.enter(1, after=0)
    assert (to, message["op"]) == ("m1", "conflict")
    assert formed(run.enter(0, after=0)) == {}
    assert formed(run.enter(2, after=0)) == everyone(1, 0, 2)


def test_the_loss_of_one_that_has_ended_ends_no_generation() -> None:
    run = ElasticRun(3)
    run.depart(1)
    assert run.lose(1) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_too_few_members_wait_only_for_replacements(replaced: bool) -> None:
    run = ElasticRun(2)
    run.state.generations.replaces["launcher"] = replaced
    run.lose(1)
    told = run.enter(0, after=0)
    if not replaced:
        told += run.wait(3)  # In which launchers notice losses.
        assert [message["too_few"] for _, message in told if message["op"] == "generation"] == [1]
        return
    assert run.wait(100) == []
    run.hello(2)
    assert plain(run.enter(2, ready=0)) == [("m2", "running")]
    told = run.enter(2)
    assert formed(told) == everyone(1, 0, 2)
    assert told[-1][1]["too_few"] == 0


def test_too_few_members_end_when_the_launcher_gives_up() -> None:
    run = ElasticRun(2)
    run.state.generations.replaces["launcher"] = True
    run.lose(1)
    run.enter(0, after=0)
    run.state.generations.replaces["launcher"] = False
    [(_, message)] = run.wait(3)  # In which other launchers would notice losses.
    assert message["too_few"] == 1


def test_few_members_are_enough_to_finish() -> None:
    run = ElasticRun(2)
    run.depart(1, finished=1)
    [(_, message)] = run.enter(0, after=0)
    assert message["too_few"] == 0


# --- new members ---


def test_the_others_stop_for_a_new_member_when_it_is_ready() -> None:
    run = ElasticRun(3)
    run.hello(3)
    assert plain(run.enter(3, ready=0)) == [("m3", "running")]
    told = run.enter(3)
    assert plain(told) == [(f"m{rank}", "change", 0) for rank in range(3)]
    assert run.say(0, "boundary", **run.limits, number=0, steps=5) == []
    assert run.say(1, "boundary", **run.limits, number=0, steps=7) == []
    told = run.say(2, "boundary", **run.limits, number=0, steps=6)
    assert plain(told) == [(f"m{rank}", "switch", 0, 7) for rank in range(3)]
    told = [each for rank in (2, 1, 0) for each in run.enter(rank, after=0)]
    assert formed(told) == everyone(1, 0, 1, 2, 3)


def test_new_members_follow_in_the_order_in_which_they_came() -> None:
    run = ElasticRun(2)
    for rank in (9, 4):
        run.hello(rank)
        run.enter(rank)
    told = [each for rank in (1, 0) for each in run.enter(rank, after=0)]
    assert formed(told) == everyone(1, 0, 1, 9, 4)


def test_there_is_no_room_beyond_the_maximum() -> None:
    run = ElasticRun(3)
    for rank in (3, 4):
        run.hello(rank)
        told = run.enter(rank)
    assert plain(told) == [], "one of the others may be lost, without anybody knowing it yet"
    told = run.wait(3.0)
    assert plain(told) == [("m4", "conflict")]
    assert "4 workers, which is its maximum" in told[0][1]["reason"]
    run.lose(3)
    run.hello(5)
    assert "change" not in {message["op"] for _, message in run.enter(5)}, "it was asked for already"


def test_one_that_replaces_a_lost_worker_may_come_before_the_loss_is_known() -> None:
    run = ElasticRun(4)
    run.hello(4)
    assert run.enter(4) == [], "the others are not stopped for it"
    assert ("m4", "conflict") not in {(to, message["op"]) for to, message in run.wait(1.0)}
    run.lose(2)
    told = [each for rank in (0, 1, 3) for each in run.enter(rank, after=0)]
    assert formed(told) == everyone(1, 0, 1, 3, 4)


def test_a_new_member_that_is_lost_is_not_waited_for() -> None:
    run = ElasticRun(3)
    run.hello(3)
    run.enter(3)
    for rank in range(3):
        told = run.say(rank, "boundary", **run.limits, number=0, steps=2)
        if rank == 1:
            run.lose(3)
    assert plain(told) == [(f"m{rank}", "switch", 0, 2) for rank in range(3)]
    assert formed([each for rank in range(3) for each in run.enter(rank, after=0)]) == everyone(1, 0, 1, 2)


def test_who_comes_after_the_end_is_told_so() -> None:
    run = ElasticRun(2)
    run.hello(2)
    run.enter(2)
    told = run.depart(0, finished=1) + run.depart(1, finished=1)
    assert [(to, message["reason"]) for to, message in told] == [("m2", "the training has ended")]
    run.hello(3)
    assert plain(run.enter(3, ready=0)) == [("m3", "conflict")]


def test_other_limits_are_refused() -> None:
    run = ElasticRun(2)
    run.hello(2)
    run.limits["maximum"] = 9
    [(_, message)] = run.enter(2)
    assert message["reason"] == "this process was started for 2 to 9 workers, and others for 2 to 4"


# --- the end of a generation without an interruption ---


def test_a_member_that_wants_to_leave_has_all_stop_at_the_same_step() -> None:
    run = ElasticRun(3)
    assert plain(run.say(1, "want", **run.limits, number=0)) == [(f"m{rank}", "change", 0) for rank in range(3)]
    assert run.say(1, "want", **run.limits, number=0) == [], "once in a generation"
    for rank in range(3):
        told = run.say(rank, "boundary", **run.limits, number=0, steps=rank)
    assert plain(told) == [(f"m{rank}", "switch", 0, 2) for rank in range(3)]
    run.depart(1)
    run.enter(0, after=0)
    assert formed(run.enter(2, after=0)) == everyone(1, 0, 2)


def test_what_is_said_of_a_generation_before_counts_no_more() -> None:
    run = ElasticRun(2)
    for rank in (0, 1):
        run.enter(rank, after=0)
    assert run.say(1, "want", **run.limits, number=0) == []
    assert run.say(1, "boundary", **run.limits, number=0, steps=5) == []


def test_after_a_loss_the_others_are_asked_and_the_lost_one_is_not_waited_for() -> None:
    run = ElasticRun(3)
    assert plain(run.lose(2)) == [("m0", "change", 0), ("m1", "change", 0)]
    run.say(0, "boundary", **run.limits, number=0, steps=4)
    assert plain(run.say(1, "boundary", **run.limits, number=0, steps=4)) == [
        ("m0", "switch", 0, 4),
        ("m1", "switch", 0, 4),
    ]


def test_a_loss_while_boundaries_are_awaited_ends_that_wait() -> None:
    run = ElasticRun(3)
    run.say(0, "want", **run.limits, number=0)
    run.say(0, "boundary", **run.limits, number=0, steps=1)
    run.say(2, "boundary", **run.limits, number=0, steps=1)
    assert plain(run.lose(1)) == [("m0", "switch", 0, 1), ("m2", "switch", 0, 1)]


# --- connections that break ---


def test_a_generation_that_was_formed_without_a_connection_is_told_again() -> None:
    run = ElasticRun(2)
    run.hello(1)  # Over a new connection: what was told over the one before may be lost.
    assert formed(run.enter(1, ready=0)) == {"m1": (0, ["m0", "m1"])}
    run.enter(0, after=0)
    run.enter(1, after=0)
    assert formed(run.enter(1, after=0)) == {"m1": (1, ["m0", "m1"])}


def test_what_was_asked_without_a_connection_is_asked_again() -> None:
    run = ElasticRun(2)
    run.say(0, "want", **run.limits, number=0)
    assert plain(run.belongs(1, 0)) == [("m1", "change", 0)]
    run.say(0, "boundary", **run.limits, number=0, steps=1)
    run.say(1, "boundary", **run.limits, number=0, steps=1)
    assert plain(run.belongs(1, 0)) == [("m1", "switch", 0, 1)]


# --- a coordinator that is started anew ---


def restarted(run: ElasticRun, told: list[tuple[str, Message]]) -> Message:
    """Start the coordinator anew; return how members of the last generation describe it."""
    run.start_coordinator()
    message = next(message for _, message in reversed(told) if message["op"] == "generation")
    return {name: message[name] for name in ("number", "members", "too_few")}


def generation_of(run: ElasticRun, *ranks: int) -> Message:
    """Start the coordinator anew after generation 0 of these ranks."""
    run.limits["expected"] = len(ranks)
    for rank in ranks:
        run.hello(rank)
    return restarted(run, [each for rank in ranks for each in run.enter(rank, ready=0)])


def test_a_new_coordinator_waits_for_all_members_of_the_present_generation() -> None:
    run = ElasticRun()
    generation = generation_of(run, 0, 1, 2)
    run.hello(0)
    assert plain(run.enter(0, after=0)) == [("m0", "recall", 0)]
    assert run.say(0, "recalled", **generation) == []
    run.hello(1)
    assert run.enter(1, after=0) == []
    assert formed(run.wait(1)) == {}
    run.hello(2)
    assert formed(run.enter(2, after=0)) == everyone(2, 0, 1, 2)


def test_a_member_that_does_not_come_to_the_new_coordinator_is_lost() -> None:
    run = ElasticRun()
    generation = generation_of(run, 0, 1, 2)
    for rank in (0, 1):
        run.hello(rank)
        run.enter(rank, after=0)
    run.say(0, "recalled", **generation)
    assert formed(run.wait(PATIENCE_S)) == {}
    assert formed(run.wait(PATIENCE_S + 1)) == everyone(2, 0, 1)


def test_a_generation_that_only_some_have_heard_of_is_told_to_the_others() -> None:
    run = ElasticRun()
    generation_of(run, 0, 1, 2)
    run = ElasticRun(3)
    run.lose(2)
    run.enter(0, after=0)
    generation = restarted(run, run.enter(1, after=0))  # Only member 0 gets the message.
    run.hello(1)
    assert plain(run.enter(1, after=0)) == [("m1", "recall", 0)]
    run.hello(0)
    assert plain(run.belongs(0, 1)) == [("m0", "recall", 1)]
    assert formed(run.say(0, "recalled", **generation)) == {"m1": (1, ["m0", "m1"])}
    run.belongs(1, 1)
    run.enter(0, after=1)
    assert formed(run.enter(1, after=1)) == everyone(3, 0, 1)


def test_a_generation_whose_members_are_lost_is_not_waited_for_and_its_number_not_used_again() -> None:
    run = ElasticRun(2)
    before = {"number": 0, "members": [{"member": described(r), "after": -1, "info": {}} for r in (0, 1)], "too_few": 0}
    run.enter(0, after=0)
    run.enter(1, after=0)
    run.start_coordinator()
    run.hello(1)
    run.enter(1, after=0)
    run.say(1, "recalled", **before)
    run.hello(0)
    assert plain(run.belongs(0, 1)) == [("m0", "recall", 1)]
    told = run.lose(0) + run.wait(3)
    assert formed(told) == {"m1": (2, ["m1"])}


def test_a_generation_that_only_a_new_member_has_heard_of_gives_its_number_to_no_other() -> None:
    run = ElasticRun(2)
    run.hello(2)
    run.enter(2)
    run.enter(0, after=0)
    told = run.enter(1, after=0)
    before = {"number": 0, "members": [{"member": described(r), "after": -1, "info": {}} for r in (0, 1)], "too_few": 0}
    generation = restarted(run, told)
    for rank in (0, 1):
        run.hello(rank)
        run.enter(rank, after=0)
    assert formed(run.say(0, "recalled", **before)) == everyone(2, 0, 1)
    run.hello(2)
    assert plain(run.belongs(2, generation["number"])) == [("m2", "conflict")]


def test_a_new_coordinator_learns_where_members_can_stop_and_asks_the_others() -> None:
    run = ElasticRun()
    generation = generation_of(run, 0, 1)
    run.hello(0)
    run.belongs(0, 0)
    assert run.say(0, "boundary", **run.limits, number=0, steps=9) == []  # It was asked before, and waits.
    assert run.say(0, "recalled", **generation) == [("m1", {"op": "change", "scope": "w", "number": 0})]
    run.hello(1)
    assert plain(run.belongs(1, 0)) == [("m1", "change", 0)]
    assert plain(run.say(1, "boundary", **run.limits, number=0, steps=3)) == [
        ("m0", "switch", 0, 9),
        ("m1", "switch", 0, 9),
    ]


def test_who_has_ended_is_not_waited_for_by_a_new_coordinator() -> None:
    run = ElasticRun()
    generation = generation_of(run, 0, 1)
    run.hello(1)
    run.depart(1)
    run.hello(0)
    run.enter(0, after=0)
    assert formed(run.say(0, "recalled", **generation) + run.wait(3)) == {"m0": (2, ["m0"])}


def test_new_members_begin_no_second_world_at_a_new_coordinator() -> None:
    run = ElasticRun()
    generation = generation_of(run, 0, 1, 2)
    for rank in (3, 4):  # Before any of the others.
        run.hello(rank)
    run.enter(3)  # It was told that the world runs.
    run.enter(4, ready=0)
    assert formed(run.wait(1)) == {}
    run.hello(0)
    run.belongs(0, 0)
    told = run.say(0, "recalled", **generation)
    assert ("m4", "running") in plain(told)
    for rank in (1, 2):
        run.hello(rank)
    told = [each for rank in range(3) for each in run.enter(rank, after=0)]
    assert formed(told) == everyone(2, 0, 1, 2, 3)


def test_a_new_member_does_not_wait_for_ever_for_a_world_that_is_gone() -> None:
    run = ElasticRun()
    run.hello(3)
    run.enter(3)
    told = run.wait(PATIENCE_S + 1)
    assert [(to, message["reason"]) for to, message in told] == [("m3", "no worker of the training is left")]


def test_who_was_left_behind_is_told_so() -> None:
    run = ElasticRun(3)
    run.lose(2)
    run.enter(0, after=0)
    generation = restarted(run, run.enter(1, after=0))
    run.ended.clear()
    for rank in (2, 0):  # It was taken for lost, and comes first.
        run.hello(rank)
    run.belongs(2, 0)
    run.belongs(0, 1)
    told = run.say(0, "recalled", **generation)
    assert ("m2", "conflict") in plain(told)


# --- messages that no member sends, and how much they can leave behind ---

NO_MEMBER_SENDS: dict[str, Callable[[], dict[str, Any]]] = {
    "a generation below -1": lambda: {"op": "enter", **LIMITS, "after": -2, "ready": 1, "info": {}},
    "a generation too far": lambda: {"op": "enter", **LIMITS, "after": 1 << 62, "ready": 1, "info": {}},
    "no members": lambda: {"op": "enter", **LIMITS, "minimum": 0, "after": -1, "ready": 1, "info": {}},
    "a minimum above the maximum": lambda: {"op": "enter", **LIMITS, "minimum": 5, "after": -1, "ready": 1, "info": {}},
    "too many": lambda: {"op": "enter", **LIMITS, "maximum": MOST_WORKERS + 1, "after": -1, "ready": 1, "info": {}},
    "nobody started": lambda: {"op": "depart", **LIMITS, "expected": 0, "finished": 1},
    "long values": lambda: {"op": "enter", **LIMITS, "after": -1, "ready": 1, "info": {"x": "x" * LONGEST_INFO}},
    "a long name": lambda: {"op": "belongs", **LIMITS, "scope": "x" * 2000, "number": 0},
    "negative steps": lambda: {"op": "boundary", **LIMITS, "number": 0, "steps": -1},
    "too many steps": lambda: {"op": "boundary", **LIMITS, "number": 0, "steps": 1 << 62},
    "a negative number": lambda: {"op": "want", **LIMITS, "number": -1},
    "a description that nobody asked for": lambda: {
        "op": "recalled", "number": 5, "too_few": 0, "members": [{"member": described(1), "after": 1, "info": {}}]
    },
    "members without an identity": lambda: {"op": "recalled", "number": 5, "too_few": 0, "members": [{"after": 1}]},
    "a bad identity": lambda: {
        "op": "recalled", "number": 5, "too_few": 0, "members": [{"member": {"id": 1}, "after": 1, "info": {}}]
    },
    "more members than there can be": lambda: {
        "op": "recalled", "number": 5, "too_few": 0, "members": [{}] * (MOST_WORKERS + 1)
    },
}  # fmt: skip


@pytest.mark.parametrize("what", NO_MEMBER_SENDS)
def test_what_no_member_sends_is_an_error_and_changes_nothing(what: str) -> None:
    run = ElasticRun(3)
    with pytest.raises(ProtocolError):
        run.say(1, **NO_MEMBER_SENDS[what]())
    assert formed([each for rank in range(3) for each in run.enter(rank, after=0)]) == everyone(1, 0, 1, 2)


@pytest.mark.parametrize("ids", [(0, 2), (1, 1), (1, 2, 2)])
def test_a_member_describes_a_generation_that_it_is_in(ids: tuple[int, ...]) -> None:
    run = ElasticRun()
    run.hello(1)
    assert plain(run.belongs(1, 4)) == [("m1", "recall", 4)]
    members = [{"member": described(rank), "after": 3, "info": {}} for rank in ids]
    with pytest.raises(ProtocolError):
        run.say(1, "recalled", number=4, members=members, too_few=0)


def test_a_member_can_leave_no_more_than_so_many_worlds_behind() -> None:
    run = ElasticRun(2)

    def flood() -> None:
        for number in range(1000):
            run.say(0, "enter", **{**run.limits, "expected": 9}, scope=f"w{number}", after=-1, ready=0, info={})

    with pytest.raises(ProtocolError, match="there are 100 worlds already"):
        flood()
    assert formed([each for rank in range(2) for each in run.enter(rank, after=0)]) == everyone(1, 0, 1)
    run.lose(0)  # With it they end, and others may follow.
    run.hello(5)
    run.say(5, "enter", **run.limits, scope="another", after=-1, ready=0, info={})


def test_members_that_come_and_go_leave_nothing_behind() -> None:
    run = ElasticRun(2)
    for rank in range(10, 200):
        run.hello(rank)
        run.enter(rank, ready=0)
        if rank % 3:
            run.enter(rank)
        run.say(rank, "want", **run.limits, number=0)
        run.say(rank, "boundary", **run.limits, number=0, steps=rank)
        if rank % 2:
            run.depart(rank)
        run.lose(rank)
    world = run.state.generations._worlds["w"]
    for kept in (world.requests, world.belonging, world.wants, world.boundaries, world.departed):
        assert not kept


def test_a_generation_of_a_thousand_members_fits_into_a_message() -> None:
    """With values as long as those of a job with two data loaders."""
    limits = {"minimum": 1, "maximum": MOST_WORKERS, "expected": MOST_WORKERS}
    run = ElasticRun()
    run.limits = limits
    position = [123, 1_000_000, 999_999]
    info = {"progress": 10**9, "digest": "0123456789abcdef", "positions": [position] * 2, "agreed": [position] * 2}
    ids = [f"{number:016x}" for number in range(MOST_WORKERS)]
    host = {"host": "worker-0123.cluster.example.org", "host_id": "01234567-89ab-cdef-0123-456789abcdef"}
    for rank, id in enumerate(ids):
        member = {"id": id, "rank": rank, "pid": 4_194_303, "started": 12_345_678_901, **host}
        hello = {"version": __version__, "member": member, "known": [], "lost": {}}
        run.state.connect({"op": "hello", **hello}, run.now)
    for id in ids:
        message = {"op": "enter", "scope": "elastic/0", **limits, "after": -1, "ready": 0, "info": info}
        run.state.receive(id, message, run.now)
    generations = [message for _, message in run.state.drain() if message["op"] == "generation"]
    assert len(generations) == MOST_WORKERS
    assert len(encode(generations[0])) < MAX_BYTES


def test_a_generation_that_fits_into_no_message_ends_with_an_error() -> None:
    run = ElasticRun(expected=20, maximum=20)
    for rank in range(20):
        run.hello(rank)
    text = "x" * (LONGEST_INFO - 20)
    assert len(json.dumps({"x": text})) < LONGEST_INFO
    told = [each for rank in range(20) for each in run.enter(rank, ready=0, x=text)]
    assert plain(told) == [(f"m{rank}", "conflict") for rank in range(20)]
    assert "too long for one message" in told[0][1]["reason"]
    assert run.wait(5) == []
