"""Lightning's Trainer with block momentum on two processes, which Lightning starts.

    python lightning_digits.py

Needs Lightning: pip install '.[lightning]'
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tutti.integrations.lightning import TuttiStrategy
from tutti.recipes import digits


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        accuracy = (self.net(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, sync_dist=True, batch_size=len(y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    torch.manual_seed(0)
    splits = digits().data(None)
    trainer = pl.Trainer(
        strategy=TuttiStrategy("bmuf:every=8"),
        accelerator="cpu",
        devices=2,
        max_epochs=8,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    train, test = DataLoader(splits.train, batch_size=16, shuffle=True), DataLoader(splits.test, batch_size=64)
    trainer.fit(Classifier(), train, test)
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")
