"""`TuttiStrategy`: Lightning's Trainer with any of Tutti's strategies.

    trainer = Trainer(strategy=TuttiStrategy("bmuf:every=16"), accelerator="cpu", devices=4)

Importing this module also registers a name: `Trainer(strategy="tutti")`.

How it works
------------
Lightning starts the processes, or finds that torchrun, srun or `tutti run` has. Each joins Tutti's world, over which
torch's default process group is made as well: Lightning's own calls (barriers, logged means, metrics) use that.

The model is distributed when training starts (`on_train_start`): by then Lightning has made the optimiser, and has
restored what it resumes from. Every DataLoader is divided by `tutti.shard`, so that every sample comes once, and means
over samples are exact in the last batch too.

Where ranks differ between two steps, validation and checkpoints use what all ranks agree on (`Job.consensus`).
Lightning makes these calls on all ranks, as they must be. A checkpoint holds the strategy's state under "tutti".
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor

from tutti.integrations.lightning_ranks import STATE, AgreedModel, divided, join_world, single, usable
from tutti.job import Job, distribute
from tutti.strategies import Strategy


class TuttiStrategy(DDPStrategy):
    """Trains a LightningModule with a strategy of Tutti's.

    Args:
        strategy: as `tutti.distribute` takes it: "ring", "bmuf:every=16", `tutti.ParameterServer(...)`.
        options: those of Lightning's `DDPStrategy` that concern processes and plug-ins, such as `start_method`,
            `cluster_environment`, `checkpoint_io` and `precision_plugin`.
    """

    strategy_name = "tutti"

    def __init__(self, strategy: str | Strategy = "native", **options: Any) -> None:
        super().__init__(process_group_backend="tutti", **options)
        self.synchronisation = usable(strategy)
        self.job: Job | None = None
        """The job, while the Trainer trains."""
        self._agreed: AgreedModel | None = None
        self._saved: dict[str, Any] = {}
        """What goes into the checkpoint that is being made: the strategy's state, and the optimiser's."""
        self._restored: dict[str, Any] | None = None

    # Ranks

    def setup_distributed(self) -> None:
        """Join the world. Collective."""
        self.set_world_ranks()
        assert self.cluster_environment is not None
        join_world(self.cluster_environment)

    def configure_ddp(self) -> None:
        """Do nothing: the model is not wrapped."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the part of the data that Lightning's own sampler gives this rank: all of it, for `tutti.shard`."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.predicting:
            return dict(super().distributed_sampler_kwargs)
        return {"num_replicas": 1, "rank": 0}

    # Training

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Let the module make its optimiser, and check that Tutti can use it."""
        super().setup_optimizers(trainer)
        single(self.optimizers)

    def on_train_start(self) -> None:
        """Distribute the model. Collective."""
        assert self.lightning_module is not None
        self.job = distribute(self.lightning_module, single(self.optimizers), self.synchronisation)
        self._agreed = AgreedModel(self.job)
        if self._restored is not None:
            self.job.load_state_dict(self._restored)
            self._restored = None

    def on_train_end(self) -> None:
        """Leave the parameters that all ranks agree on in the model. Collective."""
        if self.job is not None:
            self.job.finish()
            self.job = self._agreed = None

    def on_exception(self, exception: BaseException) -> None:
        """Release the model. Not collective: the other ranks may not be coming."""
        if self.job is not None:
            self.job.__exit__(type(exception), exception, None)
            self.job = self._agreed = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss in a forward call of the module, for the hooks on it."""
        assert self.lightning_module is not None
        module = self.lightning_module
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients to this rank, while they are accumulated."""
        assert self.job is not None
        with self.job.no_sync():
            yield

    def process_dataloader(self, dataloader: object) -> object:
        """Return this rank's part of a DataLoader."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        # Predictions are numbered by Lightning's own sampler; without `use_distributed_sampler` the user divides.
        if trainer.predicting or not trainer._accelerator_connector.use_distributed_sampler:
            return dataloader
        return divided(dataloader)

    # Evaluation and checkpoints

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum of a value over ranks. Collective.

        A mean of integers is no integer: Lightning divides logged sums by the mean number of samples of a rank.
        """
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def on_validation_start(self) -> None:
        """Validate what all ranks agree on. Collective."""
        if self._agreed is not None:
            self._agreed.enter()

    def on_validation_end(self) -> None:
        """Continue with this rank's own parameters."""
        if self._agreed is not None:
            self._agreed.leave()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the parameters that all ranks agree on. Collective."""
        if self._agreed is None:
            return dict(super().lightning_module_state_dict())
        with self._agreed.to_save() as state:
            # Copies, because this rank's own values come back before Lightning writes them, on the first rank.
            keep: Callable[[Any], Any] = deepcopy if self.is_global_zero else dict
            self._saved = {STATE: state, "optimizer": keep(single(self.optimizers).state_dict())}
            return keep(dict(super().lightning_module_state_dict()))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimiser's state, as it was when `lightning_module_state_dict` was called."""
        found: dict[str, Any] = self._saved.get("optimizer") or super().optimizer_state(optimizer)
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on the first rank."""
        state = {STATE: self._saved[STATE]} if self._saved and "optimizer_states" in checkpoint else {}
        super().save_checkpoint({**checkpoint, **state}, filepath, storage_options)
        self._saved = {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimiser now, and the strategy's state when the model is distributed."""
        super().load_optimizer_state_dict(checkpoint)
        self._restored = checkpoint.get(STATE)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name "tutti"."""
        strategy_registry.register(cls.strategy_name, cls, description="Tutti's exact all-reduce")


TuttiStrategy.register_strategies(StrategyRegistry)
