"""States that continue under another strategy or number of ranks: nothing that is owed is lost or counted twice."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from support import run_ok
from tutti.job import distribute
from tutti.strategies import as_strategy
from tutti.strategies.compressed_state import owed
from tutti.world import World

RATE = 0.5


def net() -> nn.Module:
    """The same every time, whatever other ranks draw meanwhile."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def train(world: World, model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Every rank with its part of the same global batches."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 8, generator=generator, dtype=torch.float64).tensor_split(world.size)[world.rank]
        F.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=RATE)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def save(world: World, strategy: str, num_steps: int, make: Any) -> dict[str, Any]:
    model = net()
    optimizer = make(model)
    job = distribute(model, optimizer, strategy, world=world)
    train(job.world, model, optimizer, range(num_steps))
    state = job.state_dict()
    with job.consensus():
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": state})
    job.finish()
    return saved


def resumed(world: World, strategy: str, saved: dict[str, Any], make: Any) -> Any:
    model = net()
    model.load_state_dict(saved["model"])
    optimizer = make(model)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # Which it would change in place.
    job = distribute(model, optimizer, strategy, world=world)
    job.load_state_dict(saved["job"])
    return model, optimizer, job


def saved_by(strategy: str, num_steps: int = 3, make: Any = sgd, transport: str = "sockets") -> dict[str, Any]:
    size = 2 + as_strategy(strategy).num_dedicated_servers
    return run_ok(save, strategy, num_steps, make, size=size, transport=transport)[0]


def owed_by(saved: dict[str, Any], part: str) -> dict[str, Tensor]:
    found = owed(saved["job"]["exchange"][part])
    assert found.keys() == {"2.weight"}  # The only one that is large enough to be compressed.
    return {"2.weight": found["2.weight"].double()}


def step_without_gradient(world: World, strategy: str, saved: dict[str, Any]) -> dict[str, Tensor]:
    """What one step changes by what is owed alone."""
    model, optimizer, job = resumed(world, strategy, saved, sgd)
    (0.0 * model(torch.ones(2, 8, dtype=torch.float64)).sum()).backward()
    optimizer.step()
    job.finish()
    return {name: value.detach() - saved["model"][name] for name, value in model.named_parameters()}


TO_GRADIENTS = [
    ("native", "sockets", 2),
    ("ring", "sockets", 3),
    ("native", "shared_memory", 1),
    ("onebit:exact_below=10000", "sockets", 2),
    ("poseidon:rule=broadcast", "sockets", 2),
    ("ps:bsp", "shared_memory", 2),
    ("ps:bsp,servers=1", "sockets", 3),
    ("ps:bsp,factors=1", "sockets", 2),
    ("ps:async", "shared_memory", 2),
    ("ps:async", "sockets", 3),
    ("ps:softsync=2", "sockets", 2),
    ("averaging:every=1", "sockets", 2),
    ("gossip", "sockets", 2),
    ("auto", "sockets", 2),
]


@pytest.mark.parametrize(("after", "transport", "size"), TO_GRADIENTS)
@pytest.mark.parametrize("before", ["onebit", "ps:bsp+onebit"])
def test_gradients_that_a_codec_owed_count_once(before: str, after: str, transport: str, size: int) -> None:
    saved = saved_by(before)
    expected = {name: -RATE * value for name, value in owed_by(saved, "residuals").items()}
    workers = size - as_strategy(after).num_dedicated_servers
    for changed in run_ok(step_without_gradient, after, saved, size=size, transport=transport)[:workers]:
        for name, change in changed.items():
            wanted = expected.get(name, torch.zeros_like(change))
            torch.testing.assert_close(change, wanted, rtol=1e-6, atol=1e-9, msg=name)


BETWEEN_CODECS = [
    ("onebit", "ps:bsp+onebit", 3),
    ("ps:bsp+topk:0.1", "onebit", 2),
    ("ps:bsp,servers=1+onebit", "ps:async+onebit", 3),
    ("onebit", "topk:0.1", 1),
]


@pytest.mark.parametrize(("before", "after", "size"), BETWEEN_CODECS)
def test_what_is_owed_stays_owed_under_another_codec(before: str, after: str, size: int) -> None:
    saved = saved_by(before)

    def state_of(world: World) -> dict[str, Any]:
        *_, job = resumed(world, after, saved, sgd)
        state = job.state_dict()
        job.finish()
        return {"job": state}

    then = owed_by(saved, "residuals")
    for state in run_ok(state_of, size=size, transport="sockets"):
        torch.testing.assert_close(owed_by(state, "residuals"), then, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("after", ["fp16:feedback=0", "onebit:feedback=0", "ps:bsp+topk:0.1,feedback=0"])
def test_what_is_owed_goes_with_the_next_gradient_where_a_codec_keeps_nothing(after: str) -> None:
    saved = saved_by("onebit")

    def state_of(world: World) -> dict[str, Tensor]:
        *_, job = resumed(world, after, saved, sgd)
        state = job.state_dict()
        job.finish()
        found: dict[str, Tensor] = state["exchange"]["owed"]
        return found

    then = owed_by(saved, "residuals")
    for found in run_ok(state_of, size=2, transport="sockets"):
        torch.testing.assert_close({name: value.double() for name, value in found.items()}, then, rtol=1e-5, atol=1e-8)


TO_PARAMETERS = [
    *(("bmuf:every=3+onebit", "block_residuals", f"{after}+onebit:feedback=0") for after in ("bmuf:every=3", "diloco")),
    ("peers+onebit", "update_residuals", "peers+onebit:feedback=0"),
    *(("bmuf:every=3+onebit", "block_residuals", after) for after in ("native", "ps:bsp", "bmuf:every=3", "gossip")),
    *(("peers+onebit", "update_residuals", after) for after in ("ring", "ps:bsp", "averaging:every=2", "peers")),
    ("peers+onebit", "update_residuals", "gossip:graph=ring"),
]


@pytest.mark.parametrize(("before", "part", "after"), TO_PARAMETERS)
@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
def test_changes_that_a_codec_owed_are_made(before: str, part: str, after: str, transport: str) -> None:
    saved = saved_by(before)

    def agreed(world: World) -> dict[str, Tensor]:
        model, _, job = resumed(world, after, saved, sgd)
        with job.consensus():
            changed = {name: value.detach() - saved["model"][name] for name, value in model.named_parameters()}
        job.finish()
        return changed

    expected = owed_by(saved, part)
    for changed in run_ok(agreed, size=2, transport=transport):
        for name, change in changed.items():
            torch.testing.assert_close(change, expected.get(name, torch.zeros_like(change)), rtol=1e-5, atol=1e-8)


SAME = [
    *(("peers+onebit", "sockets"), ("gossip:pairs=async", "sockets"), ("ps:async", "shared_memory")),
    *(("ps:async", "sockets"), ("ps:ssp=2+onebit", "sockets"), ("ps:softsync=2", "shared_memory")),
]


@pytest.mark.parametrize(("strategy", "transport"), SAME)
def test_what_is_loaded_is_what_was_saved(strategy: str, transport: str) -> None:
    """Where the order in which ranks come decides, two runs differ: but not in what they begin with."""
    saved = saved_by(strategy, make=adamw, transport=transport)

    def state_of(world: World) -> Any:
        model, _, job = resumed(world, strategy, saved, adamw)
        state = job.state_dict()
        with job.consensus():
            found = copy.deepcopy([model.state_dict(), state["exchange"]])
        job.finish()
        return found

    wanted = _numbers([saved["model"], saved["job"]["exchange"]])
    for found in run_ok(state_of, size=2, transport=transport):
        torch.testing.assert_close(_numbers(found), wanted, rtol=1e-14, atol=1e-14)


def _numbers(tree: Any) -> Any:
    """A state without texts, and without clocks: peers number their updates from 1 again."""
    if isinstance(tree, dict):
        return {key: _numbers(value) for key, value in tree.items() if key != "clock" and not isinstance(value, str)}
    return [_numbers(each) for each in tree if not isinstance(each, str)] if isinstance(tree, list) else tree


EXACT = [
    ("ring", "ring", "sockets"),
    ("native", "native", "shared_memory"),
    ("ps:bsp", "ps:bsp", "shared_memory"),
    ("ps:bsp", "ps:bsp,servers=1", "sockets"),
    ("ps:bsp,servers=1", "poseidon:rule=broadcast", "sockets"),
    ("poseidon:bsp", "tree", "sockets"),
]


@pytest.mark.parametrize(("before", "after", "transport"), EXACT)
def test_exact_strategies_on_other_numbers_of_ranks_equal_one_worker(before: str, after: str, transport: str) -> None:
    alone = net()
    optimizer = adamw(alone)
    train(World(0, 1, 0, "host", None), alone, optimizer, range(6))  # type: ignore[arg-type]
    saved = saved_by(before, make=adamw, transport=transport)

    def rest(world: World) -> list[Tensor]:
        model, optimizer, job = resumed(world, after, saved, adamw)
        train(job.world, model, optimizer, range(3, 6))
        job.finish()
        return [p.detach() for p in model.parameters()]

    servers = as_strategy(after).num_dedicated_servers
    for workers in (3, 1):
        for found in run_ok(rest, size=workers + servers, transport=transport)[:workers]:
            torch.testing.assert_close(found, list(alone.parameters()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "transport"),
    [("onebit", "sockets"), ("bmuf:every=3+onebit", "sockets"), ("ps:bsp+onebit", "sockets"), *SAME],
)
def test_a_state_is_the_same_inside_and_outside_a_consensus(strategy: str, transport: str) -> None:
    """And complete on the leader alone, if it asks for that."""

    def states(world: World) -> Any:
        model = net()
        optimizer = adamw(model)
        job = distribute(model, optimizer, strategy, world=world)
        train(job.world, model, optimizer, range(4))
        outside = job.state_dict()["exchange"]
        with job.consensus():
            inside = job.state_dict()["exchange"]
        on_leader = job.state_dict(everywhere=False)["exchange"]
        train(job.world, model, optimizer, range(4, 5))
        job.finish()
        return outside, inside, on_leader

    found = run_ok(states, size=2, transport=transport)
    for outside, inside, _ in found:
        torch.testing.assert_close(_numbers(inside), _numbers(found[0][0]), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(_numbers(outside), _numbers(found[0][0]), rtol=0, atol=0)
    torch.testing.assert_close(_numbers(found[0][2]), _numbers(found[0][0]), rtol=1e-14, atol=1e-14)
    assert _lists(found[0][2]) == {2}
    assert _lists(found[1][2]) == {0}


def _lists(tree: Any) -> set[int]:
    """The lengths of the lists of ranks in a state."""
    if isinstance(tree, dict):
        names = ("ranks", "replicas", "buffers")
        lengths = {len(value) for key, value in tree.items() if key in names and isinstance(value, list)}
        return lengths.union(*(_lists(value) for value in tree.values()))
    return set()
