"""Results of the reproduction on error feedback."""

from dataclasses import dataclass

from tutti.bench.compression import DEFAULT_CODECS

EXACT = "native"
"""Strategy of the uncompressed runs."""


@dataclass(frozen=True, kw_only=True)
class ErrorFeedbackConfig:
    """What is trained."""

    workers: int = 4
    codecs: tuple[str, ...] = DEFAULT_CODECS
    seeds: tuple[int, ...] = (0, 1, 2)
    accuracy_recipe: str = "mnist-mlp"
    """Recipe that is trained with every codec."""
    epochs: int = 4
    curve_recipes: tuple[str, ...] = ("cifar-quick", "char-lstm")
    """Recipes of which learning curves are recorded."""
    curve_epochs: int | None = None
    """Epochs of the curves; None for those of the recipe."""
    curve_codecs: tuple[str, ...] = ("onebit", "topk", "lowrank")


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One report during training."""

    epoch: float
    loss: float
    accuracy: float | None = None
    """Test accuracy; None for a report between two tests."""


@dataclass(frozen=True, kw_only=True)
class CompressedTraining:
    """Outcome of one training run; accuracy, bytes and target are None if the loss became infinite or NaN."""

    recipe: str
    strategy: str
    seed: int
    accuracy: float | None
    bytes_per_step: float | None
    """Bytes sent by one worker per step."""
    target: float | None
    points: tuple[CurvePoint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ErrorFeedbackResults:
    """All measurements."""

    machine: str
    quick: bool
    config: ErrorFeedbackConfig
    accuracy: tuple[CompressedTraining, ...]
    curves: tuple[CompressedTraining, ...]


def without_feedback(codec: str) -> str:
    """Return the text of a codec without error feedback."""
    return f"{codec}{',' if ':' in codec else ':'}feedback=0"


def strategies(codec: str) -> tuple[str, str]:
    """Return the strategies with a codec, with error feedback and without."""
    return codec, without_feedback(codec)
