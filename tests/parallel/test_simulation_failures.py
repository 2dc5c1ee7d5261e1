"""What goes wrong in a simulation: loops that ask, deadlocks, failures, deaths, and what is refused."""

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, TCPStore

import tutti
import warm
from tutti import Cluster, Link, Simulation, simulate
from tutti.cluster import Host
from tutti.errors import ConfigError, DeadlineExceeded, Deadlock, NoLink, RankLost, WorkerFailed
from tutti.simulation import rank_thread, runs
from tutti.transports import ANY, Transport

LINK = Link("1gbit", "50us")
ONE = torch.ones(1)


def by_rank(*functions: Callable[[Transport], Any], **how: Any) -> Simulation:
    """Each rank runs its own function of its transport."""

    def work() -> Any:
        world = tutti.init()
        return functions[world.rank](world.transport)

    return simulate(work, workers=len(functions), **{"cluster": Cluster(link=LINK), **how})


def send(dst: int, numel: int = 1, after_s: float = 0.0) -> Callable[[Transport], float]:
    def work(link: Transport) -> float:
        link.elapse(after_s)
        link.isend(torch.ones(numel), dst).wait()
        return link.now()

    return work


def receive(src: int, numel: int = 1) -> Callable[[Transport], float]:
    def work(link: Transport) -> float:
        link.irecv(torch.zeros(numel), src).wait()
        return link.now()

    return work


def caught(function: Callable[[Transport], Any]) -> Callable[[Transport], Any]:
    """The error it raises, and when."""

    def work(link: Transport) -> Any:
        try:
            function(link)
        except Exception as error:
            return error, link.now()
        return None

    return work


def idle(link: Transport) -> None:
    return None


# Asking whether something is done


@pytest.mark.parametrize("after_s", [0.0, 1.0])
@pytest.mark.parametrize("asks_first", [True, False])
def test_a_loop_that_asks_ends_at_the_moment_of_arrival(after_s: float, asks_first: bool) -> None:
    def ask(link: Transport) -> tuple[float, float]:
        other = 1 - link.rank
        box = torch.zeros(10**5)
        work = link.irecv(box, other)
        while not work.done():
            pass
        found_s = link.now()
        work.wait()
        assert (box == 1).all()
        return found_s, link.now()

    found = by_rank(*((ask, send(0, 10**5, after_s)) if asks_first else (send(1, 10**5, after_s), ask)))
    arrives_s = after_s + LINK.seconds(4 * 10**5)
    assert found.results[0 if asks_first else 1] == (pytest.approx(arrives_s), pytest.approx(arrives_s))


def test_a_loop_that_asks_for_one_of_several_sees_the_first() -> None:
    def ask(link: Transport) -> tuple[int, float]:
        works = [link.irecv(torch.zeros(1), src) for src in (1, 2, 3)]
        while not any(work.done() for work in works):
            pass
        return next(number for number, work in enumerate(works, 1) if work.done()), link.now()

    found = by_rank(ask, send(0, after_s=3.0), send(0, after_s=1.0), send(0, after_s=2.0))
    assert found.results[0] == (2, pytest.approx(1 + LINK.seconds(4)))


def test_a_loop_that_asks_for_all_of_several_goes_on_when_some_are_there() -> None:
    def ask(link: Transport) -> float:
        works = [link.irecv(torch.zeros(1), src) for src in (1, 2, 3)]
        while not all(work.done() for work in works):
            pass
        return link.now()

    found = by_rank(ask, send(0, after_s=1.0), send(0, after_s=3.0), send(0, after_s=2.0))
    assert found.results[0] == pytest.approx(3 + LINK.seconds(4))


def test_asking_once_takes_no_time_however_many_are_asked_for() -> None:
    def ask(link: Transport) -> tuple[list[bool], float]:
        works = [link.irecv(torch.zeros(1), 1, tag) for tag in range(5)]
        return [work.done() for work in works], link.now()

    def sends(link: Transport) -> None:
        link.elapse(1.0)
        for tag in range(5):
            link.isend(ONE, 0, tag)

    assert by_rank(ask, sends).results[0] == ([False] * 5, 0.0)


def test_asking_sees_what_came_while_it_computed() -> None:
    def ask(link: Transport) -> tuple[bool, float]:
        work = link.irecv(torch.zeros(1), 1)
        link.elapse(2.0)
        return work.done(), link.now()

    assert by_rank(ask, send(0, after_s=1.0)).results[0] == (True, 2.0)
    assert by_rank(ask, send(0, after_s=3.0)).results[0] == (False, 2.0)


def test_two_that_ask_and_answer_each_other() -> None:
    def ask(link: Transport) -> float:
        other = 1 - link.rank
        for number in range(5):
            if (number + link.rank) % 2:
                link.isend(ONE, other)
            else:
                work = link.irecv(torch.zeros(1), other)
                while not work.done():
                    pass
        return link.now()

    assert max(by_rank(ask, ask).results) == pytest.approx(5 * LINK.seconds(4))


def test_one_that_gives_up_asking_still_lets_others_go_on() -> None:
    """Nothing is due while both ask; but one of them stops, and sends."""

    def ask(link: Transport, patience: int) -> float:
        work = link.irecv(torch.zeros(1), 1 - link.rank)
        while not work.done() and patience:
            patience -= 1
        link.isend(ONE, 1 - link.rank).wait()
        work.wait()
        return link.now()

    found = by_rank(lambda link: ask(link, 10**9), lambda link: ask(link, 50))
    assert found.results == [
        pytest.approx(LINK.seconds(4) + 4 * LINK.seconds_per_byte),
        pytest.approx(2 * LINK.seconds(4)),
    ]


@pytest.mark.parametrize("peer", [idle, receive(0)], ids=["ended", "waits"])
def test_asking_for_what_never_comes_is_found_out(peer: Callable[[Transport], Any]) -> None:
    def ask(link: Transport) -> None:
        work = link.irecv(torch.zeros(1), 2)
        while not work.done():
            pass
        work.wait()

    def silent(link: Transport) -> None:
        work = link.irecv(torch.zeros(1), 0)
        while not work.done():
            pass

    with pytest.raises(WorkerFailed, match=r"Deadlock: rank [02] polls a message from rank .* again and again"):
        by_rank(ask, peer, silent)


def test_asking_is_time_spent_waiting() -> None:
    def ask(link: Transport) -> None:
        work = link.irecv(torch.zeros(10**6), 1)
        while not work.done():
            pass

    found = by_rank(ask, send(0, 10**6, after_s=1.0))
    rank = found.ranks[0]
    assert rank.busy_s == 0
    assert rank.waiting_s == pytest.approx(1.0)
    assert rank.communicating_s == pytest.approx(LINK.seconds(4 * 10**6))


# Deadlocks


def test_a_ring_of_receives_is_a_deadlock_found_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(Deadlock) as failure:
        by_rank(*(receive((rank + 1) % 4) for rank in range(4)))
    assert time.monotonic() - began < 5  # And not five virtual minutes, nor the ten seconds of a thread that hangs.
    rows = str(failure.value).splitlines()[1:]
    for rank, row in enumerate(rows):
        assert row.split()[:2] == ["rank", str(rank)]
        assert f"waits for a message from rank {(rank + 1) % 4} (tag 0, in 'world')" in row
    assert len(rows) == 4


def test_a_deadlock_says_what_steps_and_sums_wait_for() -> None:
    def steps(link: Transport) -> Any:
        def taken() -> Any:
            yield link.irecv(torch.zeros(1), 1, 7)

        link.start(taken()).wait()

    def anyone(link: Transport) -> None:
        link.irecv(torch.zeros(1), ANY, 3).wait()

    with pytest.raises(
        Deadlock, match=r"rank 0 .*an operation in progress, which waits for a message from rank 1 \(tag 7"
    ) as failure:
        by_rank(steps, anyone, lambda link: link.elapse(1.0) or anyone(link))
    assert "from any rank (tag 3" in str(failure.value)
    assert "1s" in str(failure.value)  # Where the last one got to.


def test_a_rank_that_left_out_a_sum_is_named() -> None:
    def sums(link: Transport) -> None:
        link.all_reduce(torch.zeros(3)).wait()  # type: ignore[attr-defined]

    with pytest.raises(WorkerFailed, match=r"RankLost: rank [12]: rank 0 is gone: it has"):
        by_rank(idle, sums, sums, cluster=Cluster(ranks_per_host=3))


def test_a_rank_that_ended_early_is_named_when_it_ended() -> None:
    found = by_rank(lambda link: link.elapse(2.0), caught(receive(0)), caught(receive(0)))
    for error, at_s in found.results[1:]:
        assert isinstance(error, RankLost)
        assert "rank 0 is gone" in str(error)
        assert at_s == 2.0


def test_what_was_sent_before_leaving_still_arrives() -> None:
    def leave(link: Transport) -> None:
        for _ in range(3):
            link.isend(torch.ones(10**6), 1)

    def collect(link: Transport) -> list[float]:
        return [receive(src, 10**6)(link) for src in (0, ANY, 0)]

    each = 4 * 10**6 * LINK.seconds_per_byte
    found = by_rank(leave, collect)
    assert found.results[1] == [pytest.approx(LINK.latency_s + count * each) for count in (1, 2, 3)]


@pytest.mark.parametrize("count", [*range(1, 6), 61, 62, 63, 64, 65])
def test_what_nobody_receives_is_counted_all_the_same(count: int) -> None:
    def leave(link: Transport) -> None:
        for number in range(count):
            link.elapse(1e-3)
            link.isend(ONE, 1, tag=number)

    found = by_rank(leave, idle)
    assert found.num_messages == count
    assert found.links["host1 in"].num_bytes == 4 * count


# Failures


def test_the_first_failure_in_virtual_time_is_named_with_its_traceback() -> None:
    def fail(after_s: float) -> Callable[[Transport], None]:
        def fails_on_purpose(link: Transport) -> None:
            link.elapse(after_s)
            raise ValueError(f"after {after_s:g} s")

        return fails_on_purpose

    with pytest.raises(WorkerFailed) as failure:
        by_rank(fail(3.0), receive(0), fail(2.0), receive(2))
    assert failure.value.rank == 2
    assert "ValueError: after 2 s" in failure.value.reason
    assert "in fails_on_purpose" in failure.value.traceback
    for starter in (rank_thread, runs.simulate):
        assert Path(starter.__file__).name not in failure.value.traceback, "how it was started is of no interest"
    assert isinstance(failure.value.__cause__, ValueError)


def test_those_a_failure_knocks_on_name_it() -> None:
    def fail(link: Transport) -> None:
        link.elapse(1.0)
        raise ValueError("on purpose")

    seen: list[Any] = []
    with pytest.raises(WorkerFailed, match="rank 0 failed: ValueError"):
        by_rank(
            fail, lambda link: seen.append(caught(receive(0))(link)), lambda link: seen.append(caught(receive(0))(link))
        )
    for error, at_s in seen:
        assert "rank 0 is gone: it failed: ValueError" in str(error)
        assert at_s == 1.0
    assert len(seen) == 2


def test_a_chain_of_losses_blames_the_first() -> None:
    """Rank 1 flees from rank 0's failure; rank 2, which waits for rank 1, hears of rank 0."""

    def fail(link: Transport) -> None:
        raise ValueError("on purpose")

    seen: list[Any] = []
    with pytest.raises(WorkerFailed, match="rank 0 failed"):
        by_rank(fail, receive(0), lambda link: seen.append(caught(receive(1))(link)))
    assert "rank 0 is gone: it failed" in str(seen[0][0])
    assert "rank 1 is gone" not in str(seen[0][0])


def test_leaving_by_exit() -> None:
    assert by_rank(lambda link: sys.exit(0), lambda link: 5).results == [None, 5]
    with pytest.raises(WorkerFailed, match="rank 0 failed: SystemExit: 3"):
        by_rank(lambda link: sys.exit(3), idle)


@pytest.mark.parametrize("doing", ["computing", "waiting", "asking", "sending", "summing"])
def test_a_death(doing: str) -> None:
    """Where the cluster says so, whatever the rank does then: its peers hear of it, and its `finally` blocks run."""
    swept: list[float] = []

    def dies(link: Transport) -> None:
        try:
            link.elapse(0.5)
            if doing == "computing":
                link.elapse(5.0)
            elif doing == "asking":
                work = link.irecv(torch.zeros(1), 1, 9)
                while not work.done():
                    pass
            elif doing == "sending":
                link.isend(torch.empty(10**9 // 4, device="meta"), 2).wait()
            elif doing == "summing":
                link.channel("sum", [0, 1]).irecv(torch.zeros(1), 1).wait()
            else:
                link.irecv(torch.zeros(1), 1, 9).wait()
        finally:
            swept.append(link.now())

    def mourns(link: Transport) -> Any:
        channel = link.channel("sum", [0, 1]) if doing == "summing" and link.rank == 1 else None
        found = caught(receive(0, 3))(link)
        if channel is not None:
            channel.close()
        return found

    cluster = Cluster(link=LINK, failures={0: "1.25s"})
    found = by_rank(dies, mourns, idle, cluster=cluster)
    assert found.lost == {0: 1.25}
    assert found.results[0] is None
    error, at_s = found.results[1]
    assert "rank 0 is gone: it died at 1.25s" in str(error)
    assert at_s == 1.25
    assert swept == [1.25]
    rank = found.ranks[0]
    assert rank.busy_s + rank.waiting_s + rank.communicating_s == pytest.approx(1.25)
    assert found.seconds == 1.25


def test_a_rank_that_is_done_before_it_would_die_is_not_lost() -> None:
    found = by_rank(lambda link: link.elapse(1.0) or "done", idle, cluster=Cluster(failures={0: 5.0}))
    assert (found.lost, found.results[0], found.seconds) == ({}, "done", 1.0)


def test_what_a_dead_rank_raises_on_its_way_out_is_nobodys_failure() -> None:
    def dies(link: Transport) -> None:
        try:
            link.elapse(5.0)
        finally:
            raise ValueError("in vain")

    assert by_rank(dies, idle, cluster=Cluster(failures={0: 1.0})).lost == {0: 1.0}


def test_the_others_go_on_without_the_dead() -> None:
    def mourns(link: Transport) -> float:
        assert isinstance(caught(receive(0))(link)[0], RankLost)
        return receive(2)(link)

    found = by_rank(lambda link: link.elapse(5.0), mourns, send(1, after_s=3.0), cluster=Cluster(failures={0: 1.0}))
    assert found.lost == {0: 1.0}
    assert found.results[0] is None
    assert found.results[1] == pytest.approx(3.0, abs=0.01)
    assert found.seconds == found.results[1]


def test_the_dead_send_nothing() -> None:
    def dies(link: Transport) -> None:
        try:
            link.elapse(5.0)
        finally:
            link.isend(ONE, 1)

    found = by_rank(dies, caught(receive(0)), cluster=Cluster(failures={0: 1.0}))
    assert isinstance(found.results[1][0], RankLost)
    assert found.num_messages == 0


# Deadlines


def test_a_peer_that_computes_for_too_long() -> None:
    found = by_rank(caught(receive(1)), send(0, after_s=100.0), timeout=timedelta(seconds=7))
    error, at_s = found.results[0]
    assert isinstance(error, DeadlineExceeded)
    assert "rank 0: waited 7 s of simulated time for a message from rank 1" in str(error)
    assert at_s == 7.0


@pytest.mark.parametrize("src", [1, ANY])
@pytest.mark.parametrize("in_steps", [False, True])
def test_a_large_message_on_its_way_is_waited_for(src: int, in_steps: bool) -> None:
    def patient(link: Transport) -> float:
        def taken() -> Any:
            yield link.irecv(torch.zeros(10**7), src)

        if in_steps:
            link.start(taken()).wait()
            return link.now()
        return receive(src, 10**7)(link)

    link = Link("1mbit", "1ms")
    found = by_rank(patient, send(0, 10**7, after_s=3.0), cluster=Cluster(link=link), timeout=timedelta(seconds=7))
    assert found.results[0] == pytest.approx(3 + link.seconds(4 * 10**7))


def test_steps_wait_for_those_before_them_as_long_as_these_go_on() -> None:
    def patient(link: Transport) -> float:
        def taken() -> Any:
            for _ in range(4):
                yield link.irecv(torch.zeros(1), 1)

        link.start(taken())
        link.start(taken()).wait()
        return link.now()

    def slow(link: Transport) -> None:
        for _ in range(8):
            link.elapse(5.0)
            link.isend(ONE, 0)

    found = by_rank(patient, slow, timeout=timedelta(seconds=7))
    assert found.results[0] == pytest.approx(40.0, rel=1e-4)


def test_after_a_deadline_a_rank_may_go_on() -> None:
    """And is not woken by what it waits for no more."""

    def goes_on(link: Transport) -> Any:
        error, _ = caught(receive(1))(link)
        return type(error).__name__, receive(2)(link)

    found = by_rank(goes_on, send(0, after_s=10.0), send(0, after_s=12.0), timeout=timedelta(seconds=7))
    assert found.results[0] == ("DeadlineExceeded", pytest.approx(12.0, rel=1e-4))


# Functions that catch everything


STUBBORN = """
import torch, tutti
from tutti.cluster import Cluster
from tutti.errors import Deadlock, WorkerFailed

def stubborn(busy_s, dies):
    link = tutti.init().transport
    if link.rank == 1:
        link.elapse(busy_s)
        return link.irecv(torch.zeros(1), 0).wait() if dies else None
    while True:
        try:
            link.irecv(torch.zeros(1), 1).wait()
        except:
            continue

try:
    found = tutti.simulate(stubborn, 5.0, {dies}, workers=2, cluster=Cluster(failures={failures}))
except (Deadlock, WorkerFailed) as error:
    print(type(error).__name__, error)
else:
    print(found.lost)
"""


@pytest.mark.parametrize(
    ("dies", "failures", "says"),
    [
        (False, {0: 1.0}, r"\{0: 1.0\}"),
        (True, {}, r"Deadlock deadlock: every rank"),
        (False, {}, r"WorkerFailed rank 0 failed: Deadlock: rank 0 has caught 1000 errors"),
    ],
)
def test_a_function_that_catches_everything_holds_nothing_up(dies: bool, failures: dict[int, float], says: str) -> None:
    """Its thread cannot be ended, only left: so this is a process of its own."""
    script = STUBBORN.replace("{dies}", str(dies)).replace("{failures}", str(failures))
    ended = subprocess.run([*warm.python(), "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert re.search(says, ended.stdout), ended.stdout


# The caller


def test_an_interrupt_in_the_caller_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.simulation.engine._PROGRESS_S", 0.0)
    monkeypatch.setattr("tutti.simulation.engine._PROGRESS_EVERY", 1)
    swept: list[int] = []

    def on_progress(seconds: float, messages: int) -> None:
        if messages > 10:
            raise KeyboardInterrupt

    def for_ever(link: Transport) -> None:
        try:
            while True:
                link.isend(ONE, 1 - link.rank)
                link.irecv(torch.zeros(1), 1 - link.rank).wait()
        finally:
            swept.append(link.rank)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        by_rank(for_ever, for_ever, on_progress=on_progress)
    assert sorted(swept) == [0, 1]
    assert threading.active_count() == before


def test_an_interrupt_in_a_rank_is_the_callers() -> None:
    def interrupted(link: Transport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        by_rank(interrupted, receive(0))


def test_watch_and_pulse_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from tutti.launch.supervisor_pipe import SupervisorPipe

    monkeypatch.setattr("tutti.simulation.engine._PROGRESS_S", 0.0)
    monkeypatch.setattr("tutti.simulation.engine._PROGRESS_EVERY", 1)
    told: list[Any] = []
    pulses: list[tuple[float, int]] = []

    def work(link: Transport) -> None:
        SupervisorPipe().progress(step=link.rank)
        (send(1) if link.rank == 0 else receive(0))(link)

    by_rank(
        work, work, watch=lambda rank, values: told.append((rank, values)), on_progress=lambda *at: pulses.append(at)
    )
    assert told == [(0, {"step": 0}), (1, {"step": 1})]
    assert pulses == sorted(pulses)
    assert pulses[-1][1] == 1


# What is refused


def test_nothing_reaches_out_of_a_simulation() -> None:
    def reach(link: Transport) -> list[str]:
        found = []
        attempts: list[Callable[[], Any]] = [
            lambda: simulate(idle, workers=1),
            lambda: tutti.launch(idle, workers=1),
            lambda: socket.socket(socket.AF_INET),
            lambda: socket.create_connection(("127.0.0.1", 9)),
            lambda: TCPStore("127.0.0.1", 0, is_master=True),
        ]
        for attempt in attempts:
            with pytest.raises(ConfigError, match="inside a simulation") as refusal:
                attempt()
            found.append(str(refusal.value))
        socket.socket(socket.AF_UNIX).close()
        HashStore()
        return found

    assert len(by_rank(reach, idle).results[0]) == 5
    # And afterwards all is as before.
    socket.socket(socket.AF_INET).close()
    store = TCPStore("127.0.0.1", 0, is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_other_threads_keep_their_sockets() -> None:
    opened: list[str] = []

    def outside() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            opened.append("yes")

    def work(link: Transport) -> None:
        if link.rank == 0:
            thread = threading.Thread(target=outside)
            thread.start()
            thread.join()

    by_rank(work, idle)
    assert opened == ["yes"]


def test_two_simulations_at_a_time_are_refused() -> None:
    """They would share the process's random numbers."""
    found: list[str] = []

    def other() -> None:
        try:
            simulate(tutti.init, workers=1)
        except ConfigError as error:
            found.append(str(error))

    def work(link: Transport) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    by_rank(work)
    assert len(found) == 1
    assert "another simulation" in found[0]
    assert by_rank(lambda link: 1).results == [1]


@pytest.mark.parametrize("workers", [0, -1, 1.5, "two"])
def test_how_many_must_be_a_number(workers: Any) -> None:
    with pytest.raises(ConfigError, match=r"workers must be (1 or more|a number of workers, or MIN:MAX)"):
        simulate(idle, workers=workers)


def test_a_cluster_must_be_one() -> None:
    with pytest.raises(ConfigError, match="cluster must be an object"):
        simulate(idle, workers=1, cluster="lan")  # type: ignore[arg-type]


def ring_of_hosts(size: int) -> Cluster:
    hosts = tuple(Host(name=f"h{number}") for number in range(size))
    links = {(f"h{number}", f"h{(number + 1) % size}"): LINK for number in range(size)}
    return Cluster(hosts=hosts, link=None, links=links)


def test_hosts_that_are_not_joined_cannot_talk() -> None:
    with pytest.raises(NoLink, match=r"has no link between them\. Not joined: h0 and h2, h1 and h3") as failure:
        by_rank(send(2), idle, receive(0), idle, cluster=ring_of_hosts(4))
    assert "on h0 sends to rank" in str(failure.value) or "on h2 sends to rank" in str(failure.value)


def test_a_ring_of_hosts_that_are_joined_in_a_ring() -> None:
    def pass_on(link: Transport) -> int:
        value = torch.tensor([link.rank])
        for _ in range(link.size - 1):
            box = torch.zeros(1, dtype=torch.int64)
            works = [link.irecv(box, (link.rank - 1) % link.size), link.isend(value, (link.rank + 1) % link.size)]
            for work in works:
                work.wait()
            value = box
        return int(value)

    found = by_rank(*[pass_on] * 4, cluster=ring_of_hosts(4))
    assert found.results == [1, 2, 3, 0]
    assert found.seconds == pytest.approx(3 * LINK.seconds(8))


# Many


def test_two_hundred_ranks_train() -> None:
    def train() -> float:
        world = tutti.init()
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tutti.distribute(model, optimizer, tutti.AllReduce("ring")):
            model(torch.full((1, 4), float(world.rank))).sum().backward()
            optimizer.step()
        return float(model.weight.detach().sum())

    before = threading.active_count()
    found = simulate(train, workers=200, cluster=Cluster(link=LINK))
    assert len(set(found.results)) == 1
    assert threading.active_count() == before
