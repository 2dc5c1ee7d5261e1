"""Training scenarios whose result must not depend on the number of workers.

A scenario is written once. Plain torch on whole batches is its reference. Under a strategy, any number of ranks train
on their parts of the same batches.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tutti.job import distribute
from tutti.strategies import BSP, SSP, AllReduce, ParameterServer, Poseidon, SoftSync, Strategy
from tutti.strategies.allreduce import NAMES
from tutti.world import World

_one_at_a_time = Lock()  # Ranks that are threads share torch's generator.

STEPS = 20
BATCH = 24

HIDDEN = 740
"""Units of `WideNet`: the gradient of its hidden layer has 4.2 MiB, more than shared memory stages at once."""

OWN: dict[str, Strategy] = {"allreduce": AllReduce(), "allreduce, many buckets": AllReduce(bucket_bytes=300)}
"""Strategies that use each transport's own all-reduce."""

SERVED: dict[str, Strategy] = {
    "servers": ParameterServer(),
    "servers, many buckets": ParameterServer(SSP(0), bucket_bytes=300),
    "servers, no overlap": ParameterServer(BSP(), overlap=False),
    "servers, soft-sync of all": ParameterServer(SoftSync(1)),  # As many as there are workers.
}
"""Synchronous parameter servers. Gradients stay local on every rank, and servers clip their mean."""

FACTORED: dict[str, Strategy] = {
    "poseidon, to all": Poseidon("broadcast", bucket_bytes=300),
    "poseidon, to owners": Poseidon("owners"),
    "poseidon, as published, no overlap": Poseidon("sacp", overlap=False),
}
"""Poseidon, with layers whose gradients are sent as factors."""

BY_NAME: dict[str, Strategy] = {name: AllReduce(name, 1000) for name in NAMES if name != "native"}
"""All-reduce by every algorithm."""

EXACT: dict[str, Strategy] = {**OWN, **BY_NAME, **FACTORED, **SERVED}
"""Strategies that must match one worker. A strategy joins by being listed."""

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    """Two experts, of which each sample uses one, a shared layer used twice, a frozen and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.shared = nn.Linear(16, 16)
        self.experts = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        hidden = torch.tanh(self.shared(hidden) + self.frozen(hidden))
        hidden = torch.tanh(self.shared(hidden))
        out = hidden.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            mine = (x[:, 0] > 1.0) == bool(number)
            if mine.any():  # Otherwise this expert gets no gradient here: it is unused on this rank.
                out = out.index_put((mine.nonzero().flatten(),), expert(hidden[mine]))
        return out


class WideNet(nn.Sequential):
    """A hidden layer whose gradient is longer than every limit at which messages are cut or staged."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4))


@dataclass(frozen=True)
class Scenario:
    """The options of a training run."""

    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float64
    uneven: bool = False
    accumulate: int = 1
    clip: float | None = None
    schedule: bool = False
    keep_zeros: bool = False
    groups: bool = False
    steps: int = STEPS
    wide: bool = False
    """Whether the model is `WideNet`, whose gradients make long messages."""


SHORT = Scenario(optimizer="momentum", uneven=True, clip=0.5, schedule=True, steps=2)
"""A few steps with small messages, for every algorithm in every world."""

LONG_MESSAGES = Scenario(optimizer="momentum", uneven=True, steps=1, wide=True)
"""One step with messages above every limit at which collectives and transports cut them."""

SCENARIOS: dict[str, Scenario] = {
    **{name: Scenario(optimizer=name) for name in OPTIMIZERS},
    "uneven batches": Scenario(uneven=True),
    "accumulation": Scenario(accumulate=3),
    "clipping": Scenario(optimizer="momentum", clip=0.5),
    "scheduler": Scenario(optimizer="momentum", schedule=True),
    "zero_grad keeps zeros": Scenario(keep_zeros=True),
    "parameter groups": Scenario(groups=True),
    "all together": Scenario(uneven=True, clip=0.5, schedule=True, groups=True, keep_zeros=True),
}


def device() -> str:
    """Return the device to train on: `TUTTI_TEST_DEVICE=cuda` runs the whole suite on a GPU."""
    return os.environ.get("TUTTI_TEST_DEVICE", "cpu")


def batches(scenario: Scenario) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(scenario.steps * scenario.accumulate):
        size = BATCH - number % 5 if scenario.uneven else BATCH
        x = torch.randn(size, 8, generator=generator, dtype=torch.float64).to(scenario.dtype)
        made.append((x.to(device()), torch.randint(0, 4, (size,), generator=generator).to(device())))
    return made


def part_of(batch: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's samples. Their number differs between ranks if the batch cannot be divided evenly."""
    return batch[0].tensor_split(size)[rank], batch[1].tensor_split(size)[rank]


def prepare(scenario: Scenario, seed: int) -> tuple[nn.Module, Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    with _one_at_a_time, torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (WideNet() if scenario.wide else Net()).to(device(), scenario.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:3]}, {"params": trained[3:], "lr": 0.003}] if scenario.groups else trained
    optimizer = OPTIMIZERS[scenario.optimizer](groups)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7 if scenario.schedule else 1.0)


def train(world: World, strategy: Strategy, scenario: Scenario) -> dict[str, Tensor]:
    """Train on this rank's part of every batch, and return the final parameters and gradients."""
    model, optimizer, scheduler = prepare(scenario, seed=world.rank)  # Rank 0's parameters hold for all.
    served = isinstance(strategy, ParameterServer)
    if served:  # What a worker has is its own gradient: the servers clip the mean.
        strategy, scenario = replace(strategy, clip=scenario.clip), replace(scenario, clip=None)
        if isinstance(strategy.consistency, SoftSync):
            strategy = replace(strategy, consistency=SoftSync(world.size))
    job = distribute(model, optimizer, strategy, world=world)
    parts = [part_of(batch, world.rank, world.size) for batch in batches(scenario)]
    _loop(scenario, model, optimizer, scheduler, parts, job.no_sync)
    if served and world.size > 1:
        with job.consensus():
            final = _parameters(model)
    else:
        final = _state(model)
    job.finish()
    return final


def train_plainly(scenario: Scenario) -> dict[str, Tensor]:
    """Return the reference: the final state of plain torch on whole batches."""
    model, optimizer, scheduler = prepare(scenario, seed=0)
    _loop(scenario, model, optimizer, scheduler, batches(scenario), nullcontext)
    return _state(model)


def _loop(scenario, model, optimizer, scheduler, parts, no_sync) -> None:  # type: ignore[no-untyped-def]
    for number, (x, y) in enumerate(parts, start=1):
        last = number % scenario.accumulate == 0
        with nullcontext() if last else no_sync():
            (F.cross_entropy(model(x), y) / scenario.accumulate).backward()
        if not last:
            continue
        if scenario.clip:
            nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
        optimizer.step()
        scheduler.step()
        if number < len(parts):
            optimizer.zero_grad(set_to_none=not scenario.keep_zeros)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = _parameters(model)
    grads = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return state | grads


def assert_same_bits(states: list[dict[str, Tensor]]) -> None:
    for rank, state in enumerate(states):
        assert state.keys() == states[0].keys(), f"rank {rank} has gradients for other parameters than rank 0"
        for name, tensor in state.items():
            assert torch.equal(tensor, states[0][name]), f"{name} differs between rank 0 and rank {rank}"


def assert_close(state: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float) -> None:
    """Compare by tensor: the largest difference over the largest element of the reference."""
    if any(name.endswith(".grad") for name in state):
        assert state.keys() == reference.keys(), f"other gradients than plain torch: {state.keys() ^ reference.keys()}"
    for name, tensor in state.items():
        scale = reference[name].abs().max().clamp(min=1e-30)
        difference = float((tensor - reference[name]).abs().max() / scale)
        assert difference <= tolerance, f"{name}: relative difference {difference:.2e} > {tolerance:.0e}"
