"""The state of a job besides its model and optimiser: its content, and the checks when it is loaded."""

from typing import Any

from tutti.errors import ConfigError
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.strategies import Exchange, Strategy


def job_state(strategy: Strategy, steps: int, exchange: Exchange, model_on_mesh: ModelOnMesh | None) -> dict[str, Any]:
    """Return the state of a job, for `Job.state_dict`. Collective."""
    local = exchange.state_dict()
    return {
        "strategy": str(strategy),
        "steps": steps,
        "exchange": local if model_on_mesh is None else model_on_mesh.gather_state(local),
    }


def exchange_state(state: dict[str, Any], strategy: Strategy, model_on_mesh: ModelOnMesh | None) -> dict[str, Any]:
    """Return the part of a job's saved state that the exchange of this rank loads.

    Raises `ConfigError` for a dict that is no such state, for the state of a strategy that this one cannot resume from,
    and for the state of a model that was split otherwise.
    """
    if missing := {"strategy", "steps", "exchange"} - state.keys():
        raise ConfigError(
            f"this is no state of a job: it has no {', '.join(sorted(missing))}. Give what job.state_dict() returned."
        )
    if not strategy.can_resume_from(state["strategy"]):
        raise ConfigError(
            f"this state was saved under strategy '{state['strategy']}' and cannot be used under "
            f"'{strategy}'. Load the model and the optimiser alone, before distribute, or use that strategy."
        )
    saved = state["exchange"]
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
