"""GoogLeNet: few parameters relative to its computation."""

import torch
from torch import Tensor, nn


class GoogLeNet(nn.Module):
    """Class scores (batch, class) of images (batch, 3, 224, 224): 6,624,904 parameters for 1,000 classes.

    The network of Szegedy (2015, arxiv.org/abs/1409.4842) as it is usually trained since: with batch normalisation
    (eps 0.001) instead of biases, 3 x 3 kernels where the paper has 5 x 5, and no auxiliary classifiers.
    The initial parameters are PyTorch's.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, 64, kernel_size=7, stride=2), _halve(),
            _convolution(64, 64, kernel_size=1), _convolution(64, 192, kernel_size=3), _halve(),
        )  # fmt: skip
        # The widths of Szegedy's table 1: input; 1x1; reduced, then 3x3; reduced, then "5x5"; pooled.
        self.inceptions = nn.Sequential(
            _Inception(192, 64, (96, 128), (16, 32), 32),
            _Inception(256, 128, (128, 192), (32, 96), 64),
            _halve(),
            _Inception(480, 192, (96, 208), (16, 48), 64),
            _Inception(512, 160, (112, 224), (24, 64), 64),
            _Inception(512, 128, (128, 256), (24, 64), 64),
            _Inception(512, 112, (144, 288), (32, 64), 64),
            _Inception(528, 256, (160, 320), (32, 128), 128),
            _halve(),
            _Inception(832, 256, (160, 320), (32, 128), 128),
            _Inception(832, 384, (192, 384), (48, 128), 128),
        )
        self.dropout = nn.Dropout(0.4)
        self.output = nn.Linear(1024, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.inceptions(self.stem(images))
        scores: Tensor = self.output(self.dropout(features.mean((2, 3))))
        return scores


class _Inception(nn.Module):
    """Four parallel branches on the same input, concatenated along the channels.

    `middle` and `wide` have the width their input is reduced to, then that of the output.
    """

    def __init__(self, width: int, narrow: int, middle: tuple[int, int], wide: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.narrow = _convolution(width, narrow, kernel_size=1)
        self.middle = _reduced(width, *middle)
        self.wide = _reduced(width, *wide)
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _convolution(width, pooled, kernel_size=1))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.narrow(images), self.middle(images), self.wide(images), self.pooled(images)], 1)


def _reduced(width: int, reduced: int, output: int) -> nn.Sequential:
    """Fewer channels first, so that the 3 x 3 convolution costs less."""
    return nn.Sequential(_convolution(width, reduced, kernel_size=1), _convolution(reduced, output, kernel_size=3))


def _convolution(width: int, output: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    """A convolution, its normalisation and ReLU, padded so that only the stride changes the image's size."""
    convolution = nn.Conv2d(width, output, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(output, eps=0.001), nn.ReLU())


def _halve() -> nn.MaxPool2d:
    """A pool that halves height and width, rounded up."""
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)
