"""Published training speeds of the large models, which simulations use as the computing time of a sample.

The figures are from different years, with different software and batch sizes. They are plausible values, and no
comparison of accelerators. Combinations without a published figure are left out.
"""

from tutti.errors import ConfigError, UnknownName

_JOHNSON_BATCH = 16
_MS_PER_S = 1000

IMAGES_PER_S: dict[str, dict[str, float]] = {
    # BVLC 2014, Caffe with cuDNN: "Performance and Hardware Configuration", batches of 256; and the readme of its
    # GoogLeNet, batches of 128, without optimiser.
    "k40": {"alexnet": 5120 / 19.2, "googlenet": 128 * _MS_PER_S / 1688.8},
    # TensorFlow team 2017, "Benchmarks", Google Compute Engine: synthetic data, batches of 64 and 512.
    "k80": {"resnet50": 51.9, "alexnet": 656},
    # Johnson 2016, github.com/jcjohnson/cnn-benchmarks: milliseconds of forward and backward on the Pascal
    # Titan X with Torch and cuDNN 5.1, without optimiser. AlexNet is Caffe's, GoogLeNet is "Inception-V1".
    "titan-x-pascal": {
        "resnet50": _JOHNSON_BATCH * _MS_PER_S / 103.58,
        "alexnet": _JOHNSON_BATCH * _MS_PER_S / 14.56,
        "googlenet": _JOHNSON_BATCH * _MS_PER_S / 39.14,
    },
    # The first two: TensorFlow team 2017, "Benchmarks", DGX-1: synthetic data, batches of 64 and 512.
    # GoogLeNet: Xu and Dandapanthu (Dell EMC) 2016, "Deep Learning Performance with P100 GPUs", figure 2:
    # a P100 on PCIe, which is slower than the DGX-1's, with NVIDIA's Caffe, ImageNet, batch of 128.
    "p100": {"resnet50": 219, "alexnet": 2987, "googlenet": 468},
    # NVIDIA, DeepLearningExamples, "ResNet50 v1.5 For PyTorch", container 21.03: DGX-1 with 16 GB, then DGX A100
    # with 80 GB. Without a suffix: float32 on the V100, TF32 on the A100; else mixed precision.
    "v100": {"resnet50": 367},
    "v100-mixed": {"resnet50": 1200},
    "a100": {"resnet50": 938},
    "a100-mixed": {"resnet50": 2470},
}
"""Training throughput of one accelerator, by accelerator and model of `tutti.recipes.models.LARGE`."""


def seconds_per_sample(accelerator: str, model: str) -> float:
    """Seconds that one `accelerator` takes to train `model` on one image, at the published batch size."""
    if accelerator not in IMAGES_PER_S:
        raise UnknownName("accelerator", accelerator, IMAGES_PER_S)
    speeds = IMAGES_PER_S[accelerator]
    if model not in speeds:
        others = [name for name, known in IMAGES_PER_S.items() if model in known]
        elsewhere = f" '{model}' has one on {', '.join(others)}." if others else ""
        raise ConfigError(
            f"no published speed of model '{model}' on '{accelerator}', which has: {', '.join(speeds)}.{elsewhere}"
        )
    return 1 / speeds[model]
