"""Support of training techniques on a mesh that splits the model, where it is not that of the mesh's strategy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tutti.errors import ReplicaMismatch
from tutti.strategies.compatibility import WORKS, Support

SUPPORT: Mapping[str, Support] = {
    "sum losses": WORKS,  # Ranks that hold one replica together have the whole batch.
    "second derivatives": Support(
        "refuses",
        "Gradients of a model that is split over ranks cannot be differentiated again (create_graph=True). Train "
        "without a gradient penalty, or without tensor in the mesh.",
    ),
    "averaged weights": Support(
        "adapts",
        "A copy of a split model would have this rank's part only. Make the copy before distribute, and update it "
        "inside job.consensus(optimizer=False).",
    ),
    "LBFGS": Support(
        "refuses",
        "LBFGS looks at the whole model, and a rank has parts of it: use SGD, Adam, AdamW or another element-wise "
        "optimiser, or do not use tensor and pipe.",
    ),
    "compiled models": Support(
        "refuses",
        "torch's compiler cannot follow layers that are split over ranks. Do not compile the model, or do not use "
        "tensor and pipe.",
    ),
    "activation checkpointing": Support(
        "refuses",
        "A split layer works inside of the model's forward pass only: call the whole model, and do not use "
        "torch.utils.checkpoint on split layers.",
    ),
    "changed parameters": Support(
        "adapts",
        "Element-wise changes, such as clamping, work on every rank's part. Load states before distribute, when the "
        "model is whole.",
    ),
    "evaluation on one rank": Support(
        "adapts",
        "Ranks that split a model run its forward passes and take steps together, all ranks as many. To evaluate on "
        "one rank, every rank must enter job.consensus(), where each has the whole model.",
    ),
}
"""By technique."""


@contextmanager
def together() -> Iterator[None]:
    """Add the remedy to the error for ranks of one replica that are in different operations."""
    try:
        yield
    except ReplicaMismatch as error:
        raise ReplicaMismatch(f"{error} {SUPPORT['evaluation on one rank'].text}") from None
