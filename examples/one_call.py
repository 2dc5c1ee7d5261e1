"""The whole training loop in one call: four processes, evaluation on all of them, a checkpoint, and a curve to print.

python examples/one_call.py
"""

from functools import partial

import torch
from torch import nn

import tutti
from tutti.recipes import digits

data = digits().data(None)  # Handwritten digits: 8 x 8 pixels, ten classes; part of Tutti.
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def misread(scores: torch.Tensor, targets: torch.Tensor) -> int:
    """Count the mistakes: a metric is any function of all scores and targets of the validation set."""
    return int((scores.argmax(1) != targets).sum())


def stop_early(run) -> None:
    """Called after every epoch, on every worker."""
    if run.history["accuracy"][-1] > 0.95:
        run.stop()


print(tutti.summary(model, torch.zeros(1, 1, 8, 8)))
history = tutti.fit(
    model,
    data.train,
    validation=data.test,
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    loss=nn.CrossEntropyLoss(),
    metrics=["accuracy", "f1", misread],
    epochs=10,
    batch_size=64,  # Samples of a step over all workers: any number of them takes the same steps.
    workers=4,
    callbacks=[stop_early],
)
print(history)
print(f"{len(history)} epochs, {history[-1].metrics['misread']} of {len(data.test)} digits are misread")
