"""Train under Ray Train, and record what came of it."""

import tempfile
from typing import Any

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from started import record
from torch.utils.data import DataLoader

import tutti
from tutti.integrations.ray import TuttiConfig
from tutti.recipes import digits


def train(config: dict[str, Any]) -> None:
    world = tutti.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    splits = digits().data(None)
    job = tutti.distribute(model, optimizer, strategy=config["strategy"])
    batches = tutti.shard(DataLoader(splits.train, batch_size=16, shuffle=True))
    for epoch in batches.epochs(6):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    x, y = next(iter(DataLoader(splits.test, batch_size=len(splits.test))))
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == y).float().mean())
    total = torch.tensor(world.rank)
    dist.all_reduce(total)  # torch's default group is there as well.
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/model.pt")
        checkpoint = Checkpoint.from_directory(folder) if world.rank == 0 else None
        values = {"accuracy": accuracy, "size": world.size, "sum of ranks": int(total)}
        ray.train.report(values, checkpoint=checkpoint)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config={"strategy": "onebit"},
            torch_config=TuttiConfig(),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=storage, name="digits"),
        )
        result = trainer.fit()
        metrics = result.metrics or {}
        with result.checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/model.pt", weights_only=True)
        record("onebit", {**metrics, "saved": sorted(saved)})
    ray.shutdown()
