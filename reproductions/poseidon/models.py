"""The models of Poseidon's experiments, and the assumed compute time of a K20 for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from reproductions.poseidon.results import AssumedCompute
from tutti.cluster import Compute
from tutti.recipes.models import AlexNet, CifarQuick, GoogLeNet
from tutti.recipes.step_times import k20
from tutti.simulation.runs.scaling import IMAGE
from tutti.simulation.workload import Workload


@dataclass(frozen=True)
class PoseidonModel:
    """A model, and the batch size of a worker in Caffe's solver."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    """Shape of a sample."""
    batch_size: int
    bucket_bytes: int = 4 * 2**20


MODELS = {
    # Small buckets: all of cifar-quick would fit into one of the usual size, and nothing would be sent before the
    # end of backward.
    "cifar-quick": PoseidonModel(CifarQuick, (3, 32, 32), 100, bucket_bytes=2**16),
    "alexnet": PoseidonModel(AlexNet, IMAGE, 256),
    "googlenet": PoseidonModel(GoogLeNet, IMAGE, 32),
}


def sample_seconds(name: str) -> float:
    """Return how long a K20 would compute for a sample.

    No speed is published for `cifar-quick`: it is taken to reach as many operations per second as AlexNet.
    """
    if name == "cifar-quick":
        return sample_seconds("alexnet") * _forward_flops(name) / _forward_flops("alexnet")
    seconds = k20(name).sample_s
    assert seconds is not None
    return seconds


def compute(name: str) -> Compute:
    """Return the compute speed of a worker for a model."""
    return Compute(sample_s=sample_seconds(name)) if name == "cifar-quick" else k20(name)


def assumed_compute(name: str) -> AssumedCompute:
    """Return the assumed compute speed for the report."""
    seconds, model = sample_seconds(name), MODELS[name]
    return AssumedCompute(
        batch_size=model.batch_size,
        images_per_s=1 / seconds,
        step_s=seconds * model.batch_size,
        flops=3 * _forward_flops(name) / seconds,  # Backward takes twice as many operations as forward.
        bucket_bytes=model.bucket_bytes,
    )


def _forward_flops(name: str) -> float:
    model = MODELS[name]
    with torch.device("meta"):
        return Workload.from_model(model.make(), (torch.empty(1, *model.sample),), {}).forward_flops
