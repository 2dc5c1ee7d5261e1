"""Models split over a mesh compute the same as one process, and unsupported ones are refused."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from support import run_ok, run_threads
from tutti.cluster import Cluster, Link
from tutti.codecs import Cast, ErrorFeedback, TopK
from tutti.errors import ConfigError, RankLost
from tutti.job import distribute, sync_batchnorm
from tutti.launch import init
from tutti.parallel import Mesh, Pipeline
from tutti.parallel.pipeline import stage_links
from tutti.parallel.pipeline.settings import SCHEDULES
from tutti.plan.auto import Auto
from tutti.recipes.models import CharGPT, CifarQuick, mlp
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import AllReduce, Async, Averaging, Gossip, ParameterServer, Poseidon, Strategy
from tutti.strategies.compressed_state import owed
from tutti.world import World, current_world, set_world

STEPS, BATCH = 20, 16

PIPED = Mesh(pipe=2)

Problem = tuple[nn.Module, Tensor, Tensor]


class Normed(nn.Module):
    """Convolutions with batch normalisation between them, and a parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=False), nn.Flatten()
        )
        self.output = nn.Linear(4 * 16, 5)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.output(self.features(images)) * self.scale
        return scores


class Tied(nn.Module):
    """One table for input and output words, and attention in three layers with a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.words = nn.Embedding(21, 16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8, dtype=torch.bool)))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.words(torch.arange(8))
        query, key, value = (
            each(hidden).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-1, -2)).masked_fill(~self.mask, float("-inf")).softmax(-1)
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        return F.linear(hidden + self.out(mixed), self.words.weight)


class Mixed(nn.Module):
    """Reshapes the outputs of a layer in a way that shards do not allow."""

    def __init__(self, in_place: bool = False, width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x).unflatten(-1, (3, -1)).sum(1)
        if self.in_place:
            output = self.layer(x)
            output[:, 2:5].zero_()
        return output


def _problem(make: Callable[[], nn.Module], shape: tuple[int, ...], words: bool = False) -> Problem:
    torch.manual_seed(0)
    model = make().double()
    x = torch.randint(0, 21, shape) if words else torch.randn(*shape, dtype=torch.float64)
    return model, x, torch.randn_like(model(x))


def _perceptron() -> Problem:
    return _problem(lambda: mlp(8, 17, 6, 6, 5), (BATCH, 8))


def _transformer() -> Problem:
    return _problem(lambda: CharGPT(21, context=8, width=16, num_heads=4, num_blocks=1), (8, 8), words=True)


def _alone(problem: Problem, steps: int, clip: float | None = None) -> list[Tensor]:
    model, x, y = copy.deepcopy(problem)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _on_mesh(
    world: World, problem: Problem, mesh: Mesh, strategy: Strategy, steps: int, clip: float | None = None
) -> tuple[list[Tensor], list[Tensor], float]:
    """Train, and return the parameters in `consensus`, those after `finish`, and the last loss."""
    model, x, y = copy.deepcopy(problem)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    job = distribute(model, optimizer, strategy, world=world, mesh=mesh, example=x[: len(x) // mesh.data])
    mine = [each.chunk(job.world.size)[job.world.rank] for each in (x, y)]
    pipeline = job.pipeline(F.mse_loss) if mesh.pipe > 1 else None
    for _ in range(steps):
        optimizer.zero_grad()
        if pipeline is not None:
            loss = pipeline(*mine)
        else:
            loss = F.mse_loss(model(mine[0]), mine[1])
            loss.backward()
        if clip is not None:
            job.clip_grad_norm(clip)
        optimizer.step()
    with job.consensus() as agreed:
        middle = [parameter.detach().clone() for parameter in agreed.parameters()]
        agreed(x)
    job.finish()
    model(x)
    return middle, [parameter.detach() for parameter in model.parameters()], loss.item()


def _assert_as_alone(
    problem: Problem, mesh: Mesh, strategy: Strategy | None = None, transport: str = "sockets", steps: int = STEPS
) -> None:
    wanted = _alone(problem, steps)
    everyone = run_ok(_on_mesh, problem, mesh, strategy or AllReduce(), steps, size=mesh.size, transport=transport)
    for middle, last, _ in everyone:
        for one, other, want in zip(middle, last, wanted, strict=True):
            torch.testing.assert_close(one, want, rtol=0, atol=1e-10)
            torch.testing.assert_close(other, want, rtol=0, atol=1e-10)


MESHES = [
    Mesh(data=2), Mesh(tensor=2), Mesh(tensor=3), PIPED, Mesh(pipe=3, pipeline=Pipeline(microbatches=4)),
    Mesh(data=2, tensor=2), Mesh(data=2, pipe=2), Mesh(tensor=2, pipe=2), Mesh(data=2, tensor=2, pipe=2),
]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.shape.values())))
def test_every_mesh_trains_as_one_process(mesh: Mesh) -> None:
    _assert_as_alone(_perceptron(), mesh, steps=8 if mesh.size <= 4 else 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_one_process(schedule: Any) -> None:
    _assert_as_alone(_perceptron(), Mesh(pipe=2, pipeline=Pipeline(schedule=schedule)))


@pytest.mark.parametrize("transport", ["sockets", "simulated"])
def test_large_messages_move_while_ranks_compute(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_links, "EAGER_BYTES", 0)
    _assert_as_alone(_perceptron(), PIPED, transport=transport, steps=5)


@pytest.mark.parametrize("mesh", [Mesh(tensor=2), PIPED], ids=["tensor", "pipe"])
@pytest.mark.parametrize("transport", ["shared_memory", "simulated"])
def test_every_transport(transport: str, mesh: Mesh) -> None:
    _assert_as_alone(_perceptron(), mesh, transport=transport, steps=5)


MODELS: dict[str, Callable[[], Problem]] = {
    "transformer": _transformer,
    "convolutions": lambda: _problem(CifarQuick, (2, 3, 32, 32)),
    "batch norm": lambda: _problem(Normed, (4, 3, 8, 8)),
    "operator that needs a gather": lambda: _problem(Mixed, (4, 8)),
    "tied words": lambda: _problem(Tied, (4, 8), words=True),
    "torch's attention": lambda: _problem(
        lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), (4, 8, 16)
    ),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_layers_of_every_kind_are_sharded(make: Callable[[], Problem], caplog: pytest.LogCaptureFixture) -> None:
    _assert_as_alone(make(), Mesh(tensor=2), steps=5)
    if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13):  # Earlier ones gather more.
        assert ("gathers the inputs of" in caplog.text) == (make is MODELS["operator that needs a gather"])


def test_a_traced_model_in_stages_with_shards() -> None:
    _assert_as_alone(_transformer(), Mesh(tensor=2, pipe=2), steps=3)


@pytest.mark.parametrize(
    "strategy", [AllReduce("ring", bucket_bytes=100), Averaging(every=1), Poseidon(), ParameterServer()], ids=str
)
@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(data=2, pipe=2)], ids=["tensor", "pipe"])
def test_any_strategy_along_data(strategy: Strategy, mesh: Mesh) -> None:
    """With SGD, averaging parameters after every step gives the same as averaging gradients."""
    _assert_as_alone(_perceptron(), mesh, strategy, steps=5)


@pytest.mark.parametrize("strategy", [AllReduce(codec=Cast("fp16"), exact_below=0), Gossip()], ids=str)
def test_inexact_strategies_keep_replicas_equal(strategy: Strategy) -> None:
    everyone = run_ok(_on_mesh, _perceptron(), Mesh(data=2, tensor=2), strategy, 5, size=4, transport="sockets")
    wanted = _alone(_perceptron(), 5)
    for _, last, _ in everyone:
        for mine, first, want in zip(last, everyone[0][1], wanted, strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, want, rtol=0, atol=0.05)


@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(tensor=2, pipe=2)], ids=["data", "pipe"])
def test_clipping_sees_all_gradients(mesh: Mesh) -> None:
    wanted = _alone(_perceptron(), 5, clip=0.1)
    everyone = run_ok(_on_mesh, _perceptron(), mesh, AllReduce(), 5, 0.1, size=4, transport="sockets")
    for got, want in zip(everyone[0][1], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-7)  # torch adds 1e-6 in another place.


def test_optimiser_state_is_sharded_and_gathered_again() -> None:
    """Train alone, then on a mesh, then alone again, with one optimiser."""
    problem = _perceptron()

    def train(world: World) -> list[Tensor]:
        model, x, y = copy.deepcopy(problem)
        optimizer = AdamW(model.parameters(), lr=0.01)

        def steps(number: int) -> None:
            for _ in range(number):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        steps(3)
        if world.size > 1:
            job = distribute(model, optimizer, world=world, mesh=Mesh(tensor=world.size))
            assert model[0].weight.shape == ((9 if world.rank == 0 else 8), 8)
            assert optimizer.state[model[0].weight]["exp_avg"].shape == model[0].weight.shape
        steps(3)
        if world.size > 1:
            job.finish()
        steps(3)
        return [parameter.detach() for parameter in model.parameters()]

    (alone,) = run_ok(train, size=1, transport="sockets")
    for mine in run_ok(train, size=2, transport="sockets"):
        for got, want in zip(mine, alone, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (Mesh(tensor=2, pipe=2), AllReduce()),
        (Mesh(data=2, pipe=2, pipeline=Pipeline(cut=[3, 4])), AllReduce(codec=ErrorFeedback(TopK(0.3)), exact_below=0)),
        (Mesh(data=2, tensor=2), AllReduce("ring")),
    ],
    ids=["both", "compressed", "tensor"],
)
def test_a_checkpoint_saved_by_one_rank_continues_exactly(mesh: Mesh, strategy: Strategy) -> None:
    """A run that continues from it, perhaps with another cut, ends where an undisturbed run does."""
    problem = _perceptron()
    saved: dict[str, Any] = {}

    def train(world: World, steps: int, resumes: bool) -> list[Tensor]:
        model, x, y = copy.deepcopy(problem)
        optimizer = AdamW(model.parameters(), lr=0.01)
        if resumes:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        job = distribute(model, optimizer, strategy, world=world, mesh=mesh, example=x[: len(x) // mesh.data])
        if resumes:
            job.load_state_dict(saved["job"])
        x, y = (each.chunk(job.world.size)[job.world.rank] for each in (x, y))
        pipeline = job.pipeline(F.mse_loss)
        for step in range(steps):
            optimizer.zero_grad()
            if mesh.pipe > 1:
                pipeline(x, y)
            else:
                F.mse_loss(model(x), y).backward()
            optimizer.step()
            if step == 2 and not resumes:
                own = job.state_dict()
                with job.consensus():
                    if job.is_leader:
                        both = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": own}
                        saved.update(copy.deepcopy(both))
        job.finish()
        return [*model.parameters(), *(optimizer.state[parameter]["exp_avg"] for parameter in model.parameters())]

    whole = run_ok(train, 6, False, size=mesh.size, transport="sockets")
    rest = run_ok(train, 3, True, size=mesh.size, transport="sockets")
    for one, other in zip(whole, rest, strict=True):
        for got, want in zip(other, one, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_a_rank_holds_only_its_part() -> None:
    def count(world: World) -> tuple[int, int, list[int]]:
        model, x, _ = copy.deepcopy(_perceptron_of_equal_layers())
        job = distribute(
            model, SGD(model.parameters(), lr=0.1), world=world,
            mesh=Mesh(tensor=2, pipe=2, pipeline=Pipeline(cut=[3, 4])), example=x,
        )  # fmt: skip
        held = sum(parameter.numel() for parameter in model.parameters())
        with pytest.raises(ConfigError, match=r"this model is in stages on several ranks. Train with .*job.pipeline"):
            model(x)
        job.finish()
        return held, sum(parameter.numel() for parameter in model.parameters()), [job.world.rank, job.world.size]

    held, full, coordinates = zip(*run_ok(count, size=4, transport="sockets"), strict=True)
    assert set(full) == {4 * (8 * 8 + 8)}
    assert held == tuple(total // 4 + extra for total, extra in zip(full, (4, 4, 4, 4), strict=True))
    assert list(coordinates) == [[0, 1]] * 4


def _perceptron_of_equal_layers() -> Problem:
    return _problem(lambda: mlp(8, 8, 8, 8, 8), (BATCH, 8))


def test_the_bubble_in_virtual_time_follows_the_formula() -> None:
    def train(schedule: Any) -> tuple[float, float]:
        world = init()
        torch.manual_seed(0)
        model = mlp(*[32] * 33)
        x = torch.randn(64, 32)
        optimizer = SGD(model.parameters(), lr=0.1)
        settings = Pipeline(schedule=schedule, microbatches=8, cut=[16, 16, 16, 15])
        job = distribute(model, optimizer, world=world, mesh=Mesh(pipe=4, pipeline=settings), example=x)
        pipeline = job.pipeline(F.mse_loss)
        pipeline(x, x)
        timeline = pipeline.timeline()
        job.finish()
        return timeline.bubble, timeline.ideal_bubble

    cluster = Cluster(link=Link("100gbit", "10ns"))
    for schedule in ("gpipe", "1f1b"):
        (bubble, ideal), *_ = simulate(train, schedule, workers=4, cluster=cluster).results
        assert bubble == pytest.approx(ideal, rel=0.15)
    again = [simulate(train, "1f1b", workers=4, cluster=cluster) for _ in range(2)]
    assert again[0].seconds == again[1].seconds > 0


def test_the_example_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time, where eight ranks cost no processes."""
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    monkeypatch.chdir(tmp_path)
    losses = simulate(names["train"], workers=8).results
    assert len(set(losses[:2])) == 1  # Of two ranks that split the layers of one stage.
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved["4.weight"].shape == (3, 64)


def _try(world: World, mesh: Mesh, model: nn.Module, x: Tensor | None) -> None:
    model = copy.deepcopy(model)
    job = distribute(model, SGD(model.parameters(), lr=0.1), world=world, mesh=mesh, example=x)
    try:
        if mesh.pipe > 1:
            assert x is not None
            job.pipeline(F.mse_loss)(x[:6], x[:6])
        else:
            model(x)
    finally:
        job.finish()


X = torch.randn(8, 8)
SQUARE = mlp(8, 8, 8)

REFUSED: dict[str, tuple[Mesh, nn.Module, Tensor | None, str]] = {
    "product": (Mesh(data=2, tensor=2), SQUARE, X, r"data=2 x tensor=2 x pipe=1 has 4 ranks, and the world has 2"),
    "no example": (PIPED, SQUARE, None, r"a mesh with pipe above 1 needs an example"),
    "more stages than layers": (
        Mesh(pipe=2, pipeline=Pipeline(schedule="interleaved")), SQUARE, X, r"4 stages need as many layers or more"
    ),
    "a layer that is too large": (
        Mesh(pipe=2, pipeline=Pipeline(memory_bytes=100)), SQUARE, X, r"a rank may take 100 B, .* need more: '0' 640 B"
    ),
    "layers that are too large together": (
        Mesh(pipe=2, pipeline=Pipeline(memory_bytes=690)), SQUARE, X, r"do not fit into 2 stages on 2 ranks of 690 B"
    ),
    "a cut that is too large": (
        Mesh(pipe=2, pipeline=Pipeline(memory_bytes=800, cut=[2, 1])), SQUARE, X, r"this cut needs 832 B on rank 0"
    ),
    "a batch that does not divide": (PIPED, SQUARE, X[:6], r"a batch of 6 samples does not divide into 4 microbatches"),
    "a batch unlike the example": (PIPED, SQUARE, X, r"rank .: a batch of 6 samples, and this pipeline takes 8"),
    "nothing to split": (Mesh(tensor=2), nn.LayerNorm(8), X, r"none of the model's layers can be split over 2 ranks"),
    "operator that needs a gather": (
        Mesh(tensor=2), Mixed(in_place=True), X, r"the model cannot be computed on shards over 2 ranks"
    ),
    "in-place operator on unequal shards": (
        Mesh(tensor=2), nn.Sequential(Mixed(True, 9)), X, r"layer '0' \(Mixed\) cannot be computed on shards over"
    ),
    "an example that does not fit": (PIPED, SQUARE, torch.randn(8, 7), r"could not be run one after the other on the"),
}  # fmt: skip


def test_strategies_and_modules_that_need_the_whole_model_are_refused() -> None:
    def ask(world: World) -> None:
        model = sync_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), world=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer, Auto(), world=world, mesh=PIPED, example=X)

    for error in run_threads(ask, size=2, transport="sockets"):
        assert isinstance(error, ConfigError)
        assert "strategy 'auto' needs the whole model on every rank" in str(error)
        assert "sync_batchnorm normalises over all ranks" in str(error)


@pytest.mark.parametrize(("mesh", "model", "x", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_on_every_rank(mesh: Mesh, model: nn.Module, x: Tensor | None, message: str) -> None:
    for error in run_threads(_try, mesh, model, x, size=2, transport="sockets"):
        with pytest.raises(ConfigError, match=message):
            raise error


def test_one_mesh_after_another() -> None:
    problem = _perceptron()

    def train(world: World) -> list[float]:
        return [_on_mesh(world, problem, Mesh(tensor=2), AllReduce(), 1)[2] for _ in range(2)]

    for first, second in run_ok(train, size=2, transport="sockets"):
        assert first == second


def test_axes_without_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Mesh: pipe=-1, data=0; every axis needs a whole number of ranks"):
        Mesh(data=0, pipe=-1)


def test_different_meshes_are_reported() -> None:
    assert run_threads(_different_meshes, size=2, transport="sockets") == ["strategy"] * 2


def _different_meshes(world: World) -> str:
    model = mlp(8, 8, 8)
    mesh = Mesh(tensor=2, split={"0": "replicate"} if world.rank else {})
    with pytest.raises(ConfigError, match=r"the strategy differs between ranks: .* on Mesh") as error:
        distribute(model, SGD(model.parameters(), lr=0.1), world=world, mesh=mesh)
    return str(error.value).split()[1]


@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
@pytest.mark.parametrize("mesh", [Mesh(tensor=2), PIPED], ids=["tensor", "pipe"])
def test_a_lost_rank_ends_the_wait_of_the_other(mesh: Mesh, transport: str) -> None:
    problem = _perceptron()

    def train(world: World) -> None:
        model, x, y = copy.deepcopy(problem)
        with distribute(model, SGD(model.parameters(), lr=0.1), world=world, mesh=mesh, example=x) as job:
            pipeline = job.pipeline(F.mse_loss)
            pipeline(x, y)
            if world.rank == 1:
                raise KeyError("lost")
            pipeline(x, y)

    error, lost = run_threads(train, size=2, transport=transport)
    assert isinstance(lost, KeyError)
    assert isinstance(error, RankLost)


@pytest.mark.parametrize("mesh", [Mesh(tensor=2), PIPED, Mesh(tensor=2, pipe=2)], ids=["tensor", "pipe", "both"])
def test_different_batches_within_a_replica_are_refused(mesh: Mesh) -> None:
    problem = _perceptron()

    def train(world: World) -> None:
        model, x, y = copy.deepcopy(problem)
        with distribute(model, SGD(model.parameters(), lr=0.1), world=world, mesh=mesh, example=x) as job:
            x = x.flip(0) if world.rank == world.size - 1 else x
            _ = job.pipeline(F.mse_loss)(x, y) if mesh.pipe > 1 else model(x)

    for rank, error in enumerate(run_threads(train, size=mesh.size, transport="sockets")):
        assert isinstance(error, ConfigError)
        wanted = rf"rank {rank}: ranks 0 and {mesh.size - 1} split one replica of the model, and were given different"
        assert re.match(wanted, str(error))


def test_a_job_that_cannot_start_releases_the_model_and_the_world() -> None:
    class Fails(AllReduce):
        def attach(self, *_: Any) -> Any:
            raise KeyError("no")

    problem = _perceptron()

    def start(world: World) -> tuple[World, World | None]:
        model, x, _ = copy.deepcopy(problem)
        set_world(world)
        with pytest.raises(KeyError):
            distribute(model, SGD(model.parameters(), lr=0.1), Fails(), mesh=PIPED, example=x)
        assert "forward" not in vars(model)
        return world, current_world()

    for before, after in run_ok(start, size=2, transport="sockets"):
        assert after is before


def test_a_pipeline_needs_a_mesh() -> None:
    def ask(world: World) -> None:
        model = mlp(2, 2)
        with distribute(model, SGD(model.parameters(), lr=0.1), world=world) as job:
            job.pipeline(F.mse_loss)

    (error,) = run_threads(ask, size=1, transport="sockets")
    assert isinstance(error, ConfigError)
    assert "job.pipeline needs a mesh" in str(error)


class Masked(nn.Module):
    """A layer with a mask."""

    mask: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mask", (torch.arange(width) % 3 > 0).double())

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden) * self.mask
        return out


class Chained(nn.Module):
    """Not an `nn.Sequential`: its layers are found by tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Masked(8), Masked(8), Masked(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.first(x)))
        return out


def test_buffers_are_on_the_rank_of_their_stage() -> None:
    _assert_as_alone(_problem(Chained, (BATCH, 8)), PIPED, steps=3)


def test_ranks_of_several_hosts_split_layers() -> None:
    problem, mesh = _perceptron(), Mesh(tensor=4)
    cluster = Cluster(hosts=2, ranks_per_host=2)
    for _, last, _ in simulate(_simulated, problem, mesh, workers=4, cluster=cluster).results:
        for one, want in zip(last, _alone(problem, 3), strict=True):
            torch.testing.assert_close(one, want, rtol=0, atol=1e-10)


def _simulated(problem: Problem, mesh: Mesh) -> Any:
    return _on_mesh(init(), problem, mesh, AllReduce(), 3)


def _trained_with_weights(world: World, whole: nn.Sequential) -> tuple[bool, bool, Any]:
    """Train a pipeline of two replicas that state their samples; return who leads, and a parameter."""
    model = copy.deepcopy(whole)
    optimizer = SGD(model.parameters(), lr=0.1)
    x = torch.arange(12, dtype=torch.float64).view(4, 3) / 12
    job = distribute(model, optimizer, world=world, mesh=Mesh(data=2, pipe=2), example=x)
    pipeline = job.pipeline(lambda output, target: (output * target).mean())
    job.contributed(100 if job.world.rank == 0 else 20)
    pipeline(x, torch.full((4, 1), 1.0 + job.world.rank, dtype=torch.float64))
    optimizer.step()
    leads = job.is_leader
    job.finish()
    return leads, job.is_leader, model[1].weight.detach()


def test_a_pipeline_uses_stated_samples_and_one_rank_leads() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False)).double()
    everyone = run_ok(_trained_with_weights, model, size=4, transport="sockets")
    assert [leads for leads, _, _ in everyone] == [True, False, False, False]
    assert [leads for _, leads, _ in everyone] == [True, False, False, False]
    hidden = model[0](torch.arange(12, dtype=torch.float64).view(4, 3) / 12).mean(0)
    wanted = model[1].weight - 0.1 * (100 * 1.0 + 20 * 2.0) / 120 * hidden
    for _, _, found in everyone:
        torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-12)


def _refused(world: World, strategy: Strategy, model: nn.Module) -> str:
    with pytest.raises(ConfigError) as caught:
        distribute(model, SGD(model.parameters(), lr=0.1), strategy, world=world, mesh=Mesh(data=2, tensor=2))
    return str(caught.value)


def test_strategies_that_let_replicated_layers_differ_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(2048))
    compressed = AllReduce(codec=ErrorFeedback(TopK(0.01)))
    for strategy in (compressed, ParameterServer(Async())):
        for message in run_ok(_refused, strategy, model, size=4, transport="sockets"):
            assert "would let copies of replicated layers differ between ranks (2)" in message


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.item()


def test_several_jobs_in_one_thread() -> None:
    problem = _problem(lambda: mlp(8, 5, 8), (BATCH, 8))

    def train(world: World) -> list[float]:
        found = []
        for number in (1, 2):
            model, x, y = copy.deepcopy(problem)
            others = [copy.deepcopy(model) for _ in range(number)]
            jobs = [
                distribute(other, SGD(other.parameters(), lr=0.1), world=world, mesh=Mesh(tensor=2)) for other in others
            ]
            found += [_loss(other, x, y) for other in others]
            for job in jobs:
                job.finish()
        return found

    wanted = _loss(*copy.deepcopy(problem))
    for found in run_ok(train, size=2, transport="sockets"):
        assert found == pytest.approx([wanted] * 3, rel=1e-9)


class Drawing(nn.Module):
    """Draws random numbers on layers with unequal shards, and on replicated ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 5), nn.Linear(5, 8), nn.Linear(8, 7)
        self.dropout, self.norm = nn.Dropout(0.5), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.first(x)) + torch.randn_like(self.first(x))
        hidden = hidden * torch.empty_like(hidden).bernoulli_(0.7) + F.rrelu(hidden, training=True)
        hidden = hidden + F.scaled_dot_product_attention(*[hidden[None]] * 3, None, 0.3)[0]
        hidden = self.dropout(self.norm(self.dropout(self.second(hidden))))
        return F.gumbel_softmax(self.last(hidden)) + F.dropout(self.last(hidden) + 1, 0.2, True, True)


def _drawn(model: nn.Module, x: Tensor, y: Tensor, mesh: Mesh | None) -> list[float]:
    torch.manual_seed(5)
    optimizer = SGD(model.parameters(), lr=0.1)
    job = distribute(model, optimizer, world=init(), mesh=mesh) if mesh else None
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        found.append(_loss(model, x, y))
        optimizer.step()
    if job is not None:
        job.finish()
    return found


def test_random_numbers_on_shards_are_those_of_one_process() -> None:
    """In virtual time, where every rank has its own random state."""
    problem = _problem(Drawing, (4, 8))
    wanted = _drawn(*copy.deepcopy(problem), None)
    for found in simulate(lambda: _drawn(*copy.deepcopy(problem), Mesh(tensor=2)), workers=2).results:
        assert found == pytest.approx(wanted, rel=1e-9)


def _with_optimizer(world: World, mesh: Mesh, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = copy.deepcopy(SQUARE)
    distribute(model, make(model), world=world, mesh=mesh, example=X)


def _factored(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["rows"] = torch.zeros(parameter.shape[0] + 1)
    return optimizer


REFUSED_OPTIMIZERS: list[tuple[Mesh, Callable[[nn.Module], torch.optim.Optimizer], str]] = [
    (
        Mesh(tensor=2),
        lambda model: torch.optim.Adafactor(model.parameters()),
        r"Adafactor looks at .* tensor=2: use SGD",
    ),
    (
        PIPED,
        lambda model: torch.optim.LBFGS(model.parameters()),
        r"LBFGS looks at the whole model, and a rank has parts of it: use SGD",
    ),
    (Mesh(tensor=2), _factored, r"SGD keeps state 'rows' of shape \(9,\) for parameter '0.weight'"),
]


@pytest.mark.parametrize(("mesh", "make", "message"), REFUSED_OPTIMIZERS, ids=["tensor", "pipe", "other shapes"])
def test_optimisers_that_are_not_element_wise_are_refused(
    mesh: Mesh, make: Callable[[nn.Module], torch.optim.Optimizer], message: str
) -> None:
    for error in run_threads(_with_optimizer, mesh, make, size=2, transport="sockets"):
        with pytest.raises(ConfigError, match=message):
            raise error


def _set(x: Tensor) -> Tensor:
    x = x * 1
    x[:, 1:4] = 0
    return x


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(-1),
    "cummax": lambda x: x.cummax(-1).values,
    "a loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "any": lambda x: x * (x > 0.5).any(-1, keepdim=True),
    "flatten": lambda x: x.flatten(),
    "group norm": lambda x: F.group_norm(x, 1),
    "prelu": lambda x: F.prelu(x, torch.tensor(0.2, dtype=x.dtype)),
    "relu6": F.relu6,
    "quantile": lambda x: x.quantile(0.3, dim=-1),
    "convolution": lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 2, dtype=x.dtype)),
    "item": lambda x: x / x.detach().abs().sum().item(),
    "branch": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "text": lambda x: x * float(f"{x.detach().sum():.3f}"),
    "partial sum": lambda x: x.mean(-1) @ torch.ones(8, 3, dtype=x.dtype),
    "set": _set,
    "in place": lambda x: (x * 1).mul_(2).triu_(),
}


class Operator(nn.Module):
    """An operator on the unequal shards of a layer, and a layer that has only buffers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 5), nn.BatchNorm1d(5, affine=False)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return OPERATORS[self.name](self.norm(self.layer(x)) + self.layer(x))


def _with_gradients(model: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    (output * torch.arange(output.numel(), dtype=output.dtype).view(output.shape).sin()).sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, model.norm.running_mean.clone(), model.layer.weight.grad]


def test_operators_on_shards_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    models = [Operator(name).double() for name in OPERATORS]
    wanted = [_with_gradients(copy.deepcopy(model), x) for model in models]

    def compute(world: World) -> list[list[Tensor]]:
        found = []
        for model in copy.deepcopy(models):
            with distribute(model, SGD(model.parameters(), lr=0.1), world=world, mesh=Mesh(tensor=2)):
                found.append(_with_gradients(model, x))
        return found

    for rank, everything in enumerate(run_ok(compute, size=2, transport="sockets")):
        for name, found, want in zip(OPERATORS, everything, wanted, strict=True):
            for one, other in zip(found, [*want[:3], want[3].tensor_split(2)[rank]], strict=True):
                torch.testing.assert_close(
                    one, other, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.parametrize("compressed", [False, True], ids=["nothing of its own", "what a codec left out"])
def test_what_a_job_has_of_its_own_goes_where_it_fits(compressed: bool) -> None:
    """From any mesh, or none, to any other: what belongs to a parameter goes with it."""
    strategy = AllReduce(codec=ErrorFeedback(TopK(0.3)), exact_below=0) if compressed else AllReduce()
    problem = _perceptron()

    def state_of(world: World, mesh: Mesh | None, state: Any) -> Any:
        model, x, y = copy.deepcopy(problem)
        optimizer = SGD(model.parameters(), lr=0.05)
        with distribute(model, optimizer, strategy, world=world, mesh=mesh, example=x) as job:
            if state is not None:
                job.load_state_dict(state)
            if mesh is None or mesh.pipe == 1:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            return job.state_dict()

    shapes = (None, Mesh(data=2), Mesh(pipe=2, pipeline=Pipeline(cut=[3, 4])), Mesh(tensor=2))
    states = [run_ok(state_of, mesh, None, size=2, transport="sockets")[0] for mesh in shapes]
    for saved, loaded in ((0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 3), (3, 0), (3, 2)):
        for state in run_ok(state_of, shapes[loaded], states[saved], size=2, transport="sockets"):
            assert state["parameters"] == states[saved]["parameters"]
            if compressed and saved < 2 <= loaded:  # Nothing is sent along data, and all is kept for a later run.
                then, now = (owed(each["exchange"]["residuals"]) for each in (states[saved], state))
                torch.testing.assert_close(now, then, rtol=0, atol=0)
