"""VGG-16: its first fully connected layer alone has more than 100 million parameters."""

from torch import Tensor, nn

_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Widths of convolutions; each block ends in a pool that halves the image."""


class VGG16(nn.Module):
    """Class scores (batch, class) of images (batch, 3, 224, 224): 138,357,544 parameters for 1,000 classes.

    Configuration D of Simonyan and Zisserman (2015, arxiv.org/abs/1409.1556). The initial parameters are PyTorch's.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for block in _BLOCKS:
            for output in block:
                layers += [nn.Conv2d(width, output, kernel_size=3, padding=1), nn.ReLU()]
                width = output
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        # Five pools halve 224 x 224 to 7 x 7.
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores
