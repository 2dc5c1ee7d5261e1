"""Ranks, data and the state to save: common to the strategies for Lightning's Trainer and for Fabric."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from tutti.data import shard
from tutti.errors import ConfigError
from tutti.job import Job
from tutti.launch.environment import RankEnvironment
from tutti.launch.rendezvous import init_numbered
from tutti.strategies import Strategy, as_strategy
from tutti.world import World

STATE = "tutti"
"""The key of the strategy's state in a checkpoint."""


class ClusterEnvironment(Protocol):
    """The part of a cluster environment of Lightning that Tutti reads."""

    @property
    def main_address(self) -> str: ...
    @property
    def main_port(self) -> int: ...
    def global_rank(self) -> int: ...
    def world_size(self) -> int: ...
    def local_rank(self) -> int: ...


def join_world(environment: ClusterEnvironment) -> World:
    """Join the world of the ranks that Lightning has numbered, with torch's default group over it. Collective."""
    numbers = environment.global_rank(), environment.world_size(), environment.local_rank()
    world = init_numbered(RankEnvironment("Lightning", *numbers, environment.main_address, environment.main_port))
    if world.elastic is not None:
        raise ConfigError(
            f"rank {world.rank}: Lightning needs a fixed number of workers. Give --workers one number, and resume "
            "from Lightning's checkpoints."
        )
    return world


def usable(strategy: str | Strategy) -> Strategy:
    """Return a strategy that works under Lightning; `ConfigError` for one that does not."""
    found = as_strategy(strategy)
    if found.num_dedicated_servers:
        raise ConfigError(
            f"strategy '{found}' has dedicated servers, and every process of Lightning trains. Let the workers serve: "
            "leave out servers=, or write servers='colocated'."
        )
    return found


def single(optimizers: list[Optimizer]) -> Optimizer:
    """Return the only optimiser of a model."""
    if len(optimizers) != 1:
        raise ConfigError(
            f"Tutti's strategies train a model with one optimiser, got {len(optimizers)}. Give one optimiser all "
            "parameters, in groups with options of their own, or use DDPStrategy(process_group_backend='tutti')."
        )
    return optimizers[0]


class DividedLoader:
    """This rank's part of a DataLoader. An epoch begins with its first batch.

    Lightning makes the iterator of a run that it continues before it says which epoch comes next.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._data: Any = shard(loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._data

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_data"], name)


def divided(loader: object) -> object:
    """Return this rank's part of a DataLoader; anything else, such as a loader of a stream, as it is."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        return loader if isinstance(loader.dataset, IterableDataset) else DividedLoader(loader)
    return loader


class AgreedModel:
    """The parameters that all ranks agree on, in the model from `enter` to `leave`.

    Lightning says by two calls when validation begins and ends, and saves checkpoints in between or outside.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._context: Any = None

    def enter(self) -> None:
        """Put them into the model, unless they are there. Collective."""
        if self._context is None:
            self._context = self._job.consensus(optimizer=False)
            self._context.__enter__()

    def leave(self) -> None:
        """Put this rank's own parameters back."""
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)

    @contextmanager
    def to_save(self) -> Iterator[dict[str, Any]]:
        """Hold everything that a checkpoint needs in model and optimiser; yield the strategy's state. Collective."""
        was_in = self._context is not None
        self.leave()
        state = self._job.state_dict()
        with self._job.consensus():
            yield state
        if was_in:
            self.enter()
