"""The coordinator's decisions, told what happened and when: no sockets, no clock."""

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tutti import __version__
from tutti.coordination.activity import Activity
from tutti.coordination.description import MemberDescription, process_state
from tutti.coordination.frames import SCHEMA, Message, ProtocolError, decode, encode
from tutti.coordination.knowledge import JobKnowledge
from tutti.coordination.state import CoordinatorState, Refused

PATIENCE_S = 10.0


class Job:
    """A coordinator on host "a", and the processes it can see."""

    def __init__(self, *hosts: str) -> None:
        self.now = 100.0
        self.processes: dict[int, Any] = {}
        self.state = CoordinatorState(PATIENCE_S, "a", self.now, lambda pid, _: self.processes.get(pid, "running"))
        self.members = [MemberDescription(f"m{rank}", rank, host, host, rank, 1) for rank, host in enumerate(hosts)]
        for member in self.members:
            self.hello(member)
            self.state.members[member.id].has_met_others = True  # As if they had joined a world.
        self.told()

    def hello(self, member: MemberDescription, **fields: Any) -> None:
        message = {"version": __version__, "member": member.to_json(), "known": [], "lost": {}, **fields}
        self.state.connect({"op": "hello", **message}, self.now)

    def send(self, sender: int, op: str, **fields: Any) -> list[tuple[str, Message]]:
        if op == "notice":
            fields = {"members": [], "reason": "it is over", **fields}
        self.state.receive(f"m{sender}", decode(encode({"op": op, **fields})[4:]), self.now)
        return self.told()

    def told(self) -> list[tuple[str, Message]]:
        """What members are sent since the last call; every message fits the schema."""
        messages = list(self.state.drain())
        for _, message in messages:
            decode(encode(message)[4:])
        return messages

    def wait(self, seconds: float, silent: tuple[int, ...] = (), step_s: float = 0.25) -> list[tuple[str, Message]]:
        """Let time pass; all members but the `silent` ones report."""
        told = []
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            for member in self.members:
                if member.rank not in silent and member.id in self.state.members:
                    self.state.receive(member.id, {"op": "beat", "status": {}}, self.now)
            self.state.tick(self.now)
            told += self.told()
        return told

    @property
    def lost(self) -> dict[str, str]:
        return self.state.lost


def losses(told: list[tuple[str, Message]]) -> set[tuple[str, str]]:
    return {(to, message["member"]) for to, message in told if message["op"] == "lost"}


def test_all_get_the_roster_when_the_last_has_joined() -> None:
    job = Job("a", "a", "b")
    assert job.send(2, "join", scope="world", rank=0, size=3) == []
    assert job.send(0, "join", scope="world", rank=2, size=3) == []
    told = job.send(1, "join", scope="world", rank=1, size=3)
    assert [to for to, _ in told] == ["m2", "m0", "m1"]
    assert all([member["id"] for member in message["members"]] == ["m2", "m1", "m0"] for _, message in told)


def test_those_that_wait_are_told_who_is_missing() -> None:
    job = Job("a", "a")
    job.send(0, "join", scope="world", rank=0, size=4)
    job.send(1, "join", scope="world", rank=2, size=4)
    told = [message for to, message in job.wait(5) if to == "m0" and message["op"] == "missing"]
    assert [message["ranks"] for message in told] == [[1, 3]] * 3
    assert [round(message["seconds"]) for message in told] == [0, 2, 4]


@pytest.mark.parametrize(
    ("rank", "size", "reason"),
    [(0, 2, "two processes say they are rank 0 of 2"), (1, 3, "does not fit"), (2, 2, "does not fit"), (-1, 2, "fit")],
)
def test_a_rank_that_cannot_be(rank: int, size: int, reason: str) -> None:
    job = Job("a", "a")
    job.send(0, "join", scope="world", rank=0, size=2)
    [(to, message)] = job.send(1, "join", scope="world", rank=rank, size=size)
    assert to == "m1"
    assert message["op"] == "conflict"
    assert reason in message["reason"]


def test_values_are_sent_when_all_are_there() -> None:
    job = Job("a", "a")
    assert job.send(1, "get", request=7, keys=["world/x", "world/y"]) == []
    assert job.send(0, "set", key="world/y", value="2") == []
    assert job.send(0, "set", key="world/x", value="1") == [
        ("m1", {"op": "values", "request": 7, "values": ["1", "2"]})
    ]
    job.send(1, "get", request=8, keys=["world/z"])
    job.send(1, "cancel", request=8)
    assert job.send(0, "set", key="world/z", value="3") == []


def test_the_first_proposal_counts_for_all() -> None:
    job = Job("a", "a")
    job.send(1, "propose", key="world/verdict", value="stop")
    job.send(0, "propose", key="world/verdict", value="go")
    for rank in (0, 1):
        [(_, answer)] = job.send(rank, "get", request=1, keys=["world/verdict"])
        assert answer["values"] == ["stop"]


def test_a_scope_is_forgotten_when_all_have_left_it() -> None:
    job = Job("a", "a")
    for rank in (0, 1):
        job.send(rank, "join", scope="world", rank=rank, size=2)
        job.send(rank, "set", key=f"world/sum/at/{rank}", value="here")
    job.send(0, "notice", scope="world/sum", kind="closed", reason="done", size=2)
    assert "world/sum/at/1" in job.state._values
    told = job.send(1, "notice", scope="world/sum", kind="closed", reason="done", size=2)
    assert {message["op"] for _, message in told} == {"noticed", "forget"}
    assert not job.state._values
    # One leaves, the other is lost: nobody is left.
    job.send(0, "notice", scope="world", kind="left", reason="it has left", size=2)
    assert job.state._scopes
    job.processes[1] = "ended"
    job.state.disconnect("m1", job.now)
    assert not job.state._scopes
    assert not job.state._notices
    assert not any(owned.sizes for owned in job.state._values._set.values())


def test_a_channel_that_is_closed_after_its_world_leaves_nothing_behind() -> None:
    job = Job("a", "a")
    for rank in (0, 1):
        job.send(rank, "join", scope="w", rank=rank, size=2)
    for rank in (0, 1):
        job.send(rank, "notice", scope="w", kind="left", reason="it has left", size=2)
    told = job.send(0, "notice", scope="w/channel", kind="closed", reason="closed", size=2)
    assert told == [("m0", {"op": "forget", "scope": "w"})]
    assert not job.state._notices


@pytest.mark.parametrize("first", ["the loss", "the ends"])
def test_a_channel_with_a_lost_member_is_forgotten_when_the_others_have_closed_it(first: str) -> None:
    job = Job("a", "a", "a", "a")
    for rank in range(4):
        job.send(rank, "join", scope="w", rank=rank, size=4)
    members = ["m0", "m1", "m3"]

    def close() -> None:
        for rank in (0, 1):
            job.send(rank, "set", key=f"w/some/at/{rank}", value="here")
            job.send(rank, "notice", scope="w/all", kind="closed", size=4)
            job.send(rank, "notice", scope="w/some", kind="closed", size=3, members=members)

    def lose() -> None:
        job.processes[3] = "ended"
        job.state.disconnect("m3", job.now)
        job.told()

    for happens in (lose, close) if first == "the loss" else (close, lose):
        happens()
    assert {scope for scope, *_ in job.state._notices} == {"w/all"}, "rank 2 is still in it"
    assert not job.state._values
    told = job.send(2, "notice", scope="w/all", kind="closed", size=4)
    assert {message["op"] for _, message in told} == {"noticed", "forget"}
    assert not job.state._notices


def test_a_channel_is_not_forgotten_for_the_loss_of_one_that_was_not_in_it() -> None:
    job = Job("a", "a", "a")
    for rank in range(3):
        job.send(rank, "join", scope="w", rank=rank, size=3)
    job.send(0, "notice", scope="w/pair", kind="closed", size=2, members=["m0", "m1"])
    job.processes[2] = "ended"
    job.state.disconnect("m2", job.now)
    assert [member for _, member, _, _ in job.state._notices] == ["m0"], "rank 1 has to know that rank 0 closed it"


def test_announcements_come_before_the_loss() -> None:
    """So whoever hears of a loss knows whether that rank only followed another."""
    job = Job("a", "a", "b")
    told = job.send(2, "notice", scope="world", kind="fled", reason="because", size=3)
    job.state.disconnect("m2", job.now)
    told += job.wait(1)
    assert [message["op"] for to, message in told if to == "m0"] == ["noticed", "lost"]


def test_a_process_that_ended_is_lost_at_once() -> None:
    job = Job("a", "a", "b")
    job.processes[1] = "ended"
    job.state.disconnect("m1", job.now)
    assert losses(job.told()) == {("m0", "m1"), ("m2", "m1")}
    assert job.lost["m1"] == "its process 1 on a has ended"


def test_a_connection_that_breaks_may_be_opened_again() -> None:
    job = Job("a", "a")
    job.state.disconnect("m1", job.now)  # Its process is seen to run.
    job.wait(PATIENCE_S - 1, silent=(1,))
    job.hello(job.members[1])
    assert not losses(job.wait(3 * PATIENCE_S))
    job.state.disconnect("m1", job.now)
    job.wait(PATIENCE_S + 1, silent=(1,))
    assert "has not connected again for 10 s" in job.lost["m1"]


def test_a_member_that_notices_first_that_its_connection_broke_may_come_back() -> None:
    job = Job("a", "b")
    job.send(0, "get", request=1, keys=["k"])
    job.hello(job.members[0])  # The end of the connection before has not come.
    job.told()
    job.send(0, "get", request=1, keys=["k"])
    answers = [message for _, message in job.send(1, "set", key="k", value="v") if message["op"] == "values"]
    assert len(answers) == 1
    assert not losses(job.wait(3 * PATIENCE_S))


def test_who_cannot_be_looked_at_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", no_file)
    assert process_state(1, 1) == "running"


def test_what_a_member_reports_is_as_short_as_it_has_to_be() -> None:
    activity = Activity()
    activity.enter("evaluation" * 1000)
    with activity.waiting([1], "open the channel " + "x" * 5000):
        Job("a", "a").send(0, "beat", status=activity.status())


def test_an_identity_belongs_to_one_process() -> None:
    job = Job("a")
    with pytest.raises(Refused, match="another process has its identity"):
        job.hello(MemberDescription("m0", 0, "a", "a", 99, 1))


def test_a_roster_that_comes_late_names_lost_members_too() -> None:
    job = Job("a", "a")
    job.state.disconnect("m0", job.now)
    job.send(1, "join", scope="w", rank=1, size=2)
    job.send(0, "join", scope="w", rank=0, size=2)
    job.send(1, "bye")
    job.hello(job.members[0])
    job.told()
    [(_, message)] = job.send(0, "join", scope="w", rank=0, size=2)
    assert [MemberDescription.from_json(each) for each in message["members"]] == job.members


def test_on_another_host_a_member_there_looks() -> None:
    job = Job("a", "b", "b")
    job.state.disconnect("m1", job.now)
    asked = [(to, message) for to, message in job.told() if message["op"] == "look"]
    assert asked == [("m2", {"op": "look", "member": "m1", "pid": 1, "started": 1})]
    assert not job.lost
    job.send(2, "seen", member="m1", state="ended")
    job.wait(0.25, silent=(1,))
    assert job.lost == {"m1": "its process 1 on b has ended"}


def test_on_another_host_without_anybody_a_closed_connection_is_a_loss() -> None:
    job = Job("a", "b")
    job.state.disconnect("m1", job.now)
    job.now += 0.1
    job.state.tick(job.now)
    assert not job.lost
    job.now += 0.15
    job.state.tick(job.now)
    assert "the connection of its process 1 on b was closed" in job.lost["m1"]


def test_a_connection_that_the_kernel_gave_up_shows_that_the_network_is_down() -> None:
    job = Job("a", "b")
    job.wait(0.9 * PATIENCE_S, silent=(1,))
    job.state.disconnect("m1", job.now)
    job.wait(0.5, silent=(1,))
    assert job.lost["m1"] == "its process 1 on b was silent for 10 s: its host or the network is down"


def test_a_member_behind_a_slow_link_gets_the_time_to_connect_again() -> None:
    job = Job("a", "b")
    job.state.members["m1"].round_trip_s = 0.1
    job.state.disconnect("m1", job.now)
    job.wait(2, silent=(1,), step_s=0.02)
    job.hello(job.members[1])
    job.wait(1)
    assert not job.lost
    job.state.disconnect("m1", job.now)
    job.wait(2.5, silent=(1,), step_s=0.02)
    assert set(job.lost) == {"m1"}


@pytest.mark.parametrize(
    ("host", "process", "reason"), [("a", "stopped", "it is stopped"), ("b", None, "its host or the network is down")]
)
def test_who_is_silent_for_too_long_is_evicted(host: str, process: str | None, reason: str) -> None:
    job = Job("a", host, "a")
    job.processes[1] = process
    assert not losses(job.wait(PATIENCE_S, silent=(1,)))
    told = job.wait(0.5, silent=(1,))
    assert losses(told) == {("m0", "m1"), ("m2", "m1")}
    assert "refused" in {message["op"] for to, message in told if to == "m1"}  # It is told too, when it wakes up.
    assert job.lost["m1"] == f"its process 1 on {host} was silent for 10 s: {reason}"
    assert [member.rank for member, _ in job.state.evicted] == [1]
    with pytest.raises(Refused, match="the job goes on without it"):
        job.hello(job.members[1])


def test_who_computes_and_says_nothing_is_not_evicted() -> None:
    job = Job("a", "a", "b", "b")

    def look(told: list[tuple[str, Message]]) -> None:
        for to, message in told:
            if message["op"] == "look":
                job.state.receive(to, {"op": "seen", "member": message["member"], "state": "running"}, job.now)

    for _ in range(40):
        look(job.wait(1, silent=(1, 2)))
    assert not job.lost


def test_a_coordinator_that_was_stopped_evicts_nobody() -> None:
    job = Job("a", "b")
    job.now += 60
    job.state.tick(job.now)
    assert not losses(job.wait(PATIENCE_S - 1, silent=(1,)))
    job.wait(2, silent=(1,))
    assert set(job.lost) == {"m1"}


def test_ranks_that_gave_up_are_not_named_as_missing() -> None:
    known = JobKnowledge()
    for ranks in ([0, 2], [2], [0, 2]):  # Rank 0 came, and gave up on rank 2.
        known.apply({"op": "missing", "scope": "world", "ranks": ranks, "seconds": 2.0})
    assert known.missing["world"] == ([2], 2.0)
    known.apply({"op": "missing", "scope": "world", "ranks": [0], "seconds": 4.0})  # Rank 2 came, rank 0 is gone.
    assert known.missing["world"] == ([0], 4.0)


def test_a_new_coordinator_learns_from_its_members() -> None:
    job = Job("a")
    gone = MemberDescription("m1", 1, "a", "a", 1, 1)
    late, never = MemberDescription("m2", 2, "b", "b", 2, 1), MemberDescription("m3", 3, "b", "b", 3, 1)
    job.processes[1] = "ended"
    job.state.disconnect("m0", job.now)
    known = [each.to_json() for each in (gone, late, never)]
    job.hello(job.members[0], known=known, lost={"m4": "it was killed"})
    job.wait(1)
    assert set(job.lost) == {"m1", "m4"}
    job.hello(late)
    job.members.append(late)
    job.wait(2 * PATIENCE_S)
    assert set(job.lost) == {"m1", "m3", "m4"}


def test_another_version_is_refused() -> None:
    with pytest.raises(Refused, match=r"it runs Tutti 0\.0, and the coordinator of this job runs"):
        Job().hello(MemberDescription("m", 0, "a", "a", 1, 1), version="0.0")


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"[]", b"{}", b'{"op":1}', b'{"op":"nothing"}', b'{"op":"set","key":"k"}', b'{"op":"bye","more":1}',
        b'{"op":"join","scope":"w","rank":true,"size":2}', b'{"op":"join","scope":"w","rank":"0","size":2}',
        b"[" * 100_000, b"\xff", b'{"op":"set","key":"k","value":"' + b"x" * 70_000 + b'"}',
    ],
)  # fmt: skip
def test_messages_that_no_member_sends(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


@pytest.mark.parametrize("op", sorted(SCHEMA))
def test_a_member_cannot_speak_for_the_coordinator(op: str) -> None:
    handled = set(CoordinatorState(1, "a", 0)._handlers)
    job = Job("a")
    if op not in handled:
        with pytest.raises(ProtocolError, match="do not send"):
            job.state.receive("m0", {"op": op}, job.now)


# --- members that lie ---


def test_who_has_met_nobody_is_not_remembered() -> None:
    job = Job("a")
    for number in range(100):
        stranger = MemberDescription(f"s{number}", 1, "a", "a", 77, 1)
        job.hello(stranger)
        job.processes[77] = "ended"
        fled = {"op": "notice", "scope": "x", "kind": "fled", "reason": "", "size": 9, "members": []}
        job.state.receive(stranger.id, fled, job.now)
        job.state.disconnect(stranger.id, job.now)
    assert job.state.members.keys() == {"m0"}
    assert not job.lost
    assert not job.state._notices


def test_what_others_claim_is_bounded() -> None:
    job = Job("a", "a")
    job.hello(MemberDescription("liar", 5, "b", "b", 1, 1), lost={"m1": "I say so"})
    assert "m1" in job.state.members, "what the coordinator sees itself counts for more"
    for start in range(0, 20_000, 1000):
        lost = {f"x{number}": "r" * 1000 for number in range(start, start + 1000)}
        liar = MemberDescription(f"liar{start}", 5, "b", "b", 1, 1)
        with suppress(Refused):
            job.hello(liar, lost=lost)
    assert len(job.lost) <= 5000
    assert max(map(len, job.lost.values())) <= 150
    job.told()


MANY = 30_000
LONG, IDS = "x" * 60_000, [f"{number:032}" for number in range(5000)]


@pytest.mark.parametrize(
    "message",
    [
        lambda n: {"op": "notice", "scope": f"w/{n}", "kind": "closed", "reason": "", "size": 2, "members": []},
        lambda n: {"op": "propose", "key": f"w/{n}", "value": "v"},
        lambda n: {"op": "set", "key": f"w/{n}", "value": "v"},
        lambda n: {"op": "get", "request": n, "keys": [f"w/{n}"]},
        lambda n: {"op": "join", "scope": f"w/{n}", "rank": 0, "size": 2},
        lambda n: {"op": "set", "key": f"w/{n}", "value": LONG},
        lambda n: {"op": "propose", "key": f"w/{n}", "value": LONG},
        lambda n: {"op": "notice", "scope": f"{LONG}/{n}", "kind": "left", "reason": "", "size": 2, "members": []},
        lambda n: {"op": "notice", "scope": f"w/{n}", "kind": "left", "reason": "", "size": 5000, "members": IDS},
    ],
)
def test_what_one_member_can_leave_behind_is_bounded(message: Callable[[int], Message]) -> None:
    job = Job("a", "a")
    received = 0

    def flood() -> None:
        nonlocal received
        for number in range(MANY):
            sent = message(number)
            job.state.receive("m0", sent, job.now)
            received += sum(map(len, (sent.get("scope", ""), sent.get("value", ""), *sent.get("members", []))))
            assert received <= 64 << 20

    with pytest.raises(ProtocolError, match=r"more than|already"):
        flood()
    job.told()
    # The other member is served as before.
    job.send(1, "set", key="k", value="v")
    assert [answer["values"] for _, answer in job.send(1, "get", request=1, keys=["k"])] == [["v"]]


@pytest.mark.parametrize("op", ["set", "propose", "notice"])
def test_what_is_forgotten_does_not_count(op: str) -> None:
    job = Job("a", "a")
    job.send(0, "join", scope="w", rank=0, size=1)
    for number in range(300):
        for _ in range(8):  # Sent again after a connection that broke, it counts once.
            if op == "notice":
                job.state.receive(
                    "m0",
                    {"op": op, "scope": f"w/{number}", "kind": "fled", "reason": "", "size": 5000, "members": IDS},
                    job.now,
                )
            else:
                job.state.receive("m0", {"op": op, "key": f"w/{number}", "value": LONG}, job.now)
        over = {"op": "notice", "scope": f"w/{number}", "kind": "closed", "reason": "", "size": 1, "members": []}
        job.state.receive("m0", over, job.now)
    assert len(job.state._values) == 0
    assert not job.state._notices._lengths
    job.state.drain()


def test_requests_that_were_answered_do_not_count() -> None:
    job = Job("a", "a")
    for number in range(3000):
        job.send(0, "get", request=number, keys=[f"w/{number}"])
        if number % 2:
            job.send(0, "cancel", request=number)
        else:
            job.send(1, "set", key=f"w/{number}", value="v")


@pytest.mark.parametrize(
    "message",
    [
        {"op": "notice", "scope": "w", "kind": "rose", "reason": "", "size": 2, "members": []},
        {"op": "notice", "scope": "w", "kind": "left", "reason": "", "size": 2, "members": [7, 8]},
        {"op": "notice", "scope": "w", "kind": "left", "reason": "", "size": 2, "members": ["m0"]},
        {"op": "join", "scope": "w", "rank": 0, "size": 1 << 40},
        {"op": "join", "scope": "w", "rank": 0, "size": 0},
        {"op": "beat", "status": {"waits": "none"}},
        {"op": "beat", "status": {"phase": "p"}},
        {
            "op": "beat",
            "status": {**dict.fromkeys(("phase_s", "usual_s", "step_s", "step"), 1), "phase": "p", "waits": [1]},
        },
        {"op": "welcome", "version": "1", "lost": {}, "host_id": "here"},
    ],
)
def test_contents_that_no_member_sends(message: Message) -> None:
    job = Job("a", "a")
    with pytest.raises(ProtocolError):
        job.state.receive("m0", message, job.now)
    job.wait(1)


def test_a_description_that_is_none() -> None:
    job = Job("a")
    with pytest.raises(ProtocolError):
        job.hello(job.members[0], known=[7])
