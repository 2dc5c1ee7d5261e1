"""Meshes priced: which of data, tensor and pipe for a model, a memory limit and a network."""

from tutti.plan.mesh.choose import MeshPlan, plan_meshes
from tutti.plan.mesh.cost import MeshPrediction, price_mesh
from tutti.plan.mesh.parts import Parts

__all__ = ["MeshPlan", "MeshPrediction", "Parts", "plan_meshes", "price_mesh"]
