"""`FabricTuttiStrategy`: Lightning Fabric with any of Tutti's strategies.

    fabric = Fabric(strategy=FabricTuttiStrategy("onebit"), accelerator="cpu", devices=4)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    ...
    fabric.strategy.finish()

`fabric.setup` with model and optimiser distributes the model. `fabric.strategy.finish()` after the training leaves the
parameters that all ranks agree on in the model; so does `fabric.save`, which every rank calls, for what it saves.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.integrations.lightning_ranks import STATE, AgreedModel, divided, join_world, single, usable
from tutti.job import Job, distribute
from tutti.strategies import Strategy


class FabricTuttiStrategy(DDPStrategy):
    """Trains a model under Fabric with a strategy of Tutti's.

    Args:
        strategy: as `tutti.distribute` takes it: "ring", "bmuf:every=16", `tutti.ParameterServer(...)`.
        options: those of Fabric's `DDPStrategy` that concern processes and plug-ins.
    """

    def __init__(self, strategy: str | Strategy = "native", **options: Any) -> None:
        super().__init__(process_group_backend="tutti", **options)
        self.synchronisation = usable(strategy)
        self.job: Job | None = None
        """The job, from `setup` to `finish`."""
        self._backward_sync_control = _AccumulatesLocally(self)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        assert self.cluster_environment is not None
        join_world(self.cluster_environment)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the part of the data that Fabric's own sampler gives this rank: all of it, for `tutti.shard`."""
        return {"num_replicas": 1, "rank": 0}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return this rank's part of a DataLoader."""
        return divided(dataloader)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return a model that is not trained, as it is."""
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Distribute the model. Collective."""
        if self.job is not None:
            raise ConfigError("a second model is set up: finish the first with fabric.strategy.finish().")
        self.job = distribute(module, single(optimizers), self.synchronisation)
        return module, optimizers, scheduler

    def finish(self) -> None:
        """Leave the parameters that all ranks agree on in the model, and release it. Collective. Idempotent."""
        if self.job is not None:
            self.job.finish()
            self.job = None

    def save_checkpoint(self, path: Any, state: dict[str, Any], **options: Any) -> None:
        """Save what all ranks agree on, and the strategy's state. Collective."""
        if self.job is None:
            super().save_checkpoint(path, state, **options)
            return
        with AgreedModel(self.job).to_save() as own:
            super().save_checkpoint(path, {**state, STATE: own}, **options)

    def load_checkpoint(self, path: Any, state: Any = None, **options: Any) -> dict[str, Any]:
        """Load a checkpoint, and the strategy's state from it. Collective."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, **options)
        own = rest.pop(STATE, None)
        if self.job is not None and own is not None:
            self.job.load_state_dict(own)
        return rest


class _AccumulatesLocally(_BackwardSyncControl):
    """Keeps gradients to each rank inside `fabric.no_backward_sync`."""

    def __init__(self, strategy: FabricTuttiStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which backward keeps gradients to this rank."""
        job = self._strategy.job
        return job.no_sync() if enabled and job is not None else nullcontext()
