"""`SameCopiesCheck`: ranks along `tensor` hold the same copies of replicated parameters, and step by the same options.

Whatever lets ranks of one replica step differently, such as another learning rate or a norm of this rank's gradients,
shows in the copies of parameters that all of them hold. What ranks compare goes through the process group of their
forward passes, so that a rank that is in a forward pass meanwhile is noticed, and not waited for.
"""

from collections.abc import Callable
from hashlib import blake2b
from json import dumps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.collectives import all_gather_json
from tutti.errors import NonFiniteValues, ReplicaMismatch
from tutti.parallel.same_batch import fingerprint
from tutti.parallel.support import together
from tutti.replica.comparison_schedule import ComparisonSchedule
from tutti.transports import Transport


class SameCopiesCheck:
    """Compares after the steps of a `ComparisonSchedule`, and at the end."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        transport: Transport,
        is_sharded: Callable[[nn.Parameter], bool],
    ) -> None:
        """Compare between the ranks of `group`, to which `transport` connects as well."""
        self._optimizer, self._group, self._transport = optimizer, group, transport
        self._parameters = dict(module.named_parameters())
        self._copies = {name for name, each in self._parameters.items() if not is_sharded(each)}
        self._num_steps, self._schedule = 0, ComparisonSchedule()
        self._handle: Any = None

    def compare_in_steps(self) -> None:
        """Compare while training too, and not at the end only."""
        self._handle = self._optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self._num_steps += 1
        if self._schedule.is_due(self._num_steps):
            self()

    @torch.no_grad()
    def __call__(self) -> None:
        """Raise the same error on all ranks if parameters are not finite, or copies or options differ. Collective."""
        bad = [name for name, each in self._parameters.items() if not torch.isfinite(each).all()]
        copies = {f"parameter '{name}'": fingerprint(self._parameters[name]) for name in sorted(self._copies)}
        compared = {**_options(self._optimizer), **copies}
        local = torch.tensor([bool(bad), _digest(compared)])
        device = next(iter(self._parameters.values())).device
        rows = torch.zeros(self._group.size(), len(local), dtype=torch.int64, device=device)
        rows[self._group.rank()] = local.to(device)
        with together():
            self._group.allreduce([rows]).wait()
        if rows[:, 0].any() or len(rows[:, 1].unique()) > 1:
            raise self._error([self._transport.world_rank, bad[:1], compared])

    def _error(self, local: list[Any]) -> Exception:
        """Return the error, of which all ranks know that there is one. Collective."""
        by_rank = all_gather_json(local, self._transport)
        rank = self._transport.world_rank
        if wrong := [(other, names[0]) for other, names, _ in by_rank if names]:
            return NonFiniteValues(rank, [other for other, _ in wrong], f"parameter '{wrong[0][1]}'", self._num_steps)
        first, _, ours = by_rank[0]
        other, _, theirs = next(row for row in by_rank if row[2] != ours)
        name = next(name for name in ours if ours[name] != theirs.get(name))
        values = "" if isinstance(ours[name], list) else f": {ours[name]} and {theirs.get(name)}"
        return ReplicaMismatch(
            f"rank {rank}: ranks {first} and {other} split one replica of the model, and {name} differs between them"
            f"{values}. They must do the same: give all ranks the same batches and steps, load states before "
            'distribute, and give schedulers the same loss, job.reduce(loss, "mean").'
        )

    def close(self) -> None:
        """Compare no more. Idempotent."""
        if self._handle is not None:
            self._handle.remove()


def _digest(values: dict[str, Any]) -> int:
    return int.from_bytes(blake2b(dumps(values).encode(), digest_size=7).digest(), "big")


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of all parameter groups that are plain values, by name and group."""
    return {
        f"the optimiser's {name} of group {number}": float(value) if isinstance(value, Tensor | int) else value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and isinstance(value, Tensor | float | int | str)
    }
