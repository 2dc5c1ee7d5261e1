"""`job.load_state_dict` under another strategy: what has a meaning there is kept, and a line says what is dropped."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import run_ok, run_threads
from tutti.errors import ConfigError
from tutti.job import distribute
from tutti.world import World


def net() -> nn.Module:
    """The same every time, whatever other ranks draw meanwhile."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def begin(world: World, strategy: str, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, distribute(model, optimizer, strategy, world=world)


def save(world: World, strategy: str, num_steps: int) -> dict[str, Any]:
    """A checkpoint as the guide makes it, after some steps."""
    model = net()
    optimizer, job = begin(world, strategy, model)
    train(model, optimizer, world.rank, range(num_steps))
    state = job.state_dict()
    with job.consensus():
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": state}
        saved["model"] = {name: value.clone() for name, value in saved["model"].items()}
    job.finish()
    return saved


def resume(world: World, strategy: str, saved: list[dict[str, Any]], steps: range) -> Any:
    model = net()
    model.load_state_dict(saved[0]["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(saved[0]["optimizer"])
    job = distribute(model, optimizer, strategy, world=world)
    job.load_state_dict(saved[0]["job"])
    assert job.steps == steps.start
    state = job.state_dict()["exchange"]
    train(model, optimizer, world.rank, steps)
    job.finish()
    return [p.detach().clone() for p in model.parameters()], state


def plain(world: World, strategy: str, num_steps: int) -> list[Tensor]:
    model = net()
    optimizer, job = begin(world, strategy, model)
    train(model, optimizer, world.rank, range(num_steps))
    job.finish()
    return [p.detach().clone() for p in model.parameters()]


EXACT = [
    ("ring", "native"),
    ("native", "tree:bucket_bytes=1000"),
    ("native", "auto"),
    ("auto", "ring"),
    ("ps:bsp", "native"),
    ("native", "ps:bsp"),
    ("ps:bsp", "ps:bsp,bucket_bytes=1000"),
]


@pytest.mark.parametrize(("before", "after"), EXACT)
def test_exact_strategies_continue_each_others_runs(before: str, after: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tutti"):
        saved = run_ok(save, before, 3, size=2, transport="sockets")
        resumed = run_ok(resume, after, saved, range(3, 6), size=2, transport="sockets")
    expected = run_ok(plain, "native", 6, size=2, transport="sockets")
    for got, wanted in zip(resumed[0][0], expected[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert "the state was saved under" not in caplog.text  # Nothing was dropped.


def residuals(state: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [saved["elements"]["residual"] for saved in state["residuals"]["ranks"]]


@pytest.mark.parametrize("after", ["onebit:bucket_bytes=1000", "topk:0.1", "onebit:exact_below=100"])
def test_residuals_go_with_the_parameters(after: str) -> None:
    saved = run_ok(save, "onebit", 3, size=2, transport="sockets")
    resumed = run_ok(resume, after, saved, range(3, 4), size=2, transport="sockets")
    for then, now in zip(residuals(saved[0]["job"]["exchange"]), residuals(resumed[0][1]), strict=True):
        assert then.keys() == {"2.weight"}  # The only one above `exact_below`.
        assert then["2.weight"].shape == (40, 40)
        assert then["2.weight"].any()
        assert torch.equal(then["2.weight"], now["2.weight"])
        assert all(not value.any() for name, value in now.items() if name not in then)


DROPPED = [
    ("bmuf:every=4", "native", "block momentum starts at zero"),
    ("bmuf:every=2", "averaging:every=4", "block momentum is dropped"),
    ("gossip", "native", "all ranks continue from their mean, and with the first rank's optimiser"),
    ("native:skip_converged=0.5,check_every=2", "ring", "skipped as converged are exchanged again"),
    ("bmuf:every=4", "gossip", "training continues from the mean of all ranks' models"),
]


@pytest.mark.parametrize(("before", "after", "words"), DROPPED)
def test_a_line_says_what_is_dropped(before: str, after: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = run_ok(save, before, 3, size=2, transport="sockets")
    with caplog.at_level(logging.WARNING, logger="tutti"):
        run_ok(resume, after, saved, range(3, 4), size=2, transport="sockets")
    lines = [record.getMessage() for record in caplog.records if "the state was saved under" in record.getMessage()]
    assert len(lines) == 1, lines
    assert words in lines[0]
    assert f"'{before}'" in lines[0]
    assert f"'{after}'" in lines[0]


@pytest.mark.parametrize("after", ["bmuf:every=2,bucket_bytes=1000", "diloco:every=4"])
def test_blocks_of_local_steps_continue_with_other_options(after: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = run_ok(save, "bmuf:every=4", 6, size=2, transport="sockets")
    with caplog.at_level(logging.WARNING, logger="tutti"):
        resumed = run_ok(resume, after, saved, range(6, 8), size=2, transport="sockets")
    then, now = saved[0]["job"]["exchange"]["block"], resumed[0][1]["block"]
    assert all(torch.equal(then["start"][name], now["start"][name]) for name in then["start"])
    assert all(torch.equal(then["velocity"][name], now["velocity"][name]) for name in then["velocity"])
    assert "the state was saved under" not in caplog.text


def test_another_model_is_refused_with_the_first_difference() -> None:
    saved = run_ok(save, "onebit", 2, size=2, transport="sockets")

    def load(world: World) -> None:
        model = nn.Sequential(nn.Linear(8, 41), nn.Tanh(), nn.Linear(41, 3))
        job = begin(world, "native", model)[1]
        job.load_state_dict(saved[0]["job"])

    for error in run_threads(load, size=2, transport="sockets"):
        assert isinstance(error, ConfigError)
        assert "it has '0.bias' of shape (40,), and this model has '0.bias' of shape (41,)" in str(error)
