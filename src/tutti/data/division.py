"""Division of an epoch's batches between ranks: the same number of steps on all of them, every sample once.

The batches of an epoch form steps: as many consecutive batches as there are ranks. The last ones may be too few for a
step, and then depend on `Remainder`. The rest of an epoch, which an earlier world left over, may be fewer samples than
there are ranks: some batches are empty then.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import chain

from tutti.errors import ConfigError

Batch = list[int]
"""Indices of the samples of one batch on one rank."""


class Remainder(Enum):
    """What becomes of the batches at the end of an epoch that are too few for a step of all ranks."""

    SPLIT = "split"
    """They are split evenly. Where they have fewer samples than there are ranks, they join the step before."""
    SPLIT_OR_EMPTY = "split or empty"
    """As `SPLIT`, but where there is no step before, some ranks have an empty batch."""
    DROP = "drop"
    """They are left out, so that all batches have one size."""
    PAD = "pad"
    """The other ranks have an empty batch, so that all batches have one size and none is left out."""


def form_steps(batches: Sequence[Batch], num_parts: int, remainder: Remainder) -> list[list[Batch]]:
    """Return the steps of an epoch: `num_parts` batches each."""
    num_in_full_steps = len(batches) // num_parts * num_parts
    steps = [list(batches[start : start + num_parts]) for start in range(0, num_in_full_steps, num_parts)]
    rest = list(batches[num_in_full_steps:])
    if not rest or remainder is Remainder.DROP:
        return steps
    if remainder is Remainder.PAD:
        return [*steps, rest + [[] for _ in range(num_parts - len(rest))]]
    pool = [index for batch in rest for index in batch]
    # A rank without a sample would take no part in the last step, for which the others would wait.
    if len(pool) < num_parts and steps:
        pool = [index for batch in steps.pop() for index in batch] + pool
    if remainder is Remainder.SPLIT:
        refuse_too_few(len(pool), num_parts)
    return [*steps, _split(pool, num_parts)]


def num_steps(num_samples: int, batch_size: int, drop_last: bool, num_parts: int) -> int:
    """Return the number of steps that `form_steps` makes of a whole epoch in batches of one size."""
    num_batches, num_more = divmod(num_samples, batch_size)
    if drop_last:
        return num_batches // num_parts
    num_full_steps, num_rest = divmod(num_batches, num_parts)
    if not (num_rest or num_more):
        return num_full_steps
    num_rest_samples = num_rest * batch_size + num_more
    if num_rest + bool(num_more) == num_parts:
        return num_full_steps + 1  # The last batch is smaller, but there is one for every rank.
    if num_rest_samples < num_parts and num_full_steps:
        return num_full_steps
    refuse_too_few(num_rest_samples, num_parts)
    return num_full_steps + 1


def divide_steps(steps: Sequence[list[Batch]], num_ranks: int) -> list[list[Batch]]:
    """Return the batches of each rank: one of every step, which is split anew if it was formed for other ranks."""
    if steps and len(steps[0]) != num_ranks:
        steps = [_split([index for part in step for index in part], num_ranks) for step in steps]
    return [[step[rank] for step in steps] for rank in range(num_ranks)]


def batches_of_rank(steps: Sequence[list[Batch]], num_ranks: int, rank: int) -> list[Batch]:
    """Return what `divide_steps` gives one rank, in less time: all ranks wait for it when they change."""
    if steps and len(steps[0]) != num_ranks:
        return [_part(list(chain.from_iterable(step)), num_ranks, rank) for step in steps]
    return [step[rank] for step in steps]


def divide_batches(batches: Sequence[Batch], num_ranks: int) -> list[list[Batch]]:
    """Return the batches of each rank in a whole epoch, none of them empty."""
    return divide_steps(form_steps(batches, num_ranks, Remainder.SPLIT), num_ranks)


def regroup(batches: Sequence[Batch], batch_size: int) -> list[Batch]:
    """Return the samples of batches in batches of another size; the last one may be smaller."""
    pool = [index for batch in batches for index in batch]
    return [pool[start : start + batch_size] for start in range(0, len(pool), batch_size)]


def _split(pool: Batch, num_parts: int) -> list[Batch]:
    """Cut a pool of samples into parts whose lengths differ by one at most."""
    return [_part(pool, num_parts, part) for part in range(num_parts)]


def _part(pool: Batch, num_parts: int, part: int) -> Batch:
    """Return one part of a pool that is cut into some."""
    size, extra = divmod(len(pool), num_parts)
    start = part * size + min(part, extra)  # The first `extra` parts have one more.
    return pool[start : start + size + (part < extra)]


def refuse_empty(num_samples: int) -> None:
    """Raise `ConfigError` if there is no data."""
    if num_samples == 0:
        raise ConfigError("shard: the data is empty (length 0). Look at its path, its filter or its split.")


def refuse_too_few(num_samples: int, num_ranks: int) -> None:
    """Raise `ConfigError` if some ranks would have no sample at all."""
    if num_samples < num_ranks:
        raise ConfigError(
            f"shard: {num_samples} samples cannot be divided between {num_ranks} ranks: each needs at least one. "
            "Use fewer workers, or more data."
        )
