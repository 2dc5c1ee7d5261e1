"""Every combination and every mistake ends in the result of one worker, or in an error that names the remedy.

None may end normally with other weights. `REFUSED` has the errors; what is not listed there must equal one worker under
exact strategies, and go its way under the others.
"""

import pytest
from cases import CASES
from harness import FAMILIES, run_case

from tutti.strategies import parse

ALL = frozenset(FAMILIES)
SERVERS = frozenset({"servers", "stale servers"})
GRADIENTS = ALL - {"local steps", "gossip", "peers"}
"""Families that exchange gradients in backward."""

REFUSED: dict[str, tuple[frozenset[str], str]] = {
    "another_model_on_one_rank": (ALL, "Build the same model on every rank"),
    "closure": (SERVERS, "Call backward yourself, then step()"),
    "distributed_twice": (ALL, "call finish() on its job"),
    "group_added_after_distribute": (ALL, "Call optimizer.add_param_group before distribute"),
    "lbfgs": (SERVERS, "Use SGD, Adam or another"),
    "loss_with_parameters": (ALL, "Distribute one module that holds everything the optimiser trains"),
    "post_accumulate_hook_after_distribute": (GRADIENTS, "Register it before distribute"),
    "sparse_embedding": (GRADIENTS, "sparse=False"),
    "step_after_no_sync_only": (GRADIENTS, "End the context before the last backward pass"),
    "two_optimizers": (ALL, "Give it all trainable parameters"),
    "unfrozen_after_distribute": (ALL, "tutti.distribute(...) again after unfreezing"),
}
"""Cases that are refused: by which families, and the remedy that the error names."""

TOLERANCES = {"autocast": 5e-3}
"""Largest difference from one worker where it is not rounding in float64: bfloat16 rounds sums of other samples."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_ends_as_on_one_worker_or_names_the_remedy(name: str, family: str) -> None:
    ended = run_case(CASES[name], FAMILIES[family], tolerance=TOLERANCES.get(name, 1e-9))
    families, remedy = REFUSED.get(name, (frozenset(), ""))
    if family in families:
        assert ended.how == "refused", ended.text
        assert remedy in ended.text
    else:
        assert ended.how == ("equal" if parse(FAMILIES[family]).exact else "trained"), ended.text
