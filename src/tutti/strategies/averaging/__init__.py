"""Blocks of local steps: plain averaging, block momentum, DiLoCo."""

from tutti.strategies.averaging.strategy import READERS, Averaging, BlockMomentum, DiLoCo

__all__ = ["READERS", "Averaging", "BlockMomentum", "DiLoCo"]
