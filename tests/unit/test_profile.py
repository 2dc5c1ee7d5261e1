"""`tutti.profile`: what it says of layers and gradients, and that it leaves everything as it was."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import tutti
from support import run_ok
from tutti.errors import ConfigError
from tutti.plan import LayerProfile, Profile
from tutti.plan.profile import layer_timer
from tutti.plan.profile.clock import WallClock


class Time:
    """Passes only when something is said to take it."""

    now_s = 0.0

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    made = Time()
    monkeypatch.setattr(WallClock, "now", lambda _: made.now_s)
    return made


class Spend(torch.autograd.Function):
    """x times w, which takes so many seconds forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, time: Time, seconds: tuple[float, float]) -> Tensor:
        time.spend(seconds[0])
        ctx.save_for_backward(x, w)
        ctx.time, ctx.seconds = time, seconds[1]
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.time.spend(ctx.seconds)
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(), None, None


class Takes(nn.Module):
    """A layer with one parameter that takes so long forward, and ten times as long backward."""

    def __init__(self, time: Time, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.time, self.seconds = time, seconds

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Spend.apply(x, self.weight, self.time, (self.seconds, 10 * self.seconds))
        return result


def by_name(found: Profile) -> dict[str, LayerProfile]:
    return {layer.name: layer for layer in found.layers}


def times(found: Profile) -> dict[str, tuple[float, float]]:
    return {layer.name: pytest.approx((layer.forward_s, layer.backward_s)) for layer in found.layers}


# --- time ---


def test_layers_share_the_time_of_a_pass(time: Time) -> None:
    model = nn.Sequential(Takes(time, 1), nn.ReLU(), Takes(time, 2), Takes(time, 3))
    found = tutti.profile(model, torch.ones(4, 2))
    assert times(found) == {"0": (1, 10), "1": (0, 0), "2": (2, 20), "3": (3, 30)}
    assert (found.forward_s, found.backward_s, found.step_s) == pytest.approx((6, 60, 0))
    assert found.seconds == pytest.approx(66)


def test_the_last_layers_gradients_are_ready_first(time: Time) -> None:
    found = tutti.profile(nn.Sequential(Takes(time, 1), Takes(time, 2), Takes(time, 3)), torch.ones(4, 2))
    assert [(each.name, each.ready_s) for each in found.gradients] == [
        ("2.weight", pytest.approx(30)),
        ("1.weight", pytest.approx(50)),
        ("0.weight", pytest.approx(60)),
    ]
    assert [layer.ready_s for layer in found.layers] == pytest.approx([60, 50, 30])


def test_functions_between_layers_are_no_layers_time(time: Time) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Takes(time, 1), Takes(time, 2)

        def forward(self, x: Tensor) -> Tensor:
            between = Spend.apply(self.one(x), torch.ones(()), time, (5, 7))
            result: Tensor = self.two(between)
            return result

    def loss(output: Tensor, target: Tensor) -> Tensor:
        result: Tensor = Spend.apply(output, torch.ones(()), time, (3, 4)).sum()
        return result

    found = tutti.profile(Net(), (torch.ones(4, 2), torch.ones(4)), loss=loss)
    assert times(found) == {"one": (1, 10), "two": (2, 20)}
    assert (found.forward_s, found.backward_s) == pytest.approx((1 + 5 + 2 + 3, 4 + 20 + 7 + 10))
    assert by_name(found)["two"].ready_s == pytest.approx(24), "after the loss, and its own"
    assert by_name(found)["one"].ready_s == pytest.approx(41)


def test_hooks_cost_nothing(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = layer_timer.tree_leaves

    def slow(value: Any) -> list[Any]:
        time.spend(100)
        return honest(value)

    monkeypatch.setattr(layer_timer, "tree_leaves", slow)
    found = tutti.profile(nn.Sequential(Takes(time, 1), Takes(time, 2)), torch.ones(4, 2))
    assert times(found) == {"0": (1, 10), "1": (2, 20)}
    assert [each.ready_s for each in found.gradients] == pytest.approx([20, 30])


def test_a_layer_used_several_times(time: Time) -> None:
    layer = Takes(time, 1)
    found = tutti.profile(nn.Sequential(layer, Takes(time, 2), layer), torch.ones(4, 2))
    assert times(found) == {"0": (2, 20), "1": (2, 20)}
    assert by_name(found)["0"].ready_s == pytest.approx(40), "not before its last use has gone back"
    assert [each.name for each in found.gradients] == ["1.weight", "0.weight"]


def test_parameters_around_layers(time: Time) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Takes(time, 1)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Spend.apply(self.inner(x), self.scale, time, (5, 7))
            return result

    found = tutti.profile(Net(), torch.ones(4, 2))
    assert times(found) == {"": (5, 7), "inner": (1, 10)}, "the model's own time is what is left"
    assert by_name(found)[""].ready_s == pytest.approx(7)


def test_branches_go_back_in_the_opposite_order(time: Time) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.stem = Takes(time, 1), Takes(time, 2), Takes(time, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            result: Tensor = self.left(x) + self.right(x) + x
            return result

    found = tutti.profile(Net(), torch.ones(4, 2))
    assert [layer.name for layer in found.layers] == ["stem", "left", "right"], "in the order of forward"
    assert times(found) == {"stem": (4, 40), "left": (1, 10), "right": (2, 20)}
    assert [each.name for each in found.gradients] == ["right.weight", "left.weight", "stem.weight"]


def test_what_is_computed_again_in_backward_is_backward(time: Time) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Takes(time, 1), Takes(time, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.two(checkpoint(self.one, x, use_reentrant=False))
            return result

    found = tutti.profile(Net(), torch.ones(4, 2, requires_grad=True))
    assert times(found) == {"one": (1, 11), "two": (2, 20)}


def test_the_optimisers_step(time: Time) -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            time.spend(5)
            return super().step(closure)

    model = Takes(time, 1)
    assert tutti.profile(model, torch.ones(4, 2), optimizer=Slow(model.parameters())).step_s == pytest.approx(5)


def test_medians_over_repeats(time: Time) -> None:
    class Uneven(Takes):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seconds = 100 if self.calls in (4, 5) else 1
            return super().forward(x)

    assert tutti.profile(Uneven(time, 1), torch.ones(4, 2), repeats=9).forward_s == pytest.approx(1)


# --- sizes ---


def test_sizes_of_a_perceptron() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    found = tutti.profile(model, (torch.randn(8, 20), torch.randint(5, (8,))), loss=F.cross_entropy)
    first, relu, last = found.layers
    assert (first.kind, relu.kind, last.kind) == ("Linear", "ReLU", "Linear")
    assert (first.gradient_bytes, relu.gradient_bytes, last.gradient_bytes) == (4 * 630, 0, 4 * 155)
    assert relu.ready_s is None
    assert (first.activation_bytes, relu.activation_bytes, last.activation_bytes) == (960, 960, 160)
    assert (first.rows, relu.rows, last.rows) == (8, None, 8)
    assert first.work == 2 * 8 * 20 * 30, "nobody needs the gradient by the batch"
    assert last.work == 3 * 8 * 30 * 5
    assert found.num_samples == 8
    assert {each.name: each.shape for each in found.gradients} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert found.gradient_bytes == sum(each.num_bytes for each in found.gradients) == 4 * 785
    ready = [each.ready_s for each in found.gradients]
    assert ready == sorted(ready)
    assert 0 <= ready[0] <= ready[-1] <= found.backward_s
    assert {each.name for each in found.gradients[:2]} == {"2.weight", "2.bias"}


def test_work_and_depth_of_the_whole() -> None:
    found = tutti.profile(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)), torch.randn(8, 20))
    assert found.work == sum(layer.work for layer in found.layers) == 9600 + 480 + 3600
    assert found.depth == sum(layer.depth for layer in found.layers)
    assert found.parallelism == pytest.approx(found.work / found.depth)
    assert found.bounds(4) == pytest.approx((found.work / 4, found.work / 4 + found.depth))
    assert found.layers[1].parallelism == 240
    assert found.layers[1].bounds(10**6)[0] == 2


@pytest.mark.parametrize(
    ("layer", "shape", "rows"),
    [
        (nn.Linear(8, 3), (2, 5, 8), 10),
        (nn.Conv2d(8, 3, 1), (2, 8, 4, 5), 40),
        (nn.Conv1d(8, 3, 1), (2, 8, 5), 10),
        (nn.Conv2d(8, 3, 1, stride=2), (2, 8, 4, 4), None),
        (nn.Conv2d(8, 3, 1, padding=1), (2, 8, 4, 4), None),
        (nn.Conv2d(8, 3, 3), (2, 8, 4, 4), None),
        (nn.Conv2d(8, 4, 1, groups=2), (2, 8, 4, 4), None),
    ],
)
def test_rows_of_products(layer: nn.Module, shape: tuple[int, ...], rows: int | None) -> None:
    """Of layers whose factors can be caught, and of no others."""
    assert tutti.profile(layer, torch.randn(shape), repeats=1).layers[0].rows == rows


def test_rows_add_up_over_calls() -> None:
    layer = nn.Linear(8, 8)
    assert tutti.profile(nn.Sequential(layer, layer), torch.randn(3, 8), repeats=1).layers[0].rows == 6


def test_memory_grows_with_activations_and_the_optimisers_state() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    parameters = sum(p.numel() for p in model.parameters()) * 4
    peaks = [tutti.profile(model, torch.randn(n, 256), repeats=1).peak_bytes for n in (16, 1616)]
    assert peaks[0] > 2 * parameters, "with gradients"
    assert peaks[1] - peaks[0] >= 3 * 1600 * 256 * 4, "the batch, and what both products need to go back"
    adam = torch.optim.Adam(model.parameters())
    assert tutti.profile(model, torch.randn(16, 256), optimizer=adam, repeats=1).peak_bytes > 4 * parameters


def test_in_words() -> None:
    lines = str(tutti.profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4), repeats=1)).splitlines()
    assert lines[0].startswith("2 samples: forward ")
    assert "80 B of gradients" in lines[0]
    assert lines[1].startswith("  0 Linear  forward ")
    assert lines[2].startswith("  1 ReLU    forward ")
    assert len(lines) == 3


# --- models of all kinds ---


class Tied(nn.Module):
    """Embedding and output share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4)
        self.output = nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.output(self.middle(self.embedding(tokens)))
        return scores


def test_shared_weights_count_once_and_are_ready_last() -> None:
    found = tutti.profile(Tied(), torch.randint(10, (3, 5)), repeats=1)
    assert found.gradients[-1].name == "embedding.weight"
    assert found.gradient_bytes == sum(layer.gradient_bytes for layer in found.layers) == 4 * (40 + 20)
    layers = by_name(found)
    assert layers["embedding"].gradient_bytes == 160
    assert (layers["output"].gradient_bytes, layers["output"].ready_s) == (0, None)
    assert (layers["middle"].rows, layers["output"].rows) == (15, None), "a shared gradient is more than one product"


def test_unused_layers_have_no_time_and_gradients_that_are_sent_last() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.used(x)
            return result

    found = tutti.profile(Spare(), torch.randn(2, 4), repeats=1)
    assert [layer.name for layer in found.layers] == ["used"]
    assert [each.name.split(".")[0] for each in found.gradients] == ["used", "used", "spare", "spare"]
    assert {each.ready_s for each in found.gradients[2:]} == {found.backward_s}


def test_frozen_layers_have_time_and_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    found = tutti.profile(model, torch.randn(2, 4), repeats=1)
    assert (found.layers[0].gradient_bytes, found.layers[0].ready_s) == (0, None)
    assert found.layers[0].work == 2 * 4 * 4
    assert found.layers[0].forward_s > 0
    assert {each.name for each in found.gradients} == {"1.weight", "1.bias"}


def test_attention_has_the_gradients_of_the_layer_in_it() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=8, batch_first=True)
    found = tutti.profile(layer, torch.randn(2, 3, 16), repeats=1)
    attention = by_name(found)["self_attn"]
    assert attention.gradient_bytes == 4 * sum(p.numel() for p in layer.self_attn.parameters())
    assert found.gradient_bytes == sum(each.gradient_bytes for each in found.layers)


class Fancy(nn.Module):
    """Two inputs; a dict of a tuple and a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"scores": (self.one(x), self.two(x + y)), "count": 3}


def test_several_inputs_and_nested_outputs() -> None:
    inputs = torch.randn(6, 4), torch.randn(6, 4)
    for batch in (inputs, [*inputs]):
        found = tutti.profile(Fancy(), batch, repeats=1)
        assert found.num_samples == 6
        assert found.gradient_bytes == 4 * 30
    with_loss = tutti.profile(Fancy(), (*inputs, 2.0), loss=lambda out, by: out["scores"][1].sum() * by, repeats=1)
    assert [layer.name for layer in with_loss.layers] == ["one", "two"]
    assert [layer.ready_s is None for layer in with_loss.layers] == [True, False], "the loss leaves one out"


def test_a_target_without_a_loss_is_not_given_to_the_model() -> None:
    found = tutti.profile(nn.Linear(4, 2), (torch.randn(6, 4), torch.zeros(6)), repeats=1)
    assert found.layers[0].rows == 6


def test_a_layer_whose_weight_is_computed() -> None:
    model = weight_norm(nn.Linear(4, 3, bias=False))
    found = tutti.profile(model, torch.randn(2, 4), repeats=1)
    assert by_name(found)[""].rows is None
    assert by_name(found)[""].work == 2 * 2 * 4 * 3
    assert by_name(found)["parametrizations.weight"].gradient_bytes == 4 * (3 + 12)


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = tutti.profile(model, torch.randint(10, (3, 5)), optimizer=optimizer, repeats=1)
    assert found.gradients[-1].num_bytes == 160, "as many as if all rows had one"


def test_packed_sequences() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    found = tutti.profile(nn.LSTM(4, 6), packed, repeats=1)
    assert found.layers[0].work == 2 * 5 * 24 * (4 + 6), "five steps in all; nobody needs the gradient by the batch"


def test_layers_that_change_their_input() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(), nn.Linear(72, 3))
    found = tutti.profile(model, torch.randn(2, 1, 8, 8), repeats=1)
    assert [layer.kind for layer in found.layers] == ["Conv2d", "ReLU", "Identity", "Flatten", "Linear"]
    assert found.layers[2].backward_s == 0, "it did nothing"


# --- left as it was ---


class Restless(nn.Module):
    """Everything that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, max_norm=0.5)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen = self.seen + 1
        scores: Tensor = self.output(self.dropout(self.norm(self.embedding(tokens))))
        return scores


def hooks(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_left_as_it_was(fails: bool) -> None:
    model = Restless()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    tokens = torch.randint(10, (6,))
    model(tokens).sum().backward()
    optimizer.step()
    model.dropout.eval()
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    seen, random = model.seen, torch.random.get_rng_state()
    if fails:
        with pytest.raises(ConfigError, match="the loss fails"):
            tutti.profile(model, (tokens, tokens), loss=lambda output, _: output.no_such_thing, optimizer=optimizer)
    else:
        tutti.profile(model, tokens, optimizer=optimizer, repeats=1)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(gradients, values, strict=True) if g is not None)
    assert model.seen is seen
    assert torch.equal(torch.random.get_rng_state(), random)
    assert (model.training, model.dropout.training, model.norm.training) == (True, False, True)
    assert hooks(model) == 0
    now = optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    for number, own in state["state"].items():
        assert all(torch.equal(now["state"][number][key], value) for key, value in own.items())


def test_the_users_hooks_stay() -> None:
    model = nn.Linear(2, 2)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    tutti.profile(model, torch.randn(2, 2), repeats=1)
    assert hooks(model) == 1
    assert calls


# --- mistakes ---


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize(
    ("model", "batch", "says"),
    [
        ("net", torch.ones(2, 4), "takes a model, which is an nn.Module, got str"),
        (nn.Linear(4, 4), (), "got an empty one"),
        (nn.Linear(4, 4), torch.ones(0, 4), "a batch of one sample or more"),
        (nn.Linear(4, 4), "text", r"the model fails in forward, in Linear: TypeError"),
        (Broken(), torch.ones(2, 4), r"in forward, in 'layers.1' \(Linear\): RuntimeError: .*shapes"),
        (nn.ReLU(), torch.ones(2, 4), "no parameter of the model is trained"),
        (nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4), "no parameter of the model is trained"),
        (nn.LazyLinear(4), torch.ones(2, 4), "lazy layers have no sizes yet"),
        (nn.Linear(4, 4, device="meta"), torch.ones(2, 4), "on one device, cpu or cuda; this one is on meta"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_bad_models_and_batches(model: Any, batch: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tutti.profile(model, batch)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda output, target: output, r"one number that needs a gradient, got one of shape \(2, 4\)"),
        (lambda output, target: 1.0, "one number that needs a gradient, got a float"),
        (lambda output, target: output.detach().sum(), "needs a gradient"),
        (F.cross_entropy, "the loss fails on what the model returned"),
    ],
)
def test_bad_losses(loss: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tutti.profile(nn.Linear(4, 4), (torch.ones(2, 4), torch.zeros(3, dtype=torch.int64)), loss=loss)


def refused_while_distributed(world: tutti.World) -> bool:
    model = nn.Linear(4, 4)
    with (
        tutti.distribute(model, torch.optim.SGD(model.parameters()), world=world),
        pytest.raises(ConfigError, match="Profile it before distribute"),
    ):
        tutti.profile(model, torch.ones(2, 4))
    return tutti.profile(model, torch.ones(2, 4), repeats=1).num_samples == 2


def test_a_distributed_model() -> None:
    assert run_ok(refused_while_distributed, size=2, transport="simulated") == [True, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_compiled_model() -> None:
    wrapped = nn.Sequential(nn.Linear(4, 4))
    wrapped._orig_mod = wrapped[0]  # As torch.compile does.
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    for model in (wrapped, scripted):
        with pytest.raises(ConfigError, match=r"Profile it before torch\.compile"):
            tutti.profile(model, torch.ones(2, 4))


def test_bad_optimisers_and_repeats() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="trains no parameter of the model"):
        tutti.profile(model, torch.ones(2, 4), optimizer=torch.optim.SGD(other.parameters()))
    with pytest.raises(ConfigError, match="a step of LBFGS fails"):
        tutti.profile(model, torch.ones(2, 4), optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="1 repeat or more, got 0"):
        tutti.profile(model, torch.ones(2, 4), repeats=0)


def test_a_model_that_returns_nothing_to_train_by() -> None:
    class Numbers(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return x.shape

    with pytest.raises(ConfigError, match=r"nothing needs a gradient\. Give profile a loss"):
        tutti.profile(Numbers(4, 4), torch.ones(2, 4))
