"""What an optimiser remembers of a piece, in memory that all ranks of a host share: any of them can take the next step.

The first step of a piece makes its state in the memory of whoever takes it, as torch's optimisers do. It is moved to
the arena then, and a directory says where: other ranks find it there. Tensors are used where they lie; numbers that
are not tensors are written back after every step and read before it.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.strategies.parameter_server.stepping import Stepper

_DIRECTORY_BYTES = 2**20
_NUMBERS = 4096
_TIMES = 8
"""Room for so many float64 for each element. What is not used takes no memory."""


class Arena:
    """The shared state of one piece. Its lock must be held."""

    def __init__(self, memory: Tensor, stepper: Stepper) -> None:
        """`memory` is `size_of` this piece, the same on every rank, zero at first."""
        self._stepper = stepper
        self._head = memory[:64].view(torch.int64).numpy()  # Generation, bytes of the directory, bytes in use.
        self._directory = memory[64:_DIRECTORY_BYTES].numpy()
        self._numbers = memory[_DIRECTORY_BYTES : _DIRECTORY_BYTES + 8 * _NUMBERS].view(torch.float64).numpy()
        self._tensors = memory[_DIRECTORY_BYTES + 8 * _NUMBERS :]
        self._generation = 0
        self._entries: dict[tuple[int, str], dict[str, Any]] = {}
        self._views: dict[tuple[int, str], Tensor] = {}

    @staticmethod
    def size_of(numel: int) -> int:
        """Bytes for a piece of so many elements."""
        return _DIRECTORY_BYTES + 8 * _NUMBERS + 8 * _TIMES * numel + 2**16

    def before(self) -> None:
        """Let the optimiser remember what others have left here."""
        if self._generation != int(self._head[0]):
            self._read_directory()
        for (share, key), entry in self._entries.items():
            if "number" in entry:
                kind = {"int": int, "float": float, "bool": bool}[entry["kind"]]
                self._stepper.state_of(share)[key] = kind(self._numbers[entry["number"]])

    def after(self) -> None:
        """Leave here what the optimiser remembers now."""
        new = False
        for share in range(len(self._stepper.piece.shares)):
            state = self._stepper.state_of(share)
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
        """Start again from what the stepper has been given."""
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
        text = self._directory[: int(self._head[1])].tobytes()
        self._entries = {(share, key): entry for share, key, entry in json.loads(text)}
        self._views.clear()
        for share, key in self._entries:
            if "start" in self._entries[share, key]:
                self._stepper.state_of(share)[key] = self._view(share, key)
        self._generation = int(self._head[0])

    def _write_directory(self) -> None:
        text = json.dumps([[share, key, entry] for (share, key), entry in self._entries.items()]).encode()
        if len(text) > len(self._directory):
            raise ConfigError("the optimiser remembers too many things of one piece to be listed in shared memory.")
        self._directory[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        self._head[1] = len(text)
        self._head[0] += 1
        self._generation = int(self._head[0])
