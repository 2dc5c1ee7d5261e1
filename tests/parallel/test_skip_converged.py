"""`skip_converged`: parameters that have stopped moving are skipped on all ranks, and exchanged again later."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import run_ok, run_threads
from tutti.errors import ConfigError
from tutti.job import distribute
from tutti.replica.buckets import Slot
from tutti.strategies import AllReduce, parse
from tutti.strategies.converged import MAX_WINDOWS, ConvergenceMonitor
from tutti.transports import SingleRankTransport
from tutti.transports.base import DEFAULT_TIMEOUT
from tutti.world import World

EVERY = 4
SKIP = AllReduce("ring", skip_converged=0.001, check_every=EVERY)
ALONE = SingleRankTransport(DEFAULT_TIMEOUT)


def test_one_that_stopped_is_left_out_for_longer_and_longer() -> None:
    still, moving = Slot("still", torch.ones(4)), Slot("moving", torch.ones(4))
    converged = ConvergenceMonitor([still, moving], 0.01, every=2)
    out = []
    for step in range(1, 80):
        moving.tensor += 0.1
        assert converged.stepped(ALONE) == (step % 2 == 0)
        out.append(converged.left_out)
    assert set().union(*out) == {"still"}
    # In windows of two steps: one out, one with the others, two out, and so on.
    wanted = [0, *[1] * 1, 0, *[1] * 2, 0, *[1] * 4, 0, *[1] * MAX_WINDOWS, 0, *[1] * MAX_WINDOWS, 0]
    assert [len(names) for names in out[::2]][: len(wanted)] == wanted


def test_one_that_moves_again_is_back_at_once_and_patience_is_short() -> None:
    slot = Slot("it", torch.ones(4))
    converged = ConvergenceMonitor([slot], 0.01, every=1)
    moves = [False] * 8 + [True] * 4 + [False] * 3
    out = []
    for moved in moves:
        slot.tensor += 0.1 * moved
        converged.stepped(ALONE)
        out.append(bool(converged.left_out))
    # Out 1, in, out 2, in, out 4: then it moves, and while it does it stays; when it stops it is out for 1 again.
    assert out == [True, False, True, True, False, True, True, True, True, False, False, False, True, False, True]


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(40)]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.1}]
    return model, torch.optim.SGD(groups, momentum=0.9)


def train(world: World, strategy: AllReduce) -> dict[str, Any]:
    """The first layer stands still in steps 8 to 24, since its learning rate is 0, and moves on then."""
    model, optimizer = make()
    absent, sent, parameters = [], [], []
    with distribute(model, optimizer, strategy, world=world) as job:
        for step, (x, y) in enumerate(batches(world.rank)):
            optimizer.param_groups[0]["lr"] = 0.0 if 8 <= step < 24 else 0.1
            before = job.metrics.bytes_sent
            F.cross_entropy(model(x), y).backward()
            sent.append(job.metrics.bytes_sent - before)
            absent.append([name for name, p in model.named_parameters() if p.grad is None])
            optimizer.step()
            optimizer.zero_grad()
            parameters.append([p.detach().clone() for p in model.parameters()])
        skipped = job.metrics.strategy.get("skipped", 0)
    return {"absent": absent, "sent": sent, "parameters": parameters, "skipped": skipped}


@pytest.mark.parametrize("transport", ["sockets", "shared_memory", "simulated"])
def test_a_layer_that_stands_still_is_left_out_and_comes_back(transport: str) -> None:
    results = run_ok(train, SKIP, size=2, transport=transport)
    exact = run_ok(train, AllReduce("ring"), size=2, transport=transport)[0]
    first = results[0]
    first_layer = ["0.weight", "0.bias"]
    # Windows end with steps 11, 15, ...: out for one, in, out for two, and back when it moves.
    out = [*range(12, 16), *range(20, 28)]
    assert first["absent"] == [first_layer if step in out else [] for step in range(40)]
    for other in results:
        assert all(map(torch.equal, other["parameters"][-1], first["parameters"][-1]))
    for step in range(24):  # It stood still anyway.
        assert all(map(torch.equal, first["parameters"][step], exact["parameters"][step]))
    num_bytes = 4 * (6 * 300 + 300)
    assert first["sent"][13] < first["sent"][9] - 0.9 * num_bytes
    assert first["sent"][35] == first["sent"][9]
    assert not torch.equal(first["parameters"][-1][0], first["parameters"][27][0])  # It moves again.
    assert first["skipped"] == pytest.approx(len(out) / 40 * 2100 / (2100 + 903))
    assert exact["skipped"] == 0


def resume(world: World, stop: int) -> list[Tensor]:
    """Do what `train` does, with everything saved and restored after some steps."""
    model, optimizer = make()
    job = distribute(model, optimizer, SKIP, world=world)
    for step, (x, y) in enumerate(batches(world.rank)):
        if step == stop:
            saved = model.state_dict(), optimizer.state_dict(), job.state_dict()
            job.finish()
            model, optimizer = make()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            job = distribute(model, optimizer, SKIP, world=world)
            job.load_state_dict(saved[2])
        optimizer.param_groups[0]["lr"] = 0.0 if 8 <= step < 24 else 0.1
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    return [p.detach().clone() for p in model.parameters()]


def test_it_goes_on_from_a_checkpoint() -> None:
    wanted = run_ok(train, SKIP, size=2, transport="sockets")[0]["parameters"][-1]
    for stop in (13, 22):  # In the middle of windows without the first layer, and with it.
        for parameters in run_ok(resume, stop, size=2, transport="sockets"):
            assert all(map(torch.equal, parameters, wanted))


def test_all_may_be_left_out() -> None:
    """With a learning rate of 0 nothing moves, and only weights and decisions are sent."""

    def work(world: World) -> list[float]:
        model, optimizer = make()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        sent = []
        with distribute(model, optimizer, SKIP, world=world) as job:
            for x, y in batches(world.rank):
                before = job.metrics.bytes_sent
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                sent.append(job.metrics.bytes_sent - before)
        return sent

    for transport in ("sockets", "shared_memory"):
        sent = run_ok(work, size=2, transport=transport)[0]
        assert sent[EVERY] < 100 < sent[0]


def test_at_the_command_line() -> None:
    text = "ring:skip_converged=0.001,check_every=4"
    assert parse(text) == SKIP
    assert str(SKIP) == text
    assert not SKIP.exact
    assert AllReduce("ring").exact
    for wrong, message in (
        ("ring:skip_converged=0", "skip_converged must be above 0 and below 1"),
        ("ring:skip_converged=1.5", "got 1.5"),
        ("ring:skip_converged=0.1,check_every=0", "check_every must be 1 or more, got 0"),
        ("ring:skip_converged=0.1+onebit", "skip_converged goes with exact gradients"),
        ("ring:skip_converged=much", "is not of the form"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(wrong)


def test_a_state_of_another_model_is_refused() -> None:
    def work(world: World) -> None:
        model, optimizer = make()
        with distribute(model, optimizer, SKIP, world=world) as job:
            state = job.state_dict()
            del state["parameters"]["0.bias"]
            job.load_state_dict(state)

    for result in run_threads(work, size=2, transport="sockets"):
        assert isinstance(result, ConfigError)
        assert "it has no '0.bias', and this model has '0.bias' of shape" in str(result)
