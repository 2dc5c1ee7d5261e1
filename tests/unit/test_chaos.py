"""The text of `tutti run --chaos`, and what is done when, with a clock that the test moves."""

import signal
from typing import Any

import pytest

from tutti.errors import ConfigError
from tutti.launch.chaos import Chaos
from tutti.launch.chaos_runner import ChaosRunner


def test_all_kinds_of_clauses() -> None:
    chaos = Chaos.parse(
        "kill 1 every 20s; stop 2 for 3s;cut host 0 for 5s at 1m; join at 30s; leave any at 10s; seed 7"
    )
    found = [(rule.action, rule.target, rule.lasts_s, rule.at_s, rule.every_s) for rule in chaos.rules]
    assert found == [
        ("kill", 1, None, None, 20.0),
        ("stop", 2, 3.0, None, None),
        ("cut", 0, 5.0, 60.0, None),
        ("join", None, None, 30.0, None),
        ("leave", None, None, 10.0, None),
    ]
    assert chaos.seed == 7


def test_every_mistake_is_in_one_message() -> None:
    text = "jump 1; kill; kill x at 5s; kill 1; stop 1; kill 1 for 3s at 1s; kill 1 at 2s every 3s; cut 0 for 1s"
    with pytest.raises(ConfigError) as failed:
        Chaos.parse(f"{text}; seed x; kill 1 at; join often; stop 2 for long")
    for part in (
        "'jump' is not one of kill, stop, cut, join, leave, seed",
        "'kill': kill needs the number of a worker, or any, got nothing",
        "kill needs the number of a worker, or any, got 'x'",
        "'kill 1': say when, such as 'at 10s' or 'every 10s'",
        "'stop 1': say for how long, such as 'for 3s'",
        "'kill' does not last, so leave 'for' out",
        "give 'at' or 'every', not both",
        "'cut 0 for 1s': say which host",
        "'seed x': a seed is a whole number of 0 or more",
        "'kill 1 at': 'at' needs a duration, such as 10s",
        "'join often': 'often' is not one of at, every, for",
        "'stop 2 for long': for must be a number of seconds",
    ):
        assert part in str(failed.value)


@pytest.mark.parametrize("text", ["", " ; ", "seed 4"])
def test_nothing_to_do(text: str) -> None:
    with pytest.raises(ConfigError, match=r"nothing is given|a seed alone does nothing"):
        Chaos.parse(text)


@pytest.mark.parametrize(
    ("text", "restarts", "hosts", "message"),
    [
        ("kill any every 5s", 0, 0, "could leave no worker at all"),
        ("kill 0 at 1s; kill 1 at 2s; leave 2 at 3s", 0, 0, "could leave no worker at all"),
        ("leave any every 5s", 10, 0, "could leave no worker at all"),
        ("leave 0 at 1s; leave any at 2s; leave any at 3s", 10, 0, "could leave no worker at all"),
        ("kill 3 at 1s", 1, 0, "the run starts workers 0 to 2"),
        ("cut host 0 for 1s", 1, 0, "only hosts of a lab can be cut off"),
        ("cut host 2 for 1s", 1, 2, "the hosts are 0 to 1"),
    ],
)
def test_what_cannot_be_done_in_a_run(text: str, restarts: int, hosts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Chaos.parse(text).check(3, restarts, hosts)


@pytest.mark.parametrize("text", ["kill any every 5s", "kill 0 every 1s; leave 1 at 2s; leave 1 at 4s; join at 1s"])
def test_workers_that_are_replaced_may_be_killed(text: str) -> None:
    Chaos.parse(text).check(3, 1, 0)


class Targets:
    """Three workers that note what is done to them."""

    def __init__(self) -> None:
        self.there = [0, 1, 2]
        self.done: list[tuple[Any, ...]] = []
        self.may_end = True

    def slots(self) -> list[int]:
        return self.there

    def can_end(self, slot: int, *, leaves: bool) -> bool:
        return self.may_end

    def signal(self, slot: int, sign: signal.Signals) -> None:
        self.done.append((sign.name, slot))

    def add(self) -> str:
        self.done.append(("add",))
        return "rank 3 was started"

    def leave(self, slot: int) -> None:
        self.done.append(("leave", slot))

    def link(self, host: int, *, up: bool) -> None:
        self.done.append(("up" if up else "down", host))


class Timeline:
    """Chaos on three workers, and the time."""

    def __init__(self, text: str) -> None:
        self.now, self.targets, self.lines = 50.0, Targets(), list[str]()
        self.runner = ChaosRunner(Chaos.parse(text), self.targets, self.lines.append, lambda: self.now)
        self.runner.start()

    def wait(self, seconds: float) -> list[tuple[Any, ...]]:
        """Let time pass; return what was done meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            self.runner.act()
        done, self.targets.done = self.targets.done, []
        return done


def test_each_act_has_its_time() -> None:
    run = Timeline("stop 2 for 3s at 1s; cut host 1 for 2s; join at 5s; leave 0 at 5s; kill 1 at 6s")
    assert run.wait(0.5) == [("down", 1)]
    assert run.wait(1) == [("SIGSTOP", 2)]
    assert run.wait(1) == [("up", 1)]
    assert run.wait(2) == [("SIGCONT", 2)]
    assert run.wait(1) == [("add",), ("leave", 0)]
    assert run.wait(10) == [("SIGKILL", 1)]
    assert run.lines == [
        "chaos: cut host 1 for 2 s",
        "chaos: stop the worker in place 2 for 3 s",
        "chaos: join: rank 3 was started",
        "chaos: leave the worker in place 0",
        "chaos: kill the worker in place 1",
    ]


def test_the_seed_decides_what_is_random() -> None:
    runs = [Timeline(f"kill any every 2s; seed {seed}").wait(100) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert 40 < len(runs[0]) < 60
    assert {slot for _, slot in runs[0]} == {0, 1, 2}


def test_who_is_not_there_is_left_alone() -> None:
    run = Timeline("kill 1 at 1s; kill any at 2s; leave 0 at 3s")
    run.targets.there = [0]
    assert run.wait(1.5) == []
    assert run.lines == ["chaos: kill 1 at 1s: no such worker runs now"]
    run.targets.may_end = False
    assert run.wait(5) == []
    assert run.lines[1:] == [
        "chaos: kill any at 2s: left out, because it is the last worker",
        "chaos: leave 0 at 3s: left out, because it is the last worker",
    ]
    run.targets.there = []
    assert Timeline("stop any for 1s").wait(0.1) == [("SIGSTOP", 1)]


def test_what_lasts_ends_with_the_run() -> None:
    run = Timeline("stop 2 for 100s; cut host 0 for 100s")
    assert run.wait(1) == [("SIGSTOP", 2), ("down", 0)]
    run.runner.close()
    assert run.wait(200) == [("up", 0), ("SIGCONT", 2)]
