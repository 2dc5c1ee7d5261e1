"""Small image models that train on a laptop.

None has dropout or batch normalisation, so that N workers with a batch of B/N each compute what one
worker with a batch of B would. Parameters come from the caller's random state (`torch.manual_seed`).
"""

from itertools import pairwise

from torch import Tensor, nn

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
    """Class scores (batch, 10) of 28 x 28 images, by a perceptron of the shape that Fourie (2019) varies.

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
        # Two pools halve 28 x 28 to 7 x 7.
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
        # Three pools that round up: 32, 16, 8, 4.
        self.classifier = nn.Sequential(nn.Linear(64 * 4 * 4, 64), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores
