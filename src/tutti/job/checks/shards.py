"""A check that `tutti.shard` was given the same on every rank: otherwise ranks take different numbers of steps."""

from collections.abc import Mapping, Sequence

from tutti.errors import ConfigError
from tutti.replica.samples import SHARD_SETTINGS


def refuse_different_shards(by_rank: Mapping[int, Sequence[int]], rank: int) -> None:
    """Raise `ConfigError` if settings of `tutti.shard` differ; each rank's are those of `SampleCounts.shard`."""
    # None where a rank draws from something else, or the user's own batch sampler has no size.
    for number, name in enumerate(SHARD_SETTINGS):
        known = {other: settings[number] for other, settings in by_rank.items() if settings[number] >= 0}
        values = {value: other for other, value in reversed(known.items())}
        if len(values) > 1:
            (value, first), (other_value, other) = sorted(values.items(), key=lambda item: item[1])[:2]
            raise ConfigError(
                f"rank {rank}: tutti.shard was given other data on other ranks: {name} is {value} on rank {first} and "
                f"{other_value} on rank {other}. Pass the same DataLoader or dataset on every rank, with all samples: "
                "tutti.shard divides it, and all ranks take the same number of steps."
            )
