"""Expectations of a job (`job.expect`): what the user says about losses and batches, for the checks of training."""

from typing import Literal

from tutti.collectives import all_gather_json
from tutti.errors import ConfigError
from tutti.replica import HookedReplica
from tutti.strategies import Exchange, Strategy
from tutti.world import World

LossKind = Literal["mean", "sum"]


def agree(replica: HookedReplica, strategy: Strategy, world: World, loss: LossKind | None, same_batches: bool) -> None:
    """Raise `ConfigError` if what the user says has no meaning here, or if ranks say different things. Collective."""
    mistake = _mistake(replica, strategy, loss)
    by_rank = all_gather_json([mistake, loss, same_batches], world.transport)
    if mistakes := [other for other, *_ in by_rank if other]:
        raise ConfigError(f"rank {world.rank}: {mistakes[0]}")
    for rank, (_, *said) in enumerate(by_rank):
        if said != by_rank[0][1:]:
            raise ConfigError(
                f"rank {world.rank}: job.expect differs between ranks: rank 0 gave loss={by_rank[0][1]!r} and "
                f"same_batches={by_rank[0][2]}, rank {rank} gave loss={said[0]!r} and same_batches={said[1]}."
            )


def follow(replica: HookedReplica, exchange: Exchange, world: World, loss: LossKind | None, same_batches: bool) -> None:
    """Follow what the user says, on which all ranks have agreed."""
    if loss == "sum":
        replica.sum_gradients(world.size, exchange.adds_up)
    if replica.checks is not None:
        replica.checks.allow(any_loss=loss is not None, same_batches=same_batches)


def _mistake(replica: HookedReplica, strategy: Strategy, loss: str | None) -> str:
    if replica.steps or replica.contribution.num_exchanges or replica.contribution.num_summed:
        return "job.expect is called once, before the first backward pass."
    if loss not in (None, "mean", "sum"):
        return f'job.expect: loss must be "mean" or "sum", got {loss!r}.'
    if loss == "sum" and not strategy.steps_by_mean_gradient:
        return (
            f'job.expect: loss="sum" has no meaning under {strategy}, whose ranks step by their own gradients and do '
            "not add them up. Use a mean, or tutti.AllReduce(...)."
        )
    return ""
