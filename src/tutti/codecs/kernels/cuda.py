"""The kernels for CUDA tensors."""

from tutti.codecs.kernels.reference import (
    cast_encode,
    fp8_decode,
    fp8_encode,
    onebit_decode,
    onebit_encode,
    pick,
    quantize_decode,
    quantize_encode,
)

__all__ = [
    "cast_encode",
    "fp8_decode",
    "fp8_encode",
    "onebit_decode",
    "onebit_encode",
    "pick",
    "quantize_decode",
    "quantize_encode",
]
