"""`attach`: a strategy at work between the present ranks of a world, with its checks."""

from typing import Any

from tutti.job.checks import TrainingChecks
from tutti.parallel.branch import Branches
from tutti.replica import HookedReplica
from tutti.strategies import Exchange, Strategy
from tutti.transports import for_devices
from tutti.world import World


def watch_training(replica: HookedReplica, exchange: Exchange, strategy: Strategy, world: World) -> None:
    """Check what the user does from now on. Collective."""
    # A single worker has nobody to differ from, and meta tensors have no values to compare.
    if world.size > 1 and not any(p.is_meta for p in replica.model.parameters()):
        checks = TrainingChecks(replica, exchange, strategy, world)
        if any(isinstance(module, Branches) for module in replica.model.modules()):
            checks.allow(any_loss=True, same_batches=True)  # The ranks of a group of branches are one worker.


def attach_again(replica: HookedReplica, strategy: Strategy, world: World, expected: dict[str, Any]) -> Exchange:
    """Attach a replica that was detached from the earlier ranks of the world. Collective.

    Args:
        expected: what the user has said of losses and batches (`job.expect`).
    """
    replica.renew()
    replica.activity = world.transport.activity
    transport = for_devices(world.transport, replica.device_types)
    exchange = strategy.attach(replica, transport.channel("job"))
    watch_training(replica, exchange, strategy, world)
    if expected.get("loss") == "sum":
        replica.sum_gradients(world.size, exchange.adds_up)
    if replica.checks is not None:
        replica.checks.allow(
            any_loss=expected.get("loss") is not None, same_batches=expected.get("same_batches", False)
        )
    return exchange
