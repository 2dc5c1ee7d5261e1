"""`BatchRecord`: digests of the first two batches that a rank trains on, which tell a loader that is not sharded."""

from hashlib import blake2b
from json import dumps
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from tutti.errors import ConfigError
from tutti.parallel.same_batch import fingerprint
from tutti.replica import SampleCounts

NUM_BATCHES = 2
"""Batches that are compared: one alone may be equal by accident, and two that are alike say nothing."""


class BatchRecord:
    """Keeps what the model was given last, and a digest of it once a backward pass shows that it is trained on."""

    def __init__(self, sample_counts: SampleCounts) -> None:
        self._sample_counts = sample_counts
        self._num_sharded = sample_counts.num_batches
        self._inputs: Any = None
        self._digests: list[str] = []
        self._comparable = True

    def forward(self, inputs: Any) -> None:
        """Keep what the model is given, until a backward pass shows that it is trained on."""
        self._inputs = inputs

    def add(self) -> None:
        """Add the batch of the backward pass that has begun; the record is complete after two."""
        if self._sample_counts.num_batches != self._num_sharded:
            self._comparable = False  # From `tutti.shard`: another part of the data on every rank.
        tensors = [leaf for leaf in tree_leaves(self._inputs) if isinstance(leaf, Tensor)]
        self._inputs = None
        if not tensors:  # In a compiled model, for example, which calls no hook that could keep them.
            self._comparable = False
        if self._comparable:
            self._digests.append(dumps([fingerprint(tensor) for tensor in tensors]))

    @property
    def digest(self) -> int:
        """A number for the two batches in their order; 0 where they say nothing."""
        if not self._comparable or len(set(self._digests)) < NUM_BATCHES:
            return 0  # Also for equal batches: synthetic data, or a model that is to learn one batch by heart.
        digest = blake2b(dumps(self._digests).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big") + 1


def refuse_same_batches(digests: dict[int, int], rank: int) -> None:
    """Raise `ConfigError` if two ranks had the same first two batches; `digests` has that of each rank, or 0."""
    first: dict[int, int] = {}
    for other, digest in digests.items():
        if digest and first.setdefault(digest, other) != other:
            raise ConfigError(
                f"rank {rank}: ranks {first[digest]} and {other} were given the same first two batches, in the same "
                "order, so they train on the same samples. Divide the data with tutti.shard(loader), or call "
                "job.expect(same_batches=True) if it is meant so."
            )
