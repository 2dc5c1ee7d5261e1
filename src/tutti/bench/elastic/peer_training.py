"""One training run under Tutti, torchft or torchrun, in which a worker is killed: the same model, data and steps.

The model is in float64, a step has the same global batch, and a worker kills itself before its step `KILL_AT`. Each
worker writes down which samples it used in which step, whether that step was completed, and when. Under torchrun a run
continues from checkpoints, one every `_SAVE_EVERY` steps, with the samples that it has not used yet: so does a careful
script.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tutti.bench.checkpoints.training import NUM_SAMPLES, NumberedSamples, squared_error

WORKERS, BATCH, EPOCHS, KILL_AT = 4, 5, 3, 22
"""Workers, samples of a worker in a step, epochs, and the step in which the last worker is killed."""
STEPS = EPOCHS * NUM_SAMPLES // (WORKERS * BATCH)
_PAUSE_S, _SAVE_EVERY = 0.02, 5
_START_S = 60.0
"""For all workers to start."""
_HIDDEN = 64


class _Log:
    """The steps of one worker."""

    def __init__(self, folder: Path, number: int, attempt: int, *, dies: bool) -> None:
        self._folder, self._number, self._attempt, self._dies = folder, number, attempt, dies
        self._file = (folder / f"worker-{attempt}-{number}.jsonl").open("w", buffering=1)

    def before(self, step: int) -> None:
        """Pause as if computing took long; be killed in the chosen step."""
        time.sleep(_PAUSE_S)
        if self._dies and step == KILL_AT and self._attempt == 0:
            (self._folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, step: int, epoch: int, numbers: list[int], *, done: bool) -> None:
        """A step is over: completed, or void."""
        self._file.write(f"{json.dumps([step, epoch, numbers, done, time.time()])}\n")

    def end(self, model: nn.Module) -> None:
        """Training is over."""
        self._file.close()
        values = torch.cat([each.detach().reshape(-1) for each in model.parameters()]).tolist()
        (self._folder / f"end-{self._attempt}-{self._number}.json").write_text(json.dumps(values))


def _made() -> tuple[NumberedSamples, nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = NumberedSamples()
    model = nn.Sequential(
        nn.Linear(samples.inputs.shape[1], _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, samples.targets.shape[1])
    ).double()
    return samples, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _dealt(epoch: int, rank: int) -> Iterator[Tensor]:
    """Yield the numbers of the samples of each step of a rank, as a sampler deals them to a fixed number of ranks."""
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
    yield from order[rank::WORKERS].split(BATCH)


def _await_all(folder: Path, number: int) -> None:
    """Wait until all workers have come so far: torchft begins with those that are there."""
    (folder / f"ready-{number}").touch()
    deadline = time.monotonic() + _START_S
    while len(list(folder.glob("ready-*"))) < WORKERS and time.monotonic() < deadline:
        time.sleep(0.01)


def under_tutti(folder: str, *, kill: bool) -> None:
    """Train as a function that `tutti.launch` starts."""
    from torch.utils.data import DataLoader

    from tutti.data.shard import shard
    from tutti.job.distribution import distribute
    from tutti.launch import init

    world = init()
    number = world.transport.world_rank
    samples, model, optimizer = _made()
    job = distribute(model, optimizer, "ring")
    batches = shard(DataLoader(samples, batch_size=BATCH, shuffle=True))
    log = _Log(Path(folder), number, 0, dies=kill and number == WORKERS - 1)
    for epoch in batches.epochs(EPOCHS):
        for x, y, numbers in epoch:
            before = job.steps
            log.before(before)
            squared_error(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            log.step(before, epoch.epoch, numbers.tolist(), done=job.steps > before)
    job.finish()
    log.end(model)


def under_torchft(folder: Path, *, kill: bool) -> None:
    """Train as a process that has its rank in RANK, and the lighthouse in TORCHFT_LIGHTHOUSE. It is a replica group."""
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo

    number = int(os.environ["RANK"])
    samples, model, optimizer = _made()
    _await_all(folder, number)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=5),
        quorum_timeout=timedelta(seconds=30),
        connect_timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica-{number}",
        hostname="127.0.0.1",
    )
    stepper = Optimizer(manager, optimizer)
    log = _Log(folder, number, 0, dies=kill and number == WORKERS - 1)
    for epoch in range(EPOCHS):
        for numbers in _dealt(epoch, number):
            before = manager.current_step()
            stepper.zero_grad()
            log.before(before)
            squared_error(model(samples.inputs[numbers]), samples.targets[numbers]).backward()
            for work in [manager.allreduce(each.grad) for each in model.parameters()]:
                work.wait()
            stepper.step()
            log.step(before, epoch, numbers.tolist(), done=manager.current_step() > before)
    log.end(model)
    manager.shutdown(wait=False)


def under_torchrun(folder: Path, *, kill: bool) -> None:
    """Train as a process of torchrun, which starts all anew after a failure."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    number, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    samples, model, optimizer = _made()
    parallel, saved, first = DistributedDataParallel(model), folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    log = _Log(folder, number, attempt, dies=kill and number == WORKERS - 1)
    steps = [(epoch, numbers) for epoch in range(EPOCHS) for numbers in _dealt(epoch, number)]
    for step, (epoch, numbers) in enumerate(steps):
        if step < first:
            continue
        log.before(step)
        squared_error(parallel(samples.inputs[numbers]), samples.targets[numbers]).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(step, epoch, numbers.tolist(), done=True)
        if number == 0 and (step + 1) % _SAVE_EVERY == 0:
            draft = saved.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, draft)
            draft.rename(saved)
    log.end(model)
    dist.destroy_process_group()


def lighthouse() -> None:
    """Serve the lighthouse of torchft, whose time limits are set to react soon; print its port; until killed."""
    from torchft.coordination import LighthouseServer

    limits = {"join_timeout_ms": 500, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1000}
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **limits)
    print(server.address().rsplit(":", 1)[1], flush=True)
    signal.pause()  # Ended by the signal with which the benchmark ends it.


PROGRAMS: dict[str, Callable[..., None]] = {"torchft": under_torchft, "torchrun": under_torchrun}
"""Training under others, by name."""


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse()
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]), kill=sys.argv[3] == "kill")
