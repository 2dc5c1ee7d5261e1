"""Measured steps of the large models, and what they would take on a K80."""

import pytest

from tutti.recipes.models import LARGE
from tutti.recipes.speeds import IMAGES_PER_S
from tutti.recipes.step_times import H200, PUBLISHED_AT, k20, k80, k80_factor


def test_every_large_model_was_measured() -> None:
    assert set(H200) == set(LARGE)
    assert all(set(times) == {64, 128, 256, 512} for times in H200.values())


def test_a_k80_is_about_as_fast_as_was_published() -> None:
    assert 15 < k80_factor() < 20, "between the ratios of peak speed and of memory"
    for model, batch_size in PUBLISHED_AT.items():
        compute = k80(model, batch_size)
        assert compute.sample_s is not None
        images_per_s = batch_size / (batch_size * compute.sample_s + compute.step_s)
        assert images_per_s == pytest.approx(IMAGES_PER_S["k80"][model], rel=0.03)
        assert 0.2 < compute.forward < 0.4


def test_a_k20_is_slower_than_a_k40_by_what_was_published() -> None:
    assert k20("alexnet").sample_s == pytest.approx(19.2 / 5120 * 36.0 / 26.5)
    assert k20("googlenet").sample_s == pytest.approx(1.6888 / 128 * 36.0 / 26.5)
