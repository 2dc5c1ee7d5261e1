"""The state of a job beside its model and optimiser: what is saved, and what of a saved state this job can use."""

from typing import Any

from tutti.errors import ConfigError
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.strategies import Exchange, Strategy


def job_state(strategy: Strategy, steps: int, exchange: Exchange, model_on_mesh: ModelOnMesh | None) -> dict[str, Any]:
    """Return what `Job.state_dict` returns. Collective."""
    own = exchange.state_dict()
    return {
        "strategy": str(strategy),
        "steps": steps,
        "exchange": own if model_on_mesh is None else model_on_mesh.gather_state(own),
    }


def exchange_state(state: dict[str, Any], strategy: Strategy, model_on_mesh: ModelOnMesh | None) -> dict[str, Any]:
    """Return the part of a job's saved state that the exchange of this rank loads.

    Raises `ConfigError` for what is no such state, for one of a strategy that cannot go on from it, and for one of a
    model that was split otherwise.
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
    own = state["exchange"]
    if model_on_mesh is not None:
        return model_on_mesh.local_state(own)
    if not any(own.get("parts", [own])):
        return {}  # Saved on a mesh by a strategy without state: it goes with any split.
    if "parts" in own:
        raise ConfigError(
            f"this state was saved of {own['of']}, and this model is not split. Use the same mesh, or load "
            "the model and the optimiser alone, before distribute."
        )
    return own
