"""`LearningRateRule`: how a learning rate that suits one worker must change for a strategy, or for a larger batch.

The reference is one worker that computes every step from the whole batch, as an exact strategy does. Strategies state
their rule in `Strategy.learning_rate`; the rule for larger batches, which holds under every strategy, is `batch_rule`.

With momentum m, a gradient moves parameters by lr / (1 - m) in the long run: the effective rate, which rules scale.
"""

from dataclasses import dataclass, replace
from math import inf, sqrt

from torch.optim import Optimizer

from tutti.codecs import Codec, print_codec


@dataclass(frozen=True)
class LearningRateRule:
    """A factor for the learning rate, one for momentum, when they begin to hold, and the reason."""

    factor: float = 1.0
    """What the effective rate of one worker with the whole batch is multiplied by."""
    momentum_factor: float = 1.0
    """What 1 - momentum is multiplied by, where the optimiser has a momentum; it does not fall below 0."""
    warmup_steps: int = 0
    """Steps in which a higher rate is reached, linearly from the old one."""
    synchronous_share: float = 0.0
    """Share of the training, at its start, in which steps are synchronous and the rate is that of one worker. The
    factors hold from then on."""
    gradient_scale: float = 1.0
    """What the strategy itself multiplies gradients by. The steps of Adam and its relatives do not depend on the scale
    of gradients, so that the learning rate takes this factor too."""
    reason: str = ""
    """One sentence with the source of the rule; empty if the rate stays as it is."""

    def __post_init__(self) -> None:
        assert 0 < self.factor < inf, self
        assert 1 <= self.momentum_factor < inf, self
        assert self.warmup_steps >= 0, self
        assert 0 <= self.synchronous_share < 1, self
        assert 0 < self.gradient_scale <= 1, self
        same = (self.factor, self.momentum_factor, self.warmup_steps, self.synchronous_share) == (1.0, 1.0, 0, 0.0)
        assert self.reason or same, f"a rule needs a reason: {self}"

    def __and__(self, other: "LearningRateRule") -> "LearningRateRule":
        """Return both rules as one."""
        return LearningRateRule(
            self.factor * other.factor,
            self.momentum_factor * other.momentum_factor,
            max(self.warmup_steps, other.warmup_steps),
            max(self.synchronous_share, other.synchronous_share),
            self.gradient_scale * other.gradient_scale,
            " ".join(reason for reason in (self.reason, other.reason) if reason),
        )

    def synchronous_steps(self, num_steps: int) -> int:
        """Return how many steps of a training of `num_steps` are synchronous, for `job.start_synchronously`."""
        return int(self.synchronous_share * num_steps)

    def changed(self, lr: float, momentum: float = 0.0, adaptive: bool = False) -> tuple[float, float]:
        """Return the learning rate and the momentum to use in place of those of one worker.

        `adaptive` says whether steps are those of Adam or a relative (`is_adaptive`).
        """
        factor = self.factor * (self.gradient_scale if adaptive else 1.0)
        lower = max(0.0, 1 - (1 - momentum) * self.momentum_factor)
        # Of the effective rate, momentum has taken its part: the rest is the learning rate's.
        return lr * factor * (1 - lower) / (1 - momentum), lower

    def apply(self, optimizer: Optimizer) -> None:
        """Change the learning rate and the momentum of every parameter group, from the next step on.

        Call it before `tutti.distribute`, or when as many steps as `synchronous_steps` are taken.

        The momentum of Adam and its relatives (`betas`) stays: their steps have the length lr whatever it is.
        """
        for group in optimizer.param_groups:
            momentum = group.get("momentum", 0.0)
            group["lr"], lower = self.changed(group["lr"], momentum, is_adaptive(optimizer))
            if momentum:
                group["momentum"] = lower


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether an optimiser divides by the gradient's magnitude, as Adam does: its steps have the length lr."""
    return "eps" in optimizer.defaults  # What it adds to a magnitude that it divides by; SGD has none.


SAME_RATE = LearningRateRule()
"""The rate of one worker with the whole batch fits as it is."""

_SYNCHRONOUS_SHARE = 1 / 2
"""Share of the training with synchronous steps where those after it are stale. With 1/4, cifar-quick ends lower."""

_WARMUP_EPOCHS = 5 / 90
"""Share of the training in which the rate of a larger batch is reached: 5 of 90 epochs in Goyal et al. (2017)."""


def momentum_rule(staleness: int, updates: str) -> LearningRateRule:
    """Return the rule for steps that all workers take together, by gradients that are up to `staleness` steps old.

    A gradient that arrives late acts as if it had been kept back by momentum: s steps as momentum 1 - 1/(s + 1) does
    (Mitliagkas et al. 2016). So the effective rate is divided by s + 1, and momentum gives way first: 1 - momentum is
    multiplied by s + 2. Theory, for delays that vary around s, has s + 1; with a bound, most delays are near it, and
    one more ends higher (digits and mnist-mlp, ps:ssp=3).

    Args:
        updates: the beginning of the reason, such as "Updates are up to 3 steps old".
    """
    if staleness == 0:
        return SAME_RATE
    return LearningRateRule(
        1 / (staleness + 1),
        staleness + 2,
        reason=f"{updates}, which acts as momentum does: 1 - momentum should be {staleness + 2} times as large, or "
        f"else the learning rate 1/{staleness + 1} (Mitliagkas et al. 2016).",
    )


def compression_rule(codec: Codec | None) -> LearningRateRule:
    """Return the rule for steps of compressed gradients: what a codec leaves out comes later, as a stale gradient.

    Where it comes more than a step later, the training starts with exact steps.
    """
    if codec is None:
        return SAME_RATE
    rule = momentum_rule(codec.delay, f"What '{print_codec(codec)}' leaves out is sent {codec.delay} or so steps later")
    if codec.delay <= 1:
        return rule
    reason = (
        f"{rule.reason} The training starts with exact steps, as those of Lin et al. (2018) start with denser ones."
    )
    return replace(rule, synchronous_share=_SYNCHRONOUS_SHARE, reason=reason)


def synchronous_start_rule(staleness: int, updates: str) -> LearningRateRule:
    """Return the rule for steps as those of `momentum_rule`, where the training can start with synchronous ones.

    Momentum 0.9 raises the largest stable rate of synchronous steps 19 times, and that of stale steps not at all. So a
    model is trained at its own rate first. Afterwards the effective rate is divided by (s + 1)^2, as a schedule would
    lower it then anyway: at 1/(s + 1) what was learned before is lost again (docs/learning-rates.md).

    Args:
        updates: the beginning of the reason, such as "Updates are up to 3 steps old".
    """
    if staleness == 0:
        return SAME_RATE
    num_parts = (staleness + 1) ** 2
    return LearningRateRule(
        1 / num_parts,
        staleness + 2,
        synchronous_share=_SYNCHRONOUS_SHARE,
        reason=f"{updates}, which needs a synchronous start, and then 1/{num_parts} of the effective rate with "
        f"{staleness + 2} times 1 - momentum (Dean et al. 2012, Mitliagkas et al. 2016).",
    )


def stale_rule(num_steps: float, updates: str) -> LearningRateRule:
    """Return the rule for `num_steps` steps where one worker takes one, by gradients that are about as many steps old.

    They are of a part of the batch each, and share its rate. Together they are as stale as steps of the whole batch
    with gradients of one step ago: a model is trained by synchronous steps first, and the effective rate is divided by
    2^2 then, as in `synchronous_start_rule`. Momentum stays: where it lasts no longer than the gradients are old, it
    hardly changes which rates are stable (docs/learning-rates.md).

    Args:
        updates: the beginning of the reason, such as "8 workers take 8 steps where one worker takes one".
    """
    if num_steps <= 1:
        return SAME_RATE
    return LearningRateRule(
        1 / (4 * num_steps),
        synchronous_share=_SYNCHRONOUS_SHARE,
        reason=f"{updates}, from parameters as many steps old, which needs a synchronous start, and then "
        f"1/{4 * num_steps:g} of the learning rate (Dean et al. 2012, Zhang et al. 2016).",
    )


def local_steps_rule(distance: float) -> LearningRateRule:
    """Return the rule for local steps, whose mean change over workers moves the model `distance` times as far.

    A model is trained by synchronous steps first, and local ones follow at a lower rate, as after the first decay of a
    schedule (Lin et al. 2020). With 1/4 no worker gets far from the others in a block. A block momentum needs less in
    the long run, if it moves the model further (Chen & Huo 2016).
    """
    num_parts = max(4.0, distance)
    moved = f", whose mean change moves the model {distance:.3g} times as far" if distance > 1 else ""
    return LearningRateRule(
        1 / num_parts,
        synchronous_share=_SYNCHRONOUS_SHARE,
        reason=f"Workers take local steps{moved}: that needs a synchronous start, and then 1/{num_parts:.3g} of the "
        "learning rate (Lin et al. 2020, Chen & Huo 2016).",
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
        warmup_steps=round(_WARMUP_EPOCHS * steps) if ratio > 1 else 0,
        reason=f"The batch of all workers is {ratio:.3g} times the {reference} samples that the learning rate is for "
        f"({source}).",
    )
