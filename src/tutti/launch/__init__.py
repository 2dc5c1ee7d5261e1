"""Launching: start workers (`launch`), and in each worker meet the others (`init`)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.launch.local import launch
    from tutti.launch.rendezvous import init

__all__ = ["init", "launch"]


def __getattr__(name: str) -> Any:
    # Late, so that a supervisor, which needs no torch, does not wait for its import.
    if name == "launch":
        from tutti.launch.local import launch

        return launch
    if name == "init":
        from tutti.launch.rendezvous import init

        return init
    raise AttributeError(f"module 'tutti.launch' has no attribute '{name}'")
