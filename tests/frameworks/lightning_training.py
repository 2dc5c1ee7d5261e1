"""Train under Lightning's Trainer, and record what came of it.

python lightning_training.py DEVICES WHAT...
"""

import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from started import record
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tutti.errors import TuttiError
from tutti.integrations.lightning import TuttiStrategy

warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 103, 5, 4
generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(NUM_SAMPLES, 8, generator=generator, dtype=torch.float64)
LABELS = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
DATA = TensorDataset(INPUTS, LABELS, torch.arange(NUM_SAMPLES))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


class Module(pl.LightningModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = net(seed)
        self.seen: list[int] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y, number = batch
        self.seen += number.tolist()
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y, _ = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("val", loss, sync_dist=True, batch_size=len(y))

    test_step = validation_step

    def predict_step(self, batch: Any, _: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


class Manual(Module):
    """Takes its steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, _)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        scheduler: Any = self.lr_schedulers()
        scheduler.step()


class TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [torch.optim.SGD([p], lr=0.1) for p in list(self.parameters())[:2]]


class Save(pl.Callback):
    """Saves a checkpoint in the middle of an epoch, and one at the end of the second."""

    def __init__(self, folder: str) -> None:
        self.paths = [f"{folder}/middle.ckpt", f"{folder}/end.ckpt"]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 17:
            trainer.save_checkpoint(self.paths[0])

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.paths[1])


def trainer_of(strategy: str, **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    chosen: Any = strategy if strategy == "tutti" else TuttiStrategy(strategy)
    return pl.Trainer(
        strategy=chosen, accelerator="cpu", devices=int(sys.argv[1]), **{"max_epochs": EPOCHS, **quiet, **options}
    )


def loader() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=BATCH_SIZE, shuffle=True)


VALIDATION: DataLoader[Any] = DataLoader(DATA, batch_size=7)


def fit(strategy: str, module: Module | None = None, ckpt_path: str | None = None, **options: Any) -> Any:
    module, trainer = module or Module(), trainer_of(strategy, **options)
    trainer.fit(module, loader(), VALIDATION, ckpt_path=ckpt_path)
    return module, trainer


def parameters(module: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).tolist()


def gathered(value: Any) -> list[Any]:
    """What all ranks have."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def train(strategy: str, **options: Any) -> dict[str, Any]:
    """What a run ends with."""
    module, trainer = fit(strategy, **options)
    tested = trainer.test(module, VALIDATION, verbose=False)[0]["val"]
    with torch.no_grad():
        exact = float(F.cross_entropy(module.net(INPUTS), LABELS))
    return {
        "parameters": gathered(parameters(module)),
        "seen": gathered(module.seen),
        "steps": trainer.global_step,
        "val": float(trainer.callback_metrics["val"]),
        "tested": tested,
        "loss of the model": exact,
    }


def resume(strategy: str) -> dict[str, Any]:
    """How far runs that were resumed end from one that was not."""
    folders: list[Any] = [tempfile.mkdtemp()]
    trainer = trainer_of(strategy)
    trainer.strategy.setup_environment()  # The folder is that of the first rank.
    dist.broadcast_object_list(folders, 0)
    save = Save(folders[0])
    whole, _ = fit(strategy, callbacks=[save])
    ends = [parameters(fit(strategy, Module(seed=7), ckpt_path=path)[0]) for path in save.paths]
    saved = torch.load(save.paths[0], weights_only=False)
    return {
        "whole": parameters(whole),
        "resumed": ends,
        "keys": sorted(saved),
        "files": sorted(path.name for path in Path(folders[0]).iterdir()),
    }


def predict(strategy: str) -> list[int]:
    """How many predictions each rank makes."""
    module, trainer = fit(strategy)
    predicted = trainer.predict(module, VALIDATION)
    return gathered(sum(len(each) for each in predicted or []))


def refused(strategy: str) -> str:
    """The error of a module with two optimisers."""
    try:
        fit(strategy, TwoOptimizers())
    except TuttiError as error:
        return str(error)
    return ""


TASKS = {
    "train": train,
    "accumulate": lambda strategy: train(strategy, accumulate_grad_batches=3, gradient_clip_val=0.1),
    "bfloat16": lambda strategy: train(strategy, precision="bf16-mixed"),
    "manual": lambda strategy: train(strategy, module=Manual()),
    "limited": lambda strategy: train(strategy, limit_train_batches=4),
    "resume": resume,
    "predict": predict,
    "refused": refused,
}

if __name__ == "__main__":
    for word in sys.argv[2:]:
        task, _, strategy = word.partition("=")
        result = TASKS[task](strategy)
        if dist.get_rank() == 0:
            record(word, result)
