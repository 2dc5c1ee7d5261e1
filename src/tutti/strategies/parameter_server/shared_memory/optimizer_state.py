"""An optimiser's state in memory that all ranks of a host share, so that any of them can take the next step.

How it works
------------
torch's optimisers create the state of a parameter in their first step, in private memory. `publish` moves such tensors
to shared memory, where the optimisers of all ranks use them in place. Numbers that are no tensors (some optimisers
count steps in an int) cannot be used in place: `publish` writes them after every step, and `refresh` reads them before.

Layout of the memory: a header of 8 int64, a directory, numbers (float64), tensors. The directory is JSON: for every
(parameter, key) where its tensor lies, with shape, strides and dtype, or which number it is. The header holds

- [0] generation: number of times that the directory was written;
- [1] bytes of the directory;
- [2] bytes in use for tensors;
- [3] number of resets.

A rank whose own generation differs from the header's reads the directory again in `refresh`; if the number of resets
differs too, it first forgets all state that it has.

Who may write: only the holder of the lock of these parameters calls `refresh`, `publish` or `reset`. Once all state
is shared, tensors are changed in place by the optimiser's steps alone. Hogwild then steps without the lock: it asks
`is_current` before a step and `is_complete` after it, and takes the lock only if the step has made new state.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError

_GENERATION, _DIRECTORY_BYTES, _TENSOR_BYTES, _NUM_RESETS = range(4)
_HEADER_BYTES = 64
_ALIGNMENT_BYTES = 64
_MAX_NUMBERS = 4096
_FLOAT64_PER_ELEMENT = 8
"""Room for so many float64 of state for each element. Pages that are not used take no memory."""


def _directory_stop(num_parameters: int) -> int:
    return 2**16 + 2048 * num_parameters


class SharedOptimizerState:
    """The shared state of some parameters. All methods that change it need the parameters' lock."""

    def __init__(self, memory: Tensor, num_parameters: int, state_of: Callable[[int], dict[str, Any]]) -> None:
        """Share the state of parameters.

        Args:
            memory: `required_bytes` bytes, the same memory on every rank, zero at first.
            num_parameters: how many parameters there are.
            state_of: returns the dictionary that the optimiser of this rank uses for a parameter.
        """
        self._num_parameters = num_parameters
        self.state_of = state_of
        directory_stop = _directory_stop(num_parameters)
        self._header = memory[:_HEADER_BYTES].view(torch.int64).numpy()
        self._directory = memory[_HEADER_BYTES:directory_stop].numpy()
        numbers_stop = directory_stop + 8 * _MAX_NUMBERS
        self._numbers = memory[directory_stop:numbers_stop].view(torch.float64).numpy()
        self._tensors = memory[numbers_stop:]
        self._generation = self._num_resets = 0
        """The header's, when this rank read it last."""
        self._entries: dict[tuple[int, str], dict[str, Any]] = {}
        """The directory, as this rank knows it: by parameter and key."""
        self._views: dict[tuple[int, str], Tensor] = {}
        self._has_numbers = False

    @staticmethod
    def required_bytes(numel: int, num_parameters: int) -> int:
        """Return the size of the memory for parameters of `numel` elements in all."""
        padding = _ALIGNMENT_BYTES * _FLOAT64_PER_ELEMENT * (num_parameters + 1)
        return _directory_stop(num_parameters) + 8 * _MAX_NUMBERS + 8 * _FLOAT64_PER_ELEMENT * numel + padding

    @property
    def is_current(self) -> bool:
        """Whether this rank's optimiser uses all shared tensors in place, and there are no numbers to read."""
        generation = int(self._header[_GENERATION])
        return self._generation == generation and self._generation > 0 and not self._has_numbers

    @property
    def is_complete(self) -> bool:
        """Whether all that this rank's optimiser keeps is in the directory."""
        return sum(len(self.state_of(index)) for index in range(self._num_parameters)) == len(self._entries)

    def refresh(self) -> None:
        """Give this rank's optimiser what other ranks have published."""
        if self._generation != int(self._header[_GENERATION]):
            self._read_directory()
        for (index, key), entry in self._entries.items():
            if "number" in entry:
                kind = {"int": int, "float": float, "bool": bool}[entry["kind"]]
                self.state_of(index)[key] = kind(self._numbers[entry["number"]])

    def publish(self) -> None:
        """Let other ranks have what this rank's optimiser keeps now."""
        has_new_entries = False
        for index in range(self._num_parameters):
            state = self.state_of(index)
            for key, value in state.items():
                if value is None:
                    continue  # Some optimisers keep None in place of state that they do not use.
                if (index, key) not in self._entries:
                    self._entries[index, key] = self._allocate(key, value)
                    has_new_entries = True
                self._store(index, key, state)
        if has_new_entries:
            self._write_directory()

    def reset(self) -> None:
        """Replace all shared state by what this rank's optimiser keeps."""
        self._header[_NUM_RESETS] += 1
        self._num_resets = int(self._header[_NUM_RESETS])
        self._entries.clear()
        self._views.clear()
        self._header[_TENSOR_BYTES] = 0
        self.publish()
        self._write_directory()

    def _allocate(self, key: str, value: Any) -> dict[str, Any]:
        """Return a new directory entry for a value."""
        if isinstance(value, Tensor):
            start = -(-int(self._header[_TENSOR_BYTES]) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._header[_TENSOR_BYTES] = start + value.nbytes
            if self._header[_TENSOR_BYTES] > self._tensors.numel():
                raise ConfigError(
                    f"the optimiser keeps more state than shared memory was laid out for, with '{key}': over "
                    f"{_FLOAT64_PER_ELEMENT} float64 per element. Use ParameterServer(servers=1)."
                )
            dtype = str(value.dtype).removeprefix("torch.")
            return {"start": start, "shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype}
        if isinstance(value, bool | int | float):
            number = sum("number" in entry for entry in self._entries.values())
            if number == _MAX_NUMBERS:
                raise ConfigError(
                    f"the optimiser keeps more than {_MAX_NUMBERS} numbers for one shard, which is all that shared "
                    "memory has room for. Use ParameterServer(servers=1)."
                )
            self._has_numbers = True
            return {"number": number, "kind": type(value).__name__}
        raise ConfigError(
            f"the optimiser keeps a {type(value).__name__} as '{key}', which ranks cannot share in memory. Use "
            "ParameterServer(servers=1), whose server keeps it alone."
        )

    def _store(self, index: int, key: str, state: dict[str, Any]) -> None:
        entry, value = self._entries[index, key], state[key]
        if "number" in entry:
            self._numbers[entry["number"]] = value
            return
        view = self._view(index, key)
        if value is not view:  # The optimiser made it, perhaps anew, in private memory.
            view.copy_(value)
            state[key] = view

    def _view(self, index: int, key: str) -> Tensor:
        if (index, key) not in self._views:
            entry = self._entries[index, key]
            dtype = getattr(torch, entry["dtype"])
            numel = max(1, int(np.prod(entry["shape"])))
            flat = self._tensors[entry["start"] : entry["start"] + numel * dtype.itemsize].view(dtype)
            self._views[index, key] = flat.as_strided(entry["shape"], entry["stride"])
        return self._views[index, key]

    def _read_directory(self) -> None:
        if self._num_resets != int(self._header[_NUM_RESETS]):
            self._num_resets = int(self._header[_NUM_RESETS])
            for index in range(self._num_parameters):
                self.state_of(index).clear()
        text = self._directory[: int(self._header[_DIRECTORY_BYTES])].tobytes()
        self._entries = {(index, key): entry for index, key, entry in json.loads(text)}
        self._views.clear()
        self._has_numbers = any("number" in entry for entry in self._entries.values())
        for index, key in self._entries:
            if "start" in self._entries[index, key]:
                self.state_of(index)[key] = self._view(index, key)
        self._generation = int(self._header[_GENERATION])

    def _write_directory(self) -> None:
        text = json.dumps([[index, key, entry] for (index, key), entry in self._entries.items()]).encode()
        if len(text) > len(self._directory):
            raise ConfigError(
                "the optimiser keeps too many entries of state for one shard to be listed in shared memory. Use "
                "ParameterServer(servers=1)."
            )
        self._directory[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        self._header[_DIRECTORY_BYTES] = len(text)
        self._header[_GENERATION] += 1  # Last: others read the directory once they see it.
        self._generation = int(self._header[_GENERATION])
