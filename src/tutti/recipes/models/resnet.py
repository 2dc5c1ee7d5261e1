"""ResNet-50, the usual benchmark model of training clusters."""

from torch import Tensor, nn

_EXPANSION = 4
"""Channels of a block's output, relative to those of its 3 x 3 convolution."""


class ResNet50(nn.Module):
    """Class scores (batch, class) of images (batch, 3, 224, 224): 25,557,032 parameters for 1,000 classes.

    The network of He (2016, arxiv.org/abs/1512.03385) in the form called v1.5, where a block that halves the image
    does so in its 3 x 3 convolution. Convolutions start as in He (2015), all else as in PyTorch.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(3, 64, kernel_size=7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
        )
        self.stages = nn.Sequential(
            _stage(64, 64, num_blocks=3, stride=1),
            _stage(256, 128, num_blocks=4, stride=2),
            _stage(512, 256, num_blocks=6, stride=2),
            _stage(1024, 512, num_blocks=3, stride=2),
        )
        self.output = nn.Linear(512 * _EXPANSION, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images))
        scores: Tensor = self.output(features.mean((2, 3)))
        return scores


class _Bottleneck(nn.Module):
    """Three convolutions, the middle one narrow, added to the input or to a linear map of it."""

    def __init__(self, width: int, narrow: int, stride: int) -> None:
        super().__init__()
        wide = _EXPANSION * narrow
        self.residual = nn.Sequential(
            *_convolution(width, narrow, kernel_size=1), nn.ReLU(),
            *_convolution(narrow, narrow, kernel_size=3, stride=stride), nn.ReLU(),
            *_convolution(narrow, wide, kernel_size=1),
        )  # fmt: skip
        # The input itself is added where it has the shape of the output.
        fits = stride == 1 and width == wide
        self.shortcut = nn.Identity() if fits else nn.Sequential(*_convolution(width, wide, 1, stride))
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        added: Tensor = self.relu(self.residual(images) + self.shortcut(images))
        return added


def _stage(width: int, narrow: int, num_blocks: int, stride: int) -> nn.Sequential:
    """Blocks at one resolution; the first changes the width, and the resolution by `stride`."""
    rest = (_Bottleneck(_EXPANSION * narrow, narrow, stride=1) for _ in range(num_blocks - 1))
    return nn.Sequential(_Bottleneck(width, narrow, stride), *rest)


def _convolution(width: int, output: int, kernel_size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution without bias, which the normalisation after it would cancel."""
    convolution = nn.Conv2d(width, output, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)
    return convolution, nn.BatchNorm2d(output)
