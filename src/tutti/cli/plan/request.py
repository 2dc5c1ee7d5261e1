"""A request to the planner, checked before anything is measured."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tutti.cluster import parse_size
from tutti.errors import ConfigError
from tutti.recipes import recipe

if TYPE_CHECKING:
    from tutti.plan.goodput import FailureRates

MEASURED = "measured"
"""The `--cluster` that stands for processes on this machine."""

ALLOWED = ("lossy",)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The arguments of `tutti plan`. `resolved` refuses those that contradict each other."""

    model: str
    """A recipe's name, or "module:factory"."""
    options: dict[str, Any]
    """Options of the recipe or factory."""
    workers: int
    cluster: str
    """The name of a preset, the path of a TOML file, or `MEASURED`."""
    allow_lossy: bool
    batch: int | None
    """Samples per worker and step."""
    global_batch: int | None
    """Samples per step over all workers."""
    input_shape: str | None
    target_accuracy: float | None
    """Test accuracy to train to in virtual time, from 0 to 1."""
    epochs: int | None
    """Longest training for `target_accuracy`."""
    data: Path | None
    per_layer: bool
    meshes: bool
    memory_bytes: int | None
    """Memory of a worker; meshes that need more are marked."""
    failures: "FailureRates | None" = None
    """How often workers fail."""

    def _check(self) -> None:
        for option, size in (("--batch", self.batch), ("--global-batch", self.global_batch)):
            if size is not None and size < 1:
                raise ConfigError(f"{option} must be 1 or more, got {size}.")
        if self.batch is not None and self.global_batch is not None:
            raise ConfigError("give --batch or --global-batch, not both: the one divides by the workers to the other.")
        if self.workers < 1:
            raise ConfigError(f"workers must be 1 or more, got {self.workers}.")
        if self.target_accuracy is None:
            if self.epochs is not None:
                raise ConfigError("--epochs is how long to train for --target-accuracy, which was not given.")
            return
        if not 0 < self.target_accuracy <= 1:
            raise ConfigError(f"--target-accuracy is a fraction such as 0.97, got {self.target_accuracy:g}.")
        if ":" in self.model:
            raise ConfigError("--target-accuracy needs data to train on, which a recipe has and a factory has not.")

    def resolved(self) -> Self:
        """Check the request, and return it with the batch of a worker where the batch of all workers is known.

        A recipe that is trained to an accuracy has its own batch of all workers by default; data that cannot be
        divided over the workers is refused here.
        """
        from tutti.data import GlobalBatches
        from tutti.plan.scaling import share_of

        self._check()
        batch, global_batch = self.batch, self.global_batch
        if self.target_accuracy is not None:
            made = recipe(self.model, **self.options)
            # As given for a worker, as given for all workers, or the recipe's own, which is for all.
            global_batch = (self.workers * batch if batch is not None else global_batch) or made.batch_size
            # Made only for its checks, before anything is measured.
            GlobalBatches(len(made.data(self.data).train), global_batch, self.workers, seed=0)
        # The batch of one worker is what is measured; that of all workers decides the number of steps.
        if batch is None and global_batch is not None:
            batch = share_of(global_batch, self.workers)
        return replace(self, batch=batch, global_batch=global_batch)


def parse_allowed(words: list[str] | None) -> bool:
    """Whether `--allow lossy` was given."""
    for word in words or []:
        if word not in ALLOWED:
            raise ConfigError(f"--allow takes {' or '.join(map(repr, ALLOWED))}, got '{word}'.")
    return bool(words)


def parse_memory(text: str | None) -> int | None:
    """Bytes of the `--memory` of a worker; None if it was not given."""
    limit = None if text is None else parse_size(text)
    if limit is not None and limit < 1:
        raise ConfigError(f"--memory is what a worker has, such as 16GiB, got {text}.")
    return limit


def parse_failures(mtbf: str | None, repair: str | None) -> "FailureRates | None":
    """Return how often workers fail, by the texts of `--mtbf` and `--repair`; None without the former."""
    if mtbf is None:
        return None
    from tutti.plan.goodput import FailureRates  # Imports torch.

    return FailureRates.parse(mtbf, repair or "10m")
