"""The state of a job besides its model and optimiser: its content, and what another strategy or world makes of it.

It is a plain dict of JSON values and tensors:

    strategy    the text of the strategy that saved it
    steps       number of steps
    parameters  shape of each trained parameter by name
    exchange    the parts that the strategy saved, by name (`Exchange.state_dict`)

These are the parts of Tutti's strategies, and what becomes of each where the strategy that continues has no such part:

    residuals         gradients that a codec had not sent yet: added to the gradient of the next step
    block_residuals   changes of a block that a codec had not sent yet: added to the parameters
    update_residuals  changes of a step that a codec had not sent yet: added to the parameters
    owed              gradients of `residuals` that no step has taken yet: added to the gradient of the next step
    optimizer         the optimiser's state that servers have: given to the user's optimiser
    block             a block of local steps, with the parameters and the optimiser of each rank: dropped
    replicas          the parameters, buffers and optimiser of each rank among peers: dropped
    converged         which parameters are skipped as converged: dropped
    buffers           buffers that each rank has by itself: dropped, if the number of ranks is another
    order, algorithms, methods, chosen
                      how gradients are summed: decided anew

A line says what is dropped, and what that means for the run. Only the state of another model is refused.
"""

import logging
from typing import Any

from tutti.collectives.calls import CollectiveCalls
from tutti.errors import ConfigError
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.replica import Replica
from tutti.strategies import Exchange, Strategy
from tutti.strategies.compressed_state import owed
from tutti.strategies.saved_state import gather_ranks, load_optimizer_states, optimizer_states

_log = logging.getLogger("tutti")

_DROPPED = {
    "block": (
        "the block of local steps that was under way is dropped: training continues from the mean of all ranks' "
        "models and the first rank's optimiser, and block momentum starts at zero"
    ),
    "block momentum": "block momentum is dropped: the next blocks move the model less far than the last ones did",
    "replicas": (
        "the models that ranks had of their own are dropped: all ranks continue from their mean, and with the first "
        "rank's optimiser"
    ),
    "converged": "parameters that were skipped as converged are exchanged again",
}
"""The effect on the run of each part that is dropped."""

_REMADE = {"order", "algorithms", "methods", "chosen", "buffers"}
"""Parts without which a run is only summed in another order, or starts from the first rank's buffers."""


def job_state(
    strategy: Strategy,
    replica: Replica,
    exchange: Exchange,
    calls: CollectiveCalls,
    model_on_mesh: ModelOnMesh | None,
    everywhere: bool = True,
) -> dict[str, Any]:
    """Return the state of a job, on a mesh with this rank's part of the strategy's state. Collective along `data`."""
    return {
        "strategy": str(strategy),
        "steps": replica.steps,
        "parameters": parameter_shapes(replica, model_on_mesh),
        "exchange": gather_ranks(exchange_state(replica, exchange), calls, exchange.tolerates_loss, everywhere),
    }


def exchange_state(replica: Replica, exchange: Exchange) -> dict[str, Any]:
    """Return the parts of a strategy, with a `PerRank` for every value of which each rank has its own."""
    parts = exchange.state_dict()
    if replica.owed:
        # In units of the mean, as `Exchange.add_to_gradient` takes it.
        factor = exchange.num_workers * exchange.gradient_share
        parts["owed"] = {name: value * factor for name, value in replica.owed.items()}
    return parts


def load_job_state(
    state: dict[str, Any],
    strategy: Strategy,
    replica: Replica,
    exchange: Exchange,
    model_on_mesh: ModelOnMesh | None,
) -> None:
    """Continue from the state of a job, for `Job.load_state_dict`. Collective.

    Raises `ConfigError` for a dict that is no such state, and for the state of another model. Then nothing has changed.
    """
    if missing := {"strategy", "steps", "parameters", "exchange"} - state.keys():
        raise ConfigError(
            f"this is no state of a job: it has no {', '.join(sorted(missing))}. Give what job.state_dict() returned."
        )
    refuse_another_model(state["parameters"], parameter_shapes(replica, model_on_mesh))
    # After this nothing is refused any more: a state of another model has changed nothing.
    parts = state["exchange"] if model_on_mesh is None else model_on_mesh.local_state(state["exchange"])
    replica.steps = state["steps"]
    replica.owed.clear()
    unused = set[str]()
    if replica.restoring:
        # The model and the optimiser were loaded after `distribute`: servers take over the state of the optimiser too.
        loaded = {"optimizer": optimizer_states(replica.optimizer, replica.slots)} if "optimizer" not in parts else {}
        unused = exchange.load_state_dict({**loaded, **parts}) - loaded.keys()
    elif parts:
        unused = exchange.load_state_dict(parts)
    dropped = _convert({name: parts[name] for name in unused & parts.keys()}, replica, exchange)
    dropped |= unused - parts.keys()  # Of a part that it uses, what it has no use for.
    if exchange.transport.rank == 0:
        for name in sorted(dropped):
            meaning = _DROPPED.get(name, f"its '{name}' is dropped")
            _log.warning(
                "the state was saved under '%s' and continues under '%s': %s.", state["strategy"], strategy, meaning
            )


def _convert(parts: dict[str, Any], replica: Replica, exchange: Exchange) -> set[str]:
    """Use the parts that an exchange has not used in another way; return the names of those that have no use."""
    for name in ("block_residuals", "update_residuals"):  # In one order: it is collective.
        if name in parts:
            exchange.add_to_model(owed(parts.pop(name)))
    # After the model, from which servers start again: they take the state of the optimiser as well.
    if "optimizer" in parts:
        load_optimizer_states(replica.optimizer, replica.slots, parts.pop("optimizer"))
    if "residuals" in parts:
        exchange.add_to_gradient(owed(parts.pop("residuals")))
    exchange.add_to_gradient(parts.pop("owed", {}))
    return parts.keys() - _REMADE


def parameter_shapes(replica: Replica, model_on_mesh: ModelOnMesh | None) -> dict[str, list[int]]:
    """Return the shape of every trained parameter of the whole model, in the order of names."""
    if model_on_mesh is not None:
        return model_on_mesh.trained_shapes
    return {slot.name: list(slot.tensor.shape) for slot in sorted(replica.slots, key=lambda slot: slot.name)}


def refuse_another_model(saved: dict[str, list[int]], present: dict[str, list[int]], what: str = "this state") -> None:
    """Raise `ConfigError` if parameters differ in name or shape, with the first difference."""
    for name in sorted(saved.keys() | present.keys()):
        if saved.get(name) != present.get(name):
            then, now = (
                f"'{name}' of shape {tuple(shapes[name])}" if name in shapes else f"no '{name}'"
                for shapes in (saved, present)
            )
            raise ConfigError(f"{what} was saved of another model: it has {then}, and this model has {now}.")
