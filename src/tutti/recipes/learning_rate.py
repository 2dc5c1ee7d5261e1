"""The learning rate of a training run: the recipe's, a number, or by the rule of the strategy (`lr="auto"`)."""

from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from tutti.strategies import Strategy
from tutti.strategies.rates import LearningRateRule, batch_rule

LearningRate = float | Literal["auto"] | None
"""The recipe's rate if None; the recipe's rate changed by the rules of strategy and batch if "auto"; or a number."""


def combined_rule(
    strategy: Strategy, optimizer: Optimizer, *, num_workers: int, batch_size: int, reference: int, steps: int
) -> LearningRateRule:
    """Return the rule of the strategy and that of the batch as one.

    Args:
        batch_size: samples per step over all workers.
        reference: samples per step that the optimiser's learning rate was chosen for.
        steps: number of steps of the whole training.
    """
    adaptive = "eps" in optimizer.defaults  # Adam and its relatives divide by a magnitude plus eps; SGD does not.
    return strategy.learning_rate(num_workers) & batch_rule(batch_size, reference, steps, adaptive)


def set_rate(optimizer: Optimizer, lr: LearningRate, rule: LearningRateRule) -> LRScheduler | None:
    """Change the rates of all parameter groups, and return a scheduler if the rate is to be warmed up.

    A number becomes the learning rate of the first group, and the others keep their ratio to it.
    """
    if lr == "auto":
        rule.apply(optimizer)
    elif lr is not None:
        factor = lr / optimizer.param_groups[0]["lr"]
        for group in optimizer.param_groups:
            group["lr"] *= factor
    # Only a rate that was raised is warmed up: from the recipe's own rate, in a line.
    if lr != "auto" or rule.warmup_steps == 0 or rule.factor <= 1:
        return None
    return LinearLR(optimizer, start_factor=1 / rule.factor, total_iters=rule.warmup_steps)
