"""Meshes priced: which of data, tensor and pipe for a model, a memory limit and a network."""

from tutti.plan.mesh.choose import MeshPlan, plan_meshes
from tutti.plan.mesh.cost import MeshPrediction, price_mesh

__all__ = ["MeshPlan", "MeshPrediction", "plan_meshes", "price_mesh"]
