"""`UndistributedCheck`: ranks of one run that each train a model of their own, because `distribute` was forgotten.

The first step of an optimiser in such a process writes a warning, once, on the first rank. If it stays so until the
end, the run ends with an error: the ranks have trained separate models. A process that communicates in another way, by
Tutti's collectives or by a group of torch.distributed, is not judged.
"""

import logging
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tutti.world import World

_log = logging.getLogger("tutti")


class UndistributedCheck:
    """Watches the optimisers of one process until a model is distributed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent_before = world.transport.bytes_sent
        self._num_steps = 0
        self._communicates = False
        # A hook of the process, for all optimisers: the user's own is not known here.
        self._handle: Any = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        # The hook stays: torch iterates over the hooks while it calls them.
        self._communicates = self._communicates or self._is_distributed()
        if self._communicates:
            return
        self._num_steps += 1
        if self._num_steps == 1 and self._world.rank == 0:
            _log.warning("%s", self._message())

    def _is_distributed(self) -> bool:
        """Whether this process has distributed a model, or communicates in another way."""
        world = self._world
        sent = world.transport.bytes_sent != self._sent_before
        return world.usage.num_jobs > 0 or sent or (dist.is_available() and dist.is_initialized())

    def _message(self) -> str:
        return (
            f"rank {self._world.rank}: an optimiser has stepped in a world of {self._world.size} ranks, and no model "
            "is distributed: each rank trains a model of its own. Call tutti.distribute(model, optimizer) before it, "
            "or leave out tutti.init() if they are meant to be separate."
        )

    def closed(self) -> str:
        """The world is closed: optimisers that step from now on are none of its business.

        Returns what to tell if this process has trained and never communicated; nothing otherwise.
        """
        self._handle.remove()
        is_forgotten = bool(self._num_steps) and not self._communicates and not self._is_distributed()
        return self._message() if is_forgotten else ""
