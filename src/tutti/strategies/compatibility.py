"""Compatibility of strategies with techniques of training: one table, which `distribute`, the docs and the tests read.

`TECHNIQUES` lists what training scripts do besides forward, backward and step. `Strategy.support` says for each whether
it works as on one worker, works in another way (adapts), or is refused, and in which words. `distribute` raises those
words where the technique can be seen in the model or the optimiser; otherwise the event that shows it raises them.
`tutti.job.compatibility` adds meshes, and lists the columns of the table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn, optim
from torch.optim import Optimizer


@dataclass(frozen=True)
class Support:
    """How a technique works under a strategy."""

    outcome: Literal["works", "adapts", "refuses"]
    text: str = ""
    """How it adapts; or the error, which names the remedy."""


@dataclass(frozen=True)
class Technique:
    """Something that a training script may do."""

    title: str
    """Its line in the documentation's table."""
    seen_in: Callable[[nn.Module, Optimizer], bool] | None = None
    """Whether a model or its optimiser uses it, where `distribute` can tell."""


def _uses_lbfgs(_: nn.Module, optimizer: Optimizer) -> bool:
    return isinstance(optimizer, optim.LBFGS)


def _has_sparse_gradients(model: nn.Module, _: Optimizer) -> bool:
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def _is_compiled(model: nn.Module, _: Optimizer) -> bool:
    # Modules that torch.compile returned, and those on which Module.compile was called.
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


TECHNIQUES: Mapping[str, Technique] = {
    "clipping": Technique("`clip_grad_norm_`, `clip_grad_value_`"),
    "changed gradients": Technique("scaling, replacing or dropping `p.grad` before the step"),
    "own gradients": Technique("gradients from `torch.autograd.grad` or a formula of your own"),
    "loss scaling": Technique("`torch.amp.GradScaler`"),
    "autocast": Technique("`torch.autocast`"),
    "sum losses": Technique("losses that are sums over samples"),
    "second derivatives": Technique("gradient penalties, `create_graph=True`"),
    "accumulation": Technique("gradient accumulation, with and without `job.no_sync()`"),
    "averaged weights": Technique("EMA and SWA copies, with `job.average(copy)`"),
    "schedulers": Technique("schedulers, also of momentum; rates set by hand"),
    "rates per layer": Technique("parameter groups with their own options"),
    "closures": Technique("`optimizer.step(closure)`"),
    "LBFGS": Technique("`torch.optim.LBFGS`", _uses_lbfgs),
    "gradient hooks": Technique("`register_hook` on parameters"),
    "batch norm": Technique("BatchNorm by `tutti.sync_batchnorm`"),
    "frozen layers": Technique("layers that are frozen, before or during training"),
    "unfrozen layers": Technique("layers that are unfrozen during training"),
    "unused parameters": Technique("parameters that some ranks do not use in a step"),
    "tied weights": Technique("tied weights"),
    "sparse gradients": Technique("`nn.Embedding(sparse=True)`", _has_sparse_gradients),
    "compiled models": Technique("`torch.compile`", _is_compiled),
    "activation checkpointing": Technique("`torch.utils.checkpoint`"),
    "two models": Technique("two models, each with its optimiser"),
    "several optimisers": Technique("several optimisers for one model"),
    "changed parameters": Technique("parameters changed between steps: clamping, `load_state_dict`"),
    "evaluation on one rank": Technique("evaluation on one rank, under `no_grad`"),
    "metrics": Technique("metrics over all ranks, with `job.reduce`"),
    "resume": Technique("saving and resuming, with `job.state_dict()`"),
    "another strategy": Technique("`job.finish()`, then `distribute` with another strategy"),
}
"""Techniques by name. The tests in `tests/promises` try each of them under every family of strategies."""

WORKS = Support("works")

SPARSE_GRADIENTS = Support(
    "refuses",
    "the model has sparse gradients; only dense ones can be exchanged. Build its embeddings with sparse=False, or use "
    "a strategy that averages parameters, such as bmuf:every=16 or gossip.",
)
"""For strategies that exchange gradients."""

MIXED_LBFGS = Support(
    "refuses",
    "LBFGS takes every change of the parameters since its last step for its own, and this strategy mixes in what other "
    "ranks did. Use AllReduce, or SGD, Adam or another that takes gradients as they are.",
)
"""For strategies that change parameters in every step."""

ADDED_CHANGES = Support(
    "refuses",
    "Changes of all ranks are added up, so this one would count once for every rank. Load states before distribute; to "
    "change parameters while training, use AllReduce, with the same change on every rank.",
)
"""For strategies that add up what ranks change."""

ADDED_SUMS = Support(
    "adapts",
    'a sum is refused until `job.expect(loss="sum")` says that gradients are to be added up, not averaged.',
)
"""For strategies that step by the mean gradient of all ranks."""

OWN_SUMS = Support("adapts", "each rank steps by the sum over its own samples, as one worker with such a batch would.")
"""For strategies whose ranks step by their own gradients."""

COMMON: Mapping[str, Support] = {
    "several optimisers": Support(
        "refuses",
        "Give distribute one optimiser of all trainable parameters, with a parameter group for each part of the model.",
    ),
    "unfrozen layers": Support(
        "adapts",
        "call `job.finish()`, unfreeze them, and call `tutti.distribute` again. Otherwise the first step that would "
        "train them is an error.",
    ),
}
"""Support for techniques that is not `WORKS` under any strategy."""


def refusals(support: Callable[[str], Support], model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the errors for techniques that a model or its optimiser uses and a strategy refuses.

    Args:
        support: how each technique works under the strategy (`Strategy.support`), or on a mesh.
        model: the model to distribute.
        optimizer: its optimiser.
    """
    used = [name for name, each in TECHNIQUES.items() if each.seen_in is not None and each.seen_in(model, optimizer)]
    return [support(name).text for name in used if support(name).outcome == "refuses"]
