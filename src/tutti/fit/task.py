"""`Task`: what `tutti.fit` was asked for, checked, in a form that goes to workers."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tutti.checkpoint.interval import Every, parse_every
from tutti.cluster.mistakes import Mistakes, is_count, is_positive
from tutti.errors import ConfigError
from tutti.fit.callbacks import callback_mistakes
from tutti.fit.data import as_loader, first_batch, num_samples
from tutti.fit.metrics import NAMED, ValidationLoss, ValidationMetric, make_metrics, predicted_classes
from tutti.job.checkpoints.random_state import RandomStates, set_random_state
from tutti.recipes.learning_rate import LearningRate
from tutti.strategies import Strategy, as_strategy
from tutti.world import World

Loss = Callable[[Any, Any], Tensor]

CANNOT_START = "fit cannot start:"
"""Before the list of all mistakes."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training, as every rank gets it."""

    model: nn.Module
    optimizer: Any
    """An optimiser of the model, or a function that makes one from its parameters."""
    loss: Loss
    loader: DataLoader[Any]
    validation: DataLoader[Any] | None
    metrics: dict[str, ValidationMetric]
    """By name, the loss among them."""
    strategy: Strategy
    epochs: int
    lr: LearningRate
    seed: int
    device: str
    """"auto", or a device of torch's."""
    callbacks: tuple[Any, ...]
    checkpoint: str | None
    every: Every

    @property
    def loss_is_sum(self) -> bool:
        """Whether the loss says itself that it adds up over samples."""
        return getattr(self.loss, "reduction", None) == "sum"


def checked_task(arguments: dict[str, Any], ranks: World | int, mistakes: Mistakes) -> Task:
    """Return the task of the arguments of `fit`. Raises `ConfigError` with all mistakes.

    Args:
        ranks: the world that trains, or the most workers that will be started.
        mistakes: those found before.
    """
    given = arguments
    strategy = mistakes.attempt(lambda: as_strategy(given["strategy"]))
    num_workers = _num_workers(ranks, strategy)
    model = mistakes.attempt(lambda: _model(given["model"]))
    loader, validation = _loaders(given, num_workers, mistakes)
    loss, epochs, lr = given["loss"], given["epochs"], given["lr"]
    mistakes.need(
        callable(loss) and not isinstance(loss, type),
        f"loss must be a function of (output, target), got {loss!r}"
        + (f". Give an object: {loss.__name__}()" if isinstance(loss, type) else ""),
    )
    mistakes.need(is_count(epochs), f"epochs must be 1 or more, got {epochs!r}")
    is_rate = lr in (None, "auto") or is_positive(lr)
    mistakes.need(is_rate, f'lr must be a number above 0, or "auto", got {lr!r}')
    metrics = mistakes.attempt(lambda: make_metrics(given["metrics"])) or {}
    mistakes.need(
        not metrics or given["validation"] is not None,
        f"metrics ({', '.join(metrics)}) are those of a validation set: give validation=, or leave them out",
    )
    if strategy is not None:
        servers = strategy.num_dedicated_servers if num_workers > 1 else 0
        mistakes.attempt(lambda: strategy.check_size(num_workers + servers))
    mistakes.attempt(lambda: _check_device(given["device"]))
    for mistake in callback_mistakes(given["callbacks"]):
        mistakes.need(False, mistake.rstrip("."))
    folder, every = mistakes.attempt(lambda: _checkpoint(given["checkpoint"])) or (None, "5m")
    _check_logger(given["logger"], mistakes)
    if model is not None:
        if loader is not None and callable(loss) and not isinstance(loss, type):
            mistakes.attempt(lambda: _try(model, loader, loss, metrics))
        mistakes.attempt(lambda: make_optimizer(given["optimizer"], model))
    mistakes.report(CANNOT_START)
    assert model is not None
    assert strategy is not None
    is_sum = getattr(loss, "reduction", None) == "sum"
    return Task(
        model=model, optimizer=given["optimizer"], loss=loss, loader=loader, validation=validation,
        metrics={"loss": ValidationLoss(loss, is_sum=is_sum), **metrics}, strategy=strategy, epochs=epochs, lr=lr,
        seed=given["seed"], device=str(given["device"]), callbacks=tuple(given["callbacks"]), checkpoint=folder,
        every=every,
    )  # fmt: skip


def make_optimizer(optimizer: Any, model: nn.Module) -> Optimizer:
    """Return the optimiser of a model. Raises `ConfigError` if it is none, or of another model."""
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise ConfigError(
                "optimizer must be an optimiser of the model, a class such as torch.optim.AdamW, or a function of its "
                f"parameters such as partial(torch.optim.SGD, lr=0.1), got {optimizer!r}."
            )
        try:
            made = optimizer(model.parameters())
        except Exception as error:  # The user's function may raise anything.
            raise ConfigError(f"optimizer fails: {type(error).__name__}: {error}") from error
        if not isinstance(made, Optimizer):
            raise ConfigError(f"optimizer must return a torch optimiser, got {made!r} from {optimizer!r}.")
        optimizer = made
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ConfigError(
            f"optimizer does not have {len(missing)} of the model's parameters, '{missing[0]}' first: make it of "
            "model.parameters(), or give the function that makes it."
        )
    return optimizer


def _model(model: Any) -> nn.Module:
    """Return the model, or the one that a function makes."""
    made = model
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise ConfigError(f"model must be a torch.nn.Module, or a function that makes one, got {model!r}.")
        try:
            made = model()
        except Exception as error:  # The user's function may raise anything.
            raise ConfigError(f"model fails: {type(error).__name__}: {error}") from error
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model must return a torch.nn.Module, got a {type(made).__name__}.")
    if not any(parameter.requires_grad for parameter in made.parameters()):
        raise ConfigError("model has no parameter to train: all are frozen, or there are none.")
    return made


def _loaders(given: dict[str, Any], num_workers: int, mistakes: Mistakes) -> tuple[Any, Any]:
    batch_size = given["batch_size"]
    is_size = batch_size is None or is_count(batch_size)
    mistakes.need(is_size, f"batch_size must be 1 or more, got {batch_size!r}")
    batch_size = batch_size if is_size else None
    loader = mistakes.attempt(lambda: as_loader(given["data"], batch_size, "data", shuffle=True))
    validation = None
    if given["validation"] is not None:
        own = None if isinstance(given["validation"], DataLoader) else batch_size or getattr(loader, "batch_size", None)
        validation = mistakes.attempt(lambda: as_loader(given["validation"], own, "validation", shuffle=False))
    if loader is not None and (length := num_samples(loader)) is not None:
        smallest = min(length, loader.batch_size or length)
        mistakes.need(
            smallest >= num_workers,
            f"{num_workers} workers cannot share {length} samples in batches of {loader.batch_size}: each needs a part "
            f"of every batch. Use {smallest} or fewer, or larger batches",
        )
    return loader, validation


def _num_workers(ranks: World | int, strategy: Strategy | None) -> int:
    """Return how many ranks train: all but dedicated servers, of which a single rank has none."""
    if isinstance(ranks, int):
        return ranks
    return ranks.size - (0 if strategy is None or ranks.size == 1 else strategy.num_dedicated_servers)


def _check_device(device: Any) -> None:
    if device == "auto":
        return
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f'device must be "auto", "cpu", "cuda" or "cuda:1", got {device!r}.') from None
    if wanted.type == "cuda" and (wanted.index or 0) >= (count := torch.cuda.device_count()):
        found = f"{count} GPUs" if count else "no GPU that torch can use"
        raise ConfigError(f'device "{device}": this machine has {found}. Use device="auto".')


def _checkpoint(checkpoint: Any) -> tuple[str | None, Every]:
    folder, every = checkpoint if isinstance(checkpoint, tuple) and len(checkpoint) == 2 else (checkpoint, "5m")
    if folder is None:
        return None, every
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(
            f'checkpoint must be a folder, or a folder and how often, such as ("runs/a", "5m"), got {checkpoint!r}.'
        )
    parse_every(every)
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(f"checkpoint: {folder} is a file, and must be a folder.")
    return os.fspath(folder), every


def _check_logger(logger: Any, mistakes: Mistakes) -> None:
    if logger is None or callable(logger):
        return
    is_file = isinstance(logger, str | Path)
    mistakes.need(is_file, f"logger must be a file or a function of (values, step), got {logger!r}")
    if is_file:
        mistakes.need(Path(logger).parent.is_dir(), f"logger: there is no folder {Path(logger).parent}")


def _try(model: nn.Module, loader: DataLoader[Any], loss: Loss, metrics: dict[str, ValidationMetric]) -> None:
    """Compute the loss of two samples, to find mistakes before the start. Nothing is changed by that."""
    before = RandomStates().values()
    try:
        batch = _attempt("data: the first sample fails", lambda: first_batch(loader))
        if batch is None:
            return
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            kind = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
            raise ConfigError(f"data must give samples (input, target), got {kind}. Wrap the dataset to give those.")
        inputs, targets = _to(batch, next(model.parameters()).device)
        if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
            _attempt("model fails on the first samples", lambda: _learn_shapes(model, inputs))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.no_grad():
            outputs = _attempt(
                "model fails on the first samples", lambda: torch.func.functional_call(model, buffers, (inputs,))
            )
            value = _attempt("loss fails on the first samples", lambda: loss(outputs, targets))
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ConfigError(f"loss must return one number, the mean over the batch, got {got}. Add .mean().")
        for name, metric in metrics.items():
            if type(metric) in NAMED.values():
                predicted_classes(name, outputs, targets)
    finally:
        set_random_state(before)


def _learn_shapes(model: nn.Module, inputs: Any) -> None:
    """Let lazy layers make their parameters, and change nothing else."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        model(inputs)
    for module, training in modes:
        module.training = training


def _attempt(what: str, do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception as error:  # The user's code may raise anything.
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error


def _to(batch: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), list(batch))
