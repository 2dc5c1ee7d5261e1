"""When lost workers are replaced, with a clock that the test moves; and how users say how many there may be."""

import pytest

from tutti.errors import ConfigError
from tutti.launch.elastic_run import ElasticRun, Workers, parse_workers
from tutti.launch.environment import read_environment
from tutti.launch.lab.placement import here
from tutti.launch.restarts import Restarts


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_each_loss_of_a_slot_waits_twice_as_long() -> None:
    clock = Clock()
    restarts = Restarts(100, clock)
    delays = [restarts.lost(2, alive_s=1.0) for _ in range(9)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert restarts.lost(1, alive_s=1.0) == 0.5, "another slot"
    assert restarts.lost(2, alive_s=61.0) == 0.5, "it ran for a minute"
    assert restarts.lost(2, alive_s=1.0) == 1.0


def test_a_worker_is_due_when_its_time_has_come() -> None:
    clock = Clock()
    restarts = Restarts(3, clock)
    restarts.lost(0, 1.0)
    restarts.lost(4, 1.0)
    assert (restarts.due(), restarts.waiting) == ([], {0, 4})
    clock.now += 0.6
    assert (restarts.due(), restarts.waiting, restarts.due()) == ([0, 4], set(), [])


def test_restarts_are_limited() -> None:
    restarts = Restarts(2, Clock())
    assert [restarts.lost(slot, 1.0) for slot in range(3)] == [0.5, 0.5, None]
    assert restarts.waiting == {0, 1}
    restarts.cancel()
    assert restarts.waiting == set()
    assert Restarts(0).lost(0, 1.0) is None


def test_places_of_workers_that_are_added() -> None:
    placement = here(3)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    assert [placement.environment(1, 7)[name] for name in names] == ["7", "1", "3"]
    assert [placement.environment(4, 9)[name] for name in names] == ["9", "4", "3"]


def test_a_number_above_the_size_needs_an_elastic_run() -> None:
    variables = {"RANK": "7", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}
    with pytest.raises(ConfigError, match="rank 7 of 3"):
        read_environment(variables)
    assert read_environment({**variables, "TUTTI_ELASTIC": "1:3"}).rank == 7


@pytest.mark.parametrize("workers", [(2, 8), "2:8", [2, 8]])
def test_the_fewest_and_the_most(workers: Workers) -> None:
    assert parse_workers(workers, "workers") == ElasticRun(minimum=2, maximum=8)


@pytest.mark.parametrize(("workers", "number"), [(4, 4), ("4", 4), (None, None), ("-1", -1)])
def test_a_fixed_number(workers: Workers, number: int | None) -> None:
    assert parse_workers(workers, "workers") == number


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ("8:2", "not above the maximum, got '8:2'"),
        ((0, 3), "the minimum is 1 or more"),
        ("a:b", "must be a number of workers, or MIN:MAX, got 'a:b'"),
        ("1:2:3", "MIN:MAX, got '1:2:3'"),
        ("", "MIN:MAX, got ''"),
        (2.5, "MIN:MAX, got '2.5'"),
    ],
)
def test_no_number_of_workers(workers: Workers, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--workers.*{message}"):
        parse_workers(workers, "--workers")


def test_restarts_are_not_negative() -> None:
    with pytest.raises(ConfigError, match="restarts must be 0 or more, got -1"):
        ElasticRun(minimum=1, maximum=2, restarts=-1)
