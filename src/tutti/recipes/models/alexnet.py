"""AlexNet: most parameters are in three fully connected layers, so there is much to send and little to compute."""

from torch import Tensor, nn


class AlexNet(nn.Module):
    """Class scores (batch, class) of images (batch, 3, 224, 224): 61,100,840 parameters for 1,000 classes.

    The network of Krizhevsky (2012) in one tower, as in Krizhevsky (2014, arxiv.org/abs/1404.5997): without the
    split over two GPUs and without local response normalisation. The initial parameters are PyTorch's.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 256, kernel_size=3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            # 6 x 6 is what a stride of 4 and three pools leave of 224 x 224.
            nn.Dropout(0.5), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(),
            nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(),
            nn.Linear(4096, num_classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores
