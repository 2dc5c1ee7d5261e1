"""An optimiser's state in memory that all ranks of a host share, so that any of them can take the next step.

How it works
------------
torch's optimisers create the state of a parameter in their first step, in private memory. `publish` moves such tensors
to shared memory, where the optimisers of all ranks use them in place. Numbers that are no tensors (some optimisers
count steps in an int) cannot be used in place: `publish` writes them after every step, and `refresh` reads them before.

Layout of the memory: a header of 8 int64, two directories, numbers (float64), tensors. A directory is JSON: the number
of resets, the bytes in use for tensors, and for every (parameter, key) where its tensor lies, with shape, strides and
dtype, or which number it is. The header holds

- [0] generation: number of times that a directory was written;
- [1], [2] bytes of the first and of the second directory.

Generation g is in directory g mod 2. A writer fills the other directory, then its length, then advances the generation.
So a rank that is killed while it writes leaves the published directory as it was, for every rank that reads it later.

A rank whose own generation differs from the header's reads the directory again in `refresh`; if the number of resets
differs too, it first forgets all state that it has.

Who may write: only the holder of the lock of these parameters calls `refresh`, `publish` or `reset`. Once all state
is shared, tensors are changed in place by the optimiser's steps alone. Hogwild then steps without the lock: it asks
`is_current` before a step and `is_complete` after it, and takes the lock only if the step has made new state.

If the lock holder is killed within `publish`, state that is in no directory yet is lost: the next rank finds none and
its optimiser makes it anew. If it is killed within `reset`, which overwrites tensors, the next leader calls that again
(`WorkerRegistry.run_on_leader`).
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError

_GENERATION = 0
"""Position in the header of the generation."""
_DIRECTORY_BYTES = 1
"""Position in the header of the bytes of the first directory; those of the second follow."""
_HEADER_BYTES = 64
_ALIGNMENT_BYTES = 64
"""Tensors begin on cache lines: aligned for every dtype, and no two of them share a line."""
# Numbers that are no tensors, of all parameters of one shard: mostly one step count for each.
_MAX_NUMBERS = 4096
_FLOAT64_PER_ELEMENT = 8
"""Room for so many float64 of state for each element. Pages that are not used take no memory."""


def _max_directory_bytes(num_parameters: int) -> int:
    """Return the room for one directory: about 20 entries of 100 bytes for each parameter."""
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
        # The parts in the order that the module's text gives.
        directory_bytes = _max_directory_bytes(num_parameters)
        numbers_start = _HEADER_BYTES + 2 * directory_bytes
        numbers_stop = numbers_start + 8 * _MAX_NUMBERS
        self._header = memory[:_HEADER_BYTES].view(torch.int64).numpy()
        self._directories = memory[_HEADER_BYTES:numbers_start].numpy().reshape(2, directory_bytes)
        self._numbers = memory[numbers_start:numbers_stop].view(torch.float64).numpy()
        self._tensors = memory[numbers_stop:]
        self._generation = 0
        """Generation of the directory that this rank has read, or written, last."""
        self._num_resets = self._tensor_bytes = 0
        """Resets, and bytes in use for tensors, as that directory has them."""
        self._entries: dict[tuple[int, str], dict[str, Any]] = {}
        """The directory, as this rank knows it: by parameter and key."""
        self._views: dict[tuple[int, str], Tensor] = {}
        self._has_numbers = False

    @staticmethod
    def required_bytes(numel: int, num_parameters: int) -> int:
        """Return the size of the memory for parameters of `numel` elements in all."""
        # At most a cache line for each tensor of state, with as many tensors per parameter as there are float64 per
        # element.
        padding = _ALIGNMENT_BYTES * _FLOAT64_PER_ELEMENT * (num_parameters + 1)
        directories = 2 * _max_directory_bytes(num_parameters)
        return _HEADER_BYTES + directories + 8 * _MAX_NUMBERS + 8 * _FLOAT64_PER_ELEMENT * numel + padding

    @property
    def is_current(self) -> bool:
        """Whether this rank's optimiser uses all shared tensors in place, and there are no numbers to read."""
        generation = int(self._header[_GENERATION])
        return self._generation == generation and self._generation > 0 and not self._has_numbers

    @property
    def is_complete(self) -> bool:
        """Whether all that this rank's optimiser keeps is in the directory.

        A state that is None is counted but never listed: an optimiser that keeps one takes the lock in every step.
        """
        return sum(len(self.state_of(index)) for index in range(self._num_parameters)) == len(self._entries)

    def refresh(self) -> None:
        """Give this rank's optimiser what other ranks have published."""
        if self._generation != int(self._header[_GENERATION]):
            self._read_directory()
        # Every time: a number is a private copy, which each step of another rank outdates. Tensors are shared views.
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
        if self._generation != int(self._header[_GENERATION]):
            self._num_resets = self._load_directory()["num_resets"]  # Other ranks may have reset it since.
        self._num_resets += 1
        self._tensor_bytes = 0
        self._entries.clear()
        self._views.clear()
        self.publish()
        if not self._entries:  # Nothing to list, so nothing was written: but other ranks must forget their state.
            self._write_directory()

    def _allocate(self, key: str, value: Any) -> dict[str, Any]:
        """Return a new directory entry for a value."""
        if isinstance(value, Tensor):
            # One after the other, and never freed: state keeps its size from step to step.
            start = -(-self._tensor_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._tensor_bytes = start + value.nbytes
            if self._tensor_bytes > self._tensors.numel():
                raise ConfigError(
                    f"the optimiser keeps more state than shared memory was laid out for, with '{key}': over "
                    f"{_FLOAT64_PER_ELEMENT} float64 per element. Use ParameterServer(servers=1)."
                )
            dtype = str(value.dtype).removeprefix("torch.")
            return {"start": start, "shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype}
        if isinstance(value, bool | int | float):
            # The next free place: numbers are removed by `reset` alone.
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
        """Copy a value to shared memory, unless it is there already, and let the optimiser use it there."""
        entry, value = self._entries[index, key], state[key]
        if "number" in entry:
            self._numbers[entry["number"]] = value
            return
        view = self._view(index, key)
        if value is not view:  # The optimiser made it, perhaps anew, in private memory.
            view.copy_(value)
            state[key] = view

    def _view(self, index: int, key: str) -> Tensor:
        """Return the shared tensor of a directory entry; the same object for the same entry every time."""
        if (index, key) not in self._views:
            entry = self._entries[index, key]
            dtype = getattr(torch, entry["dtype"])
            # At least one element: a tensor of size 0 also needs memory for `as_strided` to begin in.
            numel = max(1, int(np.prod(entry["shape"])))
            flat = self._tensors[entry["start"] : entry["start"] + numel * dtype.itemsize].view(dtype)
            self._views[index, key] = flat.as_strided(entry["shape"], entry["stride"])
        return self._views[index, key]

    def _read_directory(self) -> None:
        """Take the published directory over, and point this rank's optimiser at the shared tensors."""
        directory = self._load_directory()
        # A reset since this rank last looked: its private state is older than what is shared, so none of it counts.
        if self._num_resets != directory["num_resets"]:
            self._num_resets = directory["num_resets"]
            for index in range(self._num_parameters):
                self.state_of(index).clear()
        self._tensor_bytes = directory["tensor_bytes"]
        self._entries = {(index, key): entry for index, key, entry in directory["entries"]}
        # Entries may have moved; views are made anew when they are asked for.
        self._views.clear()
        self._has_numbers = any("number" in entry for entry in self._entries.values())
        # From here on this rank's optimiser steps the shared tensors in place.
        for index, key in self._entries:
            if "start" in self._entries[index, key]:
                self.state_of(index)[key] = self._view(index, key)
        self._generation = int(self._header[_GENERATION])

    def _load_directory(self) -> dict[str, Any]:
        """Return the published directory."""
        position = int(self._header[_GENERATION]) % 2
        return json.loads(self._directories[position, : int(self._header[_DIRECTORY_BYTES + position])].tobytes())

    def _write_directory(self) -> None:
        """Publish this rank's directory as the next generation."""
        directory = {
            "num_resets": self._num_resets,
            "tensor_bytes": self._tensor_bytes,
            "entries": [[index, key, entry] for (index, key), entry in self._entries.items()],
        }
        text = json.dumps(directory).encode()
        if len(text) > self._directories.shape[1]:
            raise ConfigError(
                "the optimiser keeps too many entries of state for one shard to be listed in shared memory. Use "
                "ParameterServer(servers=1)."
            )
        generation = int(self._header[_GENERATION]) + 1
        position = generation % 2  # Not the published one, which stays whole if this rank is killed here.
        self._directories[position, : len(text)] = np.frombuffer(text, dtype=np.uint8)
        self._header[_DIRECTORY_BYTES + position] = len(text)
        self._header[_GENERATION] = generation  # Last: one store publishes the directory and its length together.
        self._generation = generation
