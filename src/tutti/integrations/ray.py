"""`TuttiConfig`: Ray Train starts the workers, and Tutti synchronises them.

    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer
    from tutti.integrations.ray import TuttiConfig

    trainer = TorchTrainer(train, torch_config=TuttiConfig(), scaling_config=ScalingConfig(num_workers=4))
    trainer.fit()

In `train`, `tutti.init()` returns the world of Ray Train's workers. Reports, checkpoints, datasets, failures and Tune
stay Ray Train's. torch's default group is there as well, of backend "tutti", for code that asks for ranks, such as
`ray.train.torch.prepare_data_loader` and metrics.

How it works. Ray Train calls `on_start` before `train`, also after it has replaced lost workers: each time the first
worker chooses where the coordinator will listen, and all get the variables that torchrun would set, with a new secret.
`on_shutdown` closes the world.
"""

import secrets
import socket
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from tutti.launch import init
from tutti.launch.environment import set_variables
from tutti.world import current_world


@dataclass
class TuttiConfig(TorchConfig):
    """Connects the workers of a Ray Train trainer by Tutti."""

    backend: str | None = "tutti"

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that sets the workers up."""
        return TuttiBackend


class TuttiBackend(Backend):
    """Tells the workers of a Ray Train trainer who they are and where they meet."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: TuttiConfig) -> None:
        """Give every worker its variables, and let all join the world."""
        address, port = worker_group.execute_single(0, _free_port)
        shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TUTTI_SECRET": secrets.token_hex(32)}
        worker_group.execute(_set_variables, shared)
        worker_group.execute(_join)

    def on_shutdown(self, worker_group: Any, backend_config: TuttiConfig) -> None:
        """Close the world of every worker."""
        worker_group.execute(_close)


def _free_port() -> tuple[str, int]:
    """Return the address of this node, and a port that is free there."""
    address = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return address, probe.getsockname()[1]


def _set_variables(shared: dict[str, str]) -> None:
    """Set the variables of this worker as torchrun would."""
    context = ray.train.get_context()
    numbers = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
    }
    set_variables({**shared, **{name: str(number) for name, number in numbers.items()}})


def _join() -> None:
    init(torch_distributed=True)


def _close() -> None:
    if (world := current_world()) is not None:
        world.close()
