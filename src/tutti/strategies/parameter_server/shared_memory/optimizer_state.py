"""What an optimiser remembers of a piece, in memory that all ranks of a host share: any of them can take the next step.

The first step of a piece makes its state in the memory of whoever takes it, as torch's optimisers do. It is moved to
the arena then, and a directory says where: other ranks find it there. Tensors are used where they lie; numbers that
are not tensors are written back after every step and read before it.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError

_NUMBERS = 4096
_TIMES = 8
"""Room for so many float64 for each element. What is not used takes no memory."""


def _directory_bytes(count: int) -> int:
    return 2**16 + 2048 * count


class Arena:
    """The shared state of some tensors. Whoever calls holds their lock."""

    def __init__(self, memory: Tensor, count: int, state_of: Callable[[int], dict[str, Any]]) -> None:
        """Keep what `state_of` each of `count` tensors is remembered, the very dictionaries that the optimiser uses.

        `memory` is `size_of` them, the same on every rank, zero at first.
        """
        self._count = count
        self.state_of = state_of
        directory = _directory_bytes(count)
        self._head = memory[:64].view(torch.int64).numpy()  # Generation, directory's bytes, bytes in use, resets.
        self._directory = memory[64:directory].numpy()
        self._numbers = memory[directory : directory + 8 * _NUMBERS].view(torch.float64).numpy()
        self._tensors = memory[directory + 8 * _NUMBERS :]
        self._generation = self._resets = 0
        self._entries: dict[tuple[int, str], dict[str, Any]] = {}
        self._views: dict[tuple[int, str], Tensor] = {}
        self._has_numbers = False

    @staticmethod
    def size_of(numel: int, count: int) -> int:
        """Bytes for so many elements in so many tensors."""
        return _directory_bytes(count) + 8 * _NUMBERS + 8 * _TIMES * numel + 64 * _TIMES * (count + 1)

    @property
    def settled(self) -> bool:
        """Whether everything has its place here, as this rank knows it, and lies where the optimiser uses it."""
        return self._generation == int(self._head[0]) and self._generation > 0 and not self._has_numbers

    @property
    def complete(self) -> bool:
        """Whether the optimiser remembers nothing that has no place here."""
        return sum(len(self.state_of(share)) for share in range(self._count)) == len(self._entries)

    def before(self) -> None:
        """Let the optimiser remember what others have left here."""
        if self._generation != int(self._head[0]):
            self._read_directory()
        for (share, key), entry in self._entries.items():
            if "number" in entry:
                kind = {"int": int, "float": float, "bool": bool}[entry["kind"]]
                self.state_of(share)[key] = kind(self._numbers[entry["number"]])

    def after(self) -> None:
        """Leave here what the optimiser remembers now."""
        new = False
        for share in range(self._count):
            state = self.state_of(share)
            for key, value in state.items():
                if value is None:
                    continue
                if (share, key) not in self._entries:
                    self._entries[share, key] = self._place(key, value)
                    new = True
                self._leave(share, key, state)
        if new:
            self._write_directory()

    def reset(self) -> None:
        """Start again from what the optimiser has been given."""
        self._head[3] += 1
        self._resets = int(self._head[3])
        self._entries.clear()
        self._views.clear()
        self._head[2] = 0
        self.after()
        self._write_directory()

    def _place(self, key: str, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            start = -(-int(self._head[2]) // 64) * 64
            self._head[2] = start + value.nbytes
            if self._head[2] > self._tensors.numel():
                raise ConfigError(f"the optimiser remembers more than shared memory was laid out for, with '{key}'.")
            dtype = str(value.dtype).removeprefix("torch.")
            return {"start": start, "shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype}
        if isinstance(value, bool | int | float):
            number = sum("number" in entry for entry in self._entries.values())
            if number == _NUMBERS:
                raise ConfigError(f"the optimiser remembers more than {_NUMBERS} numbers of one piece.")
            self._has_numbers = True
            return {"number": number, "kind": type(value).__name__}
        raise ConfigError(
            f"the optimiser remembers a {type(value).__name__} as '{key}', which ranks cannot share in memory. Use "
            "ParameterServer(servers=1), whose server has it to itself."
        )

    def _leave(self, share: int, key: str, state: dict[str, Any]) -> None:
        entry, value = self._entries[share, key], state[key]
        if "number" in entry:
            self._numbers[entry["number"]] = value
            return
        view = self._view(share, key)
        if value is not view:  # Made, or made anew, in this rank's own memory.
            view.copy_(value)
            state[key] = view

    def _view(self, share: int, key: str) -> Tensor:
        if (share, key) not in self._views:
            entry = self._entries[share, key]
            dtype = getattr(torch, entry["dtype"])
            numel = max(1, int(np.prod(entry["shape"])))
            flat = self._tensors[entry["start"] : entry["start"] + numel * dtype.itemsize].view(dtype)
            self._views[share, key] = flat.as_strided(entry["shape"], entry["stride"])
        return self._views[share, key]

    def _read_directory(self) -> None:
        if self._resets != int(self._head[3]):  # What was remembered before is forgotten by all.
            self._resets = int(self._head[3])
            for share in range(self._count):
                self.state_of(share).clear()
        text = self._directory[: int(self._head[1])].tobytes()
        self._entries = {(share, key): entry for share, key, entry in json.loads(text)}
        self._views.clear()
        self._has_numbers = any("number" in entry for entry in self._entries.values())
        for share, key in self._entries:
            if "start" in self._entries[share, key]:
                self.state_of(share)[key] = self._view(share, key)
        self._generation = int(self._head[0])

    def _write_directory(self) -> None:
        text = json.dumps([[share, key, entry] for (share, key), entry in self._entries.items()]).encode()
        if len(text) > len(self._directory):
            raise ConfigError("the optimiser remembers too many things of one piece to be listed in shared memory.")
        self._directory[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        self._head[1] = len(text)
        self._head[0] += 1
        self._generation = int(self._head[0])
