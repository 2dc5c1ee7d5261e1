"""Workers of elastic runs that are lost before all have distributed their models, or in collective calls."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tutti.errors import WorkerFailed
from tutti.job import distribution
from tutti.launch.elastic_run import ElasticRun

VICTIM, END = 1, 8


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(when: str) -> None:
    """Have this process kill itself in `tutti.distribute`."""
    name = {"comparing": "check_alike", "taking over": "take_from_rank_0", "attaching": "_attach"}.get(when)
    if name is not None:
        setattr(distribution, name, lambda *_: die())


def train(when: str) -> tuple[int, int, list[float]]:
    torch.set_num_threads(1)
    world = tutti.init()
    number = int(os.environ["RANK"])
    torch.manual_seed(number)
    data = TensorDataset(torch.arange(END * 12 * 4, dtype=torch.float64).sin().view(-1, 4))
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if number == VICTIM and when == "before":
        die()
    if number == VICTIM:
        arrange(when)
    if when == "all fail":
        raise RuntimeError("a mistake in the script")
    job = tutti.distribute(model, optimizer, "ring")
    batches = tutti.shard(DataLoader(data, batch_size=4, shuffle=True))
    for epoch in batches.epochs(1):
        for (x,) in epoch:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return world.size, job.steps, model.weight.flatten().tolist()


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
@pytest.mark.parametrize("when", ["before", "comparing", "taking over", "attaching"])
def test_a_worker_is_lost_before_all_have_distributed(when: str, transport: str) -> None:
    workers = ElasticRun(minimum=1, maximum=3, restarts=0)
    results = tutti.launch(train, when, workers=workers, transport=transport)
    assert [each is None for each in results] == [False, True, False]
    assert results[0] == results[2], "both have taken the model of one of them"
    assert results[0][0] == 2
    # Steps are formed for the ranks that were there when the data was made.
    assert results[0][1] in (END, END * 3 // 2)


def test_a_mistake_of_all_workers_ends_the_run_at_once() -> None:
    with pytest.raises(WorkerFailed, match="a mistake in the script"):
        tutti.launch(train, "all fail", workers=(1, 3))


CALLS = ("average", "consensus", "state_dict", "shard.state_dict", "restore", "expect")


def call(folder: str, name: str, dies: bool) -> Any:
    """Make a collective call in which a worker is lost; return what it gives, and what a later call gives."""
    torch.set_num_threads(1)
    tutti.init()
    number = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = tutti.distribute(model, optimizer, "ring")
    batches = tutti.shard(DataLoader(TensorDataset(torch.randn(480, 4, dtype=torch.float64)), batch_size=4))
    copy = torch.nn.Linear(4, 1).double()
    with torch.no_grad():
        copy.weight.fill_(float(number))
    at = 0 if name in ("restore", "expect") else 3
    found: Any = None
    if at == 0:
        found = make_call(name, folder, job, batches, copy, dies and number == VICTIM)
    for epoch in batches.epochs(1):
        for (x,) in epoch:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.steps == at:
                found = make_call(name, folder, job, batches, copy, dies and number == VICTIM)
                at = -1
            if job.steps == 20 and not dies:
                job.checkpoint(folder, batches)
    later = job.reduce(1.0, "sum")
    job.finish()
    return found, later, job.steps, model.weight.flatten().tolist()


def make_call(name: str, folder: str, job: "tutti.Job", batches: Any, copy: torch.nn.Module, dies: bool) -> Any:
    if dies:
        if name == "restore":
            type(job).load_state_dict = lambda *_: die()  # type: ignore[method-assign]
        else:
            job.world.calls.call = lambda *_, **__: die()  # type: ignore[method-assign]
    if name == "average":
        job.average(copy)
        return copy.weight.flatten().tolist()
    if name == "consensus":
        with job.consensus(copy):
            inside = copy.weight.flatten().tolist()
        return [inside, copy.weight.flatten().tolist()[0] == float(os.environ["RANK"])]
    if name == "state_dict":
        return sorted(job.state_dict())
    if name == "shard.state_dict":
        return batches.state_dict()["positions"]
    if name == "restore":
        restored = job.restore(folder, batches)
        return None if restored is None else restored.steps
    if dies:
        die()
    job.expect(loss="mean")
    return None


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
@pytest.mark.parametrize("name", CALLS)
def test_a_worker_is_lost_in_a_collective_call(name: str, transport: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    if name == "restore":
        tutti.launch(call, folder, "expect", False, workers=3, transport=transport)
    workers = ElasticRun(minimum=1, maximum=3, restarts=0)
    results = tutti.launch(call, folder, name, True, workers=workers, transport=transport)
    assert [each is None for each in results] == [False, True, False]
    assert results[0] == results[2]
    found, later, steps, _ = results[0]
    assert later == 2.0
    wanted: dict[str, Any] = {
        "average": [1.0] * 4,  # Of ranks 0 and 2.
        "consensus": [[1.0] * 4, True],
        "state_dict": ["exchange", "parameters", "steps", "strategy"],
        "restore": 20,
        "expect": None,
    }
    if name == "shard.state_dict":
        assert found == [[0, 3], [0, 3]]
    else:
        assert found == wanted[name]
    assert steps == 40


def train_scaled(tracks: str, strategy: str) -> int:
    """Train with a GradScaler, which is given to the job or not."""
    tutti.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=tracks != "disabled")
    job = tutti.distribute(model, optimizer, strategy)
    if tracks == "tracked":
        job.track(scaler)
    for (x,) in tutti.shard(DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)):
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    job.finish()
    return job.steps


@pytest.mark.parametrize("strategy", ["ring", "bmuf:every=2"])
@pytest.mark.parametrize("tracks", ["tracked", "disabled", "forgotten"])
def test_a_grad_scaler_is_given_to_the_job(tracks: str, strategy: str) -> None:
    workers = ElasticRun(minimum=1, maximum=2, restarts=0)
    if tracks != "forgotten":
        assert tutti.launch(train_scaled, tracks, strategy, workers=workers) == [3, 3]
        return
    with pytest.raises(WorkerFailed, match=r"a GradScaler makes the steps .* job\.track\(scaler\)"):
        tutti.launch(train_scaled, tracks, strategy, workers=workers)
