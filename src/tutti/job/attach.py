"""A strategy at work between the present ranks of a world, with its checks: which one, and its beginning and end."""

from typing import Any

from tutti.job.checks import TrainingChecks, follow
from tutti.parallel.branch import Branches
from tutti.replica import HookedReplica
from tutti.strategies import Exchange, Strategy
from tutti.transports import Transport
from tutti.world import World


def watch_training(replica: HookedReplica, exchange: Exchange, strategy: Strategy, world: World) -> None:
    """Check what the user does from now on. Collective."""
    # A single worker has nobody to differ from, and meta tensors have no values to compare.
    if world.size > 1 and not any(p.is_meta for p in replica.model.parameters()):
        checks = TrainingChecks(replica, exchange, strategy, world)
        if any(isinstance(module, Branches) for module in replica.model.modules()):
            checks.allow(any_loss=True, same_batches=True)  # The ranks of a group of branches are one worker.


def strategy_of_next_step(strategy: Strategy, replica: HookedReplica, transport: Transport) -> Strategy:
    """Return the strategy whose exchange takes the next step: another one while the training starts synchronously."""
    start = strategy.synchronous_start if replica.starts_synchronously else None
    return strategy if start is None or strategy.starts_in_place(transport) else start


def detach(replica: HookedReplica, exchange: Exchange, world: World) -> None:
    """Detach a replica from an exchange that has ended. Not collective. Idempotent."""
    world.usage.exchanges.discard(exchange)
    exchange.close()
    replica.detach()
    if replica.checks is not None:
        replica.checks.close()


def attach_again(
    replica: HookedReplica, strategy: Strategy, world: World, expected: dict[str, Any], channel: Transport
) -> Exchange:
    """Attach a replica that was detached from another exchange, on a channel of the world's ranks. Collective.

    Args:
        expected: what the user has said of losses and batches (`job.expect`).
    """
    replica.renew()
    replica.activity = world.transport.activity
    exchange = strategy.attach(replica, channel)
    watch_training(replica, exchange, strategy, world)
    if expected:
        follow(replica, exchange, world, **expected)
    return exchange
