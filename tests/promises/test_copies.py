"""Copies of a model that each rank keeps, such as averages of weights: `job.average` and `job.consensus(copy)`."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from support import run_ok
from tutti.errors import ConfigError, ReplicaMismatch
from tutti.job import distribute
from tutti.world import World

EQUAL = ("native", "ps:bsp")
"""Strategies under which parameters are equal on all ranks after every step."""
STRATEGIES = (*EQUAL, "bmuf:every=4", "diloco:every=4", "gossip", "ps:ssp=3", "peers")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def train(world: World, strategy: str) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
    with distribute(model, optimizer, strategy, world=world) as job:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        for x in inputs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
        before = state(ema)
        with job.consensus(ema):
            inside = state(ema)
        after = state(ema)
        job.average(ema)
        return before, inside, after, state(ema)


@pytest.mark.parametrize("transport", ["shared_memory", "simulated"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_consensus_covers_copies(strategy: str, transport: str) -> None:
    by_rank = run_ok(train, strategy, size=3, transport=transport)
    for before, inside, after, averaged in by_rank:
        for name in before:
            own = torch.stack([values[0][name].double() for values in by_rank])
            if before[name].is_floating_point():
                torch.testing.assert_close(inside[name], own.mean(0), rtol=1e-12, atol=1e-14)
                assert torch.equal(inside[name], by_rank[0][1][name])  # The same bits on all ranks.
            assert torch.equal(after[name], before[name])  # Restored.
            assert torch.equal(averaged[name], inside[name])
    weights = [before["module.0.weight"] for before, *_ in by_rank]
    differ = any(not torch.equal(weights[0], other) for other in weights)
    if strategy in EQUAL:
        assert not differ
        assert torch.equal(by_rank[0][1]["module.0.weight"], weights[0])  # Left alone: not even rounded.
    if strategy in ("bmuf:every=4", "diloco:every=4", "gossip"):
        assert differ  # Otherwise this test would show nothing.


def dtypes(world: World) -> list[Tensor]:
    model = net()
    job = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    own = nn.ParameterList([nn.Parameter(torch.full((2,), float(world.rank), dtype=dtype)) for dtype in DTYPES])
    own.register_buffer("steps", torch.tensor(world.rank))
    job.average(own)
    job.finish()
    assert own.steps.item() == world.rank  # A counter has no mean.
    return [parameter.detach() for parameter in own]


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def test_every_dtype_has_a_mean() -> None:
    for parameters in run_ok(dtypes, size=2, transport="hosts"):
        assert [p.dtype for p in parameters] == list(DTYPES)
        assert all(p.tolist() == [0.5, 0.5] for p in parameters)


def wrong(world: World) -> None:
    model = net()
    with distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world) as job:
        with pytest.raises(ConfigError, match=r"rank 1: .*got a dict"):
            job.average({} if world.rank == 1 else copy.deepcopy(model))
        with pytest.raises(ConfigError, match="it takes a copy"):
            job.average(model)
        with pytest.raises(ReplicaMismatch, match=r"'weight'.*2.*'weight'.*3"):
            job.average(nn.Linear(2 + world.rank, 1))
        with pytest.raises(ReplicaMismatch, match="differ"), job.consensus(nn.Linear(2 + world.rank, 1)):
            pass
        with job.consensus(copy.deepcopy(model)):  # The context before has ended, although it never began.
            pass


def test_what_is_no_copy_of_one_model_is_an_error_on_all_ranks() -> None:
    run_ok(wrong, size=2, transport="sockets")
