"""What a user may rely on, whatever the strategy: one test for each promise."""

import copy
import pickle
from collections.abc import Callable
from threading import Lock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from support import TRANSPORTS, run_ok
from tutti.data.shard import shard
from tutti.job import distribute, sync_batchnorm
from tutti.strategies import AllReduce
from tutti.world import World

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)

_compiler = Lock()

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(2))


def net() -> nn.Sequential:
    """The same every time, whatever other ranks draw meanwhile."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def mine(world: World, x: Tensor = X) -> Tensor:
    return x.tensor_split(world.size)[world.rank]


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def reference(loss: Callable[[nn.Module], Tensor] = lambda m: F.cross_entropy(m(X), Y)) -> list[Tensor | None]:
    model = net()
    loss(model).backward()
    return grads(model)


def assert_all_close(by_rank: list[list[Tensor | None]], expected: list[Tensor | None]) -> None:
    for got in by_rank:
        for one, other in zip(got, expected, strict=True):
            if other is None:
                assert one is None
            else:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_gradients_are_global_when_backward_returns(transport: str) -> None:
    def train(world: World) -> list[Tensor | None]:
        model = net()
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        F.cross_entropy(model(mine(world)), mine(world, Y)).backward()
        return grads(model)

    assert_all_close(run_ok(train, size=3, transport=transport), reference())


def test_compiled_models_too(transport: str) -> None:
    def train(world: World) -> list[Tensor | None]:
        model = net()
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        compiled = torch.compile(model, backend="aot_eager")
        F.cross_entropy(compiled(mine(world)), mine(world, Y)).backward()
        return grads(model)

    assert_all_close(run_ok(train, size=2, transport=transport), reference())


def test_compiled_before_distribute(transport: str) -> None:
    def train(world: World) -> list[Tensor | None]:
        model = net()
        compiled = torch.compile(model, backend="aot_eager")
        distribute(compiled, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        F.cross_entropy(compiled(mine(world)), mine(world, Y)).backward()
        return grads(model)

    assert_all_close(run_ok(train, size=2, transport=transport), reference())


def test_accumulation_with_and_without_no_sync(transport: str) -> None:
    def train(world: World, quiet: bool) -> list[Tensor | None]:
        model = net()
        job = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        if quiet:
            with job.no_sync():
                F.cross_entropy(model(mine(world)), mine(world, Y)).backward()
        else:
            F.cross_entropy(model(mine(world)), mine(world, Y)).backward()
        F.cross_entropy(model(mine(world) * 2), mine(world, Y)).backward()
        return grads(model)

    expected = reference(lambda m: F.cross_entropy(m(X), Y) + F.cross_entropy(m(X * 2), Y))
    assert_all_close(run_ok(train, True, size=2, transport=transport), expected)
    assert_all_close(run_ok(train, False, size=2, transport=transport), expected)


def test_no_sync_exchanges_nothing(transport: str) -> None:
    def train(world: World) -> tuple[int, list[Tensor | None]]:
        model = net()
        job = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        with job.no_sync():
            F.cross_entropy(model(mine(world)), mine(world, Y)).backward()
        return job.metrics.exchanges, grads(model)

    results = run_ok(train, size=2, transport=transport)
    assert [exchanges for exchanges, _ in results] == [0, 0]
    assert not torch.equal(results[0][1][0], results[1][1][0])


def test_a_parameter_no_rank_used_keeps_its_gradient(transport: str) -> None:
    """None stays None, and what an earlier pass left there stays, to the bit."""

    def train(world: World) -> tuple[bool, Tensor, Tensor]:
        model = nn.ModuleDict({"used": nn.Linear(6, 3), "idle": nn.Linear(6, 3)}).double()
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        model["used"](mine(world)).square().mean().backward()
        untouched = model["idle"].weight.grad is None
        model["idle"](mine(world)).square().mean().backward()
        left = model["idle"].weight.grad.clone()
        model["used"](mine(world)).square().mean().backward()
        return untouched, left, model["idle"].weight.grad.clone()

    for untouched, left, after in run_ok(train, size=3, transport=transport):
        assert untouched
        assert torch.equal(left, after)


def test_a_parameter_one_rank_used_has_a_gradient_on_all(transport: str) -> None:
    def train(world: World) -> list[Tensor | None]:
        model = net()
        extra = nn.Linear(6, 3).double()
        with torch.no_grad():
            extra.weight.fill_(0.1)
            extra.bias.fill_(0.2)
        whole = nn.ModuleList([model, extra])
        job = distribute(whole, torch.optim.SGD(whole.parameters(), lr=0.1), world=world)
        job.contributed(4)
        out = model(mine(world)) + (extra(mine(world)) if world.rank == 1 else 0)
        out.square().mean().backward()
        return grads(extra)

    results = run_ok(train, size=3, transport=transport)
    assert all(grad is not None and grad.abs().sum() > 0 for grad in results[0])
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


def test_several_dtypes_and_memory_orders(transport: str) -> None:
    def train(world: World) -> list[Tensor | None]:
        model = nn.ModuleList([nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last), nn.Linear(3, 2)])
        model.append(nn.Linear(3, 2).bfloat16())
        model.append(nn.Module())
        model[3].phase = nn.Parameter(torch.ones(2, dtype=torch.complex128))
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        x = torch.full((2, 2, 5, 5), 1.0 + world.rank, dtype=torch.float64)
        hidden = model[0](x).mean((2, 3))
        loss = model[1](hidden.float()).mean() + model[2](hidden.bfloat16()).float().mean()
        (loss + (model[3].phase * (1 + world.rank)).abs().sum()).backward()
        assert model[0].weight.grad.stride() == model[0].weight.stride()
        return grads(model)

    first, second = run_ok(train, size=2, transport=transport)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[-1].dtype == torch.complex128
    assert torch.allclose(first[-1], torch.full((2,), 1.5, dtype=torch.complex128))


def test_two_models_in_one_process(transport: str) -> None:
    def train(world: World) -> list[list[Tensor | None]]:
        first, second = net(), net()
        distribute(first, torch.optim.SGD(first.parameters(), lr=0.1), world=world)
        distribute(second, torch.optim.SGD(second.parameters(), lr=0.1), world=world)
        (
            F.cross_entropy(first(mine(world)), mine(world, Y)) + F.cross_entropy(second(mine(world)), mine(world, Y))
        ).backward()
        F.cross_entropy(second(mine(world)), mine(world, Y)).backward()
        return [grads(first), [grad / 2 for grad in grads(second)]]

    results = run_ok(train, size=2, transport=transport)
    assert_all_close([result[0] for result in results], reference())
    assert_all_close([result[1] for result in results], reference())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(transport: str, reentrant: bool) -> None:
    def train(world: World) -> list[Tensor | None]:
        model = net()
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        x = mine(world).clone().requires_grad_()
        hidden = checkpoint(model[:2], x, use_reentrant=reentrant)
        F.cross_entropy(checkpoint(model[2], hidden, use_reentrant=reentrant), mine(world, Y)).backward()
        return grads(model)

    assert_all_close(run_ok(train, size=2, transport=transport), reference())


def test_weights_from_the_first_dimension(transport: str) -> None:
    def train(world: World) -> list[Tensor | None]:
        model = net()
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        cut = [9, 11]  # 9, 2 and 1 samples.
        F.cross_entropy(model(X.tensor_split(cut)[world.rank]), Y.tensor_split(cut)[world.rank]).backward()
        return grads(model)

    assert_all_close(run_ok(train, size=3, transport=transport), reference())


def test_weights_the_user_gives(transport: str) -> None:
    """Time first, so that rows are not samples; and a rank with nothing, whose NaN must not count."""

    def train(world: World) -> list[Tensor | None]:
        model = net()
        job = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        cut = [10, 12]
        x, y = X.tensor_split(cut)[world.rank], Y.tensor_split(cut)[world.rank]
        job.contributed(len(y))
        F.cross_entropy(model(x[None]).squeeze(0), y).backward()  # NaN on rank 2, which has no sample.
        return grads(model)

    assert_all_close(run_ok(train, size=3, transport=transport), reference())


def test_equal_weights_give_the_plain_mean_to_the_bit(transport: str) -> None:
    def train(world: World) -> tuple[list[Tensor | None], list[Tensor | None]]:
        model = net().float()
        local = copy.deepcopy(model)
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        x, y = mine(world).float(), mine(world, Y)
        F.cross_entropy(local(x), y).backward()
        F.cross_entropy(model(x), y).backward()
        return grads(local), grads(model)

    results = run_ok(train, size=2, transport=transport)  # Two addends have only one order.
    for number, together in enumerate(results[0][1]):
        assert torch.equal(together, (results[0][0][number] + results[1][0][number]) / 2)


def test_state_starts_as_rank_0s(transport: str) -> None:
    def train(world: World) -> tuple[Tensor, Tensor, Tensor, float]:
        model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
        with torch.no_grad():
            model[0].weight.fill_(world.rank + 1)
            model[1].running_mean.fill_(world.rank + 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (world.rank + 1), betas=(0.8, 0.9))
        if world.rank == 0:
            model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        distribute(model, optimizer, world=world)
        moment = optimizer.state[model[0].weight]["exp_avg"]
        return model[0].weight.detach(), model[1].running_mean.clone(), moment, optimizer.param_groups[0]["lr"]

    first, *others = run_ok(train, size=3, transport=transport)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[:3], other[:3], strict=True))
        assert other[3] == first[3] == 0.1
    assert first[2].abs().sum() > 0


def test_running_statistics_are_the_mean_over_ranks(transport: str) -> None:
    def train(world: World) -> tuple[Tensor, Tensor, Tensor]:
        model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        with torch.no_grad():
            own = 0.1 * model[0](mine(world)).mean(0)
        model(mine(world)).square().mean().backward()
        return own, model[1].running_mean.clone(), model[1].running_var.clone()

    results = run_ok(train, size=2, transport=transport)
    expected = (results[0][0] + results[1][0]) / 2
    for _, running_mean, running_var in results:
        torch.testing.assert_close(running_mean, expected)
        assert torch.equal(running_var, results[0][2])


@pytest.mark.parametrize("cut", [[6], [9]], ids=["even", "uneven"])
def test_sync_batchnorm_is_batchnorm_over_the_whole_batch(transport: str, cut: list[int]) -> None:
    def model_of() -> nn.Sequential:
        linear = net()[0]
        return nn.Sequential(linear, nn.BatchNorm1d(10), nn.Tanh(), net()[2]).double()

    def steps(model: nn.Module, x: Tensor, y: Tensor, distributed: Callable[..., object]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        distributed(model, optimizer)
        for _ in range(5):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        buffers = [buffer.double() for buffer in model.buffers()]
        return [p.detach() for p in model.parameters()] + buffers + [model(X).detach()]

    def train(world: World) -> list[Tensor]:
        model = sync_batchnorm(model_of(), world=world)
        x, y = X.tensor_split(cut)[world.rank], Y.tensor_split(cut)[world.rank]
        return steps(model, x, y, lambda m, o: distribute(m, o, world=world))

    expected = steps(model_of(), X, Y, lambda m, o: None)
    for result in run_ok(train, size=2, transport=transport):
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_buckets_follow_the_order_of_backward(transport: str) -> None:
    """Layers are used in another order than they were made; after one pass the buckets know."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False).double() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = torch.tanh(layer(x))
            return x

    def train(world: World) -> list[str]:
        model = Backwards()
        job = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(bucket_bytes=1), world=world)
        for _ in range(3):
            model(mine(world)).square().mean().backward()
        return [bucket.slots[0].name for bucket in job._replica.buckets]

    for order in run_ok(train, size=2, transport=transport):
        assert order == [f"layers.{number}.weight" for number in range(4)]


def test_mixed_precision_with_a_scaler(transport: str) -> None:
    """An overflow on one rank is seen by all, so all skip the same step."""

    def train(world: World) -> tuple[Tensor, float]:
        model = net().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            x = mine(world).float()
            if step == 1 and world.rank == 0:
                x = x * float("inf")
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), mine(world, Y))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), scaler.get_scale()

    first, second = run_ok(train, size=2, transport=transport)
    assert torch.equal(first[0], second[0])
    assert torch.isfinite(first[0]).all()
    assert first[1] == second[1] == 4.0


def test_finish_lets_the_model_go(transport: str) -> None:
    def train(world: World) -> tuple[bool, int]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with distribute(model, optimizer, world=world) as job:
            F.cross_entropy(model(mine(world)), mine(world, Y)).backward()
            optimizer.step()
        kept = model[0].weight.grad.clone()
        job.finish()
        again = distribute(model, optimizer, world=world)
        again.finish()
        F.cross_entropy(model(mine(world)), mine(world, Y)).backward()  # Nobody listens any more.
        return torch.equal(kept, model[0].weight.grad), job.metrics.exchanges

    for same, exchanges in run_ok(train, size=2, transport=transport):
        assert not same
        assert exchanges == 1


def test_state_dict_round_trip(transport: str) -> None:
    def train(world: World) -> tuple[int, int]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with distribute(model, optimizer, world=world) as job:
            F.cross_entropy(model(mine(world)), mine(world, Y)).backward()
            optimizer.step()
            saved = job.state_dict()
        with distribute(model, optimizer, world=world) as job:
            job.load_state_dict(saved)
            return saved["steps"], job.metrics.steps

    assert run_ok(train, size=2, transport=transport) == [(1, 1)] * 2


def test_copies_of_the_model_are_plain_models(transport: str) -> None:
    """A weight average keeps a copy, a checkpoint may hold the whole model: neither is distributed."""

    def train(world: World) -> list[bool]:
        model = sync_batchnorm(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double(), world=world)
        plain = net()
        optimizer = torch.optim.SGD([*model.parameters(), *plain.parameters()], lr=0.1)
        jobs = [distribute(model, optimizer, world=world), distribute(plain, optimizer, world=world)]
        copies = [copy.deepcopy(model), copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))]
        F.cross_entropy(plain(mine(world)), mine(world, Y)).backward()
        if world.rank == 0:
            for copied in copies[1:]:
                F.cross_entropy(copied(X), Y).backward()  # On one rank alone: it must wait for nobody.
        for job in jobs:
            job.finish()
        again = distribute(copies[1], torch.optim.SGD(copies[1].parameters(), lr=0.1), world=world)
        again.finish()
        return [
            torch.equal(a, b) for a, b in zip(plain.state_dict().values(), copies[2].state_dict().values(), strict=True)
        ]

    for same in run_ok(train, size=2, transport=transport):
        assert all(same)


def test_a_gradient_that_was_thrown_away_is_not_missed(transport: str) -> None:
    """A pass that was kept to the rank and then zeroed leaves no trace: all ranks step alike."""

    def train(world: World) -> list[Tensor]:
        model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = distribute(model, optimizer, world=world)
        with job.no_sync():
            (model[0](mine(world)) + model[1](mine(world))).square().mean().backward()
        optimizer.zero_grad()
        out = model[0](mine(world)) + (model[1](mine(world)) if world.rank == 1 else 0)
        out.square().mean().backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_ok(train, size=2, transport=transport)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # Of the reference cycle it makes.
def test_a_graph_of_the_gradient(transport: str) -> None:
    def train(world: World) -> list[Tensor | None]:
        model = net()
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        F.cross_entropy(model(mine(world)), mine(world, Y)).backward(create_graph=True)
        found = [grad.detach() for grad in grads(model)]
        model.zero_grad()
        return found

    assert_all_close(run_ok(train, size=2, transport=transport), reference())


def test_moments_keep_their_dtype_everywhere(transport: str) -> None:
    def train(world: World) -> Tensor:
        model = nn.Linear(2, 2).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters())
        if world.rank == 0:
            model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.state[model.weight]["exp_avg"] = torch.full((2, 2), 0.1234567)
        distribute(model, optimizer, world=world)
        return optimizer.state[model.weight]["exp_avg"]

    first, second = run_ok(train, size=2, transport=transport)
    assert first.dtype == second.dtype
    assert torch.equal(first, second)


def test_compiled_models_are_not_compiled_again_for_every_batch(transport: str) -> None:
    def train(world: World) -> int:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compilations = []

        def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
            compilations.append(graph)
            return graph.forward

        distribute(model, optimizer, world=world)
        with _compiler:  # torch compiles in one thread at a time.
            compiled = torch.compile(model, backend=count, fullgraph=True)
            loader = DataLoader(TensorDataset(X, Y), batch_size=2)
            for x, _ in shard(loader, world=world):
                compiled(x)  # Only forward: what is counted there must not change the graph.
        return len(compilations)

    assert run_ok(train, size=2, transport=transport) == [1, 1]
