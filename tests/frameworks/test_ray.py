"""Ray Train with workers that Tutti synchronises."""

import pytest
from started import results

pytest.importorskip("ray.train")

pytestmark = pytest.mark.timeout(300)


def test_a_trainer_on_real_data() -> None:
    run = results("ray_training.py")["onebit"]
    assert run["accuracy"] > 0.92
    assert (run["size"], run["sum of ranks"]) == (2, 1)
    assert run["saved"][0] == "1.bias"
