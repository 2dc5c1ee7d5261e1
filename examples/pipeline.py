"""Split a model into two pipeline stages on two processes: python examples/pipeline.py"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.recipes import digits


def train(epochs: int = 2) -> float:
    tutti.init()
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 256), torch.nn.ReLU()]
    for _ in range(4):
        layers += [torch.nn.Linear(256, 256), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(digits().data(None).train, batch_size=64, shuffle=True, drop_last=True)
    example, _ = next(iter(loader))
    mesh = tutti.Mesh(pipe=2, pipeline=tutti.Pipeline(schedule="1f1b", microbatches=4))
    job = tutti.distribute(model, optimizer, mesh=mesh, example=example)  # Each rank keeps its stage.
    pipeline = job.pipeline(F.cross_entropy)
    batches = tutti.shard(loader)  # After distribute: all stages of one replica get the same batches.
    for _ in range(epochs):
        for x, y in batches:
            loss = pipeline(x, y)  # Replaces forward and backward.
            optimizer.step()
            optimizer.zero_grad()
    job.finish()  # Every rank has the whole model again.
    return float(loss)


if __name__ == "__main__":
    losses = tutti.launch(train, workers=2)
    print(f"two stages: last loss {losses[0]:.3f}")
