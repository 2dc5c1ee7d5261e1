"""The learning rate of a training run: the recipe's, a number, or by the rule of the strategy (`lr="auto"`)."""

from typing import Literal

from torch.optim import Optimizer

from tutti.strategies.rates import SAME_RATE, LearningRateRule, batch_rule, is_adaptive

LearningRate = float | Literal["auto"] | None
"""The recipe's rate if None; the recipe's rate changed by the rules of strategy and batch if "auto"; or a number."""


class RateSchedule:
    """The learning rate and the momentum of every parameter group by the rules of strategy and batch, step by step.

    They depend on the number of the step alone. So there is nothing to save in a checkpoint, and a run that continues
    from one with another strategy or for more epochs has the rates of its own rules.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: LearningRateRule = SAME_RATE,
        batch: LearningRateRule = SAME_RATE,
        num_steps: int = 0,
    ) -> None:
        """Set what holds in the first of `num_steps` steps. The optimiser has the rates of one worker."""
        self._optimizer, self._strategy, self._batch = optimizer, strategy, batch
        self._alone = [(group["lr"], group.get("momentum", 0.0)) for group in optimizer.param_groups]
        self.synchronous_steps = strategy.synchronous_steps(num_steps)
        """Steps at the start of the training that are synchronous, at the rate of one worker."""
        self.set(0)

    def set(self, num_steps: int) -> None:
        """Set what holds in the next step, after `num_steps` of the whole training."""
        if self._strategy == self._batch == SAME_RATE:
            return  # Whatever a recipe does with its rates itself.
        rule = SAME_RATE if num_steps < self.synchronous_steps else self._strategy
        for group, alone in zip(self._optimizer.param_groups, self._alone, strict=True):
            lr, momentum = rule.changed(*alone, is_adaptive(self._optimizer))
            group["lr"] = lr * self._batch_factor(num_steps)
            if "momentum" in group:
                group["momentum"] = momentum

    def _batch_factor(self, num_steps: int) -> float:
        """The factor for the size of the batch: a higher rate is reached in a line, from the old one."""
        factor, warmup_steps = self._batch.factor, self._batch.warmup_steps
        return factor if num_steps >= warmup_steps else 1 + (factor - 1) * num_steps / warmup_steps


def set_rate(
    optimizer: Optimizer, lr: LearningRate, strategy: LearningRateRule, batch: LearningRateRule, num_steps: int
) -> RateSchedule:
    """Set the rates of all parameter groups, and return their schedule in the `num_steps` of the training.

    A number becomes the learning rate of the first group, and the others keep their ratio to it. Rules are for "auto".
    """
    if lr == "auto":
        return RateSchedule(optimizer, strategy, batch, num_steps)
    if lr is not None:
        factor = lr / optimizer.param_groups[0]["lr"]
        for group in optimizer.param_groups:
            group["lr"] *= factor
    return RateSchedule(optimizer)


def rule_of_batch(optimizer: Optimizer, batch_size: int, reference: int, num_steps: int) -> LearningRateRule:
    """Return the rule for batches of `batch_size`, where the optimiser's rate was chosen for those of `reference`."""
    return batch_rule(batch_size, reference, num_steps, is_adaptive(optimizer))
