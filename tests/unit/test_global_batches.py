"""`GlobalBatches`: the same batches for any number of workers, and a part of each for every one."""

from itertools import chain

import pytest

from tutti.data import GlobalBatches
from tutti.errors import ConfigError


def batches(num_samples: int, batch_size: int, num_parts: int) -> list[list[list[int]]]:
    """An epoch: a list of parts for every batch."""
    parts = list(GlobalBatches(num_samples, batch_size, num_parts, seed=0))
    assert len(parts) == len(GlobalBatches(num_samples, batch_size, num_parts, seed=0))
    return [parts[start : start + num_parts] for start in range(0, len(parts), num_parts)]


@pytest.mark.parametrize(("num_samples", "batch_size"), [(1437, 64), (60_000, 128), (100, 50), (127, 64), (10, 64)])
def test_every_worker_has_a_part_of_every_batch(num_samples: int, batch_size: int) -> None:
    alone = batches(num_samples, batch_size, 1)
    assert sorted(chain.from_iterable(part for (part,) in alone)) == list(range(num_samples))
    for num_parts in {2, 3, 7, 10, min(batch_size, num_samples)}:
        shared = batches(num_samples, batch_size, num_parts)
        assert [list(chain.from_iterable(parts)) for parts in shared] == [part for (part,) in alone], (
            "the same batches as for one"
        )
        assert all(part for parts in shared for part in parts), "none is empty"
        assert all(min(batch_size, num_samples) <= sum(map(len, parts)) < 2 * batch_size for parts in shared)


def test_more_workers_than_a_batch_has_samples() -> None:
    with pytest.raises(ConfigError, match=r"64 samples cannot be cut for 66 workers.*Use 64 workers or fewer"):
        GlobalBatches(64 * 22, 64, 66, seed=0)
