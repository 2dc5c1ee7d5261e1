"""Train with Accelerate, Fabric or the Trainer of Transformers, and record what came of it.

tutti run --workers 2 loops.py WHAT...
"""

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from lightning.fabric import Fabric
from started import record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tutti
from tutti.integrations.accelerate import TuttiAccelerator
from tutti.integrations.fabric import FabricTuttiStrategy
from tutti.integrations.transformers import TuttiTrainer
from tutti.recipes import digits

generator = torch.Generator().manual_seed(0)
NUM_SAMPLES = 96
DATA = TensorDataset(
    torch.randn(NUM_SAMPLES, 8, generator=generator),
    torch.randint(0, 3, (NUM_SAMPLES,), generator=generator),
    torch.arange(NUM_SAMPLES),
)
TOKENS = torch.randint(0, 32, (64, 16), generator=generator)
SENTENCES = [{"input_ids": each, "labels": each} for each in TOKENS]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def parameters(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def gathered(value: Any) -> list[Any]:
    """What all ranks have."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def accelerate(strategy: str) -> dict[str, Any]:
    """A loop of Accelerate, with accumulation and clipping; by DDP with "ddp"."""
    options: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2}
    accelerator = Accelerator(**options) if strategy == "ddp" else TuttiAccelerator(strategy, **options)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(DATA, batch_size=6, shuffle=True))
    seen = []
    for _ in range(3):
        for x, y, number in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            seen += number.tolist()
    if isinstance(accelerator, TuttiAccelerator):
        with accelerator.agreed():
            within = parameters(model)
        accelerator.finish()
        assert parameters(model) == within
    return {"parameters": gathered(parameters(model)), "seen": gathered(seen)}


def trainer_of(strategy: str, folder: str, seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, **no_dropout)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=12,
        save_steps=6,
        eval_strategy="steps",
        eval_steps=6,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    given: dict[str, Any] = {"model": GPT2LMHeadModel(config), "args": arguments}
    given |= {"train_dataset": SENTENCES, "eval_dataset": {"first": SENTENCES[:16], "last": SENTENCES[-8:]}}
    return Trainer(**given) if strategy == "ddp" else TuttiTrainer(**given, strategy=strategy)


def transformers(strategy: str) -> dict[str, Any]:
    """A run of the Trainer, and one that is resumed from its first checkpoint; by DDP with "ddp"."""
    folders = [tempfile.mkdtemp()]
    tutti.init(torch_distributed=True)
    dist.broadcast_object_list(folders, 0)
    whole = trainer_of(strategy, folders[0])
    whole.train()
    resumed = trainer_of(strategy, folders[0], seed=5)
    resumed.train(resume_from_checkpoint=f"{folders[0]}/checkpoint-6")
    assert whole.model is not None
    assert resumed.model is not None
    return {
        "parameters": gathered(parameters(whole.model)),
        "resumed": parameters(resumed.model),
        "loss": whole.evaluate()["eval_first_loss"],
        "files": sorted(os.listdir(f"{folders[0]}/checkpoint-6")),
    }


def fabric(strategy: str) -> dict[str, Any]:
    """A loop of Fabric that saves, loads into another model, and goes on."""
    made = Fabric(strategy=FabricTuttiStrategy(strategy), accelerator="cpu", devices=2)
    made.launch()
    model = net()
    wrapped, optimizer = made.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    loader = made.setup_dataloaders(DataLoader(DATA, batch_size=6, shuffle=True))
    folders, seen = [tempfile.mkdtemp()], []
    dist.broadcast_object_list(folders, 0)
    for _ in range(3):
        for index, (x, y, number) in enumerate(loader):
            with made.no_backward_sync(wrapped, enabled=index % 2 == 0):
                made.backward(F.cross_entropy(wrapped(x), y))
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
            seen += number.tolist()
    made.save(f"{folders[0]}/a.ckpt", {"model": wrapped, "optimizer": optimizer, "epoch": 3})
    made.strategy.finish()
    other = net()
    rest = made.load(f"{folders[0]}/a.ckpt", {"model": other})
    return {
        "parameters": gathered(parameters(model)),
        "loaded": parameters(other),
        "rest": sorted(rest),
        "seen": gathered(seen),
    }


def digits_by_accelerate(strategy: str) -> float:
    """The accuracy on real data."""
    accelerator = TuttiAccelerator(strategy, cpu=True)
    splits = digits().data(None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(splits.train, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(6):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.finish()
    x, y = next(iter(DataLoader(splits.test, batch_size=len(splits.test))))
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


TASKS = {"accelerate": accelerate, "transformers": transformers, "fabric": fabric, "digits": digits_by_accelerate}

if __name__ == "__main__":
    for word in sys.argv[1:]:
        task, _, strategy = word.partition("=")
        result = TASKS[task](strategy)
        if dist.get_rank() == 0:
            record(word, result)
