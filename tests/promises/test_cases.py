"""Every combination and every mistake ends in the result of one worker, or in an error that names the remedy.

None may end normally with other weights. `REFUSED` has the errors; what is not listed there must equal one worker under
exact strategies, and go its way under the others.
"""

import pytest
from cases import CASES
from harness import FAMILIES, run_case

from tutti.strategies import parse
from tutti.strategies.compatibility import TECHNIQUES

ALL = frozenset(FAMILIES)
SERVERS = frozenset({"servers", "stale servers"})
GRADIENTS = ALL - {"local steps", "gossip", "peers"}
"""Families that exchange gradients in backward."""
SYNCHRONOUS = frozenset({"all-reduce", "compressed", "poseidon"})
"""Families whose ranks hold the same bits after every step."""

REFUSED: dict[str, tuple[frozenset[str], str]] = {
    "a_step_left_out": (SERVERS, "job.no_sync()"),
    "another_model_on_one_rank": (ALL, "Build the same model on every rank"),
    "backward_left_out_on_one_rank": (SYNCHRONOUS, "tutti.shard gives all ranks the same"),
    "cast_after_distribute": (ALL, "tutti.distribute"),
    "closure": (SERVERS, "Call backward yourself, then step()"),
    "consensus_on_one_rank": (SYNCHRONOUS | SERVERS | {"local steps"}, "Every rank must enter"),
    "distributed_twice": (ALL, "call finish() on its job"),
    "fewer_steps_on_one_rank": (SYNCHRONOUS, "tutti.shard gives all ranks the same"),
    "finish_on_one_rank": (SYNCHRONOUS, "tutti.shard gives all ranks the same"),
    "group_added_after_distribute": (ALL, "Call optimizer.add_param_group before distribute"),
    "lbfgs": (SERVERS | {"compressed"}, "Use"),
    "loss_with_parameters": (ALL, "Distribute one module that holds everything the optimiser trains"),
    "meta_model": (ALL, "build it on a real one"),
    "nan_loss_on_one_rank": (ALL, "Lower the learning rate"),
    "optimizer_in_backward": (ALL, "Create the optimiser before tutti.distribute"),
    "optimizer_made_after_distribute": (ALL, "Create the optimiser before tutti.distribute"),
    "optimizer_state_loaded_after_distribute": (SERVERS, "Load the state before distribute"),
    "parameter_replaced_after_distribute": (ALL, "Change the model before tutti.distribute"),
    "plateau_scheduler_on_the_local_loss": (SYNCHRONOUS, "job.reduce"),
    "post_accumulate_hook_after_distribute": (GRADIENTS, "Register it before distribute"),
    "same_batches_on_every_rank": (ALL, "Divide the data with tutti.shard(loader)"),
    "sparse_embedding": (GRADIENTS, "sparse=False"),
    "state_loaded_after_distribute": (SERVERS, "Load states before distribute"),
    "state_loaded_on_one_rank": (SERVERS | SYNCHRONOUS, "before distribute"),
    "step_after_no_sync_only": (GRADIENTS, "End the context before the last backward pass"),
    "sum_loss": (GRADIENTS, 'job.expect(loss="sum")'),
    "two_optimizers": (ALL, "Give it all trainable parameters"),
    "unfrozen_after_distribute": (ALL, "tutti.distribute(...) again after unfreezing"),
    "weights_clamped": (SERVERS, "to change parameters while training, use AllReduce"),
}
"""Cases that are refused: by which families, and the remedy that the error names."""

ADAPTED = {
    ("lbfgs", "local steps"),  # Its estimate of the curvature mixes with what other ranks change.
    ("lbfgs", "gossip"),
    ("lbfgs", "peers"),
    ("clip_grad_norm", "servers"),  # Each worker clips its own gradient.
    ("clip_grad_value", "servers"),
    ("grad_scaler_and_clipping", "servers"),
    ("ema_by_averaged_model", "servers"),  # The copy is one step older.
    ("fewer_steps_on_one_rank", "servers"),  # The others go on.
    ("backward_left_out_on_one_rank", "servers"),
    ("finish_on_one_rank", "servers"),
}
"""Exact strategies under which a technique works in another way, as the documentation's table says."""

TOLERANCES = {"autocast": 5e-3}
"""Largest difference from one worker where it is not rounding in float64: bfloat16 rounds sums of other samples."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name in CASES if name != "error_on_one_rank"])
def test_ends_as_on_one_worker_or_names_the_remedy(name: str, family: str) -> None:
    ended = run_case(CASES[name], FAMILIES[family], tolerance=TOLERANCES.get(name, 1e-9))
    families, remedy = REFUSED.get(name, (frozenset(), ""))
    if family in families:
        assert ended.how == "refused", ended.text
        assert remedy in ended.text
    elif (name, family) in ADAPTED:
        assert ended.how != "refused", ended.text
    else:
        assert ended.how == ("equal" if parse(FAMILIES[family]).exact else "trained"), ended.text


@pytest.mark.parametrize("family", FAMILIES)
def test_an_error_of_the_users_own_is_not_hidden(family: str) -> None:
    assert "a mistake in the user's loop" in run_case(CASES["error_on_one_rank"], FAMILIES[family]).text


def test_every_technique_that_is_refused_says_what_to_do() -> None:
    for text in FAMILIES.values():
        for technique in TECHNIQUES:
            support = parse(text).support(technique)
            assert support.outcome == "works" or support.text
