"""Model parallelism: meshes of ranks, tensor parallelism, pipelines, branches, and scheduled updates."""

from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.settings import Pipeline
from tutti.parallel.tensor.plan import TensorPlan, tensor_plan

__all__ = ["Mesh", "Pipeline", "TensorPlan", "tensor_plan"]
