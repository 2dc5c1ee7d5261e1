"""`ReplicaGradients`: the gradients of a model that is split over ranks, seen as a whole by torch's own functions.

How it works
------------
`clip_grad_norm_` computes the norm of the gradients that it is given, and `GradScaler` looks for infinities in those of
an optimiser. On a mesh these are this rank's part, so ranks would scale, or skip, differently. Two functions inside of
torch are therefore replaced when the first mesh is made, and stay replaced: others may hold references to them. Where
the gradients are of no model on a mesh, the replacement is the original. Otherwise ranks along `tensor` and `pipe`
complete each other's result. All of them make the same calls, because they run the same script.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from tutti.collectives import native, run
from tutti.errors import ConfigError
from tutti.replica.weak_registry import WeakRegistry
from tutti.transports import Transport


class ReplicaGradients:
    """The gradients of one replica, of which this rank has a part."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        transports: Mapping[str, Transport],
        is_sharded: Callable[[nn.Parameter], bool],
    ) -> None:
        """Complete what torch's functions find.

        Args:
            module: this rank's part of the model.
            optimizer: its optimiser.
            transports: between the ranks along `tensor`, and along `pipe`.
            is_sharded: whether ranks along `tensor` hold different parts of a parameter.
        """
        self.optimizer = optimizer
        # Kept here: within a forward pass the module has DTensors in their place.
        self._parameters = list(module.parameters())
        self._transports, self._is_sharded = transports, is_sharded
        if any(transport.size > 1 for transport in transports.values()):
            _REPLICAS.add(self)

    def norm(self, norm_type: float = 2.0, gradients: Sequence[Tensor] | None = None) -> float:
        """Return the norm of these gradients, or of all, over the ranks of the replica. Collective."""
        chosen = None if gradients is None else {id(gradient) for gradient in gradients}
        # Replicated parameters are on every rank along `tensor`: only the first one counts them.
        is_first = self._transports["tensor"].rank == 0
        counted = [
            parameter.grad.detach()
            for parameter in self._parameters
            if parameter.grad is not None and (chosen is None or id(parameter.grad) in chosen)
            if is_first or self._is_sharded(parameter)
        ]
        if norm_type == float("inf"):
            return self._over_ranks(max((float(each.abs().max()) for each in counted), default=0.0), max)
        # In float64: powers of float16 gradients may overflow or vanish.
        powers = sum(float(each.double().abs().pow(norm_type).sum()) for each in counted)
        return float(self._over_ranks(powers, sum) ** (1 / norm_type))

    def clip_norm(self, max_norm: float) -> float:
        """Scale all gradients such that their norm is at most `max_norm`; return the norm. Collective."""
        norm = self.norm()
        for parameter in self._parameters:
            if parameter.grad is not None:
                # The same small number as in `torch.nn.utils.clip_grad_norm_`, so that both scale alike.
                parameter.grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def total_norm(self, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of gradients for `clip_grad_norm_`. Collective."""
        if self._transports["pipe"].size > 1:
            raise ConfigError(
                f"rank {self._transports['pipe'].world_rank}: clip_grad_norm_ sees the gradients of this rank's stages "
                "only. Call job.clip_grad_norm(max_norm) instead, on every rank."
            )
        return torch.tensor(self.norm(norm_type, gradients), dtype=gradients[0].dtype, device=gradients[0].device)

    def share_infinities(self, found: Mapping[torch.device, Tensor]) -> None:
        """Let every rank know if a `GradScaler` has found an infinity on any of them. Collective."""
        if self._over_ranks(max((float(each) for each in found.values()), default=0.0), max):
            for each in found.values():
                each.fill_(1.0)

    def includes(self, gradients: Sequence[Tensor]) -> bool:
        """Whether one of these is a gradient of the model."""
        wanted = {id(gradient) for gradient in gradients}
        return any(id(parameter.grad) in wanted for parameter in self._parameters)

    def close(self) -> None:
        """Complete nothing any more."""
        _REPLICAS.remove(self)

    def _over_ranks(self, value: float, combine: Callable[[list[float]], float]) -> float:
        for transport in self._transports.values():  # Not along `data`: the norm is that of one replica.
            if transport.size > 1:
                values = torch.zeros(transport.size, dtype=torch.float64)
                values[transport.rank] = value
                run(native.steps(values, transport))
                value = combine(values.tolist())
        return value


def _replace_functions() -> None:
    torch_norm: Any = clip_grad._get_total_norm
    torch_unscale: Any = torch.amp.GradScaler._unscale_grads_

    @wraps(torch_norm)
    def total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for replica in _REPLICAS.living():
            if replica.includes(tensors):
                return replica.total_norm(tensors, float(norm_type))
        return torch_norm(tensors, norm_type, *args, **kwargs)

    @wraps(torch_unscale)
    def unscale(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = torch_unscale(self, optimizer, *args, **kwargs)
        for replica in _REPLICAS.living():
            if replica.optimizer is optimizer:
                replica.share_infinities(found)
        return found

    clip_grad._get_total_norm = total_norm
    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]


_REPLICAS: WeakRegistry[ReplicaGradients] = WeakRegistry(_replace_functions)
