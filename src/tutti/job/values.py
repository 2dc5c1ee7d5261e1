"""`CollectiveValues`: the part of a job that combines values of all ranks, such as metrics."""

from math import isnan
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tutti.errors import ConfigError, ReplicaMismatch
from tutti.job.copies import average, averaged_tensors, copy_mistake, describe, different_tensors
from tutti.strategies import Exchange
from tutti.world import World

ReduceOp = Literal["mean", "sum", "max"]


class CollectiveValues:
    """Collective calls on values. `Job` sets the fields.

    The ranks that train (`job.world`) make the same calls in the same order: under `ps:async`, peers and asynchronous
    gossip after any number of steps, under other strategies after equal ones, because those that are ahead would wait
    for this rank's steps. A rank that does not call is an error that names it, after the timeout of `tutti.init`. A
    lost rank is left out under strategies that continue without it (its place in `gather` is None), and an error under
    the others.
    """

    world: World
    _model: nn.Module
    _exchange: Exchange
    _num_lost_confirmed = 0
    """Number of lost ranks when this one last confirmed that it still takes part."""

    def reduce(self, value: Any, op: ReduceOp = "mean") -> Any:
        """Return the mean, sum or maximum of `value` over ranks, the same on every rank. Collective.

        Args:
            value: a number, a tensor, or a dict of them, alike on all ranks. A mean is plain: each rank counts once.
            op: "mean", "sum" or "max".
        """
        mistake = "" if op in get_args(ReduceOp) else f"op must be one of {', '.join(get_args(ReduceOp))}, got {op!r}."
        mistake = mistake or _mistake(value, op)
        # A mistake is sent in place of the value: raised here alone, it would leave the other ranks waiting.
        sent = ConfigError(mistake) if mistake else {"op": op, "value": _plain(value)}
        answer = self._call("job.reduce", sent, _reduced)
        return _like(value, answer)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, the same list on every rank, with rank r's at index r. Collective.

        Values are tensors, numbers, texts, None, and lists, tuples and dicts of them. Tensors come on the CPU. At the
        index of a rank that was lost there is None, so that the others keep theirs. Ranks are those of `job.world`.
        """
        ranks = range(self.world.size)
        return list(self._call("job.gather", value, lambda values: [values.get(rank) for rank in ranks]))

    def barrier(self) -> None:
        """Return when every rank has called it. Collective."""
        self._call("job.barrier", None, lambda values: None)

    def average(self, module: nn.Module) -> None:
        """Replace parameters and floating-point buffers of a copy of the model by their mean over ranks. Collective.

        For copies that each rank keeps by itself, such as `torch.optim.swa_utils.AveragedModel`: where ranks take local
        steps, the copies differ. The mean is plain. What is equal on all ranks already is left as it is.
        """
        self._average(module)

    def _average(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """As `average`; return the tensors that it changed, each with the values that this rank had in it."""
        mistake = copy_mistake(module, self._model)
        tensors = {} if mistake else averaged_tensors(module)
        sent = ConfigError(mistake) if mistake else describe(tensors)

        def means() -> dict[str, Tensor]:
            calls = self.world.calls
            found = calls.call("job.average", sent, different_tensors, elastic=self._exchange.tolerates_loss)
            # Beside the copy, which stays as it is if a rank is lost meanwhile.
            made = {name: tensors[name].clone() for name in found["names"]}
            average(made.values(), calls.among(found["ranks"]))
            return made

        # Ranks that still train must not wait for this one's part in a step while it waits here.
        with self.world.waiting():
            changed = self.world.collective(means, same_answer=True)
            self._confirm_losses()
        local = [(tensors[name], tensors[name].clone()) for name in changed]
        for name, mean in changed.items():
            tensors[name].copy_(mean)
        return local

    def _call(self, name: str, value: Any, combine: Any) -> Any:
        # Ranks that still train must not wait for this one's part in a step while it waits here.
        with self.world.waiting():
            answer = self.world.call(name, value, combine, elastic=self._exchange.tolerates_loss)
            self._confirm_losses()
        return answer

    def _confirm_losses(self) -> None:
        """Make sure, after ranks were lost, that it is not this one that is cut off. Raises `RankLost` if it is.

        What it has found alone would not be the job's. Once for every loss: the coordinator may be away.
        """
        num_lost = max(self._exchange.num_lost, self.world.calls.num_lost)
        if num_lost > self._num_lost_confirmed:
            self.world.confirm()
            self._num_lost_confirmed = num_lost


def _mistake(value: Any, op: str, at: str = "") -> str:
    """Return what is wrong with a value that is to be reduced; nothing if it can be."""
    where = f"'{at}' is" if at else "got"
    if isinstance(value, dict):
        # The path through nested dicts, such as 'train.loss', so that the message names the very item.
        found = [_mistake(item, op, f"{at}.{key}" if at else str(key)) for key, item in value.items()]
        return next((mistake for mistake in found if mistake), "")
    if isinstance(value, Tensor):
        if value.is_complex() or value.dtype == torch.bool or (op == "mean" and not value.is_floating_point()):
            return f"{where} a {value.dtype} tensor, which has no {op}: convert it first, to float for example."
        return ""
    if isinstance(value, Real):
        return ""
    return f"{where} a {type(value).__name__}; it takes numbers, tensors, and dicts of them."


def _plain(value: Any) -> Any:
    """Return a value with numbers of any kind, numpy's for example, as Python's."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Tensor):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _like(value: Any, answer: Any) -> Any:
    """Return the answer with the keys of `value`, and tensors on its devices."""
    if isinstance(value, dict):
        return {key: _like(item, answer[str(key)]) for key, item in value.items()}
    return answer.to(value.device) if isinstance(value, Tensor) else answer


def _reduced(by_rank: dict[int, Any]) -> Any:
    """Return the reduction of what all ranks sent. Raises `ReplicaMismatch` if it differs in kind."""
    first = min(by_rank)
    for rank, sent in by_rank.items():
        if sent["op"] != by_rank[first]["op"]:
            raise ReplicaMismatch(
                f"job.reduce: rank {first} asks for the {by_rank[first]['op']}, rank {rank} for the {sent['op']}."
            )
        if difference := _difference(by_rank[first]["value"], sent["value"]):
            ours, theirs = difference
            raise ReplicaMismatch(f"job.reduce: rank {first} has {ours}, rank {rank} has {theirs}.")
    return _combine([sent["value"] for sent in by_rank.values()], by_rank[first]["op"])


def _difference(ours: Any, theirs: Any, at: str = "") -> tuple[str, str] | None:
    """Return how the kinds of two values differ, as seen by both; None if they do not."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() ^ theirs.keys()):
            return (f"'{at}{key}'", "no such key") if key in ours else (f"no '{at}{key}'", "one")
        found = [_difference(item, theirs[key], f"{at}{key}.") for key, item in ours.items()]
        return next((difference for difference in found if difference), None)
    kinds = _kind(ours), _kind(theirs)
    name = f" in '{at[:-1]}'" if at else ""
    return None if kinds[0] == kinds[1] else (kinds[0] + name, kinds[1])


def _kind(value: Any) -> str:
    """Describe the kind of a value: ranks must agree on it, and not on the value."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return "a dict" if isinstance(value, dict) else "a number"


def _combine(values: list[Any], op: str) -> Any:
    """Return the reduction of values of one kind; dicts key by key."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _combine([value[key] for value in values], op) for key in first}
    if isinstance(first, Tensor):
        if op == "max":
            return torch.stack(values).amax(0)
        # In float64, so that the order of ranks does not show in the result's own precision.
        wide = torch.float64 if first.is_floating_point() else torch.int64
        total = torch.stack([value.to(wide) for value in values]).sum(0)
        return (total / len(values) if op == "mean" else total).to(first.dtype)
    if op == "max":
        return float("nan") if any(map(isnan, values)) else max(values)  # As for tensors.
    return sum(values) / len(values) if op == "mean" else sum(values)
