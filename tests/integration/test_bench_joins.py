"""`tutti bench elastic --parts joins` on one small model."""

import pytest

from tutti.bench.elastic import joins


@pytest.mark.parametrize("transport", joins.TRANSPORTS)
def test_a_join_is_measured(transport: str) -> None:
    found = joins.measure("mlp-0.1M", transport)
    assert (found.model, found.transport) == ("mlp-0.1M", transport)
    assert found.step_s > 0
    assert found.joined_s > found.step_s / 10
    assert found.lost_steps == found.lost_s / found.step_s
