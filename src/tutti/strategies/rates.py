"""`LearningRateRule`: how a learning rate that suits one worker must change for a strategy, or for a larger batch.

The reference is one worker that computes every step from the whole batch, as an exact strategy does. Strategies state
their rule in `Strategy.learning_rate`; the rule for larger batches, which holds under every strategy, is `batch_rule`.
"""

from dataclasses import dataclass
from math import inf, sqrt


@dataclass(frozen=True)
class LearningRateRule:
    """A factor for the learning rate, the steps over which it is reached, and the reason."""

    factor: float = 1.0
    """What the learning rate of one worker with the whole batch is multiplied by."""
    warmup_steps: int = 0
    """Steps in which a higher rate is reached, linearly from the old one."""
    reason: str = ""
    """One sentence with the source of the rule; empty if the rate stays as it is."""

    def __post_init__(self) -> None:
        assert 0 < self.factor < inf, self
        assert self.warmup_steps >= 0, self
        assert self.reason or (self.factor, self.warmup_steps) == (1.0, 0), f"a rule needs a reason: {self}"

    def __and__(self, other: "LearningRateRule") -> "LearningRateRule":
        """Return both rules as one."""
        return LearningRateRule(
            self.factor * other.factor,
            max(self.warmup_steps, other.warmup_steps),
            " ".join(reason for reason in (self.reason, other.reason) if reason),
        )


SAME_RATE = LearningRateRule()
"""The rate of one worker with the whole batch fits as it is."""

_WARMUP_EPOCHS = 5 / 90
"""Share of the training in which the rate of a larger batch is reached: 5 of 90 epochs in Goyal et al. (2017)."""


def stale_rule(staleness: float, updates: str) -> LearningRateRule:
    """Return the rule for updates computed from parameters that are `staleness` steps old: 1 / staleness.

    Args:
        updates: the beginning of the reason, such as "Updates are up to 3 steps old".
    """
    if staleness <= 1:
        return SAME_RATE
    return LearningRateRule(
        1 / staleness, reason=f"{updates}, which needs 1/{staleness:g} of the learning rate (Zhang et al. 2016)."
    )


def batch_rule(batch_size: int, reference: int, steps: int, adaptive: bool) -> LearningRateRule:
    """Return the rule for batches of another size than the `reference` that a learning rate was chosen for.

    Args:
        steps: of the whole training, of which a larger batch takes a part to warm up.
        adaptive: whether the optimiser divides by the gradient's magnitude, as Adam does.
    """
    if batch_size == reference:
        return SAME_RATE
    ratio = batch_size / reference
    source = "Malladi et al. 2022: the square root, with Adam" if adaptive else "Goyal et al. 2017: linear"
    return LearningRateRule(
        sqrt(ratio) if adaptive else ratio,
        round(_WARMUP_EPOCHS * steps) if ratio > 1 else 0,
        f"The batch of all workers is {ratio:.3g} times the {reference} samples that the learning rate is for "
        f"({source}).",
    )
