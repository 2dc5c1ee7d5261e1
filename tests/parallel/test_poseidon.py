"""Poseidon: gradients sent as factors equal those sent in full, for every use of a layer."""

import copy
import pickle
from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tutti
from support import pairwise, run_ok, run_threads
from tutti.cluster import Cluster, Compute, Link
from tutti.errors import ConfigError, NonFiniteLoss, PacketError
from tutti.job import Job, distribute
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import BSP, SSP, AllReduce, ParameterServer, Poseidon, Strategy, parse
from tutti.strategies.parameter_server.shards import ParameterShard, ShardSegment
from tutti.strategies.parameter_server.sufficient_factors import pack, unpack
from tutti.strategies.poseidon.exchange import PoseidonExchange
from tutti.world import World

STEPS = 4
TRANSPORTS = ("shared_memory", "sockets", "simulated")

_one_at_a_time = Lock()
_compiler = Lock()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same model on every rank: ranks that are threads share torch's generator."""
    with _one_at_a_time, torch.random.fork_rng():
        torch.manual_seed(3)
        return make().double()


def batch(world: World, step: int, *shape: int) -> Tensor:
    """Return this rank's samples, a different number on every rank."""
    generator = torch.Generator().manual_seed(100 * step + world.rank)
    return torch.randn(2 + world.rank, *shape, generator=generator, dtype=torch.float64)


class Tied(nn.Module):
    """A weight of two modules, one that is used outside its module too, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.alone, self.unused = nn.Linear(6, 6, bias=False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.alone(torch.tanh(self.first(x))))
        return self.last(F.linear(hidden, self.alone.weight.t()))


class Checkpointed(nn.Module):
    """Activations are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(6, 6), mlp(), nn.Linear(3, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, torch.tanh(self.stem(x)), use_reentrant=self.reentrant))


class Recurrent(nn.Module):
    """One layer, many times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(12, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(3):
            state = torch.tanh(self.cell(torch.cat([x, state], -1)))
        return self.head(state)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(inplace=True), nn.Linear(10, 3))


def without_biases() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 3, bias=False))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 1), nn.ReLU(inplace=True), nn.Conv2d(6, 2, 1, bias=False, stride=2),
        nn.Conv2d(2, 2, 1, groups=2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, dim_feedforward=12, dropout=0.0, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (mlp, (6,)),
    "more dimensions": (mlp, (4, 2, 6)),
    "no biases": (without_biases, (6,)),
    "tied weights": (Tied, (6,)),
    "checkpointed": (lambda: Checkpointed(reentrant=False), (6,)),
    "checkpointed, reentrant": (lambda: Checkpointed(reentrant=True), (6,)),
    "recurrent": (Recurrent, (6,)),
    "convolutions": (convolutions, (3, 6, 6)),
    "attention": (attention, (5, 6)),
    "wide": (lambda: nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30)), (40,)),
}

Loop = Callable[[Job, nn.Module, torch.optim.Optimizer, World, tuple[int, ...]], None]


def plainly(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, shape: tuple[int, ...]) -> None:
    for step in range(STEPS):
        model(batch(world, step, *shape)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulating(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, shape: tuple[int, ...]
) -> None:
    """Some passes stay here; and before the last exchange, one of them is thrown away."""
    for step in range(STEPS):
        for part in range(3):
            if (step, part) == (STEPS - 1, 1):
                optimizer.zero_grad(set_to_none=False)
            with job.no_sync():
                model(batch(world, 10 * step + part, *shape)).square().mean().backward()
        model(batch(world, 10 * step + 3, *shape)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def never_cleared(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, shape: tuple[int, ...]
) -> None:
    for step in range(STEPS):
        model(batch(world, step, *shape)).square().mean().backward()
        optimizer.step()


def with_penalties(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, shape: tuple[int, ...]
) -> None:
    """The loss holds a gradient, and a weight itself."""
    for step in range(STEPS):
        x = batch(world, step, *shape).requires_grad_()
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        weight = next(p for name, p in model.named_parameters() if name.endswith("weight"))
        (loss + slope.square().sum() + 0.1 * weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_losses(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, shape: tuple[int, ...]
) -> None:
    """Both forward before either goes back, and a third that never does."""
    for step in range(STEPS):
        one, other, _ = (model(batch(world, 10 * step + part, *shape)).square().mean() for part in range(3))
        one.backward()
        other.backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: dict[str, Loop] = {
    "plainly": plainly, "accumulating": accumulating, "never cleared": never_cleared, "penalties": with_penalties,
    "two losses": two_losses,
}  # fmt: skip


def trained(world: World, strategy: Strategy, model_name: str, loop: str) -> dict[str, Tensor]:
    make, shape = MODELS[model_name]
    model = seeded(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with distribute(model, optimizer, strategy, world=world) as job:
        LOOPS[loop](job, model, optimizer, world, shape)
    assert not any("forward" in module.__dict__ for module in model.modules())
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check(strategy: Strategy, model_name: str, loop: str, transport: str, size: int = 3) -> None:
    whole = run_ok(trained, AllReduce("ring"), model_name, loop, size=size, transport=transport)
    in_factors = run_ok(trained, strategy, model_name, loop, size=size, transport=transport)
    for state in in_factors:
        for name, value in state.items():
            assert torch.equal(value, in_factors[0][name])
            torch.testing.assert_close(value, whole[0][name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("model_name", MODELS)
def test_every_model_learns_the_same(model_name: str, transport: str) -> None:
    if (model_name, transport) == ("checkpointed, reentrant", "simulated"):
        pytest.skip("its operations cannot be counted, which is said in a warning")
    check(Poseidon("broadcast"), model_name, "plainly", transport)


@pairwise(loop=list(LOOPS), model_name=["perceptron", "recurrent"], rule=["broadcast", "owners"])
def test_every_loop_learns_the_same(loop: str, model_name: str, rule: str) -> None:
    check(Poseidon(rule), model_name, loop, "sockets")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("rule", ["broadcast", "owners", "sacp"])
def test_any_number_of_ranks(size: int, rule: str) -> None:
    """Eight own parts of layers with fewer outputs than that."""
    check(Poseidon(rule), "perceptron", "plainly", "simulated", size)  # type: ignore[arg-type]


def methods(world: World, strategy: Strategy, model_name: str, loop: str = "plainly") -> dict[str, str]:
    """Return the method of each layer at the end."""
    make, shape = MODELS[model_name]
    model = seeded(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with distribute(model, optimizer, strategy, world=world) as job:
        LOOPS[loop](job, model, optimizer, world, shape)
        exchange = job._exchange
        assert isinstance(exchange, PoseidonExchange)
        return dict(exchange.methods)


FACTORED = {
    "perceptron": {"0.weight", "2.weight"},
    "tied weights": set(),  # The one that is alone is used outside its module.
    "checkpointed": {"stem.weight", "body.0.weight", "body.2.weight", "head.weight"},
    "checkpointed, reentrant": {"stem.weight", "body.0.weight", "body.2.weight", "head.weight"},
    "convolutions": {"1.weight", "7.weight"},
    "attention": {"linear1.weight", "linear2.weight"},
}


@pytest.mark.parametrize("model_name", FACTORED)
def test_layers_that_can_be_are_factored(model_name: str) -> None:
    """The model has layers of every method, so that the other tests compare something."""
    for found in run_ok(methods, Poseidon("broadcast"), model_name, size=2, transport="sockets"):
        assert set(found) == FACTORED[model_name]


def test_accumulation_stays_factored_and_other_uses_do_not() -> None:
    kept = run_ok(methods, Poseidon("broadcast"), "perceptron", "accumulating", size=2, transport="sockets")
    assert all(found == {} for found in kept)  # Since one gradient was thrown away, and not by setting it to None.
    penalised = run_ok(methods, Poseidon("broadcast"), "perceptron", "penalties", size=2, transport="sockets")
    assert all("0.weight" not in found for found in penalised)


def test_autocast_sends_what_autocast_computes() -> None:
    def train(world: World, strategy: Strategy) -> tuple[list[Tensor], int]:
        model = seeded(mlp).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with distribute(model, optimizer, strategy, world=world) as job:
            for step in range(STEPS):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch(world, step, 6).float()).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().clone() for p in model.parameters()], job.metrics.bytes_sent

    whole = run_ok(train, AllReduce("ring"), size=2, transport="sockets")
    factors = run_ok(train, Poseidon("broadcast"), size=2, transport="sockets")
    for one, other in zip(factors[0][0], whole[0][0], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_bytes_are_those_of_the_formula() -> None:
    """K (M + N) numbers to each of the others, beside what goes in full: biases, marks and what ranks say of rows."""

    def train(world: World) -> int:
        model = seeded(lambda: nn.Sequential(nn.Linear(200, 300, bias=False), nn.Linear(300, 100, bias=False)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.ones(4, 200, dtype=torch.float64)
        with distribute(model, optimizer, Poseidon("broadcast"), world=world) as job:
            sent = []
            for _ in range(3):
                model(x).square().mean().backward()
                optimizer.zero_grad()
                sent.append(job.metrics.bytes_sent)
        return sent[2] - sent[1]

    want = 2 * 4 * (200 + 300 + 300 + 100) * 8
    for sent in run_ok(train, size=3, transport="sockets"):
        assert want <= sent < 1.02 * want


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_without_rows_and_one_that_does_not_count(transport: str) -> None:
    """An expert that a rank does not use, and NaN in a batch of weight 0."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)])

    def train(world: World, strategy: Strategy) -> list[Tensor | None]:
        model = seeded(Experts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        assert isinstance(model, Experts)
        with distribute(model, optimizer, strategy, world=world) as job:
            for step in range(STEPS):
                optimizer.zero_grad()
                x = batch(world, step, 6)
                if step == STEPS - 1 and world.rank == 2:
                    x.fill_(float("nan"))
                job.contributed(0 if step == STEPS - 1 and world.rank == 2 else len(x))
                uses = model.experts if step == 0 else [model.experts[0], *([model.experts[1]] * (world.rank == 1))]
                sum(expert(x).square().mean() for expert in uses).backward()  # type: ignore[union-attr]
            return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    whole = run_ok(train, AllReduce("ring"), size=3, transport=transport)
    for rank, gradients in enumerate(run_ok(train, Poseidon("broadcast"), size=3, transport=transport)):
        for one, other in zip(gradients, whole[rank], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert whole[0][-1] is None
    assert whole[0][2] is not None


def test_compiled_models_go_in_full() -> None:
    def train(world: World, strategy: Strategy) -> list[Tensor]:
        model = seeded(without_biases)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with distribute(model, optimizer, strategy, world=world):
            compiled = torch.compile(model, backend="aot_eager")
            for step in range(3):
                compiled(batch(world, step, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    try:
        whole = run_ok(train, AllReduce("ring"), size=2, transport="sockets")[0]
        found = run_ok(train, Poseidon("broadcast"), size=2, transport="sockets")[0]
    finally:
        torch._dynamo.reset()  # What it compiled counts towards a limit of other tests.
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


def test_copies_are_models_of_their_own() -> None:
    def train(world: World) -> None:
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = batch(world, 0, 6)
        with distribute(model, optimizer, Poseidon("broadcast"), world=world):
            for _ in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                torch.testing.assert_close(copied(x), model(x))
                copied(x).square().mean().backward()
                assert all(p.grad is not None for p in copied.parameters())
                assert all(p.grad is None for p in model.parameters())

    run_ok(train, size=2, transport="sockets")


def test_a_loss_that_is_not_finite_stops_everybody() -> None:
    def train(world: World) -> None:
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with distribute(model, optimizer, Poseidon("broadcast"), world=world) as job:
            for step in range(STEPS):
                loss = model(batch(world, step, 6)).square().mean()
                if step == 2 and world.rank == 1:
                    loss = loss * float("nan")
                job.watch(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    for result in run_threads(train, size=3, transport="sockets"):
        assert isinstance(result, NonFiniteLoss)
        assert "rank 1" in str(result)


def test_a_rank_that_fails_is_not_waited_for() -> None:
    def train(world: World) -> None:
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with distribute(model, optimizer, Poseidon("broadcast", bucket_bytes=1), world=world):
            for step in range(STEPS):
                if step == 2 and world.rank == 1:
                    raise ZeroDivisionError
                model(batch(world, step, 6)).square().mean().backward()

    results = run_threads(train, size=3, transport="simulated")
    assert all(isinstance(result, Exception) for result in results)


TEXTS: dict[str, Strategy] = {
    "poseidon": Poseidon(),
    "poseidon:rule=sacp,overlap=0": Poseidon("sacp", overlap=False),
    "poseidon:bucket_bytes=1000": Poseidon(bucket_bytes=1000),
    "poseidon:ssp=2": Poseidon(consistency=SSP(2)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_it_prints_as_the_text_that_makes_it(text: str) -> None:
    assert parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Poseidon("best"), "rule 'best' is not one of priced, sacp"),  # type: ignore[arg-type]
        (lambda: Poseidon(overlap=1), "overlap must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: Poseidon(bucket_bytes=0), "bucket_bytes must be 1 or more, got 0"),
        (lambda: Poseidon("sacp", consistency=SSP(2)), "leave out rule 'sacp'"),
        (lambda: parse("poseidon+onebit"), "takes no codec"),
        (lambda: parse("poseidon:overlap=yes"), "'overlap=yes' is none of"),
        (lambda: parse("poseidon:ssp=2,overlap=0"), "overlap cannot be turned off"),
        (lambda: Poseidon(consistency=2), "consistency must be an object such as SSP(2), got 2"),  # type: ignore[arg-type]
        (lambda: parse("poseidon:servers=2"), "'servers=2' is none of"),
        (lambda: parse("poseidon:ssp=2,workers=3"), "'workers=3' is none of"),
    ],
)
def test_bad_input(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert said in str(refused.value)


def test_ranks_that_use_layers_in_another_order() -> None:
    """And clear nothing in between, so that what factors do not hold is summed for several layers at once."""

    def train(world: World, strategy: Strategy) -> list[Tensor]:
        model = seeded(lambda: nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        assert isinstance(model, nn.ModuleList)
        with distribute(model, optimizer, strategy, world=world):
            for step in range(3):
                x = batch(world, step, 6).requires_grad_()
                order = [0, 1] if world.rank == 0 else [1, 0]
                torch.stack([model[number](x).square().mean() for number in order]).sum().backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole = run_ok(train, AllReduce("ring"), size=2, transport="sockets")
    for found in run_ok(train, Poseidon("broadcast"), size=2, transport="sockets"):
        torch.testing.assert_close(found, whole[0], rtol=1e-10, atol=1e-12)


def test_gradients_that_are_asked_for_and_hooks_of_weights() -> None:
    def train(world: World, strategy: Strategy) -> list[Tensor]:
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        first, last = model.get_parameter("0.weight"), model.get_parameter("2.weight")
        with distribute(model, optimizer, strategy, world=world):
            for step in range(STEPS):
                if step == 2:
                    last.register_hook(lambda gradient: 0.5 * gradient)
                loss = model(batch(world, step, 6)).square().mean()
                (asked,) = torch.autograd.grad(loss, first, retain_graph=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [asked, *(p.detach() for p in model.parameters())]

    whole = run_ok(train, AllReduce("ring"), size=2, transport="sockets")
    for found, wanted in zip(run_ok(train, Poseidon("broadcast"), size=2, transport="sockets"), whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_factors_take_no_more_virtual_time_than_products() -> None:
    """On a link that costs nothing, with one row of input, a step takes what it takes in full, and the products."""

    def train(strategy: Strategy) -> float:
        world = tutti.init()
        model = seeded(lambda: nn.Linear(100, 100, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with distribute(model, optimizer, strategy, world=world):
            for _ in range(3):
                start_s = world.transport.now()
                model(torch.ones(1, 100, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return world.transport.now() - start_s

    cluster = Cluster(link=Link("100tbit", 0.0), compute=Compute(sample_s="300ms"))
    full, factors = (
        simulate(train, strategy, workers=2, cluster=cluster).results[0]
        for strategy in (AllReduce("ring"), Poseidon("broadcast"))
    )
    assert full == pytest.approx(0.3, rel=1e-3)
    assert factors == pytest.approx(0.3 + 0.1, rel=1e-3)  # A third of all operations are such a product.


# With servers


def served(world: World, strategy: Strategy, model_name: str, loop: str) -> tuple[dict[str, Tensor], int]:
    make, shape = MODELS[model_name]
    model = seeded(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with distribute(model, optimizer, strategy, world=world) as job:
        sent_by_step: list[int] = []
        optimizer.register_step_post_hook(lambda *_: sent_by_step.append(job.metrics.bytes_sent))
        LOOPS[loop](job, model, optimizer, world, shape)
        # Without the first step, which waits for changes of gradients, and pushes them in full.
        sent = sent_by_step[-1] - sent_by_step[0]
    assert not any("forward" in module.__dict__ for module in model.modules())
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, sent


@pytest.mark.parametrize("transport", ["sockets", "simulated"])
@pytest.mark.parametrize(
    ("model_name", "loop"),
    [
        ("perceptron", "plainly"), ("wide", "accumulating"), ("wide", "penalties"), ("recurrent", "plainly"),
        ("tied weights", "plainly"), ("checkpointed", "plainly"), ("attention", "plainly"), ("wide", "plainly"),
    ],
)  # fmt: skip
def test_servers_learn_the_same_from_factors(model_name: str, loop: str, transport: str) -> None:
    whole = run_ok(served, ParameterServer(BSP(), bucket_bytes=700), model_name, loop, size=3, transport=transport)
    factors = run_ok(
        served, Poseidon(consistency=BSP(), bucket_bytes=700), model_name, loop, size=3, transport=transport
    )
    for (state, _), (other, _) in zip(factors, whole, strict=True):
        for name, value in state.items():
            torch.testing.assert_close(value, other[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 2])
def test_servers_get_other_uses_of_a_weight_and_empty_batches(rows: int) -> None:
    def train(world: World, strategy: Strategy) -> list[Tensor]:
        model = seeded(lambda: nn.Sequential(nn.Linear(40, 60, bias=False), nn.Tanh(), nn.Linear(60, 30, bias=False)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with distribute(model, optimizer, strategy, world=world) as job:
            for step in range(STEPS):
                x = batch(world, step, 40)[:rows] if world.rank else batch(world, step, 40)
                job.contributed(1 + world.rank)
                loss = model(x).square().sum() / 2  # Parameters come with it: the penalty is on those.
                penalty = sum(p.square().sum() for p in model.parameters()) if step % 2 else 0.0
                (loss + 0.5 * penalty).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    whole = run_ok(train, ParameterServer(BSP(), bucket_bytes=1), size=2, transport="sockets")
    for found in run_ok(train, Poseidon(consistency=BSP(), bucket_bytes=1), size=2, transport="sockets"):
        torch.testing.assert_close(found, whole[0], rtol=1e-10, atol=1e-12)


def test_servers_are_sent_less() -> None:
    """K (M + N) numbers up instead of M N; down it is M N all the same."""
    sent = {
        strategy: max(sent for _, sent in run_ok(served, strategy, "wide", "plainly", size=3, transport="simulated"))
        for strategy in (ParameterServer(BSP()), Poseidon(consistency=BSP()))
    }
    plain, factored = sent.values()
    assert factored < 0.65 * plain


def test_what_the_next_forward_pass_needs_first_comes_first() -> None:
    """Factors are soon at the server, parameters are long on their way back: the lowest layer's are not the last."""
    width, layers, link = 256, 4, Link("10mbit", "50us")
    began: dict[int, float] = {}

    def train() -> None:
        world = tutti.init()
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        strategy = parse(f"ps:bsp,servers=1,factors=1,bucket_bytes={4 * width * (width + 1)}")
        with distribute(model, optimizer, strategy, world=world) as job:
            for step in range(4):
                if world.rank == 1 and step == 3:
                    for number, module in enumerate(model):
                        # Called after the hook in which the module waits for what it holds.
                        module.register_forward_pre_hook(lambda *_, n=number: began.update({n: world.transport.now()}))
                model(torch.ones(2, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            job.finish()

    simulate(train, workers=3, cluster=Cluster(link=link))
    layer_s = 8 * 4 * width * width / link.bits_per_s
    assert [began[number] for number in range(layers)] == sorted(began.values())
    assert began[layers - 1] - began[0] > 1.5 * layer_s


@pytest.mark.parametrize("text", ["poseidon:ssp=2", "poseidon:async", "ps:ssp=1,servers=1,factors=1"])
def test_stale_servers_from_factors(text: str) -> None:
    """Training continues whatever the order, and all ranks end with the same parameters."""
    found = run_threads(served, parse(text), "wide", "plainly", size=4, transport="sockets")
    states = [each[0] for each in found if each is not None]
    assert len(states) >= 3
    for state in states:
        for name, value in state.items():
            assert value.isfinite().all()
            assert torch.equal(value, states[0][name])


def test_what_no_factors_can_be_is_refused() -> None:
    """A server drops a worker whose factors have rows outside the weight."""
    with pytest.raises(ConfigError, match="factors are exact and take no codec"):
        parse("ps:bsp,factors=1+onebit")
    with pytest.raises(ConfigError, match="they need overlap=True"):
        ParameterServer(factors=True, overlap=False)
    shard = ParameterShard(0, 0, slice(0, 12), (ShardSegment(0, 0, 12, 0, True),), None, True, 8)
    pair = torch.ones(1, 3, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)
    packed = pack(shard, torch.ones(12, dtype=torch.float64), [(3, 4)], [pair])
    assert packed is not None
    found = torch.empty(12, dtype=torch.float64)
    unpack(packed, shard, [(3, 4)], found)
    assert torch.equal(found, torch.ones(12, dtype=torch.float64))
    many = packed.clone()
    many[:8] = torch.tensor([7]).view(torch.uint8)
    for wrong in (packed[:-8], torch.cat([packed, packed]), many, packed[:4]):
        with pytest.raises(PacketError, match=r"factors"):
            unpack(wrong, shard, [(3, 4)], found)


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (3, 9), (5, 6), (4, 12)])
def test_parts_of_a_matrix_that_are_no_rows(start: int, stop: int) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = (torch.randn(1, size, generator=generator) for size in (3, 4))
    whole = (outputs.t() @ inputs).view(-1)
    segments = (ShardSegment(0, start, stop, 2, False), ShardSegment(1, 0, 15, 15, True))
    shard = ParameterShard(0, 0, slice(0, 30), segments, None, True, 4)
    values = torch.zeros(30)
    values[2 : 2 + stop - start] = whole[start:stop]
    values[15:] = torch.arange(15.0)
    packed = pack(shard, values, [(3, 4), (1, 15)], [(outputs, inputs), None])
    assert packed is not None
    found = torch.empty(30)
    unpack(packed, shard, [(3, 4), (1, 15)], found)
    torch.testing.assert_close(found, values)
