"""Small models that train on a laptop: plain `nn.Module`s that know nothing of Tutti.

None has dropout or batch normalisation, so that N workers with a batch of B/N each compute what one
worker with a batch of B would. Parameters come from the caller's random state (`torch.manual_seed`).
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tutti.errors import ConfigError


def mlp(*widths: int) -> nn.Sequential:
    """Fully connected layers with ReLU between them: `mlp(784, 1024, 1024, 10)` has three."""
    if len(widths) < 2 or min(widths) < 1:
        raise ConfigError(f"mlp needs two or more widths, each 1 or more, got {widths}. Try mlp(784, 100, 10).")
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DigitsMLP(nn.Module):
    """Class scores (batch, 10) of 8 x 8 images, given as (batch, 1, 8, 8) or (batch, 8, 8)."""

    def __init__(self, hidden_width: int = 64) -> None:
        super().__init__()
        self.layers = mlp(64, hidden_width, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images.flatten(1))
        return scores


class FourLayerMLP(nn.Module):
    """Class scores (batch, 10) of 28 x 28 images, from a network of the shape Fourie (2019) varies.

    Four layers of neurons: 784 inputs, two hidden, 10 outputs. The width of the second hidden layer is
    the parameter: it sets how much there is to compute and to send. 300 for the first is LeCun's (1998).
    """

    def __init__(self, second_hidden_width: int, first_hidden_width: int = 300) -> None:
        super().__init__()
        self.layers = mlp(784, first_hidden_width, second_hidden_width, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images.flatten(1))
        return scores


class FashionCNN(nn.Module):
    """Class scores (batch, 10) of images (batch, 1, 28, 28): two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = mlp(32 * 7 * 7, 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


class CifarQuick(nn.Module):
    """Class scores (batch, 10) of images (batch, 3, 32, 32): Caffe's cifar10_quick, 145,578 parameters.

    Three convolutions, one fully connected layer and the 10-way layer under the softmax, as in Jia
    (2014), Zhang (2015, Poseidon) and Kim (2016). Like Caffe's, the pools overlap and round up, the
    first ReLU follows its pool, and nothing stands between the last two layers. The initial
    parameters are PyTorch's, not Caffe's Gaussians.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, kernel_size=5, padding=2), nn.MaxPool2d(3, stride=2, ceil_mode=True), nn.ReLU(),
            nn.Conv2d(32, 32, kernel_size=5, padding=2), nn.ReLU(), nn.AvgPool2d(3, stride=2, ceil_mode=True),
            nn.Conv2d(32, 64, kernel_size=5, padding=2), nn.ReLU(), nn.AvgPool2d(3, stride=2, ceil_mode=True),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(64 * 4 * 4, 64), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


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
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.movedim(-2, 1).unbind(3)  # each (batch, head, time, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
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
