"""`fit`: places, shards, trains, evaluates, saves and resumes, in one call."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from torch import Tensor, nn

from tutti.checkpoint.interval import Every
from tutti.cluster.mistakes import Mistakes
from tutti.errors import ConfigError, TuttiError
from tutti.fit.history import History
from tutti.fit.metrics import Metrics
from tutti.fit.progress import Logger, Reports
from tutti.fit.rank import run_worker, train
from tutti.fit.task import CANNOT_START, Task, checked_task
from tutti.launch import init
from tutti.launch.elastic_run import ElasticRun, Workers, parse_workers
from tutti.launch.environment import read_environment
from tutti.launch.local import is_importing, launch_by_value
from tutti.launch.pickling import packing_mistake
from tutti.launch.start import warm_up
from tutti.recipes.learning_rate import LearningRate
from tutti.strategies import Strategy
from tutti.world import current_world


def fit(  # noqa: PLR0913  # One call instead of a loop: each argument is a part of it.
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    *,
    validation: Any = None,
    optimizer: Any,
    loss: Callable[[Any, Any], Tensor],
    metrics: Metrics = (),
    epochs: int = 1,
    batch_size: int | None = None,
    lr: LearningRate = None,
    workers: Workers = None,
    strategy: Strategy | str = "native",
    device: str = "auto",
    seed: int = 0,
    callbacks: Sequence[Any] = (),
    checkpoint: str | PathLike[str] | tuple[str | PathLike[str], Every] | None = None,
    logger: Logger = None,
) -> History:
    """Train a model on many workers; return what every epoch found. Afterwards `model` has the trained parameters.

    Any number of workers takes the steps that one would take. Mistakes in the arguments are reported together, before
    anything starts.

    Args:
        model: a module, or a function that makes one (then `History.model`).
        data: a dataset of samples (input, target), a DataLoader, or two tensors. Batches are split between workers.
            Only those of an IterableDataset go to workers in turn: a step takes one for each.
        validation: data of the same kinds, to evaluate after every epoch, each sample once.
        optimizer: a function of parameters (`partial(torch.optim.SGD, lr=0.1)`), a class, or an optimiser of the model.
        loss: a function of (output, target), the mean over a batch.
        metrics: of the validation: "accuracy", "f1" (the mean over classes), torchmetrics metrics, functions of the
            whole set's (outputs, targets); or a dict of them by name.
        epochs: passes over the data.
        batch_size: samples per step over all workers, 32 by default; a DataLoader has its own.
        lr: a learning rate in place of the optimiser's, or "auto" to change that by the strategy's rule.
        workers: processes to start on this machine; a pair such as (2, 8) lets them come and go. By default this
            process takes part in the run of its launcher (`tutti run`, torchrun, srun), or trains alone.
        strategy: as for `tutti.distribute`.
        device: "auto" for a GPU for each worker if there are any, or a device of torch's.
        seed: of the order of samples, and of random numbers in workers that `fit` starts.
        callbacks: called as training goes on, as `tutti.fit.callbacks` describes.
        checkpoint: a folder, or a folder and how often, ("runs/a", "5m"). Training continues from the newest
            checkpoint in it. One more is written at the end, and when SIGTERM or Ctrl-C stops the run.
        logger: a file for JSON lines, or a function of (values by name, step). It is called on the first rank, or in
            this process if it starts the workers.
    """
    arguments = dict(locals())
    if is_importing():
        return History()
    return _take_part(arguments) if workers is None else _with_workers(arguments)


def _with_workers(arguments: dict[str, Any]) -> History:
    """Start workers, and take over what they found."""
    mistakes = Mistakes()
    parsed = mistakes.attempt(lambda: _parsed(arguments["workers"]))
    warm_up()  # Imports what workers need, while the arguments are checked.
    num_workers = parsed.maximum if isinstance(parsed, ElasticRun) else parsed or 1
    task = checked_task(arguments, num_workers, mistakes)
    _refuse_unsendable(task, arguments)
    started = parsed if isinstance(parsed, ElasticRun) else _num_ranks(task, num_workers)
    with Reports(task.epochs, arguments["logger"]).shown() as reports:
        results = launch_by_value(run_worker, task, workers=started, watch=reports.watch)
    found = [result for result in results if result is not None]
    if not found:
        raise TuttiError("fit: the worker that had the trained model was lost after the last step. Run it again.")
    state, epochs = found[0]
    task.model.load_state_dict(state)
    history = History(task.model)
    history.load_state_dict(epochs)
    return history


def _take_part(arguments: dict[str, Any]) -> History:
    """Train in the world of this process's launcher, or alone."""
    had_world = current_world() is not None
    world = init()
    try:
        # `tutti run --strategy` overrules the script's, as in `distribute`.
        task = checked_task({**arguments, "strategy": world.strategy or arguments["strategy"]}, world, Mistakes())
        with Reports(task.epochs, arguments["logger"]).shown() as reports:
            history, _ = train(task, world, reports.take)
        return history
    finally:
        if not had_world and world.size == 1 and world.elastic is None:
            world.close()  # Nobody else uses it.


def _parsed(workers: Workers) -> int | ElasticRun | None:
    if (found := read_environment()).size > 1:
        raise ConfigError(
            f"workers={workers!r} starts processes, and {found.launcher} has started {found.size} already: leave "
            "workers out, and fit takes part in that run."
        )
    parsed = parse_workers(workers, "workers")
    if isinstance(workers, bool) or (isinstance(parsed, int) and parsed < 1):
        raise ConfigError(f"workers must be 1 or more, or a pair such as (2, 8), got {workers!r}.")
    return parsed


def _num_ranks(task: Task, num_workers: int) -> int:
    """Return the number of processes: the workers, and the dedicated servers of the strategy."""
    return num_workers + (task.strategy.num_dedicated_servers if num_workers > 1 else 0)


def _refuse_unsendable(task: Task, arguments: dict[str, Any]) -> None:
    """Raise `ConfigError` with all arguments that workers cannot get."""
    if not packing_mistake(task):
        return
    mistakes = Mistakes()
    for name in ("model", "data", "validation", "optimizer", "loss", "metrics", "callbacks"):
        reason = packing_mistake(arguments[name])
        mistakes.need(not reason, f"{name} cannot be sent to workers ({reason})")
    mistakes.report(CANNOT_START)
