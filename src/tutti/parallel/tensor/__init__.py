"""Tensor parallelism: the weights of layers sharded over ranks, computed with torch's DTensor."""
