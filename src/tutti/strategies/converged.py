"""Which parameters have stopped moving, so that their gradients need not be exchanged for a while."""

from typing import Any

import torch
from torch import Tensor

from tutti.collectives import broadcast_json
from tutti.errors import ConfigError
from tutti.replica.buckets import Slot
from tutti.transports import Transport

MOST_WINDOWS = 8
"""For no longer is a parameter left out at a time."""


class Converged:
    """Looks at every parameter at the end of every window of some steps.

    One that moved by less than `share` of its length has stopped, and is left out for a window; if after another window
    with the others it has still stopped, for two, then four, and eight at most. One that moved is with the others.
    Rank 0 decides, from parameters that all ranks have alike.
    """

    def __init__(self, slots: list[Slot], share: float, every: int) -> None:
        self._slots = sorted(slots, key=lambda slot: slot.name)
        self._share = share
        self._every = every
        self._steps = 0
        self._before = [slot.tensor.detach().clone() for slot in self._slots]
        self._windows_out = dict.fromkeys([slot.name for slot in self._slots], 0)
        """How many more each is left out for."""
        self._patience = dict.fromkeys(self._windows_out, 1)
        """For how many it will be, when it has stopped again."""

    @property
    def left_out(self) -> frozenset[str]:
        return frozenset(name for name, windows in self._windows_out.items() if windows)

    def stepped(self, transport: Transport) -> bool:
        """A step was taken. Whether that ended a window. Collective."""
        self._steps += 1
        if self._steps % self._every:
            return False
        stopped = set(broadcast_json(self._stopped() if transport.rank == 0 else None, transport))
        for slot, before in zip(self._slots, self._before, strict=True):
            self._decide(slot.name, slot.name in stopped)
            before.copy_(slot.tensor.detach())
        return True

    def _decide(self, name: str, stopped: bool) -> None:
        if self._windows_out[name]:
            self._windows_out[name] -= 1
        elif stopped:
            self._windows_out[name] = self._patience[name]
            self._patience[name] = min(2 * self._patience[name], MOST_WINDOWS)
        else:
            self._patience[name] = 1

    def _stopped(self) -> list[str]:
        """Names of parameters that moved by less than their share in this window."""
        tensors = [slot.tensor.detach() for slot in self._slots]
        moved = _lengths([now - before for now, before in zip(tensors, self._before, strict=True)])
        within = moved < self._share * _lengths(tensors)
        still = within | (moved == 0)  # Also where all is 0.
        return [slot.name for slot, stays in zip(self._slots, still.tolist(), strict=True) if stays]

    def state_dict(self) -> dict[str, Any]:
        names = [slot.name for slot in self._slots]
        before = {name: each.clone() for name, each in zip(names, self._before, strict=True)}
        counts = {"windows_out": dict(self._windows_out), "patience": dict(self._patience)}
        return {"steps": self._steps, **counts, "before": before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["before"].keys() != self._windows_out.keys():
            raise ConfigError(
                f"this state was saved for a model with {len(state['before'])} trained parameters; this one has "
                f"{len(self._windows_out)}, or others."
            )
        self._steps = state["steps"]
        self._windows_out, self._patience = dict(state["windows_out"]), dict(state["patience"])
        for slot, before in zip(self._slots, self._before, strict=True):
            before.copy_(state["before"][slot.name])


def _lengths(tensors: list[Tensor]) -> Tensor:
    return torch.stack([length.to("cpu", torch.float64) for length in torch._foreach_norm(tensors)])
