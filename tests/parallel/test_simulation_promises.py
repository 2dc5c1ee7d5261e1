"""What training functions may rely on in a simulation as in processes."""

import copy
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tutti.cluster import Cluster, Compute, Jitter, Link
from tutti.errors import ConfigError, DeadlineExceeded, RankLost, WorkerFailed
from tutti.simulation.runs.calibrate import train_steps
from tutti.simulation.runs.simulate import Simulation
from tutti.transports.base import Operation, Transport

SECOND = Compute(sample_s="1s")
"""A sample takes a second, a third of it forward."""


def alone(train: Callable[[nn.Module, Any, Callable[[], float]], Any], model: nn.Module | None = None) -> Any:
    """What `train(model, job, now)` returns on one simulated rank, where a sample takes a second."""

    def work() -> Any:
        torch.manual_seed(0)
        made = model or nn.Linear(3, 2, bias=False)
        trained = [p for p in made.parameters() if p.requires_grad]
        with tutti.distribute(made, torch.optim.SGD(trained, lr=0.1)) as job:
            return train(made, job, tutti.world().transport.now)

    return tutti.simulate(work, workers=1, cluster=Cluster(compute=SECOND)).results[0]


def test_processes_end_with_the_same_bits() -> None:
    """More ranks than cores: torch must use as many threads in each as it does in processes."""
    real = tutti.launch(train_steps, "mnist-mlp", "ring", 2, workers=3)
    simulated = tutti.simulate(train_steps, "mnist-mlp", "ring", 2, workers=3).results
    assert len({digest for _, digest in (*real, *simulated)}) == 1


def test_each_backward_takes_the_time_of_its_own_forward() -> None:
    def train(model: nn.Module, job: Any, now: Callable[[], float]) -> list[float]:
        one, two = model(torch.ones(1, 3)).sum(), model(torch.ones(2, 3)).sum()
        marks = [now()]
        for loss in (one, two):
            loss.backward()
            marks.append(now())
        model(torch.ones(5, 3))  # Never gone back from.
        start_s = now()
        model(torch.ones(1, 3)).sum().backward()
        return [*marks, now() - start_s]

    both, first, second, third = alone(train)
    assert both == pytest.approx(1.0)
    assert (first - both, second - first) == (pytest.approx(2 / 3), pytest.approx(4 / 3))
    assert third == pytest.approx(1.0)


def test_passes_that_are_added_up_go_back_together() -> None:
    def train(model: nn.Module, job: Any, now: Callable[[], float]) -> float:
        (model(torch.ones(1, 3)) + model(torch.ones(1, 3))).sum().backward()
        return now()

    assert alone(train) == pytest.approx(2.0)


def test_frozen_layers_leave_the_time_of_a_sample_as_it_was_said() -> None:
    def train(model: nn.Module, job: Any, now: Callable[[], float]) -> float:
        model(torch.ones(1, 3)).sum().backward()
        return now()

    half_frozen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    half_frozen[0].requires_grad_(False)
    assert alone(train, half_frozen) == pytest.approx(1.0)


def test_a_model_draws_what_it_would_draw_outside() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * torch.randn(3)

    torch.manual_seed(0)
    expected = torch.randn(3)
    found = alone(lambda model, job, now: model(torch.ones(1, 3)).detach()[0], Noisy())
    assert torch.equal(found, expected)


def test_copies_of_a_model_let_no_time_pass() -> None:
    def train(model: nn.Module, job: Any, now: Callable[[], float]) -> float:
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(torch.ones(1, 3)).sum().backward()
        return now()

    assert alone(train) == 0.0


class Choosy(nn.Linear):
    """Looks at values; a copy of it may refuse to."""

    def __init__(self, copies_work: bool) -> None:
        super().__init__(3, 2)
        self.made_in, self.copies_work = id(self), copies_work

    def forward(self, x: Tensor) -> Tensor:
        if id(self) != self.made_in and not self.copies_work:
            raise ValueError("a copy")
        return super().forward(x if float(x.sum()) > 0 else -x)


def train_choosy(copies_work: bool) -> None:
    model = Choosy(copies_work)
    with tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        model(torch.ones(1, 3)).sum().backward()


def test_a_model_that_looks_at_values_is_counted_with_them() -> None:
    found = tutti.simulate(train_choosy, True, workers=1, cluster=Cluster(compute=Compute(flops=36.0)))
    assert found.seconds == pytest.approx(1.0)  # 2 × 3 × 2 forward, twice that backward.


def test_a_model_that_cannot_be_counted_says_so() -> None:
    with pytest.warns(UserWarning, match="operations of Choosy cannot be counted"):
        tutti.simulate(train_choosy, False, workers=1)


def test_jitter_goes_on_from_job_to_job() -> None:
    def work() -> list[float]:
        took = []
        for _ in range(3):
            model = nn.Linear(3, 2)
            with tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)):
                start_s = tutti.world().transport.now()
                model(torch.ones(1, 3))
                took.append(tutti.world().transport.now() - start_s)
        return took

    found = tutti.simulate(work, workers=2, cluster=Cluster(compute=SECOND, jitter=Jitter(0.3))).results
    assert len({*found[0], *found[1]}) == 6


def by_rank(*functions: Callable[[Transport], Any], **options: Any) -> Simulation:
    def work() -> Any:
        world = tutti.init()
        return functions[world.rank](world.transport)

    cluster = options.pop("cluster", Cluster(link=Link("1gbit", "50us")))
    return tutti.simulate(work, workers=len(functions), cluster=cluster, **options)


def test_channels_of_one_name_between_other_ranks() -> None:
    def first(link: Transport) -> float:
        for other in (1, 2):
            link.channel("pair", [0, other]).isend(torch.tensor([float(other)]), 1).wait()
        return 0.0

    def other(link: Transport) -> float:
        got = torch.zeros(1)
        link.channel("pair", [0, link.rank]).irecv(got, 0).wait()
        return float(got)

    assert by_rank(first, other, other).results == [0.0, 1.0, 2.0]


def test_steps_neither_wait_nor_compute() -> None:
    def waiting(link: Transport) -> Operation:
        link.irecv(torch.zeros(1), 1).wait()
        yield from ()

    def computing(link: Transport) -> Operation:
        link.elapse(1.0)
        yield from ()

    for steps in (waiting, computing):
        with pytest.raises(WorkerFailed, match="operations yield the work they wait for"):
            by_rank(lambda link, steps=steps: link.start(steps(link)).wait(), lambda link: None)


def test_steps_behind_steps_that_are_overdue_fail_with_them() -> None:
    def receiving(link: Transport) -> Operation:
        yield link.irecv(torch.zeros(1), 1)

    def work(link: Transport) -> list[str]:
        begun = [link.start(receiving(link)) for _ in range(2)]
        names = []
        for each in begun:
            with pytest.raises(DeadlineExceeded):
                each.wait()
            names.append(f"{link.now():.0f}")
        return names

    found = by_rank(work, lambda link: link.elapse(10.0), timeout=timedelta(seconds=2))
    assert found.results[0] == ["2", "2"]


def test_a_message_is_not_for_a_receive_that_was_given_up() -> None:
    def work(link: Transport) -> float:
        late, kept = torch.zeros(1), torch.zeros(1)
        with pytest.raises(DeadlineExceeded):
            link.irecv(late, 1).wait()
        link.elapse(10.0)
        link.irecv(kept, 1).wait()
        return float(kept)

    def send(link: Transport) -> None:
        link.elapse(5.0)
        link.isend(torch.ones(1), 0).wait()

    assert by_rank(work, send, timeout=timedelta(seconds=2)).results[0] == 1.0


def test_who_failed_is_named_before_those_who_then_wait_for_each_other() -> None:
    def fail(link: Transport) -> None:
        link.channel("all")
        raise ValueError("the cause")

    def wait(link: Transport) -> None:
        apart = link.channel("all").channel("apart", [1, 2])
        apart.irecv(torch.zeros(1), 1 - apart.rank).wait()

    with pytest.raises(WorkerFailed, match="rank 0 failed: ValueError: the cause"):
        by_rank(fail, wait, wait)


def test_a_death_that_the_cluster_asked_for_is_named_as_such() -> None:
    with pytest.raises(
        WorkerFailed, match=r"rank 1 died at 1s, as the cluster's failures say, and rank 0 failed: RankLost"
    ) as told:
        by_rank(
            lambda link: link.irecv(torch.zeros(1), 1).wait(),
            lambda link: link.elapse(5.0),
            cluster=Cluster(failures={1: 1.0}),
        )
    assert isinstance(told.value.__cause__, RankLost)


def test_init_after_the_world_was_closed_is_refused() -> None:
    def work(link: Transport) -> None:
        tutti.world().close()
        with pytest.raises(ConfigError, match="inside a simulation"):
            tutti.init()

    by_rank(work, work)


def test_threads_that_cannot_be_started_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def few(self: threading.Thread) -> None:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", few)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        by_rank(*[lambda link: None] * 8)
    assert not any(thread.is_alive() for thread in started)


def test_closed_channels_are_forgotten() -> None:
    def work(link: Transport) -> int:
        for _ in range(20):
            link.channel("short").close()
        link.elapse(1.0)
        settle(link)
        return len(link._me.channels)  # type: ignore[attr-defined]

    assert by_rank(work, work).results == [1, 1]


def settle(link: Transport) -> None:
    """Let all that happened until now be done."""
    works = [link.irecv(torch.zeros(1), 1 - link.rank), link.isend(torch.zeros(1), 1 - link.rank)]
    for work in works:
        work.wait()
