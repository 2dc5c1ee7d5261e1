"""`tutti.fit`: N workers give what one gives, metrics are exact, runs stop and continue, and callbacks are called."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tutti
from support import run_ok
from tutti.errors import ConfigError
from tutti.fit.callbacks import Run
from tutti.fit.history import History
from tutti.strategies import parse
from tutti.world import World, set_world


def samples(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :3].argmax(1)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


INITIAL = network()
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.5)


def trained(world: World | None = None, **options: Any) -> tuple[dict[str, Tensor], History]:
    """Train a small network in this thread's world."""
    if world is not None:
        set_world(world)
    model = deepcopy(INITIAL)
    options = {"data": samples(50), "batch_size": 16, "epochs": 3, "optimizer": SGD, **options}
    history = tutti.fit(model, loss=nn.CrossEntropyLoss(), **options)
    assert history.model is model
    return {name: value.clone() for name, value in model.state_dict().items()}, history


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("strategy", ["native", "ring", "poseidon", "ps:bsp"])
@pytest.mark.parametrize("size", [2, 3])
def test_workers_give_what_one_gives(strategy: str, size: int) -> None:
    options = {"validation": samples(21, 1), "metrics": ["accuracy", "f1"], "strategy": strategy}
    alone, history = trained(**options)
    transport = "shared_memory" if size == 2 else "sockets"
    for parameters, found in run_ok(partial(trained, **options), size=size, transport=transport):
        assert difference(parameters, alone) < 1e-10
        for one, other in zip(history, found, strict=True):
            assert other.loss == pytest.approx(one.loss, abs=1e-10)
            assert other.steps == one.steps
        if strategy != "ps:bsp":  # Whose first rank evaluates alone.
            assert [epoch.metrics for epoch in found] == [epoch.metrics for epoch in history]
            assert found["validation_loss"] == pytest.approx(history["validation_loss"], abs=1e-10)


def test_dedicated_servers_take_no_part_of_the_data() -> None:
    options = {"strategy": "ps:bsp,servers=1", "validation": samples(21, 1), "metrics": "accuracy"}
    alone, history = trained(**{**options, "strategy": "native"})
    workers = [found for found in run_ok(partial(trained, **options), size=3, transport="sockets") if found is not None]
    assert len(workers) == 2
    for parameters, found in workers:
        assert difference(parameters, alone) < 1e-10
        assert found["loss"] == pytest.approx(history["loss"], abs=1e-10)


@pytest.mark.parametrize("kind", ["loader", "drop_last", "own sampler", "dataset"])
def test_kinds_of_data(kind: str) -> None:
    dataset = TensorDataset(*samples(50))
    if kind == "dataset":
        data: Any = list(dataset)
    elif kind == "own sampler":
        data = DataLoader(dataset, batch_size=9, sampler=list(range(0, 50, 2)))
    else:
        data = DataLoader(dataset, batch_size=16, shuffle=True, drop_last=kind == "drop_last")
    options = {"data": data, "batch_size": 16 if kind == "dataset" else None, "validation": data}
    alone, history = trained(**options)
    assert history[-1].steps == 3 * {"drop_last": 3, "own sampler": 3}.get(kind, 4)
    for parameters, _ in run_ok(partial(trained, **options), size=3, transport="shared_memory"):
        assert difference(parameters, alone) < 1e-10


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*samples(48), strict=True))


def test_batches_of_a_stream_go_to_workers_in_turn() -> None:
    stream = DataLoader(Stream(), batch_size=8)
    options = {"data": stream, "batch_size": None, "validation": stream, "metrics": "accuracy"}
    (one, history), (other, _) = run_ok(partial(trained, **options), size=2, transport="shared_memory")
    assert difference(one, other) == 0
    assert [epoch.steps for epoch in history] == [3, 6, 9]


def misses(outputs: Tensor, targets: Tensor) -> int:
    return int((outputs.argmax(1) != targets).sum())


@pytest.mark.parametrize("num_samples", [2, 7, 50])
def test_metrics_are_exact_over_all_ranks(num_samples: int) -> None:
    inputs, targets = samples(num_samples, 2)
    metrics = {"accuracy": "accuracy", "f1": "f1", "misses": misses, "last": lambda outputs, targets: len(targets)}
    options = {"validation": (inputs, targets), "metrics": metrics, "epochs": 1}
    results = run_ok(partial(trained, **options), size=3, transport="shared_memory")
    model = network()
    model.load_state_dict(results[0][0])
    outputs = model(inputs).detach()
    right = outputs.argmax(1) == targets
    per_class = []
    for number in set(targets.tolist()) | set(outputs.argmax(1).tolist()):
        predicted, actual = outputs.argmax(1) == number, targets == number
        per_class.append(2 * float((predicted & actual).sum()) / float(predicted.sum() + actual.sum()))
    for _, history in results:
        found = history[0]
        assert found.metrics["accuracy"] == pytest.approx(float(right.double().mean()))
        assert found.metrics["f1"] == pytest.approx(sum(per_class) / len(per_class))
        assert found.metrics["misses"] == int((~right).sum())
        assert found.metrics["last"] == num_samples
        assert found.validation_loss == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)), abs=1e-12)


@pytest.mark.filterwarnings("ignore:No (negative|positive) samples:UserWarning")  # Of 2, a class has none.
@pytest.mark.parametrize("num_samples", [2, 50])
def test_torchmetrics(num_samples: int) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    classes = {"task": "multiclass", "num_classes": 3}
    metrics = [
        torchmetrics.F1Score(average="macro", **classes),
        torchmetrics.AUROC(**classes),  # Keeps all outputs.
        torchmetrics.MetricCollection({"recall": torchmetrics.Recall(**classes)}),
    ]
    validation = samples(num_samples, 2)
    options = {"validation": validation, "metrics": metrics, "epochs": 2}
    results = run_ok(partial(trained, **options), size=3, transport="shared_memory")
    model = network()
    model.load_state_dict(results[0][0])
    for metric in (*metrics[:2], metrics[2]["recall"]):
        metric.update(model(validation[0]), validation[1])
    wanted = [float(metric.compute()) for metric in (*metrics[:2], metrics[2]["recall"])]
    for _, history in results:
        found = history[-1].metrics
        assert [found["MulticlassF1Score"], found["MulticlassAUROC"], found["recall"]] == pytest.approx(wanted)


@pytest.mark.parametrize("strategy", ["ps:async", "ps:ssp=2", "peers", "gossip", "bmuf:every=4"])
def test_ranks_that_are_apart(strategy: str) -> None:
    options = {"validation": samples(21, 1), "metrics": "accuracy", "strategy": strategy}
    (one, history), (other, _) = run_ok(partial(trained, **options), size=2, transport="shared_memory")
    assert difference(one, other) == 0  # As agreed at the end.
    model = network()
    model.load_state_dict(one)
    inputs, targets = samples(21, 1)
    wanted = float((model(inputs).argmax(1) == targets).double().mean())
    assert len(history) == 3
    assert history[-1].metrics["accuracy"] == pytest.approx(wanted)


def test_a_sum_over_samples() -> None:
    def train(world: World | None = None) -> tuple[dict[str, Tensor], History]:
        if world is not None:
            set_world(world)
        model, optimizer = deepcopy(INITIAL), partial(torch.optim.SGD, lr=0.01)
        loss = nn.CrossEntropyLoss(reduction="sum")
        history = tutti.fit(model, samples(50), validation=samples(9), optimizer=optimizer, loss=loss, batch_size=16)
        return model.state_dict(), history

    alone, history = train()
    for parameters, found in run_ok(train, size=2, transport="shared_memory"):
        assert difference(parameters, alone) < 1e-10
        assert found[0].loss == pytest.approx(history[0].loss)
        assert found[0].validation_loss == pytest.approx(history[0].validation_loss)


class Recorder:
    """Counts the events of a run, decays the rate, and stops it on rank 1 after two epochs."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_start(self, run: Run) -> None:
        self.events.append("start")
        self.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
        run.track(self.scheduler)

    def on_step(self, run: Run) -> None:
        self.events.append(f"step {run.steps}")

    def on_epoch(self, run: Run) -> None:
        self.events.append(f"epoch {len(run.history)}")
        self.scheduler.step()
        if run.job.world.rank == run.job.world.size - 1 and len(run.history) == 2:
            run.stop()

    def on_end(self, run: Run) -> None:
        self.events.append(f"end {run.is_leader}")


def test_callbacks_are_called_and_one_rank_can_stop_all() -> None:
    def train(world: World) -> tuple[list[str], list[int], float]:
        recorder, lengths = Recorder(), []
        _, history = trained(world, callbacks=[recorder, lambda run: lengths.append(len(run.history))], epochs=5)
        assert len(history) == 2
        return recorder.events, lengths, recorder.scheduler.get_last_lr()[0]

    for rank, (events, lengths, rate) in enumerate(run_ok(train, size=2, transport="shared_memory")):
        steps = [f"step {number}" for number in range(1, 9)]
        assert events == ["start", *steps[:4], "epoch 1", *steps[4:], "epoch 2", f"end {rank == 0}"]
        assert lengths == [1, 2]
        assert rate == pytest.approx(0.3 / 4)


class Halt(Exception):
    """Ends a run in the middle, as a crash would."""


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3)])
def test_a_run_continues_from_its_checkpoint(tmp_path: Path, sizes: tuple[int, int]) -> None:
    def crash(run: Run) -> None:
        if run.steps == 7:
            raise Halt

    class Crash:
        on_step = staticmethod(crash)

    def broken(world: World, folder: str) -> None:
        with pytest.raises(Halt):
            trained(world, checkpoint=(folder, 3), callbacks=[Crash()])

    def continued(world: World, folder: str) -> tuple[dict[str, Tensor], History]:
        return trained(world, checkpoint=folder, validation=samples(9), metrics=["accuracy"])

    folder = str(tmp_path / "run")
    undisturbed, history = trained()
    run_ok(broken, folder, size=sizes[0], transport="shared_memory")
    for parameters, found in run_ok(continued, folder, size=sizes[1], transport="shared_memory"):
        assert difference(parameters, undisturbed) < 1e-10
        assert [epoch.steps for epoch in found] == [4, 8, 12]
        assert found[0].loss == pytest.approx(history[0].loss)  # From the checkpoint.
        assert found[-1].loss == pytest.approx(history[-1].loss)
    # There is nothing left to do.
    (parameters, found), *_ = run_ok(continued, folder, size=sizes[0], transport="shared_memory")
    assert difference(parameters, undisturbed) < 1e-10
    assert len(found) == 3


def test_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    _, history = trained(validation=samples(9), metrics=["accuracy"], logger=log)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    epochs = [line for line in lines if "validation_loss" in line]
    assert [line["accuracy"] for line in epochs] == history["accuracy"]
    assert [line["step"] for line in epochs] == [4, 8, 12]
    assert [line["step"] for line in lines if "validation_loss" not in line] == list(range(1, 13))
    table = str(history).splitlines()
    assert table[0].split() == ["epoch", "loss", "validation", "loss", "accuracy", "seconds", "samples", "per", "s"]
    assert len(table) == 4
    assert history[-1].loss < history[0].loss
    with pytest.raises(ConfigError, match="Known: accuracy, loss, samples_per_s, seconds, validation_loss"):
        history["los"]
    pytest.importorskip("matplotlib")
    history.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_the_learning_rate_rule_of_a_strategy() -> None:
    """It may begin with synchronous steps at the rate of one worker."""
    rule = parse("bmuf:every=4").learning_rate(2)
    changed, _ = rule.changed(0.3, 0.5)
    assert changed != 0.3

    def train(world: World) -> list[float]:
        rates: list[float] = []
        trained(world, strategy="bmuf:every=4", lr="auto", callbacks=[lambda run: rates.append(rate_of(run))])
        return rates

    def rate_of(run: Run) -> float:
        return float(run.optimizer.param_groups[0]["lr"])

    wanted = [0.3 if steps <= rule.synchronous_steps(12) else changed for steps in (4, 8, 12)]
    for rates in run_ok(train, size=2, transport="shared_memory"):
        assert rates == pytest.approx(wanted)


GOOD = {"data": samples(20), "optimizer": SGD, "loss": nn.CrossEntropyLoss()}
X, Y = samples(20)

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"data": None}, "data must be a dataset, a DataLoader, or two tensors .* got nothing"),
    ({"data": (X, Y[:5])}, "20 inputs and 5 targets"),
    ({"data": (X[:0], Y[:0])}, "data is empty"),
    ({"data": X}, "data must be .* got a Tensor"),
    ({"data": [(1, 2, 3)] * 4}, "samples .input, target., got 3 parts"),
    ({"data": DataLoader(TensorDataset(X, Y)), "batch_size": 4}, "leave batch_size out"),
    ({"data": Stream()}, "wrap it in a DataLoader"),
    ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"loss must return one number.*shape \(2,\)"),
    ({"loss": nn.CrossEntropyLoss}, r"Give an object: CrossEntropyLoss\(\)"),
    ({"loss": nn.MSELoss()}, "loss fails on the first samples"),
    ({"metrics": ["acuracy"], "validation": samples(4)}, "unknown metric 'acuracy'. Did you mean 'accuracy'"),
    ({"metrics": ["accuracy"]}, "give validation="),
    ({"metrics": [misses, misses], "validation": samples(4)}, "two metrics are called 'misses'"),
    ({"metrics": [3], "validation": samples(4)}, "a metric is 'accuracy' or 'f1'"),
    ({"workers": 0}, "workers must be 1 or more"),
    ({"workers": 30}, "30 workers cannot share 20 samples"),
    ({"workers": 8, "batch_size": 4}, "Use 4 or fewer, or larger batches"),
    ({"device": "cuda:9"}, 'device "cuda:9": this machine has'),
    ({"device": "tpux"}, 'device must be "auto"'),
    ({"strategy": "rnig"}, "unknown strategy 'rnig'"),
    ({"strategy": "ps:bsp,servers=1"}, "a dedicated server needs a second rank"),
    ({"epochs": 0}, "epochs must be 1 or more, got 0"),
    ({"lr": -1}, "lr must be a number above 0"),
    ({"optimizer": 3}, "optimizer must be"),
    ({"optimizer": lambda parameters: None}, "must return a torch optimiser"),
    ({"optimizer": torch.optim.SGD(network().parameters(), lr=1)}, "does not have 4 of the model's parameters"),
    ({"callbacks": [type("Bad", (), {"on_epoch_end": print})()]}, "has on_epoch_end: known are on_start"),
    ({"callbacks": [Recorder]}, r"give an object, Recorder\(\)"),
    ({"checkpoint": 3}, "checkpoint must be a folder"),
    ({"checkpoint": __file__}, "is a file"),
    ({"logger": "/nowhere/log"}, "there is no folder /nowhere"),
    ({"model": 3}, "model must be a torch.nn.Module"),
    ({"model": lambda: 3}, "model must return a torch.nn.Module"),
    ({"model": nn.Flatten()}, "no parameter to train"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_mistakes(options: dict[str, Any], message: str) -> None:
    if options.get("device") == "cuda:9" and torch.cuda.device_count() > 9:
        pytest.skip("there is such a GPU")
    with pytest.raises(ConfigError, match=message):
        tutti.fit(**{"model": network(), **GOOD, **options})


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        tutti.fit(network(), None, optimizer=3, loss=4, metrics=["a"], epochs=0, strategy="x", workers=0)
    lines = str(error.value).splitlines()
    assert lines[0] == "fit cannot start:"
    assert len(lines) == 8


def test_what_is_tried_before_the_start_leaves_no_trace() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)).double()
    with pytest.raises(ConfigError, match="epochs"):
        tutti.fit(model, samples(20), optimizer=SGD, loss=nn.CrossEntropyLoss(), epochs=0)
    assert int(model[1].num_batches_tracked) == 0
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match="epochs"):
        tutti.fit(model, samples(20), optimizer=SGD, loss=nn.CrossEntropyLoss(), epochs=0)
    assert torch.equal(torch.get_rng_state(), state)
