"""Recipes that guess the next character."""

from functools import partial

import torch
from torch import Tensor, nn

from tutti.recipes import data, models
from tutti.recipes.base import Recipe, accuracy, cross_entropy

_WINDOW = 64


def char_lstm() -> Recipe:
    """Shakespeare, a character at a time, with a one-layer LSTM."""
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
    """Shakespeare, a character at a time, with a three-block transformer."""
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
    """Random characters (sample, time) and the ones after them, always the same for the same number."""
    generator = torch.Generator().manual_seed(0)  # its own, so as not to move the caller's
    tokens = torch.randint(len(data.ALPHABET), (num_samples, _WINDOW + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
