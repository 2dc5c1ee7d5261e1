"""Poseidon: each layer's gradient is exchanged by the cheapest method for its shape (Zhang et al. 2015).

The paper's three ideas, and where they are:

- Sufficient factor broadcasting: the gradient of a linear layer is Eᵀ A, where E are the gradients of its outputs and A
  its inputs, with one row per sample. For small batches these sufficient factors are shorter than the matrix (`sums`).
- The structure-aware communication protocol (SACP) chooses for each layer between the matrix and its factors (`rule`).
- Wait-free backpropagation: layers are exchanged as soon as their gradients are there, while backward computes those
  below (`exchange`).
"""

from tutti.strategies.poseidon.rule import METHODS, Decision, LayerShape
from tutti.strategies.poseidon.strategy import Poseidon, read

__all__ = ["METHODS", "Decision", "LayerShape", "Poseidon", "read"]
