"""Models: plain `nn.Module`s that do not depend on Tutti.

The small ones train on a laptop, and N workers of them give the result of one. The large ones are classic ImageNet
models, used to count bytes and to simulate clusters; under `torch.device("meta")` they take no memory. They have
dropout or batch normalisation, so N workers give the result of one only approximately (see `tutti.sync_batchnorm`).

This package imports torch only when a model is first used, so that `tutti --help` can list names quickly.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tutti.errors import UnknownName
from tutti.plugins import load
from tutti.recipes.registry import LazyRegistry

if TYPE_CHECKING:
    from torch import nn

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

_MODULES = {
    "alexnet": ("AlexNet",),
    "googlenet": ("GoogLeNet",),
    "resnet": ("ResNet50",),
    "small": ("CifarQuick", "DigitsMLP", "FashionCNN", "FourLayerMLP", "mlp"),
    "text": ("CharGPT", "CharLSTM"),
    "vgg": ("VGG16",),
}
"""The module that defines each exported name."""

LARGE: Mapping[str, "Callable[[], nn.Module]"] = LazyRegistry(
    {
        "resnet50": "tutti.recipes.models.resnet:ResNet50",
        "alexnet": "tutti.recipes.models.alexnet:AlexNet",
        "googlenet": "tutti.recipes.models.googlenet:GoogLeNet",
    }
)
"""Models for images of shape (batch, 3, 224, 224) and the 1,000 classes of ImageNet."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return load(f"{__name__}.{module}:{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def large(name: str) -> "nn.Module":
    """Make a new large model of the kind listed as `name`: `large("resnet50")`."""
    if name not in LARGE:
        raise UnknownName("model", name, LARGE)
    return LARGE[name]()
