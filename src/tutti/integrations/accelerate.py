"""`TuttiAccelerator`: Hugging Face Accelerate with any of Tutti's strategies.

    accelerator = TuttiAccelerator("onebit")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ...
    accelerator.finish()

Everything else is Accelerate's: how data is divided, mixed precision, accumulation, `gather_for_metrics`. The model is
distributed by `prepare`, which gets model and optimiser in one call. `accelerator.finish()` after the training leaves
the parameters that all ranks agree on in the model. `accelerator.agreed()` is a context with these parameters, to
evaluate or save where ranks differ between two steps.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from tutti.errors import ConfigError
from tutti.job import Job, distribute
from tutti.launch import init
from tutti.strategies import Strategy, as_strategy


class TuttiAccelerator(Accelerator):
    """An `Accelerator` whose model is synchronised by a strategy of Tutti's, in place of DDP.

    Args:
        strategy: as `tutti.distribute` takes it: "ring", "bmuf:every=16", `tutti.ParameterServer(...)`.
        options: those of `Accelerator`.
    """

    def __init__(self, strategy: str | Strategy = "native", **options: Any) -> None:
        init(torch_distributed=True)  # Accelerate uses the default group that it finds.
        super().__init__(**options)
        self.synchronise(strategy)

    def synchronise(self, strategy: str | Strategy, *, when_prepared: bool = True) -> None:
        """Choose the strategy, and whether `prepare` distributes the model; otherwise `start` does."""
        self.synchronisation, self._when_prepared = as_strategy(strategy), when_prepared
        self.job: Job | None = None
        """The job, until `finish`."""

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does, and distribute a model that comes with its optimiser. Collective."""
        prepared = super().prepare(*objects, device_placement=device_placement)
        self._distribute(prepared if isinstance(prepared, tuple) else (prepared,))
        return prepared

    def _distribute(self, prepared: tuple[Any, ...]) -> None:
        models = [each for each in prepared if isinstance(each, nn.Module)]
        optimizers = [each for each in prepared if isinstance(each, AcceleratedOptimizer)]
        if not models or not optimizers or not self._when_prepared:  # One that is not trained, for example.
            return
        if (len(models), len(optimizers)) != (1, 1):
            raise ConfigError(
                f"a strategy of Tutti's trains one model with one optimiser, got {len(models)} models and "
                f"{len(optimizers)} optimisers. Make one module of the models, and give one optimiser all parameters."
            )
        self.start(models[0], optimizers[0])

    def start(self, model: nn.Module, optimizer: AcceleratedOptimizer) -> Job:
        """Distribute a prepared model. Collective."""
        if self.job is not None:
            raise ConfigError("a second model is prepared: finish the first with accelerator.finish().")
        self.job = distribute(model, optimizer.optimizer, self.synchronisation)
        return self.job

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place a model and apply mixed precision, without DDP."""
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward keeps gradients to this rank."""
        return nullcontext() if self.job is None else self.job.no_sync()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Hold the parameters that all ranks agree on in the model. Collective."""
        with nullcontext() if self.job is None else self.job.consensus():
            yield

    def finish(self) -> None:
        """Leave the parameters that all ranks agree on in the model, and release it. Collective. Idempotent."""
        if self.job is not None:
            self.job.finish()
            self.job = None
