"""Branches on different ranks compute what they would in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from support import run_ok, run_threads
from tutti.cluster import Cluster, Compute, Link
from tutti.errors import ConfigError
from tutti.job import distribute
from tutti.parallel.branch import Branches
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import Averaging
from tutti.world import World

STEPS = 20


class Last(nn.Module):
    """An LSTM's last state."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_in, num_out, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.lstm(x)[0][:, -1]
        return last


class TwoTowers(nn.Module):
    """A stem on both inputs, a shared LSTM over two sequences and a tower of its own for a third, and a head."""

    def __init__(self, world: World, num_branches: int = 3) -> None:
        super().__init__()
        shared = Last(6, 5)
        tower = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.Tanh())
        self.stem = nn.Linear(4, 6)
        self.branches = Branches([shared, shared, tower][:num_branches], world.transport)
        self.head = nn.Linear(5 * num_branches, 3)
        generator = torch.Generator().manual_seed(3)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = x.unbind(1)
        a, b = self.stem(a), self.stem(b)
        inputs = [a, b, self.stem(c).detach()[:, :, :4].contiguous()]
        outputs = self.branches(*inputs[: len(self.branches.branches)])
        out: Tensor = self.head(torch.cat(outputs, 1))
        return out


def batch(step: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 3, 6, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def train(world: World, num_branches: int, optimizer: str, strategy: str) -> dict[str, Any]:
    """Return parameters after some steps, and gradients of the first one; groups divide every batch."""
    model = TwoTowers(world, num_branches)
    kinds = {"sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), "adam": (torch.optim.AdamW, {"lr": 0.01})}
    kind, options = kinds[optimizer]
    torch_optimizer = kind(model.parameters(), **options)
    branches = model.branches
    grads = {}
    with distribute(model, torch_optimizer, strategy, world=world):
        for step in range(STEPS):
            x, y = (part[branches.group :: branches.num_groups] for part in batch(step))
            F.cross_entropy(model(x), y).backward()
            if step == 0:
                grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            torch_optimizer.step()
            torch_optimizer.zero_grad()
    return {"grads": grads, "parameters": {name: p.detach().clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("transport", "size", "num_branches", "optimizer", "strategy"),
    [
        ("shared_memory", 2, 2, "sgd", "native:bucket_bytes=500"),
        ("sockets", 3, 3, "adam", "native:bucket_bytes=500"),
        ("shared_memory", 2, 3, "adam", "native:bucket_bytes=500"),
        ("sockets", 4, 2, "sgd", "native:bucket_bytes=500"),
        ("simulated", 2, 2, "adam", "native:bucket_bytes=500"),
        ("simulated_hosts", 3, 3, "sgd", "native:bucket_bytes=500"),
        # A rank that does not compute a layer has no rows of its factors.
        ("simulated_hosts", 2, 3, "adam", "poseidon:rule=broadcast,bucket_bytes=500"),
        ("simulated_hosts", 2, 3, "sgd", "poseidon:rule=owners,bucket_bytes=500"),
    ],
)
def test_trains_as_one_process(transport: str, size: int, num_branches: int, optimizer: str, strategy: str) -> None:
    (wanted,) = run_ok(train, num_branches, optimizer, strategy, size=1, transport="sockets")
    results = run_ok(train, num_branches, optimizer, strategy, size=size, transport=transport)
    assert "stem.weight" in wanted["grads"]
    for result in results:
        for key in ("grads", "parameters"):
            assert result[key].keys() == wanted[key].keys()
            for name, value in wanted[key].items():
                torch.testing.assert_close(result[key][name], value, rtol=1e-10, atol=1e-10, msg=f"{key} of {name}")


def test_each_rank_computes_only_its_branches() -> None:
    calls: dict[tuple[int, int], int] = {}

    class CountsCalls(nn.Module):
        def __init__(self, rank: int, number: int) -> None:
            super().__init__()
            self.key = rank, number
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            calls[self.key] = calls.get(self.key, 0) + 1
            out: Tensor = self.layer(x)
            return out

    def work(world: World) -> list[int]:
        branches = Branches([CountsCalls(world.rank, number) for number in range(3)], world.transport)
        assert len(branches(*torch.ones(3, 4, 2))) == 3
        return branches.local_branches

    assert run_ok(work, size=2, transport="shared_memory") == [[0, 2], [1]]
    assert calls == {(0, 0): 1, (0, 2): 1, (1, 1): 1}


def test_numbers_of_words_and_no_gradients() -> None:
    """Inputs that have no gradient; and without a graph, as in evaluation."""

    def work(world: World) -> list[Tensor]:
        words = nn.Embedding.from_pretrained(torch.arange(12.0).view(6, 2), freeze=False)
        branches = Branches([words, nn.Linear(2, 1)], world.transport)
        with torch.no_grad():
            quietly = branches(torch.tensor([4, 1]), torch.ones(3, 2))
        with distribute(branches, torch.optim.SGD(branches.parameters(), lr=0.1), world=world):
            loudly = branches(torch.tensor([4, 1]), torch.ones(3, 2))
            assert [x.requires_grad for x in (*quietly, *loudly)] == [False, False, True, True]
            assert torch.equal(quietly[0], loudly[0])
            (loudly[0].square().sum() + loudly[1].sum()).backward()
            assert words.weight.grad is not None
            return [quietly[0], words.weight.grad.clone()]

    results = run_ok(work, size=2, transport="shared_memory")
    rows = torch.tensor([[8.0, 9.0], [2.0, 3.0]])
    for outputs, gradient in results:
        assert torch.equal(outputs, rows)
        assert torch.equal(gradient[[4, 1]], 2 * rows)
        assert gradient.sum() == 2 * rows.sum()


def test_virtual_time_is_that_of_a_ranks_own_branches() -> None:
    def work() -> float:
        world = tutti.init()
        model = nn.Module()
        model.branches = Branches([nn.Linear(400, 400), nn.Linear(400, 400)], world.transport)  # type: ignore[assignment]
        model.forward = lambda x: sum(model.branches(x, x))  # type: ignore[assignment,operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with distribute(model, optimizer, world=world):
            start_s = world.transport.now()
            model(torch.ones(10, 400))
            return world.transport.now() - start_s

    flops = 2 * 10 * 400 * 400
    cluster = Cluster(link=Link("100gbit", "1us"), compute=Compute(1e8))
    alone, two = (simulate(work, workers=size, cluster=cluster).results[0] for size in (1, 2))
    assert alone == pytest.approx(2 * flops / 1e8, rel=0.01)
    assert two == pytest.approx(flops / 1e8, rel=0.02)


def refused(world: World, branches: list[nn.Module]) -> None:
    Branches(branches, world.transport)


def test_what_cannot_be_is_refused() -> None:
    two = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for result in run_threads(refused, two, size=3, transport="shared_memory"):
        assert isinstance(result, ConfigError)
        assert "3 ranks cannot be put into groups of 2" in str(result)
    for result in run_threads(refused, [nn.Sequential(nn.BatchNorm1d(2))], size=1, transport="sockets"):
        assert "'0' of branch 0 keeps running statistics" in str(result)
    for result in run_threads(refused, [], size=1, transport="sockets"):
        assert "one branch at least" in str(result)


def test_different_batches_and_missing_distribute_are_refused() -> None:
    def work(world: World, which: str) -> None:
        branches = Branches([nn.Linear(3, 3), nn.Linear(3, 3)], world.transport)
        x = torch.ones(2, 3) + (world.rank if which == "batches" else 0)
        sum(branches(x, x)).sum().backward()  # type: ignore[union-attr]

    for which, message in {"batches": "were given different batches", "alone": "tutti.distribute the model"}.items():
        for rank, error in enumerate(run_threads(work, which, size=2, transport="sockets")):
            assert isinstance(error, ConfigError)
            assert str(error).startswith(f"rank {rank}: ")
            assert message in str(error)


def test_a_wrong_output_is_an_error_on_all_ranks() -> None:
    def work(world: World) -> None:
        branches = Branches([nn.Linear(3, 3), nn.LSTM(3, 3)], world.transport)
        branches(torch.ones(2, 3), torch.ones(2, 3))

    for result in run_threads(work, size=2, transport="sockets"):
        assert isinstance(result, ConfigError)
        assert "branch 1 must make one floating-point tensor" in str(result)


def test_a_wrong_number_of_inputs_and_other_strategies_are_refused() -> None:
    def work(world: World) -> None:
        model = TwoTowers(world)
        with pytest.raises(ConfigError, match="3 branches need an input each, got 1"):
            model.branches(torch.ones(1))
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Averaging(2), world=replace(world))

    for result in run_threads(work, size=2, transport="shared_memory"):
        assert isinstance(result, ConfigError)
        assert "a model with Branches needs the gradients of all ranks" in str(result)
