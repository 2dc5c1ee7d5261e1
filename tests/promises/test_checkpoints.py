"""`job.checkpoint` and `job.restore`: a run that is stopped and continued gives what one that never stopped gives."""

import errno
import logging
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from support import run_ok, run_threads
from tutti.checkpoint import tensor_files
from tutti.checkpoint.durable import write_all
from tutti.checkpoint.index import INDEX, checkpoints, index_bytes, read_index
from tutti.checkpoint.storage import CheckpointWriter, read
from tutti.collectives.calls import CollectiveCalls
from tutti.data import shard
from tutti.errors import CheckpointError, ConfigError
from tutti.job import Job, distribute
from tutti.job.checkpoints import calls as calls_module
from tutti.job.checkpoints import schedule as schedule_module
from tutti.job.checkpoints import signals
from tutti.job.checkpoints.calls import Checkpoints
from tutti.job.checkpoints.first_rank import FirstRankState
from tutti.parallel import Mesh
from tutti.world import World

load_file = pytest.importorskip("safetensors.torch").load_file

NUM_SAMPLES, BATCH = 96, 4


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same every time, whatever other ranks draw meanwhile."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def data(dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, x[:, :2].clone())


class Run:
    """A training run on one rank, as a script has it."""

    def __init__(self, world: World, strategy: str, dtype: torch.dtype = torch.float32, batch: int = BATCH) -> None:
        self.model = net(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.job: Job = distribute(self.model, self.optimizer, strategy, world=world)
        self.batches = shard(DataLoader(data(dtype), batch_size=batch, shuffle=True), world=self.job.world)
        self.scheduler = StepLR(self.optimizer, 5, 0.5)
        self.parts = (self.batches, self.scheduler)

    def train(self, epochs: int, after_step: Callable[["Run"], Any] = lambda run: None) -> list[Tensor] | None:
        """Train until the end; leave early if `after_step` returns True."""
        for epoch in self.batches.epochs(epochs):
            for x, y in epoch:
                (self.model(x) - y).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                if after_step(self):
                    self.job.__exit__(KeyError, None, None)
                    return None
        self.job.finish()
        return [p.detach().clone() for p in self.model.parameters()]


def whole(world: World, strategy: str, *args: Any) -> list[Tensor] | None:
    return Run(world, strategy, *args).train(2)


def stopped(world: World, strategy: str, folder: Path, at: int, *args: Any) -> None:
    """Save after some steps, take one more, and leave."""

    def save(run: Run) -> bool:
        if run.job.steps == at:
            run.job.checkpoint(folder, *run.parts, extra={"best": 0.5})
        return run.job.steps == at + 1

    Run(world, strategy, *args).train(2, save)


def continued(world: World, strategy: str, folder: Path, at: int, *args: Any) -> list[Tensor] | None:
    run = Run(world, strategy, *args)
    restored = run.job.restore(folder, *run.parts)
    assert restored is not None
    assert (restored.steps, restored.extra) == (at, {"best": 0.5})
    assert run.job.steps == at
    return run.train(2)


@pytest.mark.parametrize("at", [1, 7, 12, 13])  # An epoch has 12 steps.
@pytest.mark.parametrize("strategy", ["native", "ring", "onebit:exact_below=0", "bmuf:every=4", "ps:bsp"])
def test_a_continued_run_is_bit_identical(strategy: str, at: int, tmp_path: Path) -> None:
    run_ok(stopped, strategy, tmp_path, at, size=2, transport="sockets")
    got = run_ok(continued, strategy, tmp_path, at, size=2, transport="sockets")
    wanted = run_ok(whole, strategy, size=2, transport="sockets")
    for rank in range(2):
        assert all(map(torch.equal, got[rank], wanted[rank]))


IN_ONE_CALL = ["native", "ring", "onebit:exact_below=0", "poseidon"]
"""Strategies under which rank 0 has what all ranks agree on."""


@pytest.mark.parametrize("strategy", IN_ONE_CALL)
def test_values_of_all_ranks_are_merged_after_training_went_on(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the step of the checkpoint, the last one of an epoch but one."""
    go_on, gathered = threading.Event(), FirstRankState.gathered

    def late(state: FirstRankState) -> Any:
        assert go_on.wait(20)
        return gathered(state)

    monkeypatch.setattr(FirstRankState, "gathered", late)

    def train(world: World) -> None:
        def save(run: Run) -> bool:
            if run.job.steps == 11:
                run.job.checkpoint(tmp_path, *run.parts, extra={"best": 0.5})
            if run.job.steps == 14:
                go_on.set()
            return run.job.steps == 14

        Run(world, strategy).train(2, save)

    run_ok(train, size=2, transport="shared_memory")
    got = run_ok(continued, strategy, tmp_path, 11, size=2, transport="shared_memory")
    wanted = run_ok(whole, strategy, size=2, transport="shared_memory")
    for rank in range(2):
        assert all(map(torch.equal, got[rank], wanted[rank]))


@pytest.mark.parametrize("strategy", [*IN_ONE_CALL, "bmuf:every=4"])
def test_a_checkpoint_takes_few_calls(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    call = CollectiveCalls.call

    def record(calls: CollectiveCalls, name: str, *args: Any, **options: Any) -> Any:
        names.append(name)
        return call(calls, name, *args, **options)

    def train(world: World) -> None:
        def save(run: Run) -> bool:
            if run.job.steps == 2:
                run.job.checkpoint(tmp_path, *run.parts)
            return run.job.steps == 2

        with monkeypatch.context() as patch:
            patch.setattr(CollectiveCalls, "call", record)
            Run(world, strategy).train(1, save)

    run_ok(train, size=1, transport="sockets")
    assert names[0] == f"job.checkpoint('{tmp_path}')"
    assert len(names) == 1 if strategy in IN_ONE_CALL else len(names) > 1


@pytest.mark.parametrize("strategy", ["native", "bmuf:every=2"])
def test_a_mistake_in_a_later_checkpoint_is_an_error_on_all_ranks(strategy: str, tmp_path: Path) -> None:
    def train(world: World) -> list[str]:
        with Run(world, strategy).job as job:
            errors = []
            for extra in ({"best": 1}, {"best": nn.Linear}, {"best": 2}, {nn.Linear: 1}):
                try:
                    job.checkpoint(tmp_path, extra=extra)
                except ConfigError as error:
                    errors.append(str(error))
            return errors

    for found in run_ok(train, size=2, transport="shared_memory"):
        assert len(found) == 2
        assert "rank 0: " in found[0]
        assert re.search(r"extra\['best'\] is a type", found[0])
        assert "extra has the key" in found[1]
    assert read(tmp_path / "step-00000000").decoded().state["extra"] == {"best": 2}


@pytest.mark.parametrize("after", ["ring", "poseidon", "ps:bsp"])
@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_and_strategy_give_the_result_of_one_run(after: str, size: int, tmp_path: Path) -> None:
    double = torch.float64
    run_ok(stopped, "native", tmp_path, 7, double, 6, size=2, transport="shared_memory")
    got = run_ok(continued, after, tmp_path, 7, double, 6, size=size, transport="shared_memory")
    wanted = run_ok(whole, "native", double, 6, size=2, transport="shared_memory")
    for ours, theirs in zip(got[0], wanted[0], strict=True):
        assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()


def test_the_model_loads_without_tutti(tmp_path: Path) -> None:
    run_ok(stopped, "native", tmp_path, 3, size=2, transport="sockets")
    model = net()
    model.load_state_dict(load_file(tmp_path / "step-00000003" / "model.safetensors"))


def saved_steps(folder: Path) -> list[int]:
    return sorted(info.steps for info in checkpoints(folder))


@pytest.mark.parametrize("strategy", ["native", "bmuf:every=3", "ps:async"])
def test_every_few_steps(strategy: str, tmp_path: Path) -> None:
    def train(world: World) -> Any:
        return Run(world, strategy).train(1, lambda run: run.job.checkpoint(tmp_path, every=4, keep=2) and None)

    run_ok(train, size=2, transport="sockets")
    assert saved_steps(tmp_path) == [8, 12]


@pytest.mark.parametrize("strategy", ["native", "ps:async"])
def test_steps_count_where_it_is_not_called_after_each(strategy: str, tmp_path: Path) -> None:
    def train(world: World) -> Any:
        def save(run: Run) -> None:
            if run.job.steps % 3 == 0:
                run.job.checkpoint(tmp_path, every=5, keep=9)

        return Run(world, strategy).train(2, save)

    run_ok(train, size=2, transport="sockets")
    assert saved_steps(tmp_path) == [6, 12, 15, 21]


@pytest.mark.parametrize("strategy", ["ring", "gossip:pairs=async", "ps:ssp=2"])
def test_by_time(strategy: str, tmp_path: Path) -> None:
    """In virtual time, on ranks of different speeds, whose clocks differ."""

    def train(world: World) -> list[int]:
        taken = []

        def save(run: Run) -> None:
            world.transport.elapse(1.0 + 0.1 * world.rank)
            if run.job.checkpoint(tmp_path, run.batches, every="5s", when_busy="wait"):
                taken.append(run.job.steps)

        Run(world, strategy).train(1, save)
        return taken

    taken = run_ok(train, size=3, transport="simulated")
    assert len(taken[0]) in (1, 2)  # Eight steps of a second and more.
    assert len({len(steps) for steps in taken}) == 1
    if strategy == "ring":
        assert taken[0] == taken[1] == taken[2]


@pytest.mark.parametrize("strategy", ["ring", "gossip:pairs=async", "ps:async"])
def test_time_that_is_over_in_the_last_step_of_some_ranks(strategy: str, tmp_path: Path) -> None:
    """Eight steps take the first rank 8 s, and the last one 9.6 s: ranks must not wait for others that have ended."""

    def train(world: World) -> int:
        taken = []

        def save(run: Run) -> None:
            world.transport.elapse(1.0 + 0.1 * world.rank)
            taken.append(run.job.checkpoint(tmp_path, run.batches, every="8.5s"))

        Run(world, strategy).train(1, save)
        return sum(taken)

    assert len(set(run_ok(train, size=3, transport="simulated"))) == 1


def test_without_a_checkpoint_the_run_starts(tmp_path: Path) -> None:
    def train(world: World) -> Any:
        run = Run(world, "native")
        assert run.job.restore(tmp_path / "absent", *run.parts) is None
        return run.train(2)

    got = run_ok(train, size=2, transport="sockets")
    assert all(map(torch.equal, got[0], run_ok(whole, "native", size=2, transport="sockets")[0]))
    assert not (tmp_path / "absent").exists()


def test_one_checkpoint_of_several_can_be_named(tmp_path: Path) -> None:
    def save(world: World) -> Any:
        run = Run(world, "native")
        extra = {"best": 0.5}
        return run.train(1, lambda run: run.job.checkpoint(tmp_path, *run.parts, every=3, extra=extra) and None)

    run_ok(save, size=2, transport="sockets")
    assert saved_steps(tmp_path) == [6, 9, 12]
    got = run_ok(continued, "native", tmp_path / "step-00000009", 9, size=2, transport="sockets")
    assert all(map(torch.equal, got[0], run_ok(whole, "native", size=2, transport="sockets")[0]))


class StatefulLoader(DataLoader[Any]):
    """As torchdata's, which has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state is not None


def errors_of(function: Callable[..., Any], *args: Any, size: int = 2) -> list[str]:
    """The messages of the errors on all ranks, of which each must have one."""
    results = run_threads(function, *args, size=size, transport="sockets")
    assert all(isinstance(result, ConfigError) for result in results), results
    return [str(result) for result in results]


@pytest.mark.parametrize("damage", ["flip", "cut", "all"])
def test_a_damaged_checkpoint(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for at in (3, 5):
        run_ok(stopped, "native", tmp_path, at, size=2, transport="sockets")
    for steps in (3, 5) if damage == "all" else (5,):
        file = tmp_path / f"step-{steps:08d}" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content[:-1] if damage == "cut" else content)
    if damage == "all":
        messages = errors_of(continued, "native", tmp_path, 3)
        assert all("none of the 2 checkpoints" in message for message in messages)
        return
    with caplog.at_level(logging.WARNING, "tutti"):
        got = run_ok(continued, "native", tmp_path, 3, size=2, transport="sockets")
    assert "step-00000005 is skipped" in caplog.text
    assert all(map(torch.equal, got[0], run_ok(whole, "native", size=2, transport="sockets")[0]))


def another_model(world: World, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 2))
    job = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    with job:
        job.restore(folder)


def another_data(world: World, folder: Path) -> None:
    model = net()
    job = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), world=world)
    with job:
        job.restore(folder, shard(DataLoader(TensorDataset(torch.zeros(50, 6)), batch_size=BATCH), world=world))


def another_optimizer(world: World, folder: Path) -> None:
    model = net()
    first, *rest = model.parameters()
    job = distribute(model, torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1), world=world)
    with job:
        job.restore(folder)


def absent_step(world: World, folder: Path) -> None:
    with Run(world, "native").job as job:
        job.restore(folder / "step-00000002")


def restored_late(world: World, folder: Path) -> None:
    run = Run(world, "native")
    with run.job:
        run.train(1, lambda run: run.job.restore(folder))


def without_a_state(world: World, folder: Path) -> None:
    with Run(world, "native").job as job:
        job.checkpoint(folder, [1, 2])


def not_sharded(world: World, folder: Path) -> None:
    with Run(world, "native").job as job:
        job.checkpoint(folder, StatefulLoader(data(), batch_size=BATCH))


def not_storable(world: World, folder: Path) -> None:
    with Run(world, "native").job as job:
        job.checkpoint(folder, extra={"model": nn.Linear})


def bad_interval(world: World, folder: Path) -> None:
    with Run(world, "native").job as job:
        job.checkpoint(folder, every="often")


def a_file(world: World, folder: Path) -> None:
    with Run(world, "native").job as job:
        job.checkpoint(folder / "step-00000003" / "checkpoint.json")


def too_long(world: World, folder: Path) -> None:
    with Run(world, "native").job as job:
        job.restore(folder / ("x" * 300))


MISTAKES = [
    (too_long, "File name too long"),
    (another_model, r"another model: it has '0\.bias' of shape \(32,\), and this model has '0\.bias' of shape \(33,\)"),
    (another_data, "96.* 50|50.* 96"),
    (another_optimizer, "saved with another optimiser than this SGD"),
    (absent_step, r"step-00000002 is not a checkpoint: there is no .*checkpoint\.json"),
    (restored_late, "before the first step, and 1 were taken"),
    (without_a_state, "a list has no state_dict"),
    (not_sharded, r"a position of its own on every rank\. Give what tutti\.shard"),
    (not_storable, r"extra\['model'\] is a type"),
    (bad_interval, "every must be .*got 'often'"),
    (a_file, "cannot write checkpoints to .*checkpoint.json"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_mistakes_are_errors_on_all_ranks(mistake: Callable[..., Any], message: str, tmp_path: Path) -> None:
    run_ok(stopped, "native", tmp_path, 3, size=2, transport="sockets")
    for found in errors_of(mistake, tmp_path):
        assert re.search(message, found), found
    assert saved_steps(tmp_path) == [3]


class Converted(nn.Linear):
    """Converts what it finds of its first version, as some of torch's and torchvision's layers do."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < self._version:
            state_dict[f"{prefix}weight"] = 10 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_modules_find_the_versions_of_what_they_load(tmp_path: Path) -> None:
    def values(world: World, restores: bool) -> list[Tensor]:
        model = nn.Sequential(Converted(3, 3))
        with torch.no_grad():
            model[0].weight.copy_(torch.arange(9.0).view(3, 3) + restores)
        average = AveragedModel(model)
        with distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world) as job:
            (job.restore if restores else job.checkpoint)(tmp_path, average)
        return [model.state_dict()["0.weight"].clone(), average.state_dict()["module.0.weight"]]

    saved = run_ok(values, False, size=2, transport="sockets")
    got = run_ok(values, True, size=2, transport="sockets")
    for before, after in zip(saved, got, strict=True):
        assert all(map(torch.equal, before, after))


def test_a_run_that_starts_anew_does_not_delete_those_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(run: Run) -> None:
        # Another number on the way is no other run.
        run.job.checkpoint(tmp_path, *run.parts, every=5, keep=2 if run.job.steps < 10 else 1)

    def train(world: World, epochs: int, restores: bool) -> None:
        run = Run(world, "native")
        if restores:
            run.job.restore(tmp_path, *run.parts)
        run.train(epochs, save)

    def trained(epochs: int, restores: bool) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tutti"):
            run_ok(train, epochs, restores, size=2, transport="sockets")
        return caplog.text

    assert "of another run" not in trained(1, False)
    assert saved_steps(tmp_path) == [10]
    (tmp_path / "step-00000010").rename(tmp_path / "elsewhere")
    index = read_index(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / INDEX).write_bytes(index_bytes(replace(index, steps=100)))
    (tmp_path / "elsewhere").rename(tmp_path / "step-00000100")
    found = trained(1, False)
    assert found.count("holds checkpoints of another run, the last of step 100, and this one does not continue") == 1
    assert saved_steps(tmp_path) == [10, 100]
    assert "of another run" not in trained(2, True)
    assert saved_steps(tmp_path) == [20]


@pytest.mark.parametrize("strategy", ["native", "ps:bsp"])
def test_the_state_of_another_optimizer_is_refused_before_the_first_step(strategy: str, tmp_path: Path) -> None:
    def with_adam(world: World) -> None:
        model = net()
        with distribute(model, torch.optim.Adam(model.parameters()), strategy, world=world) as job:
            model(torch.ones(2, 6)).square().mean().backward()
            job._replica.optimizer.step()
            job.checkpoint(tmp_path)

    def with_sgd(world: World) -> None:
        model = net()
        with distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, world=world) as job:
            job.restore(tmp_path)

    run_ok(with_adam, size=2, transport="sockets")
    for found in errors_of(with_sgd):
        assert re.search("saved with another optimiser than this SGD: it has no 'dampening'", found), found


def test_two_jobs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path):
        for found in errors_of(stopped, "native", tmp_path, 1):
            assert re.search(r"is in use: process \d+ on host .* writes checkpoints", found), found


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(file: int, data: memoryview) -> None:
        if "step-00000003" not in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, data)

    monkeypatch.setattr(tensor_files, "write_all", write)

    def train(world: World) -> Any:
        return Run(world, "native").train(1, lambda run: run.job.checkpoint(tmp_path, every=3) and None)

    results = run_threads(train, size=2, transport="sockets")
    # All steps were trained; the run ends with an error, on the rank that writes, because its last one is missing.
    assert isinstance(results[0], CheckpointError)
    assert "The disk is full" in str(results[0])
    assert saved_steps(tmp_path) == [3]
    assert caplog.text.count("Training goes on") == 3  # Steps 6, 9 and 12.


def test_another_keep_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, data: memoryview) -> None:
        raise MemoryError("no memory left")

    def train(world: World) -> None:
        with Run(world, "native").job as job:
            with monkeypatch.context() as patch:
                patch.setattr(tensor_files, "write_all", fail)
                job.checkpoint(tmp_path, keep=3)
                job._checkpoints._writers[tmp_path].wait()
            assert job.checkpoint(tmp_path, keep=2)

    run_ok(train, size=1, transport="sockets")
    assert saved_steps(tmp_path) == [0]


def test_another_leader_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has not opened the folder: the leader that did was lost in the middle of a checkpoint, or after one."""

    def train(world: World) -> list[bool]:
        with Run(world, "gossip").job as job:
            with monkeypatch.context() as patch:
                patch.setattr(Checkpoints, "_agree", lambda *_: (True, 0, [None]))
                taken = [job.checkpoint(tmp_path)]
            job._checkpoints._writers.pop(tmp_path).close()
            with CheckpointWriter(tmp_path):  # As of a leader that was cut off, and lives on.
                return [*taken, job.checkpoint(tmp_path)]

    assert run_ok(train, size=1, transport="sockets") == [[True, False]]
    assert saved_steps(tmp_path) == [0]
    assert re.search("is in use: .* Training goes on", caplog.text)


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_a_second_request_waits_or_is_skipped(
    when_busy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    def slow_write(file: int, data: memoryview) -> None:
        assert go_on.wait(20)
        write_all(file, data)

    monkeypatch.setattr(tensor_files, "write_all", slow_write)

    def train(world: World) -> list[bool]:
        taken = []

        def save(run: Run) -> None:
            if run.job.steps == 2 and when_busy == "wait":
                go_on.set()
            taken.append(run.job.checkpoint(tmp_path, *run.parts, when_busy=when_busy))
            if run.job.steps == 2:
                go_on.set()

        Run(world, "native").train(1, save)
        return taken

    taken = run_ok(train, size=2, transport="sockets")
    assert taken[0] == taken[1]
    assert taken[0][:2] == [True, when_busy == "wait"]
    assert ("is still being written" in caplog.text) == (when_busy == "skip")


@pytest.mark.parametrize("calls", ["in every step", "seldom"])
def test_a_stopped_program_saves_all_its_models(calls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same step, if the loop comes to both calls; if not, the first one does not wait for ever."""
    stops: list[int] = []
    monkeypatch.setattr(signals, "_requests", signals._Requests())  # That of the process has users of earlier tests.
    for module in (calls_module, schedule_module):
        monkeypatch.setattr(module, "stop_requested", lambda world: len(stops) and signal.SIGTERM)

    def train(world: World) -> None:
        one, other = Run(world, "native"), Run(world, "native")
        with one.job, other.job:
            for step in range(1, 9):
                for run in (one, other):
                    run.model(torch.ones(1, 6)).sum().backward()
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                if step == 3:
                    stops.append(1)
                one.job.checkpoint(tmp_path / "one", every="1h")
                if calls == "in every step" or step == 1:
                    other.job.checkpoint(tmp_path / "other", every="1h")
        stops.append(2)  # It was not stopped.

    run_threads(train, size=1, transport="sockets")
    assert stops == [1]
    assert saved_steps(tmp_path / "one")[0] == 3
    assert saved_steps(tmp_path / "other") == ([3] if calls == "in every step" else [])
    assert not signals._requests.users


def test_a_stopped_run_whose_leader_is_lost_while_it_copies_saves_its_state_in_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved_part, others = Job._saved_part, threading.Semaphore(0)

    @contextmanager
    def lose_rank_0(self: Job, *copies: nn.Module) -> Iterator[Any]:
        with saved_part(self, *copies) as part:
            if self.world.rank == 0:
                assert others.acquire(timeout=20)
                assert others.acquire(timeout=20)
                raise KeyError("lost")
            others.release()  # It has found that it does not lead.
            yield part

    monkeypatch.setattr(Job, "_saved_part", lose_rank_0)
    monkeypatch.setattr(signals, "_requests", signals._Requests())
    monkeypatch.setattr(signals, "others_save", lambda user: False)  # Ranks are threads of one process here.
    monkeypatch.setattr(calls_module, "stop_requested", lambda world: signal.SIGTERM)
    taken: list[bool] = []

    def train(world: World) -> None:
        with Run(world, "peers").job as job:
            taken.append(job.checkpoint(tmp_path))
            job.checkpoint(tmp_path)
            taken.append(True)  # It was not stopped.

    run_threads(train, size=3, transport="sockets")
    assert taken == [False, False]
    assert "no checkpoint of step 0: the rank that copied it was lost" in caplog.text
    assert saved_steps(tmp_path) == [0]


def test_random_states_come_back(tmp_path: Path) -> None:
    """One rank: the generators belong to the process, of which ranks that are threads have one."""

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def save(world: World) -> list[float]:
        with Run(world, "native").job as job:
            job.checkpoint(tmp_path)
            return draw()

    def load(world: World) -> list[float]:
        with Run(world, "native").job as job:
            job.restore(tmp_path)
            return draw()

    first = run_ok(save, size=1, transport="sockets")
    draw()
    assert run_ok(load, size=1, transport="sockets") == first


def test_other_parts_than_saved_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ok(stopped, "native", tmp_path, 3, size=2, transport="sockets")

    def load(world: World) -> None:
        run = Run(world, "native")
        with run.job:
            run.job.restore(tmp_path, run.batches, torch.amp.GradScaler("cpu"))

    with caplog.at_level(logging.WARNING, "tutti"):
        run_ok(load, size=2, transport="sockets")
    assert "no state of a GradScaler: it starts anew" in caplog.text
    assert "the state of a StepLR, which was not given" in caplog.text
    assert caplog.text.count("job.restore: ") == 2  # One line each, from one rank.


# Meshes


def mesh_run(world: World, mesh: Mesh | None, folder: Path, save_at: int | None, restore: bool) -> Any:
    """Ten steps on the same batches, whatever the mesh; save after some, or continue."""
    double = torch.float64
    model, x = net(double), data(double).tensors[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job = distribute(model, optimizer, world=world, mesh=mesh, example=x[:8] if mesh and mesh.pipe > 1 else None)
    rank, size = (job.world.rank, job.world.size) if mesh is None or mesh.data > 1 else (0, 1)
    job.expect(same_batches=True)

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    pipeline = job.pipeline(loss_of) if mesh is not None and mesh.pipe > 1 else None
    if restore:
        assert job.restore(folder) is not None
    for step in range(job.steps, 10):
        part = x[8 * step % 88 :][:8].tensor_split(size)[rank]
        target = part[:, :2].clone()
        if pipeline is not None:
            pipeline(part, target)
        else:
            loss_of(model(part), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        if save_at == step + 1:
            job.checkpoint(folder)
            job.__exit__(KeyError, None, None)
            return None
    job.finish()
    return [p.detach().clone() for p in model.parameters()]


MESHES = {
    "none": (None, 2),
    "tensor": (Mesh(tensor=2), 2),
    "pipe": (Mesh(pipe=2), 2),
    "data, tensor": (Mesh(data=2, tensor=2), 4),
}


@pytest.mark.parametrize("after", MESHES)
@pytest.mark.parametrize("before", MESHES)
def test_a_run_continues_on_another_mesh(before: str, after: str, tmp_path: Path) -> None:
    mesh, size = MESHES[before]
    run_ok(mesh_run, mesh, tmp_path, 5, False, size=size, transport="sockets")
    assert read(tmp_path / "step-00000005").decoded().model["0.weight"].shape == (32, 6)
    mesh, size = MESHES[after]
    got = run_ok(mesh_run, mesh, tmp_path, None, True, size=size, transport="sockets")
    wanted = run_ok(mesh_run, None, tmp_path, None, False, size=2, transport="sockets")
    for ours, theirs in zip(got[0], wanted[0], strict=True):
        assert (ours - theirs).abs().max() < 1e-10


STRATEGIES = [
    "native", "onebit:exact_below=0", "averaging:every=2", "bmuf:every=2", "diloco:every=2", "poseidon", "ps:bsp",
    "ps:ssp=2", "ps:async", "peers", "gossip", "auto",
]  # fmt: skip


def begun(world: World, strategy: str, folder: Path) -> Any:
    """Continue under a strategy, and return what all ranks agree on before the first step."""
    run = Run(world, strategy)
    assert run.job.restore(folder, *run.parts) is not None
    with run.job.consensus() as model:
        values = [p.detach().clone() for p in model.parameters()]
        momentum = [state["momentum_buffer"].clone() for state in run.optimizer.state.values()]
    run.train(1)
    return values, momentum, [p.detach().clone() for p in run.model.parameters()]


@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
@pytest.mark.parametrize("after", STRATEGIES)
def test_every_strategy_begins_from_a_checkpoint_of_another(after: str, transport: str, tmp_path: Path) -> None:
    """`distribute` has seen other parameters: strategies that keep copies must take the loaded ones."""
    run_ok(stopped, "native", tmp_path, 7, size=2, transport="sockets")
    model = load_file(tmp_path / "step-00000007" / "model.safetensors")
    momentum = load_file(tmp_path / "step-00000007" / "optimizer.safetensors")
    for got, buffers, end in run_ok(begun, after, tmp_path, size=2, transport=transport):
        names = [name for name, _ in net().named_parameters()]
        for name, value, final in zip(names, got, end, strict=True):
            torch.testing.assert_close(value, model[name], rtol=1e-6, atol=1e-7)
            assert (final - value).abs().max() < 1  # It trained on from there, and not from somewhere else.
        wanted = [momentum[f"state.{number}.momentum_buffer"] for number in range(4)]
        assert len(buffers) == 4
        for value in buffers:
            assert any(value.shape == each.shape and torch.allclose(value, each) for each in wanted)


def test_saving_changes_no_running_statistics(tmp_path: Path) -> None:
    """Also between two batches whose gradients accumulate, on ranks whose statistics differ."""

    def train(world: World, save: bool) -> list[Tensor]:
        norm = nn.BatchNorm1d(4)
        model = nn.Sequential(nn.Linear(6, 4), norm, nn.Linear(4, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found = []
        with distribute(model, optimizer, world=world) as job:
            for step, (x, _) in enumerate(shard(DataLoader(data(), batch_size=BATCH), world=world)):
                with job.no_sync() if step % 2 == 0 else nullcontext():
                    model(x).square().mean().backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                if save and step == 2:
                    job.checkpoint(tmp_path)
                assert norm.running_mean is not None
                found.append(norm.running_mean.clone())
        return found

    saved = run_ok(train, True, size=2, transport="sockets")
    plain = run_ok(train, False, size=2, transport="sockets")
    for rank in range(2):
        assert all(map(torch.equal, saved[rank], plain[rank]))


def test_the_step_that_a_run_continues_from_is_not_saved_again(tmp_path: Path) -> None:
    run_ok(stopped, "native", tmp_path, 4, size=2, transport="sockets")

    def load(world: World) -> bool:
        run = Run(world, "native")
        with run.job:
            run.job.restore(tmp_path, *run.parts)
            return run.job.checkpoint(tmp_path, *run.parts, every=4)  # In an accumulation: no step was taken yet.

    assert run_ok(load, size=2, transport="sockets") == [False, False]


def test_a_folder_that_cannot_be_written_is_an_error_at_once() -> None:
    def train(world: World) -> None:
        Run(world, "native").train(1, lambda run: run.job.checkpoint("/proc/nope", every="1h") and None)

    for found in errors_of(train):
        assert "cannot write checkpoints to /proc/nope" in found
