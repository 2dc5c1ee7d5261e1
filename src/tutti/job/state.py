"""The state of a job besides its model and optimiser: its content, and what another strategy makes of it.

It is a plain dict of JSON values and tensors:

    strategy    the text of the strategy that saved it
    steps       number of steps
    parameters  shape of each trained parameter by name; none on a mesh
    exchange    the parts that the strategy saved, by name (`Exchange.state_dict`); on a mesh, a list of them

A strategy takes the parts that it has itself. The optimiser's state of parameter servers goes to the user's optimiser
where there are no servers. Other parts are dropped, and a line says what that means. Only the state of another model is
refused.
"""

import logging
from copy import deepcopy
from typing import Any

from tutti.errors import ConfigError
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.replica import Replica
from tutti.strategies import Exchange, Strategy

_log = logging.getLogger("tutti")

_DROPPED = {
    "residuals": "what compression had not sent yet of the last gradients is dropped, once",
    "block_residuals": "what compression had not sent yet of the last blocks is dropped, once",
    "block": (
        "the block of local steps that was under way is dropped: training continues from the model and the optimiser "
        "as they are, and block momentum starts at zero"
    ),
    "converged": "parameters that were skipped as converged are exchanged again",
}
"""The effect on the run of each part that is dropped."""


def job_state(
    strategy: Strategy, replica: Replica, exchange: Exchange, model_on_mesh: ModelOnMesh | None
) -> dict[str, Any]:
    """Return the state of a job, for `Job.state_dict`. Collective."""
    # On all ranks, although often one rank saves: a strategy may have to gather its state.
    local = exchange.state_dict()
    return {
        "strategy": str(strategy),
        "steps": replica.steps,
        "parameters": _shapes(replica) if model_on_mesh is None else {},
        "exchange": local if model_on_mesh is None else model_on_mesh.gather_state(local),
    }


def load_job_state(
    state: dict[str, Any],
    strategy: Strategy,
    replica: Replica,
    exchange: Exchange,
    model_on_mesh: ModelOnMesh | None,
) -> None:
    """Continue from the state of a job, for `Job.load_state_dict`. Collective.

    Raises `ConfigError` for a dict that is no such state, and for the state of another model, or of one that was split
    otherwise. Then nothing has changed.
    """
    if missing := {"strategy", "steps", "parameters", "exchange"} - state.keys():
        raise ConfigError(
            f"this is no state of a job: it has no {', '.join(sorted(missing))}. Give what job.state_dict() returned."
        )
    # A rank of a mesh has parts of parameters, whose shapes say nothing: `_parts` compares the splits instead.
    if state["parameters"] and model_on_mesh is None:
        _refuse_another_model(state["parameters"], _shapes(replica))
    # After this nothing is refused any more: a state of another model has changed nothing.
    parts = _parts(state["exchange"], model_on_mesh)
    replica.steps = state["steps"]
    dropped = exchange.load_state_dict(parts) if parts else set()
    # It was saved by parameter servers. Here the user's own optimiser steps, and takes it over.
    if "optimizer" in dropped:
        _load_optimizer(parts["optimizer"], replica)
    if exchange.transport.rank == 0:
        # "chosen" is the choice of `Auto`, which a strategy that was named does without.
        for name in sorted(dropped - {"optimizer", "chosen"}):
            meaning = _DROPPED.get(name, f"its '{name}' is dropped")
            _log.warning(
                "job.load_state_dict: saved under '%s', loaded under '%s': %s.", state["strategy"], strategy, meaning
            )


def _shapes(replica: Replica) -> dict[str, list[int]]:
    """Return the shape of every trained parameter, in the order of names."""
    return {slot.name: list(slot.tensor.shape) for slot in sorted(replica.slots, key=lambda slot: slot.name)}


def _refuse_another_model(saved: dict[str, list[int]], present: dict[str, list[int]]) -> None:
    """Raise `ConfigError` if parameters differ in name or shape, with the first difference."""
    for name in sorted(saved.keys() | present.keys()):
        if saved.get(name) != present.get(name):
            then, now = (
                f"'{name}' of shape {tuple(shapes[name])}" if name in shapes else f"no '{name}'"
                for shapes in (saved, present)
            )
            raise ConfigError(f"this state was saved of another model: it has {then}, and this model has {now}.")


def _parts(saved: dict[str, Any], model_on_mesh: ModelOnMesh | None) -> dict[str, Any]:
    """Return the parts that the exchange of this rank loads. Raises for the state of a model that was split."""
    if model_on_mesh is not None:
        return model_on_mesh.local_state(saved)
    # On a mesh the state has a list of "parts", one per part of the model.
    if not any(saved.get("parts", [saved])):
        return {}  # Saved on a mesh by a strategy without state: it goes with any split.
    if "parts" in saved:
        raise ConfigError(
            f"this state was saved of {saved['of']}, and this model is not split. Use the same mesh, or load "
            "the model and the optimiser alone, before distribute."
        )
    return saved


def _load_optimizer(states: dict[str, Any], replica: Replica) -> None:
    """Give the user's optimiser the state that servers kept, by parameter."""
    packed = replica.optimizer.state_dict()
    parameters = [p for group in replica.optimizer.param_groups for p in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for slot in replica.slots:
        if state := states.get(slot.name):
            # Copied: the optimiser changes its state in place, and the saved one is the user's.
            packed["state"][numbers[id(slot.tensor)]] = deepcopy(state)
    replica.optimizer.load_state_dict(packed)
