"""Every combination and every mistake ends in the result of one worker, or in an error that names the remedy.

None may end normally with other weights. What a technique must show under a strategy is what the compatibility table
says of it: "works" is equal to one worker, or about as far along its way under strategies that are not exact; "adapts"
as well, but for `OTHER_WEIGHTS`, which are judged as those of strategies that are not exact; "refuses" is an error with
the words of the table. `MISTAKES` are no techniques, or techniques in the wrong place, and have errors of their own.
"""

import pytest
from cases import CASES
from harness import X, net, run_case, sgd

from support import run_threads
from tutti.errors import TuttiError
from tutti.job import distribute
from tutti.job.compatibility import COLUMNS
from tutti.parallel import Mesh
from tutti.strategies import ParameterServer, PeerUpdates, parse
from tutti.strategies.compatibility import TECHNIQUES
from tutti.world import World

CASES_OF: dict[str, tuple[str, ...]] = {
    "clipping": ("clip_grad_norm", "clip_grad_value", "clip_by_the_job", "grad_scaler_and_clipping"),
    "changed gradients": ("scale_gradients", "replace_gradients", "drop_a_gradient"),
    "own gradients": ("gradients_by_autograd_grad",),
    "loss scaling": ("grad_scaler", "grad_scaler_and_clipping", "grad_scaler_with_an_inf"),
    "autocast": ("autocast",),
    "sum losses": ("sum_loss_expected",),
    "second derivatives": ("gradient_penalty",),
    "accumulation": ("accumulation", "accumulation_with_no_sync", "two_losses_two_backwards", "zero_grad_forgotten"),
    "averaged weights": (
        "ema_by_averaged_model", "ema_updated_in_consensus", "ema_swapped_in", "ema_swapped_in_through_data",
        "ema_swapped_in_late",
    ),
    "schedulers": (
        "scheduler_by_step", "scheduler_of_momentum_too", "plateau_scheduler_on_the_mean_loss",
        "learning_rate_set_by_hand",
    ),
    "rates per layer": ("rate_per_layer",),
    "closures": ("closure",),
    "LBFGS": ("lbfgs",),
    "gradient hooks": ("tensor_hook", "tensor_hook_after_distribute"),
    "batch norm": ("batch_norm",),
    "frozen layers": ("frozen_layer", "frozen_after_distribute"),
    "unfrozen layers": ("unfrozen_after_finish",),
    "unused parameters": ("unused_on_some_ranks",),
    "tied weights": ("tied_weights",),
    "sparse gradients": ("sparse_embedding",),
    "compiled models": ("compiled_before",),
    "activation checkpointing": ("activation_checkpointing",),
    "two models": ("two_models",),
    "several optimisers": ("two_optimizers",),
    "changed parameters": (
        "weights_clamped", "weights_clamped_at_the_end", "state_loaded_after_distribute",
        "weights_scaled_late_through_data", "weights_scaled_at_the_end_through_data",
    ),
    "evaluation on one rank": ("evaluation_on_one_rank", "evaluation_in_consensus_on_one_rank"),
    "metrics": ("plateau_scheduler_on_the_mean_loss",),
    "resume": ("resumed_in_the_middle",),
    "another strategy": ("continued_under_another_strategy",),
}  # fmt: skip
"""The cases of each technique."""

ALL = frozenset(COLUMNS)
SERVERS = frozenset({"servers", "servers, compressed", "stale servers", "asynchronous servers"})
PUSHING = SERVERS - {"asynchronous servers"}
"""Columns whose gradients are pushed; without locks, each worker's own optimiser steps the shared parameters."""
PEERS = frozenset({"peers", "peers, compressed"})
SYNCHRONOUS = frozenset({"all-reduce", "all-reduce, compressed", "Poseidon"})
"""Columns whose ranks hold the same bits after every step."""
GRADIENTS = SYNCHRONOUS | PUSHING
"""Columns that exchange gradients in backward."""
MESH = frozenset({"mesh", "mesh, replicated"})
REPLICAS = ALL - MESH
"""Columns in which every rank has the whole model and its own samples."""

MISTAKES: dict[str, tuple[frozenset[str], str]] = {
    "a_step_left_out": (PUSHING, "job.no_sync()"),
    "another_model_on_one_rank": (ALL, "Build the same model on every rank"),
    "backward_left_out_on_one_rank": (SYNCHRONOUS | MESH, "all ranks"),
    "cast_after_distribute": (REPLICAS, "tutti.distribute"),
    "consensus_on_one_rank": (SYNCHRONOUS | SERVERS | MESH | {"local steps"}, "very rank must enter"),
    "distributed_twice": (ALL, "call finish() on its job"),
    "fewer_steps_on_one_rank": (SYNCHRONOUS | MESH, "all ranks"),
    "finish_on_one_rank": (SYNCHRONOUS | MESH, "all ranks"),
    "group_added_after_distribute": (REPLICAS, "Call optimizer.add_param_group before distribute"),
    "loss_with_parameters": (REPLICAS, "Distribute one module that holds everything the optimiser trains"),
    "meta_model": (ALL, "build it on a real one"),
    "evaluation_on_one_rank": (MESH, "every rank must enter job.consensus()"),
    "ema_by_averaged_model": (MESH, "Make the copy before distribute"),
    "nan_loss_on_one_rank": (ALL, "Lower the learning rate"),
    "parts_of_the_model_called": (MESH, "call the whole model"),
    "state_loaded_after_distribute": (MESH, "Load states before distribute"),
    "optimizer_in_backward": (REPLICAS, "Create the optimiser before tutti.distribute"),
    "optimizer_made_after_distribute": (REPLICAS, "Create the optimiser before tutti.distribute"),
    "optimizer_state_loaded_after_distribute": (SERVERS | MESH, "before distribute"),
    "parameter_replaced_after_distribute": (REPLICAS, "Change the model before tutti.distribute"),
    "plateau_scheduler_on_the_local_loss": (SYNCHRONOUS | MESH, "job.reduce"),
    "post_accumulate_hook_after_distribute": (GRADIENTS, "Register it before distribute"),
    "same_batches_on_every_rank": (REPLICAS, "Divide the data with tutti.shard(loader)"),
    "ema_left_in_through_data": (SERVERS | PEERS | {"local steps"}, "Load states before distribute"),
    "gradients_changed_late_through_data": (PUSHING, "overlap"),
    "weights_scaled_late_on_one_rank": (SERVERS | SYNCHRONOUS | PEERS | MESH, "before distribute"),
    "state_loaded_on_one_rank": (SERVERS | SYNCHRONOUS | PEERS | MESH, "before distribute"),
    "step_after_no_sync_only": (GRADIENTS, "End the context before the last backward pass"),
    "sum_loss": (GRADIENTS, 'job.expect(loss="sum")'),
    "unfrozen_after_distribute": (REPLICAS, "tutti.distribute(...) again after unfreezing"),
}
"""Mistakes: by which columns they are refused, and the remedy that the error names."""

OTHER_WEIGHTS = {
    ("clip_grad_norm", "servers"),  # Each worker clips its own gradient.
    ("clip_grad_value", "servers"),
    ("clip_by_the_job", "servers"),
    ("grad_scaler_and_clipping", "servers"),
    ("ema_by_averaged_model", "servers"),  # The copy is one step older.
    ("fewer_steps_on_one_rank", "servers"),  # The others go on.
    ("backward_left_out_on_one_rank", "servers"),
    ("finish_on_one_rank", "servers"),
}
"""Cases whose weights are not those of one worker under an exact strategy; all but the last three are in the table."""

OWN_RATES = frozenset({"scheduler_of_momentum_too", "learning_rate_set_by_hand"})
"""Cases that set learning rates themselves, which are those of one worker: too high where updates are not averaged."""

TOLERANCES = {"autocast": 5e-3, "cast_after_distribute": 1e-6}
"""Largest difference from one worker where it is not rounding in float64: bfloat16 rounds sums of other samples."""


@pytest.fixture(autouse=True)
def _small_parameters_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and peers would send the parameters of these models exactly."""
    for strategy in (ParameterServer, PeerUpdates):
        monkeypatch.setattr(strategy, "exact_below", 1)


def _columns(name: str) -> list[str]:
    """Every technique in every column; other cases where they may end differently."""
    if any(name in names for names in CASES_OF.values()):
        left_out = {"asynchronous servers"} if name in OWN_RATES else set()
        return [column for column in COLUMNS if column not in left_out]
    refused = MISTAKES.get(name, (frozenset(), ""))[0]
    # A codec changes what is sent, not what is checked; on a mesh that splits the model alone nothing is exchanged.
    left_out = {"all-reduce, compressed", "peers, compressed", "mesh, replicated"} | (MESH - refused)
    return [column for column in COLUMNS if column not in left_out]


@pytest.mark.parametrize(
    ("name", "column"),
    [(name, column) for name in CASES if name != "error_on_one_rank" for column in _columns(name)],
)
def test_ends_as_on_one_worker_or_names_the_remedy(name: str, column: str) -> None:
    ended = run_case(CASES[name], COLUMNS[column], tolerance=TOLERANCES.get(name, 1e-9))
    supports = [COLUMNS[column].support(technique) for technique, names in CASES_OF.items() if name in names]
    remedies = [support.text for support in supports if support.outcome == "refuses"]
    columns, remedy = MISTAKES.get(name, (frozenset(), ""))
    remedies += [remedy] if column in columns else []
    if remedies:
        assert ended.how == "refused", ended.text
        assert any(each in ended.text for each in remedies), ended.text
    elif parse(COLUMNS[column].strategy).exact and (name, column) not in OTHER_WEIGHTS:
        assert ended.how == "equal", ended.text
    else:
        assert ended.how in ("equal", "trained"), ended.text


@pytest.mark.parametrize("column", COLUMNS)
def test_an_error_of_the_users_own_is_not_hidden(column: str) -> None:
    assert "a mistake in the user's loop" in run_case(CASES["error_on_one_rank"], COLUMNS[column]).text


def test_every_technique_has_a_case() -> None:
    assert CASES_OF.keys() == TECHNIQUES.keys()
    assert {name for names in CASES_OF.values() for name in names} <= CASES.keys()
    assert MISTAKES.keys() <= CASES.keys()


def test_what_differs_from_one_worker_under_an_exact_strategy_is_in_the_table() -> None:
    for name, column in OTHER_WEIGHTS:
        techniques = [technique for technique, names in CASES_OF.items() if name in names]
        assert not techniques or "adapts" in {COLUMNS[column].support(technique).outcome for technique in techniques}


def test_what_adapts_or_is_refused_says_how() -> None:
    for column in COLUMNS.values():
        for technique in TECHNIQUES:
            support = column.support(technique)
            assert (support.outcome == "works") == (support.text == "")


def _plain_loop_on_a_pipeline(world: World) -> None:
    model = net()
    distribute(model, sgd(model), world=world, mesh=Mesh(pipe=2), example=X[0])
    model(X[0])


def test_a_pipeline_is_no_column_of_the_table_because_its_loop_is_another() -> None:
    for error in run_threads(_plain_loop_on_a_pipeline, size=2, transport="shared_memory"):
        assert isinstance(error, TuttiError), error
        assert "job.pipeline" in str(error), error
