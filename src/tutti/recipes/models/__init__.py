"""Models: plain `nn.Module`s that know nothing of Tutti.

The small ones train on a laptop, and N workers of them equal one. The large ones are ImageNet's
classics, for counting bytes and simulating clusters; `with torch.device("meta")` they take no memory.
They have dropout or batch normalisation, so N workers equal one only roughly (but see `tutti.sync_batchnorm`).
"""

from collections.abc import Callable

from torch import nn

from tutti.errors import UnknownName
from tutti.recipes.models.alexnet import AlexNet
from tutti.recipes.models.googlenet import GoogLeNet
from tutti.recipes.models.resnet import ResNet50
from tutti.recipes.models.small import CifarQuick, DigitsMLP, FashionCNN, FourLayerMLP, mlp
from tutti.recipes.models.text import CharGPT, CharLSTM
from tutti.recipes.models.vgg import VGG16

__all__ = [
    "LARGE",
    "VGG16",
    "AlexNet",
    "CharGPT",
    "CharLSTM",
    "CifarQuick",
    "DigitsMLP",
    "FashionCNN",
    "FourLayerMLP",
    "GoogLeNet",
    "ResNet50",
    "large",
    "mlp",
]

LARGE: dict[str, Callable[[], nn.Module]] = {"resnet50": ResNet50, "alexnet": AlexNet, "googlenet": GoogLeNet}
"""Models of images (batch, 3, 224, 224) of ImageNet's 1,000 classes."""


def large(name: str) -> nn.Module:
    """A new large model, of the kind listed as `name`: `large("resnet50")`."""
    if name not in LARGE:
        raise UnknownName("model", name, LARGE)
    return LARGE[name]()
