"""`TuttiTrainer`: the Trainer of Transformers with any of Tutti's strategies.

    trainer = TuttiTrainer(model=model, args=args, train_dataset=data, strategy="bmuf:every=16")
    trainer.train()

Start it with `tutti run`, torchrun or srun. How data is divided, mixed precision, accumulation and metrics are the
Trainer's own. The model is distributed when training begins, after the Trainer has loaded what it resumes from.
Evaluation and checkpoints use the parameters that all ranks agree on. A checkpoint has one more file, `tutti.pt`, with
the strategy's state.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from tutti.integrations.accelerate import TuttiAccelerator
from tutti.launch import init
from tutti.strategies import Strategy, as_strategy

STATE_FILE = "tutti.pt"
"""The file in a checkpoint's folder that has the strategy's state."""


class TuttiTrainer(Trainer):
    """A `Trainer` whose model is synchronised by a strategy of Tutti's, in place of DDP.

    Args:
        strategy: as `tutti.distribute` takes it: "ring", "bmuf:every=16", `tutti.ParameterServer(...)`.
        options: those of `Trainer`.
    """

    def __init__(self, *arguments: Any, strategy: str | Strategy = "native", **options: Any) -> None:
        self._synchronisation = as_strategy(strategy)
        self._resumed_from: Path | None = None
        super().__init__(*arguments, **options)
        self.add_callback(_TrainingEvents(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which synchronises by the strategy."""
        init(torch_distributed=True)
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = TuttiAccelerator  # The Trainer constructs it; the subclass adds methods only.
        self.accelerator.synchronise(self._synchronisation, when_prepared=False)

    def begin(self) -> None:
        """Distribute the model, and continue from the strategy's state of a checkpoint. Collective."""
        job = self.accelerator.start(self.model_wrapped, self.optimizer)
        saved, self._resumed_from = self._resumed_from, None
        if saved is not None and saved.exists():
            job.load_state_dict(torch.load(saved, map_location="cpu", weights_only=True))

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate, or predict by, the parameters that all ranks agree on. Called for one dataset. Collective."""
        with self.accelerator.agreed():
            return super().evaluation_loop(*arguments, **options)

    def _save_checkpoint(self, model: Any, *arguments: Any, **options: Any) -> None:
        job = self.accelerator.job
        state = None if job is None else job.state_dict()
        with self.accelerator.agreed():
            super()._save_checkpoint(model, *arguments, **options)
        folder = Path(self._get_output_dir(trial=None), f"checkpoint-{self.state.global_step}")
        if state is not None and self.args.should_save and folder.is_dir():  # It may have been rotated away.
            torch.save(state, folder / STATE_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._resumed_from = Path(checkpoint, STATE_FILE)

    def _load_best_model(self) -> None:
        self.accelerator.finish()  # What is loaded is the same on all ranks, and no strategy changes it any more.
        super()._load_best_model()


class _TrainingEvents(TrainerCallback):
    """Begins and finishes the job with the training."""

    def __init__(self, trainer: TuttiTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.begin()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._trainer.accelerator.finish()
