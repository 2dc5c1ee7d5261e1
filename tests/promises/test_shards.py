"""`tutti.shard` with other data on other ranks is an error that names the ranks and both values, on every rank."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from support import run_threads
from tutti.errors import ConfigError
from tutti.world import World

SETTINGS = {
    "the number of samples": ({"samples": 24}, {"samples": 48}, "24", "48"),
    "batch_size": ({"batch_size": 2}, {"batch_size": 4}, "2", "4"),
    "drop_last": ({"drop_last": False}, {"drop_last": True}, "0", "1"),
    "seed": ({"seed": 3}, {"seed": 4}, "3", "4"),
}


def _train(world: World, strategy: str, settings: list[dict]) -> None:
    options = {"samples": 24, "batch_size": 2, "drop_last": False, "seed": 0, **settings[world.rank]}
    x = torch.arange(4.0 * options["samples"], dtype=torch.float64).view(-1, 4).sin()
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tutti.distribute(model, optimizer, strategy, world=world)
    loader = DataLoader(TensorDataset(x), options["batch_size"], shuffle=True, drop_last=options["drop_last"])
    with job:
        for (batch,) in tutti.shard(loader, seed=options["seed"], world=world):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["ring", "poseidon", "ps:bsp", "gossip", "peers", "bmuf:every=2"])
@pytest.mark.parametrize("name", SETTINGS)
def test_other_data_on_one_rank(name: str, strategy: str) -> None:
    first, second, value, other = SETTINGS[name]
    for error in run_threads(_train, strategy, [first, second], size=2, transport="shared_memory"):
        assert isinstance(error, ConfigError), error
        assert f"{name} is {value} on rank 0 and {other} on rank 1. Pass the same DataLoader" in str(error)
