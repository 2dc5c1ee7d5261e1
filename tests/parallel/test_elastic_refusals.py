"""What needs all of its workers is refused in runs whose workers come and go, with what to do instead."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import tutti
from tutti.errors import WorkerFailed


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def split_by_a_mesh(world: tutti.World) -> None:
    model = nn.Linear(4, 4)
    tutti.distribute(model, optimizer(model), mesh=tutti.Mesh(data=1, tensor=2))


def with_dedicated_servers(world: tutti.World) -> None:
    model = nn.Linear(4, 4)
    tutti.distribute(model, optimizer(model), "ps:bsp,servers=1")


def with_joined_batch_norm(world: tutti.World) -> None:
    model = tutti.sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    tutti.distribute(model, optimizer(model))


def with_a_chosen_strategy(world: tutti.World) -> None:
    model = nn.Linear(4, 4)
    tutti.distribute(model, optimizer(model), "auto")


def twice(world: tutti.World) -> None:
    for _ in range(2):
        model = nn.Linear(4, 4)
        tutti.distribute(model, optimizer(model))


def with_a_closure_in_the_middle_of_steps(world: tutti.World) -> None:
    model = nn.Linear(4, 4)
    lbfgs = torch.optim.LBFGS(model.parameters())
    job = tutti.distribute(model, lbfgs)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    job.finish()


def work(attempt: Callable[[tutti.World], None]) -> None:
    attempt(tutti.init())


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (split_by_a_mesh, "a mesh that splits the model needs all of its workers. Give a fixed number of workers, and"),
        (with_dedicated_servers, "has dedicated servers"),
        (with_joined_batch_norm, "tutti.sync_batchnorm joins the workers that are there when it is called, for good"),
        (with_a_chosen_strategy, "auto"),
        (with_a_closure_in_the_middle_of_steps, "LBFGS.step was given a closure, which it may call several times"),
        (twice, "one model can be distributed in a run whose workers come and go. Give a fixed number of workers"),
    ],
)
def test_what_needs_all_of_its_workers(attempt: Callable[[tutti.World], None], message: str) -> None:
    with pytest.raises(WorkerFailed) as failed:
        tutti.launch(work, attempt, workers="1:2")
    assert "ConfigError" in str(failed.value)
    assert message in " ".join(str(failed.value).split())


def test_mpi_is_refused() -> None:
    with pytest.raises(WorkerFailed, match="workers cannot come and go over MPI") as failed:
        tutti.launch(work, twice, workers="1:2", transport="mpi")
    assert "Use sockets or shared memory, or a fixed number of workers" in str(failed.value)
