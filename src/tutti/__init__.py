"""Train PyTorch models on many processes and machines, over any network, with any strategy.

The public names, and subpackages such as `tutti.collectives`, are imported when they are first used: a command that
needs no torch does not wait for it.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.cluster import Cluster, Link
    from tutti.data.shard import shard
    from tutti.errors import TuttiError
    from tutti.fit.call import fit
    from tutti.fit.summary import summary
    from tutti.job import Job, distribute, measure_link, sync_batchnorm
    from tutti.launch import init, launch
    from tutti.launch.lab.lab import lab
    from tutti.parallel import Mesh, Pipeline, tensor_plan
    from tutti.parallel.branch import Branches
    from tutti.plan import Profile
    from tutti.plan.auto import Auto
    from tutti.plan.profile import profile
    from tutti.simulation.runs.simulate import Simulation, simulate
    from tutti.strategies import (
        BSP,
        SSP,
        AllReduce,
        Async,
        Averaging,
        BlockMomentum,
        DiLoCo,
        Gossip,
        Graph,
        ParameterServer,
        PeerUpdates,
        Poseidon,
        SoftSync,
        StalenessAware,
    )
    from tutti.world import World, print, world

__version__ = "0.1.0.dev0"

__all__ = [
    "BSP",
    "SSP",
    "AllReduce",
    "Async",
    "Auto",
    "Averaging",
    "BlockMomentum",
    "Branches",
    "Cluster",
    "DiLoCo",
    "Gossip",
    "Graph",
    "Job",
    "Link",
    "Mesh",
    "ParameterServer",
    "PeerUpdates",
    "Pipeline",
    "Poseidon",
    "Profile",
    "Simulation",
    "SoftSync",
    "StalenessAware",
    "TuttiError",
    "World",
    "distribute",
    "fit",
    "init",
    "lab",
    "launch",
    "measure_link",
    "print",
    "profile",
    "shard",
    "simulate",
    "summary",
    "sync_batchnorm",
    "tensor_plan",
    "world",
]

_MODULES = {
    "tutti.cluster": "Cluster Link",
    "tutti.data.shard": "shard",
    "tutti.errors": "TuttiError",
    "tutti.fit.call": "fit",
    "tutti.fit.summary": "summary",
    "tutti.job": "Job distribute measure_link sync_batchnorm",
    "tutti.launch": "init launch",
    "tutti.launch.lab.lab": "lab",
    "tutti.parallel": "Mesh Pipeline tensor_plan",
    "tutti.parallel.branch": "Branches",
    "tutti.plan": "Profile",
    "tutti.plan.auto": "Auto",
    "tutti.plan.profile": "profile",
    "tutti.simulation.runs.simulate": "Simulation simulate",
    "tutti.strategies": "BSP SSP AllReduce Async Averaging BlockMomentum DiLoCo "
    "Gossip Graph ParameterServer PeerUpdates Poseidon SoftSync StalenessAware",
    "tutti.world": "World print world",
}
"""Public names by the module they come from."""

_WITHOUT_TORCH = {"tutti.cluster", "tutti.errors"}
"""Those of them that need no torch, so that its version does not matter."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

_SUBMODULES = {
    "backend", "bench", "checkpoint", "cli", "cluster", "codecs", "collectives", "coordination", "cost", "data",
    "errors", "events", "integrations", "job", "measurement", "parallel", "plan", "plugins", "recipes", "replica",
    "report", "simulation", "strategies", "transports", "versions",
}  # fmt: skip
"""Submodules that are attributes of `tutti`: all but those that have the name of a public function."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"tutti.{name}")  # The import system sets the attribute.
    if name not in _HOMES:
        raise AttributeError(f"module 'tutti' has no attribute '{name}'")
    if _HOMES[name] not in _WITHOUT_TORCH:
        from tutti.versions import check_torch

        check_torch()
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


class _Package(ModuleType):
    """This package, in which a submodule cannot hide the public function of the same name (`launch`, `world`)."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets each submodule as an attribute of its package.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)  # As for any module, for cloudpickle, which knows plain modules only.


sys.modules[__name__].__class__ = _Package  # Before the first submodule is imported.
import_module("tutti.launch.backend_registration").register_backend()
