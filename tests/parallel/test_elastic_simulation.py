"""Simulated ranks that come and go: the seeded cases, and what losses, stops and cuts take in virtual time."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti import Cluster, Link, Simulation, simulate
from tutti.bench.elastic.simulated import SUBJECTS, SimulatedCase, cases, judge
from tutti.cluster import Compute, Host
from tutti.errors import ConfigError, Deadlock, WorkerFailed

LINK = Link("1gbit", "50us")
EACH = Cluster(link=LINK, compute=Compute(sample_s=0.05))
"""A step of 4 samples takes 0.2 s."""
STEPS = 30

CASES = list(cases(2 * len(SUBJECTS), seed=1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}-{case.subject.strategy}")
def test_failures_change_nothing(case: SimulatedCase) -> None:
    assert judge(case).problems == []


def train() -> tuple[int, list[float], Any, list[tuple[float, int]]]:
    """Train with 4 samples of each rank in a step; the steps, the model, the changes, and when steps ended."""
    world = tutti.init()
    torch.manual_seed(0)
    inputs = torch.randn(4 * 4 * STEPS, 3, dtype=torch.float64)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = tutti.distribute(model, optimizer)
    ends = []
    for epoch in (batches := tutti.shard(DataLoader(TensorDataset(inputs), batch_size=4))).epochs(1):
        for (x,) in epoch:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append((world.transport.now(), world.size))
    assert len(batches)
    changes = job.metrics.changes
    job.finish()
    return job.steps, model.weight.detach().flatten().tolist(), changes, ends


def run(chaos: str | None, cluster: Cluster = EACH, workers: Any = (1, 4)) -> Simulation:
    return simulate(train, workers=workers, chaos=chaos, cluster=cluster)


def ends_of(done: Simulation) -> list[Any]:
    return [result for result in done.results if result is not None]


@cache
def undisturbed() -> Any:
    return run(None).results[0]


def gaps(result: Any) -> list[float]:
    times = [end for end, _ in result[3]]
    return [later - before for before, later in pairwise(times)]


def test_a_run_is_the_same_every_time() -> None:
    one, again = (run("kill any every 2s; stop any for 1s every 3s; seed 3") for _ in range(2))
    assert one.chaos == again.chaos
    assert len(one.chaos) > 2
    assert one.seconds == again.seconds
    assert one.lost == again.lost
    assert ends_of(one)[0][:2] == ends_of(again)[0][:2]


def test_a_lost_rank_is_noticed_at_once_and_replaced() -> None:
    done = run("kill 1 at 1s")
    assert list(done.lost) == [1]
    steps, model, changes, ends = done.results[0]
    assert (steps, len(done.results)) == (STEPS, 5)
    assert model == pytest.approx(undisturbed()[1], rel=1e-12)
    assert (changes.lost_ranks, changes.generations, changes.voided_steps) == (1, 2, 1)
    assert sorted({size for _, size in ends}) == [3, 4]
    # The step that was void, what it takes to notice the loss, and one that is a third longer.
    assert max(gaps(done.results[0])) < 0.2 + 0.1 + 0.27


def test_a_rank_that_is_stopped_for_a_while_is_waited_for() -> None:
    done = run("stop 2 for 3s at 1s")
    assert done.lost == {}
    assert all(result[1] == undisturbed()[1] for result in done.results)
    assert max(gaps(done.results[0])) == pytest.approx(3.2, abs=0.3)


def test_a_rank_that_is_stopped_for_long_is_evicted_and_replaced() -> None:
    done = run("stop 2 for 20s at 1s")
    assert list(done.lost) == [2]
    assert done.lost[2] == pytest.approx(11, abs=0.5), "after the patience"
    assert len(ends_of(done)) == 4
    assert "rank 2 was silent and is evicted" in [text for _, text in done.chaos]
    assert ends_of(done)[0][1] == pytest.approx(undisturbed()[1], rel=1e-12)


@pytest.mark.parametrize("seconds", [2, 15])
def test_a_host_is_cut_off(seconds: int) -> None:
    two = (Host(name="a", link=LINK, ranks=2), Host(name="b", link=LINK, ranks=2))
    done = run(f"cut host 1 for {seconds}s at 1s", Cluster(link=LINK, hosts=two, compute=Compute(sample_s=0.05)))
    assert sorted(done.lost) == ([] if seconds == 2 else [2, 3])
    assert ends_of(done)[0][1] == pytest.approx(undisturbed()[1], rel=1e-12)
    assert max(gaps(ends_of(done)[0])) > min(seconds, 10) - 1


def test_ranks_join_and_leave() -> None:
    done = run("leave 0 at 1s; join at 2s", workers=(1, 4))
    assert done.lost == {}
    assert done.results[0] is None
    sizes = [size for _, size in done.results[1][3]]
    assert [sizes[0], min(sizes), sizes[-1]] == [4, 3, 4]
    assert done.results[1][2].voided_steps == 0


def test_all_are_lost_and_it_begins_anew() -> None:
    done = run("kill 0 at 1s; kill 1 at 1s", workers=(1, 2))
    assert sorted(done.lost) == [0, 1]
    assert [result[0] for result in ends_of(done)] == [STEPS * 2] * 2


def test_a_hang_is_found_although_failures_are_to_come() -> None:
    def hang() -> None:
        world = tutti.init()
        job = tutti.distribute(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=1)) if False else None
        assert job is None
        world.tolerate_loss(True)
        if world.rank == 0:
            world.transport.irecv(torch.zeros(1), 1).wait()
        world.transport.irecv(torch.zeros(1), 0).wait()

    with pytest.raises(Deadlock, match="waits for a message from rank"):
        simulate(hang, workers=(1, 2), chaos="kill 1 at 1000s", cluster=EACH)


def test_an_error_of_the_script_is_raised() -> None:
    def fail() -> None:
        raise ValueError("a mistake")

    with pytest.raises(WorkerFailed, match="a mistake"):
        simulate(fail, workers=(1, 2), cluster=EACH)


def test_too_few_are_left() -> None:
    with pytest.raises(WorkerFailed, match="TooFewWorkers"):
        run("leave 0 at 1s; leave 1 at 1s; leave 2 at 1s", workers=(3, 4))


ONE_HOST = Cluster(link=LINK, hosts=(Host(name="a", link=LINK, ranks=4),))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"workers": "8:2"}, "the minimum is 1 or more and not above the maximum, got '8:2'"),
        ({"workers": (0, 2)}, "the minimum is 1 or more"),
        ({"workers": 1, "chaos": "kill 0 at 1s"}, "chaos needs 2 workers or more"),
        ({"workers": 2, "chaos": "leave 0 at 1s; leave 1 at 1s"}, "could leave no worker at all"),
        ({"workers": 2, "chaos": "kill 5 at 1s"}, "workers 0 to 1"),
        ({"workers": 2, "chaos": "cut host 2 for 1s"}, "the hosts are 0 to 1"),
        ({"workers": 2, "chaos": "explode"}, "'explode' is not one of"),
        ({"workers": 2, "chaos": "cut host 0 for 1s", "cluster": ONE_HOST}, "all ranks are on one host"),
    ],
)
def test_refused(how: dict[str, Any], message: str) -> None:
    never: Callable[[], None] = lambda: None  # noqa: E731
    with pytest.raises(ConfigError, match=message):
        simulate(never, **how)


def accumulate() -> tuple[int, int]:
    """Train with gradients of five batches in a step; two batches are left over behind the last step."""
    world = tutti.init()
    torch.manual_seed(0)
    inputs = torch.randn(4 * 4 * 12, 3, dtype=torch.float64)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = tutti.distribute(model, optimizer, "bmuf:every=4")
    number = 0
    for epoch in tutti.shard(DataLoader(TensorDataset(inputs), batch_size=4), keep="local").epochs(1):
        for (x,) in epoch:
            number += 1
            model(x).square().mean().backward()
            world.transport.sleep(0.001)  # What has come by now is known.
            if number % 5 == 0:
                optimizer.step()
                optimizer.zero_grad()
    job.finish()
    return job.steps, world.size


@pytest.mark.timeout(30)
def test_ranks_change_behind_the_last_step_although_batches_are_left_over() -> None:
    """All have answered that they can stop behind the next step, which never comes: they must not wait for it."""
    done = simulate(accumulate, workers=(1, 4), chaos="leave 0 at 1.9s", cluster=EACH)
    # What was left over comes again, and with it the share of the one that has left.
    assert done.results == [None, (3, 3), (3, 3), (3, 3)]
