"""Recipes, trained as `tutti train` does: what is exact stays so from one epoch to the next."""

import pytest
import torch

from tutti.recipes.training import TrainingConfig, TrainingResult, train
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import parse


def trained(strategy: str) -> torch.Tensor:
    task = TrainingConfig(recipe="digits", strategy=strategy, epochs=2, double=True)
    ranks = 2 + parse(strategy).num_dedicated_servers
    found = [each for each in simulate(train, task, workers=ranks).results if isinstance(each, TrainingResult)]
    return found[0].parameters


@pytest.mark.parametrize("strategy", ["poseidon", "ps:bsp", "ps:ssp=0", "ps:bsp,servers=1", "poseidon:bsp"])
def test_what_is_exact_is_exact_over_epochs(strategy: str) -> None:
    """One rank tests the model between epochs: where every step is everybody's, the others wait for it."""
    torch.testing.assert_close(trained(strategy), trained("native"), rtol=1e-10, atol=1e-12)
