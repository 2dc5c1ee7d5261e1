"""Peers go on while a rank waits for them in a collective call, and it computes alone again afterwards."""

import pytest
import torch
from torch import Tensor, nn

import tutti
from support import run_ok
from tutti.errors import ConfigError
from tutti.world import World


def _started(world: World) -> tuple[nn.Module, torch.optim.Optimizer, tutti.Job]:
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, tutti.distribute(model, optimizer, "peers", world=world)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(torch.arange(8, dtype=torch.float64).view(2, 4) + number).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _two_models(world: World, call: str) -> Tensor:
    first, first_optimizer, first_job = _started(world)
    second, second_optimizer, second_job = _started(world)
    _step(first, first_optimizer, world.rank)
    # More steps than peers may be ahead: rank 1 needs rank 0 for the second model while that waits in the first.
    for number in range(1 if world.rank == 0 else 6):
        _step(second, second_optimizer, 10 * world.rank + number)
    if call == "reduce":
        first_job.reduce(1.0)
    elif call == "consensus":
        with first_job.consensus():
            pass
    first_job.finish()
    second_job.finish()
    return torch.cat([p.detach().flatten() for p in [*first.parameters(), *second.parameters()]])


@pytest.mark.parametrize("call", ["reduce", "consensus", "finish"])
def test_a_call_of_one_model_does_not_stop_another(call: str) -> None:
    ours, theirs = run_ok(_two_models, call, size=2, transport="shared_memory")
    assert torch.equal(ours, theirs)


def _failed_call(world: World) -> bool:
    model, optimizer, job = _started(world)
    with job:
        _step(model, optimizer, world.rank)
        with pytest.raises(ConfigError):
            job.reduce("a text")
        waits = job._exchange.algorithm._applies_at_once  # type: ignore[attr-defined]
        _step(model, optimizer, 2 + world.rank)
    return bool(waits)


def test_a_call_that_failed_is_over() -> None:
    assert run_ok(_failed_call, size=2, transport="shared_memory") == [False, False]
