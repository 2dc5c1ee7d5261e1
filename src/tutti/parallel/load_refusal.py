"""`LoadRefusal`: states that do not fit this rank's part of a model are refused, with the remedy."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.parallel.support import SUPPORT


class LoadRefusal:
    """Looks at what `load_state_dict` of a split model and of its optimiser is given."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
        self._model, self._rank = model, rank
        self._handles = [
            model.register_load_state_dict_pre_hook(self._before_model),
            optimizer.register_load_state_dict_pre_hook(self._before_optimizer),
        ]

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()

    def _before_model(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        shapes = {prefix + name: p.shape for name, p in module.named_parameters()}
        for name, shape in shapes.items():
            if isinstance(given := state.get(name), Tensor) and given.shape != shape:
                raise self._error(f"'{name}' of shape {tuple(given.shape)}", tuple(shape))

    def _before_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, entries in state.get("state", {}).items():
            for key, value in entries.items():
                parameter = parameters[number] if isinstance(number, int) and number < len(parameters) else None
                is_whole = isinstance(value, Tensor) and value.numel() > 1
                if is_whole and parameter is not None and value.shape != parameter.shape:
                    raise self._error(f"the optimiser's '{key}' of shape {tuple(value.shape)}", tuple(parameter.shape))

    def _error(self, given: str, shape: tuple[int, ...]) -> ConfigError:
        return ConfigError(
            f"rank {self._rank}: load_state_dict was given {given}, and this rank has a part of shape {shape}. "
            f"{SUPPORT['changed parameters'].text}"
        )
