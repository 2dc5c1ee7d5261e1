"""Splitting the model: its layers over ranks, and the sequence of them."""

from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.settings import Pipeline
from tutti.parallel.tensor.plan import TensorPlan, tensor_plan

__all__ = ["Mesh", "Pipeline", "TensorPlan", "tensor_plan"]
