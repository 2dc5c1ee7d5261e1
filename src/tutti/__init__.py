"""Train PyTorch models on many processes and machines, over any network, with any strategy."""

from tutti import backend
from tutti.cluster import Cluster, Link
from tutti.data.shard import shard
from tutti.errors import TuttiError
from tutti.job import Job, distribute, measure_link, sync_batchnorm
from tutti.launch import init, launch
from tutti.launch.lab.lab import lab
from tutti.launch.torch_groups import open_group
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
from tutti.world import World, world

backend.register(open_group)

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
    "init",
    "lab",
    "launch",
    "measure_link",
    "profile",
    "shard",
    "simulate",
    "sync_batchnorm",
    "tensor_plan",
    "world",
]
