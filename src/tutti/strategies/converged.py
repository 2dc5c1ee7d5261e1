"""Detection of parameters that have stopped moving, whose gradients are not exchanged for a while.

Steps are counted in windows. At the end of each window rank 0 compares every parameter with its value at the start, and
broadcasts the names of those that have stopped; parameters are equal on all ranks, and one rank's rounding decides for
all.

```
exchanged ── stopped ──▶ skipped for 1 window ──▶ exchanged for 1 window ── stopped again ──▶ skipped for 2, 4, then 8
    ▲                                                     │
    └───────────────────────── moved ─────────────────────┘
```
"""

from typing import Any

import torch
from torch import Tensor

from tutti.collectives import broadcast_json
from tutti.replica.buckets import Slot
from tutti.transports import Transport

MAX_WINDOWS = 8
"""Largest number of windows for which a parameter is skipped at a time."""


class ConvergenceMonitor:
    """Decides at the end of every window which parameters are skipped in the next one.

    A parameter that moved by less than `share` of its norm in a window has stopped, and is skipped for one window. If
    it has stopped again after its next window in exchange, it is skipped for two windows, then four, and eight at most.
    One that moved is exchanged again, and starts over at one.
    """

    def __init__(self, slots: list[Slot], share: float, every: int) -> None:
        # By name, so that the order does not depend on how buckets are cut.
        self._slots = sorted(slots, key=lambda slot: slot.name)
        self._share = share
        self._every = every
        self._steps = 0
        self._window_start = [slot.tensor.detach().clone() for slot in self._slots]
        self._windows_left = dict.fromkeys([slot.name for slot in self._slots], 0)
        """For each parameter, the number of windows for which it is still skipped."""
        self._patience = dict.fromkeys(self._windows_left, 1)
        """For each parameter, the number of windows for which it is skipped when it stops next."""

    @property
    def left_out(self) -> frozenset[str]:
        """Names of the parameters that are skipped now."""
        return frozenset(name for name, windows in self._windows_left.items() if windows)

    def stepped(self, transport: Transport) -> bool:
        """Count a step, and return whether it ended a window. Collective at the end of a window."""
        self._steps += 1
        if self._steps % self._every:
            return False
        # Rank 0 decides for all: ranks that skip different parameters would exchange different buckets.
        stopped = set(broadcast_json(self._stopped() if transport.rank == 0 else None, transport))
        for slot, before in zip(self._slots, self._window_start, strict=True):
            self._decide(slot.name, slot.name in stopped)
            before.copy_(slot.tensor.detach())
        return True

    def _decide(self, name: str, stopped: bool) -> None:
        """Move one parameter on to its next window. `stopped` is ignored for a skipped one, which never moves."""
        if self._windows_left[name]:
            self._windows_left[name] -= 1
        elif stopped:
            self._windows_left[name] = self._patience[name]
            self._patience[name] = min(2 * self._patience[name], MAX_WINDOWS)
        else:
            self._patience[name] = 1

    def _stopped(self) -> list[str]:
        """Return the names of parameters that moved by less than their share in this window."""
        tensors = [slot.tensor.detach() for slot in self._slots]
        distance = _norms([now - before for now, before in zip(tensors, self._window_start, strict=True)])
        # One number per parameter.
        within = distance < self._share * _norms(tensors)
        still = within | (distance == 0)  # A parameter that is all zero has no norm to compare with.
        return [slot.name for slot, stays in zip(self._slots, still.tolist(), strict=True) if stays]

    def state_dict(self) -> dict[str, Any]:
        names = [slot.name for slot in self._slots]
        before = {name: value.clone() for name, value in zip(names, self._window_start, strict=True)}
        counts = {"windows_out": dict(self._windows_left), "patience": dict(self._patience)}
        return {"steps": self._steps, **counts, "before": before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self._windows_left, self._patience = dict(state["windows_out"]), dict(state["patience"])
        for slot, before in zip(self._slots, self._window_start, strict=True):
            before.copy_(state["before"][slot.name])


def _norms(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norms of tensors, in float64 on the CPU."""
    return torch.stack([norm.to("cpu", torch.float64) for norm in torch._foreach_norm(tensors)])
