"""Small character models of text, without dropout or batch normalisation, as the small image models."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tutti.errors import ConfigError


class CharLSTM(nn.Module):
    """Next-character scores (batch, time, vocab) of token ids (batch, time). State starts at zero."""

    def __init__(self, num_chars: int, embedding_width: int = 32, hidden_width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_chars, embedding_width)
        self.lstm = nn.LSTM(embedding_width, hidden_width, batch_first=True)
        self.output = nn.Linear(hidden_width, num_chars)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.output(hidden)
        return scores


class _Block(nn.Module):
    """Causal attention, then a two-layer perceptron, each normalised before and added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.norm_attention(hidden))
        added: Tensor = hidden + self.mlp(self.norm_mlp(hidden))
        return added

    def _attend(self, hidden: Tensor) -> Tensor:
        # (batch, time, 3 * width) -> (batch, time, 3, head, width / heads).
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.movedim(-2, 1).unbind(3)  # each (batch, head, time, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(2))  # Heads side by side again.
        return projected


class CharGPT(nn.Module):
    """Next-character scores (batch, time, vocab) of token ids (batch, time up to `context`).

    A pre-norm transformer decoder with learned positions, after Radford (2019).
    """

    def __init__(
        self, num_chars: int, context: int = 64, width: int = 96, num_heads: int = 4, num_blocks: int = 3
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ConfigError(f"CharGPT needs a width that {num_heads} heads divide, got {width}.")
        self.context = context
        self.embedding = nn.Embedding(num_chars, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, num_chars)
        for module in self.modules():  # nn.Embedding's default N(0, 1) drowns the blocks' early signal
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        num_steps = tokens.shape[1]
        if num_steps > self.context:
            raise ConfigError(f"CharGPT reads at most {self.context} characters at once, got {num_steps}.")
        positions = torch.arange(num_steps, device=tokens.device)
        hidden = self.blocks(self.embedding(tokens) + self.position(positions))
        scores: Tensor = self.output(self.norm(hidden))
        return scores
