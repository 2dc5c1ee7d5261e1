"""Step times of the large models on one GPU: `python -m tutti.bench.gpu_step_times` prints them as JSON.

It times forward, backward and a step of SGD on random images in float32, without TF32, which GPUs before 2020 lack.
"""

import json
import statistics
import sys
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F

from tutti.recipes.models import LARGE, large

BATCHES = (64, 128, 256, 512)
"""Batch sizes that are measured."""
_WARM_UP, _ROUNDS = 10, 30
"""Steps that are not counted, in which cuDNN tries its algorithms, and steps of which the median is taken."""
_HEAD_START = 200_000_000
"""Cycles that the GPU waits before a step, about 0.1 s. Python enqueues the whole step meanwhile, so that launching
kernels is not timed."""


def measure(name: str, batch_size: int) -> dict[str, Any]:
    """Return the median milliseconds of forward, backward and the optimiser's step, by the GPU's clock."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.cuda.empty_cache()  # Blocks of the last model's sizes would otherwise leave no room for this one.
    with torch.device("cuda"):
        model = large(name)
        x, y = torch.randn(batch_size, 3, 224, 224), torch.randint(1000, (batch_size,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rows = []
    for _ in range(_WARM_UP + _ROUNDS):
        # Start, end of forward, end of backward, end of the optimiser's step.
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        torch.cuda._sleep(_HEAD_START)
        marks[0].record()
        loss = F.cross_entropy(model(x), y)
        marks[1].record()
        loss.backward()
        marks[2].record()
        optimizer.step()
        optimizer.zero_grad()
        marks[3].record()
        torch.cuda.synchronize()
        rows.append([before.elapsed_time(after) for before, after in pairwise(marks)])
    medians = (statistics.median(values) for values in zip(*rows[_WARM_UP:], strict=True))
    forward_ms, backward_ms, step_ms = (round(value, 3) for value in medians)
    parts = {"forward_ms": forward_ms, "backward_ms": backward_ms, "step_ms": step_ms}
    return {"model": name, "batch_size": batch_size, **parts}


def main() -> None:
    """Measure every model at every batch size."""
    rows = []
    for name in LARGE:
        for batch_size in BATCHES:
            rows.append(measure(name, batch_size))
            print(rows[-1], file=sys.stderr, flush=True)
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32 without TF32"
    print(json.dumps({"device": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
