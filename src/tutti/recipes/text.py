"""Recipes for predicting the next character of a text."""

from functools import partial

import torch
from torch import Tensor, nn

from tutti.recipes import data, models
from tutti.recipes.base import Recipe, accuracy, cross_entropy

_WINDOW = 64


def char_lstm() -> Recipe:
    """Characters of Shakespeare with a one-layer LSTM."""
    return Recipe(
        name="char-lstm",
        summary="next character of Shakespeare with an LSTM",
        model=partial(models.CharLSTM, len(data.ALPHABET)),
        data=partial(data.tinyshakespeare, window=_WINDOW),
        optimizer=partial(adamw, lr=7e-3),
        loss=cross_entropy,
        accuracy=accuracy,
        batch_size=32,
        epochs=3,
        target=0.48,
        example=char_batch,
    )


def char_gpt() -> Recipe:
    """Characters of Shakespeare with a three-block transformer."""
    return Recipe(
        name="char-gpt",
        summary="next character of Shakespeare with a small transformer",
        model=partial(models.CharGPT, len(data.ALPHABET), context=_WINDOW),
        data=partial(data.tinyshakespeare, window=_WINDOW),
        optimizer=partial(adamw, lr=2e-3),
        loss=cross_entropy,
        accuracy=accuracy,
        batch_size=32,
        epochs=3,
        target=0.45,
        example=char_batch,
    )


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW (Loshchilov 2019) over all of the model's parameters."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def char_batch(num_samples: int) -> tuple[Tensor, Tensor]:
    """Random characters of shape (sample, time) and their successors; the same for the same number of samples."""
    generator = torch.Generator().manual_seed(0)  # A separate generator leaves torch's random state unchanged.
    tokens = torch.randint(len(data.ALPHABET), (num_samples, _WINDOW + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
