"""Recipes for image classification."""

from functools import partial

import torch
from torch import Tensor, nn

from tutti.errors import ConfigError
from tutti.recipes import data, models
from tutti.recipes.base import Recipe, accuracy, cross_entropy


def digits() -> Recipe:
    """Handwritten digits of 8 x 8 pixels, which ship with Tutti. The recipe needs no data folder and takes seconds."""
    return Recipe(
        name="digits",
        summary="8x8 handwritten digits with a small perceptron; needs no data folder",
        model=models.DigitsMLP,
        data=data.digits,
        optimizer=partial(sgd, lr=0.1),
        loss=cross_entropy,
        accuracy=accuracy,
        batch_size=64,
        epochs=10,
        target=0.95,
        example=partial(image_batch, shape=(1, 8, 8)),
    )


def mnist_mlp(second_hidden: int = 100) -> Recipe:
    """MNIST with the four-layer perceptron of Fourie (2019); `second_hidden` is its second hidden width."""
    if second_hidden < 1:
        raise ConfigError(f"mnist-mlp needs a second_hidden of 1 or more, got {second_hidden}. The default is 100.")
    return Recipe(
        name="mnist-mlp",
        summary="MNIST with a four-layer perceptron (Fourie 2019)",
        model=partial(models.FourLayerMLP, second_hidden),
        data=data.mnist,
        optimizer=partial(sgd, lr=0.05),
        loss=cross_entropy,
        accuracy=accuracy,
        batch_size=128,
        epochs=4,
        target=0.97,
        example=partial(image_batch, shape=(1, 28, 28)),
    )


def fashion_cnn() -> Recipe:
    """Fashion-MNIST (Xiao 2017) with a small convolutional network."""
    return Recipe(
        name="fashion-cnn",
        summary="Fashion-MNIST with a small convolutional network",
        model=models.FashionCNN,
        data=data.fashion_mnist,
        optimizer=partial(sgd, lr=0.03),
        loss=cross_entropy,
        accuracy=accuracy,
        batch_size=128,
        epochs=4,
        target=0.88,
        example=partial(image_batch, shape=(1, 28, 28)),
    )


def cifar_quick() -> Recipe:
    """A fifth of CIFAR-10 with Caffe's cifar10_quick, the network of Poseidon (Zhang 2015) and Kim (2016).

    With 10,000 training images the target is far below what the network reaches on all 50,000.
    """
    return Recipe(
        name="cifar-quick",
        summary="10,000 images of CIFAR-10 with Caffe's cifar10_quick",
        model=models.CifarQuick,
        data=data.cifar10_subset,
        optimizer=partial(sgd, lr=0.02, weight_decay=0.004),
        loss=cross_entropy,
        accuracy=accuracy,
        batch_size=100,
        epochs=10,
        target=0.55,
        example=partial(image_batch, shape=(3, 32, 32)),
    )


def sgd(model: nn.Module, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum 0.9 over all of the model's parameters."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)


def image_batch(num_samples: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Random images of shape (sample, *shape) and labels of ten classes; the same for the same arguments."""
    generator = torch.Generator().manual_seed(0)  # A separate generator leaves torch's random state unchanged.
    images = torch.randn(num_samples, *shape, generator=generator)
    return images, torch.randint(10, (num_samples,), generator=generator)
